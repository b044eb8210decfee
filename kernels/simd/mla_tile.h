/* mla_tile.h - what the kernels of latent attention share: a tile of queries against a tile of keys.
 *
 * Logits and probabilities of a tile lie key by key, the rows (queries) beside each other: a softmax then runs down the
 * keys with a vector of rows at a time and needs no sums across lanes. */
#ifndef TSR_KERNELS_SIMD_MLA_TILE_H
#define TSR_KERNELS_SIMD_MLA_TILE_H

#include "kernels/simd/simd.h"

#include <math.h>

enum { ROWS = 64, KEYS = 48 }; /* of a tile: what is read again and again stays in the second cache */
enum { MR = VL == 16 ? 8 : 4, NR = 3 };

/* The first bytes of each worker's scratch are its own; what all share lies behind those of worker 0. */
#define OWN_FLOATS ((int64_t)(TSR_SCRATCH_BYTES / 2 / sizeof(float)))

static inline float *shared_floats(tsr_queue *q)
{
    return (float *)tsr_scratch(q, 0) + OWN_FLOATS;
}

/* Takes n floats from *at, whole cache lines. */
static inline float *take(float **at, int64_t n)
{
    float *p = *at;
    *at += (n + 15) / 16 * 16;
    return p;
}

/* Which keys each row of a tile sees: first[i] to last[i], counted from the tile's first key; small whole numbers. */
typedef struct window {
    float first[ROWS], last[ROWS];
    bool all; /* every row sees every key */
} window;

/* s[j][i] = scale <a_i, b_j> for m <= ROWS rows of a and n <= KEYS rows of b, d numbers each. */
static inline void dots(float (*s)[ROWS], const float *a, int64_t lda, int64_t m, const float *b, int64_t ldb,
                        int64_t n, int64_t d, float scale)
{
    for (int64_t i = 0; i < m; i += MR) {
        const float *row[MR];
        for (int64_t r = 0; r < MR; r++) { /* rows that are missing repeat the last one */
            row[r] = a + (i + r < m ? i + r : m - 1) * lda;
        }
        for (int64_t j = 0; j < n; j += NR) {
            const float *key[NR];
            for (int64_t k = 0; k < NR; k++) {
                key[k] = b + (j + k < n ? j + k : n - 1) * ldb;
            }
            vf sum[MR][NR];
#pragma GCC unroll 8
            for (int r = 0; r < MR; r++) {
#pragma GCC unroll 3
                for (int k = 0; k < NR; k++) {
                    sum[r][k] = v_zero();
                }
            }
            EACH(d)
            {
                vf y[NR];
#pragma GCC unroll 3
                for (int k = 0; k < NR; k++) {
                    y[k] = LOAD(key[k]);
                }
#pragma GCC unroll 8
                for (int r = 0; r < MR; r++) {
                    vf x = LOAD(row[r]);
#pragma GCC unroll 3
                    for (int k = 0; k < NR; k++) {
                        sum[r][k] = v_fma(x, y[k], sum[r][k]);
                    }
                }
            }
            __m128 by = _mm_set1_ps(scale);
#pragma GCC unroll 3
            for (int k = 0; k < NR; k++) {
                if (j + k < n) {
#pragma GCC unroll 2
                    for (int r = 0; r < MR; r += 4) {
                        __m128 four = v_sums4(sum[r][k], sum[r + 1][k], sum[r + 2][k], sum[r + 3][k]);
                        _mm_storeu_ps(s[j + k] + i + r, _mm_mul_ps(four, by));
                    }
                }
            }
        }
    }
}

/* acc[i][c] = keep[i] acc[i][c] + sum over u of p(i, u) v[u][c], for m rows, n terms, d columns; p(i, u) lies at
 * p[i pi + u pu]. keep NULL: 1. */
