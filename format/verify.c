/* verify.c - every byte of a checkpoint against its checksum; goes on after damage and names what it found. */
#include "format/verify.h"
#include "format/tar_dir.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void verify_tell(verifier *v, tsr_status code, const char *file, const char *item, const char *what)
{
    (void)pthread_mutex_lock(&v->mu);
    if (code == TSR_OK) {
        v->out->warnings++;
    } else {
        v->out->findings++;
        v->damage = v->damage || code != TSR_E_MISSING;
        v->missing = v->missing || code == TSR_E_MISSING;
    }
    if (v->fn != NULL) {
        tsr_finding f = { code, file, item, what };
        v->fn(v->payload, &f);
    }
    (void)pthread_mutex_unlock(&v->mu);
}

static void add_checked(verifier *v, uint64_t bytes)
{
    (void)__atomic_fetch_add(&v->out->bytes_checked, bytes, __ATOMIC_RELAXED);
}

static bool cancelled(const verifier *v)
{
    return v->progress != NULL && v->progress->cancel != NULL && *v->progress->cancel != 0;
}

/* ---- manifest and members ------------------------------------------------------------------------------------ */

/* Hash of a whole member; false when it cannot be read (told). */
static bool hash_member(verifier *v, const char *name, uint64_t bytes, tsr_hash128 *out)
{
    enum { PIECE = 1 << 20 };
    tsr_err err;
    tsr_io *io = NULL;
    tsr_hasher *h = tsr_hasher_new128();
    uint8_t *buf = malloc(PIECE);
    tsr_status st = h != NULL && buf != NULL ? v->dir->ops->open(v->dir, name, &io, &err)
                                             : TSR_ERR(&err, TSR_E_LIMIT, "out of memory");
    if (st == TSR_OK && io->size != bytes) {
        char what[128];
        (void)snprintf(what, sizeof what, "file has %llu bytes, the manifest promises %llu",
                       (unsigned long long)io->size, (unsigned long long)bytes);
        verify_tell(v, TSR_E_FORMAT, name, "size", what);
        st = TSR_E_DIFF;
    } else if (st != TSR_OK) {
        verify_tell(v, st == TSR_E_MISSING ? st : TSR_E_FORMAT, name, "file",
                    st == TSR_E_MISSING ? "missing" : err.msg);
    }
    for (uint64_t at = 0; st == TSR_OK && at < bytes;) {
        size_t n = bytes - at < PIECE ? (size_t)(bytes - at) : PIECE;
        st = tsr_io_pread(io, buf, n, at, &err);
        if (st != TSR_OK) {
            verify_tell(v, TSR_E_FORMAT, name, "file", err.msg);
        } else {
            tsr_hasher_add(h, buf, n);
            at += n;
        }
    }
    if (st == TSR_OK) {
        *out = tsr_hasher_digest128(h);
        add_checked(v, bytes);
    }
    tsr_io_close(&io);
    tsr_hasher_free(&h);
    free(buf);
    return st == TSR_OK;
}

static void check_members(verifier *v, json_t *root)
{
    json_t *list = json_object_get(root, "members"), *m;
    size_t i;
    json_array_foreach(list, i, m)
    {
        const char *name = json_string_value(json_object_get(m, "name"));
        const char *want = json_string_value(json_object_get(m, "xxh3"));
        json_t *bytes = json_object_get(m, "bytes");
        if (name == NULL || want == NULL || !json_is_integer(bytes) || json_integer_value(bytes) < 0) {
            verify_tell(v, TSR_E_FORMAT, TSR_MANIFEST_NAME, "members", "an entry makes no sense");
            continue;
        }
        tsr_hash128 h;
        char hex[33];
        if (v->level == TSR_VERIFY_QUICK) {
            uint64_t size = 0;
            tsr_err err;
            tsr_status st = v->dir->ops->size(v->dir, name, &size, &err);
            if (st != TSR_OK) {
                verify_tell(v, st, name, "file", st == TSR_E_MISSING ? "missing" : err.msg);
            } else if (size != (uint64_t)json_integer_value(bytes)) {
                verify_tell(v, TSR_E_FORMAT, name, "size", "differs from the manifest");
            }
            continue;
        }
        if (hash_member(v, name, (uint64_t)json_integer_value(bytes), &h)) {
            tsr_hash128_hex(&h, hex);
            if (strcmp(hex, want) != 0) {
                verify_tell(v, TSR_E_FORMAT, name, "content", "checksum differs: the file is damaged");
            }
        }
    }
}

