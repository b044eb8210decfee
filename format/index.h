/* index.h - private: index.tsx (and the table inside a shard) as bytes: building and checked reading.
 * Reading trusts nothing: the head is checked at open, each 64 KiB page against its hash when first touched,
 * each record when it is fetched. */
#ifndef TSR_FORMAT_INDEX_H
#define TSR_FORMAT_INDEX_H

#include "format/base.h"
#include "format/format.h"
#include "format/io.h"
#include "format/layout.h"

#define TSR_INDEX_NAME "index.tsx"
#define TSR_MANIFEST_NAME "manifest.json"

/* ---- reading ------------------------------------------------------------------------------------- */

typedef struct tsr_index {
    const uint8_t *base; /* mapping, or owned copy */
    uint8_t *owned;
    tsr_index_head head; /* a checked copy */
    const char *what;    /* for messages: "index.tsx" or "experts-00000-of-00002.h5: table"; owned copy */
    uint8_t *seen;       /* one byte per page: hash was right */
    uint64_t page_count;
} tsr_index;

/* From memory that outlives it (or, owned non-NULL, that it frees). what is copied. TSR_E_FORMAT names the field. */
TSR_NODISCARD tsr_status tsr_index_open(tsr_index **out, const char *what, const uint8_t *base,
                                        uint64_t bytes, uint8_t *owned, tsr_err *err);
void tsr_index_close(tsr_index **ix);
/* Checks the pages of [off, off + n). */
TSR_NODISCARD tsr_status tsr_index_touch(const tsr_index *ix, uint64_t off, uint64_t n, tsr_err *err);
/* Checked records. The tensor info's pointers go into the mapping. */
TSR_NODISCARD tsr_status tsr_index_tensor(const tsr_index *ix, uint32_t id, tsr_tensor_info *out,
                                          uint64_t *first_extent, tsr_err *err);
TSR_NODISCARD tsr_status tsr_index_file(const tsr_index *ix, uint32_t id, tsr_file_rec *out,
                                        const char **name, tsr_err *err);
TSR_NODISCARD tsr_status tsr_index_extent(const tsr_index *ix, uint64_t id, tsr_extent_rec *out,
                                          tsr_err *err);
/* Checks rec against the tensor's chunk and the file it points into. */
TSR_NODISCARD tsr_status tsr_extent_check(const tsr_extent_rec *rec, uint64_t payload, uint64_t chunk_bytes,
                                          uint64_t file_bytes, tsr_err *err);
/* Id of the tensor whose name is exactly this (a family: its template), or UINT32_MAX. */
TSR_NODISCARD tsr_status tsr_index_lookup(const tsr_index *ix, const char *name, size_t name_bytes,
                                          bool family, uint32_t *id, tsr_err *err);
/* The shard's experts (shard tables only). */
TSR_NODISCARD tsr_status tsr_index_experts(const tsr_index *ix, const uint32_t **ids, uint32_t *count,
                                           tsr_err *err);
/* Items of tensor t in this index: 1, expert_count, or in a shard's table the experts it holds. */
TSR_NODISCARD tsr_status tsr_index_items(const tsr_index *ix, const tsr_tensor_info *t, uint32_t *count,
                                         tsr_err *err);

/* ---- building ------------------------------------------------------------------------------------- */

typedef struct tsr_index_tensor_in {
    const tsr_tensor_decl *decl;
    uint64_t first_extent;
    uint32_t partner;   /* in this index, or TSR_NO_PARTNER */
    uint32_t global_id; /* shard tables: number in index.tsx */
    bool filtered;
} tsr_index_tensor_in;

typedef struct tsr_index_in {
    bool shard_table;
    uint8_t uuid[16], manifest_hash[16];
    uint64_t manifest_bytes;
    const tsr_file_rec *files; /* name fields are filled in by the builder */
    const char *const *file_names;
    uint32_t file_count;
    const tsr_index_tensor_in *tensors;
    uint32_t tensor_count;
    const tsr_extent_rec *extents;
    uint64_t extent_count;
    const uint32_t *experts;
    uint32_t expert_count; /* length of experts */
} tsr_index_in;

/* Size of what tsr_index_build makes: depends on counts and names only. 0: over a limit. */
uint64_t tsr_index_size(const tsr_index_in *in);
/* malloc'ed. TSR_E_LIMIT beyond the limits of layout.h. */
TSR_NODISCARD tsr_status tsr_index_build(const tsr_index_in *in, uint8_t **out, uint64_t *bytes,
                                         tsr_err *err);

/* ---- shard heads ------------------------------------------------------------------------------------ */

/* Fills magic, version and head_hash of h and writes the 4096-byte block. */
void tsr_shard_head_seal(tsr_shard_head *h, uint8_t block[TSR_HEAD_BYTES]);
/* Checks a block: magic, version, hash, zero rest, sizes against file_bytes. */
TSR_NODISCARD tsr_status tsr_shard_head_check(const uint8_t block[TSR_HEAD_BYTES], uint64_t file_bytes,
                                              tsr_shard_head *out, tsr_err *err);

#endif
