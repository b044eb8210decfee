/* resume.c - where a run begins: its recipe, its weights, its state; see trainer.h. */
#include "train/init.h"
#include "train/trainer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The path that rank 0 found, to everybody; so that all go on from the same checkpoint. */
static tsr_status agree_on(trainer *t, tsr_err *err)
{
    tsr_dist *d = t->where.all;
    char path[4096] = "";
    struct {
        int32_t st;
        char msg[232];
    } told = { TSR_OK, "" };
    tsr_err why = { 0 };
    if (first_rank(t)) {
        told.st = find_checkpoint(t->o, &t->from, &why);
        (void)snprintf(told.msg, sizeof told.msg, "%s", told.st != TSR_OK ? why.msg : "");
        (void)snprintf(path, sizeof path, "%s", t->from != NULL ? t->from : "");
    }
    TSR_TRY(d->broadcast(d, &told, sizeof told, 0, err));
    if (told.st != TSR_OK) {
        TSR_FAIL(err, (tsr_status)told.st, "%s", told.msg);
    }
    TSR_TRY(d->broadcast(d, path, sizeof path, 0, err));
    if (t->from == NULL && path[0] != '\0') {
        t->from = strdup(path);
    }
    return TSR_OK;
}

/* Data may have moved: where it is says the command line, that it is the same says its hash. */
static tsr_status take_paths(tsr_recipe *own, const tsr_recipe *now, tsr_err *err)
{
    for (int32_t i = 0; i < own->sources; i++) {
        for (int32_t k = 0; k < now->sources; k++) {
            if (strcmp(own->source[i].name, now->source[k].name) == 0) {
                char *path = strdup(now->source[k].path);
                if (path == NULL) {
                    TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
                }
                free(own->source[i].path);
                own->source[i].path = path;
            }
        }
    }
    return TSR_OK;
}

static bool names_a_path(const char *line)
{
    const char *colon = strchr(line, ':');
    return strncmp(line, "data.sources.", 13) == 0 && colon != NULL && colon - line > 5 &&
           strncmp(colon - 5, ".path", 5) == 0;
}

/* Lines "key: a -> b" that no override asks for. */
static void warn_of_differences(const trainer *t, const char *was, tsr_err *err)
{
    char *ours = tsr_recipe_json(t->o->recipe), *diff = ours != NULL ? tsr_recipe_diff(was, ours) : NULL;
    char list[700] = "";
    int more = 0;
    (void)err;
    for (char *save = NULL, *line = diff != NULL ? strtok_r(diff, "\n", &save) : NULL; line != NULL;
         line = strtok_r(NULL, "\n", &save)) {
        bool asked = names_a_path(line);
        for (size_t i = 0; i < t->o->override_count; i++) {
            size_t n = strlen(t->o->overrides[i].key);
            asked = asked || (strncmp(line, t->o->overrides[i].key, n) == 0 && line[n] == ':');
        }
        size_t used = strlen(list);
        if (!asked && used + strlen(line) + 3 < sizeof list) {
            (void)snprintf(list + used, sizeof list - used, "%s%s", used > 0 ? "; " : "", line);
        } else {
            more += !asked;
        }
    }
    if (list[0] != '\0') {
        say(t, true,
            "the recipe is not what the run began with; the checkpoint's values are used (%s%s); --override "
            "KEY=VALUE changes "
            "them",
            list, more > 0 ? "; ..." : "");
    }
    free(ours);
    free(diff);
}

tsr_status resume_recipe(trainer *t, tsr_err *err)
{
    tsr_ckpt *c = NULL;
    json_t *root = NULL;
    char *text = NULL;
    t->r = t->o->recipe;
    t->p = (progress_state){ .mean_loss = NAN };
    TSR_TRY(agree_on(t, err));
    if (t->from == NULL) {
        return TSR_OK;
    }
    tsr_status st = tsr_ckpt_open(&c, t->from, err);
    st = st == TSR_OK ? state_read_json(c, &root, err) : st;
    st = st == TSR_OK ? state_parse(root, &t->p, err) : st;
    st = st == TSR_OK ? state_recipe_text(root, &text, err) : st;
    st = st == TSR_OK ? tsr_recipe_parse(&t->own, text, strlen(text), "train.json", t->o->overrides,
                                         t->o->override_count, err)
                      : st;
    st = st == TSR_OK ? take_paths(t->own, t->o->recipe, err) : st;
    if (st == TSR_OK) {
        t->r = t->own;
        if (first_rank(t)) {
            warn_of_differences(t, text, err);
        }
    }
    if (st == TSR_OK && t->p.step > tsr_recipe_steps(t->r)) {
        st = TSR_ERR(err, TSR_E_CONFLICT, "%s: is at step %lld, the recipe ends at %lld", t->from,
                     (long long)t->p.step, (long long)tsr_recipe_steps(t->r));
    }
    tsr_ckpt_close(&c);
    json_decref(root);
    free(text);
    return st;
}

