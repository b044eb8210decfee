/* moe.c - mixture of experts, latent where the model has it (docs/MODEL.md).
 *   s = sigmoid(router x), top k of s + bias, weights from s;  z = down x (or x);  u = sum_e w_e expert_e(z)
 *   y = up rms(u) (or u) + shared(x)
 * In inference experts may not be resident: then the chosen ones are leased, as many at a time as the cache holds. */
#include "model/model_priv.h"

#include <string.h>

static int64_t width_of(const tsr_spec *s)
{
    return s->latent > 0 ? s->latent : s->hidden;
}

static tsr_status route(run *r, int32_t layer, const float *x, moe_saved *k)
{
    const tsr_spec *s = r->spec;
    const layer_params *p = &r->m->p.layer[layer];
    int64_t n = r->n, e = s->experts, top = s->top_k;
    k->s = ws_f32(r, n * e);
    k->w = ws_f32(r, n * top);
    k->ids = ws_bytes(r, (size_t)(n * top) * sizeof *k->ids);
    k->order = ws_bytes(r, (size_t)(n * top) * sizeof *k->order);
    k->pos = ws_bytes(r, (size_t)(n * top) * sizeof *k->pos);
    k->offset = ws_bytes(r, (size_t)(e + 1) * sizeof *k->offset);
    TSR_TRY(linear(r, p->router, x, 0, k->s, 0, n, false));
    RUN(r, router_fwd, .s = k->s, .w = k->w, .ids = k->ids, .logits = k->s, .bias = vec(p->bias), .n = n,
        .e = e, .k = top, .scale = (float)s->route_scale, .normalise = s->route_normalise);
    RUN(r, moe_plan, .offset = k->offset, .order = k->order, .pos = k->pos, .ids = k->ids, .n = n, .e = e,
        .k = top);
    if (r->watch != NULL && !r->dry) {
        TSR_TRY(r->watch->fn(r->watch->payload, layer, k->s, k->w, k->ids, n, r->err));
    }
    TSR_TRY(trace_out(r, TSR_TRACE_ROUTE_IDS, layer, k->ids, n, top));
    return trace_out(r, TSR_TRACE_ROUTE_WEIGHTS, layer, k->w, n, top);
}

/* One part of every leased expert: y = x W_e^T over its rows. */
static tsr_status grouped(run *r, const tsr_expert_table *t, int part, const float *x, float *y, int64_t out,
                          int64_t in, const moe_saved *k)
{
    RUN(r, ggemm_nt, .y = y, .x = x, .offset = k->eoffset, .data = t->part[part], .scale = t->part[part + 3],
        .dtype = t->dtype, .m = k->erows, .e_count = local_experts(r->m), .n = out, .k = in);
    return TSR_OK;
}

static tsr_status experts(run *r, const tsr_expert_table *t, moe_saved *k)
{
    const tsr_spec *s = r->spec;
    int64_t in = width_of(s), size = k->erows * s->moe_inter;
    TSR_TRY(grouped(r, t, TSR_PART_GATE, k->xe, k->g, s->moe_inter, in, k));
    TSR_TRY(grouped(r, t, TSR_PART_UP, k->xe, k->u, s->moe_inter, in, k));
    RUN(r, glu_fwd, .y = k->a, .g = k->g, .u = k->u, .n = size,
        .kind = s->situ ? TSR_GLU_SITU : TSR_GLU_SWIGLU, .b1 = (float)s->situ_beta,
        .b2 = (float)s->situ_linear_beta);
    return grouped(r, t, TSR_PART_DOWN, k->a, k->ye, in, s->moe_inter, k);
}

