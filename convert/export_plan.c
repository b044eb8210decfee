/* export_plan.c - which safetensors files an export makes: those that were imported, byte for byte, when nothing
 * changed; else a deterministic set of shards. */
#include "convert/convert_priv.h"
#include "convert/from_safetensors.h"
#include "convert/layouts.h"
#include "convert/st_header.h"
#include "format/io.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_SHARD_BYTES ((uint64_t)5000000000)

tsr_status export_name(const conversion *c, int64_t i, char *buf, size_t room, tsr_err *err)
{
    char name[4400];
    int32_t expert;
    const tsr_tensor_decl *d = &c->map->groups[tsr_map_group(c->map, i, &expert)];
    (void)tsr_map_name(c->map, i, name, sizeof name);
    if (c->layout->row_count > 0 && strncmp(name, "other.", 6) == 0) {
        (void)snprintf(buf, room, "%s", name + 6);
        return TSR_OK;
    }
    if (c->layout->row_count == 0 || tsr_layout_map(c->layout, true, name, d->dtype, buf, room) == NULL) {
        if (c->layout->row_count > 0 && strncmp(name, "optim.", 6) != 0) {
            TSR_FAIL(err, TSR_E_UNSUPPORTED, "%s: %s: the %s layout has no name for it", c->source->path,
                     name, c->layout->arch);
        }
        (void)snprintf(buf, room, "%s", name);
    }
    return TSR_OK;
}

/* Shape and dtype as safetensors spells them. */
static const char *st_dtype(const tsr_tensor_decl *d)
{
    const tsr_dtype_traits *t = tsr_dtype_info((unsigned)d->src_dtype);
    return t != NULL && t->st_name != NULL ? t->st_name : tsr_dtype_info(TSR_DT_U8)->st_name;
}

static int64_t st_dim(const tsr_tensor_decl *d, int k)
{
    const tsr_dtype_traits *have = tsr_dtype_info((unsigned)d->dtype),
                           *as = tsr_dtype_info((unsigned)d->src_dtype);
    return k == d->rank - 1 ? d->shape[k] / have->elems_per_unit * as->elems_per_unit : d->shape[k];
}

/* ---- as imported --------------------------------------------------------------------------------------------------- */

/* The item an entry of an original header came from, when it is unchanged; else -1. */
static int64_t find_original(const conversion *c, const st_entry *e)
{
    char name[4400];
    if (c->layout->row_count == 0) {
        (void)snprintf(name, sizeof name, "%s", e->name);
    } else if (tsr_layout_map(c->layout, false, e->name, (tsr_dtype)e->dtype, name, sizeof name) == NULL) {
        (void)snprintf(name, sizeof name, "other.%s", e->name);
    }
    int64_t i = tsr_map_find(c->map, name, NULL);
    if (i < 0) {
        return -1;
    }
    const tsr_tensor_decl *d = &c->map->groups[tsr_map_group(c->map, i, NULL)];
    bool same = d->src_dtype == (tsr_dtype)e->dtype && d->rank == e->rank &&
                c->source->tensors[c->map->src[i]].bytes == e->end - e->begin;
    for (int k = 0; same && k < d->rank; k++) {
        same = st_dim(d, k) == e->shape[k];
    }
    return same ? i : -1;
}

static int by_begin(const void *a, const void *b)
{
    const out_entry *x = a, *y = b;
    return x->begin != y->begin ? (x->begin < y->begin ? -1 : 1) : (x->end < y->end ? -1 : x->end > y->end);
}

static tsr_status add_file(conversion *c, out_file f, tsr_err *err)
{
    if ((c->file_count & (c->file_count - 1)) == 0) {
        out_file *grown = tsr_arena_alloc(c->arena, ((size_t)c->file_count * 2 + 1) * sizeof *grown);
        if (grown == NULL) {
            TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
        }
        if (c->file_count > 0) {
            memcpy(grown, c->files, (size_t)c->file_count * sizeof *grown);
        }
        c->files = grown;
    }
    c->files[c->file_count++] = f;
    return TSR_OK;
}

