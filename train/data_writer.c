/* data_writer.c - writes a data folder; see data_writer.h.
 *
 * A shard counts as finished when build.json lists it, which is replaced after both of its files are on disk. Whatever else
 * lies in a partial folder that is entered again is removed. */
#include "train/data_writer.h"
#include "format/io.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NOTE "build.json"
#define BUF_BYTES ((size_t)1 << 20)
#define LENGTH_CLASSES 63

/* A file behind its head, written piece by piece. */
typedef struct stream {
    tsr_file *f;
    char *path;
    uint8_t *buf;
    size_t used;
    uint64_t at; /* of buf in the file */
    tsr_hasher *hash;
} stream;

typedef struct open_shard {
    bool open;
    stream tok, idx;
    data_shard facts;
    uint64_t doc_tokens; /* of the document that is being written */
} open_shard;

struct data_writer {
    data_writer_opts o;
    tsr_dtype dtype;
    int lock_fd;
    bool committed;
    data_meta meta;
    open_shard shard[TSR_SPLIT_COUNT];
    /* lengths of documents, counted at the end */
    uint64_t low[TSR_SPLIT_COUNT], high[TSR_SPLIT_COUNT], classes[TSR_SPLIT_COUNT][LENGTH_CLASSES];
};

static char *in_temp(const data_writer *w, const char *name)
{
    char *path;
    return asprintf(&path, "%s/%s", w->o.temp, name) >= 0 ? path : NULL;
}

/* Removes a file or folder of the partial folder. */
static tsr_status remove_own(const data_writer *w, const char *name, tsr_err *err)
{
    char *path = in_temp(w, name);
    tsr_status st = path != NULL ? tsr_fs_remove_tree(path, err) : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    free(path);
    return st;
}

/* ---- the partial folder --------------------------------------------------------------------------------------------- */

tsr_status data_writer_places(const char *path, char **real, char **temp, tsr_err *err)
{
    return tsr_fs_target(path, true, real, temp, err);
}

static tsr_status write_note(const data_writer *w, tsr_err *err)
{
    char key[DATA_HEX_BYTES];
    data_hex(w->o.key, key);
    json_t *root = json_pack("{s:s}", "key", key);
    for (int s = 0; s < TSR_SPLIT_COUNT; s++) {
        json_t *list = json_array();
        for (size_t i = 0; i < w->meta.split[s].count; i++) {
            (void)json_array_append_new(list,
                                        data_shard_json(&w->meta.split[s].shards[i], (tsr_split)s, i, true));
        }
        if (json_array_size(list) != w->meta.split[s].count ||
            json_object_set_new(root, tsr_split_name((tsr_split)s), json_pack("{s:o}", "shards", list)) !=
                0) {
            json_decref(root);
            root = NULL;
        }
    }
    char *text = root != NULL ? json_dumps(root, JSON_INDENT(1)) : NULL, *path = in_temp(w, NOTE);
    tsr_status st = text != NULL && path != NULL ? tsr_fs_replace_file(path, text, strlen(text), err)
                                                 : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    json_decref(root);
    free(text);
    free(path);
    return st;
}

/* A finished shard's file must be there, with its size and its head. */
static tsr_status check_file(const data_writer *w, tsr_split s, size_t number, bool idx, tsr_err *err)
{
    char name[DATA_NAME_BYTES];
    tsr_io *io = NULL;
    data_head want, have;
    uint64_t bytes;
    data_shard_name(name, s, number, idx);
    char *path = in_temp(w, name);
    tsr_status st = path != NULL ? TSR_OK : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    if (st == TSR_OK) {
        st = data_head_of(&want, &bytes, &w->meta.split[s].shards[number], s, number, w->dtype, idx, err);
    }
    if (st == TSR_OK) {
        st = tsr_io_open_file(&io, path, err);
    }
    if (st == TSR_OK && (io->size != bytes || tsr_io_pread(io, &have, sizeof have, 0, NULL) != TSR_OK ||
                         data_head_differs(&have, &want) != NULL)) {
        st = TSR_ERR(err, TSR_E_FORMAT, "%s: is not what the build wrote (throw it away with --restart)",
                     path);
    }
    tsr_io_close(&io);
    free(path);
    return st;
}

