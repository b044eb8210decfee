/* common.c - messages, and paths to checkpoints of any kind. */
#include "cli/cli.h"
#include "cli/out.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* ---- messages --------------------------------------------------------------------------------------- */

static void put_message(tsr_meter *meter, const char *label, const char *color, const char *text)
{
    tsr_meter_clear(meter);
    (void)fprintf(stderr, tsr_out_colors() ? "\033[%sm%s\033[0m: " : "%.0s%s: ", color, label);
    tsr_out_text(stderr, text);
    (void)fputc('\n', stderr);
}

/* Held messages are kept as label, NUL, text, NUL. */
static bool hold_message(tsr_cli *cli, const char *label, const char *text)
{
    size_t n = strlen(label) + 1, m = strlen(text) + 1;
    char *grown = realloc(cli->held, cli->held_bytes + n + m);
    if (grown == NULL) {
        return false;
    }
    memcpy(grown + cli->held_bytes, label, n);
    memcpy(grown + cli->held_bytes + n, text, m);
    cli->held = grown;
    cli->held_bytes += n + m;
    return true;
}

static const char *color_of(const char *label)
{
    return strcmp(label, "warning") == 0 ? "33" : "36";
}

static void message(tsr_cli *cli, const char *label, const char *fmt, va_list ap)
{
    char *text;
    if (vasprintf(&text, fmt, ap) < 0) {
        return; /* out of memory: the command itself will say so */
    }
    if (!cli->hold || !hold_message(cli, label, text)) {
        put_message(&cli->meter, label, color_of(label), text);
    }
    free(text);
}

void tsr_cli_warn(tsr_cli *cli, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    message(cli, "warning", fmt, ap);
    va_end(ap);
}

void tsr_cli_note(tsr_cli *cli, const char *fmt, ...)
{
    if (cli->verbose) {
        va_list ap;
        va_start(ap, fmt);
        message(cli, "note", fmt, ap);
        va_end(ap);
    }
}

void tsr_cli_release_messages(tsr_cli *cli)
{
    for (size_t at = 0; at < cli->held_bytes;) {
        const char *label = cli->held + at, *text = label + strlen(label) + 1;
        put_message(&cli->meter, label, color_of(label), text);
        at += strlen(label) + strlen(text) + 2;
    }
    free(cli->held);
    cli->held = NULL;
    cli->held_bytes = 0;
}

void tsr_cli_say(const tsr_cli *cli, const char *fmt, ...)
{
    char *text;
    va_list ap;
    if (cli->quiet || cli->json) {
        return;
    }
    va_start(ap, fmt);
    int n = vasprintf(&text, fmt, ap);
    va_end(ap);
    if (n >= 0) {
        tsr_out_text(stdout, text);
        (void)fputc('\n', stdout); /* a failure shows when standard output is flushed */
        free(text);
    }
}

tsr_status tsr_cli_go_on(const tsr_cli *cli, tsr_err *err)
{
    if (*cli->progress.cancel != 0) {
        TSR_FAIL(err, TSR_E_CANCELLED, "%s: stopped by a signal", cli->cmd->name);
    }
    return tsr_out_check(err);
}

/* ---- paths -------------------------------------------------------------------------------------------- */

const tsr_source_ops *tsr_cli_format_of(const char *path)
{
    const tsr_source_ops *best = NULL;
    int best_bid = 0;
    for (size_t i = 0; tsr_source_formats[i] != NULL; i++) {
        int bid = tsr_source_formats[i]->bid(path);
        if (bid > best_bid) {
            best = tsr_source_formats[i];
            best_bid = bid;
        }
    }
    return best;
}

static tsr_status only_tessera(const tsr_cli *cli, const char *path, tsr_err *err)
{
    const tsr_source_ops *f = tsr_ckpt_probe(path) ? NULL : tsr_cli_format_of(path);
    if (f != NULL) {
        TSR_FAIL(err, TSR_E_UNSUPPORTED,
                 "%s: taken for a %s: %s works on Tessera checkpoints only (tessera convert "
                 "makes one)",
                 path, f->what, cli->cmd->name);
    }
    return TSR_OK;
}

tsr_status tsr_cli_open_ckpt(tsr_cli *cli, tsr_ckpt **out, const char *path, tsr_err *err)
{
    char *note = NULL;
    *out = NULL;
    TSR_TRY(only_tessera(cli, path, err));
    TSR_TRY(tsr_ckpt_open_any(out, path, &note, err));
    if (note != NULL) {
        tsr_cli_warn(cli, "%s", note);
        free(note);
    }
    tsr_cli_note(cli, "%s: taken for a Tessera checkpoint", tsr_ckpt_path(*out));
    return TSR_OK;
}

static bool holds(const char *dir, const char *name)
{
    char *path;
    struct stat sb;
    if (asprintf(&path, "%s/%s", dir, name) < 0) {
        return false;
    }
    bool yes = lstat(path, &sb) == 0;
    free(path);
    return yes;
}

tsr_status tsr_cli_ckpt_path(tsr_cli *cli, char **out, const char *path, tsr_err *err)
{
    *out = NULL;
    TSR_TRY(only_tessera(cli, path, err));
    size_t n = strlen(path);
    bool latest = n > 7 && strcmp(path + n - 7, "/latest") == 0;
    bool run = !latest && tsr_run_probe(path) && !holds(path, "manifest.json") && !holds(path, "index.tsx");
    char *from = strndup(path, latest ? n - 7 : n);
    if (from == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    if (!latest && !run) {
        *out = from;
        return TSR_OK;
    }
    char *note = NULL;
    tsr_status st = tsr_run_latest(from, TSR_VERIFY_QUICK, out, &note, err);
    free(from);
    if (note != NULL) {
        tsr_cli_warn(cli, "%s", note);
        free(note);
    }
    return st;
}

tsr_status tsr_cli_open_view(tsr_cli *cli, tsr_view *out, const char *path, const char *arch, tsr_err *err)
{
    const tsr_source_opts so = { .mem_limit = cli->mem_limit };
    const tsr_map_opts mo = { .mem_limit = cli->mem_limit, .partial = true, .tie_head = true };
    memset(out, 0, sizeof *out);
    TSR_TRY(tsr_view_open(out, path, arch, &so, &mo, err));
    for (int64_t i = 0; i < out->source->warning_count; i++) {
        tsr_cli_warn(cli, "%s", out->source->warnings[i]);
    }
    for (int64_t i = 0; i < out->map->warning_count; i++) {
        tsr_cli_warn(cli, "%s", out->map->warnings[i]);
    }
    tsr_cli_note(cli, "%s: taken for a %s, names: %s", path, out->source->what, out->map->layout->what);
    return TSR_OK;
}

tsr_status tsr_cli_join(char **out, const char *dir, const char *path, tsr_err *err)
{
    bool as_is = dir == NULL || path[0] == '/' || strcmp(path, "-") == 0;
    if ((as_is ? asprintf(out, "%s", path) : asprintf(out, "%s/%s", dir, path)) < 0) {
        *out = NULL;
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    return TSR_OK;
}
