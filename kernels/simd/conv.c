/* conv.c - short causal convolution, by vectors of channels. Contracts: kernels/ops/conv.h.
 *
 * A piece is a tile of tokens times a block of channels; its taps lie transposed in the scratch. */
#include "kernels/simd/simd.h"

enum { BLOCK = 256, TILE = 64 };

static int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* wt[kw][BLOCK] = taps of channels [c0, c0 + width). */
static void load_taps(float *wt, const float *w, int64_t c0, int64_t width, int64_t kw)
{
    for (int64_t c = 0; c < width; c++) {
        for (int64_t j = 0; j < kw; j++) {
            wt[j * BLOCK + c] = w[(c0 + c) * kw + j];
        }
    }
}

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

/* One token: rows[j] is the input under tap j, NULL: zeros. Always inlined, so that four taps unroll. */
static inline __attribute__((always_inline)) void token(float *y, const float *const *rows, const float *wt,
                                                        int64_t width, int64_t kw)
{
    for (int64_t c = 0; c < width; c += VL) {
        vf u = v_zero();
        for (int64_t j = 0; j < kw; j++) {
            u = rows[j] != NULL ? v_fma(v_load(wt + j * BLOCK + c), load_part(rows[j] + c, width - c), u) : u;
        }
        store_part(y + c, u * v_sigmoid(u), width - c);
    }
}

typedef struct fwd_job {
    const tsr_conv_fwd_args *a;
    tsr_queue *q;
    int64_t blocks;
    bool keep; /* one tile has every token: the piece updates its history too */
} fwd_job;

/* Rows of the history and of x that tap j of token t of segment s sees, at channel c0. */
static const float *source(const tsr_conv_fwd_args *a, int64_t s, int64_t at, int64_t c0)
{
    int64_t first = a->seg[s];
    if (at >= first) {
        return a->x + at * a->x_stride + c0;
    }
    return a->state != NULL ? a->state + (s * (a->kw - 1) + a->kw - 1 + at - first) * a->c + c0 : NULL;
}

/* Going up, row i reads rows from i on only. */
static void keep_history(const tsr_conv_fwd_args *a, int64_t s, int64_t c0, int64_t width)
{
    for (int64_t i = 0, rows = a->kw - 1; i < rows && a->seg[s + 1] > a->seg[s]; i++) {
        memcpy(a->state + (s * rows + i) * a->c + c0, source(a, s, a->seg[s + 1] - rows + i, c0),
               (size_t)width * sizeof(float));
    }
}

static void fwd_piece(void *payload, int64_t i, int worker)
{
    const fwd_job *job = payload;
    const tsr_conv_fwd_args *a = job->a;
    int64_t c0 = i % job->blocks * BLOCK, width = a->c - c0 < BLOCK ? a->c - c0 : BLOCK, kw = a->kw;
    int64_t t0 = i / job->blocks * TILE, t1 = t0 + TILE < a->n ? t0 + TILE : a->n;
    float *wt = tsr_scratch(job->q, worker);
    const float **rows = (const float **)(void *)(wt + kw * BLOCK);
    memset(wt, 0, (size_t)(kw * BLOCK) * sizeof *wt);
    load_taps(wt, a->w, c0, width, kw);
    for (int64_t s = 0; s < a->segs; s++) {
        int64_t from = a->seg[s] > t0 ? a->seg[s] : t0, to = a->seg[s + 1] < t1 ? a->seg[s + 1] : t1;
        for (int64_t t = from; t < to; t++) {
            for (int64_t j = 0; j < kw; j++) {
                rows[j] = source(a, s, t - kw + 1 + j, c0);
            }
            float *y = a->y + t * a->y_stride + c0;
            if (kw == 4) {
                token(y, rows, wt, width, 4);
            } else {
                token(y, rows, wt, width, kw);
            }
        }
        if (job->keep) {
            keep_history(a, s, c0, width);
        }
    }
}

static void history_piece(void *payload, int64_t i, int worker)
{
    (void)worker;
    const fwd_job *job = payload;
    int64_t c0 = i % job->blocks * BLOCK, left = job->a->c - c0;
    keep_history(job->a, i / job->blocks, c0, left < BLOCK ? left : BLOCK);
}

tsr_status TSR_SIMD(conv_fwd)(tsr_queue *q, const tsr_conv_fwd_args *a)
{
    fwd_job job = { a, q, ceil_div(a->c, BLOCK), a->state != NULL && a->n <= TILE };
    TSR_ASSERT((size_t)a->kw * (BLOCK * sizeof(float) + sizeof(float *)) <= TSR_SCRATCH_BYTES);
    tsr_parallel(q, ceil_div(a->n, TILE) * job.blocks, fwd_piece, &job);
    if (a->state != NULL && !job.keep) {
        tsr_parallel(q, a->segs * job.blocks, history_piece, &job);
    }
    return TSR_OK;
}

