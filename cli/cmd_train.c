/* cmd_train.c - tessera train: a recipe becomes a run; a run goes on where it stopped. */
#include "cli/cli.h"
#include "cli/out.h"
#include "train/train.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *const synopsis[] = { "[OPTION]... RECIPE --out RUN", NULL };
static const char *const description[] = {
    "Trains a model through the stages of a recipe (docs/RECIPES.md; the name of an installed one, such as "
    "tiny, or a "
    "YAML file) and keeps everything in the folder RUN. Given again, the same command goes on from RUN's "
    "newest "
    "checkpoint that verifies, exactly where it stopped: the same samples, the same bits on the same number "
    "of ranks.",
    "On going on, the recipe in the checkpoint counts. What differs on the command line is a warning; "
    "--override changes "
    "it, and the checkpoint's history tells so.",
    "One line a logged step: loss, learning rate, gradient norm, maximum violation of the experts' balance, "
    "tokens a "
    "second, time left. SIGUSR1 saves now; SIGTERM and SIGINT save and end.",
    NULL,
};
static const tsr_opt options[] = {
    { "out", 'o', TSR_OPT_TEXT, "RUN", 0, 0, "The folder of the run; made when there is none." },
    { "resume", 0, TSR_OPT_TEXT, "auto|none|step-N", 0, 0,
      "Where to begin: auto, the newest good checkpoint or else from nothing, is the default; none refuses a "
      "run that "
      "has checkpoints; step-N takes that one." },
    { "set", 0, TSR_OPT_LIST, "KEY=VALUE", 0, 0,
      "Change the recipe, as stages.0.lr=1e-3. May be given several times." },
    { "override", 0, TSR_OPT_LIST, "KEY=VALUE", 0, 0,
      "On going on: change the checkpoint's recipe from here on. May be given several times." },
    { "start", 0, TSR_OPT_TEXT, "CKPT", 0, 0,
      "Begin with the weights of this checkpoint instead of random ones." },
    { "stop-at", 0, TSR_OPT_UINT, "STEP", 1, INT64_MAX, "Save and end after this step." },
    { "backend", 0, TSR_OPT_TEXT, "NAME", 0, 0,
      "What computes: auto (the default) or a name that tessera backends lists." },
    { "timeout", 0, TSR_OPT_UINT, "SECONDS", 1, 1000000,
      "With several ranks: how long one may wait for the others before the job ends. 600 when not given." },
    TSR_OPT_END,
};
static const tsr_pair examples[] = {
    { "tessera train tiny --set data.sources.0.path=data --out run", "All stages of the installed recipe." },
    { "tessera train my.yaml --out run --stop-at 1000",
      "As far as step 1000; without --stop-at it goes on from there." },
    { "tessera train my.yaml --out run --resume step-500 --override stages.0.lr=1e-4",
      "From an earlier step, slower." },
    { 0 },
};
static const tsr_pair files[] = {
    { "RUN/step-NNNNNNNN/",
      "Checkpoints: weights, optimizer, balance, position in the data, recipe, history." },
    { "RUN/metrics.jsonl", "One object a logged step, and one for each pass over held-out text." },
    { "RUN/events/", "The same for TensorBoard." },
    { "RUN/routing.h5", "Tokens, gate mass and bias of every expert at every step." },
    { "RUN/samples.jsonl", "With log.samples: the sequences of every step." },
    { 0 },
};
static const char *const see_also[] = { "data", "extend", "plan", "eval", "generate", NULL };

/* ---- KEY=VALUE ----------------------------------------------------------------------------------------------------- */

typedef struct sets {
    tsr_recipe_set *list;
    char **keys; /* owned */
    size_t count;
} sets;

static void free_sets(sets *s)
{
    for (size_t i = 0; i < s->count; i++) {
        free(s->keys[i]);
    }
    free(s->keys);
    free(s->list);
    *s = (sets){ .count = 0 };
}

