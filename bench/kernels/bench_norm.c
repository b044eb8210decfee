/* bench_norm.c - benchmarks of kernels/ops/norm.h. */
#include "bench/kernels/bench_kernels.h"

BK_DEFINE(rmsnorm_fwd)
BK_DEFINE(rmsnorm_bwd)
BK_DEFINE(rmsnorm_gated_fwd)
BK_DEFINE(rmsnorm_gated_bwd)
BK_DEFINE(l2norm_fwd)
BK_DEFINE(l2norm_bwd)

/* Hidden states of a block of tokens; heads of as many. */
enum { ROWS = 2048, D = 7168, ALL = ROWS * D, HEAD = 128, HEADS = ALL / HEAD };
static const double one = (double)ALL;

void bk_rmsnorm_fwd(bk *b)
{
    tsr_rmsnorm_fwd_args a = { bk_f32(b, ALL, 1), bk_f32(b, ROWS, 1), bk_f32(b, ALL, 1), bk_f32(b, D, 1), ROWS, D, D, D, 1e-5f };
    BK_TIME(b, rmsnorm_fwd, "2048 x 7168", 4 * one, 8 * one, &a);
    a.n = 1;
    BK_TIME(b, rmsnorm_fwd, "1 x 7168", 4.0 * D, 12.0 * D, &a);
}

void bk_rmsnorm_bwd(bk *b)
{
    tsr_rmsnorm_bwd_args a = { .dx = bk_f32(b, ALL, 1), .dw = bk_f32(b, D, 1), .n = ROWS, .d = D };
    a.dy = bk_f32(b, ALL, 1);
    a.x = bk_f32(b, ALL, 1);
    a.w = bk_f32(b, D, 1);
    a.rstd = bk_f32(b, ROWS, 1);
    a.x_stride = a.dx_stride = a.dy_stride = D;
    BK_TIME(b, rmsnorm_bwd, "2048 x 7168", 10 * one, 12 * one, &a);
}

void bk_rmsnorm_gated_fwd(bk *b)
{
    tsr_rmsnorm_gated_fwd_args a = { .y = bk_f32(b, ALL, 1), .rstd = bk_f32(b, HEADS, 1), .n = HEADS, .d = HEAD, .eps = 1e-5f };
    a.x = bk_f32(b, ALL, 1);
    a.g = bk_f32(b, ALL, 1);
    a.w = bk_f32(b, HEAD, 1);
    BK_TIME(b, rmsnorm_gated_fwd, "114688 x 128", 15 * one, 12 * one, &a);
}

void bk_rmsnorm_gated_bwd(bk *b)
{
    tsr_rmsnorm_gated_bwd_args a = { .dx = bk_f32(b, ALL, 1), .dg = bk_f32(b, ALL, 1), .n = HEADS, .d = HEAD };
    a.dw = bk_f32(b, HEAD, 1);
    a.dy = bk_f32(b, ALL, 1);
    a.x = bk_f32(b, ALL, 1);
    a.g = bk_f32(b, ALL, 1);
    a.w = bk_f32(b, HEAD, 1);
    a.rstd = bk_f32(b, HEADS, 1);
    BK_TIME(b, rmsnorm_gated_bwd, "114688 x 128", 40 * one, 20 * one, &a);
}

void bk_l2norm_fwd(bk *b)
{
    tsr_l2norm_fwd_args a = { bk_f32(b, ALL, 1), bk_f32(b, HEADS, 1), bk_f32(b, ALL, 1), HEADS, HEAD, 1e-6f, 1 };
    BK_TIME(b, l2norm_fwd, "114688 x 128", 3 * one, 8 * one, &a);
}

void bk_l2norm_bwd(bk *b)
{
    tsr_l2norm_bwd_args a = { bk_f32(b, ALL, 1), bk_f32(b, ALL, 1), bk_f32(b, ALL, 1), bk_f32(b, HEADS, 1), HEADS, HEAD, 1 };
    BK_TIME(b, l2norm_bwd, "114688 x 128", 5 * one, 12 * one, &a);
}
