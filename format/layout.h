/* layout.h - the bytes of index.tsx and of a shard's head and table. Only structs, constants and static
 * asserts. The normative text is docs/FORMAT.md; a test compares its tables with this file.
 * Everything is little-endian; reserved bytes are zero and checked. */
#ifndef TSR_FORMAT_LAYOUT_H
#define TSR_FORMAT_LAYOUT_H

#include <stdint.h>

#define TSR_FORMAT_VERSION 1

/* Limits: a count above its limit is refused before anything is allocated or multiplied. */
#define TSR_NAME_BYTES_MAX 4096u         /* of a tensor or file name, without the NUL */
#define TSR_TENSOR_COUNT_MAX (1u << 24)  /* plain tensors and expert families in one checkpoint */
#define TSR_EXPERT_COUNT_MAX (1u << 20)  /* experts of one family */
#define TSR_EXTENT_COUNT_MAX (1u << 28)  /* extents in one checkpoint */
#define TSR_FILE_COUNT_MAX (1u << 16)    /* shards in one checkpoint */
#define TSR_CHUNK_BYTES_MAX (1ull << 31) /* raw bytes of one extent that is not raw-coded (HDF5 chunk) */
#define TSR_MANIFEST_BYTES_MAX (64u << 20)

/* ---- shard: the first 4096 bytes of an .h5 file (the HDF5 user block) ---------------------------- */

#define TSR_HEAD_BYTES 4096u
#define TSR_HEAD_MAGIC "TSRSHARD"

typedef struct tsr_shard_head {
    char magic[8];
    uint32_t version;
    uint32_t flags;        /* 0; an unknown bit is refused */
    uint8_t uuid[16];      /* XXH3-128 of the shard's table: equal content, equal uuid */
    uint64_t file_bytes;   /* exact size of the file */
    uint64_t table_offset; /* where the shard's table (an index of this shard alone) lies */
    uint64_t table_bytes;
    uint8_t rest_hash[16]; /* XXH3-128 of every byte from 4096 on that is in no extent, in file order */
    uint8_t reserved[48];
    uint64_t head_hash; /* XXH3-64 of the 120 bytes above */
} tsr_shard_head;       /* the rest of the 4096 bytes is zero */
_Static_assert(sizeof(tsr_shard_head) == 128, "layout");

/* ---- index.tsx, and the table inside a shard: header, sections, page hashes ----------------------- */

#define TSR_INDEX_MAGIC "TSRINDEX"
#define TSR_PAGE_BYTES 65536u

enum tsr_section {
    TSR_SEC_FILES = 0, /* tsr_file_rec[] */
    TSR_SEC_TENSORS,   /* tsr_tensor_rec[] */
    TSR_SEC_DIMS,      /* int64_t[] */
    TSR_SEC_NAMES,     /* uint32_t[], open-addressed hash table of tensor names: tensor number + 1, or 0 */
    TSR_SEC_EXTENTS,   /* tsr_extent_rec[] */
    TSR_SEC_STRINGS,   /* bytes; every string is followed by one NUL */
    TSR_SEC_EXPERTS, /* uint32_t[], ascending: in a shard's table the experts it holds; empty in index.tsx */
    TSR_SEC_PAGES,   /* uint64_t[]: XXH3-64 of each 65536-byte page of [page_base, file end) */
    TSR_SEC_COUNT
};

typedef struct tsr_section_rec {
    uint64_t offset; /* from the start of the index, 64-byte aligned */
    uint64_t bytes;
} tsr_section_rec;