/* The distinct experts of this call, ascending. */
static tsr_status chosen(run *r, const moe_saved *k, int32_t *count_out)
{
    tsr_model *m = r->m;
    int64_t slots = r->n * r->spec->top_k;
    if (r->b->download(r->b, m->route_host, k->ids, (size_t)slots * sizeof *m->route_host) != TSR_OK) {
        TSR_FAIL(r->err, TSR_E_IO, "%s: cannot read the routing", r->b->name);
    }
    memset(m->seen, 0, (size_t)r->spec->experts);
    for (int64_t i = 0; i < slots; i++) {
        m->seen[m->route_host[i]] = 1;
    }
    *count_out = 0;
    for (int32_t e = 0; e < r->spec->experts; e++) {
        if (m->seen[e]) {
            m->distinct[(*count_out)++] = e;
        }
    }
    return TSR_OK;
}

/* Guesses the next layer's experts, by its router on this layer's input, and asks for them to be read meanwhile. */
static tsr_status look_ahead(run *r, int32_t layer, const float *x)
{
    const tsr_spec *s = r->spec;
    const layer_params *next = layer + 1 < s->layers ? &r->m->p.layer[layer + 1] : NULL;
    int64_t n = r->n, slots = n * s->top_k;
    if (next == NULL || next->router == NULL || slots > s->experts) {
        return TSR_OK;
    }
    float *scores = ws_f32(r, n * s->experts), *w = ws_f32(r, slots);
    int32_t *ids = ws_bytes(r, (size_t)slots * sizeof *ids);
    TSR_TRY(linear(r, next->router, x, 0, scores, 0, n, false));
    RUN(r, router_fwd, .s = scores, .w = w, .ids = ids, .logits = scores, .bias = vec(next->bias), .n = n,
        .e = s->experts, .k = s->top_k, .scale = 1, .normalise = false);
    if (r->dry) {
        return TSR_OK;
    }
    if (r->b->download(r->b, r->m->route_host, ids, (size_t)slots * sizeof *ids) != TSR_OK) {
        TSR_FAIL(r->err, TSR_E_IO, "%s: cannot read the routing", r->b->name);
    }
    tsr_experts_prefetch(r->m->experts, layer + 1, r->m->route_host, (int32_t)slots);
    return TSR_OK;
}

static tsr_status leased(run *r, int32_t layer, const float *x, moe_saved *k)
{
    tsr_model *m = r->m;
    int32_t count = 0;
    if (!r->dry) {
        TSR_TRY(chosen(r, k, &count));
    }
    TSR_TRY(look_ahead(r, layer, x));
    for (int32_t at = 0; at < count;) {
        int32_t taken;
        tsr_expert_table t;
        TSR_TRY(tsr_experts_acquire(m->experts, layer, m->distinct + at, count - at, &taken, &t, r->err));
        tsr_status st = experts(r, &t, k);
        if (st == TSR_OK && r->b->sync(r->b) != TSR_OK) {
            st = TSR_ERR(r->err, TSR_E_IO, "%s: the device failed in the experts of layer %d", r->b->name,
                         layer);
        }
        tsr_experts_release(m->experts, layer);
        TSR_TRY(st);
        at += taken;
    }
    return TSR_OK;
}

static tsr_expert_table training_table(const layer_params *p)
{
    tsr_expert_table t = { .dtype = TSR_DT_F32 };
    for (int i = 0; i < 3; i++) {
        t.part[i] = p->e_data[i];
    }
    return t;
}

/* Training: all experts are in memory, here or on other ranks. */
static tsr_status trained(run *r, int32_t layer, moe_saved *k)
{
    int64_t in = width_of(r->spec);
    tsr_expert_table t = training_table(&r->m->p.layer[layer]);
    if (r->m->o.group == NULL) {
        return experts(r, &t, k);
    }
    TSR_TRY(experts(r, &t, k));
    return exchange_out(r, layer, k, in);
}

