/* fs.c - writing: every step that can fail goes through the fault hook first; see io.h. */
#include "format/io.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

static tsr_fs_fault_fn fault_fn;
static void *fault_payload;

void tsr_fs_set_fault(tsr_fs_fault_fn fn, void *payload)
{
    fault_payload = payload;
    __atomic_store_n(&fault_fn, fn, __ATOMIC_RELEASE);
}

/* The errno a test wants here, or 0. */
static int fault(tsr_fs_op op, const char *path)
{
    tsr_fs_fault_fn fn = __atomic_load_n(&fault_fn, __ATOMIC_ACQUIRE);
    return fn != NULL ? fn(fault_payload, op, path) : 0;
}

struct tsr_file {
    int fd;
    char *path;
};

tsr_status tsr_file_create(tsr_file **out, const char *path, tsr_err *err)
{
    *out = NULL;
    int why = fault(TSR_FS_CREATE, path);
    int fd = why == 0 ? open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644) : -1;
    if (fd < 0) {
        return tsr_fs_error(err, why != 0 ? why : errno, path, "cannot be created");
    }
    tsr_file *f = calloc(1, sizeof *f);
    char *copy = strdup(path);
    if (f == NULL || copy == NULL) {
        free(f);
        free(copy);
        (void)close(fd);
        (void)unlink(path);
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    f->fd = fd;
    f->path = copy;
    *out = f;
    return TSR_OK;
}

static int write_all(int fd, const uint8_t *p, size_t n, uint64_t off)
{
    while (n > 0) {
        ssize_t put = pwrite(fd, p, n, (off_t)off);
        if (put < 0 && errno == EINTR) {
            continue;
        }
        if (put < 0) {
            return errno;
        }
        if (put == 0) {
            return ENOSPC;
        }
        p += put;
        off += (uint64_t)put;
        n -= (size_t)put;
    }
    return 0;
}

tsr_status tsr_file_pwrite(tsr_file *f, const void *src, size_t n, uint64_t off, tsr_err *err)
{
    int why = fault(TSR_FS_WRITE, f->path);
    if (why != 0) {
        (void)write_all(f->fd, src, n / 2, off); /* a failing write often gets half way */
    } else {
        why = write_all(f->fd, src, n, off);
    }
    return why == 0 ? TSR_OK : tsr_fs_error(err, why, f->path, "cannot be written");
}

tsr_status tsr_file_pread(tsr_file *f, void *dst, size_t n, uint64_t off, tsr_err *err)
{
    uint8_t *to = dst;
    while (n > 0) {
        ssize_t got = pread(f->fd, to, n, (off_t)off);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            return tsr_fs_error(err, got < 0 ? errno : EIO, f->path, "cannot be read back");
        }
        to += got;
        off += (uint64_t)got;
        n -= (size_t)got;
    }
    return TSR_OK;
}

tsr_status tsr_file_truncate(tsr_file *f, uint64_t size, tsr_err *err)
{
    int why = fault(TSR_FS_TRUNCATE, f->path);
    if (why == 0 && ftruncate(f->fd, (off_t)size) != 0) {
        why = errno;
    }
    return why == 0 ? TSR_OK : tsr_fs_error(err, why, f->path, "cannot be given its size");
}

void tsr_file_writeback(tsr_file *f, uint64_t off, uint64_t n)
{
    (void)sync_file_range(f->fd, (off_t)off, (off_t)n, SYNC_FILE_RANGE_WRITE); /* only a hint */
}

tsr_status tsr_file_sync(tsr_file *f, tsr_err *err)
{
    int why = fault(TSR_FS_FSYNC, f->path);
    if (why == 0 && fsync(f->fd) != 0) {
        why = errno;
    }
    return why == 0 ? TSR_OK : tsr_fs_error(err, why, f->path, "cannot be synced");
}

void tsr_file_close(tsr_file **f)
{
    if (f == NULL || *f == NULL) {
        return;
    }
    (void)close((*f)->fd); /* whoever needs the bytes safe has synced */
    free((*f)->path);
    free(*f);
    *f = NULL;
}

tsr_status tsr_fs_mkdir(const char *path, tsr_err *err)
{
    int why = fault(TSR_FS_MKDIR, path);
    if (why == 0 && mkdir(path, 0755) != 0) {
        why = errno;
    }
    return why == 0 ? TSR_OK : tsr_fs_error(err, why, path, "folder cannot be made");
}

