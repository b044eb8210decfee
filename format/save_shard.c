/* save_shard.c - one shard from its first byte to its final name; see save.h. */
#include "format/save.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct save_shard {
    const save_plan *plan;
    uint32_t file;
    char *part, *final; /* paths */
    tsr_file *f;
    tsr_h5_writer *h5;
    int *ids;       /* HDF5 data set of each member */
    uint64_t *base; /* contiguous members: where they begin */
    uint64_t table_bytes;
};

static char *join(const char *dir, const char *name, const char *tail)
{
    char *out = NULL;
    return asprintf(&out, "%s/%s%s", dir, name, tail) < 0 ? NULL : out;
}

/* ---- the shard's table ----------------------------------------------------------------------------------- */

typedef struct table_in {
    tsr_index_in in;
    tsr_index_tensor_in *tensors;
    tsr_extent_rec *extents;
    tsr_file_rec self;
    const char *no_name;
} table_in;

static void table_free(table_in *t)
{
    free(t->tensors);
    free(t->extents);
}

static uint32_t items_in_file(const save_file *f, const save_tensor *t)
{
    if (t->d.expert_count == 0) {
        return 1;
    }
    uint32_t n = 0;
    while (n < f->expert_count && f->experts[n] < t->d.expert_count) {
        n++;
    }
    return n;
}

/* extents NULL: only counts matter (for the size). */
static tsr_status table_gather(table_in *t, const save_plan *p, uint32_t file, const tsr_extent_rec *extents,
                               uint64_t file_bytes, tsr_err *err)
{
    const save_file *f = &p->files[file];
    *t = (table_in){ .no_name = "" };
    t->tensors = calloc((size_t)f->tensor_count + 1, sizeof *t->tensors);
    t->extents = calloc(f->slot_count + 1, sizeof *t->extents);
    if (t->tensors == NULL || t->extents == NULL) {
        table_free(t);
        TSR_FAIL(err, TSR_E_LIMIT, "%s: out of memory for its table", f->name);
    }
    uint64_t at = 0;
    for (uint32_t m = 0; m < f->tensor_count; m++) {
        uint32_t id = f->tensors[m];
        const save_tensor *s = &p->tensors[id];
        uint32_t partner = TSR_NO_PARTNER;
        for (uint32_t o = 0; s->d.partner >= 0 && o < f->tensor_count; o++) {
            if (f->tensors[o] == (uint32_t)s->d.partner) {
                partner = o;
                break;
            }
        }
        t->tensors[m] = (tsr_index_tensor_in){
            .decl = &s->d, .first_extent = at, .partner = partner, .global_id = id, .filtered = s->filtered
        };
        uint32_t items = items_in_file(f, s);
        for (uint32_t i = 0; i < items && extents != NULL; i++) {
            uint32_t item = s->d.expert_count > 0 ? f->experts[i] : 0;
            memcpy(t->extents + at + (uint64_t)i * s->k.chunks,
                   extents + s->first_extent + (uint64_t)item * s->k.chunks, s->k.chunks * sizeof *extents);
        }
        at += (uint64_t)items * s->k.chunks;
    }
    for (uint64_t i = 0; i < at; i++) {
        t->extents[i].file = 0;
    }
    t->self = (tsr_file_rec){ .file_bytes = file_bytes, .klass = (uint32_t)f->klass };
    t->in = (tsr_index_in){ .shard_table = true,
                            .files = &t->self,
                            .file_names = &t->no_name,
                            .file_count = 1,
                            .tensors = t->tensors,
                            .tensor_count = f->tensor_count,
                            .extents = t->extents,
                            .extent_count = at,
                            .experts = f->experts,
                            .expert_count = f->expert_count };
    return TSR_OK;
}

/* ---- opening: every data set is made before the first byte -------------------------------------------------- */

