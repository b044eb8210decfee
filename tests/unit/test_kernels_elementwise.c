/* test_kernels_elementwise.c - elementwise operations against their formulas in double, and their gradients against central differences. */
#include "kernels/backend_priv.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "tests/harness/hosts.h"

enum { N = 37 };

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

/* The weighted sum of a function of two arrays, so that its slopes are the gradients. */
typedef struct problem {
    double x[N], y[N];
    float fx[N], fy[N], dout[N];
    tsr_glu kind;
} problem;

static problem draw(uint64_t seed)
{
    problem p = { .kind = TSR_GLU_SITU };
    noises(p.fx, p.x, N, &seed);
    noises(p.fy, p.y, N, &seed);
    for (int i = 0; i < N; i++) {
        p.x[i] = (double)(p.fx[i] *= 3);
        p.y[i] = (double)(p.fy[i] *= 3);
        p.dout[i] = (float)noise(&seed);
    }
    return p;
}

static double gate(double x, double g)
{
    return x * sigmoid(g);
}

static double glu(tsr_glu kind, double g, double u)
{
    return kind == TSR_GLU_SITU ? 2 * tanh(g / 2) * sigmoid(g) * 5 * tanh(u / 5) : g * sigmoid(g) * u;
}

static double sum_sigmoid(const void *at)
{
    const problem *p = at;
    double sum = 0;
    for (int i = 0; i < N; i++) {
        sum += (double)p->dout[i] * sigmoid(p->x[i]);
    }
    return sum;
}

static double sum_gate(const void *at)
{
    const problem *p = at;
    double sum = 0;
    for (int i = 0; i < N; i++) {
        sum += (double)p->dout[i] * gate(p->x[i], p->y[i]);
    }
    return sum;
}

static double sum_glu(const void *at)
{
    const problem *p = at;
    double sum = 0;
    for (int i = 0; i < N; i++) {
        sum += (double)p->dout[i] * glu(p->kind, p->x[i], p->y[i]);
    }
    return sum;
}

static void simple(tsr_backend *b)
{
    problem p = draw(1);
    float y[N];
    double squares = 0, got = 1;
    tsr_add_args add = { y, p.fx, p.fy, N };
    assert_int_equal(tsr_add(b, &add), TSR_OK);
    for (int i = 0; i < N; i++) {
        assert_true(y[i] == p.fx[i] + p.fy[i]);
        squares += p.x[i] * p.x[i];
    }
    tsr_sum_squares_args sum = { &got, p.fx, N };
    assert_int_equal(tsr_sum_squares(b, &sum), TSR_OK);
    assert_true(fabs(got - 1 - squares) < 1e-12);
}

/* Rows of 3 of 5 go to rows of 3 of 4; halves of bf16 round to even. */
static void copies(tsr_backend *b)
{
    float src[10] = { 1, 2, 3, 9, 9, 1.00390625f, 1.01171875f, -4, 9, 9 }, f32[8];
    uint16_t bf16[8];
    memset(f32, 0, sizeof f32);
    memset(bf16, 0, sizeof bf16);
    tsr_copy2d_args a = { f32, src, 2, 3, 4, 5, TSR_DT_F32 }, c = a;
    c.dst = bf16;
    c.dtype = TSR_DT_BF16;
    assert_int_equal(tsr_copy2d(b, &a), TSR_OK);
    assert_int_equal(tsr_copy2d(b, &c), TSR_OK);
    static const float want[8] = { 1, 2, 3, 0, 1.00390625f, 1.01171875f, -4, 0 };
    static const uint16_t bits[8] = { 0x3f80, 0x4000, 0x4040, 0, 0x3f80, 0x3f82, 0xc080, 0 };
    assert_memory_equal(f32, want, sizeof f32);
    assert_memory_equal(bf16, bits, sizeof bf16);
}

static void sigmoids(tsr_backend *b)
{
    problem p = draw(2);
    float y[N], dx[N];
    tsr_sigmoid_fwd_args f = { y, p.fx, N };
    tsr_sigmoid_bwd_args g = { dx, p.dout, y, N };
    assert_int_equal(tsr_sigmoid_fwd(b, &f), TSR_OK);
    assert_int_equal(tsr_sigmoid_bwd(b, &g), TSR_OK);
    for (int i = 0; i < N; i++) {
        assert_true(fabs((double)y[i] - sigmoid(p.x[i])) < 3e-7);
        assert_true(fabs((double)dx[i] - slope(sum_sigmoid, &p, &p.x[i])) < 1e-6);
    }
}

static void gates(tsr_backend *b)
{
    problem p = draw(3);
    float y[N], dx[N], dg[N];
    tsr_gate_fwd_args f = { y, p.fx, p.fy, N };
    tsr_gate_bwd_args g = { dx, dg, p.dout, p.fx, p.fy, N };
    assert_int_equal(tsr_gate_fwd(b, &f), TSR_OK);
    assert_int_equal(tsr_gate_bwd(b, &g), TSR_OK);
    for (int i = 0; i < N; i++) {
        assert_true(fabs((double)y[i] - gate(p.x[i], p.y[i])) < 1e-6);
        assert_true(fabs((double)dx[i] - slope(sum_gate, &p, &p.x[i])) < 1e-6);
        assert_true(fabs((double)dg[i] - slope(sum_gate, &p, &p.y[i])) < 1e-6);
    }
}

static void glus(tsr_backend *b)
{
    for (int kind = 0; kind < 2; kind++) {
        problem p = draw(4);
        float y[N], dg[N], du[N];
        p.kind = kind == 0 ? TSR_GLU_SITU : TSR_GLU_SWIGLU;
        tsr_glu_fwd_args f = { y, p.fx, p.fy, N, p.kind, 2, 5 };
        tsr_glu_bwd_args g = { dg, du, p.dout, p.fx, p.fy, N, p.kind, 2, 5 };
        assert_int_equal(tsr_glu_fwd(b, &f), TSR_OK);
        assert_int_equal(tsr_glu_bwd(b, &g), TSR_OK);
        for (int i = 0; i < N; i++) {
            assert_true(fabs((double)y[i] - glu(p.kind, p.x[i], p.y[i])) < 3e-6);
            assert_true(fabs((double)dg[i] - slope(sum_glu, &p, &p.x[i])) < 3e-6);
            assert_true(fabs((double)du[i] - slope(sum_glu, &p, &p.y[i])) < 3e-6);
        }
    }
}

static void on_every_backend(void **state)
{
    (void)state;
    on_each_host(simple);
    on_each_host(copies);
    on_each_host(sigmoids);
    on_each_host(gates);
    on_each_host(glus);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(on_every_backend),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
