/* test_kernels_kda.c - delta attention against right answers, against itself in other cuts, against central
 * differences; what the bound on the decay is for; extremes of the unbounded decay. */
#include "tests/harness/golden.h"
#include "kernels/backend_priv.h"
#include "kernels/numeric.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/harness/hosts.h"

/* ---- helpers --------------------------------------------------------------------------------------------------- */

static float *floats(int64_t n)
{
    float *p = malloc((size_t)(n > 0 ? n : 1) * sizeof *p);
    TSR_ASSERT(p != NULL);
    for (int64_t i = 0; i < n; i++) {
        p[i] = (float)NAN;
    }
    return p;
}

static float *copy(const float *p, int64_t n)
{
    float *c = floats(n);
    memcpy(c, p, (size_t)n * sizeof *c);
    return c;
}

static void expect_close(tsr_backend *b, const char *what, const float *got, const float *want, int64_t n,
                         double most)
{
    double e = relative_l2(got, want, n);
    if (!(e <= most)) {
        fail_msg("%s, %s: relative error %.3g, allowed %.3g", b->name, what, e, most);
    }
}

/* One problem, with its outputs. */
typedef struct problem {
    int64_t n, h, dk, dv, segs, chunk, chunks;
    const int64_t *seg;
    bool bounded;
    float *q, *k, *v, *g, *beta, *state0, *dout, *dstate;
    float *o, *state, *saved, *dq, *d_k, *d_v, *dg, *dbeta, *dstate0;
} problem;

static void outputs(problem *p)
{
    p->chunks = 0;
    for (int64_t i = 0; i < p->segs; i++) {
        p->chunks += (p->seg[i + 1] - p->seg[i] + p->chunk - 1) / p->chunk;
    }
    int64_t rows = p->n * p->h, size = p->h * p->dk * p->dv;
    p->o = floats(rows * p->dv);
    p->state = copy(p->state0, p->segs * size);
    p->saved = floats(p->chunks * size);
    p->dq = floats(rows * p->dk);
    p->d_k = floats(rows * p->dk);
    p->dg = floats(rows * p->dk);
    p->d_v = floats(rows * p->dv);
    p->dbeta = floats(rows);
    p->dstate0 = floats(p->segs * size);
}

static void drop_outputs(problem *p)
{
    float **all[] = { &p->o, &p->state, &p->saved, &p->dq, &p->d_k, &p->dg, &p->d_v, &p->dbeta, &p->dstate0 };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        free(*all[i]);
        *all[i] = NULL;
    }
}

static void forward(tsr_backend *b, problem *p)
{
    tsr_kda_fwd_args a = { .o = p->o, .state = p->state, .saved = p->saved, .q = p->q, .k = p->k, .v = p->v };
    a.g = p->g;
    a.beta = p->beta;
    a.seg = p->seg;
    a.n = p->n;
    a.h = p->h;
    a.dk = p->dk;
    a.dv = p->dv;
    a.segs = p->segs;
    a.chunk = p->chunk;
    a.io = TSR_DT_F32;
    a.bounded = p->bounded;
    a.workspace_bytes = tsr_kda_fwd_workspace(&a);
    a.workspace = malloc(a.workspace_bytes + 1);
    assert_int_equal(tsr_kda_fwd(b, &a), TSR_OK);
    free(a.workspace);
}

static void step(tsr_backend *b, problem *p)
{
    tsr_kda_step_args a = { .o = p->o, .state = p->state, .q = p->q, .k = p->k, .v = p->v, .g = p->g };
    a.beta = p->beta;
    a.seg = p->seg;
    a.n = p->n;
    a.h = p->h;
    a.dk = p->dk;
    a.dv = p->dv;
    a.segs = p->segs;
    assert_int_equal(tsr_kda_step(b, &a), TSR_OK);
}

