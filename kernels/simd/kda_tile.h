/* kda_tile.h - what forward and backward of the chunkwise delta attention share: a tile of 16 steps of one head, its
 * scaled operands, and small matrix products (docs/KDA.md has the formulas). Matrices lie in a worker's scratch, their
 * rows padded with zeros to whole vectors; short tiles end in rows of zeros, which change nothing. */
#ifndef TSR_KERNELS_SIMD_KDA_TILE_H
#define TSR_KERNELS_SIMD_KDA_TILE_H

#include "kernels/numeric.h"
#include "kernels/simd/simd.h"

/* STEPS of a tile, and its row of reference: factors stay within e^+-40 of it when every g >= -5. */
enum { STEPS = 16, MID = 7 };
#ifdef __AVX512F__
enum { MR = 8 };
#else
enum { MR = 4 };
#endif

static inline vf load_part(const float *p, int64_t left)
{
    return left >= VL ? v_load(p) : v_load_n(p, left);
}

static inline void store_part(float *p, vf v, int64_t left)
{
    if (left >= VL) {
        v_store(p, v);
    } else {
        v_store_n(p, v, left);
    }
}

/* ---- products -------------------------------------------------------------------------------------------------- */

/* c[MR][nr VL] = keep c + a b: element (i, k) of a is a[i ai + k ak], keep is one factor for each row (NULL: 0). */
static inline __attribute__((always_inline)) void block(float *c, int64_t ldc, const float *a, int64_t ai,
                                                        int64_t ak, const float *b, int64_t ldb,
                                                        int64_t depth, const float *keep, int nr)
{
    vf sum[MR][2];
    for (int i = 0; i < MR; i++) {
        sum[i][0] = sum[i][1] = v_zero();
    }
    for (int64_t k = 0; k < depth; k++) {
        vf b0 = v_load(b + k * ldb), b1 = nr > 1 ? v_load(b + k * ldb + VL) : v_zero();
        for (int i = 0; i < MR; i++) {
            vf x = v_set1(a[i * ai + k * ak]);
            sum[i][0] = v_fma(x, b0, sum[i][0]);
            sum[i][1] = nr > 1 ? v_fma(x, b1, sum[i][1]) : sum[i][1];
        }
    }
    for (int i = 0; i < MR; i++) {
        for (int j = 0; j < nr; j++) {
            float *to = c + i * ldc + j * VL;
            v_store(to, keep != NULL ? v_fma(v_set1(keep[i]), v_load(to), sum[i][j]) : sum[i][j]);
        }
    }
}

typedef struct mat {
    float *p;
    int64_t ld;
} mat;

/* c[m][n] = keep c + a b, a[m][depth] or, transposed, a[depth][m]; m a multiple of MR, n of VL. */
static void product(mat c, mat a, bool transposed, mat b, int64_t m, int64_t n, int64_t depth,
                    const float *keep)
{
    int64_t ai = transposed ? 1 : a.ld, ak = transposed ? a.ld : 1;
    for (int64_t j = 0; j < n; j += 2 * VL) {
        for (int64_t i = 0; i < m; i += MR) {
            float *to = c.p + i * c.ld + j;
            const float *row = a.p + i * ai, *scale = keep != NULL ? keep + i : NULL;
            if (j + 2 * VL <= n) {
                block(to, c.ld, row, ai, ak, b.p + j, b.ld, depth, scale, 2);
            } else {
                block(to, c.ld, row, ai, ak, b.p + j, b.ld, depth, scale, 1);
            }
        }
    }
}

/* to[n][m] = from[m][n]; both multiples of VL. */
static inline void transpose(mat to, mat from, int64_t m, int64_t n)
{
    for (int64_t i = 0; i < m; i += VL) {
        for (int64_t j = 0; j < n; j += VL) {
            v_transpose(to.p + j * to.ld + i, to.ld, from.p + i * from.ld + j, from.ld);
        }
    }
}

/* ---- a tile ---------------------------------------------------------------------------------------------------- */

/* Rows of heads in memory: row t of a tile lies h apart. */
typedef struct rows {
    const void *p;
    tsr_dtype io;
    int64_t first, step, count, d; /* first row, rows between steps, steps, width */
} rows;

static void fetch(mat to, rows r)
{
    for (int64_t t = 0; t < STEPS; t++) {
        float *row = to.p + t * to.ld;
        int64_t at = (r.first + t * r.step) * r.d, c = 0, live = t < r.count ? r.d : 0;
        if (r.io == TSR_DT_F32) {
            const float *x = r.p;
            for (; c < live; c += VL) {
                v_store(row + c, load_part(x + at + c, live - c));
            }
        } else {
            const uint16_t *x = r.p;
            for (; c + VL <= live; c += VL) {
                v_store(row + c, v_bf16(x + at + c));
            }
            for (; c < live; c++) {
                row[c] = tsr_bf16_to_f32(x[at + c]);
            }
        }
        for (; c < to.ld; c++) {
            row[c] = 0.0f;
        }
    }
}

