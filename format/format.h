/* format.h - public API of the checkpoint library: read, write, verify, pack.
 *
 * The reading half (down to "writing") is in the library tsr_read, which needs nothing but libc, zstd and
 * xxHash; the rest is in tsr_format, which adds libhdf5, libarchive and jansson.
 *
 * Every function that can fail for an operating reason returns tsr_status and fills *err (may be NULL).
 * T **out first: the caller owns it, it is NULL on failure, T_close(&t) accepts NULL and sets NULL. */
#ifndef TSR_FORMAT_FORMAT_H
#define TSR_FORMAT_FORMAT_H

#include "format/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Partition classes. Codes are stored. Optimizer state is partitioned exactly like its parameters. */
typedef enum tsr_class {
    TSR_CLASS_DENSE = 0,
    TSR_CLASS_EXPERTS = 1,
    TSR_CLASS_OPTIM_DENSE = 2,
    TSR_CLASS_OPTIM_EXPERTS = 3,
    TSR_CLASS_COUNT = 4
} tsr_class;
/* "dense", "experts", "optim-dense", "optim-experts": also the stem of the shard's file name. */
const char *tsr_class_name(unsigned klass);

typedef enum tsr_codec {
    TSR_CODEC_RAW = 0,
    TSR_CODEC_ZSTD = 1,        /* one zstd frame with its content size */
    TSR_CODEC_SHUFFLE_ZSTD = 2 /* HDF5's byte shuffle by element size, then the frame */
} tsr_codec;
const char *tsr_codec_name(unsigned codec); /* "raw", "zstd", "shuffle+zstd" */

/* ---- reading ------------------------------------------------------------------------------------ */

typedef struct tsr_ckpt tsr_ckpt;

/* One tensor, or one family: the same matrix of every expert of a layer. All pointers are borrowed from the
 * checkpoint. shape is that of one item (one expert), row-major, last index fastest, in logical elements. */
typedef struct tsr_tensor_info {
    uint32_t id;
    const char *name; /* a family's holds "{e}" where the expert's number stands */
    tsr_dtype dtype;
    tsr_dtype src_dtype; /* what the source called the same bytes (MXFP4 nibbles come as U8) */
    int rank;
    const int64_t *shape;
    tsr_class klass;
    int32_t layer;         /* -1: none */
    uint32_t expert_count; /* 0: a plain tensor */
    uint64_t item_bytes;   /* decoded bytes of the tensor, or of one expert's matrix */
    uint32_t chunks;       /* extents of one item */
    uint64_t chunk_bytes, block_bytes;
    int64_t partner;    /* id of the tensor that holds the scales, -1: none */
    bool filtered;      /* lies in a dataset with a filter pipeline */
    uint32_t global_id; /* = id, but in a shard's own table its number in index.tsx */
} tsr_tensor_info;

/* Where one chunk of an item lies. */
typedef struct tsr_extent_info {
    uint32_t file;
    tsr_codec codec;
    uint64_t offset, stored_bytes, raw_bytes;
    uint64_t item_offset, payload_bytes; /* which bytes of the item it decodes to */
    uint64_t hash, raw_hash;
} tsr_extent_info;

typedef struct tsr_file_info {
    const char *name;
    uint64_t bytes;
    tsr_class klass;
    uint32_t partition, of, piece;
    uint8_t uuid[16];
} tsr_file_info;

/* Opens a checkpoint folder, or (through tsr_ckpt_open_any of tsr_format) the tar of one. Checks the index's
 * head, that manifest.json is the one the index was made for, and the presence and exact size of each shard.
 * Reads no tensor data; cost does not grow with the number of experts.
 * TSR_E_MISSING: no manifest (not a committed checkpoint), a shard is absent. TSR_E_FORMAT: damaged; err names
 * file and field. TSR_E_UNSUPPORTED: newer version or unknown feature. */
TSR_NODISCARD tsr_status tsr_ckpt_open(tsr_ckpt **out, const char *path, tsr_err *err);
void tsr_ckpt_close(tsr_ckpt **c);