/* One file of the headers asset. *same false: something of it is not as it was. */
static tsr_status take_original(conversion *c, const char *name, const uint8_t *header, uint64_t bytes,
                                bool *same, int64_t *seen, tsr_err *err)
{
    st_header h;
    tsr_arena *a = tsr_arena_new(0);
    if (a == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    out_file f = { .name = name, .header = header, .header_bytes = bytes };
    tsr_status st = st_header_parse(&h, a, name, header + 8, bytes - 8, INT64_MAX, true, err);
    if (st == TSR_OK) {
        f.entries = tsr_arena_alloc(c->arena, ((size_t)h.count + 1) * sizeof *f.entries);
        st = f.entries != NULL ? TSR_OK : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    }
    for (int64_t i = 0; st == TSR_OK && *same && i < h.count; i++) {
        int64_t item = find_original(c, &h.entries[i]);
        if (item < 0) {
            /* dropped at import because the index did not list it, or changed since */
            *same = false;
        }
        f.entries[f.count++] = (out_entry){ item, h.entries[i].begin, h.entries[i].end };
    }
    if (st == TSR_OK && *same) {
        qsort(f.entries, (size_t)f.count, sizeof *f.entries, by_begin);
        f.data_bytes = h.data_bytes;
        *seen += f.count;
        st = add_file(c, f, err);
    }
    tsr_arena_free(&a);
    return st;
}

/* *same: the files can be given back as they came. */
static tsr_status plan_original(conversion *c, bool *same, tsr_err *err)
{
    *same = false;
    int64_t asset = -1, seen = 0;
    for (int64_t i = 0; i < c->source->asset_count; i++) {
        asset = strcmp(c->source->assets[i].name, ST_HEADERS_ASSET) == 0 ? i : asset;
    }
    if (asset < 0 || c->o.shard_bytes != 0 || c->single || c->map->ignored > 0) {
        return TSR_OK;
    }
    char *text;
    TSR_TRY(c->source->ops->read_asset(c->source, asset, &text, err));
    c->source_headers = (uint8_t *)text;
    c->source_headers_bytes = c->source->assets[asset].bytes;
    const uint8_t *p = c->source_headers, *end = p + c->source_headers_bytes;
    *same = true;
    while (*same && p < end) {
        uint32_t n;
        uint64_t bytes;
        if ((size_t)(end - p) < 4) {
            break;
        }
        memcpy(&n, p, 4);
        if (n > 4096 || (size_t)(end - p) < 12u + n) {
            break;
        }
        memcpy(&bytes, p + 4 + n, 8);
        if (bytes < 10 || bytes > (uint64_t)(end - p) - 12 - n) {
            break;
        }
        const char *name = tsr_arena_strndup(c->arena, (const char *)p + 4, n);
        if (name == NULL || strchr(name, '/') != NULL || name[0] == '.') {
            break;
        }
        TSR_TRY(take_original(c, name, p + 12 + n, bytes, same, &seen, err));
        p += 12 + n + bytes;
    }
    if (*same && p != end) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: assets/%s is damaged", c->source->path, ST_HEADERS_ASSET);
    }
    *same = *same && seen == c->map->count;
    if (!*same) {
        c->file_count = 0;
        TSR_TRY(convert_warn(c,
                             "the files cannot be byte-identical to the imported ones: tensors changed, were "
                             "added or left out",
                             err));
    }
    return TSR_OK;
}

/* ---- anew ------------------------------------------------------------------------------------------------------------ */

void export_json_text(FILE *f, const char *s)
{
    (void)fputc('"', f);
    for (; *s != '\0'; s++) {
        unsigned char ch = (unsigned char)*s;
        if (ch == '"' || ch == '\\') {
            (void)fprintf(f, "\\%c", ch);
        } else if (ch < 32) {
            (void)fprintf(f, "\\u%04x", ch);
        } else {
            (void)fputc(ch, f);
        }
    }
    (void)fputc('"', f);
}

/* Compact, padded with blanks to a multiple of 8. */
tsr_status export_header(const conversion *c, const out_file *f, uint8_t **header, uint64_t *header_bytes,
                         out_entry **entries, tsr_err *err)
{
    char *text = NULL, name[4400];
    size_t n = 0;
    uint64_t at = 0;
    FILE *m = open_memstream(&text, &n);
    out_entry *list = malloc(((size_t)f->count + 1) * sizeof *list);
    *header = NULL;
    *entries = NULL;
    if (m == NULL || list == NULL) {
        if (m != NULL) {
            (void)fclose(m);
        }
        free(text);
        free(list);
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    (void)fwrite("\0\0\0\0\0\0\0\0", 1, 8, m); /* the length, filled in below */
    (void)fputs("{\"__metadata__\":{\"format\":\"pt\"}", m);
    tsr_status st = TSR_OK;
    for (int64_t k = 0; st == TSR_OK && k < f->count; k++) {
        int64_t i = f->first + k;
        const tsr_tensor_decl *d = &c->map->groups[tsr_map_group(c->map, i, NULL)];
        uint64_t bytes = c->source->tensors[c->map->src[i]].bytes;
        st = export_name(c, i, name, sizeof name, err);
        (void)fputc(',', m);
        export_json_text(m, name);
        (void)fprintf(m, ":{\"dtype\":\"%s\",\"shape\":[", st_dtype(d));
        for (int r = 0; r < d->rank; r++) {
            (void)fprintf(m, "%s%lld", r > 0 ? "," : "", (long long)st_dim(d, r));
        }
        (void)fprintf(m, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)at,
                      (unsigned long long)(at + bytes));
        list[k] = (out_entry){ i, at, at + bytes };
        at += bytes;
    }
    (void)fputc('}', m);
    for (long used = ftell(m); used % 8 != 0; used++) {
        (void)fputc(' ', m);
    }
    if (fclose(m) != 0 && st == TSR_OK) {
        st = TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    }
    if (st != TSR_OK) {
        free(text);
        free(list);
        return st;
    }
    uint64_t json_bytes = n - 8;
    memcpy(text, &json_bytes, 8);
    *header = (uint8_t *)text;
    *header_bytes = n;
    *entries = list;
    return TSR_OK;
}

