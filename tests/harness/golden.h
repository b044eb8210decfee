/* golden.h - for tests: tensors of a safetensors file of right answers. */
#ifndef TSR_TESTS_GOLDEN_H
#define TSR_TESTS_GOLDEN_H

#include "convert/convert.h"

typedef struct golden {
    tsr_source *source;
} golden;

/* path below tests/data. Ends the process when it cannot be opened. */
void golden_open(golden *g, const char *path);
/* A malloc'ed copy; *n_out elements. Ends the process when there is none or the dtype differs. */
float *golden_f32(golden *g, const char *name, int64_t *n_out);
int32_t *golden_i32(golden *g, const char *name, int64_t *n_out);
int64_t *golden_i64(golden *g, const char *name, int64_t *n_out);
double *golden_f64(golden *g, const char *name, int64_t *n_out);
bool golden_has(const golden *g, const char *name);
const int64_t *golden_shape(golden *g, const char *name, int *rank_out);
void golden_close(golden *g);
/* |got - want| / |want| over n elements, in f64. */
double relative_l2(const float *got, const float *want, int64_t n);

#endif
