/* test_kernels_matmul.c - matrix products of each backend of this machine: stored formats against their definitions, and
 * the three products against each other, for they are one trilinear form. */
#include "kernels/kernels.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/harness/hosts.h"

static uint64_t seed = 88172645463325252u;

static int64_t below(int64_t n)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return (int64_t)((seed >> 11) % (uint64_t)n);
}

static float *drawn(int64_t n)
{
    float *p = malloc((size_t)n * sizeof *p);
    for (int64_t i = 0; i < n; i++) {
        p[i] = (float)(below(1 << 20) - (1 << 19)) * 0x1p-19f;
    }
    return p;
}

static double dot(const float *a, const float *b, int64_t n)
{
    double s = 0;
    for (int64_t i = 0; i < n; i++) {
        s += (double)a[i] * (double)b[i];
    }
    return s;
}

/* The weight, row by row, times the identity: all columns at once, then one by one (other kernels). NaN anywhere in a row
 * makes the whole output NaN. */
static void expect_values(tsr_backend *b, const tsr_weight *w, const double *want)
{
    int64_t n = w->rows, k = w->cols;
    float *x = calloc((size_t)(k * k), sizeof *x), *y = malloc((size_t)(k * n) * sizeof *y);
    for (int64_t c = 0; c < k; c++) {
        x[c * k + c] = 1;
    }
    for (int round = 0; round < 2; round++) {
        memset(y, 0x55, (size_t)(k * n) * sizeof *y);
        for (int64_t c = 0; c < (round == 0 ? 1 : k); c++) {
            tsr_gemm_nt_args a = { y + c * n, x + c * k, *w, round == 0 ? k : 1, 0, 0, false };
            assert_int_equal(tsr_gemm_nt(b, &a), TSR_OK);
        }
        for (int64_t i = 0; i < k * n; i++) {
            double v = want[i % n * k + i / n];
            if (isnan(v)) {
                assert_true(isnan(y[i]));
            } else {
                assert_true((double)y[i] == v);
            }
        }
    }
    /* The rows of W, by the product that does not transpose. */
    float one = 1, *row = malloc((size_t)k * sizeof *row);
    for (int64_t r = 0; r < n; r++) {
        tsr_gemm_nn_args a = { row, &one, *w, 1, 0, 0, false };
        a.w.rows = 1; /* this row alone: NaN stays in it */
        a.w.data = (const char *)w->data + r * (w->dtype == TSR_DT_MXFP4 ? k / 2 : k);
        a.w.scale = w->dtype == TSR_DT_MXFP4 ? (const char *)w->scale + r * (k / 32)
                                             : (const char *)w->scale + r / 128 * ((k + 127) / 128) * 4;
        assert_int_equal(tsr_gemm_nn(b, &a), TSR_OK);
        for (int64_t c = 0; c < k; c++) {
            double v = want[r * k + c];
            assert_true(isnan(v) ? isnan(row[c]) : (double)row[c] == v);
        }
    }
    free(x);
    free(y);
    free(row);
}

static void mxfp4_values(tsr_backend *b)
{
    static const double e2m1[16] = { 0, .5, 1, 1.5, 2, 3, 4, 6, 0, -.5, -1, -1.5, -2, -3, -4, -6 };
    static const uint8_t scales[6] = { 0, 1, 127, 134, 254, 255 };
    for (int64_t k = 32; k <= 416; k += 96) { /* short groups at the end */
        uint8_t data[6 * 208], scale[6 * 13];
        double want[6 * 416];
        for (int64_t r = 0; r < 6; r++) {
            for (int64_t c = 0; c < k; c++) {
                uint8_t code = (uint8_t)((c + r + c / 32) % 16);
                code = scales[r] == 254 ? code & 11 : code; /* 1.5 2^127 is the last to fit */
                uint8_t *at = &data[(r * k + c) / 2];
                *at = (uint8_t)(c % 2 == 0 ? code : *at | code << 4);
                want[r * k + c] = scales[r] == 255 ? (double)NAN : e2m1[code] * ldexp(1, scales[r] - 127);
            }
            memset(&scale[r * (k / 32)], scales[r], (size_t)(k / 32));
        }
        tsr_weight w = { data, scale, TSR_DT_MXFP4, 6, k };
        expect_values(b, &w, want);
    }
}

static double e4m3(int code)
{
    int e = code >> 3 & 15, m = code & 7;
    double v = e == 0 ? ldexp(m, -9) : ldexp(8 + m, e - 10);
    return code & 128 ? -v : v;
}

