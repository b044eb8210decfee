/* check_norm.c - checks of kernels/ops/norm.h. */
#include "tests/kernels/check.h"

#include <math.h>
#include <string.h>

static const struct shape {
    int64_t n, d, pad;
} shapes[] = { { 0, 5, 0 },  { 1, 1, 0 },    { 3, 7, 2 },    { 5, 8, 0 },    { 2, 15, 1 },   { 33, 16, 4 }, { 9, 17, 0 },
               { 200, 128, 0 }, { 150, 192, 64 }, { 4, 1023, 1 }, { 3, 1024, 0 }, { 70, 1500, 0 }, { 2, 7168, 4 }, { 1, 20000, 0 } };
enum { SHAPES = sizeof shapes / sizeof *shapes };
static const float eps = 1e-5f;

static void *dev(ck *t, const float *p, int64_t n)
{
    return ck_dev(t, p, (size_t)n * sizeof *p);
}

/* Rows that are all zeros, tiny (eps decides) and huge stand among the others. */
static float *rows(ck *t, int64_t n, int64_t d, int64_t stride)
{
    static const float scales[] = { 1, 0, 1, 1e-4f, 1, 1e4f, 1, 1 };
    float *x = ck_normal(t, n * stride, 1);
    for (int64_t i = 0; i < n; i++) {
        for (int64_t j = 0; j < d; j++) {
            x[i * stride + j] *= scales[i % 8];
        }
    }
    return x;
}

/* 1 / sqrt(mean or sum of x^2 + eps) of a row, as kernels keep it. */
static float rstd_of(const float *x, int64_t d, bool mean)
{
    double s = 0;
    for (int64_t j = 0; j < d; j++) {
        s += (double)x[j] * (double)x[j];
    }
    return (float)(1 / sqrt((mean ? s / (double)d : s) + (double)eps));
}

static float *rstds(ck *t, const float *x, int64_t n, int64_t d, int64_t stride, bool mean)
{
    float *r = ck_nan(t, n);
    for (int64_t i = 0; i < n; i++) {
        r[i] = rstd_of(x + i * stride, d, mean);
    }
    return r;
}

/* Sums of squares have one sign: in f64 their error is nothing, in f32 that of 32 threads is below log2(32) + d / 1024
 * roundings, halved by the root. */
static ck_tol fwd_tol(const ck *t, int64_t d, double roundings)
{
    return (ck_tol){ 1e-37, roundings + (t->dut->host ? 0 : 3 + (double)d / 2048), 0 };
}

static void rms_fwd(ck *t, const struct shape *s, bool with_w, bool in_place, bool keep)
{
    int64_t xs = s->d + s->pad, ys = in_place ? xs : s->d + 2 * s->pad;
    float *x = rows(t, s->n, s->d, xs), *w = ck_normal(t, s->d, 1), *rstd = ck_nan(t, s->n);
    float *dx = dev(t, x, s->n * xs), *drstd = dev(t, rstd, s->n);
    float *y = in_place ? x : ck_rand(t, s->n * ys, 1), *dy = in_place ? dx : dev(t, y, s->n * ys);
    tsr_rmsnorm_fwd_args r = { y, keep ? rstd : NULL, x, with_w ? w : NULL, s->n, s->d, xs, ys, eps }, d = r;
    d.y = dy;
    d.rstd = keep ? drstd : NULL;
    d.x = dx;
    d.w = with_w ? dev(t, w, s->d) : NULL;
    CK_RUN(t, rmsnorm_fwd, &r, &d);
    ck_f32(t, "y", y, dy, NULL, s->n * ys, fwd_tol(t, s->d, 2.5));
    if (keep) {
        ck_f32(t, "rstd", rstd, drstd, NULL, s->n, fwd_tol(t, s->d, 1));
    }
    ck_end(t);
}

void ck_rmsnorm_fwd(ck *t)
{
    for (int i = 0; i < 4 * SHAPES; i++) {
        rms_fwd(t, &shapes[i / 4], i % 4 != 0, i % 4 == 2, i % 4 != 3);
    }
}

