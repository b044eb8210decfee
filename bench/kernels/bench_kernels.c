/* bench_kernels.c - usage: bench_kernels [op [backend [threads]]]. See bench_kernels.h. */
#include "bench/kernels/bench_kernels.h"
#include "bench/bench.h"
#include "kernels/simd/blas.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BUFS_MAX = 256, ROUNDS_MAX = 200 };
static void *bufs[BUFS_MAX];
static int bufs_n;
static double sgemm_rate, read_rate; /* FLOP/s, B/s with the same threads */

static void *take(bk *b, size_t bytes)
{
    void *p = NULL;
    TSR_ASSERT(bufs_n < BUFS_MAX && b->be->alloc(b->be, &p, bytes) == TSR_OK);
    bufs[bufs_n++] = p;
    return p;
}

void *bk_copy(bk *b, const void *src, size_t bytes)
{
    void *p = take(b, bytes);
    TSR_ASSERT(b->be->upload(b->be, p, src, bytes) == TSR_OK);
    return p;
}

float *bk_f32(bk *b, int64_t n, float scale)
{
    float *h = malloc((size_t)n * sizeof *h);
    uint64_t s = 88172645463325252u;
    for (int64_t i = 0; i < n; i++) {
        s ^= s << 13;
        s ^= s >> 7;
        s ^= s << 17;
        h[i] = scale * (float)((double)(s >> 40) / 8388608.0 - 1.0);
    }
    float *p = bk_copy(b, h, (size_t)n * sizeof *h);
    free(h);
    return p;
}

int32_t *bk_ids(bk *b, int64_t n, int64_t below)
{
    int32_t *h = malloc((size_t)n * sizeof *h);
    for (int64_t i = 0; i < n; i++) {
        h[i] = (int32_t)((uint32_t)i * 2654435761u % (uint32_t)below);
    }
    int32_t *p = bk_copy(b, h, (size_t)n * sizeof *h);
    free(h);
    return p;
}

void *bk_bytes(bk *b, size_t bytes)
{
    uint8_t *h = malloc(bytes);
    uint64_t s = 2463534242u;
    for (size_t i = 0; i < bytes; i++) {
        s = s * 6364136223846793005u + 1442695040888963407u;
        h[i] = (uint8_t)(s >> 56);
    }
    void *p = bk_copy(b, h, bytes);
    free(h);
    return p;
}

void bk_time(bk *b, const char *what, double flops, double bytes, void (*fn)(bk *b, const void *args),
             const void *args)
{
    double t[ROUNDS_MAX], start = bench_now();
    size_t n = 0;
    fn(b, args);
    while (n < ROUNDS_MAX && (n < 3 || bench_now() - start < 0.5)) {
        double from = bench_now();
        fn(b, args);
        TSR_ASSERT(b->be->sync(b->be) == TSR_OK);
        t[n++] = bench_now() - from;
    }
    double m = bench_median(t, n);
    printf("%-18s %-7s %d thr  %-34s %10.1f us  %7.2f GFLOP/s (%3.0f%% of sgemm)  %6.2f GB/s (%3.0f%% of "
           "read)\n",
           b->op, b->be->name, b->be->threads, what, m * 1e6, flops / m / 1e9, 100 * flops / m / sgemm_rate,
           bytes / m / 1e9, 100 * bytes / m / read_rate);
    (void)fflush(stdout);
}

/* ---- the two limits, over the same pool of threads ----------------------------------------------------------- */

typedef struct limit {
    const float *a, *b;
    float *c;
    double sink[64];
} limit;
enum { GEMM = 768, READ_FLOATS = 1 << 26, READ_PARTS = 64 };

static void gemm_part(void *payload, int64_t i, int worker)
{
    (void)worker;
    limit *l = payload;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, GEMM, GEMM, GEMM, 1.0f, l->a, GEMM, l->b, GEMM, 0.0f,
                l->c + i * GEMM * GEMM, GEMM);
}

static void read_part(void *payload, int64_t i, int worker)
{
    (void)worker;
    limit *l = payload;
    const uint64_t *p = (const uint64_t *)(const void *)(l->a + i * (READ_FLOATS / READ_PARTS));
    uint64_t s[8] = { 0 };
    for (int64_t k = 0; k < READ_FLOATS / READ_PARTS / 2; k += 8) {
        for (int j = 0; j < 8; j++) {
            s[j] += p[k + j];
        }
    }
    l->sink[i] = (double)(s[0] + s[1] + s[2] + s[3] + s[4] + s[5] + s[6] + s[7]);
}

static void measure_limits(tsr_backend *be)
{
    limit l = { 0 };
    float *big = malloc((size_t)READ_FLOATS * sizeof *big),
          *c = malloc((size_t)be->threads * GEMM * GEMM * sizeof *c);
    TSR_ASSERT(big != NULL && c != NULL);
    for (int64_t i = 0; i < READ_FLOATS; i++) {
        big[i] = (float)(i % 1000) * 1e-3f;
    }
    l.a = big;
    l.b = big + GEMM * GEMM;
    l.c = c;
    double g[7], r[7];
    tsr_parallel(be->queue, be->threads, gemm_part, &l);
    for (int i = 0; i < 7; i++) {
        double t = bench_now();
        tsr_parallel(be->queue, be->threads, gemm_part, &l);
        g[i] = bench_now() - t;
        t = bench_now();
        tsr_parallel(be->queue, READ_PARTS, read_part, &l);
        r[i] = bench_now() - t;
    }
    sgemm_rate = 2.0 * GEMM * GEMM * GEMM * be->threads / bench_median(g, 7);
    read_rate = READ_FLOATS * 4.0 / bench_median(r, 7);
    printf("# %d threads: sgemm %.1f GFLOP/s, reading memory %.1f GB/s\n", be->threads, sgemm_rate / 1e9,
           read_rate / 1e9);
    free(big);
    free(c);
}

static void (*const benches[])(bk *) = {
#define TSR_OP(op, cpu, simd, cuda) bk_##op,
#include "kernels/ops.def"
#undef TSR_OP
};

int main(int argc, char **argv)
{
    const char *only = argc > 1 && strcmp(argv[1], "all") != 0 ? argv[1] : NULL,
               *name = argc > 2 ? argv[2] : "auto";
    openblas_set_num_threads(1);
    for (int threads = 1; threads <= 2; threads++) {
        tsr_backend *be = NULL;
        tsr_err err;
        if (tsr_backend_open(&be, name, argc > 3 ? (int)strtol(argv[3], NULL, 10) : threads, &err) !=
            TSR_OK) {
            printf("%s\n", err.msg);
            return 1;
        }
        measure_limits(be);
        for (int id = 0; id < TSR_OP_COUNT; id++) {
            bk b = { be, tsr_op_name((tsr_op_id)id) };
            if (benches[id] == NULL || (only != NULL && strcmp(only, b.op) != 0)) {
                continue;
            }
            benches[id](&b);
            while (bufs_n > 0) {
                be->release(be, bufs[--bufs_n]);
            }
        }
        tsr_backend_close(&be);
        if (argc > 3) {
            break;
        }
    }
    return 0;
}
