/* mla.c - gated multi-head latent attention without positions (docs/MODEL.md).
 *   q = q_b rms(q_a x) (or q x);  [c, kr] = kv_a x;  c = rms(c);  [k, v] = kv_b c;  y = W_o (softmax(q [k, kr]) v sigmoid(g x))
 * Training computes k and v; inference keeps [c, kr] only and moves kv_b to the other side of the products. */
#include "model/model_priv.h"

#include <math.h>

static float scale_of(const tsr_spec *s)
{
    return 1 / sqrtf((float)(s->qk_nope + s->qk_rope));
}

static tsr_status queries(run *r, int32_t layer, const float *x, mla_saved *k)
{
    const tsr_spec *s = r->spec;
    const layer_params *p = &r->m->p.layer[layer];
    k->q = ws_f32(r, r->n * s->mla_heads * (s->qk_nope + s->qk_rope));
    if (s->q_lora == 0) {
        return linear(r, p->q, x, 0, k->q, 0, r->n, false);
    }
    k->q_a = ws_f32(r, r->n * s->q_lora);
    k->q_an = r->train ? ws_f32(r, r->n * s->q_lora) : k->q_a;
    k->rstd_qa = ws_f32(r, r->n);
    TSR_TRY(linear(r, p->q_a, x, 0, k->q_a, 0, r->n, false));
    RUN(r, rmsnorm_fwd, .y = k->q_an, .rstd = k->rstd_qa, .x = k->q_a, .w = vec(p->q_a_norm), .n = r->n,
        .d = s->q_lora, .x_stride = s->q_lora, .y_stride = s->q_lora, .eps = (float)s->lora_eps);
    return linear(r, p->q_b, k->q_an, 0, k->q, 0, r->n, false);
}

/* Output gate and projection of k->o [n][h][v_head]. */
static tsr_status output(run *r, int32_t layer, const float *x, float *y, mla_saved *k)
{
    const tsr_spec *s = r->spec;
    const layer_params *p = &r->m->p.layer[layer];
    int64_t size = r->n * s->mla_heads * s->v_head;
    k->gated = k->o;
    if (s->mla_gate) {
        k->gate = ws_f32(r, size);
        k->gated = r->train ? ws_f32(r, size) : k->o;
        TSR_TRY(linear(r, p->g, x, 0, k->gate, 0, r->n, false));
        RUN(r, gate_fwd, .y = k->gated, .x = k->o, .g = k->gate, .n = size);
    }
    return linear(r, p->o, k->gated, 0, y, 0, r->n, false);
}

static tsr_status expanded(run *r, int32_t layer, mla_saved *k)
{
    const tsr_spec *s = r->spec;
    const layer_params *p = &r->m->p.layer[layer];
    int64_t n = r->n, h = s->mla_heads, rank = s->kv_lora, row = rank + s->qk_rope;
    k->c = ws_f32(r, n * rank);
    k->rstd_c = ws_f32(r, n);
    k->kv = ws_f32(r, n * h * (s->qk_nope + s->v_head));
    k->lse = ws_f32(r, n * h);
    RUN(r, rmsnorm_fwd, .y = k->c, .rstd = k->rstd_c, .x = k->kv_a, .w = vec(p->kv_a_norm), .n = n, .d = rank,
        .x_stride = row, .y_stride = rank, .eps = (float)s->lora_eps);
    TSR_TRY(linear(r, p->kv_b, k->c, 0, k->kv, 0, n, false));
    RUN(r, mla_fwd, .o = k->o, .lse = k->lse, .q = k->q, .kv = k->kv, .kr = k->kv_a + rank, .seg = r->seg,
        .max_logit = r->dry ? NULL : r->m->max_logits + (int64_t)layer * h, .n = n, .h = h, .dn = s->qk_nope,
        .dr = s->qk_rope, .dv = s->v_head, .segs = r->segs, .kr_stride = row, .scale = scale_of(s));
    return TSR_OK;
}

