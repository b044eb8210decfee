/* trainer.h - for train/: a run in memory. trainer.c opens and drives it, step.c does one step, held_out.c evaluates. */
#ifndef TSR_TRAIN_TRAINER_H
#define TSR_TRAIN_TRAINER_H

#include "train/balance.h"
#include "train/checkpoint.h"
#include "train/metrics.h"
#include "train/routing_file.h"
#include "train/train.h"

typedef struct trainer {
    const tsr_train_opts *o;
    const tsr_recipe *r;
    tsr_recipe *own; /* r, when it came from a checkpoint */
    char *from;      /* that checkpoint; NULL: none */
    tsr_backend *b;
    layout where;
    int lock;
    feed feed;
    tsr_model *m;
    optim optim;
    balance balance;
    saver saver;
    metrics metrics;
    routing_file routing;
    progress_state p;
    int64_t saved; /* step of the last save; -1: none */
    tsr_train_line line;
    /* since the last line */
    int64_t line_tokens;
    uint64_t line_ns, start_ns;
    int64_t start_step;
} trainer;

static inline bool first_rank(const trainer *t)
{
    return t->where.all->rank == 0;
}
void say(const trainer *t, bool warning, const char *fmt, ...) TSR_PRINTF(3, 4);
uint64_t now_ns(void);
/* Data-parallel share: ranks of one line count as one. */
static inline int32_t share_rank(const trainer *t)
{
    return t->where.all->rank / t->where.cp;
}
static inline int32_t line_rank(const trainer *t)
{
    return t->where.all->rank % t->where.cp;
}
static inline int32_t shares(const trainer *t)
{
    return t->where.all->ranks / t->where.cp;
}

/* step.c: forward, backward, guard, update, balance. TSR_E_NUMERIC: the guard stops; nothing was updated. */
tsr_status train_step(trainer *t, tsr_err *err);
/* held_out.c: collective; *out is right on every rank. TSR_E_MISSING: no held-out text. */
tsr_status evaluate_held(trainer *t, tsr_train_eval *out, tsr_err *err);
/* qk_clip.c: weights of heads whose largest logit in this step passed the recipe's limit. */
tsr_status clip_heads(trainer *t, tsr_err *err);
/* resume.c: where to begin: recipe, progress, weights and state. */
tsr_status resume_recipe(trainer *t, tsr_err *err);
tsr_status resume_load(trainer *t, tsr_err *err);

#endif
