/* test_kernels_attnres.c - attention residuals against their formula in double, and their gradients against central differences. */
#include "kernels/backend_priv.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "tests/harness/hosts.h"

enum { N = 3, D = 19, S = 4, GAP = 2, STRIDE = N * D + GAP };
static const double eps = 0.01;

typedef struct problem {
    double bank[S * STRIDE], cur[N * D], norm[D], proj[D];
    float fbank[S * STRIDE], fcur[N * D], fnorm[D], fproj[D], dy[N * D];
} problem;

static problem draw(void)
{
    problem p;
    uint64_t seed = 13;
    noises(p.fbank, p.bank, (int64_t)S * STRIDE, &seed);
    noises(p.fcur, p.cur, (int64_t)N * D, &seed);
    noises(p.fnorm, p.norm, D, &seed);
    noises(p.fproj, p.proj, D, &seed);
    for (int i = 0; i < N * D; i++) {
        p.dy[i] = (float)noise(&seed);
    }
    return p;
}

static const double *source(const problem *p, int t, int i)
{
    return i < S ? p->bank + i * STRIDE + t * D : p->cur + t * D;
}

static void mix(const problem *p, int t, double *share, double *rstd)
{
    double sum = 0;
    for (int i = 0; i <= S; i++) {
        const double *v = source(p, t, i);
        double ss = 0, dot = 0;
        for (int j = 0; j < D; j++) {
            ss += v[j] * v[j];
            dot += v[j] * p->norm[j] * p->proj[j];
        }
        rstd[i] = 1 / sqrt(ss / D + (double)(float)eps);
        sum += share[i] = exp(dot * rstd[i]);
    }
    for (int i = 0; i <= S; i++) {
        share[i] /= sum;
    }
}

static void formula(const problem *p, double *y)
{
    for (int t = 0; t < N; t++) {
        double share[S + 1], rstd[S + 1];
        mix(p, t, share, rstd);
        for (int j = 0; j < D; j++) {
            y[t * D + j] = 0;
            for (int i = 0; i <= S; i++) {
                y[t * D + j] += share[i] * source(p, t, i)[j];
            }
        }
    }
}

static double sum(const void *at)
{
    const problem *p = at;
    double y[N * D], s = 0;
    formula(p, y);
    for (int i = 0; i < N * D; i++) {
        s += (double)p->dy[i] * y[i];
    }
    return s;
}

static void same_slopes(problem *p, const float *got, double *x, int n)
{
    for (int i = 0; i < n; i++) {
        assert_true(fabs((double)got[i] - 1 - slope(sum, p, &x[i])) < 3e-6);
    }
}

static void both(tsr_backend *b)
{
    problem q = draw();
    float y[N * D], p[N * (S + 1)], rstd[N * (S + 1)];
    double want[N * D];
    tsr_attnres_fwd_args f = { y, p, rstd, q.fbank, q.fcur, q.fnorm, q.fproj, N, D, S, STRIDE, (float)eps };
    assert_int_equal(tsr_attnres_fwd(b, &f), TSR_OK);
    formula(&q, want);
    for (int i = 0; i < N * D; i++) {
        assert_true(fabs((double)y[i] - want[i]) < 1e-6);
    }
    for (int t = 0; t < N; t++) {
        double share[S + 1], r[S + 1];
        mix(&q, t, share, r);
        for (int i = 0; i <= S; i++) {
            assert_true(fabs((double)p[t * (S + 1) + i] - share[i]) < 1e-6);
            assert_true(fabs((double)rstd[t * (S + 1) + i] - r[i]) < 1e-6);
        }
    }
    float dbank[S * STRIDE], dcur[N * D], dnorm[D], dproj[D];
    for (int i = 0; i < S * STRIDE; i++) {
        dbank[i] = 1;
        dcur[i % (N * D)] = dnorm[i % D] = dproj[i % D] = 1;
    }
    tsr_attnres_bwd_args g = { dbank,   dcur,    dnorm,  dproj,   q.dy, p, rstd, q.fbank,
                               q.fcur, q.fnorm, q.fproj, N,       D,    S, STRIDE, STRIDE };
    assert_int_equal(tsr_attnres_bwd(b, &g), TSR_OK);
    same_slopes(&q, dbank, q.bank, S * STRIDE); /* of the gaps too: 0 */
    same_slopes(&q, dcur, q.cur, N * D);
    same_slopes(&q, dnorm, q.norm, D);
    same_slopes(&q, dproj, q.proj, D);
}

static void on_every_backend(void **state)
{
    (void)state;
    on_each_host(both);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(on_every_backend),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
