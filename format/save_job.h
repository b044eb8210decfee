/* save_job.h - private to save_*.c: the job itself. */
#ifndef TSR_FORMAT_SAVE_JOB_H
#define TSR_FORMAT_SAVE_JOB_H

#include "format/save.h"

#include <pthread.h>

#define SAVE_THREADS_MAX 64

typedef struct save_buffer {
    struct save_buffer *next;
    size_t bytes;
    _Alignas(16) uint8_t data[];
} save_buffer;

typedef struct save_item {
    save_slot slot;
    uint8_t *data;     /* in its batch's buffer; NULL for zeros */
    tsr_extent_info x; /* stored mode */
} save_item;

/* What a worker takes at a time: one large chunk, or neighbours of one file that are small. Workers take their turns
 * by the batch: a turn may cost a sleep and a wake-up, which is more than a small chunk is worth. */
#define SAVE_BATCH_ITEMS 64
#define SAVE_BATCH_BYTES ((size_t)256 << 10)
typedef struct save_batch {
    struct save_batch *next;
    uint64_t ticket; /* places in files are given in this order */
    uint32_t file, count;
    bool opens;       /* opens the file; carries no items */
    save_buffer *buf; /* NULL for an opener and for zeros */
    size_t used;
    save_item items[];
} save_batch;

struct tsr_save_job {
    save_plan plan;
    tsr_save_opts o; /* strings copied into plan.arena */
    save_source source;
    char *real, *temp;
    int lock_fd; /* -1: none */
    tsr_extent_rec *extents;
    tsr_file_rec *recs;
    bool *finished; /* per file: found complete from an earlier run */

    tsr_ckpt *parent; /* hard-link candidates; NULL */
    int64_t *parent_tensor, *parent_file;
    uint8_t *same; /* per extent: the parent's bytes are equal and not written yet */

    pthread_mutex_t mu;
    pthread_cond_t room, work, turn; /* a buffer is free; a batch waits; the ticket moved on */
    save_batch *head, *tail;
    save_batch *gathered; /* the feeder's own until it is handed over; NULL */
    size_t batch_bytes;   /* of a batch of small items */
    save_buffer *spare;
    uint64_t buffer_used, buffer_limit, next_ticket, tickets;
    save_shard **shards; /* per file, while it is open */
    uint64_t *remaining; /* per file: items not done */
    struct {
        uint64_t bytes, hash;
    } zero_hash[64]; /* of runs of zeros, by length */
    int zero_count;
    bool no_more;
    tsr_status st; /* first failure */
    tsr_err err;
    uint64_t written, stored_bytes; /* payload done; bytes stored */
    uint64_t linked_files, stall_ns, start_ns;

    pthread_t workers[SAVE_THREADS_MAX], finisher;
    int worker_count;
    bool finisher_runs;
};

uint64_t save_now_ns(void);
/* Remembers the first failure and wakes everybody. */
void save_fail(tsr_save_job *j, tsr_status st, const tsr_err *err);
void *save_worker(void *job);
/* Asset files, index, manifest, rename. */
TSR_NODISCARD tsr_status save_commit(tsr_save_job *j, tsr_err *err);
/* Candidate shards of the parent, see tsr_save_opts.parent. */
TSR_NODISCARD tsr_status save_parent_open(tsr_save_job *j, tsr_err *err);
/* True when the parent holds exactly these stored bytes for the slot. */
bool save_parent_has(const tsr_save_job *j, const save_slot *slot, const tsr_extent_rec *e,
                     const uint8_t *stored);
/* All slots of the file are marked same: links the parent's shard. *linked false: the shards would differ. */
TSR_NODISCARD tsr_status save_parent_link(tsr_save_job *j, uint32_t file, bool *linked, tsr_err *err);
/* Writes what was marked same into the open shard after all. */
TSR_NODISCARD tsr_status save_parent_copy(tsr_save_job *j, uint32_t file, tsr_err *err);

#endif