static int64_t shard_end(const conversion *c, int64_t first, uint64_t limit)
{
    uint64_t sum = 0;
    int64_t i = first;
    while (i < c->map->count) {
        sum += c->source->tensors[c->map->src[i]].bytes;
        if (i > first && sum > limit) {
            break;
        }
        i++;
    }
    return i;
}

static tsr_status plan_anew(conversion *c, tsr_err *err)
{
    uint64_t limit = c->single ? UINT64_MAX : c->o.shard_bytes > 0 ? c->o.shard_bytes : DEFAULT_SHARD_BYTES;
    uint32_t total = 0;
    for (int64_t i = 0; i < c->map->count || total == 0; i = shard_end(c, i, limit)) {
        total++;
        if (c->map->count == 0) {
            break;
        }
    }
    int64_t first = 0;
    for (uint32_t k = 0; k < total; k++) {
        char name[300];
        out_file f = { 0 };
        int64_t end = shard_end(c, first, limit);
        const char *slash = strrchr(c->dst, '/');
        if (c->single) {
            (void)snprintf(name, sizeof name, "%.250s", slash != NULL ? slash + 1 : c->dst);
        } else if (total == 1) {
            (void)snprintf(name, sizeof name, "model.safetensors");
        } else {
            (void)snprintf(name, sizeof name, "model-%05u-of-%05u.safetensors", k + 1, total);
        }
        f.name = tsr_arena_strndup(c->arena, name, strlen(name));
        if (f.name == NULL) {
            TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
        }
        f.first = first;
        f.count = end - first;
        uint8_t *header;
        out_entry *entries;
        TSR_TRY(export_header(c, &f, &header, &f.header_bytes, &entries, err)); /* only its size is kept */
        f.data_bytes = f.count > 0 ? entries[f.count - 1].end : 0;
        free(header);
        free(entries);
        TSR_TRY(add_file(c, f, err));
        first = end;
    }
    return TSR_OK;
}

/* ---- both -------------------------------------------------------------------------------------------------------------- */

static tsr_status pick_layout(conversion *c, tsr_err *err)
{
    c->layout = c->map->layout;
    if (c->source->ckpt == NULL) {
        return TSR_OK;
    }
    size_t n;
    const char *text = tsr_ckpt_manifest(c->source->ckpt, &n);
    json_t *root = json_loadb(text, n, 0, NULL);
    const char *arch = json_string_value(json_object_get(root, "arch"));
    const char *asked = c->o.arch != NULL && strcmp(c->o.arch, "auto") != 0 ? c->o.arch : arch;
    const tsr_layout *l = asked != NULL ? tsr_layout_find(asked) : NULL;
    tsr_status st = TSR_OK;
    if (l == NULL) {
        st = TSR_ERR(err, TSR_E_UNSUPPORTED, "%s: its layout %s is unknown here (--arch chooses one)",
                     c->source->path, asked != NULL ? asked : "?");
    } else {
        c->layout = l;
        c->pub.arch = l->arch;
    }
    json_decref(root);
    return st;
}

tsr_status export_plan(conversion *c, tsr_err *err)
{
    bool same = false;
    TSR_TRY(pick_layout(c, err));
    if (c->source->ckpt != NULL) {
        TSR_TRY(plan_original(c, &same, err));
    }
    c->pub.identical_files = same;
    if (!same) {
        TSR_TRY(plan_anew(c, err));
    }
    for (uint32_t i = 0; i < c->file_count; i++) {
        c->pub.bytes_out += c->files[i].header_bytes + c->files[i].data_bytes;
    }
    for (int64_t i = 0; !c->single && i < c->source->asset_count; i++) {
        c->pub.bytes_out += c->source->assets[i].bytes;
    }
    c->pub.files_out = c->file_count;
    c->pub.peak_bytes = ((uint64_t)8 << 20) + (uint64_t)c->map->count * 300 + c->source_headers_bytes;
    return TSR_OK;
}
