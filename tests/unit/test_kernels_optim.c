/* test_kernels_optim.c - optimizers against five steps worked out in f64 by other means. */
#include "tests/harness/golden.h"
#include "kernels/backend_priv.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/harness/hosts.h"

enum { STEPS = 5 };
static const char *const shapes[] = { "24x40", "40x24", "16x16" };
static golden file;

static float *get(const char *shape, const char *what, int64_t *n)
{
    char name[64];
    (void)snprintf(name, sizeof name, "%s.%s", shape, what);
    return golden_f32(&file, name, n);
}

static void same(const char *shape, const char *what, const float *got, int64_t n)
{
    float *want = get(shape, what, NULL);
    double off = relative_l2(got, want, n);
    if (!(off <= 1e-6)) {
        fail_msg("%s.%s: off by %g", shape, what, off);
    }
    free(want);
}

static void adamw_on(tsr_backend *b)
{
    for (size_t s = 0; s < 3; s++) {
        int64_t n;
        float *w = get(shapes[s], "w0", &n), *g = get(shapes[s], "grads", NULL);
        float *m = calloc((size_t)n, sizeof *m), *v = calloc((size_t)n, sizeof *v);
        for (int t = 0; t < STEPS; t++) {
            tsr_adamw_args a = { .w = w,
                                 .m = m,
                                 .v = v,
                                 .g = g + t * n,
                                 .n = n,
                                 .t = t + 1,
                                 .lr = 0.01,
                                 .b1 = 0.9,
                                 .b2 = 0.95,
                                 .eps = 1e-8,
                                 .decay = 0.1,
                                 .grad_scale = 1 };
            assert_int_equal(tsr_adamw(b, &a), TSR_OK);
        }
        same(shapes[s], "adamw", w, n);
        same(shapes[s], "adamw_m", m, n);
        same(shapes[s], "adamw_v", v, n);
        free(w);
        free(g);
        free(m);
        free(v);
    }
}

/* count copies of the same matrix: each must come out as the one. */
static void muon_on(tsr_backend *b, int64_t count)
{
    for (size_t s = 0; s < 3; s++) {
        int64_t n, rows, cols;
        float *w0 = get(shapes[s], "w0", &n), *g0 = get(shapes[s], "grads", NULL);
        float *w = malloc((size_t)(n * count) * sizeof *w), *g = malloc((size_t)(n * count) * sizeof *g),
              *m = calloc((size_t)(n * count), sizeof *m);
        char *end;
        rows = strtol(shapes[s], &end, 10);
        cols = strtol(end + 1, NULL, 10);
        for (int64_t i = 0; i < count; i++) {
            memcpy(w + i * n, w0, (size_t)n * sizeof *w);
        }
        tsr_muon_args a = { .w = w,
                            .m = m,
                            .g = g,
                            .count = count,
                            .rows = rows,
                            .cols = cols,
                            .lr = 0.02,
                            .mu = 0.95,
                            .decay = 0.1,
                            .grad_scale = 1,
                            .nesterov = true };
        a.workspace_bytes = tsr_muon_workspace(&a);
        a.workspace = malloc(a.workspace_bytes);
        for (int t = 0; t < STEPS; t++) {
            for (int64_t i = 0; i < count; i++) {
                memcpy(g + i * n, g0 + t * n, (size_t)n * sizeof *g);
            }
            assert_int_equal(tsr_muon(b, &a), TSR_OK);
        }
        for (int64_t i = 0; i < count; i++) {
            same(shapes[s], "muon", w + i * n, n);
            same(shapes[s], "muon_m", m + i * n, n);
        }
        free(a.workspace);
        free(w0);
        free(g0);
        free(w);
        free(g);
        free(m);
    }
}

static void one_matrix(tsr_backend *b)
{
    muon_on(b, 1);
}

static void three_matrices(tsr_backend *b)
{
    muon_on(b, 3);
}

static void on_every_backend(void **state)
{
    (void)state;
    on_each_host(adamw_on);
    on_each_host(one_matrix);
    on_each_host(three_matrices);
}

/* Over many weights the roundings even out, and the mean step is the decay asked for, far below one unit of
 * 1 - lr decay in f32. */
static void small_decay_is_not_lost(void **state)
{
    (void)state;
    enum { COUNT = 4096 };
    static float w[COUNT], m[COUNT], v[COUNT], g[COUNT];
    tsr_backend *b = NULL;
    tsr_err err;
    assert_int_equal(tsr_backend_open(&b, "auto", 1, &err), TSR_OK);
    double before = 0, after = 0;
    for (int i = 0; i < COUNT; i++) {
        w[i] = 1 + (float)i / 4099.0f;
        before += (double)w[i];
    }
    tsr_adamw_args a = { .w = w,
                         .m = m,
                         .v = v,
                         .g = g,
                         .n = COUNT,
                         .t = 1,
                         .lr = 1e-4,
                         .b1 = 0.9,
                         .b2 = 0.95,
                         .eps = 1e-8,
                         .decay = 0.01,
                         .grad_scale = 1 };
    assert_int_equal(tsr_adamw(b, &a), TSR_OK);
    for (int i = 0; i < COUNT; i++) {
        after += (double)w[i];
    }
    double decay = (before - after) / before;
    assert_true(decay > 0.995e-6 && decay < 1.005e-6);
    tsr_backend_close(&b);
}

int main(void)
{
    golden_open(&file, "optim/optim.safetensors");
    const struct CMUnitTest tests[] = { cmocka_unit_test(on_every_backend),
                                        cmocka_unit_test(small_decay_is_not_lost) };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    golden_close(&file);
    return failed;
}
