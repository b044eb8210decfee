/* common.c - see common.h. */
#include "tests/model/common.h"

const char *const backends[] = { "cpu", "avx2", "avx512", "fence", NULL };

void open_files(opened *o, const char *path)
{
    tsr_err err;
    char full[4096];
    (void)snprintf(full, sizeof full, "%s%s%s", path[0] == '/' ? "" : TSR_TEST_DATA,
                   path[0] == '/' ? "" : "/", path);
    CHECK_OK(tsr_view_open(&o->view, full, NULL, NULL, NULL, &err));
    CHECK_OK(tsr_spec_parse(&o->spec, o->view.source->config_json, o->view.source->config_bytes, &err));
    CHECK_OK(tsr_view_weights(&o->source, &o->view, &err));
}

void close_files(opened *o)
{
    tsr_view_weights_done(&o->source);
    tsr_view_close(&o->view);
}

bool open_backend(tsr_backend **b, const char *name, int threads)
{
    tsr_err err;
    tsr_status st = strcmp(name, "fence") == 0 ? tsr_fence_open(b, "auto", threads, &err)
                                               : tsr_backend_open(b, name, threads, &err);
    if (st == TSR_E_UNSUPPORTED) {
        print_message("skipped backend %s: %s\n", name, err.msg);
        return false;
    }
    assert_int_equal(st, TSR_OK);
    return true;
}

void traced_init(traced *t, const tsr_spec *s, int64_t tokens)
{
    *t = (traced){ .tokens = tokens, .spec = s };
    size_t layers = (size_t)s->layers, n = (size_t)tokens;
    t->hidden = calloc(layers * n * (size_t)s->hidden, sizeof *t->hidden);
    t->logits = calloc(n * (size_t)s->vocab, sizeof *t->logits);
    t->ids = calloc(layers * n * (size_t)s->top_k, sizeof *t->ids);
    t->w = calloc(layers * n * (size_t)s->top_k, sizeof *t->w);
    t->state = calloc(layers * (size_t)(s->kda_heads * s->kda_head_dim * s->kda_head_dim), sizeof *t->state);
    assert_true(t->hidden != NULL && t->logits != NULL && t->ids != NULL && t->w != NULL && t->state != NULL);
}

void traced_free(traced *t)
{
    free(t->hidden);
    free(t->logits);
    free(t->ids);
    free(t->w);
    free(t->state);
}

static void on_trace(void *payload, tsr_trace_kind kind, int32_t layer, const void *data, int64_t rows,
                     int64_t cols)
{
    traced *t = payload;
    size_t bytes = (size_t)(rows * cols) * 4;
    int64_t at = (layer * t->tokens + t->at) * cols;
    switch (kind) {
    case TSR_TRACE_HIDDEN: memcpy(t->hidden + at, data, bytes); break;
    case TSR_TRACE_ROUTE_IDS: memcpy(t->ids + at, data, bytes); break;
    case TSR_TRACE_ROUTE_WEIGHTS: memcpy(t->w + at, data, bytes); break;
    case TSR_TRACE_KDA_STATE: memcpy(t->state + layer * rows * cols, data, bytes); break;
    }
}

void run_traced(tsr_model *m, tsr_session *s, const int32_t *ids, int64_t n, int64_t chunk, traced *t)
{
    tsr_err err;
    tsr_trace trace = { t, on_trace };
    for (int64_t at = 0; at < n; at += chunk) {
        int64_t k = n - at < chunk ? n - at : chunk;
        tsr_forward_args a = { .ids = ids + at,
                               .n = k,
                               .logits = t->logits + t->at * t->spec->vocab,
                               .logit_rows = k,
                               .trace = &trace };
        CHECK_OK(tsr_model_forward(m, s, &a, &err));
        t->at += k;
    }
}