static tsr_status take_sets(sets *out, const tsr_args *a, const char *option, tsr_err *err)
{
    const tsr_opt_value *v = tsr_opt_get(a, option);
    const char **list = v->list;
    size_t n = v->list_count;
    *out = (sets){ .count = 0 };
    out->list = calloc(n + 1, sizeof *out->list);
    out->keys = calloc(n + 1, sizeof *out->keys);
    if (out->list == NULL || out->keys == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    for (size_t i = 0; i < n; i++) {
        const char *equals = strchr(list[i], '=');
        if (equals == NULL || equals == list[i]) {
            TSR_FAIL(err, TSR_E_USAGE, "--%s: %s: is not KEY=VALUE", option, list[i]);
        }
        out->keys[i] = strndup(list[i], (size_t)(equals - list[i]));
        out->list[i] = (tsr_recipe_set){ out->keys[i], equals + 1 };
        out->count = i + 1;
        if (out->keys[i] == NULL) {
            TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
        }
    }
    return TSR_OK;
}

/* ---- what people see -------------------------------------------------------------------------------------------------- */

static void duration(char *out, size_t bytes, double s)
{
    long t = s < 0 || s > 1e9 ? 0 : lround(s);
    if (t >= 3600) {
        (void)snprintf(out, bytes, "%ldh%02ldm", t / 3600, t / 60 % 60);
    } else {
        (void)snprintf(out, bytes, "%ldm%02lds", t / 60, t % 60);
    }
}

static void line(void *payload, const tsr_train_line *l)
{
    const tsr_cli *cli = payload;
    char eta[32];
    duration(eta, sizeof eta, l->eta_s);
    tsr_cli_say(cli,
                "step %" PRId64 "/%" PRId64
                "  %s  loss %.4f  lr %.3g  norm %.3g  maxvio %.2f  %.0f tokens/s  ETA %s%s",
                l->step, l->steps, l->stage, l->loss, l->lr, l->grad_norm, l->maxvio, l->tokens_per_s, eta,
                l->skipped ? "  skipped" : "");
    (void)fflush(stdout);
}

static void eval(void *payload, const tsr_train_eval *e)
{
    const tsr_cli *cli = payload;
    char text[800];
    int n = snprintf(text, sizeof text, "held-out at step %" PRId64 ": loss %.4f", e->step, e->loss);
    if (e->bits_per_byte >= 0) {
        n += snprintf(text + n, sizeof text - (size_t)n, ", %.4f bits a byte", e->bits_per_byte);
    }
    n += snprintf(text + n, sizeof text - (size_t)n, "; by position");
    for (int32_t i = 0; i < e->buckets && n < (int)sizeof text - 40; i++) {
        if (e->count[i] > 0) {
            n += snprintf(text + n, sizeof text - (size_t)n, "  <%" PRId64 " %.4f", e->edge[i + 1],
                          e->bucket_loss[i]);
        }
    }
    tsr_cli_say(cli, "%s", text);
    (void)fflush(stdout);
}

static void note(void *payload, bool warning, const char *text)
{
    tsr_cli *cli = payload;
    if (warning) {
        tsr_cli_warn(cli, "%s", text);
    } else {
        tsr_cli_note(cli, "%s", text);
    }
}

static unsigned poll_signals(void *payload)
{
    (void)payload;
    return (tsr_signals_take_save() ? TSR_TRAIN_SAVE : 0u) | (tsr_signals_seen() != 0 ? TSR_TRAIN_STOP : 0u);
}

/* ---- running ------------------------------------------------------------------------------------------------------------ */

static tsr_status take_resume(tsr_train_opts *o, const tsr_args *a, tsr_err *err)
{
    const char *text = tsr_opt_text(a, "resume", "auto");
    char *end;
    if (strcmp(text, "auto") == 0 || strcmp(text, "none") == 0) {
        o->resume = text[0] == 'a' ? TSR_RESUME_AUTO : TSR_RESUME_NONE;
        return TSR_OK;
    }
    o->resume = TSR_RESUME_STEP;
    if (strncmp(text, "step-", 5) == 0 && text[5] >= '0' && text[5] <= '9') {
        o->resume_step = strtoll(text + 5, &end, 10);
        if (*end == '\0') {
            return TSR_OK;
        }
    }
    TSR_FAIL(err, TSR_E_USAGE, "--resume: %s: is not auto, none, or step-N", text);
}

/* Whether mpirun, or a launcher that speaks its language, has started this process. */
static bool started_by_mpi(void)
{
    static const char *const names[] = { "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "SLURM_MPI_TYPE" };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (getenv(names[i]) != NULL) {
            return true;
        }
    }
    return false;
}

static tsr_status open_dist(tsr_dist **out, const tsr_args *a, tsr_err *err)
{
    return started_by_mpi() ? tsr_dist_mpi_open(out, getenv("TESSERA_MPI_PLUGIN"),
                                                (double)tsr_opt_number(a, "timeout", 600), err)
                            : tsr_dist_self_open(out, err);
}

static tsr_status open_backend(tsr_backend **out, const tsr_cli *cli, const tsr_args *a, const tsr_dist *d,
                               tsr_err *err)
{
    long processors = sysconf(_SC_NPROCESSORS_ONLN), each = processors / d->local_ranks;
    int threads = cli->threads > 0 || d->ranks == 1 ? cli->threads : each > 1 ? (int)each : 1;
    return tsr_backend_open(out, tsr_opt_text(a, "backend", "auto"), threads, err);
}

