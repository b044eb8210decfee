/* index_build.c - writing index.tsx, shard tables and shard heads as bytes; see index.h. */
#include "format/chunking.h"
#include "format/index.h"

#include <stdlib.h>
#include <string.h>

typedef struct sizes {
    uint64_t bytes[TSR_SEC_COUNT], offset[TSR_SEC_COUNT], page_base, total;
} sizes;

static uint64_t name_slots(uint32_t tensors)
{
    uint64_t slots = 1;
    while (slots < (uint64_t)tensors * 2 + 1) {
        slots *= 2;
    }
    return tensors == 0 ? 0 : slots;
}

/* Section sizes and places. False beyond a limit of layout.h. */
static bool measure(const tsr_index_in *in, sizes *s)
{
    uint64_t strings = 0, dims = 0;
    if (in->file_count > TSR_FILE_COUNT_MAX || in->tensor_count > TSR_TENSOR_COUNT_MAX ||
        in->extent_count > TSR_EXTENT_COUNT_MAX) {
        return false;
    }
    for (uint32_t i = 0; i < in->file_count; i++) {
        strings += strlen(in->file_names[i]) + 1;
    }
    for (uint32_t i = 0; i < in->tensor_count; i++) {
        size_t n = strlen(in->tensors[i].decl->name);
        if (n > TSR_NAME_BYTES_MAX) {
            return false;
        }
        strings += n + 1;
        dims += (uint64_t)in->tensors[i].decl->rank;
    }
    if (strings > UINT32_MAX || dims > UINT32_MAX) {
        return false;
    }
    s->bytes[TSR_SEC_FILES] = (uint64_t)in->file_count * sizeof(tsr_file_rec);
    s->bytes[TSR_SEC_TENSORS] = (uint64_t)in->tensor_count * sizeof(tsr_tensor_rec);
    s->bytes[TSR_SEC_DIMS] = dims * 8;
    s->bytes[TSR_SEC_NAMES] = name_slots(in->tensor_count) * 4;
    s->bytes[TSR_SEC_EXTENTS] = in->extent_count * sizeof(tsr_extent_rec);
    s->bytes[TSR_SEC_STRINGS] = strings;
    s->bytes[TSR_SEC_EXPERTS] = (uint64_t)in->expert_count * 4;
    uint64_t body = 0;
    for (int i = 0; i < TSR_SEC_PAGES; i++) {
        body = tsr_align_up(body + s->bytes[i], 64);
    }
    uint64_t pages = (body + TSR_PAGE_BYTES - 1) / TSR_PAGE_BYTES;
    s->bytes[TSR_SEC_PAGES] = pages * 8;
    s->offset[TSR_SEC_PAGES] = sizeof(tsr_index_head);
    s->page_base = tsr_align_up(sizeof(tsr_index_head) + pages * 8, 64);
    uint64_t at = s->page_base;
    for (int i = 0; i < TSR_SEC_PAGES; i++) {
        s->offset[i] = at;
        at = tsr_align_up(at + s->bytes[i], 64);
    }
    s->total = s->page_base + body;
    return true;
}

uint64_t tsr_index_size(const tsr_index_in *in)
{
    sizes s = { 0 };
    return measure(in, &s) ? s.total : 0;
}

static uint32_t put_text(uint8_t *base, const sizes *s, uint64_t *used, const char *text, size_t n)
{
    memcpy(base + s->offset[TSR_SEC_STRINGS] + *used, text, n + 1);
    uint32_t at = (uint32_t)*used;
    *used += n + 1;
    return at;
}

static void put_tensors(const tsr_index_in *in, const sizes *s, uint8_t *base, uint64_t *strings)
{
    uint64_t dims = 0, slots = name_slots(in->tensor_count);
    uint32_t *names = (uint32_t *)(void *)(base + s->offset[TSR_SEC_NAMES]);
    for (uint32_t i = 0; i < in->tensor_count; i++) {
        const tsr_tensor_decl *d = in->tensors[i].decl;
        size_t n = strlen(d->name);
        tsr_chunking k;
        bool fits = tsr_chunking_make(&k, d->dtype, d->rank, d->shape, TSR_CHUNK_TARGET_BYTES);
        TSR_ASSERT(fits); /* the writer checked every declaration */
        tsr_tensor_rec r = { .name_hash = tsr_hash64(d->name, n),
                             .name_bytes = (uint32_t)n,
                             .kind = d->expert_count > 0,
                             .dtype = (uint8_t)d->dtype,
                             .src_dtype = (uint8_t)d->src_dtype,
                             .rank = (uint8_t)d->rank,
                             .klass = (uint8_t)d->klass,
                             .layer = d->layer,
                             .expert_count = d->expert_count,
                             .dims = (uint32_t)dims,
                             .chunks = (uint32_t)k.chunks,
                             .partner = in->tensors[i].partner,
                             .first_extent = in->tensors[i].first_extent,
                             .item_bytes = k.item_bytes,
                             .chunk_bytes = k.chunk_bytes,
                             .block_bytes = k.block_bytes,
                             .flags = in->tensors[i].filtered ? 1 : 0,
                             .global_id = in->shard_table ? in->tensors[i].global_id : i };
        r.name = put_text(base, s, strings, d->name, n);
        memcpy(base + s->offset[TSR_SEC_TENSORS] + (uint64_t)i * sizeof r, &r, sizeof r);
        if (d->rank > 0) {
            memcpy(base + s->offset[TSR_SEC_DIMS] + dims * 8, d->shape, (size_t)d->rank * 8);
        }
        dims += (uint64_t)d->rank;
        uint64_t slot = r.name_hash & (slots - 1);
        while (names[slot] != 0) {
            slot = (slot + 1) & (slots - 1);
        }
        names[slot] = i + 1;
    }
}

