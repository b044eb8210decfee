/* matmul.c - products with transposed weights, by vectors. Contracts: kernels/ops/matmul.h.
 *
 * Few rows (decoding): each weight is read once, straight from its stored format, and meets all rows in registers.
 * More rows: x is packed once, transposed, so that its rows fill the lanes; weights are expanded TILE_ROWS rows at a
 * time into the first level of the cache, and read from there one number at a time. Every output is the sum of partial
 * sums over TILE_T columns, whatever the number of rows beyond FEW. */
#include "kernels/simd/jobs.h"

#define FEW 8
#define SUM_T 32     /* columns that are summed in one go: short sums lose less */
#define FEW_PIECES 32
#define FEW_PIECE ((int64_t)16384) /* bytes of a weight */
#define TWICE_FEW 12 /* so many rows are done in two halves, if x then fits the first level of the cache */
#define TWICE_K 1024
#define ROUND_FLOATS (1 << 20) /* packed, then used, while the cache still holds them */
#define PACK_ALONE (1 << 15)
#define BLOCK_N 48 /* rows of a weight in one piece: a multiple of TILE_ROWS and of a line of the cache ... */
#define SMALL_BLOCK_N 24 /* ... or less when there are few pieces */
#define MANY_PIECES 64

ALWAYS void put(float *y, float sum, bool add)
{
    *y = add ? *y + sum : sum;
}

/* Four rows of src become four columns of dst. */
ALWAYS void transpose_4x4(const float *src, int64_t src_stride, float *dst, int64_t dst_stride, bool add)
{
    __m128 v[4];
    for (int i = 0; i < 4; i++) {
        v[i] = _mm_loadu_ps(src + i * src_stride);
    }
    _MM_TRANSPOSE4_PS(v[0], v[1], v[2], v[3]);
    for (int i = 0; i < 4; i++) {
        float *to = dst + i * dst_stride;
        _mm_storeu_ps(to, add ? _mm_add_ps(_mm_loadu_ps(to), v[i]) : v[i]);
    }
}

/* ---- few rows ------------------------------------------------------------------------------------------------------- */

#define AT_ONCE(rows)                                                                                        \
    (VL == 16      ? ((rows) == 1   ? 8                                                                      \
                      : (rows) == 2 ? 4                                                                      \
                      : (rows) <= 4 ? 4                                                                      \
                                    : 2)                                                                     \
     : (rows) == 1 ? 8                                                                                       \
     : (rows) == 2 ? 4                                                                                       \
     : (rows) <= 4 ? 2                                                                                       \
                   : 1)

/* at: AT_ONCE rows of the weight from r on, of which those below `end` exist. */
ALWAYS void few_plain(const tsr_dtype dtype, const int rows, const int at, const jobs *p, const job *j,
                      int64_t r, int64_t end)
{
    const char *w[8], *scale[8];
    vf sum[8][8];
    int64_t bytes = row_bytes(dtype, p->k);
#pragma GCC unroll 8
    for (int i = 0; i < at; i++) {
        int64_t row = at_most(r + i, end - 1);
        w[i] = j->w + row * bytes;
        scale[i] = scale_row(dtype, j->scale, row, p->k);
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++) {
            sum[i][m] = v_zero();
        }
    }
    int64_t c = 0;
    for (; c + VL <= p->k; c += VL) {
        vf x[8];
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++) {
            x[m] = v_load(j->x + m * j->x_stride + c);
        }
#pragma GCC unroll 8
        for (int i = 0; i < at; i++) {
            vf v = stored_vec(dtype, w[i], scale[i], c);
#pragma GCC unroll 8
            for (int m = 0; m < rows; m++) {
                sum[i][m] = v_fma(v, x[m], sum[i][m]);
            }
        }
    }
    for (int i = 0; i < at && r + i < end; i++) {
        vf v = stored_vec_n(dtype, w[i], scale[i], c, p->k - c);
        for (int m = 0; m < rows; m++) {
            vf x = v_load_n(j->x + m * j->x_stride + c, p->k - c);
            put(&j->y[m * j->y_stride + r + i], v_sum(v_fma(v, x, sum[i][m])), p->accumulate);
        }
    }
}

