/* data_file.c - the bytes of a data folder that its writer and its reader have in common; see data_file.h. */
#include "train/data_file.h"
#include "format/io.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const data_tokenizer_names[DATA_TOKENIZER_FILES] = {
    "tiktoken.model",       "tokenizer_config.json", "special_tokens_map.json",
    "tokenization_kimi.py", "chat_template.jinja",   "generation_config.json"
};

const char *tsr_split_name(tsr_split s)
{
    return s == TSR_SPLIT_TRAIN ? "train" : s == TSR_SPLIT_HELD ? "held" : "?";
}

void data_meta_free(data_meta *m)
{
    for (int s = 0; s < TSR_SPLIT_COUNT; s++) {
        free(m->split[s].shards);
    }
    memset(m, 0, sizeof *m);
}

tsr_status data_split_add(data_split *s, const data_shard *shard, tsr_err *err)
{
    if (s->count >= DATA_SHARD_COUNT_MAX) {
        TSR_FAIL(err, TSR_E_LIMIT, "data: more than %u shards (build with larger ones)",
                 DATA_SHARD_COUNT_MAX);
    }
    if (!tsr_add_u64(s->documents, shard->documents, &s->documents) ||
        !tsr_add_u64(s->tokens, shard->tokens, &s->tokens) ||
        !tsr_add_u64(s->text_bytes, shard->text_bytes, &s->text_bytes) || s->documents > INT64_MAX ||
        s->tokens > INT64_MAX || s->text_bytes > INT64_MAX) {
        TSR_FAIL(err, TSR_E_FORMAT, "data: counts of shards do not fit 63 bits");
    }
    if (s->count == s->room) {
        size_t room = s->room * 2 + 8;
        data_shard *grown = realloc(s->shards, room * sizeof *grown);
        if (grown == NULL) {
            TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
        }
        s->shards = grown;
        s->room = room;
    }
    s->shards[s->count++] = *shard;
    return TSR_OK;
}

/* ---- heads --------------------------------------------------------------------------------------------------- */

tsr_dtype data_dtype(int64_t vocab)
{
    return vocab <= 65536 ? TSR_DT_U16 : TSR_DT_U32;
}

void data_shard_name(char out[DATA_NAME_BYTES], tsr_split s, size_t shard, bool idx)
{
    (void)snprintf(out, DATA_NAME_BYTES, "%s-%05zu.%s", tsr_split_name(s), shard, idx ? "idx" : "tok");
}

tsr_status data_head_of(data_head *out, uint64_t *file_bytes, const data_shard *shard, tsr_split s,
                        size_t number, tsr_dtype dtype, bool idx, tsr_err *err)
{
    uint64_t count = shard->tokens, width = dtype == TSR_DT_U16 ? 2 : 4;
    *out = (data_head){ .version = DATA_VERSION,
                        .dtype = (uint32_t)(idx ? TSR_DT_U64 : dtype),
                        .split = (uint32_t)s,
                        .shard = (uint32_t)number,
                        .documents = shard->documents,
                        .tokens = shard->tokens,
                        .text_bytes = shard->text_bytes,
                        .data_hash = idx ? shard->idx_hash : shard->tok_hash };
    memcpy(out->magic, idx ? DATA_IDX_MAGIC : DATA_TOK_MAGIC, sizeof out->magic);
    out->head_hash = tsr_hash64(out, offsetof(data_head, head_hash));
    if ((idx && !tsr_add_u64(shard->documents, 1, &count)) ||
        !tsr_mul_u64(count, idx ? 8 : width, file_bytes) ||
        !tsr_add_u64(*file_bytes, sizeof *out, file_bytes) || *file_bytes > INT64_MAX) {
        TSR_FAIL(err, TSR_E_FORMAT, "counts of the shard do not fit");
    }
    return TSR_OK;
}

