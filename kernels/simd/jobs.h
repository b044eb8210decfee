/* jobs.h - a list of products that differ in their pointers only: the experts of a layer, the heads of an attention, the
 * blocks of rows of one big product. They are cut into pieces and worked on together. */
#ifndef TSR_KERNELS_SIMD_JOBS_H
#define TSR_KERNELS_SIMD_JOBS_H

#include "kernels/simd/tile.h"

/* One product of `rows` rows of activations with one weight. */
typedef struct job {
    const float *x; /* rows, x_stride apart */
    float *y;
    const char *w, *scale;
    int64_t rows, x_stride, y_stride;
    float *packed; /* x as the kernel wants it, or NULL */
    int64_t first; /* piece */
} job;

typedef struct jobs {
    tsr_queue *q;
    tsr_dtype dtype;
    int64_t n, k; /* of every weight */
    bool accumulate;
    job *list;
    int64_t count, pieces;
    int64_t block; /* rows or columns of a weight in one piece */
    float *room;   /* for packed */
    int64_t room_used, room_floats;
} jobs;

/* The first bytes of each worker's scratch are its own; what all share lies behind those of worker 0. */
#define OWN_BYTES ((size_t)1 << 20)
#define LIST_BYTES ((size_t)1 << 20)
#define JOBS_MAX ((int64_t)(LIST_BYTES / sizeof(job)))
#define ROWS_MAX 512 /* of one job */

static inline void jobs_open(jobs *p, tsr_queue *q, tsr_dtype dtype, int64_t n, int64_t k, bool accumulate)
{
    char *shared = (char *)tsr_scratch(q, 0) + OWN_BYTES;
    *p = (jobs){ .q = q, .dtype = dtype, .n = n, .k = k, .accumulate = accumulate };
    p->list = (job *)(void *)shared;
    p->room = (float *)(void *)(shared + LIST_BYTES);
    p->room_floats = (int64_t)((TSR_SCRATCH_BYTES - OWN_BYTES - LIST_BYTES) / sizeof(float));
}

/* The job that has piece i. */
static inline const job *job_of(const jobs *p, int64_t i)
{
    int64_t low = 0, high = p->count;
    while (high - low > 1) {
        int64_t mid = (low + high) / 2;
        low = p->list[mid].first <= i ? mid : low;
        high = p->list[mid].first <= i ? high : mid;
    }
    return &p->list[low];
}

static inline int64_t round_up(int64_t n, int64_t to)
{
    return (n + to - 1) / to * to;
}

static inline int64_t at_most(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t stride_or(int64_t stride, int64_t width)
{
    return stride == 0 ? width : stride;
}

/* dx += or = dy W, and dw += dy^T x: matmul_grad.c. In gradients, x of a job is dy, y is dx. */
void TSR_SIMD(jobs_nn_add)(jobs *p, job one);
void TSR_SIMD(jobs_nn_run)(jobs *p);

#endif
