/* index.c - reading index.tsx and shard tables; see index.h. */
#include "format/index.h"
#include "format/chunking.h"
#include "format/codec.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static const uint32_t record_bytes[TSR_SEC_COUNT] = {
    [TSR_SEC_FILES] = sizeof(tsr_file_rec),
    [TSR_SEC_TENSORS] = sizeof(tsr_tensor_rec),
    [TSR_SEC_DIMS] = 8,
    [TSR_SEC_NAMES] = 4,
    [TSR_SEC_EXTENTS] = sizeof(tsr_extent_rec),
    [TSR_SEC_STRINGS] = 1,
    [TSR_SEC_EXPERTS] = 4,
    [TSR_SEC_PAGES] = 8,
};
static const char *const section_names[TSR_SEC_COUNT] = { "files",   "tensors", "dims",    "names",
                                                          "extents", "strings", "experts", "pages" };

static tsr_status check_sections(const tsr_index *ix, tsr_err *err)
{
    const tsr_index_head *h = &ix->head;
    for (int i = 0; i < TSR_SEC_COUNT; i++) {
        uint64_t end;
        if (h->sec[i].offset % 64 != 0 || h->sec[i].bytes % record_bytes[i] != 0 ||
            !tsr_add_u64(h->sec[i].offset, h->sec[i].bytes, &end) || end > h->index_bytes ||
            h->sec[i].offset < sizeof *h) {
            TSR_FAIL(err, TSR_E_FORMAT, "%s: section %s lies outside the index", ix->what, section_names[i]);
        }
        if (i != TSR_SEC_PAGES && h->sec[i].offset < h->page_base) {
            TSR_FAIL(err, TSR_E_FORMAT, "%s: section %s is not covered by page hashes", ix->what,
                     section_names[i]);
        }
    }
    uint64_t name_slots = h->sec[TSR_SEC_NAMES].bytes / 4;
    if (h->file_count > TSR_FILE_COUNT_MAX || h->tensor_count > TSR_TENSOR_COUNT_MAX ||
        h->extent_count > TSR_EXTENT_COUNT_MAX || h->expert_count_max > TSR_EXPERT_COUNT_MAX ||
        h->sec[TSR_SEC_FILES].bytes != (uint64_t)h->file_count * sizeof(tsr_file_rec) ||
        h->sec[TSR_SEC_TENSORS].bytes != (uint64_t)h->tensor_count * sizeof(tsr_tensor_rec) ||
        h->sec[TSR_SEC_EXTENTS].bytes != h->extent_count * sizeof(tsr_extent_rec) ||
        (name_slots & (name_slots - 1)) != 0 || (h->tensor_count > 0 && name_slots <= h->tensor_count)) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: counts do not agree with section sizes", ix->what);
    }
    return TSR_OK;
}

static tsr_status check_pages(tsr_index *ix, tsr_err *err)
{
    const tsr_index_head *h = &ix->head;
    const tsr_section_rec *p = &h->sec[TSR_SEC_PAGES];
    uint64_t pages_end = p->offset + p->bytes;
    if (p->offset != sizeof *h || h->page_base != tsr_align_up(pages_end, 64) ||
        h->page_base > h->index_bytes) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: page hashes are misplaced", ix->what);
    }
    ix->page_count = (h->index_bytes - h->page_base + TSR_PAGE_BYTES - 1) / TSR_PAGE_BYTES;
    if (p->bytes / 8 != ix->page_count) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: has %llu page hashes for %llu pages", ix->what,
                 (unsigned long long)(p->bytes / 8), (unsigned long long)ix->page_count);
    }
    if (tsr_hash64(ix->base + p->offset, p->bytes) != h->pages_hash) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: page hashes are damaged (tessera index --rebuild makes it again)",
                 ix->what);
    }
    for (uint64_t i = pages_end; i < h->page_base; i++) {
        if (ix->base[i] != 0) {
            TSR_FAIL(err, TSR_E_FORMAT, "%s: byte %llu is not zero", ix->what, (unsigned long long)i);
        }
    }
    ix->seen = calloc(ix->page_count + 1, 1);
    if (ix->seen == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "%s: out of memory", ix->what);
    }
    return TSR_OK;
}

