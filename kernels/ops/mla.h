/* mla.h - contracts: multi-head latent attention. See kernels/kernels.h for the conventions. */
#ifndef TSR_KERNELS_OPS_MLA_H
#define TSR_KERNELS_OPS_MLA_H

#include "format/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Expanded form, causal inside each segment (segments as in ops/conv.h), no positions before it.
 *   q [n][h][dn+dr]; kv [n][h][dn+dv] (k part first); kr [n][dr], rows kr_stride apart, shared by the heads
 *   logit = scale (<q[:dn], k> + <q[dn:], kr>);  o[n][h][dv] = softmax . v
 * lse[n][h] = log sum exp of the logits (NULL: not kept). max_logit [h] = max(max_logit, logits) when not NULL (for
 * QK-clip). Online softmax: memory does not grow with the square of n. */
typedef struct tsr_mla_fwd_args {
    float *o, *lse, *max_logit;
    const float *q, *kv, *kr;
    const int64_t *seg;
    int64_t n, h, dn, dr, dv, segs, kr_stride;
    float scale;
} tsr_mla_fwd_args;

/* dq [n][h][dn+dr] =, dkv [n][h][dn+dv] =, dkr [n][dr] = (rows dkr_stride apart). */
typedef struct tsr_mla_bwd_args {
    float *dq, *dkv, *dkr;
    const float *dout, *o, *lse, *q, *kv, *kr;
    const int64_t *seg;
    int64_t n, h, dn, dr, dv, segs, kr_stride, dkr_stride;
    float scale;
} tsr_mla_bwd_args;

/* Absorbed form over the compressed cache: one sequence, n new tokens at positions past .. past+n-1.
 *   q [n][h][r+dr]: q[:r] = W_UK^T q_nope;  cache [past+n][r+dr] (c after its norm, then kr), f32 or bf16
 *   logit_s = scale <q, cache[s]>, s <= past + row;  ctx[n][h][r] = sum softmax cache[s][:r]
 * The new tokens' rows are in the cache already. Heads share each cache row: it is read once per block of heads. */
typedef struct tsr_mla_absorbed_args {
    float *ctx;
    const float *q;
    const void *cache;
    int64_t n, h, r, dr, past;
    tsr_dtype dtype;
    float scale;
} tsr_mla_absorbed_args;

#ifdef __cplusplus
}
#endif
#endif
