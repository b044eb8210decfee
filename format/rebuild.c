/* rebuild.c - index.tsx made again from the shards' own tables and the manifest. */
#include "format/chunking.h"
#include "format/reader.h"
#include "format/save.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct shard_table {
    tsr_index *ix;
    tsr_shard_head head;
    tsr_file_rec rec;
    const char *name; /* in the manifest's tree */
} shard_table;

typedef struct rebuild {
    tsr_dir *dir;
    char *manifest;
    size_t manifest_bytes;
    json_t *root;
    shard_table *shards;
    uint32_t shard_count;
    tsr_tensor_decl *decls; /* by global number; name NULL: not seen yet */
    tsr_index_tensor_in *tensors;
    uint32_t tensor_count;
    tsr_extent_rec *extents;
    uint64_t extent_count;
    uint8_t *filled; /* per extent */
} rebuild;

static tsr_status read_manifest(rebuild *r, tsr_err *err)
{
    TSR_TRY(tsr_dir_read(r->dir, TSR_MANIFEST_NAME, TSR_MANIFEST_BYTES_MAX, &r->manifest, &r->manifest_bytes,
                         err));
    if (!manifest_intact(r->manifest, r->manifest_bytes)) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s/%s: is damaged: its check value differs (restore it from a copy)",
                 r->dir->path, TSR_MANIFEST_NAME);
    }
    json_error_t e;
    r->root = json_loadb(r->manifest, r->manifest_bytes, JSON_REJECT_DUPLICATES, &e);
    if (r->root == NULL) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s/%s: line %d: %s", r->dir->path, TSR_MANIFEST_NAME, e.line, e.text);
    }
    return TSR_OK;
}

static tsr_status read_shard(rebuild *r, json_t *entry, shard_table *s, tsr_err *err)
{
    uint8_t block[TSR_HEAD_BYTES];
    char uuid[37];
    tsr_io *io;
    const char *want = json_string_value(json_object_get(entry, "uuid"));
    const char *klass = json_string_value(json_object_get(entry, "class"));
    s->name = json_string_value(json_object_get(entry, "name"));
    if (s->name == NULL || want == NULL || klass == NULL) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s/%s: an entry of files makes no sense", r->dir->path,
                 TSR_MANIFEST_NAME);
    }
    TSR_TRY(r->dir->ops->open(r->dir, s->name, &io, err));
    tsr_status st = tsr_io_pread(io, block, sizeof block, 0, err);
    uint8_t *table = NULL;
    if (st == TSR_OK) {
        st = tsr_shard_head_check(block, io->size, &s->head, err);
        if (st != TSR_OK) {
            tsr_err_prefix(err, "%s/%s", r->dir->path, s->name);
        }
    }
    if (st == TSR_OK && (table = malloc(s->head.table_bytes + 1)) == NULL) {
        st = TSR_ERR(err, TSR_E_LIMIT, "%s: out of memory for its table", s->name);
    }
    if (st == TSR_OK) {
        st = tsr_io_pread(io, table, s->head.table_bytes, s->head.table_offset, err);
    }
    if (st == TSR_OK) {
        tsr_hash128 h = tsr_hash_128(table, s->head.table_bytes);
        uuid_text(s->head.uuid, uuid);
        if (memcmp(h.b, s->head.uuid, 16) != 0) {
            st = TSR_ERR(err, TSR_E_FORMAT, "%s/%s: its table is damaged", r->dir->path, s->name);
        } else if (strcmp(uuid, want) != 0) {
            st = TSR_ERR(err, TSR_E_CONFLICT, "%s/%s: is not the shard the manifest names", r->dir->path,
                         s->name);
        }
    }
    if (st == TSR_OK) {
        st = tsr_index_open(&s->ix, s->name, table, s->head.table_bytes, table, err);
        table = NULL;
    }
    free(table);
    s->rec = (tsr_file_rec){ .file_bytes = io->size,
                             .head_hash = s->head.head_hash,
                             .partition = (uint32_t)json_integer_value(json_object_get(entry, "partition")),
                             .of = (uint32_t)json_integer_value(json_object_get(entry, "of")),
                             .piece = (uint32_t)json_integer_value(json_object_get(entry, "piece")) };
    memcpy(s->rec.uuid, s->head.uuid, 16);
    for (unsigned k = 0; k < TSR_CLASS_COUNT; k++) {
        s->rec.klass = strcmp(klass, tsr_class_name(k)) == 0 ? k : s->rec.klass;
    }
    tsr_io_close(&io);
    return st;
}