tsr_status tsr_index_open(tsr_index **out, const char *what, const uint8_t *base, uint64_t bytes,
                          uint8_t *owned, tsr_err *err)
{
    *out = NULL;
    tsr_status st = TSR_OK;
    tsr_index *ix = calloc(1, sizeof *ix);
    if (ix == NULL || (ix->what = strdup(what)) == NULL) {
        free(ix);
        free(owned);
        TSR_FAIL(err, TSR_E_LIMIT, "%s: out of memory", what);
    }
    ix->base = base;
    ix->owned = owned;
    tsr_index_head *h = &ix->head;
    if (bytes < sizeof *h) {
        st = TSR_ERR(err, TSR_E_FORMAT, "%s: %llu bytes are too short for an index", what,
                     (unsigned long long)bytes);
        goto out;
    }
    memcpy(h, base, sizeof *h);
    if (memcmp(h->magic, TSR_INDEX_MAGIC, 8) != 0) {
        st = TSR_ERR(err, TSR_E_FORMAT, "%s: not a Tessera index (wrong magic)", what);
    } else if (tsr_hash64(base, sizeof *h - 8) != h->head_hash) {
        st = TSR_ERR(err, TSR_E_FORMAT, "%s: head is damaged (tessera index --rebuild makes it again)", what);
    } else if (h->version != TSR_FORMAT_VERSION || (h->flags & ~1u) != 0) {
        st = TSR_ERR(err, TSR_E_UNSUPPORTED, "%s: version %u with flags %#x (needs a newer tessera)", what,
                     h->version, h->flags);
    } else if (h->index_bytes != bytes) {
        st = TSR_ERR(err, TSR_E_FORMAT, "%s: file has %llu bytes, its head promises %llu", what,
                     (unsigned long long)bytes, (unsigned long long)h->index_bytes);
    } else {
        st = check_sections(ix, err);
    }
    if (st == TSR_OK) {
        st = check_pages(ix, err);
    }
out:
    if (st != TSR_OK) {
        tsr_index_close(&ix);
    }
    *out = ix;
    return st;
}

void tsr_index_close(tsr_index **ix)
{
    if (ix == NULL || *ix == NULL) {
        return;
    }
    free((*ix)->owned);
    free((*ix)->seen);
    free((void *)(uintptr_t)(*ix)->what);
    free(*ix);
    *ix = NULL;
}

tsr_status tsr_index_touch(const tsr_index *ix, uint64_t off, uint64_t n, tsr_err *err)
{
    if (n == 0) {
        return TSR_OK;
    }
    uint64_t base = ix->head.page_base;
    TSR_ASSERT(off >= base && off + n <= ix->head.index_bytes);
    for (uint64_t p = (off - base) / TSR_PAGE_BYTES; p <= (off + n - 1 - base) / TSR_PAGE_BYTES; p++) {
        if (__atomic_load_n(&ix->seen[p], __ATOMIC_RELAXED)) {
            continue;
        }
        uint64_t from = base + p * TSR_PAGE_BYTES;
        uint64_t len = ix->head.index_bytes - from < TSR_PAGE_BYTES ? ix->head.index_bytes - from
                                                                    : TSR_PAGE_BYTES;
        uint64_t want;
        memcpy(&want, ix->base + ix->head.sec[TSR_SEC_PAGES].offset + p * 8, 8);
        if (tsr_hash64(ix->base + from, len) != want) {
            TSR_FAIL(err, TSR_E_FORMAT,
                     "%s: page %llu (bytes %llu..%llu) is damaged (tessera index --rebuild makes it again)",
                     ix->what, (unsigned long long)p, (unsigned long long)from,
                     (unsigned long long)(from + len - 1));
        }
        __atomic_store_n(&ix->seen[p], 1, __ATOMIC_RELAXED);
    }
    return TSR_OK;
}

