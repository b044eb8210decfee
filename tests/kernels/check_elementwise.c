/* check_elementwise.c - checks of kernels/ops/elementwise.h. */
#include "tests/kernels/check.h"

#include <math.h>

/* Around a vector, a piece of work and several of them. */
static const int64_t sizes[] = { 0, 1, 7, 8, 9, 15, 16, 17, 255, 1000, 16384, 16385, 40003 };
enum { SIZES = sizeof sizes / sizeof *sizes };

/* An input on both backends. */
typedef struct pair {
    float *ref, *dut;
} pair;

static pair input(ck *t, int64_t n)
{
    static const float odd[] = { 0, -0.0f, 1e-30f, -1e-4f, 0.62f, 0.63f, -17, 88, -88, 90, -90, 110, -110, 1e4f, -1e4f };
    pair p = { .ref = ck_normal(t, n, 3) };
    for (size_t k = 0; k < sizeof odd / sizeof *odd; k++) {
        if (n > 0 && ck_random(t) % 2 == 0) {
            p.ref[ck_random(t) % (uint64_t)n] = odd[k];
        }
    }
    p.dut = ck_dev(t, p.ref, (size_t)n * sizeof(float));
    return p;
}

static pair output(ck *t, int64_t n)
{
    pair p = { .ref = ck_nan(t, n) };
    p.dut = ck_dev(t, p.ref, (size_t)n * sizeof(float));
    return p;
}

void ck_add(ck *t)
{
    for (int i = 0; i < 3 * SIZES; i++) {
        int64_t n = sizes[i / 3];
        pair a = input(t, n), b = input(t, n), y = i % 3 == 0 ? output(t, n) : i % 3 == 1 ? a : b;
        CK_RUN(t, add, (&(tsr_add_args){ y.ref, a.ref, b.ref, n }), (&(tsr_add_args){ y.dut, a.dut, b.dut, n }));
        ck_exact(t, "y", y.ref, y.dut, (size_t)n * sizeof(float));
        ck_end(t);
    }
}

void ck_copy2d(ck *t)
{
    static const int64_t shapes[][4] = { { 0, 3, 3, 3 },     { 1, 1, 1, 1 },         { 5, 7, 9, 8 },   { 3, 16, 16, 20 },
                                         { 300, 65, 65, 65 }, { 2, 20000, 20001, 20000 }, { 17, 1, 4, 3 } };
    for (size_t i = 0; i < 2 * sizeof shapes / sizeof *shapes; i++) {
        const int64_t *s = shapes[i / 2], n = s[0], d = s[1];
        tsr_dtype dtype = i % 2 == 0 ? TSR_DT_F32 : TSR_DT_BF16;
        pair x = input(t, n * s[3]);
        /* What lies between the rows stays. */
        size_t bytes = (size_t)(n * s[2]) * (dtype == TSR_DT_F32 ? 4 : 2);
        void *y = ck_rand(t, n * s[2], 1), *dev = ck_dev(t, y, bytes);
        CK_RUN(t, copy2d, (&(tsr_copy2d_args){ y, x.ref, n, d, s[2], s[3], dtype }),
               (&(tsr_copy2d_args){ dev, x.dut, n, d, s[2], s[3], dtype }));
        ck_exact(t, "dst", y, dev, bytes);
        ck_end(t);
    }
}

/* A sigmoid has two roundings and the error of one exponential, below 2 ulp; it may be 0 where it is below 1e-38. */
void ck_sigmoid_fwd(ck *t)
{
    for (int i = 0; i < 2 * SIZES; i++) {
        int64_t n = sizes[i / 2];
        pair x = input(t, n), y = i % 2 == 0 ? output(t, n) : x;
        CK_RUN(t, sigmoid_fwd, (&(tsr_sigmoid_fwd_args){ y.ref, x.ref, n }), (&(tsr_sigmoid_fwd_args){ y.dut, x.dut, n }));
        ck_f32(t, "y", y.ref, y.dut, NULL, n, (ck_tol){ 2e-38, 4, 0 });
        ck_end(t);
    }
}

void ck_sigmoid_bwd(ck *t)
{
    for (int i = 0; i < 2 * SIZES; i++) {
        int64_t n = sizes[i / 2];
        pair dy = input(t, n), y = { .ref = ck_rand(t, n, 1) }, dx = i % 2 == 0 ? output(t, n) : dy;
        for (int64_t k = 0; k < n; k++) {
            y.ref[k] = k % 7 == 0 ? (float)(k % 2) : fabsf(y.ref[k]);
        }
        y.dut = ck_dev(t, y.ref, (size_t)n * sizeof(float));
        CK_RUN(t, sigmoid_bwd, (&(tsr_sigmoid_bwd_args){ dx.ref, dy.ref, y.ref, n }),
               (&(tsr_sigmoid_bwd_args){ dx.dut, dy.dut, y.dut, n }));
        ck_f32(t, "dx", dx.ref, dx.dut, NULL, n, (ck_tol){ 2e-38, 2, 0 });
        ck_end(t);
    }
}

/* Factors up to 1e4 beside a sigmoid that may be 0 below 1e-38: 2e-34; beside two of them and a product of 1e8: 4e-30. */
void ck_gate_fwd(ck *t)
{
    for (int i = 0; i < 2 * SIZES; i++) {
        int64_t n = sizes[i / 2];
        pair x = input(t, n), g = input(t, n), y = i % 2 == 0 ? output(t, n) : x;
        CK_RUN(t, gate_fwd, (&(tsr_gate_fwd_args){ y.ref, x.ref, g.ref, n }),
               (&(tsr_gate_fwd_args){ y.dut, x.dut, g.dut, n }));
        ck_f32(t, "y", y.ref, y.dut, NULL, n, (ck_tol){ 2e-34, 5, 0 });
        ck_end(t);
    }
}

