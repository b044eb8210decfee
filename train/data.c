/* data.c - opens and reads a data folder; see data.h. Shards are mapped; nothing of a file is trusted before it was checked. */
#include "train/data.h"
#include "format/io.h"
#include "model/tokenizer.h"
#include "train/data_file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define BLOCK ((uint64_t)4 << 20)

typedef struct mapping {
    const uint8_t *p; /* NULL: none */
    size_t bytes;
} mapping;

typedef struct shard {
    mapping tok, idx;
    int64_t first; /* document */
} shard;

struct tsr_data {
    char *path;
    uint64_t hash;
    tsr_dtype dtype;
    data_meta meta;
    shard *shards[TSR_SPLIT_COUNT];
};

/* ---- data.json --------------------------------------------------------------------------------------------------------- */

static tsr_status parse_files(tsr_data *d, const json_t *root, const char *path, tsr_err *err)
{
    const json_t *tokenizer = json_object_get(root, "tokenizer"), *list = json_object_get(tokenizer, "files");
    const char *kind = json_string_value(json_object_get(tokenizer, "kind"));
    if (kind == NULL || !json_is_array(list) || json_array_size(list) > DATA_TOKENIZER_FILES) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: tokenizer: no kind, or no list of at most %d files", path,
                 DATA_TOKENIZER_FILES);
    }
    if (strcmp(kind, "bytes") != 0 && strcmp(kind, "tiktoken") != 0) {
        TSR_FAIL(err, TSR_E_UNSUPPORTED, "%s: tokenizer %.40s: this version does not know it", path, kind);
    }
    size_t known = 0;
    for (size_t i = 0; i < json_array_size(list); i++, known++) {
        const json_t *o = json_array_get(list, i);
        const char *name = json_string_value(json_object_get(o, "name"));
        while (name != NULL && known < DATA_TOKENIZER_FILES &&
               strcmp(name, data_tokenizer_names[known]) != 0) {
            known++; /* they come in one order, so none comes twice */
        }
        if (name == NULL || known >= DATA_TOKENIZER_FILES) {
            TSR_FAIL(err, TSR_E_FORMAT,
                     "%s: tokenizer: file %zu: name is not one this version knows, or not in order", path, i);
        }
        data_file *f = &d->meta.files[d->meta.file_count++];
        f->name = data_tokenizer_names[known];
        TSR_TRY(data_json_u64(o, path, "bytes", &f->bytes, err));
        TSR_TRY(data_json_hex(o, path, "xxh3", &f->hash, err));
    }
    bool ranks = d->meta.file_count > 0 && d->meta.files[0].name == data_tokenizer_names[0];
    if (ranks != (strcmp(kind, "tiktoken") == 0) || (!ranks && d->meta.file_count > 0)) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: tokenizer: kind %s and its files disagree", path, kind);
    }
    return TSR_OK;
}

static tsr_status parse_split(tsr_data *d, const json_t *splits, const char *path, tsr_split s, tsr_err *err)
{
    const json_t *o = json_object_get(splits, tsr_split_name(s));
    const char *const keys[] = { "documents", "tokens", "text_bytes" };
    const uint64_t *const have[] = { &d->meta.split[s].documents, &d->meta.split[s].tokens,
                                     &d->meta.split[s].text_bytes };
    TSR_TRY(data_shards_parse(o, path, s, false, &d->meta.split[s], err));
    for (int i = 0; i < 3; i++) {
        uint64_t said;
        TSR_TRY(data_json_u64(o, path, keys[i], &said, err));
        if (said != *have[i]) {
            TSR_FAIL(err, TSR_E_FORMAT, "%s: %s: %s are %" PRIu64 ", but %" PRIu64 " in its shards", path,
                     tsr_split_name(s), keys[i], said, *have[i]);
        }
    }
    return TSR_OK;
}