/* Checks the pages of record i of a section and points at it. */
static tsr_status record(const tsr_index *ix, int sec, uint64_t first, uint64_t count, const void **out,
                         tsr_err *err)
{
    uint64_t have = ix->head.sec[sec].bytes / record_bytes[sec];
    *out = NULL;
    if (count > have || first > have - count) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: record %llu of section %s is beyond its end", ix->what,
                 (unsigned long long)first, section_names[sec]);
    }
    uint64_t off = ix->head.sec[sec].offset + first * record_bytes[sec];
    TSR_TRY(tsr_index_touch(ix, off, count * record_bytes[sec], err));
    *out = ix->base + off;
    return TSR_OK;
}

static tsr_status text(const tsr_index *ix, uint32_t off, uint32_t bytes, const char **out, tsr_err *err)
{
    const void *p;
    if (bytes > TSR_NAME_BYTES_MAX) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: a name of %u bytes (limit %u)", ix->what, bytes, TSR_NAME_BYTES_MAX);
    }
    TSR_TRY(record(ix, TSR_SEC_STRINGS, off, (uint64_t)bytes + 1, &p, err));
    const char *s = p;
    if (s[bytes] != '\0' || memchr(s, 0, bytes) != NULL) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: name at string offset %u is not terminated", ix->what, off);
    }
    *out = s;
    return TSR_OK;
}

static tsr_status check_tensor(const tsr_index *ix, const tsr_tensor_rec *r, const tsr_tensor_info *t,
                               tsr_err *err)
{
    static const uint8_t zeros[8];
    uint64_t bytes = 0, raw_bytes = 0;
    const char *bad = NULL;
    if (r->kind > 1 || (r->kind == 1) != (r->expert_count > 0) || r->expert_count > TSR_EXPERT_COUNT_MAX) {
        bad = "kind and expert count";
    } else if (tsr_dtype_info(r->dtype) == NULL || tsr_dtype_info(r->src_dtype) == NULL) {
        bad = "dtype";
    } else if (r->klass >= TSR_CLASS_COUNT || r->layer < -1) {
        bad = "class or layer";
    } else if (!tsr_shape_bytes((tsr_dtype)r->dtype, r->rank, t->shape, &bytes) || bytes != r->item_bytes) {
        bad = "shape and byte count";
    } else if (bytes == 0 ? (r->chunks != 0 || r->block_bytes != 0 || r->chunk_bytes != 0)
                          : tsr_chunk_count(bytes, r->block_bytes, r->chunk_bytes) != r->chunks) {
        bad = "chunking";
    } else if ((ix->head.flags & 1) == 0 && r->global_id != t->id) {
        bad = "number";
    } else if (r->partner != TSR_NO_PARTNER && r->partner >= ix->head.tensor_count) {
        bad = "partner";
    } else if (r->flags > 1 || memcmp(r->reserved0, zeros, 2) != 0 || memcmp(r->reserved1, zeros, 4) != 0) {
        bad = "reserved bytes";
    } else if ((ix->head.flags & 1) == 0) {
        uint64_t items = r->kind == 1 ? r->expert_count : 1;
        if (!tsr_mul_u64(items, r->chunks, &raw_bytes) || raw_bytes > ix->head.extent_count ||
            r->first_extent > ix->head.extent_count - raw_bytes) {
            bad = "extents";
        }
    }
    if (bad != NULL) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: %s: %s make no sense", ix->what, t->name, bad);
    }
    return TSR_OK;
}

tsr_status tsr_index_tensor(const tsr_index *ix, uint32_t id, tsr_tensor_info *out, uint64_t *first_extent,
                            tsr_err *err)
{
    const void *p;
    TSR_TRY(record(ix, TSR_SEC_TENSORS, id, 1, &p, err));
    tsr_tensor_rec r;
    memcpy(&r, p, sizeof r);
    *out = (tsr_tensor_info){ .id = id,
                              .dtype = (tsr_dtype)r.dtype,
                              .src_dtype = (tsr_dtype)r.src_dtype,
                              .rank = r.rank,
                              .klass = (tsr_class)r.klass,
                              .layer = r.layer,
                              .expert_count = r.expert_count,
                              .item_bytes = r.item_bytes,
                              .chunks = r.chunks,
                              .chunk_bytes = r.chunk_bytes,
                              .block_bytes = r.block_bytes,
                              .filtered = (r.flags & 1) != 0,
                              .global_id = r.global_id,
                              .partner = r.partner == TSR_NO_PARTNER ? -1 : (int64_t)r.partner };
    TSR_TRY(text(ix, r.name, r.name_bytes, &out->name, err));
    if (r.rank > TSR_RANK_MAX) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: %s: rank %u (limit %d)", ix->what, out->name, r.rank, TSR_RANK_MAX);
    }
    TSR_TRY(record(ix, TSR_SEC_DIMS, r.dims, r.rank, &p, err));
    out->shape = p;
    TSR_TRY(check_tensor(ix, &r, out, err));
    if (first_extent != NULL) {
        *first_extent = r.first_extent;
    }
    return TSR_OK;
}

