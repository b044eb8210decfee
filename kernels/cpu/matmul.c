/* matmul.c - reference: matrix products. Plain loops, f64 accumulators. Contracts: kernels/ops/matmul.h. */
#include "kernels/backend_priv.h"
#include "kernels/numeric.h"

/* One weight, exactly. */
static double value(const tsr_weight *w, int64_t r, int64_t c)
{
    const uint8_t *bytes = w->data;
    int64_t i = r * w->cols + c;
    switch (w->dtype) {
    case TSR_DT_F32: return (double)((const float *)w->data)[i];
    case TSR_DT_BF16: return (double)tsr_bf16_to_f32(((const uint16_t *)w->data)[i]);
    case TSR_DT_F16: return (double)tsr_f16_to_f32(((const uint16_t *)w->data)[i]);
    case TSR_DT_MXFP4:
        return (double)tsr_e2m1_to_f32(c % 2 == 0 ? bytes[i / 2] : bytes[i / 2] >> 4) *
               (double)tsr_e8m0_to_f32(((const uint8_t *)w->scale)[i / 32]);
    case TSR_DT_F8_E4M3:
        return (double)tsr_f8_to_f32(TSR_DT_F8_E4M3, bytes[i]) *
               (double)((const float *)w->scale)[r / 128 * ((w->cols + 127) / 128) + c / 128];
    default: tsr_panic_("not a dtype of weights", __FILE__, __LINE__);
    }
}

static void put(float *y, double sum, bool accumulate)
{
    *y = (float)(accumulate ? (double)*y + sum : sum);
}

enum { TOGETHER = 64 }; /* rows that share one decoding of a weight */

/* y[m][n] = x[m][k] W^T, with the rows of W from row0 on. */
static void product_nt(float *y, int64_t y_stride, const float *x, int64_t x_stride, int64_t m,
                       const tsr_weight *w, int64_t row0, int64_t n, bool accumulate)
{
    for (int64_t i0 = 0; i0 < m; i0 += TOGETHER) {
        int64_t rows = m - i0 < TOGETHER ? m - i0 : TOGETHER;
        for (int64_t j = 0; j < n; j++) {
            double sum[TOGETHER] = { 0 };
            for (int64_t c = 0; c < w->cols; c++) {
                double v = value(w, row0 + j, c);
                for (int64_t i = 0; i < rows; i++) {
                    sum[i] += (double)x[(i0 + i) * x_stride + c] * v;
                }
            }
            for (int64_t i = 0; i < rows; i++) {
                put(&y[(i0 + i) * y_stride + j], sum[i], accumulate);
            }
        }
    }
}

/* dx[m][k] = dy[m][n] W, with the n rows of W from row0 on. */
static void product_nn(float *dx, int64_t dx_stride, const float *dy, int64_t dy_stride, int64_t m,
                       const tsr_weight *w, int64_t row0, int64_t n, bool accumulate)
{
    for (int64_t i0 = 0; i0 < m; i0 += TOGETHER) {
        int64_t rows = m - i0 < TOGETHER ? m - i0 : TOGETHER;
        for (int64_t c = 0; c < w->cols; c++) {
            double sum[TOGETHER] = { 0 };
            for (int64_t j = 0; j < n; j++) {
                double v = value(w, row0 + j, c);
                for (int64_t i = 0; i < rows; i++) {
                    sum[i] += (double)dy[(i0 + i) * dy_stride + j] * v;
                }
            }
            for (int64_t i = 0; i < rows; i++) {
                put(&dx[(i0 + i) * dx_stride + c], sum[i], accumulate);
            }
        }
    }
}

static void product_tn(float *dw, const float *dy, int64_t dy_stride, const float *x, int64_t x_stride,
                       int64_t m, int64_t n, int64_t k)
{
    for (int64_t j = 0; j < n; j++) {
        for (int64_t c = 0; c < k; c++) {
            double sum = 0;
            for (int64_t i = 0; i < m; i++) {
                sum += (double)dy[i * dy_stride + j] * (double)x[i * x_stride + c];
            }
            put(&dw[j * k + c], sum, true);
        }
    }
}