/* First pass: declarations by global number. Families are told by every shard that holds some of their experts. */
static tsr_status take_decls(rebuild *r, const shard_table *s, tsr_err *err)
{
    for (uint32_t i = 0; i < s->ix->head.tensor_count; i++) {
        tsr_tensor_info t;
        TSR_TRY(tsr_index_tensor(s->ix, i, &t, NULL, err));
        if (t.global_id >= r->tensor_count) {
            TSR_FAIL(err, TSR_E_FORMAT, "%s/%s: %s: number %u of %u", r->dir->path, s->name, t.name,
                     t.global_id, r->tensor_count);
        }
        tsr_tensor_decl *d = &r->decls[t.global_id];
        if (d->name != NULL) {
            if (strcmp(d->name, t.name) != 0) {
                TSR_FAIL(err, TSR_E_CONFLICT, "%s/%s: %s: another shard has %s under its number",
                         r->dir->path, s->name, t.name, d->name);
            }
            continue;
        }
        *d = tsr_tensor_decl_of(&t); /* partner: a number of the shard, replaced below */
        tsr_index_tensor_in *in = &r->tensors[t.global_id];
        in->decl = d;
        in->filtered = t.filtered;
        in->partner = TSR_NO_PARTNER;
        if (t.partner >= 0) {
            tsr_tensor_info p;
            TSR_TRY(tsr_index_tensor(s->ix, (uint32_t)t.partner, &p, NULL, err));
            in->partner = p.global_id;
        }
    }
    return TSR_OK;
}

static tsr_status take_extents(rebuild *r, uint32_t file, tsr_err *err)
{
    const shard_table *s = &r->shards[file];
    const uint32_t *experts;
    uint32_t expert_count, items;
    TSR_TRY(tsr_index_experts(s->ix, &experts, &expert_count, err));
    for (uint32_t i = 0; i < s->ix->head.tensor_count; i++) {
        tsr_tensor_info t;
        uint64_t first;
        TSR_TRY(tsr_index_tensor(s->ix, i, &t, &first, err));
        TSR_TRY(tsr_index_items(s->ix, &t, &items, err));
        for (uint64_t k = 0; k < (uint64_t)items * t.chunks; k++) {
            uint64_t item = t.expert_count > 0 ? experts[k / t.chunks] : 0;
            uint64_t to = r->tensors[t.global_id].first_extent + item * t.chunks + k % t.chunks;
            if (to >= r->extent_count || r->filled[to]) {
                TSR_FAIL(err, TSR_E_CONFLICT, "%s/%s: %s: expert %llu is in two shards", r->dir->path,
                         s->name, t.name, (unsigned long long)item);
            }
            TSR_TRY(tsr_index_extent(s->ix, first + k, &r->extents[to], err));
            r->extents[to].file = file;
            r->filled[to] = 1;
        }
    }
    return TSR_OK;
}