static tsr_status routed(run *r, int32_t layer, const float *x, moe_saved *k)
{
    const tsr_spec *s = r->spec;
    int64_t rows = r->n * s->top_k, in = width_of(s);
    k->xs = k->xe = ws_f32(r, rows * in);
    k->y = k->ye = ws_f32(r, rows * in);
    k->eoffset = k->offset;
    k->erows = rows;
    RUN(r, moe_gather, .xs = k->xs, .x = k->z, .order = k->order, .n = r->n, .k = s->top_k, .d = in);
    if (r->m->o.group != NULL) {
        TSR_TRY(exchange_in(r, layer, k, in));
    }
    int64_t most = r->m->o.group != NULL ? rows_at_most(r) : rows;
    k->g = ws_f32(r, most * s->moe_inter);
    k->u = ws_f32(r, most * s->moe_inter);
    k->a = ws_f32(r, most * s->moe_inter);
    if (r->train) {
        return trained(r, layer, k);
    }
    if (r->m->experts != NULL && tsr_experts_all_resident(r->m->experts)) {
        tsr_expert_table t = tsr_experts_table(r->m->experts, layer);
        return experts(r, &t, k);
    }
    return leased(r, layer, x, k); /* and when only memory is counted: it takes the most */
}

tsr_status moe_forward(run *r, int32_t layer, const float *x, float *y, moe_saved *k)
{
    const tsr_spec *s = r->spec;
    const layer_params *p = &r->m->p.layer[layer];
    int64_t n = r->n, in = width_of(s);
    TSR_TRY(route(r, layer, x, k));
    k->z = x;
    if (s->latent > 0) {
        float *z = ws_f32(r, n * in);
        TSR_TRY(linear(r, p->latent_down, x, 0, z, 0, n, false));
        k->z = z;
    }
    TSR_TRY(routed(r, layer, x, k));
    k->sum = s->latent > 0 ? ws_f32(r, n * in) : y;
    RUN(r, moe_combine_fwd, .u = k->sum, .y = k->y, .w = k->w, .pos = k->pos, .n = n, .k = s->top_k, .d = in);
    k->normed = k->sum;
    if (s->latent_norm) {
        k->normed = r->train ? ws_f32(r, n * in) : k->sum;
        k->rstd = ws_f32(r, n);
        RUN(r, rmsnorm_fwd, .y = k->normed, .rstd = k->rstd, .x = k->sum, .w = vec(p->latent_norm), .n = n,
            .d = in, .x_stride = in, .y_stride = in, .eps = (float)s->rms_eps);
    }
    if (s->latent > 0) {
        TSR_TRY(linear(r, p->latent_up, k->normed, 0, y, 0, n, false));
    }
    if (s->shared_experts == 0) {
        return TSR_OK;
    }
    return mlp_forward(r, p->shared_gate, p->shared_up, p->shared_down, x, y, true, &k->shared);
}

/* ---- backward ------------------------------------------------------------------------------------------------ */

static tsr_status grouped_bwd(run *r, int32_t layer, int part, const float *x, const float *dy, float *dx,
                              int64_t out, int64_t in, const moe_saved *k)
{
    const layer_params *p = &r->m->p.layer[layer];
    int64_t e = local_experts(r->m);
    RUN(r, ggemm_nn, .dx = dx, .dy = dy, .offset = k->eoffset, .data = p->e_data[part], .dtype = TSR_DT_F32,
        .m = k->erows, .e_count = e, .n = out, .k = in);
    RUN(r, ggemm_tn, .dw = p->e_grad[part], .dy = dy, .x = x, .offset = k->eoffset, .m = k->erows,
        .e_count = e, .n = out, .k = in);
    return TSR_OK;
}

/* Through the experts here: dx [erows][in] =, from dy [erows][in], which is used up. */
static tsr_status experts_bwd(run *r, int32_t layer, float *dy, float *dx, const moe_saved *k)
{
    const tsr_spec *s = r->spec;
    int64_t in = width_of(s), inter = s->moe_inter, most = r->m->o.group != NULL ? rows_at_most(r) : k->erows;
    float *da = ws_f32(r, most * inter), *du = ws_f32(r, most * inter);
    TSR_TRY(grouped_bwd(r, layer, TSR_PART_DOWN, k->a, dy, da, in, inter, k));
    RUN(r, glu_bwd, .dg = da, .du = du, .dy = da, .g = k->g, .u = k->u, .n = k->erows * inter,
        .kind = s->situ ? TSR_GLU_SITU : TSR_GLU_SWIGLU, .b1 = (float)s->situ_beta,
        .b2 = (float)s->situ_linear_beta);
    TSR_TRY(grouped_bwd(r, layer, TSR_PART_GATE, k->xe, da, dx, inter, in, k));
    TSR_TRY(grouped_bwd(r, layer, TSR_PART_UP, k->xe, du, dy, inter, in, k));
    RUN(r, add, .y = dx, .a = dx, .b = dy, .n = k->erows * in);
    return TSR_OK;
}

