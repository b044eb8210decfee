/* check_mla.c - checks of kernels/ops/mla.h. */
#include "tests/kernels/check.h"
#include "kernels/numeric.h"

#include <math.h>
#include <string.h>

typedef struct shape {
    int64_t h, dn, dr, dv, pad, segs, lengths[5];
} shape;

static const shape shapes[] = {
    { 1, 1, 0, 1, 0, 1, { 1 } },
    { 2, 7, 3, 5, 0, 4, { 0, 1, 47, 2 } },
    { 3, 16, 0, 24, 2, 1, { 49 } },
    { 1, 33, 8, 17, 5, 3, { 63, 65, 1 } },
    { 5, 20, 4, 48, 0, 5, { 1, 1, 1, 1, 131 } },
    { 2, 128, 64, 128, 64, 2, { 100, 97 } },
    { 4, 8, 2, 9, 0, 0, { 0 } },
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

static double logit(const tsr_mla_fwd_args *a, int64_t t, int64_t u, int64_t head, double *mag)
{
    const float *q = a->q + (t * a->h + head) * (a->dn + a->dr),
                *k = a->kv + (u * a->h + head) * (a->dn + a->dv);
    double s = 0;
    *mag = 0;
    for (int64_t j = 0; j < a->dn + a->dr; j++) {
        double x = (double)q[j] * (double)(j < a->dn ? k[j] : a->kr[u * a->kr_stride + j - a->dn]);
        s += x;
        *mag += fabs(x);
    }
    *mag *= (double)a->scale;
    return s * (double)a->scale;
}

/* The segment's first token for each token. */
static void firsts(int64_t *first, const tsr_mla_fwd_args *a)
{
    for (int64_t s = 0; s < a->segs; s++) {
        for (int64_t t = a->seg[s]; t < a->seg[s + 1]; t++) {
            first[t] = a->seg[s];
        }
    }
}

/* A logit is a sum of dn + dr terms in lanes: its error is a few eps times the sum of their magnitudes, L, and that
 * moves its probability by as large a share. Sums of n probabilities and outputs add roundings as the square root of n.
 * So o is off by eps (a sqrt(n) + b L) sum p |v|: magnitudes are those sums, times 1 + L. */
static double red(const shape *s)
{
    int64_t n = 0;
    for (int64_t i = 0; i < s->segs; i++) {
        n = s->lengths[i] > n ? s->lengths[i] : n;
    }
    return 4 + 0.5 * sqrt((double)n) + 0.5 * sqrt((double)(s->dn + s->dr));
}

static tsr_mla_fwd_args inputs(ck *t, const shape *s, int64_t *seg)
{
    seg[0] = 0;
    for (int64_t i = 0; i < s->segs; i++) {
        seg[i + 1] = seg[i] + s->lengths[i];
    }
    tsr_mla_fwd_args a = {
        .n = seg[s->segs], .h = s->h, .dn = s->dn, .dr = s->dr, .dv = s->dv, .segs = s->segs
    };
    int64_t rows = a.n * a.h;
    a.kr_stride = s->dr + s->pad;
    a.scale = 2.0f / sqrtf((float)(s->dn + s->dr));
    a.q = ck_normal(t, rows * (s->dn + s->dr), 1.0f);
    a.kv = ck_normal(t, rows * (s->dn + s->dv), 1.0f);
    a.kr = ck_normal(t, a.n * a.kr_stride + 1, 1.0f);
    a.seg = seg;
    a.o = ck_nan(t, rows * s->dv);
    a.lse = ck_nan(t, rows);
    a.max_logit = ck_normal(t, s->h, 1.0f);
    return a;
}

static tsr_mla_fwd_args on_device(ck *t, const tsr_mla_fwd_args *a)
{
    tsr_mla_fwd_args d = *a;
    size_t rows = (size_t)(a->n * a->h) * sizeof(float);
    d.q = ck_dev(t, a->q, rows * (size_t)(a->dn + a->dr));
    d.kv = ck_dev(t, a->kv, rows * (size_t)(a->dn + a->dv));
    d.kr = a->dr > 0 ? ck_dev(t, a->kr, (size_t)(a->n * a->kr_stride) * sizeof(float)) : NULL;
    d.seg = ck_dev(t, a->seg, (size_t)(a->segs + 1) * sizeof *a->seg);
    d.o = ck_dev(t, a->o, rows * (size_t)a->dv);
    d.lse = a->lse != NULL ? ck_dev(t, a->lse, rows) : NULL;
    d.max_logit = a->max_logit != NULL ? ck_dev(t, a->max_logit, (size_t)a->h * sizeof(float)) : NULL;
    return d;
}

static void forward(ck *t, const shape *s, bool keeps)
{
    int64_t seg[8];
    tsr_mla_fwd_args r = inputs(t, s, seg);
    if (!keeps) {
        r.lse = r.max_logit = NULL;
    }
    tsr_mla_fwd_args d = on_device(t, &r);
    int64_t rows = r.n * r.h, *first = ck_host(t, (size_t)r.n * sizeof *first);
    double *mag = ck_host(t, (size_t)(rows * r.dv) * sizeof *mag),
           *mag_l = ck_host(t, (size_t)rows * sizeof *mag);
    double *mag_top = ck_host(t, (size_t)r.h * sizeof *mag);
    firsts(first, &r);
    CK_RUN(t, mla_fwd, &r, &d);
    memset(mag_top, 0, (size_t)r.h * sizeof *mag);
    for (int64_t i = 0; i < rows; i++) {
        int64_t at = i / r.h, head = i % r.h;
        double most = -INFINITY, sum = 0, l = 0, m;
        for (int64_t u = first[at]; u <= at; u++) {
            double x = logit(&r, at, u, head, &m);
            most = x > most ? x : most;
            l = m > l ? m : l;
        }
        memset(mag + i * r.dv, 0, (size_t)r.dv * sizeof *mag);
        for (int64_t u = first[at]; u <= at; u++) {
            double p = exp(logit(&r, at, u, head, &m) - most);
            sum += p;
            for (int64_t j = 0; j < r.dv; j++) {
                mag[i * r.dv + j] += p * fabs((double)r.kv[(u * r.h + head) * (r.dn + r.dv) + r.dn + j]);
            }
        }
        for (int64_t j = 0; j < r.dv; j++) {
            mag[i * r.dv + j] *= (1 + l) / sum;
        }
        mag_l[i] = 1 + l;
        mag_top[head] = l > mag_top[head] ? l : mag_top[head];
    }
    ck_f32(t, "o", r.o, d.o, mag, rows * r.dv, (ck_tol){ 1e-37, 2, red(s) });
    if (keeps) {
        ck_f32(t, "lse", r.lse, d.lse, mag_l, rows, (ck_tol){ 1e-37, 2, red(s) });
        ck_f32(t, "max_logit", r.max_logit, d.max_logit, mag_top, r.h, (ck_tol){ 1e-37, 1, red(s) });
    }
    ck_end(t);
}

void ck_mla_fwd(ck *t)
{
    for (int i = 0; i < SHAPES; i++) {
        forward(t, &shapes[i], true);
        forward(t, &shapes[i], false);
    }
}

/* Magnitudes of the gradients: ds is off by about eps p (|dout| |v| + |dout| |o|) (1 + L) scale. */
static void magnitudes(const tsr_mla_bwd_args *a, const tsr_mla_fwd_args *f, const int64_t *first, double *dq,
                       double *dkv, double *dkr)
{
    int64_t wide = a->dn + a->dv, qd = a->dn + a->dr;
    for (int64_t i = 0; i < a->n * a->h; i++) {
        int64_t t = i / a->h, head = i % a->h;
        double delta = 0;
        for (int64_t j = 0; j < a->dv; j++) {
            delta += fabs((double)a->dout[i * a->dv + j] * (double)a->o[i * a->dv + j]);
        }
        for (int64_t u = first[t]; u <= t; u++) {
            int64_t at = u * a->h + head;
            double l, x = logit(f, t, u, head, &l),
                      p = exp(x - (double)a->lse[i]) * (1 + l + fabs((double)a->lse[i])), dp = 0;
            for (int64_t j = 0; j < a->dv; j++) {
                double g = fabs((double)a->dout[i * a->dv + j]);
                dp += g * fabs((double)a->kv[at * wide + a->dn + j]);
                dkv[at * wide + a->dn + j] += p * g;
            }
            double ds = p * (dp + delta) * (double)a->scale;
            for (int64_t j = 0; j < qd; j++) {
                double q = fabs((double)a->q[i * qd + j]);
                double k = fabs(
                    (double)(j < a->dn ? a->kv[at * wide + j] : a->kr[u * a->kr_stride + j - a->dn]));
                dq[i * qd + j] += ds * k;
                *(j < a->dn ? &dkv[at * wide + j] : &dkr[u * a->dkr_stride + j - a->dn]) += ds * q;
            }
        }
    }
}

void ck_mla_bwd(ck *t)
{
    for (int i = 0; i < SHAPES; i++) {
        const shape *s = &shapes[i];
        int64_t seg[8];
        tsr_mla_fwd_args f = inputs(t, s, seg);
        if (tsr_cpu_mla_fwd(t->ref->queue, &f) != TSR_OK) {
            ck_fail(t, "forward failed");
        }
        int64_t rows = f.n * f.h, qd = f.dn + f.dr, wide = f.dn + f.dv, ks = s->dr + 2 * s->pad;
        tsr_mla_bwd_args r = { .o = f.o,
                               .lse = f.lse,
                               .q = f.q,
                               .kv = f.kv,
                               .kr = f.kr,
                               .seg = seg,
                               .n = f.n,
                               .h = f.h,
                               .dn = f.dn,
                               .dr = f.dr,
                               .dv = f.dv,
                               .segs = f.segs,
                               .kr_stride = f.kr_stride,
                               .dkr_stride = ks,
                               .scale = f.scale };
        float *dkr = ck_normal(t, f.n * ks + 1, 1.0f); /* what lies between the rows stays */
        r.dq = ck_nan(t, rows * qd);
        r.dkv = ck_nan(t, rows * wide);
        r.dkr = dkr;
        r.dout = ck_normal(t, rows * f.dv, 1.0f);
        tsr_mla_fwd_args df = on_device(t, &f);
        tsr_mla_bwd_args d = r;
        d.o = df.o;
        d.lse = df.lse;
        d.q = df.q;
        d.kv = df.kv;
        d.kr = df.kr;
        d.seg = df.seg;
        d.dq = ck_dev(t, r.dq, (size_t)(rows * qd) * 4);
        d.dkv = ck_dev(t, r.dkv, (size_t)(rows * wide) * 4);
        d.dkr = s->dr > 0 ? ck_dev(t, dkr, (size_t)(f.n * ks) * 4) : NULL;
        d.dout = ck_dev(t, r.dout, (size_t)(rows * f.dv) * 4);
        double *mags = ck_host(t, (size_t)(rows * (qd + wide) + f.n * ks) * sizeof *mags),
               *mkv = mags + rows * qd, *mkr = mkv + rows * wide;
        int64_t *first = ck_host(t, (size_t)f.n * sizeof *first);
        memset(mags, 0, (size_t)(rows * (qd + wide) + f.n * ks) * sizeof *mags);
        firsts(first, &f);
        magnitudes(&r, &f, first, mags, mkv, mkr);
        CK_RUN(t, mla_bwd, &r, &d);
        ck_tol tol = { 1e-37, 2, red(s) };
        ck_f32(t, "dq", r.dq, d.dq, mags, rows * qd, tol);
        ck_f32(t, "dkv", r.dkv, d.dkv, mkv, rows * wide, tol);
        if (s->dr > 0) {
            ck_f32(t, "dkr", dkr, d.dkr, mkr, f.n * ks, tol);
        }
        ck_end(t);
    }
}

typedef struct cached {
    int64_t n, h, r, dr, past;
} cached;

/* Few rows over many positions (split into parts) and many over few; a whole tile of keys and one more. */
static const cached caches[] = {
    { 1, 1, 1, 0, 0 },     { 1, 8, 128, 64, 47 }, { 1, 8, 40, 8, 1700 }, { 1, 3, 17, 3, 5000 },
    { 5, 7, 32, 0, 768 },  { 70, 1, 9, 2, 0 },    { 33, 8, 24, 8, 100 }, { 3, 96, 16, 4, 48 },
    { 64, 40, 16, 1, 13 }, { 0, 2, 4, 1, 3 },
};

static void absorbed(ck *t, const cached *s, tsr_dtype dtype)
{
    int64_t row = s->r + s->dr, rows = s->n * s->h, size = (s->past + s->n) * row;
    float *cache = ck_normal(t, size, 1.0f);
    void *stored = cache;
    size_t bytes = (size_t)size * sizeof(float);
    if (dtype == TSR_DT_BF16) {
        uint16_t *x = ck_bf16(t, cache, size);
        for (int64_t i = 0; i < size; i++) {
            cache[i] = tsr_bf16_to_f32(x[i]);
        }
        stored = x;
        bytes = (size_t)size * sizeof *x;
    }
    tsr_mla_absorbed_args r = { .n = s->n,
                                .h = s->h,
                                .r = s->r,
                                .dr = s->dr,
                                .past = s->past,
                                .dtype = dtype },
                          d;
    r.scale = 2.0f / sqrtf((float)row);
    r.cache = stored;
    r.q = ck_normal(t, rows * row, 1.0f);
    r.ctx = ck_nan(t, rows * s->r);
    d = r;
    d.cache = ck_dev(t, stored, bytes);
    d.q = ck_dev(t, r.q, (size_t)(rows * row) * 4);
    d.ctx = ck_dev(t, r.ctx, (size_t)(rows * s->r) * 4);
    double *mag = ck_host(t, (size_t)(rows * s->r) * sizeof *mag);
    for (int64_t i = 0; i < rows; i++) {
        double *m = mag + i * s->r, most = -INFINITY, sum = 0, l = 0;
        memset(m, 0, (size_t)s->r * sizeof *m);
        for (int64_t u = 0; u <= s->past + i / s->h; u++) {
            double x = 0, lu = 0;
            for (int64_t j = 0; j < row; j++) {
                double term = (double)r.q[i * row + j] * (double)cache[u * row + j] * (double)r.scale;
                x += term;
                lu += fabs(term);
            }
            double top = x > most ? x : most, old = exp(most - top), p = exp(x - top);
            l = lu > l ? lu : l;
            most = top;
            sum = sum * old + p;
            for (int64_t j = 0; j < s->r; j++) {
                m[j] = m[j] * old + p * fabs((double)cache[u * row + j]);
            }
        }
        for (int64_t j = 0; j < s->r; j++) {
            m[j] *= (1 + l) / sum;
        }
    }
    CK_RUN(t, mla_absorbed, &r, &d);
    double bound = 4 + 0.5 * sqrt((double)(s->past + s->n)) + 0.5 * sqrt((double)row); /* as red() */
    ck_f32(t, "ctx", r.ctx, d.ctx, mag, rows * s->r, (ck_tol){ 1e-37, 2, bound });
    ck_end(t);
}

void ck_mla_absorbed(ck *t)
{
    for (size_t i = 0; i < sizeof caches / sizeof *caches; i++) {
        absorbed(t, &caches[i], TSR_DT_F32);
        absorbed(t, &caches[i], TSR_DT_BF16);
    }
}
