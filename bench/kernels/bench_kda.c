/* bench_kda.c - benchmarks of kernels/ops/kda.h. */
#include "bench/kernels/bench_kernels.h"

#include <stdio.h>

BK_DEFINE(kda_gate_fwd)
BK_DEFINE(kda_gate_bwd)
BK_DEFINE(kda_step)
BK_DEFINE(kda_fwd)
BK_DEFINE(kda_bwd)

enum { D = 128 };

void bk_kda_gate_fwd(bk *b)
{
    tsr_kda_gate_fwd_args a = { .n = 512, .h = 96, .d = D };
    int64_t all = a.n * a.h * a.d;
    a.g = bk_f32(b, all, 1.0f);
    a.z = bk_f32(b, all, 4.0f);
    a.dt_bias = bk_f32(b, a.h * a.d, 1.0f);
    a.a_log = bk_f32(b, a.h, 0.5f);
    a.lower = -5.0f;
    BK_TIME(b, kda_gate_fwd, "512 x 96 x 128, bounded", 12.0 * (double)all, 8.0 * (double)all, &a);
    a.lower = 0.0f;
    BK_TIME(b, kda_gate_fwd, "512 x 96 x 128, unbounded", 20.0 * (double)all, 8.0 * (double)all, &a);
}

void bk_kda_gate_bwd(bk *b)
{
    tsr_kda_gate_bwd_args a = { .n = 512, .h = 96, .d = D, .lower = -5.0f };
    int64_t all = a.n * a.h * a.d;
    a.dz = bk_f32(b, all, 1.0f);
    a.dg = bk_f32(b, all, 1.0f);
    a.z = bk_f32(b, all, 4.0f);
    a.dt_bias = bk_f32(b, a.h * a.d, 1.0f);
    a.a_log = bk_f32(b, a.h, 0.5f);
    a.ddt_bias = bk_f32(b, a.h * a.d, 1.0f);
    a.da_log = bk_f32(b, a.h, 1.0f);
    BK_TIME(b, kda_gate_bwd, "512 x 96 x 128, bounded", 18.0 * (double)all, 12.0 * (double)all, &a);
}

/* A token needs seven flops per number of the state; it reads and writes the state when there is one token. */
void bk_kda_step(bk *b)
{
    static const int64_t seg[2][2] = { { 0, 1 }, { 0, 4096 } };
    for (int i = 0; i < 2; i++) {
        tsr_kda_step_args a = { .n = seg[i][1], .h = i == 0 ? 96 : 4, .dk = D, .dv = D, .segs = 1 };
        int64_t rows = a.n * a.h;
        a.o = bk_f32(b, rows * D, 1.0f);
        a.state = bk_f32(b, a.h * D * D, 0.1f);
        a.q = bk_f32(b, rows * D, 0.01f);
        a.k = bk_f32(b, rows * D, 0.1f);
        a.v = bk_f32(b, rows * D, 1.0f);
        a.g = bk_f32(b, rows * D, 0.0f);
        a.beta = bk_f32(b, rows, 0.5f);
        a.seg = bk_copy(b, seg[i], sizeof seg[i]);
        double bytes = 4.0 * (double)(rows * 5 * D + 2 * a.h * D * D);
        BK_TIME(b, kda_step, i == 0 ? "1 token, 96 heads of 128" : "4096 tokens, 4 heads of 128",
                7.0 * (double)(rows * D * D), bytes, &a);
    }
}

static void fill_fwd(bk *b, tsr_kda_fwd_args *a, const int64_t *seg)
{
    int64_t rows = a->n * a->h;
    a->o = bk_f32(b, rows * D, 1.0f);
    a->q = bk_f32(b, rows * D, 0.01f);
    a->k = bk_f32(b, rows * D, 0.1f);
    a->v = bk_f32(b, rows * D, 1.0f);
    float *g = bk_f32(b, rows * D, 1.0f), *beta = bk_f32(b, rows, 0.5f);
    for (int64_t i = 0; b->be->host && i < rows * D; i++) {
        g[i] = -2.5f + 2.5f * g[i];
    }
    for (int64_t i = 0; b->be->host && i < rows; i++) {
        beta[i] += 0.5f;
    }
    a->g = g;
    a->beta = beta;
    a->seg = bk_copy(b, seg, 2 * sizeof *seg);
    a->io = TSR_DT_F32;
    a->bounded = true;
    a->workspace_bytes = tsr_kda_fwd_workspace(a);
    a->workspace = bk_bytes(b, a->workspace_bytes);
}

/* Flops counted as those of the recurrence, so that rates compare with kda_step. */
void bk_kda_fwd(bk *b)
{
    for (int i = 0; i < 7; i++) {
        static const int64_t seg[][2] = { { 0, 4096 }, { 0, 16384 }, { 0, 1 << 20 } };
        const int64_t *length = seg[i == 4 ? 1 : i == 6 ? 2 : 0];
        tsr_kda_fwd_args a = { .h = i == 6 ? 2 : 4, .dk = D, .dv = D, .segs = 1, .chunk = i < 3 ? 16 << i : 64 };
        a.n = length[1];
        fill_fwd(b, &a, length);
        a.bounded = i != 3;
        a.state = i == 5 ? bk_f32(b, a.h * D * D, 0.1f) : NULL;
        a.saved = i == 5 ? bk_f32(b, a.n / 64 * a.h * D * D, 0.1f) : NULL;
        char what[64];
        (void)snprintf(what, sizeof what, "%lld tokens, %lld heads, chunk %lld%s%s", (long long)a.n,
                       (long long)a.h, (long long)a.chunk, a.bounded ? "" : " unb.", i == 5 ? " saved" : "");
        double work = (double)(a.n * a.h * D);
        BK_TIME(b, kda_fwd, what, 7 * D * work, 20 * work, &a);
    }
}

void bk_kda_bwd(bk *b)
{
    for (int i = 0; i < 4; i++) {
        static const int64_t seg[2] = { 0, 4096 };
        tsr_kda_fwd_args f = {
            .n = 4096, .h = 4, .dk = D, .dv = D, .segs = 1, .chunk = i < 3 ? 16 << i : 64
        };
        fill_fwd(b, &f, seg);
        int64_t rows = f.n * f.h;
        tsr_kda_bwd_args a = { .q = f.q, .k = f.k, .v = f.v, .g = f.g, .beta = f.beta, .seg = f.seg };
        a.n = f.n;
        a.h = f.h;
        a.dk = D;
        a.dv = D;
        a.segs = 1;
        a.chunk = f.chunk;
        a.bounded = i != 3;
        a.dq = bk_f32(b, rows * D, 1.0f);
        a.d_k = bk_f32(b, rows * D, 1.0f);
        a.d_v = bk_f32(b, rows * D, 1.0f);
        a.dg = bk_f32(b, rows * D, 1.0f);
        a.dbeta = bk_f32(b, rows, 1.0f);
        a.dout = bk_f32(b, rows * D, 1.0f);
        a.saved = bk_f32(b, f.n / f.chunk * f.h * D * D, 0.1f);
        a.workspace_bytes = tsr_kda_bwd_workspace(&a);
        a.workspace = bk_bytes(b, a.workspace_bytes);
        char what[64];
        (void)snprintf(what, sizeof what, "4096 tokens, 4 heads, chunk %lld%s", (long long)f.chunk,
                       a.bounded ? "" : " unb.");
        double work = (double)(rows * D);
        BK_TIME(b, kda_bwd, what, 19 * D * work, 40 * work, &a);
    }
}
