/* metrics.c - see metrics.h. */
#include "train/metrics.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static tsr_status failed(const char *path, tsr_err *err)
{
    TSR_FAIL(err, TSR_E_IO, "%s: %s", path, strerror(errno));
}

/* Copies the lines of steps up to `step`; a torn last line goes too. */
static bool copy_kept(FILE *from, FILE *to, int64_t step)
{
    char *line = NULL;
    size_t room = 0;
    ssize_t n;
    bool ok = true;
    while (ok && (n = getline(&line, &room, from)) > 0) {
        json_t *o = line[n - 1] == '\n' ? json_loadb(line, (size_t)n, 0, NULL) : NULL;
        const json_t *at = json_object_get(o, "step");
        if (json_is_integer(at) && json_integer_value(at) <= step) {
            ok = fwrite(line, 1, (size_t)n, to) == (size_t)n;
        }
        json_decref(o);
    }
    free(line);
    return ok;
}

static tsr_status open_lines(FILE **out, const char *run, const char *name, int64_t step, tsr_err *err)
{
    char path[4096], fresh[4104];
    (void)snprintf(path, sizeof path, "%s/%s", run, name);
    (void)snprintf(fresh, sizeof fresh, "%s.new", path);
    FILE *old = fopen(path, "r"), *now = fopen(fresh, "w");
    bool ok = now != NULL && (old == NULL || copy_kept(old, now, step));
    if (old != NULL) {
        (void)fclose(old);
    }
    ok = now != NULL && fflush(now) == 0 && ok && rename(fresh, path) == 0;
    *out = now;
    return ok ? TSR_OK : failed(path, err);
}

static double wall(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_REALTIME, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static tsr_status open_events(metrics *m, const char *run, int64_t step, tsr_err *err)
{
    char path[4096];
    (void)snprintf(path, sizeof path, "%s/events", run);
    if (mkdir(path, 0777) != 0 && errno != EEXIST) {
        return failed(path, err);
    }
    (void)snprintf(path, sizeof path, "%s/events/events.out.tfevents.%010lld.%08lld.%d.tessera", run,
                   (long long)time(NULL), (long long)step, (int)getpid());
    m->events = fopen(path, "w");
    return m->events != NULL && tf_begin(m->events, wall(), step) ? TSR_OK : failed(path, err);
}

tsr_status metrics_open(metrics *m, const char *run, const tsr_recipe *r, int64_t step, tsr_err *err)
{
    *m = (metrics){ NULL, NULL, NULL };
    TSR_TRY(open_lines(&m->lines, run, "metrics.jsonl", step, err));
    if (r->log.samples) {
        TSR_TRY(open_lines(&m->samples, run, "samples.jsonl", step, err));
    }
    return r->log.tensorboard ? open_events(m, run, step, err) : TSR_OK;
}

void metrics_close(metrics *m)
{
    FILE *const files[] = { m->lines, m->samples, m->events };
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        if (files[i] != NULL) {
            (void)fclose(files[i]);
        }
    }
    *m = (metrics){ NULL, NULL, NULL };
}

/* Strict JSON has no NaN. */
static json_t *number(double x)
{
    return isfinite(x) ? json_real(x) : json_null();
}

static tsr_status put(FILE *f, json_t *o, tsr_err *err)
{
    bool ok = o != NULL && json_dumpf(o, f, JSON_COMPACT) == 0 && fputc('\n', f) != EOF && fflush(f) == 0;
    json_decref(o);
    return ok ? TSR_OK : failed("metrics.jsonl", err);
}

tsr_status metrics_step(metrics *m, const tsr_train_line *l, const char *stage, double balance_mean,
                        tsr_err *err)
{
    char hex[40];
    (void)snprintf(hex, sizeof hex, "%a", l->loss);
    json_t *o = json_pack("{s:I, s:s, s:o, s:s, s:I, s:o, s:o, s:o, s:o, s:o}", "step", (json_int_t)l->step,
                          "stage", stage, "loss", number(l->loss), "loss_hex", hex, "tokens",
                          (json_int_t)l->tokens, "lr", number(l->lr), "grad_norm", number(l->grad_norm),
                          "tokens_per_s", number(l->tokens_per_s), "maxvio", number(l->maxvio), "maxvio_mean",
                          number(balance_mean));
    if (l->skipped && o != NULL) {
        (void)json_object_set_new(o, "skipped", json_true());
    }
    TSR_TRY(put(m->lines, o, err));
    const tf_value v[] = { { "train/loss", l->loss },           { "train/lr", l->lr },
                           { "train/grad_norm", l->grad_norm }, { "train/tokens_per_s", l->tokens_per_s },
                           { "balance/maxvio", l->maxvio },     { "balance/maxvio_mean", balance_mean } };
    if (m->events != NULL && !tf_scalars(m->events, wall(), l->step, v, sizeof v / sizeof *v)) {
        return failed("events", err);
    }
    return TSR_OK;
}

tsr_status metrics_eval(metrics *m, const tsr_train_eval *e, tsr_err *err)
{
    json_t *buckets = json_array();
    for (int32_t i = 0; i < e->buckets; i++) {
        (void)json_array_append_new(buckets,
                                    json_pack("{s:I, s:I, s:I, s:o}", "from", (json_int_t)e->edge[i], "to",
                                              (json_int_t)e->edge[i + 1], "tokens", (json_int_t)e->count[i],
                                              "loss", number(e->bucket_loss[i])));
    }
    json_t *o = json_pack("{s:I, s:s, s:o, s:I, s:o, s:o}", "step", (json_int_t)e->step, "stage", e->stage,
                          "eval_loss", number(e->loss), "eval_tokens", (json_int_t)e->tokens, "bits_per_byte",
                          number(e->bits_per_byte), "positions", buckets);
    TSR_TRY(put(m->lines, o, err));
    const tf_value v[] = { { "eval/loss", e->loss }, { "eval/bits_per_byte", e->bits_per_byte } };
    if (m->events != NULL && !tf_scalars(m->events, wall(), e->step, v, e->bits_per_byte >= 0 ? 2 : 1)) {
        return failed("events", err);
    }
    return TSR_OK;
}

tsr_status metrics_samples(metrics *m, int64_t step, const feed *f, int64_t in_stage, tsr_err *err)
{
    if (m->samples == NULL) {
        return TSR_OK;
    }
    json_t *list = json_array();
    for (int64_t i = 0; i < f->batch; i++) {
        tsr_place p = feed_place(f, in_stage, i);
        (void)json_array_append_new(list, json_pack("{s:s, s:I, s:I}", "source", f->r->source[p.source].name,
                                                    "epoch", (json_int_t)p.epoch, "sequence",
                                                    (json_int_t)p.sequence));
    }
    return put(m->samples, json_pack("{s:I, s:o}", "step", (json_int_t)step, "sequences", list), err);
}
