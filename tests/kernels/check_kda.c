/* check_kda.c - checks of kernels/ops/kda.h. */
#include "tests/kernels/check.h"

#include <math.h>

#define BYTES(n) ((size_t)(n) * sizeof(float))

static const int64_t gate_shapes[][3] = { { 0, 2, 8 },  { 1, 1, 1 },   { 3, 2, 7 },
                                          { 5, 3, 8 },  { 70, 2, 17 }, { 9, 1, 31 },
                                          { 2, 5, 33 }, { 4, 2, 64 },  { 130, 1, 128 } };
enum { GATES = sizeof gate_shapes / sizeof *gate_shapes };

void ck_kda_gate_fwd(ck *t)
{
    for (int i = 0; i < 2 * GATES; i++) {
        int64_t n = gate_shapes[i / 2][0], h = gate_shapes[i / 2][1], d = gate_shapes[i / 2][2],
                all = n * h * d;
        float *g = ck_nan(t, all), *z = ck_normal(t, all, i % 3 == 0 ? 40.0f : 2.0f);
        float *bias = ck_normal(t, h * d, 1.0f), *a_log = ck_rand(t, h, 1.5f);
        tsr_kda_gate_fwd_args r = { g, z, bias, a_log, n, h, d, i % 2 ? -5.0f : 0.0f }, k = r;
        k.z = ck_dev(t, z, BYTES(all));
        k.g = i % 4 < 2 ? ck_dev(t, g, BYTES(all)) : (float *)(uintptr_t)k.z; /* in place too */
        k.dt_bias = ck_dev(t, bias, BYTES(h * d));
        k.a_log = ck_dev(t, a_log, BYTES(h));
        double *mag = ck_host(t, (size_t)all * sizeof *mag);
        for (int64_t j = 0; j < all; j++) {
            mag[j] = fabs((double)z[j] + (double)bias[j % (h * d)]) * exp((double)a_log[j % (h * d) / d]);
        }
        CK_RUN(t, kda_gate_fwd, &r, &k);
        /* Both functions have |f'(x)| <= |f(x)| times max(1, 1 / x): rounding u and the rate (exp within 2 ulp) by
         * three halves of an ulp in all moves the result by so many of |x|, weighed by f; the tail of the sigmoid is
         * f itself, so the share that matters is |x| f. */
        for (int64_t j = 0; j < all; j++) {
            mag[j] = fmin(mag[j], 90) * fabs((double)g[j]);
        }
        ck_f32(t, "g", g, k.g, mag, all, (ck_tol){ 1e-37, 4, 2 });
        ck_end(t);
    }
}

void ck_kda_gate_bwd(ck *t)
{
    for (int i = 0; i < 2 * GATES; i++) {
        int64_t n = gate_shapes[i / 2][0], h = gate_shapes[i / 2][1], d = gate_shapes[i / 2][2],
                all = n * h * d;
        float *dg = ck_normal(t, all, 1.0f), *z = ck_normal(t, all, i % 3 == 0 ? 40.0f : 2.0f);
        float *bias = ck_normal(t, h * d, 1.0f), *a_log = ck_rand(t, h, 1.5f);
        float *dz = ck_nan(t, all), *dbias = ck_normal(t, h * d, 1.0f), *da = ck_normal(t, h, 1.0f);
        tsr_kda_gate_bwd_args r = { dz, dbias, da, dg, z, bias, a_log, n, h, d, i % 2 ? -5.0f : 0.0f }, k = r;
        k.dg = ck_dev(t, dg, BYTES(all));
        k.dz = i % 4 < 2 ? ck_dev(t, dz, BYTES(all)) : (float *)(uintptr_t)k.dg;
        k.z = ck_dev(t, z, BYTES(all));
        k.dt_bias = ck_dev(t, bias, BYTES(h * d));
        k.a_log = ck_dev(t, a_log, BYTES(h));
        k.ddt_bias = ck_dev(t, dbias, BYTES(h * d));
        k.da_log = ck_dev(t, da, BYTES(h));
        double *mz = ck_host(t, (size_t)all * sizeof *mz), *mb = ck_host(t, (size_t)(h * d) * sizeof *mb);
        double *ma = ck_host(t, (size_t)h * sizeof *ma);
        for (int64_t j = 0; j < h * d; j++) {
            mb[j] = fabs((double)dbias[j]);
            ma[j / d] = j % d == 0 ? fabs((double)da[j / d]) : ma[j / d];
        }
        CK_RUN(t, kda_gate_bwd, &r, &k);
        for (int64_t j = 0; j < all; j++) { /* as in the forward check */
            double u = fabs((double)z[j] + (double)bias[j % (h * d)]),
                   rate = exp((double)a_log[j % (h * d) / d]);
            double x = fmin(i % 2 ? u * rate : u, 90);
            mz[j] = x * fabs((double)dz[j]);
            mb[j % (h * d)] += (1 + x) * fabs((double)dz[j]);
            /* softplus(u) sigmoid(-...) <= (1 + u) sigmoid(u) + e^-u */
            ma[j % (h * d) / d] += (1 + x) * fabs((double)dz[j]) * (i % 2 ? u : 1 + u);
        }
        ck_f32(t, "dz", dz, k.dz, mz, all, (ck_tol){ 1e-37, 6, 2 });
        /* Sums: each term's own error as above, at full size only once by the square-root law. */
        ck_f32(t, "ddt_bias", dbias, k.ddt_bias, mb, h * d, (ck_tol){ 1e-37, 1, 2 });
        ck_f32(t, "da_log", da, k.da_log, ma, h, (ck_tol){ 1e-37, 1, 2 });
        ck_end(t);
    }
}

