/* kda.h - contracts: Kimi Delta Attention. See kernels/kernels.h for the conventions. */
#ifndef TSR_KERNELS_OPS_KDA_H
#define TSR_KERNELS_OPS_KDA_H

#include "format/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Log decay per channel. z[n][h][d], dt_bias[h][d], a_log[h]; u = z + dt_bias.
 *   lower < 0:  g = lower * sigmoid(exp(a_log) u)       in (lower, 0)        (Kimi K3)
 *   lower == 0: g = -exp(a_log) * softplus(u)           unbounded            (Kimi-Linear, arXiv 2510.26692)
 * g may alias z. */
typedef struct tsr_kda_gate_fwd_args {
    float *g;
    const float *z, *dt_bias, *a_log;
    int64_t n, h, d;
    float lower;
} tsr_kda_gate_fwd_args;

/* dz[n][h][d] =, ddt_bias[h][d] +=, da_log[h] +=. dz may alias dg. z is the input of the forward op. */
typedef struct tsr_kda_gate_bwd_args {
    float *dz, *ddt_bias, *da_log;
    const float *dg, *z, *dt_bias, *a_log;
    int64_t n, h, d;
    float lower;
} tsr_kda_gate_bwd_args;

/* The recurrence, token by token.
 *   S = diag(exp g) S;  S += beta k (v - S^T k)^T;  o = S^T q
 * q, k, g [n][h][dk]; v, o [n][h][dv]; beta [n][h]; segments as in ops/conv.h; state [segs][h][dk][dv] f32, in and
 * out (never NULL). q comes normalised and scaled, k normalised. o may not alias. */
typedef struct tsr_kda_step_args {
    float *o, *state;
    const float *q, *k, *v, *g, *beta;
    const int64_t *seg;
    int64_t n, h, dk, dv, segs;
} tsr_kda_step_args;

/* The same result chunk by chunk, by matrix products (docs/KDA.md). chunk: 16, 32 or 64 steps; inside it, sub-blocks
 * of 16 steps. bounded: every g >= -5, so that the factors exp(+-(G - G_mid)) of a sub-block stay within e^+-40 and
 * its diagonal block is a plain matrix product; false: diagonal blocks by pairwise differences.
 * io: dtype of q, k and v (F32, or BF16: read as such, computed in f32); g, beta, o, states are f32.
 * state NULL: starts from zero, the end is not kept.
 * saved [chunks][h][dk][dv] = the state before each chunk (NULL: not kept), chunks counted over all segments in
 * order; there are sum over segments of ceil(length / chunk) <= n / chunk + segs of them.
 * workspace: at least tsr_kda_fwd_workspace(a) bytes, contents undefined before and after. */
typedef struct tsr_kda_fwd_args {
    float *o, *state, *saved;
    const void *q, *k, *v;
    const float *g, *beta;
    const int64_t *seg;
    int64_t n, h, dk, dv, segs, chunk;
    tsr_dtype io;
    bool bounded;
    void *workspace;
    size_t workspace_bytes;
} tsr_kda_fwd_args;
/* Depends on the sizes, not on the pointers. The same for all backends of a host; 0 is possible. */
size_t tsr_kda_fwd_workspace(const tsr_kda_fwd_args *a);

/* Gradients for q, k, v, g, beta and the initial state, from do and (may be NULL: zero) dstate, the gradient of
 * the final state. saved: what kda_fwd kept with the same chunk. dstate0 [segs][h][dk][dv] = (NULL: not wanted).
 * dq, dk, dg [n][h][dk] =; dv [n][h][dv] =; dbeta [n][h] =. f32 only. */
typedef struct tsr_kda_bwd_args {
    float *dq, *d_k, *d_v, *dg, *dbeta, *dstate0;
    const float *dout, *dstate;
    const float *q, *k, *v, *g, *beta, *saved;
    const int64_t *seg;
    int64_t n, h, dk, dv, segs, chunk;
    bool bounded;
    void *workspace;
    size_t workspace_bytes;
} tsr_kda_bwd_args;
size_t tsr_kda_bwd_workspace(const tsr_kda_bwd_args *a);

#ifdef __cplusplus
}
#endif
#endif
