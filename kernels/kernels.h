/* kernels.h - public: backends, and one call per op of ops.def. The argument structs in ops/ are the contracts:
 * shapes are row-major, last index fastest, letters as in docs/GLOSSARY.md; "=" overwrites, "+=" adds.
 * Every pointer in them is memory of the backend (tsr_backend.alloc), never dereferenced by callers, unless the
 * comment says "host". Activations are f32. Output may alias input only where the struct says so. */
#ifndef TSR_KERNELS_KERNELS_H
#define TSR_KERNELS_KERNELS_H

#include "format/base.h"
#include "kernels/ops/attnres.h"
#include "kernels/ops/balance.h"
#include "kernels/ops/conv.h"
#include "kernels/ops/elementwise.h"
#include "kernels/ops/embed.h"
#include "kernels/ops/kda.h"
#include "kernels/ops/loss.h"
#include "kernels/ops/matmul.h"
#include "kernels/ops/mla.h"
#include "kernels/ops/moe.h"
#include "kernels/ops/norm.h"
#include "kernels/ops/optim.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Ordered work on one backend. */
typedef struct tsr_queue tsr_queue;

/* A kernel returns TSR_OK, or TSR_E_IO when the device failed: everything else is a broken contract. */
typedef struct tsr_kernels {
#define TSR_OP(op, cpu, simd, cuda) tsr_status (*op)(tsr_queue * q, const tsr_##op##_args *a);
#include "kernels/ops.def"
#undef TSR_OP
} tsr_kernels;

typedef enum tsr_op_id {
#define TSR_OP(op, cpu, simd, cuda) TSR_OP_##op,
#include "kernels/ops.def"
#undef TSR_OP
    TSR_OP_COUNT
} tsr_op_id;
const char *tsr_op_name(tsr_op_id id); /* "?" for none */

typedef struct tsr_backend tsr_backend;
struct tsr_backend {
    const char *name; /* "cpu", "avx2", "avx512", "cuda" */
    tsr_kernels k;    /* a slot without a kernel of its own holds the reference (host), or NULL (device) */
    tsr_queue *queue; /* the queue of this backend; calls are made from one thread at a time */
    bool host;        /* its memory is ordinary memory: kernels may be handed host pointers */
    int threads;      /* of its pool */
    /* What failed first on the device, in words; NULL while nothing did. No call succeeds after it. */
    const char *trouble;
    /* 64-byte aligned, contents undefined; *out NULL on failure (TSR_E_LIMIT). */
    tsr_status (*alloc)(tsr_backend *b, void **out, size_t bytes);
    void (*release)(tsr_backend *b, void *p);
    tsr_status (*upload)(tsr_backend *b, void *dst, const void *src, size_t bytes); /* ordered in the queue */
    tsr_status (*download)(tsr_backend *b, void *dst, const void *src, size_t bytes); /* waits */
    tsr_status (*zero)(tsr_backend *b, void *dst, size_t bytes);
    tsr_status (*sync)(tsr_backend *b);
    void (*destroy)(tsr_backend *b); /* use tsr_backend_close */
    void *impl;
};

/* name: "cpu" (the plain reference), "avx2", "avx512", "cuda" (the first GPU), or "auto": the fastest this machine has
 * that runs every op; "cuda" has too few yet. threads 0: as many as processors. Results do not depend on threads. The
 * caller owns *out.
 * TSR_E_USAGE: no such name; TSR_E_UNSUPPORTED: this machine or build lacks it, err says what. */
TSR_NODISCARD tsr_status tsr_backend_open(tsr_backend **out, const char *name, int threads, tsr_err *err);
void tsr_backend_close(tsr_backend **b);
/* What a failed call of this backend was about: its trouble, or "the device failed". */
const char *tsr_backend_trouble(const tsr_backend *b);
/* The file with the code of "cuda", for backends opened later; kept, not copied. NULL, as at first: tessera-cuda.so
 * beside the program, or in the library folder. */
void tsr_backend_set_plugin(const char *path);
/* Names this build knows, in order of preference, NULL-terminated, without "auto". */
extern const char *const tsr_backend_names[];

/* True when the arguments keep the op's contract (kernels/valid.c). */
#define TSR_OP(op, cpu, simd, cuda) bool tsr_##op##_valid(const tsr_##op##_args *a);
#include "kernels/ops.def"
#undef TSR_OP

/* The one way to reach a kernel: tsr_<op>(backend, &args). */
#define TSR_OP(op, cpu, simd, cuda)                                                                          \
    static inline TSR_NODISCARD tsr_status tsr_##op(const tsr_backend *b, const tsr_##op##_args *a)          \
    {                                                                                                        \
        TSR_ASSERT(b->k.op != NULL);                                                                         \
        TSR_ASSERT(tsr_##op##_valid(a));                                                                     \
        return b->k.op(b->queue, a);                                                                         \
    }
#include "kernels/ops.def"
#undef TSR_OP

#ifdef __cplusplus
}
#endif
#endif
