/* common.h - for tests of whole models: every backend this machine has, models opened from files. */
#ifndef TSR_TESTS_MODEL_COMMON_H
#define TSR_TESTS_MODEL_COMMON_H

#include "convert/weights.h"
#include "model/model.h"
#include "tests/harness/bag.h"
#include "tests/harness/fence.h"
#include "tests/harness/golden.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

typedef struct opened {
    tsr_view view;
    tsr_weight_source source;
    tsr_spec spec;
} opened;

/* path below tests/data, or absolute. */
void open_files(opened *o, const char *path);
void close_files(opened *o);

extern const char *const backends[]; /* NULL-terminated */
/* False: this machine lacks it; says so. */
bool open_backend(tsr_backend **b, const char *name, int threads);

typedef struct traced { /* what a session of several calls gave, one behind the other */
    float *hidden;      /* [layers][tokens][hidden] */
    float *logits;      /* [tokens][vocab] */
    int32_t *ids;       /* [layers][tokens][k] */
    float *w;
    float *state; /* [layers][heads dk dv] */
    int64_t tokens, at;
    const tsr_spec *spec;
} traced;
void traced_init(traced *t, const tsr_spec *s, int64_t tokens);
void traced_free(traced *t);
/* Runs ids through a fresh or running session, `chunk` at a time. */
void run_traced(tsr_model *m, tsr_session *s, const int32_t *ids, int64_t n, int64_t chunk, traced *t);

#endif
