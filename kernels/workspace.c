/* workspace.c - how much scratch an op wants, from its sizes alone: the same for every host backend. */
#include "kernels/kernels.h"

/* Chunks are worked on in the scratch of the pool's threads. */
size_t tsr_kda_fwd_workspace(const tsr_kda_fwd_args *a)
{
    (void)a;
    return 0;
}

size_t tsr_kda_bwd_workspace(const tsr_kda_bwd_args *a)
{
    (void)a;
    return 0;
}

/* The matrix, x x^T and its square, and a column, in f64; the fast kernels use less. */
size_t tsr_muon_workspace(const tsr_muon_args *a)
{
    size_t low = (size_t)(a->rows < a->cols ? a->rows : a->cols),
           high = (size_t)(a->rows < a->cols ? a->cols : a->rows);
    return (low * high + 2 * low * low + low) * sizeof(double);
}

/* alpha, and one row or column to select from. */
size_t tsr_balance_exact_workspace(const tsr_balance_exact_args *a)
{
    return (size_t)(a->n + (a->n > a->e ? a->n : a->e)) * sizeof(double);
}
