/* kda.c - Kimi Delta Attention (docs/MODEL.md, docs/KDA.md).
 *   q, k, v = silu(conv(W x));  q = l2(q) d^-1/2, k = l2(k);  g = gate(f_b f_a x);  beta = sigmoid(b x)
 *   o = delta rule(q, k, v, g, beta);  y = W_o (rms_head(o) sigmoid(gate x)) */
#include "model/model_priv.h"

#include <math.h>

#define L2_EPS 1e-6f
/* Fewer new tokens than this go one by one: a chunk costs the same for 1 and for 16. */
#define STEP_BELOW 8

/* A convolution whose first segment goes on from the rank before. */
static tsr_status line_conv(run *r, const float *w, int i, int64_t width, kda_saved *k)
{
    int64_t kw = r->spec->conv_kernel, size = (kw - 1) * width;
    float *state = ws_f32(r, r->segs * size);
    TSR_TRY(conv_history(r, k->u[i], width, kw, &k->history[i]));
    if (!r->dry && r->b->zero(r->b, state, (size_t)(r->segs * size) * sizeof *state) != TSR_OK) {
        TSR_FAIL(r->err, TSR_E_IO, "%s: cannot clear memory", r->b->name);
    }
    TSR_TRY(copy_rows(r, state, k->history[i], kw - 1, width));
    RUN(r, conv_fwd, .y = k->c[i], .x = k->u[i], .w = w, .seg = r->seg, .n = r->n, .c = width, .kw = kw,
        .segs = r->segs, .x_stride = width, .y_stride = width, .state = state);
    return TSR_OK;
}

/* Projections, convolutions, norms of q and k. */
static tsr_status inputs(run *r, int32_t layer, const float *x, kda_saved *k)
{
    const tsr_spec *s = r->spec;
    const layer_params *p = &r->m->p.layer[layer];
    int64_t width = s->kda_heads * s->kda_head_dim, n = r->n, rows = n * s->kda_heads, kw = s->conv_kernel;
    const param *w[3] = { p->q, p->k, p->v }, *conv[3] = { p->q_conv, p->k_conv, p->v_conv };
    for (int i = 0; i < 3; i++) {
        k->u[i] = ws_f32(r, n * width);
        k->c[i] = ws_f32(r, n * width);
        TSR_TRY(linear(r, w[i], x, 0, k->u[i], 0, n, false));
        if (in_line(r)) {
            TSR_TRY(line_conv(r, vec(conv[i]), i, width, k));
            continue;
        }
        RUN(r, conv_fwd, .y = k->c[i], .x = k->u[i], .w = vec(conv[i]), .seg = r->seg, .n = n, .c = width,
            .kw = kw, .segs = r->segs, .x_stride = width, .y_stride = width,
            .state = r->s != NULL ? r->s->conv[layer] + i * (kw - 1) * width : NULL);
    }
    k->q = r->train ? ws_f32(r, n * width) : k->c[0];
    k->k = r->train ? ws_f32(r, n * width) : k->c[1];
    k->rstd_q = ws_f32(r, rows);
    k->rstd_k = ws_f32(r, rows);
    RUN(r, l2norm_fwd, .y = k->q, .rstd = k->rstd_q, .x = k->c[0], .n = rows, .d = s->kda_head_dim,
        .eps = L2_EPS, .scale = 1 / sqrtf((float)s->kda_head_dim));
    RUN(r, l2norm_fwd, .y = k->k, .rstd = k->rstd_k, .x = k->c[1], .n = rows, .d = s->kda_head_dim,
        .eps = L2_EPS, .scale = 1);
    return TSR_OK;
}

/* Decay, beta, output gate. */
static tsr_status gates(run *r, int32_t layer, const float *x, kda_saved *k)
{
    const tsr_spec *s = r->spec;
    const layer_params *p = &r->m->p.layer[layer];
    int64_t d = s->kda_head_dim, h = s->kda_heads, n = r->n;
    k->f_a = ws_f32(r, n * d);
    k->z = ws_f32(r, n * h * d);
    k->g = r->train ? ws_f32(r, n * h * d) : k->z;
    k->beta = ws_f32(r, n * h);
    k->gate = ws_f32(r, n * h * d);
    TSR_TRY(linear(r, p->f_a, x, 0, k->f_a, 0, n, false));
    TSR_TRY(linear(r, p->f_b, k->f_a, 0, k->z, 0, n, false));
    RUN(r, kda_gate_fwd, .g = k->g, .z = k->z, .dt_bias = vec(p->dt_bias), .a_log = vec(p->a_log), .n = n,
        .h = h, .d = d, .lower = (float)s->gate_lower_bound);
    TSR_TRY(linear(r, p->b, x, 0, k->beta, 0, n, false));
    RUN(r, sigmoid_fwd, .y = k->beta, .x = k->beta, .n = n * h);
    if (s->kda_full_rank_gate) {
        return linear(r, p->g, x, 0, k->gate, 0, n, false);
    }
    k->g_a = ws_f32(r, n * d);
    TSR_TRY(linear(r, p->g_a, x, 0, k->g_a, 0, n, false));
    return linear(r, p->g_b, k->g_a, 0, k->gate, 0, n, false);
}