tsr_status tsr_index_file(const tsr_index *ix, uint32_t id, tsr_file_rec *out, const char **name,
                          tsr_err *err)
{
    const void *p;
    TSR_TRY(record(ix, TSR_SEC_FILES, id, 1, &p, err));
    memcpy(out, p, sizeof *out);
    TSR_TRY(text(ix, out->name, out->name_bytes, name, err));
    bool table = (ix->head.flags & 1) != 0;
    if (out->klass >= TSR_CLASS_COUNT ||
        (!table && (strchr(*name, '/') != NULL || **name == '\0' || **name == '.'))) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: shard %u: class or name makes no sense", ix->what, id);
    }
    return TSR_OK;
}

tsr_status tsr_index_extent(const tsr_index *ix, uint64_t id, tsr_extent_rec *out, tsr_err *err)
{
    const void *p;
    TSR_TRY(record(ix, TSR_SEC_EXTENTS, id, 1, &p, err));
    memcpy(out, p, sizeof *out);
    if (out->file >= ix->head.file_count || out->codec > TSR_CODEC_SHUFFLE_ZSTD || out->reserved[0] != 0 ||
        out->reserved[1] != 0 || out->reserved[2] != 0) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: extent %llu makes no sense", ix->what, (unsigned long long)id);
    }
    return TSR_OK;
}

tsr_status tsr_extent_check(const tsr_extent_rec *r, uint64_t payload, uint64_t chunk_bytes,
                            uint64_t file_bytes, tsr_err *err)
{
    uint64_t end;
    if (r->offset < TSR_HEAD_BYTES || !tsr_add_u64(r->offset, r->stored_bytes, &end) || end > file_bytes) {
        TSR_FAIL(err, TSR_E_FORMAT, "offset %llu + %llu bytes lie outside the file's %llu",
                 (unsigned long long)r->offset, (unsigned long long)r->stored_bytes,
                 (unsigned long long)file_bytes);
    }
    if (r->raw_bytes != payload && r->raw_bytes != chunk_bytes) {
        TSR_FAIL(err, TSR_E_FORMAT, "extent decodes to %llu bytes, the chunk has %llu",
                 (unsigned long long)r->raw_bytes, (unsigned long long)payload);
    }
    bool raw = r->codec == TSR_CODEC_RAW;
    if (raw ? r->stored_bytes != r->raw_bytes
            : (r->raw_bytes > TSR_CHUNK_BYTES_MAX || r->stored_bytes == 0 ||
               r->stored_bytes > tsr_codec_bound(r->raw_bytes))) {
        TSR_FAIL(err, TSR_E_FORMAT, "%llu stored bytes cannot be %llu decoded ones",
                 (unsigned long long)r->stored_bytes, (unsigned long long)r->raw_bytes);
    }
    return TSR_OK;
}

