/* bench_kernels.h - one `void bk_<op>(bk *b)` per op: makes arguments of a size that matters and calls BK_TIME, which
 * prints time, GFLOP/s and GB/s of each backend, and the ratios to the sgemm rate and the read bandwidth measured in
 * the same run. */
#ifndef TSR_BENCH_KERNELS_H
#define TSR_BENCH_KERNELS_H

#include "kernels/backend_priv.h"

typedef struct bk {
    tsr_backend *be;
    const char *op;
} bk;

/* Memory of the backend under test until the op's benchmark ends; f: uniform in (-scale, scale). */
float *bk_f32(bk *b, int64_t n, float scale);
void *bk_bytes(bk *b, size_t bytes); /* random bytes */
void *bk_copy(bk *b, const void *src, size_t bytes);
int32_t *bk_ids(bk *b, int64_t n, int64_t below); /* n numbers in [0, below), spread */
/* Runs fn several times after one warm-up; flops and bytes are what one call must do and must move. */
void bk_time(bk *b, const char *what, double flops, double bytes, void (*fn)(bk *b, const void *args),
             const void *args);

#define BK_DEFINE(op)                                                                                        \
    static void run_##op(bk *b, const void *args)                                                            \
    {                                                                                                        \
        tsr_status st = tsr_##op(b->be, (const tsr_##op##_args *)args);                                      \
        TSR_ASSERT(st == TSR_OK);                                                                            \
    }
#define BK_TIME(b, op, what, flops, bytes, args) bk_time(b, what, flops, bytes, run_##op, args)

#define TSR_OP(op, cpu, simd, cuda) void bk_##op(bk *b) __attribute__((weak));
#include "kernels/ops.def"
#undef TSR_OP

#endif
