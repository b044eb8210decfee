/* check_matmul.c - checks of kernels/ops/matmul.h.
 *
 * Bounds. An f32 sum rounds at every step, by at most eps/2 of the partial sum; evenly spread, one standard deviation of
 * such a rounding is eps/2 / sqrt(3) of it. The products here have random signs, so partial sums stay well below mag, the
 * sum of the magnitudes. Worst are weights of very unequal size: when a few outweigh the rest and come first, the sum is
 * about 0.3 mag through the 256 steps of a chain, and the errors add up to sqrt(256) 0.3 eps/2 / sqrt(3) mag = 1.4 eps
 * mag. Six deviations cover the million outputs of a run. Weights that are rounded themselves (F8_E4M3 times its scale)
 * and the sum over chains are small beside that. */
#include "kernels/numeric.h"
#include "tests/kernels/check.h"

#include <math.h>
#include <string.h>

static const ck_tol tol = { .ulps = 1, .red = 8 };

typedef struct mat {
    tsr_weight ref, dev;
    float *mag; /* [rows][cols] magnitudes; NaN becomes 0 */
} mat;

static const tsr_dtype dtypes[] = { TSR_DT_F32, TSR_DT_BF16, TSR_DT_F16, TSR_DT_F8_E4M3, TSR_DT_MXFP4 };
enum { DTYPES = sizeof dtypes / sizeof *dtypes };

static int64_t pick(ck *t, int64_t n)
{
    return (int64_t)(ck_random(t) % (uint64_t)n);
}

static uint8_t mx_scale(ck *t, bool extreme)
{
    static const uint8_t odd[] = { 0, 1, 2, 127, 134, 253, 255 };
    return extreme ? odd[pick(t, sizeof odd)] : (uint8_t)(117 + pick(t, 10));
}

/* Fills data and scale; v gets the values. */
static void fill(ck *t, tsr_weight *w, uint8_t *data, uint8_t *scale, bool extreme, double *v)
{
    int64_t n = w->rows * w->cols, sc = (w->cols + 127) / 128;
    for (int64_t i = 0; w->dtype == TSR_DT_F8_E4M3 && i < (w->rows + 127) / 128 * sc; i++) {
        float s = (float)ldexp((double)(ck_random(t) >> 40) + 1,
                               (extreme ? (int)pick(t, 200) - 100 : 0) - 30);
        memcpy(scale + i * 4, &s, 4);
    }
    for (int64_t i = 0; w->dtype == TSR_DT_MXFP4 && i < n / 32; i++) {
        scale[i] = mx_scale(t, extreme && pick(t, 4) == 0);
    }
    for (int64_t i = 0; i < n; i++) {
        float x = (float)((double)(ck_random(t) >> 40) / 8388608.0 - 1.0), s = 1;
        uint16_t h = w->dtype == TSR_DT_F16 ? tsr_f32_to_f16(x) : tsr_f32_to_bf16(x);
        uint8_t b = (uint8_t)(ck_random(t) >> 30);
        switch (w->dtype) {
        case TSR_DT_F32:
            memcpy(data + i * 4, &x, 4);
            v[i] = (double)x;
            break;
        case TSR_DT_BF16:
        case TSR_DT_F16:
            h = extreme && pick(t, 64) == 0 ? (uint16_t)(h & 0x83ff) : h; /* zeros and subnormals */
            memcpy(data + i * 2, &h, 2);
            tsr_to_f64(w->dtype, &h, 0, 1, &v[i]);
            break;
        case TSR_DT_F8_E4M3:
            b = (b & 127) == 127 && !(extreme && pick(t, 8) == 0) ? 0x81 : b;
            data[i] = b;
            memcpy(&s, scale + (i / w->cols / 128 * sc + i % w->cols / 128) * 4, 4);
            v[i] = (double)tsr_f8_to_f32(TSR_DT_F8_E4M3, b) * (double)s;
            break;
        default:
            b &= scale[i / 32] >= 253 ? 0x99 : 0xff; /* the product must fit f32 */
            data[i / 2] = i % 2 == 0 ? b : data[i / 2];
            v[i] = (double)tsr_e2m1_to_f32(i % 2 == 0 ? data[i / 2] : data[i / 2] >> 4) *
                   (double)tsr_e8m0_to_f32(scale[i / 32]);
        }
    }
}

