/* added.c - added tokens: texts with ids outside the ranks, out of tokenizer_config.json or, without one, K3's. */
#include "model/tokenizer_priv.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* K3's published names, relative to the first id behind the ranks. */
static const struct {
    int32_t at;
    const char *text;
    bool special;
} k3_names[] = {
    { 0, "[BOS]", true },
    { 1, "[EOS]", true },
    { 2, "<|end_of_msg|>", true },
    { 3, "<|open|>", false },
    { 4, "<|close|>", false },
    { 5, "<|sep|>", false },
    { 6, "[start_header_id]", true },
    { 7, "[end_header_id]", true },
    { 9, "[EOT]", true },
    { 18, "<|media_begin|>", true },
    { 19, "<|media_content|>", true },
    { 20, "<|media_end|>", true },
    { 21, "<|media_pad|>", true },
    { 65, "<osagent_mode>", true },
    { 254, "[UNK]", true },
    { 255, "[PAD]", true },
};

void added_free(added *a)
{
    for (size_t i = 0; i < a->count; i++) {
        free(a->by_text[i].text);
    }
    free(a->by_text);
    free(a->by_id);
    *a = (added){ 0 };
}

static tsr_status add(added *a, int32_t id, const char *text, size_t bytes, bool special, tsr_err *err)
{
    TSR_TRY(tok_grow((void **)&a->by_text, &a->room, a->count + 1, sizeof *a->by_text, err));
    char *copy = malloc(bytes + 1);
    if (copy == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "tokenizer: out of memory for added tokens");
    }
    memcpy(copy, text, bytes);
    copy[bytes] = '\0';
    a->by_text[a->count++] = (added_token){ id, (uint32_t)bytes, copy, special };
    return TSR_OK;
}

/* Bytes first, then length: what begins with the same bytes stands together, the shorter one first. */
static int compare_text(const char *a, size_t an, const char *b, size_t bn)
{
    int c = memcmp(a, b, an < bn ? an : bn);
    return c != 0 ? c : (an > bn) - (an < bn);
}

static int by_text_order(const void *x, const void *y)
{
    const added_token *a = x, *b = y;
    return compare_text(a->text, a->bytes, b->text, b->bytes);
}

static int by_id_order(const void *x, const void *y, void *base)
{
    const added_token *tokens = base;
    int32_t a = tokens[*(const uint32_t *)x].id, b = tokens[*(const uint32_t *)y].id;
    return (a > b) - (a < b);
}

const added_token *added_by_id(const added *a, int32_t id)
{
    size_t low = 0, high = a->count;
    while (low < high) {
        size_t mid = (low + high) / 2;
        const added_token *t = &a->by_text[a->by_id[mid]];
        if (t->id == id) {
            return t;
        }
        if (t->id < id) {
            low = mid + 1;
        } else {
            high = mid;
        }
    }
    return NULL;
}

const added_token *added_by_text(const added *a, const char *text, size_t bytes)
{
    size_t low = 0, high = a->count;
    while (low < high) {
        size_t mid = (low + high) / 2;
        int c = compare_text(a->by_text[mid].text, a->by_text[mid].bytes, text, bytes);
        if (c == 0) {
            return &a->by_text[mid];
        }
        if (c < 0) {
            low = mid + 1;
        } else {
            high = mid;
        }
    }
    return NULL;
}

/* The first of by_text[low..high), which agree in depth bytes, whose next byte is at least c. */
static size_t lower(const added *a, size_t low, size_t high, size_t depth, unsigned c)
{
    while (low < high) {
        size_t mid = (low + high) / 2;
        const added_token *t = &a->by_text[mid];
        if (t->bytes <= depth || (uint8_t)t->text[depth] < c) {
            low = mid + 1;
        } else {
            high = mid;
        }
    }
    return low;
}

const added_token *added_at(const added *a, const uint8_t *p, size_t n)
{
    if (n == 0 || !a->first[p[0]]) {
        return NULL;
    }
    const added_token *best = NULL;
    size_t low = 0, high = a->count;
    for (size_t depth = 0; depth < n; depth++) {
        low = lower(a, low, high, depth, p[depth]);
        high = lower(a, low, high, depth, p[depth] + 1u);
        if (low == high) {
            break;
        }
        best = a->by_text[low].bytes == depth + 1 ? &a->by_text[low] : best;
    }
    return best;
}

