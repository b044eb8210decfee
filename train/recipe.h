/* recipe.h - public: what a training run shall do, from a YAML file. docs/RECIPES.md explains every key.
 *
 * Strict: an unknown key is an error that names the nearest one; every value is checked against its range, and values against each
 * other. A recipe has one resolved form, as JSON with every key present, which is what a checkpoint keeps. */
#ifndef TSR_TRAIN_RECIPE_H
#define TSR_TRAIN_RECIPE_H

#include "format/base.h"
#include "model/spec.h"

#ifdef __cplusplus
extern "C" {
#endif

#define TSR_STAGE_MAX 16
#define TSR_SOURCE_MAX 32
#define TSR_NAME_MAX 64
#define TSR_FREEZE_MAX 16

typedef enum tsr_schedule_kind {
    TSR_SCHEDULE_CONSTANT,
    TSR_SCHEDULE_COSINE,
    TSR_SCHEDULE_WSD
} tsr_schedule_kind;
typedef enum tsr_balance_kind {
    TSR_BALANCE_OFF,
    TSR_BALANCE_QUANTILE,       /* histogram, one integer all-reduce a layer */
    TSR_BALANCE_QUANTILE_EXACT, /* one process only */
    TSR_BALANCE_SIGN
} tsr_balance_kind;
typedef enum tsr_optim_kind { TSR_OPTIM_ADAMW, TSR_OPTIM_MUON } tsr_optim_kind;
typedef enum tsr_guard_action { TSR_GUARD_STOP, TSR_GUARD_SKIP } tsr_guard_action;

typedef struct tsr_stage {
    char name[TSR_NAME_MAX];
    int64_t context;      /* tokens of a sequence, at most */
    int64_t steps;        /* given, or from tokens */
    int64_t batch_tokens; /* of a step over all ranks; batch_tokens / context sequences, at least one */
    tsr_schedule_kind schedule;
    double lr, lr_final; /* lr_final: at the end of the stage, absolute (recipe: a share of lr) */
    int64_t warmup;      /* steps, linear from 0 */
    int64_t decay;       /* wsd: steps of the linear descent at the end */
    double
        weight_decay_final; /* linear from the optimizers' weight_decay to it, as a factor of it; 1: constant */
    bool recompute;
    double mix[TSR_SOURCE_MAX]; /* weights, by source */
    char freeze[TSR_FREEZE_MAX]
               [TSR_NAME_MAX]; /* canonical names with * and ?: those parameters stay as they are */
    int32_t freeze_count;
} tsr_stage;

typedef struct tsr_train_source {
    char name[TSR_NAME_MAX];
    char *path; /* data folder, relative to the recipe's folder until resolved */
} tsr_train_source;

typedef struct tsr_optim {
    tsr_optim_kind kind;
    double lr_scale, weight_decay;
    double beta1, beta2, eps; /* adamw */
    double momentum;          /* muon */
    bool nesterov, per_head;  /* muon; per_head: q, k, v head by head */
} tsr_optim;

typedef struct tsr_recipe {
    char *config_json; /* the model as a Hugging Face style config.json */
    tsr_spec *spec;    /* parsed from it */
    tsr_train_source source[TSR_SOURCE_MAX];
    int32_t sources;
    tsr_stage stage[TSR_STAGE_MAX];
    int32_t stages;
    tsr_optim matrices, others; /* matrices of attention, MLP and experts; everything else */
    double clip;                /* of the global gradient norm; 0: none */
    double qk_clip;             /* largest attention logit of MLA; 0: none */
    struct {
        tsr_balance_kind kind;
        int64_t bins;
        double rate; /* sign */
        bool centre;
    } balance;
    struct {
        int64_t every;      /* steps; 0: at the end of stages only */
        uint32_t keep_last; /* 0: all */
        uint64_t keep_every;
        bool compress, wait;     /* wait: the next step starts when it is written */
        uint32_t experts, files; /* partitions; 0: as many as ranks */
        tsr_dtype dtype;         /* of parameters: F32, or BF16 with f32 masters beside it */
    } checkpoint;
    struct {
        int64_t every;     /* steps; 0: at the end of stages only */
        int64_t sequences; /* held-out sequences, at most */
        int64_t buckets;   /* of positions */
    } eval;
    struct {
        tsr_guard_action nan, spike;
        double spike_factor; /* of the running mean of the loss; 0: off */
        int64_t skips;       /* in a row, then it stops all the same */
    } guard;
    struct {
        int64_t every;
        bool tensorboard, samples; /* samples: RUN/samples.jsonl says which sequences each step took */
    } log;
    struct {
        int32_t ep, dp, cp, pp; /* 0: dp takes the ranks that are left; pp sizes `tessera plan` only */
    } parallel;
    int64_t micro_tokens; /* of one forward; 0: one sequence at a time */
    uint64_t seed;
    double init_std; /* of matrices; 0: 1 / sqrt(columns) */
} tsr_recipe;

/* One --set: "optimizer.matrices.lr_scale=0.5", "stages.1.lr=1e-3". Applied to the file's tree before it is checked. */
typedef struct tsr_recipe_set {
    const char *key, *value;
} tsr_recipe_set;

/* path: a file, or the name of a recipe that is installed ("tiny"). TSR_E_MISSING: no such file; TSR_E_FORMAT: not YAML, a wrong
 * type, an unknown key: "tiny.yaml:12: stages.0.contxt: unknown key (did you mean context?)"; TSR_E_CONFLICT: values that
 * contradict each other. *out is owned by the caller. */
TSR_NODISCARD tsr_status tsr_recipe_load(tsr_recipe **out, const char *path, const tsr_recipe_set *sets,
                                         size_t set_count, tsr_err *err);
/* The same from text; name: for messages and as base of relative paths. */
TSR_NODISCARD tsr_status tsr_recipe_parse(tsr_recipe **out, const char *text, size_t bytes, const char *name,
                                          const tsr_recipe_set *sets, size_t set_count, tsr_err *err);
void tsr_recipe_free(tsr_recipe **r);
/* The resolved form: JSON with every key, sorted; parsing it again gives the same recipe (JSON is YAML). malloc'ed; NULL: no memory. */
char *tsr_recipe_json(const tsr_recipe *r);
/* Keys whose values differ, as "key: a -> b" lines in both resolved forms; malloc'ed, "" when they are equal. */
char *tsr_recipe_diff(const char *json_a, const char *json_b);

/* ---- schedule --------------------------------------------------------------------------------------------------------------- */

int64_t tsr_recipe_steps(const tsr_recipe *r);                                     /* of all stages */
int32_t tsr_recipe_stage_of(const tsr_recipe *r, int64_t step, int64_t *in_stage); /* step from 0 */
/* Learning rate of a step of a stage, from 0: linear warm-up (step + 1) / warmup, then constant, cosine to lr_final, or
 * warm-up-stable-decay (linear to lr_final over the last `decay` steps). */
double tsr_stage_lr(const tsr_stage *s, int64_t step);
double tsr_stage_decay_factor(const tsr_stage *s, int64_t step); /* of weight decay */

#ifdef __cplusplus
}
#endif
#endif
