/* check_attnres.c - checks of kernels/ops/attnres.h. */
#include "tests/kernels/check.h"

#include <math.h>
#include <string.h>

static const struct shape {
    int64_t n, d, s, gap; /* gap: elements between the banked vectors */
} shapes[] = { { 0, 4, 1, 0 },  { 1, 1, 1, 0 },  { 3, 7, 2, 5 },    { 8, 16, 5, 0 },   { 9, 17, 13, 3 },
               { 300, 24, 3, 0 }, { 5, 256, 8, 0 }, { 17, 129, 1, 64 }, { 2, 1000, 12, 0 } };
enum { SHAPES = sizeof shapes / sizeof *shapes };
static const float eps = 1e-6f;

static float *up(ck *t, const float *p, int64_t n)
{
    return ck_dev(t, p, (size_t)n * sizeof *p);
}

typedef struct inputs {
    float *bank, *cur, *norm, *proj;
    int64_t n, d, s, stride;
} inputs;

static inputs make(ck *t, const struct shape *k)
{
    inputs in = { .n = k->n, .d = k->d, .s = k->s, .stride = k->n * k->d + k->gap };
    in.bank = ck_normal(t, in.s * in.stride, 2);
    in.cur = ck_normal(t, in.n * in.d, 1);
    in.norm = ck_normal(t, in.d, 1);
    in.proj = ck_normal(t, in.d, 0.3f);
    for (int64_t j = 0; in.n > 1 && j < in.d; j++) {
        in.cur[in.d + j] *= 1e-3f; /* a token whose last source is small */
    }
    return in;
}

static const float *source(const inputs *in, int64_t t, int64_t i)
{
    return i < in->s ? in->bank + i * in->stride + t * in->d : in->cur + t * in->d;
}

/* Of source i of token t: 1 / rms, the score, and the sum of the magnitudes that make the score. */
static void scored(const inputs *in, int64_t t, int64_t i, double *r, double *score, double *mag)
{
    const float *v = source(in, t, i);
    double ss = 0;
    *score = *mag = 0;
    for (int64_t j = 0; j < in->d; j++) {
        double term = (double)v[j] * (double)in->norm[j] * (double)in->proj[j];
        ss += (double)v[j] * (double)v[j];
        *score += term;
        *mag += fabs(term);
    }
    *r = 1 / sqrt(ss / (double)in->d + (double)eps);
    *score *= *r;
    *mag *= *r;
}

/* The mix of token t into p, r [s + 1]. Returns 1 + the largest magnitude of a score: by that many roundings each p is off. */
static double mix(const inputs *in, int64_t t, float *p, float *r)
{
    double x[16], most = -INFINITY, sum = 0, worst = 0;
    for (int64_t i = 0; i <= in->s; i++) {
        double one, mag;
        scored(in, t, i, &one, &x[i], &mag);
        r[i] = (float)one;
        most = x[i] > most ? x[i] : most;
        worst = mag > worst ? mag : worst;
    }
    for (int64_t i = 0; i <= in->s; i++) {
        sum += x[i] = exp(x[i] - most);
    }
    for (int64_t i = 0; i <= in->s; i++) {
        p[i] = (float)(x[i] / sum);
    }
    return 1 + worst;
}

static void fwd(ck *t, const struct shape *k, bool keep)
{
    inputs in = make(t, k);
    int64_t n = in.n, d = in.d, mixes = n * (in.s + 1);
    float *y = ck_nan(t, n * d), *p = ck_nan(t, mixes), *r = ck_nan(t, mixes), row[2][16];
    double *my = ck_host(t, (size_t)(n * d) * sizeof *my), *mp = ck_host(t, (size_t)mixes * sizeof *mp);
    memset(my, 0, (size_t)(n * d) * sizeof *my);
    for (int64_t i = 0; i < n; i++) {
        double off = mix(&in, i, row[0], row[1]);
        for (int64_t b = 0; b <= in.s; b++) {
            mp[i * (in.s + 1) + b] = (double)row[0][b] * off;
            for (int64_t j = 0; j < d; j++) {
                my[i * d + j] += (double)row[0][b] * fabs((double)source(&in, i, b)[j]) * off;
            }
        }
    }
    tsr_attnres_fwd_args a = { y,      keep ? p : NULL, keep ? r : NULL, in.bank, in.cur, in.norm,
                               in.proj, n,               d,               in.s,    in.stride, eps };
    float *dp = up(t, p, mixes), *dr = up(t, r, mixes);
    tsr_attnres_fwd_args b = a;
    b.y = up(t, y, n * d);
    b.p = keep ? dp : NULL;
    b.rstd = keep ? dr : NULL;
    b.bank = up(t, in.bank, in.s * in.stride);
    b.cur = up(t, in.cur, n * d);
    b.norm = up(t, in.norm, d);
    b.proj = up(t, in.proj, d);
    CK_RUN(t, attnres_fwd, &a, &b);
    ck_f32(t, "y", y, b.y, my, n * d, (ck_tol){ 1e-37, 1, 3 });
    if (keep) {
        ck_f32(t, "p", p, dp, mp, mixes, (ck_tol){ 1e-37, 1, 3 });
        ck_f32(t, "rstd", r, dr, NULL, mixes, (ck_tol){ 0, 3, 0 });
    }
    ck_end(t);
}

