/* moe.c - reference: routing and permutation. Contracts: kernels/ops/moe.h. */
#include "kernels/backend_priv.h"

#include <math.h>

/* Larger score first; of equals the lower expert. NaN comes last. */
static bool before(float a, float b)
{
    return a > b || (isnan(b) && !isnan(a));
}

tsr_status tsr_cpu_router_fwd(tsr_queue *q, const tsr_router_fwd_args *a)
{
    float *biased = tsr_scratch(q, 0);
    for (int64_t i = 0; i < a->n; i++) {
        float *s = a->s + i * a->e;
        int32_t *ids = a->ids + i * a->k;
        double sum = 0;
        for (int64_t e = 0; e < a->e; e++) {
            s[e] = (float)(1 / (1 + exp(-(double)a->logits[i * a->e + e])));
            biased[e] = s[e] + a->bias[e];
        }
        int64_t have = 0;
        for (int64_t e = 0; e < a->e; e++) { /* insertion into the k best so far */
            int64_t at = have < a->k ? have++ : a->k;
            if (at == a->k && !before(biased[e], biased[ids[at - 1]])) {
                continue;
            }
            at = at == a->k ? a->k - 1 : at;
            for (; at > 0 && before(biased[e], biased[ids[at - 1]]); at--) {
                ids[at] = ids[at - 1];
            }
            ids[at] = (int32_t)e;
        }
        for (int64_t j = 0; j < a->k; j++) {
            sum += (double)s[ids[j]];
        }
        for (int64_t j = 0; j < a->k; j++) {
            double w = (double)s[ids[j]];
            a->w[i * a->k + j] = (float)((a->normalise ? w / (sum + 1e-20) : w) * (double)a->scale);
        }
    }
    return TSR_OK;
}

/* w_j = scale s_j / sum:  ds_j = scale (dw_j - sum_r dw_r s_r / sum) / sum. */
tsr_status tsr_cpu_router_bwd(tsr_queue *q, const tsr_router_bwd_args *a)
{
    double *keep = tsr_scratch(q, 0);
    for (int64_t i = 0; i < a->n; i++) {
        const float *s = a->s + i * a->e, *dw = a->dw + i * a->k;
        const int32_t *ids = a->ids + i * a->k;
        double sum = 1e-20, dot = 0;
        for (int64_t j = 0; j < a->k; j++) {
            sum += (double)s[ids[j]];
            dot += (double)dw[j] * (double)s[ids[j]];
        }
        for (int64_t j = 0; j < a->k; j++) {
            double x = (double)s[ids[j]], d = (double)dw[j] * (double)a->scale;
            double ds = a->normalise ? ((double)dw[j] - dot / sum) / sum * (double)a->scale : d;
            keep[j] = ds * x * (1 - x);
        }
        for (int64_t e = 0; e < a->e; e++) {
            a->dlogits[i * a->e + e] = 0;
        }
        for (int64_t j = 0; j < a->k; j++) {
            a->dlogits[i * a->e + ids[j]] = (float)keep[j];
        }
    }
    return TSR_OK;
}

tsr_status tsr_cpu_moe_plan(tsr_queue *q, const tsr_moe_plan_args *a)
{
    (void)q;
    for (int64_t e = 0; e <= a->e; e++) {
        a->offset[e] = 0;
    }
    for (int64_t i = 0; i < a->n * a->k; i++) {
        a->offset[a->ids[i] + 1]++;
    }
    for (int64_t e = 0; e < a->e; e++) {
        a->offset[e + 1] += a->offset[e];
    }
    for (int64_t i = 0; i < a->n * a->k; i++) { /* offset[e] runs through the rows of e ... */
        int64_t row = a->offset[a->ids[i]]++;
        a->order[row] = (int32_t)i;
        a->pos[i] = (int32_t)row;
    }
    for (int64_t e = a->e; e > 0; e--) { /* ... and stands at the next one's start: shift back */
        a->offset[e] = a->offset[e - 1];
    }
    a->offset[0] = 0;
    return TSR_OK;
}

tsr_status tsr_cpu_moe_gather(tsr_queue *q, const tsr_moe_gather_args *a)
{
    (void)q;
    for (int64_t r = 0; r < a->n * a->k; r++) {
        for (int64_t j = 0; j < a->d; j++) {
            a->xs[r * a->d + j] = a->x[a->order[r] / a->k * a->d + j];
        }
    }
    return TSR_OK;
}

tsr_status tsr_cpu_moe_scatter(tsr_queue *q, const tsr_moe_scatter_args *a)
{
    (void)q;
    for (int64_t i = 0; i < a->n; i++) {
        for (int64_t c = 0; c < a->d; c++) {
            double s = 0;
            for (int64_t j = 0; j < a->k; j++) {
                s += (double)a->dxs[a->pos[i * a->k + j] * a->d + c];
            }
            a->dx[i * a->d + c] = (float)s;
        }
    }
    return TSR_OK;
}

tsr_status tsr_cpu_moe_combine_fwd(tsr_queue *q, const tsr_moe_combine_fwd_args *a)
{
    (void)q;
    for (int64_t i = 0; i < a->n; i++) {
        for (int64_t c = 0; c < a->d; c++) {
            double s = 0;
            for (int64_t j = 0; j < a->k; j++) {
                s += (double)a->w[i * a->k + j] * (double)a->y[a->pos[i * a->k + j] * a->d + c];
            }
            a->u[i * a->d + c] = (float)s;
        }
    }
    return TSR_OK;
}

tsr_status tsr_cpu_moe_combine_bwd(tsr_queue *q, const tsr_moe_combine_bwd_args *a)
{
    (void)q;
    for (int64_t i = 0; i < a->n * a->k; i++) {
        int64_t row = a->pos[i];
        const float *du = a->du + i / a->k * a->d;
        double dot = 0;
        for (int64_t c = 0; c < a->d; c++) {
            dot += (double)du[c] * (double)a->y[row * a->d + c];
        }
        for (int64_t c = 0; c < a->d; c++) {
            a->dy[row * a->d + c] = a->w[i] * du[c];
        }
        a->dw[i] = (float)dot;
    }
    return TSR_OK;
}
