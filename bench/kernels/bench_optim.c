/* bench_optim.c - benchmarks of kernels/ops/optim.h. */
#include "bench/kernels/bench_kernels.h"

#include <stdio.h>

BK_DEFINE(adamw)
BK_DEFINE(muon)

void bk_adamw(bk *b)
{
    int64_t n = 1 << 24;
    tsr_adamw_args a = { .w = bk_f32(b, n, 1),
                         .m = bk_f32(b, n, 0),
                         .v = bk_f32(b, n, 0),
                         .g = bk_f32(b, n, 1),
                         .n = n,
                         .t = 3,
                         .lr = 1e-3,
                         .b1 = 0.9,
                         .b2 = 0.95,
                         .eps = 1e-8,
                         .decay = 0.1,
                         .grad_scale = 1 };
    BK_TIME(b, adamw, "16 Mi", 15.0 * (double)n, 28.0 * (double)n, &a);
}

void bk_muon(bk *b)
{
    static const int64_t shapes[][3] = { { 1, 512, 512 }, { 8, 128, 2304 }, { 1, 1024, 2304 } };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        int64_t count = shapes[i][0], rows = shapes[i][1], cols = shapes[i][2], n = count * rows * cols;
        tsr_muon_args a = { .w = bk_f32(b, n, 1),
                            .m = bk_f32(b, n, 1),
                            .g = bk_f32(b, n, 1),
                            .count = count,
                            .rows = rows,
                            .cols = cols,
                            .lr = 1e-3,
                            .mu = 0.95,
                            .decay = 0.1,
                            .grad_scale = 1,
                            .nesterov = true };
        char what[64];
        (void)snprintf(what, sizeof what, "%lld x %lld x %lld", (long long)count, (long long)rows,
                       (long long)cols);
        a.workspace_bytes = tsr_muon_workspace(&a);
        a.workspace = bk_bytes(b, a.workspace_bytes);
        /* Products with and of symmetric matrices, counted whole; half of two of the three is saved. */
        double flops = 5 * 2.0 * (double)count * (double)rows * (double)rows * (double)(2 * cols + rows);
        BK_TIME(b, muon, what, flops, 20.0 * (double)n, &a);
    }
}
