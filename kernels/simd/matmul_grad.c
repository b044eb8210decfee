/* matmul_grad.c - products with weights as they lie, and gradients of weights, by vectors. Contracts:
 * kernels/ops/matmul.h. Columns fill the lanes; every output is the sum of partial sums over TILE_T rows. */
#include "kernels/simd/jobs.h"

#define BLOCK_K 128 /* columns of one piece */
#define BLOCK_PANELS (BLOCK_K / TILE_LANES)
#define BLOCK_N 192 /* rows of a gradient in one piece */

/* Columns [c, c + TILE_LANES) of a row in their natural order, scaled; beyond the row's end 0. */
ALWAYS void columns_as(const tsr_dtype dtype, const char *row, const char *scale, int64_t c, int64_t cols,
                       vf v[2])
{
    if (dtype == TSR_DT_MXFP4) {
        vf s = v_set1(_mm_cvtss_f32(mx_scales((uint8_t)scale[c / 32])));
        vi codes = mx_bytes(row + c / 2);
        v_interleave(mx_value(codes, 0) * s, mx_value(codes, 1) * s, &v[0], &v[1]);
        return;
    }
    for (int i = 0; i < 2; i++) {
        int64_t left = cols - c - i * VL;
        v[i] = left >= VL ? stored_vec(dtype, row, scale, c + i * VL)
               : left > 0 ? stored_vec_n(dtype, row, scale, c + i * VL, left)
                          : v_zero();
    }
}

/* Rows [r0, r0 + n) of W, columns [c, c + TILE_LANES) to panel [n][TILE_LANES]. */
ALWAYS void expand_panel_as(const tsr_dtype dtype, const jobs *p, const job *j, int64_t r0, int64_t n,
                            int64_t c, float *panel)
{
    int64_t bytes = row_bytes(dtype, p->k);
    for (int64_t r = r0; r < r0 + n; r++) {
        vf v[2];
        columns_as(dtype, j->w + r * bytes, scale_row(dtype, j->scale, r, p->k), c, p->k, v);
        v_store(panel, v[0]);
        v_store(panel + VL, v[1]);
        panel += TILE_LANES;
    }
}

static void expand_panel(const jobs *p, const job *j, int64_t r0, int64_t n, int64_t c, float *panel)
{
    switch (p->dtype) {
    case TSR_DT_F32: expand_panel_as(TSR_DT_F32, p, j, r0, n, c, panel); break;
    case TSR_DT_BF16: expand_panel_as(TSR_DT_BF16, p, j, r0, n, c, panel); break;
    case TSR_DT_F16: expand_panel_as(TSR_DT_F16, p, j, r0, n, c, panel); break;
    case TSR_DT_MXFP4: expand_panel_as(TSR_DT_MXFP4, p, j, r0, n, c, panel); break;
    default: expand_panel_as(TSR_DT_F8_E4M3, p, j, r0, n, c, panel); break;
    }
}

/* The panels of a block times `rows` (at most TILE_ROWS) rows in a; c is the block's first output. */
static void tiles(tile_fn *tile, int tile_rows_n, const float *a, const float *panel, int64_t steps, float *c,
                  int64_t c_stride, bool add, int64_t rows, int64_t columns)
{
    for (int64_t l = 0; l < columns; l += TILE_LANES) {
        const float *b = panel + l * TILE_T;
        if (rows == tile_rows_n && columns - l >= TILE_LANES) {
            tile(a, b, steps, c + l, c_stride, add);
        } else {
            tile_edge(tile, a, b, steps, c + l, c_stride, add, rows, at_most(columns - l, TILE_LANES));
        }
    }
}

/* ---- few rows: each weight is read once, and meets all rows in registers ------------------------------------------- */

#define FEW 4