/* From the gradient of the combined sum to z and to the routing weights. */
static tsr_status routed_bwd(run *r, int32_t layer, const float *dsum, float *dz, float *dw,
                             const moe_saved *k)
{
    const tsr_spec *s = r->spec;
    int64_t rows = r->n * s->top_k, in = width_of(s);
    float *dy = ws_f32(r, rows * in), *dxs = ws_f32(r, rows * in);
    RUN(r, moe_combine_bwd, .dy = dy, .dw = dw, .du = dsum, .y = k->y, .w = k->w, .pos = k->pos, .n = r->n,
        .k = s->top_k, .d = in);
    if (r->m->o.group == NULL) {
        TSR_TRY(experts_bwd(r, layer, dy, dxs, k));
    } else {
        int64_t most = rows_at_most(r);
        float *dye = ws_f32(r, most * in), *dxe = ws_f32(r, most * in);
        TSR_TRY(exchange_in_bwd(r, layer, k, dy, dye, in));
        TSR_TRY(experts_bwd(r, layer, dye, dxe, k));
        TSR_TRY(exchange_out_bwd(r, layer, k, dxe, dxs, in));
    }
    RUN(r, moe_scatter, .dx = dz, .dxs = dxs, .pos = k->pos, .n = r->n, .k = s->top_k, .d = in);
    return TSR_OK;
}

tsr_status moe_backward(run *r, int32_t layer, const float *x, const float *dy, float *dx, const moe_saved *k)
{
    const tsr_spec *s = r->spec;
    const layer_params *p = &r->m->p.layer[layer];
    int64_t n = r->n, in = width_of(s);
    float *dz = ws_f32(r, n * in), *dw = ws_f32(r, n * s->top_k), *dlogits = ws_f32(r, n * s->experts);
    const float *dsum = dy;
    if (s->latent > 0) {
        float *d = ws_f32(r, n * in);
        TSR_TRY(linear_bwd(r, p->latent_up, k->normed, 0, dy, 0, d, 0, n, false));
        if (s->latent_norm) {
            RUN(r, rmsnorm_bwd, .dx = d, .dw = p->latent_norm->pub.grad, .dy = d, .x = k->sum,
                .w = vec(p->latent_norm), .rstd = k->rstd, .n = n, .d = in, .x_stride = in, .dx_stride = in,
                .dy_stride = in);
        }
        dsum = d;
    }
    TSR_TRY(routed_bwd(r, layer, dsum, dz, dw, k));
    RUN(r, router_bwd, .dlogits = dlogits, .dw = dw, .s = k->s, .w = k->w, .ids = k->ids, .n = n,
        .e = s->experts, .k = s->top_k, .scale = (float)s->route_scale, .normalise = s->route_normalise);
    TSR_TRY(linear_bwd(r, p->router, x, 0, dlogits, 0, dx, 0, n, false));
    if (s->latent > 0) {
        TSR_TRY(linear_bwd(r, p->latent_down, x, 0, dz, 0, dx, 0, n, true));
    } else {
        RUN(r, add, .y = dx, .a = dx, .b = dz, .n = n * in);
    }
    if (s->shared_experts > 0) {
        float *more = ws_f32(r, n * s->hidden);
        TSR_TRY(mlp_backward(r, p->shared_gate, p->shared_up, p->shared_down, x, dy, more, &k->shared));
        RUN(r, add, .y = dx, .a = dx, .b = more, .n = n * s->hidden);
    }
    return TSR_OK;
}