static bool is_finished(const data_writer *w, const char *name)
{
    char own[DATA_NAME_BYTES];
    const char *dash = strchr(name, '-');
    size_t number = dash != NULL ? (size_t)strtoull(dash + 1, NULL, 10) : SIZE_MAX;
    for (int k = 0; k < 2 * TSR_SPLIT_COUNT; k++) {
        if (number < w->meta.split[k / 2].count) {
            data_shard_name(own, (tsr_split)(k / 2), number, k % 2);
            if (strcmp(name, own) == 0) {
                return true;
            }
        }
    }
    return false;
}

/* Removes what an interrupted build has not finished. */
static tsr_status sweep(const data_writer *w, tsr_err *err)
{
    DIR *d = opendir(w->o.temp);
    if (d == NULL) {
        return tsr_fs_error(err, errno, w->o.temp, "cannot be read");
    }
    tsr_status st = TSR_OK;
    for (const struct dirent *e; st == TSR_OK && (e = readdir(d)) != NULL;) {
        const char *n = e->d_name;
        if (strcmp(n, ".") != 0 && strcmp(n, "..") != 0 && strcmp(n, "lock") != 0 && strcmp(n, NOTE) != 0 &&
            !is_finished(w, n)) {
            st = remove_own(w, n, err);
        }
    }
    (void)closedir(d);
    return st;
}

static tsr_status parse_note(data_writer *w, const json_t *root, const char *path, tsr_err *err)
{
    uint64_t key;
    TSR_TRY(data_json_hex(root, path, "key", &key, err));
    if (key != w->o.key) {
        TSR_FAIL(err, TSR_E_CONFLICT,
                 "%s: an unfinished build with other options or other input left %s (give the same to "
                 "continue it, "
                 "or --restart to throw it away)",
                 w->o.real, w->o.temp);
    }
    for (int s = 0; s < TSR_SPLIT_COUNT; s++) {
        const json_t *split = json_object_get(root, tsr_split_name((tsr_split)s));
        TSR_TRY(data_shards_parse(split, path, (tsr_split)s, true, &w->meta.split[s], err));
        for (size_t i = 0; i < 2 * w->meta.split[s].count; i++) {
            TSR_TRY(check_file(w, (tsr_split)s, i / 2, i % 2, err));
        }
    }
    return sweep(w, err);
}

static tsr_status enter(data_writer *w, tsr_err *err)
{
    char *lock = in_temp(w, "lock"), *note = in_temp(w, NOTE);
    json_t *root = NULL;
    tsr_status st;
    if (lock == NULL || note == NULL) {
        st = TSR_ERR(err, TSR_E_LIMIT, "out of memory");
        goto out;
    }
    TSR_GO(tsr_fs_mkdirs(w->o.temp, err));
    TSR_GO(tsr_fs_lock(lock, &w->lock_fd, err));
    if (!w->o.restart) {
        st = data_json_read(&root, note, err);
        if (st != TSR_E_MISSING) {
            st = st == TSR_OK ? parse_note(w, root, note, err) : st;
            goto out;
        }
    }
    tsr_fs_unlock(&w->lock_fd);
    TSR_GO(tsr_fs_remove_tree(w->o.temp, err));
    TSR_GO(tsr_fs_mkdirs(w->o.temp, err));
    TSR_GO(tsr_fs_lock(lock, &w->lock_fd, err));
    st = write_note(w, err);
out:
    json_decref(root);
    free(lock);
    free(note);
    return st;
}

