/* test_kernels_norm.c - norms against their formulas in double, and their gradients against central differences. */
#include "kernels/backend_priv.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "tests/harness/hosts.h"

enum { N = 3, D = 19 };
static const double eps = 0.01;

typedef enum kind { RMS, GATED, L2 } kind;

typedef struct problem {
    kind kind;
    double x[N * D], g[N * D], w[D];
    float fx[N * D], fg[N * D], fw[D], dy[N * D];
} problem;

static problem draw(kind k)
{
    problem p = { .kind = k };
    uint64_t seed = 7;
    noises(p.fx, p.x, (int64_t)N * D, &seed);
    noises(p.fg, p.g, (int64_t)N * D, &seed);
    noises(p.fw, p.w, D, &seed);
    for (int i = 0; i < N * D; i++) {
        p.dy[i] = (float)noise(&seed);
    }
    return p;
}

static double factor(const problem *p, int row)
{
    double s = 0;
    for (int j = 0; j < D; j++) {
        s += p->x[row * D + j] * p->x[row * D + j];
    }
    return 1 / sqrt((p->kind == L2 ? s : s / D) + (double)(float)eps);
}

/* Element j of a row. L2 norms are scaled by a half. */
static double formula(const problem *p, int row, int j)
{
    int i = row * D + j;
    double y = p->x[i] * factor(p, row);
    return p->kind == L2 ? y * 0.5 : p->kind == RMS ? y * p->w[j] : y * p->w[j] / (1 + exp(-p->g[i]));
}

static double sum(const void *at)
{
    const problem *p = at;
    double s = 0;
    for (int i = 0; i < N * D; i++) {
        s += (double)p->dy[i] * formula(p, i / D, i % D);
    }
    return s;
}

static void forward(tsr_backend *b)
{
    for (int k = RMS; k <= L2; k++) {
        problem p = draw((kind)k);
        float y[N * D], rstd[N], e = (float)eps;
        tsr_rmsnorm_fwd_args r = { y, rstd, p.fx, p.fw, N, D, D, D, e };
        tsr_rmsnorm_gated_fwd_args g = { y, rstd, p.fx, p.fg, p.fw, N, D, e };
        tsr_l2norm_fwd_args l = { y, rstd, p.fx, N, D, e, 0.5f };
        assert_int_equal(k == RMS ? tsr_rmsnorm_fwd(b, &r) : k == GATED ? tsr_rmsnorm_gated_fwd(b, &g) : tsr_l2norm_fwd(b, &l),
                         TSR_OK);
        for (int i = 0; i < N * D; i++) {
            assert_true(fabs((double)y[i] - formula(&p, i / D, i % D)) < 1e-6);
            assert_true(fabs((double)rstd[i / D] - factor(&p, i / D)) < 1e-6);
        }
    }
}

static void backward(tsr_backend *b)
{
    for (int k = RMS; k <= L2; k++) {
        problem p = draw((kind)k);
        float dx[N * D], dg[N * D], dw[D], rstd[N];
        for (int i = 0; i < N; i++) {
            rstd[i] = (float)factor(&p, i);
        }
        for (int j = 0; j < D; j++) {
            dw[j] = 1;
        }
        tsr_rmsnorm_bwd_args r = { dx, dw, p.dy, p.fx, p.fw, rstd, N, D, D, D, D };
        tsr_rmsnorm_gated_bwd_args g = { dx, dg, dw, p.dy, p.fx, p.fg, p.fw, rstd, N, D };
        tsr_l2norm_bwd_args l = { dx, p.dy, p.fx, rstd, N, D, 0.5f };
        assert_int_equal(k == RMS ? tsr_rmsnorm_bwd(b, &r) : k == GATED ? tsr_rmsnorm_gated_bwd(b, &g) : tsr_l2norm_bwd(b, &l),
                         TSR_OK);
        for (int i = 0; i < N * D; i++) {
            assert_true(fabs((double)dx[i] - slope(sum, &p, &p.x[i])) < 2e-6);
            assert_true(k != GATED || fabs((double)dg[i] - slope(sum, &p, &p.g[i])) < 2e-6);
        }
        for (int j = 0; j < D; j++) {
            assert_true(k == L2 ? dw[j] == 1 : fabs((double)dw[j] - 1 - slope(sum, &p, &p.w[j])) < 2e-6);
        }
    }
}

/* Rows with a gap between, without weights: what lies in the gap stays. */
static void strides(tsr_backend *b)
{
    float x[2 * 5] = { 3, 4, 0, -1, -1, 0, 0, 0, -1, -1 }, y[2 * 4] = { 7, 7, 7, 7, 7, 7, 7, 7 };
    tsr_rmsnorm_fwd_args a = { y, NULL, x, NULL, 2, 3, 5, 4, 1e-20f };
    assert_int_equal(tsr_rmsnorm_fwd(b, &a), TSR_OK);
    double r = sqrt(3.0 / 25.0);
    static const double shares[8] = { 3, 4, 0, 0, 0, 0, 0, 0 };
    for (int i = 0; i < 8; i++) {
        assert_true(i % 4 == 3 ? y[i] == 7 : fabs((double)y[i] - r * shares[i]) < 1e-6);
    }
}

static void on_every_backend(void **state)
{
    (void)state;
    on_each_host(forward);
    on_each_host(backward);
    on_each_host(strides);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(on_every_backend),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