/* ---- sources ------------------------------------------------------------------------------------ */

static tsr_status id_of(const char *key, const char *name, int32_t *out, tsr_err *err)
{
    int64_t id = key[0] == '\0' ? -1 : 0;
    for (const char *c = key; *c != '\0' && id >= 0; c++) {
        id = *c >= '0' && *c <= '9' ? id * 10 + (*c - '0') : -1;
        if (id >= TSR_TOKEN_ID_MAX) {
            TSR_FAIL(err, TSR_E_LIMIT, "%s: added_tokens_decoder: id %.20s is beyond %d", name, key,
                     TSR_TOKEN_ID_MAX - 1);
        }
    }
    if (id < 0) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: added_tokens_decoder: \"%.40s\" is no token id", name, key);
    }
    *out = (int32_t)id;
    return TSR_OK;
}

static tsr_status read_entry(added *a, const char *key, json_t *entry, const char *name, tsr_err *err)
{
    int32_t id;
    TSR_TRY(id_of(key, name, &id, err));
    json_t *content = json_object_get(entry, "content"), *special = json_object_get(entry, "special");
    size_t bytes = json_string_length(content);
    if (!json_is_string(content) || bytes == 0) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: added_tokens_decoder.%d.content: is no text", name, id);
    }
    if (bytes > TSR_ADDED_BYTES_MAX) {
        TSR_FAIL(err, TSR_E_LIMIT, "%s: added_tokens_decoder.%d.content: %zu bytes (limit %zu)", name, id,
                 bytes, TSR_ADDED_BYTES_MAX);
    }
    if (special != NULL && !json_is_boolean(special)) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: added_tokens_decoder.%d.special: is neither true nor false", name,
                 id);
    }
    return add(a, id, json_string_value(content), bytes, json_is_true(special), err);
}

/* bos_token and its like: a text, or an object with the text as content; the id is looked up later. */
static json_t *named(json_t *root, const char *key)
{
    json_t *v = json_object_get(root, key);
    v = json_is_object(v) ? json_object_get(v, "content") : v;
    return json_is_string(v) ? v : NULL;
}

static tsr_status sort(added *a, const char *name, tsr_err *err)
{
    if (a->count == 0) {
        return TSR_OK;
    }
    qsort(a->by_text, a->count, sizeof *a->by_text, by_text_order);
    a->by_id = malloc(a->count * sizeof *a->by_id);
    if (a->by_id == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "tokenizer: out of memory for added tokens");
    }
    for (size_t i = 0; i < a->count; i++) {
        a->by_id[i] = (uint32_t)i;
        a->first[(uint8_t)a->by_text[i].text[0]] = true;
        if (i > 0 && by_text_order(&a->by_text[i - 1], &a->by_text[i]) == 0) {
            TSR_FAIL(err, TSR_E_CONFLICT, "%s: added_tokens_decoder: ids %d and %d have the same text", name,
                     a->by_text[i - 1].id, a->by_text[i].id);
        }
    }
    qsort_r(a->by_id, a->count, sizeof *a->by_id, by_id_order, a->by_text);
    for (size_t i = 1; i < a->count; i++) { /* "7" and "07" are two keys and one id */
        if (a->by_text[a->by_id[i - 1]].id == a->by_text[a->by_id[i]].id) {
            TSR_FAIL(err, TSR_E_CONFLICT, "%s: added_tokens_decoder: id %d comes twice", name,
                     a->by_text[a->by_id[i]].id);
        }
    }
    return TSR_OK;
}

static int32_t id_by_name(const added *a, json_t *root, const char *key)
{
    json_t *v = named(root, key);
    const added_token *t = v != NULL ? added_by_text(a, json_string_value(v), json_string_length(v)) : NULL;
    return t != NULL ? t->id : -1;
}

