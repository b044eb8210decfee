/* extend_recipe.c - see extend.h. Recipes are joined in their resolved form, and the result is checked like any other recipe. */
#include "train/extend.h"
#include "train/recipe_keys.h"

#include <stdlib.h>
#include <string.h>

int32_t extend_stages_done(const tsr_recipe *r, int64_t step)
{
    int32_t done = 0;
    while (done < r->stages && step >= r->stage[done].steps) {
        step -= r->stage[done++].steps;
    }
    return step == 0 ? done : -1;
}

/* ---- the same model ---------------------------------------------------------------------------------------------- */

typedef enum field_kind { FIELD_I64, FIELD_I32, FIELD_FLAG, FIELD_REAL } field_kind;

typedef struct field {
    const char *key; /* of a recipe where it has one, else of config.json */
    field_kind kind;
    size_t at;
} field;

#define AT(name) offsetof(tsr_spec, name)
static const field fields[] = {
    { "model.layers", FIELD_I32, AT(layers) },
    { "model.hidden", FIELD_I64, AT(hidden) },
    { "model.vocab", FIELD_I64, AT(vocab) },
    { "model.first_dense", FIELD_I32, AT(first_dense) },
    { "model.dense_width", FIELD_I64, AT(dense_inter) },
    { "model.kda_heads", FIELD_I64, AT(kda_heads) },
    { "model.kda_head_dim", FIELD_I64, AT(kda_head_dim) },
    { "model.conv_kernel", FIELD_I64, AT(conv_kernel) },
    { "model.gate_lower_bound", FIELD_REAL, AT(gate_lower_bound) },
    { "model.config: use_full_rank_gate", FIELD_FLAG, AT(kda_full_rank_gate) },
    { "model.mla_heads", FIELD_I64, AT(mla_heads) },
    { "model.q_lora", FIELD_I64, AT(q_lora) },
    { "model.kv_lora", FIELD_I64, AT(kv_lora) },
    { "model.qk_nope", FIELD_I64, AT(qk_nope) },
    { "model.qk_rope", FIELD_I64, AT(qk_rope) },
    { "model.v_head", FIELD_I64, AT(v_head) },
    { "model.config: mla_use_output_gate", FIELD_FLAG, AT(mla_gate) },
    { "model.experts", FIELD_I64, AT(experts) },
    { "model.top_k", FIELD_I64, AT(top_k) },
    { "model.shared_experts", FIELD_I64, AT(shared_experts) },
    { "model.expert_width", FIELD_I64, AT(moe_inter) },
    { "model.latent", FIELD_I64, AT(latent) },
    { "model.config: latent_moe_use_norm", FIELD_FLAG, AT(latent_norm) },
    { "model.config: moe_renormalize", FIELD_FLAG, AT(route_normalise) },
    { "model.route_scale", FIELD_REAL, AT(route_scale) },
    { "model.config: hidden_act situ", FIELD_FLAG, AT(situ) },
    { "model.config: activation_situ_beta", FIELD_REAL, AT(situ_beta) },
    { "model.config: activation_situ_linear_beta", FIELD_REAL, AT(situ_linear_beta) },
    { "model.res_block", FIELD_I64, AT(res_block) },
    { "model.config: tie_word_embeddings", FIELD_FLAG, AT(tied_embeddings) },
    { "model.config: rms_norm_eps", FIELD_REAL, AT(rms_eps) },
    { "model.config: mla_lora_norm_eps", FIELD_REAL, AT(lora_eps) },
};
#undef AT

static double value_of(const tsr_spec *s, const field *f)
{
    const char *p = (const char *)s + f->at;
    switch (f->kind) {
    case FIELD_I64: return (double)*(const int64_t *)(const void *)p;
    case FIELD_I32: return (double)*(const int32_t *)(const void *)p;
    case FIELD_FLAG: return *(const bool *)(const void *)p ? 1 : 0;
    case FIELD_REAL:
    default: return *(const double *)(const void *)p;
    }
}

