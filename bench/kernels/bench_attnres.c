/* bench_attnres.c - benchmarks of kernels/ops/attnres.h. */
#include "bench/kernels/bench_kernels.h"

BK_DEFINE(attnres_fwd)
BK_DEFINE(attnres_bwd)

enum { TOKENS = 256, D = 7168, BANKED = 8, ROW = TOKENS * D };
static const double sources = (double)ROW * (BANKED + 1);

void bk_attnres_fwd(bk *b)
{
    tsr_attnres_fwd_args a = { .n = TOKENS, .d = D, .s = BANKED, .bank_stride = ROW, .eps = 1e-5f };
    a.y = bk_f32(b, ROW, 1);
    a.p = bk_f32(b, TOKENS * (BANKED + 1), 1);
    a.rstd = bk_f32(b, TOKENS * (BANKED + 1), 1);
    a.bank = bk_f32(b, (int64_t)BANKED * ROW, 1);
    a.cur = bk_f32(b, ROW, 1);
    a.norm = bk_f32(b, D, 1);
    a.proj = bk_f32(b, D, 0.01f);
    BK_TIME(b, attnres_fwd, "256 x 7168 of 9", 6 * sources, 4 * sources + 4.0 * ROW, &a);
}

void bk_attnres_bwd(bk *b)
{
    tsr_attnres_bwd_args a = { .n = TOKENS, .d = D, .s = BANKED, .bank_stride = ROW, .dbank_stride = ROW };
    a.dbank = bk_f32(b, (int64_t)BANKED * ROW, 1);
    a.dcur = bk_f32(b, ROW, 1);
    a.dnorm = bk_f32(b, D, 1);
    a.dproj = bk_f32(b, D, 1);
    a.dy = bk_f32(b, ROW, 1);
    a.p = bk_f32(b, TOKENS * (BANKED + 1), 1);
    a.rstd = bk_f32(b, TOKENS * (BANKED + 1), 1);
    a.bank = bk_f32(b, (int64_t)BANKED * ROW, 1);
    a.cur = bk_f32(b, ROW, 1);
    a.norm = bk_f32(b, D, 1);
    a.proj = bk_f32(b, D, 0.01f);
    BK_TIME(b, attnres_bwd, "256 x 7168 of 9", 15 * sources, 12 * sources + 4.0 * ROW, &a);
}
