/* forward.c - a run through all layers: inference into a session, training with its loss and backward. */
#include "model/layers/head.h"

#include <string.h>

/* Attention residuals keep the sum of each block of layers. */
static int64_t bank_slots(const tsr_spec *s)
{
    return s->res_block > 0 ? (s->layers + s->res_block - 1) / s->res_block : 0;
}

static bool uploaded(run *r, void *dst, const void *src, size_t bytes)
{
    return r->dry || r->b->upload(r->b, dst, src, bytes) == TSR_OK;
}

static tsr_status check_ids(const tsr_model *m, const int32_t *ids, int64_t n, bool negative,
                            const char *what, tsr_err *err)
{
    for (int64_t i = 0; i < n; i++) {
        if (ids[i] >= m->spec.vocab || (ids[i] < 0 && !negative)) {
            TSR_FAIL(err, TSR_E_USAGE, "%s %lld: id %d is not in the vocabulary of %lld", what, (long long)i,
                     ids[i], (long long)m->spec.vocab);
        }
    }
    return TSR_OK;
}

static run begin(tsr_model *m, const tsr_batch *in, tsr_session *s, bool dry, tsr_err *err)
{
    m->ws.used = 0;
    return (run){ .m = m,
                  .b = m->b,
                  .spec = &m->spec,
                  .ws = &m->ws,
                  .dry = dry,
                  .train = m->o.train,
                  .n = in->n,
                  .segs = in->segs,
                  .seg = m->seg,
                  .ids = m->ids,
                  .targets = m->targets,
                  .s = s,
                  .trace = in->trace,
                  .watch = in->watch,
                  .done = in->done,
                  .total = in->total,
                  .before = in->before,
                  .goes_on = in->goes_on,
                  .err = err };
}

/* ---- inference ----------------------------------------------------------------------------------------------- */

static tsr_status infer(run *r, const tsr_forward_args *a)
{
    tsr_model *m = r->m;
    int64_t size = r->n * r->spec->hidden, seg[2] = { 0, r->n };
    float *cur = ws_f32(r, size);
    r->bank = ws_f32(r, bank_slots(r->spec) * size);
    if (!uploaded(r, m->ids, a->ids, (size_t)r->n * sizeof *a->ids) ||
        !uploaded(r, m->seg, seg, sizeof seg)) {
        TSR_FAIL(r->err, TSR_E_IO, "%s: cannot copy to the device", r->b->name);
    }
    TSR_TRY(embed_forward(r, cur));
    for (int32_t i = 0; i < r->spec->layers; i++) {
        size_t mark = ws_mark(r);
        layer_saved k = { .cur2 = cur };
        TSR_TRY(layer_forward(r, i, cur, &k));
        ws_release(r, mark);
    }
    final_saved k;
    if (!r->dry && a->logits == NULL && a->logprob == NULL) {
        return TSR_OK;
    }
    TSR_TRY(final_forward(r, cur, &k));
    size_t mark = ws_mark(r);
    if (r->dry || a->logprob != NULL) {
        if (!uploaded(r, m->targets, a->targets, (size_t)r->n * sizeof *a->targets)) {
            TSR_FAIL(r->err, TSR_E_IO, "%s: cannot copy to the device", r->b->name);
        }
        TSR_TRY(head_losses(r, k.normed, m->losses, m->lse));
        ws_release(r, mark);
    }
    if (!r->dry && a->logprob != NULL) {
        if (r->b->download(r->b, a->logprob, m->losses, (size_t)r->n * sizeof(float)) != TSR_OK) {
            TSR_FAIL(r->err, TSR_E_IO, "%s: cannot read back losses", r->b->name);
        }
        for (int64_t i = 0; i < r->n; i++) {
            a->logprob[i] = a->targets[i] >= 0 ? -a->logprob[i] : 0;
        }
    }
    return r->dry || a->logits != NULL
               ? head_logits(r, k.normed, r->dry ? 0 : r->n - a->logit_rows, a->logits)
               : TSR_OK;
}

