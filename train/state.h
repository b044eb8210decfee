/* state.h - for train/: everything that shapes the next step, to a checkpoint and back. docs/TRAINING.md, "What a checkpoint
 * holds". */
#ifndef TSR_TRAIN_STATE_H
#define TSR_TRAIN_STATE_H

#include "format/format.h"
#include "train/feed.h"
#include "train/optim.h"

#include <jansson.h>

/* What is not in tensors. */
typedef struct progress_state {
    int64_t step, tokens; /* done: of all stages */
    double mean_loss;     /* running, of the guard; NAN: none yet */
    int64_t skipped, skips_in_a_row;
} progress_state;

/* A weight source over a checkpoint that training wrote: f32 masters where there are some. Borrows c. */
typedef struct ckpt_source {
    const tsr_ckpt *c;
    tsr_weight_source source;
} ckpt_source;
void ckpt_source_open(ckpt_source *s, const tsr_ckpt *c);

/* The parsed train.json. *out: owned. TSR_E_MISSING: the checkpoint holds no training state. */
tsr_status state_read_json(const tsr_ckpt *c, json_t **out, tsr_err *err);
/* Its recipe as text (borrowed from root). TSR_E_FORMAT: there is none. */
tsr_status state_recipe_text(const json_t *root, char **out, tsr_err *err);
tsr_status state_parse(const json_t *root, progress_state *out, tsr_err *err);
/* Data is what it was: names and hashes. TSR_E_CONFLICT. */
tsr_status state_check_data(const json_t *root, const feed *f, tsr_err *err);
/* Moments of the parameters this rank owns. */
tsr_status state_read_optim(const tsr_ckpt *c, const json_t *root, optim *o, uint32_t first_expert,
                            tsr_err *err);
/* The text of train.json. malloc'ed; NULL: out of memory. */
char *state_json(const progress_state *p, const tsr_recipe *r, const feed *f, const optim *o);

#endif