static tsr_status parse_checks(tsr_data *d, json_t *root, const char *path, tsr_err *err)
{
    uint64_t said, have;
    TSR_TRY(data_json_hex(root, path, "hash", &said, err));
    TSR_TRY(data_hash_of(&d->meta, &d->hash, err));
    if (said != d->hash) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: hash: is not that of the shards it lists", path);
    }
    TSR_TRY(data_json_hex(root, path, "check", &said, err));
    (void)json_object_del(root, "check"); /* it was just read */
    TSR_TRY(data_json_hash(root, &have, err));
    if (said != have) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: check: the file was changed", path);
    }
    return TSR_OK;
}

static tsr_status parse_json(tsr_data *d, json_t *root, const char *path, tsr_err *err)
{
    const char *format = json_string_value(json_object_get(root, "format"));
    const json_t *eos = json_object_get(root, "eos");
    uint64_t version, vocab;
    if (format == NULL || strcmp(format, DATA_FORMAT) != 0) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: format: is not \"%s\"", path, DATA_FORMAT);
    }
    TSR_TRY(data_json_u64(root, path, "version", &version, err));
    if (version != DATA_VERSION) {
        TSR_FAIL(err, TSR_E_UNSUPPORTED, "%s: version %" PRIu64 " (this program reads %d)", path, version,
                 DATA_VERSION);
    }
    TSR_TRY(data_json_u64(root, path, "vocab", &vocab, err));
    if (vocab < 1 || vocab > (uint64_t)TSR_TOKEN_ID_MAX) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: vocab: %" PRIu64 " is not in 1 to %d", path, vocab,
                 TSR_TOKEN_ID_MAX);
    }
    if (!json_is_integer(eos) || json_integer_value(eos) < -1 ||
        json_integer_value(eos) >= (json_int_t)vocab) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: eos: is no token of the vocabulary, nor -1", path);
    }
    d->meta.vocab = (int64_t)vocab;
    d->meta.eos = (int32_t)json_integer_value(eos);
    d->dtype = data_dtype(d->meta.vocab);
    const char *dtype = json_string_value(json_object_get(root, "dtype"));
    if (dtype == NULL || strcmp(dtype, tsr_dtype_name(d->dtype)) != 0) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: dtype: is not %s", path, tsr_dtype_name(d->dtype));
    }
    TSR_TRY(parse_files(d, root, path, err));
    for (int s = 0; s < TSR_SPLIT_COUNT; s++) {
        TSR_TRY(parse_split(d, json_object_get(root, "splits"), path, (tsr_split)s, err));
    }
    return parse_checks(d, root, path, err);
}

/* ---- shards ---------------------------------------------------------------------------------------------------------------- */

static tsr_status file_of(const tsr_data *d, tsr_split s, size_t number, bool idx, char **path, tsr_err *err)
{
    char name[DATA_NAME_BYTES];
    data_shard_name(name, s, number, idx);
    if (asprintf(path, "%s/%s", d->path, name) < 0) {
        *path = NULL;
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    return TSR_OK;
}

/* The descriptor is not kept: a folder may have more shards than a process may have open files. */
static tsr_status map_file(mapping *m, const char *path, uint64_t bytes, tsr_err *err)
{
    struct stat s;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return tsr_fs_error(err, errno, path, "cannot be opened");
    }
    tsr_status st = TSR_OK;
    if (fstat(fd, &s) != 0 || !S_ISREG(s.st_mode) || (uint64_t)s.st_size != bytes) {
        st = TSR_ERR(err, TSR_E_FORMAT,
                     "%s: file size: %" PRIu64 " bytes are promised (truncated, or another file)", path,
                     bytes);
    } else {
        void *p = mmap(NULL, (size_t)bytes, PROT_READ, MAP_SHARED, fd, 0);
        if (p == MAP_FAILED) {
            st = tsr_fs_error(err, errno, path, "cannot be mapped");
        } else {
            *m = (mapping){ p, (size_t)bytes };
        }
    }
    (void)close(fd);
    return st;
}

static void unmap(mapping *m)
{
    if (m->p != NULL) {
        (void)munmap((void *)(uintptr_t)m->p, m->bytes);
    }
}

