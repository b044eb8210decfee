/* extend.c - a checkpoint once more, for longer sequences: tsr_extend of train.h. Nothing is computed: tensors are carried, and what
 * says how training goes on is written anew. */
#include "train/extend.h"
#include "train/recipe_keys.h"
#include "train/state.h"
#include "train/train.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define ASSET_BYTES_MAX ((size_t)1 << 31)

static const char not_rotated[] =
    "positions are not rotated in this family (delta attention, and MLA without rotary positions), so "
    "nothing is rescaled";

typedef struct extension {
    const tsr_extend_opts *o;
    tsr_ckpt *src;
    json_t *manifest, *config;
    json_t *state; /* train.json; NULL: weights only */
    tsr_spec spec;
    progress_state p;
    tsr_recipe *was, *now;
    int32_t done; /* stages */
    /* tensors that are carried */
    tsr_tensor_decl *decls;
    uint32_t *ids; /* of src */
    uint32_t count;
    /* as src is cut */
    uint32_t dense_files, parts;
    tsr_partition *part;
    uint32_t *ranges;
    bool compress;
    /* what travels along */
    tsr_asset *assets;
    uint32_t asset_count;
    char *config_json, *train_json, *lineage_json;
    tsr_extend_report report;
} extension;

static bool starts(const char *text, const char *head)
{
    return strncmp(text, head, strlen(head)) == 0;
}

/* ---- what there is ------------------------------------------------------------------------------------------------- */

static tsr_status check_positions(const extension *x, tsr_err *err)
{
    static const char *const rotary[] = { "rope_theta", "rope_scaling", "rope_parameters" };
    const char *path = tsr_ckpt_path(x->src),
               *type = json_string_value(json_object_get(x->config, "model_type"));
    const json_t *text = json_object_get(x->config, "text_config");
    text = json_is_object(text) ? text : x->config;
    const char *why = json_is_false(json_object_get(text, "mla_use_nope")) ? "mla_use_nope is false" : NULL;
    bool known = type != NULL && (strcmp(type, "kimi_k3") == 0 || strcmp(type, "kimi_linear") == 0);
    for (size_t i = 0; !known && why == NULL && i < sizeof rotary / sizeof *rotary; i++) {
        const json_t *v = json_object_get(text, rotary[i]);
        why = v != NULL && !json_is_null(v) ? rotary[i] : NULL;
    }
    if (why != NULL) {
        TSR_FAIL(
            err, TSR_E_UNSUPPORTED,
            "%s: config.json: %s: positions are rotated, and the family names no rule that rescales them "
            "for longer contexts (only models without rotated positions can be extended)",
            path, why);
    }
    return TSR_OK;
}

static tsr_status read_config(extension *x, tsr_err *err)
{
    size_t bytes;
    const char *text = tsr_ckpt_manifest(x->src, &bytes);
    x->manifest = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, NULL);
    const json_t *config = json_object_get(x->manifest, "config");
    if (!json_is_object(config)) {
        TSR_FAIL(err, TSR_E_MISSING,
                 "%s: holds no config.json, so nothing says what its context is (convert the model again, "
                 "config.json beside it)",
                 tsr_ckpt_path(x->src));
    }
    x->config = json_deep_copy(config);
    TSR_TRY(check_positions(x, err));
    char *plain = json_dumps(x->config, JSON_REAL_PRECISION(17));
    tsr_status st = plain != NULL ? tsr_spec_parse(&x->spec, plain, strlen(plain), err)
                                  : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    free(plain);
    if (st != TSR_OK) {
        tsr_err_prefix(err, "%s", tsr_ckpt_path(x->src));
    }
    return st;
}

static bool has_member(const extension *x, const char *name)
{
    const json_t *v, *list = json_object_get(x->manifest, "members");
    size_t i;
    json_array_foreach(list, i, v)
    {
        const char *have = json_string_value(json_object_get(v, "name"));
        if (have != NULL && strcmp(have, name) == 0) {
            return true;
        }
    }
    return false;
}

