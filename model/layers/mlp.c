/* mlp.c - gated MLP: y = down(act(gate x, up x)), act being SiTU-GLU or SwiGLU. Dense layers and shared experts. */
#include "model/model_priv.h"

tsr_status mlp_forward(run *r, const param *gate, const param *up, const param *down, const float *x,
                       float *y, bool accumulate, mlp_saved *k)
{
    const tsr_spec *s = r->spec;
    int64_t size = r->n * gate->w.rows;
    k->g = ws_f32(r, size);
    k->u = ws_f32(r, size);
    k->a = r->train ? ws_f32(r, size) : k->g;
    TSR_TRY(linear(r, gate, x, 0, k->g, 0, r->n, false));
    TSR_TRY(linear(r, up, x, 0, k->u, 0, r->n, false));
    RUN(r, glu_fwd, .y = k->a, .g = k->g, .u = k->u, .n = size,
        .kind = s->situ ? TSR_GLU_SITU : TSR_GLU_SWIGLU, .b1 = (float)s->situ_beta,
        .b2 = (float)s->situ_linear_beta);
    return linear(r, down, k->a, 0, y, 0, r->n, accumulate);
}

tsr_status mlp_backward(run *r, const param *gate, const param *up, const param *down, const float *x,
                        const float *dy, float *dx, const mlp_saved *k)
{
    const tsr_spec *s = r->spec;
    int64_t size = r->n * gate->w.rows;
    float *da = ws_f32(r, size), *du = ws_f32(r, size);
    TSR_TRY(linear_bwd(r, down, k->a, 0, dy, 0, da, 0, r->n, false));
    RUN(r, glu_bwd, .dg = da, .du = du, .dy = da, .g = k->g, .u = k->u, .n = size,
        .kind = s->situ ? TSR_GLU_SITU : TSR_GLU_SWIGLU, .b1 = (float)s->situ_beta,
        .b2 = (float)s->situ_linear_beta);
    TSR_TRY(linear_bwd(r, gate, x, 0, da, 0, dx, 0, r->n, false));
    return linear_bwd(r, up, x, 0, du, 0, dx, 0, r->n, true);
}