static void backward(tsr_backend *b, problem *p)
{
    tsr_kda_bwd_args a = { .dq = p->dq, .d_k = p->d_k, .d_v = p->d_v, .dg = p->dg, .dbeta = p->dbeta };
    a.dstate0 = p->dstate0;
    a.dout = p->dout;
    a.dstate = p->dstate;
    a.q = p->q;
    a.k = p->k;
    a.v = p->v;
    a.g = p->g;
    a.beta = p->beta;
    a.saved = p->saved;
    a.seg = p->seg;
    a.n = p->n;
    a.h = p->h;
    a.dk = p->dk;
    a.dv = p->dv;
    a.segs = p->segs;
    a.chunk = p->chunk;
    a.bounded = p->bounded;
    a.workspace_bytes = tsr_kda_bwd_workspace(&a);
    a.workspace = malloc(a.workspace_bytes + 1);
    assert_int_equal(tsr_kda_bwd(b, &a), TSR_OK);
    free(a.workspace);
}

/* Unit keys, short queries, betas in (0, 1); g from low to high, evenly. */
static problem random_problem(uint64_t seed, const int64_t *seg, int64_t segs, int64_t h, int64_t dk,
                              int64_t dv, double low, double high)
{
    problem p = {
        .n = seg[segs], .h = h, .dk = dk, .dv = dv, .segs = segs, .seg = seg, .bounded = low >= -5
    };
    int64_t rows = p.n * h, size = segs * h * dk * dv;
    p.q = floats(rows * dk);
    p.k = floats(rows * dk);
    p.v = floats(rows * dv);
    p.g = floats(rows * dk);
    p.beta = floats(rows);
    p.state0 = floats(size);
    p.dout = floats(rows * dv);
    p.dstate = floats(size);
    for (int64_t r = 0; r < rows; r++) {
        double kk = 1e-12;
        for (int64_t i = r * dk; i < (r + 1) * dk; i++) {
            p.q[i] = (float)(noise(&seed) / (double)dk);
            p.k[i] = (float)noise(&seed);
            kk += (double)p.k[i] * (double)p.k[i];
            p.g[i] = (float)(low + (high - low) * (0.5 + 0.5 * noise(&seed)));
        }
        for (int64_t i = r * dk; i < (r + 1) * dk; i++) {
            p.k[i] = (float)((double)p.k[i] / sqrt(kk));
        }
        for (int64_t i = r * dv; i < (r + 1) * dv; i++) {
            p.v[i] = (float)noise(&seed);
            p.dout[i] = (float)noise(&seed);
        }
        p.beta[r] = (float)(0.5 + 0.5 * noise(&seed));
    }
    for (int64_t i = 0; i < size; i++) {
        p.state0[i] = (float)noise(&seed);
        p.dstate[i] = (float)noise(&seed);
    }
    return p;
}

static void drop_problem(problem *p)
{
    float *all[] = { p->q, p->k, p->v, p->g, p->beta, p->state0, p->dout, p->dstate };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        free(all[i]);
    }
}

/* ---- right answers --------------------------------------------------------------------------------------------- */

static void normalise(float *dst, const float *x, int64_t rows, int64_t d, double scale)
{
    for (int64_t r = 0; r < rows; r++) {
        double s = 1e-6;
        for (int64_t i = r * d; i < (r + 1) * d; i++) {
            s += (double)x[i] * (double)x[i];
        }
        for (int64_t i = r * d; i < (r + 1) * d; i++) {
            dst[i] = (float)((double)x[i] * scale / sqrt(s));
        }
    }
}

/* Gradient of x for y = scale x / sqrt(|x|^2 + 1e-6). */
static void normalise_back(float *dst, const float *dy, const float *x, int64_t rows, int64_t d, double scale)
{
    for (int64_t r = 0; r < rows; r++) {
        double s = 1e-6, dot = 0;
        for (int64_t i = r * d; i < (r + 1) * d; i++) {
            s += (double)x[i] * (double)x[i];
            dot += (double)x[i] * (double)dy[i];
        }
        for (int64_t i = r * d; i < (r + 1) * d; i++) {
            dst[i] = (float)(scale / sqrt(s) * ((double)dy[i] - (double)x[i] * dot / s));
        }
    }
}

