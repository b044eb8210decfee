/* recipe.c - the tables of a recipe's keys, loading, and what values must have to do with each other; see recipe.h. */
#include "train/recipe_keys.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define ARENA_BYTES ((size_t)64 << 20)
#define TOKENS 1, 1099511627776.0
#define STEPS_MAX 1099511627776.0

/* ---- tables --------------------------------------------------------------------------------------------------------------- */

static const recipe_choice schedules[] = { { "constant", TSR_SCHEDULE_CONSTANT },
                                           { "cosine", TSR_SCHEDULE_COSINE },
                                           { "wsd", TSR_SCHEDULE_WSD },
                                           { 0 } };
static const recipe_choice balances[] = { { "off", TSR_BALANCE_OFF },
                                          { "quantile", TSR_BALANCE_QUANTILE },
                                          { "exact", TSR_BALANCE_QUANTILE_EXACT },
                                          { "sign", TSR_BALANCE_SIGN },
                                          { 0 } };
static const recipe_choice optims[] = { { "adamw", TSR_OPTIM_ADAMW }, { "muon", TSR_OPTIM_MUON }, { 0 } };
static const recipe_choice guards[] = { { "stop", TSR_GUARD_STOP }, { "skip", TSR_GUARD_SKIP }, { 0 } };
static const recipe_choice dtypes[] = { { "f32", TSR_DT_F32 }, { "bf16", TSR_DT_BF16 }, { 0 } };

#define AT(field) offsetof(recipe_stage_raw, field)
const recipe_key recipe_stage_keys[] = {
    { "name", KEY_NAME, AT(s.name), .help = "name of the stage" },
    { "context", KEY_SIZE, AT(s.context), TOKENS, .help = "tokens of a sequence, at most" },
    { "steps", KEY_I64, AT(s.steps), 1, STEPS_MAX, KEY_UNSET, .help = "optimizer steps; or give tokens" },
    { "tokens", KEY_SIZE, AT(tokens), 1, 1152921504606846976.0, KEY_UNSET,
      .help = "tokens of the stage; or give steps" },
    { "batch_tokens", KEY_SIZE, AT(s.batch_tokens), TOKENS, .help = "tokens of a step over all ranks" },
    { "schedule", KEY_CHOICE, AT(s.schedule), .fallback = "cosine", .choices = schedules,
      .help = "of the learning rate" },
    { "lr", KEY_REAL, AT(s.lr), 0, 100, .help = "largest learning rate" },
    { "lr_final", KEY_REAL, AT(s.lr_final_share), 0, 1, "0.1",
      .help = "learning rate at the end, as a share of lr" },
    { "warmup", KEY_STEPS, AT(warmup), 0, STEPS_MAX, "0",
      .help = "steps, or their share, of linear warm-up" },
    { "decay", KEY_STEPS, AT(decay), 0, STEPS_MAX, KEY_UNSET,
      .help = "wsd: steps, or their share, of the descent at the end" },
    { "weight_decay_final", KEY_REAL, AT(s.weight_decay_final), 0, 1000, "1",
      .help = "weight decay at the end, as a multiple of the optimizers'" },
    { "recompute", KEY_FLAG, AT(s.recompute), .fallback = "false",
      .help = "run forward again in backward, to save memory" },
    { "mix", KEY_OTHER, .help = "weights by source" },
    { "freeze", KEY_OTHER, .help = "patterns of parameters that stay" },
    { 0 },
};
#undef AT

#define AT(field) offsetof(tsr_recipe, field)
#define OPTIM(o, kind_default)                                                                                \
    {                                                                                                         \
        {                                                                                                     \
            "kind", KEY_CHOICE, AT(o.kind), .fallback = kind_default, .choices = optims, .help = "optimizer"  \
        },                                                                                                    \
            { "lr_scale", KEY_REAL, AT(o.lr_scale), 0, 1000, "1", .help = "factor of the stage's lr" },       \
            { "weight_decay", KEY_REAL, AT(o.weight_decay), 0, 10, "0.1", .help = "decoupled weight decay" }, \
            { "beta1", KEY_REAL, AT(o.beta1), 0, 0.999999, "0.9", .help = "AdamW: of the first moment" },     \
            { "beta2", KEY_REAL, AT(o.beta2), 0, 0.999999, "0.95", .help = "AdamW: of the second moment" },   \
            { "eps", KEY_REAL, AT(o.eps), 1e-30, 1, "1e-8", .help = "AdamW: added to the denominator" },      \
            { "momentum", KEY_REAL, AT(o.momentum), 0, 0.999999, "0.95", .help = "Muon: of the momentum" },   \
            { "nesterov", KEY_FLAG, AT(o.nesterov), .fallback = "true", .help = "Muon: look ahead" },         \
            { "per_head", KEY_FLAG, AT(o.per_head), .fallback = "true",                                       \
              .help = "Muon: q, k, v head by head" },                                                         \
            { 0 },                                                                                            \
    }
