/* norm.h - contracts: norms. See kernels/kernels.h for the conventions. */
#ifndef TSR_KERNELS_OPS_NORM_H
#define TSR_KERNELS_OPS_NORM_H

#include "format/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* rstd[n] = 1 / sqrt(mean_d x^2 + eps);  y[n][d] = x rstd w[d]. Rows x_stride, y_stride elements apart (>= d).
 * w NULL: ones. rstd NULL: not kept. y may alias x when the strides are equal. */
typedef struct tsr_rmsnorm_fwd_args {
    float *y, *rstd;
    const float *x, *w;
    int64_t n, d, x_stride, y_stride;
    float eps;
} tsr_rmsnorm_fwd_args;

/* dx[n][d] =;  dw[d] += (NULL with w NULL). Rows of x, dx, dy at their strides. dx may alias dy when the
 * strides are equal. */
typedef struct tsr_rmsnorm_bwd_args {
    float *dx, *dw;
    const float *dy, *x, *w, *rstd;
    int64_t n, d, x_stride, dx_stride, dy_stride;
} tsr_rmsnorm_bwd_args;

/* y[n][d] = x rstd w[d] sigmoid(g[n][d]): the output norm of KDA, a row per token and head. y may alias x. */
typedef struct tsr_rmsnorm_gated_fwd_args {
    float *y, *rstd;
    const float *x, *g, *w;
    int64_t n, d;
    float eps;
} tsr_rmsnorm_gated_fwd_args;

/* dx[n][d] =, dg[n][d] =, dw[d] +=. dx may alias dy. */
typedef struct tsr_rmsnorm_gated_bwd_args {
    float *dx, *dg, *dw;
    const float *dy, *x, *g, *w, *rstd;
    int64_t n, d;
} tsr_rmsnorm_gated_bwd_args;

/* rstd[n] = 1 / sqrt(sum_d x^2 + eps);  y[n][d] = x rstd scale. rstd NULL: not kept. y may alias x. */
typedef struct tsr_l2norm_fwd_args {
    float *y, *rstd;
    const float *x;
    int64_t n, d;
    float eps, scale;
} tsr_l2norm_fwd_args;

/* dx[n][d] = rstd scale (dy - u <u, dy>), u = x rstd. dx may alias dy. */
typedef struct tsr_l2norm_bwd_args {
    float *dx;
    const float *dy, *x, *rstd;
    int64_t n, d;
    float scale;
} tsr_l2norm_bwd_args;

#ifdef __cplusplus
}
#endif
#endif
