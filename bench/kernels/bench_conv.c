/* bench_conv.c - benchmarks of kernels/ops/conv.h. */
#include "bench/kernels/bench_kernels.h"

enum { C = 12288, KW = 4 };

BK_DEFINE(conv_fwd)
BK_DEFINE(conv_bwd)

/* Flops: a fused multiply-add per tap, and about ten operations of a sigmoid. */
void bk_conv_fwd(bk *b)
{
    static const int64_t seg[2][2] = { { 0, 512 }, { 0, 1 } };
    static const char *const what[] = { "512 tokens x 12288", "1 token x 12288" };
    for (int i = 0; i < 2; i++) {
        int64_t n = seg[i][1];
        tsr_conv_fwd_args a = { .n = n, .c = C, .kw = KW, .segs = 1, .x_stride = C, .y_stride = C };
        a.x = bk_f32(b, n * C, 1.0f);
        a.y = bk_f32(b, n * C, 1.0f);
        a.w = bk_f32(b, (int64_t)C * KW, 1.0f);
        a.state = bk_f32(b, (int64_t)C * (KW - 1), 1.0f);
        a.seg = bk_copy(b, seg[i], sizeof seg[i]);
        double rows = (double)(2 * n + KW + 2 * (KW - 1));
        BK_TIME(b, conv_fwd, what[i], (double)n * C * (2 * KW + 10), rows * C * 4, &a);
    }
}

void bk_conv_bwd(bk *b)
{
    static const int64_t seg[2] = { 0, 512 };
    int64_t n = seg[1];
    tsr_conv_bwd_args a = {
        .n = n, .c = C, .kw = KW, .segs = 1, .x_stride = C, .dy_stride = C, .dx_stride = C
    };
    a.x = bk_f32(b, n * C, 1.0f);
    a.dy = bk_f32(b, n * C, 1.0f);
    a.dx = bk_f32(b, n * C, 1.0f);
    a.w = bk_f32(b, (int64_t)C * KW, 1.0f);
    a.dw = bk_f32(b, (int64_t)C * KW, 0.0f);
    a.seg = bk_copy(b, seg, sizeof seg);
    BK_TIME(b, conv_bwd, "512 tokens x 12288", (double)n * C * (6 * KW + 14),
            (double)(3 * n + 2 * KW) * C * 4, &a);
}
