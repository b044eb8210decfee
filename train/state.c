/* state.c - see state.h. */
#include "train/state.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define TRAIN_JSON_BYTES_MAX ((size_t)64 << 20)
#define VERSION 1

/* ---- parameters from a checkpoint ----------------------------------------------------------------------------------- */

static tsr_status look_up(const ckpt_source *s, const char *name, tsr_tensor_info *t, uint32_t *item,
                          tsr_err *err)
{
    char master[300];
    (void)snprintf(master, sizeof master, "optim.master.%s", name);
    tsr_status st = tsr_ckpt_find(s->c, master, t, item, NULL);
    return st == TSR_E_MISSING ? tsr_ckpt_find(s->c, name, t, item, err) : st;
}

static tsr_status find(void *payload, const char *name, tsr_weight_info *out, tsr_err *err)
{
    const ckpt_source *s = payload;
    tsr_tensor_info t;
    uint32_t item;
    TSR_TRY(look_up(s, name, &t, &item, err));
    *out = (tsr_weight_info){
        .id = (int64_t)((uint64_t)t.id << 32 | item), .dtype = t.dtype, .rank = t.rank, .bytes = t.item_bytes
    };
    for (int i = 0; i < t.rank && i < 4; i++) {
        out->shape[i] = t.shape[i];
    }
    return TSR_OK;
}

static tsr_status read_item(void *payload, int64_t id, void *dst, size_t bytes, tsr_err *err)
{
    const ckpt_source *s = payload;
    tsr_tensor_info t;
    TSR_TRY(tsr_ckpt_tensor(s->c, (uint32_t)((uint64_t)id >> 32), &t, err));
    return tsr_ckpt_read(s->c, &t, (uint32_t)id, 0, dst, bytes, TSR_READ_CHECK, err);
}

void ckpt_source_open(ckpt_source *s, const tsr_ckpt *c)
{
    *s = (ckpt_source){ .c = c };
    s->source = (tsr_weight_source){ .payload = s, .find = find, .read = read_item };
}

/* ---- train.json ---------------------------------------------------------------------------------------------------------- */

tsr_status state_read_json(const tsr_ckpt *c, json_t **out, tsr_err *err)
{
    char *text;
    size_t bytes;
    json_error_t why;
    *out = NULL;
    if (tsr_ckpt_read_member(c, "train.json", TRAIN_JSON_BYTES_MAX, &text, &bytes, err) != TSR_OK) {
        TSR_FAIL(err, TSR_E_MISSING,
                 "%s: holds no training state (only weights: use --start, or tessera extend --recipe)",
                 tsr_ckpt_path(c));
    }
    *out = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &why);
    free(text);
    if (*out == NULL) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: train.json:%d: %s", tsr_ckpt_path(c), why.line, why.text);
    }
    json_int_t version = json_integer_value(json_object_get(*out, "version"));
    if (version != VERSION) {
        json_decref(*out);
        *out = NULL;
        TSR_FAIL(err, version > VERSION ? TSR_E_UNSUPPORTED : TSR_E_FORMAT,
                 "%s: train.json: version %lld (this program knows %d)", tsr_ckpt_path(c), (long long)version,
                 VERSION);
    }
    return TSR_OK;
}

tsr_status state_recipe_text(const json_t *root, char **out, tsr_err *err)
{
    const json_t *r = json_object_get(root, "recipe");
    *out = json_is_object(r) ? json_dumps(r, JSON_SORT_KEYS | JSON_REAL_PRECISION(17)) : NULL;
    if (*out == NULL) {
        TSR_FAIL(err, TSR_E_FORMAT, "train.json: recipe: missing");
    }
    return TSR_OK;
}

static tsr_status whole(const json_t *root, const char *key, int64_t *out, tsr_err *err)
{
    const json_t *v = json_object_get(root, key);
    *out = (int64_t)json_integer_value(v);
    if (!json_is_integer(v) || *out < 0) {
        TSR_FAIL(err, TSR_E_FORMAT, "train.json: %s: no number of 0 or more", key);
    }
    return TSR_OK;
}

tsr_status state_parse(const json_t *root, progress_state *out, tsr_err *err)
{
    const char *mean = json_string_value(json_object_get(root, "mean_loss_hex"));
    *out = (progress_state){ .mean_loss = mean != NULL ? strtod(mean, NULL) : NAN };
    TSR_TRY(whole(root, "step", &out->step, err));
    TSR_TRY(whole(root, "tokens", &out->tokens, err));
    TSR_TRY(whole(root, "skipped", &out->skipped, err));
    return whole(root, "skips_in_a_row", &out->skips_in_a_row, err);
}

tsr_status state_check_data(const json_t *root, const feed *f, tsr_err *err)
{
    const json_t *list = json_object_get(root, "data");
    for (int32_t i = 0; i < f->r->sources; i++) {
        const char *name = f->r->source[i].name, *was = NULL;
        char now[17];
        size_t at;
        const json_t *v;
        json_array_foreach(list, at, v)
        {
            const char *have = json_string_value(json_object_get(v, "name"));
            was = have != NULL && strcmp(have, name) == 0 ? json_string_value(json_object_get(v, "hash"))
                                                          : was;
        }
        (void)snprintf(now, sizeof now, "%016llx", (unsigned long long)tsr_data_hash(f->data[i]));
        if (was != NULL && strcmp(was, now) != 0) {
            TSR_FAIL(err, TSR_E_CONFLICT,
                     "data source %s: %s is not what the checkpoint was trained on (hash %s, was %s): "
                     "samples would repeat or "
                     "be lost; give it another name to begin with it anew",
                     name, f->r->source[i].path, now, was);
        }
    }
    return TSR_OK;
}

