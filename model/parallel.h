/* parallel.h - public: what a model that is one of several asks of those who know the others (train/). Host memory; a backend
 * with memory of its own is not served yet. Calls are collective: every rank of the group makes them in the same order. */
#ifndef TSR_MODEL_PARALLEL_H
#define TSR_MODEL_PARALLEL_H

#include "format/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Ranks that hold all experts together, each an equal part, in order. */
typedef struct tsr_expert_group {
    void *payload;
    int32_t rank, ranks;
    /* n numbers for each rank, n from each. */
    tsr_status (*counts)(void *payload, const int64_t *send, int64_t *recv, int64_t n, tsr_err *err);
    /* Rows of `width` f32: send_rows[i] to rank i, recv_rows[i] from it, one behind the other in rank order. */
    tsr_status (*rows)(void *payload, const float *send, const int64_t *send_rows, float *recv,
                       const int64_t *recv_rows, int64_t width, tsr_err *err);
} tsr_expert_group;

/* Ranks that share a sequence: each has an equal run of its tokens, in order. */
typedef struct tsr_sequence_line {
    void *payload;
    int32_t rank, ranks;
    tsr_status (*send)(void *payload, int32_t to, const void *data, size_t bytes, tsr_err *err);
    tsr_status (*receive)(void *payload, int32_t from, void *data, size_t bytes, tsr_err *err);
    /* bytes from each rank, in rank order. */
    tsr_status (*gather)(void *payload, const void *send, void *recv, size_t bytes, tsr_err *err);
    /* data [n] becomes the sum over the ranks. */
    tsr_status (*sum)(void *payload, float *data, int64_t n, tsr_err *err);
} tsr_sequence_line;

#ifdef __cplusplus
}
#endif
#endif