static tsr_status read_state(extension *x, tsr_err *err)
{
    char *text = NULL;
    const char *path = tsr_ckpt_path(x->src);
    x->p = (progress_state){ .mean_loss = NAN };
    if (!has_member(x, "train.json")) {
        if (x->o->recipe == NULL) {
            TSR_FAIL(err, TSR_E_USAGE,
                     "%s: holds only weights, no training state (say what to train with --recipe)", path);
        }
        return TSR_OK;
    }
    tsr_status st = state_read_json(x->src, &x->state, err);
    if (st == TSR_OK) {
        st = state_parse(x->state, &x->p, err);
        st = st == TSR_OK ? state_recipe_text(x->state, &text, err) : st;
        st = st == TSR_OK ? tsr_recipe_parse(&x->was, text, strlen(text), "train.json", NULL, 0, err) : st;
        if (st != TSR_OK) {
            tsr_err_prefix(err, "%s", path);
        }
    }
    free(text);
    TSR_TRY(st);
    x->done = extend_stages_done(x->was, x->p.step);
    if (x->done < 0) {
        int64_t in_stage, left;
        const tsr_stage *s = &x->was->stage[tsr_recipe_stage_of(x->was, x->p.step, &in_stage)];
        left = s->steps - in_stage;
        TSR_FAIL(err, TSR_E_USAGE,
                 "%s: is at step %lld, in the middle of stage %s (extend where a stage ends: step %lld, or "
                 "train until then)",
                 path, (long long)x->p.step, s->name, (long long)(x->p.step + left));
    }
    if (x->done == 0 && x->o->recipe == NULL) {
        TSR_FAIL(err, TSR_E_USAGE,
                 "%s: no stage was trained yet that could be repeated (say what to train with --recipe)",
                 path);
    }
    return TSR_OK;
}

static tsr_status check_context(const extension *x, tsr_err *err)
{
    const char *path = tsr_ckpt_path(x->src);
    int64_t n = x->o->context;
    if (n <= x->spec.context) {
        TSR_FAIL(err, TSR_E_USAGE, "%s: promises a context of %lld tokens already: %lld is not longer", path,
                 (long long)x->spec.context, (long long)n);
    }
    if (x->done > 0 && n <= x->was->stage[x->done - 1].context) {
        TSR_FAIL(err, TSR_E_USAGE, "%s: was trained on sequences of %lld tokens: %lld is not longer", path,
                 (long long)x->was->stage[x->done - 1].context, (long long)n);
    }
    return TSR_OK;
}

/* A folder "step-N" is taken by its number when training goes on. */
static tsr_status check_name(const extension *x, const char *dst, tsr_err *err)
{
    size_t n = strlen(dst);
    while (n > 0 && dst[n - 1] == '/') {
        n--;
    }
    size_t from = n;
    while (from > 0 && dst[from - 1] != '/') {
        from--;
    }
    char name[64] = "", *end;
    if (n - from < sizeof name) {
        memcpy(name, dst + from, n - from);
    }
    if (!starts(name, "step-") || name[5] < '0' || name[5] > '9') {
        return TSR_OK;
    }
    long long step = strtoll(name + 5, &end, 10);
    if (*end == '\0' && step != x->p.step) {
        TSR_FAIL(err, TSR_E_USAGE,
                 "%s: is named after step %lld, but the checkpoint is at step %lld (name it "
                 "step-%08lld)",
                 dst, step, (long long)x->p.step, (long long)x->p.step);
    }
    return TSR_OK;
}

static void keep_first(void *payload, const tsr_finding *f)
{
    tsr_err *out = payload;
    if (out->msg[0] == '\0' && f->code != TSR_OK) {
        (void)TSR_ERR(out, f->code, "%s: %s: %s", f->file, f->item, f->what);
    }
}

/* Every byte, since linked shards bring along what lies between the tensors too. */
static tsr_status check_source(const extension *x, tsr_err *err)
{
    tsr_verify_report report;
    tsr_err why = { 0 };
    const char *path = tsr_ckpt_path(x->src);
    TSR_TRY(tsr_verify(path, TSR_VERIFY_FULL, 0, keep_first, &why, NULL, &report, err));
    if (report.worst != TSR_OK) {
        TSR_FAIL(err, report.worst == TSR_E_MISSING ? TSR_E_MISSING : TSR_E_FORMAT, "%s: %s", path, why.msg);
    }
    return TSR_OK;
}

/* ---- tensors --------------------------------------------------------------------------------------------------------- */

