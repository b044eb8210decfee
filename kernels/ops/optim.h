/* optim.h - contracts: optimizer updates. See kernels/kernels.h for the conventions. */
#ifndef TSR_KERNELS_OPS_OPTIM_H
#define TSR_KERNELS_OPS_OPTIM_H

#include "format/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
 * w = w (1 - lr decay) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps), g scaled by grad_scale first.
 * w, m, v [n] in and out. Source: Loshchilov and Hutter, arXiv 1711.05101. */
typedef struct tsr_adamw_args {
    float *w, *m, *v;
    const float *g;
    int64_t n, t; /* t: from 1 */
    double lr, b1, b2, eps, decay, grad_scale;
} tsr_adamw_args;

/* count independent matrices [rows][cols], one behind the other (heads, experts).
 * m = mu m + g; u = NewtonSchulz(nesterov ? g + mu m : m); w = w (1 - lr decay) - lr u 0.2 sqrt(max(rows, cols)).
 * Newton-Schulz: x = u / (|u| + 1e-7), transposed when rows > cols; five times A = x x^T,
 * x = 3.4445 x + (-4.7750 A + 2.0315 A A) x. g scaled by grad_scale first.
 * scale_dim 0: max(rows, cols); else this number stands under the root. workspace: tsr_muon_workspace bytes.
 * Source: K. Jordan et al., Muon (2024); Moonlight, arXiv 2502.16982. */
typedef struct tsr_muon_args {
    float *w, *m;
    const float *g;
    int64_t count, rows, cols, scale_dim;
    double lr, mu, decay, grad_scale;
    bool nesterov;
    void *workspace;
    size_t workspace_bytes;
} tsr_muon_args;
size_t tsr_muon_workspace(const tsr_muon_args *a);

#ifdef __cplusplus
}
#endif
#endif
