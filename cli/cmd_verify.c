/* cmd_verify.c - tessera verify: every byte against its checksum; for foreign formats what can be checked
 * there. */
#include "cli/cli.h"
#include "cli/out.h"
#include "inspect/inspect.h"

#include <dirent.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static const char *const synopsis[] = { "[--quick|--deep] PATH", NULL };
static const char *const description[] = {
    "Checks a checkpoint and prints each finding as \"file: item: what\". It goes on after damage, so that "
    "one run tells "
    "all. Without options every byte of every file is compared with its checksum. PATH may also be a tar, or "
    "a run "
    "folder: then its newest checkpoint without findings is taken, as a resumed run would, with a warning "
    "for what was "
    "skipped; --all verifies every step instead.",
    "A safetensors source has no checksums: its headers, sizes and index are checked, and NaN codes among "
    "the scales "
    "of MXFP4 tensors are reported as warnings. Contradictions that do not keep it from being read make exit "
    "status 1.",
    "The exit status is 0 when all is well, 1 when there is damage, and 4 when nothing is damaged but "
    "something is "
    "missing.",
    NULL,
};
static const tsr_opt options[] = {
    { "all", 0, TSR_OPT_FLAG, NULL, 0, 0, "In a run folder: every step, one after the other." },
    { "quick", 0, TSR_OPT_FLAG, NULL, 0, 0, "Only manifest, index, sizes and heads: no tensor data." },
    { "deep", 0, TSR_OPT_FLAG, NULL, 0, 0,
      "Also decode every chunk, and compare each shard as the HDF5 library sees it with the index." },
    TSR_OPT_END,
};
static const tsr_pair examples[] = {
    { "tessera verify model.tsr", "Silent damage is found and named." },
    { "tessera verify --quick run/", "Are all files there, and the right ones?" },
    { 0 },
};
static const char *const see_also[] = { "info", "index", NULL };

typedef struct checker {
    tsr_cli *cli;
    tsr_verify_level level;
    bool all;           /* every step of a run folder */
    const char *prefix; /* folder of a run, put before file names; NULL */
    json_t *findings;
    tsr_verify_report total; /* of all checkpoints */
    tsr_err first;           /* the first finding that is no warning */
} checker;

/* ---- findings -------------------------------------------------------------------------------------------
 */

/* A TSR_OK code is a warning. Printed at once; kept for JSON. */
static void tell(checker *k, tsr_status code, const char *file, const char *item, const char *what)
{
    char *text;
    const char *slash = k->prefix != NULL ? "/" : "", *prefix = k->prefix != NULL ? k->prefix : "";
    tsr_meter_clear(&k->cli->meter);
    if (asprintf(&text, "%s%s%s: %s: %s", prefix, slash, file, item, what) < 0) {
        return;
    }
    if (code != TSR_OK && k->first.code == TSR_OK) {
        TSR_IGNORE(TSR_ERR(&k->first, code, "%s", text)); /* kept for the end */
    }
    if (k->cli->json) {
        json_t *o = json_object();
        char *name;
        if (asprintf(&name, "%s%s%s", prefix, slash, file) >= 0) {
            tsr_json_set(&o, "file", tsr_json_text(name));
            free(name);
        }
        tsr_json_set(&o, "class", tsr_json_text(code == TSR_OK ? "warning" : tsr_status_class(code)));
        tsr_json_set(&o, "item", tsr_json_text(item));
        tsr_json_set(&o, "what", tsr_json_text(what));
        tsr_json_append(&k->findings, o);
    } else if (code == TSR_OK) {
        tsr_cli_warn(k->cli, "%s", text);
    } else {
        tsr_out_text(stdout, text);
        (void)fputc('\n', stdout);
    }
    free(text);
}

static void on_finding(void *payload, const tsr_finding *f)
{
    tell(payload, f->code, f->file, f->item, f->what);
}

/* Damage outweighs absence. */
static void add_report(checker *k, const tsr_verify_report *r)
{
    k->total.bytes_checked += r->bytes_checked;
    k->total.findings += r->findings;
    k->total.warnings += r->warnings;
    k->total.files += r->files;
    k->total.tensors += r->tensors;
    k->total.extents += r->extents;
    if (r->worst != TSR_OK && k->total.worst != TSR_E_DIFF) {
        k->total.worst = r->worst;
    }
}

/* ---- Tessera checkpoints
 * ----------------------------------------------------------------------------------- */

