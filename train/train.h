/* train.h - public: a training run in a folder: from nothing or from its newest checkpoint, through the stages of a recipe.
 *
 * RUN/step-00000040/   checkpoints, each with everything that shapes the next step
 * RUN/metrics.jsonl    one object a logged step; RUN/events/: the same for TensorBoard; RUN/routing.h5: routing of every step
 * RUN/samples.jsonl    which sequences each step took, when the recipe asks for it
 *
 * Resuming on the same number of ranks continues bit for bit; on another it differs by the order of sums only. docs/TRAINING.md. */
#ifndef TSR_TRAIN_TRAIN_H
#define TSR_TRAIN_TRAIN_H

#include "kernels/kernels.h"
#include "train/data.h"
#include "train/dist.h"
#include "train/recipe.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum tsr_resume { TSR_RESUME_AUTO, TSR_RESUME_NONE, TSR_RESUME_STEP } tsr_resume;

enum { TSR_TRAIN_SAVE = 1, TSR_TRAIN_STOP = 2 }; /* what a poll may ask for */

/* One logged step. */
typedef struct tsr_train_line {
    int64_t step, steps; /* done, of all */
    int64_t tokens;      /* trained on so far */
    const char *stage;
    double loss, grad_norm, lr, maxvio, tokens_per_s, eta_s;
    bool skipped;
} tsr_train_line;

/* A pass over held-out text. */
#define TSR_EVAL_BUCKET_MAX 32
typedef struct tsr_train_eval {
    int64_t step, tokens;
    const char *stage;
    double loss, bits_per_byte; /* nats a token; bits of a byte of text, -1 unknown */
    int32_t buckets;            /* by how many tokens of the document are in view: [edge[i], edge[i + 1]) */
    int64_t edge[TSR_EVAL_BUCKET_MAX + 1], count[TSR_EVAL_BUCKET_MAX];
    double bucket_loss[TSR_EVAL_BUCKET_MAX]; /* NAN where there is nothing */
} tsr_train_eval;

/* Called on rank 0 only, but for poll. */
typedef struct tsr_train_hooks {
    void *payload;
    void (*line)(void *payload, const tsr_train_line *l);
    void (*eval)(void *payload, const tsr_train_eval *e);
    void (*note)(void *payload, bool warning, const char *text);
    unsigned (*poll)(void *payload); /* asked on each rank between steps */
} tsr_train_hooks;

typedef struct tsr_train_opts {
    const tsr_recipe *recipe; /* on resuming the checkpoint's own recipe counts; what differs is a warning */
    const char *run;          /* folder; made when there is none */
    tsr_resume resume;
    int64_t resume_step;
    const tsr_recipe_set *overrides; /* change the checkpoint's recipe on resuming; go into its lineage */
    size_t override_count;
    int64_t stop_at;    /* save and end after this step; -1: go to the end */
    const char *start;  /* checkpoint to start from when the run has none; NULL: from random numbers */
    uint64_t mem_limit; /* of buffers of saving; 0: 256 MiB */
    tsr_backend *backend;
    tsr_dist *dist;
    tsr_train_hooks hooks;
} tsr_train_opts;

typedef struct tsr_train_result {
    int64_t step, tokens;
    double loss;            /* of the last step */
    bool finished, stopped; /* the recipe's end; asked to stop */
    int64_t skipped;
} tsr_train_result;

/* TSR_E_MISSING: no such checkpoint, no data; TSR_E_FORMAT: the checkpoint asked for is damaged; TSR_E_CONFLICT: --resume none in a
 * run that has checkpoints, another run is at work in the folder, data that is not what the checkpoint was trained on;
 * TSR_E_NUMERIC: the guard stopped, a checkpoint of the last good step is there; TSR_E_CANCELLED: asked to stop by a signal, saved. */
TSR_NODISCARD tsr_status tsr_train(const tsr_train_opts *o, tsr_train_result *out, tsr_err *err);

/* ---- extension ------------------------------------------------------------------------------------------------------ */

/* What an extension did. Texts are borrowed from nothing: static, or in place. */
typedef struct tsr_extend_report {
    int64_t step, context_before, context;
    int32_t stages_done, stages_replaced, stages_added; /* replaced: of the checkpoint's recipe, not begun */
    char next_stage[TSR_NAME_MAX];
    uint32_t tensors, optim_tensors, optim_dropped; /* optim_tensors: those of tensors that are moments */
    uint32_t files, linked_files;
    const char *positions; /* why nothing is rescaled */
} tsr_extend_report;

typedef struct tsr_extend_opts {
    int64_t context; /* of the new stage */
    const tsr_recipe *
        recipe; /* what to train from here on, behind the stages that are done; NULL: the last of those once more at the new context */
    bool
        keep_optimizer; /* carry the moments; else they start from zero. Masters of bf16 weights are carried all the same */
    tsr_progress progress;
    tsr_extend_report *report; /* filled on success; NULL */
} tsr_extend_opts;
/* A new checkpoint at dst: the same weights and, by rule, optimizer state, with the configuration's context and the training state of
 * the next stage. Equal shards are linked. src: what tsr_ckpt_open_any opens; weights alone need a recipe and begin at step 0 of it.
 * TSR_E_UNSUPPORTED: positions are rotated and the family names no rule for longer contexts; TSR_E_USAGE: not longer than the context
 * it has, in the middle of a stage, no recipe where one is needed, dst is named after another step; TSR_E_CONFLICT: dst exists, the
 * recipe is of another model, has no stage of this context or a stage that is done; TSR_E_MISSING, TSR_E_FORMAT: of src. */
TSR_NODISCARD tsr_status tsr_extend(const char *src, const char *dst, const tsr_extend_opts *o, tsr_err *err);

#ifdef __cplusplus
}
#endif
#endif