static tsr_status report(tsr_cli *cli, const tsr_train_opts *o, const tsr_train_result *r, tsr_err *err)
{
    if (cli->json) {
        json_t *obj = json_object();
        tsr_json_set(&obj, "run", json_string(o->run));
        tsr_json_set(&obj, "step", json_integer(r->step));
        tsr_json_set(&obj, "tokens", json_integer(r->tokens));
        tsr_json_set(&obj, "loss", tsr_json_number(r->loss));
        tsr_json_set(&obj, "finished", json_boolean(r->finished));
        tsr_json_set(&obj, "skipped", json_integer(r->skipped));
        return tsr_json_print(obj, false, err);
    }
    tsr_cli_say(cli, "%s after step %" PRId64 " (%" PRId64 " tokens): %s/step-%08" PRId64,
                r->finished ? "finished" : "stopped", r->step, r->tokens, o->run, r->step);
    return TSR_OK;
}

static tsr_status train(tsr_cli *cli, const tsr_args *a, tsr_train_opts *o, tsr_err *err)
{
    tsr_train_result r;
    o->hooks = (tsr_train_hooks){ cli, line, eval, note, poll_signals };
    o->run = tsr_opt_text(a, "out", NULL);
    o->start = tsr_opt_text(a, "start", NULL);
    o->stop_at = tsr_opt_given(a, "stop-at") ? (int64_t)tsr_opt_number(a, "stop-at", 0) : -1;
    o->mem_limit = cli->mem_limit;
    tsr_signals_usr1_saves();
    TSR_TRY(tsr_train(o, &r, err));
    if (tsr_signals_seen() != 0 && !r.finished) {
        TSR_FAIL(err, TSR_E_CANCELLED,
                 "stopped on request after step %" PRId64 "; %s/step-%08" PRId64
                 " is saved, the same command goes on",
                 r.step, o->run, r.step);
    }
    return o->dist->rank == 0 ? report(cli, o, &r, err) : TSR_OK;
}

/* A rank that failed cannot leave the others waiting. Where all failed alike, rank 0 is the one that tells. */
static tsr_status end_together(tsr_status st, tsr_dist *d, const tsr_err *err)
{
    if (st == TSR_OK || d == NULL || d->ranks == 1 || st == TSR_E_CANCELLED) {
        return st;
    }
    if (d->rank != 0 && sleep(10) > 0) { /* a signal: rank 0 has told, and is ending the job */
        _exit(-(int)st);
    }
    (void)fprintf(stderr, "error[%s] rank %d: %s\n", tsr_status_class(st), d->rank, err->msg);
    d->abort(d, -(int)st);
    return st;
}

static tsr_status run(tsr_cli *cli, const tsr_args *a, tsr_err *err)
{
    tsr_train_opts o = { .stop_at = -1 };
    sets set = { .count = 0 }, override = { .count = 0 };
    tsr_recipe *recipe = NULL;
    tsr_backend *backend = NULL;
    tsr_dist *dist = NULL;
    if (!tsr_opt_given(a, "out")) {
        TSR_FAIL(err, TSR_E_USAGE, "train: needs --out RUN, the folder of the run");
    }
    tsr_status st = take_resume(&o, a, err);
    st = st == TSR_OK ? take_sets(&set, a, "set", err) : st;
    st = st == TSR_OK ? take_sets(&override, a, "override", err) : st;
    st = st == TSR_OK ? open_dist(&dist, a, err) : st;
    st = st == TSR_OK ? tsr_recipe_load(&recipe, a->operands[0], set.list, set.count, err) : st;
    st = st == TSR_OK ? open_backend(&backend, cli, a, dist, err) : st;
    if (st == TSR_OK) {
        o.recipe = recipe;
        o.overrides = override.list;
        o.override_count = override.count;
        o.backend = backend;
        o.dist = dist;
        st = train(cli, a, &o, err);
    }
    st = end_together(st, dist, err);
    tsr_backend_close(&backend);
    tsr_dist_close(&dist);
    tsr_recipe_free(&recipe);
    free_sets(&override);
    free_sets(&set);
    return st;
}

const tsr_cmd tsr_cmd_train = { .name = "train",
                                .what = "train a model through the stages of a recipe",
                                .synopsis = synopsis,
                                .description = description,
                                .options = options,
                                .examples = examples,
                                .files = files,
                                .see_also = see_also,
                                .operand_min = 1,
                                .operand_max = 1,
                                .run = run };
