/* mla.c - latent attention, forward, by vectors: tiles of queries against tiles of keys with an online softmax, so that
 * memory does not grow with the length. Contracts: kernels/ops/mla.h. */
#include "kernels/simd/mla_tile.h"

/* A tile of queries on its way: outputs not yet divided by the sums. */
typedef struct queries {
    float (*s)[ROWS];
    float *acc, *top, *sum, *keep;
    int64_t m, d; /* rows, width of acc */
} queries;

static void queries_open(queries *t, float **at, int64_t m, int64_t d)
{
    *t = (queries){ .s = (float(*)[ROWS])(void *)take(at, KEYS * ROWS), .m = m, .d = d };
    t->acc = take(at, ROWS * d);
    t->top = take(at, ROWS);
    t->sum = take(at, ROWS);
    t->keep = take(at, ROWS);
    memset(t->s, 0, sizeof(float) * KEYS * ROWS); /* lanes without a row are computed too */
    memset(t->acc, 0, (size_t)(m * d) * sizeof(float));
    for (int64_t i = 0; i < ROWS; i++) {
        t->top[i] = -INFINITY;
        t->sum[i] = 0.0f;
    }
}

static void attend(queries *t, const float *q, int64_t width, const float *keys, int64_t ldk,
                   const float *values, int64_t ldv, int64_t n, const window *w, float scale)
{
    dots(t->s, q, width, t->m, keys, ldk, n, width, scale);
    softmax(t->s, t->m, n, w, t->top, t->sum, t->keep);
    weighted(t->acc, t->d, t->m, t->keep, t->s[0], 1, ROWS, values, ldv, n, t->d);
}

/* ---- expanded ---------------------------------------------------------------------------------------------------- */

typedef struct fwd_job {
    const tsr_mla_fwd_args *a;
    tsr_queue *q;
} fwd_job;

