/* kda_bwd.c - delta attention, chunkwise backward. Contracts: kernels/ops/kda.h; formulas: docs/KDA.md. One piece is
 * one head of one segment, from its last chunk to its first: the tiles of a chunk are made anew from the saved state,
 * then taken backwards. */
#include "kernels/simd/kda_tile.h"

enum { TILES_MAX = 4 }; /* of a chunk */

typedef struct bwd_room {
    tile tiles[TILES_MAX];
    mat S[TILES_MAX];    /* state before each tile */
    mat D;               /* gradient of the state after the tile */
    mat turned;          /* a state transposed */
    mat dout;            /* [STEPS][vp] */
    mat pull;            /* [STEPS][vp]: tail D */
    mat d_res;           /* [2 STEPS][vp]: minus the gradient of read, then dout */
    mat val_t;           /* [vp][STEPS] */
    mat d_low;           /* [2 STEPS][STEPS]: gradient of low, strictly below the diagonal */
    mat d_start, d_tail; /* [2 STEPS], [STEPS] x kp: of start and tail */
    mat by_row, by_col;  /* [2 STEPS], [STEPS] x kp: of k and q as rows of low, of k as its columns */
    mat d_q, d_k, d_g;   /* [STEPS][kp]: of the inputs */
    float *d_gamma;      /* [kp]: gamma rowsum(D S) */
    float d_beta[STEPS], diagonal[STEPS];
} bwd_room;

static void take_room(bwd_room *r, float *at, const tsr_kda_bwd_args *a)
{
    int64_t kp = padded(a->dk), vp = padded(a->dv);
    for (int i = 0; i < a->chunk / STEPS; i++) {
        tile_room(&r->tiles[i], &at, a->dk, a->dv);
        r->S[i] = room(&at, kp, state_ld(a->dv));
    }
    r->D = room(&at, kp, state_ld(a->dv));
    r->turned = room(&at, vp, state_ld(a->dk));
    r->dout = room(&at, STEPS, vp);
    r->pull = room(&at, STEPS, vp);
    r->d_res = room(&at, 2 * STEPS, vp);
    r->val_t = room(&at, vp, STEPS);
    r->d_low = room(&at, 2 * STEPS, STEPS);
    r->d_start = room(&at, 2 * STEPS, kp);
    r->d_tail = room(&at, STEPS, kp);
    r->by_row = room(&at, 2 * STEPS, kp);
    r->by_col = room(&at, STEPS, kp);
    r->d_q = room(&at, STEPS, kp);
    r->d_k = room(&at, STEPS, kp);
    r->d_g = room(&at, STEPS, kp);
    r->d_gamma = room(&at, 1, kp).p;
}

/* Gradients of val through the outputs and the next state, then of res by substitution from the last row up. d_beta
 * and, in d_res, what the state's answers get: minus beta times the gradient of res, which is the gradient of v. */
static void back_solve(bwd_room *r, const tile *t)
{
    vf beta_sum[STEPS];
    for (int i = 0; i < STEPS; i++) {
        beta_sum[i] = v_zero();
    }
    for (int64_t c = 0; c < t->vp; c += VL) {
        vf x[STEPS];
#pragma GCC unroll 16
        for (int s = STEPS - 1; s >= 0; s--) {
            vf sum = v_load(r->pull.p + s * t->vp + c);
#pragma GCC unroll 16
            for (int i = s; i < STEPS; i++) {
                sum = v_fma(v_set1(t->low.p[(STEPS + i) * STEPS + s]), v_load(r->dout.p + i * t->vp + c),
                            sum);
            }
#pragma GCC unroll 16
            for (int i = s + 1; i < STEPS; i++) {
                sum = v_fma(v_set1(-t->low.p[i * STEPS + s]), x[i], sum);
            }
            /* sum: the gradient of val_s; res_s = v_s - ..., val_s = beta_s res_s. */
            beta_sum[s] = v_fma(sum, v_load(t->res.p + s * t->vp + c), beta_sum[s]);
            x[s] = v_set1(t->beta[s]) * sum;
            v_store(r->d_res.p + s * t->vp + c, -x[s]);
            v_store(r->d_res.p + (STEPS + s) * t->vp + c, v_load(r->dout.p + s * t->vp + c));
        }
    }
    for (int i = 0; i < STEPS; i++) {
        r->d_beta[i] = v_sum(beta_sum[i]);
    }
}

