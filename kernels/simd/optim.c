/* optim.c - optimizer updates, by vectors and sgemm. Contracts: kernels/ops/optim.h. */
#include "kernels/simd/blas.h"
#include "kernels/simd/simd.h"

#include <math.h>

/* Elements of a piece of elementwise work. */
enum { PIECE = 1 << 15 };

static int64_t pieces(int64_t n, int64_t step)
{
    return (n + step - 1) / step;
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static vf load_some(const float *p, int64_t n)
{
    return n >= VL ? v_load(p) : v_load_n(p, n);
}

static void store_some(float *p, vf v, int64_t n)
{
    if (n >= VL) {
        v_store(p, v);
    } else {
        v_store_n(p, v, n);
    }
}

/* ---- AdamW --------------------------------------------------------------------------------------------------- */

/* Written as steps from the old value, m + (1 - b1) (g - m) and w - (lr decay w + update): the small factors keep all
 * their digits, where 1 - lr decay in f32 would lose most of the decay. */
static void adamw_piece(void *payload, int64_t piece, int worker)
{
    (void)worker;
    const tsr_adamw_args *a = payload;
    double c1 = 1 - pow(a->b1, (double)a->t), c2 = 1 - pow(a->b2, (double)a->t);
    vf to_m = v_set1((float)(1 - a->b1)), to_v = v_set1((float)(1 - a->b2)),
       scale = v_set1((float)a->grad_scale), rate = v_set1((float)(a->lr / c1)),
       over_c2 = v_set1((float)(1 / c2)), eps = v_set1((float)a->eps),
       decay = v_set1((float)(a->lr * a->decay));
    int64_t to = least((piece + 1) * PIECE, a->n);
    for (int64_t i = piece * PIECE; i < to; i += VL) {
        vf g = load_some(a->g + i, to - i) * scale, w = load_some(a->w + i, to - i);
        vf m = load_some(a->m + i, to - i), v = load_some(a->v + i, to - i);
        m = v_fma(to_m, g - m, m);
        v = v_fma(to_v, v_fma(g, g, -v), v);
        store_some(a->m + i, m, to - i);
        store_some(a->v + i, v, to - i);
        vf step = rate * m / (v_sqrt(v * over_c2) + eps);
        store_some(a->w + i, w - v_fma(decay, w, step), to - i);
    }
}

tsr_status TSR_SIMD(adamw)(tsr_queue *q, const tsr_adamw_args *a)
{
    tsr_adamw_args job = *a;
    tsr_parallel(q, pieces(a->n, PIECE), adamw_piece, &job);
    return TSR_OK;
}

/* ---- Muon ---------------------------------------------------------------------------------------------------- */

/* Newton-Schulz in f32. A step multiplies an error by 3.45 at most (the polynomial's slope over the singular values),
 * five steps by 485: from roundings of 2^-24 about 3e-5 of the norm of x at the start, which is 1, against sqrt(low) at
 * the end: 3e-5 / sqrt(low) relative, and the update itself is a small part of w. */
enum { STRIP = 512, SHORT = 1024 }; /* columns of x at a time; elements summed in f32 */

/* One matrix. x is [rows][cols] as it came; when rows > cols the products run from the other side instead of
 * transposing: x^T x, x B. The pieces and what each computes do not depend on who runs them. */
typedef struct muon {
    const tsr_muon_args *a;
    tsr_queue *q;
    float *w, *m;
    const float *g;
    int64_t n, low, high, tile;
    float *x, *p, *b; /* [low][high], [low][low] twice */
    float *strip;     /* [low][STRIP], or NULL: this worker's scratch */
    double *sums;     /* one per piece */
    float over_norm;
} muon;

static void momentum(void *payload, int64_t piece, int worker)
{
    (void)worker;
    const muon *u = payload;
    vf scale = v_set1((float)u->a->grad_scale), mu = v_set1((float)u->a->mu);
    int64_t to = least((piece + 1) * PIECE, u->n);
    double sum = 0;
    for (int64_t from = piece * PIECE; from < to; from += SHORT) {
        vf s = v_zero();
        int64_t end = least(from + SHORT, to);
        for (int64_t i = from; i < end; i += VL) {
            vf g = load_some(u->g + i, end - i) * scale, m = v_fma(mu, load_some(u->m + i, end - i), g);
            vf x = u->a->nesterov ? v_fma(mu, m, g) : m;
            store_some(u->m + i, m, end - i);
            store_some(u->x + i, x, end - i);
            s = v_fma(x, x, s);
        }
        sum += (double)v_sum(s);
    }
    u->sums[piece] = sum;
}

static void normalise(void *payload, int64_t piece, int worker)
{
    (void)worker;
    const muon *u = payload;
    int64_t to = least((piece + 1) * PIECE, u->n);
    for (int64_t i = piece * PIECE; i < to; i += VL) {
        store_some(u->x + i, load_some(u->x + i, to - i) * v_set1(u->over_norm), to - i);
    }
}

static void move_weights(void *payload, int64_t piece, int worker)
{
    (void)worker;
    const muon *u = payload;
    const tsr_muon_args *a = u->a;
    double root = sqrt((double)(a->scale_dim > 0 ? a->scale_dim : u->high));
    vf rate = v_set1((float)(a->lr * 0.2 * root)), decay = v_set1((float)(a->lr * a->decay));
    int64_t to = least((piece + 1) * PIECE, u->n);
    for (int64_t i = piece * PIECE; i < to; i += VL) {
        vf w = load_some(u->w + i, to - i), x = load_some(u->x + i, to - i);
        store_some(u->w + i, w - v_fma(decay, w, rate * x), to - i);
    }
}

/* Tile number `piece` of the upper triangle of tiles: row r, column c >= r. */
static void tile_of(int64_t piece, int64_t side, int64_t *r, int64_t *c)
{
    for (*r = 0; piece >= side - *r; piece -= side - *r, (*r)++) {
    }
    *c = *r + piece;
}

static void mirror(float *m, int64_t low, int64_t r, int64_t c, int64_t nr, int64_t nc)
{
    for (int64_t i = 0; i < nr; i++) {
        for (int64_t j = 0; j < nc; j++) {
            m[(c + j) * low + r + i] = m[(r + i) * low + c + j];
        }
    }
}

/* p = x x^T (or x^T x), upper tiles, each written to both sides. */
static void square(void *payload, int64_t piece, int worker)
{
    (void)worker;
    const muon *u = payload;
    int64_t r, c, low = u->low, high = u->high;
    tile_of(piece, pieces(low, u->tile), &r, &c);
    r *= u->tile;
    c *= u->tile;
    int64_t nr = least(u->tile, low - r), nc = least(u->tile, low - c);
    if (u->a->rows <= u->a->cols) {
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)nr, (int)nc, (int)high, 1, u->x + r * high,
                    (int)high, u->x + c * high, (int)high, 0, u->p + r * low + c, (int)low);
    } else {
        cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)nr, (int)nc, (int)high, 1, u->x + r,
                    (int)low, u->x + c, (int)low, 0, u->p + r * low + c, (int)low);
    }
    if (r != c) {
        mirror(u->p, low, r, c, nr, nc);
    }
}