/* One row of x, and one row of the weight after the other: memory is read in one stream, which the processor foresees
 * best, and in whole vectors, which hold two columns a lane. x is packed to fit: 2 VL columns as VL even and VL odd. */
static void one_bf16(const jobs *p, const job *j, int64_t r, int64_t end)
{
    for (; r < end; r++) {
        const char *w = j->w + r * p->k * 2;
        vf even, odd, sum[4] = { v_zero(), v_zero(), v_zero(), v_zero() };
        int64_t c = 0;
        for (; c + 4 * VL <= p->k; c += 4 * VL) {
#pragma GCC unroll 2
            for (int s = 0; s < 4; s += 2) {
                v_bf16_pair(w + 2 * (c + s * VL), &even, &odd);
                sum[s] = v_fma(even, v_load(j->packed + c + s * VL), sum[s]);
                sum[s + 1] = v_fma(odd, v_load(j->packed + c + s * VL + VL), sum[s + 1]);
            }
        }
        for (; c < p->k; c += VL) {
            int64_t n = at_most(VL, p->k - c);
            vf v = n == VL ? stored_vec(TSR_DT_BF16, w, NULL, c) : stored_vec_n(TSR_DT_BF16, w, NULL, c, n);
            sum[0] = v_fma(v, n == VL ? v_load(j->x + c) : v_load_n(j->x + c, n), sum[0]);
        }
        put(&j->y[r], v_sum((sum[0] + sum[1]) + (sum[2] + sum[3])), p->accumulate);
    }
}

static void pack_pairs(const jobs *p, const job *j)
{
    for (int64_t c = 0; c + 2 * VL <= p->k; c += 2 * VL) {
        for (int64_t i = 0; i < VL; i++) {
            j->packed[c + i] = j->x[c + 2 * i];
            j->packed[c + VL + i] = j->x[c + 2 * i + 1];
        }
    }
}

/* A row of x in stored order, with zeros at its end; no power of two, for the cache's sake. */
static int64_t few_length(int64_t k)
{
    return round_up(k, GROUP) + VL;
}

/* One row of the weight: memory is read in one stream, which the processor foresees best. */
ALWAYS void few_mxfp4(const int rows, const jobs *p, const job *j, int64_t r)
{
    const char *w = j->w + r * (p->k / 2), *scale = j->scale + r * (p->k / 32);
    int64_t length = few_length(p->k);
    vf sum[8];
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++) {
        sum[m] = v_zero();
    }
    for (int64_t c = 0; c < p->k; c += GROUP) {
        vi codes;
        vf scales, part[8], v[8];
        _mm_prefetch(w + c / 2 + 2048, _MM_HINT_T0); /* in rows to come */
        mx_group(w, scale, c, p->k, &codes, &scales);
        mx_values(codes, v);
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++) {
            const float *x = j->packed + m * length + c;
            part[m] = v[0] * v_load(x);
#pragma GCC unroll 8
            for (int s = 1; s < 8; s++) {
                part[m] = v_fma(v[s], v_load(x + s * VL), part[m]);
            }
            sum[m] = v_fma(mx_plain(part[m]), scales, sum[m]);
        }
    }
    for (int m = 0; m < rows; m++) {
        put(&j->y[m * j->y_stride + r], v_sum(sum[m]), p->accumulate);
    }
}

typedef void few_fn(const jobs *p, const job *j, int64_t r, int64_t end);
#define PLAIN(name, dtype, rows)                                                                             \
    static void name##_##rows(const jobs *p, const job *j, int64_t r, int64_t end)                           \
    {                                                                                                        \
        for (; r < end; r += AT_ONCE(rows)) {                                                                \
            few_plain(dtype, rows, AT_ONCE(rows), p, j, r, end);                                             \
        }                                                                                                    \
    }
