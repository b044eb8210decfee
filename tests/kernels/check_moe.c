/* check_moe.c - checks of kernels/ops/moe.h. */
#include "tests/kernels/check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const double tiny = 1.1754943508222875e-38; /* below the smallest normal number simd may give 0 */

static int64_t below(ck *t, int64_t n)
{
    return (int64_t)(ck_random(t) % (uint64_t)n);
}

/* ---- router -------------------------------------------------------------------------------------------------- */

static int falling(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x < y) - (x > y);
}

/* True when no two neighbours among the k + 1 best are nearer than the rounding of scores could bridge. */
static bool clear_cut(const float *logits, const float *bias, int64_t e, int64_t k, double *sorted)
{
    for (int64_t j = 0; j < e; j++) {
        sorted[j] = 1 / (1 + exp(-(double)logits[j])) + (double)bias[j];
    }
    qsort(sorted, (size_t)e, sizeof *sorted, falling);
    for (int64_t j = 0; j < k && j + 1 < e; j++) {
        if (sorted[j] - sorted[j + 1] < 4e-6) {
            return false;
        }
    }
    return true;
}

static void router_case(ck *t, float *logits, const float *bias, int64_t n, int64_t e, int64_t k,
                        bool normalise, bool alias)
{
    size_t ne = (size_t)(n * e) * sizeof(float), nk = (size_t)(n * k) * sizeof(float);
    tsr_router_fwd_args r = { .s = ck_nan(t, n * e),
                              .w = ck_nan(t, n * k),
                              .ids = ck_host(t, nk),
                              .logits = logits,
                              .bias = bias,
                              .n = n,
                              .e = e,
                              .k = k,
                              .scale = 2.446f,
                              .normalise = normalise },
                        d = r;
    float *dl = ck_dev(t, logits, ne);
    d.logits = dl;
    d.s = alias ? dl : ck_dev(t, r.s, ne);
    d.w = ck_dev(t, r.w, nk);
    d.ids = ck_dev(t, r.ids, nk);
    d.bias = ck_dev(t, bias, (size_t)e * sizeof *bias);
    CK_RUN(t, router_fwd, &r, &d);
    /* exp 2 ulp, 1 + exp and the division half each, the reference half. */
    ck_f32(t, "s", r.s, d.s, NULL, n * e, (ck_tol){ .abs = tiny, .ulps = 3.5 });
    ck_exact(t, "ids", r.ids, d.ids, nk);
    /* The error of s twice, once through the sum. */
    ck_f32(t, "w", r.w, d.w, NULL, n * k, (ck_tol){ .abs = tiny, .ulps = normalise ? 7.5 : 4 });
    ck_end(t);
}

static void router_random(ck *t, int64_t n, int64_t e, int64_t k, bool normalise, bool alias)
{
    float *logits = ck_host(t, (size_t)(n * e) * sizeof *logits), *bias = ck_rand(t, e, 0.3f);
    double *sorted = ck_host(t, (size_t)(e + 1) * sizeof *sorted);
    for (int64_t i = 0; i < n; i++) {
        do {
            for (int64_t j = 0; j < e; j++) {
                logits[i * e + j] = (float)((double)(ck_random(t) >> 40) / 8388608.0 - 1.0) * 6;
            }
        } while (!clear_cut(logits + i * e, bias, e, k, sorted));
    }
    router_case(t, logits, bias, n, e, k, normalise, alias);
}

/* Many exact ties, and one row of each kind of number that is not a score. */
static void router_ties(ck *t, int64_t e, int64_t k)
{
    enum { N = 9 };
    float *logits = ck_host(t, (size_t)(N * e) * sizeof *logits),
          *bias = ck_host(t, (size_t)e * sizeof *bias);
    for (int64_t j = 0; j < e; j++) {
        bias[j] = 0.125f * (float)below(t, 3);
    }
    for (int64_t j = 0; j < N * e; j++) {
        logits[j] = (float)below(t, 3) - 1.0f;
    }
    for (int64_t j = 0; j < e; j++) {
        logits[3 * e + j] = (float)NAN;
        logits[4 * e + j] = below(t, 2) == 0 ? (float)NAN : 0.5f;
        logits[5 * e + j] = below(t, 2) == 0 ? (float)INFINITY : (float)-INFINITY;
        logits[6 * e + j] = -200.0f;
        logits[7 * e + j] = 0.0f;
        logits[8 * e + j] = below(t, 20) == 0 ? 200.0f : (float)NAN;
    }
    router_case(t, logits, bias, N, e, k, true, false);
}