/* True when name is listed in array `key` of the manifest. */
static bool listed(json_t *root, const char *key, const char *name)
{
    json_t *m;
    size_t i;
    json_array_foreach(json_object_get(root, key), i, m)
    {
        const char *n = json_string_value(json_object_get(m, "name"));
        if (n != NULL && strcmp(n, name) == 0) {
            return true;
        }
    }
    return false;
}

typedef struct foreign_search {
    verifier *v;
    json_t *root;
} foreign_search;

static tsr_status look_foreign(void *payload, const char *name, uint64_t size, tsr_err *err)
{
    (void)size, (void)err;
    foreign_search *s = payload;
    if (strcmp(name, TSR_MANIFEST_NAME) != 0 && strcmp(name, TSR_INDEX_NAME) != 0 &&
        strncmp(name, ".pad/", 5) != 0 && !listed(s->root, "files", name) &&
        !listed(s->root, "members", name)) {
        verify_tell(s->v, TSR_E_CONFLICT, name, "file", "foreign: the manifest does not know it");
    }
    return TSR_OK;
}

/* Shards by the manifest: for when the index does not open. */
static void check_listed_files(verifier *v, json_t *root)
{
    json_t *m;
    size_t i;
    json_array_foreach(json_object_get(root, "files"), i, m)
    {
        const char *name = json_string_value(json_object_get(m, "name"));
        json_t *bytes = json_object_get(m, "bytes");
        uint64_t size = 0;
        tsr_err err;
        if (name == NULL || !json_is_integer(bytes)) {
            verify_tell(v, TSR_E_FORMAT, TSR_MANIFEST_NAME, "files", "an entry makes no sense");
            continue;
        }
        v->out->files++;
        tsr_status st = v->dir->ops->size(v->dir, name, &size, &err);
        if (st != TSR_OK) {
            const char *tail = json_string_value(json_object_get(m, "experts"));
            char what[512];
            (void)snprintf(what, sizeof what, "missing%s%s", tail != NULL ? ", with experts " : "",
                           tail != NULL ? tail : "");
            verify_tell(v, st, name, "shard", st == TSR_E_MISSING ? what : err.msg);
        } else if (size != (uint64_t)json_integer_value(bytes)) {
            char what[128];
            (void)snprintf(what, sizeof what, "file has %llu bytes, the manifest promises %lld",
                           (unsigned long long)size, (long long)json_integer_value(bytes));
            verify_tell(v, TSR_E_FORMAT, name, "size", what);
        }
    }
}

/* ---- shards ------------------------------------------------------------------------------------------------------ */

typedef struct piece { /* one extent of a shard, to be hashed */
    uint64_t offset, bytes, hash;
    uint32_t tensor, item, chunk;
} piece;
typedef struct shard_work {
    verifier *v;
    const char *name;
    tsr_io *io;
    const uint8_t *map;
    piece *pieces;
    uint64_t count, next;
} shard_work;

static void tell_piece(verifier *v, const char *file, const piece *p, const char *what)
{
    tsr_tensor_info t;
    char item[700] = "?";
    if (tsr_ckpt_tensor(v->c, p->tensor, &t, NULL) == TSR_OK) {
        (void)tsr_tensor_item_name(&t, p->item, item, sizeof item);
    }
    verify_tell(v, TSR_E_FORMAT, file, item, what);
}

void verify_decoded(verifier *v, const tsr_tensor_info *t, uint32_t item, const tsr_extent_info *x,
                    const char *file, const uint8_t *stored)
{
    tsr_err err;
    char name[700];
    (void)tsr_tensor_item_name(t, item, name, sizeof name);
    uint8_t *raw = x->codec == TSR_CODEC_RAW ? NULL : malloc(x->raw_bytes + 1);
    if (x->codec != TSR_CODEC_RAW && raw == NULL) {
        verify_tell(v, TSR_E_FORMAT, file, name, "out of memory to decode it");
        return;
    }
    tsr_status st = raw != NULL ? tsr_extent_decode(x, t->dtype, stored, raw, &err) : TSR_OK;
    const uint8_t *bytes = raw != NULL ? raw : stored;
    if (st != TSR_OK) {
        verify_tell(v, TSR_E_FORMAT, file, name, err.msg);
    } else if (tsr_hash64(bytes, x->payload_bytes) != x->raw_hash) {
        verify_tell(v, TSR_E_FORMAT, file, name, "decodes to other bytes than were written");
    }
    free(raw);
}