#define MXFP4(name, dtype, rows)                                                                             \
    static void name##_##rows(const jobs *p, const job *j, int64_t r, int64_t end)                           \
    {                                                                                                        \
        for (; r < end; r++) {                                                                               \
            few_mxfp4(rows, p, j, r);                                                                        \
        }                                                                                                    \
    }
#define TWO_TO_EIGHT(F, name, dtype, first)                                                                  \
    F(name, dtype, 2)                                                                                        \
    F(name, dtype, 3)                                                                                        \
    F(name, dtype, 4)                                                                                        \
    F(name, dtype, 5)                                                                                        \
    F(name, dtype, 6)                                                                                        \
    F(name, dtype, 7)                                                                                        \
    F(name, dtype, 8)                                                                                        \
    static few_fn *const name[FEW] = { first,    name##_2, name##_3, name##_4,                               \
                                       name##_5, name##_6, name##_7, name##_8 };
#define ONE_TO_EIGHT(F, name, dtype)                                                                         \
    F(name, dtype, 1)                                                                                        \
    TWO_TO_EIGHT(F, name, dtype, name##_1)
ONE_TO_EIGHT(PLAIN, few_f32, TSR_DT_F32)
TWO_TO_EIGHT(PLAIN, few_bf16, TSR_DT_BF16, one_bf16)
ONE_TO_EIGHT(PLAIN, few_f16, TSR_DT_F16)
ONE_TO_EIGHT(PLAIN, few_f8, TSR_DT_F8_E4M3)
ONE_TO_EIGHT(MXFP4, few_mx, TSR_DT_MXFP4)

static few_fn *few_kernel(tsr_dtype dtype, int64_t rows)
{
    switch (dtype) {
    case TSR_DT_F32: return few_f32[rows - 1];
    case TSR_DT_BF16: return few_bf16[rows - 1];
    case TSR_DT_F16: return few_f16[rows - 1];
    case TSR_DT_MXFP4: return few_mx[rows - 1];
    default: return few_f8[rows - 1];
    }
}

/* Rows of a weight in one piece: long streams, but enough pieces for every worker; pieces of about the same size. */
static int64_t few_block(const jobs *p)
{
    int64_t row = row_bytes(p->dtype, p->k), part = p->count * p->n * row / FEW_PIECES;
    int64_t rows = (part < FEW_PIECE ? FEW_PIECE : part > 8 * FEW_PIECE ? 8 * FEW_PIECE : part) / row;
    rows = rows < 8 ? 8 : rows;
    int64_t pieces = (p->n + rows - 1) / rows;
    return round_up((p->n + pieces - 1) / pieces, 8);
}

/* ---- more rows ------------------------------------------------------------------------------------------------------ */

/* Columns [c, c + n) of a row, in stored order, scaled; c is a multiple of GROUP. May write up to VL - 1 beyond. */
ALWAYS void expand_as(const tsr_dtype dtype, const char *row, const char *scale, int64_t c, int64_t n,
                      int64_t cols, float *dst)
{
    if (dtype == TSR_DT_MXFP4) {
        for (int64_t i = 0; i < n; i += GROUP) {
            vi codes;
            vf scales, v[8];
            mx_group(row, scale, c + i, cols, &codes, &scales);
            mx_values(codes, v);
#pragma GCC unroll 8
            for (int s = 0; s < 8; s++) {
                v_store(dst + i + s * at_most(VL, (n - i) / 8), mx_plain(v[s]) * scales);
            }
        }
        return;
    }
    int64_t i = 0;
    for (; i + VL <= n; i += VL) {
        v_store(dst + i, stored_vec(dtype, row, scale, c + i));
    }
    if (i < n) {
        v_store(dst + i, stored_vec_n(dtype, row, scale, c + i, n - i));
    }
}

static void expand_row(tsr_dtype dtype, const char *row, const char *scale, int64_t c, int64_t n,
                       int64_t cols, float *dst)
{
    switch (dtype) {
    case TSR_DT_F32: expand_as(TSR_DT_F32, row, scale, c, n, cols, dst); break;
    case TSR_DT_BF16: expand_as(TSR_DT_BF16, row, scale, c, n, cols, dst); break;
    case TSR_DT_F16: expand_as(TSR_DT_F16, row, scale, c, n, cols, dst); break;
    case TSR_DT_MXFP4: expand_as(TSR_DT_MXFP4, row, scale, c, n, cols, dst); break;
    default: expand_as(TSR_DT_F8_E4M3, row, scale, c, n, cols, dst); break;
    }
}

/* Columns [c, c + n) of four rows of x into four lanes of the panel from step `to` on, from a column to the next one
 * `apart` steps; `rows` of the four exist. */
static void pack_lanes(const float *x, int64_t x_stride, int64_t rows, int64_t n, float *to, int64_t apart)
{
    int64_t c = 0, step = apart * TILE_LANES;
    for (; rows >= 4 && c + 4 <= n; c += 4) {
        transpose_4x4(x + c, x_stride, to + c * step, step, false);
    }
    for (; c < n; c++) {
        for (int64_t i = 0; i < 4; i++) {
            to[c * step + i] = i < rows ? x[i * x_stride + c] : 0;
        }
    }
}

static int64_t panels(int64_t rows)
{
    return (rows + TILE_LANES - 1) / TILE_LANES;
}

/* One panel, [stored order of k][TILE_LANES], of `rows` rows. */
static void pack_panel(const jobs *p, const job *j, int64_t row0, float *panel)
{
    for (int64_t l = 0; l < TILE_LANES; l += 4) {
        int64_t rows = j->rows - row0 - l;
        const float *x = rows > 0 ? j->x + (row0 + l) * j->x_stride : j->x;
        if (p->dtype != TSR_DT_MXFP4) {
            pack_lanes(x, j->x_stride, rows, p->k, panel + l, 1);
            continue;
        }
        for (int64_t c = 0; c < p->k; c += 8) {
            int64_t group = c / GROUP * GROUP, words = at_most(VL, (p->k - group) / 8);
            pack_lanes(x + c, j->x_stride, rows, 8, panel + (group + (c - group) / 8) * TILE_LANES + l,
                       words);
        }
    }
}

/* Few rows: each in stored order, the last group filled up with zeros. */
static void pack_rows(const jobs *p, const job *j)
{
    int64_t length = few_length(p->k);
    for (int64_t r = 0; r < j->rows; r++) {
        const float *x = j->x + r * j->x_stride;
        float *to = j->packed + r * length;
        if (p->k % GROUP != 0) {
            memset(to + p->k / GROUP * GROUP, 0, GROUP * sizeof *to);
        }
        for (int64_t c = 0; c < p->k; c += 32) {
            float *group = to + c / GROUP * GROUP + c % GROUP / 8;
            transpose_4x4(x + c, 8, group, VL, false);
            transpose_4x4(x + c + 4, 8, group + 4 * VL, VL, false);
        }
    }
}

static void pack_piece(void *payload, int64_t i, int worker)
{
    (void)worker;
    const jobs *p = payload;
    const job *j = &p->list[0];
    while (j->packed == NULL || i >= panels(j->rows)) {
        i -= j->packed == NULL ? 0 : panels(j->rows);
        j++;
    }
    if (j->rows == 1 && p->dtype == TSR_DT_BF16) {
        pack_pairs(p, j);
    } else if (j->rows <= FEW) {
        pack_rows(p, j);
    } else {
        pack_panel(p, j, i * TILE_LANES, j->packed + i * p->k * TILE_LANES);
    }
}

/* y[m][n0 + i] from sums[i][m], `count` rows of the weight. */
static void put_transposed(const jobs *p, const job *j, const float *sums, int64_t lanes, int64_t n0,
                           int64_t count)
{
    int64_t m = 0;
    for (; m + 4 <= j->rows; m += 4) {
        float *y = j->y + m * j->y_stride + n0;
        int64_t i = 0;
        for (; i + 4 <= count; i += 4) {
            const float *from = sums + i * lanes + m;
            transpose_4x4(from, lanes, y + i, j->y_stride, p->accumulate);
        }
        for (; i < count; i++) {
            for (int64_t r = 0; r < 4; r++) {
                put(&y[r * j->y_stride + i], sums[i * lanes + m + r], p->accumulate);
            }
        }
    }
    for (; m < j->rows; m++) {
        for (int64_t i = 0; i < count; i++) {
            put(&j->y[m * j->y_stride + n0 + i], sums[i * lanes + m], p->accumulate);
        }
    }
}

/* Bytes [from, to) of the next rows will be expanded when the tiles of these are done. */
static void foresee(const char *w, int64_t rows, int64_t bytes, int64_t from, int64_t to)
{
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t i = from; i < to; i += 64) {
            _mm_prefetch(w + r * bytes + i, _MM_HINT_T1);
        }
    }
}

