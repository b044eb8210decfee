/* test_kernels_balance.c - balancing against right answers worked out elsewhere, and the histogram against the exact
 * quantile of the same scores. */
#include "tests/harness/golden.h"
#include "kernels/backend_priv.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { N = 2048, E = 64, K = 4, BINS = 1000 };
static golden file;
static float *scores; /* [N][E] */
static tsr_backend *best;

/* Loads when tokens choose by s + bias. */
static void loads(const float *bias, int64_t n, int64_t *load)
{
    memset(load, 0, E * sizeof *load);
    for (int64_t i = 0; i < n; i++) {
        const float *s = scores + i * E;
        for (int j = 0; j < E; j++) {
            int ahead = 0;
            for (int o = 0; o < E; o++) {
                ahead += s[o] + bias[o] > s[j] + bias[j] || (s[o] + bias[o] == s[j] + bias[j] && o < j);
            }
            load[j] += ahead < K;
        }
    }
}

static double violation(const int64_t *load, int64_t n)
{
    int64_t most = 0;
    for (int j = 0; j < E; j++) {
        most = load[j] > most ? load[j] : most;
    }
    return (double)most * E / ((double)n * K) - 1;
}

static void exact_rounds(void **state)
{
    (void)state;
    static const int rounds[] = { 1, 2, 5, 20 };
    double beta[E] = { 0 };
    int done = 0;
    for (size_t r = 0; r < 4; r++) {
        char name[32];
        tsr_balance_exact_args a = {
            .beta = beta, .s = scores, .n = N, .e = E, .k = K, .rounds = rounds[r] - done
        };
        a.workspace_bytes = tsr_balance_exact_workspace(&a);
        a.workspace = malloc(a.workspace_bytes);
        assert_int_equal(tsr_balance_exact(best, &a), TSR_OK);
        free(a.workspace);
        done = rounds[r];
        (void)snprintf(name, sizeof name, "beta.%d", done);
        float *want = golden_f32(&file, name, NULL), bias[E];
        (void)snprintf(name, sizeof name, "load.%d", done);
        int64_t *load = golden_i64(&file, name, NULL), got[E];
        for (int j = 0; j < E; j++) {
            assert_true(fabs(beta[j] - (double)want[j]) < 1e-6);
            bias[j] = (float)-beta[j];
        }
        loads(bias, N, got);
        assert_true(fabs(violation(got, N) - violation(load, N)) < 0.05);
        free(want);
        free(load);
    }
}

static int rising(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int falling(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

/* The smallest value such that at least n K / E of the required biases are not above it. */
static void exact_quantile(const float *bias, int64_t n, double *out)
{
    static double alpha[N], r[N];
    float x[E];
    for (int64_t i = 0; i < n; i++) {
        for (int j = 0; j < E; j++) {
            x[j] = scores[i * E + j] + bias[j];
        }
        qsort(x, E, sizeof *x, falling);
        alpha[i] = (double)x[K];
    }
    for (int j = 0; j < E; j++) {
        for (int64_t i = 0; i < n; i++) {
            r[i] = alpha[i] - (double)scores[i * E + j];
        }
        qsort(r, (size_t)n, sizeof *r, rising);
        out[j] = r[(n * K + E - 1) / E - 1];
    }
}

static tsr_balance_count_args counting(int64_t *hist, const float *bias, int64_t first, int64_t n)
{
    tsr_balance_count_args a = { .hist = hist,
                                 .s = scores + first * E,
                                 .bias = bias,
                                 .n = n,
                                 .e = E,
                                 .k = K,
                                 .bins = BINS,
                                 .low = 1e9,
                                 .high = -1e9 };
    for (int j = 0; j < E; j++) {
        a.low = fmin(a.low, (double)bias[j] - 1);
        a.high = fmax(a.high, (double)bias[j] + 1);
    }
    return a;
}

/* n K / E whole and not; several rounds, each from the bias the last one gave. */
static void histogram_is_within_a_bin(void **state)
{
    (void)state;
    static int64_t hist[E * BINS], halves[E * BINS];
    static const int64_t sizes[] = { N, N - 5, 77 };
    for (size_t c = 0; c < sizeof sizes / sizeof *sizes; c++) {
        int64_t n = sizes[c], load[E];
        float bias[E] = { 0 };
        loads(bias, n, load);
        double first = violation(load, n);
        for (int round = 0; round < 4; round++) {
            double want[E], mean = 0, raw_mean = 0;
            float raw[E], next[E];
            memset(hist, 0, sizeof hist);
            memset(halves, 0, sizeof halves);
            tsr_balance_count_args whole = counting(hist, bias, 0, n), a = counting(halves, bias, 0, n / 2),
                                   b = counting(halves, bias, n / 2, n - n / 2);
            assert_true(tsr_balance_count(best, &whole) == TSR_OK && tsr_balance_count(best, &a) == TSR_OK &&
                        tsr_balance_count(best, &b) == TSR_OK);
            assert_memory_equal(hist, halves, sizeof hist); /* ranks may add theirs up */
            tsr_balance_solve_args s = { .bias = raw,
                                         .hist = hist,
                                         .tokens = n,
                                         .e = E,
                                         .k = K,
                                         .bins = BINS,
                                         .low = whole.low,
                                         .high = whole.high };
            assert_int_equal(tsr_balance_solve(best, &s), TSR_OK);
            s.centre = true;
            s.bias = next;
            assert_int_equal(tsr_balance_solve(best, &s), TSR_OK);
            exact_quantile(bias, n, want);
            for (int j = 0; j < E; j++) {
                assert_true(fabs((double)raw[j] - want[j]) <= (whole.high - whole.low) / BINS + 1e-6);
                mean += (double)next[j] / E;
                raw_mean += (double)raw[j] / E;
            }
            assert_true(fabs(mean) < 1e-6);
            for (int j = 0; j < E; j++) {
                assert_true(fabs((double)raw[j] - raw_mean - (double)next[j]) < 1e-6);
            }
            memcpy(bias, next, sizeof bias);
        }
        loads(bias, n, load);
        print_message("%lld tokens: violation %.2f, after four rounds %.2f\n", (long long)n, first,
                      violation(load, n));
        assert_true(violation(load, n) < first / 5);
    }
}

static void sign_moves_towards_the_mean(void **state)
{
    (void)state;
    float bias[4] = { 0, 1, -1, 0.5f };
    int64_t load[4] = { 10, 2, 6, 6 };
    tsr_balance_sign_args a = { bias, load, 4, 0.25 };
    assert_int_equal(tsr_balance_sign(best, &a), TSR_OK);
    assert_true(bias[0] == -0.25f && bias[1] == 1.25f && bias[2] == -1 && bias[3] == 0.5f);
}

int main(void)
{
    tsr_err err;
    golden_open(&file, "balance/balance.safetensors");
    scores = golden_f32(&file, "scores", NULL);
    if (tsr_backend_open(&best, "auto", 2, &err) != TSR_OK) {
        return 1;
    }
    const struct CMUnitTest tests[] = { cmocka_unit_test(exact_rounds),
                                        cmocka_unit_test(histogram_is_within_a_bin),
                                        cmocka_unit_test(sign_moves_towards_the_mean) };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    tsr_backend_close(&best);
    free(scores);
    golden_close(&file);
    return failed;
}