tsr_status tsr_index_lookup(const tsr_index *ix, const char *name, size_t name_bytes, bool family,
                            uint32_t *id, tsr_err *err)
{
    *id = UINT32_MAX;
    uint64_t slots = ix->head.sec[TSR_SEC_NAMES].bytes / 4;
    if (slots == 0 || name_bytes > TSR_NAME_BYTES_MAX) {
        return TSR_OK;
    }
    uint64_t hash = tsr_hash64(name, name_bytes);
    for (uint64_t i = hash & (slots - 1), tried = 0; tried < slots; i = (i + 1) & (slots - 1), tried++) {
        const void *p;
        TSR_TRY(record(ix, TSR_SEC_NAMES, i, 1, &p, err));
        uint32_t slot;
        memcpy(&slot, p, 4);
        if (slot == 0) {
            return TSR_OK;
        }
        TSR_TRY(record(ix, TSR_SEC_TENSORS, slot - 1, 1, &p, err));
        tsr_tensor_rec r;
        memcpy(&r, p, sizeof r);
        if (r.name_hash != hash || r.name_bytes != name_bytes || (r.kind == 1) != family) {
            continue;
        }
        const char *s;
        TSR_TRY(text(ix, r.name, r.name_bytes, &s, err));
        if (memcmp(s, name, name_bytes) == 0) {
            *id = slot - 1;
            return TSR_OK;
        }
    }
    return TSR_OK;
}

tsr_status tsr_index_experts(const tsr_index *ix, const uint32_t **ids, uint32_t *count, tsr_err *err)
{
    uint64_t n = ix->head.sec[TSR_SEC_EXPERTS].bytes / 4;
    if (n > TSR_EXPERT_COUNT_MAX) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: lists %llu experts (limit %u)", ix->what, (unsigned long long)n,
                 TSR_EXPERT_COUNT_MAX);
    }
    const void *p;
    TSR_TRY(record(ix, TSR_SEC_EXPERTS, 0, n, &p, err));
    const uint32_t *e = p;
    for (uint64_t i = 0; i < n; i++) {
        if (e[i] >= TSR_EXPERT_COUNT_MAX || (i > 0 && e[i] <= e[i - 1])) {
            TSR_FAIL(err, TSR_E_FORMAT, "%s: its list of experts is not ascending", ix->what);
        }
    }
    *ids = e;
    *count = (uint32_t)n;
    return TSR_OK;
}

tsr_status tsr_index_items(const tsr_index *ix, const tsr_tensor_info *t, uint32_t *count, tsr_err *err)
{
    *count = t->expert_count == 0 ? 1 : t->expert_count;
    if (t->expert_count == 0 || (ix->head.flags & 1) == 0) {
        return TSR_OK;
    }
    const uint32_t *ids;
    uint32_t n;
    TSR_TRY(tsr_index_experts(ix, &ids, &n, err));
    uint32_t below = 0;
    while (below < n && ids[below] < t->expert_count) {
        below++;
    }
    *count = below;
    return TSR_OK;
}

tsr_status tsr_shard_head_check(const uint8_t block[TSR_HEAD_BYTES], uint64_t file_bytes, tsr_shard_head *out,
                                tsr_err *err)
{
    memcpy(out, block, sizeof *out);
    if (memcmp(out->magic, TSR_HEAD_MAGIC, 8) != 0) {
        TSR_FAIL(err, TSR_E_FORMAT, "not a Tessera shard (wrong magic)");
    }
    if (tsr_hash64(block, sizeof *out - 8) != out->head_hash) {
        TSR_FAIL(err, TSR_E_FORMAT, "head is damaged");
    }
    for (size_t i = sizeof *out; i < TSR_HEAD_BYTES; i++) {
        if (block[i] != 0) {
            TSR_FAIL(err, TSR_E_FORMAT, "head: byte %zu is not zero", i);
        }
    }
    if (out->version != TSR_FORMAT_VERSION || out->flags != 0) {
        TSR_FAIL(err, TSR_E_UNSUPPORTED, "version %u with flags %#x (needs a newer tessera)", out->version,
                 out->flags);
    }
    uint64_t end;
    if (out->file_bytes != file_bytes) {
        TSR_FAIL(err, TSR_E_FORMAT, "file has %llu bytes, its head promises %llu",
                 (unsigned long long)file_bytes, (unsigned long long)out->file_bytes);
    }
    if (out->table_offset < TSR_HEAD_BYTES || !tsr_add_u64(out->table_offset, out->table_bytes, &end) ||
        end > file_bytes) {
        TSR_FAIL(err, TSR_E_FORMAT, "its table lies outside the file");
    }
    return TSR_OK;
}