void ck_gate_bwd(ck *t)
{
    for (int i = 0; i < 2 * SIZES; i++) {
        int64_t n = sizes[i / 2];
        pair dy = input(t, n), x = input(t, n), g = input(t, n), dg = output(t, n), dx = i % 2 == 0 ? output(t, n) : dy;
        double *mag = ck_host(t, (size_t)n * sizeof *mag); /* 1 - s keeps the whole error of s near 1 */
        for (int64_t k = 0; k < n; k++) {
            mag[k] = fabs((double)dy.ref[k] * (double)x.ref[k]) / (1 + exp(-(double)g.ref[k]));
        }
        CK_RUN(t, gate_bwd, (&(tsr_gate_bwd_args){ dx.ref, dg.ref, dy.ref, x.ref, g.ref, n }),
               (&(tsr_gate_bwd_args){ dx.dut, dg.dut, dy.dut, x.dut, g.dut, n }));
        ck_f32(t, "dx", dx.ref, dx.dut, NULL, n, (ck_tol){ 2e-34, 5, 0 });
        ck_f32(t, "dg", dg.ref, dg.dut, mag, n, (ck_tol){ 4e-30, 6, 3 });
        ck_end(t);
    }
}

static const struct glu_kind {
    tsr_glu kind;
    float b1, b2;
} kinds[] = { { TSR_GLU_SITU, 4, 25 }, { TSR_GLU_SITU, 0.5f, 1 }, { TSR_GLU_SWIGLU, 0, 0 } };

/* Two tanh of 3 ulp, a sigmoid of 3, six products and quotients. A quotient's rounding is no more than that of tanh. */
void ck_glu_fwd(ck *t)
{
    for (int i = 0; i < 3 * 3 * SIZES; i++) {
        const struct glu_kind *k = &kinds[i % 3];
        int64_t n = sizes[i / 9];
        pair g = input(t, n), u = input(t, n), y = i / 3 % 3 == 0 ? output(t, n) : i / 3 % 3 == 1 ? g : u;
        CK_RUN(t, glu_fwd, (&(tsr_glu_fwd_args){ y.ref, g.ref, u.ref, n, k->kind, k->b1, k->b2 }),
               (&(tsr_glu_fwd_args){ y.dut, g.dut, u.dut, n, k->kind, k->b1, k->b2 }));
        ck_f32(t, "y", y.ref, y.dut, NULL, n, (ck_tol){ 4e-30, 14, 0 });
        ck_end(t);
    }
}

void ck_glu_bwd(ck *t)
{
    for (int i = 0; i < 2 * 3 * SIZES; i++) {
        const struct glu_kind *k = &kinds[i % 3];
        int64_t n = sizes[i / 6];
        pair dy = input(t, n), g = input(t, n), u = input(t, n);
        pair dg = i / 3 % 2 == 0 ? output(t, n) : g, du = i / 3 % 2 == 0 ? output(t, n) : u;
        double *mg = ck_host(t, (size_t)n * sizeof *mg), *mu = ck_host(t, (size_t)n * sizeof *mu);
        for (int64_t j = 0; j < n; j++) { /* differences of terms near 1 keep the whole error of the terms */
            double a = (double)g.ref[j], b = (double)u.ref[j], d = fabs((double)dy.ref[j]), s = 1 / (1 + exp(-a));
            bool situ = k->kind == TSR_GLU_SITU;
            double f = situ ? (double)k->b1 * fabs(tanh(a / (double)k->b1)) : fabs(a);
            double v = situ ? (double)k->b2 * fabs(tanh(b / (double)k->b2)) : fabs(b);
            mg[j] = d * v * s * (1 + f);
            mu[j] = situ ? d * f * s : 0;
        }
        CK_RUN(t, glu_bwd, (&(tsr_glu_bwd_args){ dg.ref, du.ref, dy.ref, g.ref, u.ref, n, k->kind, k->b1, k->b2 }),
               (&(tsr_glu_bwd_args){ dg.dut, du.dut, dy.dut, g.dut, u.dut, n, k->kind, k->b1, k->b2 }));
        ck_f32(t, "dg", dg.ref, dg.dut, mg, n, (ck_tol){ 4e-30, 6, 12 });
        ck_f32(t, "du", du.ref, du.dut, mu, n, (ck_tol){ 4e-30, 6, 12 });
        ck_end(t);
    }
}

void ck_sum_squares(ck *t)
{
    for (int i = 0; i <= SIZES; i++) {
        int64_t n = i < SIZES ? sizes[i] : 257 * 16384 + 5; /* more pieces than are summed at once */
        pair x = { .ref = ck_normal(t, n, 3) };
        x.dut = ck_dev(t, x.ref, (size_t)n * sizeof(float));
        double *out = ck_host(t, sizeof *out), *dev;
        *out = 0.25;
        dev = ck_dev(t, out, sizeof *out);
        CK_RUN(t, sum_squares, (&(tsr_sum_squares_args){ out, x.ref, n }), (&(tsr_sum_squares_args){ dev, x.dut, n }));
        const double *got = ck_back(t, dev, sizeof *got);
        /* The reference's own sum is the worse one: n roundings of f64, of which the square root adds up. */
        if (!(fabs(*got - *out) <= 4 * 2.3e-16 * sqrt(1 + (double)n) * *out)) {
            ck_fail(t, "n %lld: want %.17g got %.17g", (long long)n, *out, *got);
        }
        ck_end(t);
    }
}
