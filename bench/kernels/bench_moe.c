/* bench_moe.c - benchmarks of kernels/ops/moe.h: 896 experts, 16 of them chosen, rows of the latent width. */
#include "bench/kernels/bench_kernels.h"

#include <stdlib.h>

enum { E = 896, K = 16, D = 3584 };

BK_DEFINE(router_fwd)
BK_DEFINE(router_bwd)
BK_DEFINE(moe_plan)
BK_DEFINE(moe_gather)
BK_DEFINE(moe_scatter)
BK_DEFINE(moe_combine_fwd)
BK_DEFINE(moe_combine_bwd)

/* Different experts for every token. */
static int32_t *ids_of(bk *b, int64_t n)
{
    int32_t *h = malloc((size_t)(n * K) * sizeof *h);
    uint64_t s = 12345;
    for (int64_t i = 0; i < n; i++) {
        s = s * 6364136223846793005u + 1442695040888963407u;
        for (int64_t j = 0; j < K; j++) {
            h[i * K + j] = (int32_t)((s >> 33) % (E / K) + (uint64_t)j * (E / K));
        }
    }
    int32_t *p = bk_copy(b, h, (size_t)(n * K) * sizeof *h);
    free(h);
    return p;
}

static tsr_moe_plan_args plan_of(bk *b, int64_t n)
{
    tsr_moe_plan_args a = { .offset = bk_bytes(b, (E + 1) * sizeof(int64_t)),
                            .order = bk_bytes(b, (size_t)(n * K) * 4),
                            .pos = bk_bytes(b, (size_t)(n * K) * 4),
                            .ids = ids_of(b, n),
                            .n = n,
                            .e = E,
                            .k = K };
    tsr_status st = tsr_moe_plan(b->be, &a);
    TSR_ASSERT(st == TSR_OK);
    return a;
}

void bk_router_fwd(bk *b)
{
    for (int64_t n = 1; n <= 4096; n *= 4096) {
        tsr_router_fwd_args a = { .s = bk_f32(b, n * E, 1),
                                  .w = bk_f32(b, n * K, 1),
                                  .ids = ids_of(b, n),
                                  .logits = bk_f32(b, n * E, 4),
                                  .bias = bk_f32(b, E, 0.1f),
                                  .n = n,
                                  .e = E,
                                  .k = K,
                                  .scale = 1,
                                  .normalise = true };
        BK_TIME(b, router_fwd, n == 1 ? "1 x 896, 16" : "4096 x 896, 16", 0, (double)n * (2 * E + 2 * K) * 4,
                &a);
    }
}

void bk_router_bwd(bk *b)
{
    int64_t n = 4096;
    tsr_router_bwd_args a = { .dlogits = bk_f32(b, n * E, 1),
                              .dw = bk_f32(b, n * K, 1),
                              .s = bk_f32(b, n * E, 1),
                              .w = bk_f32(b, n * K, 1),
                              .ids = ids_of(b, n),
                              .n = n,
                              .e = E,
                              .k = K,
                              .scale = 1,
                              .normalise = true };
    BK_TIME(b, router_bwd, "4096 x 896, 16", 0, (double)n * (E + 3 * K) * 4, &a);
}

void bk_moe_plan(bk *b)
{
    tsr_moe_plan_args one = plan_of(b, 1), many = plan_of(b, 65536);
    BK_TIME(b, moe_plan, "1 x 16 of 896", 0, 16 * 12.0, &one);
    BK_TIME(b, moe_plan, "65536 x 16 of 896", 0, 65536 * 16 * 12.0, &many);
}

void bk_moe_gather(bk *b)
{
    for (int64_t n = 1; n <= 1024; n *= 1024) {
        tsr_moe_plan_args p = plan_of(b, n);
        tsr_moe_gather_args a = { bk_f32(b, n * K * D, 1), bk_f32(b, n * D, 1), p.order, n, K, D };
        BK_TIME(b, moe_gather, n == 1 ? "1 x 16 x 3584" : "1024 x 16 x 3584", 0, (double)n * (K + 1) * D * 4,
                &a);
    }
}

void bk_moe_scatter(bk *b)
{
    int64_t n = 1024;
    tsr_moe_plan_args p = plan_of(b, n);
    tsr_moe_scatter_args a = { bk_f32(b, n * D, 1), bk_f32(b, n * K * D, 1), p.pos, n, K, D };
    BK_TIME(b, moe_scatter, "1024 x 16 x 3584", (double)n * K * D, (double)n * (K + 1) * D * 4, &a);
}

void bk_moe_combine_fwd(bk *b)
{
    for (int64_t n = 1; n <= 1024; n *= 1024) {
        tsr_moe_plan_args p = plan_of(b, n);
        tsr_moe_combine_fwd_args a = {
            bk_f32(b, n * D, 1), bk_f32(b, n * K * D, 1), bk_f32(b, n * K, 1), p.pos, n, K, D
        };
        BK_TIME(b, moe_combine_fwd, n == 1 ? "1 x 16 x 3584" : "1024 x 16 x 3584", 2.0 * (double)n * K * D,
                (double)n * (K + 1) * D * 4, &a);
    }
}

void bk_moe_combine_bwd(bk *b)
{
    int64_t n = 1024;
    tsr_moe_plan_args p = plan_of(b, n);
    tsr_moe_combine_bwd_args a = { bk_f32(b, n * K * D, 1),
                                   bk_f32(b, n * K, 1),
                                   bk_f32(b, n * D, 1),
                                   bk_f32(b, n * K * D, 1),
                                   bk_f32(b, n * K, 1),
                                   p.pos,
                                   n,
                                   K,
                                   D };
    BK_TIME(b, moe_combine_bwd, "1024 x 16 x 3584", 3.0 * (double)n * K * D, (double)n * (2 * K + 1) * D * 4,
            &a);
}
