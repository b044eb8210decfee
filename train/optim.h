/* optim.h - for train/: which optimizer each parameter has, its state, one update of all. */
#ifndef TSR_TRAIN_OPTIM_H
#define TSR_TRAIN_OPTIM_H

#include "model/model.h"
#include "train/dist.h"
#include "train/recipe.h"

/* One parameter. State is held by its owner only: whole matrices, so that Muon needs no other rank. */
typedef struct optim_param {
    const tsr_param *p;
    const tsr_optim *o;
    bool decays; /* matrices do; vectors, convolutions and decays of attention do not */
    bool frozen, mine;
    int32_t owner;             /* rank of its group */
    tsr_dist *group;           /* ranks that hold a copy */
    int64_t count, rows, cols; /* muon: matrices that are orthogonalised on their own */
    int64_t updates;
    float *m, *v; /* backend; NULL where there is none */
} optim_param;

typedef struct optim {
    tsr_backend *b;
    tsr_dist *all, *copies;
    optim_param *list;
    int64_t count;
    void *state; /* one block */
    uint64_t state_bytes;
    void *workspace;
    size_t workspace_bytes;
    double *sum; /* backend: one number */
} optim;

/* all: every rank; copies: the ranks that hold the same experts. Takes memory for the state, all zero. */
tsr_status optim_open(optim *out, tsr_model *m, const tsr_recipe *r, tsr_dist *all, tsr_dist *copies,
                      tsr_err *err);
void optim_close(optim *o);
/* Marks what a stage leaves as it is. */
void optim_freeze(optim *o, const tsr_stage *s);
/* Begins to sum the gradients of a layer (-1: of none) over their groups, each at its owner; and waits for all sums. */
tsr_status optim_start_reduce(optim *o, int32_t layer, tsr_err *err);
tsr_status optim_finish_reduce(optim *o, tsr_err *err);
/* L2 norm of all gradients that are not frozen, over all ranks. */
tsr_status optim_norm(optim *o, tsr_dist *all, double *out, tsr_err *err);
/* One update, gradients scaled first; then everybody has the new parameters. */
tsr_status optim_step(optim *o, double lr, double decay_factor, double grad_scale, tsr_err *err);
/* "exp_avg", "exp_avg_sq", "momentum"; NULL beyond the last. */
const char *optim_state_name(const optim_param *p, int which);
float *optim_state_of(const optim_param *p, int which);
/* The stage leaves the parameter of this name as it is. */
bool optim_frozen(const tsr_stage *s, const char *name);
/* True when name matches pattern with * and ?. */
bool optim_matches(const char *pattern, const char *name);

#endif