/* Columns [c, c + pairs TILE_LANES): all of them exist when `whole`. */
ALWAYS void few_columns(const tsr_dtype dtype, const int rows, const int pairs, const bool whole,
                        const jobs *p, const job *j, int64_t c)
{
    vf sum[FEW][8], v[2];
    int64_t bytes = row_bytes(dtype, p->k);
#pragma GCC unroll 32
    for (int i = 0; i < rows * 2 * pairs; i++) {
        sum[i / (2 * pairs)][i % (2 * pairs)] = v_zero();
    }
    for (int64_t r = 0; r < p->n; r++) {
        const char *w = j->w + r * bytes, *scale = scale_row(dtype, j->scale, r, p->k);
#pragma GCC unroll 4
        for (int i = 0; i < pairs; i++) {
            columns_as(dtype, w, scale, c + i * TILE_LANES, whole ? INT64_MAX / 2 : p->k, v);
#pragma GCC unroll 4
            for (int m = 0; m < rows; m++) {
                vf x = v_set1(j->x[m * j->x_stride + r]);
                sum[m][2 * i] = v_fma(x, v[0], sum[m][2 * i]);
                sum[m][2 * i + 1] = v_fma(x, v[1], sum[m][2 * i + 1]);
            }
        }
    }
    for (int m = 0; m < rows; m++) {
        for (int i = 0; i < 2 * pairs; i++) {
            float *y = j->y + m * j->y_stride + c + i * VL;
            int64_t left = whole ? VL : p->k - c - i * VL;
            if (left >= VL) {
                v_store(y, p->accumulate ? (vf)(v_load(y) + sum[m][i]) : sum[m][i]);
            } else if (left > 0) {
                v_store_n(y, p->accumulate ? (vf)(v_load_n(y, left) + sum[m][i]) : sum[m][i], left);
            }
        }
    }
}

ALWAYS void few_strips(const tsr_dtype dtype, const int rows, const jobs *p, const job *j, int64_t c,
                       int64_t end)
{
    const int pairs = rows == 1 ? 4 : rows == 2 ? 2 : 1;
    for (; c + pairs * TILE_LANES <= end; c += pairs * TILE_LANES) {
        few_columns(dtype, rows, pairs, true, p, j, c);
    }
    for (; c < end; c += TILE_LANES) {
        few_columns(dtype, rows, 1, false, p, j, c);
    }
}

ALWAYS void few_rows(const tsr_dtype dtype, const jobs *p, const job *j, int64_t c, int64_t end)
{
    switch (j->rows) {
    case 1: few_strips(dtype, 1, p, j, c, end); break;
    case 2: few_strips(dtype, 2, p, j, c, end); break;
    case 3: few_strips(dtype, 3, p, j, c, end); break;
    default: few_strips(dtype, 4, p, j, c, end); break;
    }
}

static void few_piece(const jobs *p, const job *j, int64_t c, int64_t end)
{
    switch (p->dtype) {
    case TSR_DT_F32: few_rows(TSR_DT_F32, p, j, c, end); break;
    case TSR_DT_BF16: few_rows(TSR_DT_BF16, p, j, c, end); break;
    case TSR_DT_F16: few_rows(TSR_DT_F16, p, j, c, end); break;
    case TSR_DT_MXFP4: few_rows(TSR_DT_MXFP4, p, j, c, end); break;
    default: few_rows(TSR_DT_F8_E4M3, p, j, c, end); break;
    }
}

/* ---- more rows ----------------------------------------------------------------------------------------------------- */