static void check_piece(shard_work *w, const piece *p, uint8_t *buf)
{
    verifier *v = w->v;
    tsr_err err;
    const uint8_t *at = w->map != NULL ? w->map + p->offset : buf;
    if (w->map == NULL && tsr_io_pread(w->io, buf, p->bytes, p->offset, &err) != TSR_OK) {
        tell_piece(v, w->name, p, err.msg);
        return;
    }
    if (tsr_hash64(at, p->bytes) != p->hash) {
        tell_piece(v, w->name, p, "checksum differs: the data is damaged");
    } else if (v->level == TSR_VERIFY_DEEP) {
        tsr_tensor_info t;
        tsr_extent_info x;
        if (tsr_ckpt_tensor(v->c, p->tensor, &t, NULL) == TSR_OK &&
            tsr_ckpt_extent(v->c, &t, p->item, p->chunk, &x, NULL) == TSR_OK) {
            verify_decoded(v, &t, p->item, &x, w->name, at);
        }
    }
    if (w->map != NULL) {
        tsr_io_drop(w->io, p->offset, p->bytes);
    }
    add_checked(v, p->bytes);
}

static void report(const verifier *v)
{
    if (v->progress != NULL && v->progress->report != NULL) {
        uint64_t done = __atomic_load_n(&v->out->bytes_checked, __ATOMIC_RELAXED);
        v->progress->report(v->progress->payload, "verify", done, v->total_bytes);
    }
}

/* caller: this is the thread that called tsr_verify, which is the one that reports. */
static void check_pieces(shard_work *w, bool caller)
{
    uint8_t *buf = NULL;
    uint64_t room = 0;
    while (!cancelled(w->v)) {
        uint64_t i = __atomic_fetch_add(&w->next, 1, __ATOMIC_RELAXED);
        if (i >= w->count) {
            break;
        }
        if (w->map == NULL && w->pieces[i].bytes > room) {
            free(buf);
            room = w->pieces[i].bytes;
            buf = malloc(room);
            if (buf == NULL) {
                room = 0;
                tell_piece(w->v, w->name, &w->pieces[i], "out of memory to read it");
                continue;
            }
        }
        check_piece(w, &w->pieces[i], buf);
        if (caller) {
            report(w->v);
        }
    }
    free(buf);
}

static void *shard_thread(void *arg)
{
    check_pieces(arg, false);
    return NULL;
}

static void run_pieces(shard_work *w)
{
    pthread_t threads[64];
    int started = 0, want = w->v->threads < 64 ? w->v->threads : 64;
    while (started < want - 1 && (uint64_t)started + 1 < w->count &&
           pthread_create(&threads[started], NULL, shard_thread, w) == 0) {
        started++;
    }
    check_pieces(w, true);
    for (int i = 0; i < started; i++) {
        (void)pthread_join(threads[i], NULL);
    }
    report(w->v);
}

static int compare_pieces(const void *a, const void *b)
{
    const piece *x = a, *y = b;
    return x->offset < y->offset ? -1 : x->offset > y->offset;
}

/* Extents of one file, in file order, bounds checked. Damage of the index is told and ends the file's check. */
static bool gather_pieces(verifier *v, uint32_t file, const char *name, uint64_t size, piece **out,
                          uint64_t *count)
{
    tsr_err err;
    uint64_t room = 0;
    *out = NULL;
    *count = 0;
    for (uint32_t i = 0; i < tsr_ckpt_tensor_count(v->c); i++) {
        tsr_tensor_info t;
        if (tsr_ckpt_tensor(v->c, i, &t, &err) != TSR_OK) {
            verify_tell(v, TSR_E_FORMAT, TSR_INDEX_NAME, "tensor record", err.msg);
            return false;
        }
        uint32_t items = t.expert_count > 0 ? t.expert_count : 1;
        for (uint64_t k = 0; k < (uint64_t)items * t.chunks; k++) {
            tsr_extent_info x;
            uint32_t item = (uint32_t)(k / t.chunks), chunk = (uint32_t)(k % t.chunks);
            if (tsr_ckpt_extent(v->c, &t, item, chunk, &x, &err) != TSR_OK) {
                verify_tell(v, TSR_E_FORMAT, TSR_INDEX_NAME, t.name, err.msg);
                return false;
            }
            if (x.file != file || x.stored_bytes == 0) {
                continue;
            }
            if (*count == room) {
                room = room * 2 + 256;
                piece *grown = realloc(*out, room * sizeof **out);
                if (grown == NULL) {
                    verify_tell(v, TSR_E_FORMAT, name, "shard", "out of memory for its list of extents");
                    return false;
                }
                *out = grown;
            }
            (*out)[(*count)++] = (piece){ x.offset, x.stored_bytes, x.hash, i, item, chunk };
        }
    }
    if (*count > 0) {
        qsort(*out, *count, sizeof **out, compare_pieces);
    }
    for (uint64_t i = 0; i + 1 < *count; i++) {
        if ((*out)[i].offset + (*out)[i].bytes > (*out)[i + 1].offset) {
            tell_piece(v, name, &(*out)[i], "overlaps the extent behind it");
            return false;
        }
    }
    return *count == 0 || (*out)[*count - 1].offset + (*out)[*count - 1].bytes <= size;
}

