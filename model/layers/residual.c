/* residual.c - one decoder layer around its attention and its MLP, with block attention residuals instead of a plain
 * residual stream where the model has them (docs/MODEL.md).
 *   x = mix(bank, cur);  at the start of a block cur is banked and the sum restarts;  cur = [cur +] attention(rms(x))
 *   cur = cur + mlp(rms(mix(bank, cur))) */
#include "model/model_priv.h"

tsr_status residual_mix(run *r, const param *norm, const param *proj, const float *cur, float *y,
                        res_saved *k)
{
    int64_t d = r->spec->hidden;
    k->p = ws_f32(r, r->n * (r->banks + 1));
    k->rstd = ws_f32(r, r->n * (r->banks + 1));
    RUN(r, attnres_fwd, .y = y, .p = k->p, .rstd = k->rstd, .bank = r->bank, .cur = cur, .norm = vec(norm),
        .proj = vec(proj), .n = r->n, .d = d, .s = r->banks, .bank_stride = r->n * d,
        .eps = (float)r->spec->rms_eps);
    return TSR_OK;
}

tsr_status residual_mix_bwd(run *r, const param *norm, const param *proj, const float *cur, const float *dy,
                            float *dcur, const res_saved *k)
{
    int64_t d = r->spec->hidden;
    RUN(r, attnres_bwd, .dbank = r->dbank, .dcur = dcur, .dnorm = norm->pub.grad, .dproj = proj->pub.grad,
        .dy = dy, .p = k->p, .rstd = k->rstd, .bank = r->bank, .cur = cur, .norm = vec(norm),
        .proj = vec(proj), .n = r->n, .d = d, .s = r->banks, .bank_stride = r->n * d,
        .dbank_stride = r->n * d);
    return TSR_OK;
}

static bool starts_block(const run *r, int32_t layer)
{
    return r->spec->res_block > 0 && layer % r->spec->res_block == 0;
}

static tsr_status norm_rows(run *r, const param *w, const float *x, float *y, float **rstd)
{
    int64_t d = r->spec->hidden;
    *rstd = ws_f32(r, r->n);
    RUN(r, rmsnorm_fwd, .y = y, .rstd = *rstd, .x = x, .w = vec(w), .n = r->n, .d = d, .x_stride = d,
        .y_stride = d, .eps = (float)r->spec->rms_eps);
    return TSR_OK;
}

static tsr_status attention(run *r, int32_t layer, const float *x, float *y, layer_saved *k)
{
    return r->spec->layer_kind[layer] == TSR_LAYER_KDA ? kda_forward(r, layer, x, y, &k->attn.kda)
                                                       : mla_forward(r, layer, x, y, &k->attn.mla);
}

static tsr_status feed_forward(run *r, int32_t layer, const float *x, float *y, layer_saved *k)
{
    const layer_params *p = &r->m->p.layer[layer];
    return layer < r->spec->first_dense ? mlp_forward(r, p->gate, p->up, p->down, x, y, false, &k->ffn.mlp)
                                        : moe_forward(r, layer, x, y, &k->ffn.moe);
}

/* cur holds the running sum. In training k->cur1 and k->cur2 are memory of their own; in inference both are cur. */
tsr_status layer_forward(run *r, int32_t layer, float *cur, layer_saved *k)
{
    const layer_params *p = &r->m->p.layer[layer];
    int64_t size = r->n * r->spec->hidden;
    bool restart = starts_block(r, layer);
    k->cur0 = cur;
    k->banks = r->banks;
    k->cur1 = r->train ? ws_f32(r, size) : cur;
    float *out = ws_f32(r, size);
    k->x1 = cur;
    if (r->banks > 0) {
        k->x1 = ws_f32(r, size);
        TSR_TRY(residual_mix(r, p->attn_res_norm, p->attn_res_proj, cur, k->x1, &k->res1));
    }
    if (restart) {
        TSR_TRY(copy_rows(r, r->bank + r->banks * size, cur, r->n, r->spec->hidden));
        r->banks++;
    }
    k->n1 = ws_f32(r, size);
    TSR_TRY(norm_rows(r, p->attn_norm, k->x1, k->n1, &k->rstd1));
    TSR_TRY(attention(r, layer, k->n1, out, k));
    if (restart) {
        TSR_TRY(copy_rows(r, k->cur1, out, r->n, r->spec->hidden));
    } else {
        RUN(r, add, .y = k->cur1, .a = cur, .b = out, .n = size);
    }
    k->x2 = k->cur1;
    if (r->spec->res_block > 0) {
        k->x2 = ws_f32(r, size);
        TSR_TRY(residual_mix(r, p->mlp_res_norm, p->mlp_res_proj, k->cur1, k->x2, &k->res2));
    }
    k->n2 = ws_f32(r, size);
    TSR_TRY(norm_rows(r, p->mlp_norm, k->x2, k->n2, &k->rstd2));
    TSR_TRY(feed_forward(r, layer, k->n2, out, k));
    RUN(r, add, .y = k->cur2, .a = k->cur1, .b = out, .n = size);
    return trace_out(r, TSR_TRACE_HIDDEN, layer, k->cur2, r->n, r->spec->hidden);
}

/* ---- backward ------------------------------------------------------------------------------------------------ */

static tsr_status norm_bwd(run *r, const param *w, const float *x, const float *rstd, float *d_inout)
{
    int64_t d = r->spec->hidden;
    RUN(r, rmsnorm_bwd, .dx = d_inout, .dw = w->pub.grad, .dy = d_inout, .x = x, .w = vec(w), .rstd = rstd,
        .n = r->n, .d = d, .x_stride = d, .dx_stride = d, .dy_stride = d);
    return TSR_OK;
}

tsr_status layer_backward(run *r, int32_t layer, float *dcur, layer_saved *k)
{
    const layer_params *p = &r->m->p.layer[layer];
    int64_t size = r->n * r->spec->hidden;
    bool restart = starts_block(r, layer);
    float *dx = ws_f32(r, size);
    size_t mark = ws_mark(r);
    TSR_TRY(layer < r->spec->first_dense
                ? mlp_backward(r, p->gate, p->up, p->down, k->n2, dcur, dx, &k->ffn.mlp)
                : moe_backward(r, layer, k->n2, dcur, dx, &k->ffn.moe));
    ws_release(r, mark);
    TSR_TRY(norm_bwd(r, p->mlp_norm, k->x2, k->rstd2, dx));
    if (r->spec->res_block > 0) {
        TSR_TRY(residual_mix_bwd(r, p->mlp_res_norm, p->mlp_res_proj, k->cur1, dx, dcur, &k->res2));
    } else {
        RUN(r, add, .y = dcur, .a = dcur, .b = dx, .n = size);
    }
    TSR_TRY(r->spec->layer_kind[layer] == TSR_LAYER_KDA
                ? kda_backward(r, layer, k->n1, dcur, dx, &k->attn.kda)
                : mla_backward(r, layer, k->n1, dcur, dx, &k->attn.mla));
    ws_release(r, mark);
    TSR_TRY(norm_bwd(r, p->attn_norm, k->x1, k->rstd1, dx));
    r->banks = k->banks;
    if (restart) { /* the sum went into the bank and nowhere else */
        TSR_TRY(copy_rows(r, dcur, r->dbank + k->banks * size, r->n, r->spec->hidden));
    }
    if (k->banks > 0) {
        return residual_mix_bwd(r, p->attn_res_norm, p->attn_res_proj, k->cur0, dx, dcur, &k->res1);
    }
    RUN(r, add, .y = dcur, .a = dcur, .b = dx, .n = size);
    return TSR_OK;
}
