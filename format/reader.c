/* reader.c - an open checkpoint: look-up and reads. Needs no HDF5 and no JSON. */
#include "format/reader.h"
#include "format/chunking.h"
#include "format/codec.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct tsr_ckpt {
    tsr_dir *dir;
    tsr_io *index_io;
    tsr_index *ix;
    char *manifest;
    size_t manifest_bytes;
    pthread_mutex_t lock; /* guards the two lazily made things below */
    tsr_io **files;       /* NULL until first use */
    uint32_t *families;   /* ids of families sorted by (class, layer, id), made by the first expert look-up */
    uint32_t family_count;
};

const char *tsr_class_name(unsigned klass)
{
    static const char *const names[] = { "dense", "experts", "optim-dense", "optim-experts" };
    return klass < TSR_CLASS_COUNT ? names[klass] : "?";
}

/* ---- open ------------------------------------------------------------------------------------------ */

static tsr_status open_index(tsr_ckpt *c, tsr_err *err)
{
    tsr_status st = c->dir->ops->open(c->dir, TSR_INDEX_NAME, &c->index_io, err);
    if (st != TSR_OK) {
        if (st == TSR_E_MISSING) {
            TSR_FAIL(err, st, "%s: %s is missing (tessera index --rebuild makes it again)", c->dir->path,
                     TSR_INDEX_NAME);
        }
        return st;
    }
    char what[512];
    (void)snprintf(what, sizeof what, "%.400s/%s", c->dir->path, TSR_INDEX_NAME);
    const uint8_t *base = tsr_io_map(c->index_io);
    uint8_t *owned = NULL;
    uint64_t bytes = c->index_io->size;
    if (base == NULL || (uintptr_t)base % 8 != 0) {
        if (bytes > (uint64_t)1 << 36 || (owned = malloc(bytes + 1)) == NULL) {
            TSR_FAIL(err, TSR_E_LIMIT, "%s: %llu bytes are too many to read", what,
                     (unsigned long long)bytes);
        }
        st = tsr_io_pread(c->index_io, owned, bytes, 0, err);
        if (st != TSR_OK) {
            free(owned);
            return st;
        }
        base = owned;
    }
    TSR_TRY(tsr_index_open(&c->ix, what, base, bytes, owned, err));
    if ((c->ix->head.flags & 1) != 0) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: is the table of a single shard, not of a checkpoint", what);
    }
    tsr_hash128 h = tsr_hash_128(c->manifest, c->manifest_bytes);
    if (c->manifest_bytes != c->ix->head.manifest_bytes || memcmp(h.b, c->ix->head.manifest_hash, 16) != 0) {
        TSR_FAIL(err, TSR_E_FORMAT,
                 "%s/%s: is not the one that %s was made for: one of them is damaged or stale"
                 " (tessera verify tells more)",
                 c->dir->path, TSR_MANIFEST_NAME, TSR_INDEX_NAME);
    }
    return TSR_OK;
}

/* Presence and exact size of every shard. */
static tsr_status check_sizes(tsr_ckpt *c, tsr_err *err)
{
    char missing[512] = "";
    uint32_t missing_count = 0;
    size_t used = 0;
    uint32_t n = c->ix->head.file_count;
    for (uint32_t i = 0; i < n; i++) {
        tsr_file_rec rec;
        const char *name;
        uint64_t size;
        TSR_TRY(tsr_index_file(c->ix, i, &rec, &name, err));
        tsr_status st = c->dir->ops->size(c->dir, name, &size, err);
        if (st == TSR_E_MISSING) {
            missing_count++;
            if (used < 400) {
                used += (size_t)snprintf(missing + used, sizeof missing - used, "%s%.90s", used ? ", " : "",
                                         name);
            }
        } else if (st != TSR_OK) {
            return st;
        } else if (size != rec.file_bytes) {
            TSR_FAIL(err, TSR_E_FORMAT, "%s/%s: file has %llu bytes, the index promises %llu", c->dir->path,
                     name, (unsigned long long)size, (unsigned long long)rec.file_bytes);
        }
    }
    if (missing_count > 0) {
        TSR_FAIL(err, TSR_E_MISSING, "%s: %u of %u shards missing: %s%s", c->dir->path, missing_count, n,
                 missing, used >= 400 ? ", ..." : "");
    }
    return TSR_OK;
}