typedef struct tile {
    int64_t dk, dv, kp, vp; /* widths, and padded ones */
    mat q, k, v;            /* [STEPS]: as given */
    mat decay;              /* exp g */
    mat start;              /* [2 STEPS]: k, then q, times the decay from the tile's start up to this step */
    mat tail;               /* k times the decay from this step to the tile's end */
    mat mid, inv;           /* bounded: [2 STEPS]: k, q times exp(G - G_mid); k times exp(G_mid - G) */
    mat inv_t;              /* inv transposed: [kp][STEPS] */
    mat low;  /* [2 STEPS][STEPS]: <k_r exp(G_r - G_s), k_s> for s < r; <q_r .., k_s> for s <= r; else 0 */
    mat read; /* [2 STEPS][vp]: start S */
    mat res, val; /* [STEPS][vp]: v - S^T k before the update, and beta times that */
    float *gamma; /* [kp]: the decay of the whole tile */
    float beta[STEPS];
} tile;

/* Takes n rows of width ld from *at. */
static inline mat room(float **at, int64_t n, int64_t ld)
{
    mat m = { *at, ld };
    *at += n * ld;
    return m;
}

static inline int64_t padded(int64_t d)
{
    return (d + 15) / 16 * 16;
}

/* Rows of a state lie one line further apart than whole vectors: powers of two would share few cache sets. */
static inline int64_t state_ld(int64_t d)
{
    return padded(d) + 16;
}

static void tile_room(tile *t, float **at, int64_t dk, int64_t dv)
{
    *t = (tile){ .dk = dk, .dv = dv, .kp = padded(dk), .vp = padded(dv) };
    t->q = room(at, STEPS, t->kp);
    t->k = room(at, STEPS, t->kp);
    t->v = room(at, STEPS, t->vp);
    t->decay = room(at, STEPS, t->kp);
    t->start = room(at, 2 * STEPS, t->kp);
    t->tail = room(at, STEPS, t->kp);
    t->mid = room(at, 2 * STEPS, t->kp);
    t->inv = room(at, STEPS, t->kp);
    t->inv_t = room(at, t->kp, STEPS);
    t->low = room(at, 2 * STEPS, STEPS);
    t->read = room(at, 2 * STEPS, t->vp);
    t->res = room(at, STEPS, t->vp);
    t->val = room(at, STEPS, t->vp);
    t->gamma = room(at, 1, t->kp).p;
}

/* Decays from the start, to the end, and about the middle, by running products of exp g: rounding grows with the
 * number of factors, not with the size of the exponent. */
static void scale_operands(tile *t, bool bounded)
{
    for (int64_t c = 0; c < t->kp; c += VL) {
        vf e = v_set1(1.0f);
        for (int64_t i = 0; i < STEPS; i++) {
            float *decay = t->decay.p + i * t->kp + c; /* holds g */
            vf x = v_exp(v_load(decay));
            v_store(decay, x);
            e = e * x;
            v_store(t->start.p + i * t->kp + c, e * v_load(t->k.p + i * t->kp + c));
            v_store(t->start.p + (STEPS + i) * t->kp + c, e * v_load(t->q.p + i * t->kp + c));
        }
        v_store(t->gamma + c, e);
        if (!bounded) {
            continue;
        }
        vf m = v_set1(1.0f), one = m;
        e = one;
        for (int64_t i = STEPS - 1; i >= 0; i--) {
            v_store(t->tail.p + i * t->kp + c, e * v_load(t->k.p + i * t->kp + c));
            e = e * v_load(t->decay.p + i * t->kp + c);
        }
        for (int64_t i = MID; i < STEPS; i++) {
            if (i > MID) {
                m = m * v_load(t->decay.p + i * t->kp + c);
            }
            vf k = v_load(t->k.p + i * t->kp + c);
            v_store(t->mid.p + i * t->kp + c, m * k);
            v_store(t->mid.p + (STEPS + i) * t->kp + c, m * v_load(t->q.p + i * t->kp + c));
            v_store(t->inv.p + i * t->kp + c, k * (one / m));
        }
        m = one;
        for (int64_t i = MID - 1; i >= 0; i--) {
            m = m * v_load(t->decay.p + (i + 1) * t->kp + c);
            vf k = v_load(t->k.p + i * t->kp + c), up = one / m;
            v_store(t->mid.p + i * t->kp + c, up * k);
            v_store(t->mid.p + (STEPS + i) * t->kp + c, up * v_load(t->q.p + i * t->kp + c));
            v_store(t->inv.p + i * t->kp + c, k * m);
        }
    }
}