static const recipe_key matrices_keys[] = OPTIM(matrices, "muon");
static const recipe_key others_keys[] = OPTIM(others, "adamw");
static const recipe_key optimizer_keys[] = {
    { "matrices", KEY_MAP, .keys = matrices_keys },
    { "others", KEY_MAP, .keys = others_keys },
    { "clip", KEY_REAL, AT(clip), 0, 1e6, "1", .help = "largest global gradient norm; 0: any" },
    { "qk_clip", KEY_REAL, AT(qk_clip), 0, 1e6, "100", .help = "largest attention logit of MLA; 0: any" },
    { 0 },
};
static const recipe_key balance_keys[] = {
    { "kind", KEY_CHOICE, AT(balance.kind), .fallback = "quantile", .choices = balances,
      .help = "how experts are balanced" },
    { "bins", KEY_I64, AT(balance.bins), 2, 1000000, "1000", .help = "quantile: bins of the histogram" },
    { "rate", KEY_REAL, AT(balance.rate), 0, 1, "0.001", .help = "sign: step of a bias" },
    { "centre", KEY_FLAG, AT(balance.centre), .fallback = "true",
      .help = "keep the mean of the biases at 0" },
    { 0 },
};
static const recipe_key checkpoint_keys[] = {
    { "every", KEY_SIZE, AT(checkpoint.every), 0, STEPS_MAX, "500",
      .help = "steps; 0: at the end of stages only" },
    { "keep_last", KEY_U32, AT(checkpoint.keep_last), 0, 1000000, "3",
      .help = "newest checkpoints that stay; 0: all" },
    { "keep_every", KEY_U64, AT(checkpoint.keep_every), 0, STEPS_MAX, "0",
      .help = "steps whose multiples stay; 0: none" },
    { "compress", KEY_FLAG, AT(checkpoint.compress), .fallback = "false", .help = "zstd" },
    { "wait", KEY_FLAG, AT(checkpoint.wait), .fallback = "false",
      .help = "the next step starts when it is written" },
    { "experts", KEY_U32, AT(checkpoint.experts), 0, 65536, "1",
      .help = "partitions by expert; 0: as many as ranks" },
    { "files", KEY_U32, AT(checkpoint.files), 0, 65536, "1",
      .help = "partitions of all else; 0: as many as ranks" },
    { "dtype", KEY_CHOICE, AT(checkpoint.dtype), .fallback = "f32", .choices = dtypes,
      .help = "of parameters" },
    { 0 },
};
static const recipe_key eval_keys[] = {
    { "every", KEY_SIZE, AT(eval.every), 0, STEPS_MAX, "0", .help = "steps; 0: at the end of stages only" },
    { "sequences", KEY_SIZE, AT(eval.sequences), 1, 1073741824, "64", .help = "held-out sequences, at most" },
    { "context", KEY_SIZE, AT(eval.context), 0, 1099511627776.0, "0",
      .help = "tokens of a held-out sequence; 0: the stage's" },
    { "buckets", KEY_I64, AT(eval.buckets), 1, 32, "8", .help = "of positions" },
    { 0 },
};
static const recipe_key guard_keys[] = {
    { "nan", KEY_CHOICE, AT(guard.nan), .fallback = "stop", .choices = guards,
      .help = "when loss or gradients are not finite" },
    { "spike", KEY_CHOICE, AT(guard.spike), .fallback = "skip", .choices = guards,
      .help = "when the loss jumps" },
    { "spike_factor", KEY_REAL, AT(guard.spike_factor), 0, 1e6, "0",
      .help = "of the running mean of the loss; 0: off" },
    { "skips", KEY_I64, AT(guard.skips), 0, 1000000, "10", .help = "steps in a row that may be skipped" },
    { 0 },
};
static const recipe_key log_keys[] = {
    { "every", KEY_I64, AT(log.every), 1, 1000000, "1", .help = "steps" },
    { "tensorboard", KEY_FLAG, AT(log.tensorboard), .fallback = "true", .help = "write event files" },
    { "samples", KEY_FLAG, AT(log.samples), .fallback = "false",
      .help = "write which sequences each step took" },
    { 0 },
};
#define RANKS 1, 65536, "1"
static const recipe_key parallel_keys[] = {
    { "ep", KEY_I32, AT(parallel.ep), RANKS, .help = "ranks that share the experts of a layer" },
    { "dp", KEY_I32, AT(parallel.dp), 0, 65536, "0",
      .help = "ranks that share a batch; 0: those that are left" },
    { "cp", KEY_I32, AT(parallel.cp), RANKS, .help = "ranks that share a sequence" },
    { "pp", KEY_I32, AT(parallel.pp), RANKS, .help = "ranks that share the layers" },
    { 0 },
};
const recipe_key recipe_root_keys[] = {
    { "model", KEY_OTHER, .help = "the model" },
    { "data", KEY_OTHER, .help = "where tokens come from" },
    { "stages", KEY_OTHER, .help = "what is done, in order" },
    { "optimizer", KEY_MAP, .keys = optimizer_keys },
    { "balance", KEY_MAP, .keys = balance_keys },
    { "checkpoint", KEY_MAP, .keys = checkpoint_keys },
    { "eval", KEY_MAP, .keys = eval_keys },
    { "guard", KEY_MAP, .keys = guard_keys },
    { "log", KEY_MAP, .keys = log_keys },
    { "parallel", KEY_MAP, .keys = parallel_keys },
    { "micro_tokens", KEY_SIZE, AT(micro_tokens), 0, 1099511627776.0, "0",
      .help = "tokens of one forward; 0: one sequence" },
    { "seed", KEY_U64, AT(seed), 0, 9007199254740992.0, "0", .help = "of everything that is drawn" },
    { "init_std", KEY_REAL, AT(init_std), 0, 10, "0",
      .help = "of matrices at the start; 0: 1 / sqrt(columns)" },
    { 0 },
};
#undef AT
static const recipe_key data_keys[] = { { "sources", KEY_OTHER, .help = "data folders" }, { 0 } };
static const recipe_key source_keys[] = {
    { "name", KEY_NAME, offsetof(tsr_train_source, name), .help = "name of the source, for mix" },
    { "path", KEY_OTHER, .help = "data folder" },
    { 0 },
};