/* ---- backward: a piece is a narrow block of channels over all tokens, since dw adds over them ------------------ */

enum { NARROW = 64 };

typedef struct bwd_job {
    const tsr_conv_bwd_args *a;
    tsr_queue *q;
} bwd_job;

/* What one piece works in; rows of NARROW channels. */
typedef struct bwd_room {
    float *wt, *du, *near, *sum; /* [kw]: taps; ring of du; dw of the last tokens; of all before */
    int64_t c0, width;
} bwd_room;

/* du of token t, and its share of dw. */
static void bwd_token(const tsr_conv_bwd_args *a, const bwd_room *r, int64_t t, int64_t first)
{
    const float *dy = a->dy + t * a->dy_stride + r->c0, *x = a->x + (t - a->kw + 1) * a->x_stride + r->c0;
    int64_t from = t - a->kw + 1 < first ? first - (t - a->kw + 1) : 0;
    float *du = r->du + t % a->kw * NARROW;
    for (int64_t c = 0; c < r->width; c += VL) {
        int64_t left = r->width - c;
        vf u = v_zero(), one = v_set1(1.0f);
        for (int64_t j = from; j < a->kw; j++) {
            u = v_fma(v_load(r->wt + j * NARROW + c), load_part(x + j * a->x_stride + c, left), u);
        }
        /* s (1 + u (1 - s)), with 1 - s taken from -u: no difference. */
        vf s = v_sigmoid(u), d = s * v_fma(u, v_sigmoid(-u), one) * load_part(dy + c, left);
        v_store(du + c, d);
        for (int64_t j = from; j < a->kw; j++) {
            float *near = r->near + j * NARROW + c;
            v_store(near, v_fma(d, load_part(x + j * a->x_stride + c, left), v_load(near)));
        }
    }
}

/* dx of token t, when du is known up to t + kw - 1 or to the end of the segment. */
static void bwd_dx(const tsr_conv_bwd_args *a, const bwd_room *r, int64_t t, int64_t end)
{
    float *dx = a->dx + t * a->dx_stride + r->c0;
    for (int64_t c = 0; c < r->width; c += VL) {
        vf sum = v_zero();
        for (int64_t k = t; k < t + a->kw && k < end; k++) {
            sum = v_fma(v_load(r->wt + (t + a->kw - 1 - k) * NARROW + c),
                        v_load(r->du + k % a->kw * NARROW + c), sum);
        }
        store_part(dx + c, sum, r->width - c);
    }
}

static void fold(const bwd_room *r, int64_t kw)
{
    for (int64_t i = 0; i < kw * NARROW; i += VL) {
        v_store(r->sum + i, v_load(r->sum + i) + v_load(r->near + i));
        v_store(r->near + i, v_zero());
    }
}

static void bwd_piece(void *payload, int64_t i, int worker)
{
    const bwd_job *job = payload;
    const tsr_conv_bwd_args *a = job->a;
    int64_t kw = a->kw, room = kw * NARROW, left = a->c - i * NARROW;
    float *at = tsr_scratch(job->q, worker);
    bwd_room r = { at, at + room, at + 2 * room, at + 3 * room, i * NARROW, left < NARROW ? left : NARROW };
    memset(at, 0, (size_t)(4 * room) * sizeof *at);
    for (int64_t c = 0; c < r.width; c++) {
        for (int64_t j = 0; j < kw; j++) {
            r.wt[j * NARROW + c] = a->w[(r.c0 + c) * kw + j];
        }
    }
    for (int64_t s = 0; s < a->segs; s++) {
        int64_t first = a->seg[s], end = a->seg[s + 1];
        for (int64_t t = first; t < end; t++) {
            bwd_token(a, &r, t, first);
            if (t - kw + 1 >= first) {
                bwd_dx(a, &r, t - kw + 1, end);
            }
            if (t % TILE == TILE - 1) {
                fold(&r, kw);
            }
        }
        for (int64_t t = end - kw + 1 > first ? end - kw + 1 : first; t < end; t++) {
            bwd_dx(a, &r, t, end);
        }
    }
    fold(&r, kw);
    for (int64_t c = 0; c < r.width; c++) {
        for (int64_t j = 0; j < kw; j++) {
            a->dw[(r.c0 + c) * kw + j] += r.sum[j * NARROW + c];
        }
    }
}

tsr_status TSR_SIMD(conv_bwd)(tsr_queue *q, const tsr_conv_bwd_args *a)
{
    bwd_job job = { a, q };
    TSR_ASSERT((size_t)a->kw * 4 * NARROW * sizeof(float) <= TSR_SCRATCH_BYTES);
    tsr_parallel(q, ceil_div(a->c, NARROW), bwd_piece, &job);
    return TSR_OK;
}