static tsr_status allocate(rebuild *r, tsr_err *err)
{
    for (uint32_t f = 0; f < r->shard_count; f++) { /* the largest number tells how many there are */
        for (uint32_t i = 0; i < r->shards[f].ix->head.tensor_count; i++) {
            tsr_tensor_info t;
            TSR_TRY(tsr_index_tensor(r->shards[f].ix, i, &t, NULL, err));
            if (t.global_id >= TSR_TENSOR_COUNT_MAX) {
                TSR_FAIL(err, TSR_E_FORMAT, "%s/%s: %s: its number makes no sense", r->dir->path,
                         r->shards[f].name, t.name);
            }
            r->tensor_count = t.global_id + 1 > r->tensor_count ? t.global_id + 1 : r->tensor_count;
        }
    }
    r->decls = calloc((size_t)r->tensor_count + 1, sizeof *r->decls);
    r->tensors = calloc((size_t)r->tensor_count + 1, sizeof *r->tensors);
    if (r->decls == NULL || r->tensors == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    return TSR_OK;
}

static tsr_status merge(rebuild *r, tsr_err *err)
{
    TSR_TRY(allocate(r, err));
    for (uint32_t f = 0; f < r->shard_count; f++) {
        TSR_TRY(take_decls(r, &r->shards[f], err));
    }
    for (uint32_t i = 0; i < r->tensor_count; i++) {
        const tsr_tensor_decl *d = &r->decls[i];
        tsr_chunking k;
        if (d->name == NULL || !tsr_chunking_make(&k, d->dtype, d->rank, d->shape, TSR_CHUNK_TARGET_BYTES)) {
            TSR_FAIL(err, TSR_E_MISSING, "%s: no shard tells tensor number %u", r->dir->path, i);
        }
        r->tensors[i].first_extent = r->extent_count;
        r->extent_count += (d->expert_count > 0 ? d->expert_count : 1) * k.chunks;
        if (r->extent_count > TSR_EXTENT_COUNT_MAX) {
            TSR_FAIL(err, TSR_E_LIMIT, "%s: more than %u extents", r->dir->path, TSR_EXTENT_COUNT_MAX);
        }
    }
    r->extents = calloc(r->extent_count + 1, sizeof *r->extents);
    r->filled = calloc(r->extent_count + 1, 1);
    if (r->extents == NULL || r->filled == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory for %llu extents", (unsigned long long)r->extent_count);
    }
    for (uint32_t f = 0; f < r->shard_count; f++) {
        TSR_TRY(take_extents(r, f, err));
    }
    for (uint64_t i = 0; i < r->extent_count; i++) {
        if (!r->filled[i]) {
            TSR_FAIL(err, TSR_E_MISSING, "%s: extent %llu is in no shard", r->dir->path,
                     (unsigned long long)i);
        }
    }
    return TSR_OK;
}

static tsr_status write_out(rebuild *r, bool *changed, tsr_err *err)
{
    tsr_file_rec *recs = calloc((size_t)r->shard_count + 1, sizeof *recs);
    const char **names = calloc((size_t)r->shard_count + 1, sizeof *names);
    char *path = NULL, *had = NULL;
    uint8_t *index = NULL;
    uint64_t bytes = 0;
    size_t had_bytes = 0;
    unsigned u[16];
    tsr_index_in in = { .files = recs,
                        .file_names = names,
                        .file_count = r->shard_count,
                        .tensors = r->tensors,
                        .tensor_count = r->tensor_count,
                        .extents = r->extents,
                        .extent_count = r->extent_count,
                        .manifest_bytes = r->manifest_bytes };
    const char *uuid = json_string_value(json_object_get(r->root, "uuid"));
    tsr_status st = recs != NULL && names != NULL ? TSR_OK : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    if (st == TSR_OK &&
        (uuid == NULL || sscanf(uuid, "%2x%2x%2x%2x-%2x%2x-%2x%2x-%2x%2x-%2x%2x%2x%2x%2x%2x", &u[0], &u[1],
                                &u[2], &u[3], &u[4], &u[5], &u[6], &u[7], &u[8], &u[9], &u[10], &u[11],
                                &u[12], &u[13], &u[14], &u[15]) != 16)) {
        st = TSR_ERR(err, TSR_E_FORMAT, "%s/%s: uuid makes no sense", r->dir->path, TSR_MANIFEST_NAME);
    }
    for (uint32_t i = 0; st == TSR_OK && i < r->shard_count; i++) {
        recs[i] = r->shards[i].rec;
        names[i] = r->shards[i].name;
    }
    if (st == TSR_OK) {
        tsr_hash128 h = tsr_hash_128(r->manifest, r->manifest_bytes);
        memcpy(in.manifest_hash, h.b, 16);
        for (int i = 0; i < 16; i++) {
            in.uuid[i] = (uint8_t)u[i];
        }
        st = tsr_index_build(&in, &index, &bytes, err);
    }
    if (st == TSR_OK) {
        *changed = tsr_dir_read(r->dir, TSR_INDEX_NAME, bytes, &had, &had_bytes, NULL) != TSR_OK ||
                   had_bytes != bytes || memcmp(had, index, bytes) != 0;
        if (asprintf(&path, "%s/%s", r->dir->path, TSR_INDEX_NAME) < 0) {
            path = NULL;
            st = TSR_ERR(err, TSR_E_LIMIT, "out of memory");
        }
    }
    if (st == TSR_OK && *changed) {
        st = tsr_fs_replace_file(path, index, bytes, err);
    }
    free(had);
    free(index);
    free(path);
    free((void *)names);
    free(recs);
    return st;
}

tsr_status tsr_index_rebuild(const char *path, bool *changed_out, tsr_err *err)
{
    rebuild r = { 0 };
    tsr_status st;
    json_t *files, *entry;
    size_t i;
    *changed_out = false;
    TSR_GO(tsr_dir_open_posix(&r.dir, path, err));
    TSR_GO(read_manifest(&r, err));
    files = json_object_get(r.root, "files");
    if (json_array_size(files) > TSR_FILE_COUNT_MAX) {
        st = TSR_ERR(err, TSR_E_LIMIT, "%s: more than %u shards", path, TSR_FILE_COUNT_MAX);
        goto out;
    }
    r.shards = calloc(json_array_size(files) + 1, sizeof *r.shards);
    if (r.shards == NULL) {
        st = TSR_ERR(err, TSR_E_LIMIT, "out of memory");
        goto out;
    }
    json_array_foreach(files, i, entry)
    {
        r.shard_count++;
        TSR_GO(read_shard(&r, entry, &r.shards[i], err));
    }
    TSR_GO(merge(&r, err));
    st = write_out(&r, changed_out, err);
out:
    for (uint32_t k = 0; k < r.shard_count; k++) {
        tsr_index_close(&r.shards[k].ix);
    }
    free(r.shards);
    free(r.decls);
    free(r.tensors);
    free(r.extents);
    free(r.filled);
    json_decref(r.root);
    free(r.manifest);
    tsr_dir_close(&r.dir);
    return st;
}