static tsr_status check_ckpt(checker *k, const char *path, tsr_err *err)
{
    tsr_verify_report r = { 0 };
    TSR_TRY(tsr_verify(path, k->level, k->cli->threads, on_finding, k, &k->cli->progress, &r, err));
    add_report(k, &r);
    return TSR_OK;
}

static int step_name(const struct dirent *e)
{
    size_t n = strlen(e->d_name);
    return strncmp(e->d_name, "step-", 5) == 0 && n > 5 && strspn(e->d_name + 5, "0123456789") == n - 5;
}

/* Every step of a run folder, in the order of their numbers. */
static tsr_status check_run(checker *k, const char *path, tsr_err *err)
{
    struct dirent **list;
    int n = scandir(path, &list, step_name, versionsort);
    if (n < 0) {
        TSR_FAIL(err, TSR_E_IO, "%s: cannot be listed: %m", path);
    }
    tsr_status st = TSR_OK;
    for (int i = 0; i < n; i++) {
        char *step = NULL;
        if (st == TSR_OK && asprintf(&step, "%s/%s", path, list[i]->d_name) < 0) {
            st = TSR_ERR(err, TSR_E_LIMIT, "out of memory");
        }
        if (st == TSR_OK) {
            k->prefix = list[i]->d_name;
            st = check_ckpt(k, step, err);
            free(step);
        }
        free(list[i]);
    }
    free(list);
    k->prefix = NULL;
    return st;
}

/* ---- foreign formats
 * ------------------------------------------------------------------------------------------ */

static void on_nan(void *payload, const char *tensor, int64_t row, int64_t nan_values)
{
    checker *k = payload;
    char what[120];
    (void)snprintf(what, sizeof what, "%" PRId64 " NaN in row %" PRId64 " (scale code 255)", nan_values, row);
    k->total.warnings++;
    tell(k, TSR_OK, "scales", tensor, what);
}

static tsr_status check_foreign(checker *k, const char *path, tsr_err *err)
{
    const tsr_source_opts so = { .mem_limit = k->cli->mem_limit };
    const tsr_map_opts mo = { .mem_limit = k->cli->mem_limit, .partial = true, .tie_head = true };
    tsr_view v;
    TSR_TRY(tsr_view_open(&v, path, NULL, &so, &mo, err));
    tsr_cli_note(k->cli, "%s: taken for a %s, names: %s", path, v.source->what, v.map->layout->what);
    for (int64_t i = 0; i < v.source->warning_count; i++) {
        k->total.findings++;
        k->total.worst = TSR_E_DIFF;
        tell(k, TSR_E_CONFLICT, path, "index", v.source->warnings[i]);
    }
    for (int64_t i = 0; i < v.map->warning_count; i++) {
        k->total.warnings++;
        tell(k, TSR_OK, path, "names", v.map->warnings[i]);
    }
    k->total.files = (uint64_t)v.source->file_count;
    k->total.tensors = (uint64_t)v.source->count;
    tsr_status st = k->level == TSR_VERIFY_QUICK ? TSR_OK : tsr_inspect_scan_scales(&v, on_nan, k, err);
    tsr_view_close(&v);
    return st;
}

/* NaN scales inside a Tessera checkpoint: only where its bytes are known to be sound. That they cannot be
 * looked for is no damage. */
static tsr_status scan_ckpt(checker *k, const char *path, tsr_err *err)
{
    const tsr_source_opts so = { .mem_limit = k->cli->mem_limit };
    const tsr_map_opts mo = { .mem_limit = k->cli->mem_limit, .partial = true, .tie_head = true };
    tsr_view v;
    tsr_err why;
    tsr_status st = tsr_view_open(&v, path, NULL, &so, &mo, &why);
    if (st == TSR_OK) {
        st = tsr_inspect_scan_scales(&v, on_nan, k, &why);
        tsr_view_close(&v);
    }
    if (st == TSR_E_CANCELLED || st == TSR_E_IO) {
        *err = why;
        return st;
    }
    if (st != TSR_OK) {
        tsr_cli_warn(k->cli, "not looked for NaN scales: %s", why.msg);
    }
    return TSR_OK;
}

/* ---- running
 * --------------------------------------------------------------------------------------------------- */