/* Dots of d terms are off by a few roundings of the magnitudes added, and so is what is made of them. */
static void rms_bwd(ck *t, const struct shape *s, bool with_w, bool in_place)
{
    int64_t n = s->n, d = s->d, xs = d + s->pad, ys = d + 2 * s->pad, ds = in_place ? ys : d + 3 * s->pad;
    float *x = rows(t, n, d, xs), *w = ck_normal(t, d, 1), *dw = ck_normal(t, d, 1), *dy = ck_normal(t, n * ys, 1);
    float *rstd = rstds(t, x, n, d, xs, true), *dx = in_place ? dy : ck_rand(t, n * ds, 1);
    double *mx = ck_host(t, (size_t)(n * ds) * sizeof *mx), *mw = ck_host(t, (size_t)d * sizeof *mw);
    memset(mx, 0, (size_t)(n * ds) * sizeof *mx);
    for (int64_t j = 0; j < d; j++) {
        mw[j] = fabs((double)dw[j]);
    }
    for (int64_t i = 0; i < n; i++) {
        double r = (double)rstd[i], dot = 0;
        for (int64_t j = 0; j < d; j++) {
            dot += fabs((double)dy[i * ys + j] * (with_w ? (double)w[j] : 1) * (double)x[i * xs + j]);
        }
        for (int64_t j = 0; j < d; j++) {
            double v = (double)x[i * xs + j], g = (double)dy[i * ys + j];
            mx[i * ds + j] = r * fabs(g * (with_w ? (double)w[j] : 1)) + r * r * r * dot / (double)d * fabs(v);
            mw[j] += fabs(g * v * r);
        }
    }
    tsr_rmsnorm_bwd_args a = { dx, with_w ? dw : NULL, dy, x, with_w ? w : NULL, rstd, n, d, xs, ds, ys }, b = a;
    float *ddw = dev(t, dw, d);
    b.dy = dev(t, dy, n * ys);
    b.dx = in_place ? (float *)(uintptr_t)b.dy : dev(t, dx, n * ds);
    b.dw = with_w ? ddw : NULL;
    b.x = dev(t, x, n * xs);
    b.w = with_w ? dev(t, w, d) : NULL;
    b.rstd = dev(t, rstd, n);
    CK_RUN(t, rmsnorm_bwd, &a, &b);
    ck_f32(t, "dx", dx, b.dx, mx, n * ds, (ck_tol){ 1e-37, 2, 4 });
    ck_f32(t, "dw", dw, ddw, mw, d, (ck_tol){ 1e-37, 1, 4 });
    ck_end(t);
}

void ck_rmsnorm_bwd(ck *t)
{
    for (int i = 0; i < 3 * SHAPES; i++) {
        rms_bwd(t, &shapes[i / 3], i % 3 != 0, i % 3 == 2);
    }
}

void ck_rmsnorm_gated_fwd(ck *t)
{
    for (int i = 0; i < 2 * SHAPES; i++) {
        int64_t n = shapes[i / 2].n, d = shapes[i / 2].d;
        float *x = rows(t, n, d, d), *g = ck_normal(t, n * d, 4), *w = ck_normal(t, d, 1), *rstd = ck_nan(t, n);
        float *dx = dev(t, x, n * d), *drstd = dev(t, rstd, n);
        float *y = i % 2 == 0 ? ck_nan(t, n * d) : x, *dy = i % 2 == 0 ? dev(t, y, n * d) : dx;
        tsr_rmsnorm_gated_fwd_args r = { y, i % 2 == 0 ? rstd : NULL, x, g, w, n, d, eps };
        tsr_rmsnorm_gated_fwd_args u = { dy, i % 2 == 0 ? drstd : NULL, dx, dev(t, g, n * d), dev(t, w, d), n, d, eps };
        CK_RUN(t, rmsnorm_gated_fwd, &r, &u);
        ck_f32(t, "y", y, dy, NULL, n * d, fwd_tol(t, d, 6)); /* 4 of them of the sigmoid */
        ck_f32(t, "rstd", rstd, drstd, NULL, n, fwd_tol(t, d, 1));
        ck_end(t);
    }
}

