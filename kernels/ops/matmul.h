/* matmul.h - contracts: matrix products with weights in their stored formats. See kernels/kernels.h for the conventions. */
#ifndef TSR_KERNELS_OPS_MATMUL_H
#define TSR_KERNELS_OPS_MATMUL_H

#include "format/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A weight matrix [rows][cols] (out, in) as stored.
 *   F32, BF16, F16: data [rows][cols].
 *   MXFP4: data [rows][cols/2], low nibble = even column; scale [rows][cols/32] E8M0. cols % 32 == 0.
 *   F8_E4M3: data [rows][cols]; scale f32 [ceil(rows/128)][ceil(cols/128)], value = code * scale (ragged edges).
 * Source of the formats: OCP Microscaling Formats 1.0; DeepSeek-V3 technical report (128 x 128 blocks). */
typedef struct tsr_weight {
    const void *data;
    const void *scale; /* NULL for F32, BF16, F16 */
    tsr_dtype dtype;
    int64_t rows, cols;
} tsr_weight;

/* y[m][n] = x[m][k] W^T (or += with accumulate), W [n][k]. Strides in elements (0: dense). y may not alias x. */
typedef struct tsr_gemm_nt_args {
    float *y;
    const float *x;
    tsr_weight w; /* rows n, cols k */
    int64_t m, x_stride, y_stride;
    bool accumulate;
} tsr_gemm_nt_args;

/* dx[m][k] = dy[m][n] W (or +=), W [n][k]. */
typedef struct tsr_gemm_nn_args {
    float *dx;
    const float *dy;
    tsr_weight w;
    int64_t m, dy_stride, dx_stride;
    bool accumulate;
} tsr_gemm_nn_args;

/* dw[n][k] += dy[m][n]^T x[m][k]. */
typedef struct tsr_gemm_tn_args {
    float *dw;
    const float *dy, *x;
    int64_t m, n, k, dy_stride, x_stride;
} tsr_gemm_tn_args;

/* Grouped: rows [offset[e], offset[e+1]) of x belong to expert e. offset [e_count + 1] i64, offset[0] = 0,
 * offset[e_count] = m. The tables hold one pointer per expert, themselves in backend memory; rows of experts
 * whose entry is NULL are skipped: left as they are in y and dx. All experts share dtype and shape.
 * y[m][n] = x[m][k] W_e^T. */
typedef struct tsr_ggemm_nt_args {
    float *y;
    const float *x;
    const int64_t *offset;
    const void *const *data, *const *scale; /* [e_count]; scale NULL where the dtype has none */
    tsr_dtype dtype;
    int64_t m, e_count, n, k;
} tsr_ggemm_nt_args;

/* dx[m][k] = dy[m][n] W_e. */
typedef struct tsr_ggemm_nn_args {
    float *dx;
    const float *dy;
    const int64_t *offset;
    const void *const *data, *const *scale;
    tsr_dtype dtype;
    int64_t m, e_count, n, k;
} tsr_ggemm_nn_args;

/* dw[e][n][k] += dy_e^T x_e; dw is one table entry per expert. */
typedef struct tsr_ggemm_tn_args {
    float *const *dw;
    const float *dy, *x;
    const int64_t *offset;
    int64_t m, e_count, n, k;
} tsr_ggemm_tn_args;

/* One small product per head with a slice of one weight W [rows][cols] (F32 or BF16): head h uses the rows
 * W_h = W[row0 + h row_step ...][cols], of which there are `out` (transposed false) or `in` (true).
 *   transposed false:  y[m][h][out] = x[m][h][in] W_h^T,  in  = cols
 *   transposed true:   y[m][h][out] = x[m][h][in] W_h,    out = cols
 * Head h of x starts at x + h x_head, rows x_stride apart; y likewise. */
typedef struct tsr_gemm_heads_args {
    float *y;
    const float *x;
    tsr_weight w;
    int64_t m, heads, in, out, row0, row_step;
    int64_t x_stride, x_head, y_stride, y_head;
    bool transposed;
} tsr_gemm_heads_args;

#ifdef __cplusplus
}
#endif
#endif