static mat matrix(ck *t, tsr_dtype dtype, int64_t rows, int64_t cols, bool extreme)
{
    int64_t n = rows * cols;
    size_t bytes = dtype == TSR_DT_F32     ? (size_t)n * 4
                   : dtype == TSR_DT_MXFP4 ? (size_t)n / 2
                                           : (size_t)n * (dtype == TSR_DT_F8_E4M3 ? 1 : 2);
    size_t scale_bytes = dtype == TSR_DT_MXFP4     ? (size_t)n / 32
                         : dtype == TSR_DT_F8_E4M3 ? (size_t)((rows + 127) / 128 * ((cols + 127) / 128)) * 4
                                                   : 0;
    uint8_t *data = ck_host(t, bytes), *scale = scale_bytes > 0 ? ck_host(t, scale_bytes) : NULL;
    double *v = ck_host(t, (size_t)n * sizeof *v);
    mat out = { .ref = { data, scale, dtype, rows, cols } };
    fill(t, &out.ref, data, scale, extreme, v);
    out.mag = ck_host(t, (size_t)n * sizeof *out.mag);
    for (int64_t i = 0; i < n; i++) {
        out.mag[i] = isnan(v[i]) ? 0 : (float)fabs(v[i]);
    }
    out.dev = out.ref;
    out.dev.data = ck_dev(t, data, bytes);
    out.dev.scale = scale != NULL ? ck_dev(t, scale, scale_bytes) : NULL;
    return out;
}

static tsr_weight plain(const float *data, int64_t rows, int64_t cols)
{
    return (tsr_weight){ data, NULL, TSR_DT_F32, rows, cols };
}

/* Floats of m rows of `width`, `stride` apart; nothing after the last row. */
static int64_t span(int64_t m, int64_t stride, int64_t width)
{
    return m > 0 ? (m - 1) * (stride > 0 ? stride : width) + width : 0;
}

static float *magnitudes(ck *t, const float *x, int64_t n)
{
    float *p = ck_host(t, (size_t)n * sizeof *p);
    for (int64_t i = 0; i < n; i++) {
        p[i] = isnan(x[i]) ? 0 : fabsf(x[i]);
    }
    return p;
}

static double *doubles(ck *t, const float *x, int64_t n)
{
    double *p = ck_host(t, (size_t)n * sizeof *p);
    for (int64_t i = 0; i < n; i++) {
        p[i] = (double)x[i];
    }
    return p;
}

/* An output of n floats: for the reference, for the magnitudes, and on the device. */
typedef struct outs {
    float *ref, *mag, *dev;
    int64_t n;
} outs;

static outs outputs(ck *t, int64_t n, bool accumulate)
{
    outs o = { .n = n };
    o.ref = accumulate ? ck_rand(t, n, 3) : ck_nan(t, n);
    o.mag = magnitudes(t, o.ref, n);
    o.dev = ck_dev(t, o.ref, (size_t)n * sizeof(float));
    return o;
}

static void compare(ck *t, const char *what, const outs *o)
{
    ck_f32(t, what, o->ref, o->dev, doubles(t, o->mag, o->n), o->n, tol);
}

typedef struct shape {
    int64_t m, n, k;
} shape;

static void nt_case(ck *t, tsr_dtype dtype, shape s, int64_t pad, bool accumulate, bool extreme)
{
    int64_t xs = pad > 0 ? s.k + pad : 0, ys = pad > 0 ? s.n + 2 * pad : 0, xn = span(s.m, xs, s.k);
    mat w = matrix(t, dtype, s.n, s.k, extreme);
    float *x = ck_rand(t, xn, 1);
    outs y = outputs(t, span(s.m, ys, s.n), accumulate);
    tsr_gemm_nt_args a = { y.ref, x, w.ref, s.m, xs, ys, accumulate }, b = a, c = a;
    b.y = y.mag;
    b.x = magnitudes(t, x, xn);
    b.w = plain(w.mag, s.n, s.k);
    b.accumulate = true;
    c.y = y.dev;
    c.x = ck_dev(t, x, (size_t)xn * sizeof *x);
    c.w = w.dev;
    (void)t->ref->k.gemm_nt(t->ref->queue, &b);
    CK_RUN(t, gemm_nt, &a, &c);
    compare(t, "y", &y);
    ck_end(t);
}

