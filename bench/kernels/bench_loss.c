/* bench_loss.c - benchmarks of kernels/ops/loss.h. */
#include "bench/kernels/bench_kernels.h"

BK_DEFINE(xent_fwd)
BK_DEFINE(xent_bwd)

enum { TOKENS = 128, VOCABULARY = 163840 };
static const double all = (double)TOKENS * VOCABULARY;

/* An exponential counts as eight operations. */
void bk_xent_fwd(bk *b)
{
    tsr_xent_fwd_args a = { bk_f32(b, TOKENS, 1), bk_f32(b, TOKENS, 1), bk_f32(b, (int64_t)TOKENS * VOCABULARY, 4), bk_ids(b, TOKENS, VOCABULARY),
                            TOKENS, VOCABULARY };
    BK_TIME(b, xent_fwd, "128 x 163840", 11 * all, 4 * all, &a);
}

void bk_xent_bwd(bk *b)
{
    int64_t n = (int64_t)TOKENS * VOCABULARY;
    tsr_xent_bwd_args a = { bk_f32(b, n, 1), bk_f32(b, n, 4), bk_f32(b, TOKENS, 1), bk_ids(b, TOKENS, VOCABULARY), TOKENS, VOCABULARY, 1 };
    BK_TIME(b, xent_bwd, "128 x 163840", 10 * all, 8 * all, &a);
}
