/* plan.c - memory and traffic of a rank; see plan.h. Sums are doubles: exact up to 2^53, and they cannot overflow. */
#include "train/plan.h"

#include <stdlib.h>
#include <string.h>

#define F32 4.0
#define KDA_CHUNK 64                    /* tokens between the states that are kept */
#define HEAD_NUMBERS ((int64_t)8 << 20) /* logits are made in blocks of rows of about so many */

typedef struct layer_params {
    double matrices, others, experts; /* experts: of all of them */
} layer_params;

typedef struct survey {
    layer_params *layer; /* layers + 2: then the embedding, then what stands behind the layers */
    int32_t layers;
} survey;

static tsr_status count_tensor(void *payload, const tsr_tensor_rule *t, tsr_err *err)
{
    survey *v = payload;
    (void)err;
    double n = t->expert_count > 0 ? (double)t->expert_count : 1;
    for (int i = 0; i < t->rank; i++) {
        n *= (double)t->shape[i];
    }
    int32_t at = t->layer >= 0 ? t->layer : strcmp(t->name, "embed.weight") == 0 ? v->layers : v->layers + 1;
    layer_params *l = &v->layer[at];
    bool router = strstr(t->name, "moe.router.") != NULL;
    if (t->expert_count > 0) {
        l->experts += n;
    } else if (t->layer >= 0 && t->rank == 2 && t->shape[0] > 1 && !router) {
        l->matrices += n;
    } else {
        l->others += n;
    }
    return TSR_OK;
}

/* ---- activations, in numbers ------------------------------------------------------------------------------------- */

/* What layer i keeps of each token. */
static double kept_by(const tsr_spec *s, int32_t i)
{
    double h = (double)s->hidden, kept = 6 * h; /* inputs, mixed and normalised, and outputs of both halves */
    if (s->layer_kind[i] == TSR_LAYER_KDA) {
        double heads = (double)s->kda_heads, d = (double)s->kda_head_dim;
        kept += 13 * heads * d + 4 * heads + d + heads * d * d / KDA_CHUNK;
    } else {
        double heads = (double)s->mla_heads, v = (double)s->v_head;
        kept += heads * (double)(s->qk_nope + s->qk_rope) + 2 * (double)s->q_lora;
        kept += (double)(2 * s->kv_lora + s->qk_rope) + heads * ((double)s->qk_nope + v + 1);
        kept += heads * v * (s->mla_gate ? 3 : 1);
    }
    if (i < s->first_dense) {
        return kept + 3 * (double)s->dense_inter;
    }
    double in = (double)(s->latent > 0 ? s->latent : s->hidden), k = (double)s->top_k,
           w = (double)s->moe_inter;
    kept += (double)s->experts + k * (2 * in + 3 * w + 4) + 3 * (double)s->shared_experts * w;
    return kept + (s->latent > 0 ? 3 * in : 0);
}

/* Finished residual blocks before layer i, which travel beside the residual stream. */
static double blocks_before(const tsr_spec *s, int32_t i)
{
    return s->res_block > 0 ? (double)((i + s->res_block - 1) / s->res_block) : 0;
}

typedef struct part { /* a run of layers */
    int32_t first, count, number;
} part;

static part part_of(const tsr_spec *s, int32_t pp, int32_t number)
{
    int32_t each = s->layers / pp, more = s->layers % pp;
    return (part){ number * each + (number < more ? number : more), each + (number < more ? 1 : 0), number };
}

/* Numbers kept by a part: for a token without and with recompute, and logits. */
static void activations(const tsr_spec *s, part p, const tsr_train_plan *o, double *all, double *recompute)
{
    double largest = 0, sum = 0, h = (double)s->hidden, tokens = (double)o->micro_tokens;
    for (int32_t i = p.first; i < p.first + p.count; i++) {
        double kept = kept_by(s, i);
        sum += kept;
        largest = kept > largest ? kept : largest;
    }
    /* The first part of a pipeline has as many micro-batches under way as there are parts, the last has one. */
    double flight = o->pp - p.number < o->micros ? o->pp - p.number : (double)o->micros;
    double blocks = blocks_before(s, p.first + p.count);
    int64_t rows = HEAD_NUMBERS / s->vocab < 16 ? 16 : HEAD_NUMBERS / s->vocab;
    rows = rows < o->micro_tokens ? rows : o->micro_tokens;
    double head = p.number == o->pp - 1 ? (double)rows * (double)s->vocab + 2 * h * tokens : 0;
    *all = tokens * (flight * (sum + blocks * h) + largest) + head; /* backward needs about one layer more */
    *recompute = tokens * (flight * ((double)p.count + blocks) * h + 1.5 * largest) + head;
}

/* ---- a rank ------------------------------------------------------------------------------------------------------------ */

typedef struct sizes {
    double params, routed, parameters, gradients, optimizer, all, recompute, total;
    double a2a, scatter, gather, states, cache, pipeline;
} sizes;

static double state_numbers(const tsr_optim *o)
{
    return o->kind == TSR_OPTIM_MUON ? 1 : 2;
}

