/* bench_embed.c - benchmarks of kernels/ops/embed.h. */
#include "bench/kernels/bench_kernels.h"

BK_DEFINE(embed_fwd)
BK_DEFINE(embed_bwd)

enum { TOKENS = 2048, D = 7168, VOCABULARY = 8192 };

static const int32_t *ids(bk *b)
{
    static int32_t id[TOKENS];
    for (int i = 0; i < TOKENS; i++) {
        id[i] = (int32_t)((uint32_t)i * 2654435761u % VOCABULARY);
    }
    return bk_copy(b, id, sizeof id);
}

void bk_embed_fwd(bk *b)
{
    tsr_embed_fwd_args a = { .n = TOKENS, .d = D, .v = VOCABULARY, .ids = ids(b), .dtype = TSR_DT_BF16 };
    a.y = bk_f32(b, (int64_t)TOKENS * D, 1);
    a.table = bk_bytes(b, (size_t)VOCABULARY * D * 2);
    BK_TIME(b, embed_fwd, "2048 x 7168 from bf16", 0, 6.0 * TOKENS * D, &a);
}

void bk_embed_bwd(bk *b)
{
    tsr_embed_bwd_args a = { .n = TOKENS, .d = D, .v = VOCABULARY, .ids = ids(b) };
    a.dtable = bk_f32(b, (int64_t)VOCABULARY * D, 1);
    a.dy = bk_f32(b, (int64_t)TOKENS * D, 1);
    BK_TIME(b, embed_bwd, "2048 x 7168", 1.0 * TOKENS * D, 12.0 * TOKENS * D, &a);
}
