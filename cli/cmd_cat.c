/* cmd_cat.c - tessera cat: values or bytes of a tensor, of a part of it, or of one expert. */
#include "cli/cli.h"
#include "cli/out.h"
#include "inspect/inspect.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *const synopsis[] = { "[OPTION]... PATH NAME",
                                        "[OPTION]... PATH [NAME] --layer L --expert E", NULL };
static const char *const description[] = {
    "Prints a tensor of a checkpoint of any format: NAME is its canonical name or the source's own. With "
    "--layer and "
    "--expert all matrices of that expert are printed, each behind a line that names it; with a family's "
    "NAME (the one "
    "that holds {e}), --expert alone is enough.",
    "Text has one row of the last dimension per line. Values of MXFP4 tensors are multiplied with their "
    "scales. raw "
    "writes the bytes as they are decoded, npy a file for NumPy (bf16, fp8 and packed types as unsigned "
    "integers, "
    "unless --as converts them). Neither is written to a terminal. With --json each tensor is one line: an "
    "object "
    "with name, dtype, shape and the flat list of values, where NaN and Inf are null.",
    NULL,
};
static const tsr_opt options[] = {
    { "layer", 0, TSR_OPT_UINT, "L", 0, 1u << 20, "Layer of the expert." },
    { "expert", 0, TSR_OPT_UINT, "E", 0, 1u << 20,
      "Number of the expert, counted from 0 over the whole model." },
    { "slice", 0, TSR_OPT_TEXT, "SLICE", 0, 0,
      "Part to print, as in Python but without steps: \"0:4,:\" is four rows." },
    { "start", 0, TSR_OPT_UINT, "N", 0, INT64_MAX, "First index of the first dimension; 0 when not given." },
    { "count", 0, TSR_OPT_UINT, "N", 0, INT64_MAX,
      "How many indices of the first dimension; all when not given." },
    { "format", 0, TSR_OPT_CHOICE, "text|raw|npy|hex", 0, 0, "What to write; text when not given." },
    { "as", 0, TSR_OPT_CHOICE, "f32|bf16|f16|f64", 0, 0, "Convert the values, rounding to nearest even." },
    { "mxfp4", 0, TSR_OPT_FLAG, NULL, 0, 0,
      "NAME is a packed u8 tensor X.weight_packed: decode it with X.weight_scale." },
    { "codes", 0, TSR_OPT_FLAG, NULL, 0, 0, "MXFP4: the codes' own values, without scales." },
    { "saturate", 0, TSR_OPT_FLAG, NULL, 0, 0,
      "The largest finite value, not an error, where a value does not fit." },
    { "arch", 0, TSR_OPT_CHOICE, "auto|raw|kimi-k3|kimi-linear|canonical", 0, 0,
      "Names of a foreign source." },
    { "output", 'o', TSR_OPT_TEXT, "FILE", 0, 0,
      "Write to FILE, which must not exist, instead of standard output." },
    TSR_OPT_END,
};
static const tsr_pair examples[] = {
    { "tessera cat model.tsr layers.1.attn_norm.weight", "All values as text." },
    { "tessera cat model.tsr --layer 12 --expert 345 --slice 0:2,0:8",
      "A corner of every matrix of one expert." },
    { "tessera cat model.tsr embed.weight --format npy --as f32 -o embed.npy", "For NumPy." },
    { 0 },
};
static const char *const see_also[] = { "ls", "diff", NULL };

/* ---- where the bytes go
 * ------------------------------------------------------------------------------------- */

typedef struct sink {
    const tsr_cli *cli;
    FILE *f;
    tsr_out_file file; /* .f NULL for standard output */
    int error;         /* errno of a failed write */
    bool hex, later;   /* JSON: values are strings; one was printed */
} sink;

static void write_out(sink *s, const void *data, size_t n)
{
    errno = 0;
    if (n > 0 && fwrite(data, 1, n, s->f) != n) {
        s->error = errno != 0 ? errno : EIO;
    }
}

static bool put(void *payload, const void *data, size_t n)
{
    sink *s = payload;
    write_out(s, data, n);
    return s->error == 0 && *s->cli->progress.cancel == 0;
}

/* Text to the elements of a JSON array; what JSON has no number for becomes null. No word is cut between
 * calls. */