/* ---- sources ---------------------------------------------------------------------------------------------------------------- */

static tsr_status read_path(const recipe_reader *r, const tsr_tree *at, const char *path, char **out)
{
    if (tsr_tree_null(at) || at->kind != TSR_TREE_TEXT || at->text[0] == '\0') {
        return recipe_fail(r, at, path, TSR_E_FORMAT, "must be the path of a data folder");
    }
    const char *slash = strrchr(r->name, '/');
    int folder = slash != NULL && at->text[0] != '/' && at->line > 0 ? (int)(slash - r->name) + 1 : 0;
    if (asprintf(out, "%.*s%s", folder, r->name, at->text) < 0) {
        *out = NULL;
        return recipe_fail(r, at, path, TSR_E_LIMIT, "out of memory");
    }
    return TSR_OK;
}

static tsr_status read_sources(const recipe_reader *r, tsr_recipe *out, const tsr_tree *data)
{
    const tsr_tree *list;
    TSR_TRY(recipe_read(r, data, "data", data_keys, NULL));
    TSR_TRY(recipe_expect(r, tsr_tree_get(data, "sources"), "data.sources", TSR_TREE_LIST, &list));
    if (list == NULL || list->count == 0 || list->count > TSR_SOURCE_MAX) {
        return recipe_fail(r, list != NULL ? list : data, "data.sources", TSR_E_FORMAT,
                           "must list one to %d sources (- {name: ..., path: ...})", TSR_SOURCE_MAX);
    }
    for (const tsr_tree *c = list->first; c != NULL; c = c->next) {
        char number[16];
        (void)snprintf(number, sizeof number, "%d", out->sources);
        const char *path = recipe_path(r, "data.sources", number);
        tsr_train_source *s = &out->source[out->sources];
        TSR_TRY(recipe_read(r, c, path, source_keys, s));
        for (int32_t i = 0; i < out->sources; i++) {
            if (strcmp(out->source[i].name, s->name) == 0) {
                return recipe_fail(r, c, path, TSR_E_CONFLICT, "a source of the name %s is there already",
                                   s->name);
            }
        }
        const tsr_tree *at = tsr_tree_get(c, "path");
        TSR_TRY(read_path(r, at != NULL ? at : c, recipe_path(r, path, "path"), &s->path));
        out->sources++;
    }
    return TSR_OK;
}

