/* run.c - a run folder: which checkpoint is the newest that opens, `latest`, and what may be removed. */
#include "format/reader.h"
#include "format/save.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct step {
    uint64_t number;
    char *name;
} step;

static int newest_first(const void *a, const void *b)
{
    const step *x = a, *y = b;
    return x->number > y->number ? -1 : x->number < y->number;
}

/* "step-12" or "step-000012"; numbers are compared as numbers, never as text. */
static bool parse_step(const char *name, uint64_t *number)
{
    char *end;
    if (strncmp(name, "step-", 5) != 0 || name[5] < '0' || name[5] > '9') {
        return false;
    }
    *number = strtoull(name + 5, &end, 10);
    return *end == '\0';
}

static tsr_status list_steps(const char *run, step **out, size_t *count, tsr_err *err)
{
    *out = NULL;
    *count = 0;
    size_t room = 0;
    DIR *d = opendir(run);
    if (d == NULL) {
        TSR_FAIL(err, TSR_E_MISSING, "%s: no such run folder", run);
    }
    tsr_status st = TSR_OK;
    for (const struct dirent *e; st == TSR_OK && (e = readdir(d)) != NULL;) {
        uint64_t number;
        if (!parse_step(e->d_name, &number)) {
            continue;
        }
        if (*count == room) {
            room = room * 2 + 16;
            step *grown = realloc(*out, room * sizeof *grown);
            if (grown == NULL) {
                st = TSR_ERR(err, TSR_E_LIMIT, "out of memory");
                break;
            }
            *out = grown;
        }
        char *name = strdup(e->d_name);
        if (name == NULL) {
            st = TSR_ERR(err, TSR_E_LIMIT, "out of memory");
            break;
        }
        (*out)[(*count)++] = (step){ number, name };
    }
    (void)closedir(d);
    if (*count > 0) {
        qsort(*out, *count, sizeof **out, newest_first);
    }
    return st;
}

static void free_steps(step *s, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        free(s[i].name);
    }
    free(s);
}

typedef struct first_finding {
    char text[400];
} first_finding;

static void keep_first(void *payload, const tsr_finding *f)
{
    first_finding *k = payload;
    if (k->text[0] == '\0' && f->code != TSR_OK) {
        (void)snprintf(k->text, sizeof k->text, "%.100s: %.100s: %.150s", f->file, f->item, f->what);
    }
}

/* Nothing found by a verification of this level; else why. */
static bool is_good(const char *path, tsr_verify_level level, char *why, size_t why_bytes)
{
    tsr_verify_report report;
    first_finding first = { "" };
    tsr_err err;
    tsr_status st = tsr_verify(path, level, 0, keep_first, &first, NULL, &report, &err);
    if (st == TSR_OK && report.findings == 0) {
        return true;
    }
    (void)snprintf(why, why_bytes, "%s", st != TSR_OK ? err.msg : first.text);
    return false;
}

bool tsr_run_probe(const char *path)
{
    step *steps;
    size_t count;
    bool yes = list_steps(path, &steps, &count, NULL) == TSR_OK && count > 0;
    free_steps(steps, count);
    return yes;
}

tsr_status tsr_run_latest(const char *run, tsr_verify_level level, char **path_out, char **note_out,
                          tsr_err *err)
{
    *path_out = NULL;
    if (note_out != NULL) {
        *note_out = NULL;
    }
    step *steps;
    size_t count;
    tsr_status st = list_steps(run, &steps, &count, err);
    char note[1024] = "";
    size_t used = 0, skipped = 0;
    for (size_t i = 0; st == TSR_OK && i < count && *path_out == NULL; i++) {
        char *path, why[600];
        if (asprintf(&path, "%s/%s", run, steps[i].name) < 0) {
            st = TSR_ERR(err, TSR_E_LIMIT, "out of memory");
            break;
        }
        if (is_good(path, level, why, sizeof why)) {
            *path_out = path;
            break;
        }
        free(path);
        if (skipped++ == 0) {
            used = (size_t)snprintf(note, sizeof note, "%.100s skipped: %.500s", steps[i].name, why);
        }
    }
    free_steps(steps, count);
    TSR_TRY(st);
    if (*path_out == NULL) {
        TSR_FAIL(err, TSR_E_MISSING, "%s: no checkpoint here can be used%s%s", run, skipped > 0 ? "; " : "",
                 note);
    }
    if (note_out != NULL && skipped > 0) {
        (void)snprintf(note + used, sizeof note - used, "%s; using %s",
                       skipped > 1 ? " (and older ones)" : "", strrchr(*path_out, '/') + 1);
        *note_out = strdup(note);
    }
    return TSR_OK;
}

tsr_status tsr_run_set_latest(const char *run, const char *name, tsr_err *err)
{
    char *path, *text;
    if (asprintf(&path, "%s/latest", run) < 0) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    int n = asprintf(&text, "%s\n", name);
    tsr_status st = n >= 0 ? tsr_fs_replace_file(path, text, (size_t)n, err)
                           : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    if (n >= 0) {
        free(text);
    }
    free(path);
    return st;
}

tsr_status tsr_run_retain(const char *run, const tsr_retention *r, uint32_t *removed_out, tsr_err *err)
{
    step *steps;
    size_t count;
    uint32_t removed = 0;
    save_sweep(run);
    tsr_status st = list_steps(run, &steps, &count, err);
    bool newest_seen = false;
    size_t kept = 0;
    for (size_t i = 0; st == TSR_OK && i < count; i++) {
        char *path, why[600];
        if (asprintf(&path, "%s/%s", run, steps[i].name) < 0) {
            st = TSR_ERR(err, TSR_E_LIMIT, "out of memory");
            break;
        }
        bool newest_good = !newest_seen && is_good(path, TSR_VERIFY_QUICK, why, sizeof why);
        newest_seen = newest_seen || newest_good;
        bool keep = newest_good || r->keep_last == 0 || kept < r->keep_last ||
                    (r->keep_every > 0 && steps[i].number % r->keep_every == 0);
        kept++;
        if (!keep && newest_seen) { /* nothing goes before a newer good one was seen */
            char *gone;
            if (asprintf(&gone, "%s/.%s.removed", run, steps[i].name) < 0) {
                st = TSR_ERR(err, TSR_E_LIMIT, "out of memory");
            } else {
                st = tsr_fs_rename(path, gone, err); /* never a half-removed checkpoint under its own name */
                if (st == TSR_OK) {
                    st = tsr_fs_remove_tree(gone, err);
                }
                removed += st == TSR_OK;
                free(gone);
            }
        }
        free(path);
    }
    free_steps(steps, count);
    if (removed_out != NULL) {
        *removed_out = removed;
    }
    return st;
}