typedef struct right {
    golden g;
    float *q, *k, *z, *logit;
    double shift;
    problem p;
} right;

static void open_right(right *r, const char *name, int64_t seg[2])
{
    char path[64];
    (void)snprintf(path, sizeof path, "kda/%s.safetensors", name);
    golden_open(&r->g, path);
    problem *p = &r->p;
    int rank;
    const int64_t *shape = golden_shape(&r->g, "k", &rank);
    *p = (problem){ .n = shape[0], .h = shape[1], .dk = shape[2], .segs = 1, .seg = seg, .bounded = true };
    p->dv = golden_shape(&r->g, "v", &rank)[2];
    seg[0] = 0;
    seg[1] = p->n;
    int64_t count, rows = p->n * p->h;
    r->q = golden_f32(&r->g, "q", &count);
    r->k = golden_f32(&r->g, "k", &count);
    r->z = golden_f32(&r->g, "z", &count);
    r->logit = golden_f32(&r->g, "beta_logit", &count);
    float *shift = golden_f32(&r->g, "shift", &count);
    r->shift = (double)shift[0];
    free(shift);
    p->v = golden_f32(&r->g, "v", &count);
    p->state0 = golden_f32(&r->g, "state0", &count);
    p->dout = golden_f32(&r->g, "dout", &count);
    p->q = floats(rows * p->dk);
    p->k = floats(rows * p->dk);
    p->g = floats(rows * p->dk);
    p->beta = floats(rows);
    normalise(p->q, r->q, rows, p->dk, 1 / sqrt((double)p->dk));
    normalise(p->k, r->k, rows, p->dk, 1);
    for (int64_t i = 0; i < rows * p->dk; i++) {
        p->g[i] = (float)(-5 / (1 + exp(-((double)r->z[i] + r->shift))));
    }
    for (int64_t i = 0; i < rows; i++) {
        p->beta[i] = (float)(1 / (1 + exp(-(double)r->logit[i])));
    }
}

static void close_right(right *r)
{
    free(r->q);
    free(r->k);
    free(r->z);
    free(r->logit);
    drop_problem(&r->p);
    golden_close(&r->g);
}

static void against(tsr_backend *b, right *r, const char *name, const float *got)
{
    int64_t n;
    float *want = golden_f32(&r->g, name, &n);
    expect_close(b, name, got, want, n, 2e-5);
    free(want);
}

static void right_gradients(tsr_backend *b, right *r)
{
    problem *p = &r->p;
    int64_t rows = p->n * p->h, nk = rows * p->dk;
    float *dx = floats(nk), *db = floats(rows);
    normalise_back(dx, p->dq, r->q, rows, p->dk, 1 / sqrt((double)p->dk));
    against(b, r, "grad.q", dx);
    normalise_back(dx, p->d_k, r->k, rows, p->dk, 1);
    against(b, r, "grad.k", dx);
    for (int64_t i = 0; i < nk; i++) {
        double e = exp(-fabs((double)r->z[i] + r->shift));
        dx[i] = (float)(-5 * (double)p->dg[i] * e / ((1 + e) * (1 + e)));
    }
    against(b, r, "grad.z", dx);
    for (int64_t i = 0; i < rows; i++) {
        db[i] = (float)((double)p->dbeta[i] * (double)p->beta[i] * (1 - (double)p->beta[i]));
    }
    against(b, r, "grad.beta_logit", db);
    against(b, r, "grad.v", p->d_v);
    against(b, r, "grad.state0", p->dstate0);
    free(dx);
    free(db);
}

static void right_answers(tsr_backend *b)
{
    static const char *const names[] = { "short", "chunks", "strong_decay", "no_decay" };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        right r;
        int64_t seg[2];
        open_right(&r, names[i], seg);
        r.p.chunk = 16;
        outputs(&r.p);
        step(b, &r.p);
        against(b, &r, "out", r.p.o);
        against(b, &r, "state", r.p.state);
        drop_outputs(&r.p);
        for (int j = 0; j < 6; j++) { /* bounded or not must not matter for these decays */
            r.p.chunk = 16 << j / 2;
            r.p.bounded = j % 2 == 0;
            outputs(&r.p);
            forward(b, &r.p);
            against(b, &r, "out", r.p.o);
            against(b, &r, "state", r.p.state);
            backward(b, &r.p);
            right_gradients(b, &r);
            drop_outputs(&r.p);
        }
        close_right(&r);
    }
}