/* b = -4.7750 p + 2.0315 p p, likewise. */
static void polynomial(void *payload, int64_t piece, int worker)
{
    (void)worker;
    const muon *u = payload;
    int64_t r, c, low = u->low;
    tile_of(piece, pieces(low, u->tile), &r, &c);
    r *= u->tile;
    c *= u->tile;
    int64_t nr = least(u->tile, low - r), nc = least(u->tile, low - c);
    for (int64_t i = r; i < r + nr; i++) {
        memcpy(u->b + i * low + c, u->p + i * low + c, (size_t)nc * sizeof(float));
    }
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)nr, (int)nc, (int)low, 2.0315f,
                u->p + r * low, (int)low, u->p + c, (int)low, -4.7750f, u->b + r * low + c, (int)low);
    if (r != c) {
        mirror(u->b, low, r, c, nr, nc);
    }
}

/* x = 3.4445 x + b x in place, a strip at a time through a copy of the strip. */
static void advance(void *payload, int64_t piece, int worker)
{
    const muon *u = payload;
    int64_t from = piece * STRIP, low = u->low, high = u->high, n = least(STRIP, high - from);
    float *old = u->strip != NULL ? u->strip : tsr_scratch(u->q, worker);
    if (u->a->rows <= u->a->cols) {
        for (int64_t i = 0; i < low; i++) {
            memcpy(old + i * n, u->x + i * high + from, (size_t)n * sizeof(float));
        }
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)low, (int)n, (int)low, 1, u->b, (int)low,
                    old, (int)n, 3.4445f, u->x + from, (int)high);
    } else {
        memcpy(old, u->x + from * low, (size_t)(n * low) * sizeof(float));
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)n, (int)low, (int)low, 1, old, (int)low,
                    u->b, (int)low, 3.4445f, u->x + from * low, (int)low);
    }
}