typedef enum decay { MIXED, STRONG, NONE, EXTREME, DECAYS } decay;
typedef struct shape {
    int64_t h, dk, dv, segs, lengths[8];
} shape;
static const shape shapes[] = {
    { 64, 1, 1, 1, { 3 } }, /* many heads: one alone may end small after it was large */
    { 2, 8, 8, 1, { 7 } },
    { 2, 16, 24, 8, { 0, 1, 15, 16, 17, 64, 65, 200 } },
    { 3, 17, 33, 3, { 31, 0, 33 } },
    { 1, 128, 128, 2, { 100, 48 } },
    { 1, 72, 64, 1, { 130 } },
    { 2, 9, 5, 0, { 0 } },
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

typedef struct inputs {
    int64_t seg[9], n, chunks, states;
    float *q, *k, *v, *g, *beta, *state;
} inputs;

/* Unit keys, queries of length dk^-1/2, betas in (0, 1), decays of a kind. */
static inputs make(ck *t, const shape *s, decay kind, int64_t chunk)
{
    inputs in = { .states = s->segs * s->h * s->dk * s->dv };
    for (int64_t i = 0; i < s->segs; i++) {
        in.seg[i + 1] = in.seg[i] + s->lengths[i];
        in.chunks += (s->lengths[i] + chunk - 1) / chunk;
    }
    in.n = in.seg[s->segs];
    int64_t rows = in.n * s->h;
    in.q = ck_normal(t, rows * s->dk, 1.0f);
    in.k = ck_normal(t, rows * s->dk, 1.0f);
    in.v = ck_normal(t, rows * s->dv, 1.0f);
    in.g = ck_rand(t, rows * s->dk, 1.0f);
    in.beta = ck_rand(t, rows, 1.0f);
    in.state = ck_normal(t, in.states, 1.0f);
    static const float low[DECAYS] = { -5, -5, 0, -200 }, high[DECAYS] = { 0, -4.9f, 0, 0 };
    for (int64_t r = 0; r < rows; r++) {
        double qq = 1e-12, kk = 1e-12;
        for (int64_t i = r * s->dk; i < (r + 1) * s->dk; i++) {
            qq += (double)(in.q[i] * in.q[i]);
            kk += (double)(in.k[i] * in.k[i]);
            float x = 0.5f + 0.5f * in.g[i];
            in.g[i] = low[kind] + (high[kind] - low[kind]) * x;
            if (kind != STRONG && ck_random(t) % 2 == 0) { /* half of the channels remember */
                in.g[i] = -0.05f * x;
            }
        }
        for (int64_t i = r * s->dk; i < (r + 1) * s->dk; i++) {
            in.q[i] = (float)((double)in.q[i] / sqrt(qq * (double)s->dk));
            in.k[i] = (float)((double)in.k[i] / sqrt(kk));
        }
        in.beta[r] = 0.5f + 0.5f * in.beta[r];
    }
    return in;
}

/* What a chunked sum may be off by. A step maps states by (I - beta k k^T) diag(exp g), of norm at most 1: roundings
 * add up and do not grow. A value passes through about four products of some 16 to 128 terms and a triangular system;
 * their roundings add like square roots, to some ten eps of the largest value at hand, and over the two dozen steps
 * that are remembered here to a few times that. */
static ck_tol of_largest(const float *x, int64_t n, double share)
{
    double top = 0;
    for (int64_t i = 0; i < n; i++) {
        top = fmax(top, fabs((double)x[i]));
    }
    return (ck_tol){ .abs = share * 1.2e-7 * top + 1e-37 };
}

void ck_kda_step(ck *t)
{
    for (int i = 0; i < SHAPES * DECAYS; i++) {
        const shape *s = &shapes[i / DECAYS];
        inputs in = make(t, s, (decay)(i % DECAYS), 64);
        int64_t rows = in.n * s->h;
        float *o = ck_nan(t, rows * s->dv);
        tsr_kda_step_args r = { .o = o, .state = in.state, .q = in.q, .k = in.k, .v = in.v, .g = in.g };
        r.beta = in.beta;
        r.seg = in.seg;
        r.n = in.n;
        r.h = s->h;
        r.dk = s->dk;
        r.dv = s->dv;
        r.segs = s->segs;
        tsr_kda_step_args d = r;
        d.o = ck_dev(t, o, BYTES(rows * s->dv));
        d.state = ck_dev(t, in.state, BYTES(in.states));
        d.q = ck_dev(t, in.q, BYTES(rows * s->dk));
        d.k = ck_dev(t, in.k, BYTES(rows * s->dk));
        d.v = ck_dev(t, in.v, BYTES(rows * s->dv));
        d.g = ck_dev(t, in.g, BYTES(rows * s->dk));
        d.beta = ck_dev(t, in.beta, BYTES(rows));
        d.seg = ck_dev(t, in.seg, (size_t)(s->segs + 1) * sizeof *in.seg);
        CK_RUN(t, kda_step, &r, &d);
        ck_f32(t, "o", o, d.o, NULL, rows * s->dv, of_largest(o, rows * s->dv, 8));
        ck_f32(t, "state", in.state, d.state, NULL, in.states, of_largest(in.state, in.states, 8));
        ck_end(t);
    }
}

static void fwd(ck *t, const shape *s, decay kind, int64_t chunk, bool bf16, bool bare)
{
    inputs in = make(t, s, kind, chunk);
    int64_t rows = in.n * s->h, saved_n = in.chunks * s->h * s->dk * s->dv;
    float *o = ck_nan(t, rows * s->dv), *saved = ck_nan(t, saved_n);
    tsr_kda_fwd_args r = { .o = o, .state = bare ? NULL : in.state, .saved = bare ? NULL : saved };
    r.q = bf16 ? (const void *)ck_bf16(t, in.q, rows * s->dk) : in.q;
    r.k = bf16 ? (const void *)ck_bf16(t, in.k, rows * s->dk) : in.k;
    r.v = bf16 ? (const void *)ck_bf16(t, in.v, rows * s->dv) : in.v;
    r.g = in.g;
    r.beta = in.beta;
    r.seg = in.seg;
    r.n = in.n;
    r.h = s->h;
    r.dk = s->dk;
    r.dv = s->dv;
    r.segs = s->segs;
    r.chunk = chunk;
    r.io = bf16 ? TSR_DT_BF16 : TSR_DT_F32;
    r.bounded = kind != EXTREME;
    r.workspace_bytes = tsr_kda_fwd_workspace(&r);
    r.workspace = ck_host(t, r.workspace_bytes);
    tsr_kda_fwd_args d = r;
    size_t size = bf16 ? 2 : 4;
    d.o = ck_dev(t, o, BYTES(rows * s->dv));
    d.state = bare ? NULL : ck_dev(t, in.state, BYTES(in.states));
    d.saved = bare ? NULL : ck_dev(t, saved, BYTES(saved_n));
    d.q = ck_dev(t, r.q, size * (size_t)(rows * s->dk));
    d.k = ck_dev(t, r.k, size * (size_t)(rows * s->dk));
    d.v = ck_dev(t, r.v, size * (size_t)(rows * s->dv));
    d.g = ck_dev(t, in.g, BYTES(rows * s->dk));
    d.beta = ck_dev(t, in.beta, BYTES(rows));
    d.seg = ck_dev(t, in.seg, (size_t)(s->segs + 1) * sizeof *in.seg);
    d.workspace = ck_dev(t, r.workspace, r.workspace_bytes);
    CK_RUN(t, kda_fwd, &r, &d);
    ck_f32(t, "o", o, d.o, NULL, rows * s->dv, of_largest(o, rows * s->dv, 16));
    if (!bare) {
        ck_f32(t, "state", in.state, d.state, NULL, in.states, of_largest(in.state, in.states, 16));
        ck_f32(t, "saved", saved, d.saved, NULL, saved_n, of_largest(saved, saved_n, 16));
    }
    ck_end(t);
}

void ck_kda_fwd(ck *t)
{
    for (int64_t chunk = 16; chunk <= 64; chunk *= 2) {
        for (int i = 0; i < SHAPES * DECAYS; i++) {
            fwd(t, &shapes[i / DECAYS], (decay)(i % DECAYS), chunk, i % 2 == 1, i % 3 == 1);
        }
    }
    fwd(t, &shapes[2], MIXED, 64, true, false);
    fwd(t, &shapes[2], EXTREME, 32, false, false);
}

static void bwd(ck *t, const shape *s, decay kind, int64_t chunk, bool bare)
{
    inputs in = make(t, s, kind, chunk);
    int64_t rows = in.n * s->h, size = s->dk * s->dv, nk = rows * s->dk, nv = rows * s->dv;
    float *o = ck_nan(t, nv), *saved = ck_nan(t, in.chunks * s->h * size);
    tsr_kda_fwd_args f = { .o = o, .state = in.state, .saved = saved, .q = in.q, .k = in.k, .v = in.v };
    f.g = in.g;
    f.beta = in.beta;
    f.seg = in.seg;
    f.h = s->h;
    f.dk = s->dk;
    f.dv = s->dv;
    f.segs = s->segs;
    f.chunk = chunk;
    f.io = TSR_DT_F32;
    TSR_IGNORE(tsr_cpu_kda_fwd(t->ref->queue, &f));
    float *dout = ck_normal(t, nv, 1.0f), *dstate = ck_normal(t, in.states, 1.0f);
    tsr_kda_bwd_args r = { .dq = ck_nan(t, nk), .d_k = ck_nan(t, nk), .d_v = ck_nan(t, nv) };
    r.dg = ck_nan(t, nk);
    r.dbeta = ck_nan(t, rows);
    r.dstate0 = bare ? NULL : ck_nan(t, in.states);
    r.dout = dout;
    r.dstate = bare ? NULL : dstate;
    r.q = in.q;
    r.k = in.k;
    r.v = in.v;
    r.g = in.g;
    r.beta = in.beta;
    r.saved = saved;
    r.seg = in.seg;
    r.n = in.n;
    r.h = s->h;
    r.dk = s->dk;
    r.dv = s->dv;
    r.segs = s->segs;
    r.chunk = chunk;
    r.bounded = kind != EXTREME;
    r.workspace_bytes = tsr_kda_bwd_workspace(&r);
    r.workspace = ck_host(t, r.workspace_bytes);
    tsr_kda_bwd_args d = r;
    d.dq = ck_dev(t, r.dq, BYTES(nk));
    d.d_k = ck_dev(t, r.d_k, BYTES(nk));
    d.d_v = ck_dev(t, r.d_v, BYTES(nv));
    d.dg = ck_dev(t, r.dg, BYTES(nk));
    d.dbeta = ck_dev(t, r.dbeta, BYTES(rows));
    d.dstate0 = bare ? NULL : ck_dev(t, r.dstate0, BYTES(in.states));
    d.dout = ck_dev(t, dout, BYTES(nv));
    d.dstate = bare ? NULL : ck_dev(t, dstate, BYTES(in.states));
    d.q = ck_dev(t, in.q, BYTES(nk));
    d.k = ck_dev(t, in.k, BYTES(nk));
    d.v = ck_dev(t, in.v, BYTES(nv));
    d.g = ck_dev(t, in.g, BYTES(nk));
    d.beta = ck_dev(t, in.beta, BYTES(rows));
    d.saved = ck_dev(t, saved, BYTES(in.chunks * s->h * size));
    d.seg = ck_dev(t, in.seg, (size_t)(s->segs + 1) * sizeof *in.seg);
    d.workspace = ck_dev(t, r.workspace, r.workspace_bytes);
    CK_RUN(t, kda_bwd, &r, &d);
    ck_f32(t, "dq", r.dq, d.dq, NULL, nk, of_largest(r.dq, nk, 16));
    ck_f32(t, "dk", r.d_k, d.d_k, NULL, nk, of_largest(r.d_k, nk, 24));
    ck_f32(t, "dv", r.d_v, d.d_v, NULL, nv, of_largest(r.d_v, nv, 16));
    /* Differences of sums over a chunk. */
    ck_f32(t, "dg", r.dg, d.dg, NULL, nk, of_largest(r.dg, nk, 40));
    ck_f32(t, "dbeta", r.dbeta, d.dbeta, NULL, rows, of_largest(r.dbeta, rows, 64)); /* sums of dk dv products */
    if (!bare) {
        ck_f32(t, "dstate0", r.dstate0, d.dstate0, NULL, in.states, of_largest(r.dstate0, in.states, 16));
    }
    ck_end(t);
}

void ck_kda_bwd(ck *t)
{
    for (int64_t chunk = 16; chunk <= 64; chunk *= 2) {
        for (int i = 0; i < SHAPES * DECAYS; i++) {
            bwd(t, &shapes[i / DECAYS], (decay)(i % DECAYS), chunk, i % 3 == 1);
        }
    }
}