void ck_rmsnorm_gated_bwd(ck *t)
{
    for (int i = 0; i < 2 * SHAPES; i++) {
        int64_t n = shapes[i / 2].n, d = shapes[i / 2].d;
        float *x = rows(t, n, d, d), *g = ck_normal(t, n * d, 4), *w = ck_normal(t, d, 1), *dy = ck_normal(t, n * d, 1);
        float *rstd = rstds(t, x, n, d, d, true), *dw = ck_normal(t, d, 1), *dg = ck_nan(t, n * d);
        float *dx = i % 2 == 0 ? ck_nan(t, n * d) : dy;
        size_t all = (size_t)(n * d) * sizeof(double);
        double *mx = ck_host(t, all), *mg = ck_host(t, all), *mw = ck_host(t, (size_t)d * sizeof *mw);
        for (int64_t j = 0; j < d; j++) {
            mw[j] = fabs((double)dw[j]);
        }
        for (int64_t k = 0; k < n; k++) {
            double r = (double)rstd[k], dot = 0;
            for (int64_t j = k * d; j < (k + 1) * d; j++) {
                dot += fabs((double)dy[j] * (double)w[j - k * d] * (double)x[j]) / (1 + exp(-(double)g[j]));
            }
            for (int64_t j = k * d; j < (k + 1) * d; j++) {
                double s = 1 / (1 + exp(-(double)g[j])), xr = fabs((double)x[j]) * r, y = fabs((double)dy[j]);
                double gain = fabs((double)w[j - k * d]);
                mx[j] = r * y * s * gain + r * r * dot / (double)d * xr;
                mg[j] = y * xr * gain * s; /* 1 - s keeps the whole error of s near 1 */
                mw[j - k * d] += y * xr * s;
            }
        }
        tsr_rmsnorm_gated_bwd_args a = { dx, dg, dw, dy, x, g, w, rstd, n, d }, b = a;
        b.dy = dev(t, dy, n * d);
        b.dx = i % 2 == 0 ? dev(t, dx, n * d) : (float *)(uintptr_t)b.dy;
        b.dg = dev(t, dg, n * d);
        b.dw = dev(t, dw, d);
        b.x = dev(t, x, n * d);
        b.g = dev(t, g, n * d);
        b.w = dev(t, w, d);
        b.rstd = dev(t, rstd, n);
        CK_RUN(t, rmsnorm_gated_bwd, &a, &b);
        ck_f32(t, "dx", dx, b.dx, mx, n * d, (ck_tol){ 1e-37, 2, 6 });
        ck_f32(t, "dg", dg, b.dg, mg, n * d, (ck_tol){ 1e-37, 4, 4 });
        ck_f32(t, "dw", dw, b.dw, mw, d, (ck_tol){ 1e-37, 1, 6 });
        ck_end(t);
    }
}

void ck_l2norm_fwd(ck *t)
{
    for (int i = 0; i < 2 * SHAPES; i++) {
        int64_t n = shapes[i / 2].n, d = shapes[i / 2].d;
        float scale = i % 4 < 2 ? 1 : 0.088388346f;
        float *x = rows(t, n, d, d), *rstd = ck_nan(t, n), *dx = dev(t, x, n * d), *drstd = dev(t, rstd, n);
        float *y = i % 2 == 0 ? ck_nan(t, n * d) : x, *dy = i % 2 == 0 ? dev(t, y, n * d) : dx;
        tsr_l2norm_fwd_args r = { y, i % 2 == 0 ? rstd : NULL, x, n, d, eps, scale };
        tsr_l2norm_fwd_args u = { dy, i % 2 == 0 ? drstd : NULL, dx, n, d, eps, scale };
        CK_RUN(t, l2norm_fwd, &r, &u);
        ck_f32(t, "y", y, dy, NULL, n * d, fwd_tol(t, d, 2.5));
        ck_f32(t, "rstd", rstd, drstd, NULL, n, fwd_tol(t, d, 1));
        ck_end(t);
    }
}

void ck_l2norm_bwd(ck *t)
{
    for (int i = 0; i < 2 * SHAPES; i++) {
        int64_t n = shapes[i / 2].n, d = shapes[i / 2].d;
        float scale = i % 4 < 2 ? 1 : 0.088388346f;
        float *x = rows(t, n, d, d), *dy = ck_normal(t, n * d, 1), *rstd = rstds(t, x, n, d, d, false);
        float *dx = i % 2 == 0 ? ck_nan(t, n * d) : dy;
        double *mag = ck_host(t, (size_t)(n * d) * sizeof *mag);
        for (int64_t k = 0; k < n; k++) {
            double r = (double)rstd[k], dot = 0;
            for (int64_t j = k * d; j < (k + 1) * d; j++) {
                dot += fabs((double)x[j] * r * (double)dy[j]);
            }
            for (int64_t j = k * d; j < (k + 1) * d; j++) {
                mag[j] = r * (double)scale * (fabs((double)dy[j]) + fabs((double)x[j]) * r * dot);
            }
        }
        tsr_l2norm_bwd_args a = { dx, dy, x, rstd, n, d, scale }, b = a;
        b.dy = dev(t, dy, n * d);
        b.dx = i % 2 == 0 ? dev(t, dx, n * d) : (float *)(uintptr_t)b.dy;
        b.x = dev(t, x, n * d);
        b.rstd = dev(t, rstd, n);
        CK_RUN(t, l2norm_bwd, &a, &b);
        ck_f32(t, "dx", dx, b.dx, mag, n * d, (ck_tol){ 1e-37, 2, 4 });
        ck_end(t);
    }
}
