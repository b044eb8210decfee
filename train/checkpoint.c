/* checkpoint.c - see checkpoint.h. Rank 0 writes; it asks the others for what only they hold. */
#include "train/checkpoint.h"
#include "format/io.h"
#include "kernels/numeric.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- what is written ------------------------------------------------------------------------------------------------- */

static void add(saver *s, const tsr_param *p, const char *what, const float *data, bool bf16, int32_t owner)
{
    uint32_t i = s->count++, all = p->expert_count > 0 ? (uint32_t)s->r->spec->experts : 0;
    save_entry *e = &s->entry[i];
    bool state = what != NULL;
    *e = (save_entry){ .data = data,
                       .count = p->count / (p->expert_count > 0 ? p->expert_count : 1),
                       .experts = all,
                       .state = state && owner >= 0,
                       .bf16 = bf16,
                       .owner = owner };
    (void)snprintf(e->name, sizeof e->name, "%s%s%s%s", state ? "optim." : "", state ? what : "",
                   state ? "." : "", p->name);
    s->decl[i] = (tsr_tensor_decl){ .name = e->name,
                                    .dtype = bf16 ? TSR_DT_BF16 : TSR_DT_F32,
                                    .src_dtype = bf16 ? TSR_DT_BF16 : TSR_DT_F32,
                                    .rank = p->rank,
                                    .shape = p->shape,
                                    .klass = (all > 0 ? TSR_CLASS_EXPERTS : TSR_CLASS_DENSE) +
                                             (state ? TSR_CLASS_OPTIM_DENSE : 0),
                                    .layer = p->layer,
                                    .expert_count = all,
                                    .partner = -1 };
}