static void put_head(const tsr_index_in *in, const sizes *s, uint8_t *base)
{
    tsr_index_head h = { .version = TSR_FORMAT_VERSION,
                         .flags = in->shard_table ? 1 : 0,
                         .index_bytes = s->total,
                         .manifest_bytes = in->manifest_bytes,
                         .file_count = in->file_count,
                         .tensor_count = in->tensor_count,
                         .extent_count = in->extent_count,
                         .page_base = s->page_base };
    memcpy(h.magic, TSR_INDEX_MAGIC, 8);
    memcpy(h.uuid, in->uuid, 16);
    memcpy(h.manifest_hash, in->manifest_hash, 16);
    for (uint32_t i = 0; i < in->tensor_count; i++) {
        if (in->tensors[i].decl->expert_count > h.expert_count_max) {
            h.expert_count_max = in->tensors[i].decl->expert_count;
        }
    }
    for (int i = 0; i < TSR_SEC_COUNT; i++) {
        h.sec[i] = (tsr_section_rec){ s->offset[i], s->bytes[i] };
    }
    uint64_t *pages = (uint64_t *)(void *)(base + s->offset[TSR_SEC_PAGES]);
    for (uint64_t p = 0; p < s->bytes[TSR_SEC_PAGES] / 8; p++) {
        uint64_t from = s->page_base + p * TSR_PAGE_BYTES;
        uint64_t len = s->total - from < TSR_PAGE_BYTES ? s->total - from : TSR_PAGE_BYTES;
        pages[p] = tsr_hash64(base + from, len);
    }
    h.pages_hash = tsr_hash64(pages, s->bytes[TSR_SEC_PAGES]);
    h.head_hash = tsr_hash64(&h, sizeof h - 8);
    memcpy(base, &h, sizeof h);
}

tsr_status tsr_index_build(const tsr_index_in *in, uint8_t **out, uint64_t *bytes, tsr_err *err)
{
    *out = NULL;
    sizes s = { 0 };
    if (!measure(in, &s)) {
        TSR_FAIL(err, TSR_E_LIMIT,
                 "index: too many or too long names, tensors, files or extents for one checkpoint");
    }
    uint8_t *base = calloc(1, s.total);
    if (base == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "index: out of memory for %llu bytes", (unsigned long long)s.total);
    }
    uint64_t strings = 0;
    for (uint32_t i = 0; i < in->file_count; i++) {
        tsr_file_rec f = in->files[i];
        f.name_bytes = (uint32_t)strlen(in->file_names[i]);
        f.name = put_text(base, &s, &strings, in->file_names[i], f.name_bytes);
        memcpy(base + s.offset[TSR_SEC_FILES] + (uint64_t)i * sizeof f, &f, sizeof f);
    }
    put_tensors(in, &s, base, &strings);
    if (in->extent_count > 0) {
        memcpy(base + s.offset[TSR_SEC_EXTENTS], in->extents, s.bytes[TSR_SEC_EXTENTS]);
    }
    if (in->expert_count > 0) {
        memcpy(base + s.offset[TSR_SEC_EXPERTS], in->experts, s.bytes[TSR_SEC_EXPERTS]);
    }
    put_head(in, &s, base);
    *out = base;
    *bytes = s.total;
    return TSR_OK;
}

void tsr_shard_head_seal(tsr_shard_head *h, uint8_t block[TSR_HEAD_BYTES])
{
    memcpy(h->magic, TSR_HEAD_MAGIC, 8);
    h->version = TSR_FORMAT_VERSION;
    memset(block, 0, TSR_HEAD_BYTES);
    h->head_hash = tsr_hash64(h, sizeof *h - 8);
    memcpy(block, h, sizeof *h);
}
