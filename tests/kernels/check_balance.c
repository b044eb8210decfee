/* check_balance.c - checks of kernels/ops/balance.h. Everything here is f64 or whole numbers on every backend, in the
 * same order: the bits agree. */
#include "tests/kernels/check.h"

#include <math.h>
#include <string.h>

static void count_case(ck *t, int64_t n, int64_t e, int64_t k, int64_t bins, bool odd)
{
    size_t hist = (size_t)(e * bins) * sizeof(int64_t);
    float *s = ck_rand(t, n * e, 0.5f), *bias = ck_rand(t, e, 0.2f);
    for (int64_t i = 0; i < n * e; i++) {
        s[i] += 0.5f;
        if (odd && ck_random(t) % 5 == 0) { /* ties, what is no score, and what falls outside */
            static const float values[] = { 0.5f, 0.5f, 0.25f, (float)NAN, (float)INFINITY, (float)-INFINITY,
                                            30,   -30 };
            s[i] = values[ck_random(t) % 8];
        }
    }
    tsr_balance_count_args r = { .hist = ck_host(t, hist),
                                 .s = s,
                                 .bias = bias,
                                 .n = n,
                                 .e = e,
                                 .k = k,
                                 .bins = bins,
                                 .low = -1.2,
                                 .high = 1.2 },
                           d = r;
    for (int64_t i = 0; i < e * bins; i++) {
        r.hist[i] = (int64_t)(ck_random(t) % 1000);
    }
    d.hist = ck_dev(t, r.hist, hist);
    d.s = ck_dev(t, s, (size_t)(n * e) * sizeof *s);
    d.bias = ck_dev(t, bias, (size_t)e * sizeof *bias);
    CK_RUN(t, balance_count, &r, &d);
    ck_exact(t, "hist", r.hist, d.hist, hist);
    ck_end(t);
}

void ck_balance_count(ck *t)
{
    count_case(t, 0, 4, 2, 10, false);
    count_case(t, 1, 2, 1, 1, false);
    count_case(t, 33, 7, 6, 10, false);
    count_case(t, 100, 16, 3, 100, true);
    count_case(t, 65, 33, 8, 1000, false);
    count_case(t, 65, 65, 20, 1000, true);
    count_case(t, 300, 896, 16, 1000, false);
    count_case(t, 31, 896, 16, 1000, true);
}

void ck_balance_exact(ck *t)
{
    static const int64_t sizes[][4] = { { 2, 2, 1, 1 }, { 64, 8, 3, 4 }, { 101, 16, 2, 3 }, { 40, 5, 4, 0 } };
    for (size_t c = 0; c < sizeof sizes / sizeof *sizes; c++) {
        int64_t n = sizes[c][0], e = sizes[c][1], k = sizes[c][2];
        size_t beta = (size_t)e * sizeof(double);
        tsr_balance_exact_args r = { .beta = ck_host(t, beta),
                                     .s = ck_rand(t, n * e, 1),
                                     .n = n,
                                     .e = e,
                                     .k = k,
                                     .rounds = sizes[c][3] },
                               d = r;
        for (int64_t j = 0; j < e; j++) {
            r.beta[j] = (double)(ck_random(t) % 1000) * 1e-3;
        }
        r.workspace_bytes = d.workspace_bytes = tsr_balance_exact_workspace(&r);
        r.workspace = ck_host(t, r.workspace_bytes);
        d.workspace = ck_dev(t, r.workspace, r.workspace_bytes);
        d.beta = ck_dev(t, r.beta, beta);
        d.s = ck_dev(t, r.s, (size_t)(n * e) * sizeof(float));
        CK_RUN(t, balance_exact, &r, &d);
        ck_exact(t, "beta", r.beta, d.beta, beta);
        ck_end(t);
    }
}

void ck_balance_solve(ck *t)
{
    for (int c = 0; c < 6; c++) {
        int64_t e = c % 3 == 0 ? 2 : 37, bins = c % 2 == 0 ? 1 : 57;
        size_t hist = (size_t)(e * bins) * sizeof(int64_t), bias = (size_t)e * sizeof(float);
        int64_t *h = ck_host(t, hist);
        for (int64_t i = 0; i < e * bins; i++) {
            h[i] = (int64_t)(ck_random(t) % 50 * (ck_random(t) % 2));
        }
        tsr_balance_solve_args r = { .bias = ck_nan(t, e),
                                     .hist = h,
                                     .tokens = 700,
                                     .e = e,
                                     .k = 1,
                                     .bins = bins,
                                     .low = -1.1,
                                     .high = 1.3,
                                     .centre = c > 2 },
                               d = r;
        d.bias = ck_dev(t, r.bias, bias);
        d.hist = ck_dev(t, h, hist);
        CK_RUN(t, balance_solve, &r, &d);
        ck_exact(t, "bias", r.bias, d.bias, bias);
        ck_end(t);
    }
}

void ck_balance_sign(ck *t)
{
    enum { E = 19 };
    int64_t load[E];
    for (int64_t j = 0; j < E; j++) {
        load[j] = j % 3 == 0 ? 5 : (int64_t)(ck_random(t) % 11);
    }
    tsr_balance_sign_args r = { .bias = ck_rand(t, E, 1), .load = load, .e = E, .rate = 1e-3 }, d = r;
    d.bias = ck_dev(t, r.bias, E * sizeof(float));
    d.load = ck_dev(t, load, sizeof load);
    CK_RUN(t, balance_sign, &r, &d);
    ck_exact(t, "bias", r.bias, d.bias, E * sizeof(float));
    ck_end(t);
}
