/* run.c - what the layers use: workspace, linear maps, traces. */
#include "model/model_priv.h"

#include <stdlib.h>

#define ALIGN 64

void *ws_bytes(run *r, size_t bytes)
{
    stack *s = r->ws;
    size_t at = s->used;
    s->used += tsr_align_up(bytes, ALIGN);
    s->peak = s->used > s->peak ? s->used : s->peak;
    TSR_ASSERT(r->dry || s->used <= s->size);
    return s->base + at;
}

float *ws_f32(run *r, int64_t n)
{
    return ws_bytes(r, (size_t)n * sizeof(float));
}

tsr_status linear(run *r, const param *w, const float *x, int64_t x_stride, float *y, int64_t y_stride,
                  int64_t n, bool accumulate)
{
    RUN(r, gemm_nt, .y = y, .x = x, .w = w->w, .m = n, .x_stride = x_stride, .y_stride = y_stride,
        .accumulate = accumulate);
    return TSR_OK;
}

tsr_status linear_bwd(run *r, const param *w, const float *x, int64_t x_stride, const float *dy,
                      int64_t dy_stride, float *dx, int64_t dx_stride, int64_t n, bool accumulate)
{
    RUN(r, gemm_tn, .dw = w->pub.grad, .dy = dy, .x = x, .m = n, .n = w->w.rows, .k = w->w.cols,
        .dy_stride = dy_stride, .x_stride = x_stride);
    if (dx != NULL || r->dry) {
        RUN(r, gemm_nn, .dx = dx, .dy = dy, .w = w->w, .m = n, .dy_stride = dy_stride, .dx_stride = dx_stride,
            .accumulate = accumulate);
    }
    return TSR_OK;
}

tsr_status copy_rows(run *r, float *dst, const float *src, int64_t n, int64_t d)
{
    RUN(r, copy2d, .dst = dst, .src = src, .n = n, .d = d, .dst_stride = d, .src_stride = d,
        .dtype = TSR_DT_F32);
    return TSR_OK;
}

tsr_status trace_out(run *r, tsr_trace_kind kind, int32_t layer, const void *data, int64_t rows, int64_t cols)
{
    if (r->trace == NULL || r->dry) {
        return TSR_OK;
    }
    size_t bytes = (size_t)(rows * cols) * 4;
    void *host = malloc(bytes > 0 ? bytes : 1);
    if (host == NULL) {
        TSR_FAIL(r->err, TSR_E_LIMIT, "out of memory: a trace");
    }
    if (r->b->download(r->b, host, data, bytes) != TSR_OK) {
        free(host);
        TSR_FAIL(r->err, TSR_E_IO, "%s: cannot read back a trace", r->b->name);
    }
    r->trace->fn(r->trace->payload, kind, layer, host, rows, cols);
    free(host);
    return TSR_OK;
}
