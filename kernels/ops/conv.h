/* conv.h - contracts: short causal convolution. See kernels/kernels.h for the conventions. */
#ifndef TSR_KERNELS_OPS_CONV_H
#define TSR_KERNELS_OPS_CONV_H

#include "format/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Depthwise causal convolution of kw taps (oldest first, the last multiplies the current token), then SiLU.
 *   u[n][c] = sum_j w[c][j] x[n - kw + 1 + j][c];  y = u sigmoid(u)
 * Tokens are cut into segs segments: segment i is [seg[i], seg[i+1]), seg[0] = 0, seg[segs] = n. History before a
 * segment comes from state[segs][kw-1][c] (oldest first), which then receives the last kw - 1 inputs; NULL: zeros,
 * not kept. y may not alias x. Rows of x and y are stride elements apart. */
typedef struct tsr_conv_fwd_args {
    float *y, *state;
    const float *x, *w;
    const int64_t *seg;
    int64_t n, c, kw, segs, x_stride, y_stride;
} tsr_conv_fwd_args;

/* With zero history: dx[n][c] =, dw[c][kw] +=. dx may not alias dy. */
typedef struct tsr_conv_bwd_args {
    float *dx, *dw;
    const float *dy, *x, *w;
    const int64_t *seg;
    int64_t n, c, kw, segs, x_stride, dy_stride, dx_stride;
} tsr_conv_bwd_args;

#ifdef __cplusplus
}
#endif
#endif
