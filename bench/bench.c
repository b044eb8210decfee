/* bench.c - see bench.h. */
#include "bench/bench.h"

#include <math.h>
#include <time.h>

double bench_now(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

double bench_median(double *t, size_t n)
{
    qsort(t, n, sizeof *t, compare);
    return t[n / 2];
}

void bench_pair(const char *what, const char *peer_name, uint64_t bytes, void (*ours)(void *),
                void (*peer)(void *), void *payload)
{
    double a[BENCH_ROUNDS], b[BENCH_ROUNDS];
    ours(payload); /* warm both */
    peer(payload);
    for (int i = 0; i < BENCH_ROUNDS; i++) {
        double t = bench_now();
        ours(payload);
        a[i] = bench_now() - t;
        t = bench_now();
        peer(payload);
        b[i] = bench_now() - t;
    }
    double mine = bench_median(a, BENCH_ROUNDS), theirs = bench_median(b, BENCH_ROUNDS);
    printf("%s: ours %.2f GB/s, %s %.2f GB/s, ratio %.2f (best of each %.2f)\n", what,
           (double)bytes / mine / 1e9, peer_name, (double)bytes / theirs / 1e9, theirs / mine, b[0] / a[0]);
    (void)fflush(stdout);
}

uint64_t bench_bytes(int argc, char **argv, uint64_t default_mib)
{
    return (argc > 1 ? strtoull(argv[1], NULL, 10) : default_mib) << 20;
}

void bench_gauss(float *dst, uint64_t n, double sigma)
{
    uint64_t rng = 99;
    for (uint64_t i = 0; i < n; i += 2) {
        double u = ((double)(bag_random(&rng) >> 11) + 0.5) * 0x1p-53,
               v = (double)(bag_random(&rng) >> 11) * 0x1p-53;
        double r = sigma * sqrt(-2 * log(u));
        dst[i] = (float)(r * cos(6.283185307179586 * v));
        if (i + 1 < n) {
            dst[i + 1] = (float)(r * sin(6.283185307179586 * v));
        }
    }
}

void bench_decls(uint64_t bytes, tsr_tensor_decl **decls, uint32_t *count)
{
    static const int64_t dense[2] = { 4096, 2048 }, expert[2] = { 2048, 1024 }; /* bf16: 16 MiB, 4 MiB */
    static const char *const parts[] = { "gate", "up", "down" };
    uint64_t layers = bytes / ((uint64_t)(16 + 3 * 4 * 8) << 20);
    layers = layers > 0 ? layers : 1;
    *decls = calloc(layers * 4, sizeof **decls);
    *count = 0;
    CHECK(*decls != NULL);
    for (uint64_t l = 0; l < layers; l++) {
        for (int k = 0; k < 4; k++) {
            char *name;
            CHECK((k == 0 ? asprintf(&name, "layers.%d.attn.q.weight", (int)l)
                          : asprintf(&name, "layers.%d.experts.{e}.%s.weight", (int)l, parts[k - 1])) > 0);
            (*decls)[(*count)++] = (tsr_tensor_decl){ .name = name,
                                                      .dtype = TSR_DT_BF16,
                                                      .src_dtype = TSR_DT_BF16,
                                                      .rank = 2,
                                                      .shape = k == 0 ? dense : expert,
                                                      .klass = k == 0 ? TSR_CLASS_DENSE : TSR_CLASS_EXPERTS,
                                                      .layer = (int32_t)l,
                                                      .expert_count = k == 0 ? 0 : 8,
                                                      .partner = -1 };
        }
    }
}