static void memory(const tsr_recipe *r, const survey *v, part p, const tsr_train_plan *o, bool recompute,
                   sizes *z)
{
    layer_params sum = { 0 };
    for (int32_t i = p.first; i < p.first + p.count; i++) {
        sum.matrices += v->layer[i].matrices;
        sum.others += v->layer[i].others;
        sum.experts += v->layer[i].experts;
    }
    sum.others += p.number == 0 ? v->layer[v->layers].others : 0;
    sum.others += p.number == o->pp - 1 ? v->layer[v->layers + 1].others : 0;
    double routed = sum.experts / o->ep, copies = (double)o->dp * o->cp, dense = sum.matrices + sum.others;
    z->routed = routed;
    z->params = dense + routed;
    z->parameters = z->gradients = F32 * z->params;
    z->optimizer = F32 * (state_numbers(&r->matrices) * (routed / copies + sum.matrices / (copies * o->ep)) +
                          state_numbers(&r->others) * sum.others / (copies * o->ep));
    activations(r->spec, p, o, &z->all, &z->recompute);
    z->all *= F32;
    z->recompute *= F32;
    z->total = z->parameters + z->gradients + z->optimizer + (recompute ? z->recompute : z->all);
    z->scatter = F32 * (routed * (copies - 1) / copies + dense * (copies * o->ep - 1) / (copies * o->ep));
    z->gather = z->scatter;
}

static void traffic(const tsr_recipe *r, part p, const tsr_train_plan *o, const tsr_stage *stage, sizes *z)
{
    const tsr_spec *s = r->spec;
    double tokens = (double)o->step_tokens, sequences = tokens * o->cp / (double)stage->context;
    double width = (double)(s->latent > 0 ? s->latent : s->hidden), passes = stage->recompute ? 3 : 2;
    double heads = (double)s->kda_heads, d = (double)s->kda_head_dim;
    double state = heads * d * d + 3 * heads * d * (double)(s->conv_kernel - 1);
    double cache = (double)(s->kv_lora + s->qk_rope);
    for (int32_t i = p.first; i < p.first + p.count; i++) {
        if (i >= s->first_dense) {
            z->a2a += F32 * tokens * (double)s->top_k * width * 2 * passes * (o->ep - 1) / o->ep;
        }
        if (o->cp > 1 && s->layer_kind[i] == TSR_LAYER_KDA) {
            z->states += F32 * 2 * sequences * state;
        } else if (o->cp > 1) {
            z->cache += F32 * 2 * tokens * cache * (o->cp - 1);
        }
    }
    if (o->pp > 1) {
        /* The first part sends activations on, the last gradients back, those between both. */
        double on = p.number < o->pp - 1 ? 1 + blocks_before(s, p.first + p.count) : 0;
        double back = p.number > 0 ? 1 + blocks_before(s, p.first) : 0;
        z->pipeline = F32 * tokens * (double)s->hidden * (on + back);
    }
}

/* Tokens of a rank in a step and in one forward. */
static void batch(const tsr_recipe *r, const tsr_stage *s, tsr_train_plan *o)
{
    int64_t shares = (int64_t)o->dp * o->ep, sequences = s->batch_tokens / s->context;
    int64_t mine = (sequences + shares - 1) / shares, at_once = r->micro_tokens / s->context;
    at_once = at_once < 1 ? 1 : at_once > mine ? mine : at_once;
    o->step_tokens = mine * (s->context / o->cp);
    o->micro_tokens = at_once * (s->context / o->cp);
    o->micros = (mine + at_once - 1) / at_once;
}

static bool store(const double *from, uint64_t *const *to, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (!(from[i] < 9.2e18)) {
            return false;
        }
        *to[i] = (uint64_t)(from[i] + 0.5);
    }
    return true;
}

static tsr_status report(tsr_train_plan *o, const sizes *z, tsr_err *err)
{
    double sent = z->a2a + z->scatter + z->gather + z->states + z->cache + z->pipeline;
    const double from[] = { z->params, z->routed,    z->parameters, z->gradients, z->optimizer,
                            z->all,    z->recompute, z->total,      z->a2a,       z->scatter,
                            z->gather, z->states,    z->cache,      z->pipeline,  sent };
    uint64_t *const to[] = { &o->params,
                             &o->params_routed,
                             &o->parameters,
                             &o->gradients,
                             &o->optimizer,
                             &o->activations,
                             &o->activations_recompute,
                             &o->total,
                             &o->expert_all_to_all,
                             &o->reduce_scatter,
                             &o->all_gather,
                             &o->cp_states,
                             &o->cp_cache,
                             &o->pipeline,
                             &o->traffic };
    if (!store(from, to, sizeof from / sizeof *from)) {
        TSR_FAIL(err, TSR_E_LIMIT, "the run's sizes do not fit 63 bits");
    }
    return TSR_OK;
}

tsr_status tsr_train_plan_of(tsr_train_plan *out, const tsr_recipe *r, int32_t stage, tsr_err *err)
{
    TSR_ASSERT(stage >= 0 && stage < r->stages);
    const tsr_stage *s = &r->stage[stage];
    *out = (tsr_train_plan){ .ep = r->parallel.ep,
                             .dp = r->parallel.dp > 0 ? r->parallel.dp : 1,
                             .cp = r->parallel.cp,
                             .pp = r->parallel.pp };
    if (__builtin_mul_overflow((int64_t)out->ep * out->dp, (int64_t)out->cp * out->pp, &out->ranks)) {
        TSR_FAIL(err, TSR_E_LIMIT, "the number of ranks does not fit 63 bits");
    }
    batch(r, s, out);
    survey v = { calloc((size_t)r->spec->layers + 2, sizeof *v.layer), r->spec->layers };
    if (v.layer == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    tsr_status st = tsr_spec_each_tensor(r->spec, count_tensor, &v, err);
    sizes most = { 0 };
    for (int32_t i = 0; st == TSR_OK && i < out->pp; i++) {
        part p = part_of(r->spec, out->pp, i);
        sizes z = { 0 };
        memory(r, &v, p, out, s->recompute, &z);
        traffic(r, p, out, s, &z);
        if (i == 0 || z.total > most.total) {
            most = z;
            out->first_layer = p.first;
            out->layers = p.count;
        }
    }
    free(v.layer);
    return st == TSR_OK ? report(out, &most, err) : st;
}
