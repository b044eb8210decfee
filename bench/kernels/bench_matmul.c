/* bench_matmul.c - benchmarks of kernels/ops/matmul.h. */
#include "bench/kernels/bench_kernels.h"

#include <stdio.h>
#include <stdlib.h>

BK_DEFINE(gemm_nt)
BK_DEFINE(gemm_nn)
BK_DEFINE(gemm_tn)
BK_DEFINE(ggemm_nt)
BK_DEFINE(ggemm_nn)
BK_DEFINE(ggemm_tn)
BK_DEFINE(gemm_heads)

static size_t data_bytes(tsr_dtype dtype, int64_t n)
{
    return dtype == TSR_DT_F32     ? (size_t)n * 4
           : dtype == TSR_DT_MXFP4 ? (size_t)n / 2
                                   : (size_t)n * (dtype == TSR_DT_F8_E4M3 ? 1 : 2);
}

static size_t scale_bytes(tsr_dtype dtype, int64_t rows, int64_t cols)
{
    return dtype == TSR_DT_MXFP4     ? (size_t)(rows * cols / 32)
           : dtype == TSR_DT_F8_E4M3 ? (size_t)((rows + 127) / 128 * ((cols + 127) / 128)) * 4
                                     : 0;
}

/* Codes that are ordinary numbers: no infinities, which some processors handle slowly. */
static tsr_weight weights(bk *b, tsr_dtype dtype, int64_t rows, int64_t cols)
{
    tsr_weight w = { NULL, NULL, dtype, rows, cols };
    size_t bytes = data_bytes(dtype, rows * cols), scales = scale_bytes(dtype, rows, cols);
    uint8_t *p = malloc(bytes), *s = malloc(scales + 1);
    uint64_t r = 2463534242u;
    for (size_t i = 0; i < bytes; i++) {
        r = r * 6364136223846793005u + 1442695040888963407u;
        p[i] = (uint8_t)(r >> 56);
        if ((dtype == TSR_DT_F32 && i % 4 == 3) || (dtype == TSR_DT_BF16 && i % 2 == 1) ||
            dtype == TSR_DT_F16) {
            p[i] = (uint8_t)((p[i] & 0x80) | 0x3c);
        } else if (dtype == TSR_DT_F8_E4M3) {
            p[i] = (p[i] & 0x7f) == 0x7f ? 0 : p[i];
        }
    }
    float one = 0.25f;
    for (size_t i = 0; i < scales; i++) {
        s[i] = dtype == TSR_DT_MXFP4 ? (uint8_t)(120 + i % 7) : ((uint8_t *)&one)[i % 4];
    }
    w.data = bk_copy(b, p, bytes);
    w.scale = scales > 0 ? bk_copy(b, s, scales) : NULL;
    free(p);
    free(s);
    return w;
}

static const char *label(const char *what, tsr_dtype dtype, int64_t m, int64_t n, int64_t k)
{
    static char s[96];
    (void)snprintf(s, sizeof s, "%s%s m=%lld n=%lld k=%lld", what, tsr_dtype_name(dtype), (long long)m,
                   (long long)n, (long long)k);
    return s;
}

static double packed(const tsr_weight *w)
{
    return (double)(data_bytes(w->dtype, w->rows * w->cols) + scale_bytes(w->dtype, w->rows, w->cols));
}

static void one_nt(bk *b, tsr_dtype dtype, int64_t m, int64_t n, int64_t k)
{
    tsr_gemm_nt_args a = {
        bk_f32(b, m * n, 1), bk_f32(b, m * k, 1), weights(b, dtype, n, k), m, 0, 0, false
    };
    BK_TIME(b, gemm_nt, label("", dtype, m, n, k), 2.0 * (double)(m * n * k), packed(&a.w), &a);
}

void bk_gemm_nt(bk *b)
{
    static const tsr_dtype dtypes[] = { TSR_DT_F32, TSR_DT_BF16, TSR_DT_F8_E4M3, TSR_DT_MXFP4 };
    for (int d = 0; d < 4; d++) {
        one_nt(b, dtypes[d], 512, 1024, 1024);
    }
    for (int64_t m = 2; m <= 64; m *= 2) {
        one_nt(b, TSR_DT_BF16, m, 1024, 1024);
    }
    for (int d = 0; d < 4; d++) {
        one_nt(b, dtypes[d], 1, 16384, 7168); /* more than the caches hold */
    }
    one_nt(b, TSR_DT_BF16, 1, 1024, 1024);
    one_nt(b, TSR_DT_MXFP4, 4, 16384, 7168);
}

void bk_gemm_nn(bk *b)
{
    int64_t m = 512, n = 1024, k = 1024;
    static const tsr_dtype dtypes[] = { TSR_DT_F32, TSR_DT_BF16, TSR_DT_MXFP4 };
    for (int d = 0; d < 3; d++) {
        tsr_gemm_nn_args a = {
            bk_f32(b, m * k, 1), bk_f32(b, m * n, 1), weights(b, dtypes[d], n, k), m, 0, 0, false
        };
        BK_TIME(b, gemm_nn, label("", dtypes[d], m, n, k), 2.0 * (double)(m * n * k), packed(&a.w), &a);
    }
}

void bk_gemm_tn(bk *b)
{
    int64_t m = 512, n = 1024, k = 1024;
    tsr_gemm_tn_args a = { bk_f32(b, n * k, 1), bk_f32(b, m * n, 1), bk_f32(b, m * k, 1), m, n, k, 0, 0 };
    BK_TIME(b, gemm_tn, label("", TSR_DT_F32, m, n, k), 2.0 * (double)(m * n * k), 8.0 * (double)(n * k), &a);
}