static void nn_case(ck *t, tsr_dtype dtype, shape s, int64_t pad, bool accumulate, bool extreme)
{
    int64_t ds = pad > 0 ? s.n + pad : 0, xs = pad > 0 ? s.k + 2 * pad : 0, dn = span(s.m, ds, s.n);
    mat w = matrix(t, dtype, s.n, s.k, extreme);
    float *dy = ck_rand(t, dn, 1);
    outs dx = outputs(t, span(s.m, xs, s.k), accumulate);
    tsr_gemm_nn_args a = { dx.ref, dy, w.ref, s.m, ds, xs, accumulate }, b = a, c = a;
    b.dx = dx.mag;
    b.dy = magnitudes(t, dy, dn);
    b.w = plain(w.mag, s.n, s.k);
    b.accumulate = true;
    c.dx = dx.dev;
    c.dy = ck_dev(t, dy, (size_t)dn * sizeof *dy);
    c.w = w.dev;
    (void)t->ref->k.gemm_nn(t->ref->queue, &b);
    CK_RUN(t, gemm_nn, &a, &c);
    compare(t, "dx", &dx);
    ck_end(t);
}

static void tn_case(ck *t, shape s, int64_t pad)
{
    int64_t ds = pad > 0 ? s.n + pad : 0, xs = pad > 0 ? s.k + 2 * pad : 0;
    int64_t dn = span(s.m, ds, s.n), xn = span(s.m, xs, s.k);
    float *dy = ck_rand(t, dn, 1), *x = ck_rand(t, xn, 1);
    outs dw = outputs(t, s.n * s.k, true);
    tsr_gemm_tn_args a = { dw.ref, dy, x, s.m, s.n, s.k, ds, xs }, b = a, c = a;
    b.dw = dw.mag;
    b.dy = magnitudes(t, dy, dn);
    b.x = magnitudes(t, x, xn);
    c.dw = dw.dev;
    c.dy = ck_dev(t, dy, (size_t)dn * sizeof *dy);
    c.x = ck_dev(t, x, (size_t)xn * sizeof *x);
    (void)t->ref->k.gemm_tn(t->ref->queue, &b);
    CK_RUN(t, gemm_tn, &a, &c);
    compare(t, "dw", &dw);
    ck_end(t);
}

/* Edges of register tiles (6, 12 rows; 8, 16, 32 lanes), of the kernels for few rows, of blocks of 24 rows and of
 * chunks of the summed index. */
static const int64_t few_or_many[] = { 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 15, 16, 17, 24, 31, 33, 65 };
static const int64_t widths[] = { 1, 2, 5, 8, 12, 15, 16, 17, 23, 24, 25, 32, 47, 49, 64, 97, 129, 131 };
static const int64_t longs[] = { 32, 64, 96, 128, 160, 224, 256, 288, 512, 544, 608 };

static shape any_shape(ck *t, tsr_dtype dtype, int64_t i)
{
    shape s = { few_or_many[i % 18], widths[pick(t, 18)], longs[pick(t, 11)] };
    if (dtype != TSR_DT_MXFP4 && pick(t, 2) == 0) {
        s.k = widths[pick(t, 18)];
    } else if (dtype != TSR_DT_MXFP4) {
        s.k += pick(t, 36) - 18;
    }
    return s;
}

static void each_shape(ck *t, void (*one)(ck *, tsr_dtype, shape, int64_t, bool, bool))
{
    for (int d = 0; d < DTYPES; d++) {
        for (int64_t i = 0; i < 36; i++) {
            one(t, dtypes[d], any_shape(t, dtypes[d], i), i % 3 == 1 ? 1 + pick(t, 9) : 0, i % 4 == 3,
                i % 5 == 4);
        }
        one(t, dtypes[d], (shape){ 0, 40, 64 }, 0, false, false);
        one(t, dtypes[d], (shape){ 1, 1, dtypes[d] == TSR_DT_MXFP4 ? 32 : 1 }, 0, false, false);
        one(t, dtypes[d], (shape){ 5, 300, 288 }, 0, false, true);
        one(t, dtypes[d], (shape){ 70, 300, 288 }, 3, true, true);
    }
    one(t, TSR_DT_BF16, (shape){ 530, 30, 520 }, 0, false, false);
    one(t, TSR_DT_F32, (shape){ 1100, 20, 16 }, 5, true, false);
}

void ck_gemm_nt(ck *t)
{
    each_shape(t, nt_case);
}

void ck_gemm_nn(ck *t)
{
    each_shape(t, nn_case);
}

