/* test_kernels_mla.c - latent attention against its formula in double, its gradients against central differences, and the
 * absorbed form against the expanded one. */
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

enum { N = 9, H = 2, DN = 3, DR = 2, DV = 4, SEGS = 3, Q = DN + DR, KV = DN + DV, R = 5 };
static const int64_t seg[SEGS + 1] = { 0, 3, 3, 9 };
static const double scale = 0.7;

static void draw(double *x, float *f, int n, uint64_t *rng)
{
    for (int i = 0; i < n; i++) {
        x[i] = (double)(f[i] = (float)noise(rng));
    }
}

typedef struct inputs {
    double q[N * H * Q], kv[N * H * KV], kr[N * DR];
    float fq[N * H * Q], fkv[N * H * KV], fkr[N * DR];
} inputs;

static void formula(const inputs *x, double *o, double *lse, double *top)
{
    for (int g = 0; g < SEGS; g++) {
        for (int64_t t = seg[g]; t < seg[g + 1]; t++) {
            for (int h = 0; h < H; h++) {
                double sum = 0, *out = o + (t * H + h) * DV;
                memset(out, 0, DV * sizeof *out);
                for (int64_t u = seg[g]; u <= t; u++) {
                    double s = 0;
                    for (int j = 0; j < Q; j++) {
                        s += x->q[(t * H + h) * Q + j] *
                             (j < DN ? x->kv[(u * H + h) * KV + j] : x->kr[u * DR + j - DN]);
                    }
                    s *= scale;
                    top[h] = s > top[h] ? s : top[h];
                    sum += exp(s);
                    for (int j = 0; j < DV; j++) {
                        out[j] += exp(s) * x->kv[(u * H + h) * KV + DN + j];
                    }
                }
                for (int j = 0; j < DV; j++) {
                    out[j] /= sum;
                }
                lse[t * H + h] = log(sum);
            }
        }
    }
}

static tsr_mla_fwd_args arguments(const inputs *x, float *o, float *lse)
{
    return (tsr_mla_fwd_args){ .o = o,
                               .lse = lse,
                               .q = x->fq,
                               .kv = x->fkv,
                               .kr = x->fkr,
                               .seg = seg,
                               .n = N,
                               .h = H,
                               .dn = DN,
                               .dr = DR,
                               .dv = DV,
                               .segs = SEGS,
                               .kr_stride = DR,
                               .scale = (float)scale };
}

static inputs *random_inputs(uint64_t seed)
{
    inputs *x = malloc(sizeof *x);
    assert_non_null(x);
    draw(x->q, x->fq, N * H * Q, &seed);
    draw(x->kv, x->fkv, N * H * KV, &seed);
    draw(x->kr, x->fkr, N * DR, &seed);
    return x;
}

static void forward(tsr_backend *b)
{
    inputs *x = random_inputs(11);
    double o[N * H * DV], lse[N * H], top[H] = { -0.25, 100 };
    float fo[N * H * DV], flse[N * H], ftop[H] = { -0.25f, 100 };
    formula(x, o, lse, top);
    tsr_mla_fwd_args a = arguments(x, fo, flse);
    a.max_logit = ftop;
    assert_int_equal(tsr_mla_fwd(b, &a), TSR_OK);
    for (int i = 0; i < N * H * DV; i++) {
        assert_true(fabs((double)fo[i] - o[i]) < 1e-6);
    }
    for (int i = 0; i < N * H; i++) {
        assert_true(fabs((double)flse[i] - lse[i]) < 1e-6);
    }
    for (int h = 0; h < H; h++) {
        assert_true(fabs((double)ftop[h] - top[h]) < 1e-6);
    }
    free(x);
}

static double loss(const inputs *x, const float *dout)
{
    double o[N * H * DV], lse[N * H], top[H] = { 0 }, sum = 0;
    formula(x, o, lse, top);
    for (int i = 0; i < N * H * DV; i++) {
        sum += o[i] * (double)dout[i];
    }
    return sum;
}

static void slopes(inputs *x, double *at, const float *got, int n, const float *dout)
{
    for (int i = 0; i < n; i++) {
        double keep = at[i], step = 1e-5;
        at[i] = keep + step;
        double up = loss(x, dout);
        at[i] = keep - step;
        double slope = (up - loss(x, dout)) / (2 * step);
        at[i] = keep;
        assert_true(fabs((double)got[i] - slope) < 3e-6);
    }
}

