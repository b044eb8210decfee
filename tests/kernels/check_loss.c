/* check_loss.c - checks of kernels/ops/loss.h. */
#include "tests/kernels/check.h"

#include <math.h>

static const int64_t shapes[][2] = { /* rows, vocabulary */
    { 0, 3 }, { 1, 1 }, { 4, 2 }, { 9, 7 }, { 8, 8 }, { 5, 15 }, { 20, 16 }, { 3, 17 }, { 12, 1024 }, { 11, 1033 }, { 3, 20003 }
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

/* Rows of another size and far from 0 (an exponential of it overflows), one with logits that are masked. */
static float *logits(ck *t, int64_t n, int64_t v)
{
    float *x = ck_normal(t, n * v, 2);
    for (int64_t i = 0; i < n; i++) {
        for (int64_t j = 0; j < v; j++) {
            float *p = &x[i * v + j];
            *p = i % 4 == 1 ? 10 * *p - 3000 : i % 4 == 2 ? *p + 5000 : i % 4 == 3 && j % 3 == 1 ? -INFINITY : *p;
        }
    }
    return x;
}

static int32_t *targets(ck *t, int64_t n, int64_t v)
{
    int32_t *p = ck_host(t, (size_t)n * sizeof *p);
    for (int64_t i = 0; i < n; i++) {
        int32_t some = (int32_t)(ck_random(t) % (uint64_t)v);
        p[i] = i % 5 == 4 ? -1 - (int32_t)i : i % 4 == 3 ? some / 3 * 3 : some; /* none that is masked */
    }
    return p;
}

static double lse_of(const float *x, int64_t v)
{
    double most = -INFINITY, sum = 0;
    for (int64_t j = 0; j < v; j++) {
        most = (double)x[j] > most ? (double)x[j] : most;
    }
    for (int64_t j = 0; j < v; j++) {
        sum += exp((double)x[j] - most);
    }
    return most + log(sum);
}

/* lse = most + log(sum): the sum's share of error is that of one exponential, and what rounding its argument does, which
 * weighs as the term does; p (most - x) is small wherever most - x is not. */
void ck_xent_fwd(ck *t)
{
    for (int i = 0; i < SHAPES; i++) {
        int64_t n = shapes[i][0], v = shapes[i][1];
        size_t bytes = (size_t)n * sizeof(float);
        float *x = logits(t, n, v), *loss = ck_nan(t, n), *lse = ck_nan(t, n);
        int32_t *target = targets(t, n, v);
        double *mag = ck_host(t, (size_t)n * sizeof *mag);
        for (int64_t k = 0; k < n; k++) {
            double whole = lse_of(x + k * v, v);
            mag[k] = 1;
            for (int64_t j = 0; j < v; j++) {
                double less = whole - (double)x[k * v + j];
                mag[k] += isfinite(less) ? exp(-less) * fabs(less) : 0;
            }
        }
        tsr_xent_fwd_args r = { loss, lse, x, target, n, v }, d = r;
        d.loss = ck_dev(t, loss, bytes);
        d.lse = ck_dev(t, lse, bytes);
        d.logits = ck_dev(t, x, (size_t)(n * v) * sizeof *x);
        d.target = ck_dev(t, target, (size_t)n * sizeof *target);
        CK_RUN(t, xent_fwd, &r, &d);
        ck_f32(t, "loss", loss, d.loss, mag, n, (ck_tol){ 0, 1, 2 });
        ck_f32(t, "lse", lse, d.lse, mag, n, (ck_tol){ 0, 1, 2 });
        ck_end(t);
    }
}

/* Rounding logits - lse moves the exponential by half an ulp of the difference. */
void ck_xent_bwd(ck *t)
{
    for (int i = 0; i < 2 * SHAPES; i++) {
        int64_t n = shapes[i / 2][0], v = shapes[i / 2][1];
        float *x = logits(t, n, v), *lse = ck_nan(t, n), scale = i % 4 < 2 ? 1.0f / 64 : -3;
        float *dx = ck_dev(t, x, (size_t)(n * v) * sizeof *x);
        float *out = i % 2 == 0 ? ck_nan(t, n * v) : x, *dev = i % 2 == 0 ? ck_dev(t, out, (size_t)(n * v) * sizeof *x) : dx;
        int32_t *target = targets(t, n, v);
        double *mag = ck_host(t, (size_t)(n * v) * sizeof *mag);
        for (int64_t k = 0; k < n; k++) {
            lse[k] = (float)lse_of(x + k * v, v);
            for (int64_t j = k * v; j < (k + 1) * v; j++) {
                double less = (double)lse[k] - (double)x[j], p = isfinite(less) ? exp(-less) * (2 + fabs(less)) : 0;
                mag[j] = fabs((double)scale) * (p + (j - k * v == target[k] ? 1 : 0));
            }
        }
        tsr_xent_bwd_args r = { out, x, lse, target, n, v, scale }, d = r;
        d.dlogits = dev;
        d.logits = dx;
        d.lse = ck_dev(t, lse, (size_t)n * sizeof *lse);
        d.target = ck_dev(t, target, (size_t)n * sizeof *target);
        CK_RUN(t, xent_bwd, &r, &d);
        ck_f32(t, "dlogits", out, dev, mag, n * v, (ck_tol){ 1e-37, 1, 1.5 });
        ck_end(t);
    }
}