tsr_status tsr_model_forward(tsr_model *m, tsr_session *s, const tsr_forward_args *a, tsr_err *err)
{
    TSR_ASSERT(!m->o.train && s->m == m);
    TSR_ASSERT(a->logits == NULL || (a->logit_rows >= 1 && a->logit_rows <= a->n));
    TSR_ASSERT(a->logprob == NULL || a->targets != NULL);
    if (a->n < 1 || a->n > m->o.max_tokens) {
        TSR_FAIL(err, TSR_E_USAGE, "%lld tokens at once: this model was opened for 1 to %lld",
                 (long long)a->n, (long long)m->o.max_tokens);
    }
    if (a->n > s->context - s->length) {
        TSR_FAIL(err, TSR_E_LIMIT, "%lld more tokens do not fit: the session has %lld of %lld positions",
                 (long long)a->n, (long long)s->length, (long long)s->context);
    }
    TSR_TRY(check_ids(m, a->ids, a->n, false, "token", err));
    if (a->logprob != NULL) {
        TSR_TRY(check_ids(m, a->targets, a->n, true, "target", err));
    }
    tsr_batch in = { .n = a->n, .segs = 1, .trace = a->trace };
    run r = begin(m, &in, s, false, err);
    TSR_TRY(infer(&r, a));
    if (m->b->sync(m->b) != TSR_OK) {
        TSR_FAIL(err, TSR_E_IO, "%s: %s", m->b->name, tsr_backend_trouble(m->b));
    }
    s->length += a->n;
    return TSR_OK;
}

/* ---- training ------------------------------------------------------------------------------------------------- */

/* Layers of one training forward; with recompute only the running sums stay. */
static tsr_status train_layers(run *r)
{
    tsr_model *m = r->m;
    int64_t size = r->n * r->spec->hidden;
    float *cur = ws_f32(r, size);
    r->bank = ws_f32(r, bank_slots(r->spec) * size);
    TSR_TRY(embed_forward(r, cur));
    for (int32_t i = 0; i < r->spec->layers; i++) {
        layer_saved *k = &m->saved[i];
        *k = (layer_saved){ .cur2 = ws_f32(r, size) };
        size_t mark = ws_mark(r);
        TSR_TRY(layer_forward(r, i, cur, k));
        if (m->o.recompute) {
            ws_release(r, mark);
        }
        cur = k->cur2;
    }
    return final_forward(r, cur, &m->final);
}

static tsr_status layer_done(run *r, int32_t layer)
{
    return r->done == NULL || r->dry ? TSR_OK : r->done->fn(r->done->payload, layer, r->err);
}

static tsr_status train_backward(run *r, double scale)
{
    tsr_model *m = r->m;
    int64_t size = r->n * r->spec->hidden, slots = bank_slots(r->spec);
    float *dcur = ws_f32(r, size), *dnormed = ws_f32(r, size);
    r->dbank = ws_f32(r, slots * size);
    if (!r->dry && r->b->zero(r->b, r->dbank, (size_t)(slots * size) * sizeof(float)) != TSR_OK) {
        TSR_FAIL(r->err, TSR_E_IO, "%s: cannot clear memory", r->b->name);
    }
    size_t mark = ws_mark(r);
    TSR_TRY(head_backward(r, m->final.normed, m->lse, scale, dnormed));
    ws_release(r, mark);
    r->banks = slots;
    TSR_TRY(final_backward(r, dnormed, dcur, &m->final));
    for (int32_t i = r->spec->layers - 1; i >= 0; i--) {
        layer_saved *k = &m->saved[i];
        if (m->o.recompute) {
            const tsr_trace *trace = r->trace;
            layer_saved again = { .cur2 = ws_f32(r, size) };
            r->banks = k->banks;
            r->trace = NULL;
            TSR_TRY(layer_forward(r, i, k->cur0, &again));
            r->trace = trace;
            TSR_TRY(layer_backward(r, i, dcur, &again));
        } else {
            TSR_TRY(layer_backward(r, i, dcur, k));
        }
        ws_release(r, mark);
        TSR_TRY(layer_done(r, i));
    }
    TSR_TRY(embed_backward(r, dcur));
    return layer_done(r, -1);
}