static void many_piece(const jobs *p, const job *j, int64_t n0, void *scratch)
{
    float *a = scratch, *sums = a + TILE_ROWS * TILE_A_STRIDE;
    int64_t lanes = panels(j->rows) * TILE_LANES, count = at_most(p->n - n0, p->block);
    int64_t bytes = row_bytes(p->dtype, p->k);
    for (int64_t t = 0; t < p->k; t += TILE_T) {
        int64_t steps = at_most(p->k - t, TILE_T);
        for (int64_t r0 = 0; r0 < count; r0 += TILE_ROWS) {
            for (int64_t r = r0; r < at_most(r0 + TILE_ROWS, count); r++) {
                expand_row(p->dtype, j->w + (n0 + r) * bytes, scale_row(p->dtype, j->scale, n0 + r, p->k), t,
                           steps, p->k, a + (r - r0) * TILE_A_STRIDE);
            }
            foresee(j->w + (n0 + r0 + TILE_ROWS) * bytes, at_most(p->n - n0 - r0 - TILE_ROWS, TILE_ROWS),
                    bytes, row_bytes(p->dtype, at_most(t, p->k)),
                    row_bytes(p->dtype, at_most(t + TILE_T, p->k)));
            for (int64_t l = 0; l < j->rows; l += TILE_LANES) {
                tile_fn *tile = j->rows - l <= VL ? tile_rows_narrow : tile_rows;
                for (int64_t u = 0; u < steps; u += SUM_T) {
                    tile(a + u, j->packed + l * p->k + (t + u) * TILE_LANES, at_most(steps - u, SUM_T),
                         sums + r0 * lanes + l, lanes, t + u > 0);
                }
            }
        }
    }
    put_transposed(p, j, sums, lanes, n0, count);
}