void ck_router_fwd(ck *t)
{
    static const int64_t sizes[][3] = { { 0, 8, 2 },     { 1, 1, 1 },     { 1, 7, 7 },   { 3, 8, 1 },
                                        { 5, 9, 2 },     { 2, 15, 4 },    { 2, 16, 16 }, { 2, 17, 16 },
                                        { 7, 31, 8 },    { 4, 33, 33 },   { 3, 64, 6 },  { 300, 256, 8 },
                                        { 70, 896, 16 }, { 3, 1021, 100 } };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        router_random(t, sizes[i][0], sizes[i][1], sizes[i][2], i % 3 != 0, i % 2 != 0);
    }
    router_ties(t, 5, 3);
    router_ties(t, 16, 16);
    router_ties(t, 37, 8);
    router_ties(t, 896, 16);
}

static void distinct(ck *t, int32_t *ids, int64_t e, int64_t k)
{
    for (int64_t j = 0; j < k; j++) {
        bool again = true;
        while (again) {
            ids[j] = (int32_t)below(t, e);
            again = false;
            for (int64_t i = 0; i < j; i++) {
                again = again || ids[i] == ids[j];
            }
        }
    }
}

static void router_bwd_case(ck *t, int64_t n, int64_t e, int64_t k, bool normalise, bool alias)
{
    size_t ne = (size_t)(n * e) * sizeof(float), nk = (size_t)(n * k) * sizeof(float);
    float *s = ck_rand(t, n * e, 0.5f), *dw = ck_normal(t, n * k, 1), *w = ck_nan(t, n * k);
    int32_t *ids = ck_host(t, nk);
    double *mag = ck_host(t, (size_t)(n * e) * sizeof *mag);
    for (int64_t i = 0; i < n * e; i++) {
        s[i] += 0.5f;
        mag[i] = 0;
    }
    for (int64_t i = 0; i < n; i++) {
        distinct(t, ids + i * k, e, k);
    }
    tsr_router_bwd_args r = { .dlogits = ck_nan(t, n * e),
                              .dw = dw,
                              .s = s,
                              .w = w,
                              .ids = ids,
                              .n = n,
                              .e = e,
                              .k = k,
                              .scale = 2.446f,
                              .normalise = normalise },
                        d = r;
    float *ds = ck_dev(t, s, ne);
    d.s = ds;
    d.dw = ck_dev(t, dw, nk);
    d.w = ck_dev(t, w, nk);
    d.ids = ck_dev(t, ids, nk);
    d.dlogits = alias ? ds : ck_dev(t, r.dlogits, ne);
    CK_RUN(t, router_bwd, &r, &d);
    /* Both work in f64 and round once each. */
    ck_f32(t, "dlogits", r.dlogits, d.dlogits, mag, n * e, (ck_tol){ .ulps = 1 });
    ck_end(t);
}

void ck_router_bwd(ck *t)
{
    router_bwd_case(t, 0, 4, 2, true, false);
    router_bwd_case(t, 1, 1, 1, false, false);
    router_bwd_case(t, 5, 17, 17, true, true);
    router_bwd_case(t, 6, 33, 3, false, true);
    router_bwd_case(t, 90, 896, 16, true, false);
    router_bwd_case(t, 91, 896, 16, true, true);
}

/* ---- plan ---------------------------------------------------------------------------------------------------- */

static void plan_case(ck *t, int64_t n, int64_t e, int64_t k, int64_t among)
{
    size_t nk = (size_t)(n * k) * sizeof(int32_t), eo = (size_t)(e + 1) * sizeof(int64_t);
    int32_t *ids = ck_host(t, nk);
    for (int64_t i = 0; i < n * k; i++) {
        ids[i] = (int32_t)(e - 1 - below(t, among));
    }
    tsr_moe_plan_args r = { .offset = ck_host(t, eo),
                            .order = ck_host(t, nk),
                            .pos = ck_host(t, nk),
                            .ids = ids,
                            .n = n,
                            .e = e,
                            .k = k },
                      d = r;
    d.offset = ck_dev(t, r.offset, eo);
    d.order = ck_dev(t, r.order, nk);
    d.pos = ck_dev(t, r.pos, nk);
    d.ids = ck_dev(t, ids, nk);
    CK_RUN(t, moe_plan, &r, &d);
    ck_exact(t, "offset", r.offset, d.offset, eo);
    ck_exact(t, "order", r.order, d.order, nk);
    ck_exact(t, "pos", r.pos, d.pos, nk);
    ck_end(t);
}

