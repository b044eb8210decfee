/* recipe_model.c - the section "model": hyper-parameters, or a config.json, into the text of a config.json. */
#include "train/recipe_keys.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CONFIG_DEPTH_MAX 12 /* so that the resolved form stays within the depth of a recipe */

static const recipe_choice families[] = { { "kimi-k3", TSR_ARCH_KIMI_K3 },
                                          { "kimi-linear", TSR_ARCH_KIMI_LINEAR },
                                          { 0 } };

#define AT(field) offsetof(tsr_model_shape, field)
#define WIDTH 1, 16777216
static const recipe_key model_keys[] = {
    { "config", KEY_OTHER, .help = "path of a config.json, or its content" },
    { "family", KEY_CHOICE, AT(family), .fallback = "kimi-k3", .choices = families, .help = "model family" },
    { "layers", KEY_I64, AT(layers), 1, TSR_LAYER_MAX, .help = "number of layers" },
    { "hidden", KEY_I64, AT(hidden), WIDTH, .help = "width of the residual stream" },
    { "vocab", KEY_SIZE, AT(vocab), 1, 2147483648.0, .help = "tokens of the vocabulary" },
    { "first_dense", KEY_I64, AT(first_dense), 0, TSR_LAYER_MAX, "1",
      .help = "layers with a dense MLP, at the beginning" },
    { "dense_width", KEY_I64, AT(dense_width), WIDTH, .help = "width of the dense MLP" },
    { "kda_heads", KEY_I64, AT(kda_heads), WIDTH, .help = "heads of delta attention" },
    { "kda_head_dim", KEY_I64, AT(kda_head_dim), WIDTH, "128", .help = "width of a head of delta attention" },
    { "conv_kernel", KEY_I64, AT(conv_kernel), 1, 64, "4", .help = "taps of the short convolution" },
    { "gate_lower_bound", KEY_REAL, AT(gate_lower_bound), -5, 0, KEY_UNSET,
      .help = "of the log of a decay; 0: none" },
    { "full_attention_every", KEY_I64, AT(full_attention_every), 0, TSR_LAYER_MAX, "4",
      .help = "every so many layers, and the last, have MLA; 0: the last only" },
    { "mla_heads", KEY_I64, AT(mla_heads), WIDTH, .help = "heads of MLA" },
    { "q_lora", KEY_I64, AT(q_lora), 0, 16777216, "0", .help = "rank of the query projection; 0: full" },
    { "kv_lora", KEY_I64, AT(kv_lora), WIDTH, .help = "rank of keys and values" },
    { "qk_nope", KEY_I64, AT(qk_nope), WIDTH, .help = "width of a head's compressed key" },
    { "qk_rope", KEY_I64, AT(qk_rope), 0, 16777216, "0", .help = "width of the key shared by the heads" },
    { "v_head", KEY_I64, AT(v_head), WIDTH, .help = "width of a head's value" },
    { "experts", KEY_I64, AT(experts), 1, 1048576, .help = "routed experts of a layer" },
    { "top_k", KEY_I64, AT(top_k), 1, 1048576, .help = "routed experts of a token" },
    { "shared_experts", KEY_I64, AT(shared_experts), 0, 4096, "0", .help = "experts of every token" },
    { "expert_width", KEY_I64, AT(expert_width), WIDTH, .help = "inner width of an expert" },
    { "latent", KEY_I64, AT(latent), 0, 16777216, "0", .help = "outer width of routed experts; 0: hidden" },
    { "route_scale", KEY_REAL, AT(route_scale), 1e-6, 1e6, "1", .help = "factor of routing weights" },
    { "res_block", KEY_I64, AT(res_block), 0, TSR_LAYER_MAX, "0",
      .help = "layers of an attention residual block; 0: none" },
    { "context", KEY_SIZE, AT(context), 1, 1099511627776.0, KEY_UNSET,
      .help = "longest sequence, in tokens" },
    { 0 },
};

