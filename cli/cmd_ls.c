/* cmd_ls.c - tessera ls: names, shapes, places of tensors; reads no tensor data. */
#include "cli/cli.h"
#include "cli/glob.h"
#include "cli/list.h"
#include "cli/out.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static const char *const synopsis[] = { "[OPTION]... PATH [GLOB]...", "[OPTION]... PATH:GLOB", NULL };
static const char *const description[] = {
    "Lists the tensors of a checkpoint in any format. Tensor data is never read.",
    "The same matrix of every expert of a layer is a family and takes one line: its name holds {e} where the "
    "number "
    "of the expert stands, and the count follows. With --all, or when a GLOB matches the names of single "
    "experts but "
    "not the family's, they are listed one by one.",
    "A GLOB matches whole names: * ? and [..] as in the shell, also across dots and slashes; {gate,up} is "
    "either word "
    "and {0..7} a whole number from 0 to 7.",
    "The columns of --long are: dtype, shape (of one expert), bytes, shard (the first and how many more), "
    "codec, "
    "stored bytes by bytes, name.",
    NULL,
};
static const tsr_opt options[] = {
    { "long", 'l', TSR_OPT_FLAG, NULL, 0, 0, "Also dtype, shape, bytes, shard, codec and ratio." },
    { "all", 'r', TSR_OPT_FLAG, NULL, 0, 0, "List every expert by itself." },
    { "jsonl", 0, TSR_OPT_FLAG, NULL, 0, 0, "One JSON object per line and tensor." },
    { "names", 0, TSR_OPT_CHOICE, "canonical|source", 0, 0,
      "Tessera's own names, or those of the model's source." },
    TSR_OPT_END,
};
static const tsr_pair examples[] = {
    { "tessera ls model.tsr", "One line per tensor and family." },
    { "tessera ls -l model.tsr '*.experts.{0..7}.gate*'",
      "The gate matrices of eight experts in every layer." },
    { "tessera ls --jsonl model/ '*norm*'", "Norms of a safetensors folder, for a script." },
    { 0 },
};
static const char *const see_also[] = { "info", "cat", NULL };

typedef struct listing {
    tsr_cli *cli;
    tsr_list list;
    tsr_glob *glob;
    tsr_list_row row;
    bool wide, all, jsonl, source_names;
    uint64_t printed;
} listing;

/* ---- one row
 * ----------------------------------------------------------------------------------------------- */

