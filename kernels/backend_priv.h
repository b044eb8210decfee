/* backend_priv.h - for kernels/ only: prototypes of every kernel ops.def says exists, their tables, and what host
 * kernels use of the pool. */
#ifndef TSR_KERNELS_BACKEND_PRIV_H
#define TSR_KERNELS_BACKEND_PRIV_H

#include "kernels/kernels.h"

#define TSR_IF_0(...)
#define TSR_IF_1(...) __VA_ARGS__
#define TSR_OR_NULL_0(x) NULL
#define TSR_OR_NULL_1(x) x

#ifdef __cplusplus
extern "C" {
#endif

#define TSR_OP(op, cpu, simd, cuda)                                                                          \
    TSR_IF_##cpu(tsr_status tsr_cpu_##op(tsr_queue *q, const tsr_##op##_args *a);)                           \
        TSR_IF_##simd(tsr_status tsr_avx2_##op(tsr_queue *q, const tsr_##op##_args *a);)                     \
            TSR_IF_##simd(tsr_status tsr_avx512_##op(tsr_queue *q, const tsr_##op##_args *a);)               \
                TSR_IF_##cuda(tsr_status tsr_cuda_##op(tsr_queue *q, const tsr_##op##_args *a);)
#include "kernels/ops.def"
#undef TSR_OP

extern const tsr_kernels tsr_cpu_kernels;
extern const tsr_kernels tsr_avx2_kernels;
extern const tsr_kernels tsr_avx512_kernels;

/* ---- host: work over the threads of the pool ---------------------------------------------------- */

/* Calls fn(payload, i, worker) for each i of [0, n), from any of the pool's threads, and returns when all are done.
 * What i computes may depend on i only, never on worker or on the number of threads: cut the work by its size.
 * worker is in [0, tsr_workers(q)) and says whose scratch to use. Not nested. */
void tsr_parallel(tsr_queue *q, int64_t n, void (*fn)(void *payload, int64_t i, int worker), void *payload);
int tsr_workers(const tsr_queue *q);
/* This worker's scratch: TSR_SCRATCH_BYTES, 64-byte aligned, kept for the life of the backend, contents undefined.
 * Taken from the system page by page as it is touched. */
#define TSR_SCRATCH_BYTES ((size_t)64 << 20)
void *tsr_scratch(tsr_queue *q, int worker);

tsr_status tsr_pool_open(tsr_queue **out, int threads, tsr_err *err);
void tsr_pool_close(tsr_queue **q);

/* ---- "cuda": in a plugin, so that programs start without CUDA -------------------------------------------------- */

/* The plugin's one door. Refuses a program with another version or layout. why says what is wrong, without a name. */
#define TSR_CUDA_ENTRY "tsr_cuda_open"
tsr_status tsr_cuda_open(tsr_backend **out, const char *version, uint64_t layout, char *why,
                         size_t why_bytes);
/* Finds the plugin, opens it and goes through its door (kernels/plugin.c). */
tsr_status tsr_plugin_open(tsr_backend **out, tsr_err *err);

/* Changes with the structs that program and plugin share. */
static inline uint64_t tsr_plugin_layout(void)
{
    uint64_t h = sizeof(tsr_backend);
#define TSR_OP(op, cpu, simd, cuda) h = h * 0x100000001b3u ^ sizeof(tsr_##op##_args);
#include "kernels/ops.def"
#undef TSR_OP
    return h;
}

#ifdef __cplusplus
}
#endif
#endif