static void nt_piece(void *payload, int64_t i, int worker)
{
    const jobs *p = payload;
    const job *j = job_of(p, i);
    if (j->rows <= FEW) {
        int64_t block = few_block(p), r = (i - j->first) * block;
        few_kernel(p->dtype, j->rows)(p, j, r, at_most(r + block, p->n));
    } else {
        many_piece(p, j, (i - j->first) * p->block, tsr_scratch(p->q, worker));
    }
}

static void nt_run(jobs *p)
{
    int64_t packs = 0;
    p->pieces = 0;
    p->block = p->count * p->n < MANY_PIECES * BLOCK_N ? SMALL_BLOCK_N : BLOCK_N;
    for (int64_t i = 0; i < p->count; i++) {
        job *j = &p->list[i];
        int64_t block = j->rows <= FEW ? few_block(p) : p->block;
        j->first = p->pieces;
        p->pieces += (p->n + block - 1) / block;
        packs += j->packed != NULL ? panels(j->rows) : 0;
    }
    for (int64_t i = 0; i < packs && p->room_used <= PACK_ALONE; i++) { /* done before others are awake */
        pack_piece(p, i, 0);
    }
    tsr_parallel(p->q, p->room_used <= PACK_ALONE ? 0 : packs, pack_piece, p);
    tsr_parallel(p->q, p->pieces, nt_piece, p);
    p->count = p->room_used = 0;
}

