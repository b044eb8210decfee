/* from_tessera.c - a checkpoint as a source: one tensor per plain tensor and per expert's matrix, canonical names. */
#include "convert/from_tessera.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_MEM_LIMIT ((uint64_t)256 << 20)

typedef struct ts_source {
    tsr_source pub; /* first */
    tsr_arena *arena;
    tsr_ckpt *ckpt;
    tsr_src_tensor *tensors;
    tsr_src_file *files;
    tsr_tensor_info *infos; /* per tensor of the checkpoint */
    int64_t *first;         /* its first source tensor; one more entry at the end */
    tsr_src_asset *assets;
    int64_t asset_room;
    const char *warning;
    char *config;
} ts_source;

static tsr_status no_memory(const ts_source *s, tsr_err *err)
{
    TSR_FAIL(err, TSR_E_LIMIT, "%s: its list of tensors needs more memory than allowed (--mem-limit)",
             s->pub.path);
}

static tsr_status list_tensors(ts_source *s, tsr_err *err)
{
    uint32_t n = tsr_ckpt_tensor_count(s->ckpt);
    s->infos = tsr_arena_alloc(s->arena, ((size_t)n + 1) * sizeof *s->infos);
    s->first = tsr_arena_alloc(s->arena, ((size_t)n + 1) * sizeof *s->first);
    if (s->infos == NULL || s->first == NULL) {
        return no_memory(s, err);
    }
    for (uint32_t i = 0; i < n; i++) {
        TSR_TRY(tsr_ckpt_tensor(s->ckpt, i, &s->infos[i], err));
        s->first[i] = s->pub.count;
        s->pub.count += s->infos[i].expert_count > 0 ? s->infos[i].expert_count : 1;
    }
    s->first[n] = s->pub.count;
    s->tensors = tsr_arena_alloc(s->arena, ((size_t)s->pub.count + 1) * sizeof *s->tensors);
    if (s->tensors == NULL) {
        return no_memory(s, err);
    }
    for (uint32_t i = 0; i < n; i++) {
        const tsr_tensor_info *t = &s->infos[i];
        uint32_t items = t->expert_count > 0 ? t->expert_count : 1;
        for (uint32_t e = 0; e < items; e++) {
            char name[4200];
            const char *kept = t->name; /* lives in the index */
            if (t->expert_count > 0) {
                size_t len = tsr_tensor_item_name(t, e, name, sizeof name);
                kept = tsr_arena_strndup(s->arena, name, len);
            }
            tsr_extent_info x = { 0 };
            if (t->chunks > 0) {
                TSR_TRY(tsr_ckpt_extent(s->ckpt, t, e, 0, &x, err));
            }
            if (kept == NULL) {
                return no_memory(s, err);
            }
            s->tensors[s->first[i] + e] = (tsr_src_tensor){ .name = kept,
                                                            .shape = t->shape,
                                                            .bytes = t->item_bytes,
                                                            .offset = x.offset,
                                                            .file = x.file,
                                                            .dtype = (uint8_t)t->dtype,
                                                            .rank = (uint8_t)t->rank };
        }
    }
    s->pub.tensors = s->tensors;
    return TSR_OK;
}

static tsr_status list_files(ts_source *s, tsr_err *err)
{
    uint32_t n = tsr_ckpt_file_count(s->ckpt);
    s->files = tsr_arena_alloc(s->arena, ((size_t)n + 1) * sizeof *s->files);
    if (s->files == NULL) {
        return no_memory(s, err);
    }
    for (uint32_t i = 0; i < n; i++) {
        tsr_file_info f;
        TSR_TRY(tsr_ckpt_file(s->ckpt, i, &f, err));
        s->files[i] = (tsr_src_file){ f.name, f.bytes };
    }
    s->pub.files = s->files;
    s->pub.file_count = n;
    return TSR_OK;
}

static tsr_status take_member(void *payload, const char *name, uint64_t size, tsr_err *err)
{
    ts_source *s = payload;
    if (strncmp(name, "assets/", 7) != 0) {
        return TSR_OK;
    }
    if (s->pub.asset_count == s->asset_room) {
        int64_t room = s->asset_room * 2 + 16;
        tsr_src_asset *grown = tsr_arena_alloc(s->arena, (size_t)room * sizeof *grown);
        if (grown == NULL) {
            return no_memory(s, err);
        }
        if (s->pub.asset_count > 0) {
            memcpy(grown, s->assets, (size_t)s->pub.asset_count * sizeof *grown);
        }
        s->assets = grown;
        s->asset_room = room;
    }
    const char *copy = tsr_arena_strndup(s->arena, name + 7, strlen(name + 7));
    if (copy == NULL) {
        return no_memory(s, err);
    }
    s->assets[s->pub.asset_count++] = (tsr_src_asset){ copy, NULL, NULL, size };
    return TSR_OK;
}

