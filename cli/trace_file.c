/* trace_file.c - traces into memory, then into a file. */
#include "cli/trace_file.h"
#include "cli/out.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define FILE_NAME "trace.safetensors"

typedef struct layer_trace {
    int64_t rows; /* of the hidden states so far */
    int64_t route_rows, weight_rows;
    int32_t *ids;     /* [tokens][k] */
    float *weights;   /* [tokens][k] */
    float *state;     /* [heads dk][dv] */
    uint64_t *counts; /* [experts] */
} layer_trace;

struct tsr_trace_file {
    const tsr_spec *s;
    int64_t tokens, logit_rows;
    bool wanted, failed; /* failed: out of memory, or more rows than were announced */
    float *hidden;       /* [layers][tokens][hidden] */
    float *logits;       /* [tokens][vocab] */
    layer_trace *layers;
    tsr_trace trace;
};

static void *room(tsr_trace_file *t, int64_t rows, int64_t cols, size_t size)
{
    uint64_t n;
    void *p = tsr_mul_u64((uint64_t)rows * size, (uint64_t)cols, &n) && n < SIZE_MAX / 2
                  ? malloc((size_t)n + 1)
                  : NULL;
    t->failed = t->failed || p == NULL;
    return p;
}

/* ---- taking ----------------------------------------------------------------------------------------------------- */

static void put_rows(tsr_trace_file *t, void *dst, int64_t *at, const void *data, int64_t rows, int64_t cols)
{
    if (t->failed || *at + rows > t->tokens) {
        t->failed = true;
        return;
    }
    memcpy((char *)dst + (size_t)(*at * cols) * 4, data, (size_t)(rows * cols) * 4);
    *at += rows;
}

static void take_routing(tsr_trace_file *t, layer_trace *l, const int32_t *ids, int64_t n)
{
    if (l->counts == NULL) {
        l->counts = calloc((size_t)t->s->experts, sizeof *l->counts);
        t->failed = t->failed || l->counts == NULL;
    }
    for (int64_t i = 0; l->counts != NULL && i < n; i++) {
        l->counts[ids[i]]++;
    }
}

static void take(void *payload, tsr_trace_kind kind, int32_t layer, const void *data, int64_t rows,
                 int64_t cols)
{
    tsr_trace_file *t = payload;
    layer_trace *l = &t->layers[layer];
    if (kind == TSR_TRACE_ROUTE_IDS) {
        take_routing(t, l, data, rows * cols);
    }
    if (!t->wanted || t->failed) {
        return;
    }
    switch (kind) {
    case TSR_TRACE_HIDDEN:
        put_rows(t, t->hidden + (int64_t)layer * t->tokens * cols, &l->rows, data, rows, cols);
        break;
    case TSR_TRACE_ROUTE_IDS:
        l->ids = l->ids != NULL ? l->ids : room(t, t->tokens, cols, 4);
        put_rows(t, l->ids, &l->route_rows, data, rows, cols);
        break;
    case TSR_TRACE_ROUTE_WEIGHTS:
        l->weights = l->weights != NULL ? l->weights : room(t, t->tokens, cols, 4);
        put_rows(t, l->weights, &l->weight_rows, data, rows, cols);
        break;
    case TSR_TRACE_KDA_STATE:
        l->state = l->state != NULL ? l->state : room(t, rows, cols, 4);
        if (l->state != NULL) {
            memcpy(l->state, data, (size_t)(rows * cols) * 4);
        }
        break;
    }
}

tsr_status tsr_trace_file_logits(void *payload, const float *logits, int64_t rows, tsr_err *err)
{
    tsr_trace_file *t = payload;
    (void)err;
    put_rows(t, t->logits, &t->logit_rows, logits, rows, t->s->vocab);
    return TSR_OK;
}

tsr_status tsr_trace_file_open(tsr_trace_file **out, const tsr_spec *s, int64_t tokens, bool wanted,
                               tsr_err *err)
{
    tsr_trace_file *t = calloc(1, sizeof *t);
    *out = t;
    if (t != NULL) {
        *t = (tsr_trace_file){ .s = s, .tokens = tokens, .wanted = wanted, .trace = { t, take } };
        t->layers = calloc((size_t)s->layers, sizeof *t->layers);
        if (wanted) {
            t->hidden = room(t, tokens, s->layers * s->hidden, 4);
            t->logits = room(t, tokens, s->vocab, 4);
        }
    }
    if (t == NULL || t->layers == NULL || t->failed) {
        tsr_trace_file_close(out);
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory: a trace of %lld tokens", (long long)tokens);
    }
    return TSR_OK;
}

void tsr_trace_file_close(tsr_trace_file **pt)
{
    tsr_trace_file *t = *pt;
    if (t == NULL) {
        return;
    }
    *pt = NULL;
    for (int32_t i = 0; t->layers != NULL && i < t->s->layers; i++) {
        free(t->layers[i].ids);
        free(t->layers[i].weights);
        free(t->layers[i].state);
        free(t->layers[i].counts);
    }
    free(t->layers);
    free(t->hidden);
    free(t->logits);
    free(t);
}

const tsr_trace *tsr_trace_file_trace(tsr_trace_file *t)
{
    return &t->trace;
}

const uint64_t *tsr_trace_file_counts(const tsr_trace_file *t, int32_t layer)
{
    return t->layers[layer].counts;
}