/* ---- grouped: `each` rows for each of `count` experts ------------------------------------------------------------ */

enum { EXPERTS_MAX = 64 };
typedef struct group {
    const int64_t *offset;
    const void *const *data, *const *scale;
    double bytes;
} group;

static group experts(bk *b, tsr_dtype dtype, int64_t count, int64_t each, int64_t n, int64_t k)
{
    int64_t offset[EXPERTS_MAX + 1];
    const void *data[EXPERTS_MAX], *scale[EXPERTS_MAX];
    group g = { 0 };
    tsr_weight w = weights(b, dtype, count * n, k);
    for (int64_t e = 0; e < count; e++) {
        data[e] = (const char *)w.data + data_bytes(dtype, e * n * k);
        scale[e] = w.scale != NULL ? (const char *)w.scale + scale_bytes(dtype, e * n, k) : NULL;
        offset[e] = e * each;
    }
    g.bytes = packed(&w);
    offset[count] = count * each;
    g.offset = bk_copy(b, offset, (size_t)(count + 1) * sizeof *offset);
    g.data = bk_copy(b, data, (size_t)count * sizeof *data);
    g.scale = scale[0] != NULL ? bk_copy(b, scale, (size_t)count * sizeof *scale) : NULL;
    return g;
}

static void one_ggemm(bk *b, bool nn, tsr_dtype dtype, int64_t count, int64_t each, int64_t n, int64_t k)
{
    char what[32];
    (void)snprintf(what, sizeof what, "%lld x ", (long long)count);
    group g = experts(b, dtype, count, each, n, k);
    int64_t m = count * each;
    float *y = bk_f32(b, m * n, 1), *x = bk_f32(b, m * k, 1);
    tsr_ggemm_nt_args a = { y, x, g.offset, g.data, g.scale, dtype, m, count, n, k };
    tsr_ggemm_nn_args c = { x, y, g.offset, g.data, g.scale, dtype, m, count, n, k };
    if (nn) {
        BK_TIME(b, ggemm_nn, label(what, dtype, each, n, k), 2.0 * (double)(m * n * k), g.bytes, &c);
    } else {
        BK_TIME(b, ggemm_nt, label(what, dtype, each, n, k), 2.0 * (double)(m * n * k), g.bytes, &a);
    }
}

void bk_ggemm_nt(bk *b)
{
    one_ggemm(b, false, TSR_DT_MXFP4, 32, 64, 448, 512);
    one_ggemm(b, false, TSR_DT_MXFP4, 32, 64, 512, 448);
    one_ggemm(b, false, TSR_DT_BF16, 32, 64, 448, 512);
    for (int64_t each = 4; each <= 32; each += 4) {
        one_ggemm(b, false, TSR_DT_MXFP4, 32, each, 448, 512);
    }
    one_ggemm(b, false, TSR_DT_MXFP4, 8, 1, 448, 512);
    one_ggemm(b, false, TSR_DT_MXFP4, 16, 1, 448, 512);
    one_ggemm(b, false, TSR_DT_MXFP4, 16, 1, 3072, 3584);
    one_ggemm(b, false, TSR_DT_BF16, 16, 1, 448, 512);
}

void bk_ggemm_nn(bk *b)
{
    one_ggemm(b, true, TSR_DT_MXFP4, 32, 64, 448, 512);
    one_ggemm(b, true, TSR_DT_F32, 32, 64, 448, 512);
}

void bk_ggemm_tn(bk *b)
{
    int64_t count = 32, each = 64, n = 448, k = 512, m = count * each;
    int64_t offset[EXPERTS_MAX + 1];
    float *dw[EXPERTS_MAX];
    for (int64_t e = 0; e <= count; e++) {
        offset[e] = e * each;
        dw[e] = e < count ? bk_f32(b, n * k, 1) : NULL;
    }
    tsr_ggemm_tn_args a = { bk_copy(b, dw, sizeof dw),
                            bk_f32(b, m * n, 1),
                            bk_f32(b, m * k, 1),
                            bk_copy(b, offset, sizeof offset),
                            m,
                            count,
                            n,
                            k };
    BK_TIME(b, ggemm_tn, label("32 x ", TSR_DT_F32, each, n, k), 2.0 * (double)(m * n * k),
            8.0 * (double)(count * n * k), &a);
}

void bk_gemm_heads(bk *b)
{
    int64_t heads = 96, rows = 128, cols = 512;
    tsr_weight w = weights(b, TSR_DT_BF16, heads * 2 * rows, cols);
    for (int i = 0; i < 4; i++) {
        bool transposed = i % 2 == 0;
        int64_t m = i < 2 ? 1 : 256, in = transposed ? rows : cols, out = transposed ? cols : rows;
        tsr_gemm_heads_args a = { bk_f32(b, m * heads * out, 1),
                                  bk_f32(b, m * heads * in, 1),
                                  w,
                                  m,
                                  heads,
                                  in,
                                  out,
                                  0,
                                  2 * rows,
                                  heads * in,
                                  in,
                                  heads * out,
                                  out,
                                  transposed };
        BK_TIME(b, gemm_heads, label(transposed ? "x W " : "x W^T ", TSR_DT_BF16, m, out, in),
                2.0 * (double)(m * heads * in * out), 0.5 * packed(&w), &a);
    }
}