static json_t *data_json(const progress_state *p, const tsr_recipe *r, const feed *f)
{
    json_t *list = json_array();
    int64_t in_stage = 0;
    int32_t stage = tsr_recipe_stage_of(r, p->step, &in_stage);
    for (int32_t i = 0; i < r->sources; i++) {
        char hash[17];
        bool here = f->at == stage && f->count[i] > 0;
        int64_t used = here ? tsr_mix_used(&f->mix, in_stage * f->batch, i) : 0;
        (void)snprintf(hash, sizeof hash, "%016llx", (unsigned long long)tsr_data_hash(f->data[i]));
        json_t *o = json_pack("{s:s, s:s, s:I, s:I, s:I}", "name", r->source[i].name, "hash", hash,
                              "sequences", (json_int_t)used, "epoch",
                              (json_int_t)(here ? used / f->count[i] : 0), "position",
                              (json_int_t)(here ? used % f->count[i] : 0));
        if (o == NULL || json_array_append_new(list, o) != 0) {
            json_decref(list);
            return NULL;
        }
    }
    return list;
}

/* How often each parameter was updated, where it is not the number of steps. */
static json_t *updates_json(const optim *o, int64_t usual)
{
    json_t *out = json_object();
    for (int64_t i = 0; i < o->count; i++) {
        if (o->list[i].updates != usual) {
            (void)json_object_set_new(out, o->list[i].p->name, json_integer((json_int_t)o->list[i].updates));
        }
    }
    return out;
}

char *state_json(const progress_state *p, const tsr_recipe *r, const feed *f, const optim *o)
{
    char mean[40], *recipe = tsr_recipe_json(r), *out = NULL;
    int64_t in_stage, usual = p->step - p->skipped;
    int32_t stage = tsr_recipe_stage_of(r, p->step, &in_stage);
    json_t *tree = recipe != NULL ? json_loads(recipe, 0, NULL) : NULL, *data = data_json(p, r, f);
    json_t *updates = updates_json(o, usual), *root = NULL;
    (void)snprintf(mean, sizeof mean, "%a", p->mean_loss);
    if (tree != NULL && data != NULL && updates != NULL) {
        root = json_pack("{s:i, s:I, s:I, s:I, s:I, s:s, s:s, s:I, s:O, s:O, s:O, s:I}", "version", VERSION,
                         "step", (json_int_t)p->step, "tokens", (json_int_t)p->tokens, "skipped",
                         (json_int_t)p->skipped, "skips_in_a_row", (json_int_t)p->skips_in_a_row,
                         "mean_loss_hex", mean, "stage", r->stage[stage].name, "stage_step",
                         (json_int_t)in_stage, "data", data, "recipe", tree, "updates", updates,
                         "usual_updates", (json_int_t)usual);
    }
    out = root != NULL ? json_dumps(root, JSON_SORT_KEYS | JSON_INDENT(1) | JSON_REAL_PRECISION(17)) : NULL;
    json_decref(root);
    json_decref(tree);
    json_decref(data);
    json_decref(updates);
    free(recipe);
    return out;
}

/* ---- moments ------------------------------------------------------------------------------------------------------------- */

static tsr_status read_state(const tsr_ckpt *c, const optim *o, optim_param *q, int which,
                             uint32_t first_expert, tsr_err *err)
{
    char name[300];
    tsr_tensor_info t;
    uint32_t item, items = q->p->expert_count > 0 ? q->p->expert_count : 1;
    int64_t n = q->p->count / items;
    (void)snprintf(name, sizeof name, "optim.%s.%s", optim_state_name(q, which), q->p->name);
    TSR_TRY(tsr_ckpt_find(c, name, &t, &item, err));
    if (t.dtype != TSR_DT_F32 || t.item_bytes != (uint64_t)n * sizeof(float) ||
        (q->p->expert_count > 0 && first_expert + items > t.expert_count)) {
        TSR_FAIL(err, TSR_E_CONFLICT, "%s: has another size or dtype than its parameter", name);
    }
    float *host = malloc((size_t)n * sizeof *host);
    tsr_status st = host != NULL ? TSR_OK : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    for (uint32_t e = 0; st == TSR_OK && e < items; e++) {
        uint32_t from = q->p->expert_count > 0 ? first_expert + e : 0;
        st = tsr_ckpt_read(c, &t, from, 0, host, (size_t)t.item_bytes, TSR_READ_CHECK, err);
        if (st == TSR_OK && o->b->upload(o->b, optim_state_of(q, which) + (int64_t)e * n, host,
                                         (size_t)t.item_bytes) != TSR_OK) {
            st = TSR_ERR(err, TSR_E_IO, "%s: cannot copy to the device", o->b->name);
        }
    }
    free(host);
    return st;
}

tsr_status state_read_optim(const tsr_ckpt *c, const json_t *root, optim *o, uint32_t first_expert,
                            tsr_err *err)
{
    const json_t *updates = json_object_get(root, "updates");
    int64_t usual;
    TSR_TRY(whole(root, "usual_updates", &usual, err));
    for (int64_t i = 0; i < o->count; i++) {
        optim_param *q = &o->list[i];
        const json_t *v = json_object_get(updates, q->p->name);
        q->updates = json_is_integer(v) ? (int64_t)json_integer_value(v) : usual;
        for (int which = 0; q->mine && optim_state_name(q, which) != NULL; which++) {
            tsr_err why;
            tsr_status st = read_state(c, o, q, which, first_expert, &why);
            if (st == TSR_E_MISSING) { /* moments that were dropped: they start from zero */
                q->updates = 0;
                continue;
            }
            if (st != TSR_OK) {
                TSR_FAIL(err, st, "%s", why.msg);
            }
        }
    }
    return TSR_OK;
}