static tsr_status open_file(tsr_data *d, tsr_split s, size_t i, bool idx, tsr_err *err)
{
    mapping *m = idx ? &d->shards[s][i].idx : &d->shards[s][i].tok;
    data_head want, have;
    uint64_t bytes;
    char *path;
    TSR_TRY(file_of(d, s, i, idx, &path, err));
    tsr_status st = data_head_of(&want, &bytes, &d->meta.split[s].shards[i], s, i, d->dtype, idx, err);
    if (st == TSR_OK) {
        st = map_file(m, path, bytes, err);
    } else {
        tsr_err_prefix(err, "%s", path);
    }
    if (st == TSR_OK) {
        memcpy(&have, m->p, sizeof have); /* a file is never shorter than its head */
        const char *field = data_head_differs(&have, &want);
        if (field != NULL) {
            st = TSR_ERR(err, TSR_E_FORMAT, "%s: head: %s is not what it must be", path, field);
        }
    }
    free(path);
    return st;
}

static const uint64_t *borders_of(const shard *x)
{
    return (const uint64_t *)(const void *)(x->idx.p + sizeof(data_head));
}

static tsr_status check_borders(const tsr_data *d, tsr_split s, size_t i, tsr_err *err)
{
    const uint64_t *border = borders_of(&d->shards[s][i]);
    const data_shard *x = &d->meta.split[s].shards[i];
    uint64_t bad = border[0] != 0 ? 0 : UINT64_MAX;
    for (uint64_t k = 0; bad == UINT64_MAX && k < x->documents; k++) {
        bad = border[k + 1] <= border[k] || border[k + 1] > x->tokens ? k + 1 : bad;
    }
    if (bad == UINT64_MAX && border[x->documents] != x->tokens) {
        bad = x->documents;
    }
    if (bad != UINT64_MAX) {
        char name[DATA_NAME_BYTES];
        data_shard_name(name, s, i, true);
        TSR_FAIL(err, TSR_E_FORMAT, "%s/%s: border %" PRIu64 ": is out of order or out of range", d->path,
                 name, bad);
    }
    return TSR_OK;
}