static void gives_the_right_answers(void **state)
{
    (void)state;
    on_each_host(right_answers);
}

/* ---- other cuts ------------------------------------------------------------------------------------------------ */

/* One batch of segments: step by step, in chunks, and each segment for itself. */
static void cuts(tsr_backend *b)
{
    static const int64_t seg[] = { 0, 0, 1, 16, 32, 49, 113, 178, 378 };
    for (int64_t chunk = 16; chunk <= 64; chunk *= 2) {
        problem p = random_problem(11, seg, 8, 2, 20, 24, -5, 0);
        int64_t size = p.h * p.dk * p.dv, nv = p.n * p.h * p.dv;
        p.chunk = chunk;
        outputs(&p);
        step(b, &p);
        float *o = p.o, *state = p.state;
        p.o = NULL;
        p.state = NULL;
        drop_outputs(&p);
        outputs(&p);
        forward(b, &p);
        backward(b, &p);
        expect_close(b, "chunks are steps", p.o, o, nv, 2e-6);
        expect_close(b, "state of chunks", p.state, state, 8 * size, 2e-6);
        free(o);
        free(state);
        for (int i = 0; i < 8; i++) {
            int64_t own[2] = { 0, seg[i + 1] - seg[i] }, at = seg[i] * p.h;
            problem s = { .n = own[1], .h = p.h, .dk = p.dk, .dv = p.dv, .segs = 1, .seg = own };
            s.chunk = chunk;
            s.bounded = true;
            s.q = p.q + at * p.dk;
            s.k = p.k + at * p.dk;
            s.v = p.v + at * p.dv;
            s.g = p.g + at * p.dk;
            s.beta = p.beta + at;
            s.dout = p.dout + at * p.dv;
            s.state0 = p.state0 + i * size;
            s.dstate = p.dstate + i * size;
            outputs(&s);
            forward(b, &s);
            backward(b, &s);
            assert_memory_equal(s.o, p.o + at * p.dv, (size_t)(s.n * p.h * p.dv) * sizeof(float));
            assert_memory_equal(s.state, p.state + i * size, (size_t)size * sizeof(float));
            assert_memory_equal(s.dstate0, p.dstate0 + i * size, (size_t)size * sizeof(float));
            assert_memory_equal(s.dg, p.dg + at * p.dk, (size_t)(s.n * p.h * p.dk) * sizeof(float));
            drop_outputs(&s);
        }
        drop_outputs(&p);
        drop_problem(&p);
    }
}

static void segments_do_not_see_each_other(void **state)
{
    (void)state;
    on_each_host(cuts);
}

/* A sequence in two calls, cut anywhere, the state handed on. */
static void splits(tsr_backend *b)
{
    static const int64_t seg[] = { 0, 100 };
    problem p = random_problem(12, seg, 1, 2, 16, 8, -5, 0);
    p.chunk = 32;
    outputs(&p);
    forward(b, &p);
    float *whole = p.o, *end = p.state;
    p.o = floats(100 * p.h * p.dv);
    p.state = floats(p.h * p.dk * p.dv);
    for (int64_t cut = 0; cut <= 100; cut++) {
        int64_t one[2] = { 0, cut }, two[2] = { 0, 100 - cut }, at = cut * p.h;
        memcpy(p.state, p.state0, (size_t)(p.h * p.dk * p.dv) * sizeof(float));
        problem s = p;
        s.saved = NULL;
        s.n = cut;
        s.seg = one;
        if (cut % 3 == 1) {
            step(b, &s);
        } else {
            forward(b, &s);
        }
        s.n = 100 - cut;
        s.seg = two;
        s.q += at * p.dk;
        s.k += at * p.dk;
        s.g += at * p.dk;
        s.v += at * p.dv;
        s.o += at * p.dv;
        s.beta += at;
        forward(b, &s);
        expect_close(b, "outputs of a cut sequence", p.o, whole, 100 * p.h * p.dv, 2e-6);
        expect_close(b, "state of a cut sequence", p.state, end, p.h * p.dk * p.dv, 2e-6);
    }
    free(whole);
    free(end);
    drop_outputs(&p);
    drop_problem(&p);
}