static void backward(tsr_backend *b)
{
    inputs *x = random_inputs(13);
    uint64_t rng = 17;
    float o[N * H * DV], lse[N * H], dout[N * H * DV], dq[N * H * Q], dkv[N * H * KV], dkr[N * DR];
    for (int i = 0; i < N * H * DV; i++) {
        dout[i] = (float)noise(&rng);
    }
    tsr_mla_fwd_args f = arguments(x, o, lse);
    assert_int_equal(tsr_mla_fwd(b, &f), TSR_OK);
    tsr_mla_bwd_args a = { .dq = dq,
                           .dkv = dkv,
                           .dkr = dkr,
                           .dout = dout,
                           .o = o,
                           .lse = lse,
                           .q = x->fq,
                           .kv = x->fkv,
                           .kr = x->fkr,
                           .seg = seg,
                           .n = N,
                           .h = H,
                           .dn = DN,
                           .dr = DR,
                           .dv = DV,
                           .segs = SEGS,
                           .kr_stride = DR,
                           .dkr_stride = DR,
                           .scale = (float)scale };
    assert_int_equal(tsr_mla_bwd(b, &a), TSR_OK);
    slopes(x, x->q, dq, N * H * Q, dout);
    slopes(x, x->kv, dkv, N * H * KV, dout);
    slopes(x, x->kr, dkr, N * DR, dout);
    free(x);
}

/* [k, v] = W_kv c: the absorbed form sees c only. q' = W_k^T q, and W_v ctx = o. */
static void absorbed(tsr_backend *b)
{
    uint64_t rng = 19;
    float c[N * R], w[H * KV * R], q[N * H * Q], kr[N * DR], kv[N * H * KV], o[N * H * DV];
    float cache[N * (R + DR)], qa[N * H * (R + DR)], ctx[N * H * R];
    double wide[N * H * Q + N * R + H * KV * R + N * DR];
    draw(wide, c, N * R, &rng);
    draw(wide, w, H * KV * R, &rng);
    draw(wide, q, N * H * Q, &rng);
    draw(wide, kr, N * DR, &rng);
    memset(kv, 0, sizeof kv);
    memset(qa, 0, sizeof qa);
    for (int t = 0; t < N; t++) {
        memcpy(cache + t * (R + DR), c + t * R, R * sizeof *c);
        memcpy(cache + t * (R + DR) + R, kr + t * DR, DR * sizeof *kr);
        for (int i = 0; i < H * KV; i++) {
            for (int j = 0; j < R; j++) {
                kv[t * H * KV + i] += w[i * R + j] * c[t * R + j];
            }
        }
        for (int h = 0; h < H; h++) {
            float *to = qa + (t * H + h) * (R + DR), *from = q + (t * H + h) * Q;
            for (int i = 0; i < DN; i++) {
                for (int j = 0; j < R; j++) {
                    to[j] += w[(h * KV + i) * R + j] * from[i];
                }
            }
            memcpy(to + R, from + DN, DR * sizeof *to);
        }
    }
    static const int64_t one[2] = { 0, N };
    tsr_mla_fwd_args f = { .o = o,
                           .q = q,
                           .kv = kv,
                           .kr = kr,
                           .seg = one,
                           .n = N,
                           .h = H,
                           .dn = DN,
                           .dr = DR,
                           .dv = DV,
                           .segs = 1,
                           .kr_stride = DR,
                           .scale = (float)scale };
    assert_int_equal(tsr_mla_fwd(b, &f), TSR_OK);
    for (int64_t past = 0; past < N; past++) { /* the last tokens, after any number of earlier ones */
        tsr_mla_absorbed_args a = { .ctx = ctx,
                                    .q = qa + past * H * (R + DR),
                                    .cache = cache,
                                    .n = N - past,
                                    .h = H,
                                    .r = R,
                                    .dr = DR,
                                    .past = past,
                                    .dtype = TSR_DT_F32,
                                    .scale = (float)scale };
        assert_int_equal(tsr_mla_absorbed(b, &a), TSR_OK);
        for (int64_t i = 0; i < (N - past) * H; i++) {
            for (int j = 0; j < DV; j++) {
                double sum = 0;
                for (int k = 0; k < R; k++) {
                    sum += (double)w[(i % H * KV + DN + j) * R + k] * (double)ctx[i * R + k];
                }
                assert_true(fabs(sum - (double)o[(past * H + i) * DV + j]) < 2e-6);
            }
        }
    }
}

static void on_every_backend(void **state)
{
    (void)state;
    on_each_host(forward);
    on_each_host(backward);
    on_each_host(absorbed);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(on_every_backend) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