tsr_status extend_check_shape(const tsr_recipe *r, const tsr_spec *have, const char *ckpt, tsr_err *err)
{
    const tsr_spec *want = r->spec;
    if (want->arch != have->arch) {
        TSR_FAIL(err, TSR_E_CONFLICT, "recipe: model.family: is %s, but %s holds a model of %s",
                 tsr_arch_name(want->arch), ckpt, tsr_arch_name(have->arch));
    }
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        double a = value_of(want, &fields[i]), b = value_of(have, &fields[i]);
        if (a != b) {
            TSR_FAIL(err, TSR_E_CONFLICT, "recipe: %s: is %.10g, but %s has %.10g (the shape must stay)",
                     fields[i].key, a, ckpt, b);
        }
    }
    for (int32_t i = 0; i < want->layers; i++) {
        if (want->layer_kind[i] != have->layer_kind[i]) {
            TSR_FAIL(err, TSR_E_CONFLICT,
                     "recipe: model.full_attention_every: makes layer %d one of %s, but in %s it is not "
                     "(the shape must stay)",
                     i, want->layer_kind[i] == TSR_LAYER_MLA ? "MLA" : "delta attention", ckpt);
        }
    }
    return TSR_OK;
}

/* ---- the recipe ---------------------------------------------------------------------------------------------------- */

void extend_set_context(json_t *config, int64_t context)
{
    static const char *const keys[] = { "max_position_embeddings", "model_max_length" };
    json_t *text = json_object_get(config, "text_config"), *both[] = { config, text };
    bool there = false;
    for (size_t i = 0; i < 2; i++) {
        for (size_t k = 0; k < 2; k++) {
            if (json_is_integer(json_object_get(both[i], keys[k]))) {
                (void)json_object_set_new(both[i], keys[k], json_integer(context));
                there = there || both[i] == text || !json_is_object(text);
            }
        }
    }
    if (!there) { /* where hyper-parameters are read from */
        (void)json_object_set_new(json_is_object(text) ? text : config, "model_max_length",
                                  json_integer(context));
    }
}

static json_t *tree_of(const tsr_recipe *r)
{
    char *text = r != NULL ? tsr_recipe_json(r) : NULL;
    json_t *tree = text != NULL ? json_loads(text, 0, NULL) : NULL;
    free(text);
    return tree;
}

/* A done stage keeps its weights of the sources that are still there; without any it is as if none had been given. */
static void fit_mix(json_t *stage, const tsr_recipe *r)
{
    json_t *mix = json_object(), *old = json_object_get(stage, "mix");
    double sum = 0;
    for (int32_t i = 0; i < r->sources; i++) {
        json_t *v = json_object_get(old, r->source[i].name);
        if (v != NULL) {
            (void)json_object_set(mix, r->source[i].name, v);
            sum += json_number_value(v);
        }
    }
    if (sum > 0) {
        (void)json_object_set(stage, "mix", mix);
    } else {
        (void)json_object_del(stage, "mix");
    }
    json_decref(mix);
}

static bool has_stage(const tsr_recipe *r, int32_t stages, const char *name)
{
    for (int32_t i = 0; r != NULL && i < stages; i++) {
        if (strcmp(r->stage[i].name, name) == 0) {
            return true;
        }
    }
    return false;
}

static tsr_status check_next(const tsr_recipe *was, int32_t done, const tsr_recipe *next, int64_t context,
                             tsr_err *err)
{
    bool there = false;
    for (int32_t i = 0; i < next->stages; i++) {
        const tsr_stage *s = &next->stage[i];
        there = there || s->context == context;
        if (s->context > context) {
            TSR_FAIL(err, TSR_E_CONFLICT,
                     "recipe: stages.%d: %s: has sequences of %lld tokens, longer than the wanted context of "
                     "%lld",
                     i, s->name, (long long)s->context, (long long)context);
        }
        if (has_stage(was, done, s->name)) {
            TSR_FAIL(err, TSR_E_CONFLICT,
                     "recipe: stages.%d: %s: a stage of this name is done already (give only the stages to "
                     "come, or another name)",
                     i, s->name);
        }
    }
    if (!there) {
        TSR_FAIL(err, TSR_E_CONFLICT, "recipe: stages: none has the wanted context of %lld tokens",
                 (long long)context);
    }
    return TSR_OK;
}