static int64_t stride_or(int64_t stride, int64_t width)
{
    return stride == 0 ? width : stride;
}

tsr_status tsr_cpu_gemm_nt(tsr_queue *q, const tsr_gemm_nt_args *a)
{
    (void)q;
    product_nt(a->y, stride_or(a->y_stride, a->w.rows), a->x, stride_or(a->x_stride, a->w.cols), a->m, &a->w,
               0, a->w.rows, a->accumulate);
    return TSR_OK;
}

tsr_status tsr_cpu_gemm_nn(tsr_queue *q, const tsr_gemm_nn_args *a)
{
    (void)q;
    product_nn(a->dx, stride_or(a->dx_stride, a->w.cols), a->dy, stride_or(a->dy_stride, a->w.rows), a->m,
               &a->w, 0, a->w.rows, a->accumulate);
    return TSR_OK;
}

tsr_status tsr_cpu_gemm_tn(tsr_queue *q, const tsr_gemm_tn_args *a)
{
    (void)q;
    product_tn(a->dw, a->dy, stride_or(a->dy_stride, a->n), a->x, stride_or(a->x_stride, a->k), a->m, a->n,
               a->k);
    return TSR_OK;
}

tsr_status tsr_cpu_ggemm_nt(tsr_queue *q, const tsr_ggemm_nt_args *a)
{
    (void)q;
    for (int64_t e = 0; e < a->e_count; e++) {
        int64_t from = a->offset[e], rows = a->offset[e + 1] - from;
        if (rows > 0 && a->data[e] != NULL) {
            tsr_weight w = { a->data[e], a->scale != NULL ? a->scale[e] : NULL, a->dtype, a->n, a->k };
            product_nt(a->y + from * a->n, a->n, a->x + from * a->k, a->k, rows, &w, 0, a->n, false);
        }
    }
    return TSR_OK;
}

tsr_status tsr_cpu_ggemm_nn(tsr_queue *q, const tsr_ggemm_nn_args *a)
{
    (void)q;
    for (int64_t e = 0; e < a->e_count; e++) {
        int64_t from = a->offset[e], rows = a->offset[e + 1] - from;
        if (rows > 0 && a->data[e] != NULL) {
            tsr_weight w = { a->data[e], a->scale != NULL ? a->scale[e] : NULL, a->dtype, a->n, a->k };
            product_nn(a->dx + from * a->k, a->k, a->dy + from * a->n, a->n, rows, &w, 0, a->n, false);
        }
    }
    return TSR_OK;
}

tsr_status tsr_cpu_ggemm_tn(tsr_queue *q, const tsr_ggemm_tn_args *a)
{
    (void)q;
    for (int64_t e = 0; e < a->e_count; e++) {
        int64_t from = a->offset[e], rows = a->offset[e + 1] - from;
        if (rows > 0 && a->dw[e] != NULL) {
            product_tn(a->dw[e], a->dy + from * a->n, a->n, a->x + from * a->k, a->k, rows, a->n, a->k);
        }
    }
    return TSR_OK;
}

tsr_status tsr_cpu_gemm_heads(tsr_queue *q, const tsr_gemm_heads_args *a)
{
    (void)q;
    for (int64_t h = 0; h < a->heads; h++) {
        const float *x = a->x + h * a->x_head;
        float *y = a->y + h * a->y_head;
        int64_t row = a->row0 + h * a->row_step;
        if (a->transposed) {
            product_nn(y, a->y_stride, x, a->x_stride, a->m, &a->w, row, a->in, false);
        } else {
            product_nt(y, a->y_stride, x, a->x_stride, a->m, &a->w, row, a->out, false);
        }
    }
    return TSR_OK;
}