static bool put_json(void *payload, const void *data, size_t n)
{
    sink *s = payload;
    const char *p = data, *end = p + n;
    while (p < end && s->error == 0) {
        const char *from = p;
        while (p < end && *p != ' ' && *p != '\n') {
            p++;
        }
        if (p > from) {
            bool number = s->hex || (p[-1] >= '0' && p[-1] <= '9');
            write_out(s, ",", s->later ? 1 : 0);
            write_out(s, "\"", s->hex ? 1 : 0);
            write_out(s, number ? from : "null", number ? (size_t)(p - from) : 4);
            write_out(s, "\"", s->hex ? 1 : 0);
            s->later = true;
        }
        p += p < end;
    }
    return s->error == 0 && *s->cli->progress.cancel == 0;
}

static tsr_status sink_open(sink *s, const char *path, tsr_err *err)
{
    s->f = stdout;
    if (path == NULL || strcmp(path, "-") == 0) {
        return TSR_OK;
    }
    TSR_TRY(tsr_out_file_open(&s->file, path, err));
    s->f = s->file.f;
    return TSR_OK;
}

static tsr_status sink_close(sink *s, tsr_status st, tsr_err *err)
{
    if (s->file.f == NULL) {
        return st == TSR_E_IO && s->error != 0 ? tsr_out_check(err) : st;
    }
    if (s->error != 0 && (st == TSR_OK || st == TSR_E_IO)) {
        st = TSR_ERR(err, TSR_E_IO, "%s: cannot be written: %s", s->file.name, strerror(s->error));
    }
    return tsr_out_file_close(&s->file, st, err);
}

/* ---- which tensors
 * ------------------------------------------------------------------------------------------- */

typedef struct choice {
    int64_t *items;
    size_t count;
} choice;

/* A source's own name, where it is not canonical. */
static int64_t find_source_name(const tsr_view *v, const char *name)
{
    for (int64_t i = 0; i < v->map->count; i++) {
        if (v->map->src[i] >= 0 && strcmp(v->source->tensors[v->map->src[i]].name, name) == 0) {
            return i;
        }
    }
    return -1;
}

static tsr_status family_item(const tsr_view *v, uint32_t group, const tsr_args *a, int64_t *item,
                              tsr_err *err)
{
    const tsr_tensor_decl *d = &v->map->groups[group];
    uint64_t e = tsr_opt_number(a, "expert", 0);
    if (!tsr_opt_given(a, "expert")) {
        TSR_FAIL(err, TSR_E_USAGE, "%s: is a family of %u experts (choose one with --expert)", d->name,
                 d->expert_count);
    }
    if (e >= d->expert_count) {
        TSR_FAIL(err, TSR_E_MISSING, "%s: expert %" PRIu64 ": there are %u, from 0 on", d->name, e,
                 d->expert_count);
    }
    *item = v->map->group_first[group] + (int64_t)e;
    return TSR_OK;
}

static tsr_status choose_name(const tsr_view *v, const char *path, const char *name, const tsr_args *a,
                              choice *c, tsr_err *err)
{
    uint32_t group;
    int64_t item = tsr_map_find(v->map, name, &group);
    if (item < 0 && group != UINT32_MAX) {
        TSR_TRY(family_item(v, group, a, &item, err));
    } else if (item < 0) {
        item = find_source_name(v, name);
    }
    if (item < 0 || v->map->src[item] < 0) {
        TSR_FAIL(err, TSR_E_MISSING, "%s: %s: no such tensor (tessera ls %s lists them)", path, name, path);
    }
    c->items[c->count++] = item;
    return TSR_OK;
}

static tsr_status choose_expert(const tsr_view *v, const char *path, const tsr_args *a, choice *c,
                                tsr_err *err)
{
    uint64_t layer = tsr_opt_number(a, "layer", 0), expert = tsr_opt_number(a, "expert", 0);
    uint32_t families = 0, experts = 0;
    for (uint32_t g = 0; g < v->map->group_count; g++) {
        const tsr_tensor_decl *d = &v->map->groups[g];
        if (d->klass != TSR_CLASS_EXPERTS || d->expert_count == 0 || d->layer < 0 ||
            (uint64_t)d->layer != layer) {
            continue;
        }
        families++;
        experts = d->expert_count > experts ? d->expert_count : experts;
        int64_t item = v->map->group_first[g] + (int64_t)expert;
        if (expert < d->expert_count && v->map->src[item] >= 0) {
            c->items[c->count++] = item;
        }
    }
    if (families == 0) {
        TSR_FAIL(err, TSR_E_MISSING, "%s: layer %" PRIu64 ": has no experts", path, layer);
    }
    if (c->count == 0) {
        TSR_FAIL(err, TSR_E_MISSING, "%s: layer %" PRIu64 ": expert %" PRIu64 ": there are %u, from 0 on",
                 path, layer, expert, experts);
    }
    return TSR_OK;
}

