/* attnres.h - contracts: block attention residuals. See kernels/kernels.h for the conventions. */
#ifndef TSR_KERNELS_OPS_ATTNRES_H
#define TSR_KERNELS_OPS_ATTNRES_H

#include "format/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Sources per token: the s banked vectors bank[s][n][d] (bank_stride elements apart) and cur[n][d].
 *   score_i = <v_i / sqrt(mean v_i^2 + eps), norm * proj>;  p = softmax over the s + 1 scores;  y = sum p_i v_i.
 * p[n][s+1] = (NULL: not kept), rstd[n][s+1] = (NULL: not kept). s >= 1. y may not alias.
 * Source: Attention Residuals (arXiv 2603.15031). */
typedef struct tsr_attnres_fwd_args {
    float *y, *p, *rstd;
    const float *bank, *cur, *norm, *proj;
    int64_t n, d, s, bank_stride;
    float eps;
} tsr_attnres_fwd_args;

/* dbank[s][n][d] += (dbank_stride apart), dcur[n][d] +=, dnorm[d] +=, dproj[d] +=. */
typedef struct tsr_attnres_bwd_args {
    float *dbank, *dcur, *dnorm, *dproj;
    const float *dy, *p, *rstd, *bank, *cur, *norm, *proj;
    int64_t n, d, s, bank_stride, dbank_stride;
} tsr_attnres_bwd_args;

#ifdef __cplusplus
}
#endif
#endif
