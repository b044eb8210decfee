/* list.c - see list.h. */
#include "cli/list.h"
#include "cli/out.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- opening ------------------------------------------------------------------------------------------ */

static const tsr_layout *layout_of(const tsr_ckpt *c)
{
    size_t n;
    const char *text = tsr_ckpt_manifest(c, &n);
    json_t *root = json_loadb(text, n, 0, NULL);
    const char *arch = json_string_value(json_object_get(root, "arch"));
    const tsr_layout *l = arch != NULL ? tsr_layout_find(arch) : NULL;
    json_decref(root);
    return l != NULL ? l : tsr_layout_find("raw");
}

tsr_status tsr_list_open(tsr_list *out, tsr_cli *cli, const char *path, tsr_err *err)
{
    memset(out, 0, sizeof *out);
    out->cli = cli;
    const tsr_source_ops *f = tsr_cli_format_of(path);
    size_t files;
    if (f != NULL && strcmp(f->name, "tessera") == 0) {
        TSR_TRY(tsr_cli_open_ckpt(cli, &out->ckpt, path, err));
        size_t n = strlen(path);
        out->what = n > 4 && strcmp(path + n - 4, ".tar") == 0 ? "tar of a Tessera checkpoint"
                                                               : "Tessera checkpoint";
        out->layout = layout_of(out->ckpt);
        out->count = tsr_ckpt_tensor_count(out->ckpt);
        files = tsr_ckpt_file_count(out->ckpt);
    } else {
        TSR_TRY(tsr_cli_open_view(cli, &out->view, path, NULL, err));
        out->what = out->view.source->what;
        out->layout = out->view.map->layout;
        out->count = out->view.map->group_count;
        files = (size_t)out->view.source->file_count;
    }
    out->seen_files = calloc(files + 1, 1);
    if (out->seen_files == NULL) {
        tsr_list_close(out);
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    return TSR_OK;
}

void tsr_list_close(tsr_list *l)
{
    tsr_ckpt_close(&l->ckpt);
    if (l->view.source != NULL) {
        tsr_view_close(&l->view);
    }
    free(l->seen_files);
    memset(l, 0, sizeof *l);
}

/* ---- names ------------------------------------------------------------------------------------------------
 */

/* Writes template with its {e} replaced by expert; without one, as it is. */
static void put_expert(const char *template, const char *expert, char *buf, size_t room)
{
    const char *at = strstr(template, "{e}");
    if (at == NULL) {
        (void)snprintf(buf, room, "%s", template);
    } else {
        (void)snprintf(buf, room, "%.*s%s%s", (int)(at - template), template, expert, at + 3);
    }
}

/* A number no real expert has: it travels through the table of names and marks where the expert's number
 * goes. */
#define MARK "999999937"

static void to_source_name(const tsr_layout *l, tsr_list_row *row, bool family, tsr_dtype dtype)
{
    char from[TSR_LIST_NAME_BYTES], to[TSR_LIST_NAME_BYTES];
    put_expert(row->name, MARK, from, sizeof from);
    if (tsr_layout_map(l, true, family ? from : row->name, dtype, to, sizeof to) == NULL) {
        return; /* a name the table does not know is kept as it came */
    }
    char *at = family ? strstr(to, MARK) : NULL;
    if (at != NULL) {
        (void)snprintf(row->name, sizeof row->name, "%.*s{e}%s", (int)(at - to), to, at + sizeof MARK - 1);
    } else if (!family) {
        (void)snprintf(row->name, sizeof row->name, "%s", to);
    }
}

static void set_name(const tsr_list *l, tsr_list_row *row, const char *template, int64_t expert, int64_t src,
                     bool source_names)
{
    bool family = row->expert_count > 0;
    char number[24];
    (void)snprintf(number, sizeof number, "%lld", (long long)expert);
    put_expert(template, family || expert < 0 ? "{e}" : number, row->name, sizeof row->name);
    if (!source_names) {
        return;
    }
    if (src >= 0 && !family) {
        (void)snprintf(row->name, sizeof row->name, "%s", l->view.source->tensors[src].name);
    } else {
        to_source_name(l->layout, row, family, row->dtype);
    }
}

/* ---- rows
 * --------------------------------------------------------------------------------------------------- */

static tsr_status get_foreign(const tsr_list *l, uint32_t group, int64_t expert, bool source_names,
                              tsr_list_row *row, tsr_err *err)
{
    const tsr_map *m = l->view.map;
    const tsr_tensor_decl *d = &m->groups[group];
    uint64_t bytes;
    if (!tsr_shape_bytes(d->dtype, d->rank, d->shape, &bytes)) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: its size does not fit", d->name);
    }
    row->dtype = d->dtype;
    row->rank = d->rank;
    row->shape = d->shape;
    row->klass = d->klass;
    row->layer = d->layer;
    row->expert_count = expert < 0 ? d->expert_count : 0;
    row->bytes = bytes;
    if (row->expert_count > 0 && !tsr_mul_u64(bytes, d->expert_count, &row->bytes)) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: its size does not fit", d->name);
    }
    int64_t src = m->src[m->group_first[group] + (expert > 0 ? expert : 0)];
    set_name(l, row, d->name, d->expert_count > 0 ? expert : -1, src, source_names);
    return TSR_OK;
}