const char *tsr_ckpt_path(const tsr_ckpt *c);
/* The manifest's text (UTF-8 JSON), NUL-terminated. Borrowed. */
const char *tsr_ckpt_manifest(const tsr_ckpt *c, size_t *bytes_out);
uint32_t tsr_ckpt_tensor_count(const tsr_ckpt *c);
uint32_t tsr_ckpt_file_count(const tsr_ckpt *c);
uint64_t tsr_ckpt_extent_count(const tsr_ckpt *c);
/* Experts of the largest family; 0 without experts. */
uint32_t tsr_ckpt_expert_count(const tsr_ckpt *c);

/* id < tsr_ckpt_tensor_count. Damage in the index pages it touches is TSR_E_FORMAT. */
TSR_NODISCARD tsr_status tsr_ckpt_tensor(const tsr_ckpt *c, uint32_t id, tsr_tensor_info *out, tsr_err *err);
TSR_NODISCARD tsr_status tsr_ckpt_file(const tsr_ckpt *c, uint32_t file, tsr_file_info *out, tsr_err *err);
/* The experts whose matrices lie in this file, ascending; *ids_out malloc'ed (NULL when none). Reads the index only. */
TSR_NODISCARD tsr_status tsr_ckpt_file_experts(const tsr_ckpt *c, uint32_t file, uint32_t **ids_out,
                                               uint32_t *count_out, tsr_err *err);
/* Opens the shard, if it was not yet, and checks that its head is the one the index names. TSR_E_MISSING when it
 * is a copy of another shard (says which experts are missing and which are there twice), TSR_E_FORMAT when it is
 * damaged or foreign. Reads do this by themselves. */
TSR_NODISCARD tsr_status tsr_ckpt_check_file(const tsr_ckpt *c, uint32_t file, tsr_err *err);
/* item: 0 for a plain tensor, the expert for a family. */
TSR_NODISCARD tsr_status tsr_ckpt_extent(const tsr_ckpt *c, const tsr_tensor_info *t, uint32_t item,
                                         uint32_t chunk, tsr_extent_info *out, tsr_err *err);

/* Finds by full name: a plain tensor, or one expert's matrix ("layers.3.experts.17.gate.weight": *item = 17).
 * Also finds a family by its template ("...experts.{e}.gate.weight": *item = UINT32_MAX). O(1).
 * TSR_E_MISSING when there is none. */
TSR_NODISCARD tsr_status tsr_ckpt_find(const tsr_ckpt *c, const char *name, tsr_tensor_info *out,
                                       uint32_t *item, tsr_err *err);

/* Writes the name of item (expert) of t into buf, NUL-terminated; returns its length (as snprintf). */
size_t tsr_tensor_item_name(const tsr_tensor_info *t, uint32_t item, char *buf, size_t buf_bytes);

enum {
    TSR_READ_CHECK = 1 /* compare each touched extent with its checksum; always on for compressed ones */
};

/* Copies bytes [off, off + n) of the decoded item into dst. Thread-safe. With TSR_READ_CHECK whole extents
 * are hashed. TSR_E_FORMAT names file, tensor and expert on damage. */
TSR_NODISCARD tsr_status tsr_ckpt_read(const tsr_ckpt *c, const tsr_tensor_info *t, uint32_t item,
                                       uint64_t off, void *dst, size_t n, unsigned flags, tsr_err *err);

/* Stored bytes of one extent, as they lie in the file. dst holds at least x->stored_bytes. */
TSR_NODISCARD tsr_status tsr_ckpt_read_stored(const tsr_ckpt *c, const tsr_extent_info *x, void *dst,
                                              tsr_err *err);
/* A pointer to them in a read-only mapping of the file, or NULL when the file cannot be mapped. */
const uint8_t *tsr_ckpt_map_stored(const tsr_ckpt *c, const tsr_extent_info *x);
/* Decodes stored bytes of x (of a tensor of this dtype) to x->raw_bytes at dst. */
TSR_NODISCARD tsr_status tsr_extent_decode(const tsr_extent_info *x, tsr_dtype dtype, const void *stored,
                                           void *dst, tsr_err *err);