static tsr_status attend(run *r, int32_t layer, kda_saved *k)
{
    const tsr_spec *s = r->spec;
    int64_t d = s->kda_head_dim, h = s->kda_heads, chunk = r->m->o.kda_chunk;
    float *state = r->s != NULL ? r->s->state[layer] : NULL;
    k->o = ws_f32(r, r->n * h * d);
    if (r->s != NULL && r->n < STEP_BELOW) {
        RUN(r, kda_step, .o = k->o, .state = state, .q = k->q, .k = k->k, .v = k->c[2], .g = k->g,
            .beta = k->beta, .seg = r->seg, .n = r->n, .h = h, .dk = d, .dv = d, .segs = r->segs);
        return TSR_OK;
    }
    if (in_line(r)) {
        TSR_TRY(state_in(r, &state, h * d * d));
    }
    k->states = r->train ? ws_f32(r, (r->n / chunk + r->segs) * h * d * d) : NULL;
    tsr_kda_fwd_args a = { .o = k->o,
                           .state = state,
                           .saved = k->states,
                           .q = k->q,
                           .k = k->k,
                           .v = k->c[2],
                           .g = k->g,
                           .beta = k->beta,
                           .seg = r->seg,
                           .n = r->n,
                           .h = h,
                           .dk = d,
                           .dv = d,
                           .segs = r->segs,
                           .chunk = chunk,
                           .io = TSR_DT_F32,
                           .bounded = s->gate_lower_bound < 0 };
    a.workspace_bytes = tsr_kda_fwd_workspace(&a);
    a.workspace = ws_bytes(r, a.workspace_bytes);
    if (!r->dry && tsr_kda_fwd(r->b, &a) != TSR_OK) {
        TSR_FAIL(r->err, TSR_E_IO, "%s: the device failed in kda_fwd", r->b->name);
    }
    return in_line(r) ? state_out(r, state, h * d * d) : TSR_OK;
}

tsr_status kda_forward(run *r, int32_t layer, const float *x, float *y, kda_saved *k)
{
    const tsr_spec *s = r->spec;
    const layer_params *p = &r->m->p.layer[layer];
    int64_t d = s->kda_head_dim, h = s->kda_heads, rows = r->n * h;
    TSR_TRY(inputs(r, layer, x, k));
    TSR_TRY(gates(r, layer, x, k));
    TSR_TRY(attend(r, layer, k));
    k->normed = r->train ? ws_f32(r, rows * d) : k->o;
    k->rstd = ws_f32(r, rows);
    RUN(r, rmsnorm_gated_fwd, .y = k->normed, .rstd = k->rstd, .x = k->o, .g = k->gate, .w = vec(p->o_norm),
        .n = rows, .d = d, .eps = (float)s->rms_eps);
    TSR_TRY(linear(r, p->o, k->normed, 0, y, 0, r->n, false));
    if (r->s != NULL) {
        TSR_TRY(trace_out(r, TSR_TRACE_KDA_STATE, layer, r->s->state[layer], h * d, d));
    }
    return TSR_OK;
}

/* ---- backward ------------------------------------------------------------------------------------------------ */

/* From the gradients of q, k, v to x. dx +=. */
static tsr_status inputs_bwd(run *r, int32_t layer, const float *x, float *const dqkv[3], float *dx,
                             const kda_saved *k)
{
    const tsr_spec *s = r->spec;
    const layer_params *p = &r->m->p.layer[layer];
    int64_t d = s->kda_head_dim, width = s->kda_heads * d, n = r->n, rows = n * s->kda_heads;
    const param *w[3] = { p->q, p->k, p->v }, *conv[3] = { p->q_conv, p->k_conv, p->v_conv };
    RUN(r, l2norm_bwd, .dx = dqkv[0], .dy = dqkv[0], .x = k->c[0], .rstd = k->rstd_q, .n = rows, .d = d,
        .scale = 1 / sqrtf((float)d));
    RUN(r, l2norm_bwd, .dx = dqkv[1], .dy = dqkv[1], .x = k->c[1], .rstd = k->rstd_k, .n = rows, .d = d,
        .scale = 1);
    float *du = ws_f32(r, n * width);
    for (int i = 0; i < 3; i++) {
        if (in_line(r)) {
            TSR_TRY(conv_line_bwd(r, k->u[i], k->history[i], vec(conv[i]), dqkv[i], du, conv[i]->pub.grad,
                                  width, s->conv_kernel));
            TSR_TRY(linear_bwd(r, w[i], x, 0, du, 0, dx, 0, n, true));
            continue;
        }
        RUN(r, conv_bwd, .dx = du, .dw = conv[i]->pub.grad, .dy = dqkv[i], .x = k->u[i], .w = vec(conv[i]),
            .seg = r->seg, .n = n, .c = width, .kw = s->conv_kernel, .segs = r->segs, .x_stride = width,
            .dy_stride = width, .dx_stride = width);
        TSR_TRY(linear_bwd(r, w[i], x, 0, du, 0, dx, 0, n, true));
    }
    return TSR_OK;
}