static tsr_status open_split(tsr_data *d, tsr_split s, tsr_err *err)
{
    const data_split *x = &d->meta.split[s];
    int64_t first = 0;
    d->shards[s] = calloc(x->count + 1, sizeof *d->shards[s]);
    if (d->shards[s] == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    for (size_t i = 0; i < x->count; i++) {
        TSR_TRY(open_file(d, s, i, false, err));
        TSR_TRY(open_file(d, s, i, true, err));
        TSR_TRY(check_borders(d, s, i, err));
        d->shards[s][i].first = first;
        first += (int64_t)x->shards[i].documents;
    }
    return TSR_OK;
}

static tsr_status open_all(tsr_data *d, tsr_err *err)
{
    char *path;
    json_t *root = NULL;
    if (asprintf(&path, "%s/data.json", d->path) < 0) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    tsr_status st = data_json_read(&root, path, err);
    if (st == TSR_OK) {
        st = parse_json(d, root, path, err);
    }
    json_decref(root);
    free(path);
    for (int s = 0; st == TSR_OK && s < TSR_SPLIT_COUNT; s++) {
        st = open_split(d, (tsr_split)s, err);
    }
    return st;
}

tsr_status tsr_data_open(tsr_data **out, const char *path, tsr_err *err)
{
    tsr_data *d = calloc(1, sizeof *d);
    size_t n = strlen(path);
    *out = NULL;
    while (n > 1 && path[n - 1] == '/') {
        n--;
    }
    if (d != NULL) {
        d->path = strndup(path, n);
    }
    tsr_status st = d != NULL && d->path != NULL ? open_all(d, err)
                                                 : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    if (st != TSR_OK) {
        tsr_data_close(&d);
    }
    *out = d;
    return st;
}

void tsr_data_close(tsr_data **out)
{
    tsr_data *d = *out;
    if (d == NULL) {
        return;
    }
    for (int s = 0; s < TSR_SPLIT_COUNT; s++) {
        for (size_t i = 0; d->shards[s] != NULL && i < d->meta.split[s].count; i++) {
            unmap(&d->shards[s][i].tok);
            unmap(&d->shards[s][i].idx);
        }
        free(d->shards[s]);
    }
    data_meta_free(&d->meta);
    free(d->path);
    free(d);
    *out = NULL;
}

/* ---- questions --------------------------------------------------------------------------------------------------------------- */

const char *tsr_data_path(const tsr_data *d)
{
    return d->path;
}

uint64_t tsr_data_hash(const tsr_data *d)
{
    return d->hash;
}

int64_t tsr_data_vocab(const tsr_data *d)
{
    return d->meta.vocab;
}

int32_t tsr_data_eos(const tsr_data *d)
{
    return d->meta.eos;
}

const char *tsr_data_tokenizer_file(const tsr_data *d, size_t i)
{
    return i < d->meta.file_count ? d->meta.files[i].name : NULL;
}

int64_t tsr_data_docs(const tsr_data *d, tsr_split s)
{
    return (int64_t)d->meta.split[s].documents;
}

int64_t tsr_data_tokens(const tsr_data *d, tsr_split s)
{
    return (int64_t)d->meta.split[s].tokens;
}

uint64_t tsr_data_text_bytes(const tsr_data *d, tsr_split s)
{
    return d->meta.split[s].text_bytes;
}

/* The shard that holds a document. */
static const shard *shard_of(const tsr_data *d, tsr_split s, int64_t doc)
{
    TSR_ASSERT(doc >= 0 && doc < tsr_data_docs(d, s));
    size_t low = 0, high = d->meta.split[s].count; /* it is in [low, high) */
    while (high - low > 1) {
        size_t mid = low + (high - low) / 2;
        if (d->shards[s][mid].first <= doc) {
            low = mid;
        } else {
            high = mid;
        }
    }
    return &d->shards[s][low];
}

int64_t tsr_data_doc_length(const tsr_data *d, tsr_split s, int64_t doc)
{
    const shard *x = shard_of(d, s, doc);
    const uint64_t *border = borders_of(x) + (doc - x->first);
    return (int64_t)(border[1] - border[0]);
}

void tsr_data_copy(const tsr_data *d, tsr_split s, int64_t doc, int64_t off, int64_t n, int32_t *dst)
{
    const shard *x = shard_of(d, s, doc);
    const uint64_t *border = borders_of(x) + (doc - x->first);
    int64_t length = (int64_t)(border[1] - border[0]);
    TSR_ASSERT(off >= 0 && n >= 0 && off <= length && n <= length - off);
    const uint8_t *p = x->tok.p + sizeof(data_head);
    if (d->dtype == TSR_DT_U32) {
        memcpy(dst, p + 4 * (border[0] + (uint64_t)off), (size_t)n * 4);
        return;
    }
    const uint16_t *ids = (const uint16_t *)(const void *)p + border[0] + off;
    for (int64_t i = 0; i < n; i++) {
        dst[i] = ids[i];
    }
}

/* ---- verifying ----------------------------------------------------------------------------------------------------------------- */

typedef struct checker {
    const tsr_data *d;
    const tsr_progress *p;
    tsr_hasher *hash;
    uint64_t done, total;
} checker;

static uint64_t id_at(const tsr_data *d, const uint8_t *p, uint64_t i)
{
    uint16_t narrow;
    uint32_t wide;
    if (d->dtype == TSR_DT_U16) {
        memcpy(&narrow, p + 2 * i, sizeof narrow);
        return narrow;
    }
    memcpy(&wide, p + 4 * i, sizeof wide);
    return wide;
}

static tsr_status verify_file(checker *c, tsr_split s, size_t i, bool idx, tsr_err *err)
{
    const tsr_data *d = c->d;
    const mapping *m = idx ? &d->shards[s][i].idx : &d->shards[s][i].tok;
    const data_shard *x = &d->meta.split[s].shards[i];
    uint64_t width = d->dtype == TSR_DT_U16 ? 2 : 4;
    char name[DATA_NAME_BYTES];
    data_shard_name(name, s, i, idx);
    tsr_hasher_reset(c->hash);
    for (uint64_t at = sizeof(data_head); at < m->bytes; at += BLOCK) {
        uint64_t n = m->bytes - at < BLOCK ? m->bytes - at : BLOCK;
        if (c->p != NULL && c->p->cancel != NULL && *c->p->cancel != 0) {
            TSR_FAIL(err, TSR_E_CANCELLED, "stopped");
        }
        tsr_hasher_add(c->hash, m->p + at, (size_t)n);
        for (uint64_t k = 0; !idx && k < n / width; k++) {
            uint64_t id = id_at(d, m->p + at, k);
            if (id >= (uint64_t)d->meta.vocab) {
                TSR_FAIL(err, TSR_E_FORMAT,
                         "%s/%s: token %" PRIu64 ": id %" PRIu64 ", the vocabulary has %" PRId64, d->path,
                         name, (at - sizeof(data_head)) / width + k, id, d->meta.vocab);
            }
        }
        c->done += n;
        if (c->p != NULL && c->p->report != NULL) {
            c->p->report(c->p->payload, "verify", c->done, c->total);
        }
    }
    if (tsr_hasher_digest(c->hash) != (idx ? x->idx_hash : x->tok_hash)) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s/%s: checksum: the bytes are not those that were written", d->path,
                 name);
    }
    return TSR_OK;
}

