/* balance.h - contracts: balancing experts by quantiles. See kernels/kernels.h for the conventions. */
#ifndef TSR_KERNELS_OPS_BALANCE_H
#define TSR_KERNELS_OPS_BALANCE_H

#include "format/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Exact alternating minimisation of the dual (design of Kimi K3, technical report 2.3.3; J. Su, kexue.fm 11619):
 * scores s[n][e]; `rounds` times: alpha_i = midway between the k-th and (k+1)-th largest of s_i - beta; beta_j = midway
 * between the r-th and (r+1)-th largest of s_:j - alpha, r = n k / e. beta[e] in and out; the router's bias is -beta.
 * n k >= e, k < e. workspace: tsr_balance_exact_workspace bytes. Computed in f64. */
typedef struct tsr_balance_exact_args {
    double *beta;
    const float *s;
    int64_t n, e, k, rounds;
    void *workspace;
    size_t workspace_bytes;
} tsr_balance_exact_args;
size_t tsr_balance_exact_workspace(const tsr_balance_exact_args *a);

/* Histogram of the required bias r_ij = alpha_i - s_ij, alpha_i = the (k+1)-th largest of s_i + bias (added in f32, as
 * the router does), over bins equal bins of [low, high) = [min bias - 1, max bias + 1): hist[e][bins] i64 +=. Values
 * outside go to the end bins; a score that is NaN is never chosen and needs the largest bias. */
typedef struct tsr_balance_count_args {
    int64_t *hist;
    const float *s, *bias;
    int64_t n, e, k, bins;
    double low, high;
} tsr_balance_count_args;

/* New bias from the (summed) histogram: first bin whose cumulative count >= q = tokens k / e, linear inside the bin
 * (high when fewer were counted); then mean-centred when centre. bias[e] =. */
typedef struct tsr_balance_solve_args {
    float *bias;
    const int64_t *hist;
    int64_t tokens, e, k, bins;
    double low, high;
    bool centre;
} tsr_balance_solve_args;

/* The sign rule, for comparison: bias[e] += rate sign(mean load - load[e]). Source: DeepSeek-V3 report 2.1.2. */
typedef struct tsr_balance_sign_args {
    float *bias;
    const int64_t *load;
    int64_t e;
    double rate;
} tsr_balance_sign_args;

#ifdef __cplusplus
}
#endif
#endif
