/* convert.h - public API of convert/: foreign formats as sources, layouts (names of model families as data
 * tables), import into and export from Tessera checkpoints. */
#ifndef TSR_CONVERT_CONVERT_H
#define TSR_CONVERT_CONVERT_H

#include "format/base.h"
#include "format/format.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- sources: one row per foreign format --------------------------------------------------------- */

/* One tensor as the source names it. Borrowed from the source. 48 bytes: a source may hold half a million. */
typedef struct tsr_src_tensor {
    const char *name;
    const int64_t *shape; /* rank entries, logical elements */
    uint64_t bytes;
    uint64_t offset; /* absolute in its file; 0 where that has no meaning */
    uint32_t file;   /* number in tsr_source.files */
    uint8_t dtype;   /* tsr_dtype */
    uint8_t rank;
    uint8_t reserved[2];
} tsr_src_tensor;

typedef struct tsr_src_file { /* a file that holds tensors */
    const char *name; /* as the user sees it (the snapshot's name, not the blob's), relative to the folder */
    uint64_t bytes;
} tsr_src_file;

typedef struct tsr_src_asset { /* any other file beside them: travels along byte for byte */
    const char *name;          /* relative, '/'-separated */
    const char *path;          /* where to read it; NULL: data */
    const void *data;
    uint64_t bytes;
} tsr_src_asset;

typedef struct tsr_source tsr_source;
typedef struct tsr_source_opts {
    uint64_t mem_limit;  /* bytes for names, shapes, headers; 0: 256 MiB. Beyond: TSR_E_LIMIT */
    bool allow_trailing; /* safetensors: bytes behind the last tensor are a warning, not an error */
} tsr_source_opts;

typedef struct tsr_source_ops {
    const char *name; /* "safetensors", "tessera" */
    const char *what; /* "safetensors folder", for "took it for ..." */
    /* 0: not mine .. 100: surely mine. Looks at names and first bytes only; never fails. */
    int (*bid)(const char *path);
    tsr_status (*open)(tsr_source **out, const char *path, const tsr_source_opts *o, tsr_err *err);
    /* Bytes [off, off+n) of tensor i. Thread-safe. */
    tsr_status (*read)(tsr_source *s, int64_t i, uint64_t off, void *dst, size_t n, tsr_err *err);
    /* A whole asset whose path and data are NULL; malloc'ed. NULL where every asset has one of them. */
    tsr_status (*read_asset)(tsr_source *s, int64_t asset, char **out, tsr_err *err);
    void (*close)(tsr_source *s);
    /* Bytes [off, off+n) of a file as they lie there, where tensors' offsets mean something: several neighbours in one
     * read. Thread-safe. NULL: the format has no such thing. */
    tsr_status (*read_range)(tsr_source *s, uint32_t file, uint64_t off, void *dst, size_t n, tsr_err *err);
} tsr_source_ops;

struct tsr_source {
    const tsr_source_ops *ops;
    const char *path;
    const char *what; /* ops->what or a finer word: "single safetensors file" */
    const tsr_src_tensor *tensors;
    int64_t count;
    const tsr_src_file *files;
    int64_t file_count;
    const tsr_src_asset *assets;
    int64_t asset_count;
    const char *config_json; /* text of config.json, NUL-terminated; NULL when there is none */
    size_t config_bytes;
    const char *const *warnings; /* "1 tensor not in the index is ignored: x" */
    int64_t warning_count;
    const tsr_ckpt *ckpt; /* when the source is a Tessera checkpoint, else NULL */
};

/* The format with the highest bid opens it. TSR_E_MISSING: no such path. TSR_E_UNSUPPORTED: nobody bids, the
 * message says what the file looks like. */
TSR_NODISCARD tsr_status tsr_source_open(tsr_source **out, const char *path, const tsr_source_opts *o,
                                         tsr_err *err);
TSR_NODISCARD tsr_status tsr_source_read(tsr_source *s, int64_t i, uint64_t off, void *dst, size_t n,
                                         tsr_err *err);
