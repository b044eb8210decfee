/* head.c - embedding at one end; last mix, norm and logits at the other. Logits are made in blocks of rows, so that a
 * vocabulary of 163,840 does not decide how much memory a run takes. */
#include "model/layers/head.h"

/* Rows whose logits fill about 32 MB. */
int64_t head_block(const tsr_spec *s, int64_t n)
{
    int64_t rows = ((int64_t)8 << 20) / s->vocab;
    rows = rows < 16 ? 16 : rows;
    return rows < n ? rows : n;
}

tsr_status embed_forward(run *r, float *cur)
{
    const param *p = r->m->p.embed;
    RUN(r, embed_fwd, .y = cur, .table = p->w.data, .ids = r->ids, .n = r->n, .d = r->spec->hidden,
        .v = r->spec->vocab, .dtype = p->w.dtype);
    return TSR_OK;
}

tsr_status embed_backward(run *r, const float *dcur)
{
    RUN(r, embed_bwd, .dtable = r->m->p.embed->pub.grad, .dy = dcur, .ids = r->ids, .n = r->n,
        .d = r->spec->hidden, .v = r->spec->vocab);
    return TSR_OK;
}

tsr_status final_forward(run *r, const float *cur, final_saved *k)
{
    const model_params *p = &r->m->p;
    int64_t d = r->spec->hidden;
    k->cur = cur;
    k->x = cur;
    if (r->spec->res_block > 0) {
        float *x = ws_f32(r, r->n * d);
        TSR_TRY(residual_mix(r, p->output_res_norm, p->output_res_proj, cur, x, &k->res));
        k->x = x;
    }
    k->normed = ws_f32(r, r->n * d);
    k->rstd = ws_f32(r, r->n);
    RUN(r, rmsnorm_fwd, .y = k->normed, .rstd = k->rstd, .x = k->x, .w = vec(p->final_norm), .n = r->n,
        .d = d, .x_stride = d, .y_stride = d, .eps = (float)r->spec->rms_eps);
    return TSR_OK;
}

tsr_status final_backward(run *r, float *dnormed, float *dcur, const final_saved *k)
{
    const model_params *p = &r->m->p;
    int64_t d = r->spec->hidden;
    RUN(r, rmsnorm_bwd, .dx = dnormed, .dw = p->final_norm->pub.grad, .dy = dnormed, .x = k->x,
        .w = vec(p->final_norm), .rstd = k->rstd, .n = r->n, .d = d, .x_stride = d, .dx_stride = d,
        .dy_stride = d);
    if (r->spec->res_block == 0) {
        return copy_rows(r, dcur, dnormed, r->n, d);
    }
    if (!r->dry && r->b->zero(r->b, dcur, (size_t)(r->n * d) * sizeof *dcur) != TSR_OK) {
        TSR_FAIL(r->err, TSR_E_IO, "%s: cannot clear memory", r->b->name);
    }
    return residual_mix_bwd(r, p->output_res_norm, p->output_res_proj, k->cur, dnormed, dcur, &k->res);
}

static tsr_status logits_of(run *r, const float *normed, int64_t first, int64_t rows, float *logits)
{
    const param *w = r->m->p.head;
    RUN(r, gemm_nt, .y = logits, .x = normed + first * r->spec->hidden, .w = w->w, .m = rows);
    return TSR_OK;
}

tsr_status head_logits(run *r, const float *normed, int64_t first, float *host)
{
    int64_t v = r->spec->vocab, block = head_block(r->spec, r->n - first);
    float *logits = ws_f32(r, block * v);
    for (int64_t at = first; !r->dry && at < r->n; at += block) {
        int64_t rows = r->n - at < block ? r->n - at : block;
        TSR_TRY(logits_of(r, normed, at, rows, logits));
        if (r->b->download(r->b, host + (at - first) * v, logits, (size_t)(rows * v) * sizeof *host) !=
            TSR_OK) {
            TSR_FAIL(r->err, TSR_E_IO, "%s: cannot read back logits", r->b->name);
        }
    }
    return TSR_OK;
}

tsr_status head_losses(run *r, const float *normed, float *losses, float *lse)
{
    int64_t v = r->spec->vocab, block = head_block(r->spec, r->n);
    float *logits = ws_f32(r, block * v);
    for (int64_t at = 0; !r->dry && at < r->n; at += block) {
        int64_t rows = r->n - at < block ? r->n - at : block;
        TSR_TRY(logits_of(r, normed, at, rows, logits));
        RUN(r, xent_fwd, .loss = losses + at, .lse = lse + at, .logits = logits, .target = r->targets + at,
            .n = rows, .v = v);
    }
    return TSR_OK;
}

tsr_status head_backward(run *r, const float *normed, const float *lse, double scale, float *dnormed)
{
    const param *w = r->m->p.head;
    int64_t v = r->spec->vocab, d = r->spec->hidden, block = head_block(r->spec, r->n);
    float *logits = ws_f32(r, block * v);
    for (int64_t at = 0; !r->dry && at < r->n; at += block) {
        int64_t rows = r->n - at < block ? r->n - at : block;
        TSR_TRY(logits_of(r, normed, at, rows, logits));
        RUN(r, xent_bwd, .dlogits = logits, .logits = logits, .lse = lse + at, .target = r->targets + at,
            .n = rows, .v = v, .scale = (float)scale);
        TSR_TRY(linear_bwd(r, w, normed + at * d, 0, logits, 0, dnormed + at * d, 0, rows, false));
    }
    return TSR_OK;
}