void ck_gemm_tn(ck *t)
{
    for (int64_t i = 0; i < 54; i++) {
        shape s = { few_or_many[i % 18], widths[pick(t, 18)], widths[pick(t, 18)] };
        tn_case(t, s, i % 3 == 1 ? 1 + pick(t, 9) : 0);
    }
    tn_case(t, (shape){ 0, 3, 5 }, 0);
    tn_case(t, (shape){ 700, 40, 300 }, 0);
    tn_case(t, (shape){ 300, 131, 70 }, 4);
}

/* ---- grouped --------------------------------------------------------------------------------------------------- */

enum { EXPERTS = 9 };
typedef struct group {
    int64_t m, offset_host[EXPERTS + 1];
    const int64_t *offset_dev;
    const void *data[EXPERTS], *scale[EXPERTS], *mag[EXPERTS], *dev_data[EXPERTS], *dev_scale[EXPERTS];
    const void *const *data_table, *const *scale_table; /* on the device */
} group;

static void rows_of_experts(ck *t, group *g, int64_t most)
{
    g->m = 0;
    for (int e = 0; e < EXPERTS; e++) {
        g->offset_host[e] = g->m;
        g->m += e % 4 == 2 ? 0 : e % 4 == 0 ? 1 + pick(t, most) : pick(t, 12);
    }
    g->offset_host[EXPERTS] = g->m;
    g->offset_dev = ck_dev(t, g->offset_host, sizeof g->offset_host);
}

static void experts(ck *t, group *g, tsr_dtype dtype, int64_t n, int64_t k)
{
    for (int e = 0; e < EXPERTS; e++) {
        g->data[e] = g->scale[e] = g->mag[e] = g->dev_data[e] = g->dev_scale[e] = NULL;
        if (e != 3) { /* absent, with rows or without */
            mat w = matrix(t, dtype, n, k, false);
            g->data[e] = w.ref.data;
            g->scale[e] = w.ref.scale;
            g->mag[e] = w.mag;
            g->dev_data[e] = w.dev.data;
            g->dev_scale[e] = w.dev.scale;
        }
    }
    bool scaled = dtype == TSR_DT_MXFP4 || dtype == TSR_DT_F8_E4M3;
    g->data_table = ck_dev(t, g->dev_data, sizeof g->dev_data);
    g->scale_table = scaled ? ck_dev(t, g->dev_scale, sizeof g->dev_scale) : NULL;
}

static void ggemm_case(ck *t, tsr_dtype dtype, int64_t most, int64_t n, int64_t k, bool nn)
{
    group g;
    rows_of_experts(t, &g, most);
    experts(t, &g, dtype, n, k);
    int64_t in = nn ? n : k, out = nn ? k : n;
    float *x = ck_rand(t, g.m * in, 1), *mag = magnitudes(t, x, g.m * in);
    float *dev = ck_dev(t, x, (size_t)(g.m * in) * sizeof *x);
    outs y = outputs(t, g.m * out, false);
    if (nn) {
        tsr_ggemm_nn_args a = { y.ref, x,   g.offset_host, g.data, g.scale_table != NULL ? g.scale : NULL,
                                dtype, g.m, EXPERTS,       n,      k };
        tsr_ggemm_nn_args b = { y.mag, mag, g.offset_host, g.mag, NULL, TSR_DT_F32, g.m, EXPERTS, n, k };
        tsr_ggemm_nn_args c = { y.dev, dev, g.offset_dev, g.data_table, g.scale_table, dtype, g.m, EXPERTS,
                                n,     k };
        (void)t->ref->k.ggemm_nn(t->ref->queue, &b);
        CK_RUN(t, ggemm_nn, &a, &c);
    } else {
        tsr_ggemm_nt_args a = { y.ref, x,   g.offset_host, g.data, g.scale_table != NULL ? g.scale : NULL,
                                dtype, g.m, EXPERTS,       n,      k };
        tsr_ggemm_nt_args b = { y.mag, mag, g.offset_host, g.mag, NULL, TSR_DT_F32, g.m, EXPERTS, n, k };
        tsr_ggemm_nt_args c = { y.dev, dev, g.offset_dev, g.data_table, g.scale_table, dtype, g.m, EXPERTS,
                                n,     k };
        (void)t->ref->k.ggemm_nt(t->ref->queue, &b);
        CK_RUN(t, ggemm_nt, &a, &c);
    }
    compare(t, nn ? "dx" : "y", &y);
    ck_end(t);
}

