/* bench_elementwise.c - benchmarks of kernels/ops/elementwise.h. */
#include "bench/kernels/bench_kernels.h"

BK_DEFINE(add)
BK_DEFINE(copy2d)
BK_DEFINE(sigmoid_fwd)
BK_DEFINE(sigmoid_bwd)
BK_DEFINE(gate_fwd)
BK_DEFINE(gate_bwd)
BK_DEFINE(glu_fwd)
BK_DEFINE(glu_bwd)
BK_DEFINE(sum_squares)

/* Arrays well beyond the last cache. A sigmoid counts as ten operations, a tanh as twelve. */
enum { N = 1 << 24 };
static const double one = (double)N;

void bk_add(bk *b)
{
    tsr_add_args a = { bk_f32(b, N, 1), bk_f32(b, N, 1), bk_f32(b, N, 1), N };
    BK_TIME(b, add, "16 Mi", one, 12 * one, &a);
}

void bk_copy2d(bk *b)
{
    enum { D = 7168, ROWS = N / D };
    tsr_copy2d_args a = { bk_f32(b, N, 1), bk_f32(b, N, 1), ROWS, D, D, D, TSR_DT_F32 };
    BK_TIME(b, copy2d, "2340 x 7168", 0, 8.0 * ROWS * D, &a);
    a.dtype = TSR_DT_BF16;
    BK_TIME(b, copy2d, "2340 x 7168 to bf16", 0, 6.0 * ROWS * D, &a);
}

void bk_sigmoid_fwd(bk *b)
{
    tsr_sigmoid_fwd_args a = { bk_f32(b, N, 1), bk_f32(b, N, 4), N };
    BK_TIME(b, sigmoid_fwd, "16 Mi", 10 * one, 8 * one, &a);
}

void bk_sigmoid_bwd(bk *b)
{
    tsr_sigmoid_bwd_args a = { bk_f32(b, N, 1), bk_f32(b, N, 1), bk_f32(b, N, 1), N };
    BK_TIME(b, sigmoid_bwd, "16 Mi", 3 * one, 12 * one, &a);
}

void bk_gate_fwd(bk *b)
{
    tsr_gate_fwd_args a = { bk_f32(b, N, 1), bk_f32(b, N, 1), bk_f32(b, N, 4), N };
    BK_TIME(b, gate_fwd, "16 Mi", 11 * one, 12 * one, &a);
}

void bk_gate_bwd(bk *b)
{
    tsr_gate_bwd_args a = { bk_f32(b, N, 1), bk_f32(b, N, 1), bk_f32(b, N, 1), bk_f32(b, N, 1), bk_f32(b, N, 4), N };
    BK_TIME(b, gate_bwd, "16 Mi", 15 * one, 20 * one, &a);
}

void bk_glu_fwd(bk *b)
{
    tsr_glu_fwd_args a = { bk_f32(b, N, 1), bk_f32(b, N, 4), bk_f32(b, N, 4), N, TSR_GLU_SITU, 4, 25 };
    BK_TIME(b, glu_fwd, "16 Mi situ", 40 * one, 12 * one, &a);
    a.kind = TSR_GLU_SWIGLU;
    BK_TIME(b, glu_fwd, "16 Mi swiglu", 12 * one, 12 * one, &a);
}

void bk_glu_bwd(bk *b)
{
    tsr_glu_bwd_args a = { .dg = bk_f32(b, N, 1), .du = bk_f32(b, N, 1), .dy = bk_f32(b, N, 1), .n = N };
    a.g = bk_f32(b, N, 4);
    a.u = bk_f32(b, N, 4);
    a.b1 = 4;
    a.b2 = 25;
    a.kind = TSR_GLU_SITU;
    BK_TIME(b, glu_bwd, "16 Mi situ", 56 * one, 20 * one, &a);
    a.kind = TSR_GLU_SWIGLU;
    BK_TIME(b, glu_bwd, "16 Mi swiglu", 18 * one, 20 * one, &a);
}

void bk_sum_squares(bk *b)
{
    double zero = 0;
    tsr_sum_squares_args a = { bk_copy(b, &zero, sizeof zero), bk_f32(b, N, 1), N };
    BK_TIME(b, sum_squares, "16 Mi", 2 * one, 4 * one, &a);
}
