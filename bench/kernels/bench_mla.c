/* bench_mla.c - benchmarks of kernels/ops/mla.h. */
#include "bench/kernels/bench_kernels.h"

#include <stdio.h>

BK_DEFINE(mla_fwd)
BK_DEFINE(mla_bwd)
BK_DEFINE(mla_absorbed)

static const int64_t whole[2] = { 0, 2048 };

static tsr_mla_fwd_args expanded(bk *b)
{
    tsr_mla_fwd_args a = {
        .n = whole[1], .h = 8, .dn = 128, .dr = 64, .dv = 128, .segs = 1, .kr_stride = 64, .scale = 0.07f
    };
    int64_t rows = a.n * a.h;
    a.q = bk_f32(b, rows * (a.dn + a.dr), 1.0f);
    a.kv = bk_f32(b, rows * (a.dn + a.dv), 1.0f);
    a.kr = bk_f32(b, a.n * a.dr, 1.0f);
    a.seg = bk_copy(b, whole, sizeof whole);
    a.o = bk_f32(b, rows * a.dv, 1.0f);
    a.lse = bk_f32(b, rows, 1.0f);
    return a;
}

/* Pairs of a query and a key it sees, over all heads. */
static double pairs(const tsr_mla_fwd_args *a)
{
    return (double)a->h * (double)a->n * (double)(a->n + 1) / 2;
}

void bk_mla_fwd(bk *b)
{
    tsr_mla_fwd_args a = expanded(b);
    double bytes = 4.0 * (double)(a.n * a.h) * (double)(2 * a.dn + a.dr + 2 * a.dv);
    BK_TIME(b, mla_fwd, "2048 tokens, 8 heads of 128+64", 2 * pairs(&a) * (double)(a.dn + a.dr + a.dv), bytes,
            &a);
}

void bk_mla_bwd(bk *b)
{
    tsr_mla_fwd_args f = expanded(b);
    int64_t rows = f.n * f.h;
    tsr_mla_bwd_args a = { .o = f.o,
                           .lse = f.lse,
                           .q = f.q,
                           .kv = f.kv,
                           .kr = f.kr,
                           .seg = f.seg,
                           .n = f.n,
                           .h = f.h,
                           .dn = f.dn,
                           .dr = f.dr,
                           .dv = f.dv,
                           .segs = 1,
                           .kr_stride = f.dr,
                           .dkr_stride = f.dr,
                           .scale = f.scale };
    a.dq = bk_f32(b, rows * (a.dn + a.dr), 1.0f);
    a.dkv = bk_f32(b, rows * (a.dn + a.dv), 1.0f);
    a.dkr = bk_f32(b, a.n * a.dr, 1.0f);
    a.dout = bk_f32(b, rows * a.dv, 1.0f);
    tsr_status st = tsr_mla_fwd(b->be, &f);
    TSR_ASSERT(st == TSR_OK);
    /* dq, dk, dv, and the logits and dout v once: what any method must compute */
    double flops = 2 * pairs(&f) * (double)(3 * (a.dn + a.dr) + 2 * a.dv);
    BK_TIME(b, mla_bwd, "2048 tokens, 8 heads of 128+64", flops,
            8.0 * (double)rows * (double)(2 * a.dn + a.dr + 2 * a.dv), &a);
}

static void *cached(bk *b, int64_t n, tsr_dtype dtype)
{
    if (dtype == TSR_DT_F32) {
        return bk_f32(b, n, 1.0f);
    }
    uint16_t *x = bk_bytes(b, (size_t)n * sizeof *x);
    for (int64_t i = 0; b->be->host && i < n; i++) {
        x[i] = (uint16_t)((x[i] & 0x80ff) | 0x3f00); /* 0.5 to 2 */
    }
    return x;
}

/* Decoding: the bytes are those of the cache, once. Prefill: a chunk of new tokens. */
void bk_mla_absorbed(bk *b)
{
    static const struct {
        int64_t n, h, r, past;
        tsr_dtype dtype;
    } cases[] = {
        { 1, 8, 128, 65535, TSR_DT_BF16 },   { 1, 8, 128, 262143, TSR_DT_BF16 },
        { 1, 8, 128, 1048575, TSR_DT_BF16 }, { 1, 8, 128, 262143, TSR_DT_F32 },
        { 1, 2, 512, 65535, TSR_DT_BF16 },   { 1, 96, 512, 65535, TSR_DT_BF16 },
        { 512, 8, 128, 0, TSR_DT_BF16 },     { 512, 8, 128, 8192, TSR_DT_BF16 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tsr_mla_absorbed_args a = { .n = cases[i].n,
                                    .h = cases[i].h,
                                    .r = cases[i].r,
                                    .dr = 64,
                                    .past = cases[i].past,
                                    .dtype = cases[i].dtype,
                                    .scale = 0.07f };
        int64_t row = a.r + a.dr, total = a.past + a.n;
        size_t size = a.dtype == TSR_DT_BF16 ? 2 : 4;
        a.ctx = bk_f32(b, a.n * a.h * a.r, 1.0f);
        a.q = bk_f32(b, a.n * a.h * row, 1.0f);
        a.cache = cached(b, total * row, a.dtype);
        char what[64];
        (void)snprintf(what, sizeof what, "%lld new after %lld, %lld x %lld %s", (long long)a.n,
                       (long long)a.past, (long long)a.h, (long long)row, size == 2 ? "bf16" : "f32");
        double seen = (double)a.h * (double)a.n * ((double)a.past + (double)(a.n + 1) / 2);
        BK_TIME(b, mla_absorbed, what, 2 * seen * (double)(row + a.r),
                (double)total * (double)row * (double)size, &a);
    }
}
