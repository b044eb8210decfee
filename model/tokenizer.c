/* tokenizer.c - opening a tokenizer, looking tokens up, and the way from text to ids. */
#include "model/tokenizer_priv.h"
#include "model/utf8.h"

#include <stdlib.h>
#include <string.h>

#define PIECE_CHARS_MAX ((size_t)1 << 24)

tsr_span tsr_span_of(const char *s)
{
    return (tsr_span){ s, s != NULL ? strlen(s) : 0 };
}

tsr_status tok_grow(void **p, size_t *room, size_t count, size_t item, tsr_err *err)
{
    if (count <= *room) {
        return TSR_OK;
    }
    size_t more = *room < 32 ? 64 : *room * 2;
    more = more < count ? count : more;
    uint64_t bytes;
    void *grown = tsr_mul_u64(more, item, &bytes) && bytes < SIZE_MAX / 2 ? realloc(*p, (size_t)bytes) : NULL;
    if (grown == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "tokenizer: out of memory for %zu items of %zu bytes", more, item);
    }
    *p = grown;
    *room = more;
    return TSR_OK;
}

tsr_status tok_push(tsr_tokens *out, int32_t id, tsr_err *err)
{
    if (out->count == out->room) {
        TSR_TRY(tok_grow((void **)&out->ids, &out->room, out->count + 1, sizeof *out->ids, err));
    }
    out->ids[out->count++] = id;
    return TSR_OK;
}

tsr_status tok_append(tsr_bytes *out, const void *p, size_t n, tsr_err *err)
{
    TSR_TRY(tok_grow((void **)&out->p, &out->room, out->count + n, 1, err));
    if (n > 0) {
        memcpy(out->p + out->count, p, n);
    }
    out->count += n;
    return TSR_OK;
}

void tsr_tokens_free(tsr_tokens *t)
{
    free(t->ids);
    *t = (tsr_tokens){ 0 };
}

void tsr_bytes_free(tsr_bytes *b)
{
    free(b->p);
    *b = (tsr_bytes){ 0 };
}

/* ---- opening ------------------------------------------------------------------------------------ */

static tsr_status fill(tsr_tokenizer *t, const tsr_tokenizer_opts *o, tsr_err *err)
{
    t->piece_chars = o->piece_chars > 0 ? o->piece_chars : TSR_SPLIT_PIECE_CHARS;
    t->run_chars = o->run_chars > 0 ? o->run_chars : TSR_SPLIT_RUN_CHARS;
    if (t->piece_chars > PIECE_CHARS_MAX) {
        TSR_FAIL(err, TSR_E_USAGE, "tokenizer: pieces of %zu characters (limit %zu)", t->piece_chars,
                 PIECE_CHARS_MAX);
    }
    t->built_in = o->ranks.p == NULL;
    const char *name = o->ranks_name != NULL ? o->ranks_name : "tiktoken.model";
    TSR_TRY(t->built_in ? vocab_from_bytes(&t->vocab, err)
                        : vocab_from_ranks(&t->vocab, o->ranks, name, err));
    if (o->vocab > 0 && t->vocab.id_count > o->vocab) {
        TSR_FAIL(err, TSR_E_CONFLICT, "%s: rank %d is outside the vocabulary of %lld",
                 t->built_in ? "tokenizer" : name, t->vocab.id_count - 1, (long long)o->vocab);
    }
    TSR_TRY(added_fill(&t->added, &t->vocab, o, err));
    return pretoken_open(&t->pattern, o->pattern, o->no_jit, err);
}

tsr_status tsr_tokenizer_open(tsr_tokenizer **out, const tsr_tokenizer_opts *opts, tsr_err *err)
{
    tsr_tokenizer *t = *out = calloc(1, sizeof *t);
    if (t == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "tokenizer: out of memory");
    }
    tsr_status st = fill(t, opts, err);
    if (st != TSR_OK) {
        tsr_tokenizer_close(out);
    }
    return st;
}

void tsr_tokenizer_close(tsr_tokenizer **t)
{
    if (t == NULL || *t == NULL) {
        return;
    }
    vocab_free(&(*t)->vocab);
    added_free(&(*t)->added);
    pretoken_close(&(*t)->pattern);
    free(*t);
    *t = NULL;
}

/* ---- looking up --------------------------------------------------------------------------------- */

tsr_tokenizer_info tsr_tokenizer_info_of(const tsr_tokenizer *t)
{
    const added *a = &t->added;
    int32_t last = a->count > 0 ? a->by_text[a->by_id[a->count - 1]].id + 1 : 0;
    return (tsr_tokenizer_info){
        .ranks = t->vocab.count,
        .ids = last > t->vocab.id_count ? last : t->vocab.id_count,
        .added = (int32_t)a->count,
        .repeated = t->vocab.repeated,
        .longest = (int32_t)t->vocab.longest,
        .bos = a->bos,
        .eos = a->eos,
        .unk = a->unk,
        .pad = a->pad,
        .built_in = t->built_in,
        .k3_names = a->k3_names,
        .own_pattern = pretoken_is_own(t->pattern),
        .jit = pretoken_has_jit(t->pattern),
    };
}