static tsr_status reserve_names(added *a, int32_t base, const bool *taken, tsr_err *err)
{
    for (int32_t i = 0; i < K3_ADDED; i++) {
        if (!taken[i]) {
            char text[40];
            int n = snprintf(text, sizeof text, "<|reserved_token_%d|>", base + i);
            TSR_TRY(add(a, base + i, text, (size_t)n, true, err));
        }
    }
    return TSR_OK;
}

static tsr_status fill_k3(added *a, int32_t base, tsr_err *err)
{
    bool taken[K3_ADDED] = { false };
    for (size_t i = 0; i < sizeof k3_names / sizeof k3_names[0]; i++) {
        taken[k3_names[i].at] = true;
        TSR_TRY(add(a, base + k3_names[i].at, k3_names[i].text, strlen(k3_names[i].text), k3_names[i].special,
                    err));
    }
    TSR_TRY(reserve_names(a, base, taken, err));
    TSR_TRY(sort(a, "tokenizer", err));
    a->bos = base, a->eos = base + 1, a->unk = base + 254, a->pad = base + 255;
    a->k3_names = true;
    return TSR_OK;
}

static tsr_status fill_config(added *a, const vocab *v, json_t *root, bool k3_ranks, const char *name,
                              tsr_err *err)
{
    json_t *decoder = json_object_get(root, "added_tokens_decoder");
    if (!json_is_object(root) || (decoder != NULL && !json_is_object(decoder))) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: %s is no JSON object", name,
                 decoder != NULL ? "added_tokens_decoder" : "it");
    }
    if (json_object_size(decoder) > TSR_ADDED_COUNT_MAX) {
        TSR_FAIL(err, TSR_E_LIMIT, "%s: added_tokens_decoder: %zu tokens (limit %zu)", name,
                 json_object_size(decoder), TSR_ADDED_COUNT_MAX);
    }
    const char *key;
    json_t *entry;
    bool taken[K3_ADDED] = { false };
    json_object_foreach(decoder, key, entry)
    {
        TSR_TRY(read_entry(a, key, entry, name, err));
        int32_t id = a->by_text[a->count - 1].id;
        if (id < v->id_count && v->tokens[id].bytes > 0) {
            TSR_FAIL(err, TSR_E_CONFLICT, "%s: added_tokens_decoder.%d: the ranks have a token with this id",
                     name, id);
        }
        if (id >= v->id_count && id - v->id_count < K3_ADDED) {
            taken[id - v->id_count] = true;
        }
    }
    if (k3_ranks) {
        TSR_TRY(reserve_names(a, v->id_count, taken, err));
    }
    TSR_TRY(sort(a, name, err));
    a->bos = id_by_name(a, root, "bos_token");
    a->eos = id_by_name(a, root, "eos_token");
    a->unk = id_by_name(a, root, "unk_token");
    a->pad = id_by_name(a, root, "pad_token");
    return TSR_OK;
}

tsr_status added_fill(added *a, const vocab *v, const tsr_tokenizer_opts *opts, tsr_err *err)
{
    a->bos = a->eos = a->unk = a->pad = -1;
    bool k3_ranks = v->id_count == K3_RANKS && v->count == K3_RANKS;
    const char *name = opts->config_name != NULL ? opts->config_name : "tokenizer_config.json";
    if (opts->config.p != NULL) {
        json_error_t e;
        json_t *root = json_loadb(opts->config.p, opts->config.bytes, JSON_REJECT_DUPLICATES, &e);
        if (root == NULL) {
            TSR_FAIL(err, TSR_E_FORMAT, "%s: line %d: %s", name, e.line, e.text);
        }
        tsr_status st = fill_config(a, v, root, k3_ranks, name, err);
        json_decref(root);
        TSR_TRY(st);
    } else if (k3_ranks || (opts->ranks.p == NULL && opts->byte_added)) {
        TSR_TRY(fill_k3(a, v->id_count, err));
    }
    for (size_t i = 0; i < a->count && opts->vocab > 0; i++) {
        if (a->by_text[i].id >= opts->vocab) {
            TSR_FAIL(err, TSR_E_CONFLICT, "%s: id %d (%s) is outside the vocabulary of %lld", name,
                     a->by_text[i].id, a->by_text[i].text, (long long)opts->vocab);
        }
    }
    return TSR_OK;
}