/* ---- hyper-parameters into a config ------------------------------------------------------------------------------ */

static json_t *layer_list(const tsr_model_shape *m, bool full)
{
    json_t *list = json_array();
    for (int64_t i = 1; i <= m->layers; i++) {
        bool mla = i == m->layers || (m->full_attention_every > 0 && i % m->full_attention_every == 0);
        if (mla == full) {
            (void)json_array_append_new(list, json_integer(i));
        }
    }
    return list;
}

static json_t *text_config(const tsr_model_shape *m)
{
    bool k3 = m->family == TSR_ARCH_KIMI_K3;
    json_t *linear = json_pack("{s:I,s:I,s:I,s:f,s:b,s:o,s:o}", "num_heads", (json_int_t)m->kda_heads,
                               "head_dim", (json_int_t)m->kda_head_dim, "short_conv_kernel_size",
                               (json_int_t)m->conv_kernel, "gate_lower_bound", m->gate_lower_bound,
                               "use_full_rank_gate", k3, "kda_layers", layer_list(m, false),
                               "full_attn_layers", layer_list(m, true));
    json_t *t = json_pack("{s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:b,s:b}", "num_hidden_layers",
                          (json_int_t)m->layers, "hidden_size", (json_int_t)m->hidden, "vocab_size",
                          (json_int_t)m->vocab, "first_k_dense_replace", (json_int_t)m->first_dense,
                          "intermediate_size", (json_int_t)m->dense_width, "num_attention_heads",
                          (json_int_t)m->mla_heads, "num_key_value_heads", (json_int_t)m->mla_heads,
                          "kv_lora_rank", (json_int_t)m->kv_lora, "qk_nope_head_dim", (json_int_t)m->qk_nope,
                          "qk_rope_head_dim", (json_int_t)m->qk_rope, "v_head_dim", (json_int_t)m->v_head,
                          "mla_use_nope", 1, "mla_use_output_gate", k3);
    json_t *moe = json_pack("{s:I,s:I,s:I,s:I,s:f,s:b,s:I,s:s,s:f}", "num_experts", (json_int_t)m->experts,
                            "num_experts_per_token", (json_int_t)m->top_k, "num_shared_experts",
                            (json_int_t)m->shared_experts, "moe_intermediate_size",
                            (json_int_t)m->expert_width, "routed_scaling_factor", m->route_scale,
                            "moe_renormalize", 1, "max_position_embeddings", (json_int_t)m->context,
                            "hidden_act", k3 ? "situ" : "silu", "rms_norm_eps", 1e-5);
    (void)json_object_update(t, moe);
    json_decref(moe);
    (void)json_object_set_new(t, "linear_attn_config", linear);
    (void)json_object_set_new(t, "q_lora_rank", m->q_lora > 0 ? json_integer(m->q_lora) : json_null());
    if (m->latent > 0) {
        (void)json_object_set_new(t, "routed_expert_hidden_size", json_integer(m->latent));
        (void)json_object_set_new(t, "latent_moe_use_norm", json_true());
    }
    if (k3) {
        (void)json_object_set_new(t, "attn_res_block_size", json_integer(m->res_block));
    }
    return t;
}

static json_t *config_of(const tsr_model_shape *m)
{
    json_t *text = text_config(m);
    if (m->family == TSR_ARCH_KIMI_K3) {
        return json_pack("{s:s,s:b,s:o}", "model_type", "kimi_k3", "tie_word_embeddings", 0, "text_config",
                         text);
    }
    (void)json_object_set_new(text, "model_type", json_string("kimi_linear"));
    (void)json_object_set_new(text, "tie_word_embeddings", json_false());
    return text;
}

