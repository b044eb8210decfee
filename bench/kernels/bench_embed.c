/* bench_embed.c - benchmarks of kernels/ops/embed.h. */
#include "bench/kernels/bench_kernels.h"

BK_DEFINE(embed_fwd)
BK_DEFINE(embed_bwd)

enum { TOKENS = 2048, D = 7168, VOCABULARY = 8192 };

void bk_embed_fwd(bk *b)
{
    tsr_embed_fwd_args a = { .n = TOKENS, .d = D, .v = VOCABULARY, .ids = bk_ids(b, TOKENS, VOCABULARY), .dtype = TSR_DT_BF16 };
    a.y = bk_f32(b, (int64_t)TOKENS * D, 1);
    a.table = bk_bytes(b, (size_t)VOCABULARY * D * 2);
    BK_TIME(b, embed_fwd, "2048 x 7168 from bf16", 0, 6.0 * TOKENS * D, &a);
}

void bk_embed_bwd(bk *b)
{
    tsr_embed_bwd_args a = { .n = TOKENS, .d = D, .v = VOCABULARY, .ids = bk_ids(b, TOKENS, VOCABULARY) };
    a.dtable = bk_f32(b, (int64_t)VOCABULARY * D, 1);
    a.dy = bk_f32(b, (int64_t)TOKENS * D, 1);
    BK_TIME(b, embed_bwd, "2048 x 7168", 1.0 * TOKENS * D, 12.0 * TOKENS * D, &a);
}
