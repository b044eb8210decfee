/* metrics.h - for train/: what a run tells about its steps: metrics.jsonl, samples.jsonl, TensorBoard's event files. */
#ifndef TSR_TRAIN_METRICS_H
#define TSR_TRAIN_METRICS_H

#include "train/feed.h"
#include "train/train.h"

#include <stdio.h>

typedef struct metrics {
    FILE *lines, *samples, *events;
} metrics;

/* Opens for appending; lines of steps beyond `step` are dropped first, so that the files are those of a run that never stopped. */
tsr_status metrics_open(metrics *m, const char *run, const tsr_recipe *r, int64_t step, tsr_err *err);
tsr_status metrics_step(metrics *m, const tsr_train_line *l, const char *stage, double balance_mean,
                        tsr_err *err);
tsr_status metrics_eval(metrics *m, const tsr_train_eval *e, tsr_err *err);
/* The sequences of one step: source and number of each. */
tsr_status metrics_samples(metrics *m, int64_t step, const feed *f, int64_t in_stage, tsr_err *err);
void metrics_close(metrics *m);

/* ---- tfevents.c --------------------------------------------------------------------------------------------------- */

typedef struct tf_value {
    const char *tag;
    double value;
} tf_value;
/* The first records of a file: version, and that the session starts at this step (readers drop later steps of older files). */
bool tf_begin(FILE *f, double wall_time, int64_t step);
bool tf_scalars(FILE *f, double wall_time, int64_t step, const tf_value *v, size_t count);
uint32_t tf_crc32c(const void *data, size_t bytes);

#endif
