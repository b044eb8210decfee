/* feed.h - for train/: the data of a run: which sequences a step takes, and their tokens. */
#ifndef TSR_TRAIN_FEED_H
#define TSR_TRAIN_FEED_H

#include "model/model.h"
#include "train/data.h"
#include "train/recipe.h"

typedef struct feed {
    const tsr_recipe *r;
    tsr_data *data[TSR_SOURCE_MAX];
    int32_t at; /* stage that is packed; -1: none */
    tsr_packed *pack[TSR_SOURCE_MAX];
    int64_t count[TSR_SOURCE_MAX]; /* sequences */
    int32_t share[TSR_SOURCE_MAX];
    tsr_mix mix;
    int64_t batch; /* sequences of a step */
    int64_t micro; /* sequences of one forward */
    int64_t max_tokens, max_segs;
    /* of held-out text, by the evaluation's context */
    tsr_packed *held[TSR_SOURCE_MAX];
    int64_t held_context;
    int64_t model_tokens; /* of one forward, at most: max_tokens, or this rank's share of a line's */
    int32_t line_ranks;
    /* one micro-batch */
    int32_t *ids, *targets;
    int64_t *seg, *seg_part;
    int32_t idle_id, idle_target;
} feed;

/* Opens all sources. TSR_E_CONFLICT: ids beyond the model's vocabulary. */
tsr_status feed_open(feed *f, const tsr_recipe *r, int32_t line_ranks, tsr_err *err);
void feed_close(feed *f);
/* Packs what a stage takes, and the held-out text of the sources it takes from. */
tsr_status feed_stage(feed *f, int32_t stage, tsr_err *err);

/* Sequences [first, last) of a step are those of this share of the ranks. */
void feed_share(const feed *f, int32_t rank, int32_t ranks, int64_t *first, int64_t *last);
/* Micro-batches every rank makes in a step: those without sequences of their own make empty ones. */
int64_t feed_micros(const feed *f, int32_t ranks);
/* Targets that count and tokens of all sequences of a step of the stage (from 0). */
void feed_totals(const feed *f, int64_t step, int64_t *targets, int64_t *tokens);
/* Sequences [first, last) of a step as one batch; an empty range: one token without a target. Borrowed until the next call. */
tsr_batch feed_batch(feed *f, int64_t step, int64_t first, int64_t last);
/* What one rank of a line of f->line_ranks takes of a batch. Few tokens are left to the first rank; the others then get one token
 * without a target: *idle. Borrowed until the next call. */
tsr_batch feed_part(feed *f, const tsr_batch *b, int32_t rank, bool *idle);
tsr_place feed_place(const feed *f, int64_t step, int64_t i);

/* Held-out sequences there are, at most `most`, and the i-th of them as a batch. */
int64_t feed_held_count(const feed *f, int64_t most);
tsr_batch feed_held(feed *f, int64_t i, int64_t most, int32_t *source);

#endif