/* ---- lineage ------------------------------------------------------------------------------------------------------------- */

static json_t *lineage_of(const tsr_ckpt *c)
{
    size_t bytes;
    const char *text = tsr_ckpt_manifest(c, &bytes);
    json_t *root = json_loadb(text, bytes, 0, NULL), *list = json_object_get(root, "lineage");
    list = json_is_array(list) ? json_deep_copy(list) : json_array();
    json_decref(root);
    return list;
}

static tsr_status write_lineage(trainer *t, const tsr_ckpt *c, const char *what, tsr_err *err)
{
    json_t *list = c != NULL ? lineage_of(c) : json_array();
    json_t *step = json_pack("{s:s, s:s, s:I, s:i}", "op", what, "tool", "tessera " TSR_VERSION, "step",
                             (json_int_t)t->p.step, "ranks", (int)t->where.all->ranks);
    if (t->from != NULL && step != NULL) {
        const char *slash = strrchr(t->from, '/');
        (void)json_object_set_new(step, "from", json_string(slash != NULL ? slash + 1 : t->from));
    }
    json_t *changed = t->o->override_count > 0 ? json_object() : NULL;
    for (size_t i = 0; changed != NULL && i < t->o->override_count; i++) {
        (void)json_object_set_new(changed, t->o->overrides[i].key, json_string(t->o->overrides[i].value));
    }
    if (changed != NULL && step != NULL) {
        (void)json_object_set_new(step, "override", changed);
    }
    t->saver.lineage = list;
    if (list == NULL || step == NULL || json_array_append_new(list, step) != 0) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    return TSR_OK;
}

/* ---- weights and state ------------------------------------------------------------------------------------------------------ */

static tsr_status open_model(trainer *t, const tsr_weight_source *src, tsr_err *err)
{
    const tsr_stage *s = &t->r->stage[t->feed.at];
    tsr_model_opts o = { .train = true,
                         .recompute = s->recompute,
                         .max_tokens = t->feed.model_tokens,
                         .max_segs = t->feed.max_segs,
                         .group = t->where.ep > 1 ? &t->where.group : NULL,
                         .line = t->where.cp > 1 ? &t->where.sequence : NULL };
    TSR_TRY(tsr_model_open(&t->m, t->r->spec, src, &o, t->b, NULL, err));
    return optim_open(&t->optim, t->m, t->r, t->where.all, t->where.copies, err);
}

static tsr_status from_nothing(trainer *t, tsr_err *err)
{
    tsr_weight_source src;
    tsr_status st = tsr_init_source(&src, t->r->spec, t->r->seed, t->r->init_std, err);
    st = st == TSR_OK ? open_model(t, &src, err) : st;
    st = st == TSR_OK ? write_lineage(t, NULL, "init", err) : st;
    tsr_init_source_done(&src);
    return st;
}

static tsr_status from_checkpoint(trainer *t, const char *path, bool with_state, tsr_err *err)
{
    tsr_ckpt *c;
    ckpt_source src;
    json_t *root = NULL;
    TSR_TRY(tsr_ckpt_open(&c, path, err));
    ckpt_source_open(&src, c);
    tsr_status st = open_model(t, &src.source, err);
    if (with_state) {
        st = st == TSR_OK ? state_read_json(c, &root, err) : st;
        st = st == TSR_OK ? state_check_data(root, &t->feed, err) : st;
        st = st == TSR_OK ? state_read_optim(c, root, &t->optim, t->where.first_expert, err) : st;
    }
    st = st == TSR_OK ? write_lineage(t, c, with_state ? "train" : "start", err) : st;
    json_decref(root);
    tsr_ckpt_close(&c);
    return st;
}

tsr_status resume_load(trainer *t, tsr_err *err)
{
    if (t->from != NULL) {
        return from_checkpoint(t, t->from, true, err);
    }
    return t->o->start != NULL ? from_checkpoint(t, t->o->start, false, err) : from_nothing(t, err);
}