/* ---- stages ------------------------------------------------------------------------------------------------------------------- */

static tsr_status read_mix(const recipe_reader *r, const tsr_recipe *recipe, tsr_stage *s, const tsr_tree *at,
                           const char *path)
{
    static const recipe_key weight = { "", KEY_REAL, 0, 0, 1e9, .help = "weight of a source" };
    const char *names[TSR_SOURCE_MAX];
    double sum = 0;
    for (int32_t i = 0; i < recipe->sources; i++) {
        names[i] = recipe->source[i].name;
        s->mix[i] = tsr_tree_null(at) ? 1 : 0;
    }
    TSR_TRY(recipe_expect(r, at, path, TSR_TREE_MAP, &at));
    for (const tsr_tree *c = at != NULL ? at->first : NULL; c != NULL; c = c->next) {
        int32_t i = 0;
        while (i < recipe->sources && strcmp(names[i], c->key) != 0) {
            i++;
        }
        const char *here = recipe_path(r, path, c->key);
        if (i == recipe->sources) {
            const char *near = recipe_nearest(c->key, names, (size_t)i);
            return recipe_fail(r, c, here, TSR_E_CONFLICT, "no source has this name (%s%s%s)",
                               near != NULL ? "did you mean " : "data.sources lists them",
                               near != NULL ? near : "", near != NULL ? "?" : "");
        }
        if (!tsr_tree_null(c)) {
            TSR_TRY(recipe_read_value(r, c, here, &weight, &s->mix[i]));
        }
        sum += s->mix[i];
    }
    if (at != NULL && sum <= 0) {
        return recipe_fail(r, at, path, TSR_E_CONFLICT, "has no weight above 0");
    }
    return TSR_OK;
}

