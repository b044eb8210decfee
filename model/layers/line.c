/* line.c - one sequence on several ranks: what layers hand to their neighbours. Delta attention hands over its state, so ranks
 * work one behind the other there; full attention gathers the compressed keys of those before; a convolution needs a few rows. */
#include "model/model_priv.h"

#include <string.h>

bool in_line(const run *r)
{
    return r->train && r->m->o.line != NULL && (r->dry || r->total > 0);
}

static const tsr_sequence_line *line_of(const run *r)
{
    return r->m->o.line;
}

int64_t line_rows(const run *r)
{
    return r->dry ? line_of(r)->ranks * r->n : r->before + r->n;
}

static tsr_status device_failed(const run *r)
{
    TSR_FAIL(r->err, TSR_E_IO, "%s: cannot move rows of a shared sequence", r->b->name);
}

static tsr_status cleared(run *r, float *p, int64_t n)
{
    return r->dry || n == 0 || r->b->zero(r->b, p, (size_t)n * sizeof *p) == TSR_OK ? TSR_OK
                                                                                    : device_failed(r);
}

static tsr_status to_rank(run *r, int32_t step, const float *p, int64_t n)
{
    const tsr_sequence_line *l = line_of(r);
    return r->dry ? TSR_OK : l->send(l->payload, l->rank + step, p, (size_t)n * sizeof *p, r->err);
}

static tsr_status from_rank(run *r, int32_t step, float *p, int64_t n)
{
    const tsr_sequence_line *l = line_of(r);
    return r->dry ? TSR_OK : l->receive(l->payload, l->rank + step, p, (size_t)n * sizeof *p, r->err);
}

tsr_status line_borders(run *r, int64_t more, const int64_t **out)
{
    int64_t *host = r->m->seg_host;
    *out = r->m->seg_line;
    if (r->dry) {
        return TSR_OK;
    }
    if (r->b->download(r->b, host, r->seg, (size_t)(r->segs + 1) * sizeof *host) != TSR_OK) {
        return device_failed(r);
    }
    for (int64_t i = 1; i <= r->segs; i++) {
        host[i] += more;
    }
    return r->b->upload(r->b, r->m->seg_line, host, (size_t)(r->segs + 1) * sizeof *host) == TSR_OK
               ? TSR_OK
               : device_failed(r);
}

/* ---- convolutions --------------------------------------------------------------------------------------------------- */

tsr_status conv_history(run *r, const float *u, int64_t width, int64_t kw, float **history)
{
    int64_t rows = kw - 1, have = r->before < rows ? r->before : rows;
    float *h = *history = ws_f32(r, rows * width);
    if (r->goes_on) {
        TSR_TRY(to_rank(r, 1, u + (r->n - rows) * width, rows * width));
    }
    if (r->before > 0) {
        TSR_TRY(from_rank(r, -1, h, rows * width));
    }
    return cleared(r, h, (rows - have) * width);
}

tsr_status conv_line_bwd(run *r, const float *u, const float *history, const float *w, const float *dy,
                         float *du, float *dw, int64_t width, int64_t kw)
{
    int64_t rows = kw - 1, all = rows + r->n, have = r->before < rows ? r->before : rows;
    const int64_t *seg;
    float *ux = ws_f32(r, all * width), *dyx = ws_f32(r, all * width), *dux = ws_f32(r, all * width);
    TSR_TRY(copy_rows(r, ux, history, rows, width)); /* zeros stand in front of a segment that begins here */
    TSR_TRY(copy_rows(r, ux + rows * width, u, r->n, width));
    TSR_TRY(cleared(r, dyx, rows * width));
    TSR_TRY(copy_rows(r, dyx + rows * width, dy, r->n, width));
    TSR_TRY(line_borders(r, rows, &seg));
    RUN(r, conv_bwd, .dx = dux, .dw = dw, .dy = dyx, .x = ux, .w = w, .seg = seg, .n = all, .c = width,
        .kw = kw, .segs = r->segs, .x_stride = width, .dy_stride = width, .dx_stride = width);
    TSR_TRY(copy_rows(r, du, dux + rows * width, r->n, width));
    if (r->goes_on) { /* what the next rank's first rows give to this rank's last ones */
        float *tail = du + (r->n - rows) * width;
        TSR_TRY(from_rank(r, 1, dyx, rows * width));
        RUN(r, add, .y = tail, .a = tail, .b = dyx, .n = rows * width);
    }
    TSR_TRY(cleared(r, dux, (rows - have) * width)); /* those belong to another segment */
    return r->before > 0 ? to_rank(r, -1, dux, rows * width) : TSR_OK;
}