tsr_status tsr_fs_mkdirs(const char *path, tsr_err *err)
{
    char *copy = strdup(path);
    if (copy == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    tsr_status st = TSR_OK;
    for (char *p = copy + 1; st == TSR_OK; p++) {
        if (*p != '/' && *p != '\0') {
            continue;
        }
        char had = *p;
        *p = '\0';
        if (!tsr_fs_is_dir(copy)) {
            st = tsr_fs_mkdir(copy, err);
        }
        *p = had;
        if (had == '\0') {
            break;
        }
    }
    free(copy);
    return st;
}

tsr_status tsr_fs_sync_dir(const char *path, tsr_err *err)
{
    int why = fault(TSR_FS_FSYNC_DIR, path);
    int fd = why == 0 ? open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    if (why == 0 && fd < 0) {
        why = errno;
    } else if (why == 0 && fsync(fd) != 0 &&
               errno != EINVAL) { /* EINVAL: this file system has no folder sync */
        why = errno;
    }
    if (fd >= 0) {
        (void)close(fd);
    }
    return why == 0 ? TSR_OK : tsr_fs_error(err, why, path, "folder cannot be synced");
}

tsr_status tsr_fs_rename(const char *src, const char *dst, tsr_err *err)
{
    int why = fault(TSR_FS_RENAME, dst);
    if (why == 0 && rename(src, dst) != 0) {
        why = errno;
    }
    return why == 0 ? TSR_OK : tsr_fs_error(err, why, dst, "cannot be given its name");
}

tsr_status tsr_fs_rename_new(const char *src, const char *dst, tsr_err *err)
{
    int why = fault(TSR_FS_RENAME, dst);
    if (why == 0 && renameat2(AT_FDCWD, src, AT_FDCWD, dst, RENAME_NOREPLACE) != 0) {
        why = errno;
        if (why == EINVAL || why == ENOSYS) { /* this file system cannot: a check is the best there is */
            why = tsr_fs_exists(dst) ? EEXIST : rename(src, dst) != 0 ? errno : 0;
        }
    }
    if (why == EEXIST) {
        TSR_FAIL(err, TSR_E_CONFLICT, "%s: exists already (choose another name, or remove it)", dst);
    }
    return why == 0 ? TSR_OK : tsr_fs_error(err, why, dst, "cannot be given its name");
}

/* Bytes of in to out, by the kernel where it can. Returns an errno. */
static int copy_bytes(int in, int out)
{
    if (ioctl(out, FICLONE, in) == 0) {
        return 0;
    }
    for (;;) {
        ssize_t n = copy_file_range(in, NULL, out, NULL, (size_t)1 << 30, 0);
        if (n == 0) {
            return 0;
        }
        if (n < 0) {
            break;
        }
    }
    off_t at = lseek(out, 0, SEEK_CUR);
    if (at < 0 || lseek(in, at, SEEK_SET) < 0) {
        return errno;
    }
    char *buf = malloc((size_t)1 << 20);
    int why = buf != NULL ? 0 : ENOMEM;
    while (why == 0) {
        ssize_t n = read(in, buf, (size_t)1 << 20);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            why = n < 0 ? errno : 0;
            break;
        }
        why = write_all(out, (const uint8_t *)buf, (size_t)n, (uint64_t)at);
        at += n;
    }
    free(buf);
    return why;
}

tsr_status tsr_fs_link_or_copy(const char *src, const char *dst, tsr_err *err)
{
    int why = fault(TSR_FS_LINK, dst);
    if (why == 0 && linkat(AT_FDCWD, src, AT_FDCWD, dst, AT_SYMLINK_FOLLOW) == 0) {
        return TSR_OK;
    }
    why = why != 0 ? why : errno;
    if (why != EXDEV && why != EPERM && why != EMLINK && why != ENOTSUP) {
        return tsr_fs_error(err, why, dst, "cannot be linked");
    }
    tsr_file *f;
    int in = open(src, O_RDONLY | O_CLOEXEC);
    if (in < 0) {
        return tsr_fs_error(err, errno, src, "cannot be opened");
    }
    tsr_status st = tsr_file_create(&f, dst, err);
    if (st == TSR_OK) {
        why = fault(TSR_FS_WRITE, dst);
        why = why != 0 ? why : copy_bytes(in, f->fd);
        st = why == 0 ? tsr_file_sync(f, err) : tsr_fs_error(err, why, dst, "cannot be written");
        tsr_file_close(&f);
    }
    (void)close(in);
    return st;
}

