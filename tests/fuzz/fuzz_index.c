/* fuzz_index.c - index.tsx and shard tables. Checksums are made right first, so that what lies behind them is reached. */
#include "format/index.h"
#include "tests/fuzz/fuzz.h"

#include <stdlib.h>
#include <string.h>

static void mend(uint8_t *p, size_t n)
{
    tsr_index_head h;
    memcpy(&h, p, sizeof h);
    memcpy(h.magic, TSR_INDEX_MAGIC, 8);
    h.version = TSR_FORMAT_VERSION;
    h.flags &= 1;
    h.index_bytes = n;
    const tsr_section_rec *s = &h.sec[TSR_SEC_PAGES];
    if (h.page_base <= n && s->offset <= n && s->bytes <= n - s->offset && h.page_base >= sizeof h) {
        for (uint64_t i = 0; i < s->bytes / 8 && h.page_base + i * TSR_PAGE_BYTES < n; i++) {
            uint64_t from = h.page_base + i * TSR_PAGE_BYTES,
                     len = n - from < TSR_PAGE_BYTES ? n - from : TSR_PAGE_BYTES;
            uint64_t hash = tsr_hash64(p + from, len);
            memcpy(p + s->offset + i * 8, &hash, 8);
        }
        h.pages_hash = tsr_hash64(p + s->offset, s->bytes);
    }
    h.head_hash = tsr_hash64(&h, sizeof h - 8);
    memcpy(p, &h, sizeof h);
}

static void walk(const tsr_index *ix)
{
    for (uint32_t i = 0; i < ix->head.file_count && i < 64; i++) {
        tsr_file_rec f;
        const char *name;
        TSR_IGNORE(tsr_index_file(ix, i, &f, &name, NULL)); /* only crashes matter here */
    }
    const uint32_t *ids;
    uint32_t count;
    TSR_IGNORE(tsr_index_experts(ix, &ids, &count, NULL));
    for (uint32_t i = 0; i < ix->head.tensor_count && i < 4096; i++) {
        tsr_tensor_info t;
        uint64_t first;
        uint32_t items, id;
        if (tsr_index_tensor(ix, i, &t, &first, NULL) != TSR_OK) {
            continue;
        }
        char name[128];
        (void)tsr_tensor_item_name(&t, 7, name, sizeof name);
        TSR_IGNORE(tsr_index_lookup(ix, t.name, strlen(t.name), t.expert_count > 0, &id, NULL));
        TSR_IGNORE(tsr_index_items(ix, &t, &items, NULL));
        for (uint64_t k = 0; k < t.chunks && k < 16; k++) {
            tsr_extent_rec e;
            if (tsr_index_extent(ix, first + k, &e, NULL) == TSR_OK) {
                TSR_IGNORE(tsr_extent_check(&e, t.chunk_bytes, t.chunk_bytes, 1 << 20, NULL));
            }
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint8_t *copy = malloc(size + 1);
    tsr_index *ix;
    if (copy == NULL) {
        return 0;
    }
    memcpy(copy, data, size);
    if (size >= sizeof(tsr_index_head)) {
        mend(copy, size);
    }
    if (tsr_index_open(&ix, "fuzz", copy, size, copy, NULL) == TSR_OK) {
        walk(ix);
    }
    tsr_index_close(&ix);
    uint8_t block[TSR_HEAD_BYTES] = { 0 };
    tsr_shard_head h;
    memcpy(block, data, size < sizeof block ? size : sizeof block);
    memcpy(&h, block, sizeof h);
    tsr_shard_head_seal(&h, block);
    TSR_IGNORE(tsr_shard_head_check(block, h.file_bytes, &h, NULL));
    return 0;
}
