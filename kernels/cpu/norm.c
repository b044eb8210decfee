/* norm.c - reference: norms. Plain loops, f64 accumulators. Contracts: kernels/ops/norm.h. */
#include "kernels/backend_priv.h"

#include <math.h>

static double sum_squares(const float *x, int64_t d)
{
    double s = 0;
    for (int64_t j = 0; j < d; j++) {
        s += (double)x[j] * (double)x[j];
    }
    return s;
}

tsr_status tsr_cpu_rmsnorm_fwd(tsr_queue *q, const tsr_rmsnorm_fwd_args *a)
{
    (void)q;
    for (int64_t i = 0; i < a->n; i++) {
        const float *x = a->x + i * a->x_stride;
        double r = 1 / sqrt(sum_squares(x, a->d) / (double)a->d + (double)a->eps);
        for (int64_t j = 0; j < a->d; j++) {
            a->y[i * a->y_stride + j] = (float)((double)x[j] * r * (a->w != NULL ? (double)a->w[j] : 1));
        }
        if (a->rstd != NULL) {
            a->rstd[i] = (float)r;
        }
    }
    return TSR_OK;
}

tsr_status tsr_cpu_rmsnorm_bwd(tsr_queue *q, const tsr_rmsnorm_bwd_args *a)
{
    (void)q;
    for (int64_t i = 0; i < a->n; i++) {
        const float *x = a->x + i * a->x_stride, *dy = a->dy + i * a->dy_stride;
        double r = (double)a->rstd[i], dot = 0;
        for (int64_t j = 0; j < a->d; j++) {
            dot += (double)dy[j] * (a->w != NULL ? (double)a->w[j] : 1) * (double)x[j];
        }
        for (int64_t j = 0; j < a->d; j++) {
            double d = (double)dy[j], g = d * (a->w != NULL ? (double)a->w[j] : 1);
            if (a->dw != NULL) {
                a->dw[j] += (float)(d * (double)x[j] * r);
            }
            a->dx[i * a->dx_stride + j] = (float)(r * g - r * r * r * dot / (double)a->d * (double)x[j]);
        }
    }
    return TSR_OK;
}

tsr_status tsr_cpu_rmsnorm_gated_fwd(tsr_queue *q, const tsr_rmsnorm_gated_fwd_args *a)
{
    (void)q;
    for (int64_t i = 0; i < a->n; i++) {
        const float *x = a->x + i * a->d, *g = a->g + i * a->d;
        double r = 1 / sqrt(sum_squares(x, a->d) / (double)a->d + (double)a->eps);
        for (int64_t j = 0; j < a->d; j++) {
            a->y[i * a->d + j] = (float)((double)x[j] * r * (double)a->w[j] / (1 + exp(-(double)g[j])));
        }
        if (a->rstd != NULL) {
            a->rstd[i] = (float)r;
        }
    }
    return TSR_OK;
}

tsr_status tsr_cpu_rmsnorm_gated_bwd(tsr_queue *q, const tsr_rmsnorm_gated_bwd_args *a)
{
    (void)q;
    for (int64_t i = 0; i < a->n; i++) {
        const float *x = a->x + i * a->d, *g = a->g + i * a->d, *dy = a->dy + i * a->d;
        double r = (double)a->rstd[i], dot = 0;
        for (int64_t j = 0; j < a->d; j++) {
            dot += (double)dy[j] / (1 + exp(-(double)g[j])) * (double)a->w[j] * (double)x[j];
        }
        for (int64_t j = 0; j < a->d; j++) {
            double s = 1 / (1 + exp(-(double)g[j])), d = (double)dy[j], w = (double)a->w[j],
                   xj = (double)x[j];
            a->dg[i * a->d + j] = (float)(d * xj * r * w * s * (1 - s));
            a->dw[j] += (float)(d * xj * r * s);
            a->dx[i * a->d + j] = (float)(r * d * s * w - r * r * r * dot / (double)a->d * xj);
        }
    }
    return TSR_OK;
}

tsr_status tsr_cpu_l2norm_fwd(tsr_queue *q, const tsr_l2norm_fwd_args *a)
{
    (void)q;
    for (int64_t i = 0; i < a->n; i++) {
        const float *x = a->x + i * a->d;
        double r = 1 / sqrt(sum_squares(x, a->d) + (double)a->eps);
        for (int64_t j = 0; j < a->d; j++) {
            a->y[i * a->d + j] = (float)((double)x[j] * r * (double)a->scale);
        }
        if (a->rstd != NULL) {
            a->rstd[i] = (float)r;
        }
    }
    return TSR_OK;
}

tsr_status tsr_cpu_l2norm_bwd(tsr_queue *q, const tsr_l2norm_bwd_args *a)
{
    (void)q;
    for (int64_t i = 0; i < a->n; i++) {
        const float *x = a->x + i * a->d, *dy = a->dy + i * a->d;
        double r = (double)a->rstd[i], dot = 0;
        for (int64_t j = 0; j < a->d; j++) {
            dot += (double)x[j] * r * (double)dy[j];
        }
        for (int64_t j = 0; j < a->d; j++) {
            a->dx[i * a->d + j] = (float)(r * (double)a->scale * ((double)dy[j] - (double)x[j] * r * dot));
        }
    }
    return TSR_OK;
}
