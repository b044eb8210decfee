/* trainer.c - a run from beginning to end: opening, the loop over steps and stages, saving, telling; see trainer.h. */
#include "train/trainer.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

uint64_t now_ns(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void say(const trainer *t, bool warning, const char *fmt, ...)
{
    char text[1024];
    va_list ap;
    if (!first_rank(t) || t->o->hooks.note == NULL) {
        return;
    }
    va_start(ap, fmt);
    (void)vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    t->o->hooks.note(t->o->hooks.payload, warning, text);
}

/* ---- opening ----------------------------------------------------------------------------------------------------------- */

/* The folder, held by one run at a time. */
static tsr_status hold_folder(trainer *t, tsr_err *err)
{
    char path[4096];
    t->lock = -1;
    if (!first_rank(t)) {
        return TSR_OK;
    }
    if (mkdir(t->o->run, 0777) != 0 && errno != EEXIST) {
        TSR_FAIL(err, TSR_E_IO, "%s: cannot be made: %s", t->o->run, strerror(errno));
    }
    (void)snprintf(path, sizeof path, "%s/.lock", t->o->run);
    t->lock = open(path, O_CREAT | O_RDWR | O_CLOEXEC, 0666);
    if (t->lock < 0) {
        TSR_FAIL(err, TSR_E_IO, "%s: %s", path, strerror(errno));
    }
    if (flock(t->lock, LOCK_EX | LOCK_NB) != 0) {
        TSR_FAIL(err, TSR_E_CONFLICT, "%s: another run is at work here (take another --out, or end it)",
                 t->o->run);
    }
    return TSR_OK;
}

static tsr_status take_memory(trainer *t, tsr_err *err)
{
    const tsr_recipe *r = t->r;
    const tsr_stage *s = &r->stage[t->feed.at];
    int64_t step_tokens = t->feed.batch * s->context;
    optim_freeze(&t->optim, s);
    return balance_open(&t->balance, t->m, r, s, t->feed.max_tokens, step_tokens, err);
}

static tsr_status open_files(trainer *t, tsr_err *err)
{
    char *note;
    if (!first_rank(t)) {
        return TSR_OK;
    }
    TSR_TRY(set_aside(t->o, t->from != NULL ? t->p.step : -1, err));
    if (t->from != NULL) { /* a kill between a checkpoint and its name in "latest" left the one before */
        const char *slash = strrchr(t->from, '/');
        TSR_TRY(tsr_run_set_latest(t->o->run, slash != NULL ? slash + 1 : t->from, err));
    }
    TSR_TRY(metrics_open(&t->metrics, t->o->run, t->r, t->p.step, err));
    tsr_status st = routing_open(&t->routing, t->o->run, t->r, &t->balance, t->p.step, &note, err);
    if (note != NULL) {
        say(t, true, "%s", note);
    }
    free(note);
    return st;
}

static tsr_status open_run(trainer *t, tsr_err *err)
{
    int64_t in_stage;
    TSR_TRY(hold_folder(t, err));
    TSR_TRY(resume_recipe(t, err));
    TSR_TRY(layout_make(&t->where, t->o->dist, t->r, t->b, err));
    TSR_TRY(feed_open(&t->feed, t->r, t->where.cp, err));
    int32_t stage = tsr_recipe_stage_of(t->r, t->p.step, &in_stage);
    TSR_TRY(feed_stage(&t->feed, stage, err));
    json_t *keep = t->saver.lineage;
    t->saver = (saver){
        .run = t->o->run, .r = t->r, .hooks = &t->o->hooks, .mem_limit = t->o->mem_limit, .lineage = keep
    };
    TSR_TRY(resume_load(t, err));
    TSR_TRY(take_memory(t, err));
    t->saver.m = t->m;
    t->saver.o = &t->optim;
    t->saver.where = &t->where;
    t->saver.f = &t->feed;
    TSR_TRY(saver_open(&t->saver, err));
    t->saved = t->from != NULL ? t->p.step : -1;
    t->line.steps = tsr_recipe_steps(t->r);
    return open_files(t, err);
}

static void close_run(trainer *t)
{
    saver_close(&t->saver);
    routing_close(&t->routing);
    metrics_close(&t->metrics);
    balance_close(&t->balance);
    optim_close(&t->optim);
    tsr_model_close(&t->m);
    layout_done(&t->where);
    feed_close(&t->feed);
    tsr_recipe_free(&t->own);
    free(t->from);
    if (t->lock >= 0) {
        (void)close(t->lock);
    }
}

/* ---- telling -------------------------------------------------------------------------------------------------------------- */

static double mean_violation(const balance *k)
{
    double sum = 0;
    for (int32_t i = 0; i < k->layers; i++) {
        sum += k->row[i].maxvio;
    }
    return k->layers > 0 ? sum / k->layers : 0;
}

static tsr_status tell_step(trainer *t, int64_t in_stage, tsr_err *err)
{
    bool due = t->r->log.every > 0 && t->p.step % t->r->log.every == 0;
    if (!first_rank(t)) {
        return TSR_OK;
    }
    TSR_TRY(metrics_samples(&t->metrics, t->p.step, &t->feed, in_stage, err));
    routing_add(&t->routing, &t->balance, t->p.step, t->feed.at, t->p.tokens);
    if (!due && t->p.step != t->line.steps) {
        return TSR_OK;
    }
    uint64_t now = now_ns();
    double s = (double)(now - t->line_ns) * 1e-9;
    t->line.tokens_per_s = s > 0 ? (double)t->line_tokens / s : 0;
    t->line.eta_s = (double)(now - t->start_ns) * 1e-9 / (double)(t->p.step - t->start_step) *
                    (double)(t->line.steps - t->p.step);
    t->line_ns = now;
    t->line_tokens = 0;
    if (t->o->hooks.line != NULL) {
        t->o->hooks.line(t->o->hooks.payload, &t->line);
    }
    return metrics_step(&t->metrics, &t->line, t->line.stage, mean_violation(&t->balance), err);
}

static tsr_status tell_held(trainer *t, tsr_err *err)
{
    tsr_train_eval e;
    tsr_err why;
    uint64_t begin = now_ns();
    tsr_status st = evaluate_held(t, &e, &why);
    t->line_ns += now_ns() - begin; /* the rate is that of training */
    if (st == TSR_E_MISSING) {
        return TSR_OK;
    }
    if (st != TSR_OK) {
        TSR_FAIL(err, st, "%s", why.msg);
    }
    if (!first_rank(t)) {
        return TSR_OK;
    }
    if (t->o->hooks.eval != NULL) {
        t->o->hooks.eval(t->o->hooks.payload, &e);
    }
    return metrics_eval(&t->metrics, &e, err);
}

/* ---- saving --------------------------------------------------------------------------------------------------------------- */

static tsr_status save_now(trainer *t, tsr_err *err)
{
    char *window = NULL;
    if (t->saved == t->p.step) {
        return TSR_OK;
    }
    TSR_TRY(saver_wait(&t->saver, err)); /* libhdf5 is not for two threads at once */
    if (first_rank(t)) {
        TSR_TRY(routing_flush(&t->routing, err));
        window = routing_take_window(&t->routing, t->p.step);
    }
    tsr_status st = saver_start(&t->saver, &t->p, window, err);
    free(window);
    TSR_TRY(st);
    t->saved = t->p.step;
    return t->r->checkpoint.wait ? saver_wait(&t->saver, err) : TSR_OK;
}

/* ---- the loop ---------------------------------------------------------------------------------------------------------------- */

static tsr_status next_stage(trainer *t, int32_t stage, tsr_err *err)
{
    const tsr_stage *s = &t->r->stage[stage];
    TSR_TRY(saver_wait(&t->saver, err)); /* it may still be asked about the feed */
    TSR_TRY(feed_stage(&t->feed, stage, err));
    tsr_model_opts o = { .train = true,
                         .recompute = s->recompute,
                         .max_tokens = t->feed.model_tokens,
                         .max_segs = t->feed.max_segs };
    TSR_TRY(tsr_model_reshape(t->m, &o, err));
    balance_close(&t->balance);
    return take_memory(t, err);
}

static tsr_status asked(trainer *t, unsigned *flags, tsr_err *err)
{
    const tsr_train_hooks *h = &t->o->hooks;
    int64_t all = h->poll != NULL ? (int64_t)h->poll(h->payload) : 0;
    TSR_TRY(t->where.all->all_reduce(t->where.all, &all, 1, TSR_MAX_I64, err));
    *flags = (unsigned)all;
    return TSR_OK;
}

static bool every(int64_t n, int64_t step)
{
    return n > 0 && step % n == 0;
}

static tsr_status after_step(trainer *t, int64_t in_stage, bool *stop, tsr_err *err)
{
    unsigned flags;
    const tsr_recipe *r = t->r;
    bool stage_ends = in_stage + 1 == r->stage[t->feed.at].steps;
    TSR_TRY(tell_step(t, in_stage, err));
    TSR_TRY(asked(t, &flags, err));
    if (every(r->eval.every, t->p.step) || stage_ends) {
        TSR_TRY(tell_held(t, err));
    }
    *stop = (flags & TSR_TRAIN_STOP) != 0 || t->p.step == t->o->stop_at;
    if (every(r->checkpoint.every, t->p.step) || stage_ends || *stop || flags != 0) {
        TSR_TRY(save_now(t, err));
    } else if (first_rank(t) && routing_full(&t->routing)) {
        TSR_TRY(saver_wait(&t->saver, err));
        TSR_TRY(routing_flush(&t->routing, err));
    }
    return TSR_OK;
}

static tsr_status loop(trainer *t, bool *stop, tsr_err *err)
{
    t->start_ns = t->line_ns = now_ns();
    t->start_step = t->p.step;
    if (t->p.step == 0 && t->r->eval.every > 0) {
        TSR_TRY(tell_held(t, err));
        t->start_ns = t->line_ns = now_ns();
    }
    *stop = t->o->stop_at >= 0 && t->p.step >= t->o->stop_at;
    while (t->p.step < t->line.steps && !*stop) {
        int64_t in_stage;
        int32_t stage = tsr_recipe_stage_of(t->r, t->p.step, &in_stage);
        TSR_TRY(stage != t->feed.at ? next_stage(t, stage, err) : TSR_OK);
        tsr_status st = train_step(t, err);
        if (st == TSR_E_NUMERIC) {
            TSR_TRY(save_now(t, NULL)); /* what the last good step left */
            return st;
        }
        TSR_TRY(st);
        TSR_TRY(after_step(t, in_stage, stop, err));
    }
    return saver_wait(&t->saver, err);
}

tsr_status tsr_train(const tsr_train_opts *o, tsr_train_result *out, tsr_err *err)
{
    trainer *t = calloc(1, sizeof *t);
    bool stop = false;
    *out = (tsr_train_result){ .step = 0 };
    if (t == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    t->o = o;
    t->b = o->backend;
    t->where = (layout){ .all = o->dist, .copies = o->dist, .ep = 1, .cp = 1 };
    tsr_status st = open_run(t, err);
    st = st == TSR_OK ? loop(t, &stop, err) : st;
    tsr_status last = saver_wait(&t->saver, st == TSR_OK ? err : NULL);
    st = st == TSR_OK ? last : st;
    *out = (tsr_train_result){ .step = t->p.step,
                               .tokens = t->p.tokens,
                               .loss = t->line.loss,
                               .finished = st == TSR_OK && t->p.step == t->line.steps,
                               .stopped = stop,
                               .skipped = t->p.skipped };
    close_run(t);
    free(t);
    return st;
}