/* Everything that is in no extent: HDF5's own structures, padding, the table. */
static void check_rest(verifier *v, const char *name, tsr_io *io, const piece *pieces, uint64_t count)
{
    uint8_t block[TSR_HEAD_BYTES];
    tsr_shard_head h;
    tsr_hash128 rest;
    tsr_err err;
    span *spans = malloc((count + 1) * sizeof *spans);
    if (spans == NULL || tsr_io_pread(io, block, sizeof block, 0, &err) != TSR_OK ||
        tsr_shard_head_check(block, io->size, &h, &err) != TSR_OK) {
        free(spans);
        return; /* the head was told already */
    }
    uint64_t used = 0;
    for (uint64_t i = 0; i < count; i++) {
        spans[i] = (span){ pieces[i].offset, pieces[i].bytes, 0 };
        used += pieces[i].bytes;
    }
    if (save_rest_hash(io, spans, count, &rest, &err) != TSR_OK) {
        verify_tell(v, TSR_E_FORMAT, name, "HDF5 metadata", err.msg);
    } else if (memcmp(rest.b, h.rest_hash, 16) != 0) {
        verify_tell(v, TSR_E_FORMAT, name, "HDF5 metadata",
                    "checksum differs: structure or padding is damaged, tensor data is not");
    }
    add_checked(v, io->size - used);
    free(spans);
}

static void check_shard(verifier *v, uint32_t file)
{
    tsr_file_info f;
    tsr_err err;
    tsr_io *io;
    v->out->files++;
    if (tsr_ckpt_file(v->c, file, &f, &err) != TSR_OK) {
        verify_tell(v, TSR_E_FORMAT, TSR_INDEX_NAME, "file record", err.msg);
        return;
    }
    uint64_t size;
    tsr_status st = v->dir->ops->size(v->dir, f.name, &size, &err);
    if (st != TSR_OK || size != f.bytes) {
        return; /* told from the manifest's list */
    }
    st = tsr_ckpt_file_io(v->c, file, &io, &err);
    if (st != TSR_OK) {
        size_t skip = strlen(v->dir->path) + strlen(f.name) + 3; /* "path/name: " */
        bool prefixed = strlen(err.msg) > skip &&
                        strncmp(err.msg + strlen(v->dir->path) + 1, f.name, strlen(f.name)) == 0;
        verify_tell(v, st == TSR_E_MISSING ? st : TSR_E_FORMAT, f.name, "shard head",
                    prefixed ? err.msg + skip : err.msg);
        return;
    }
    piece *pieces;
    uint64_t count;
    if (gather_pieces(v, file, f.name, io->size, &pieces, &count)) {
        v->out->extents += count;
        if (v->level != TSR_VERIFY_QUICK) {
            shard_work w = {
                .v = v, .name = f.name, .io = io, .map = tsr_io_map(io), .pieces = pieces, .count = count
            };
            run_pieces(&w);
            check_rest(v, f.name, io, pieces, count);
        }
    }
    free(pieces);
}

/* ---- all --------------------------------------------------------------------------------------------------------------- */

static void check_index_pages(verifier *v)
{
    const tsr_index *ix = tsr_ckpt_index(v->c);
    tsr_err err;
    for (uint64_t p = 0; p < ix->page_count; p++) {
        uint64_t from = ix->head.page_base + p * TSR_PAGE_BYTES;
        uint64_t n = ix->head.index_bytes - from < TSR_PAGE_BYTES ? ix->head.index_bytes - from
                                                                  : TSR_PAGE_BYTES;
        if (tsr_index_touch(ix, from, n, &err) != TSR_OK) {
            char item[64];
            (void)snprintf(item, sizeof item, "page %llu", (unsigned long long)p);
            verify_tell(v, TSR_E_FORMAT, TSR_INDEX_NAME, item,
                        "checksum differs: the index is damaged (tessera index --rebuild makes it again)");
        }
    }
    add_checked(v, ix->head.index_bytes);
}

