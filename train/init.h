/* init.h - for train/: weights of a model that does not exist yet. */
#ifndef TSR_TRAIN_INIT_H
#define TSR_TRAIN_INIT_H

#include "model/source.h"
#include "model/spec.h"

/* Every tensor of the catalogue as f32, each number a function of seed, name and place: the same for any partitioning.
 * std: of matrices, 0: 1 / sqrt(columns). Borrows spec. Rules: docs/TRAINING.md. */
TSR_NODISCARD tsr_status tsr_init_source(tsr_weight_source *out, const tsr_spec *spec, uint64_t seed,
                                         double std, tsr_err *err);
void tsr_init_source_done(tsr_weight_source *s);

#endif