void tsr_source_close(tsr_source **s);
/* Registered formats, NULL-terminated. */
extern const tsr_source_ops *const tsr_source_formats[];

/* ---- layouts: names of a model family <-> canonical names ------------------------------------------ */

/* Canonical names are what Tessera checkpoints hold and what model/ asks for (docs/NAMES.md).
 * Patterns: {l} a layer number, {e} an expert number (canonical decimal, no leading zeros), {*} the rest of the
 * name (last position only). A row matches only when its dtype and rank conditions hold. */
typedef enum tsr_packing {
    TSR_PACK_NONE,   /* same dtype, same shape */
    TSR_PACK_NIBBLES /* source U8 [.., n] of nibble pairs <-> MXFP4 [.., 2n] */
} tsr_packing;
typedef struct tsr_name_row {
    const char *source;    /* "language_model.model.layers.{l}.self_attn.q_proj.weight" */
    const char *canonical; /* "layers.{l}.attn.q.weight" */
    uint8_t src_dtype;     /* 0: any; else the row matches only this dtype in the source */
    uint8_t dtype;         /* 0: the source's; else what the bytes mean (MXFP4, E8M0) */
    uint8_t pack;          /* tsr_packing */
    const char *partner;   /* canonical pattern of the tensor with its scales; NULL */
    bool alias; /* an older spelling: read, never written; the name as it came is kept for export */
} tsr_name_row;
typedef struct tsr_layout {
    const char *arch;               /* "kimi-k3" */
    const char *what;               /* "Kimi K3 (Hugging Face names)" */
    const char *const *model_types; /* config.json model_type values, NULL-terminated */
    const tsr_name_row *rows;
    size_t row_count;
} tsr_layout;
extern const tsr_layout *const tsr_layouts[];        /* NULL-terminated */
const tsr_layout *tsr_layout_find(const char *arch); /* NULL when unknown */
/* Which layout fits: "auto" looks at config.json's model_type, then "raw". TSR_E_USAGE: unknown arch name. */
TSR_NODISCARD tsr_status tsr_layout_pick(const tsr_layout **out, const char *arch, const tsr_source *s,
                                         tsr_err *err);

/* One name through the table. to_source false: source -> canonical; true: canonical -> source (first row that is
 * no alias and whose dtype fits). dtype is that of the side given. Returns the row or NULL; buf gets the name. */
const tsr_name_row *tsr_layout_map(const tsr_layout *l, bool to_source, const char *name, tsr_dtype dtype,
                                   char *buf, size_t buf_bytes);

/* ---- a source seen through a layout ------------------------------------------------------------------ */

/* Items are canonical tensors, one per source tensor: a plain tensor, or one expert's matrix. Groups are plain
 * tensors and families: exactly the writer's declarations. Group g's expert e is item group_first[g] + e. */
typedef struct tsr_map {
    const tsr_layout *layout;
    tsr_source *source;      /* borrowed */
    int64_t *src;            /* per item: number in source->tensors */
    int64_t count;           /* items */
    tsr_tensor_decl *groups; /* in canonical file order; names and shapes live in the arena or the source */
    int64_t *group_first;    /* group_count + 1 entries */
    uint32_t group_count;
    int64_t ignored;  /* source tensors the keep function refused */
    int64_t unmapped; /* source tensors no row knew: kept under "other.<source name>" */
    const char *const *warnings;
    int64_t warning_count;
    tsr_arena *arena;
    uint32_t *hash; /* names of groups */
    uint64_t hash_size;
} tsr_map;
/* Ledger: every source tensor becomes exactly one item; two that map to one name: TSR_E_CONFLICT; a family with
 * a gap: TSR_E_MISSING naming layer and experts; differing shapes inside a family: TSR_E_CONFLICT; a packed
 * tensor without scales or the reverse: TSR_E_MISSING. With a model layout also: complete against
 * tsr_spec_each_tensor (model/spec.h), tied head rules. */
