/* open_any.c - a path of any kind that leads to a checkpoint: folder, run folder, "latest", tar. */
#include "format/tar_dir.h"
#include "format/reader.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool has_file(const char *dir, const char *name)
{
    char *path;
    if (asprintf(&path, "%s/%s", dir, name) < 0) {
        return false;
    }
    bool yes = tsr_fs_exists(path);
    free(path);
    return yes;
}

/* A run folder holds `latest` or step-* folders and is itself no checkpoint. */
static bool is_run(const char *path)
{
    if (!tsr_fs_is_dir(path) || has_file(path, TSR_MANIFEST_NAME) || has_file(path, TSR_INDEX_NAME)) {
        return false;
    }
    return has_file(path, "latest") || tsr_run_probe(path);
}

bool tsr_ckpt_probe(const char *path)
{
    size_t n = strlen(path);
    if (tsr_fs_is_dir(path)) {
        return has_file(path, TSR_MANIFEST_NAME) || has_file(path, TSR_INDEX_NAME) || is_run(path);
    }
    return (n > 7 && strcmp(path + n - 7, "/latest") == 0) || tsr_is_tar(path) ||
           (n > 4 && strcmp(path + n - 4, ".tar") == 0) || (n > 8 && strcmp(path + n - 8, ".tar.zst") == 0);
}

tsr_status tsr_ckpt_open_any(tsr_ckpt **out, const char *path, char **note_out, tsr_err *err)
{
    *out = NULL;
    if (note_out != NULL) {
        *note_out = NULL;
    }
    size_t n = strlen(path);
    char *run = NULL, *found = NULL;
    tsr_status st;
    if (n > 7 && strcmp(path + n - 7, "/latest") == 0) {
        run = strndup(path, n - 7);
    } else if (is_run(path)) {
        run = strdup(path);
    }
    if (run != NULL) {
        st = tsr_run_latest(run, TSR_VERIFY_QUICK, &found, note_out, err);
        if (st == TSR_OK) {
            st = tsr_ckpt_open(out, found, err);
        }
        free(found);
        free(run);
        return st;
    }
    if (tsr_fs_is_dir(path) || !tsr_fs_exists(path)) {
        return tsr_ckpt_open(out, path, err);
    }
    tsr_dir *d;
    TSR_TRY(tsr_dir_open_tar(&d, path, err));
    return tsr_ckpt_open_dir(out, d, false, err);
}
