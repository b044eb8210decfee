/* layout.h - for train/: which rank holds what, and whom it talks to. */
#ifndef TSR_TRAIN_LAYOUT_H
#define TSR_TRAIN_LAYOUT_H

#include "kernels/kernels.h"
#include "model/parallel.h"
#include "train/dist.h"
#include "train/recipe.h"

/* Who holds what: ranks are numbered so that rank % ep is the part of the experts. */
typedef struct layout {
    tsr_dist *all;     /* every rank */
    tsr_dist *copies;  /* ranks with the same experts; == all without expert parallelism */
    tsr_dist *experts; /* ranks that hold all experts together; NULL without expert parallelism */
    tsr_dist *line;    /* ranks that share a sequence; NULL without context parallelism */
    int32_t ep, cp;
    uint32_t first_expert, local_experts;
    tsr_expert_group group;       /* what the model asks of `experts` */
    size_t *bytes_out, *bytes_in; /* of its calls */
    tsr_sequence_line sequence;   /* what it asks of `line` */
} layout;

/* TSR_E_USAGE: the recipe's numbers do not make up the ranks there are. Borrows all. */
tsr_status layout_make(layout *w, tsr_dist *all, const tsr_recipe *r, const tsr_backend *b, tsr_err *err);
void layout_done(layout *w);

#endif
