/* loss.c - reference: cross-entropy. Plain loops, f64 accumulators. Contracts: kernels/ops/loss.h. */
#include "kernels/backend_priv.h"

#include <math.h>

tsr_status tsr_cpu_xent_fwd(tsr_queue *q, const tsr_xent_fwd_args *a)
{
    (void)q;
    for (int64_t i = 0; i < a->n; i++) {
        const float *x = a->logits + i * a->v;
        double most = -INFINITY, sum = 0;
        for (int64_t j = 0; j < a->v; j++) {
            most = (double)x[j] > most ? (double)x[j] : most;
        }
        for (int64_t j = 0; j < a->v; j++) {
            sum += exp((double)x[j] - most);
        }
        double lse = most + log(sum);
        a->lse[i] = (float)lse;
        a->loss[i] = a->target[i] >= 0 ? (float)(lse - (double)x[a->target[i]]) : 0;
    }
    return TSR_OK;
}

tsr_status tsr_cpu_xent_bwd(tsr_queue *q, const tsr_xent_bwd_args *a)
{
    (void)q;
    for (int64_t i = 0; i < a->n; i++) {
        for (int64_t j = 0; j < a->v; j++) {
            double p = exp((double)a->logits[i * a->v + j] - (double)a->lse[i]) - (j == a->target[i] ? 1 : 0);
            a->dlogits[i * a->v + j] = a->target[i] >= 0 ? (float)((double)a->scale * p) : 0;
        }
    }
    return TSR_OK;
}
