/* text_list.c - the files below paths, in an order that depends on names only; see text_source.h. */
#include "format/io.h"
#include "train/text_source.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define DEPTH_MAX 128

static tsr_status add_file(text_list *l, const char *path, const struct stat *s, tsr_err *err)
{
    if (l->count == l->room) {
        size_t room = l->room * 2 + 64;
        text_file *grown = realloc(l->files, room * sizeof *grown);
        if (grown == NULL) {
            TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
        }
        l->files = grown;
        l->room = room;
    }
    text_file f = { .name = strdup(path),
                    .bytes = (uint64_t)s->st_size,
                    .mtime_ns = (int64_t)s->st_mtim.tv_sec * 1000000000 + s->st_mtim.tv_nsec };
    if (f.name == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    l->files[l->count++] = f;
    l->bytes += f.bytes;
    return TSR_OK;
}

static int by_bytes(const struct dirent **a, const struct dirent **b)
{
    return strcmp((*a)->d_name, (*b)->d_name);
}

static int no_dots(const struct dirent *e)
{
    return strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
}

static tsr_status add_path(text_list *l, const char *path, int depth, tsr_err *err)
{
    struct stat s, link;
    struct dirent **names = NULL;
    if (stat(path, &s) != 0 || lstat(path, &link) != 0) {
        return tsr_fs_error(err, errno, path, "cannot be read");
    }
    if (S_ISREG(s.st_mode)) {
        return add_file(l, path, &s, err);
    }
    if (!S_ISDIR(s.st_mode)) {
        TSR_FAIL(err, TSR_E_UNSUPPORTED, "%s: is neither a file nor a folder", path);
    }
    if (l->skip_ino != 0 && s.st_ino == l->skip_ino && s.st_dev == l->skip_dev) {
        return TSR_OK;
    }
    if (depth > 0 && S_ISLNK(link.st_mode)) {
        TSR_FAIL(err, TSR_E_UNSUPPORTED, "%s: is a link to a folder (name the folder itself)", path);
    }
    if (depth > DEPTH_MAX) {
        TSR_FAIL(err, TSR_E_LIMIT, "%s: more than %d folders deep", path, DEPTH_MAX);
    }
    int n = scandir(path, &names, no_dots, by_bytes);
    if (n < 0) {
        return tsr_fs_error(err, errno, path, "cannot be read");
    }
    tsr_status st = TSR_OK;
    for (int i = 0; i < n; i++) {
        char *full = NULL;
        const char *slash = path[0] != '\0' && path[strlen(path) - 1] == '/' ? "" : "/";
        if (st == TSR_OK && asprintf(&full, "%s%s%s", path, slash, names[i]->d_name) < 0) {
            full = NULL;
            st = TSR_ERR(err, TSR_E_LIMIT, "out of memory");
        }
        if (st == TSR_OK) {
            st = add_path(l, full, depth + 1, err);
        }
        free(full);
        free(names[i]);
    }
    free(names);
    return st;
}

tsr_status text_list_add(text_list *l, const char *path, tsr_err *err)
{
    return add_path(l, path, 0, err);
}

void text_list_free(text_list *l)
{
    for (size_t i = 0; i < l->count; i++) {
        free(l->files[i].name);
    }
    free(l->files);
    *l = (text_list){ 0 };
}