static tsr_status list_tensors(extension *x, tsr_err *err)
{
    uint32_t all = tsr_ckpt_tensor_count(x->src);
    int64_t *place = malloc(((size_t)all + 1) * sizeof *place);
    x->decls = calloc((size_t)all + 1, sizeof *x->decls);
    x->ids = malloc(((size_t)all + 1) * sizeof *x->ids);
    tsr_status st = place != NULL && x->decls != NULL && x->ids != NULL
                        ? TSR_OK
                        : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    for (uint32_t i = 0; st == TSR_OK && i < all; i++) {
        tsr_tensor_info t;
        st = tsr_ckpt_tensor(x->src, i, &t, err);
        if (st != TSR_OK) {
            break;
        }
        bool moment = starts(t.name, "optim.") && !starts(t.name, "optim.master.");
        place[i] = -1;
        if (moment &&
            (x->state == NULL || !x->o->keep_optimizer)) { /* without their count moments mean nothing */
            x->report.optim_dropped++;
            continue;
        }
        place[i] = x->count;
        x->compress = x->compress || t.filtered;
        x->report.optim_tensors += moment;
        x->decls[x->count] = tsr_tensor_decl_of(&t);
        x->ids[x->count++] = i;
    }
    for (uint32_t i = 0; st == TSR_OK && i < x->count; i++) {
        int64_t partner = x->decls[i].partner;
        x->decls[i].partner = partner >= 0 && partner < all ? place[partner] : -1;
    }
    x->report.tensors = x->count;
    free(place);
    return st;
}

/* Ranges of experts, partition by partition, so that the new shards hold what the old ones do. */
static void set_ranges(extension *x, const uint32_t *of, uint32_t experts)
{
    uint32_t *at = x->ranges;
    for (uint32_t p = 0; p < x->parts; p++) {
        x->part[p].ranges = at;
        for (uint32_t e = 0; e < experts; e++) {
            if (of[e] != p) {
                continue;
            }
            if (x->part[p].range_count > 0 && at[-1] + 1 == e) {
                at[-1] = e;
            } else {
                *at++ = e;
                *at++ = e;
                x->part[p].range_count++;
            }
        }
    }
}