/* dx[rows][c ...] = dy W. */
static void nn_piece(void *payload, int64_t i, int worker)
{
    const jobs *p = payload;
    const job *j = job_of(p, i);
    int64_t c = (i - j->first) * BLOCK_K, columns = at_most(p->k - c, BLOCK_K);
    float *a = tsr_scratch(p->q, worker), *panel = a + TILE_ROWS * TILE_A_STRIDE;
    if (j->rows <= FEW) {
        few_piece(p, j, c, c + columns);
        return;
    }
    for (int64_t t = 0; t < p->n; t += TILE_T) {
        int64_t steps = at_most(p->n - t, TILE_T);
        for (int64_t l = 0; l < columns; l += TILE_LANES) {
            expand_panel(p, j, t, steps, c + l, panel + l * TILE_T);
        }
        for (int64_t r = 0; r < j->rows;) {
            bool half = j->rows - r <= TILE_ROWS / 2;
            int64_t rows = at_most(j->rows - r, TILE_ROWS);
            for (int64_t s = 0; s < rows; s++) {
                memcpy(a + s * TILE_A_STRIDE, j->x + (r + s) * j->x_stride + t, (size_t)steps * sizeof *a);
            }
            tiles(half ? tile_rows_half : tile_rows, half ? TILE_ROWS / 2 : TILE_ROWS, a, panel, steps,
                  j->y + r * j->y_stride + c, j->y_stride, p->accumulate || t > 0, rows, columns);
            r += rows;
        }
    }
}

void TSR_SIMD(jobs_nn_run)(jobs *p)
{
    p->pieces = 0;
    for (int64_t i = 0; i < p->count; i++) {
        p->list[i].first = p->pieces;
        p->pieces += (p->k + BLOCK_K - 1) / BLOCK_K;
    }
    tsr_parallel(p->q, p->pieces, nn_piece, p);
    p->count = 0;
}

void TSR_SIMD(jobs_nn_add)(jobs *p, job all)
{
    for (int64_t r = 0; r < all.rows; r += ROWS_MAX) {
        job one = all;
        one.rows = at_most(all.rows - r, ROWS_MAX);
        one.x += r * all.x_stride;
        one.y += r * all.y_stride;
        if (p->count == JOBS_MAX) {
            TSR_SIMD(jobs_nn_run)(p);
        }
        p->list[p->count++] = one;
    }
}

tsr_status TSR_SIMD(gemm_nn)(tsr_queue *q, const tsr_gemm_nn_args *a)
{
    jobs p;
    jobs_open(&p, q, a->w.dtype, a->w.rows, a->w.cols, a->accumulate);
    TSR_SIMD(jobs_nn_add)
    (&p, (job){ .x = a->dy,
                .y = a->dx,
                .w = a->w.data,
                .scale = a->w.scale,
                .rows = a->m,
                .x_stride = stride_or(a->dy_stride, a->w.rows),
                .y_stride = stride_or(a->dx_stride, a->w.cols) });
    TSR_SIMD(jobs_nn_run)(&p);
    return TSR_OK;
}

tsr_status TSR_SIMD(ggemm_nn)(tsr_queue *q, const tsr_ggemm_nn_args *a)
{
    jobs p;
    jobs_open(&p, q, a->dtype, a->n, a->k, false);
    for (int64_t e = 0; e < a->e_count; e++) {
        if (a->data[e] != NULL) {
            TSR_SIMD(jobs_nn_add)
            (&p, (job){ .x = a->dy + a->offset[e] * a->n,
                        .y = a->dx + a->offset[e] * a->k,
                        .w = a->data[e],
                        .scale = a->scale != NULL ? a->scale[e] : NULL,
                        .rows = a->offset[e + 1] - a->offset[e],
                        .x_stride = a->n,
                        .y_stride = a->k });
        }
    }
    TSR_SIMD(jobs_nn_run)(&p);
    return TSR_OK;
}

/* ---- dw += dy^T x: x of a job is dy, w is x -------------------------------------------------------------------------- */

/* Rows [t, t + steps) of x, columns [c, c + TILE_LANES) to panel. */
static void copy_panel(const jobs *p, const float *x, int64_t stride, int64_t t, int64_t steps, int64_t c,
                       float *panel)
{
    for (int64_t s = t; s < t + steps; s++) {
        vf v[2];
        columns_as(TSR_DT_F32, (const char *)(x + s * stride), NULL, c, p->k, v);
        v_store(panel, v[0]);
        v_store(panel + VL, v[1]);
        panel += TILE_LANES;
    }
}