static tsr_status add_dataset(save_shard *s, uint32_t member, int zstd_level, tsr_err *err)
{
    const save_file *f = &s->plan->files[s->file];
    const save_tensor *t = &s->plan->tensors[f->tensors[member]];
    bool family = t->d.expert_count > 0;
    int64_t shape[TSR_RANK_MAX + 1], chunk[TSR_RANK_MAX + 1];
    int lead = family ? 1 : 0;
    shape[0] = items_in_file(f, t);
    chunk[0] = 1;
    unsigned pack = tsr_dtype_info((unsigned)t->d.dtype)->elems_per_unit;
    for (int i = 0; i < t->d.rank; i++) {
        shape[lead + i] = t->d.shape[i];
        chunk[lead + i] = i < t->k.axis ? 1 : i == t->k.axis ? t->k.rows : t->d.shape[i];
        if (i == t->k.axis && i == t->d.rank - 1) {
            chunk[lead + i] *= pack; /* rows count storage units, the data set is told in elements */
        }
    }
    tsr_h5_attr attrs[2];
    int n = 0;
    if (t->d.partner >= 0) {
        attrs[n++] = (tsr_h5_attr){ "scales", s->plan->tensors[t->d.partner].d.name };
    }
    if (t->d.src_dtype != t->d.dtype) {
        attrs[n++] = (tsr_h5_attr){ "source_dtype", tsr_dtype_name((unsigned)t->d.src_dtype) };
    }
    bool chunked = t->k.item_bytes > 0 && (family || (t->filtered && t->d.rank > 0));
    tsr_h5_dataset d = { .group = family ? "/experts" : "/tensors",
                         .name = t->d.name,
                         .dtype = t->d.dtype,
                         .rank = t->d.rank + lead,
                         .shape = shape,
                         .chunk = chunked ? chunk : NULL,
                         .compress = chunked && t->filtered,
                         .zstd_level = zstd_level,
                         .attrs = attrs,
                         .attr_count = n };
    return tsr_h5_add(s->h5, &d, &s->ids[member], &s->base[member], err);
}

static tsr_status open_parts(save_shard *s, int zstd_level, tsr_err *err)
{
    const save_file *f = &s->plan->files[s->file];
    s->ids = calloc((size_t)f->tensor_count + 1, sizeof *s->ids);
    s->base = calloc((size_t)f->tensor_count + 1, sizeof *s->base);
    if (s->ids == NULL || s->base == NULL || s->part == NULL || s->final == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "%s: out of memory", f->name);
    }
    table_in t;
    TSR_TRY(table_gather(&t, s->plan, s->file, NULL, 0, err));
    s->table_bytes = tsr_index_size(&t.in);
    table_free(&t);
    if (s->table_bytes == 0) {
        TSR_FAIL(err, TSR_E_LIMIT, "%s: too many or too long names for one shard", f->name);
    }
    TSR_TRY(tsr_file_create(&s->f, s->part, err));
    TSR_TRY(tsr_h5_create(&s->h5, s->f, err));
    for (uint32_t m = 0; m < f->tensor_count; m++) {
        TSR_TRY(add_dataset(s, m, zstd_level, err));
    }
    return TSR_OK;
}

