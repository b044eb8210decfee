/* plan.c - what a conversion would do; everything that can be refused is refused here, before a byte is written. */
#include "convert/convert_priv.h"
#include "convert/layouts.h"
#include "convert/split_fused.h"

#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_MEM_LIMIT ((uint64_t)256 << 20)
#define NOMINAL_BYTES_PER_SECOND 4e8

tsr_status convert_warn(conversion *c, const char *text, tsr_err *err)
{
    const char **grown = tsr_arena_alloc(c->arena, ((size_t)c->pub.warning_count + 1) * sizeof *grown);
    const char *copy = tsr_arena_strndup(c->arena, text, strlen(text));
    if (grown == NULL || copy == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    if (c->pub.warning_count > 0) {
        memcpy(grown, c->warnings, (size_t)c->pub.warning_count * sizeof *grown);
    }
    grown[c->pub.warning_count++] = copy;
    c->warnings = grown;
    c->pub.warnings = grown;
    return TSR_OK;
}

static bool any_glob(const char *const *globs, const char *name)
{
    for (size_t i = 0; globs != NULL && globs[i] != NULL; i++) {
        if (fnmatch(globs[i], name, 0) == 0) {
            return true;
        }
    }
    return false;
}

static bool wanted(void *payload, const char *name)
{
    const tsr_convert_opts *o = payload;
    return (o->include == NULL || any_glob(o->include, name)) && !any_glob(o->exclude, name);
}

static bool ends_with(const char *s, const char *tail)
{
    size_t n = strlen(s), t = strlen(tail);
    return n >= t && strcmp(s + n - t, tail) == 0;
}

static tsr_status choose_target(conversion *c, tsr_err *err)
{
    bool from_tessera = c->source->ckpt != NULL;
    const char *to = c->o.to != NULL                                     ? c->o.to
                     : from_tessera || ends_with(c->dst, ".safetensors") ? "safetensors"
                                                                         : "tessera";
    c->to_tessera = strcmp(to, "tessera") == 0;
    if (!c->to_tessera && strcmp(to, "safetensors") != 0) {
        TSR_FAIL(err, TSR_E_USAGE, "--to %s: unknown (known: tessera, safetensors)", to);
    }
    c->single = !c->to_tessera && ends_with(c->dst, ".safetensors");
    c->pub.to = c->to_tessera ? "tessera" : "safetensors";
    c->pub.from = c->source->what;
    return TSR_OK;
}

static tsr_status load_source(conversion *c, const char *src, tsr_err *err)
{
    const tsr_layout *l;
    tsr_source_opts so = { .mem_limit = c->o.mem_limit, .allow_trailing = c->o.allow_trailing };
    tsr_map_opts mo = { .mem_limit = c->o.mem_limit, .tie_head = c->o.tie_head };
    if (c->o.include != NULL || c->o.exclude != NULL) {
        mo.keep = wanted;
        mo.keep_payload = &c->o;
    }
    TSR_TRY(tsr_source_open(&c->source, src, &so, err));
    TSR_TRY(tsr_layout_pick(&l, c->o.arch, c->source, err));
    bool asked_raw = c->o.arch != NULL && strcmp(c->o.arch, "raw") == 0, split = false;
    if (c->source->ckpt == NULL && l->row_count == 0 && !asked_raw) {
        TSR_TRY(split_fused(&c->source, c->o.gate_up, &split, err));
        l = split ? &tsr_layout_canonical : l; /* their names are canonical now */
    }
    TSR_TRY(choose_target(c, err));
    TSR_TRY(tsr_map_make(&c->map, c->source, l, &mo, err));
    c->pub.arch = l->arch;
    for (int64_t i = 0; i < c->source->warning_count; i++) {
        TSR_TRY(convert_warn(c, c->source->warnings[i], err));
    }
    for (int64_t i = 0; i < c->map->warning_count; i++) {
        TSR_TRY(convert_warn(c, c->map->warnings[i], err));
    }
    c->pub.tensors_in = c->source->count;
    c->pub.tensors_ignored = c->map->ignored;
    c->pub.tensors_used = c->source->count - c->map->ignored;
    c->pub.tensors_written = c->map->count;
    for (int64_t i = 0; i < c->source->count; i++) {
        c->pub.bytes_in += c->source->tensors[i].bytes;
    }
    return TSR_OK;
}

tsr_status convert_key(conversion *c, const char **out, tsr_err *err)
{
    tsr_hasher *h = tsr_hasher_new128();
    char *real = realpath(c->source->path, NULL), *text;
    if (h == NULL || real == NULL) {
        tsr_hasher_free(&h);
        free(real);
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    for (int64_t i = 0; i < c->source->count; i++) { /* names, places and sizes of everything that goes in */
        const tsr_src_tensor *t = &c->source->tensors[i];
        tsr_hasher_add(h, t->name, strlen(t->name) + 1);
        tsr_hasher_add(h, &t->bytes, sizeof t->bytes);
        tsr_hasher_add(h, &t->offset, sizeof t->offset);
    }
    for (int64_t i = 0; i < c->source->file_count; i++) {
        tsr_hasher_add(h, c->source->files[i].name, strlen(c->source->files[i].name) + 1);
        tsr_hasher_add(h, &c->source->files[i].bytes, sizeof c->source->files[i].bytes);
    }
    for (const char *const *g = c->o.include; g != NULL && *g != NULL; g++) {
        tsr_hasher_add(h, *g, strlen(*g) + 1);
    }
    for (const char *const *g = c->o.exclude; g != NULL && *g != NULL; g++) {
        tsr_hasher_add(h, *g, strlen(*g) + 1);
    }
    char hex[33];
    tsr_hash128 d = tsr_hasher_digest128(h);
    tsr_hash128_hex(&d, hex);
    tsr_hasher_free(&h);
    int n = asprintf(&text,
                     "convert %s\ncontent %s\nto %s arch %s experts %u dense %u compress %d level %d shard "
                     "%llu gate-up %s\n",
                     real, hex, c->pub.to, c->pub.arch, c->o.expert_partitions, c->o.dense_files,
                     c->o.compress, c->o.zstd_level, (unsigned long long)c->o.shard_bytes,
                     c->o.gate_up != NULL ? c->o.gate_up : "auto");
    free(real);
    *out = n >= 0 ? tsr_arena_strndup(c->arena, text, (size_t)n) : NULL;
    if (n >= 0) {
        free(text);
    }
    return *out != NULL ? TSR_OK : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
}

tsr_status tsr_convert_plan_make(tsr_convert_plan **out, const char *src, const char *dst,
                                 const tsr_convert_opts *o, tsr_err *err)
{
    *out = NULL;
    conversion *c = calloc(1, sizeof *c);
    if (c == NULL || (c->arena = tsr_arena_new(0)) == NULL || (c->dst = strdup(dst)) == NULL) {
        if (c != NULL) {
            tsr_arena_free(&c->arena);
        }
        free(c);
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    c->o = *o;
    c->o.mem_limit = o->mem_limit > 0 ? o->mem_limit : DEFAULT_MEM_LIMIT;
    tsr_convert_plan *p = &c->pub;
    tsr_status st = load_source(c, src, err);
    if (st == TSR_OK) {
        st = c->to_tessera ? import_plan(c, err) : export_plan(c, err);
    }
    if (st != TSR_OK) {
        tsr_convert_plan_free(&p);
        return st;
    }
    c->pub.seconds = (double)c->pub.bytes_out / NOMINAL_BYTES_PER_SECOND;
    *out = p;
    return TSR_OK;
}

tsr_status tsr_convert_run(tsr_convert_plan *p, tsr_err *err)
{
    conversion *c = (conversion *)(void *)p;
    return c->to_tessera ? import_run(c, err) : export_run(c, err);
}

void tsr_convert_plan_free(tsr_convert_plan **p)
{
    if (p == NULL || *p == NULL) {
        return;
    }
    conversion *c = (conversion *)(void *)*p;
    tsr_map_free(&c->map);
    tsr_source_close(&c->source);
    free(c->source_headers);
    free(c->dst);
    tsr_arena_free(&c->arena);
    free(c);
    *p = NULL;
}