void ck_moe_plan(ck *t)
{
    plan_case(t, 0, 5, 2, 5);
    plan_case(t, 1, 1, 1, 1);
    plan_case(t, 1, 896, 16, 896);
    plan_case(t, 101, 7, 3, 7);
    plan_case(t, 1000, 8, 4, 1); /* all in the last */
    plan_case(t, 4099, 896, 16, 896);
    plan_case(t, 4099, 896, 16, 11);
    plan_case(t, 60013, 3, 2, 3);
}

/* ---- rows ---------------------------------------------------------------------------------------------------- */

static void permutation(ck *t, int32_t *order, int32_t *pos, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        int64_t j = below(t, i + 1);
        order[i] = order[j];
        order[j] = (int32_t)i;
    }
    for (int64_t i = 0; i < n; i++) {
        pos[order[i]] = (int32_t)i;
    }
}

/* n, k, d. */
static const int64_t shapes[][3] = { { 0, 2, 8 },    { 1, 1, 1 },    { 1, 16, 3584 }, { 3, 2, 7 },
                                     { 4, 3, 8 },    { 5, 4, 9 },    { 2, 8, 15 },    { 2, 5, 16 },
                                     { 7, 3, 17 },   { 3, 2, 63 },   { 2, 4, 64 },    { 33, 16, 129 },
                                     { 2, 2, 1024 }, { 2, 3, 1025 }, { 9, 16, 2309 } };
enum { SHAPES = sizeof shapes / sizeof *shapes };

void ck_moe_gather(ck *t)
{
    for (int c = 0; c < SHAPES; c++) {
        int64_t n = shapes[c][0], k = shapes[c][1], d = shapes[c][2];
        size_t rows = (size_t)(n * k * d) * sizeof(float), nk = (size_t)(n * k) * sizeof(int32_t);
        int32_t *order = ck_host(t, nk), *pos = ck_host(t, nk);
        permutation(t, order, pos, n * k);
        tsr_moe_gather_args r = { .xs = ck_nan(t, n * k * d),
                                  .x = ck_normal(t, n * d, 1),
                                  .order = order,
                                  .n = n,
                                  .k = k,
                                  .d = d },
                            u = r;
        u.xs = ck_dev(t, r.xs, rows);
        u.x = ck_dev(t, r.x, (size_t)(n * d) * sizeof(float));
        u.order = ck_dev(t, order, nk);
        CK_RUN(t, moe_gather, &r, &u);
        ck_exact(t, "xs", r.xs, u.xs, rows);
        ck_end(t);
    }
}

/* Sums of |w y| over the k rows of each token. */
static double *magnitudes(ck *t, const float *y, const float *w, const int32_t *pos, int64_t n, int64_t k,
                          int64_t d)
{
    double *mag = ck_host(t, (size_t)(n * d) * sizeof *mag);
    for (int64_t i = 0; i < n * d; i++) {
        mag[i] = 0;
        for (int64_t j = 0; j < k; j++) {
            int64_t slot = i / d * k + j;
            mag[i] += fabs((w != NULL ? (double)w[slot] : 1) * (double)y[pos[slot] * d + i % d]);
        }
    }
    return mag;
}

void ck_moe_scatter(ck *t)
{
    for (int c = 0; c < SHAPES; c++) {
        int64_t n = shapes[c][0], k = shapes[c][1], d = shapes[c][2];
        size_t nk = (size_t)(n * k) * sizeof(int32_t);
        int32_t *order = ck_host(t, nk), *pos = ck_host(t, nk);
        permutation(t, order, pos, n * k);
        tsr_moe_scatter_args r = { .dx = ck_nan(t, n * d),
                                   .dxs = ck_normal(t, n * k * d, 1),
                                   .pos = pos,
                                   .n = n,
                                   .k = k,
                                   .d = d },
                             u = r;
        u.dx = ck_dev(t, r.dx, (size_t)(n * d) * sizeof(float));
        u.dxs = ck_dev(t, r.dxs, (size_t)(n * k * d) * sizeof(float));
        u.pos = ck_dev(t, pos, nk);
        CK_RUN(t, moe_scatter, &r, &u);
        /* k - 1 sums of at most mag, half an eps each; the reference rounds once. */
        ck_f32(t, "dx", r.dx, u.dx, magnitudes(t, r.dxs, NULL, pos, n, k, d), n * d,
               (ck_tol){ .ulps = 0.5, .red = 0.5 * (double)(k - 1) });
        ck_end(t);
    }
}

