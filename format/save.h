/* save.h - private: the plan of a save (which bytes go where), one shard being written, and the job that runs. */
#ifndef TSR_FORMAT_SAVE_H
#define TSR_FORMAT_SAVE_H

#include "format/chunking.h"
#include "format/format.h"
#include "format/index.h"
#include "format/io.h"
#include "format/reader.h"
#include "format/shard_h5.h"

/* ---- plan: pure, from declarations and options ------------------------------------------------------ */

typedef struct save_tensor {
    tsr_tensor_decl d; /* name and shape point into the plan's arena */
    tsr_chunking k;
    bool filtered;
    uint64_t first_extent;
    uint32_t file; /* plain: its file */
} save_tensor;

typedef struct save_file {
    const char *name;
    tsr_class klass;
    uint32_t partition, of, piece;
    uint32_t *tensors; /* file order: families grouped by layer */
    uint32_t tensor_count;
    uint32_t *experts; /* ascending */
    uint32_t expert_count;
    uint64_t slot_count, payload_bytes;
    int64_t link_from; /* reshard: number of the source's file that is linked instead of written; -1 */
} save_file;

typedef struct save_plan {
    tsr_arena *arena;
    save_tensor *tensors;
    uint32_t tensor_count;
    save_file *files;
    uint32_t file_count;
    uint64_t extent_count, payload_bytes, largest_chunk;
    bool any_filtered;
} save_plan;

TSR_NODISCARD tsr_status save_plan_make(save_plan *p, const tsr_tensor_decl *decls, uint32_t count,
                                        const tsr_save_opts *o, tsr_err *err);
/* In steps: declarations only (filtered: per declaration, or NULL: decided by o->compress and the dtype), then files
 * by the options for a class, or one by one, then save_plan_assign. */
TSR_NODISCARD tsr_status save_plan_begin(save_plan *p, const tsr_tensor_decl *decls, uint32_t count,
                                         const bool *filtered, const tsr_save_opts *o, tsr_err *err);
TSR_NODISCARD tsr_status save_plan_add_class(save_plan *p, tsr_class klass, uint32_t experts,
                                             const tsr_save_opts *o, tsr_err *err);
void save_plan_free(save_plan *p);
/* Adds one file; used by reshard for linked pieces too. experts is copied. */
TSR_NODISCARD tsr_status save_plan_add_file(save_plan *p, tsr_class klass, uint32_t partition, uint32_t of,
                                            uint32_t piece, uint32_t pieces, const uint32_t *experts,
                                            uint32_t expert_count, tsr_err *err);
/* Splits declarations over the files of their class and counts slots. */
TSR_NODISCARD tsr_status save_plan_assign(save_plan *p, tsr_err *err);
/* The experts of each partition as one id list per partition: part[e] = partition of expert e. */
TSR_NODISCARD tsr_status save_partition_of(uint32_t expert_count, const tsr_save_opts *o, uint32_t *part,
                                           tsr_err *err);

/* Chunks of a file in file order. */
typedef struct save_slot {
    uint32_t file, tensor; /* tensor: number in the plan */
    uint32_t member;       /* its position in file.tensors */
    uint32_t item;         /* expert, or 0 */
    uint32_t local;        /* the item's position in this file */
    uint32_t chunk;
    uint64_t item_offset, payload_bytes, raw_bytes;
    uint64_t extent; /* number in the checkpoint */
} save_slot;
typedef struct save_cursor {
    uint32_t group_first, group_end, member, local, chunk;
    bool started;
} save_cursor;
/* False at the end. c starts zeroed. */
bool save_next_slot(const save_plan *p, uint32_t file, save_cursor *c, save_slot *out);

/* ---- one shard ------------------------------------------------------------------------------------------ */

typedef struct save_shard save_shard;
/* Creates dir/name.part with all its datasets. */
TSR_NODISCARD tsr_status save_shard_open(save_shard **out, const save_plan *p, uint32_t file, const char *dir,
                                         int zstd_level, tsr_err *err);
/* Where the slot's stored bytes go. Call in file order. */
TSR_NODISCARD tsr_status save_shard_place(save_shard *s, const save_slot *slot, uint64_t stored_bytes,
                                          bool encoded, uint64_t *offset, tsr_err *err);