const char *data_head_differs(const data_head *have, const data_head *want)
{
    if (memcmp(have->magic, want->magic, sizeof have->magic) != 0) {
        return "magic";
    }
    const struct {
        const char *name;
        uint64_t have, want;
    } fields[] = { { "version", have->version, want->version },
                   { "head_hash", tsr_hash64(have, offsetof(data_head, head_hash)), have->head_hash },
                   { "dtype", have->dtype, want->dtype },
                   { "split", have->split, want->split },
                   { "shard", have->shard, want->shard },
                   { "documents", have->documents, want->documents },
                   { "tokens", have->tokens, want->tokens },
                   { "text_bytes", have->text_bytes, want->text_bytes },
                   { "data_hash", have->data_hash, want->data_hash } };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        if (fields[i].have != fields[i].want) {
            return fields[i].name;
        }
    }
    return NULL;
}

static void add_u64(tsr_hasher *h, uint64_t v)
{
    tsr_hasher_add(h, &v, sizeof v);
}

tsr_status data_hash_of(const data_meta *m, uint64_t *out, tsr_err *err)
{
    tsr_hasher *h = tsr_hasher_new();
    if (h == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    add_u64(h, DATA_VERSION);
    add_u64(h, (uint64_t)m->vocab);
    add_u64(h, (uint64_t)(int64_t)m->eos);
    add_u64(h, m->file_count);
    for (size_t i = 0; i < m->file_count; i++) {
        tsr_hasher_add(h, m->files[i].name, strlen(m->files[i].name) + 1);
        add_u64(h, m->files[i].bytes);
        add_u64(h, m->files[i].hash);
    }
    for (int s = 0; s < TSR_SPLIT_COUNT; s++) {
        add_u64(h, m->split[s].count);
        for (size_t i = 0; i < m->split[s].count; i++) {
            const data_shard *x = &m->split[s].shards[i];
            const uint64_t facts[] = { x->documents, x->tokens, x->text_bytes, x->tok_hash, x->idx_hash };
            tsr_hasher_add(h, facts, sizeof facts);
        }
    }
    *out = tsr_hasher_digest(h);
    tsr_hasher_free(&h);
    return TSR_OK;
}

/* ---- JSON ------------------------------------------------------------------------------------------------------ */

void data_hex(uint64_t v, char out[DATA_HEX_BYTES])
{
    (void)snprintf(out, DATA_HEX_BYTES, "%016" PRIx64, v);
}

tsr_status data_json_hash(const json_t *root, uint64_t *out, tsr_err *err)
{
    char *text = json_dumps(root, JSON_COMPACT | JSON_SORT_KEYS | JSON_REAL_PRECISION(17));
    if (text == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    *out = tsr_hash64(text, strlen(text));
    free(text);
    return TSR_OK;
}

tsr_status data_json_read(json_t **out, const char *path, tsr_err *err)
{
    tsr_io *io;
    json_error_t e;
    *out = NULL;
    TSR_TRY(tsr_io_open_file(&io, path, err));
    char *text = io->size <= DATA_JSON_BYTES_MAX ? malloc((size_t)io->size + 1) : NULL;
    tsr_status st = text != NULL
                        ? tsr_io_pread(io, text, (size_t)io->size, 0, err)
                        : TSR_ERR(err, TSR_E_LIMIT, "%s: too large (%" PRIu64 " bytes)", path, io->size);
    if (st == TSR_OK) {
        *out = json_loadb(text, (size_t)io->size, JSON_REJECT_DUPLICATES, &e);
        if (*out == NULL) {
            st = TSR_ERR(err, TSR_E_FORMAT, "%s: line %d: %s", path, e.line, e.text);
        } else if (!json_is_object(*out)) {
            json_decref(*out);
            *out = NULL;
            st = TSR_ERR(err, TSR_E_FORMAT, "%s: is no JSON object", path);
        }
    }
    free(text);
    tsr_io_close(&io);
    return st;
}

tsr_status data_json_u64(const json_t *o, const char *path, const char *key, uint64_t *out, tsr_err *err)
{
    const json_t *v = json_object_get(o, key);
    *out = 0;
    if (!json_is_integer(v) || json_integer_value(v) < 0) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: %s: is no whole number", path, key);
    }
    *out = (uint64_t)json_integer_value(v);
    return TSR_OK;
}

tsr_status data_json_hex(const json_t *o, const char *path, const char *key, uint64_t *out, tsr_err *err)
{
    const char *s = json_string_value(json_object_get(o, key));
    *out = 0;
    if (s == NULL || strlen(s) != 16 || strspn(s, "0123456789abcdef") != 16) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: %s: is no checksum of 16 hex digits", path, key);
    }
    *out = strtoull(s, NULL, 16);
    return TSR_OK;
}

