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
    double lr, lr_final;   /* lr_final: at the end of the stage, absolute */
    double lr_final_share; /* of lr, as the recipe has it */
    int64_t warmup;        /* steps, linear from 0 */
    int64_t decay;         /* wsd: steps of the linear descent at the end */
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
    char *path; /* data folder; a relative one has the recipe's folder in front of it */
} tsr_train_source;

typedef struct tsr_optim {
    tsr_optim_kind kind;
    double lr_scale, weight_decay;
    double beta1, beta2, eps; /* adamw */
    double momentum;          /* muon */
    bool nesterov, per_head;  /* muon; per_head: q, k, v head by head */
} tsr_optim;

/* The model by hyper-parameters, as a recipe names them. */
typedef struct tsr_model_shape {
    tsr_arch family;
    int64_t layers, hidden, vocab;
    int64_t first_dense, dense_width;
    int64_t kda_heads, kda_head_dim, conv_kernel;
    double gate_lower_bound;
    int64_t full_attention_every; /* MLA: every Nth layer, and the last; 0: the last only */
    int64_t mla_heads, q_lora, kv_lora, qk_nope, qk_rope, v_head;
    int64_t experts, top_k, shared_experts, expert_width, latent;
    double route_scale;
    int64_t res_block;
    int64_t context;
} tsr_model_shape;

typedef struct tsr_recipe {
    char *
        config_json; /* the model as a Hugging Face style config.json, without quantization: experts are trained in f32 */
    tsr_spec *spec;        /* parsed from it */
    tsr_model_shape shape; /* layers 0: the recipe gives a config.json instead */
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
        int64_t context;   /* tokens of a held-out sequence; 0: the stage's */
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

/* The folder of installed recipes, for later calls of tsr_recipe_load; kept, not copied. NULL, as at first: none. */
void tsr_recipe_set_folder(const char *path);

/* path: a file, or the name of a recipe that is installed ("tiny"), whose relative paths start from the working folder. TSR_E_MISSING: no such file; TSR_E_FORMAT: not YAML, a wrong
 * type, an unknown key: "tiny.yaml:12: stages.0.contxt: unknown key (did you mean context?)"; TSR_E_CONFLICT: values that
 * contradict each other. *out is owned by the caller. */
TSR_NODISCARD tsr_status tsr_recipe_load(tsr_recipe **out, const char *path, const tsr_recipe_set *sets,
                                         size_t set_count, tsr_err *err);
/* The same from text; name: for messages, and its folder is the base of relative paths. Give a resolved form a name without one. */
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
/* Learning rate of a step of a stage. With n = step + 1, step from 0: lr * n / warmup while n < warmup; then constant; or
 * cosine: lr_final + (lr - lr_final) * (1 + cos(pi * (n - warmup) / (steps - warmup))) / 2; or warm-up-stable-decay: lr until
 * n = steps - decay, then linear, lr_final at n = steps. */
double tsr_stage_lr(const tsr_stage *s, int64_t step);
/* What weight decay is multiplied by: linear, 1 at the first step and weight_decay_final at the last. */
double tsr_stage_decay_factor(const tsr_stage *s, int64_t step);

#ifdef __cplusplus
}
#endif
#endif