/* Pieces over the pool, or all here when this matrix belongs to one worker. */
static void each(muon *u, int64_t n, void (*fn)(void *payload, int64_t i, int worker))
{
    if (u->strip == NULL) {
        tsr_parallel(u->q, n, fn, u);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        fn(u, i, -1);
    }
}

static void one_matrix(muon *u)
{
    int64_t parts = pieces(u->n, PIECE), side = pieces(u->low, u->tile), tiles = side * (side + 1) / 2;
    double sum = 0;
    each(u, parts, momentum);
    for (int64_t i = 0; i < parts; i++) {
        sum += u->sums[i];
    }
    u->over_norm = (float)(1 / (sqrt(sum) + 1e-7));
    each(u, parts, normalise);
    for (int step = 0; step < 5; step++) {
        each(u, tiles, square);
        each(u, tiles, polynomial);
        each(u, pieces(u->high, STRIP), advance);
    }
    each(u, parts, move_weights);
}

static muon matrix(tsr_queue *q, const tsr_muon_args *a, int64_t i, void *memory)
{
    muon u = { .a = a, .q = q, .n = a->rows * a->cols, .low = least(a->rows, a->cols) };
    u.high = u.n / u.low;
    u.tile = u.low > 1024 ? 256 : 128;
    u.w = a->w + i * u.n;
    u.m = a->m + i * u.n;
    u.g = a->g + i * u.n;
    u.sums = memory;
    u.x = (float *)(void *)(u.sums + pieces(u.n, PIECE));
    u.p = u.x + u.n;
    u.b = u.p + u.low * u.low;
    return u;
}

typedef struct muon_job {
    const tsr_muon_args *a;
    tsr_queue *q;
} muon_job;

static void small_matrix(void *payload, int64_t i, int worker)
{
    const muon_job *job = payload;
    muon u = matrix(job->q, job->a, i, tsr_scratch(job->q, worker));
    u.strip = u.b + u.low * u.low;
    one_matrix(&u);
}

/* Many small matrices: one to a worker. Else all workers on one matrix after the other, in the workspace. Both do the
 * same sums in the same order, so the choice may depend on the number of workers. */
tsr_status TSR_SIMD(muon)(tsr_queue *q, const tsr_muon_args *a)
{
    int64_t low = least(a->rows, a->cols), n = a->rows * a->cols;
    size_t need = ((size_t)n + 2 * (size_t)(low * low)) * sizeof(float) +
                  (size_t)pieces(n, PIECE) * sizeof(double),
           strip = (size_t)(low * STRIP) * sizeof(float);
    TSR_ASSERT(strip <= TSR_SCRATCH_BYTES && a->rows <= INT32_MAX && a->cols <= INT32_MAX);
    if (a->count >= tsr_workers(q) && need + strip <= TSR_SCRATCH_BYTES) {
        muon_job job = { a, q };
        tsr_parallel(q, a->count, small_matrix, &job);
        return TSR_OK;
    }
    TSR_ASSERT(need <= a->workspace_bytes);
    for (int64_t i = 0; i < a->count; i++) {
        muon u = matrix(q, a, i, a->workspace);
        one_matrix(&u);
    }
    return TSR_OK;
}