/* From the gradients of the decay and of beta to x. dx +=. */
static tsr_status gates_bwd(run *r, int32_t layer, const float *x, float *dg, float *dbeta, float *dx,
                            const kda_saved *k)
{
    const tsr_spec *s = r->spec;
    const layer_params *p = &r->m->p.layer[layer];
    int64_t d = s->kda_head_dim, h = s->kda_heads, n = r->n;
    float *df = ws_f32(r, n * d);
    RUN(r, kda_gate_bwd, .dz = dg, .ddt_bias = p->dt_bias->pub.grad, .da_log = p->a_log->pub.grad, .dg = dg,
        .z = k->z, .dt_bias = vec(p->dt_bias), .a_log = vec(p->a_log), .n = n, .h = h, .d = d,
        .lower = (float)s->gate_lower_bound);
    TSR_TRY(linear_bwd(r, p->f_b, k->f_a, 0, dg, 0, df, 0, n, false));
    TSR_TRY(linear_bwd(r, p->f_a, x, 0, df, 0, dx, 0, n, true));
    RUN(r, sigmoid_bwd, .dx = dbeta, .dy = dbeta, .y = k->beta, .n = n * h);
    return linear_bwd(r, p->b, x, 0, dbeta, 0, dx, 0, n, true);
}

tsr_status kda_backward(run *r, int32_t layer, const float *x, const float *dy, float *dx, const kda_saved *k)
{
    const tsr_spec *s = r->spec;
    const layer_params *p = &r->m->p.layer[layer];
    int64_t d = s->kda_head_dim, h = s->kda_heads, n = r->n, size = n * h * d;
    float *dout = ws_f32(r, size), *dgate = ws_f32(r, size), *dqkv[3], *dg = ws_f32(r, size),
          *dbeta = ws_f32(r, n * h);
    TSR_TRY(linear_bwd(r, p->o, k->normed, 0, dy, 0, dout, 0, n, false));
    RUN(r, rmsnorm_gated_bwd, .dx = dout, .dg = dgate, .dw = p->o_norm->pub.grad, .dy = dout, .x = k->o,
        .g = k->gate, .w = vec(p->o_norm), .rstd = k->rstd, .n = n * h, .d = d);
    if (s->kda_full_rank_gate) {
        TSR_TRY(linear_bwd(r, p->g, x, 0, dgate, 0, dx, 0, n, false));
    } else {
        float *da = ws_f32(r, n * d);
        TSR_TRY(linear_bwd(r, p->g_b, k->g_a, 0, dgate, 0, da, 0, n, false));
        TSR_TRY(linear_bwd(r, p->g_a, x, 0, da, 0, dx, 0, n, false));
    }
    for (int i = 0; i < 3; i++) {
        dqkv[i] = ws_f32(r, size);
    }
    tsr_kda_bwd_args a = { .dq = dqkv[0],
                           .d_k = dqkv[1],
                           .d_v = dqkv[2],
                           .dg = dg,
                           .dbeta = dbeta,
                           .dout = dout,
                           .q = k->q,
                           .k = k->k,
                           .v = k->c[2],
                           .g = k->g,
                           .beta = k->beta,
                           .saved = k->states,
                           .seg = r->seg,
                           .n = n,
                           .h = h,
                           .dk = d,
                           .dv = d,
                           .segs = r->segs,
                           .chunk = r->m->o.kda_chunk,
                           .bounded = s->gate_lower_bound < 0 };
    float *dlast = NULL, *dfirst = NULL;
    if (in_line(r)) {
        TSR_TRY(dstate_in(r, &dlast, h * d * d));
        dfirst = ws_f32(r, r->segs * h * d * d);
        a.dstate = dlast;
        a.dstate0 = dfirst;
    }
    a.workspace_bytes = tsr_kda_bwd_workspace(&a);
    a.workspace = ws_bytes(r, a.workspace_bytes);
    if (!r->dry && tsr_kda_bwd(r->b, &a) != TSR_OK) {
        TSR_FAIL(r->err, TSR_E_IO, "%s: the device failed in kda_bwd", r->b->name);
    }
    TSR_TRY(in_line(r) ? dstate_out(r, dfirst, h * d * d) : TSR_OK);
    TSR_TRY(inputs_bwd(r, layer, x, dqkv, dx, k));
    return gates_bwd(r, layer, x, dg, dbeta, dx, k);
}