static tsr_status choose(const tsr_view *v, const tsr_args *a, choice *c, tsr_err *err)
{
    c->items = calloc((size_t)v->map->group_count + 1, sizeof *c->items);
    if (c->items == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    if (a->operand_count > 1) {
        return choose_name(v, a->operands[0], a->operands[1], a, c, err);
    }
    if (!tsr_opt_given(a, "layer") || !tsr_opt_given(a, "expert")) {
        TSR_FAIL(err, TSR_E_USAGE, "cat: needs a tensor's NAME, or --layer and --expert");
    }
    return choose_expert(v, a->operands[0], a, c, err);
}

/* ---- running
 * -------------------------------------------------------------------------------------------------- */

static tsr_cat_format format_of(const char *name)
{
    return strcmp(name, "raw") == 0   ? TSR_CAT_RAW
           : strcmp(name, "npy") == 0 ? TSR_CAT_NPY
           : strcmp(name, "hex") == 0 ? TSR_CAT_HEX
                                      : TSR_CAT_TEXT;
}

/* --start and --count as a slice of the first dimension; *out malloc'ed, NULL when none of them is given. */
static tsr_status slice_of(const tsr_args *a, char **out, tsr_err *err)
{
    uint64_t start = tsr_opt_number(a, "start", 0), count = tsr_opt_number(a, "count", 0), end = INT64_MAX;
    bool given = tsr_opt_given(a, "start") || tsr_opt_given(a, "count");
    const char *slice = tsr_opt_text(a, "slice", NULL);
    *out = NULL;
    if (given && slice != NULL) {
        TSR_FAIL(err, TSR_E_USAGE, "--slice, --start, --count: choose --slice or the other two");
    }
    if (slice == NULL && !given) {
        return TSR_OK;
    }
    if (tsr_opt_given(a, "count")) {
        end = count < INT64_MAX - start ? start + count : INT64_MAX;
    }
    if ((slice != NULL ? asprintf(out, "%s", slice) : asprintf(out, "%" PRIu64 ":%" PRIu64, start, end)) <
        0) {
        *out = NULL;
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    return TSR_OK;
}

static void put_heading(sink *s, const tsr_view *v, int64_t item)
{
    char name[4400], shape[512];
    const tsr_tensor_decl *d = &v->map->groups[tsr_map_group(v->map, item, NULL)];
    (void)tsr_map_name(v->map, item, name, sizeof name);
    (void)fputs("# ", s->f); /* failures show with the next data */
    tsr_out_text(s->f, name);
    (void)fprintf(s->f, " %s %s\n", tsr_dtype_name((unsigned)d->dtype),
                  tsr_shape_text(d->rank, d->shape, shape, sizeof shape));
}

/* {"name": .., "dtype": .., "shape": [..], "values": [  - up to where the values go. */
static tsr_status put_json_heading(sink *s, const tsr_view *v, int64_t item, tsr_err *err)
{
    char name[4400];
    const tsr_tensor_decl *d = &v->map->groups[tsr_map_group(v->map, item, NULL)];
    (void)tsr_map_name(v->map, item, name, sizeof name);
    json_t *o = json_object();
    tsr_json_set(&o, "name", tsr_json_text(name));
    tsr_json_set(&o, "dtype", tsr_json_text(tsr_dtype_name((unsigned)d->dtype)));
    tsr_json_set(&o, "shape", tsr_json_shape(d->rank, d->shape));
    char *text = o != NULL ? json_dumps(o, JSON_COMPACT) : NULL;
    json_decref(o);
    if (text == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    write_out(s, text, strlen(text) - 1);
    write_out(s, ",\"values\":[", 11);
    s->later = false;
    free(text);
    return TSR_OK;
}

/* One tensor, with what stands around it. */
static tsr_status print_item(const tsr_view *v, int64_t item, bool heading, const tsr_cat_opts *o, sink *s,
                             bool json, uint64_t *to_inf, tsr_err *err)
{
    if (json) {
        TSR_TRY(put_json_heading(s, v, item, err));
    } else if (heading) {
        put_heading(s, v, item);
    }
    TSR_TRY(tsr_inspect_cat(v, item, o, json ? put_json : put, s, to_inf, err));
    write_out(s, "]}\n", json ? 3 : 0);
    return TSR_OK;
}

static tsr_status print_items(tsr_cli *cli, const tsr_view *v, const choice *c, const tsr_cat_opts *o,
                              sink *s, tsr_err *err)
{
    bool text = o->format == TSR_CAT_TEXT || o->format == TSR_CAT_HEX;
    if (o->format == TSR_CAT_NPY && c->count > 1) {
        TSR_FAIL(err, TSR_E_USAGE, "--format npy: holds one tensor, this expert has %zu (give a NAME)",
                 c->count);
    }
    s->hex = o->format == TSR_CAT_HEX;
    for (size_t i = 0; i < c->count; i++) {
        uint64_t to_inf = 0;
        char name[4400];
        tsr_status st = print_item(v, c->items[i], c->count > 1 && text, o, s, cli->json, &to_inf, err);
        if (st == TSR_E_IO && s->error == 0 && *cli->progress.cancel != 0) {
            TSR_FAIL(err, TSR_E_CANCELLED, "cat: stopped by a signal");
        }
        TSR_TRY(st);
        if (to_inf > 0) {
            (void)tsr_map_name(v->map, c->items[i], name, sizeof name);
            tsr_cli_warn(cli, "%s: %" PRIu64 " value%s became Inf", name, to_inf, to_inf == 1 ? "" : "s");
        }
    }
    return TSR_OK;
}

static tsr_status cat(tsr_cli *cli, const tsr_args *a, const tsr_cat_opts *o, tsr_err *err)
{
    tsr_view v;
    choice c = { 0 };
    sink s = { .cli = cli };
    const char *path = tsr_opt_text(a, "output", NULL);
    TSR_TRY(tsr_cli_open_view(cli, &v, a->operands[0], tsr_opt_text(a, "arch", NULL), err));
    tsr_status st = choose(&v, a, &c, err);
    if (st == TSR_OK) {
        st = sink_open(&s, path, err);
    }
    if (st == TSR_OK) {
        st = print_items(cli, &v, &c, o, &s, err);
        st = sink_close(&s, st, err);
    }
    free(c.items);
    tsr_view_close(&v);
    return st;
}

static tsr_status run(tsr_cli *cli, const tsr_args *a, tsr_err *err)
{
    const char *as = tsr_opt_text(a, "as", NULL), *output = tsr_opt_text(a, "output", "-");
    char *slice;
    tsr_cat_opts o = { .format = format_of(tsr_opt_text(a, "format", "text")),
                       .as = as != NULL ? tsr_dtype_parse(as) : TSR_DT_NONE,
                       .mxfp4 = tsr_opt_given(a, "mxfp4"),
                       .codes = tsr_opt_given(a, "codes"),
                       .saturate = tsr_opt_given(a, "saturate") };
    bool binary = o.format == TSR_CAT_RAW || o.format == TSR_CAT_NPY;
    if (binary && strcmp(output, "-") == 0 && isatty(STDOUT_FILENO)) {
        TSR_FAIL(err, TSR_E_USAGE, "standard output: is a terminal (redirect it, or use -o FILE)");
    }
    if (binary && cli->json) {
        TSR_FAIL(err, TSR_E_USAGE, "--json: goes with --format text or hex only");
    }
    TSR_TRY(slice_of(a, &slice, err));
    o.slice = slice;
    tsr_status st = cat(cli, a, &o, err);
    free(slice);
    return st;
}

const tsr_cmd tsr_cmd_cat = { .name = "cat",
                              .what = "Print a tensor, a part of it, or one expert",
                              .synopsis = synopsis,
                              .description = description,
                              .options = options,
                              .examples = examples,
                              .see_also = see_also,
                              .operand_min = 1,
                              .operand_max = 2,
                              .run = run };