/* Gradients of <k_r e^(G_r - G_s), k_s> and <q_r .., k_s> to their factors. The diagonal of the second, which has no
 * decay, is kept apart: what goes through decays then has no large terms that only cancel. */
static void back_pairs(bwd_room *r, const tile *t, bool bounded)
{
    transpose(r->val_t, t->val, STEPS, t->vp);
    product(r->d_low, r->d_res, false, r->val_t, 2 * STEPS, STEPS, t->vp, NULL);
    for (int64_t i = 0; i < STEPS; i++) {
        r->diagonal[i] = r->d_low.p[(STEPS + i) * STEPS + i];
        for (int64_t s = i; s < STEPS; s++) {
            r->d_low.p[i * STEPS + s] = r->d_low.p[(STEPS + i) * STEPS + s] = 0.0f;
        }
    }
    if (bounded) { /* in units of mid and inv; back_inputs scales */
        product(r->by_row, r->d_low, false, t->inv, 2 * STEPS, t->kp, STEPS, NULL);
        product(r->by_col, r->d_low, true, t->mid, STEPS, t->kp, 2 * STEPS, NULL);
        return;
    }
    for (int64_t c = 0; c < t->kp; c += VL) {
        for (int64_t i = 0; i < 2 * STEPS; i++) {
            v_store(r->by_row.p + i * t->kp + c, v_zero());
        }
        for (int64_t s = 0; s < STEPS; s++) {
            vf reach = v_load(t->k.p + s * t->kp + c), fade = v_set1(1.0f), col = v_zero();
            for (int64_t i = s + 1; i < STEPS; i++) {
                vf k = v_load(t->k.p + i * t->kp + c), q = v_load(t->q.p + i * t->kp + c);
                vf dk = v_set1(r->d_low.p[i * STEPS + s]), dq = v_set1(r->d_low.p[(STEPS + i) * STEPS + s]);
                float *row_k = r->by_row.p + i * t->kp + c, *row_q = r->by_row.p + (STEPS + i) * t->kp + c;
                fade = fade * v_load(t->decay.p + i * t->kp + c);
                v_store(row_k, v_fma(dk, fade * reach, v_load(row_k)));
                v_store(row_q, v_fma(dq, fade * reach, v_load(row_q)));
                col = v_fma(fade, v_fma(dk, k, dq * q), col);
            }
            v_store(r->by_col.p + s * t->kp + c, col);
        }
    }
}

/* by_row and by_col of the bounded case to plain units: times exp(G - G_mid) and its inverse. */
static void unscale_pairs(bwd_room *r, const tile *t)
{
    for (int64_t c = 0; c < t->kp; c += VL) {
        vf one = v_set1(1.0f), m = one;
        for (int64_t i = MID; i < STEPS; i++) {
            if (i > MID) {
                m = m * v_load(t->decay.p + i * t->kp + c);
            }
            float *k = r->by_row.p + i * t->kp + c, *q = k + STEPS * t->kp,
                  *col = r->by_col.p + i * t->kp + c;
            v_store(k, m * v_load(k));
            v_store(q, m * v_load(q));
            v_store(col, v_load(col) * (one / m));
        }
        m = one;
        for (int64_t i = MID - 1; i >= 0; i--) {
            m = m * v_load(t->decay.p + (i + 1) * t->kp + c);
            float *k = r->by_row.p + i * t->kp + c, *q = k + STEPS * t->kp,
                  *col = r->by_col.p + i * t->kp + c;
            v_store(k, v_load(k) * (one / m));
            v_store(q, v_load(q) * (one / m));
            v_store(col, m * v_load(col));
        }
    }
}

