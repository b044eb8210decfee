/* extend.h - for train/: the recipe of a checkpoint whose context was raised; see train.h. */
#ifndef TSR_TRAIN_EXTEND_H
#define TSR_TRAIN_EXTEND_H

#include "train/recipe.h"

#include <jansson.h>

/* How many stages of r are over at this step; -1: it lies inside one. */
int32_t extend_stages_done(const tsr_recipe *r, int64_t step);
/* TSR_E_CONFLICT names the first key in which the recipe's model is not the checkpoint's. Context, quantization and vision may
 * differ. */
tsr_status extend_check_shape(const tsr_recipe *r, const tsr_spec *have, const char *ckpt, tsr_err *err);
/* Puts a longest context into the tree of a config.json. */
void extend_set_context(json_t *config, int64_t context);
/* The first `done` stages of was, then those of next, or (next NULL) was's last done stage once more at this context. was may be
 * NULL with done 0. */
tsr_status extend_recipe(tsr_recipe **out, const tsr_recipe *was, int32_t done, const tsr_recipe *next,
                         int64_t context, tsr_err *err);

#endif
