/* moe_exchange.c - experts that lie on other ranks: rows of tokens go there, what the experts make of them comes back.
 *
 * Rows are ordered by expert, and each rank holds a run of experts, so that what goes to a rank lies together. What comes is
 * ordered by rank, then expert; eorder makes it ordered by expert, then rank. */
#include "model/model_priv.h"

#include <string.h>

int64_t local_experts(const tsr_model *m)
{
    return m->spec.experts / (m->o.group != NULL ? m->o.group->ranks : 1);
}

int64_t rows_at_most(const run *r)
{
    const tsr_spec *s = r->spec;
    int64_t local = local_experts(r->m), each = s->top_k < local ? s->top_k : local;
    int64_t n = r->dry ? r->n : r->m->o.max_tokens; /* other ranks may have more tokens than this one */
    return r->m->o.group->ranks * n * each;
}

static tsr_status device_failed(const run *r)
{
    TSR_FAIL(r->err, TSR_E_IO, "%s: cannot copy rows of experts", r->b->name);
}

/* Who gets how much, from both sides. */
static tsr_status tell_counts(run *r, const moe_saved *k, moe_trip *t)
{
    tsr_model *m = r->m;
    const tsr_expert_group *g = m->o.group;
    int64_t e = m->spec.experts, local = local_experts(m), last = 0;
    int64_t *offset = m->counts_in; /* free until the numbers come */
    if (r->b->download(r->b, offset, k->offset, (size_t)(e + 1) * sizeof *offset) != TSR_OK) {
        return device_failed(r);
    }
    for (int64_t i = 0; i < e; i++) {
        m->counts_out[i] = offset[i + 1] - last;
        last = offset[i + 1];
    }
    TSR_TRY(g->counts(g->payload, m->counts_out, m->counts_in, local, r->err));
    for (int32_t i = 0; i < g->ranks; i++) {
        t->sent[i] = t->got[i] = 0;
        for (int64_t j = 0; j < local; j++) {
            t->sent[i] += m->counts_out[i * local + j];
            t->got[i] += m->counts_in[i * local + j];
        }
    }
    return TSR_OK;
}

/* eorder[row by expert] = row as it came; epos the other way; eoffset. */
static tsr_status order_rows(run *r, moe_saved *k)
{
    tsr_model *m = r->m;
    int64_t local = local_experts(m), ranks = m->o.group->ranks, at = 0;
    int32_t *order = m->trip_order, *pos = order + rows_at_most(r);
    int64_t *offset = m->counts_out; /* not needed any more; [local + 1] */
    for (int64_t e = 0; e < local; e++) {
        offset[e] = at;
        for (int64_t i = 0, came = 0; i < ranks; i++) {
            for (int64_t j = 0; j < e; j++) {
                came += m->counts_in[i * local + j];
            }
            for (int64_t n = 0; n < m->counts_in[i * local + e]; n++, at++) {
                order[at] = (int32_t)(came + n);
                pos[came + n] = (int32_t)at;
            }
            for (int64_t j = e; j < local; j++) {
                came += m->counts_in[i * local + j];
            }
        }
    }
    offset[local] = at;
    k->erows = at;
    TSR_ASSERT(at <= rows_at_most(r));
    size_t bytes = (size_t)at * sizeof *order;
    bool ok = at == 0 || (r->b->upload(r->b, k->eorder, order, bytes) == TSR_OK &&
                          r->b->upload(r->b, k->epos, pos, bytes) == TSR_OK);
    ok = ok && r->b->upload(r->b, k->eoffset, offset, (size_t)(local + 1) * sizeof *offset) == TSR_OK;
    return ok ? TSR_OK : device_failed(r);
}

/* from [sent] to the ranks and to [got] back, or the other way round. */
static tsr_status travel(run *r, const moe_trip *t, bool home, const float *from, float *to, int64_t width)
{
    const tsr_expert_group *g = r->m->o.group;
    return g->rows(g->payload, from, home ? t->got : t->sent, to, home ? t->sent : t->got, width, r->err);
}

tsr_status exchange_in(run *r, int32_t layer, moe_saved *k, int64_t width)
{
    moe_trip *t = &r->m->trips[layer];
    int64_t most = rows_at_most(r);
    k->eoffset = ws_bytes(r, (size_t)(local_experts(r->m) + 1) * sizeof *k->eoffset);
    k->eorder = ws_bytes(r, (size_t)most * sizeof *k->eorder);
    k->epos = ws_bytes(r, (size_t)most * sizeof *k->epos);
    k->xe = ws_f32(r, most * width);
    k->ye = ws_f32(r, most * width);
    k->erows = most;
    if (r->dry) {
        return TSR_OK;
    }
    TSR_TRY(tell_counts(r, k, t));
    TSR_TRY(order_rows(r, k));
    TSR_TRY(travel(r, t, false, k->xs, k->ye, width)); /* ye is free until the experts have run */
    RUN(r, moe_gather, .xs = k->xe, .x = k->ye, .order = k->eorder, .n = k->erows, .k = 1, .d = width);
    return TSR_OK;
}

tsr_status exchange_out(run *r, int32_t layer, moe_saved *k, int64_t width)
{
    float *came = ws_f32(r, rows_at_most(r) * width);
    RUN(r, moe_scatter, .dx = came, .dxs = k->ye, .pos = k->epos, .n = k->erows, .k = 1, .d = width);
    return r->dry ? TSR_OK : travel(r, &r->m->trips[layer], true, came, k->y, width);
}

tsr_status exchange_in_bwd(run *r, int32_t layer, const moe_saved *k, const float *dy, float *dye,
                           int64_t width)
{
    float *came = ws_f32(r, rows_at_most(r) * width);
    if (r->dry) {
        return TSR_OK;
    }
    TSR_TRY(travel(r, &r->m->trips[layer], false, dy, came, width));
    RUN(r, moe_gather, .xs = dye, .x = came, .order = k->eorder, .n = k->erows, .k = 1, .d = width);
    return TSR_OK;
}

tsr_status exchange_out_bwd(run *r, int32_t layer, const moe_saved *k, const float *dxe, float *dxs,
                            int64_t width)
{
    float *came = ws_f32(r, rows_at_most(r) * width);
    if (r->dry) {
        return TSR_OK;
    }
    RUN(r, moe_scatter, .dx = came, .dxs = dxe, .pos = k->epos, .n = k->erows, .k = 1, .d = width);
    return travel(r, &r->m->trips[layer], true, came, dxs, width);
}