typedef struct tsr_map_opts {
    uint64_t mem_limit;
    bool tie_head; /* accept a missing lm_head although tie_word_embeddings is false */
    bool partial;  /* do not demand completeness against the catalogue (ls, cat, diff of a part) */
    bool (*keep)(void *payload, const char *source_name); /* NULL: all; else completeness is not demanded */
    void *keep_payload;
} tsr_map_opts;
TSR_NODISCARD tsr_status tsr_map_make(tsr_map **out, tsr_source *s, const tsr_layout *l,
                                      const tsr_map_opts *o, tsr_err *err);
void tsr_map_free(tsr_map **m);
/* The item with this canonical name, or -1. *group (may be NULL) is its group; for a family's own name ("..{e}..") the
 * result is -1 and *group is set; else *group is UINT32_MAX. O(1). */
int64_t tsr_map_find(const tsr_map *m, const char *canonical, uint32_t *group);
/* The group of item i, and (may be NULL) its expert, -1 for a plain tensor. */
uint32_t tsr_map_group(const tsr_map *m, int64_t i, int32_t *expert);
/* Canonical name of item i, as snprintf. */
size_t tsr_map_name(const tsr_map *m, int64_t i, char *buf, size_t buf_bytes);
/* Decoded bytes [off, off+n) of item i. Thread-safe. */
TSR_NODISCARD tsr_status tsr_map_read(const tsr_map *m, int64_t i, uint64_t off, void *dst, size_t n,
                                      tsr_err *err);

/* Opens path, picks the layout and maps: what ls, cat, diff, info use. Frees with tsr_view_close. */
typedef struct tsr_view {
    tsr_source *source;
    tsr_map *map;
} tsr_view;
TSR_NODISCARD tsr_status tsr_view_open(tsr_view *out, const char *path, const char *arch,
                                       const tsr_source_opts *so, const tsr_map_opts *mo, tsr_err *err);
void tsr_view_close(tsr_view *v);

/* ---- conversions ---------------------------------------------------------------------------------------- */

typedef struct tsr_convert_opts {
    const char *to;   /* "tessera", "safetensors"; NULL: tessera from foreign, safetensors from tessera */
    const char *arch; /* "auto" (NULL), "raw", "kimi-k3", ... */
    const char
        *gate_up; /* stacks of experts with gate and up fused: "interleaved", "halves"; NULL: by model_type */
    uint32_t expert_partitions, dense_files;
    bool allow_uneven, compress, tie_head, allow_trailing, restart;
    int zstd_level, threads;
    uint64_t mem_limit;
    uint64_t
        shard_bytes; /* safetensors: at most so many data bytes a file; 0: as the source was, else 5 GB */
    const char *const *include, *const *exclude; /* globs on source names, NULL-terminated; NULL */
    tsr_progress progress;
} tsr_convert_opts;

typedef struct tsr_convert_plan {
    const char *from, *to, *arch; /* static or borrowed strings */
    int64_t tensors_in, tensors_used, tensors_ignored, tensors_written;
    uint64_t bytes_in, bytes_out, peak_bytes;
    uint32_t files_out;
    double seconds;       /* estimate at a nominal disk speed, stated in the man page */
    bool identical_files; /* export: the files will be byte-identical to those imported */
    const char *const *warnings;
    int64_t warning_count;
    void *impl;
} tsr_convert_plan;
/* Reads headers only; everything that can be refused is refused here. */
TSR_NODISCARD tsr_status tsr_convert_plan_make(tsr_convert_plan **out, const char *src, const char *dst,
                                               const tsr_convert_opts *o, tsr_err *err);
/* Executes it. Resumable: killed or cancelled, the same call goes on; with other options TSR_E_CONFLICT. */
TSR_NODISCARD tsr_status tsr_convert_run(tsr_convert_plan *p, tsr_err *err);
void tsr_convert_plan_free(tsr_convert_plan **p);

#ifdef __cplusplus
}
#endif
#endif