typedef struct tn {
    jobs p;
    int64_t w_stride; /* of x */
} tn;

static void tn_piece(void *payload, int64_t i, int worker)
{
    const tn *g = payload;
    const jobs *p = &g->p;
    const job *j = job_of(p, i);
    int64_t across = (p->k + BLOCK_K - 1) / BLOCK_K;
    int64_t n0 = (i - j->first) / across * BLOCK_N, c = (i - j->first) % across * BLOCK_K;
    int64_t n1 = at_most(n0 + BLOCK_N, p->n), columns = at_most(p->k - c, BLOCK_K);
    float *a = tsr_scratch(p->q, worker), *panel = a + TILE_ROWS * TILE_A_STRIDE;
    for (int64_t t = 0; t < j->rows; t += TILE_T) {
        int64_t steps = at_most(j->rows - t, TILE_T);
        for (int64_t l = 0; l < columns; l += TILE_LANES) {
            copy_panel(p, (const float *)(const void *)j->w, g->w_stride, t, steps, c + l,
                       panel + l * TILE_T);
        }
        for (int64_t r = n0; r < n1; r += TILE_ROWS) {
            int64_t rows = at_most(n1 - r, TILE_ROWS);
            bool half = rows <= TILE_ROWS / 2;
            const float *dy = j->x + t * j->x_stride + r;
            for (int64_t s = 0; s < steps && rows == TILE_ROWS; s++) {
                memcpy(a + s * TILE_ROWS, dy + s * j->x_stride, TILE_ROWS * sizeof *a);
            }
            for (int64_t s = 0; s < steps && rows < TILE_ROWS; s++) {
                memcpy(a + s * TILE_ROWS, dy + s * j->x_stride, (size_t)rows * sizeof *a);
            }
            tiles(half ? tile_steps_half : tile_steps, half ? TILE_ROWS / 2 : TILE_ROWS, a, panel, steps,
                  j->y + r * p->k + c, p->k, true, rows, columns);
        }
    }
}

static void tn_run(tn *g)
{
    jobs *p = &g->p;
    p->pieces = 0;
    for (int64_t i = 0; i < p->count; i++) {
        p->list[i].first = p->pieces;
        p->pieces += (p->k + BLOCK_K - 1) / BLOCK_K * ((p->n + BLOCK_N - 1) / BLOCK_N);
    }
    tsr_parallel(p->q, p->pieces, tn_piece, g);
    p->count = 0;
}

tsr_status TSR_SIMD(gemm_tn)(tsr_queue *q, const tsr_gemm_tn_args *a)
{
    tn g = { .w_stride = stride_or(a->x_stride, a->k) };
    jobs_open(&g.p, q, TSR_DT_F32, a->n, a->k, true);
    g.p.list[g.p.count++] = (job){ .x = a->dy,
                                   .y = a->dw,
                                   .w = (const char *)a->x,
                                   .rows = a->m,
                                   .x_stride = stride_or(a->dy_stride, a->n) };
    tn_run(&g);
    return TSR_OK;
}

tsr_status TSR_SIMD(ggemm_tn)(tsr_queue *q, const tsr_ggemm_tn_args *a)
{
    tn g = { .w_stride = a->k };
    jobs_open(&g.p, q, TSR_DT_F32, a->n, a->k, true);
    for (int64_t e = 0; e < a->e_count; e++) {
        if (a->dw[e] == NULL || a->offset[e + 1] == a->offset[e]) {
            continue;
        }
        if (g.p.count == JOBS_MAX) {
            tn_run(&g);
        }
        g.p.list[g.p.count++] = (job){ .x = a->dy + a->offset[e] * a->n,
                                       .y = a->dw[e],
                                       .w = (const char *)(a->x + a->offset[e] * a->k),
                                       .rows = a->offset[e + 1] - a->offset[e],
                                       .x_stride = a->n };
    }
    tn_run(&g);
    return TSR_OK;
}