static tsr_status print_summary(checker *k, const char *path, tsr_err *err)
{
    const tsr_verify_report *r = &k->total;
    char size[TSR_SIZE_TEXT];
    if (k->cli->json) {
        json_t *o = json_object();
        tsr_json_set(&o, "path", tsr_json_text(path));
        tsr_json_set(&o, "status", tsr_json_text(r->worst == TSR_OK ? "ok" : tsr_status_class(r->worst)));
        tsr_json_set(&o, "findings", k->findings);
        k->findings = NULL;
        tsr_json_set(&o, "finding_count", tsr_json_u64(r->findings));
        tsr_json_set(&o, "warning_count", tsr_json_u64(r->warnings));
        tsr_json_set(&o, "files", tsr_json_u64(r->files));
        tsr_json_set(&o, "tensors", tsr_json_u64(r->tensors));
        tsr_json_set(&o, "extents", tsr_json_u64(r->extents));
        tsr_json_set(&o, "bytes_checked", tsr_json_u64(r->bytes_checked));
        return tsr_json_print(o, false, err);
    }
    const char *verdict = r->worst == TSR_OK ? "ok" : r->worst == TSR_E_MISSING ? "incomplete" : "damaged";
    tsr_cli_say(k->cli,
                "%s: %s: %" PRIu64 " file%s, %" PRIu64 " tensors, %s checked, %" PRIu64 " finding%s, %" PRIu64
                " warning%s",
                path, verdict, r->files, r->files == 1 ? "" : "s", r->tensors,
                tsr_size_text(r->bytes_checked, size), r->findings, r->findings == 1 ? "" : "s", r->warnings,
                r->warnings == 1 ? "" : "s");
    return TSR_OK;
}

static bool is_dir(const char *path)
{
    struct stat sb;
    return stat(path, &sb) == 0 && S_ISDIR(sb.st_mode);
}

/* A folder nobody claims is verified as a checkpoint: what it lacks is then named. */
static tsr_status check_any(checker *k, const char *path, tsr_err *err)
{
    const tsr_source_ops *f = tsr_cli_format_of(path);
    bool ours = f != NULL ? strcmp(f->name, "tessera") == 0 : is_dir(path);
    if (!ours) {
        return check_foreign(k, path, err);
    }
    char *resolved;
    size_t n = strlen(path);
    bool latest = n > 7 && strcmp(path + n - 7, "/latest") == 0;
    struct stat sb;
    char *manifest;
    if (asprintf(&manifest, "%s/manifest.json", path) < 0) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    bool committed = lstat(manifest, &sb) == 0;
    free(manifest);
    bool steps = latest || (!committed && tsr_run_probe(path));
    if (steps && k->all && !latest) {
        return check_run(k, path, err);
    }
    if (!steps) {
        tsr_cli_note(k->cli, "%s: taken for a Tessera checkpoint", path);
        TSR_TRY(check_ckpt(k, path, err));
        return k->total.findings == 0 && k->level != TSR_VERIFY_QUICK ? scan_ckpt(k, path, err) : TSR_OK;
    }
    char *run_path = strndup(path, latest ? n - 7 : n), *note = NULL;
    if (run_path == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    tsr_status st = tsr_run_latest(run_path, k->level, &resolved, &note, err);
    free(run_path);
    if (note != NULL) {
        tsr_cli_warn(k->cli, "%s", note);
        free(note);
    }
    if (st == TSR_OK) {
        st = check_ckpt(k, resolved, err);
        free(resolved);
    }
    return st;
}

static tsr_status run(tsr_cli *cli, const tsr_args *a, tsr_err *err)
{
    checker k = { .cli = cli, .level = TSR_VERIFY_FULL };
    if (tsr_opt_given(a, "quick") && tsr_opt_given(a, "deep")) {
        TSR_FAIL(err, TSR_E_USAGE, "--quick, --deep: choose one");
    }
    k.level = tsr_opt_given(a, "quick")  ? TSR_VERIFY_QUICK
              : tsr_opt_given(a, "deep") ? TSR_VERIFY_DEEP
                                         : k.level;
    k.all = tsr_opt_given(a, "all");
    k.findings = json_array();
    tsr_status st = check_any(&k, a->operands[0], err);
    tsr_meter_clear(&cli->meter);
    if (st == TSR_OK) {
        st = print_summary(&k, a->operands[0], err);
    }
    json_decref(k.findings);
    if (st == TSR_OK && k.total.worst != TSR_OK) {
        st = k.total.worst;
        TSR_IGNORE(TSR_ERR(err, st, "%s", k.first.msg)); /* the status is passed on right below */
    }
    return st;
}

const tsr_cmd tsr_cmd_verify = { .name = "verify",
                                 .what = "Check a checkpoint for damage",
                                 .synopsis = synopsis,
                                 .description = description,
                                 .options = options,
                                 .examples = examples,
                                 .see_also = see_also,
                                 .operand_min = 1,
                                 .operand_max = 1,
                                 .run = run };
