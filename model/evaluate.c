/* evaluate.c - windows, chunks, sums. */
#include "model/evaluate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct evaluation {
    tsr_model *m;
    const tsr_evaluate_opts *o;
    tsr_evaluate_result *out;
    tsr_err *err;
    int32_t *ids, *targets; /* [chunk] */
    float *logprob;         /* [chunk] */
    float *logits;          /* [chunk][vocab]; NULL: not wanted */
} evaluation;

static uint64_t now(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Of the ids that the chunk predicts: its first token predicts number `at`. */
static tsr_status add_up(evaluation *e, int64_t at, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        if (e->targets[i] < 0) {
            continue;
        }
        if (!isfinite(e->logprob[i])) {
            TSR_FAIL(
                e->err, TSR_E_NUMERIC,
                "position %lld: the log probability of token %d is not a number (the weights or an earlier "
                "result are broken)",
                (long long)(at + i), e->targets[i]);
        }
        e->out->loss -= (double)e->logprob[i];
        e->out->scored++;
        if (e->o->logprob != NULL) {
            e->o->logprob[at + i] = e->logprob[i];
        }
    }
    return TSR_OK;
}

/* Runs n tokens: a bos in front if asked for, then ids from number `at`. */
static tsr_status run_chunk(evaluation *e, int64_t at, int64_t n, bool bos)
{
    const tsr_evaluate_opts *o = e->o;
    for (int64_t i = 0; i < n; i++) {
        int64_t id = at + i - bos;
        e->ids[i] = id < at ? o->bos : o->ids[id];
        bool again = id < at && at > 0; /* the window before has predicted it */
        e->targets[i] = id + 1 < o->count && !again ? o->ids[id + 1] : -1;
    }
    tsr_forward_args a = { .ids = e->ids,
                           .n = n,
                           .logits = e->logits,
                           .logit_rows = e->logits != NULL ? n : 0,
                           .targets = e->targets,
                           .logprob = e->logprob,
                           .trace = o->trace };
    TSR_TRY(tsr_model_forward(e->m, o->session, &a, e->err));
    e->out->tokens += n;
    if (o->logits != NULL) {
        TSR_TRY(o->logits(o->logits_payload, e->logits, n, e->err));
    }
    return add_up(e, at + 1 - bos, n);
}

static tsr_status windows(evaluation *e)
{
    const tsr_evaluate_opts *o = e->o;
    const tsr_progress *p = o->progress;
    int64_t window = tsr_session_context(o->session);
    for (int64_t at = 0; at < o->count; e->out->windows++) {
        bool bos = o->bos >= 0;
        tsr_session_reset(o->session);
        while (at < o->count && tsr_session_length(o->session) < window) {
            int64_t n = o->count - at + bos, room = window - tsr_session_length(o->session);
            if (p != NULL && p->cancel != NULL && *p->cancel != 0) {
                TSR_FAIL(e->err, TSR_E_CANCELLED, "eval: stopped on request");
            }
            n = n < room ? n : room;
            n = n < o->chunk ? n : o->chunk;
            TSR_TRY(run_chunk(e, at, n, bos));
            at += n - bos;
            bos = false;
            if (p != NULL && p->report != NULL) {
                p->report(p->payload, "eval", (uint64_t)at * sizeof *o->ids,
                          (uint64_t)o->count * sizeof *o->ids);
            }
        }
    }
    return TSR_OK;
}

tsr_status tsr_evaluate(tsr_model *m, const tsr_evaluate_opts *o, tsr_evaluate_result *out, tsr_err *err)
{
    evaluation e = { .m = m, .o = o, .out = out, .err = err };
    size_t n = (size_t)o->chunk, vocab = (size_t)tsr_model_spec(m)->vocab;
    uint64_t begin = now();
    *out = (tsr_evaluate_result){ 0 };
    TSR_ASSERT(o->count >= 1 && o->chunk >= 1);
    if (o->bos >= 0 && tsr_session_context(o->session) < 2) {
        TSR_FAIL(err, TSR_E_USAGE, "windows of one token have no room behind the begin token");
    }
    for (int64_t i = 0; o->logprob != NULL && i < o->count; i++) {
        o->logprob[i] = NAN;
    }
    e.ids = malloc(n * sizeof *e.ids);
    e.targets = malloc(n * sizeof *e.targets);
    e.logprob = malloc(n * sizeof *e.logprob);
    e.logits = o->logits != NULL ? malloc(n * vocab * sizeof *e.logits) : NULL;
    tsr_status st = TSR_OK;
    if (e.ids == NULL || e.targets == NULL || e.logprob == NULL || (o->logits != NULL && e.logits == NULL)) {
        st = TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    }
    st = st == TSR_OK ? windows(&e) : st;
    out->ns = now() - begin;
    free(e.ids);
    free(e.targets);
    free(e.logprob);
    free(e.logits);
    return st;
}
