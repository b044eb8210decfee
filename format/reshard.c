/* reshard.c - another partitioning of the same checkpoint: stored bytes are moved, never decoded, and whole shards
 * are hard-linked where the new partitions are unions of old files. */
#include "format/reader.h"
#include "format/save.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct reshard {
    const tsr_ckpt *src;
    const tsr_reshard_opts *o;
    tsr_save_opts save;
    tsr_tensor_decl *decls;
    bool *filtered;
    uint32_t count;
    uint32_t *file_of;  /* plain tensors: the source file */
    uint32_t **experts; /* per source file */
    uint32_t *expert_counts;
    json_t *root; /* manifest */
    char *lineage, *config;
    tsr_asset *assets;
    uint32_t asset_count;
    char *train;
    bool links; /* the source is a folder: its files can be linked */
} reshard;

/* ---- what the source holds ----------------------------------------------------------------------------------- */

static tsr_status read_decls(reshard *r, tsr_err *err)
{
    r->count = tsr_ckpt_tensor_count(r->src);
    uint32_t files = tsr_ckpt_file_count(r->src);
    r->decls = calloc((size_t)r->count + 1, sizeof *r->decls);
    r->filtered = calloc((size_t)r->count + 1, sizeof *r->filtered);
    r->file_of = malloc(((size_t)r->count + 1) * sizeof *r->file_of);
    r->experts = calloc((size_t)files + 1, sizeof *r->experts);
    r->expert_counts = calloc((size_t)files + 1, sizeof *r->expert_counts);
    if (r->decls == NULL || r->filtered == NULL || r->file_of == NULL || r->experts == NULL ||
        r->expert_counts == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    for (uint32_t i = 0; i < r->count; i++) {
        tsr_tensor_info t;
        TSR_TRY(tsr_ckpt_tensor(r->src, i, &t, err));
        r->decls[i] = tsr_tensor_decl_of(&t);
        r->filtered[i] = t.filtered;
        r->file_of[i] = UINT32_MAX;
        if (t.expert_count == 0 && t.chunks > 0) {
            tsr_extent_info x;
            TSR_TRY(tsr_ckpt_extent(r->src, &t, 0, 0, &x, err));
            r->file_of[i] = x.file;
        }
    }
    for (uint32_t f = 0; f < files; f++) {
        TSR_TRY(tsr_ckpt_file_experts(r->src, f, &r->experts[f], &r->expert_counts[f], err));
    }
    return TSR_OK;
}

/* ---- which files the result has -------------------------------------------------------------------------------- */

static tsr_status link_piece(reshard *r, save_plan *p, tsr_class k, uint32_t part, uint32_t of,
                             uint32_t piece, uint32_t pieces, uint32_t from, tsr_err *err)
{
    TSR_TRY(save_plan_add_file(p, k, part, of, piece, pieces, r->experts[from], r->expert_counts[from], err));
    p->files[p->file_count - 1].link_from = from;
    return TSR_OK;
}

/* Dense classes: files stay as they are unless another number is asked for. */
static tsr_status plan_dense(reshard *r, save_plan *p, tsr_class k, tsr_err *err)
{
    uint32_t files = tsr_ckpt_file_count(r->src), have = 0;
    tsr_file_info f;
    for (uint32_t i = 0; i < files; i++) {
        TSR_TRY(tsr_ckpt_file(r->src, i, &f, err));
        have += f.klass == k;
    }
    if (have == 0) {
        return TSR_OK;
    }
    if (!r->links || (r->o->dense_files != 0 && r->o->dense_files != have)) {
        tsr_save_opts o = r->save;
        o.dense_files = r->o->dense_files != 0 ? r->o->dense_files : have;
        return save_plan_add_class(p, k, 0, &o, err);
    }
    uint32_t first_new = UINT32_MAX;
    for (uint32_t i = 0; i < files; i++) {
        TSR_TRY(tsr_ckpt_file(r->src, i, &f, err));
        if (f.klass != k) {
            continue;
        }
        TSR_TRY(link_piece(r, p, k, f.partition, f.of, f.piece, 1, i, err));
        first_new = first_new == UINT32_MAX ? p->file_count - 1 : first_new;
        for (uint32_t t = 0; t < r->count; t++) {
            if (r->decls[t].klass == k && (r->file_of[t] == i || r->file_of[t] == UINT32_MAX)) {
                p->tensors[t].file = r->file_of[t] == i ? p->file_count - 1 : first_new;
            }
        }
    }
    return TSR_OK;
}

/* One new partition: linked when it is a union of whole old files, else one file to be written. */
static tsr_status plan_partition(reshard *r, save_plan *p, tsr_class k, const uint32_t *part,
                                 uint32_t experts, uint32_t which, uint32_t of, tsr_err *err)
{
    uint32_t files = tsr_ckpt_file_count(r->src), pieces = 0, inside = 0, count = 0;
    tsr_file_info f;
    for (uint32_t i = 0; i < files; i++) {
        TSR_TRY(tsr_ckpt_file(r->src, i, &f, err));
        if (f.klass != k || r->expert_counts[i] == 0) {
            continue;
        }
        uint32_t mine = 0;
        for (uint32_t e = 0; e < r->expert_counts[i]; e++) {
            mine += part[r->experts[i][e]] == which;
        }
        pieces += mine == r->expert_counts[i];
        inside += mine == r->expert_counts[i] ? mine : 0;
    }
    for (uint32_t e = 0; e < experts; e++) {
        count += part[e] == which;
    }
    if (count == 0) {
        return TSR_OK;
    }
    if (r->links && inside == count && (pieces == 1 || !r->o->rewrite)) {
        uint32_t piece = 0;
        for (uint32_t i = 0; i < files; i++) {
            TSR_TRY(tsr_ckpt_file(r->src, i, &f, err));
            if (f.klass == k && r->expert_counts[i] > 0 && part[r->experts[i][0]] == which) {
                TSR_TRY(link_piece(r, p, k, which, of, piece++, pieces, i, err));
            }
        }
        return TSR_OK;
    }
    uint32_t *ids = malloc((size_t)count * sizeof *ids);
    if (ids == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    uint32_t n = 0;
    for (uint32_t e = 0; e < experts; e++) {
        if (part[e] == which) {
            ids[n++] = e;
        }
    }
    tsr_status st = save_plan_add_file(p, k, which, of, 0, 1, ids, n, err);
    free(ids);
    return st;
}

static tsr_status plan_experts(reshard *r, save_plan *p, tsr_class k, tsr_err *err)
{
    uint32_t experts = 0, of = 0;
    for (uint32_t i = 0; i < r->count; i++) {
        if (r->decls[i].klass == k && r->decls[i].expert_count > experts) {
            experts = r->decls[i].expert_count;
        }
    }
    if (experts == 0) {
        return TSR_OK;
    }
    uint32_t *part = malloc((size_t)experts * sizeof *part);
    if (part == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    tsr_status st = TSR_OK;
    if (r->o->expert_partitions > 0) {
        of = r->o->expert_partitions;
        st = save_partition_of(experts, &r->save, part, err);
    } else { /* as it is */
        for (uint32_t i = 0; st == TSR_OK && i < tsr_ckpt_file_count(r->src); i++) {
            tsr_file_info f;
            st = tsr_ckpt_file(r->src, i, &f, err);
            if (st == TSR_OK && f.klass == k) {
                of = f.of;
                for (uint32_t e = 0; e < r->expert_counts[i]; e++) {
                    part[r->experts[i][e]] = f.partition;
                }
            }
        }
    }
    for (uint32_t w = 0; st == TSR_OK && w < of; w++) {
        st = plan_partition(r, p, k, part, experts, w, of, err);
    }
    free(part);
    return st;
}

static tsr_status make_plan(reshard *r, save_plan *p, tsr_err *err)
{
    r->links = tsr_fs_is_dir(tsr_ckpt_path(r->src));
    r->save = (tsr_save_opts){ .expert_partitions = r->o->expert_partitions,
                               .dense_files = r->o->dense_files,
                               .partitions = r->o->partitions,
                               .allow_uneven = r->o->allow_uneven,
                               .threads = r->o->threads,
                               .mem_limit = r->o->mem_limit,
                               .resumable = r->o->resumable,
                               .restart = r->o->restart,
                               .progress = r->o->progress };
    TSR_TRY(read_decls(r, err));
    TSR_TRY(save_plan_begin(p, r->decls, r->count, r->filtered, &r->save, err));
    tsr_status st = TSR_OK;
    for (int k = 0; st == TSR_OK && k < TSR_CLASS_COUNT; k++) {
        bool dense = k == TSR_CLASS_DENSE || k == TSR_CLASS_OPTIM_DENSE;
        st = dense ? plan_dense(r, p, (tsr_class)k, err) : plan_experts(r, p, (tsr_class)k, err);
    }
    if (st == TSR_OK) {
        st = save_plan_assign(p, err);
    }
    p->any_filtered = false; /* nothing is encoded here */
    if (st != TSR_OK) {
        save_plan_free(p);
    }
    return st;
}

/* ---- what travels along ------------------------------------------------------------------------------------------ */

static tsr_status take_member(reshard *r, const char *name, tsr_err *err)
{
    char *text;
    size_t bytes;
    if (strcmp(name, "train.json") == 0) {
        return tsr_ckpt_read_member(r->src, name, TSR_MANIFEST_BYTES_MAX, &r->train, &bytes, err);
    }
    if (strncmp(name, "assets/", 7) != 0) {
        TSR_FAIL(err, TSR_E_UNSUPPORTED, "%s: %s: a member this version does not know", tsr_ckpt_path(r->src),
                 name);
    }
    tsr_asset *a = &r->assets[r->asset_count];
    a->name = name + 7;
    if (r->links) {
        char *path;
        if (asprintf(&path, "%s/%s", tsr_ckpt_path(r->src), name) < 0) {
            TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
        }
        a->path = path;
    } else {
        TSR_TRY(tsr_ckpt_read_member(r->src, name, (size_t)1 << 31, &text, &bytes, err));
        a->data = text;
        a->bytes = bytes;
    }
    r->asset_count++;
    return TSR_OK;
}

static tsr_status read_extras(reshard *r, tsr_err *err)
{
    size_t bytes, i;
    json_error_t e;
    json_t *m;
    const char *text = tsr_ckpt_manifest(r->src, &bytes);
    r->root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &e);
    if (r->root == NULL) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s/manifest.json: line %d: %s", tsr_ckpt_path(r->src), e.line, e.text);
    }
    json_t *members = json_object_get(r->root, "members");
    r->assets = calloc(json_array_size(members) + 1, sizeof *r->assets);
    if (r->assets == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    json_array_foreach(members, i, m)
    {
        const char *name = json_string_value(json_object_get(m, "name"));
        if (name != NULL) {
            TSR_TRY(take_member(r, name, err));
        }
    }
    json_t *lineage = json_object_get(r->root, "lineage");
    lineage = json_is_array(lineage) ? json_deep_copy(lineage) : json_array();
    if (r->o->lineage_step_json != NULL) {
        (void)json_array_append_new(lineage,
                                    json_loads(r->o->lineage_step_json, 0, NULL)); /* NULL: nothing to add */
    }
    r->lineage = json_dumps(lineage, 0);
    json_decref(lineage);
    json_t *config = json_object_get(r->root, "config");
    r->config = config != NULL && !json_is_null(config) ? json_dumps(config, JSON_REAL_PRECISION(17)) : NULL;
    r->save.arch = json_string_value(json_object_get(r->root, "arch"));
    r->save.lineage_json = r->lineage;
    r->save.config_json = r->config;
    r->save.train_json = r->train;
    r->save.assets = r->assets;
    r->save.asset_count = r->asset_count;
    return TSR_OK;
}

static void release(reshard *r)
{
    for (uint32_t i = 0; r->experts != NULL && i < tsr_ckpt_file_count(r->src); i++) {
        free(r->experts[i]);
    }
    for (uint32_t i = 0; i < r->asset_count; i++) {
        free((void *)(uintptr_t)r->assets[i].path);
        free((void *)(uintptr_t)r->assets[i].data);
    }
    free(r->assets);
    free(r->train);
    free(r->lineage);
    free(r->config);
    json_decref(r->root);
    free(r->experts);
    free(r->expert_counts);
    free(r->file_of);
    free(r->decls);
    free(r->filtered);
}

/* ---- moving bytes ---------------------------------------------------------------------------------------------------- */

static tsr_status describe(void *payload, const save_slot *slot, tsr_extent_info *x, tsr_err *err)
{
    const reshard *r = payload;
    tsr_tensor_info t;
    TSR_TRY(tsr_ckpt_tensor(r->src, slot->tensor, &t, err));
    return tsr_ckpt_extent(r->src, &t, slot->item, slot->chunk, x, err);
}

static tsr_status stored(void *payload, const save_slot *slot, const tsr_extent_info *x, void *dst,
                         tsr_err *err)
{
    const reshard *r = payload;
    (void)slot;
    return tsr_ckpt_read_stored(r->src, x, dst, err);
}

static void fill_plan(tsr_reshard_plan *out, const save_plan *p, const tsr_save_opts *o)
{
    uint64_t linked = 0;
    for (uint32_t i = 0; i < p->file_count; i++) {
        const save_file *f = &p->files[i];
        bool link = f->link_from >= 0;
        out->moved_files += !link;
        out->linked_files += link;
        out->moved_bytes += link ? 0 : f->payload_bytes;
        linked += link ? f->payload_bytes : 0;
    }
    out->linked_bytes = linked;
    out->disk_bytes = save_disk_bytes(p, o);
    out->disk_bytes -= linked < out->disk_bytes ? linked : out->disk_bytes;
}

tsr_status tsr_reshard_plan_make(tsr_reshard_plan *out, const tsr_ckpt *src, const tsr_reshard_opts *o,
                                 tsr_err *err)
{
    reshard r = { .src = src, .o = o };
    save_plan p;
    uint64_t buffers;
    *out = (tsr_reshard_plan){ 0 };
    tsr_status st = make_plan(&r, &p, err);
    if (st == TSR_OK) {
        fill_plan(out, &p, &r.save);
        st = save_buffer_budget(&p, &r.save, false, &buffers, &out->buffer_bytes, err);
        save_plan_free(&p);
    }
    release(&r);
    return st;
}

/* Names the source and the result's files with their experts: what a continued run must agree on. */
static tsr_status resume_key(const reshard *r, const save_plan *p, char **out, tsr_err *err)
{
    size_t bytes;
    const char *manifest = tsr_ckpt_manifest(r->src, &bytes);
    tsr_hash128 from = tsr_hash_128(manifest, bytes), to;
    tsr_hasher *h = tsr_hasher_new128();
    if (h == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    for (uint32_t i = 0; i < p->file_count; i++) {
        const save_file *f = &p->files[i];
        tsr_hasher_add(h, f->name, strlen(f->name) + 1);
        tsr_hasher_add(h, f->experts, f->expert_count * sizeof *f->experts);
        tsr_hasher_add(h, &f->link_from, sizeof f->link_from);
    }
    to = tsr_hasher_digest128(h);
    tsr_hasher_free(&h);
    char a[33], b[33];
    tsr_hash128_hex(&from, a);
    tsr_hash128_hex(&to, b);
    if (asprintf(out, "reshard %s %s", a, b) < 0) {
        *out = NULL;
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    return TSR_OK;
}

tsr_status tsr_reshard(const tsr_ckpt *src, const char *dst, const tsr_reshard_opts *o, tsr_err *err)
{
    reshard r = { .src = src, .o = o };
    save_plan p;
    tsr_save_job *job;
    char *key = NULL;
    tsr_status st = make_plan(&r, &p, err);
    if (st != TSR_OK) {
        release(&r);
        return st;
    }
    for (uint32_t i = 0; st == TSR_OK && i < tsr_ckpt_file_count(src); i++) {
        st = tsr_ckpt_check_file(src, i, err);
    }
    if (st == TSR_OK) {
        st = read_extras(&r, err);
    }
    if (st == TSR_OK && o->resumable) {
        st = resume_key(&r, &p, &key, err);
        r.save.resume_key = key;
    }
    if (st == TSR_OK) {
        save_source source = { .describe = describe, .stored = stored, .payload = &r, .link_source = src };
        st = save_job_start(&job, dst, &p, &source, &r.save, err);
        if (st == TSR_OK) {
            st = tsr_save_wait(&job, NULL, err);
        }
    } else {
        save_plan_free(&p);
    }
    free(key);
    release(&r);
    return st;
}
