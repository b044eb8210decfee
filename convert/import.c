/* import.c - a foreign source into a Tessera checkpoint, through tsr_save. */
#include "convert/convert_priv.h"
#include "convert/from_safetensors.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Names, shapes, extents held in memory beside the buffers. */
static uint64_t list_bytes(const conversion *c)
{
    return (uint64_t)c->source->count * 220 + (uint64_t)c->map->count * 112;
}

static tsr_save_opts save_opts(const conversion *c)
{
    uint64_t lists = list_bytes(c), floor = (uint64_t)48 << 20;
    uint64_t buffers = c->o.mem_limit > lists ? c->o.mem_limit - lists : 0;
    if (buffers < floor) {
        buffers = c->o.mem_limit < floor ? c->o.mem_limit : floor;
    }
    return (tsr_save_opts){ .expert_partitions = c->o.expert_partitions,
                            .dense_files = c->o.dense_files,
                            .allow_uneven = c->o.allow_uneven,
                            .compress = c->o.compress,
                            .zstd_level = c->o.zstd_level,
                            .threads = c->o.threads,
                            .mem_limit = buffers,
                            .resumable = true,
                            .restart = c->o.restart,
                            .arch = c->pub.arch,
                            .progress = c->o.progress };
}

tsr_status import_plan(conversion *c, tsr_err *err)
{
    tsr_save_opts o = save_opts(c);
    tsr_save_plan p;
    TSR_TRY(tsr_save_plan_make(&p, c->map->groups, c->map->group_count, &o, err));
    c->pub.bytes_out = p.disk_bytes;
    c->pub.files_out = p.file_count;
    c->pub.peak_bytes = p.buffer_bytes + list_bytes(c);
    return TSR_OK;
}

static tsr_status fill(void *payload, const tsr_slot *slot, void *dst, tsr_err *err)
{
    const tsr_map *m = payload;
    return tsr_map_read(m, m->group_first[slot->tensor] + slot->item, slot->off, dst, slot->bytes, err);
}

static char *lineage(const conversion *c)
{
    json_t *list = NULL;
    if (c->source->ckpt != NULL) { /* its own history goes on */
        size_t n;
        const char *text = tsr_ckpt_manifest(c->source->ckpt, &n);
        json_t *root = json_loadb(text, n, 0, NULL);
        list = json_deep_copy(json_object_get(root, "lineage"));
        json_decref(root);
    }
    if (!json_is_array(list)) {
        json_decref(list);
        list = json_array();
    }
    json_t *step = json_pack("{s:s, s:s, s:s, s:s, s:b}", "op", "convert", "from", c->pub.from, "arch",
                             c->pub.arch, "tool", "tessera " TSR_VERSION, "compress", c->o.compress);
    (void)json_array_append_new(list, step); /* NULL only when out of memory: the dump below fails then too */
    char *out = json_dumps(list, 0);
    json_decref(list);
    return out;
}

/* The source's assets, its headers, read_asset'ed ones in memory. */
static tsr_status take_assets(conversion *c, tsr_asset **out, uint32_t *count, tsr_err *err)
{
    const tsr_source *s = c->source;
    tsr_asset *list = calloc((size_t)s->asset_count + 2, sizeof *list);
    *out = list;
    *count = 0;
    if (list == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    for (int64_t i = 0; i < s->asset_count; i++) {
        tsr_asset *a = &list[*count];
        *a = (tsr_asset){ s->assets[i].name, s->assets[i].path, s->assets[i].data, s->assets[i].bytes };
        if (a->path == NULL && a->data == NULL) {
            char *text;
            TSR_TRY(s->ops->read_asset(c->source, i, &text, err));
            const char *kept = tsr_arena_strndup(c->arena, text, a->bytes);
            free(text);
            if (kept == NULL) {
                TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
            }
            a->data = kept;
        }
        (*count)++;
    }
    if (s->ops == &tsr_source_safetensors) {
        TSR_TRY(st_source_headers(c->source, &c->source_headers, &c->source_headers_bytes, err));
        list[(*count)++] = (tsr_asset){ ST_HEADERS_ASSET, NULL, c->source_headers, c->source_headers_bytes };
    }
    return TSR_OK;
}

/* A checkpoint written anew (compressed, say) keeps its arch and its training state. */
static tsr_status keep_state(conversion *c, tsr_save_opts *o, char **train, tsr_err *err)
{
    size_t n;
    *train = NULL;
    if (c->source->ckpt == NULL) {
        return TSR_OK;
    }
    const char *text = tsr_ckpt_manifest(c->source->ckpt, &n);
    json_t *root = json_loadb(text, n, 0, NULL);
    const char *arch = json_string_value(json_object_get(root, "arch"));
    o->arch = arch != NULL ? tsr_arena_strndup(c->arena, arch, strlen(arch)) : o->arch;
    json_decref(root);
    tsr_status st = tsr_ckpt_read_member(c->source->ckpt, "train.json", (size_t)64 << 20, train, &n, err);
    o->train_json = *train;
    return st == TSR_E_MISSING ? TSR_OK : st;
}

tsr_status import_run(conversion *c, tsr_err *err)
{
    tsr_save_opts o = save_opts(c);
    char *train = NULL;
    tsr_asset *assets = NULL;
    char *steps = lineage(c);
    tsr_status st = steps != NULL ? TSR_OK : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    if (st == TSR_OK) {
        st = take_assets(c, &assets, &o.asset_count, err);
    }
    if (st == TSR_OK) {
        st = keep_state(c, &o, &train, err);
    }
    if (st == TSR_OK) {
        st = convert_key(c, &o.resume_key, err);
    }
    if (st == TSR_OK) {
        o.assets = assets;
        o.lineage_json = steps;
        o.config_json = c->source->config_json;
        st = tsr_save(c->dst, c->map->groups, c->map->group_count, fill, c->map, &o, err);
    }
    free(assets);
    free(train);
    free(steps);
    return st;
}