tsr_status tsr_fs_write_file(const char *path, const void *src, size_t n, tsr_err *err)
{
    tsr_file *f;
    TSR_TRY(tsr_file_create(&f, path, err));
    tsr_status st = tsr_file_pwrite(f, src, n, 0, err);
    if (st == TSR_OK) {
        st = tsr_file_sync(f, err);
    }
    tsr_file_close(&f);
    if (st != TSR_OK) {
        (void)unlink(path); /* half a file is worse than none */
    }
    return st;
}

tsr_status tsr_fs_replace_file(const char *path, const void *src, size_t n, tsr_err *err)
{
    char *temp, *dir = NULL, host[65];
    tsr_fs_host(host);
    const char *slash = strrchr(path, '/');
    int head = slash != NULL ? (int)(slash - path + 1) : 0;
    if (asprintf(&temp, "%.*s.%s.tmp-%s-%ld", head, path, path + head, host, (long)getpid()) < 0) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    (void)unlink(temp); /* of an earlier process with our number */
    tsr_status st = tsr_fs_write_file(temp, src, n, err);
    if (st == TSR_OK) {
        st = tsr_fs_rename(temp, path, err);
        if (st != TSR_OK) {
            (void)unlink(temp);
        }
    }
    if (st == TSR_OK && (dir = strdup(path)) != NULL) {
        char *cut = strrchr(dir, '/');
        if (cut != NULL) {
            cut[cut == dir ? 1 : 0] = '\0';
        }
        st = tsr_fs_sync_dir(cut != NULL ? dir : ".", err);
    }
    free(dir);
    free(temp);
    return st;
}

/* ---- removing ------------------------------------------------------------------------------------------------- */

#define REMOVE_DEPTH_MAX 64

/* Removes what is in the folder fd (which it closes). Depth is bounded; links are removed, not followed. */
static int remove_inside(int fd, int depth)
{
    DIR *d = fdopendir(fd);
    if (d == NULL) {
        int why = errno;
        (void)close(fd);
        return why;
    }
    int first = depth >= REMOVE_DEPTH_MAX ? ELOOP : 0;
    for (const struct dirent *e; first != ELOOP && (e = readdir(d)) != NULL;) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) {
            continue;
        }
        int why = 0;
        int sub = openat(dirfd(d), e->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (sub >= 0) {
            why = remove_inside(sub, depth + 1);
            why = unlinkat(dirfd(d), e->d_name, AT_REMOVEDIR) != 0 && why == 0 ? errno : why;
        } else if (unlinkat(dirfd(d), e->d_name, 0) != 0) {
            why = errno;
        }
        first = first == 0 ? why : first;
    }
    (void)closedir(d);
    return first;
}

tsr_status tsr_fs_remove_tree(const char *path, tsr_err *err)
{
    struct stat s;
    if (lstat(path, &s) != 0) {
        return errno == ENOENT ? TSR_OK : tsr_fs_error(err, errno, path, "cannot be removed");
    }
    int why = fault(TSR_FS_UNLINK, path);
    if (why == 0 && S_ISDIR(s.st_mode)) {
        int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        why = fd >= 0 ? remove_inside(fd, 0) : errno;
        why = why == 0 && rmdir(path) != 0 ? errno : why;
    } else if (why == 0 && unlink(path) != 0) {
        why = errno;
    }
    return why == 0 ? TSR_OK : tsr_fs_error(err, why, path, "cannot be removed");
}

tsr_status tsr_fs_free_bytes(const char *path, uint64_t *out, tsr_err *err)
{
    char *copy = strdup(path);
    struct statvfs v;
    if (copy == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    int rc = statvfs(copy, &v);
    while (rc != 0 && errno == ENOENT) { /* go up to what exists */
        char *slash = strrchr(copy, '/');
        if (slash == NULL) {
            rc = statvfs(".", &v);
            break;
        }
        slash[slash == copy ? 1 : 0] = '\0';
        rc = statvfs(copy, &v);
        if (slash == copy) {
            break;
        }
    }
    tsr_status st = rc == 0 ? TSR_OK : tsr_fs_error(err, errno, path, "free space is unknown");
    free(copy);
    *out = st == TSR_OK ? (uint64_t)v.f_bavail * v.f_frsize : 0;
    return st;
}

bool tsr_fs_exists(const char *path)
{
    struct stat s;
    return lstat(path, &s) == 0;
}

bool tsr_fs_is_dir(const char *path)
{
    struct stat s;
    return stat(path, &s) == 0 && S_ISDIR(s.st_mode);
}