/* Without a bound: k_s decays on from row to row, never divided; at the end it is the tail. */
static void pairwise(tile *t)
{
    for (int64_t r = 0; r < STEPS; r++) {
        const float *k = t->k.p + r * t->kp, *q = t->q.p + r * t->kp, *decay = t->decay.p + r * t->kp;
        for (int64_t s = 0; s <= r; s++) {
            float *tail = t->tail.p + s * t->kp;
            vf kk = v_zero(), qk = v_zero();
            for (int64_t c = 0; c < t->kp; c += VL) {
                vf x = v_load((s < r ? tail : k) + c);
                if (s < r) {
                    x = x * v_load(decay + c);
                }
                v_store(tail + c, x);
                kk = v_fma(v_load(k + c), x, kk);
                qk = v_fma(v_load(q + c), x, qk);
            }
            t->low.p[r * STEPS + s] = v_sum(kk);
            t->low.p[(STEPS + r) * STEPS + s] = v_sum(qk);
        }
    }
}

/* Everything that does not depend on the state. q, k, v, g: rows of this tile and head. */
static void tile_begin(tile *t, rows q, rows k, rows v, rows g, const float *beta, bool bounded)
{
    fetch(t->q, q);
    fetch(t->k, k);
    fetch(t->v, v);
    fetch(t->decay, g);
    for (int64_t i = 0; i < STEPS; i++) {
        t->beta[i] = i < g.count ? beta[g.first + i * g.step] : 0.0f;
    }
    scale_operands(t, bounded);
    if (bounded) {
        transpose(t->inv_t, t->inv, STEPS, t->kp);
        product(t->low, t->mid, false, t->inv_t, 2 * STEPS, STEPS, t->kp, NULL);
    } else {
        pairwise(t);
    }
    for (int64_t r = 0; r < STEPS; r++) { /* what lies above may be anything, infinity too */
        for (int64_t s = r; s < STEPS; s++) {
            t->low.p[r * STEPS + s] = 0.0f;
            t->low.p[(STEPS + r) * STEPS + s] = s == r ? t->low.p[(STEPS + r) * STEPS + s] : 0.0f;
        }
    }
}

/* res and val from the state's answers, by forward substitution; a vector of columns at a time, in registers. With
 * `outputs` also read's second half += low's second half times val: the outputs. */
static void tile_solve(tile *t, bool outputs)
{
    for (int64_t c = 0; c < t->vp; c += VL) {
        vf x[STEPS];
#pragma GCC unroll 16
        for (int r = 0; r < STEPS; r++) {
            vf e = v_load(t->v.p + r * t->vp + c) - v_load(t->read.p + r * t->vp + c);
#pragma GCC unroll 16
            for (int s = 0; s < r; s++) {
                e = v_fma(v_set1(-t->low.p[r * STEPS + s]), x[s], e);
            }
            v_store(t->res.p + r * t->vp + c, e);
            x[r] = e * v_set1(t->beta[r]);
            v_store(t->val.p + r * t->vp + c, x[r]);
        }
        if (!outputs) {
            continue;
        }
#pragma GCC unroll 16
        for (int r = 0; r < STEPS; r++) {
            float *o = t->read.p + (STEPS + r) * t->vp + c;
            vf sum = v_load(o);
#pragma GCC unroll 16
            for (int s = 0; s <= r; s++) {
                sum = v_fma(v_set1(t->low.p[(STEPS + r) * STEPS + s]), x[s], sum);
            }
            v_store(o, sum);
        }
    }
}

/* S = diag(gamma) S + tail^T val. */
static void tile_advance(const tile *t, mat S)
{
    product(S, t->tail, true, t->val, t->kp, t->vp, STEPS, t->gamma);
}

/* ---- states ---------------------------------------------------------------------------------------------------- */

static void state_in(mat S, const float *from, int64_t dk, int64_t dv) /* from NULL: zeros */
{
    memset(S.p, 0, (size_t)(padded(dk) * S.ld) * sizeof(float));
    for (int64_t i = 0; from != NULL && i < dk; i++) {
        memcpy(S.p + i * S.ld, from + i * dv, (size_t)dv * sizeof(float));
    }
}

static void state_out(float *to, mat S, int64_t dk, int64_t dv)
{
    for (int64_t i = 0; i < dk; i++) {
        memcpy(to + i * dv, S.p + i * S.ld, (size_t)dv * sizeof(float));
    }
}

#endif