static tsr_status contradictions(const recipe_reader *r, const tsr_tree *at, const tsr_model_shape *m)
{
    if (m->top_k > m->experts) {
        return recipe_fail(r, at, "model.top_k", TSR_E_CONFLICT, "is %lld, but a layer has %lld experts",
                           (long long)m->top_k, (long long)m->experts);
    }
    if (m->first_dense > m->layers || m->res_block > m->layers) {
        return recipe_fail(r, at, m->first_dense > m->layers ? "model.first_dense" : "model.res_block",
                           TSR_E_CONFLICT, "is more than the %lld layers", (long long)m->layers);
    }
    if (m->family == TSR_ARCH_KIMI_LINEAR && m->res_block > 0) {
        return recipe_fail(
            r, at, "model.res_block", TSR_E_CONFLICT,
            "attention residuals are of family kimi-k3 only (remove it, or change the family)");
    }
    return TSR_OK;
}

static tsr_status read_shape(const recipe_reader *r, tsr_recipe *out, const tsr_tree *at, json_t **config)
{
    tsr_model_shape *m = &out->shape;
    int64_t longest = 0;
    for (int32_t i = 0; i < out->stages; i++) {
        longest = out->stage[i].context > longest ? out->stage[i].context : longest;
    }
    TSR_TRY(recipe_read(r, at, "model", model_keys, m));
    if (isnan(m->gate_lower_bound)) {
        m->gate_lower_bound = m->family == TSR_ARCH_KIMI_K3 ? -5 : 0;
    }
    m->context = m->context == KEY_UNSET_INT ? longest : m->context;
    if (m->context < longest) {
        return recipe_fail(r, at, "model.context", TSR_E_CONFLICT,
                           "is %lld, but a stage has sequences of %lld", (long long)m->context,
                           (long long)longest);
    }
    TSR_TRY(contradictions(r, at, m));
    *config = config_of(m);
    return *config != NULL ? TSR_OK : recipe_fail(r, at, "model", TSR_E_LIMIT, "out of memory");
}

/* ---- a config as it is ---------------------------------------------------------------------------------------------- */

static json_t *scalar_json(const tsr_tree *t)
{
    char *end;
    if (!t->plain) {
        return json_string(t->text);
    }
    if (tsr_tree_null(t)) {
        return json_null();
    }
    if (strcmp(t->text, "true") == 0 || strcmp(t->text, "false") == 0) {
        return json_boolean(t->text[0] == 't');
    }
    if (t->text[strspn(t->text, "0123456789+-.eE")] == '\0') {
        errno = 0;
        long long n = strtoll(t->text, &end, 10);
        if (*end == '\0' && errno == 0) {
            return json_integer(n);
        }
        double x = strtod(t->text, &end);
        if (*end == '\0' && isfinite(x)) {
            return json_real(x);
        }
    }
    return json_string(t->text);
}

static json_t *tree_json(const tsr_tree *t)
{
    if (t->kind == TSR_TREE_TEXT) {
        return scalar_json(t);
    }
    json_t *o = t->kind == TSR_TREE_MAP ? json_object() : json_array();
    for (const tsr_tree *c = t->first; c != NULL; c = c->next) {
        if (t->kind == TSR_TREE_MAP) {
            (void)json_object_set_new(o, c->key, tree_json(c));
        } else {
            (void)json_array_append_new(o, tree_json(c));
        }
    }
    return o;
}

static bool deeper(const json_t *v, int depth)
{
    size_t i;
    json_t *c;
    const char *key;
    if (depth == 0) {
        return true;
    }
    json_array_foreach(v, i, c)
    {
        if (deeper(c, depth - 1)) {
            return true;
        }
    }
    for (void *it = json_object_iter((json_t *)(uintptr_t)v); it != NULL;
         it = json_object_iter_next((json_t *)(uintptr_t)v, it)) {
        key = json_object_iter_key(it);
        if (strlen(key) > 1000 || deeper(json_object_iter_value(it), depth - 1)) {
            return true;
        }
    }
    return false;
}

