/* experts_priv.h - for model/ only: slots of the expert cache, and the threads that fill them.
 *
 * Every slot is in exactly one list, told by its state; links are slot numbers, so that nothing is allocated while the
 * cache works. One lock guards everything but the bytes of slots: those belong to the reading thread while READING, else
 * to the thread that calls tsr_experts_*. Backend calls are made by that thread only. */
#ifndef TSR_MODEL_EXPERTS_PRIV_H
#define TSR_MODEL_EXPERTS_PRIV_H

#include "model/experts.h"

#include <pthread.h>

typedef enum slot_state {
    SLOT_FREE,    /* in free */
    SLOT_QUEUED,  /* in demand or ahead */
    SLOT_READING, /* in no list: a thread reads into it, or its bytes are uploaded */
    SLOT_STAGED,  /* in staged: read into host memory, not yet uploaded; parts point there */
    SLOT_READY    /* in lru */
} slot_state;

typedef struct slot {
    const void *part[TSR_PART_COUNT];
    int32_t layer, expert;
    int32_t prev, next; /* -1: none */
    int32_t stage;      /* the staging buffer it holds; -1 */
    int32_t rank;       /* place among the experts asked for: the first failure is told */
    uint32_t step;      /* its layer's count of acquires when last leased; 0: never */
    uint8_t state;
    bool demand; /* somebody waits for it */
    bool leased;
    bool ahead;  /* read on a guess */
    bool unused; /* read ahead and never leased */
    bool guess;  /* read ahead for its layer's next acquire, which has not come: counted in guesses */
} slot;

typedef struct slot_list {
    int32_t head, tail;
} slot_list;

typedef struct expert_layer {
    int32_t ordinal; /* among the layers with experts; -1: has none */
    uint32_t step;   /* acquires so far */
    bool stale;      /* its table could not be written: all of it is next time */
    tsr_dtype dtype;
    uint64_t bytes;
    uint64_t part_bytes[TSR_PART_COUNT]; /* 0: no such part */
} expert_layer;

struct tsr_experts {
    tsr_backend *b;
    const tsr_weight_source *src;
    expert_layer *layers;
    int32_t layer_count, experts, top_k;
    int64_t total; /* experts of all layers */
    uint64_t slot_bytes;
    int32_t slot_count;
    slot *slots;
    char *arena;                        /* backend: slot_count of slot_bytes */
    int32_t *where;                     /* [ordinal][expert]: slot, -1 */
    const void **table, **mirror;       /* [ordinal][part][expert]: backend; what was last written there */
    int32_t *leased;                    /* experts of the current lease */
    int32_t leased_count, leased_layer; /* layer -1: no lease */
    bool all;

    pthread_mutex_t lock;
    pthread_cond_t work, done; /* there is something to read; a read has ended */
    slot_list free, demand, ahead, staged, lru;
    int32_t guesses;
    int64_t pending; /* demanded slots that are not ready */
    uint64_t loaded; /* bytes of demanded slots that became ready */
    tsr_status failure;
    int32_t failure_rank;
    tsr_err failure_err;
    tsr_experts_stats stats;
    bool stop;

    /* only where the backend's memory is not the host's */
    char *stages; /* stage_count of slot_bytes */
    int32_t *free_stages;
    int32_t stage_count, free_stage_count;

    pthread_t *threads;
    int thread_count;
};

/* ---- lists (experts_io.c); the lock is held ------------------------------------------------------------------- */

void list_push(tsr_experts *x, slot_list *l, int32_t i);       /* at the tail */
void list_push_front(tsr_experts *x, slot_list *l, int32_t i); /* at the head */
void list_remove(tsr_experts *x, slot_list *l, int32_t i);
static inline int32_t *where_of(const tsr_experts *x, int32_t layer, int32_t expert)
{
    return &x->where[(int64_t)x->layers[layer].ordinal * x->experts + expert];
}
static inline char *slot_memory(const tsr_experts *x, int32_t i)
{
    return x->arena + (uint64_t)i * x->slot_bytes;
}

/* ---- requests (experts_io.c); the lock is held ---------------------------------------------------------------- */

/* A free slot becomes a request. */
void slot_request(tsr_experts *x, int32_t i, int32_t layer, int32_t expert, bool demand);
/* A request or read on a guess becomes one that is waited for. */
void slot_demand(tsr_experts *x, int32_t i);
/* Takes a slot that is not READING from its list; its expert is forgotten. It is then free and in no list. */
void slot_take(tsr_experts *x, int32_t i);
/* The slot's expert was not brought: it is free again. */
void slot_drop(tsr_experts *x, int32_t i);
/* Brings the longest waiting staged slot to the backend; gives the lock up meanwhile. */
void upload_one(tsr_experts *x);
/* Until nothing that was demanded is pending; after a failure what is still queued is dropped. progress may be NULL;
 * total: its bytes. False: cancelled. Gives the lock up meanwhile. */
bool wait_demanded(tsr_experts *x, const tsr_progress *p, uint64_t total);
TSR_NODISCARD tsr_status threads_start(tsr_experts *x, int count, tsr_err *err);
void threads_stop(tsr_experts *x);

#endif