static tsr_status read_freeze(const recipe_reader *r, tsr_stage *s, const tsr_tree *at, const char *path)
{
    static const char allowed[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-.*?{}";
    TSR_TRY(recipe_expect(r, at, path, TSR_TREE_LIST, &at));
    for (const tsr_tree *c = at != NULL ? at->first : NULL; c != NULL; c = c->next) {
        size_t n = c->kind == TSR_TREE_TEXT ? strlen(c->text) : 0;
        if (s->freeze_count == TSR_FREEZE_MAX) {
            return recipe_fail(r, c, path, TSR_E_FORMAT, "more than %d patterns", TSR_FREEZE_MAX);
        }
        if (n == 0 || n >= TSR_NAME_MAX || c->text[strspn(c->text, allowed)] != '\0') {
            return recipe_fail(r, c, path, TSR_E_FORMAT,
                               "must list names of parameters, with * and ?, at most %d long",
                               TSR_NAME_MAX - 1);
        }
        memcpy(s->freeze[s->freeze_count++], c->text, n);
    }
    return TSR_OK;
}

static int64_t as_steps(double x, int64_t steps)
{
    return x < 1 ? llround(x * (double)steps) : (int64_t)x;
}

/* Steps, warm-up and decay in steps, and whether they fit. */
static tsr_status resolve_stage(const recipe_reader *r, recipe_stage_raw *raw, const tsr_tree *at,
                                const char *path)
{
    tsr_stage *s = &raw->s;
    bool steps = s->steps != KEY_UNSET_INT, tokens = raw->tokens != KEY_UNSET_INT;
    if (steps == tokens) {
        return recipe_fail(r, at, path, TSR_E_CONFLICT, "give steps or tokens%s", steps ? ", not both" : "");
    }
    if (tokens) {
        s->steps = raw->tokens / s->batch_tokens + (raw->tokens % s->batch_tokens != 0);
        if ((double)s->steps > STEPS_MAX) {
            return recipe_fail(r, at, path, TSR_E_CONFLICT, "tokens: are too many steps of batch_tokens");
        }
    }
    if (s->batch_tokens < s->context) {
        return recipe_fail(
            r, at, path, TSR_E_CONFLICT,
            "batch_tokens is %lld, less than one sequence of context %lld (raise batch_tokens)",
            (long long)s->batch_tokens, (long long)s->context);
    }
    bool wsd = s->schedule == TSR_SCHEDULE_WSD;
    if (!wsd && !isnan(raw->decay) && raw->decay > 0) {
        return recipe_fail(r, at, path, TSR_E_CONFLICT, "decay: is of schedule wsd only (remove it)");
    }
    raw->decay = isnan(raw->decay) ? (wsd ? 0.1 : 0) : raw->decay;
    s->warmup = as_steps(raw->warmup, s->steps);
    s->decay = as_steps(raw->decay, s->steps);
    if (s->warmup + s->decay > s->steps) {
        return recipe_fail(r, at, path, TSR_E_CONFLICT,
                           "warmup (%lld) and decay (%lld) are more than the %lld steps",
                           (long long)s->warmup, (long long)s->decay, (long long)s->steps);
    }
    s->lr_final = s->lr * s->lr_final_share;
    return TSR_OK;
}

static tsr_status read_stages(const recipe_reader *r, tsr_recipe *out, const tsr_tree *root)
{
    const tsr_tree *list;
    TSR_TRY(recipe_expect(r, tsr_tree_get(root, "stages"), "stages", TSR_TREE_LIST, &list));
    if (list == NULL || list->count == 0 || list->count > TSR_STAGE_MAX) {
        return recipe_fail(r, list != NULL ? list : root, "stages", TSR_E_FORMAT,
                           "must list one to %d stages", TSR_STAGE_MAX);
    }
    for (const tsr_tree *c = list->first; c != NULL; c = c->next) {
        char number[16];
        (void)snprintf(number, sizeof number, "%d", out->stages);
        const char *path = recipe_path(r, "stages", number);
        recipe_stage_raw raw = { 0 };
        TSR_TRY(recipe_read(r, c, path, recipe_stage_keys, &raw));
        for (int32_t i = 0; i < out->stages; i++) {
            if (strcmp(out->stage[i].name, raw.s.name) == 0) {
                return recipe_fail(r, c, path, TSR_E_CONFLICT, "a stage of the name %s is there already",
                                   raw.s.name);
            }
        }
        TSR_TRY(resolve_stage(r, &raw, c, path));
        TSR_TRY(read_mix(r, out, &raw.s, tsr_tree_get(c, "mix"), recipe_path(r, path, "mix")));
        TSR_TRY(read_freeze(r, &raw.s, tsr_tree_get(c, "freeze"), recipe_path(r, path, "freeze")));
        out->stage[out->stages++] = raw.s;
    }
    return TSR_OK;
}

/* ---- a recipe --------------------------------------------------------------------------------------------------------------------- */

/* Values of different sections. */
static tsr_status contradictions(const recipe_reader *r, const tsr_recipe *c, const tsr_tree *root)
{
    const tsr_tree *parallel = tsr_tree_get(root, "parallel");
    if (c->spec->experts % c->parallel.ep != 0) {
        return recipe_fail(r, parallel, "parallel.ep", TSR_E_CONFLICT,
                           "%d ranks cannot share %lld experts evenly (take a divisor)", c->parallel.ep,
                           (long long)c->spec->experts);
    }
    if (c->parallel.pp > c->spec->layers) {
        return recipe_fail(r, parallel, "parallel.pp", TSR_E_CONFLICT, "%d ranks are more than the %d layers",
                           c->parallel.pp, c->spec->layers);
    }
    for (int32_t i = 0; i < c->stages; i++) {
        if (c->stage[i].context % c->parallel.cp != 0) {
            return recipe_fail(r, parallel, "parallel.cp", TSR_E_CONFLICT,
                               "%d ranks cannot share sequences of %lld tokens evenly (stage %s)",
                               c->parallel.cp, (long long)c->stage[i].context, c->stage[i].name);
        }
    }
    if (c->others.kind != TSR_OPTIM_ADAMW) {
        return recipe_fail(r, tsr_tree_get(root, "optimizer"), "optimizer.others.kind", TSR_E_CONFLICT,
                           "Muon is for matrices only (use adamw)");
    }
    if (c->balance.kind == TSR_BALANCE_QUANTILE_EXACT &&
        (c->parallel.ep > 1 || c->parallel.dp > 1 || c->parallel.cp > 1)) {
        return recipe_fail(r, tsr_tree_get(root, "balance"), "balance.kind", TSR_E_CONFLICT,
                           "exact works in one process only (use quantile)");
    }
    return TSR_OK;
}

static tsr_status read_recipe(const recipe_reader *r, tsr_recipe *out, const char *text, size_t bytes,
                              const tsr_recipe_set *sets, size_t set_count)
{
    tsr_tree *root;
    TSR_TRY(tsr_tree_parse(&root, r->arena, text, bytes, r->name, r->err));
    for (size_t i = 0; i < set_count; i++) {
        TSR_TRY(tsr_tree_set(root, r->arena, sets[i].key, sets[i].value, r->err));
    }
    TSR_TRY(recipe_read(r, root, "", recipe_root_keys, out));
    TSR_TRY(read_sources(r, out, tsr_tree_get(root, "data")));
    TSR_TRY(read_stages(r, out, root));
    TSR_TRY(recipe_read_model(r, out, tsr_tree_get(root, "model")));
    return contradictions(r, out, root);
}

tsr_status tsr_recipe_parse(tsr_recipe **out, const char *text, size_t bytes, const char *name,
                            const tsr_recipe_set *sets, size_t set_count, tsr_err *err)
{
    *out = NULL;
    tsr_recipe *c = calloc(1, sizeof *c);
    recipe_reader r = { .name = name, .arena = tsr_arena_new(ARENA_BYTES), .err = err };
    tsr_status st = c == NULL || r.arena == NULL ? TSR_ERR(err, TSR_E_LIMIT, "%s: out of memory", name)
                                                 : read_recipe(&r, c, text, bytes, sets, set_count);
    tsr_arena_free(&r.arena);
    if (st != TSR_OK) {
        tsr_recipe_free(&c);
    }
    *out = c;
    return st;
}

void tsr_recipe_free(tsr_recipe **r)
{
    tsr_recipe *c = *r;
    if (c != NULL) {
        for (int32_t i = 0; i < TSR_SOURCE_MAX; i++) {
            free(c->source[i].path);
        }
        free(c->config_json);
        free(c->spec);
        free(c);
    }
    *r = NULL;
}

/* ---- files ------------------------------------------------------------------------------------------------------------------------- */

static const char *installed;

void tsr_recipe_set_folder(const char *path)
{
    installed = path;
}

/* The file of a path or name. *by_name: it is an installed one. */
static tsr_status find(const char *path, char **out, bool *by_name, tsr_err *err)
{
    struct stat sb;
    bool file = stat(path, &sb) == 0 && !S_ISDIR(sb.st_mode);
    *by_name = !file && strchr(path, '/') == NULL && path[0] != '\0' && installed != NULL;
    int n = *by_name ? asprintf(out, "%s/%s.yaml", installed, path) : asprintf(out, "%s", path);
    if (n < 0) {
        *out = NULL;
        TSR_FAIL(err, TSR_E_LIMIT, "%s: out of memory", path);
    }
    return TSR_OK;
}

static tsr_status read_file(const char *file, const char *path, bool by_name, char **text, size_t *bytes,
                            tsr_err *err)
{
    FILE *f = fopen(file, "re");
    if (f == NULL && errno == ENOENT) {
        TSR_FAIL(err, TSR_E_MISSING, "%s: no such recipe%s%s (give the path of a YAML file)", path,
                 by_name ? ", here or in " : "", by_name ? installed : "");
    }
    if (f == NULL) {
        TSR_FAIL(err, TSR_E_IO, "%s: cannot be opened: %s", file, strerror(errno));
    }
    *text = malloc(TSR_TREE_BYTES_MAX + 1);
    *bytes = *text != NULL ? fread(*text, 1, TSR_TREE_BYTES_MAX + 1, f) : 0;
    bool broken = ferror(f) != 0;
    int why = errno;
    (void)fclose(f);
    if (broken || *text == NULL) {
        TSR_FAIL(err, broken ? TSR_E_IO : TSR_E_LIMIT, "%s: cannot be read: %s", file,
                 broken ? strerror(why) : "out of memory");
    }
    return TSR_OK;
}

tsr_status tsr_recipe_load(tsr_recipe **out, const char *path, const tsr_recipe_set *sets, size_t set_count,
                           tsr_err *err)
{
    char *file, *text = NULL;
    size_t bytes = 0;
    bool by_name;
    *out = NULL;
    TSR_TRY(find(path, &file, &by_name, err));
    tsr_status st = read_file(file, path, by_name, &text, &bytes, err);
    if (st == TSR_OK) {
        st = tsr_recipe_parse(out, text, bytes, by_name ? strrchr(file, '/') + 1 : file, sets, set_count,
                              err);
    }
    free(text);
    free(file);
    return st;
}