tsr_status tsr_ckpt_open_dir(tsr_ckpt **out, tsr_dir *dir, bool lenient, tsr_err *err)
{
    *out = NULL;
    tsr_status st;
    tsr_ckpt *c = calloc(1, sizeof *c);
    if (c == NULL) {
        tsr_dir_close(&dir);
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    c->dir = dir;
    (void)pthread_mutex_init(&c->lock, NULL); /* cannot fail with default attributes */
    st = tsr_dir_read(dir, TSR_MANIFEST_NAME, TSR_MANIFEST_BYTES_MAX, &c->manifest, &c->manifest_bytes, err);
    if (st == TSR_E_MISSING) {
        st = TSR_ERR(err, st, "%s: no %s: not a committed checkpoint", dir->path, TSR_MANIFEST_NAME);
    }
    if (st == TSR_OK) {
        st = open_index(c, err);
    }
    if (st == TSR_OK && !lenient) {
        st = check_sizes(c, err);
    }
    if (st == TSR_OK) {
        c->files = calloc((size_t)c->ix->head.file_count + 1, sizeof *c->files);
        if (c->files == NULL) {
            st = TSR_ERR(err, TSR_E_LIMIT, "out of memory");
        }
    }
    if (st != TSR_OK) {
        tsr_ckpt_close(&c);
    }
    *out = c;
    return st;
}

tsr_status tsr_ckpt_open(tsr_ckpt **out, const char *path, tsr_err *err)
{
    *out = NULL;
    tsr_dir *dir;
    TSR_TRY(tsr_dir_open_posix(&dir, path, err));
    return tsr_ckpt_open_dir(out, dir, false, err);
}

void tsr_ckpt_close(tsr_ckpt **c)
{
    if (c == NULL || *c == NULL) {
        return;
    }
    for (uint32_t i = 0; (*c)->files != NULL && i < (*c)->ix->head.file_count; i++) {
        tsr_io_close(&(*c)->files[i]);
    }
    free((*c)->files);
    free((*c)->families);
    tsr_index_close(&(*c)->ix);
    tsr_io_close(&(*c)->index_io);
    free((*c)->manifest);
    tsr_dir_close(&(*c)->dir);
    (void)pthread_mutex_destroy(&(*c)->lock);
    free(*c);
    *c = NULL;
}

/* ---- plain facts ------------------------------------------------------------------------------------- */

const char *tsr_ckpt_path(const tsr_ckpt *c)
{
    return c->dir->path;
}

const char *tsr_ckpt_manifest(const tsr_ckpt *c, size_t *bytes_out)
{
    if (bytes_out != NULL) {
        *bytes_out = c->manifest_bytes;
    }
    return c->manifest;
}

uint32_t tsr_ckpt_tensor_count(const tsr_ckpt *c)
{
    return c->ix->head.tensor_count;
}

uint32_t tsr_ckpt_file_count(const tsr_ckpt *c)
{
    return c->ix->head.file_count;
}

uint64_t tsr_ckpt_extent_count(const tsr_ckpt *c)
{
    return c->ix->head.extent_count;
}

uint32_t tsr_ckpt_expert_count(const tsr_ckpt *c)
{
    return (uint32_t)c->ix->head.expert_count_max;
}

const tsr_index *tsr_ckpt_index(const tsr_ckpt *c)
{
    return c->ix;
}

tsr_dir *tsr_ckpt_dir(const tsr_ckpt *c)
{
    return c->dir;
}

tsr_status tsr_ckpt_tensor(const tsr_ckpt *c, uint32_t id, tsr_tensor_info *out, tsr_err *err)
{
    TSR_ASSERT(id < c->ix->head.tensor_count);
    return tsr_index_tensor(c->ix, id, out, NULL, err);
}

tsr_status tsr_ckpt_file(const tsr_ckpt *c, uint32_t file, tsr_file_info *out, tsr_err *err)
{
    TSR_ASSERT(file < c->ix->head.file_count);
    tsr_file_rec r;
    TSR_TRY(tsr_index_file(c->ix, file, &r, &out->name, err));
    out->bytes = r.file_bytes;
    out->klass = (tsr_class)r.klass;
    out->partition = r.partition;
    out->of = r.of;
    out->piece = r.piece;
    memcpy(out->uuid, r.uuid, 16);
    return TSR_OK;
}

tsr_tensor_decl tsr_tensor_decl_of(const tsr_tensor_info *t)
{
    return (tsr_tensor_decl){ .name = t->name,
                              .dtype = t->dtype,
                              .src_dtype = t->src_dtype,
                              .rank = t->rank,
                              .shape = t->shape,
                              .klass = t->klass,
                              .layer = t->layer,
                              .expert_count = t->expert_count,
                              .partner = t->partner };
}

size_t tsr_tensor_item_name(const tsr_tensor_info *t, uint32_t item, char *buf, size_t buf_bytes)
{
    const char *at = t->expert_count > 0 ? strstr(t->name, "{e}") : NULL;
    int n = at == NULL ? snprintf(buf, buf_bytes, "%s", t->name)
                       : snprintf(buf, buf_bytes, "%.*s%u%s", (int)(at - t->name), t->name, item, at + 3);
    return n < 0 ? 0 : (size_t)n;
}

/* ---- look-up ------------------------------------------------------------------------------------------ */

/* Tries the digit run [from, to) of name as the expert's number. */
static tsr_status find_expert(const tsr_ckpt *c, const char *name, size_t n, size_t from, size_t to,
                              uint32_t *id, uint32_t *item, tsr_err *err)
{
    *id = UINT32_MAX;
    if (to - from > 7 || (name[from] == '0' && to - from > 1)) {
        return TSR_OK; /* not how we write a number */
    }
    uint32_t e = 0;
    for (size_t i = from; i < to; i++) {
        e = e * 10 + (uint32_t)(name[i] - '0');
    }
    char key[TSR_NAME_BYTES_MAX + 4];
    memcpy(key, name, from);
    memcpy(key + from, "{e}", 3);
    memcpy(key + from + 3, name + to, n - to);
    TSR_TRY(tsr_index_lookup(c->ix, key, from + 3 + n - to, true, id, err));
    *item = e;
    return TSR_OK;
}

tsr_status tsr_ckpt_find(const tsr_ckpt *c, const char *name, tsr_tensor_info *out, uint32_t *item,
                         tsr_err *err)
{
    size_t n = strlen(name);
    uint32_t id = UINT32_MAX, which = 0;
    if (n <= TSR_NAME_BYTES_MAX) {
        TSR_TRY(tsr_index_lookup(c->ix, name, n, false, &id, err));
        if (id == UINT32_MAX && strstr(name, "{e}") != NULL) {
            which = UINT32_MAX;
            TSR_TRY(tsr_index_lookup(c->ix, name, n, true, &id, err));
        }
        for (size_t i = 0; id == UINT32_MAX && i < n; i++) {
            size_t to = i;
            while (to < n && name[to] >= '0' && name[to] <= '9') {
                to++;
            }
            if (to > i) {
                TSR_TRY(find_expert(c, name, n, i, to, &id, &which, err));
                i = to;
            }
        }
    }
    if (id == UINT32_MAX) {
        TSR_FAIL(err, TSR_E_MISSING, "%s: no tensor is called %.200s", c->dir->path, name);
    }
    TSR_TRY(tsr_index_tensor(c->ix, id, out, NULL, err));
    if (out->expert_count > 0 && which != UINT32_MAX && which >= out->expert_count) {
        TSR_FAIL(err, TSR_E_MISSING, "%s: %.200s: experts go from 0 to %u", c->dir->path, name,
                 out->expert_count - 1);
    }
    *item = which;
    return TSR_OK;
}

tsr_status tsr_ckpt_extent(const tsr_ckpt *c, const tsr_tensor_info *t, uint32_t item, uint32_t chunk,
                           tsr_extent_info *out, tsr_err *err)
{
    TSR_ASSERT(chunk < t->chunks && item < (t->expert_count > 0 ? t->expert_count : 1));
    tsr_tensor_info again;
    uint64_t first;
    tsr_extent_rec r;
    tsr_file_rec f;
    const char *name;
    TSR_TRY(tsr_index_tensor(c->ix, t->id, &again, &first, err));
    TSR_TRY(tsr_index_extent(c->ix, first + (uint64_t)item * t->chunks + chunk, &r, err));
    TSR_TRY(tsr_index_file(c->ix, r.file, &f, &name, err));
    tsr_chunk_range(t->block_bytes, t->chunk_bytes, chunk, &out->item_offset, &out->payload_bytes);
    tsr_status st = tsr_extent_check(&r, out->payload_bytes, t->chunk_bytes, f.file_bytes, err);
    if (st != TSR_OK) {
        char item_name[512];
        (void)tsr_tensor_item_name(t, item, item_name, sizeof item_name);
        tsr_err_prefix(err, "%s: %s", c->ix->what, item_name);
        return st;
    }
    out->file = r.file;
    out->codec = (tsr_codec)r.codec;
    out->offset = r.offset;
    out->stored_bytes = r.stored_bytes;
    out->raw_bytes = r.raw_bytes;
    out->hash = r.hash;
    out->raw_hash = r.raw_hash;
    return TSR_OK;
}

/* ---- shards ------------------------------------------------------------------------------------------- */

void tsr_ranges_text(const uint32_t *ids, uint32_t count, char *buf, size_t buf_bytes)
{
    size_t used = 0;
    buf[0] = '\0';
    for (uint32_t i = 0; i < count && used + 32 < buf_bytes;) {
        uint32_t j = i;
        while (j + 1 < count && ids[j + 1] == ids[j] + 1) {
            j++;
        }
        const char *sep = i > 0 ? ", " : "";
        if (j == i + 1) {
            j = i; /* two in a row read better as "2, 3" */
        }
        used += (size_t)(j == i ? snprintf(buf + used, buf_bytes - used, "%s%u", sep, ids[i])
                                : snprintf(buf + used, buf_bytes - used, "%s%u-%u", sep, ids[i], ids[j]));
        i = j + 1;
        if (i < count && used + 32 >= buf_bytes) {
            (void)snprintf(buf + used, buf_bytes - used, ", ...");
        }
    }
}

tsr_status tsr_ckpt_file_experts(const tsr_ckpt *c, uint32_t file, uint32_t **ids_out, uint32_t *count_out,
                                 tsr_err *err)
{
    *ids_out = NULL;
    *count_out = 0;
    tsr_file_info f;
    TSR_TRY(tsr_ckpt_file(c, file, &f, err));
    tsr_tensor_info best = { 0 }, t;
    uint64_t best_first = 0, first;
    for (uint32_t i = 0; i < c->ix->head.tensor_count;
         i++) { /* the family with the most experts stands for all */
        TSR_TRY(tsr_index_tensor(c->ix, i, &t, &first, err));
        if (t.klass == f.klass && t.chunks > 0 && t.expert_count > best.expert_count) {
            best = t;
            best_first = first;
        }
    }
    if (best.expert_count == 0) {
        return TSR_OK;
    }
    uint32_t *ids = malloc((size_t)best.expert_count * sizeof *ids);
    if (ids == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    for (uint32_t e = 0; e < best.expert_count; e++) {
        tsr_extent_rec r;
        tsr_status st = tsr_index_extent(c->ix, best_first + (uint64_t)e * best.chunks, &r, err);
        if (st != TSR_OK) {
            free(ids);
            return st;
        }
        if (r.file == file) {
            ids[(*count_out)++] = e;
        }
    }
    *ids_out = ids;
    return TSR_OK;
}

/* The shard on disk is not the one the index names: says what that means for the model. */
static tsr_status foreign_shard(const tsr_ckpt *c, uint32_t file, const char *name, const tsr_shard_head *h,
                                tsr_err *err)
{
    for (uint32_t i = 0; i < c->ix->head.file_count; i++) {
        tsr_file_rec r;
        const char *other;
        TSR_TRY(tsr_index_file(c->ix, i, &r, &other, err));
        if (i == file || memcmp(r.uuid, h->uuid, 16) != 0) {
            continue;
        }
        uint32_t *gone, *twice, gone_count, twice_count;
        TSR_TRY(tsr_ckpt_file_experts(c, file, &gone, &gone_count, err));
        tsr_status st = tsr_ckpt_file_experts(c, i, &twice, &twice_count, err);
        if (st != TSR_OK) {
            free(gone);
            return st;
        }
        char a[256], b[256];
        tsr_ranges_text(gone, gone_count, a, sizeof a);
        tsr_ranges_text(twice, twice_count, b, sizeof b);
        free(gone);
        free(twice);
        if (gone_count > 0) {
            TSR_FAIL(err, TSR_E_MISSING, "%s/%s: is a copy of %s: experts %s missing, %s twice", c->dir->path,
                     name, other, a, b);
        }
        TSR_FAIL(err, TSR_E_MISSING, "%s/%s: is a copy of %s: its own tensors are missing", c->dir->path,
                 name, other);
    }
    TSR_FAIL(err, TSR_E_FORMAT, "%s/%s: is a foreign shard: the index was made for another one", c->dir->path,
             name);
}

static tsr_status open_shard(const tsr_ckpt *c, uint32_t file, tsr_io **out, tsr_err *err)
{
    tsr_file_rec r;
    const char *name;
    uint8_t block[TSR_HEAD_BYTES];
    tsr_shard_head h;
    TSR_TRY(tsr_index_file(c->ix, file, &r, &name, err));
    tsr_io *io;
    TSR_TRY(c->dir->ops->open(c->dir, name, &io, err));
    tsr_status st = tsr_io_pread(io, block, sizeof block, 0, err);
    if (st == TSR_OK) {
        st = tsr_shard_head_check(block, io->size, &h, err);
        if (st != TSR_OK) {
            tsr_err_prefix(err, "%s/%s", c->dir->path, name);
        } else if (memcmp(h.uuid, r.uuid, 16) != 0 || h.head_hash != r.head_hash) {
            st = foreign_shard(c, file, name, &h, err);
        }
    }
    if (st != TSR_OK) {
        tsr_io_close(&io);
        return st;
    }
    *out = io;
    return TSR_OK;
}

tsr_status tsr_ckpt_file_io(const tsr_ckpt *c, uint32_t file, tsr_io **out, tsr_err *err)
{
    TSR_ASSERT(file < c->ix->head.file_count);
    tsr_io *io = __atomic_load_n(&c->files[file], __ATOMIC_ACQUIRE);
    if (io == NULL) {
        pthread_mutex_t *lock =
            (pthread_mutex_t *)(uintptr_t)&c->lock; /* opening is invisible to the caller */
        (void)pthread_mutex_lock(lock);
        tsr_status st = TSR_OK;
        io = c->files[file];
        if (io == NULL) {
            st = open_shard(c, file, &io, err);
            if (st == TSR_OK) {
                __atomic_store_n(&c->files[file], io, __ATOMIC_RELEASE);
            }
        }
        (void)pthread_mutex_unlock(lock);
        TSR_TRY(st);
    }
    *out = io;
    return TSR_OK;
}

tsr_status tsr_ckpt_check_file(const tsr_ckpt *c, uint32_t file, tsr_err *err)
{
    tsr_io *io;
    return tsr_ckpt_file_io(c, file, &io, err);
}

/* ---- data ----------------------------------------------------------------------------------------------- */

tsr_status tsr_ckpt_read_stored(const tsr_ckpt *c, const tsr_extent_info *x, void *dst, tsr_err *err)
{
    tsr_io *io;
    TSR_TRY(tsr_ckpt_file_io(c, x->file, &io, err));
    return tsr_io_pread(io, dst, x->stored_bytes, x->offset, err);
}

const uint8_t *tsr_ckpt_map_stored(const tsr_ckpt *c, const tsr_extent_info *x)
{
    tsr_io *io;
    if (tsr_ckpt_file_io(c, x->file, &io, NULL) != TSR_OK) {
        return NULL;
    }
    const uint8_t *base = tsr_io_map(io);
    return base != NULL ? base + x->offset : NULL;
}

/* Puts file and tensor in front of what is wrong with one extent. */
static tsr_status blame(const tsr_ckpt *c, const tsr_tensor_info *t, uint32_t item, const tsr_extent_info *x,
                        tsr_status st, tsr_err *err)
{
    char name[600];
    tsr_file_info f;
    (void)tsr_tensor_item_name(t, item, name, sizeof name);
    if (tsr_ckpt_file(c, x->file, &f, NULL) == TSR_OK) {
        tsr_err_prefix(err, "%s/%s: %s", c->dir->path, f.name, name);
    }
    return st;
}

/* Bytes [from, from + n) of one chunk's payload. */
static tsr_status read_chunk(const tsr_ckpt *c, const tsr_tensor_info *t, uint32_t item,
                             const tsr_extent_info *x, uint64_t from, uint8_t *dst, uint64_t n,
                             unsigned flags, tsr_err *err)
{
    tsr_io *io;
    TSR_TRY(tsr_ckpt_file_io(c, x->file, &io, err));
    bool check = (flags & TSR_READ_CHECK) != 0;
    bool whole = from == 0 && n == x->raw_bytes;
    if (x->codec == TSR_CODEC_RAW && (whole || !check)) {
        TSR_TRY(tsr_io_pread(io, dst, n, x->offset + from, err));
        if (check && tsr_hash64(dst, n) != x->hash) {
            return blame(c, t, item, x, TSR_ERR(err, TSR_E_FORMAT, "checksum differs: the data is damaged"),
                         err);
        }
        return TSR_OK;
    }
    const uint8_t *map = x->codec != TSR_CODEC_RAW ? tsr_io_map(io) : NULL; /* spares a copy */
    uint64_t stored_room = map != NULL ? 0 : x->stored_bytes, total;
    if (!tsr_add_u64(stored_room, whole ? 0 : x->raw_bytes, &total) || total > SIZE_MAX / 2) {
        return blame(c, t, item, x, TSR_ERR(err, TSR_E_LIMIT, "chunk is too large"), err);
    }
    uint8_t *room = malloc(total + 1), *raw = whole ? dst : room + stored_room;
    if (room == NULL) {
        return blame(
            c, t, item, x,
            TSR_ERR(err, TSR_E_LIMIT, "out of memory: a chunk needs %llu bytes", (unsigned long long)total),
            err);
    }
    const uint8_t *stored = map != NULL ? map + x->offset : room;
    tsr_status st = map != NULL ? TSR_OK : tsr_io_pread(io, room, x->stored_bytes, x->offset, err);
    if (st == TSR_OK && tsr_hash64(stored, x->stored_bytes) != x->hash) {
        st = blame(c, t, item, x, TSR_ERR(err, TSR_E_FORMAT, "checksum differs: the data is damaged"), err);
    } else if (st == TSR_OK) {
        st = tsr_extent_decode(x, t->dtype, stored, raw, err);
        if (st != TSR_OK) {
            st = blame(c, t, item, x, st, err);
        } else if (!whole) {
            memcpy(dst, raw + from, n);
        }
    }
    if (map != NULL) {
        tsr_io_drop(io, x->offset, x->stored_bytes);
    }
    free(room);
    return st;
}

tsr_status tsr_ckpt_read(const tsr_ckpt *c, const tsr_tensor_info *t, uint32_t item, uint64_t off, void *dst,
                         size_t n, unsigned flags, tsr_err *err)
{
    TSR_ASSERT(off <= t->item_bytes && n <= t->item_bytes - off);
    uint8_t *to = dst;
    while (n > 0) {
        tsr_extent_info x;
        uint64_t chunk = tsr_chunk_at(t->block_bytes, t->chunk_bytes, off);
        TSR_TRY(tsr_ckpt_extent(c, t, item, (uint32_t)chunk, &x, err));
        uint64_t from = off - x.item_offset, len = x.payload_bytes - from;
        len = len < n ? len : n;
        TSR_TRY(read_chunk(c, t, item, &x, from, to, len, flags, err));
        to += len;
        off += len;
        n -= len;
    }
    return TSR_OK;
}

tsr_status tsr_ckpt_read_member(const tsr_ckpt *c, const char *name, size_t limit, char **out,
                                size_t *bytes_out, tsr_err *err)
{
    return tsr_dir_read(c->dir, name, limit, out, bytes_out, err);
}

tsr_status tsr_ckpt_each_member(const tsr_ckpt *c,
                                tsr_status (*fn)(void *payload, const char *name, uint64_t size,
                                                 tsr_err *err),
                                void *payload, tsr_err *err)
{
    return c->dir->ops->each(c->dir, fn, payload, err);
}

/* ---- one expert, one read ------------------------------------------------------------------------------- */

typedef struct family_key {
    int klass;
    int32_t layer;
    uint32_t id;
} family_key;

static int compare_keys(const void *a, const void *b)
{
    const family_key *x = a, *y = b;
    if (x->klass != y->klass) {
        return x->klass < y->klass ? -1 : 1;
    }
    if (x->layer != y->layer) {
        return x->layer < y->layer ? -1 : 1;
    }
    return x->id < y->id ? -1 : x->id > y->id;
}

static tsr_status make_families(tsr_ckpt *c, tsr_err *err)
{
    uint32_t n = c->ix->head.tensor_count, count = 0;
    family_key *keys = malloc(((size_t)n + 1) * sizeof *keys);
    uint32_t *ids = malloc(((size_t)n + 1) * sizeof *ids);
    tsr_status st = keys != NULL && ids != NULL ? TSR_OK : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    for (uint32_t i = 0; st == TSR_OK && i < n; i++) {
        tsr_tensor_info t;
        st = tsr_index_tensor(c->ix, i, &t, NULL, err);
        if (st == TSR_OK && t.expert_count > 0) {
            keys[count++] = (family_key){ (int)t.klass, t.layer, i };
        }
    }
    if (st != TSR_OK) {
        free(keys);
        free(ids);
        return st;
    }
    qsort(keys, count, sizeof *keys, compare_keys);
    for (uint32_t i = 0; i < count; i++) {
        ids[i] = keys[i].id;
    }
    free(keys);
    c->family_count = count;
    __atomic_store_n(&c->families, ids, __ATOMIC_RELEASE);
    return TSR_OK;
}

/* The run of family ids of (klass, layer). */
static tsr_status layer_families(const tsr_ckpt *cc, int32_t layer, tsr_class klass, const uint32_t **first,
                                 uint32_t *count, tsr_err *err)
{
    tsr_ckpt *c = (tsr_ckpt *)(uintptr_t)cc; /* the list is made once, behind the lock */
    if (__atomic_load_n(&c->families, __ATOMIC_ACQUIRE) == NULL) {
        (void)pthread_mutex_lock(&c->lock);
        tsr_status st = c->families == NULL ? make_families(c, err) : TSR_OK;
        (void)pthread_mutex_unlock(&c->lock);
        TSR_TRY(st);
    }
    uint32_t lo = 0, hi = c->family_count;
    tsr_tensor_info t;
    while (lo < hi) {
        uint32_t mid = lo + (hi - lo) / 2;
        TSR_TRY(tsr_index_tensor(c->ix, c->families[mid], &t, NULL, err));
        if (t.klass < klass || (t.klass == klass && t.layer < layer)) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    *first = c->families + lo;
    *count = 0;
    while (lo + *count < c->family_count) {
        TSR_TRY(tsr_index_tensor(c->ix, c->families[lo + *count], &t, NULL, err));
        if (t.klass != klass || t.layer != layer) {
            break;
        }
        (*count)++;
    }
    if (*count == 0) {
        TSR_FAIL(err, TSR_E_MISSING, "%s: layer %d has no experts", c->dir->path, layer);
    }
    if (*count > TSR_EXPERT_MATRIX_MAX) {
        TSR_FAIL(err, TSR_E_LIMIT, "%s: layer %d: %u matrices an expert (limit %d)", c->dir->path, layer,
                 *count, TSR_EXPERT_MATRIX_MAX);
    }
    return TSR_OK;
}

tsr_status tsr_ckpt_expert_span(const tsr_ckpt *c, int32_t layer, uint32_t expert, tsr_class klass,
                                tsr_expert_span *out, tsr_err *err)
{
    const uint32_t *ids;
    TSR_TRY(layer_families(c, layer, klass, &ids, &out->matrix_count, err));
    uint64_t low = UINT64_MAX, high = 0, sum = 0, pieces = 0;
    uint32_t file = UINT32_MAX;
    for (uint32_t i = 0; i < out->matrix_count; i++) {
        tsr_tensor_info t;
        TSR_TRY(tsr_index_tensor(c->ix, ids[i], &t, NULL, err));
        if (expert >= t.expert_count) {
            TSR_FAIL(err, TSR_E_MISSING, "%s: layer %d: expert %u: experts go from 0 to %u", c->dir->path,
                     layer, expert, t.expert_count - 1);
        }
        for (uint32_t k = 0; k < t.chunks; k++) {
            tsr_extent_info x;
            TSR_TRY(tsr_ckpt_extent(c, &t, expert, k, &x, err));
            if (file != UINT32_MAX && x.file != file) {
                TSR_FAIL(err, TSR_E_UNSUPPORTED, "%s: layer %d: expert %u is spread over two files",
                         c->dir->path, layer, expert);
            }
            file = x.file;
            low = x.offset < low ? x.offset : low;
            high = x.offset + x.stored_bytes > high ? x.offset + x.stored_bytes : high;
            sum += x.stored_bytes;
            pieces++;
        }
    }
    if (pieces > 0 &&
        high - low > sum + pieces * 8192) { /* alignment and a little HDF5 metadata may lie between */
        TSR_FAIL(err, TSR_E_UNSUPPORTED, "%s: layer %d: matrices of expert %u do not lie side by side",
                 c->dir->path, layer, expert);
    }
    out->file = file;
    out->offset = pieces > 0 ? low : 0;
    out->bytes = pieces > 0 ? high - low : 0;
    return TSR_OK;
}

tsr_status tsr_ckpt_read_expert(const tsr_ckpt *c, int32_t layer, uint32_t expert, tsr_class klass, void *dst,
                                size_t dst_bytes, tsr_expert_matrix *m, unsigned flags, tsr_err *err)
{
    tsr_expert_span span;
    TSR_TRY(tsr_ckpt_expert_span(c, layer, expert, klass, &span, err));
    TSR_ASSERT(dst_bytes >= span.bytes);
    const uint32_t *ids;
    uint32_t count;
    TSR_TRY(layer_families(c, layer, klass, &ids, &count, err));
    if (span.bytes > 0) {
        tsr_io *io;
        TSR_TRY(tsr_ckpt_file_io(c, span.file, &io, err));
        TSR_TRY(tsr_io_pread(io, dst, span.bytes, span.offset, err));
    }
    for (uint32_t i = 0; i < count; i++) {
        tsr_tensor_info *t = &m[i].tensor;
        TSR_TRY(tsr_index_tensor(c->ix, ids[i], t, NULL, err));
        m[i].data = NULL;
        const uint8_t *next = NULL;
        bool joined = t->chunks > 0;
        for (uint32_t k = 0; k < t->chunks; k++) {
            tsr_extent_info x;
            TSR_TRY(tsr_ckpt_extent(c, t, expert, k, &x, err));
            const uint8_t *at = (const uint8_t *)dst + (x.offset - span.offset);
            if ((flags & TSR_READ_CHECK) != 0 && tsr_hash64(at, x.stored_bytes) != x.hash) {
                return blame(c, t, expert, &x,
                             TSR_ERR(err, TSR_E_FORMAT, "checksum differs: the data is damaged"), err);
            }
            joined = joined && x.codec == TSR_CODEC_RAW && x.raw_bytes == x.payload_bytes &&
                     (k == 0 || at == next);
            next = at + x.stored_bytes;
            if (k == 0) {
                m[i].data = at;
            }
        }
        if (!joined) {
            m[i].data = NULL;
        }
    }
    return TSR_OK;
}