tsr_status data_writer_open(data_writer **out, const data_writer_opts *o, tsr_err *err)
{
    data_writer *w = *out = calloc(1, sizeof *w);
    if (w == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    w->o = *o;
    w->lock_fd = -1;
    w->dtype = data_dtype(o->vocab);
    w->meta.vocab = o->vocab;
    w->meta.eos = o->eos;
    tsr_status st = enter(w, err);
    if (st != TSR_OK) {
        data_writer_close(out, true);
    }
    return st;
}

static void stream_close(stream *s)
{
    tsr_file_close(&s->f);
    tsr_hasher_free(&s->hash);
    free(s->path);
    free(s->buf);
    *s = (stream){ 0 };
}

void data_writer_close(data_writer **w, bool keep)
{
    data_writer *x = *w;
    if (x == NULL) {
        return;
    }
    for (int s = 0; s < TSR_SPLIT_COUNT; s++) {
        stream_close(&x->shard[s].tok);
        stream_close(&x->shard[s].idx);
    }
    if (!keep && !x->committed) {
        TSR_IGNORE(tsr_fs_remove_tree(x->o.temp, NULL)); /* the failure before it matters more */
    }
    tsr_fs_unlock(&x->lock_fd);
    data_meta_free(&x->meta);
    free(x);
    *w = NULL;
}

uint64_t data_writer_finished(const data_writer *w, tsr_split s)
{
    const data_split *x = &w->meta.split[s];
    return x->count > 0 ? x->shards[x->count - 1].end : 0;
}

size_t data_writer_shards(const data_writer *w)
{
    return w->meta.split[TSR_SPLIT_TRAIN].count + w->meta.split[TSR_SPLIT_HELD].count;
}

const data_meta *data_writer_meta(const data_writer *w)
{
    return &w->meta;
}

/* ---- shards ------------------------------------------------------------------------------------------------------------ */

static tsr_status stream_open(stream *s, const data_writer *w, const char *name, tsr_err *err)
{
    s->path = in_temp(w, name);
    s->buf = malloc(BUF_BYTES);
    s->hash = tsr_hasher_new();
    s->at = sizeof(data_head);
    s->used = 0;
    if (s->path == NULL || s->buf == NULL || s->hash == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    return tsr_file_create(&s->f, s->path, err);
}

static tsr_status stream_flush(stream *s, tsr_err *err)
{
    TSR_TRY(tsr_file_pwrite(s->f, s->buf, s->used, s->at, err));
    tsr_hasher_add(s->hash, s->buf, s->used);
    tsr_file_writeback(s->f, s->at, s->used);
    s->at += s->used;
    s->used = 0;
    return TSR_OK;
}

/* n is at most BUF_BYTES. */
static tsr_status stream_put(stream *s, const void *p, size_t n, tsr_err *err)
{
    if (BUF_BYTES - s->used < n) {
        TSR_TRY(stream_flush(s, err));
    }
    memcpy(s->buf + s->used, p, n);
    s->used += n;
    return TSR_OK;
}

static tsr_status begin_shard(data_writer *w, tsr_split s, tsr_err *err)
{
    open_shard *x = &w->shard[s];
    char name[DATA_NAME_BYTES];
    uint64_t zero = 0;
    x->facts = (data_shard){ 0 };
    x->doc_tokens = 0;
    data_shard_name(name, s, w->meta.split[s].count, false);
    TSR_TRY(stream_open(&x->tok, w, name, err));
    data_shard_name(name, s, w->meta.split[s].count, true);
    TSR_TRY(stream_open(&x->idx, w, name, err));
    x->open = true;
    return stream_put(&x->idx, &zero, sizeof zero, err);
}

static tsr_status finish_file(data_writer *w, tsr_split s, bool idx, tsr_err *err)
{
    open_shard *x = &w->shard[s];
    stream *f = idx ? &x->idx : &x->tok;
    data_head head;
    uint64_t bytes;
    TSR_TRY(data_head_of(&head, &bytes, &x->facts, s, w->meta.split[s].count, w->dtype, idx, err));
    TSR_ASSERT(bytes == f->at);
    TSR_TRY(tsr_file_pwrite(f->f, &head, sizeof head, 0, err));
    return tsr_file_sync(f->f, err);
}

static tsr_status close_shard(data_writer *w, tsr_split s, tsr_err *err)
{
    open_shard *x = &w->shard[s];
    TSR_TRY(stream_flush(&x->tok, err));
    TSR_TRY(stream_flush(&x->idx, err));
    x->facts.tok_hash = tsr_hasher_digest(x->tok.hash);
    x->facts.idx_hash = tsr_hasher_digest(x->idx.hash);
    TSR_TRY(finish_file(w, s, false, err));
    TSR_TRY(finish_file(w, s, true, err));
    TSR_TRY(tsr_fs_sync_dir(w->o.temp, err));
    TSR_TRY(data_split_add(&w->meta.split[s], &x->facts, err));
    stream_close(&x->tok);
    stream_close(&x->idx);
    x->open = false;
    return write_note(w, err);
}

tsr_status data_writer_add(data_writer *w, tsr_split s, const int32_t *ids, size_t count, tsr_err *err)
{
    open_shard *x = &w->shard[s];
    if (!x->open) {
        TSR_TRY(begin_shard(w, s, err));
    }
    x->doc_tokens += count;
    if (w->dtype == TSR_DT_U32) {
        for (size_t i = 0; i < count; i += BUF_BYTES / 4) {
            size_t n = count - i < BUF_BYTES / 4 ? count - i : BUF_BYTES / 4;
            TSR_TRY(stream_put(&x->tok, ids + i, n * 4, err));
        }
        return TSR_OK;
    }
    for (size_t i = 0; i < count; i++) {
        uint16_t id = (uint16_t)ids[i];
        TSR_TRY(stream_put(&x->tok, &id, sizeof id, err));
    }
    return TSR_OK;
}

tsr_status data_writer_end(data_writer *w, tsr_split s, uint64_t number, uint64_t text_bytes, tsr_err *err)
{
    open_shard *x = &w->shard[s];
    TSR_ASSERT(x->open && x->doc_tokens > 0);
    x->facts.documents++;
    x->facts.tokens += x->doc_tokens;
    x->facts.text_bytes += text_bytes;
    x->facts.end = number + 1;
    x->doc_tokens = 0;
    TSR_TRY(stream_put(&x->idx, &x->facts.tokens, sizeof x->facts.tokens, err));
    return x->facts.tokens >= w->o.shard_tokens ? close_shard(w, s, err) : TSR_OK;
}

/* ---- the end -------------------------------------------------------------------------------------------------------------- */

tsr_status data_writer_file(data_writer *w, size_t index, const void *p, size_t n, tsr_err *err)
{
    char *dir = in_temp(w, "tokenizer"), *path = NULL;
    const char *name = data_tokenizer_names[index];
    tsr_status st = TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    if (dir != NULL && asprintf(&path, "%s/%s", dir, name) >= 0) {
        st = tsr_fs_mkdirs(dir, err);
        st = st == TSR_OK ? tsr_fs_write_file(path, p, n, err) : st;
        st = st == TSR_OK ? tsr_fs_sync_dir(dir, err) : st;
    }
    free(dir);
    free(path);
    w->meta.files[w->meta.file_count++] = (data_file){ name, n, tsr_hash64(p, n) };
    return st;
}

/* Counts lengths of documents from a finished shard's borders, so that a build in several goes counts like one in one go. */
static tsr_status count_lengths(data_writer *w, tsr_split s, size_t number, tsr_err *err)
{
    char name[DATA_NAME_BYTES];
    tsr_io *io = NULL;
    uint64_t documents = w->meta.split[s].shards[number].documents, before = 0;
    data_shard_name(name, s, number, true);
    char *path = in_temp(w, name);
    uint64_t *block = malloc(BUF_BYTES);
    tsr_status st = path != NULL && block != NULL ? tsr_io_open_file(&io, path, err)
                                                  : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    for (uint64_t i = 0; st == TSR_OK && i < documents;) {
        uint64_t n = documents - i < BUF_BYTES / 8 ? documents - i : BUF_BYTES / 8;
        st = tsr_io_pread(io, block, n * 8, sizeof(data_head) + (i + 1) * 8, err);
        for (uint64_t k = 0; st == TSR_OK && k < n; k++) {
            if (block[k] <= before) {
                st = TSR_ERR(err, TSR_E_FORMAT, "%s: border %" PRIu64 ": does not ascend", path, i + k + 1);
                break;
            }
            uint64_t length = block[k] - before;
            before = block[k];
            w->low[s] = w->low[s] == 0 || length < w->low[s] ? length : w->low[s];
            w->high[s] = length > w->high[s] ? length : w->high[s];
            w->classes[s][63 - __builtin_clzll(length) < LENGTH_CLASSES ? 63 - __builtin_clzll(length)
                                                                        : LENGTH_CLASSES - 1]++;
        }
        i += n;
    }
    tsr_io_close(&io);
    free(block);
    free(path);
    return st;
}

static json_t *split_json(const data_writer *w, tsr_split s)
{
    const data_split *x = &w->meta.split[s];
    json_t *shards = json_array(), *classes = json_array();
    for (size_t i = 0; i < x->count; i++) {
        (void)json_array_append_new(shards, data_shard_json(&x->shards[i], s, i, false));
    }
    for (int k = 0; k < LENGTH_CLASSES && w->high[s] >> k != 0; k++) {
        (void)json_array_append_new(classes, json_integer((json_int_t)w->classes[s][k]));
    }
    if (json_array_size(shards) != x->count) {
        json_decref(shards);
        shards = NULL;
    }
    double mean = x->documents > 0 ? (double)x->tokens / (double)x->documents : 0;
    return json_pack("{s:I, s:I, s:I, s:{s:I, s:f, s:I, s:o}, s:o}", "documents", (json_int_t)x->documents,
                     "tokens", (json_int_t)x->tokens, "text_bytes", (json_int_t)x->text_bytes, "lengths",
                     "min", (json_int_t)w->low[s], "mean", mean, "max", (json_int_t)w->high[s], "histogram",
                     classes, "shards", shards);
}

static tsr_status write_json(const data_writer *w, json_t *facts, tsr_err *err)
{
    char hex[DATA_HEX_BYTES];
    uint64_t hash;
    int bad = 0;
    TSR_TRY(data_hash_of(&w->meta, &hash, err));
    data_hex(hash, hex);
    json_t *splits = json_object();
    for (int s = 0; s < TSR_SPLIT_COUNT; s++) {
        bad |= json_object_set_new(splits, tsr_split_name((tsr_split)s), split_json(w, (tsr_split)s));
    }
    bad |= json_object_set_new(facts, "hash", json_string(hex));
    bad |= json_object_set_new(facts, "splits", splits);
    if (bad != 0) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    TSR_TRY(data_json_hash(facts, &hash, err));
    data_hex(hash, hex);
    bad = json_object_set_new(facts, "check", json_string(hex));
    char *text = bad == 0 ? json_dumps(facts, JSON_INDENT(1) | JSON_REAL_PRECISION(17)) : NULL;
    char *path = in_temp(w, "data.json");
    tsr_status st = text != NULL && path != NULL ? tsr_fs_write_file(path, text, strlen(text), err)
                                                 : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    free(text);
    free(path);
    return st;
}

tsr_status data_writer_commit(data_writer *w, json_t *facts, tsr_err *err)
{
    for (int s = 0; s < TSR_SPLIT_COUNT; s++) {
        if (w->shard[s].open) {
            TSR_TRY(close_shard(w, (tsr_split)s, err));
        }
        for (size_t i = 0; i < w->meta.split[s].count; i++) {
            TSR_TRY(count_lengths(w, (tsr_split)s, i, err));
        }
    }
    TSR_TRY(write_json(w, facts, err));
    TSR_TRY(remove_own(w, NOTE, err));
    TSR_TRY(remove_own(w, "lock", err));
    TSR_TRY(tsr_fs_sync_dir(w->o.temp, err));
    TSR_TRY(tsr_fs_exists(w->o.real) ? tsr_fs_rename(w->o.temp, w->o.real, err)
                                     : tsr_fs_rename_new(w->o.temp, w->o.real, err));
    w->committed = true;
    char *parent = strdup(w->o.real);
    char *slash = parent != NULL ? strrchr(parent, '/') : NULL;
    if (slash != NULL) {
        slash[slash == parent ? 1 : 0] = '\0';
    }
    tsr_status st = parent != NULL ? tsr_fs_sync_dir(slash != NULL ? parent : ".", err)
                                   : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    free(parent);
    return st;
}