tsr_span tsr_tokenizer_token(const tsr_tokenizer *t, int32_t id)
{
    const vocab *v = &t->vocab;
    if (id >= 0 && id < v->id_count && v->tokens[id].bytes > 0) {
        return (tsr_span){ (const char *)v->blob + v->tokens[id].at, v->tokens[id].bytes };
    }
    const added_token *a = added_by_id(&t->added, id);
    return a != NULL ? (tsr_span){ a->text, a->bytes } : (tsr_span){ NULL, 0 };
}

int32_t tsr_tokenizer_added_id(const tsr_tokenizer *t, const char *text)
{
    const added_token *a = added_by_text(&t->added, text, strlen(text));
    return a != NULL ? a->id : -1;
}

bool tsr_tokenizer_is_added(const tsr_tokenizer *t, int32_t id, bool *special)
{
    const added_token *a = added_by_id(&t->added, id);
    if (special != NULL) {
        *special = a != NULL && a->special;
    }
    return a != NULL;
}

/* ---- encoding ----------------------------------------------------------------------------------- */

/* Cuts text as K3's own tokenizer does before anything else: into windows of piece_chars characters, and inside each
 * where a run of white space, or of anything else, has reached run_chars. A byte that is no UTF-8 counts as a character. */
typedef struct slicer {
    const uint8_t *text;
    size_t bytes, at, piece_chars, run_chars;
    size_t window_left; /* characters */
    size_t run;
    bool space; /* the run's kind */
} slicer;

static bool next_slice(slicer *s, const uint8_t **slice, size_t *bytes)
{
    size_t from = s->at;
    while (s->at < s->bytes) {
        const uint8_t *p = s->text + s->at;
        int length = utf8_at(p, s->bytes - s->at);
        bool space = length > 0 && utf8_is_space(utf8_value(p, length));
        if (s->window_left == 0) {
            s->window_left = s->piece_chars;
            s->run = 0;
            s->space = space;
            if (s->at > from) {
                break;
            }
        }
        if (space != s->space) {
            s->space = space;
            s->run = 0;
        }
        if (s->run == s->run_chars) {
            s->run = 0;
            break;
        }
        s->run++;
        s->window_left--;
        s->at += length > 0 ? (size_t)length : 1;
    }
    *slice = s->text + from;
    *bytes = s->at - from;
    return *bytes > 0;
}

typedef struct encoder {
    const tsr_tokenizer *t;
    pretoken_run *match;
    bpe_run merge;
    tsr_tokens *out;
} encoder;

static tsr_status on_piece(void *payload, const uint8_t *piece, size_t bytes, tsr_err *err)
{
    encoder *e = payload;
    return bpe_piece(&e->t->vocab, &e->merge, piece, bytes, e->out, err);
}

/* One slice in which added tokens are looked for. */
static tsr_status encode_with_added(encoder *e, const uint8_t *p, size_t n, tsr_err *err)
{
    size_t from = 0;
    for (size_t at = 0; at < n;) {
        const added_token *a = added_at(&e->t->added, p + at, n - at);
        if (a == NULL) {
            at++;
            continue;
        }
        TSR_TRY(pretoken_each(e->match, p + from, at - from, on_piece, e, err));
        TSR_TRY(tok_push(e->out, a->id, err));
        from = at += a->bytes;
    }
    return pretoken_each(e->match, p + from, n - from, on_piece, e, err);
}

tsr_status tsr_tokenizer_encode(const tsr_tokenizer *t, const void *text, size_t bytes, unsigned flags,
                                tsr_tokens *out, tsr_err *err)
{
    encoder e = { .t = t, .out = out };
    size_t before = out->count;
    if (bytes == 0) {
        return TSR_OK;
    }
    TSR_TRY(pretoken_run_open(&e.match, t->pattern, err));
    slicer s = { .text = text, .bytes = bytes, .piece_chars = t->piece_chars, .run_chars = t->run_chars };
    tsr_status st = TSR_OK;
    const uint8_t *slice;
    size_t n;
    while (st == TSR_OK && next_slice(&s, &slice, &n)) {
        st = flags & TSR_ENCODE_ADDED ? encode_with_added(&e, slice, n, err)
                                      : pretoken_each(e.match, slice, n, on_piece, &e, err);
    }
    bpe_run_free(&e.merge);
    pretoken_run_close(&e.match);
    out->count = st == TSR_OK ? out->count : before;
    return st;
}
