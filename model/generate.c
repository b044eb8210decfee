/* generate.c - the loop around forward and sampler. */
#include "model/generate.h"
#include "model/stop_text.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct generator {
    tsr_model *m;
    const tsr_generate_opts *o;
    tsr_generate_result *out;
    tsr_err *err;
    float *logits; /* [vocab] of the last position */
    tsr_detok detok;
    stop_text text;
    uint64_t begin;
    bool ended;
} generator;

const char *tsr_stop_name(tsr_stop s)
{
    static const char *const names[] = { "length", "end", "text", "context", "caller" };
    return (unsigned)s < sizeof names / sizeof *names ? names[s] : "?";
}

static uint64_t now(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---- running -------------------------------------------------------------------------------------------------- */

typedef struct mark {
    uint64_t ns;
    tsr_experts_stats experts;
} mark;

static mark begin_part(generator *g)
{
    mark k = { .ns = now() };
    g->out->cached = tsr_model_expert_stats(g->m, &k.experts);
    return k;
}

static void end_part(generator *g, tsr_generate_part *p, const mark *k, int64_t tokens)
{
    tsr_experts_stats e, *sum = &p->experts;
    (void)tsr_model_expert_stats(g->m, &e);
    p->tokens += tokens;
    p->ns += now() - k->ns;
    sum->asked += e.asked - k->experts.asked;
    sum->hits += e.hits - k->experts.hits;
    sum->misses += e.misses - k->experts.misses;
    sum->prefetched += e.prefetched - k->experts.prefetched;
    sum->bytes_read += e.bytes_read - k->experts.bytes_read;
    sum->wait_ns += e.wait_ns - k->experts.wait_ns;
}

static tsr_status go_on(const generator *g)
{
    if (g->o->cancel != NULL && *g->o->cancel != 0) {
        TSR_FAIL(g->err, TSR_E_CANCELLED, "generate: stopped on request");
    }
    return TSR_OK;
}

static tsr_status prefill(generator *g)
{
    const tsr_generate_opts *o = g->o;
    mark k = begin_part(g);
    for (int64_t at = 0; at < o->prompt_count; at += o->chunk) {
        int64_t n = o->prompt_count - at < o->chunk ? o->prompt_count - at : o->chunk;
        bool last = at + n == o->prompt_count && o->max_tokens > 0;
        TSR_TRY(go_on(g));
        tsr_forward_args a = {
            .ids = o->prompt + at, .n = n, .logits = last ? g->logits : NULL, .logit_rows = last
        };
        TSR_TRY(tsr_model_forward(g->m, o->session, &a, g->err));
    }
    end_part(g, &g->out->prefill, &k, o->prompt_count);
    return TSR_OK;
}

/* One made token through the model; logits only when another one follows. */
static tsr_status run_token(generator *g, int32_t id, bool follow)
{
    mark k = begin_part(g);
    tsr_forward_args a = { .ids = &id, .n = 1, .logits = follow ? g->logits : NULL, .logit_rows = follow };
    TSR_TRY(go_on(g));
    TSR_TRY(tsr_model_forward(g->m, g->o->session, &a, g->err));
    end_part(g, &g->out->decode, &k, 1);
    return TSR_OK;
}

/* ---- giving out ------------------------------------------------------------------------------------------------ */

static void end(generator *g, tsr_stop why)
{
    if (!g->ended) {
        g->ended = true;
        g->out->stop = why;
    }
}

static bool is_stop(const tsr_generate_opts *o, int32_t id)
{
    for (size_t i = 0; i < o->stop_id_count; i++) {
        if (o->stop_ids[i] == id) {
            return true;
        }
    }
    return false;
}

static tsr_status call(generator *g, const tsr_generated *made)
{
    bool stop = false;
    if (g->o->fn != NULL) {
        TSR_TRY(g->o->fn(g->o->payload, made, &stop, g->err));
    }
    if (stop) {
        end(g, TSR_STOP_CALLER);
    }
    return TSR_OK;
}

static tsr_status give(generator *g, int32_t id, int64_t position)
{
    const tsr_generate_opts *o = g->o;
    tsr_generated made = { .id = id, .position = position, .logits = g->logits };
    if (is_stop(o, id)) {
        end(g, TSR_STOP_ID);
    } else if (o->tok != NULL && tsr_tokenizer_token(o->tok, id).p != NULL) {
        bool found;
        TSR_TRY(tsr_detok_push(&g->detok, o->tok, id, &g->text.held, g->err));
        made.text = stop_text_take(&g->text, false, &found);
        if (found) {
            end(g, TSR_STOP_TEXT);
        }
    }
    return call(g, &made);
}

/* Text that waited for more. */
static tsr_status give_rest(generator *g)
{
    bool found;
    tsr_generated rest = { .id = -1, .position = tsr_session_length(g->o->session) };
    if (g->o->tok == NULL || g->out->stop == TSR_STOP_TEXT) {
        return TSR_OK;
    }
    TSR_TRY(tsr_detok_finish(&g->detok, &g->text.held, g->err));
    rest.text = stop_text_take(&g->text, true, &found);
    if (found) {
        g->out->stop = TSR_STOP_TEXT;
    }
    return rest.text.bytes > 0 ? call(g, &rest) : TSR_OK;
}

static tsr_status decode(generator *g)
{
    const tsr_generate_opts *o = g->o;
    while (!g->ended) {
        int32_t id;
        int64_t at = tsr_session_length(o->session);
        TSR_TRY(tsr_sampler_pick(o->sampler, g->logits, at, &id, g->err));
        if (g->out->tokens++ == 0) {
            g->out->first_token_ns = now() - g->begin;
        }
        TSR_TRY(give(g, id, at));
        bool room = at < tsr_session_context(o->session);
        if (g->out->tokens == o->max_tokens) {
            end(g, TSR_STOP_LENGTH);
        } else if (!room) {
            end(g, TSR_STOP_CONTEXT);
        }
        if (!g->ended || (o->run_last && room)) {
            TSR_TRY(run_token(g, id, !g->ended));
        }
    }
    return give_rest(g);
}

tsr_status tsr_generate(tsr_model *m, const tsr_generate_opts *o, tsr_generate_result *out, tsr_err *err)
{
    const tsr_spec *s = tsr_model_spec(m);
    generator g = { .m = m, .o = o, .out = out, .err = err, .begin = now() };
    *out = (tsr_generate_result){ .stop = TSR_STOP_LENGTH };
    TSR_ASSERT(o->prompt_count >= 1 && o->max_tokens >= 0);
    TSR_ASSERT(o->chunk >= 1);
    int64_t room = tsr_session_context(o->session) - tsr_session_length(o->session);
    if (o->prompt_count > room) {
        TSR_FAIL(err, TSR_E_LIMIT, "a prompt of %lld tokens does not fit: the session has room for %lld",
                 (long long)o->prompt_count, (long long)room);
    }
    g.detok.flags = o->decode;
    g.text.texts = o->stop_texts;
    g.logits = malloc((size_t)s->vocab * sizeof *g.logits);
    if (g.logits == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    tsr_status st = prefill(&g);
    if (st == TSR_OK && o->max_tokens > 0) {
        st = decode(&g);
    }
    free(g.logits);
    tsr_bytes_free(&g.text.held);
    return st;
}
