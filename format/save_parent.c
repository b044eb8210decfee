/* save_parent.c - shards that did not change since the parent checkpoint are hard-linked, not written. */
#include "format/save_job.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool same_shape(const tsr_tensor_info *a, const save_tensor *t)
{
    return a->dtype == t->d.dtype && a->rank == t->d.rank && a->expert_count == t->d.expert_count &&
           a->filtered == t->filtered && a->chunks == t->k.chunks && a->chunk_bytes == t->k.chunk_bytes &&
           (a->rank == 0 || memcmp(a->shape, t->d.shape, (size_t)a->rank * sizeof *a->shape) == 0);
}

tsr_status save_parent_open(tsr_save_job *j, tsr_err *err)
{
    TSR_TRY(tsr_ckpt_open(&j->parent, j->o.parent, err));
    j->parent_tensor = malloc(((size_t)j->plan.tensor_count + 1) * sizeof *j->parent_tensor);
    j->parent_file = malloc(((size_t)j->plan.file_count + 1) * sizeof *j->parent_file);
    j->same = calloc(j->plan.extent_count + 1, 1);
    if (j->parent_tensor == NULL || j->parent_file == NULL || j->same == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    for (uint32_t i = 0; i < j->plan.tensor_count; i++) {
        tsr_tensor_info t;
        uint32_t item;
        const save_tensor *s = &j->plan.tensors[i];
        bool hit = tsr_ckpt_find(j->parent, s->d.name, &t, &item, NULL) == TSR_OK && same_shape(&t, s) &&
                   strcmp(t.name, s->d.name) == 0;
        j->parent_tensor[i] = hit ? (int64_t)t.id : -1;
    }
    for (uint32_t i = 0; i < j->plan.file_count; i++) {
        j->parent_file[i] = -1;
        for (uint32_t f = 0; f < tsr_ckpt_file_count(j->parent); f++) {
            tsr_file_info info;
            TSR_TRY(tsr_ckpt_file(j->parent, f, &info, err));
            if (strcmp(info.name, j->plan.files[i].name) == 0) {
                j->parent_file[i] = f;
            }
        }
    }
    return TSR_OK;
}

/* The parent's extent for a slot, when it lies in the shard of the same name. */
static bool parent_extent(const tsr_save_job *j, const save_slot *s, tsr_extent_info *x)
{
    tsr_tensor_info t;
    int64_t id = j->parent_tensor[s->tensor];
    return id >= 0 && j->parent_file[s->file] >= 0 &&
           tsr_ckpt_tensor(j->parent, (uint32_t)id, &t, NULL) == TSR_OK &&
           tsr_ckpt_extent(j->parent, &t, s->item, s->chunk, x, NULL) == TSR_OK &&
           (int64_t)x->file == j->parent_file[s->file];
}

bool save_parent_has(const tsr_save_job *j, const save_slot *slot, const tsr_extent_rec *e,
                     const uint8_t *stored)
{
    tsr_extent_info x;
    if (!parent_extent(j, slot, &x) || x.hash != e->hash || x.stored_bytes != e->stored_bytes ||
        x.codec != (tsr_codec)e->codec) {
        return false;
    }
    const uint8_t *theirs = tsr_ckpt_map_stored(j->parent, &x);
    return theirs != NULL && memcmp(theirs, stored, e->stored_bytes) == 0; /* equal hashes are only a hint */
}

static bool all_same(const tsr_save_job *j, uint32_t file)
{
    save_cursor c = { 0 };
    save_slot s;
    while (save_next_slot(&j->plan, file, &c, &s)) {
        if (!j->same[s.extent]) {
            return false;
        }
    }
    return true;
}

tsr_status save_parent_link(tsr_save_job *j, uint32_t file, bool *linked, tsr_err *err)
{
    *linked = false;
    tsr_file_info info;
    tsr_file_rec rec;
    const char *name;
    uint8_t uuid[16];
    uint32_t from = (uint32_t)j->parent_file[file];
    TSR_TRY(tsr_ckpt_file(j->parent, from, &info, err));
    if (!all_same(j, file)) {
        return TSR_OK;
    }
    TSR_TRY(save_shard_uuid(&j->plan, file, j->extents, info.bytes, uuid, err));
    if (memcmp(uuid, info.uuid, 16) != 0) {
        return TSR_OK;
    }
    TSR_TRY(tsr_index_file(tsr_ckpt_index(j->parent), from, &rec, &name, err));
    char *src = NULL, *dst = NULL;
    tsr_status st = TSR_OK;
    if (asprintf(&src, "%s/%s", tsr_ckpt_path(j->parent), info.name) < 0 ||
        asprintf(&dst, "%s/%s", j->temp, j->plan.files[file].name) < 0) {
        st = TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    } else {
        st = tsr_fs_link_or_copy(src, dst, err);
    }
    free(src);
    free(dst);
    TSR_TRY(st);
    const save_file *f = &j->plan.files[file];
    rec.klass = (uint32_t)f->klass;
    rec.partition = f->partition;
    rec.of = f->of;
    rec.piece = f->piece;
    j->recs[file] = rec;
    (void)pthread_mutex_lock(&j->mu);
    j->linked_files++;
    (void)pthread_mutex_unlock(&j->mu);
    *linked = true;
    return TSR_OK;
}

tsr_status save_parent_copy(tsr_save_job *j, uint32_t file, tsr_err *err)
{
    save_cursor c = { 0 };
    save_slot s;
    while (save_next_slot(&j->plan, file, &c, &s)) {
        tsr_extent_info x;
        if (!j->same[s.extent]) {
            continue;
        }
        const tsr_extent_rec *e = &j->extents[s.extent];
        const uint8_t *bytes = parent_extent(j, &s, &x) ? tsr_ckpt_map_stored(j->parent, &x) : NULL;
        if (bytes == NULL) {
            TSR_FAIL(err, TSR_E_IO, "%s: cannot be read any more", j->o.parent);
        }
        TSR_TRY(save_shard_write(j->shards[file], e->offset, bytes, e->stored_bytes, err));
    }
    return TSR_OK;
}