static tsr_status print_json(listing *g, tsr_err *err)
{
    const tsr_list_row *r = &g->row;
    json_t *o = json_object();
    tsr_json_set(&o, "name", tsr_json_text(r->name));
    tsr_json_set(&o, "dtype", tsr_json_text(tsr_dtype_name((unsigned)r->dtype)));
    tsr_json_set(&o, "shape", tsr_json_shape(r->rank, r->shape));
    if (r->expert_count > 0) {
        tsr_json_set(&o, "experts", json_integer(r->expert_count));
    }
    tsr_json_set(&o, "bytes", tsr_json_u64(r->bytes));
    tsr_json_set(&o, "stored_bytes", tsr_json_u64(r->stored_bytes));
    tsr_json_set(&o, "ratio",
                 r->bytes > 0 ? tsr_json_number((double)r->stored_bytes / (double)r->bytes) : json_null());
    tsr_json_set(&o, "codec", tsr_json_text(r->codec));
    tsr_json_set(&o, "file", tsr_json_text(r->file));
    tsr_json_set(&o, "files", json_integer(r->file_count));
    tsr_json_set(&o, "class", tsr_json_text(tsr_class_name(r->klass)));
    tsr_json_set(&o, "layer", r->layer >= 0 ? json_integer(r->layer) : json_null());
    if (!g->jsonl) {
        (void)fputs(g->printed > 0 ? ",\n    " : "\n    ", stdout);
    }
    char *text = o != NULL ? json_dumps(o, JSON_COMPACT | JSON_REAL_PRECISION(17)) : NULL;
    json_decref(o);
    if (text == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    (void)fputs(text, stdout); /* failures show in tsr_cli_go_on */
    (void)fputs(g->jsonl ? "\n" : "", stdout);
    free(text);
    return TSR_OK;
}

static void print_text(const listing *g)
{
    const tsr_list_row *r = &g->row;
    if (g->wide) {
        char shape[256], file[64] = "", ratio[16] = "-";
        if (r->bytes > 0) {
            (void)snprintf(ratio, sizeof ratio, "%.3f", (double)r->stored_bytes / (double)r->bytes);
        }
        if (r->file_count > 1) {
            (void)snprintf(file, sizeof file, " +%u", r->file_count - 1);
        }
        (void)printf("%-8s %-18s %15" PRIu64 "  ", tsr_dtype_name((unsigned)r->dtype),
                     tsr_shape_text(r->rank, r->shape, shape, sizeof shape), r->bytes);
        tsr_out_text(stdout, r->file != NULL ? r->file : "-");
        (void)printf("%s  %-12s %6s  ", file, r->codec, ratio);
    }
    tsr_out_text(stdout, r->name);
    if (r->expert_count > 0) {
        (void)printf("  x %u", r->expert_count);
    }
    (void)fputc('\n', stdout);
}

static tsr_status print_row(listing *g, uint32_t group, int64_t expert, tsr_err *err)
{
    bool json = g->cli->json || g->jsonl;
    if (g->wide || json) {
        TSR_TRY(tsr_list_storage(&g->list, group, expert, &g->row, err));
    }
    if (json) {
        TSR_TRY(print_json(g, err));
    } else {
        print_text(g);
    }
    g->printed++;
    return tsr_cli_go_on(g->cli, err);
}

/* ---- all rows
 * --------------------------------------------------------------------------------------------------- */

/* The experts of a family one by one. */
static tsr_status print_experts(listing *g, uint32_t group, uint32_t count, tsr_err *err)
{
    for (uint32_t e = 0; e < count; e++) {
        TSR_TRY(tsr_list_get(&g->list, group, e, g->source_names, &g->row, err));
        if (tsr_list_present(&g->list, group, e) && tsr_glob_match(g->glob, g->row.name)) {
            TSR_TRY(print_row(g, group, e, err));
        }
    }
    return TSR_OK;
}

static tsr_status print_all(listing *g, const char *path, tsr_err *err)
{
    bool document = g->cli->json && !g->jsonl;
    if (document) {
        json_t *p = tsr_json_text(path), *w = tsr_json_text(g->list.what);
        (void)fputs("{\n  \"path\": ", stdout);
        (void)json_dumpf(p, stdout, JSON_ENCODE_ANY); /* failures show in tsr_out_check */
        (void)fputs(",\n  \"format\": ", stdout);
        (void)json_dumpf(w, stdout, JSON_ENCODE_ANY);
        (void)fputs(",\n  \"tensors\": [", stdout);
        json_decref(p);
        json_decref(w);
    }
    for (uint32_t i = 0; i < g->list.count; i++) {
        TSR_TRY(tsr_list_get(&g->list, i, -1, g->source_names, &g->row, err));
        uint32_t experts = g->row.expert_count;
        bool family = !g->all && tsr_glob_match(g->glob, g->row.name);
        if (experts == 0 ? tsr_glob_match(g->glob, g->row.name) : family) {
            TSR_TRY(print_row(g, i, -1, err));
        } else if (experts > 0) {
            TSR_TRY(print_experts(g, i, experts, err));
        }
        TSR_TRY(tsr_cli_go_on(g->cli, err));
    }
    if (document) {
        (void)fputs(g->printed > 0 ? "\n  ]\n}\n" : "]\n}\n", stdout);
    }
    if (g->printed == 0 && !tsr_glob_empty(g->glob)) {
        TSR_FAIL(err, TSR_E_MISSING, "%s: no tensor matches (tessera ls %s lists all)", path, path);
    }
    return tsr_out_check(err);
}

/* "PATH:GLOB", when there is no such path but PATH exists: *path malloc'ed, *glob points into word. */
static tsr_status split_path(const char *word, char **path, const char **glob, tsr_err *err)
{
    struct stat sb;
    *glob = NULL;
    *path = strdup(word);
    if (*path == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    if (lstat(word, &sb) == 0) {
        return TSR_OK;
    }
    for (const char *colon = strchr(word, ':'); colon != NULL; colon = strchr(colon + 1, ':')) {
        (*path)[colon - word] = '\0';
        if (colon[1] != '\0' && lstat(*path, &sb) == 0) {
            *glob = colon + 1;
            return TSR_OK;
        }
        (*path)[colon - word] = ':';
    }
    return TSR_OK;
}

static tsr_status run(tsr_cli *cli, const tsr_args *a, tsr_err *err)
{
    listing *g = calloc(1, sizeof *g);
    const char **patterns = calloc(a->operand_count + 1, sizeof *patterns), *inner;
    char *path = NULL;
    tsr_status st;
    if (g == NULL || patterns == NULL) {
        free(g);
        free(patterns);
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    g->cli = cli;
    g->wide = tsr_opt_given(a, "long");
    g->all = tsr_opt_given(a, "all");
    g->jsonl = tsr_opt_given(a, "jsonl");
    g->source_names = strcmp(tsr_opt_text(a, "names", "canonical"), "source") == 0;
    TSR_GO(split_path(a->operands[0], &path, &inner, err));
    size_t n = 0;
    if (inner != NULL) {
        patterns[n++] = inner;
    }
    for (size_t i = 1; i < a->operand_count; i++) {
        patterns[n++] = a->operands[i];
    }
    TSR_GO(tsr_glob_new(&g->glob, patterns, err));
    TSR_GO(tsr_list_open(&g->list, cli, path, err));
    st = print_all(g, path, err);
    tsr_list_close(&g->list);
out:
    tsr_glob_free(&g->glob);
    free(path);
    free(patterns);
    free(g);
    return st;
}

const tsr_cmd tsr_cmd_ls = { .name = "ls",
                             .what = "List the tensors of a checkpoint",
                             .synopsis = synopsis,
                             .description = description,
                             .options = options,
                             .examples = examples,
                             .see_also = see_also,
                             .operand_min = 1,
                             .operand_max = SIZE_MAX,
                             .run = run };