/* "context-64K", or "context-65000", with a number behind it where that is taken. */
static void name_stage(char out[TSR_NAME_MAX], const tsr_recipe *was, int32_t done, int64_t context)
{
    static const char *const units[] = { "", "K", "M", "G" };
    size_t unit = 0;
    while (unit < 3 && context % 1024 == 0) {
        context /= 1024;
        unit++;
    }
    (void)snprintf(out, TSR_NAME_MAX, "context-%lld%s", (long long)context, units[unit]);
    for (int n = 2; has_stage(was, done, out); n++) {
        (void)snprintf(out, TSR_NAME_MAX, "context-%lld%s-%d", (long long)context, units[unit], n);
    }
}

static json_t *longer_stage(const json_t *stages, const tsr_recipe *was, int32_t done, int64_t context)
{
    char name[TSR_NAME_MAX];
    json_t *stage = json_deep_copy(json_array_get(stages, (size_t)done - 1));
    name_stage(name, was, done, context);
    (void)json_object_set_new(stage, "name", json_string(name));
    (void)json_object_set_new(stage, "context", json_integer(context));
    if (was->stage[done - 1].batch_tokens < context) {
        (void)json_object_set_new(stage, "batch_tokens", json_integer(context));
    }
    return stage;
}

/* The stages of the result. Steals nothing. */
static json_t *join(const json_t *old, const json_t *fresh, const tsr_recipe *was, int32_t done,
                    const tsr_recipe *next, int64_t context)
{
    json_t *out = json_array(), *v;
    size_t i;
    for (int32_t k = 0; k < done; k++) {
        json_t *stage = json_deep_copy(json_array_get(old, (size_t)k));
        if (next != NULL) {
            fit_mix(stage, next);
        }
        (void)json_array_append_new(out, stage);
    }
    if (next == NULL) {
        (void)json_array_append_new(out, longer_stage(old, was, done, context));
    }
    json_array_foreach(fresh, i, v)
    {
        (void)json_array_append(out, v);
    }
    return out;
}

tsr_status extend_recipe(tsr_recipe **out, const tsr_recipe *was, int32_t done, const tsr_recipe *next,
                         int64_t context, tsr_err *err)
{
    int32_t all = done + (next != NULL ? next->stages : 1);
    *out = NULL;
    if (all > TSR_STAGE_MAX) {
        TSR_FAIL(err, TSR_E_CONFLICT,
                 "recipe: stages: with those that are done there are %d, at most %d may be", all,
                 TSR_STAGE_MAX);
    }
    TSR_TRY(next != NULL ? check_next(was, done, next, context, err) : TSR_OK);
    json_t *old = tree_of(was), *fresh = tree_of(next), *tree = fresh != NULL ? fresh : old;
    json_t *stages = join(json_object_get(old, "stages"), json_object_get(fresh, "stages"), was, done, next,
                          context);
    json_t *model = json_object_get(tree, "model"), *config = json_object_get(model, "config");
    if (json_is_object(config)) {
        extend_set_context(config, context);
    } else {
        (void)json_object_set_new(model, "context", json_integer(context));
    }
    (void)json_object_set_new(tree, "stages", stages);
    char *text = recipe_dump(tree);
    tsr_status st = text != NULL ? tsr_recipe_parse(out, text, strlen(text), "extended recipe", NULL, 0, err)
                                 : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    free(text);
    json_decref(old);
    json_decref(fresh);
    return st;
}