static tsr_status read_file(const recipe_reader *r, const tsr_tree *at, json_t **out)
{
    char path[4096];
    const char *slash = strrchr(r->name, '/');
    int folder = slash != NULL && at->text[0] != '/' ? (int)(slash - r->name) + 1 : 0;
    int n = snprintf(path, sizeof path, "%.*s%s", folder, r->name, at->text);
    if (n < 0 || (size_t)n >= sizeof path) {
        return recipe_fail(r, at, "model.config", TSR_E_LIMIT, "the path is too long");
    }
    FILE *f = fopen(path, "re");
    if (f == NULL) {
        return recipe_fail(r, at, "model.config", errno == ENOENT ? TSR_E_MISSING : TSR_E_IO,
                           "%.300s cannot be opened: %s", path, strerror(errno));
    }
    char *text = malloc(TSR_TREE_BYTES_MAX + 1);
    size_t bytes = text != NULL ? fread(text, 1, TSR_TREE_BYTES_MAX + 1, f) : 0;
    bool broken = ferror(f) != 0 || text == NULL || bytes > TSR_TREE_BYTES_MAX;
    (void)fclose(f);
    json_error_t e = { 0 };
    *out = broken ? NULL : json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &e);
    free(text);
    if (broken) {
        return recipe_fail(r, at, "model.config", TSR_E_IO, "%.300s cannot be read, or is larger than 1 MiB",
                           path);
    }
    if (!json_is_object(*out) || deeper(*out, CONFIG_DEPTH_MAX)) {
        return recipe_fail(r, at, "model.config", TSR_E_FORMAT,
                           "%.300s:%d: not a JSON object for a model: %s", path, e.line, e.text);
    }
    return TSR_OK;
}

static tsr_status read_config(const recipe_reader *r, const tsr_tree *model, const tsr_tree *at, json_t **out)
{
    for (const tsr_tree *c = model->first; c != NULL; c = c->next) {
        if (c != at && !tsr_tree_null(c)) {
            return recipe_fail(r, c, recipe_path(r, "model", c->key), TSR_E_CONFLICT,
                               "is in config.json already (give config or hyper-parameters, not both)");
        }
    }
    if (at->kind == TSR_TREE_TEXT) {
        TSR_TRY(read_file(r, at, out));
    } else {
        const tsr_tree *map;
        TSR_TRY(recipe_expect(r, at, "model.config", TSR_TREE_MAP, &map));
        *out = tree_json(map);
        if (deeper(*out, CONFIG_DEPTH_MAX)) {
            return recipe_fail(r, at, "model.config", TSR_E_FORMAT, "is nested too deeply for a model");
        }
    }
    /* How released weights were packed says nothing about training, which has them in f32. */
    (void)json_object_del(*out, "quantization_config");
    (void)json_object_del(json_object_get(*out, "text_config"), "quantization_config");
    return TSR_OK;
}

/* ---- the section ------------------------------------------------------------------------------------------------------ */

tsr_status recipe_read_model(const recipe_reader *r, tsr_recipe *out, const tsr_tree *model)
{
    json_t *config = NULL;
    TSR_TRY(recipe_expect(r, model, "model", TSR_TREE_MAP, &model));
    const tsr_tree *given = tsr_tree_get(model, "config");
    tsr_status st = tsr_tree_null(given) ? read_shape(r, out, model, &config)
                                         : read_config(r, model, given, &config);
    if (st == TSR_OK) {
        out->config_json = recipe_dump(config);
        out->spec = calloc(1, sizeof *out->spec);
        st = out->config_json == NULL || out->spec == NULL
                 ? recipe_fail(r, model, "model", TSR_E_LIMIT, "out of memory")
                 : tsr_spec_parse(out->spec, out->config_json, strlen(out->config_json), r->err);
        if (st != TSR_OK) {
            tsr_err_prefix(r->err, "%s: model", r->name);
        }
    }
    json_decref(config);
    return st;
}

json_t *recipe_write_model(const tsr_recipe *r)
{
    json_t *o = json_object();
    if (r->shape.layers > 0) {
        recipe_write(o, model_keys, &r->shape);
    } else {
        (void)json_object_set_new(o, "config", json_loads(r->config_json, 0, NULL));
    }
    return o;
}