static inline void weighted(float *acc, int64_t ld, int64_t m, const float *keep, const float *p, int64_t pi,
                            int64_t pu, const float *v, int64_t ldv, int64_t n, int64_t d)
{
    for (int64_t c = 0; c < d; c += NR * VL) {
        int64_t left[NR];
        for (int64_t k = 0; k < NR; k++) {
            int64_t l = d - c - k * VL;
            left[k] = l < 0 ? 0 : l < VL ? l : VL;
        }
        bool full = left[NR - 1] == VL;
        for (int64_t i = 0; i < m; i += MR) {
            const float *x[MR];
            for (int64_t r = 0; r < MR; r++) {
                x[r] = p + (i + r < m ? i + r : m - 1) * pi;
            }
            vf sum[MR][NR];
#pragma GCC unroll 8
            for (int r = 0; r < MR; r++) {
#pragma GCC unroll 3
                for (int k = 0; k < NR; k++) {
                    sum[r][k] = v_zero();
                }
            }
            const float *row = v + c;
            for (int64_t u = 0; u < n; u++, row += ldv) {
                vf y[NR];
#pragma GCC unroll 3
                for (int k = 0; k < NR; k++) {
                    y[k] = full ? v_load(row + k * VL) : v_load_n(row + k * VL, left[k]);
                }
#pragma GCC unroll 8
                for (int r = 0; r < MR; r++) {
                    vf w = v_set1(x[r][u * pu]);
#pragma GCC unroll 3
                    for (int k = 0; k < NR; k++) {
                        sum[r][k] = v_fma(w, y[k], sum[r][k]);
                    }
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < MR; r++) {
                float *to = acc + (i + r) * ld + c;
                vf old = v_set1(keep != NULL && i + r < m ? keep[i + r] : 1.0f);
#pragma GCC unroll 3
                for (int k = 0; k < NR; k++) {
                    if (i + r < m && full) {
                        v_store(to + k * VL, v_fma(old, v_load(to + k * VL), sum[r][k]));
                    } else if (i + r < m && left[k] > 0) {
                        v_store_n(to + k * VL, v_fma(old, v_load_n(to + k * VL, left[k]), sum[r][k]),
                                  left[k]);
                    }
                }
            }
        }
    }
}

/* x where the row of this lane sees key u, else `hidden`. */
static inline vf seen(const window *w, int64_t v, int64_t u, vf x, vf hidden)
{
    vf at = v_set1((float)u);
    x = v_less(at, v_load(w->first + v), hidden, x);
    return v_less(v_load(w->last + v), at, hidden, x);
}

/* Online softmax of one tile: logits become exp(logit - top), tops and sums go on, keep is what older sums and outputs
 * are worth beside them. Rows that have seen no key have top -infinity and sum 0. */
static inline void softmax(float (*s)[ROWS], int64_t m, int64_t n, const window *w, float *top, float *sum,
                           float *keep)
{
    const vf none = v_set1(-INFINITY);
    for (int64_t v = 0; v < m; v += VL) {
        vf most = v_load(top + v), was = most, total = v_zero();
        for (int64_t u = 0; u < n; u++) {
            vf x = v_load(s[u] + v);
            if (!w->all) {
                x = seen(w, v, u, x, none);
                v_store(s[u] + v, x);
            }
            most = v_max(x, most);
        }
        vf base = v_less(none, most, most, v_zero());
        for (int64_t u = 0; u < n; u++) {
            vf x = v_exp(v_load(s[u] + v) - base);
            v_store(s[u] + v, x);
            total = total + x;
        }
        vf old = v_exp(was - base);
        v_store(keep + v, old);
        v_store(sum + v, v_fma(old, v_load(sum + v), total));
        v_store(top + v, most);
    }
}

/* ---- segments of a batch ---------------------------------------------------------------------------------------- */

/* The segment that has token t. */
static inline int64_t segment_of(const int64_t *seg, int64_t segs, int64_t t)
{
    int64_t low = 0, high = segs;
    while (high - low > 1) {
        int64_t mid = (low + high) / 2;
        low = seg[mid] <= t ? mid : low;
        high = seg[mid] <= t ? high : mid;
    }
    return low;
}

/* First token that each of m queries from t on sees. */
static inline void first_seen(int64_t *first, const int64_t *seg, int64_t segs, int64_t t, int64_t m)
{
    int64_t at = segment_of(seg, segs, t);
    for (int64_t i = 0; i < m; i++) {
        while (seg[at + 1] <= t + i) {
            at++;
        }
        first[i] = seg[at];
    }
}

/* Queries t.. see keys from first[] to themselves; the tile has keys u to u + n - 1. */
static inline void window_of(window *w, const int64_t *first, int64_t t, int64_t m, int64_t u, int64_t n)
{
    w->all = true;
    for (int64_t i = 0; i < ROWS; i++) {
        int64_t a = i < m ? first[i] - u : n, b = i < m ? t + i - u : -1;
        w->first[i] = (float)(a < 0 ? 0 : a > n ? n : a);
        w->last[i] = (float)(b < -1 ? -1 : b > n - 1 ? n - 1 : b);
        w->all = w->all && (i >= m || (a <= 0 && b >= n - 1));
    }
}

/* Keys u.. of one head as dots wants them: [k, kr] beside each other; values too. */
static inline void pack_keys(float *keys, float *values, const float *kv, const float *kr, int64_t kr_stride,
                             int64_t h, int64_t head, int64_t dn, int64_t dr, int64_t dv, int64_t u,
                             int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        const float *row = kv + ((u + i) * h + head) * (dn + dv);
        memcpy(keys + i * (dn + dr), row, (size_t)dn * sizeof(float));
        if (dr > 0) {
            memcpy(keys + i * (dn + dr) + dn, kr + (u + i) * kr_stride, (size_t)dr * sizeof(float));
        }
        memcpy(values + i * dv, row + dn, (size_t)dv * sizeof(float));
    }
}

/* m rows of one head: to[i] = from[t + i][head]. */
static inline void pack_rows(float *to, const float *from, int64_t h, int64_t head, int64_t d, int64_t t,
                             int64_t m)
{
    for (int64_t i = 0; i < m; i++) {
        memcpy(to + i * d, from + ((t + i) * h + head) * d, (size_t)d * sizeof(float));
    }
}

#endif