static void each_ggemm(ck *t, bool nn)
{
    static const int64_t most[] = { 1, 8, 20, 90 };
    for (int d = 0; d < DTYPES; d++) {
        for (int i = 0; i < 8; i++) {
            shape s = any_shape(t, dtypes[d], i);
            ggemm_case(t, dtypes[d], most[i % 4], s.n, s.k, nn);
        }
    }
}

void ck_ggemm_nt(ck *t)
{
    each_ggemm(t, false);
}

void ck_ggemm_nn(ck *t)
{
    each_ggemm(t, true);
}

static void ggemm_tn_case(ck *t, int64_t most, int64_t n, int64_t k)
{
    group g;
    rows_of_experts(t, &g, most);
    float *dy = ck_rand(t, g.m * n, 1), *x = ck_rand(t, g.m * k, 1);
    float *ref[EXPERTS] = { 0 }, *mag[EXPERTS] = { 0 }, *dev[EXPERTS] = { 0 };
    outs dw[EXPERTS];
    for (int e = 0; e < EXPERTS; e++) {
        dw[e] = outputs(t, n * k, true);
        if (e != 3) {
            ref[e] = dw[e].ref;
            mag[e] = dw[e].mag;
            dev[e] = dw[e].dev;
        }
    }
    tsr_ggemm_tn_args a = { ref, dy, x, g.offset_host, g.m, EXPERTS, n, k }, b = a, c = a;
    b.dw = mag;
    b.dy = magnitudes(t, dy, g.m * n);
    b.x = magnitudes(t, x, g.m * k);
    c.dw = ck_dev(t, dev, sizeof dev);
    c.dy = ck_dev(t, dy, (size_t)(g.m * n) * sizeof *dy);
    c.x = ck_dev(t, x, (size_t)(g.m * k) * sizeof *x);
    c.offset = g.offset_dev;
    (void)t->ref->k.ggemm_tn(t->ref->queue, &b);
    CK_RUN(t, ggemm_tn, &a, &c);
    for (int e = 0; e < EXPERTS; e++) {
        compare(t, "dw", &dw[e]);
    }
    ck_end(t);
}

void ck_ggemm_tn(ck *t)
{
    for (int i = 0; i < 18; i++) {
        ggemm_tn_case(t, few_or_many[pick(t, 18)], widths[pick(t, 18)], widths[i]);
    }
}

/* ---- heads ----------------------------------------------------------------------------------------------------- */

static void heads_case(ck *t, tsr_dtype dtype, int64_t m, int64_t heads, int64_t rows, int64_t cols,
                       bool transposed, int64_t pad)
{
    int64_t in = transposed ? rows : cols, out = transposed ? cols : rows;
    int64_t step = rows + pad, row0 = pad, xh = in + pad, yh = out + pad;
    int64_t xs = heads * xh + pad, ys = heads * yh;
    mat w = matrix(t, dtype, row0 + (heads - 1) * step + rows, cols, false);
    int64_t xn = span(m, xs, (heads - 1) * xh + in);
    float *x = ck_rand(t, xn, 1);
    outs y = outputs(t, span(m, ys, (heads - 1) * yh + out), false);
    tsr_gemm_heads_args a = { y.ref, x, w.ref, m, heads, in, out, row0, step, xs, xh, ys, yh, transposed },
                        b = a, c = a;
    b.y = y.mag;
    b.x = magnitudes(t, x, xn);
    b.w = plain(w.mag, w.ref.rows, cols);
    c.y = y.dev;
    c.x = ck_dev(t, x, (size_t)xn * sizeof *x);
    c.w = w.dev;
    (void)t->ref->k.gemm_heads(t->ref->queue, &b);
    CK_RUN(t, gemm_heads, &a, &c);
    compare(t, "y", &y);
    ck_end(t);
}

void ck_gemm_heads(ck *t)
{
    for (int i = 0; i < 72; i++) {
        heads_case(t, dtypes[i % 2], few_or_many[i / 4], 1 + pick(t, 5), widths[pick(t, 18)],
                   widths[pick(t, 18)], i / 2 % 2 == 0, i % 3 == 0 ? pick(t, 9) : 0);
    }
    for (int i = 0; i < 4; i++) {
        heads_case(t, TSR_DT_BF16, i < 2 ? 1 : 40, 3, 128, 512, i % 2 == 0, 128);
        heads_case(t, TSR_DT_BF16, i < 2 ? 0 : 2, 3, 128, 300, i % 2 == 0, 64);
    }
}