void ck_attnres_fwd(ck *t)
{
    for (int i = 0; i < 2 * SHAPES; i++) {
        fwd(t, &shapes[i / 2], i % 2 == 0);
    }
}

/* Adds the magnitudes of one token's terms (kernels/cpu/attnres.c has the formula). */
static void magnitudes(const inputs *in, const tsr_attnres_bwd_args *a, int64_t t, double *bank, double *cur, double *norm,
                       double *proj)
{
    double dot[16], mean = 0;
    const float *dy = a->dy + t * in->d, *p = a->p + t * (in->s + 1), *r = a->rstd + t * (in->s + 1);
    for (int64_t i = 0; i <= in->s; i++) {
        dot[i] = 0;
        for (int64_t j = 0; j < in->d; j++) {
            dot[i] += fabs((double)dy[j] * (double)source(in, t, i)[j]);
        }
        mean += (double)p[i] * dot[i];
    }
    for (int64_t i = 0; i <= in->s; i++) {
        const float *v = source(in, t, i);
        double ds = (double)p[i] * (dot[i] + mean), one, score, mag;
        double *dv = i < in->s ? bank + i * a->dbank_stride + t * in->d : cur + t * in->d;
        scored(in, t, i, &one, &score, &mag);
        for (int64_t j = 0; j < in->d; j++) {
            double n = fabs((double)v[j] * (double)r[i]), w = fabs((double)in->norm[j]), q = fabs((double)in->proj[j]);
            norm[j] += ds * n * q;
            proj[j] += ds * n * w;
            dv[j] += (double)p[i] * fabs((double)dy[j]) + ds * (double)r[i] * (w * q + n * mag / (double)in->d);
        }
    }
}

/* An output that is added to: its start on both sides, and the magnitudes of the terms, the start first. */
typedef struct sum {
    float *ref, *dut;
    double *mag;
    int64_t n;
} sum;

static sum start(ck *t, int64_t n)
{
    sum s = { .ref = ck_normal(t, n, 1), .n = n };
    s.dut = up(t, s.ref, n);
    s.mag = ck_host(t, (size_t)n * sizeof *s.mag);
    for (int64_t i = 0; i < n; i++) {
        s.mag[i] = fabs((double)s.ref[i]);
    }
    return s;
}

static void bwd(ck *t, const struct shape *k)
{
    static const char *const names[] = { "dbank", "dcur", "dnorm", "dproj" };
    inputs in = make(t, k);
    int64_t n = in.n, d = in.d, mixes = n * (in.s + 1), stride = n * d + 2 * k->gap;
    float *p = ck_nan(t, mixes), *r = ck_nan(t, mixes), *dy = ck_normal(t, n * d, 1);
    sum out[] = { start(t, in.s * stride), start(t, n * d), start(t, d), start(t, d) };
    tsr_attnres_bwd_args a = { out[0].ref, out[1].ref, out[2].ref, out[3].ref, dy,   p,         r,     in.bank,
                               in.cur,     in.norm,    in.proj,    n,          d,    in.s,      in.stride, stride };
    for (int64_t i = 0; i < n; i++) {
        (void)mix(&in, i, p + i * (in.s + 1), r + i * (in.s + 1));
        magnitudes(&in, &a, i, out[0].mag, out[1].mag, out[2].mag, out[3].mag);
    }
    tsr_attnres_bwd_args b = { out[0].dut,
                               out[1].dut,
                               out[2].dut,
                               out[3].dut,
                               up(t, dy, n * d),
                               up(t, p, mixes),
                               up(t, r, mixes),
                               up(t, in.bank, in.s * in.stride),
                               up(t, in.cur, n * d),
                               up(t, in.norm, d),
                               up(t, in.proj, d),
                               n,
                               d,
                               in.s,
                               in.stride,
                               stride };
    CK_RUN(t, attnres_bwd, &a, &b);
    for (int i = 0; i < 4; i++) {
        ck_f32(t, names[i], out[i].ref, out[i].dut, out[i].mag, out[i].n, (ck_tol){ 1e-37, 1, 3 });
    }
    ck_end(t);
}

void ck_attnres_bwd(ck *t)
{
    for (int i = 0; i < SHAPES; i++) {
        bwd(t, &shapes[i]);
    }
}
