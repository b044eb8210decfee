/* check.h - every op of every fast backend against the plain reference, on fenced random inputs.
 *
 * One `void ck_<op>(ck *t)` per op, in check_<family>.c: makes inputs, runs the op on both backends (CK_RUN), compares
 * each output. It is called for each backend with one thread and with four, for the emulated GPU under each schedule, for a
 * real one twice; the bits must be the same. A device backend is checked on the ops it has. */
#ifndef TSR_TESTS_KERNELS_CHECK_H
#define TSR_TESTS_KERNELS_CHECK_H

#include "kernels/backend_priv.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct ck {
    tsr_backend *ref, *dut;
    const char *op;
    uint64_t rng;
    int failed;
    double worst;    /* largest error seen, as a share of what is allowed */
    uint64_t digest; /* of all outputs */
    int compared;    /* outputs compared: a check that compares nothing fails */
} ck;

/* Per element: |got - want| <= abs + ulps eps |want| + red eps mag, with eps = 2^-23 and mag the sum of the magnitudes
 * that were added to make that element (NULL: 0). Bounds are derived beside each use. */
typedef struct ck_tol {
    double abs, ulps, red;
} ck_tol;

/* Host memory until ck_end; the last byte touches a page nobody may read. */
void *ck_host(ck *t, size_t bytes);
float *ck_rand(ck *t, int64_t n, float scale); /* uniform in (-scale, scale) */
float *ck_normal(ck *t, int64_t n, float sigma);
uint64_t ck_random(ck *t);
float *ck_nan(ck *t, int64_t n);                     /* for outputs that are "=" */
uint16_t *ck_bf16(ck *t, const float *x, int64_t n); /* rounded copy */
/* A fenced copy in the memory of the backend under test. */
void *ck_dev(ck *t, const void *host, size_t bytes);
/* got lies in the backend's memory. */
void ck_f32(ck *t, const char *what, const float *want, const void *got, const double *mag, int64_t n,
            ck_tol tol);
void ck_exact(ck *t, const char *what, const void *want, const void *got, size_t bytes);
/* Copies back from the backend. */
void *ck_back(ck *t, const void *dev, size_t bytes);
void ck_fail(ck *t, const char *fmt, ...) TSR_PRINTF(2, 3);
/* Frees what ck_host and ck_dev gave: call it between shapes. */
void ck_end(ck *t);
/* Runs op on both backends; contract checked too. */
#define CK_RUN(t, op, ref_args, dut_args)                                                                    \
    do {                                                                                                     \
        if (!tsr_##op##_valid(ref_args) || !tsr_##op##_valid(dut_args)) {                                    \
            ck_fail(t, "arguments break the contract");                                                      \
        } else if ((t)->ref->k.op((t)->ref->queue, ref_args) != TSR_OK ||                                    \
                   (t)->dut->k.op((t)->dut->queue, dut_args) != TSR_OK) {                                    \
            ck_fail(t, "returned an error");                                                                 \
        }                                                                                                    \
    } while (0)

/* Weak: an op without a check is a failure of the run, not of the link. */
#define TSR_OP(op, cpu, simd, cuda) void ck_##op(ck *t) __attribute__((weak));
#include "kernels/ops.def"
#undef TSR_OP

#endif
