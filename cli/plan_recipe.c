/* plan_recipe.c - what training by a recipe takes from a rank; see plan_recipe.h. */
#include "cli/plan_recipe.h"
#include "cli/out.h"
#include "train/plan.h"

#include <inttypes.h>
#include <string.h>
#include <unistd.h>

typedef struct row {
    const char *key, *name; /* of JSON; for people */
    size_t offset;
} row;

#define AT(field) #field, .offset = offsetof(tsr_train_plan, field)
static const row memory[] = {
    { AT(parameters), .name = "parameters" },
    { AT(gradients), .name = "gradients" },
    { AT(optimizer), .name = "optimizer state" },
    { AT(activations), .name = "activations, kept" },
    { AT(activations_recompute), .name = "activations, recomputed" },
    { AT(total), .name = "memory" },
};
static const row traffic[] = {
    { AT(expert_all_to_all), .name = "experts, all to all" },
    { AT(reduce_scatter), .name = "gradients, reduce-scatter" },
    { AT(all_gather), .name = "parameters, all-gather" },
    { AT(cp_states), .name = "states handed on" },
    { AT(cp_cache), .name = "compressed cache" },
    { AT(pipeline), .name = "pipeline" },
    { AT(traffic), .name = "sent in a step" },
};
#undef AT
#define COUNT(list) (sizeof(list) / sizeof *(list))

bool tsr_plan_is_recipe(const char *path)
{
    const char *dot = strrchr(path, '.');
    if (dot != NULL && (strcmp(dot, ".yaml") == 0 || strcmp(dot, ".yml") == 0)) {
        return true;
    }
    return strchr(path, '/') == NULL && strcmp(path, "-") != 0 && strstr(path, ".json") == NULL &&
           access(path, F_OK) != 0;
}

static uint64_t value_of(const tsr_train_plan *p, const row *r)
{
    uint64_t v;
    memcpy(&v, (const char *)p + r->offset, sizeof v);
    return v;
}

static tsr_status sizes_of(const tsr_recipe *r, tsr_train_plan *plans, tsr_spec_sizes *z, tsr_err *err)
{
    TSR_TRY(tsr_spec_sizes_of(r->spec, z, err));
    for (int32_t i = 0; i < r->stages; i++) {
        TSR_TRY(tsr_train_plan_of(&plans[i], r, i, err));
    }
    return TSR_OK;
}

static json_t *stage_json(const tsr_stage *s, const tsr_train_plan *p)
{
    json_t *o = json_object();
    tsr_json_set(&o, "name", tsr_json_text(s->name));
    tsr_json_set(&o, "context", json_integer(s->context));
    tsr_json_set(&o, "steps", json_integer(s->steps));
    tsr_json_set(&o, "recompute", json_boolean(s->recompute));
    tsr_json_set(&o, "step_tokens", json_integer(p->step_tokens));
    tsr_json_set(&o, "micro_tokens", json_integer(p->micro_tokens));
    tsr_json_set(&o, "micros", json_integer(p->micros));
    tsr_json_set(&o, "first_layer", json_integer(p->first_layer));
    tsr_json_set(&o, "layers", json_integer(p->layers));
    tsr_json_set(&o, "params", tsr_json_u64(p->params));
    tsr_json_set(&o, "params_routed", tsr_json_u64(p->params_routed));
    for (size_t i = 0; i < COUNT(memory); i++) {
        tsr_json_set(&o, memory[i].key, tsr_json_u64(value_of(p, &memory[i])));
    }
    for (size_t i = 0; i < COUNT(traffic); i++) {
        tsr_json_set(&o, traffic[i].key, tsr_json_u64(value_of(p, &traffic[i])));
    }
    return o;
}