/* The greatest of all is the same in whatever order they come. */
static void raise_to(float *most, float x)
{
    float old;
    __atomic_load(most, &old, __ATOMIC_RELAXED);
    while (x > old && !__atomic_compare_exchange(most, &old, &x, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

static void put_outputs(const tsr_mla_fwd_args *a, const queries *t, int64_t first, int64_t head)
{
    float most = -INFINITY;
    for (int64_t i = 0; i < t->m; i++) {
        int64_t row = (first + i) * a->h + head;
        const float *from = t->acc + i * a->dv;
        float *o = a->o + row * a->dv;
        vf sum = v_set1(t->sum[i]);
        EACH(a->dv)
        {
            STORE(o, LOAD(from) / sum);
        }
        if (a->lse != NULL) {
            a->lse[row] = (float)((double)t->top[i] + log((double)t->sum[i]));
        }
        most = t->top[i] > most ? t->top[i] : most;
    }
    if (a->max_logit != NULL) {
        raise_to(&a->max_logit[head], most);
    }
}

static void fwd_piece(void *payload, int64_t piece, int worker)
{
    const fwd_job *job = payload;
    const tsr_mla_fwd_args *a = job->a;
    int64_t head = piece % a->h, t = piece / a->h * ROWS, m = a->n - t < ROWS ? a->n - t : ROWS,
            width = a->dn + a->dr;
    int64_t first[ROWS];
    float *at = tsr_scratch(job->q, worker);
    float *q = take(&at, ROWS * width), *keys = take(&at, KEYS * width), *values = take(&at, KEYS * a->dv);
    queries tile;
    window w;
    queries_open(&tile, &at, m, a->dv);
    first_seen(first, a->seg, a->segs, t, m);
    pack_rows(q, a->q, a->h, head, width, t, m);
    for (int64_t u = first[0]; u < t + m; u += KEYS) {
        int64_t n = t + m - u < KEYS ? t + m - u : KEYS;
        pack_keys(keys, values, a->kv, a->kr, a->kr_stride, a->h, head, a->dn, a->dr, a->dv, u, n);
        window_of(&w, first, t, m, u, n);
        attend(&tile, q, width, keys, width, values, a->dv, n, &w, a->scale);
    }
    put_outputs(a, &tile, t, head);
}

tsr_status TSR_SIMD(mla_fwd)(tsr_queue *q, const tsr_mla_fwd_args *a)
{
    fwd_job job = { a, q };
    TSR_ASSERT((ROWS + KEYS) * (a->dn + a->dr + a->dv + ROWS) < OWN_FLOATS);
    tsr_parallel(q, (a->n + ROWS - 1) / ROWS * a->h, fwd_piece, &job);
    return TSR_OK;
}

/* ---- absorbed ---------------------------------------------------------------------------------------------------- */

/* Rows are (token, head) pairs. Few rows: the positions are split, and the parts put together at the end; how many parts
 * depends on the sizes alone. */
enum { PARTS_MAX = 32, PART_KEYS = 16 * KEYS };

typedef struct absorbed_job {
    const tsr_mla_absorbed_args *a;
    tsr_queue *q;
    int64_t rows, parts, part; /* rows in all; parts, and positions of each */
    float *ctx, *top, *sum;    /* [part][row]([r]) of the parts */
} absorbed_job;

/* Keys u.. as f32: in place, or widened into `room`. */
static const float *cached_keys(const tsr_mla_absorbed_args *a, float *room, int64_t u, int64_t n)
{
    int64_t row = a->r + a->dr, size = n * row, i = 0;
    if (a->dtype == TSR_DT_F32) {
        return (const float *)a->cache + u * row;
    }
    const uint16_t *from = (const uint16_t *)a->cache + u * row;
    for (; i + VL <= size; i += VL) {
        v_store(room + i, v_bf16(from + i));
    }
    for (; i < size; i++) {
        uint32_t bits = (uint32_t)from[i] << 16;
        memcpy(room + i, &bits, sizeof bits);
    }
    return room;
}

static void absorbed_put(const absorbed_job *job, const queries *t, int64_t first, int64_t part)
{
    const tsr_mla_absorbed_args *a = job->a;
    for (int64_t i = 0; i < t->m; i++) {
        const float *from = t->acc + i * a->r;
        if (job->parts == 1) {
            float *to = a->ctx + (first + i) * a->r;
            vf sum = v_set1(t->sum[i]);
            EACH(a->r)
            {
                STORE(to, LOAD(from) / sum);
            }
        } else {
            int64_t row = part * job->rows + first + i;
            memcpy(job->ctx + row * a->r, from, (size_t)a->r * sizeof(float));
            job->top[row] = t->top[i];
            job->sum[row] = t->sum[i];
        }
    }
}

static void absorbed_piece(void *payload, int64_t piece, int worker)
{
    const absorbed_job *job = payload;
    const tsr_mla_absorbed_args *a = job->a;
    int64_t part = piece % job->parts, first = piece / job->parts * ROWS, width = a->r + a->dr;
    int64_t m = job->rows - first < ROWS ? job->rows - first : ROWS, u = part * job->part,
            end = u + job->part;
    int64_t last = a->past + (first + m - 1) / a->h + 1; /* what the last row sees */
    end = end < last ? end : last;
    float *at = tsr_scratch(job->q, worker), *room = take(&at, KEYS * width);
    queries tile;
    window w;
    queries_open(&tile, &at, m, a->r);
    for (; u < end; u += KEYS) {
        int64_t n = end - u < KEYS ? end - u : KEYS;
        const float *keys = cached_keys(a, room, u, n);
        w.all = a->past + first / a->h >= u + n - 1;
        for (int64_t i = 0; !w.all && i < ROWS; i++) {
            int64_t sees = a->past + (first + i) / a->h - u;
            w.first[i] = 0.0f;
            w.last[i] = (float)(sees < -1 ? -1 : sees > n - 1 ? n - 1 : sees);
        }
        attend(&tile, a->q + first * width, width, keys, width, keys, width, n, &w, a->scale);
    }
    absorbed_put(job, &tile, first, part);
}

/* One row of the parts, in order. */
static void absorbed_join(void *payload, int64_t row, int worker)
{
    const absorbed_job *job = payload;
    const tsr_mla_absorbed_args *a = job->a;
    double top = -INFINITY, sum = 0;
    float share[PARTS_MAX], *to = a->ctx + row * a->r;
    (void)worker;
    for (int64_t p = 0; p < job->parts; p++) {
        double x = (double)job->top[p * job->rows + row];
        top = x > top || x != x ? x : top;
    }
    for (int64_t p = 0; p < job->parts; p++) {
        double x = exp((double)job->top[p * job->rows + row] - top);
        sum += x * (double)job->sum[p * job->rows + row];
        share[p] = (float)x;
    }
    vf by = v_set1((float)(1 / sum));
    EACH(a->r)
    {
        vf x = v_zero();
        for (int64_t p = 0; p < job->parts; p++) {
            x = v_fma(v_set1(share[p]), LOAD(job->ctx + (p * job->rows + row) * a->r), x);
        }
        STORE(to, x * by);
    }
}

tsr_status TSR_SIMD(mla_absorbed)(tsr_queue *q, const tsr_mla_absorbed_args *a)
{
    absorbed_job job = { .a = a, .q = q, .rows = a->n * a->h, .parts = 1 };
    int64_t tiles = (job.rows + ROWS - 1) / ROWS, positions = a->past + a->n;
    if (tiles == 0) {
        return TSR_OK;
    }
    int64_t most = (positions + PART_KEYS - 1) / PART_KEYS;
    job.parts = tiles >= PARTS_MAX ? 1 : PARTS_MAX / tiles < most ? PARTS_MAX / tiles : most;
    job.part = ((positions + job.parts - 1) / job.parts + KEYS - 1) / KEYS * KEYS;
    job.ctx = shared_floats(q);
    job.top = job.ctx + job.parts * job.rows * a->r;
    job.sum = job.top + job.parts * job.rows;
    TSR_ASSERT((ROWS + KEYS) * (2 * a->r + a->dr + ROWS) < OWN_FLOATS);
    TSR_ASSERT(job.parts == 1 || job.parts * job.rows * (a->r + 2) < OWN_FLOATS);
    tsr_parallel(q, tiles * job.parts, absorbed_piece, &job);
    if (job.parts > 1) {
        tsr_parallel(q, job.rows, absorbed_join, &job);
    }
    return TSR_OK;
}