typedef struct tsr_index_head {
    char magic[8];
    uint32_t version;
    uint32_t flags;            /* bit 0: the table of one shard; unknown bits are refused */
    uint64_t index_bytes;      /* exact size of the index */
    uint8_t uuid[16];          /* of the checkpoint; zero in a shard's table */
    uint8_t manifest_hash[16]; /* XXH3-128 of manifest.json; zero in a shard's table */
    uint64_t manifest_bytes;
    uint32_t file_count;
    uint32_t tensor_count;
    uint64_t extent_count;
    uint64_t page_base;        /* where paged data begins: 512 + bytes of TSR_SEC_PAGES, rounded up to 64 */
    uint64_t pages_hash;       /* XXH3-64 of TSR_SEC_PAGES */
    uint64_t expert_count_max; /* experts of the largest family, 0 without experts */
    tsr_section_rec sec[TSR_SEC_COUNT];
    uint8_t reserved[512 - 104 - 16 * TSR_SEC_COUNT - 8];
    uint64_t head_hash; /* XXH3-64 of the 504 bytes above */
} tsr_index_head;
_Static_assert(sizeof(tsr_index_head) == 512, "layout");

typedef struct tsr_file_rec {
    uint8_t uuid[16];
    uint64_t file_bytes;
    uint64_t head_hash; /* the shard's tsr_shard_head.head_hash */
    uint32_t name;      /* offset in TSR_SEC_STRINGS */
    uint32_t name_bytes;
    uint32_t klass;     /* enum tsr_class */
    uint32_t partition; /* which partition of its class it belongs to */
    uint32_t of;        /* how many partitions the class has */
    uint32_t piece;     /* 0.. when a partition is made of several files */
    uint8_t reserved[8];
} tsr_file_rec;
_Static_assert(sizeof(tsr_file_rec) == 64, "layout");

typedef struct tsr_tensor_rec {
    uint64_t name_hash; /* XXH3-64 of the name's bytes */
    uint32_t name; /* offset in TSR_SEC_STRINGS; a family's name holds "{e}" once, where the expert stands */
    uint32_t name_bytes;
    uint8_t kind;      /* 0 plain, 1 family (one item per expert) */
    uint8_t dtype;     /* tsr_dtype: what the bytes mean */
    uint8_t src_dtype; /* tsr_dtype: what the source called them; same byte count */
    uint8_t rank;
    uint8_t klass; /* enum tsr_class */
    uint8_t flags; /* bit 0: filtered, a chunked dataset with a filter pipeline (each extent's codec tells) */
    uint8_t reserved0[2];
    int32_t layer;         /* -1 when it belongs to none */
    uint32_t expert_count; /* 0 for plain */
    uint32_t dims;         /* index of the first of rank dims in TSR_SEC_DIMS: the shape of one item */
    uint32_t chunks;       /* extents of one item (0 for an item of 0 bytes) */
    uint32_t partner;      /* MXFP4: number of the tensor with its E8M0 scales; else 0xffffffff */
    uint64_t first_extent; /* item i, chunk c: extent first_extent + i * chunks + c. In index.tsx item i is
                                expert i; in a shard's table it is the i-th of TSR_SEC_EXPERTS below expert_count */
    uint64_t item_bytes;
    uint64_t chunk_bytes; /* payload of every chunk but the last of its block; see docs/FORMAT.md "Chunks" */
    uint64_t block_bytes; /* bytes after which chunking starts anew (divides item_bytes) */
    uint32_t global_id;   /* its number in index.tsx: a shard's table keeps it for rebuilding */
    uint8_t reserved1[4];
} tsr_tensor_rec;
_Static_assert(sizeof(tsr_tensor_rec) == 88, "layout");

typedef struct tsr_extent_rec {
    uint64_t offset; /* in the file */
    uint64_t stored_bytes;
    uint64_t raw_bytes; /* decoded; at least the payload, more where HDF5 pads an edge chunk */
    uint64_t hash;      /* XXH3-64 of the stored bytes */
    uint64_t raw_hash;  /* XXH3-64 of the payload bytes (without padding) */
    uint32_t file;      /* number in TSR_SEC_FILES */
    uint8_t codec;      /* enum tsr_codec */
    uint8_t reserved[3];
} tsr_extent_rec;
_Static_assert(sizeof(tsr_extent_rec) == 48, "layout");

#define TSR_NO_PARTNER 0xffffffffu

#endif
