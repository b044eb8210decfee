/* loss.c - cross-entropy, by vectors: a piece of work is a row. Contracts: kernels/ops/loss.h. */
#include "kernels/simd/simd.h"

#include <math.h>

/* Exponentials are summed in f32 over so many elements, beyond in f64. */
#define RUN 1024

static double sum_exp(const float *x, int64_t v, float most)
{
    double sum = 0;
    for (int64_t j = 0; j < v; j += RUN) {
        int64_t end = v - j < RUN ? v : j + RUN, k = j;
        vf s = v_zero();
        for (; k + VL <= end; k += VL) {
            s = s + v_exp(v_load(x + k) - v_set1(most));
        }
        sum += (double)v_sum(s);
        for (; k < end; k++) {
            sum += (double)expf(x[k] - most);
        }
    }
    return sum;
}

static void row_fwd(void *payload, int64_t i, int worker)
{
    const tsr_xent_fwd_args *a = payload;
    const float *x = a->logits + i * a->v;
    float most = -INFINITY;
    (void)worker;
    int64_t j = 0;
    if (a->v >= VL) {
        vf m = v_load(x);
        for (j = VL; j + VL <= a->v; j += VL) {
            m = v_max(m, v_load(x + j));
        }
        float lane[VL];
        v_store(lane, m);
        for (int k = 0; k < VL; k++) {
            most = lane[k] > most ? lane[k] : most;
        }
    }
    for (; j < a->v; j++) {
        most = x[j] > most ? x[j] : most;
    }
    double lse = (double)most + log(sum_exp(x, a->v, most));
    a->lse[i] = (float)lse;
    a->loss[i] = a->target[i] >= 0 ? (float)(lse - (double)x[a->target[i]]) : 0;
}

tsr_status TSR_SIMD(xent_fwd)(tsr_queue *q, const tsr_xent_fwd_args *a)
{
    tsr_parallel(q, a->n, row_fwd, (void *)(uintptr_t)a);
    return TSR_OK;
}

static void row_bwd(void *payload, int64_t i, int worker)
{
    const tsr_xent_bwd_args *a = payload;
    const float *x = a->logits + i * a->v;
    float *d = a->dlogits + i * a->v;
    (void)worker;
    if (a->target[i] < 0) {
        memset(d, 0, (size_t)a->v * sizeof *d);
        return;
    }
    vf lse = v_set1(a->lse[i]), scale = v_set1(a->scale);
    for (int64_t j = 0; j < a->v; j += VL) {
        if (a->v - j >= VL) {
            v_store(d + j, scale * v_exp(v_load(x + j) - lse));
        } else {
            v_store_n(d + j, scale * v_exp(v_load_n(x + j, a->v - j) - lse), a->v - j);
        }
    }
    d[a->target[i]] -= a->scale;
}

tsr_status TSR_SIMD(xent_bwd)(tsr_queue *q, const tsr_xent_bwd_args *a)
{
    tsr_parallel(q, a->n, row_bwd, (void *)(uintptr_t)a);
    return TSR_OK;
}