static tsr_status read_partition(extension *x, uint32_t *of, uint32_t experts, tsr_err *err)
{
    for (uint32_t i = 0; i < tsr_ckpt_file_count(x->src); i++) {
        tsr_file_info f;
        uint32_t *ids = NULL, count = 0;
        TSR_TRY(tsr_ckpt_file(x->src, i, &f, err));
        x->dense_files += f.klass == TSR_CLASS_DENSE;
        if (f.klass != TSR_CLASS_EXPERTS) {
            continue;
        }
        x->parts = f.of > x->parts ? f.of : x->parts;
        TSR_TRY(tsr_ckpt_file_experts(x->src, i, &ids, &count, err));
        for (uint32_t k = 0; k < count; k++) {
            of[ids[k]] = ids[k] < experts ? f.partition : of[ids[k]];
        }
        free(ids);
    }
    x->part = calloc((size_t)x->parts + 1, sizeof *x->part);
    x->ranges = calloc(2 * (size_t)experts + 2, sizeof *x->ranges);
    if (x->part == NULL || x->ranges == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    set_ranges(x, of, experts);
    return TSR_OK;
}

static tsr_status read_cut(extension *x, tsr_err *err)
{
    uint32_t experts = tsr_ckpt_expert_count(x->src);
    uint32_t *of = calloc((size_t)experts + 1, sizeof *of);
    tsr_status st = of != NULL ? read_partition(x, of, experts, err)
                               : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    free(of);
    return st;
}

static tsr_status fill(void *payload, const tsr_slot *slot, void *dst, tsr_err *err)
{
    const extension *x = payload;
    tsr_tensor_info t;
    TSR_TRY(tsr_ckpt_tensor(x->src, x->ids[slot->tensor], &t, err));
    return tsr_ckpt_read(x->src, &t, slot->item, slot->off, dst, (size_t)slot->bytes, TSR_READ_CHECK, err);
}

/* ---- what travels along ------------------------------------------------------------------------------------------------ */

/* The source's config.json with its spelling and order kept, or the manifest's when it has none. */
static tsr_status raise_config(extension *x, const char *text, size_t bytes, tsr_asset *out, tsr_err *err)
{
    json_t *config = text != NULL ? json_loadb(text, bytes, 0, NULL) : json_incref(x->config);
    if (!json_is_object(config)) {
        json_decref(config);
        TSR_FAIL(err, TSR_E_FORMAT, "%s: assets/config.json: is not a JSON object", tsr_ckpt_path(x->src));
    }
    extend_set_context(config, x->o->context);
    char *now = json_dumps(config, JSON_INDENT(2) | JSON_REAL_PRECISION(17));
    json_decref(config);
    if (now == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    *out = (tsr_asset){ .name = "config.json", .data = now, .bytes = strlen(now) };
    return TSR_OK;
}

static tsr_status take_assets(extension *x, tsr_err *err)
{
    const json_t *v, *list = json_object_get(x->manifest, "members");
    size_t i;
    x->assets = calloc(json_array_size(list) + 2, sizeof *x->assets);
    if (x->assets == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    json_array_foreach(list, i, v)
    {
        const char *name = json_string_value(json_object_get(v, "name"));
        char *text = NULL;
        size_t bytes = 0;
        if (name == NULL || !starts(name, "assets/") || strcmp(name, "assets/config.json") == 0) {
            continue;
        }
        TSR_TRY(tsr_ckpt_read_member(x->src, name, ASSET_BYTES_MAX, &text, &bytes, err));
        x->assets[x->asset_count++] = (tsr_asset){ .name = name + 7, .data = text, .bytes = bytes };
    }
    char *text = NULL;
    size_t bytes = 0;
    TSR_TRY(has_member(x, "assets/config.json")
                ? tsr_ckpt_read_member(x->src, "assets/config.json", ASSET_BYTES_MAX, &text, &bytes, err)
                : TSR_OK);
    tsr_status st = raise_config(x, text, bytes, &x->assets[x->asset_count], err);
    free(text);
    x->asset_count += st == TSR_OK;
    return st;
}

/* Sources that the recipe still has, at the beginning of a stage. */
static json_t *data_list(const extension *x)
{
    json_t *out = json_array(), *v, *old = json_object_get(x->state, "data");
    size_t i;
    json_array_foreach(old, i, v)
    {
        const char *name = json_string_value(json_object_get(v, "name"));
        bool there = false;
        for (int32_t k = 0; name != NULL && k < x->now->sources; k++) {
            there = there || strcmp(x->now->source[k].name, name) == 0;
        }
        if (there) {
            json_t *one = json_deep_copy(v);
            (void)json_object_set_new(one, "sequences", json_integer(0));
            (void)json_object_set_new(one, "epoch", json_integer(0));
            (void)json_object_set_new(one, "position", json_integer(0));
            (void)json_array_append_new(out, one);
        }
    }
    return out;
}

static tsr_status write_state(extension *x, tsr_err *err)
{
    char *recipe = tsr_recipe_json(x->now);
    json_t *root = x->state != NULL
                       ? json_deep_copy(x->state)
                       : json_pack("{s:i, s:i, s:i, s:i, s:i, s:s}", "version", 1, "step", 0, "tokens", 0,
                                   "skipped", 0, "skips_in_a_row", 0, "mean_loss_hex", "nan");
    (void)json_object_set_new(root, "recipe", recipe != NULL ? json_loads(recipe, 0, NULL) : NULL);
    (void)json_object_set_new(root, "stage", json_string(x->now->stage[x->done].name));
    (void)json_object_set_new(root, "stage_step", json_integer(0));
    (void)json_object_set_new(root, "data", data_list(x));
    if (x->state == NULL || !x->o->keep_optimizer) {
        (void)json_object_set_new(root, "updates", json_object());
        (void)json_object_set_new(root, "usual_updates", json_integer(0));
    }
    x->train_json = json_dumps(root, JSON_SORT_KEYS | JSON_INDENT(1) | JSON_REAL_PRECISION(17));
    json_decref(root);
    free(recipe);
    return x->train_json != NULL ? TSR_OK : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
}

static tsr_status write_lineage(extension *x, tsr_err *err)
{
    const char *path = tsr_ckpt_path(x->src), *slash = strrchr(path, '/');
    const json_t *old = json_object_get(x->manifest, "lineage");
    json_t *list = json_is_array(old) ? json_deep_copy(old) : json_array();
    json_t *step = json_pack(
        "{s:s, s:s, s:I, s:I, s:I, s:s, s:s, s:b}", "op", "extend", "tool", "tessera " TSR_VERSION, "context",
        (json_int_t)x->o->context, "context_before", (json_int_t)x->spec.context, "step",
        (json_int_t)x->p.step, "from", slash != NULL && slash[1] != '\0' ? slash + 1 : path, "optimizer",
        x->o->keep_optimizer && x->state != NULL ? "carried" : "dropped", "recipe", x->o->recipe != NULL);
    const char *parent = json_string_value(json_object_get(x->manifest, "uuid"));
    if (step != NULL && parent != NULL) {
        (void)json_object_set_new(step, "parent", json_string(parent));
    }
    bool ok = list != NULL && step != NULL && json_array_append_new(list, step) == 0;
    x->lineage_json = ok ? json_dumps(list, JSON_SORT_KEYS | JSON_REAL_PRECISION(17)) : NULL;
    json_decref(list);
    return x->lineage_json != NULL ? TSR_OK : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
}

/* ---- the whole --------------------------------------------------------------------------------------------------------- */

static tsr_status decide(extension *x, const char *dst, tsr_err *err)
{
    TSR_TRY(read_config(x, err));
    TSR_TRY(read_state(x, err));
    TSR_TRY(check_context(x, err));
    TSR_TRY(check_name(x, dst, err));
    TSR_TRY(x->o->recipe != NULL ? extend_check_shape(x->o->recipe, &x->spec, tsr_ckpt_path(x->src), err)
                                 : TSR_OK);
    return extend_recipe(&x->now, x->was, x->done, x->o->recipe, x->o->context, err);
}

static tsr_status gather(extension *x, tsr_err *err)
{
    TSR_TRY(check_source(x, err));
    TSR_TRY(list_tensors(x, err));
    TSR_TRY(read_cut(x, err));
    TSR_TRY(take_assets(x, err));
    extend_set_context(x->config, x->o->context);
    x->config_json = json_dumps(x->config, JSON_REAL_PRECISION(17));
    if (x->config_json == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    TSR_TRY(write_state(x, err));
    return write_lineage(x, err);
}

static tsr_status save(extension *x, const char *dst, tsr_err *err)
{
    struct stat sb;
    tsr_save_job *job;
    tsr_save_stats stats;
    bool folder = stat(tsr_ckpt_path(x->src), &sb) == 0 && S_ISDIR(sb.st_mode);
    tsr_save_opts o = { .expert_partitions = x->parts,
                        .dense_files = x->dense_files,
                        .partitions = x->parts > 0 ? x->part : NULL,
                        .allow_uneven = true,
                        .compress = x->compress,
                        .parent = folder ? tsr_ckpt_path(x->src) : NULL,
                        .arch = json_string_value(json_object_get(x->manifest, "arch")),
                        .config_json = x->config_json,
                        .train_json = x->train_json,
                        .lineage_json = x->lineage_json,
                        .assets = x->assets,
                        .asset_count = x->asset_count,
                        .progress = x->o->progress };
    TSR_TRY(tsr_save_start(&job, dst, x->decls, x->count, fill, x, &o, err));
    TSR_TRY(tsr_save_wait(&job, &stats, err));
    x->report.linked_files = (uint32_t)stats.linked_files;
    return TSR_OK;
}

static tsr_status report(extension *x, const char *dst, tsr_err *err)
{
    tsr_ckpt *made;
    tsr_extend_report *r = &x->report;
    TSR_TRY(tsr_ckpt_open(&made, dst, err));
    r->files = tsr_ckpt_file_count(made);
    tsr_ckpt_close(&made);
    r->step = x->p.step;
    r->context_before = x->spec.context;
    r->context = x->o->context;
    r->stages_done = x->done;
    r->stages_replaced = x->was != NULL ? x->was->stages - x->done : 0;
    r->stages_added = x->now->stages - x->done;
    r->positions = not_rotated;
    memcpy(r->next_stage, x->now->stage[x->done].name, sizeof r->next_stage);
    if (x->o->report != NULL) {
        *x->o->report = *r;
    }
    return TSR_OK;
}

static void release(extension *x)
{
    for (uint32_t i = 0; i < x->asset_count; i++) {
        free((void *)(uintptr_t)x->assets[i].data);
    }
    json_t *const trees[] = { x->manifest, x->config, x->state };
    for (size_t i = 0; i < sizeof trees / sizeof *trees; i++) {
        json_decref(trees[i]);
    }
    void *const blocks[] = { x->decls,  x->ids,         x->part,       x->ranges,
                             x->assets, x->config_json, x->train_json, x->lineage_json };
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) {
        free(blocks[i]);
    }
    tsr_recipe_free(&x->was);
    tsr_recipe_free(&x->now);
    tsr_ckpt_close(&x->src);
    free(x);
}

tsr_status tsr_extend(const char *src, const char *dst, const tsr_extend_opts *o, tsr_err *err)
{
    struct stat sb;
    extension *x = calloc(1, sizeof *x);
    if (x == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    x->o = o;
    tsr_status st = tsr_ckpt_open_any(&x->src, src, NULL, err);
    if (st == TSR_OK && lstat(dst, &sb) == 0 && !S_ISDIR(sb.st_mode)) {
        st = TSR_ERR(err, TSR_E_CONFLICT, "%s: exists already (take another name)", dst);
    }
    st = st == TSR_OK ? decide(x, dst, err) : st;
    st = st == TSR_OK ? gather(x, err) : st;
    st = st == TSR_OK ? save(x, dst, err) : st;
    st = st == TSR_OK ? report(x, dst, err) : st;
    release(x);
    return st;
}
