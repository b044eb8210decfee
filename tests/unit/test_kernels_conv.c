/* test_kernels_conv.c - the convolution against its formula in double, and its gradients against central differences. */
#include "tests/harness/golden.h"
#include "kernels/backend_priv.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/harness/hosts.h"

enum { N = 11, C = 3, KW = 4, SEGS = 3 };
static const int64_t seg[SEGS + 1] = { 0, 2, 2, 11 };

static void formula(double *y, const double *x, const double *w, const double *history)
{
    for (int g = 0; g < SEGS; g++) {
        for (int64_t t = seg[g]; t < seg[g + 1]; t++) {
            for (int c = 0; c < C; c++) {
                double u = 0;
                for (int j = 0; j < KW; j++) {
                    int64_t at = t - KW + 1 + j;
                    double in = at >= seg[g] ? x[at * C + c]
                                             : history[(g * (KW - 1) + KW - 1 + at - seg[g]) * C + c];
                    u += w[c * KW + j] * in;
                }
                y[t * C + c] = u / (1 + exp(-u));
            }
        }
    }
}

static void forward_is_the_formula(void **state)
{
    (void)state;
    uint64_t rng = 3;
    double x[N * C], w[C * KW], history[SEGS * (KW - 1) * C], want[N * C];
    float fx[N * C], fw[C * KW], fh[SEGS * (KW - 1) * C], old[SEGS * (KW - 1) * C], y[N * C];
    for (int i = 0; i < N * C; i++) {
        x[i] = (double)(fx[i] = (float)noise(&rng));
    }
    for (int i = 0; i < C * KW; i++) {
        w[i] = (double)(fw[i] = (float)noise(&rng));
    }
    for (int i = 0; i < SEGS * (KW - 1) * C; i++) {
        history[i] = (double)(old[i] = fh[i] = (float)noise(&rng));
    }
    formula(want, x, w, history);
    tsr_conv_fwd_args a = { y, fh, fx, fw, seg, N, C, KW, SEGS, C, C };
    assert_int_equal(tsr_cpu_conv_fwd(NULL, &a), TSR_OK);
    for (int i = 0; i < N * C; i++) {
        assert_true(fabs((double)y[i] - want[i]) < 2e-7);
    }
    for (int c = 0; c < C; c++) { /* segment 0 has two tokens, segment 1 none, segment 2 nine */
        assert_true(fh[c] == old[2 * C + c] && fh[C + c] == fx[c] && fh[2 * C + c] == fx[C + c]);
        assert_memory_equal(fh + 3 * C, old + 3 * C, 3 * C * sizeof *fh);
        assert_memory_equal(fh + 6 * C, fx + 8 * C, 3 * C * sizeof *fh);
    }
}

static double loss(const double *x, const double *w, const float *dy)
{
    static const double zeros[SEGS * (KW - 1) * C];
    double y[N * C], sum = 0;
    formula(y, x, w, zeros);
    for (int i = 0; i < N * C; i++) {
        sum += y[i] * (double)dy[i];
    }
    return sum;
}

static void gradients(tsr_backend *b)
{
    uint64_t rng = 5;
    double x[N * C], w[C * KW];
    float fx[N * C], fw[C * KW], dy[N * C], dx[N * C], dw[C * KW];
    for (int i = 0; i < N * C; i++) {
        x[i] = (double)(fx[i] = (float)noise(&rng));
        dy[i] = (float)noise(&rng);
    }
    for (int i = 0; i < C * KW; i++) {
        w[i] = (double)(fw[i] = (float)noise(&rng));
        dw[i] = 1.0f;
    }
    tsr_conv_bwd_args a = { dx, dw, dy, fx, fw, seg, N, C, KW, SEGS, C, C, C };
    assert_int_equal(tsr_conv_bwd(b, &a), TSR_OK);
    for (int i = 0; i < N * C + C * KW; i++) {
        double *p = i < N * C ? &x[i] : &w[i - N * C], at = *p, step = 1e-5;
        *p = at + step;
        double up = loss(x, w, dy);
        *p = at - step;
        double slope = (up - loss(x, w, dy)) / (2 * step);
        *p = at;
        double got = i < N * C ? (double)dx[i] : (double)dw[i - N * C] - 1.0;
        assert_true(fabs(got - slope) < 2e-6);
    }
}

static void gradients_are_central_differences(void **state)
{
    (void)state;
    on_each_host(gradients);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(forward_is_the_formula),
        cmocka_unit_test(gradients_are_central_differences),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
