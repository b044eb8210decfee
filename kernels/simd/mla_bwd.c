/* mla_bwd.c - latent attention, backward, by vectors. Two passes, each computing the logits again: one piece of the first
 * owns a tile of keys of a head, one of the second a tile of queries. So no sum depends on which thread comes first.
 *   p = exp(logit - lse);  dv += p^T dout;  ds = p (dout v^T - <dout, o>) scale;  dk += ds^T q;  dq += ds k
 * Contracts: kernels/ops/mla.h. */
#include "kernels/simd/mla_tile.h"

typedef struct bwd_job {
    const tsr_mla_bwd_args *a;
    tsr_queue *q;
    int64_t tile, tiles; /* first pass: first tile of keys of this round, and how many */
    float *dkr;          /* [head][position of this round][dr] */
} bwd_job;

/* A tile of queries of one head. */
typedef struct side {
    float *q, *dout;
    int64_t t, m, first[ROWS];
    float lse[ROWS], delta[ROWS];
} side;

typedef struct bwd_room {
    float (*p)[ROWS], (*ds)[ROWS];
    float *keys, *values, *dk, *dv;
    side side;
} bwd_room;

static void room_open(bwd_room *r, const tsr_mla_bwd_args *a, float *at)
{
    int64_t width = a->dn + a->dr;
    r->p = (float(*)[ROWS])(void *)take(&at, KEYS * ROWS);
    r->ds = (float(*)[ROWS])(void *)take(&at, KEYS * ROWS);
    r->keys = take(&at, KEYS * width);
    r->values = take(&at, KEYS * a->dv);
    r->dk = take(&at, ROWS * width); /* of keys, or of queries */
    r->dv = take(&at, KEYS * a->dv);
    r->side.q = take(&at, ROWS * width);
    r->side.dout = take(&at, ROWS * a->dv);
    memset(r->p, 0, 2 * sizeof(float) * KEYS * ROWS); /* lanes without a row are computed too */
    for (int64_t i = 0; i < ROWS; i++) {
        r->side.lse[i] = r->side.delta[i] = 0.0f;
    }
}

static void side_load(side *s, const tsr_mla_bwd_args *a, int64_t head, int64_t t, int64_t m)
{
    s->t = t;
    s->m = m;
    first_seen(s->first, a->seg, a->segs, t, m);
    pack_rows(s->q, a->q, a->h, head, a->dn + a->dr, t, m);
    pack_rows(s->dout, a->dout, a->h, head, a->dv, t, m);
    for (int64_t i = 0; i < m; i++) {
        int64_t row = (t + i) * a->h + head;
        const float *o = a->o + row * a->dv, *dout = s->dout + i * a->dv;
        vf sum = v_zero();
        EACH(a->dv)
        {
            sum = v_fma(LOAD(o), LOAD(dout), sum);
        }
        s->delta[i] = v_sum(sum);
        s->lse[i] = a->lse[row];
    }
}

/* p and ds of the tile of queries in r->side and n keys from u on. */
static void probabilities(bwd_room *r, const tsr_mla_bwd_args *a, int64_t u, int64_t n)
{
    const side *s = &r->side;
    int64_t width = a->dn + a->dr;
    window w;
    window_of(&w, s->first, s->t, s->m, u, n);
    dots(r->p, s->q, width, s->m, r->keys, width, n, width, a->scale);
    dots(r->ds, s->dout, a->dv, s->m, r->values, a->dv, n, a->dv, 1.0f);
    vf scale = v_set1(a->scale);
    for (int64_t v = 0; v < s->m; v += VL) {
        vf lse = v_load(s->lse + v), delta = v_load(s->delta + v);
        for (int64_t j = 0; j < n; j++) {
            vf p = v_exp(v_load(r->p[j] + v) - lse);
            p = w.all ? p : seen(&w, v, j, p, v_zero());
            v_store(r->p[j] + v, p);
            v_store(r->ds[j] + v, p * (v_load(r->ds[j] + v) - delta) * scale);
        }
    }
}

