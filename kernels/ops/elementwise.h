/* elementwise.h - contracts: elementwise operations and reductions. See kernels/kernels.h for the conventions. */
#ifndef TSR_KERNELS_OPS_ELEMENTWISE_H
#define TSR_KERNELS_OPS_ELEMENTWISE_H

#include "format/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* y[n] = a[n] + b[n]. y may alias a or b. */
typedef struct tsr_add_args {
    float *y;
    const float *a, *b;
    int64_t n;
} tsr_add_args;

/* dst[n][d] = src[n][d], rows dst_stride and src_stride elements apart; src f32, dst f32 or bf16 (dtype). */
typedef struct tsr_copy2d_args {
    void *dst;
    const float *src;
    int64_t n, d, dst_stride, src_stride;
    tsr_dtype dtype;
} tsr_copy2d_args;

/* y[n] = sigmoid(x[n]). y may alias x. */
typedef struct tsr_sigmoid_fwd_args {
    float *y;
    const float *x;
    int64_t n;
} tsr_sigmoid_fwd_args;

/* dx[n] = dy y (1 - y). dx may alias dy. */
typedef struct tsr_sigmoid_bwd_args {
    float *dx;
    const float *dy, *y;
    int64_t n;
} tsr_sigmoid_bwd_args;

/* y[n] = x sigmoid(g). y may alias x. */
typedef struct tsr_gate_fwd_args {
    float *y;
    const float *x, *g;
    int64_t n;
} tsr_gate_fwd_args;

/* dx[n] = dy sigmoid(g);  dg[n] = dy x sigmoid(g) (1 - sigmoid(g)). dx may alias dy. */
typedef struct tsr_gate_bwd_args {
    float *dx, *dg;
    const float *dy, *x, *g;
    int64_t n;
} tsr_gate_bwd_args;

typedef enum tsr_glu { TSR_GLU_SITU, TSR_GLU_SWIGLU } tsr_glu;

/* y[n] = b1 tanh(g / b1) sigmoid(g) b2 tanh(u / b2) (SITU), or g sigmoid(g) u (SWIGLU). y may alias g or u.
 * Source: Kimi K3 technical report, eq. 12. */
typedef struct tsr_glu_fwd_args {
    float *y;
    const float *g, *u;
    int64_t n;
    tsr_glu kind;
    float b1, b2; /* SITU: > 0 */
} tsr_glu_fwd_args;

/* dg[n] =, du[n] =; may alias g, u, dy elementwise. */
typedef struct tsr_glu_bwd_args {
    float *dg, *du;
    const float *dy, *g, *u;
    int64_t n;
    tsr_glu kind;
    float b1, b2;
} tsr_glu_bwd_args;

/* out[0] += sum of x[n]^2, in f64, in an order that depends on n only. */
typedef struct tsr_sum_squares_args {
    double *out;
    const float *x;
    int64_t n;
} tsr_sum_squares_args;

#ifdef __cplusplus
}
#endif
#endif