void ck_moe_combine_fwd(ck *t)
{
    for (int c = 0; c < SHAPES; c++) {
        int64_t n = shapes[c][0], k = shapes[c][1], d = shapes[c][2];
        size_t nk = (size_t)(n * k) * sizeof(int32_t);
        int32_t *order = ck_host(t, nk), *pos = ck_host(t, nk);
        permutation(t, order, pos, n * k);
        tsr_moe_combine_fwd_args r = { .u = ck_nan(t, n * d),
                                       .y = ck_normal(t, n * k * d, 1),
                                       .w = ck_rand(t, n * k, 1),
                                       .pos = pos,
                                       .n = n,
                                       .k = k,
                                       .d = d },
                                 u = r;
        u.u = ck_dev(t, r.u, (size_t)(n * d) * sizeof(float));
        u.y = ck_dev(t, r.y, (size_t)(n * k * d) * sizeof(float));
        u.w = ck_dev(t, r.w, nk);
        u.pos = ck_dev(t, pos, nk);
        CK_RUN(t, moe_combine_fwd, &r, &u);
        /* k fused products and sums of at most mag, half an eps each; the reference rounds once. */
        ck_f32(t, "u", r.u, u.u, magnitudes(t, r.y, r.w, pos, n, k, d), n * d,
               (ck_tol){ .ulps = 0.5, .red = 0.5 * (double)k });
        ck_end(t);
    }
}

void ck_moe_combine_bwd(ck *t)
{
    for (int c = 0; c < SHAPES; c++) {
        int64_t n = shapes[c][0], k = shapes[c][1], d = shapes[c][2];
        size_t nk = (size_t)(n * k) * sizeof(int32_t), rows = (size_t)(n * k * d) * sizeof(float);
        int32_t *order = ck_host(t, nk), *pos = ck_host(t, nk);
        permutation(t, order, pos, n * k);
        tsr_moe_combine_bwd_args r = { .dy = ck_nan(t, n * k * d),
                                       .dw = ck_nan(t, n * k),
                                       .du = ck_normal(t, n * d, 1),
                                       .y = ck_normal(t, n * k * d, 1),
                                       .w = ck_rand(t, n * k, 1),
                                       .pos = pos,
                                       .n = n,
                                       .k = k,
                                       .d = d },
                                 u = r;
        float *y = ck_dev(t, r.y, rows);
        u.y = y;
        u.dy = c % 2 != 0 ? y : ck_dev(t, r.dy, rows);
        u.dw = ck_dev(t, r.dw, nk);
        u.du = ck_dev(t, r.du, (size_t)(n * d) * sizeof(float));
        u.w = ck_dev(t, r.w, nk);
        u.pos = ck_dev(t, pos, nk);
        double *mag = ck_host(t, (size_t)(n * k) * sizeof *mag);
        for (int64_t i = 0; i < n * k; i++) {
            mag[i] = 0;
            for (int64_t j = 0; j < d; j++) {
                mag[i] += pow((double)r.du[i / k * d + j] * (double)r.y[pos[i] * d + j], 2);
            }
            mag[i] = sqrt(mag[i]);
        }
        CK_RUN(t, moe_combine_bwd, &r, &u);
        ck_exact(t, "dy", r.dy, u.dy, rows);
        /* At least 32 partial sums of d / 32 terms and 5 sums of them. A partial sum wanders by sqrt(terms), a rounding
         * is 0.29 eps of it at most in the mean square: 0.2 eps sqrt(terms) times the root of the sum of squares; five
         * deviations of that. */
        ck_f32(t, "dw", r.dw, u.dw, mag, n * k, (ck_tol){ .ulps = 0.5, .red = sqrt((double)d / 32 + 6) });
        ck_end(t);
    }
}