static void ts_close(tsr_source *pub)
{
    ts_source *s = (ts_source *)(void *)pub;
    tsr_ckpt_close(&s->ckpt);
    free(s->config);
    tsr_arena_free(&s->arena);
    free(s);
}

static tsr_status open_parts(ts_source *s, const char *path, tsr_err *err)
{
    char *note = NULL;
    TSR_TRY(tsr_ckpt_open_any(&s->ckpt, path, &note, err));
    if (note != NULL) {
        s->warning = tsr_arena_strndup(s->arena, note, strlen(note));
        free(note);
        s->pub.warnings = &s->warning;
        s->pub.warning_count = s->warning != NULL;
    }
    s->pub.ckpt = s->ckpt;
    TSR_TRY(list_tensors(s, err));
    TSR_TRY(list_files(s, err));
    TSR_TRY(tsr_ckpt_each_member(s->ckpt, take_member, s, err));
    s->pub.assets = s->assets;
    tsr_status st = tsr_ckpt_read_member(s->ckpt, "assets/config.json", (size_t)64 << 20, &s->config,
                                         &s->pub.config_bytes, err);
    s->pub.config_json = s->config;
    return st == TSR_E_MISSING ? TSR_OK : st;
}

static tsr_status ts_open(tsr_source **out, const char *path, const tsr_source_opts *o, tsr_err *err)
{
    *out = NULL;
    ts_source *s = calloc(1, sizeof *s);
    if (s == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    s->arena = tsr_arena_new(o->mem_limit > 0 ? o->mem_limit : DEFAULT_MEM_LIMIT);
    s->pub.path = s->arena != NULL ? tsr_arena_strndup(s->arena, path, strlen(path)) : NULL;
    if (s->pub.path == NULL) {
        tsr_arena_free(&s->arena);
        free(s);
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    s->pub.ops = &tsr_source_tessera;
    tsr_status st = open_parts(s, path, err);
    if (st != TSR_OK) {
        ts_close(&s->pub);
        return st;
    }
    size_t n = strlen(path);
    s->pub.what = n > 4 && strcmp(path + n - 4, ".tar") == 0 ? "tar of a Tessera checkpoint"
                                                             : "Tessera checkpoint";
    *out = &s->pub;
    return TSR_OK;
}

void tessera_source_tensor(const tsr_source *pub, int64_t i, uint32_t *tensor, uint32_t *item)
{
    const ts_source *s = (const ts_source *)(const void *)pub;
    uint32_t lo = 0, hi = tsr_ckpt_tensor_count(s->ckpt);
    while (hi - lo > 1) {
        uint32_t mid = lo + (hi - lo) / 2;
        if (s->first[mid] <= i) {
            lo = mid;
        } else {
            hi = mid;
        }
    }
    *tensor = lo;
    *item = (uint32_t)(i - s->first[lo]);
}

static tsr_status ts_read(tsr_source *pub, int64_t i, uint64_t off, void *dst, size_t n, tsr_err *err)
{
    const ts_source *s = (const ts_source *)(const void *)pub;
    uint32_t tensor, item;
    tessera_source_tensor(pub, i, &tensor, &item);
    return tsr_ckpt_read(s->ckpt, &s->infos[tensor], item, off, dst, n, TSR_READ_CHECK, err);
}

static tsr_status ts_read_asset(tsr_source *pub, int64_t asset, char **out, tsr_err *err)
{
    const ts_source *s = (const ts_source *)(const void *)pub;
    char name[4200];
    size_t bytes;
    (void)snprintf(name, sizeof name, "assets/%s", s->assets[asset].name);
    return tsr_ckpt_read_member(s->ckpt, name, (size_t)1 << 31, out, &bytes, err);
}

static int ts_bid(const char *path)
{
    return tsr_ckpt_probe(path) ? 95 : 0;
}

const tsr_source_ops tsr_source_tessera = { .name = "tessera",
                                            .what = "Tessera checkpoint",
                                            .bid = ts_bid,
                                            .open = ts_open,
                                            .read = ts_read,
                                            .read_asset = ts_read_asset,
                                            .close = ts_close };
