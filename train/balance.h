/* balance.h - for train/: balancing of experts, and what the router did in a step. docs/TRAINING.md. */
#ifndef TSR_TRAIN_BALANCE_H
#define TSR_TRAIN_BALANCE_H

#include "model/model.h"
#include "train/dist.h"
#include "train/recipe.h"

/* One mixture layer in one step, over all ranks. */
typedef struct route_row {
    int32_t layer;
    int64_t *count; /* [experts] tokens */
    double *mass;   /* [experts] sum of gate weights */
    float *bias;    /* [experts] that the step used */
    double maxvio;  /* largest count over the mean, less 1 */
} route_row;

typedef struct balance {
    const tsr_recipe *r;
    const tsr_stage *stage; /* biases that it freezes stay */
    tsr_model *m;
    tsr_backend *b;
    int32_t layers;  /* with experts */
    int32_t *row_of; /* [spec.layers], -1: none */
    route_row *row;
    int64_t **hist;       /* [layers] backend [experts][bins] */
    float *scores;        /* exact: [layers][room][experts], backend */
    int64_t room, tokens; /* tokens: of this rank in this step */
    int64_t *seen;        /* exact: tokens of each layer */
    double *low, *high;
    int32_t *ids; /* host [max_tokens k] */
    float *w;
    bool idle;     /* the batch at hand does not count */
    int64_t *sums; /* host, for reductions */
    double *beta;  /* exact: backend [experts] */
    void *work;
    size_t work_bytes;
    tsr_route_watch watch;
} balance;

/* max_tokens: of a forward; step_tokens: of a step on this rank (exact only). */
tsr_status balance_open(balance *out, tsr_model *m, const tsr_recipe *r, const tsr_stage *stage,
                        int64_t max_tokens, int64_t step_tokens, tsr_err *err);
void balance_close(balance *k);
/* Clears the counts, and reads the biases that the step will use. */
tsr_status balance_begin(balance *k, tsr_err *err);
/* Sums over ranks: rows are then right everywhere. */
tsr_status balance_sum(balance *k, tsr_dist *d, tsr_err *err);
/* New biases for the next step. tokens: of the step, over all ranks. */
tsr_status balance_update(balance *k, int64_t tokens, tsr_err *err);
/* Largest over the layers. */
double balance_maxvio(const balance *k);

#endif