static void state_carries_a_cut_sequence(void **state)
{
    (void)state;
    on_each_host(splits);
}

/* ---- central differences --------------------------------------------------------------------------------------- */

enum { FD_N = 5, FD_H = 2, FD_K = 3, FD_V = 2, FD_ROWS = FD_N * FD_H };
typedef struct fd {
    double q[FD_ROWS][FD_K], k[FD_ROWS][FD_K], g[FD_ROWS][FD_K], v[FD_ROWS][FD_V], beta[FD_ROWS];
    double S[FD_H][FD_K][FD_V], dout[FD_ROWS][FD_V], dS[FD_H][FD_K][FD_V];
} fd;

/* <o, dout> + <last state, dS>, from the formula of the contract. */
static double fd_loss(const fd *x)
{
    double sum = 0;
    for (int h = 0; h < FD_H; h++) {
        double S[FD_K][FD_V];
        memcpy(S, x->S[h], sizeof S);
        for (int t = 0; t < FD_N; t++) {
            int r = t * FD_H + h;
            for (int j = 0; j < FD_V; j++) {
                double read = 0, o = 0;
                for (int i = 0; i < FD_K; i++) {
                    S[i][j] *= exp(x->g[r][i]);
                    read += S[i][j] * x->k[r][i];
                }
                for (int i = 0; i < FD_K; i++) {
                    S[i][j] += x->beta[r] * x->k[r][i] * (x->v[r][j] - read);
                    o += S[i][j] * x->q[r][i];
                }
                sum += o * x->dout[r][j];
            }
        }
        for (int i = 0; i < FD_K * FD_V; i++) {
            sum += S[i / FD_V][i % FD_V] * x->dS[h][i / FD_V][i % FD_V];
        }
    }
    return sum;
}

static void spread(double *dst, const float *src, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        dst[i] = (double)src[i];
    }
}

static void slopes(const fd *at, double *x, const float *got, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        double keep = x[i], delta = 1e-5;
        x[i] = keep + delta;
        double up = fd_loss(at);
        x[i] = keep - delta;
        double slope = (up - fd_loss(at)) / (2 * delta);
        x[i] = keep;
        assert_true(fabs(slope - (double)got[i]) < 5e-6);
    }
}

static void differences(tsr_backend *b)
{
    static const int64_t seg[] = { 0, FD_N };
    problem p = random_problem(13, seg, 1, FD_H, FD_K, FD_V, -3, 0);
    p.chunk = 16;
    outputs(&p);
    forward(b, &p);
    backward(b, &p);
    fd x;
    spread(&x.q[0][0], p.q, FD_ROWS * FD_K);
    spread(&x.k[0][0], p.k, FD_ROWS * FD_K);
    spread(&x.g[0][0], p.g, FD_ROWS * FD_K);
    spread(&x.v[0][0], p.v, FD_ROWS * FD_V);
    spread(x.beta, p.beta, FD_ROWS);
    spread(&x.S[0][0][0], p.state0, FD_H * FD_K * FD_V);
    spread(&x.dout[0][0], p.dout, FD_ROWS * FD_V);
    spread(&x.dS[0][0][0], p.dstate, FD_H * FD_K * FD_V);
    slopes(&x, &x.q[0][0], p.dq, FD_ROWS * FD_K);
    slopes(&x, &x.k[0][0], p.d_k, FD_ROWS * FD_K);
    slopes(&x, &x.g[0][0], p.dg, FD_ROWS * FD_K);
    slopes(&x, &x.v[0][0], p.d_v, FD_ROWS * FD_V);
    slopes(&x, x.beta, p.dbeta, FD_ROWS);
    slopes(&x, &x.S[0][0][0], p.dstate0, FD_H * FD_K * FD_V);
    drop_outputs(&p);
    drop_problem(&p);
}