/* ---- states ------------------------------------------------------------------------------------------------------------ */

tsr_status state_in(run *r, float **states, int64_t size)
{
    *states = ws_f32(r, r->segs * size);
    TSR_TRY(cleared(r, *states, r->segs * size));
    return r->before > 0 ? from_rank(r, -1, *states, size) : TSR_OK;
}

tsr_status state_out(run *r, const float *states, int64_t size)
{
    return r->goes_on ? to_rank(r, 1, states + (r->segs - 1) * size, size) : TSR_OK;
}

tsr_status dstate_in(run *r, float **dstates, int64_t size)
{
    *dstates = ws_f32(r, r->segs * size);
    TSR_TRY(cleared(r, *dstates, r->segs * size));
    return r->goes_on ? from_rank(r, 1, *dstates + (r->segs - 1) * size, size) : TSR_OK;
}

tsr_status dstate_out(run *r, const float *dstates, int64_t size)
{
    return r->before > 0 ? to_rank(r, -1, dstates, size) : TSR_OK;
}

/* ---- rows of everybody --------------------------------------------------------------------------------------------------- */

/* Rows of the largest share. */
static int64_t share_rows(const run *r)
{
    int64_t ranks = line_of(r)->ranks;
    return r->dry ? r->n : (r->total + ranks - 1) / ranks;
}

/* Copies rows [first, last) of the shared tokens between `all`, whose first row is `from`, and the gathered shares. */
static tsr_status each_share(run *r, float *shares, float *all, int64_t from, int64_t last, int64_t width,
                             bool gather)
{
    const tsr_sequence_line *l = line_of(r);
    for (int32_t i = 0; !r->dry && i < l->ranks; i++) {
        int64_t begin = tsr_line_first(r->total, i, l->ranks),
                end = tsr_line_first(r->total, i + 1, l->ranks);
        int64_t a = begin > from ? begin : from, b = end < last ? end : last;
        float *there = shares + (i * share_rows(r) + a - begin) * width, *here = all + (a - from) * width;
        if (a < b) {
            TSR_TRY(copy_rows(r, gather ? here : there, gather ? there : here, b - a, width));
        }
    }
    return TSR_OK;
}

tsr_status rows_before(run *r, const float *rows, int64_t stride, int64_t width, float *all)
{
    const tsr_sequence_line *l = line_of(r);
    int64_t most = share_rows(r) * width, first = r->dry ? 0 : tsr_line_first(r->total, l->rank, l->ranks);
    float *own = ws_f32(r, most), *shares = ws_f32(r, l->ranks * most);
    TSR_TRY(cleared(r, own, most));
    RUN(r, copy2d, .dst = own, .src = rows, .n = r->n, .d = width, .dst_stride = width, .src_stride = stride,
        .dtype = TSR_DT_F32);
    if (!r->dry) {
        TSR_TRY(l->gather(l->payload, own, shares, (size_t)most * sizeof *own, r->err));
    }
    TSR_TRY(each_share(r, shares, all, first - r->before, first, width, true));
    return copy_rows(r, all + (r->dry ? 0 : r->before) * width, own, r->n, width);
}

tsr_status rows_before_bwd(run *r, const float *dall, int64_t width, float *drows, int64_t stride)
{
    const tsr_sequence_line *l = line_of(r);
    int64_t most = share_rows(r) * width, first = r->dry ? 0 : tsr_line_first(r->total, l->rank, l->ranks);
    float *shares = ws_f32(r, l->ranks * most), *copy = ws_f32(r, line_rows(r) * width);
    TSR_TRY(cleared(r, shares, l->ranks * most));
    TSR_TRY(copy_rows(r, copy, dall, line_rows(r), width));
    TSR_TRY(each_share(r, shares, copy, first - r->before, first + r->n, width, false));
    if (!r->dry) {
        TSR_TRY(l->sum(l->payload, shares, l->ranks * most, r->err));
    }
    RUN(r, copy2d, .dst = drows, .src = shares + l->rank * most, .n = r->n, .d = width, .dst_stride = stride,
        .src_stride = width, .dtype = TSR_DT_F32);
    return TSR_OK;
}