static tsr_status print_json(const tsr_recipe *r, const tsr_train_plan *plans, const tsr_spec_sizes *z,
                             tsr_err *err)
{
    json_t *o = json_object(), *stages = json_array();
    tsr_json_set(&o, "arch", tsr_json_text(tsr_arch_name(r->spec->arch)));
    tsr_json_set(&o, "params_total", tsr_json_u64(z->params_total));
    tsr_json_set(&o, "params_active", tsr_json_u64(z->params_active));
    tsr_json_set(&o, "ranks", json_integer(plans[0].ranks));
    tsr_json_set(&o, "ep", json_integer(plans[0].ep));
    tsr_json_set(&o, "dp", json_integer(plans[0].dp));
    tsr_json_set(&o, "cp", json_integer(plans[0].cp));
    tsr_json_set(&o, "pp", json_integer(plans[0].pp));
    for (int32_t i = 0; i < r->stages; i++) {
        tsr_json_append(&stages, stage_json(&r->stage[i], &plans[i]));
    }
    tsr_json_set(&o, "stages", stages);
    return tsr_json_print(o, false, err);
}

static void print_rows(const tsr_train_plan *p, const row *rows, size_t count, bool skip_zero)
{
    char size[TSR_SIZE_TEXT];
    for (size_t i = 0; i < count; i++) {
        uint64_t v = value_of(p, &rows[i]);
        if (v > 0 || !skip_zero) {
            (void)printf("  %-26s %" PRIu64 " (%s)\n", rows[i].name, v, tsr_size_text(v, size));
        }
    }
}

static void print_text(const tsr_recipe *r, const tsr_train_plan *plans, const tsr_spec_sizes *z)
{
    const tsr_train_plan *p = plans;
    (void)printf("%-28s %s, %d layers, %" PRId64 " experts, top-k %" PRId64 "\n", "model",
                 tsr_arch_name(r->spec->arch), r->spec->layers, r->spec->experts, r->spec->top_k);
    (void)printf("%-28s %" PRIu64 ", %" PRIu64 " active\n", "parameters", z->params_total, z->params_active);
    (void)printf("%-28s %" PRId64 " (ep %d, dp %d, cp %d, pp %d)\n", "ranks", p->ranks, p->ep, p->dp, p->cp,
                 p->pp);
    for (int32_t i = 0; i < r->stages; i++) {
        const tsr_stage *s = &r->stage[i];
        p = &plans[i];
        (void)printf("stage %s: context %" PRId64 ", %" PRId64 " steps; the fullest rank, layers %d to %d:\n",
                     s->name, s->context, s->steps, p->first_layer, p->first_layer + p->layers - 1);
        (void)printf("  %-26s %" PRIu64 "\n", "number of parameters", p->params);
        (void)printf("  %-26s %" PRId64 " in %" PRId64 " forwards of %" PRId64 "\n", "tokens of a step",
                     p->step_tokens, p->micros, p->micro_tokens);
        print_rows(p, memory, COUNT(memory), false);
        print_rows(p, traffic, COUNT(traffic), true);
    }
}

tsr_status tsr_plan_recipe(tsr_cli *cli, const tsr_args *a, tsr_err *err)
{
    static const char *const keys[] = { "parallel.ep", "parallel.dp", "parallel.cp", "parallel.pp" };
    tsr_recipe_set sets[4];
    char values[4][24];
    size_t count = 0;
    for (size_t i = 0; i < 4; i++) {
        const char *option = strchr(keys[i], '.') + 1;
        if (tsr_opt_given(a, option)) {
            (void)snprintf(values[count], sizeof values[count], "%" PRIu64, tsr_opt_number(a, option, 0));
            sets[count] = (tsr_recipe_set){ keys[i], values[count] };
            count++;
        }
    }
    tsr_recipe *r;
    tsr_spec_sizes z;
    tsr_train_plan plans[TSR_STAGE_MAX];
    TSR_TRY(tsr_recipe_load(&r, a->operands[0], sets, count, err));
    tsr_status st = sizes_of(r, plans, &z, err);
    if (st == TSR_OK && cli->json) {
        st = print_json(r, plans, &z, err);
    } else if (st == TSR_OK) {
        print_text(r, plans, &z);
    }
    tsr_recipe_free(&r);
    return st;
}