/* Gradients of q, k and g. g_r decays everything that is carried over step r: start rows i >= r, pairs (i, s) with
 * s < r <= i, tail rows i < r, and the state through the whole tile. */
static void back_inputs(bwd_room *r, const tile *t)
{
    for (int64_t c = 0; c < t->kp; c += VL) {
        vf e = v_set1(1.0f), carried = v_load(r->d_gamma + c), tails[STEPS];
        for (int64_t i = STEPS - 1; i >= 0; i--) { /* e: decay after step i */
            vf x = e * v_load(r->d_tail.p + i * t->kp + c);
            tails[i] = x;
            e = e * v_load(t->decay.p + i * t->kp + c);
        }
        e = v_set1(1.0f);
        for (int64_t i = 0; i < STEPS; i++) { /* e: decay up to step i */
            int64_t at = i * t->kp + c;
            vf k = v_load(t->k.p + at), q = v_load(t->q.p + at), diag = v_set1(r->diagonal[i]);
            e = e * v_load(t->decay.p + at);
            vf row_k = v_fma(e, v_load(r->d_start.p + at), v_load(r->by_row.p + at));
            vf row_q = v_fma(e, v_load(r->d_start.p + STEPS * t->kp + at),
                             v_load(r->by_row.p + STEPS * t->kp + at));
            vf col = v_load(r->by_col.p + at);
            v_store(r->d_q.p + at, v_fma(diag, k, row_q));
            v_store(r->d_k.p + at, v_fma(diag, q, row_k + col + tails[i]));
            v_store(r->d_g.p + at, v_fma(k, row_k - col, q * row_q));
            tails[i] = k * tails[i];
        }
        vf before = v_zero(), after = v_zero(), sums[STEPS];
        for (int64_t i = STEPS - 1; i >= 0; i--) {
            after = after + v_load(r->d_g.p + i * t->kp + c);
            sums[i] = after + carried;
        }
        for (int64_t i = 0; i < STEPS; i++) {
            v_store(r->d_g.p + i * t->kp + c, sums[i] + before);
            before = before + tails[i];
        }
    }
}

/* D becomes the gradient of the state before the tile. */
static void back_tile(bwd_room *r, tile *t, mat S, bool bounded)
{
    product(r->pull, t->tail, false, r->D, STEPS, t->vp, t->kp, NULL);
    back_solve(r, t);
    back_pairs(r, t, bounded);
    if (bounded) {
        unscale_pairs(r, t);
    }
    transpose(r->turned, S, t->kp, t->vp);
    product(r->d_start, r->d_res, false, r->turned, 2 * STEPS, t->kp, t->vp, NULL);
    transpose(r->turned, r->D, t->kp, t->vp);
    product(r->d_tail, t->val, false, r->turned, STEPS, t->kp, t->vp, NULL);
    for (int64_t i = 0; i < t->kp; i++) {
        vf sum = v_zero();
        for (int64_t c = 0; c < t->vp; c += VL) {
            sum = v_fma(v_load(r->D.p + i * r->D.ld + c), v_load(S.p + i * S.ld + c), sum);
        }
        r->d_gamma[i] = t->gamma[i] * v_sum(sum);
    }
    back_inputs(r, t);
    product(r->D, t->start, true, r->d_res, t->kp, t->vp, 2 * STEPS, t->gamma);
}

static void put(float *to, mat from, rows at, int64_t d, float sign)
{
    for (int64_t i = 0; i < at.count; i++) {
        for (int64_t c = 0; c < d; c += VL) {
            store_part(to + (at.first + i * at.step) * d + c, v_set1(sign) * v_load(from.p + i * from.ld + c),
                       d - c);
        }
    }
}

static void put_gradients(const tsr_kda_bwd_args *a, const bwd_room *r, rows at)
{
    put(a->dq, r->d_q, at, a->dk, 1.0f);
    put(a->d_k, r->d_k, at, a->dk, 1.0f);
    put(a->dg, r->d_g, at, a->dk, 1.0f);
    put(a->d_v, r->d_res, at, a->dv, -1.0f);
    for (int64_t i = 0; i < at.count; i++) {
        a->dbeta[at.first + i * at.step] = r->d_beta[i];
    }
}