static void nt_add(jobs *p, job all)
{
    int64_t length = few_length(p->k);
    int64_t most = at_most(ROWS_MAX, p->room_floats / length / TILE_LANES * TILE_LANES);
    TSR_ASSERT(most > 0);
    if (all.rows > FEW && all.rows <= TWICE_FEW && p->k <= TWICE_K) {
        most = (all.rows + 1) / 2;
    }
    for (int64_t r = 0; r < all.rows; r += most) {
        job one = all;
        one.rows = at_most(all.rows - r, most);
        one.x += r * all.x_stride;
        one.y += r * all.y_stride;
        int64_t lanes = one.rows > FEW             ? panels(one.rows) * TILE_LANES
                        : p->dtype == TSR_DT_MXFP4 ? one.rows
                        : p->dtype == TSR_DT_BF16  ? one.rows == 1
                                                   : 0;
        if (p->count == JOBS_MAX || (p->room_used > 0 && p->room_used + lanes * length > ROUND_FLOATS)) {
            nt_run(p);
        }
        one.packed = lanes > 0 ? p->room + p->room_used : NULL;
        p->room_used += lanes * length;
        p->list[p->count++] = one;
    }
}

/* ---- ops ------------------------------------------------------------------------------------------------------------ */

tsr_status TSR_SIMD(gemm_nt)(tsr_queue *q, const tsr_gemm_nt_args *a)
{
    jobs p;
    jobs_open(&p, q, a->w.dtype, a->w.rows, a->w.cols, a->accumulate);
    nt_add(&p, (job){ .x = a->x,
                      .y = a->y,
                      .w = a->w.data,
                      .scale = a->w.scale,
                      .rows = a->m,
                      .x_stride = stride_or(a->x_stride, a->w.cols),
                      .y_stride = stride_or(a->y_stride, a->w.rows) });
    nt_run(&p);
    return TSR_OK;
}

tsr_status TSR_SIMD(ggemm_nt)(tsr_queue *q, const tsr_ggemm_nt_args *a)
{
    jobs p;
    jobs_open(&p, q, a->dtype, a->n, a->k, false);
    for (int64_t e = 0; e < a->e_count; e++) {
        if (a->data[e] != NULL) {
            nt_add(&p, (job){ .x = a->x + a->offset[e] * a->k,
                              .y = a->y + a->offset[e] * a->n,
                              .w = a->data[e],
                              .scale = a->scale != NULL ? a->scale[e] : NULL,
                              .rows = a->offset[e + 1] - a->offset[e],
                              .x_stride = a->k,
                              .y_stride = a->n });
        }
    }
    nt_run(&p);
    return TSR_OK;
}

tsr_status TSR_SIMD(gemm_heads)(tsr_queue *q, const tsr_gemm_heads_args *a)
{
    jobs p;
    int64_t bytes = row_bytes(a->w.dtype, a->w.cols);
    jobs_open(&p, q, a->w.dtype, a->transposed ? a->in : a->out, a->w.cols, false);
    for (int64_t h = 0; h < a->heads; h++) {
        job one = { .x = a->x + h * a->x_head,
                    .y = a->y + h * a->y_head,
                    .w = (const char *)a->w.data + (a->row0 + h * a->row_step) * bytes,
                    .rows = a->m,
                    .x_stride = a->x_stride,
                    .y_stride = a->y_stride };
        if (a->transposed) {
            TSR_SIMD(jobs_nn_add)(&p, one);
        } else {
            nt_add(&p, one);
        }
    }
    if (a->transposed) {
        TSR_SIMD(jobs_nn_run)(&p);
    } else {
        nt_run(&p);
    }
    return TSR_OK;
}