/* The same on a line of ranks: keys that stand before are gathered as what they were compressed to. */
static tsr_status line_expanded(run *r, int32_t layer, mla_saved *k)
{
    const tsr_spec *s = r->spec;
    const layer_params *p = &r->m->p.layer[layer];
    int64_t n = r->n, h = s->mla_heads, rank = s->kv_lora, row = rank + s->qk_rope,
            dq = h * (s->qk_nope + s->qk_rope), all = line_rows(r), more = all - n, dv = h * s->v_head;
    const int64_t *seg;
    k->c = ws_f32(r, n * rank);
    k->rstd_c = ws_f32(r, n);
    k->cx = ws_f32(r, all * rank);
    k->krx = ws_f32(r, all * (s->qk_rope > 0 ? s->qk_rope : 1));
    k->qx = ws_f32(r, all * dq);
    k->ox = ws_f32(r, all * dv);
    k->kv = ws_f32(r, all * h * (s->qk_nope + s->v_head));
    k->lse = ws_f32(r, all * h);
    RUN(r, rmsnorm_fwd, .y = k->c, .rstd = k->rstd_c, .x = k->kv_a, .w = vec(p->kv_a_norm), .n = n, .d = rank,
        .x_stride = row, .y_stride = rank, .eps = (float)s->lora_eps);
    TSR_TRY(rows_before(r, k->c, rank, rank, k->cx));
    if (s->qk_rope > 0) {
        TSR_TRY(rows_before(r, k->kv_a + rank, row, s->qk_rope, k->krx));
    }
    TSR_TRY(linear(r, p->kv_b, k->cx, 0, k->kv, 0, all, false));
    if (!r->dry && more > 0 && r->b->zero(r->b, k->qx, (size_t)(more * dq) * sizeof(float)) != TSR_OK) {
        TSR_FAIL(r->err, TSR_E_IO, "%s: cannot clear memory", r->b->name);
    }
    TSR_TRY(copy_rows(r, k->qx + more * dq, k->q, n, dq));
    TSR_TRY(line_borders(r, more, &seg));
    RUN(r, mla_fwd, .o = k->ox, .lse = k->lse, .q = k->qx, .kv = k->kv, .kr = k->krx, .seg = seg,
        .max_logit = r->dry ? NULL : r->m->max_logits + (int64_t)layer * h, .n = all, .h = h,
        .dn = s->qk_nope, .dr = s->qk_rope, .dv = s->v_head, .segs = r->segs, .kr_stride = s->qk_rope,
        .scale = scale_of(s));
    return copy_rows(r, k->o, k->ox + more * dv, n, dv);
}

/* Appends the new tokens' [c, kr] to the session's cache. */
static tsr_status append(run *r, int32_t layer, mla_saved *k)
{
    const tsr_spec *s = r->spec;
    const layer_params *p = &r->m->p.layer[layer];
    int64_t n = r->n, rank = s->kv_lora, row = rank + s->qk_rope;
    size_t size = r->s != NULL && r->s->dtype == TSR_DT_BF16 ? 2 : 4;
    char *at = r->dry ? NULL : (char *)r->s->cache[layer] + (size_t)(r->s->length * row) * size;
    k->c = ws_f32(r, n * rank);
    RUN(r, rmsnorm_fwd, .y = k->c, .x = k->kv_a, .w = vec(p->kv_a_norm), .n = n, .d = rank, .x_stride = row,
        .y_stride = rank, .eps = (float)s->lora_eps);
    RUN(r, copy2d, .dst = at, .src = k->c, .n = n, .d = rank, .dst_stride = row, .src_stride = rank,
        .dtype = r->s->dtype);
    if (s->qk_rope > 0) {
        RUN(r, copy2d, .dst = at + (size_t)rank * size, .src = k->kv_a + rank, .n = n, .d = s->qk_rope,
            .dst_stride = row, .src_stride = row, .dtype = r->s->dtype);
    }
    return TSR_OK;
}

