/* moe.c - routing and permutation, by vectors. Contracts: kernels/ops/moe.h. */
#include "kernels/simd/simd.h"

/* A piece of work moves about this many floats: long against handing it out, short against the whole. */
enum { PIECE = 1 << 15 };

static int64_t rows_per_piece(int64_t width)
{
    return width >= PIECE ? 1 : PIECE / width;
}

static int64_t pieces(int64_t rows, int64_t step)
{
    return (rows + step - 1) / step;
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* ---- router -------------------------------------------------------------------------------------------------- */

/* s of one token, and the keys of s + bias. */
static void score(const tsr_router_fwd_args *a, int64_t i, int32_t *key)
{
    const float *logits = a->logits + i * a->e;
    float *s = a->s + i * a->e;
    int64_t e = 0;
    for (; e + VL <= a->e; e += VL) {
        vf v = v_sigmoid(v_load(logits + e));
        v_store(s + e, v);
        vi_store(key + e, v_key(v + v_load(a->bias + e)));
    }
    if (e < a->e) {
        vf v = v_sigmoid(v_load_n(logits + e, a->e - e));
        v_store_n(s + e, v, a->e - e);
        vi_store(key + e, v_key(v + v_load_n(a->bias + e, a->e - e))); /* key has room for whole vectors */
    }
}

/* Puts expert e among the best `have`, which stay sorted; an equal key stays behind those that came before it. */
static void insert(int32_t *best, int32_t *ids, int64_t have, int32_t key, int32_t e)
{
    int64_t at = have;
    for (; at > 0 && best[at - 1] < key; at--) {
        best[at] = best[at - 1];
        ids[at] = ids[at - 1];
    }
    best[at] = key;
    ids[at] = e;
}

/* Goes through the experts in order and looks closer only at those above the k-th best so far: about
 * k (1 + ln(e / k)) of them in random order. */
static void choose(const int32_t *key, int64_t e, int64_t k, int32_t *best, int32_t *ids)
{
    for (int64_t j = 0; j < k; j++) {
        insert(best, ids, j, key[j], (int32_t)j);
    }
    int64_t j = k;
    for (; j + VL <= e; j += VL) {
        unsigned above = vi_more(vi_load(key + j), vi_set1(best[k - 1]));
        for (; above != 0; above &= above - 1) {
            int64_t at = j + __builtin_ctz(above);
            if (key[at] > best[k - 1]) { /* the bar may have risen */
                insert(best, ids, k - 1, key[at], (int32_t)at);
            }
        }
    }
    for (; j < e; j++) {
        if (key[j] > best[k - 1]) {
            insert(best, ids, k - 1, key[j], (int32_t)j);
        }
    }
}

typedef struct router_job {
    const tsr_router_fwd_args *a;
    tsr_queue *q;
    int64_t step;
} router_job;

static void router_piece(void *payload, int64_t piece, int worker)
{
    const router_job *job = payload;
    const tsr_router_fwd_args *a = job->a;
    int32_t *key = tsr_scratch(job->q, worker), *best = key + a->e + VL;
    for (int64_t i = piece * job->step; i < least((piece + 1) * job->step, a->n); i++) {
        int32_t *ids = a->ids + i * a->k;
        const float *s = a->s + i * a->e;
        score(a, i, key);
        choose(key, a->e, a->k, best, ids);
        double sum = 1e-20, scale = (double)a->scale;
        for (int64_t j = 0; j < a->k; j++) {
            sum += (double)s[ids[j]];
        }
        for (int64_t j = 0; j < a->k; j++) {
            double w = (double)s[ids[j]];
            a->w[i * a->k + j] = (float)((a->normalise ? w / sum : w) * scale);
        }
    }
}

tsr_status TSR_SIMD(router_fwd)(tsr_queue *q, const tsr_router_fwd_args *a)
{
    TSR_ASSERT((size_t)(a->e + VL + a->k) * sizeof(int32_t) <= TSR_SCRATCH_BYTES);
    router_job job = { a, q, rows_per_piece(4 * a->e) }; /* an exponential is dearer than a move */
    tsr_parallel(q, pieces(a->n, job.step), router_piece, &job);
    return TSR_OK;
}

typedef struct router_bwd_job {
    const tsr_router_bwd_args *a;
    tsr_queue *q;
    int64_t step;
} router_bwd_job;

static void router_bwd_piece(void *payload, int64_t piece, int worker)
{
    const router_bwd_job *job = payload;
    const tsr_router_bwd_args *a = job->a;
    float *keep = tsr_scratch(job->q, worker); /* dlogits may lie over s */
    for (int64_t i = piece * job->step; i < least((piece + 1) * job->step, a->n); i++) {
        const float *s = a->s + i * a->e, *dw = a->dw + i * a->k;
        const int32_t *ids = a->ids + i * a->k;
        double sum = 1e-20, dot = 0;
        for (int64_t j = 0; j < a->k; j++) {
            sum += (double)s[ids[j]];
            dot += (double)dw[j] * (double)s[ids[j]];
        }
        for (int64_t j = 0; j < a->k; j++) {
            double x = (double)s[ids[j]], d = (double)dw[j];
            d = a->normalise ? (d - dot / sum) / sum : d;
            keep[j] = (float)(d * (double)a->scale * x * (1 - x));
        }
        memset(a->dlogits + i * a->e, 0, (size_t)a->e * sizeof *a->dlogits);
        for (int64_t j = 0; j < a->k; j++) {
            a->dlogits[i * a->e + ids[j]] = keep[j];
        }
    }
}

tsr_status TSR_SIMD(router_bwd)(tsr_queue *q, const tsr_router_bwd_args *a)
{
    TSR_ASSERT((size_t)a->k * sizeof(float) <= TSR_SCRATCH_BYTES);
    router_bwd_job job = { a, q, rows_per_piece(a->e) };
    tsr_parallel(q, pieces(a->n, job.step), router_bwd_piece, &job);
    return TSR_OK;
}

/* ---- plan: a counting sort by parts -------------------------------------------------------------------------- */

typedef struct plan_job {
    const tsr_moe_plan_args *a;
    int32_t *count; /* [parts][e]: rows of each expert in each part, then the next free row */
    int64_t step;
} plan_job;

static void plan_count(void *payload, int64_t part, int worker)
{
    (void)worker;
    const plan_job *job = payload;
    const tsr_moe_plan_args *a = job->a;
    int32_t *count = job->count + part * a->e;
    memset(count, 0, (size_t)a->e * sizeof *count);
    for (int64_t i = part * job->step; i < least((part + 1) * job->step, a->n * a->k); i++) {
        count[a->ids[i]]++;
    }
}

static void plan_place(void *payload, int64_t part, int worker)
{
    (void)worker;
    const plan_job *job = payload;
    const tsr_moe_plan_args *a = job->a;
    int32_t *next = job->count + part * a->e;
    for (int64_t i = part * job->step; i < least((part + 1) * job->step, a->n * a->k); i++) {
        int32_t row = next[a->ids[i]]++;
        a->order[row] = (int32_t)i;
        a->pos[i] = row;
    }
}

tsr_status TSR_SIMD(moe_plan)(tsr_queue *q, const tsr_moe_plan_args *a)
{
    /* Parts of at least 8 e slots, so that the counters cost less than the slots; all counters in one scratch. */
    int64_t slots = a->n * a->k, most = (int64_t)(TSR_SCRATCH_BYTES / sizeof(int32_t)) / a->e;
    int64_t parts = least(least(slots / (8 * a->e) + 1, 64), most);
    TSR_ASSERT(most > 0);
    plan_job job = { a, tsr_scratch(q, 0), (slots + parts - 1) / parts };
    tsr_parallel(q, parts, plan_count, &job);
    int32_t row = 0;
    for (int64_t e = 0; e < a->e; e++) {
        a->offset[e] = row;
        for (int64_t p = 0; p < parts; p++) {
            int32_t here = job.count[p * a->e + e];
            job.count[p * a->e + e] = row;
            row += here;
        }
    }
    a->offset[a->e] = row;
    tsr_parallel(q, parts, plan_place, &job);
    return TSR_OK;
}

/* ---- rows there and back ------------------------------------------------------------------------------------- */

typedef struct gather_job {
    const tsr_moe_gather_args *a;
    int64_t step;
} gather_job;

static void gather_piece(void *payload, int64_t piece, int worker)
{
    (void)worker;
    const gather_job *job = payload;
    const tsr_moe_gather_args *a = job->a;
    for (int64_t r = piece * job->step; r < least((piece + 1) * job->step, a->n * a->k); r++) {
        memcpy(a->xs + r * a->d, a->x + a->order[r] / a->k * a->d, (size_t)a->d * sizeof(float));
    }
}

tsr_status TSR_SIMD(moe_gather)(tsr_queue *q, const tsr_moe_gather_args *a)
{
    gather_job job = { a, rows_per_piece(2 * a->d) };
    tsr_parallel(q, pieces(a->n * a->k, job.step), gather_piece, &job);
    return TSR_OK;
}

/* Columns of one token are added up four vectors at a time, so that the sums stay in registers over all k rows. */
static void add_rows(float *u, const float *y, const float *w, const int32_t *pos, int64_t k, int64_t d,
                     int64_t from, int64_t to)
{
    int64_t c = from;
    for (; c + 4 * VL <= to; c += 4 * VL) {
        vf s0 = v_zero(), s1 = v_zero(), s2 = v_zero(), s3 = v_zero();
        for (int64_t j = 0; j < k; j++) {
            const float *row = y + pos[j] * d + c;
            vf m = v_set1(w != NULL ? w[j] : 1.0f);
            s0 = v_fma(m, v_load(row), s0);
            s1 = v_fma(m, v_load(row + VL), s1);
            s2 = v_fma(m, v_load(row + 2 * VL), s2);
            s3 = v_fma(m, v_load(row + 3 * VL), s3);
        }
        v_store(u + c, s0);
        v_store(u + c + VL, s1);
        v_store(u + c + 2 * VL, s2);
        v_store(u + c + 3 * VL, s3);
    }
    for (; c < to; c += VL) {
        int64_t n = least(VL, to - c);
        vf s = v_zero();
        for (int64_t j = 0; j < k; j++) {
            const float *row = y + pos[j] * d + c;
            s = v_fma(v_set1(w != NULL ? w[j] : 1.0f), n == VL ? v_load(row) : v_load_n(row, n), s);
        }
        if (n == VL) {
            v_store(u + c, s);
        } else {
            v_store_n(u + c, s, n);
        }
    }
}

typedef struct combine_job {
    float *u;
    const float *y, *w; /* w NULL: ones */
    const int32_t *pos;
    int64_t k, d, strips;
} combine_job;
enum { STRIP = 1024 }; /* columns of a piece: one token's rows are shared out too, for decoding */

static void combine_piece(void *payload, int64_t piece, int worker)
{
    (void)worker;
    const combine_job *job = payload;
    int64_t i = piece / job->strips, from = piece % job->strips * STRIP;
    add_rows(job->u + i * job->d, job->y, job->w != NULL ? job->w + i * job->k : NULL, job->pos + i * job->k,
             job->k, job->d, from, least(from + STRIP, job->d));
}

tsr_status TSR_SIMD(moe_scatter)(tsr_queue *q, const tsr_moe_scatter_args *a)
{
    combine_job job = { a->dx, a->dxs, NULL, a->pos, a->k, a->d, pieces(a->d, STRIP) };
    tsr_parallel(q, a->n * job.strips, combine_piece, &job);
    return TSR_OK;
}

tsr_status TSR_SIMD(moe_combine_fwd)(tsr_queue *q, const tsr_moe_combine_fwd_args *a)
{
    combine_job job = { a->u, a->y, a->w, a->pos, a->k, a->d, pieces(a->d, STRIP) };
    tsr_parallel(q, a->n * job.strips, combine_piece, &job);
    return TSR_OK;
}

/* dy = w du and the return value <du, y>; dy may be y. */
static float spread_row(float *dy, const float *du, const float *y, float w, int64_t d)
{
    vf s[4] = { v_zero(), v_zero(), v_zero(), v_zero() }, m = v_set1(w);
    int64_t c = 0;
    for (; c + 4 * VL <= d; c += 4 * VL) {
        for (int j = 0; j < 4; j++) {
            vf g = v_load(du + c + j * VL);
            s[j] = v_fma(g, v_load(y + c + j * VL), s[j]);
            v_store(dy + c + j * VL, m * g);
        }
    }
    for (; c + VL <= d; c += VL) {
        vf g = v_load(du + c);
        s[0] = v_fma(g, v_load(y + c), s[0]);
        v_store(dy + c, m * g);
    }
    if (c < d) {
        vf g = v_load_n(du + c, d - c);
        s[1] = v_fma(g, v_load_n(y + c, d - c), s[1]);
        v_store_n(dy + c, m * g, d - c);
    }
    return v_sum((s[0] + s[1]) + (s[2] + s[3]));
}

typedef struct combine_bwd_job {
    const tsr_moe_combine_bwd_args *a;
    int64_t step;
} combine_bwd_job;

static void combine_bwd_piece(void *payload, int64_t piece, int worker)
{
    (void)worker;
    const combine_bwd_job *job = payload;
    const tsr_moe_combine_bwd_args *a = job->a;
    for (int64_t i = piece * job->step; i < least((piece + 1) * job->step, a->n * a->k); i++) {
        int64_t at = a->pos[i] * a->d;
        a->dw[i] = spread_row(a->dy + at, a->du + i / a->k * a->d, a->y + at, a->w[i], a->d);
    }
}

tsr_status TSR_SIMD(moe_combine_bwd)(tsr_queue *q, const tsr_moe_combine_bwd_args *a)
{
    combine_bwd_job job = { a, rows_per_piece(2 * a->d) };
    tsr_parallel(q, pieces(a->n * a->k, job.step), combine_bwd_piece, &job);
    return TSR_OK;
}