tsr_status save_shard_open(save_shard **out, const save_plan *p, uint32_t file, const char *dir,
                           int zstd_level, tsr_err *err)
{
    *out = NULL;
    save_shard *s = calloc(1, sizeof *s);
    if (s == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    s->plan = p;
    s->file = file;
    s->part = join(dir, p->files[file].name, ".part");
    s->final = join(dir, p->files[file].name, "");
    tsr_status st = open_parts(s, zstd_level, err);
    if (st != TSR_OK) {
        save_shard_abort(&s);
    }
    *out = s;
    return st;
}

tsr_status save_shard_place(save_shard *s, const save_slot *slot, uint64_t stored_bytes, bool encoded,
                            uint64_t *offset, tsr_err *err)
{
    const save_tensor *t = &s->plan->tensors[slot->tensor];
    bool family = t->d.expert_count > 0;
    if (!family && !(t->filtered && t->d.rank > 0)) {
        *offset = s->base[slot->member] + slot->item_offset;
        return TSR_OK;
    }
    int64_t coords[TSR_RANK_MAX + 1];
    coords[0] = slot->local;
    tsr_chunk_coords(&t->k, t->d.dtype, t->d.rank, t->d.shape, slot->chunk, coords + (family ? 1 : 0));
    return tsr_h5_place(s->h5, s->ids[slot->member], coords, stored_bytes, encoded, offset, err);
}

tsr_status save_shard_write(save_shard *s, uint64_t offset, const void *src, size_t n, tsr_err *err)
{
    TSR_TRY(tsr_file_pwrite(s->f, src, n, offset, err));
    if (n >= ((size_t)1 << 20)) {
        tsr_file_writeback(s->f, offset, n);
    }
    return TSR_OK;
}

/* ---- closing ----------------------------------------------------------------------------------------------------- */

static int compare_spans(const void *a, const void *b)
{
    const span *x = a, *y = b;
    return x->offset < y->offset ? -1 : x->offset > y->offset;
}

tsr_status save_rest_hash(tsr_io *io, span *spans, uint64_t count, tsr_hash128 *out, tsr_err *err)
{
    enum { PIECE = 1 << 18 };
    qsort(spans, count, sizeof *spans, compare_spans);
    tsr_hasher *h = tsr_hasher_new128();
    uint8_t *buf = malloc(PIECE);
    tsr_status st = h != NULL && buf != NULL ? TSR_OK : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    uint64_t at = TSR_HEAD_BYTES;
    for (uint64_t i = 0; st == TSR_OK && i <= count; i++) {
        uint64_t to = i < count ? spans[i].offset : io->size;
        if (to < at) {
            st = TSR_ERR(err, TSR_E_FORMAT, "%s: extents overlap at offset %llu", io->name,
                         (unsigned long long)to);
        }
        while (st == TSR_OK && at < to) {
            size_t n = to - at < PIECE ? (size_t)(to - at) : PIECE;
            st = tsr_io_pread(io, buf, n, at, err);
            if (st == TSR_OK) {
                tsr_hasher_add(h, buf, n);
                at += n;
            }
        }
        if (i < count) {
            at = to + spans[i].bytes;
        }
    }
    if (st == TSR_OK) {
        *out = tsr_hasher_digest128(h);
    }
    tsr_hasher_free(&h);
    free(buf);
    return st;
}

/* Non-empty extents of a table as spans; *out malloc'ed. */
static tsr_status table_spans(const table_in *t, span **out, uint64_t *count, tsr_err *err)
{
    *count = 0;
    *out = malloc((t->in.extent_count + 1) * sizeof **out);
    if (*out == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    for (uint64_t i = 0; i < t->in.extent_count; i++) {
        const tsr_extent_rec *e = &t->in.extents[i];
        if (e->stored_bytes > 0) {
            (*out)[(*count)++] = (span){ e->offset, e->stored_bytes, i };
        }
    }
    return TSR_OK;
}

/* Writes table and head behind the data, and syncs. */
static tsr_status seal(save_shard *s, const table_in *t, uint64_t table_offset, uint64_t file_bytes,
                       tsr_file_rec *rec, tsr_err *err)
{
    uint8_t *table = NULL, block[TSR_HEAD_BYTES];
    uint64_t table_bytes, count;
    span *spans = NULL;
    tsr_io *io = NULL;
    tsr_status st;
    tsr_shard_head h = { .file_bytes = file_bytes, .table_offset = table_offset };
    TSR_GO(tsr_index_build(&t->in, &table, &table_bytes, err));
    TSR_ASSERT(table_bytes == s->table_bytes);
    h.table_bytes = table_bytes;
    tsr_hash128 uuid = tsr_hash_128(table, table_bytes), rest;
    TSR_GO(tsr_file_pwrite(s->f, table, table_bytes, table_offset, err));
    TSR_GO(table_spans(t, &spans, &count, err));
    TSR_GO(tsr_io_open_file(&io, s->part, err));
    TSR_GO(save_rest_hash(io, spans, count, &rest, err));
    memcpy(h.uuid, uuid.b, 16);
    memcpy(h.rest_hash, rest.b, 16);
    tsr_shard_head_seal(&h, block);
    TSR_GO(tsr_file_pwrite(s->f, block, sizeof block, 0, err));
    TSR_GO(tsr_file_sync(s->f, err));
    const save_file *f = &s->plan->files[s->file];
    *rec = (tsr_file_rec){ .file_bytes = file_bytes,
                           .head_hash = h.head_hash,
                           .klass = (uint32_t)f->klass,
                           .partition = f->partition,
                           .of = f->of,
                           .piece = f->piece };
    memcpy(rec->uuid, uuid.b, 16);
out:
    tsr_io_close(&io);
    free(spans);
    free(table);
    return st;
}

static tsr_status close_parts(save_shard *s, const tsr_extent_rec *extents, tsr_file_rec *rec, tsr_err *err)
{
    const save_file *f = &s->plan->files[s->file];
    int id;
    uint64_t table_offset, ids_offset, file_bytes;
    int64_t n = f->expert_count;
    if (n > 0) {
        tsr_h5_dataset ids = {
            .group = "/tessera", .name = "expert_ids", .dtype = TSR_DT_U32, .rank = 1, .shape = &n
        };
        TSR_TRY(tsr_h5_add(s->h5, &ids, &id, &ids_offset, err));
        TSR_TRY(tsr_file_pwrite(s->f, f->experts, (size_t)n * 4, ids_offset, err));
    }
    int64_t table_bytes = (int64_t)s->table_bytes;
    tsr_h5_dataset d = {
        .group = "/tessera", .name = "table", .dtype = TSR_DT_U8, .rank = 1, .shape = &table_bytes
    };
    TSR_TRY(tsr_h5_add(s->h5, &d, &id, &table_offset, err));
    TSR_TRY(tsr_h5_finish(&s->h5, &file_bytes, err));
    TSR_TRY(tsr_h5_drop_times(s->f, file_bytes, err));
    table_in t;
    TSR_TRY(table_gather(&t, s->plan, s->file, extents, file_bytes, err));
    tsr_status st = seal(s, &t, table_offset, file_bytes, rec, err);
    table_free(&t);
    return st;
}

tsr_status save_shard_close(save_shard **s, const tsr_extent_rec *extents, tsr_file_rec *rec, tsr_err *err)
{
    tsr_status st = close_parts(*s, extents, rec, err);
    if (st == TSR_OK) {
        tsr_file_close(&(*s)->f);
        st = tsr_fs_rename((*s)->part, (*s)->final, err);
    }
    save_shard_abort(s); /* frees; after a rename there is nothing left to remove */
    return st;
}

tsr_status save_shard_uuid(const save_plan *p, uint32_t file, const tsr_extent_rec *extents,
                           uint64_t file_bytes, uint8_t uuid[16], tsr_err *err)
{
    table_in t;
    uint8_t *table = NULL;
    uint64_t bytes;
    TSR_TRY(table_gather(&t, p, file, extents, file_bytes, err));
    tsr_status st = tsr_index_build(&t.in, &table, &bytes, err);
    if (st == TSR_OK) {
        tsr_hash128 h = tsr_hash_128(table, bytes);
        memcpy(uuid, h.b, 16);
    }
    free(table);
    table_free(&t);
    return st;
}

void save_shard_abort(save_shard **s)
{
    if (s == NULL || *s == NULL) {
        return;
    }
    tsr_h5_abort(&(*s)->h5);
    bool open = (*s)->f != NULL;
    tsr_file_close(&(*s)->f);
    if (open && (*s)->part != NULL) {
        TSR_IGNORE(tsr_fs_remove_tree((*s)->part, NULL)); /* the error that brought us here matters more */
    }
    free((*s)->part);
    free((*s)->final);
    free((*s)->ids);
    free((*s)->base);
    free(*s);
    *s = NULL;
}

/* ---- a finished shard of an earlier, interrupted run ------------------------------------------------------------- */

/* The table of the shard at io; *ix borrows the copy it owns. */
static tsr_status read_table(tsr_io *io, tsr_index **ix, tsr_shard_head *h, tsr_err *err)
{
    uint8_t block[TSR_HEAD_BYTES];
    *ix = NULL;
    TSR_TRY(tsr_io_pread(io, block, sizeof block, 0, err));
    TSR_TRY(tsr_shard_head_check(block, io->size, h, err));
    uint8_t *table = malloc(h->table_bytes + 1);
    if (table == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "%s: out of memory for its table", io->name);
    }
    tsr_status st = tsr_io_pread(io, table, h->table_bytes, h->table_offset, err);
    if (st != TSR_OK) {
        free(table);
        return st;
    }
    tsr_hash128 uuid = tsr_hash_128(table, h->table_bytes);
    if (memcmp(uuid.b, h->uuid, 16) != 0) {
        free(table);
        TSR_FAIL(err, TSR_E_FORMAT, "%s: its table is damaged", io->name);
    }
    return tsr_index_open(ix, io->name, table, h->table_bytes, table, err);
}

/* The table tells exactly the planned content: the same bytes as ours, but for what only the file knows. */
static tsr_status compare_table(const save_plan *p, uint32_t file, const tsr_index *ix,
                                const tsr_shard_head *h, tsr_extent_rec *extents, tsr_err *err)
{
    const save_file *f = &p->files[file];
    if (ix->head.extent_count != f->slot_count || ix->head.tensor_count != f->tensor_count) {
        TSR_FAIL(err, TSR_E_CONFLICT, "%s: holds other tensors", f->name);
    }
    uint64_t at = 0;
    for (uint32_t m = 0; m < f->tensor_count; m++) {
        const save_tensor *s = &p->tensors[f->tensors[m]];
        uint32_t items = items_in_file(f, s);
        for (uint32_t i = 0; i < items; i++) {
            uint32_t item = s->d.expert_count > 0 ? f->experts[i] : 0;
            for (uint64_t c = 0; c < s->k.chunks; c++, at++) {
                tsr_extent_rec *e = &extents[s->first_extent + (uint64_t)item * s->k.chunks + c];
                TSR_TRY(tsr_index_extent(ix, at, e, err));
                e->file = file;
            }
        }
    }
    table_in t;
    uint8_t *ours = NULL;
    uint64_t bytes;
    TSR_TRY(table_gather(&t, p, file, extents, h->file_bytes, err));
    tsr_status st = tsr_index_build(&t.in, &ours, &bytes, err);
    if (st == TSR_OK && (bytes != h->table_bytes || memcmp(ours, ix->base, bytes) != 0)) {
        st = TSR_ERR(err, TSR_E_CONFLICT, "%s: holds other tensors", f->name);
    }
    free(ours);
    table_free(&t);
    return st;
}

/* Every stored byte against its checksum. */
static tsr_status check_bytes(const save_plan *p, uint32_t file, tsr_io *io, const tsr_extent_rec *extents,
                              const tsr_shard_head *h, tsr_err *err)
{
    table_in t;
    TSR_TRY(table_gather(&t, p, file, extents, h->file_bytes, err));
    span *spans = NULL;
    uint64_t count;
    uint8_t *buf = NULL;
    size_t room = 0;
    tsr_hash128 rest;
    tsr_status st;
    TSR_GO(table_spans(&t, &spans, &count, err));
    for (uint64_t i = 0; i < t.in.extent_count; i++) {
        const tsr_extent_rec *e = &t.in.extents[i];
        uint64_t end;
        if (!tsr_add_u64(e->offset, e->stored_bytes, &end) || end > io->size) {
            st = TSR_ERR(err, TSR_E_FORMAT, "%s: extent outside the file", io->name);
            goto out;
        }
        if (e->stored_bytes > room) {
            free(buf);
            room = e->stored_bytes;
            buf = malloc(room);
            if (buf == NULL) {
                st = TSR_ERR(err, TSR_E_LIMIT, "out of memory");
                goto out;
            }
        }
        TSR_GO(tsr_io_pread(io, buf, e->stored_bytes, e->offset, err));
        if (tsr_hash64(buf, e->stored_bytes) != e->hash) {
            st = TSR_ERR(err, TSR_E_FORMAT, "%s: checksum differs", io->name);
            goto out;
        }
    }
    TSR_GO(save_rest_hash(io, spans, count, &rest, err));
    if (memcmp(rest.b, h->rest_hash, 16) != 0) {
        st = TSR_ERR(err, TSR_E_FORMAT, "%s: checksum differs", io->name);
    }
out:
    free(buf);
    free(spans);
    table_free(&t);
    return st;
}

tsr_status save_shard_check(const save_plan *p, uint32_t file, const char *path, tsr_extent_rec *extents,
                            tsr_file_rec *rec, tsr_err *err)
{
    const save_file *f = &p->files[file];
    tsr_io *io = NULL;
    tsr_index *ix = NULL;
    tsr_shard_head h;
    tsr_status st;
    TSR_GO(tsr_io_open_file(&io, path, err));
    TSR_GO(read_table(io, &ix, &h, err));
    TSR_GO(compare_table(p, file, ix, &h, extents, err));
    TSR_GO(check_bytes(p, file, io, extents, &h, err));
    *rec = (tsr_file_rec){ .file_bytes = h.file_bytes,
                           .head_hash = h.head_hash,
                           .klass = (uint32_t)f->klass,
                           .partition = f->partition,
                           .of = f->of,
                           .piece = f->piece };
    memcpy(rec->uuid, h.uuid, 16);
out:
    tsr_index_close(&ix);
    tsr_io_close(&io);
    return st;
}
