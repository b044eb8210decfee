/* test_kernels_loss.c - cross-entropy against its formula in double, and its gradient against central differences. */
#include "kernels/backend_priv.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "tests/harness/hosts.h"

enum { N = 4, V = 21 };
static const int32_t target[N] = { 0, 20, -1, 7 };

typedef struct problem {
    double x[N * V];
    float fx[N * V];
} problem;

static problem draw(void)
{
    problem p;
    uint64_t seed = 11;
    noises(p.fx, p.x, (int64_t)N * V, &seed);
    return p;
}

static double lse(const problem *p, int row)
{
    double s = 0;
    for (int j = 0; j < V; j++) {
        s += exp(p->x[row * V + j]);
    }
    return log(s);
}

static double sum(const void *at)
{
    const problem *p = at;
    double s = 0;
    for (int i = 0; i < N; i++) {
        s += target[i] >= 0 ? lse(p, i) - p->x[i * V + target[i]] : 0;
    }
    return 0.25 * s;
}

static void both(tsr_backend *b)
{
    problem p = draw();
    float loss[N], l[N], dx[N * V];
    tsr_xent_fwd_args f = { loss, l, p.fx, target, N, V };
    tsr_xent_bwd_args g = { dx, p.fx, l, target, N, V, 0.25f };
    assert_int_equal(tsr_xent_fwd(b, &f), TSR_OK);
    assert_int_equal(tsr_xent_bwd(b, &g), TSR_OK);
    for (int i = 0; i < N; i++) {
        double want = target[i] >= 0 ? lse(&p, i) - p.x[i * V + target[i]] : 0;
        assert_true(fabs((double)l[i] - lse(&p, i)) < 1e-6 && fabs((double)loss[i] - want) < 1e-6);
    }
    for (int i = 0; i < N * V; i++) {
        assert_true(fabs((double)dx[i] - slope(sum, &p, &p.x[i])) < 1e-6);
    }
}

/* Far beyond what an exponential of f32 or f64 holds. */
static void large(tsr_backend *b)
{
    float x[2 * V], loss[2], l[2];
    int32_t last[2] = { V - 1, 0 };
    for (int j = 0; j < 2 * V; j++) {
        x[j] = j < V ? 30000 : -30000;
    }
    tsr_xent_fwd_args f = { loss, l, x, last, 2, V };
    assert_int_equal(tsr_xent_fwd(b, &f), TSR_OK);
    assert_true(fabs((double)loss[0] - log(V)) < 1e-6 && fabs((double)loss[1] - log(V)) < 1e-6);
}

static void on_every_backend(void **state)
{
    (void)state;
    on_each_host(both);
    on_each_host(large);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(on_every_backend),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
