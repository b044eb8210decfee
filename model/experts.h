/* experts.h - residency of routed experts: lent from a source by one read each, kept packed as stored within a budget of
 * bytes, evicted least recently used first, fetched ahead on request. Threads of its own do the reading. */
#ifndef TSR_MODEL_EXPERTS_H
#define TSR_MODEL_EXPERTS_H

#include "kernels/kernels.h"
#include "model/source.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tsr_experts tsr_experts;

typedef struct tsr_experts_opts {
    int32_t layers; /* of the model; those that have no experts are never asked for */
    int32_t experts, top_k;
    uint64_t cache_bytes;       /* 0: room for all */
    int io_threads;             /* 0: 2 */
    const uint8_t *has_experts; /* [layers] */
} tsr_experts_opts;

/* asked = hits + misses; every expert that was read is resident or was evicted. */
typedef struct tsr_experts_stats {
    uint64_t asked, hits, misses; /* experts leased; found resident; had to be waited for */
    uint64_t prefetched,
        prefetch_used; /* read before they were wanted; of these, leased before they were evicted */
    uint64_t evicted;
    uint64_t bytes_read, wait_ns; /* from files; spent waiting in acquire */
    uint64_t resident, resident_bytes, capacity_bytes;
} tsr_experts_stats;

/* Takes the whole budget from the backend at once, in slots of the largest expert's size. Borrows backend and source.
 * TSR_E_LIMIT: cache_bytes cannot hold top_k experts; err says how many bytes that takes. */
TSR_NODISCARD tsr_status tsr_experts_open(tsr_experts **out, tsr_backend *b, const tsr_weight_source *src,
                                          const tsr_experts_opts *o, tsr_err *err);
void tsr_experts_close(tsr_experts **x);
/* Reads experts into free slots until all are resident or the cache is full. progress in bytes. After a failure or
 * TSR_E_CANCELLED what was read stays. */
TSR_NODISCARD tsr_status tsr_experts_load_all(tsr_experts *x, const tsr_progress *p, tsr_err *err);

/* Leases experts ids[0..n) (each once, n >= 1) of a layer, as many from the front as fit into the cache at once:
 * *taken_out (>= 1, and >= min(n, top_k)). Reads what is missing, several at a time. Leased slots are not evicted. Then
 * table[part][expert] in backend memory points to the parts of every leased expert and is NULL for all others of that layer:
 * hand the rows to the ggemm ops. Exactly one release per successful acquire, when the backend has done with them (sync);
 * one lease at a time. After a failure nothing is leased, what could be read stays resident, and the same call may be
 * made again. Once all are resident ids are not looked at and the table holds every expert. */
typedef struct tsr_expert_table {
    const void *const
        *part[TSR_PART_COUNT]; /* backend memory, [experts] pointers each; scales: NULL when none */
    tsr_dtype dtype;
} tsr_expert_table;
TSR_NODISCARD tsr_status tsr_experts_acquire(tsr_experts *x, int32_t layer, const int32_t *ids, int32_t n,
                                             int32_t *taken_out, tsr_expert_table *table, tsr_err *err);
void tsr_experts_release(tsr_experts *x, int32_t layer);
/* Advice that these experts will be wanted soon. Never evicts a leased slot, never waits, may do nothing; leaves room for
 * the top_k experts of another acquire. What cannot be read is forgotten, and fails when it is acquired. */
void tsr_experts_prefetch(tsr_experts *x, int32_t layer, const int32_t *ids, int32_t n);
/* True when every expert of every layer is resident for good: acquire then costs nothing and needs no ids. */
bool tsr_experts_all_resident(const tsr_experts *x);
/* The table of a layer whose experts are all resident. */
tsr_expert_table tsr_experts_table(const tsr_experts *x, int32_t layer);
void tsr_experts_stats_get(const tsr_experts *x, tsr_experts_stats *out);

#ifdef __cplusplus
}
#endif
#endif