static double gate(double u, double a_log, double lower)
{
    return lower < 0 ? lower / (1 + exp(-exp(a_log) * u)) : -exp(a_log) * log1p(exp(u));
}

static void gate_differences(tsr_backend *b)
{
    enum { N = 4, H = 2, D = 3 };
    static const float bias[H * D] = { 0.3f, -0.2f, 0.9f, 0, 1, -1 }, a_log[H] = { 0.4f, -0.7f };
    uint64_t rng = 17;
    for (int kind = 0; kind < 2; kind++) {
        float lower = kind ? -5.0f : 0.0f, z[N * H * D], dg[N * H * D], g[N * H * D], dz[N * H * D];
        float dbias[H * D] = { 1, 1, 1, 1, 1, 1 }, da[H] = { 2, 2 };
        double bias_slope[H * D] = { 0 }, log_slope[H] = { 0 }, e = 1e-5;
        for (int i = 0; i < N * H * D; i++) {
            z[i] = (float)(3 * noise(&rng));
            dg[i] = (float)noise(&rng);
        }
        tsr_kda_gate_fwd_args f = { g, z, bias, a_log, N, H, D, lower };
        tsr_kda_gate_bwd_args a = { dz, dbias, da, dg, z, bias, a_log, N, H, D, lower };
        assert_int_equal(tsr_kda_gate_fwd(b, &f), TSR_OK);
        assert_int_equal(tsr_kda_gate_bwd(b, &a), TSR_OK);
        for (int i = 0; i < N * H * D; i++) {
            int c = i % (H * D);
            double u = (double)z[i] + (double)bias[c], l = (double)a_log[c / D], low = (double)lower;
            assert_true(fabs((double)g[i] - gate(u, l, low)) < 2e-6);
            double slope = (double)dg[i] * (gate(u + e, l, low) - gate(u - e, l, low)) / (2 * e);
            assert_true(fabs((double)dz[i] - slope) < 2e-6);
            bias_slope[c] += slope;
            log_slope[c / D] += (double)dg[i] * (gate(u, l + e, low) - gate(u, l - e, low)) / (2 * e);
        }
        for (int c = 0; c < H * D; c++) {
            assert_true(fabs((double)dbias[c] - 1 - bias_slope[c]) < 1e-5);
            assert_true(fabs((double)da[c / D] - 2 - log_slope[c / D]) < 2e-5);
        }
    }
}

static void gradients_are_central_differences(void **state)
{
    (void)state;
    on_each_host(differences);
    on_each_host(gate_differences);
}

static void gate_values(void **state)
{
    (void)state;
    static const float z[3] = { -4, 0, 4 }, zero[3] = { 0 };
    static const double want[3] = { -0.08993105, -2.5, -4.91006895 };
    float g[3];
    tsr_kda_gate_fwd_args a = { g, z, zero, zero, 1, 1, 3, -5.0f };
    assert_int_equal(tsr_cpu_kda_gate_fwd(NULL, &a), TSR_OK);
    for (int i = 0; i < 3; i++) {
        assert_true(fabs((double)g[i] - want[i]) < 5e-7);
    }
}

/* ---- what the bound is for ------------------------------------------------------------------------------------- */

/* A sub-block of 16 steps about its middle row: exp(G - Gm) k and exp(Gm - G) k, each rounded to bf16, stay finite,
 * and the products <k_r exp(G_r - G_s), k_s> come out to what two such roundings cost: 2^-9 each of what is added. */
