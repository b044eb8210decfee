/* bench_balance.c - benchmarks of kernels/ops/balance.h: what runs every step, on 896 experts and 1000 bins. */
#include "bench/kernels/bench_kernels.h"

#include <string.h>

enum { E = 896, K = 16, BINS = 1000, N = 4096 };

BK_DEFINE(balance_count)
BK_DEFINE(balance_solve)

void bk_balance_count(bk *b)
{
    tsr_balance_count_args a = { .hist = bk_bytes(b, (size_t)E * BINS * sizeof(int64_t)),
                                 .s = bk_f32(b, N * E, 1),
                                 .bias = bk_f32(b, E, 0.1f),
                                 .n = N,
                                 .e = E,
                                 .k = K,
                                 .bins = BINS,
                                 .low = -1.1,
                                 .high = 1.1 };
    BK_TIME(b, balance_count, "4096 x 896, 1000 bins", 0, N * E * 4.0 + 16.0 * E * BINS, &a);
}

void bk_balance_solve(bk *b)
{
    int64_t *hist = bk_bytes(b, (size_t)E * BINS * sizeof(int64_t));
    tsr_status st = b->be->zero(b->be, hist, (size_t)E * BINS * sizeof(int64_t));
    TSR_ASSERT(st == TSR_OK);
    tsr_balance_solve_args a = { .bias = bk_f32(b, E, 0),
                                 .hist = hist,
                                 .tokens = N,
                                 .e = E,
                                 .k = K,
                                 .bins = BINS,
                                 .low = -1.1,
                                 .high = 1.1,
                                 .centre = true };
    BK_TIME(b, balance_solve, "896 x 1000 bins", 0, 8.0 * E * BINS, &a);
}