/* One expert of one layer: all its matrices lie side by side, so that one read brings them. */
typedef struct tsr_expert_span {
    uint32_t file;
    uint64_t offset, bytes; /* one pread covers every extent of every matrix */
    uint32_t matrix_count;  /* families of this layer and class */
} tsr_expert_span;
#define TSR_EXPERT_MATRIX_MAX 64
typedef struct tsr_expert_matrix {
    tsr_tensor_info tensor;
    const uint8_t *data; /* first byte of the item, inside dst; NULL when compressed or in several extents */
} tsr_expert_matrix;
/* TSR_E_MISSING: no such layer or expert. TSR_E_UNSUPPORTED: not side by side (written by another tool). */
TSR_NODISCARD tsr_status tsr_ckpt_expert_span(const tsr_ckpt *c, int32_t layer, uint32_t expert,
                                              tsr_class klass, tsr_expert_span *out, tsr_err *err);
/* dst: out->bytes of tsr_ckpt_expert_span. m: at least matrix_count entries. One pread. */
TSR_NODISCARD tsr_status tsr_ckpt_read_expert(const tsr_ckpt *c, int32_t layer, uint32_t expert,
                                              tsr_class klass, void *dst, size_t dst_bytes,
                                              tsr_expert_matrix *m, unsigned flags, tsr_err *err);

/* Assets (files that came along: config.json, tokenizer, ...) and other members, by name relative to the
 * checkpoint ("assets/config.json"). malloc'ed, NUL-terminated. */
TSR_NODISCARD tsr_status tsr_ckpt_read_member(const tsr_ckpt *c, const char *name, size_t limit, char **out,
                                              size_t *bytes_out, tsr_err *err);
/* Every regular file of the checkpoint, sorted. */
TSR_NODISCARD tsr_status tsr_ckpt_each_member(const tsr_ckpt *c,
                                              tsr_status (*fn)(void *payload, const char *name, uint64_t size,
                                                               tsr_err *err),
                                              void *payload, tsr_err *err);

/* ---- opening anything that is a checkpoint (tsr_format) ------------------------------------------ */

/* A checkpoint folder; a run folder (its newest committed checkpoint, as tsr_run_latest with quick checks); the path
 * "run/latest"; an uncompressed tar of a checkpoint folder, read in place. *note_out (may be NULL): a malloc'ed
 * line saying what was skipped and why, or NULL. */
TSR_NODISCARD tsr_status tsr_ckpt_open_any(tsr_ckpt **out, const char *path, char **note_out, tsr_err *err);
/* True when path looks like something tsr_ckpt_open_any would try (a manifest, a tar, a run folder). */
bool tsr_ckpt_probe(const char *path);

/* ---- writing ------------------------------------------------------------------------------------ */

/* What will be in the checkpoint. Order is file order (families are grouped by layer, expert-major). */
typedef struct tsr_tensor_decl {
    const char *name; /* family: with "{e}" exactly once */
    tsr_dtype dtype, src_dtype;
    int rank;
    const int64_t *shape;
    tsr_class klass;
    int32_t layer;
    uint32_t expert_count; /* 0: plain */
    int64_t partner;       /* index in the same array, or -1 */
} tsr_tensor_decl;

/* The declaration that would write t again; pointers are borrowed from t's checkpoint. */
tsr_tensor_decl tsr_tensor_decl_of(const tsr_tensor_info *t);

/* One piece that the writer asks for: bytes [off, off + bytes) of item `item` of declaration `tensor`. */
typedef struct tsr_slot {
    uint32_t tensor;
    uint32_t item;
    uint64_t off, bytes;
} tsr_slot;
/* Fills dst with the slot's bytes. May be called from several threads at once when opts->threads > 1. */
typedef tsr_status (*tsr_fill_fn)(void *payload, const tsr_slot *slot, void *dst, tsr_err *err);

/* A file that travels along. Either bytes in memory or a path to copy from. */
typedef struct tsr_asset {
    const char *name; /* below assets/, '/'-separated, no "." or ".." components */
    const char *path; /* NULL: data */
    const void *data;
    uint64_t bytes;
} tsr_asset;

typedef struct tsr_partition { /* experts of one partition by hand: inclusive ranges, flattened pairs */
    const uint32_t *ranges;    /* first0, last0, first1, last1, ... ascending */
    uint32_t range_count;      /* pairs */
} tsr_partition;