static tsr_status absorbed(run *r, int32_t layer, mla_saved *k)
{
    const tsr_spec *s = r->spec;
    const layer_params *p = &r->m->p.layer[layer];
    int64_t n = r->n, h = s->mla_heads, rank = s->kv_lora, row = rank + s->qk_rope,
            dq = s->qk_nope + s->qk_rope;
    float *q = ws_f32(r, n * h * row), *ctx = ws_f32(r, n * h * rank);
    TSR_TRY(append(r, layer, k));
    RUN(r, gemm_heads, .y = q, .x = k->q, .w = p->kv_b->w, .m = n, .heads = h, .in = s->qk_nope, .out = rank,
        .row0 = 0, .row_step = s->qk_nope + s->v_head, .x_stride = h * dq, .x_head = dq, .y_stride = h * row,
        .y_head = row, .transposed = true);
    if (s->qk_rope > 0) {
        RUN(r, copy2d, .dst = q + rank, .src = k->q + s->qk_nope, .n = n * h, .d = s->qk_rope,
            .dst_stride = row, .src_stride = dq, .dtype = TSR_DT_F32);
    }
    RUN(r, mla_absorbed, .ctx = ctx, .q = q, .cache = r->s->cache[layer], .n = n, .h = h, .r = rank,
        .dr = s->qk_rope, .past = r->s->length, .dtype = r->s->dtype, .scale = scale_of(s));
    RUN(r, gemm_heads, .y = k->o, .x = ctx, .w = p->kv_b->w, .m = n, .heads = h, .in = rank, .out = s->v_head,
        .row0 = s->qk_nope, .row_step = s->qk_nope + s->v_head, .x_stride = h * rank, .x_head = rank,
        .y_stride = h * s->v_head, .y_head = s->v_head);
    return TSR_OK;
}

tsr_status mla_forward(run *r, int32_t layer, const float *x, float *y, mla_saved *k)
{
    const tsr_spec *s = r->spec;
    const layer_params *p = &r->m->p.layer[layer];
    TSR_TRY(queries(r, layer, x, k));
    k->kv_a = ws_f32(r, r->n * (s->kv_lora + s->qk_rope));
    k->o = ws_f32(r, r->n * s->mla_heads * s->v_head);
    TSR_TRY(linear(r, p->kv_a, x, 0, k->kv_a, 0, r->n, false));
    TSR_TRY(in_line(r) ? line_expanded(r, layer, k)
            : r->train ? expanded(r, layer, k)
                       : absorbed(r, layer, k));
    return output(r, layer, x, y, k);
}

/* ---- backward ------------------------------------------------------------------------------------------------ */

/* dx: = when fresh, else +=. */
static tsr_status queries_bwd(run *r, int32_t layer, const float *x, const float *dq, float *dx, bool fresh,
                              const mla_saved *k)
{
    const tsr_spec *s = r->spec;
    const layer_params *p = &r->m->p.layer[layer];
    if (s->q_lora == 0) {
        return linear_bwd(r, p->q, x, 0, dq, 0, dx, 0, r->n, !fresh);
    }
    float *da = ws_f32(r, r->n * s->q_lora);
    TSR_TRY(linear_bwd(r, p->q_b, k->q_an, 0, dq, 0, da, 0, r->n, false));
    RUN(r, rmsnorm_bwd, .dx = da, .dw = p->q_a_norm->pub.grad, .dy = da, .x = k->q_a, .w = vec(p->q_a_norm),
        .rstd = k->rstd_qa, .n = r->n, .d = s->q_lora, .x_stride = s->q_lora, .dx_stride = s->q_lora,
        .dy_stride = s->q_lora);
    return linear_bwd(r, p->q_a, x, 0, da, 0, dx, 0, r->n, !fresh);
}

