/* moe.h - contracts: routing, permutation, combination. See kernels/kernels.h for the conventions. */
#ifndef TSR_KERNELS_OPS_MOE_H
#define TSR_KERNELS_OPS_MOE_H

#include "format/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* s[n][e] = sigmoid(logits);  ids[n][k] = the k largest of s + bias, largest first, ties to the lower index;
 * w[n][k] = s of the chosen (no bias), divided by their sum + 1e-20 when normalise, times scale.
 * s may alias logits. Source: Kimi K3 technical report 2.3; DeepSeek-V3 (bias only in the choice). */
typedef struct tsr_router_fwd_args {
    float *s, *w;
    int32_t *ids;
    const float *logits, *bias;
    int64_t n, e, k;
    float scale;
    bool normalise;
} tsr_router_fwd_args;

/* dlogits[n][e] = (zero where not chosen), from dw[n][k]. dlogits may alias s. */
typedef struct tsr_router_bwd_args {
    float *dlogits;
    const float *dw, *s, *w;
    const int32_t *ids;
    int64_t n, e, k;
    float scale;
    bool normalise;
} tsr_router_bwd_args;

/* Slots are numbered t k + j. offset[e+1] = rows of each expert; order[n k] = slot of each row, by expert, then by
 * slot; pos[n k] = row of each slot. */
typedef struct tsr_moe_plan_args {
    int64_t *offset;
    int32_t *order, *pos;
    const int32_t *ids;
    int64_t n, e, k;
} tsr_moe_plan_args;

/* xs[n k][d] = x[order / k][d]. */
typedef struct tsr_moe_gather_args {
    float *xs;
    const float *x;
    const int32_t *order;
    int64_t n, k, d;
} tsr_moe_gather_args;

/* dx[n][d] = sum_j dxs[pos[t k + j]][d] (the gradient of the gather), in the order of j. */
typedef struct tsr_moe_scatter_args {
    float *dx;
    const float *dxs;
    const int32_t *pos;
    int64_t n, k, d;
} tsr_moe_scatter_args;

/* u[n][d] = sum_j w[n][j] y[pos[t k + j]][d], in the order of j. */
typedef struct tsr_moe_combine_fwd_args {
    float *u;
    const float *y, *w;
    const int32_t *pos;
    int64_t n, k, d;
} tsr_moe_combine_fwd_args;

/* dy[row][d] = w du;  dw[n][k] = <du, y[pos]>. dy may alias y. */
typedef struct tsr_moe_combine_bwd_args {
    float *dy, *dw;
    const float *du, *y, *w;
    const int32_t *pos;
    int64_t n, k, d;
} tsr_moe_combine_bwd_args;

#ifdef __cplusplus
}
#endif
#endif
