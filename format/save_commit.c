/* save_commit.c - the last steps of a save: assets, index, manifest, and the rename that makes it visible. */
#include "format/save_job.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct members {
    manifest_member *list;
    uint32_t count;
} members;

/* Makes the folders above dir/name, and syncs nothing yet. */
static tsr_status make_parents(const char *path, tsr_err *err)
{
    char *copy = strdup(path);
    if (copy == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    *strrchr(copy, '/') = '\0';
    tsr_status st = tsr_fs_mkdirs(copy, err);
    free(copy);
    return st;
}

/* Copies path (or data) to dst with its hash, then syncs it. */
static tsr_status copy_asset(const tsr_asset *a, const char *dst, manifest_member *m, tsr_err *err)
{
    enum { PIECE = 1 << 20 };
    tsr_io *io = NULL;
    tsr_file *f = NULL;
    tsr_hasher *h = tsr_hasher_new128();
    uint8_t *buf = malloc(PIECE);
    tsr_status st = h != NULL && buf != NULL ? TSR_OK : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    if (st == TSR_OK) {
        st = a->path != NULL ? tsr_io_open_file(&io, a->path, err)
                             : tsr_io_open_mem(&io, a->name, a->data, a->bytes, err);
    }
    if (st == TSR_OK) {
        st = tsr_file_create(&f, dst, err);
    }
    for (uint64_t at = 0; st == TSR_OK && at < io->size;) {
        size_t n = io->size - at < PIECE ? (size_t)(io->size - at) : PIECE;
        st = tsr_io_pread(io, buf, n, at, err);
        if (st == TSR_OK) {
            tsr_hasher_add(h, buf, n);
            st = tsr_file_pwrite(f, buf, n, at, err);
        }
        at += n;
    }
    if (st == TSR_OK) {
        st = tsr_file_sync(f, err);
        m->bytes = io->size;
        m->hash = tsr_hasher_digest128(h);
    }
    tsr_file_close(&f);
    tsr_io_close(&io);
    tsr_hasher_free(&h);
    free(buf);
    return st;
}

static tsr_status add_member(tsr_save_job *j, members *ms, const char *name, const tsr_asset *a, tsr_err *err)
{
    char *dst = NULL;
    char *kept = tsr_arena_strndup(j->plan.arena, name, strlen(name));
    if (kept == NULL || asprintf(&dst, "%s/%s", j->temp, name) < 0) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    tsr_status st = make_parents(dst, err);
    if (st == TSR_OK) {
        ms->list[ms->count].name = kept;
        st = copy_asset(a, dst, &ms->list[ms->count], err);
        ms->count++;
    }
    free(dst);
    return st;
}

static tsr_status write_members(tsr_save_job *j, members *ms, tsr_err *err)
{
    ms->list = calloc((size_t)j->o.asset_count + 2, sizeof *ms->list);
    if (ms->list == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    for (uint32_t i = 0; i < j->o.asset_count; i++) {
        char name[TSR_NAME_BYTES_MAX + 16];
        (void)snprintf(name, sizeof name, "assets/%s", j->o.assets[i].name);
        TSR_TRY(add_member(j, ms, name, &j->o.assets[i], err));
    }
    if (j->o.train_json != NULL) {
        tsr_asset a = { .name = "train.json", .data = j->o.train_json, .bytes = strlen(j->o.train_json) };
        TSR_TRY(add_member(j, ms, "train.json", &a, err));
    }
    return TSR_OK;
}

static tsr_status write_text(tsr_save_job *j, const char *name, const void *data, size_t n, tsr_err *err)
{
    char *path;
    if (asprintf(&path, "%s/%s", j->temp, name) < 0) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    tsr_status st = tsr_fs_write_file(path, data, n, err);
    free(path);
    return st;
}

static tsr_status write_index(tsr_save_job *j, const uint8_t uuid[16], const char *manifest,
                              size_t manifest_bytes, tsr_err *err)
{
    const save_plan *p = &j->plan;
    tsr_index_tensor_in *tensors = calloc((size_t)p->tensor_count + 1, sizeof *tensors);
    const char **names = calloc((size_t)p->file_count + 1, sizeof *names);
    uint8_t *index = NULL;
    uint64_t bytes = 0;
    tsr_status st = tensors != NULL && names != NULL ? TSR_OK : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    if (st == TSR_OK) {
        for (uint32_t i = 0; i < p->tensor_count; i++) {
            const save_tensor *t = &p->tensors[i];
            tensors[i] = (tsr_index_tensor_in){ .decl = &t->d,
                                                .first_extent = t->first_extent,
                                                .filtered = t->filtered,
                                                .partner = t->d.partner >= 0 ? (uint32_t)t->d.partner
                                                                             : TSR_NO_PARTNER };
        }
        for (uint32_t i = 0; i < p->file_count; i++) {
            names[i] = p->files[i].name;
        }
        tsr_index_in in = { .files = j->recs,
                            .file_names = names,
                            .file_count = p->file_count,
                            .tensors = tensors,
                            .tensor_count = p->tensor_count,
                            .extents = j->extents,
                            .extent_count = p->extent_count,
                            .manifest_bytes = manifest_bytes };
        tsr_hash128 h = tsr_hash_128(manifest, manifest_bytes);
        memcpy(in.manifest_hash, h.b, 16);
        memcpy(in.uuid, uuid, 16);
        st = tsr_index_build(&in, &index, &bytes, err);
    }
    if (st == TSR_OK) {
        st = write_text(j, TSR_INDEX_NAME, index, bytes, err);
    }
    free(index);
    free(tensors);
    free((void *)names);
    return st;
}

/* Syncs the folders that were made below temp for assets: their names come from the members. */
static tsr_status sync_folders(tsr_save_job *j, const members *ms, tsr_err *err)
{
    for (uint32_t i = 0; i < ms->count; i++) {
        const char *name = ms->list[i].name;
        for (const char *slash = strchr(name, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
            if (i > 0 && strncmp(ms->list[i - 1].name, name, (size_t)(slash - name) + 1) == 0) {
                continue; /* synced for the member before */
            }
            char *path;
            if (asprintf(&path, "%s/%.*s", j->temp, (int)(slash - name), name) < 0) {
                TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
            }
            tsr_status st = tsr_fs_sync_dir(path, err);
            free(path);
            TSR_TRY(st);
        }
    }
    return tsr_fs_sync_dir(j->temp, err);
}

/* From here on the checkpoint is visible; if even the folder's sync fails, it is taken back. */
static tsr_status publish(tsr_save_job *j, tsr_err *err)
{
    TSR_TRY(tsr_fs_exists(j->real) ? tsr_fs_rename(j->temp, j->real, err)
                                   : tsr_fs_rename_new(j->temp, j->real, err));
    const char *slash = strrchr(j->real, '/');
    char *parent = slash == NULL ? strdup(".")
                                 : strndup(j->real, slash == j->real ? 1 : (size_t)(slash - j->real));
    if (parent == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    tsr_status st = tsr_fs_sync_dir(parent, err);
    free(parent);
    if (st != TSR_OK) {
        TSR_IGNORE(tsr_fs_rename(j->real, j->temp, NULL)); /* the sync's error is the one to tell */
    }
    return st;
}

static tsr_status remove_own(tsr_save_job *j, const char *name, tsr_err *err)
{
    char *path;
    if (asprintf(&path, "%s/%s", j->temp, name) < 0) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    tsr_status st = tsr_fs_remove_tree(path, err);
    free(path);
    return st;
}

tsr_status save_commit(tsr_save_job *j, tsr_err *err)
{
    members ms = { 0 };
    char *manifest = NULL;
    size_t bytes;
    manifest_in in = { .plan = &j->plan, .files = j->recs, .opts = &j->o };
    tsr_status st;
    if (j->lock_fd >= 0) { /* an interrupted run may have come this far */
        TSR_GO(remove_own(j, "assets", err));
        TSR_GO(remove_own(j, "train.json", err));
        TSR_GO(remove_own(j, TSR_INDEX_NAME, err));
        TSR_GO(remove_own(j, TSR_MANIFEST_NAME, err));
    }
    TSR_GO(write_members(j, &ms, err));
    uuid_new(in.uuid);
    in.members = ms.list;
    in.member_count = ms.count;
    for (uint64_t i = 0; i < j->plan.extent_count; i++) {
        in.stored_bytes += j->extents[i].stored_bytes;
    }
    TSR_GO(manifest_build(&in, &manifest, &bytes, err));
    TSR_GO(write_index(j, in.uuid, manifest, bytes, err));
    if (j->lock_fd >= 0) {
        TSR_GO(remove_own(j, "resume.txt", err));
        TSR_GO(remove_own(j, "lock", err));
    }
    TSR_GO(write_text(j, TSR_MANIFEST_NAME, manifest, bytes, err));
    TSR_GO(sync_folders(j, &ms, err));
    st = publish(j, err);
out:
    free(manifest);
    free(ms.list);
    return st;
}