static tsr_status verify_tokenizer_file(const tsr_data *d, const data_file *f, tsr_err *err)
{
    char *path;
    tsr_io *io = NULL;
    if (asprintf(&path, "%s/tokenizer/%s", d->path, f->name) < 0) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    tsr_status st = tsr_io_open_file(&io, path, err);
    if (st == TSR_OK && (io->size != f->bytes || f->bytes > TSR_RANKS_FILE_BYTES_MAX)) {
        st = TSR_ERR(err, TSR_E_FORMAT, "%s: has %" PRIu64 " bytes, data.json says %" PRIu64, path, io->size,
                     f->bytes);
    }
    char *p = st == TSR_OK ? malloc((size_t)f->bytes + 1) : NULL;
    if (st == TSR_OK) {
        st = p != NULL ? tsr_io_pread(io, p, (size_t)f->bytes, 0, err)
                       : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    }
    if (st == TSR_OK && tsr_hash64(p, (size_t)f->bytes) != f->hash) {
        st = TSR_ERR(err, TSR_E_FORMAT, "%s: checksum: the bytes are not those that were written", path);
    }
    free(p);
    tsr_io_close(&io);
    free(path);
    return st;
}

tsr_status tsr_data_verify(const tsr_data *d, const tsr_progress *p, tsr_err *err)
{
    checker c = { .d = d, .p = p, .hash = tsr_hasher_new() };
    tsr_status st = c.hash != NULL ? TSR_OK : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    for (size_t i = 0; st == TSR_OK && i < d->meta.file_count; i++) {
        st = verify_tokenizer_file(d, &d->meta.files[i], err);
    }
    for (int s = 0; s < TSR_SPLIT_COUNT; s++) {
        for (size_t i = 0; i < d->meta.split[s].count; i++) {
            c.total += d->shards[s][i].tok.bytes + d->shards[s][i].idx.bytes - 2 * sizeof(data_head);
        }
    }
    for (int s = 0; s < TSR_SPLIT_COUNT; s++) {
        for (size_t i = 0; st == TSR_OK && i < d->meta.split[s].count; i++) {
            st = verify_file(&c, (tsr_split)s, i, false, err);
            st = st == TSR_OK ? verify_file(&c, (tsr_split)s, i, true, err) : st;
        }
    }
    tsr_hasher_free(&c.hash);
    return st;
}