tsr_status tsr_model_loss(tsr_model *m, const tsr_batch *in, tsr_loss *out, tsr_err *err)
{
    TSR_ASSERT(m->o.train);
    m->can_go_back = false;
    bool ok = in->n >= 1 && in->n <= m->o.max_tokens && in->segs >= 1 && in->segs <= m->o.max_segs &&
              in->seg[0] == 0 && in->seg[in->segs] == in->n;
    for (int64_t i = 0; ok && i < in->segs; i++) {
        ok = in->seg[i] <= in->seg[i + 1];
    }
    if (!ok) {
        TSR_FAIL(err, TSR_E_USAGE,
                 "a batch of %lld tokens in %lld segments: this model was opened for %lld in %lld, and "
                 "borders must ascend from 0 to the end",
                 (long long)in->n, (long long)in->segs, (long long)m->o.max_tokens, (long long)m->o.max_segs);
    }
    TSR_ASSERT(in->total == 0 || (m->o.line != NULL && in->n >= TSR_LINE_LEAST && in->n <= in->total));
    TSR_TRY(check_ids(m, in->ids, in->n, false, "token", err));
    TSR_TRY(check_ids(m, in->targets, in->n, true, "target", err));
    run r = begin(m, in, NULL, false, err);
    if (!uploaded(&r, m->ids, in->ids, (size_t)in->n * sizeof *in->ids) ||
        !uploaded(&r, m->targets, in->targets, (size_t)in->n * sizeof *in->targets) ||
        !uploaded(&r, m->seg, in->seg, (size_t)(in->segs + 1) * sizeof *in->seg)) {
        TSR_FAIL(err, TSR_E_IO, "%s: cannot copy to the device", r.b->name);
    }
    TSR_TRY(train_layers(&r));
    size_t mark = ws_mark(&r);
    TSR_TRY(head_losses(&r, m->final.normed, m->losses, m->lse));
    ws_release(&r, mark);
    if (r.b->download(r.b, m->host_f32, m->losses, (size_t)in->n * sizeof(float)) != TSR_OK) {
        TSR_FAIL(err, TSR_E_IO, "%s: cannot read back losses", r.b->name);
    }
    *out = (tsr_loss){ 0 };
    for (int64_t i = 0; i < in->n; i++) {
        out->sum += (double)m->host_f32[i];
        out->count += in->targets[i] >= 0;
    }
    r.trace = NULL;
    r.watch = NULL; /* not again when backward recomputes */
    m->last = r;
    m->can_go_back = true;
    return TSR_OK;
}

const float *tsr_model_losses(const tsr_model *m)
{
    return m->host_f32;
}

tsr_status tsr_model_backward(tsr_model *m, double scale, tsr_err *err)
{
    TSR_ASSERT(m->o.train);
    if (!m->can_go_back) {
        TSR_FAIL(err, TSR_E_USAGE, "backward without a loss before it");
    }
    m->can_go_back = false;
    run r = m->last;
    r.err = err;
    TSR_TRY(train_backward(&r, scale));
    if (m->b->sync(m->b) != TSR_OK) {
        TSR_FAIL(err, TSR_E_IO, "%s: %s", m->b->name, tsr_backend_trouble(m->b));
    }
    return TSR_OK;
}

/* ---- memory of a run, by running dry ---------------------------------------------------------------------------- */

size_t run_bytes(tsr_model *m, int64_t n, int64_t segs)
{
    tsr_err err;
    tsr_batch in = { .n = n, .segs = segs };
    m->ws = (stack){ .base = (char *)(uintptr_t)4096 };
    run r = begin(m, &in, NULL, true, &err);
    tsr_status st;
    if (m->o.train) {
        st = train_layers(&r);
        size_t mark = ws_mark(&r);
        st = st == TSR_OK ? head_losses(&r, m->final.normed, NULL, NULL) : st;
        ws_release(&r, mark);
        st = st == TSR_OK ? train_backward(&r, 1) : st;
    } else {
        st = infer(&r, &(tsr_forward_args){ .n = n });
    }
    TSR_ASSERT(st == TSR_OK);
    return m->ws.peak;
}