typedef struct tsr_save_opts {
    uint32_t expert_partitions;      /* 0: 1 */
    uint32_t dense_files;            /* 0: 1 */
    const tsr_partition *partitions; /* NULL: equal contiguous ranges (first ones one larger when uneven) */
    bool allow_uneven;               /* else expert_count % expert_partitions != 0 is TSR_E_USAGE */
    bool compress;                   /* shuffle + zstd where it pays (see docs/FORMAT.md "Codecs") */
    int zstd_level;                  /* 0: 1 */
    int threads;                     /* 0: number of processors */
    uint64_t mem_limit; /* bytes of buffers; 0: 256 MiB. TSR_E_LIMIT when one chunk does not fit */
    bool zeros;         /* every tensor is zeros: fill is not called, shards are sparse files (for planning
                                        a model that does not exist yet, and for tests of its size); no compression */
    const char *parent; /* a checkpoint whose equal shards are hard-linked instead of written; NULL */
    bool resumable;     /* keep and continue DST's partial folder; see tsr_save */
    const char *resume_key;   /* text that names source and options; another key: TSR_E_CONFLICT */
    bool restart;             /* throw an existing partial folder away */
    const char *arch;         /* "kimi-k3", "kimi-linear", "raw", "canonical" */
    const char *config_json;  /* the model's hyper-parameters, kept whole; NULL */
    const char *train_json;   /* training state, kept as train.json; NULL */
    const char *lineage_json; /* a JSON array of steps, oldest first; NULL */
    const tsr_asset *assets;
    uint32_t asset_count;
    tsr_progress progress;
} tsr_save_opts;

/* What a save would do, without doing it. */
typedef struct tsr_save_plan {
    uint64_t payload_bytes; /* decoded tensor bytes */
    uint64_t disk_bytes;    /* at most, uncompressed shards + index */
    uint64_t buffer_bytes;  /* of memory, at most */
    uint64_t extent_count;
    uint32_t file_count;
} tsr_save_plan;
TSR_NODISCARD tsr_status tsr_save_plan_make(tsr_save_plan *out, const tsr_tensor_decl *decls, uint32_t count,
                                            const tsr_save_opts *o, tsr_err *err);

/* Writes a whole checkpoint at path (which must not exist, or TSR_E_CONFLICT) and commits it atomically:
 * everything is written and synced under a temporary name beside path, then renamed. Data is asked for in file
 * order through fill. Space is checked first (TSR_E_IO "No space left on device: need N bytes, M free").
 * On failure or cancellation nothing is left, except that with o->resumable a cancelled or killed save leaves
 * its partial folder, and the next call with the same resume_key verifies finished shards and goes on. */
TSR_NODISCARD tsr_status tsr_save(const char *path, const tsr_tensor_decl *decls, uint32_t count,
                                  tsr_fill_fn fill, void *payload, const tsr_save_opts *o, tsr_err *err);

/* The same without waiting: returns when every byte has been copied into at most opts->mem_limit of memory and
 * continues on background threads. decls, fill and payload may be freed after the return. One at a time per job. */
typedef struct tsr_save_job tsr_save_job;
TSR_NODISCARD tsr_status tsr_save_start(tsr_save_job **out, const char *path, const tsr_tensor_decl *decls,
                                        uint32_t count, tsr_fill_fn fill, void *payload,
                                        const tsr_save_opts *o, tsr_err *err);
typedef struct tsr_save_stats {
    uint64_t stall_ns; /* how long tsr_save_start kept its caller waiting for memory */
    uint64_t total_ns; /* from start to commit */
    uint64_t raw_bytes, stored_bytes, linked_files;
} tsr_save_stats;
/* Waits, frees the job, returns the save's own status. stats may be NULL. */
TSR_NODISCARD tsr_status tsr_save_wait(tsr_save_job **job, tsr_save_stats *stats, tsr_err *err);

/* ---- a run folder: latest, retention -------------------------------------------------------------- */

/* Writes run/latest (by rename). name is relative to run. */
TSR_NODISCARD tsr_status tsr_run_set_latest(const char *run, const char *name, tsr_err *err);

typedef struct tsr_retention {
    uint32_t keep_last;  /* newest N; 0: all */
    uint64_t keep_every; /* and each whose step number is a multiple; 0: none */
} tsr_retention;
/* Removes committed checkpoints step-* beyond the policy, and dead temporary folders of this host. Never the
 * newest that verifies (quick). removed_out may be NULL. */
TSR_NODISCARD tsr_status tsr_run_retain(const char *run, const tsr_retention *r, uint32_t *removed_out,
                                        tsr_err *err);

