/* test_kernels_moe.c - the references of routing against their formulas in double, central differences and sums that
 * must agree. */
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

enum { N = 7, E = 13, K = 4, D = 5 };
static tsr_backend *cpu;

static void fill(float *p, int64_t n, uint64_t *s)
{
    for (int64_t i = 0; i < n; i++) {
        p[i] = (float)noise(s);
    }
}

/* w of one token whose choice is fixed. */
static void weights(double *w, const double *logits, const int32_t *ids, bool normalise, double scale)
{
    double sum = 1e-20;
    for (int j = 0; j < K; j++) {
        w[j] = 1 / (1 + exp(-logits[ids[j]]));
        sum += w[j];
    }
    for (int j = 0; j < K; j++) {
        w[j] = scale * (normalise ? w[j] / sum : w[j]);
    }
}

static void router(bool normalise)
{
    uint64_t rng = 5;
    float logits[N * E], bias[E], s[N * E], w[N * K], dw[N * K], dlogits[N * E];
    int32_t ids[N * K];
    fill(logits, N * E, &rng);
    fill(bias, E, &rng);
    fill(dw, N * K, &rng);
    tsr_router_fwd_args a = { s, w, ids, logits, bias, N, E, K, 2.5f, normalise };
    assert_int_equal(tsr_router_fwd(cpu, &a), TSR_OK);
    tsr_router_bwd_args d = { dlogits, dw, s, w, ids, N, E, K, 2.5f, normalise };
    assert_int_equal(tsr_router_bwd(cpu, &d), TSR_OK);
    for (int i = 0; i < N; i++) {
        double l[E], v[K], up[K], down[K];
        for (int e = 0; e < E; e++) {
            l[e] = (double)logits[i * E + e];
            int rank = 0, listed = 0; /* how many come before e; whether e is among the chosen, and where */
            for (int o = 0; o < E; o++) {
                float se = s[i * E + e] + bias[e], so = s[i * E + o] + bias[o];
                rank += so > se || (so == se && o < e);
            }
            for (int j = 0; j < K; j++) {
                listed += ids[i * K + j] == e ? j + 1 : 0;
            }
            assert_int_equal(listed, rank < K ? rank + 1 : 0);
            assert_true(fabs((double)s[i * E + e] - 1 / (1 + exp(-l[e]))) < 1e-7);
        }
        weights(v, l, ids + i * K, normalise, 2.5);
        for (int j = 0; j < K; j++) {
            assert_true(fabs(v[j] - (double)w[i * K + j]) < 1e-6);
        }
        for (int e = 0; e < E; e++) {
            double h = 1e-5, keep = l[e], slope = 0;
            l[e] = keep + h;
            weights(up, l, ids + i * K, normalise, 2.5);
            l[e] = keep - h;
            weights(down, l, ids + i * K, normalise, 2.5);
            l[e] = keep;
            for (int j = 0; j < K; j++) {
                slope += (double)dw[i * K + j] * (up[j] - down[j]) / (2 * h);
            }
            assert_true(fabs(slope - (double)dlogits[i * E + e]) < 1e-6);
        }
    }
}

static void router_and_its_gradient(void **state)
{
    (void)state;
    router(false);
    router(true);
}

static void plan(const int32_t *ids, int64_t *offset, int32_t *order, int32_t *pos)
{
    tsr_moe_plan_args a = { offset, order, pos, ids, N, E, K };
    assert_int_equal(tsr_moe_plan(cpu, &a), TSR_OK);
}

static void plan_sorts_and_keeps_order(void **state)
{
    (void)state;
    uint64_t rng = 9;
    int32_t ids[N * K], order[N * K], pos[N * K];
    int64_t offset[E + 1];
    for (int i = 0; i < N * K; i++) {
        ids[i] = (int32_t)((noise(&rng) + 1) * 0.5 * E);
    }
    plan(ids, offset, order, pos);
    assert_int_equal(offset[0], 0);
    assert_int_equal(offset[E], N * K);
    for (int e = 0; e < E; e++) {
        for (int64_t r = offset[e]; r < offset[e + 1]; r++) {
            assert_int_equal(ids[order[r]], e);
            assert_true(r == offset[e] || order[r] > order[r - 1]);
        }
    }
    for (int i = 0; i < N * K; i++) {
        assert_int_equal(order[pos[i]], i);
    }
}

/* <dxs, gather(x)> = <scatter(dxs), x>, and the same for the combination in y and in w. */
static void gradients_are_adjoint(void **state)
{
    (void)state;
    uint64_t rng = 21;
    int32_t ids[N * K], order[N * K], pos[N * K];
    int64_t offset[E + 1];
    float x[N * D], xs[N * K * D], dxs[N * K * D], dx[N * D], y[N * K * D], w[N * K], u[N * D], du[N * D],
        dy[N * K * D], dw[N * K];
    for (int i = 0; i < N * K; i++) {
        ids[i] = (int32_t)((noise(&rng) + 1) * 0.5 * E);
    }
    plan(ids, offset, order, pos);
    fill(x, N * D, &rng);
    fill(dxs, N * K * D, &rng);
    fill(y, N * K * D, &rng);
    fill(w, N * K, &rng);
    fill(du, N * D, &rng);
    tsr_moe_gather_args g = { xs, x, order, N, K, D };
    tsr_moe_scatter_args s = { dx, dxs, pos, N, K, D };
    tsr_moe_combine_fwd_args c = { u, y, w, pos, N, K, D };
    tsr_moe_combine_bwd_args b = { dy, dw, du, y, w, pos, N, K, D };
    assert_true(tsr_moe_gather(cpu, &g) == TSR_OK && tsr_moe_scatter(cpu, &s) == TSR_OK &&
                tsr_moe_combine_fwd(cpu, &c) == TSR_OK && tsr_moe_combine_bwd(cpu, &b) == TSR_OK);
    double left = 0, right = 0, out = 0, by_y = 0, by_w = 0;
    for (int i = 0; i < N * K * D; i++) {
        assert_true(xs[i] == x[order[i / D] / K * D + i % D]);
        left += (double)dxs[i] * (double)xs[i];
        by_y += (double)dy[i] * (double)y[i];
    }
    for (int i = 0; i < N * D; i++) {
        double sum = 0;
        for (int j = 0; j < K; j++) {
            int slot = i / D * K + j;
            sum += (double)w[slot] * (double)y[pos[slot] * D + i % D];
        }
        assert_true(fabs(sum - (double)u[i]) < 1e-6);
        right += (double)dx[i] * (double)x[i];
        out += (double)du[i] * (double)u[i];
    }
    for (int i = 0; i < N * K; i++) {
        by_w += (double)dw[i] * (double)w[i];
    }
    assert_true(fabs(left - right) < 1e-5 && fabs(out - by_y) < 1e-5 && fabs(out - by_w) < 1e-5);
}

int main(void)
{
    tsr_err err;
    if (tsr_backend_open(&cpu, "cpu", 1, &err) != TSR_OK) {
        return 1;
    }
    const struct CMUnitTest tests[] = { cmocka_unit_test(router_and_its_gradient),
                                        cmocka_unit_test(plan_sorts_and_keeps_order),
                                        cmocka_unit_test(gradients_are_adjoint) };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    tsr_backend_close(&cpu);
    return failed;
}
