/* tsr_fs_target.c - where a new checkpoint is prepared and where it ends up; locks and leftovers. */
#include "format/save.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

static bool is_empty_dir(const char *path)
{
    DIR *d = opendir(path);
    if (d == NULL) {
        return false;
    }
    bool empty = true;
    for (const struct dirent *e; empty && (e = readdir(d)) != NULL;) {
        empty = strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0;
    }
    (void)closedir(d);
    return empty;
}

void tsr_fs_host(char out[65])
{
    if (gethostname(out, 65) != 0) {
        (void)snprintf(out, 65, "localhost");
    }
    out[64] = '\0';
}

tsr_status tsr_fs_target(const char *dst, bool resumable, char **real, char **temp, tsr_err *err)
{
    *real = NULL;
    *temp = NULL;
    size_t n = strlen(dst);
    while (n > 1 && dst[n - 1] == '/') {
        n--;
    }
    char *path = strndup(dst, n);
    if (path == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    if (n == 0 || strcmp(path, "/") == 0) {
        free(path);
        TSR_FAIL(err, TSR_E_USAGE, "%s: not a place for a checkpoint", dst);
    }
    if (tsr_fs_exists(path)) {
        char *full = realpath(path,
                              NULL); /* an empty folder may be a link to where the space is: the link stays */
        if (full == NULL || !tsr_fs_is_dir(full) || !is_empty_dir(full)) {
            tsr_status st = TSR_ERR(err, TSR_E_CONFLICT,
                                    "%s: exists already (choose another name, or remove it)", path);
            free(full);
            free(path);
            return st;
        }
        free(path);
        path = full;
    }
    char host[65];
    tsr_fs_host(host);
    char *slash = strrchr(path, '/');
    const char *base = slash != NULL ? slash + 1 : path;
    int dir = slash != NULL ? (int)(slash - path + 1) : 0;
    int made = resumable ? asprintf(temp, "%.*s.%s.partial", dir, path, base)
                         : asprintf(temp, "%.*s.%s.tmp-%s-%ld", dir, path, base, host, (long)getpid());
    if (made < 0) {
        *temp = NULL;
        free(path);
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    *real = path;
    return TSR_OK;
}

void save_sweep(const char *parent)
{
    DIR *d = opendir(parent);
    if (d == NULL) {
        return;
    }
    char host[65], mark[80];
    tsr_fs_host(host);
    (void)snprintf(mark, sizeof mark, ".tmp-%s-", host);
    for (const struct dirent *e; (e = readdir(d)) != NULL;) {
        const char *at = e->d_name[0] == '.' ? strstr(e->d_name, mark) : NULL;
        char *end;
        long pid = at != NULL ? strtol(at + strlen(mark), &end, 10) : 0;
        if (pid <= 0 || *end != '\0' || kill((pid_t)pid, 0) == 0 || errno != ESRCH) {
            continue;
        }
        char *path;
        if (asprintf(&path, "%s/%s", parent, e->d_name) >= 0) {
            TSR_IGNORE(tsr_fs_remove_tree(path, NULL)); /* tidying must not stop a save */
            free(path);
        }
    }
    (void)closedir(d);
}

tsr_status tsr_fs_lock(const char *path, int *fd_out, tsr_err *err)
{
    *fd_out = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (*fd_out < 0) {
        return tsr_fs_error(err, errno, path, "cannot be locked");
    }
    if (flock(*fd_out, LOCK_EX | LOCK_NB) != 0) {
        int why = errno;
        tsr_fs_unlock(fd_out);
        if (why == EWOULDBLOCK) {
            TSR_FAIL(err, TSR_E_CONFLICT, "%s: another process is writing here (wait for it, or stop it)",
                     path);
        }
        return tsr_fs_error(err, why, path, "cannot be locked");
    }
    return TSR_OK;
}

void tsr_fs_unlock(int *fd)
{
    if (*fd >= 0) {
        (void)close(*fd);
        *fd = -1;
    }
}

tsr_status tsr_fs_check_note(const char *note, const char *key, const char *real, const char *temp,
                             tsr_err *err)
{
    tsr_io *io;
    TSR_TRY(tsr_io_open_file(&io, note, err));
    size_t n = strlen(key);
    char *had = io->size == n ? malloc(n + 1) : NULL;
    bool same = had != NULL && tsr_io_pread(io, had, n, 0, NULL) == TSR_OK && memcmp(had, key, n) == 0;
    free(had);
    tsr_io_close(&io);
    if (!same) {
        TSR_FAIL(err, TSR_E_CONFLICT,
                 "%s: an unfinished run with other options or another source left %s"
                 " (give the same options to continue it, or --restart to throw it away)",
                 real, temp);
    }
    return TSR_OK;
}