static void keys_piece(void *payload, int64_t piece, int worker)
{
    const bwd_job *job = payload;
    const tsr_mla_bwd_args *a = job->a;
    int64_t head = piece % a->h, tile = job->tile + piece / a->h, u = tile * KEYS, width = a->dn + a->dr;
    int64_t n = a->n - u < KEYS ? a->n - u : KEYS, end = a->seg[segment_of(a->seg, a->segs, u + n - 1) + 1];
    bwd_room r;
    room_open(&r, a, tsr_scratch(job->q, worker));
    pack_keys(r.keys, r.values, a->kv, a->kr, a->kr_stride, a->h, head, a->dn, a->dr, a->dv, u, n);
    memset(r.dk, 0, (size_t)(n * width) * sizeof(float));
    memset(r.dv, 0, (size_t)(n * a->dv) * sizeof(float));
    for (int64_t t = u; t < end; t += ROWS) {
        side *s = &r.side;
        side_load(s, a, head, t, end - t < ROWS ? end - t : ROWS);
        probabilities(&r, a, u, n);
        weighted(r.dv, a->dv, n, NULL, r.p[0], ROWS, 1, s->dout, a->dv, s->m, a->dv);
        weighted(r.dk, width, n, NULL, r.ds[0], ROWS, 1, s->q, width, s->m, width);
    }
    for (int64_t i = 0; i < n; i++) {
        float *to = a->dkv + ((u + i) * a->h + head) * (a->dn + a->dv);
        memcpy(to, r.dk + i * width, (size_t)a->dn * sizeof(float));
        memcpy(to + a->dn, r.dv + i * a->dv, (size_t)a->dv * sizeof(float));
        if (a->dr > 0) {
            int64_t at = head * job->tiles * KEYS + u + i - job->tile * KEYS;
            memcpy(job->dkr + at * a->dr, r.dk + i * width + a->dn, (size_t)a->dr * sizeof(float));
        }
    }
}

/* The shared key part of one position: the heads' gradients in order. */
static void join_piece(void *payload, int64_t i, int worker)
{
    const bwd_job *job = payload;
    const tsr_mla_bwd_args *a = job->a;
    float *to = a->dkr + (job->tile * KEYS + i) * a->dkr_stride;
    (void)worker;
    EACH(a->dr)
    {
        vf sum = v_zero();
        for (int64_t h = 0; h < a->h; h++) {
            sum = sum + LOAD(job->dkr + (h * job->tiles * KEYS + i) * a->dr);
        }
        STORE(to, sum);
    }
}

static void queries_piece(void *payload, int64_t piece, int worker)
{
    const bwd_job *job = payload;
    const tsr_mla_bwd_args *a = job->a;
    int64_t head = piece % a->h, t = piece / a->h * ROWS, m = a->n - t < ROWS ? a->n - t : ROWS,
            width = a->dn + a->dr;
    bwd_room r;
    room_open(&r, a, tsr_scratch(job->q, worker));
    side_load(&r.side, a, head, t, m);
    memset(r.dk, 0, (size_t)(m * width) * sizeof(float));
    for (int64_t u = r.side.first[0]; u < t + m; u += KEYS) {
        int64_t n = t + m - u < KEYS ? t + m - u : KEYS;
        pack_keys(r.keys, r.values, a->kv, a->kr, a->kr_stride, a->h, head, a->dn, a->dr, a->dv, u, n);
        probabilities(&r, a, u, n);
        weighted(r.dk, width, m, NULL, r.ds[0], 1, ROWS, r.keys, width, n, width);
    }
    for (int64_t i = 0; i < m; i++) {
        memcpy(a->dq + ((t + i) * a->h + head) * width, r.dk + i * width, (size_t)width * sizeof(float));
    }
}

tsr_status TSR_SIMD(mla_bwd)(tsr_queue *q, const tsr_mla_bwd_args *a)
{
    bwd_job job = { .a = a, .q = q, .dkr = shared_floats(q) };
    int64_t tiles = (a->n + KEYS - 1) / KEYS, round = tiles;
    TSR_ASSERT((2 * ROWS + 2 * KEYS) * (a->dn + a->dr + a->dv + ROWS) < OWN_FLOATS);
    if (a->dr > 0) { /* as many tiles of keys as there is room for every head's part */
        round = OWN_FLOATS / (KEYS * a->h * a->dr);
        TSR_ASSERT(round > 0);
    }
    for (job.tile = 0; job.tile < tiles; job.tile += round) {
        job.tiles = tiles - job.tile < round ? tiles - job.tile : round;
        tsr_parallel(q, job.tiles * a->h, keys_piece, &job);
        int64_t left = a->n - job.tile * KEYS;
        if (a->dr > 0) {
            tsr_parallel(q, left < job.tiles * KEYS ? left : job.tiles * KEYS, join_piece, &job);
        }
    }
    tsr_parallel(q, (a->n + ROWS - 1) / ROWS * a->h, queries_piece, &job);
    return TSR_OK;
}
