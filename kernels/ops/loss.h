/* loss.h - contracts: cross-entropy. See kernels/kernels.h for the conventions. */
#ifndef TSR_KERNELS_OPS_LOSS_H
#define TSR_KERNELS_OPS_LOSS_H

#include "format/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* lse[n] = log sum_v exp(logits[n][v]);  loss[n] = lse - logits[n][target[n]]; 0 where target is negative. */
typedef struct tsr_xent_fwd_args {
    float *loss, *lse;
    const float *logits;
    const int32_t *target;
    int64_t n, v;
} tsr_xent_fwd_args;

/* dlogits[n][v] = scale (exp(logits - lse) - [v == target]); rows with a negative target are 0. dlogits may
 * alias logits. */
typedef struct tsr_xent_bwd_args {
    float *dlogits;
    const float *logits, *lse;
    const int32_t *target;
    int64_t n, v;
    float scale;
} tsr_xent_bwd_args;

#ifdef __cplusplus
}
#endif
#endif