/* Thread-safe. */
TSR_NODISCARD tsr_status save_shard_write(save_shard *s, uint64_t offset, const void *src, size_t n,
                                          tsr_err *err);
/* Table, head, hashes; fsync; rename to its final name. extents: of the whole checkpoint. Fills rec (but for its
 * name). Frees s in any case. */
TSR_NODISCARD tsr_status save_shard_close(save_shard **s, const tsr_extent_rec *extents, tsr_file_rec *rec,
                                          tsr_err *err);
void save_shard_abort(save_shard **s);
/* The uuid the shard would get with these extents and this file size. */
TSR_NODISCARD tsr_status save_shard_uuid(const save_plan *p, uint32_t file, const tsr_extent_rec *extents,
                                         uint64_t file_bytes, uint8_t uuid[16], tsr_err *err);
/* A finished shard at path holds exactly the planned content and every byte is right; fills its extents and rec. */
TSR_NODISCARD tsr_status save_shard_check(const save_plan *p, uint32_t file, const char *path,
                                          tsr_extent_rec *extents, tsr_file_rec *rec, tsr_err *err);

/* XXH3-128 of all bytes of io from 4096 on that no extent covers; extents: (offset, bytes) pairs, sorted here.
 * TSR_E_FORMAT when two overlap or one is outside. */
typedef struct span {
    uint64_t offset, bytes;
    uint64_t tag; /* the caller's */
} span;
TSR_NODISCARD tsr_status save_rest_hash(tsr_io *io, span *spans, uint64_t count, tsr_hash128 *out,
                                        tsr_err *err);

/* ---- what else goes into the folder ------------------------------------------------------------------------ */

typedef struct manifest_member {
    const char *name;
    uint64_t bytes;
    tsr_hash128 hash;
} manifest_member;
typedef struct manifest_in {
    const save_plan *plan;
    const tsr_file_rec *files;
    const tsr_save_opts *opts;
    const manifest_member *members; /* assets/..., train.json */
    uint32_t member_count;
    uint64_t stored_bytes;
    uint8_t uuid[16];
} manifest_in;
/* malloc'ed text, with its own check value filled in. */
TSR_NODISCARD tsr_status manifest_build(const manifest_in *in, char **text, size_t *bytes, tsr_err *err);
/* A member may be called so: the name is UTF-8. */
bool manifest_can_hold(const char *name);
/* The check value is right: XXH3-128 of the text with its own 32 digits as zeros. */
bool manifest_intact(const char *text, size_t bytes);
/* Random (version 4) uuid. */
void uuid_new(uint8_t uuid[16]);
void uuid_text(const uint8_t uuid[16], char out[37]);

/* ---- the job --------------------------------------------------------------------------------------------------- */

/* Brings the stored bytes of a slot (reshard): dst has room for the extent's stored bytes, told by size(). */
typedef struct save_source {
    tsr_fill_fn fill;
    /* Instead of fill, for data that is encoded already: describe says what the slot's stored bytes are, then
     * stored brings them. */
    tsr_status (*describe)(void *payload, const save_slot *slot, tsr_extent_info *x, tsr_err *err);
    tsr_status (*stored)(void *payload, const save_slot *slot, const tsr_extent_info *x, void *dst,
                         tsr_err *err);
    void *payload;
    const tsr_ckpt *link_source; /* files with link_from come from here; its folder must be a real one */
} save_source;
/* Takes plan over, also on failure. */
TSR_NODISCARD tsr_status save_job_start(tsr_save_job **out, const char *path, save_plan *plan,
                                        const save_source *source, const tsr_save_opts *o, tsr_err *err);
/* Bytes for buffers in flight (*out) and with what encoders need (*total). snapshot: as many as the limit allows. */
TSR_NODISCARD tsr_status save_buffer_budget(const save_plan *p, const tsr_save_opts *o, bool snapshot,
                                            uint64_t *out, uint64_t *total, tsr_err *err);
/* Bytes on disk, at most (a guess of 60 % for what will be compressed). */
uint64_t save_disk_bytes(const save_plan *p, const tsr_save_opts *o);

/* Removes temporary folders of dead processes of this host in parent. */
void save_sweep(const char *parent);

#endif
