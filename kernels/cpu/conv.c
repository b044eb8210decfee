/* conv.c - reference: short causal convolution. Plain loops, f64 accumulators. Contracts: kernels/ops/conv.h. */
#include "kernels/backend_priv.h"

#include <math.h>

/* Input of channel c, `back` tokens before token t of segment s: the segment's own, else its history, else zero. */
static double input(const tsr_conv_fwd_args *a, int64_t s, int64_t t, int64_t back, int64_t c)
{
    int64_t at = t - back, first = a->seg[s];
    if (at >= first) {
        return (double)a->x[at * a->x_stride + c];
    }
    int64_t row = a->kw - 1 + at - first;
    return a->state != NULL ? (double)a->state[(s * (a->kw - 1) + row) * a->c + c] : 0.0;
}

/* Going up, row i reads rows from i on only. */
static void keep_history(const tsr_conv_fwd_args *a, int64_t s)
{
    int64_t end = a->seg[s + 1], rows = a->kw - 1;
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t c = 0; c < a->c; c++) {
            a->state[(s * rows + i) * a->c + c] = (float)input(a, s, end, rows - i, c);
        }
    }
}

tsr_status tsr_cpu_conv_fwd(tsr_queue *q, const tsr_conv_fwd_args *a)
{
    (void)q;
    for (int64_t s = 0; s < a->segs; s++) {
        for (int64_t t = a->seg[s]; t < a->seg[s + 1]; t++) {
            for (int64_t c = 0; c < a->c; c++) {
                double u = 0;
                for (int64_t j = 0; j < a->kw; j++) {
                    u += (double)a->w[c * a->kw + j] * input(a, s, t, a->kw - 1 - j, c);
                }
                a->y[t * a->y_stride + c] = (float)(u / (1 + exp(-u)));
            }
        }
        if (a->state != NULL) {
            keep_history(a, s);
        }
    }
    return TSR_OK;
}

/* dy silu'(u) at token t, whose segment starts at first. */
static double d_pre(const tsr_conv_bwd_args *a, int64_t first, int64_t t, int64_t c)
{
    double u = 0;
    for (int64_t j = 0; j < a->kw; j++) {
        int64_t at = t - a->kw + 1 + j;
        u += at >= first ? (double)a->w[c * a->kw + j] * (double)a->x[at * a->x_stride + c] : 0.0;
    }
    double s = 1 / (1 + exp(-u));
    return (double)a->dy[t * a->dy_stride + c] * s * (1 + u * (1 - s));
}

tsr_status tsr_cpu_conv_bwd(tsr_queue *q, const tsr_conv_bwd_args *a)
{
    double *dw = tsr_scratch(q, 0);
    TSR_ASSERT((size_t)a->kw * sizeof *dw <= TSR_SCRATCH_BYTES);
    for (int64_t c = 0; c < a->c; c++) {
        for (int64_t j = 0; j < a->kw; j++) {
            dw[j] = 0;
        }
        for (int64_t s = 0; s < a->segs; s++) {
            int64_t first = a->seg[s], end = a->seg[s + 1];
            for (int64_t t = first; t < end; t++) {
                double dx = 0;
                for (int64_t j = 0; j < a->kw; j++) {
                    int64_t later = t + a->kw - 1 - j;
                    double du = later < end ? d_pre(a, first, later, c) : 0.0;
                    dx += (double)a->w[c * a->kw + j] * du;
                    dw[j] += du * (double)a->x[t * a->x_stride + c];
                }
                a->dx[t * a->dx_stride + c] = (float)dx;
            }
        }
        for (int64_t j = 0; j < a->kw; j++) {
            a->dw[c * a->kw + j] = (float)((double)a->dw[c * a->kw + j] + dw[j]);
        }
    }
    return TSR_OK;
}