/* Every code but NaN, over blocks of 128 x 128 with ragged edges and a scale each. */
static void f8_values(tsr_backend *b)
{
    enum { N = 130, K = 150 };
    static const float scale[4] = { 1, 0.0078125f, 3, 0x1p-130f };
    uint8_t *data = malloc(N * K);
    double *want = malloc(N * K * sizeof *want);
    for (int i = 0; i < N * K; i++) {
        data[i] = (uint8_t)((i & 127) == 127 ? 0 : i);
        want[i] = (double)(float)(e4m3(data[i]) * (double)scale[i / K / 128 * 2 + i % K / 128]);
    }
    tsr_weight w = { data, scale, TSR_DT_F8_E4M3, N, K };
    expect_values(b, &w, want);
    for (int r = 0; r < N; r += 3) { /* now NaN: rows with one of the two codes */
        data[r * K + r] = r % 2 == 0 ? 0x7f : 0xff;
        float *y = malloc(20 * N * sizeof *y), *x = drawn(20 * K);
        for (int64_t m = 1; m <= 20; m += 19) {
            tsr_gemm_nt_args a = { y, x, w, m, 0, 0, false };
            assert_int_equal(tsr_gemm_nt(b, &a), TSR_OK);
            for (int64_t i = 0; i < m * N; i++) {
                assert_int_equal(isnan(y[i]) != 0, i % N % 3 == 0 && i % N <= r);
            }
        }
        free(y);
        free(x);
    }
    free(data);
    free(want);
}

/* <dy, x W^T> = <dy W, x> = <dy^T x, W>: five numbers that round differently, and one in double. */
static void adjoint(tsr_backend *b)
{
    for (int i = 0; i < 40; i++) {
        int64_t m = 1 + below(i % 2 == 0 ? 12 : 80), n = 1 + below(150), k = 1 + below(300);
        float *x = drawn(m * k), *dy = drawn(m * n), *w = drawn(n * k);
        float *y = drawn(m * n), *dx = drawn(m * k), *dw = calloc((size_t)(n * k), sizeof *dw);
        tsr_weight weight = { w, NULL, TSR_DT_F32, n, k };
        assert_int_equal(tsr_gemm_nt(b, &(tsr_gemm_nt_args){ y, x, weight, m, 0, 0, false }), TSR_OK);
        assert_int_equal(tsr_gemm_nn(b, &(tsr_gemm_nn_args){ dx, dy, weight, m, 0, 0, false }), TSR_OK);
        assert_int_equal(tsr_gemm_tn(b, &(tsr_gemm_tn_args){ dw, dy, x, m, n, k, 0, 0 }), TSR_OK);
        double form = 0, mag = 0;
        for (int64_t r = 0; r < m; r++) {
            for (int64_t j = 0; j < n; j++) {
                double one = (double)dy[r * n + j] * dot(x + r * k, w + j * k, k);
                form += one;
                mag += fabs(one);
            }
        }
        double allow = 1e-6 * mag + 1e-12; /* each output rounds to some 2^-24 of its terms, of either sign */
        assert_true(fabs(dot(dy, y, m * n) - form) <= allow);
        assert_true(fabs(dot(dx, x, m * k) - form) <= allow);
        assert_true(fabs(dot(dw, w, n * k) - form) <= allow);
        free(x);
        free(dy);
        free(w);
        free(y);
        free(dx);
        free(dw);
    }
}

/* Accumulating twice is twice the product; a product with no rows touches nothing. */
static void accumulates(tsr_backend *b)
{
    int64_t n = 70, k = 96;
    float *w = drawn(n * k), *x = drawn(30 * k), *y = malloc(30 * (size_t)n * sizeof *y),
          *z = malloc(30 * (size_t)n * sizeof *z);
    for (int64_t m = 0; m <= 30; m += 3) {
        tsr_weight weight = { w, NULL, TSR_DT_F32, n, k };
        for (int64_t i = 0; i < 30 * n; i++) {
            y[i] = z[i] = 7;
        }
        assert_int_equal(tsr_gemm_nt(b, &(tsr_gemm_nt_args){ y, x, weight, m, 0, 0, false }), TSR_OK);
        assert_int_equal(tsr_gemm_nt(b, &(tsr_gemm_nt_args){ z, x, weight, m, 0, 0, false }), TSR_OK);
        assert_int_equal(tsr_gemm_nt(b, &(tsr_gemm_nt_args){ z, x, weight, m, 0, 0, true }), TSR_OK);
        for (int64_t i = 0; i < 30 * n; i++) {
            assert_true(z[i] == (i < m * n ? 2 * y[i] : 7));
        }
    }
    free(w);
    free(x);
    free(y);
    free(z);
}

static void test_mxfp4(void **state)
{
    (void)state;
    on_each_host(mxfp4_values);
}

static void test_f8(void **state)
{
    (void)state;
    on_each_host(f8_values);
}

static void test_adjoint(void **state)
{
    (void)state;
    on_each_host(adjoint);
}

static void test_accumulate(void **state)
{
    (void)state;
    on_each_host(accumulates);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mxfp4),
        cmocka_unit_test(test_f8),
        cmocka_unit_test(test_adjoint),
        cmocka_unit_test(test_accumulate),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