/* ---- writing ---------------------------------------------------------------------------------------------------- */

/* Two passes over the same list: heads, then data. */
typedef struct writer {
    FILE *f;
    json_t *head;
    uint64_t at;
    bool data;
} writer;

static void put_tensor(writer *w, const char *name, const char *dtype, const void *data, size_t size,
                       int rank, const int64_t *shape)
{
    uint64_t bytes = size;
    for (int i = 0; i < rank; i++) {
        bytes *= (uint64_t)shape[i];
    }
    if (w->data) {
        (void)fwrite(data, 1, bytes, w->f); /* a failure shows when the file is closed */
        return;
    }
    json_t *o = json_object(), *offsets = json_array();
    tsr_json_append(&offsets, tsr_json_u64(w->at));
    tsr_json_append(&offsets, tsr_json_u64(w->at + bytes));
    tsr_json_set(&o, "dtype", tsr_json_text(dtype));
    tsr_json_set(&o, "shape", tsr_json_shape(rank, shape));
    tsr_json_set(&o, "data_offsets", offsets);
    tsr_json_set(&w->head, name, o);
    w->at += bytes;
}

static void put_all(writer *w, const tsr_trace_file *t, const int64_t *ids)
{
    const tsr_spec *s = t->s;
    char name[40];
    put_tensor(w, "ids", "I64", ids, 8, 1, &t->tokens);
    put_tensor(w, "hidden", "F32", t->hidden, 4, 3, (int64_t[]){ s->layers, t->tokens, s->hidden });
    put_tensor(w, "logits", "F32", t->logits, 4, 2, (int64_t[]){ t->tokens, s->vocab });
    for (int32_t i = 0; i < s->layers; i++) {
        const layer_trace *l = &t->layers[i];
        int64_t shape[] = { t->tokens, s->top_k };
        if (l->ids != NULL && l->weights != NULL) {
            (void)snprintf(name, sizeof name, "route_ids.%d", i);
            put_tensor(w, name, "I32", l->ids, 4, 2, shape);
            (void)snprintf(name, sizeof name, "route_weights.%d", i);
            put_tensor(w, name, "F32", l->weights, 4, 2, shape);
        }
    }
    for (int32_t i = 0; i < s->layers; i++) {
        if (t->layers[i].state != NULL) {
            (void)snprintf(name, sizeof name, "kda_state.%d", i);
            put_tensor(w, name, "F32", t->layers[i].state, 4, 3,
                       (int64_t[]){ s->kda_heads, s->kda_head_dim, s->kda_head_dim });
        }
    }
}

static tsr_status write_to(FILE *f, const tsr_trace_file *t, const int64_t *ids, tsr_err *err)
{
    static const char blanks[8] = "        ";
    writer w = { .f = f, .head = json_object() };
    put_all(&w, t, ids);
    char *text = w.head != NULL ? json_dumps(w.head, JSON_COMPACT) : NULL;
    json_decref(w.head);
    if (text == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    size_t n = strlen(text), fill = (8 - n % 8) % 8;
    uint64_t bytes = n + fill;                /* little-endian, as all hosts that are built for */
    (void)fwrite(&bytes, sizeof bytes, 1, f); /* failures show when the file is closed */
    (void)fwrite(text, 1, n, f);
    (void)fwrite(blanks, 1, fill, f);
    free(text);
    w.data = true;
    put_all(&w, t, ids);
    return TSR_OK;
}

static tsr_status file_name(char **out, const char *dir, tsr_err *err)
{
    if (asprintf(out, "%s/" FILE_NAME, dir) < 0) {
        *out = NULL;
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    return TSR_OK;
}

tsr_status tsr_trace_file_check(const char *dir, tsr_err *err)
{
    char *name;
    TSR_TRY(file_name(&name, dir, err));
    bool taken = access(name, F_OK) == 0;
    free(name);
    if (taken) {
        TSR_FAIL(err, TSR_E_CONFLICT,
                 "%s/" FILE_NAME ": exists already (choose another folder, or remove it)", dir);
    }
    return TSR_OK;
}

tsr_status tsr_trace_file_write(const tsr_trace_file *t, const char *dir, const int32_t *ids, tsr_err *err)
{
    TSR_ASSERT(t->wanted && t->logit_rows <= t->tokens);
    char *name;
    tsr_out_file o;
    bool made = mkdir(dir, 0777) == 0;
    if (t->failed) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory: a trace of %lld tokens", (long long)t->tokens);
    }
    if (!made && errno != EEXIST) {
        TSR_FAIL(err, errno == ENOENT ? TSR_E_MISSING : TSR_E_IO, "%s: cannot be made: %s", dir,
                 strerror(errno));
    }
    TSR_TRY(file_name(&name, dir, err));
    int64_t *wide = malloc((size_t)t->tokens * sizeof *wide);
    tsr_status st = wide != NULL ? tsr_out_file_open(&o, name, err)
                                 : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    if (st == TSR_OK) {
        for (int64_t i = 0; i < t->tokens; i++) {
            wide[i] = ids[i];
        }
        st = tsr_out_file_close(&o, write_to(o.f, t, wide, err), err);
    }
    if (st != TSR_OK && made) {
        (void)rmdir(dir);
    }
    free(wide);
    free(name);
    return st;
}