/* ---- verify ---------------------------------------------------------------------------------------- */

typedef enum tsr_verify_level {
    TSR_VERIFY_QUICK, /* manifest, index, sizes, heads, bounds, overlaps: no tensor data */
    TSR_VERIFY_FULL,  /* every byte of every file against its checksum */
    TSR_VERIFY_DEEP   /* also: decode each chunk, and compare the shard as libhdf5 sees it with the index */
} tsr_verify_level;

typedef struct tsr_finding {
    tsr_status code; /* TSR_E_FORMAT damage, TSR_E_MISSING absent, TSR_E_CONFLICT foreign, TSR_OK a warning */
    const char *file;
    const char *item; /* tensor (with expert), "index page 3", "HDF5 metadata", ... */
    const char *what;
} tsr_finding;
typedef void (*tsr_finding_fn)(void *payload, const tsr_finding *f);

typedef struct tsr_verify_report {
    uint64_t bytes_checked, findings, warnings;
    uint64_t files, tensors, extents;
    tsr_status worst; /* TSR_OK, TSR_E_DIFF (damage), TSR_E_MISSING (only things absent) */
} tsr_verify_report;

/* Goes on after damage; each finding is told once. Fails itself only when it cannot run (I/O, memory). Works on
 * a folder or a tar. threads 0: processors. */
TSR_NODISCARD tsr_status tsr_verify(const char *path, tsr_verify_level level, int threads, tsr_finding_fn fn,
                                    void *payload, const tsr_progress *progress, tsr_verify_report *out,
                                    tsr_err *err);

/* True when the folder holds step-* folders. */
bool tsr_run_probe(const char *path);
/* The newest committed checkpoint of a run folder that a verification of this level finds nothing wrong with
 * (resuming wants TSR_VERIFY_FULL). *path_out malloc'ed. Those with findings are skipped; *note_out (may be NULL): a
 * malloc'ed line saying which and why, or NULL. TSR_E_MISSING when there is none. */
TSR_NODISCARD tsr_status tsr_run_latest(const char *run, tsr_verify_level level, char **path_out,
                                        char **note_out, tsr_err *err);

/* Makes index.tsx again from the shards' own tables and the manifest; replaces it by rename. *changed_out: the
 * bytes differ from what was there. */
TSR_NODISCARD tsr_status tsr_index_rebuild(const char *path, bool *changed_out, tsr_err *err);

/* ---- reshard ---------------------------------------------------------------------------------------- */

typedef struct tsr_reshard_opts {
    uint32_t expert_partitions, dense_files; /* 0: as they are */
    const tsr_partition *partitions;
    bool allow_uneven;
    bool rewrite; /* one file per partition even where linking files would do */
    bool resumable, restart;
    int threads;
    uint64_t mem_limit;
    const char *lineage_step_json; /* appended to the lineage; NULL */
    tsr_progress progress;
} tsr_reshard_opts;
typedef struct tsr_reshard_plan {
    uint64_t moved_bytes, linked_bytes, disk_bytes, buffer_bytes;
    uint32_t moved_files, linked_files; /* of the result */
} tsr_reshard_plan;
TSR_NODISCARD tsr_status tsr_reshard_plan_make(tsr_reshard_plan *out, const tsr_ckpt *src,
                                               const tsr_reshard_opts *o, tsr_err *err);
/* Moves stored bytes, never decodes; whole files are hard-linked where partitions nest on file borders. */
TSR_NODISCARD tsr_status tsr_reshard(const tsr_ckpt *src, const char *dst, const tsr_reshard_opts *o,
                                     tsr_err *err);

/* ---- pack, unpack (libarchive) ----------------------------------------------------------------------- */

/* out "-": standard output. zstd_level 0: uncompressed, readable in place. Verifies checksums on the way. */
TSR_NODISCARD tsr_status tsr_pack(const char *ckpt_path, const char *out, int zstd_level,
                                  const tsr_progress *p, tsr_err *err);
/* in "-": standard input. Refuses absolute paths, "..", links, duplicate members; verifies on the way; commits
 * dst by rename. */
TSR_NODISCARD tsr_status tsr_unpack(const char *in, const char *dst, const tsr_progress *p, tsr_err *err);

#ifdef __cplusplus
}
#endif
#endif