json_t *data_shard_json(const data_shard *x, tsr_split s, size_t number, bool building)
{
    char tok[DATA_NAME_BYTES], idx[DATA_NAME_BYTES], tok_hash[DATA_HEX_BYTES], idx_hash[DATA_HEX_BYTES];
    data_shard_name(tok, s, number, false);
    data_shard_name(idx, s, number, true);
    data_hex(x->tok_hash, tok_hash);
    data_hex(x->idx_hash, idx_hash);
    json_t *o = json_pack("{s:s, s:s, s:I, s:I, s:I, s:s, s:s}", "tok", tok, "idx", idx, "documents",
                          (json_int_t)x->documents, "tokens", (json_int_t)x->tokens, "text_bytes",
                          (json_int_t)x->text_bytes, "tok_xxh3", tok_hash, "idx_xxh3", idx_hash);
    if (building && o != NULL && json_object_set_new(o, "end", json_integer((json_int_t)x->end)) != 0) {
        json_decref(o);
        return NULL;
    }
    return o;
}

tsr_status data_shard_parse(const json_t *o, const char *path, tsr_split s, size_t number, bool building,
                            data_shard *out, tsr_err *err)
{
    *out = (data_shard){ 0 };
    for (int idx = 0; idx < 2; idx++) {
        char name[DATA_NAME_BYTES];
        data_shard_name(name, s, number, idx);
        const char *have = json_string_value(json_object_get(o, idx ? "idx" : "tok"));
        if (have == NULL || strcmp(have, name) != 0) {
            TSR_FAIL(err, TSR_E_FORMAT, "%s: %s shard %zu: %s is not %s", path, tsr_split_name(s), number,
                     idx ? "idx" : "tok", name);
        }
    }
    TSR_TRY(data_json_u64(o, path, "documents", &out->documents, err));
    TSR_TRY(data_json_u64(o, path, "tokens", &out->tokens, err));
    TSR_TRY(data_json_u64(o, path, "text_bytes", &out->text_bytes, err));
    TSR_TRY(data_json_hex(o, path, "tok_xxh3", &out->tok_hash, err));
    TSR_TRY(data_json_hex(o, path, "idx_xxh3", &out->idx_hash, err));
    if (out->documents == 0 || out->tokens < out->documents) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: %s shard %zu: %" PRIu64 " documents of %" PRIu64 " tokens", path,
                 tsr_split_name(s), number, out->documents, out->tokens);
    }
    return building ? data_json_u64(o, path, "end", &out->end, err) : TSR_OK;
}

tsr_status data_shards_parse(const json_t *o, const char *path, tsr_split s, bool building, data_split *out,
                             tsr_err *err)
{
    const json_t *list = json_object_get(o, "shards");
    if (!json_is_array(list)) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: %s: shards is no list", path, tsr_split_name(s));
    }
    for (size_t i = 0; i < json_array_size(list); i++) {
        data_shard shard;
        TSR_TRY(data_shard_parse(json_array_get(list, i), path, s, i, building, &shard, err));
        TSR_TRY(data_split_add(out, &shard, err));
    }
    return TSR_OK;
}
