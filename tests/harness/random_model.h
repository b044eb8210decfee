/* random_model.h - for tests and benchmarks: a model that exists in memory only, every tensor of the catalogue filled from
 * its name. Matrices have rows of length about one, norms lie near one, gates as in trained models. */
#ifndef TSR_TESTS_RANDOM_MODEL_H
#define TSR_TESTS_RANDOM_MODEL_H

#include "model/source.h"
#include "model/spec.h"

typedef struct random_tensor {
    char name[64];
    tsr_dtype dtype;
    int rank;
    int64_t shape[4];
    uint32_t experts;
    uint64_t bytes; /* of one item */
    uint8_t *data;
} random_tensor;

typedef struct random_model {
    tsr_spec spec;
    tsr_weight_source source;
    random_tensor *list;
    int64_t count;
    uint64_t expert_bytes;
    tsr_dtype dense; /* of the matrices */
} random_model;

/* config: text of a config.json; dense: F32 or BF16. Experts are MXFP4 when the config says so, else `dense`. */
void random_model_open(random_model *m, const char *config, tsr_dtype dense);
void random_model_close(random_model *m);
/* The values of a plain tensor as stored, to be changed by tests. */
random_tensor *random_model_find(random_model *m, const char *name);

#endif