static json_t *load_manifest(verifier *v)
{
    char *text;
    size_t bytes;
    tsr_err err;
    tsr_status st = tsr_dir_read(v->dir, TSR_MANIFEST_NAME, TSR_MANIFEST_BYTES_MAX, &text, &bytes, &err);
    if (st != TSR_OK) {
        verify_tell(v, st == TSR_E_MISSING ? st : TSR_E_FORMAT, TSR_MANIFEST_NAME, "file",
                    st == TSR_E_MISSING ? "missing: not a committed checkpoint" : err.msg);
        return NULL;
    }
    if (!manifest_intact(text, bytes)) {
        verify_tell(v, TSR_E_FORMAT, TSR_MANIFEST_NAME, "content",
                    "check value differs: the manifest is damaged");
    }
    json_error_t e;
    json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &e);
    if (root == NULL) {
        char what[300];
        (void)snprintf(what, sizeof what, "line %d: %s", e.line, e.text);
        verify_tell(v, TSR_E_FORMAT, TSR_MANIFEST_NAME, "JSON", what);
    }
    add_checked(v, bytes);
    free(text);
    return root;
}

static tsr_status open_again(verifier *v, const char *path, tsr_err *err)
{
    bool tar = !tsr_fs_is_dir(path);
    tsr_dir *d;
    tsr_err why;
    TSR_TRY(tar ? tsr_dir_open_tar(&d, path, err) : tsr_dir_open_posix(&d, path, err));
    tsr_status st = tsr_ckpt_open_dir(&v->c, d, true, &why);
    if (st == TSR_OK) {
        return TSR_OK;
    }
    if (v->out->findings == 0) { /* else it is the consequence of what was told */
        size_t skip = strlen(v->dir->path) + 1;
        const char *what = strncmp(why.msg, v->dir->path, skip - 1) == 0 ? why.msg + skip : why.msg;
        while (*what == ' ' || *what == '/') {
            what++;
        }
        verify_tell(v, st == TSR_E_MISSING ? st : TSR_E_FORMAT, TSR_INDEX_NAME, "index", what);
    }
    return TSR_OK;
}

static tsr_status verify_all(verifier *v, const char *path, tsr_err *err)
{
    json_t *root = load_manifest(v);
    if (root == NULL) {
        return TSR_OK;
    }
    check_listed_files(v, root);
    check_members(v, root);
    foreign_search s = { v, root };
    tsr_status st = v->dir->ops->each(v->dir, look_foreign, &s, err);
    json_decref(root);
    TSR_TRY(st);
    v->out->files = 0;
    TSR_TRY(open_again(v, path, err));
    if (v->c == NULL) {
        return TSR_OK;
    }
    v->out->tensors = tsr_ckpt_tensor_count(v->c);
    for (uint32_t i = 0; i < tsr_ckpt_file_count(v->c); i++) {
        tsr_file_info f;
        if (tsr_ckpt_file(v->c, i, &f, NULL) == TSR_OK) {
            v->total_bytes += f.bytes;
        }
    }
    check_index_pages(v);
    for (uint32_t i = 0; i < tsr_ckpt_file_count(v->c); i++) {
        if (cancelled(v)) {
            TSR_FAIL(err, TSR_E_CANCELLED, "%s: verification stopped", path);
        }
        check_shard(v, i);
    }
    return v->level == TSR_VERIFY_DEEP ? verify_deep(v, err) : TSR_OK;
}

tsr_status tsr_verify(const char *path, tsr_verify_level level, int threads, tsr_finding_fn fn, void *payload,
                      const tsr_progress *progress, tsr_verify_report *out, tsr_err *err)
{
    *out = (tsr_verify_report){ 0 };
    long n = threads > 0 ? threads : sysconf(_SC_NPROCESSORS_ONLN);
    verifier v = { .level = level,
                   .threads = n > 0 ? (int)n : 1,
                   .fn = fn,
                   .payload = payload,
                   .progress = progress,
                   .out = out };
    TSR_TRY(tsr_fs_is_dir(path) || !tsr_fs_exists(path) ? tsr_dir_open_posix(&v.dir, path, err)
                                                        : tsr_dir_open_tar(&v.dir, path, err));
    (void)pthread_mutex_init(&v.mu, NULL); /* cannot fail with default attributes */
    tsr_status st = verify_all(&v, path, err);
    out->worst = v.damage ? TSR_E_DIFF : v.missing ? TSR_E_MISSING : TSR_OK;
    tsr_ckpt_close(&v.c);
    tsr_dir_close(&v.dir);
    (void)pthread_mutex_destroy(&v.mu);
    return st;
}