tsr_status saver_open(saver *s, tsr_err *err)
{
    size_t most = (size_t)tsr_model_param_count(s->m) * 4;
    s->entry = calloc(most, sizeof *s->entry);
    s->decl = calloc(most, sizeof *s->decl);
    if (s->entry == NULL || s->decl == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    for (int64_t i = 0; i < tsr_model_param_count(s->m); i++) {
        const tsr_param *p = tsr_model_param(s->m, i);
        bool half = s->r->checkpoint.dtype == TSR_DT_BF16 && p->rank == 2 && p->shape[0] > 1;
        add(s, p, NULL, p->data, half, -1);
    }
    for (int64_t i = 0; s->r->checkpoint.dtype == TSR_DT_BF16 && i < tsr_model_param_count(s->m); i++) {
        const tsr_param *p = tsr_model_param(s->m, i);
        if (p->rank == 2 && p->shape[0] > 1) {
            add(s, p, "master", p->data, false, -1);
        }
    }
    for (int64_t i = 0; i < s->o->count; i++) {
        const optim_param *q = &s->o->list[i];
        for (int k = 0; optim_state_name(q, k) != NULL; k++) {
            add(s, q->p, optim_state_name(q, k), optim_state_of(q, k), false, q->owner);
        }
    }
    return TSR_OK;
}

/* ---- bytes, here or elsewhere ------------------------------------------------------------------------------------------- */

typedef struct request {
    uint64_t entry, item, off, bytes; /* item: of that rank's own experts; bytes 0: nothing more */
} request;

static int32_t holder(const layout *w, const save_entry *e, uint32_t item)
{
    int32_t part = e->experts > 0 ? (int32_t)(item / w->local_experts) : 0;
    if (!e->state) {
        return part;
    }
    return e->experts > 0 ? e->owner * w->ep + part : e->owner;
}

/* Bytes [off, off + bytes) of an item that this rank holds. */
static tsr_status own_bytes(const saver *s, const save_entry *e, const request *q, void *dst, tsr_err *err)
{
    tsr_backend *b = s->o->b;
    const float *at = e->data + (int64_t)q->item * e->count;
    if (!e->bf16) {
        return b->download(b, dst, (const char *)at + q->off, (size_t)q->bytes) == TSR_OK
                   ? TSR_OK
                   : TSR_ERR(err, TSR_E_IO, "%s: cannot read %s", b->name, e->name);
    }
    float part[4096];
    for (uint64_t done = 0; done < q->bytes / 2;) {
        uint64_t n = q->bytes / 2 - done < 4096 ? q->bytes / 2 - done : 4096, to_inf;
        if (b->download(b, part, at + q->off / 2 + done, (size_t)n * sizeof *part) != TSR_OK) {
            TSR_FAIL(err, TSR_E_IO, "%s: cannot read %s", b->name, e->name);
        }
        tsr_from_f32(TSR_DT_BF16, part, n, (uint16_t *)dst + done, &to_inf);
        done += n;
    }
    return TSR_OK;
}

static tsr_status fill(void *payload, const tsr_slot *slot, void *dst, tsr_err *err)
{
    saver *s = payload;
    const save_entry *e = &s->entry[slot->tensor];
    const layout *w = s->where;
    int32_t from = holder(w, e, slot->item);
    request q = { slot->tensor, e->experts > 0 ? slot->item % w->local_experts : 0, slot->off, slot->bytes };
    if (from == 0) {
        return own_bytes(s, e, &q, dst, err);
    }
    TSR_TRY(w->all->send(w->all, &q, sizeof q, from, err));
    return w->all->receive(w->all, dst, (size_t)q.bytes, from, err);
}

/* What other ranks do while rank 0 copies. */
static tsr_status serve(saver *s, tsr_err *err)
{
    tsr_dist *d = s->where->all;
    void *room = NULL;
    size_t have = 0;
    tsr_status st = TSR_OK;
    while (st == TSR_OK) {
        request q;
        st = d->receive(d, &q, sizeof q, 0, err);
        if (st != TSR_OK || q.bytes == 0) {
            break;
        }
        if (q.bytes > have) {
            free(room);
            room = malloc((size_t)q.bytes);
            have = room != NULL ? (size_t)q.bytes : 0;
        }
        st = room == NULL ? TSR_ERR(err, TSR_E_LIMIT, "out of memory: %llu bytes of a checkpoint",
                                    (unsigned long long)q.bytes)
                          : own_bytes(s, &s->entry[q.entry], &q, room, err);
        st = st == TSR_OK ? d->send(d, room, (size_t)q.bytes, 0, err) : st;
    }
    free(room);
    return st;
}

static tsr_status dismiss(const saver *s, tsr_err *err)
{
    tsr_dist *d = s->where->all;
    for (int32_t i = 1; i < d->ranks; i++) {
        TSR_TRY(d->send(d, &(request){ 0 }, sizeof(request), i, err));
    }
    return TSR_OK;
}

/* ---- one save -------------------------------------------------------------------------------------------------------------- */

static void name_of(char *out, size_t bytes, const char *run, int64_t step)
{
    (void)snprintf(out, bytes, "%s/step-%08lld", run, (long long)step);
}

static void *finish(void *payload)
{
    saver *s = payload;
    char name[32];
    s->st = tsr_save_wait(&s->job, NULL, &s->err);
    (void)snprintf(name, sizeof name, "step-%08lld", (long long)s->step);
    if (s->st == TSR_OK) {
        s->st = tsr_run_set_latest(s->run, name, &s->err);
    }
    tsr_retention keep = { .keep_last = s->r->checkpoint.keep_last,
                           .keep_every = s->r->checkpoint.keep_every };
    if (s->st == TSR_OK) {
        s->st = tsr_run_retain(s->run, &keep, NULL, &s->err);
    }
    if (s->asset_path != NULL) {
        (void)unlink(s->asset_path);
        free(s->asset_path);
        s->asset_path = NULL;
    }
    return NULL;
}

#define ASSETS_MAX 32

/* Files that travel along: the tokenizer's, once though several sources have it, config.json, and the routing. */
static uint32_t list_assets(saver *s, tsr_asset *out, char paths[ASSETS_MAX][4096], const char *routing)
{
    uint32_t n = 0;
    out[n++] = (tsr_asset){ .name = "config.json",
                            .data = s->r->config_json,
                            .bytes = strlen(s->r->config_json) };
    const tsr_data *d = s->f->data[0];
    for (size_t i = 0; n < ASSETS_MAX - 1 && tsr_data_tokenizer_file(d, i) != NULL; i++) {
        const char *name = tsr_data_tokenizer_file(d, i);
        (void)snprintf(paths[n], sizeof paths[n], "%s/tokenizer/%s", tsr_data_path(d), name);
        out[n] = (tsr_asset){ .name = name, .path = paths[n] };
        n++;
    }
    if (routing != NULL) {
        out[n++] = (tsr_asset){ .name = "routing.h5", .path = routing };
    }
    return n;
}

static tsr_status begin(saver *s, const progress_state *p, const char *routing, tsr_err *err)
{
    char path[4096], (*paths)[4096] = calloc(ASSETS_MAX, sizeof *paths);
    char *train = state_json(p, s->r, s->f, s->o);
    char *lineage = json_dumps(s->lineage, JSON_SORT_KEYS | JSON_REAL_PRECISION(17));
    tsr_asset assets[ASSETS_MAX];
    name_of(path, sizeof path, s->run, p->step);
    if (paths == NULL || train == NULL || lineage == NULL) {
        free(paths);
        free(train);
        free(lineage);
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    tsr_save_opts o = { .expert_partitions = s->r->checkpoint.experts > 0 ? s->r->checkpoint.experts
                                                                          : (uint32_t)s->where->ep,
                        .dense_files = s->r->checkpoint.files,
                        .allow_uneven = true,
                        .compress = s->r->checkpoint.compress,
                        .threads = s->where->all->ranks > 1 ? 1 : 0,
                        .mem_limit = s->mem_limit,
                        .arch = tsr_arch_name(s->r->spec->arch),
                        .config_json = s->r->config_json,
                        .train_json = train,
                        .lineage_json = lineage,
                        .assets = assets };
    o.asset_count = list_assets(s, assets, paths, routing);
    tsr_status st = tsr_save_start(&s->job, path, s->decl, s->count, fill, s, &o, err);
    free(paths);
    free(train);
    free(lineage);
    return st;
}

tsr_status saver_start(saver *s, const progress_state *p, const char *routing, tsr_err *err)
{
    tsr_dist *d = s->where->all;
    if (d->rank != 0) {
        TSR_TRY(serve(s, err));
    } else {
        TSR_TRY(saver_wait(s, err));
        tsr_status st = begin(s, p, routing, err);
        TSR_TRY(dismiss(s, st == TSR_OK ? err : NULL));
        if (st == TSR_OK) {
            s->step = p->step;
            s->asset_path = routing != NULL ? strdup(routing) : NULL;
            s->running = pthread_create(&s->thread, NULL, finish, s) == 0;
            if (!s->running) {
                (void)finish(s);
                st = s->st;
            }
        }
        TSR_TRY(st);
    }
    return TSR_OK;
}

tsr_status saver_wait(saver *s, tsr_err *err)
{
    if (!s->running) {
        return TSR_OK;
    }
    s->running = false;
    (void)pthread_join(s->thread, NULL);
    if (s->st != TSR_OK) {
        TSR_FAIL(err, s->st, "%s", s->err.msg);
    }
    return TSR_OK;
}

void saver_close(saver *s)
{
    (void)saver_wait(s, NULL);
    free(s->entry);
    free(s->decl);
    json_decref(s->lineage);
    *s = (saver){ .count = 0 };
}

/* ---- where to go on ------------------------------------------------------------------------------------------------------------ */

static void note(const tsr_train_opts *o, bool warning, const char *text)
{
    if (o->hooks.note != NULL) {
        o->hooks.note(o->hooks.payload, warning, text);
    }
}

typedef struct first_finding {
    char text[300];
} first_finding;

static void keep_first(void *payload, const tsr_finding *f)
{
    first_finding *out = payload;
    if (out->text[0] == '\0' && f->code != TSR_OK) {
        (void)snprintf(out->text, sizeof out->text, "%s: %s: %s", f->file, f->item, f->what);
    }
}

static tsr_status asked_for(const tsr_train_opts *o, char **out, tsr_err *err)
{
    char path[4096], plain[4096];
    tsr_verify_report report;
    first_finding why = { "" };
    name_of(path, sizeof path, o->run, o->resume_step);
    (void)snprintf(plain, sizeof plain, "%s/step-%lld", o->run, (long long)o->resume_step);
    const char *use = access(path, F_OK) != 0 && access(plain, F_OK) == 0 ? plain : path;
    if (access(use, F_OK) != 0) {
        TSR_FAIL(err, TSR_E_MISSING, "%s: the run has no such checkpoint", use);
    }
    tsr_ckpt *c;
    TSR_TRY(tsr_ckpt_open(&c, use, err));
    tsr_ckpt_close(&c);
    TSR_TRY(tsr_verify(use, TSR_VERIFY_FULL, 0, keep_first, &why, NULL, &report, err));
    if (report.worst != TSR_OK) {
        TSR_FAIL(err, report.worst == TSR_E_MISSING ? TSR_E_MISSING : TSR_E_FORMAT, "%s: %s", use, why.text);
    }
    *out = strdup(use);
    return *out != NULL ? TSR_OK : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
}

tsr_status find_checkpoint(const tsr_train_opts *o, char **out, tsr_err *err)
{
    char *why = NULL;
    *out = NULL;
    if (o->resume == TSR_RESUME_STEP) {
        return asked_for(o, out, err);
    }
    if (!tsr_run_probe(o->run)) {
        return TSR_OK;
    }
    if (o->resume == TSR_RESUME_NONE) {
        TSR_FAIL(err, TSR_E_CONFLICT,
                 "%s: has checkpoints already (--resume auto goes on from them, or take another --out)",
                 o->run);
    }
    tsr_status st = tsr_run_latest(o->run, TSR_VERIFY_FULL, out, &why, err);
    if (st == TSR_OK && why != NULL) {
        note(o, true, why);
    }
    free(why);
    return st;
}

static bool ends_with(const char *name, const char *end)
{
    size_t n = strlen(name), m = strlen(end);
    return n >= m && strcmp(name + n - m, end) == 0;
}

/* What a killed run left: windows of its routing, a `latest` not yet in place, checkpoints that were being removed. */
static bool left_over(const char *name)
{
    return strncmp(name, ".routing-window.h5", 18) == 0 || strncmp(name, ".latest.tmp-", 12) == 0 ||
           (strncmp(name, ".step-", 6) == 0 && ends_with(name, ".removed"));
}

/* A damaged newest checkpoint was warned of already. */
static tsr_status supersede(const tsr_train_opts *o, const char *name, tsr_err *err)
{
    char from[4096], to[4096], text[512];
    (void)snprintf(from, sizeof from, "%s/%s", o->run, name);
    (void)snprintf(to, sizeof to, "%s/superseded.%s.%lld", o->run, name, (long long)getpid());
    if (rename(from, to) != 0) {
        TSR_FAIL(err, TSR_E_IO, "%s: cannot be renamed: %s", from, strerror(errno));
    }
    (void)snprintf(text, sizeof text, "%s lies behind the step that training goes on from: renamed to %s",
                   name, strrchr(to, '/') + 1);
    note(o, o->resume == TSR_RESUME_STEP, text);
    return TSR_OK;
}

tsr_status set_aside(const tsr_train_opts *o, int64_t step, tsr_err *err)
{
    DIR *dir = opendir(o->run);
    if (dir == NULL) {
        TSR_FAIL(err, TSR_E_IO, "%s: cannot be read: %s", o->run, strerror(errno));
    }
    tsr_status st = TSR_OK;
    const struct dirent *e;
    while (st == TSR_OK && (e = readdir(dir)) != NULL) {
        char path[4096], *end;
        if (left_over(e->d_name)) {
            (void)snprintf(path, sizeof path, "%s/%s", o->run, e->d_name);
            TSR_IGNORE(tsr_fs_remove_tree(path, NULL)); /* tidying must not stop a run */
        }
        if (strncmp(e->d_name, "step-", 5) != 0) {
            continue;
        }
        long long at = strtoll(e->d_name + 5, &end, 10);
        st = *end == '\0' && at > step ? supersede(o, e->d_name, err) : TSR_OK;
    }
    (void)closedir(dir);
    return st;
}
