/* embed.h - contracts: token embedding. See kernels/kernels.h for the conventions. */
#ifndef TSR_KERNELS_OPS_EMBED_H
#define TSR_KERNELS_OPS_EMBED_H

#include "format/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* y[n][d] = table[ids[n]][d]. table f32 or bf16 [v][d]; ids in [0, v). */
typedef struct tsr_embed_fwd_args {
    float *y;
    const void *table;
    const int32_t *ids;
    int64_t n, d, v;
    tsr_dtype dtype;
} tsr_embed_fwd_args;

/* dtable[ids[n]][d] += dy[n][d], in token order. */
typedef struct tsr_embed_bwd_args {
    float *dtable;
    const float *dy;
    const int32_t *ids;
    int64_t n, d, v;
} tsr_embed_bwd_args;

#ifdef __cplusplus
}
#endif
#endif