static rows rows_of(const tsr_kda_bwd_args *a, int64_t h, int64_t from, int64_t end)
{
    int64_t count = end - from < STEPS ? end - from : STEPS;
    return (rows){ NULL, TSR_DT_F32, from * a->h + h, a->h, count, a->dk };
}

static rows with(rows r, const float *p, int64_t d)
{
    r.p = p;
    r.d = d;
    return r;
}

/* Steps [from, end) of head h: at most a chunk; saved: the state before it. */
static void back_chunk(const tsr_kda_bwd_args *a, bwd_room *r, int64_t h, int64_t from, int64_t end,
                       const float *saved)
{
    int64_t tiles = (end - from + STEPS - 1) / STEPS;
    state_in(r->S[0], saved, a->dk, a->dv);
    for (int64_t i = 0; i < tiles; i++) {
        tile *t = &r->tiles[i];
        rows at = rows_of(a, h, from + i * STEPS, end);
        tile_begin(t, with(at, a->q, a->dk), with(at, a->k, a->dk), with(at, a->v, a->dv),
                   with(at, a->g, a->dk), a->beta, a->bounded);
        product(t->read, t->start, false, r->S[i], STEPS, t->vp, t->kp, NULL);
        tile_solve(t, false);
        if (i + 1 < tiles) {
            memcpy(r->S[i + 1].p, r->S[i].p, (size_t)(t->kp * r->S[i].ld) * sizeof(float));
            tile_advance(t, r->S[i + 1], NULL);
        }
    }
    for (int64_t i = tiles - 1; i >= 0; i--) {
        rows at = rows_of(a, h, from + i * STEPS, end);
        fetch(r->dout, with(at, a->dout, a->dv));
        back_tile(r, &r->tiles[i], r->S[i], a->bounded);
        put_gradients(a, r, at);
    }
}

typedef struct bwd_job {
    const tsr_kda_bwd_args *a;
    tsr_queue *q;
} bwd_job;

static void bwd_piece(void *payload, int64_t i, int worker)
{
    const bwd_job *job = payload;
    const tsr_kda_bwd_args *a = job->a;
    int64_t s = i / a->h, h = i % a->h, size = a->dk * a->dv, first = a->seg[s], end = a->seg[s + 1],
            chunk0 = 0;
    for (int64_t j = 0; j < s; j++) {
        chunk0 += (a->seg[j + 1] - a->seg[j] + a->chunk - 1) / a->chunk;
    }
    bwd_room r;
    take_room(&r, tsr_scratch(job->q, worker), a);
    state_in(r.D, a->dstate != NULL ? a->dstate + i * size : NULL, a->dk, a->dv);
    for (int64_t c = (end - first + a->chunk - 1) / a->chunk - 1; c >= 0; c--) {
        int64_t from = first + c * a->chunk, to = from + a->chunk < end ? from + a->chunk : end;
        back_chunk(a, &r, h, from, to, a->saved + ((chunk0 + c) * a->h + h) * size);
    }
    if (a->dstate0 != NULL) {
        state_out(a->dstate0 + i * size, r.D, a->dk, a->dv);
    }
}

tsr_status TSR_SIMD(kda_bwd)(tsr_queue *q, const tsr_kda_bwd_args *a)
{
    bwd_job job = { a, q };
    int64_t kp = padded(a->dk), vp = padded(a->dv), tiles = a->chunk / STEPS;
    int64_t one = kp * (state_ld(a->dv) + 12 * STEPS + 1) + vp * 5 * STEPS + 2 * STEPS * STEPS;
    int64_t rest = kp * state_ld(a->dv) + vp * state_ld(a->dk) + vp * 5 * STEPS + 2 * STEPS * STEPS;
    TSR_ASSERT((size_t)(tiles * one + rest + kp * (9 * STEPS + 1)) * sizeof(float) <= TSR_SCRATCH_BYTES);
    tsr_parallel(q, a->segs * a->h, bwd_piece, &job);
    return TSR_OK;
}