/* Of line_expanded: dq, dc [n], and the last columns of da [n]. */
static tsr_status line_bwd(run *r, int32_t layer, const float *dout, float *dq, float *dc, float *da,
                           const mla_saved *k)
{
    const tsr_spec *s = r->spec;
    const layer_params *p = &r->m->p.layer[layer];
    int64_t n = r->n, h = s->mla_heads, rank = s->kv_lora, row = rank + s->qk_rope,
            wq = h * (s->qk_nope + s->qk_rope), all = line_rows(r), more = all - n, wo = h * s->v_head;
    const int64_t *seg;
    float *doutx = ws_f32(r, all * wo), *dqx = ws_f32(r, all * wq),
          *dkvx = ws_f32(r, all * h * (s->qk_nope + s->v_head)), *dcx = ws_f32(r, all * rank),
          *dkrx = ws_f32(r, all * (s->qk_rope > 0 ? s->qk_rope : 1));
    if (!r->dry && more > 0 && r->b->zero(r->b, doutx, (size_t)(more * wo) * sizeof(float)) != TSR_OK) {
        TSR_FAIL(r->err, TSR_E_IO, "%s: cannot clear memory", r->b->name);
    }
    TSR_TRY(copy_rows(r, doutx + more * wo, dout, n, wo));
    TSR_TRY(line_borders(r, more, &seg));
    RUN(r, mla_bwd, .dq = dqx, .dkv = dkvx, .dkr = dkrx, .dout = doutx, .o = k->ox, .lse = k->lse, .q = k->qx,
        .kv = k->kv, .kr = k->krx, .seg = seg, .n = all, .h = h, .dn = s->qk_nope, .dr = s->qk_rope,
        .dv = s->v_head, .segs = r->segs, .kr_stride = s->qk_rope, .dkr_stride = s->qk_rope,
        .scale = scale_of(s));
    TSR_TRY(copy_rows(r, dq, dqx + more * wq, n, wq));
    TSR_TRY(linear_bwd(r, p->kv_b, k->cx, 0, dkvx, 0, dcx, 0, all, false));
    TSR_TRY(rows_before_bwd(r, dcx, rank, dc, rank));
    return s->qk_rope > 0 ? rows_before_bwd(r, dkrx, s->qk_rope, da + rank, row) : TSR_OK;
}

tsr_status mla_backward(run *r, int32_t layer, const float *x, const float *dy, float *dx, const mla_saved *k)
{
    const tsr_spec *s = r->spec;
    const layer_params *p = &r->m->p.layer[layer];
    int64_t n = r->n, h = s->mla_heads, rank = s->kv_lora, row = rank + s->qk_rope,
            dqk = s->qk_nope + s->qk_rope;
    float *dout = ws_f32(r, n * h * s->v_head), *dq = ws_f32(r, n * h * dqk);
    float *dkv = ws_f32(r, n * h * (s->qk_nope + s->v_head)), *dc = ws_f32(r, n * rank),
          *da = ws_f32(r, n * row);
    TSR_TRY(linear_bwd(r, p->o, k->gated, 0, dy, 0, dout, 0, n, false));
    if (s->mla_gate) {
        float *dgate = ws_f32(r, n * h * s->v_head);
        RUN(r, gate_bwd, .dx = dout, .dg = dgate, .dy = dout, .x = k->o, .g = k->gate,
            .n = n * h * s->v_head);
        TSR_TRY(linear_bwd(r, p->g, x, 0, dgate, 0, dx, 0, n, false));
    }
    if (in_line(r)) {
        TSR_TRY(line_bwd(r, layer, dout, dq, dc, da, k));
    } else {
        RUN(r, mla_bwd, .dq = dq, .dkv = dkv, .dkr = da + rank, .dout = dout, .o = k->o, .lse = k->lse,
            .q = k->q, .kv = k->kv, .kr = k->kv_a + rank, .seg = r->seg, .n = n, .h = h, .dn = s->qk_nope,
            .dr = s->qk_rope, .dv = s->v_head, .segs = r->segs, .kr_stride = row, .dkr_stride = row,
            .scale = scale_of(s));
        TSR_TRY(linear_bwd(r, p->kv_b, k->c, 0, dkv, 0, dc, 0, n, false));
    }
    RUN(r, rmsnorm_bwd, .dx = da, .dw = p->kv_a_norm->pub.grad, .dy = dc, .x = k->kv_a,
        .w = vec(p->kv_a_norm), .rstd = k->rstd_c, .n = n, .d = rank, .x_stride = row, .dx_stride = row,
        .dy_stride = rank);
    TSR_TRY(linear_bwd(r, p->kv_a, x, 0, da, 0, dx, 0, n, s->mla_gate));
    return queries_bwd(r, layer, x, dq, dx, false, k);
}