tsr_status tsr_list_get(const tsr_list *l, uint32_t group, int64_t expert, bool source_names,
                        tsr_list_row *row, tsr_err *err)
{
    TSR_ASSERT(group < l->count);
    row->stored_bytes = 0;
    row->file = NULL;
    row->file_count = 0;
    row->codec = "-";
    if (l->ckpt == NULL) {
        return get_foreign(l, group, expert, source_names, row, err);
    }
    tsr_tensor_info t;
    TSR_TRY(tsr_ckpt_tensor(l->ckpt, group, &t, err));
    row->dtype = t.dtype;
    row->rank = t.rank;
    row->shape = t.shape;
    row->klass = t.klass;
    row->layer = t.layer;
    row->expert_count = expert < 0 ? t.expert_count : 0;
    row->bytes = t.item_bytes;
    if (row->expert_count > 0 && !tsr_mul_u64(t.item_bytes, t.expert_count, &row->bytes)) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: its size does not fit", t.name);
    }
    set_name(l, row, t.name, t.expert_count > 0 ? expert : -1, -1, source_names);
    return TSR_OK;
}

bool tsr_list_present(const tsr_list *l, uint32_t group, int64_t expert)
{
    const tsr_map *m = l->view.map;
    return l->ckpt != NULL || m->src[m->group_first[group] + (expert > 0 ? expert : 0)] >= 0;
}

static void see_file(tsr_list *l, tsr_list_row *row, uint32_t file, const char *name)
{
    if (l->seen_files[file] == 0) {
        l->seen_files[file] = 1;
        row->file_count++;
        row->file = row->file == NULL ? name : row->file;
    }
}

/* The codec of what was seen so far and of one more. */
static const char *codec_of(const char *before, const char *more)
{
    return strcmp(before, "-") == 0 || strcmp(before, more) == 0 ? more : "mixed";
}

static tsr_status storage_foreign(tsr_list *l, uint32_t group, int64_t first, int64_t last, tsr_list_row *row)
{
    const tsr_source *s = l->view.source;
    const tsr_map *m = l->view.map;
    memset(l->seen_files, 0, (size_t)s->file_count);
    for (int64_t e = first; e < last; e++) {
        int64_t src = m->src[m->group_first[group] + e];
        if (src >= 0) {
            see_file(l, row, s->tensors[src].file, s->files[s->tensors[src].file].name);
            row->stored_bytes += s->tensors[src].bytes;
            row->codec = codec_of(row->codec, "raw");
        }
    }
    return TSR_OK;
}

tsr_status tsr_list_storage(tsr_list *l, uint32_t group, int64_t expert, tsr_list_row *row, tsr_err *err)
{
    int64_t first = expert < 0 ? 0 : expert,
            last = expert < 0 && row->expert_count > 0 ? row->expert_count : first + 1;
    if (l->ckpt == NULL) {
        return storage_foreign(l, group, first, last, row);
    }
    tsr_tensor_info t;
    TSR_TRY(tsr_ckpt_tensor(l->ckpt, group, &t, err));
    memset(l->seen_files, 0, tsr_ckpt_file_count(l->ckpt));
    for (int64_t e = first; e < last; e++) {
        for (uint32_t c = 0; c < t.chunks; c++) {
            tsr_extent_info x;
            tsr_file_info f = { 0 };
            TSR_TRY(tsr_ckpt_extent(l->ckpt, &t, (uint32_t)e, c, &x, err));
            if (l->seen_files[x.file] == 0) {
                TSR_TRY(tsr_ckpt_file(l->ckpt, x.file, &f, err));
            }
            see_file(l, row, x.file, f.name);
            row->stored_bytes += x.stored_bytes;
            row->codec = codec_of(row->codec, tsr_codec_name(x.codec));
        }
    }
    return TSR_OK;
}
