/* layout.c - see layout.h. */
#include "train/layout.h"

#include <stdlib.h>
#include <string.h>

/* ---- what the model asks of the ranks that share experts ------------------------------------------------------------ */

static tsr_status counts(void *payload, const int64_t *send, int64_t *recv, int64_t n, tsr_err *err)
{
    layout *w = payload;
    for (int32_t i = 0; i < w->ep; i++) {
        w->bytes_out[i] = w->bytes_in[i] = (size_t)n * sizeof *send;
    }
    return w->experts->all_to_all(w->experts, send, w->bytes_out, recv, w->bytes_in, err);
}

static tsr_status rows(void *payload, const float *send, const int64_t *send_rows, float *recv,
                       const int64_t *recv_rows, int64_t width, tsr_err *err)
{
    layout *w = payload;
    for (int32_t i = 0; i < w->ep; i++) {
        w->bytes_out[i] = (size_t)(send_rows[i] * width) * sizeof *send;
        w->bytes_in[i] = (size_t)(recv_rows[i] * width) * sizeof *recv;
    }
    return w->experts->all_to_all(w->experts, send, w->bytes_out, recv, w->bytes_in, err);
}

/* ---- what it asks of the ranks that share a sequence ------------------------------------------------------------------- */

static tsr_status send_to(void *payload, int32_t to, const void *data, size_t bytes, tsr_err *err)
{
    layout *w = payload;
    return w->line->send(w->line, data, bytes, to, err);
}

static tsr_status receive_from(void *payload, int32_t from, void *data, size_t bytes, tsr_err *err)
{
    layout *w = payload;
    return w->line->receive(w->line, data, bytes, from, err);
}

static tsr_status gather(void *payload, const void *send, void *recv, size_t bytes, tsr_err *err)
{
    layout *w = payload;
    return w->line->all_gather(w->line, send, recv, bytes, err);
}

static tsr_status sum(void *payload, float *data, int64_t n, tsr_err *err)
{
    layout *w = payload;
    return w->line->all_reduce(w->line, data, (size_t)n, TSR_SUM_F32, err);
}

/* ---- groups -------------------------------------------------------------------------------------------------------------- */

static tsr_status check(const layout *w, const tsr_recipe *r, const tsr_backend *b, tsr_err *err)
{
    int32_t ranks = w->all->ranks, others = w->ep * w->cp,
            dp = r->parallel.dp > 0   ? r->parallel.dp
                 : ranks / others > 0 ? ranks / others
                                      : 1;
    if (dp * others != ranks) {
        TSR_FAIL(err, TSR_E_USAGE,
                 "%d ranks cannot be ep %d x dp %d x cp %d (start %d, or change the recipe's parallel)",
                 ranks, w->ep, dp, w->cp, dp * others);
    }
    if (r->spec->experts % w->ep != 0) {
        TSR_FAIL(err, TSR_E_USAGE, "%lld experts do not fall evenly on ep %d", (long long)r->spec->experts,
                 w->ep);
    }
    if (ranks > 1 && (!b->host || r->balance.kind == TSR_BALANCE_QUANTILE_EXACT)) {
        TSR_FAIL(
            err, TSR_E_UNSUPPORTED,
            "more than one rank needs a backend with host memory, and balance.kind quantile, sign or off");
    }
    return TSR_OK;
}

tsr_status layout_make(layout *w, tsr_dist *all, const tsr_recipe *r, const tsr_backend *b, tsr_err *err)
{
    *w = (layout){ .all = all, .copies = all };
    w->ep = r->parallel.ep > 0 ? r->parallel.ep : 1;
    w->cp = r->parallel.cp > 0 ? r->parallel.cp : 1;
    TSR_TRY(check(w, r, b, err));
    w->local_experts = (uint32_t)(r->spec->experts / w->ep);
    w->first_expert = (uint32_t)(all->rank % w->ep) * w->local_experts;
    if (w->cp > 1) {
        TSR_TRY(all->split(all, all->rank / w->cp, &w->line, err));
        w->sequence = (tsr_sequence_line){ w, w->line->rank, w->cp, send_to, receive_from, gather, sum };
    }
    if (w->ep == 1) {
        return TSR_OK;
    }
    w->bytes_out = calloc((size_t)w->ep, sizeof *w->bytes_out);
    w->bytes_in = calloc((size_t)w->ep, sizeof *w->bytes_in);
    if (w->bytes_out == NULL || w->bytes_in == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    TSR_TRY(all->split(all, all->rank / w->ep, &w->experts, err));
    w->copies = NULL;
    TSR_TRY(all->split(all, all->rank % w->ep, &w->copies, err));
    w->group = (tsr_expert_group){ w, w->experts->rank, w->ep, counts, rows };
    return TSR_OK;
}

void layout_done(layout *w)
{
    if (w->copies != w->all) {
        tsr_dist_close(&w->copies);
    }
    tsr_dist_close(&w->experts);
    tsr_dist_close(&w->line);
    free(w->bytes_out);
    free(w->bytes_in);
    w->bytes_out = w->bytes_in = NULL;
}