static void operands_fit_bf16(void **state)
{
    (void)state;
    enum { C = 16, D = 128, MID = 7 };
    static const double low[3] = { -5, 0, -5 }, high[3] = { -4.999, 0, 0 };
    for (int kind = 0; kind < 3; kind++) {
        static double k[C][D], G[C][D];
        uint64_t rng = 19;
        double worst = 0, largest = 0;
        for (int t = 0; t < C; t++) {
            for (int i = 0; i < D; i++) {
                double g = low[kind] + (high[kind] - low[kind]) * (0.5 + 0.5 * noise(&rng));
                k[t][i] = noise(&rng) / sqrt(D / 3.0);
                G[t][i] = g + (t > 0 ? G[t - 1][i] : 0);
            }
        }
        for (int r = 0; r < C; r++) {
            for (int s = 0; s <= r; s++) {
                double got = 0, want = 0, size = 0;
                for (int i = 0; i < D; i++) {
                    float x = tsr_bf16_to_f32(tsr_f32_to_bf16((float)(k[r][i] * exp(G[r][i] - G[MID][i]))));
                    float y = tsr_bf16_to_f32(tsr_f32_to_bf16((float)(k[s][i] * exp(G[MID][i] - G[s][i]))));
                    assert_true(isfinite(x) && isfinite(y));
                    largest = fmax(largest, fmax(fabs((double)x), fabs((double)y)));
                    double exact = k[r][i] * k[s][i] * exp(G[r][i] - G[s][i]);
                    got += (double)x * (double)y;
                    want += exact;
                    size += fabs(exact);
                }
                worst = fmax(worst, fabs(got - want) / size);
            }
        }
        print_message("decay %g to %g: largest operand %.3g, worst error %.2g of the sum of magnitudes\n",
                      low[kind], high[kind], largest, worst);
        assert_true(worst <= 1.01 / 256 && worst > 1e-4);
        assert_true(largest < exp(40));
    }
}

/* ---- extremes of the unbounded decay --------------------------------------------------------------------------- */

static void extremes(tsr_backend *b)
{
    static const int64_t seg[] = { 0, 83 };
    static const double low[3] = { -30, -200, -200 }, high[3] = { -30, -200, 0 };
    for (int i = 0; i < 9; i++) {
        problem p = random_problem(23, seg, 1, 2, 16, 16, low[i % 3], high[i % 3]);
        p.chunk = 16 << i / 3;
        int64_t rows = p.n * p.h, nk = rows * p.dk, nv = rows * p.dv;
        problem want = p;
        tsr_backend *cpu = NULL;
        tsr_err err;
        assert_int_equal(tsr_backend_open(&cpu, "cpu", 1, &err), TSR_OK);
        outputs(&p);
        outputs(&want);
        forward(b, &p);
        forward(cpu, &want);
        backward(b, &p);
        backward(cpu, &want);
        const float *got[] = { p.o, p.state, p.dq, p.d_k, p.d_v, p.dbeta, p.dstate0 };
        const float *truth[] = { want.o, want.state, want.dq, want.d_k, want.d_v, want.dbeta, want.dstate0 };
        int64_t size = p.h * p.dk * p.dv, counts[] = { nv, size, nk, nk, nv, rows, size };
        for (int j = 0; j < 7; j++) {
            for (int64_t m = 0; m < counts[j]; m++) {
                assert_true(isfinite(got[j][m]) && fabs((double)got[j][m] - (double)truth[j][m]) < 1e-5);
            }
        }
        for (int64_t m = 0; m < nk; m++) {
            assert_true(isfinite(p.dg[m]) && fabs((double)p.dg[m] - (double)want.dg[m]) < 1e-5);
        }
        tsr_backend_close(&cpu);
        drop_outputs(&p);
        drop_outputs(&want);
        drop_problem(&p);
    }
}

static void no_decay_is_too_strong(void **state)
{
    (void)state;
    on_each_host(extremes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gate_values),
        cmocka_unit_test(gives_the_right_answers),
        cmocka_unit_test(segments_do_not_see_each_other),
        cmocka_unit_test(state_carries_a_cut_sequence),
        cmocka_unit_test(gradients_are_central_differences),
        cmocka_unit_test(operands_fit_bf16),
        cmocka_unit_test(no_decay_is_too_strong),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
