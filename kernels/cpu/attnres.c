/* attnres.c - reference: attention residuals. Plain loops, f64 accumulators. Contracts: kernels/ops/attnres.h. */
#include "kernels/backend_priv.h"

#include <math.h>

/* Source i of token t. */
static const float *source(const float *bank, const float *cur, int64_t stride, int64_t s, int64_t i,
                           int64_t t, int64_t d)
{
    return i < s ? bank + i * stride + t * d : cur + t * d;
}

tsr_status tsr_cpu_attnres_fwd(tsr_queue *q, const tsr_attnres_fwd_args *a)
{
    double *score = tsr_scratch(q, 0);
    for (int64_t t = 0; t < a->n; t++) {
        double most = -INFINITY, sum = 0;
        for (int64_t i = 0; i <= a->s; i++) {
            const float *v = source(a->bank, a->cur, a->bank_stride, a->s, i, t, a->d);
            double ss = 0, dot = 0;
            for (int64_t j = 0; j < a->d; j++) {
                ss += (double)v[j] * (double)v[j];
                dot += (double)v[j] * (double)a->norm[j] * (double)a->proj[j];
            }
            double r = 1 / sqrt(ss / (double)a->d + (double)a->eps);
            score[i] = dot * r;
            most = score[i] > most ? score[i] : most;
            if (a->rstd != NULL) {
                a->rstd[t * (a->s + 1) + i] = (float)r;
            }
        }
        for (int64_t i = 0; i <= a->s; i++) {
            score[i] = exp(score[i] - most);
            sum += score[i];
        }
        for (int64_t j = 0; j < a->d; j++) {
            double y = 0;
            for (int64_t i = 0; i <= a->s; i++) {
                y += score[i] / sum * (double)source(a->bank, a->cur, a->bank_stride, a->s, i, t, a->d)[j];
            }
            a->y[t * a->d + j] = (float)y;
        }
        for (int64_t i = 0; a->p != NULL && i <= a->s; i++) {
            a->p[t * (a->s + 1) + i] = (float)(score[i] / sum);
        }
    }
    return TSR_OK;
}

/* With n = v rstd and theta = norm proj: score = <theta, n>, ds = p (<dy, v> - <dy, y>),
 * dv = p dy + ds rstd (theta - n score / d), dtheta = ds n. */
tsr_status tsr_cpu_attnres_bwd(tsr_queue *q, const tsr_attnres_bwd_args *a)
{
    double *dot = tsr_scratch(q, 0);
    for (int64_t t = 0; t < a->n; t++) {
        const float *dy = a->dy + t * a->d, *p = a->p + t * (a->s + 1), *rstd = a->rstd + t * (a->s + 1);
        double mean = 0;
        for (int64_t i = 0; i <= a->s; i++) {
            const float *v = source(a->bank, a->cur, a->bank_stride, a->s, i, t, a->d);
            dot[i] = 0;
            for (int64_t j = 0; j < a->d; j++) {
                dot[i] += (double)dy[j] * (double)v[j];
            }
            mean += (double)p[i] * dot[i];
        }
        for (int64_t i = 0; i <= a->s; i++) {
            const float *v = source(a->bank, a->cur, a->bank_stride, a->s, i, t, a->d);
            float *dv = i < a->s ? a->dbank + i * a->dbank_stride + t * a->d : a->dcur + t * a->d;
            double ds = (double)p[i] * (dot[i] - mean), r = (double)rstd[i], score = 0;
            for (int64_t j = 0; j < a->d; j++) {
                score += (double)v[j] * r * (double)a->norm[j] * (double)a->proj[j];
            }
            for (int64_t j = 0; j < a->d; j++) {
                double n = (double)v[j] * r, theta = (double)a->norm[j] * (double)a->proj[j];
                a->dnorm[j] += (float)(ds * n * (double)a->proj[j]);
                a->dproj[j] += (float)(ds * n * (double)a->norm[j]);
                dv[j] += (float)((double)p[i] * (double)dy[j] + ds * r * (theta - n * score / (double)a->d));
            }
        }
    }
    return TSR_OK;
}
