/* io.c - reading: files, memory, windows into another, and folders; see io.h. */
#include "format/io.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

tsr_status tsr_fs_error(tsr_err *err, int errnum, const char *path, const char *what)
{
    tsr_status st = errnum == ENOENT || errnum == ENOTDIR ? TSR_E_MISSING : TSR_E_IO;
    return TSR_ERR(err, st, "%s: %s: %s", path, what, strerror(errnum));
}

tsr_status tsr_io_pread(tsr_io *io, void *dst, size_t n, uint64_t off, tsr_err *err)
{
    if (n > io->size || off > io->size - n) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: ends at byte %llu, before %llu + %zu", io->name,
                 (unsigned long long)io->size, (unsigned long long)off, n);
    }
    return n > 0 ? io->ops->pread(io, dst, n, off, err) : TSR_OK;
}

const uint8_t *tsr_io_map(tsr_io *io)
{
    return io->size > 0 ? io->ops->map(io) : NULL;
}

void tsr_io_drop(tsr_io *io, uint64_t off, uint64_t n)
{
    TSR_ASSERT(off <= io->size && n <= io->size - off);
    if (io->ops->drop != NULL && n > 0) {
        io->ops->drop(io, off, n);
    }
}

void tsr_io_close(tsr_io **io)
{
    if (io == NULL || *io == NULL) {
        return;
    }
    char *name = (*io)->name;
    (*io)->ops->close(*io);
    free(name);
    *io = NULL;
}

/* ---- files ------------------------------------------------------------------------------------------------ */

typedef struct file_io {
    tsr_io io;
    int fd;
    void *map; /* NULL until asked for; MAP_FAILED: cannot */
} file_io;

static tsr_status file_pread(tsr_io *io, void *dst, size_t n, uint64_t off, tsr_err *err)
{
    const file_io *f = (const file_io *)(const void *)io;
    uint8_t *to = dst;
    while (n > 0) {
        ssize_t got = pread(f->fd, to, n, (off_t)off);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            return tsr_fs_error(err, errno, io->name, "cannot be read");
        }
        if (got == 0) {
            TSR_FAIL(err, TSR_E_FORMAT, "%s: became shorter while it was read", io->name);
        }
        to += got;
        off += (uint64_t)got;
        n -= (size_t)got;
    }
    return TSR_OK;
}

static const uint8_t *file_map(tsr_io *io)
{
    file_io *f = (file_io *)(void *)io;
    void *had = __atomic_load_n(&f->map, __ATOMIC_ACQUIRE);
    if (had == NULL) {
        void *fresh = mmap(NULL, io->size, PROT_READ, MAP_SHARED, f->fd, 0);
        if (__atomic_compare_exchange_n(&f->map, &had, fresh, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
            had = fresh;
        } else if (fresh != MAP_FAILED) {
            (void)munmap(fresh, io->size); /* another thread was faster */
        }
    }
    return had == MAP_FAILED ? NULL : had;
}

static void file_drop(tsr_io *io, uint64_t off, uint64_t n)
{
    file_io *f = (file_io *)(void *)io;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), from = (off + page - 1) / page * page,
             to = (off + n) / page * page;
    if (f->map != NULL && f->map != MAP_FAILED && from < to) { /* whole pages of ours only */
        (void)madvise((uint8_t *)f->map + from, to - from, MADV_DONTNEED);
    }
}

static void file_close(tsr_io *io)
{
    file_io *f = (file_io *)(void *)io;
    if (f->map != NULL && f->map != MAP_FAILED) {
        (void)munmap(f->map, io->size);
    }
    (void)close(f->fd); /* opened for reading: nothing can be lost */
    free(f);
}

/* A missing file may be a link whose target is missing: that is a different mistake to mend. */
static tsr_status open_error(const char *path, int why, tsr_err *err)
{
    char target[512];
    ssize_t n = readlink(path, target, sizeof target - 1);
    if (why == ENOENT && n >= 0) {
        target[n] = '\0';
        TSR_FAIL(err, TSR_E_MISSING, "%s: is a link to %s, which does not exist", path, target);
    }
    return tsr_fs_error(err, why, path, "cannot be opened");
}

tsr_status tsr_io_open_file(tsr_io **out, const char *path, tsr_err *err)
{
    static const tsr_io_ops ops = { file_pread, file_map, file_drop, file_close };
    *out = NULL;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        return open_error(path, errno, err);
    }
    struct stat s;
    if (fstat(fd, &s) != 0) {
        int why = errno;
        (void)close(fd);
        return tsr_fs_error(err, why, path, "cannot be read");
    }
    if (!S_ISREG(s.st_mode)) {
        (void)close(fd);
        TSR_FAIL(err, TSR_E_FORMAT, "%s: is not a regular file", path);
    }
    file_io *f = calloc(1, sizeof *f);
    char *name = strdup(path);
    if (f == NULL || name == NULL) {
        free(f);
        free(name);
        (void)close(fd);
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    f->io = (tsr_io){ .ops = &ops, .size = (uint64_t)s.st_size, .name = name };
    f->fd = fd;
    *out = &f->io;
    return TSR_OK;
}

/* ---- memory ------------------------------------------------------------------------------------------------ */

typedef struct mem_io {
    tsr_io io;
    const uint8_t *p;
} mem_io;

static tsr_status mem_pread(tsr_io *io, void *dst, size_t n, uint64_t off, tsr_err *err)
{
    (void)err;
    memcpy(dst, ((const mem_io *)(const void *)io)->p + off, n);
    return TSR_OK;
}

static const uint8_t *mem_map(tsr_io *io)
{
    return ((const mem_io *)(const void *)io)->p;
}

static void mem_close(tsr_io *io)
{
    free(io);
}

tsr_status tsr_io_open_mem(tsr_io **out, const char *name, const void *p, size_t n, tsr_err *err)
{
    static const tsr_io_ops ops = { mem_pread, mem_map, NULL, mem_close };
    mem_io *m = calloc(1, sizeof *m);
    char *copy = strdup(name);
    *out = NULL;
    if (m == NULL || copy == NULL) {
        free(m);
        free(copy);
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    m->io = (tsr_io){ .ops = &ops, .size = n, .name = copy };
    m->p = p;
    *out = &m->io;
    return TSR_OK;
}

/* ---- windows ------------------------------------------------------------------------------------------------ */

typedef struct window_io {
    tsr_io io;
    tsr_io *base;
    uint64_t off;
} window_io;

static tsr_status window_pread(tsr_io *io, void *dst, size_t n, uint64_t off, tsr_err *err)
{
    const window_io *w = (const window_io *)(const void *)io;
    return tsr_io_pread(w->base, dst, n, w->off + off, err);
}

static const uint8_t *window_map(tsr_io *io)
{
    const window_io *w = (const window_io *)(const void *)io;
    const uint8_t *base = tsr_io_map(w->base);
    return base != NULL ? base + w->off : NULL;
}

static void window_drop(tsr_io *io, uint64_t off, uint64_t n)
{
    const window_io *w = (const window_io *)(const void *)io;
    tsr_io_drop(w->base, w->off + off, n);
}

tsr_status tsr_io_open_window(tsr_io **out, const char *name, tsr_io *base, uint64_t off, uint64_t n,
                              tsr_err *err)
{
    static const tsr_io_ops ops = { window_pread, window_map, window_drop, mem_close };
    *out = NULL;
    uint64_t end;
    if (!tsr_add_u64(off, n, &end) || end > base->size) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: lies outside %s", name, base->name);
    }
    window_io *w = calloc(1, sizeof *w);
    char *copy = strdup(name);
    if (w == NULL || copy == NULL) {
        free(w);
        free(copy);
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    w->io = (tsr_io){ .ops = &ops, .size = n, .name = copy };
    w->base = base;
    w->off = off;
    *out = &w->io;
    return TSR_OK;
}

/* ---- folders -------------------------------------------------------------------------------------------------- */

/* name has no empty, "." or ".." part and is not absolute. */
static tsr_status check_relative(const char *name, tsr_err *err)
{
    const char *p = name;
    bool bad = *p == '\0';
    while (!bad) {
        size_t n = strcspn(p, "/");
        bad = n == 0 || (n <= 2 && strncmp(p, "..", n) == 0);
        p += n;
        if (*p == '\0') {
            break;
        }
        p++;
    }
    if (bad) {
        TSR_FAIL(err, TSR_E_FORMAT, "%.200s: not a plain relative name", name);
    }
    return TSR_OK;
}

static tsr_status posix_path(const tsr_dir *d, const char *name, char **out, tsr_err *err)
{
    TSR_TRY(check_relative(name, err));
    if (asprintf(out, "%s/%s", d->path, name) < 0) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    return TSR_OK;
}

static tsr_status posix_open(tsr_dir *d, const char *name, tsr_io **out, tsr_err *err)
{
    char *path;
    *out = NULL;
    TSR_TRY(posix_path(d, name, &path, err));
    tsr_status st = tsr_io_open_file(out, path, err);
    free(path);
    return st;
}

static tsr_status posix_size(tsr_dir *d, const char *name, uint64_t *out, tsr_err *err)
{
    char *path;
    struct stat s;
    TSR_TRY(posix_path(d, name, &path, err));
    tsr_status st = TSR_OK;
    if (stat(path, &s) != 0) {
        st = open_error(path, errno, err);
    } else if (!S_ISREG(s.st_mode)) {
        st = TSR_ERR(err, TSR_E_FORMAT, "%s: is not a regular file", path);
    } else {
        *out = (uint64_t)s.st_size;
    }
    free(path);
    return st;
}

typedef struct found {
    char *name;
    uint64_t size;
} found;
typedef struct listing {
    found *list;
    size_t count, room;
} listing;

static int compare_found(const void *a, const void *b)
{
    return strcmp(((const found *)a)->name, ((const found *)b)->name);
}

static tsr_status add_found(listing *l, char *name, uint64_t size, tsr_err *err)
{
    if (l->count == l->room) {
        size_t room = l->room * 2 + 16;
        found *grown = realloc(l->list, room * sizeof *grown);
        if (grown == NULL) {
            free(name);
            TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
        }
        l->list = grown;
        l->room = room;
    }
    l->list[l->count++] = (found){ name, size };
    return TSR_OK;
}

/* Lists the folder `rel` ("" or "a/b"); folders are appended with a trailing '/' and visited by the caller. */
static tsr_status list_one(const char *root, const char *rel, listing *l, tsr_err *err)
{
    char *dir;
    if (asprintf(&dir, "%s/%s", root, rel) < 0) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    DIR *d = opendir(dir);
    tsr_status st = d != NULL ? TSR_OK : tsr_fs_error(err, errno, dir, "cannot be listed");
    for (const struct dirent *e; st == TSR_OK && (e = readdir(d)) != NULL;) {
        struct stat s, link;
        char *name;
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0 ||
            fstatat(dirfd(d), e->d_name, &link, AT_SYMLINK_NOFOLLOW) != 0) {
            continue;
        }
        if (fstatat(dirfd(d), e->d_name, &s, 0) != 0) {
            if (!S_ISLNK(link.st_mode)) {
                continue; /* gone meanwhile */
            }
            int why = errno;
            if (asprintf(&name, "%s/%s", dir, e->d_name) < 0) {
                st = TSR_ERR(err, TSR_E_LIMIT, "out of memory");
            } else {
                st = open_error(name, why, err); /* a dangling link is a promised file that is not there */
                free(name);
            }
            continue;
        }
        if (!(S_ISREG(s.st_mode) || S_ISDIR(link.st_mode))) {
            continue; /* a device, or a link to a folder */
        }
        bool sub = S_ISDIR(s.st_mode);
        if (asprintf(&name, "%s%s%s", rel, e->d_name, sub ? "/" : "") < 0) {
            st = TSR_ERR(err, TSR_E_LIMIT, "out of memory");
        } else {
            st = add_found(l, name, (uint64_t)s.st_size, err);
        }
    }
    if (d != NULL) {
        (void)closedir(d);
    }
    free(dir);
    return st;
}

static tsr_status posix_each(tsr_dir *d,
                             tsr_status (*fn)(void *payload, const char *name, uint64_t size, tsr_err *err),
                             void *payload, tsr_err *err)
{
    listing l = { 0 };
    tsr_status st = list_one(d->path, "", &l, err);
    for (size_t i = 0; st == TSR_OK && i < l.count;
         i++) { /* grows while it goes: breadth first, no recursion */
        size_t n = strlen(l.list[i].name);
        if (n > 0 && l.list[i].name[n - 1] == '/') {
            char *rel = strdup(l.list[i].name);
            st = rel != NULL ? list_one(d->path, rel, &l, err) : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
            free(rel);
        }
    }
    if (l.count > 0) {
        qsort(l.list, l.count, sizeof *l.list, compare_found);
    }
    for (size_t i = 0; i < l.count; i++) {
        size_t n = strlen(l.list[i].name);
        if (st == TSR_OK && l.list[i].name[n - 1] != '/') {
            st = fn(payload, l.list[i].name, l.list[i].size, err);
        }
        free(l.list[i].name);
    }
    free(l.list);
    return st;
}

static void posix_close(tsr_dir *d)
{
    free(d->path);
    free(d);
}

tsr_status tsr_dir_open_posix(tsr_dir **out, const char *path, tsr_err *err)
{
    static const tsr_dir_ops ops = { posix_open, posix_size, posix_each, posix_close };
    *out = NULL;
    struct stat s;
    if (stat(path, &s) != 0) {
        return open_error(path, errno, err);
    }
    if (!S_ISDIR(s.st_mode)) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: is not a folder", path);
    }
    tsr_dir *d = calloc(1, sizeof *d);
    char *copy = strdup(path);
    if (d == NULL || copy == NULL) {
        free(d);
        free(copy);
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    size_t n = strlen(copy);
    while (n > 1 && copy[n - 1] == '/') {
        copy[--n] = '\0';
    }
    d->ops = &ops;
    d->path = copy;
    *out = d;
    return TSR_OK;
}

void tsr_dir_close(tsr_dir **d)
{
    if (d != NULL && *d != NULL) {
        (*d)->ops->close(*d);
        *d = NULL;
    }
}

tsr_status tsr_dir_read(tsr_dir *d, const char *name, size_t limit, char **out, size_t *bytes_out,
                        tsr_err *err)
{
    tsr_io *io;
    *out = NULL;
    TSR_TRY(d->ops->open(d, name, &io, err));
    tsr_status st = TSR_OK;
    char *text = NULL;
    if (io->size > limit) {
        st = TSR_ERR(err, TSR_E_LIMIT, "%s: %llu bytes (limit %zu)", io->name, (unsigned long long)io->size,
                     limit);
    } else if ((text = malloc(io->size + 1)) == NULL) {
        st = TSR_ERR(err, TSR_E_LIMIT, "%s: out of memory", io->name);
    } else {
        st = tsr_io_pread(io, text, io->size, 0, err);
    }
    if (st == TSR_OK) {
        text[io->size] = '\0';
        *out = text;
        *bytes_out = io->size;
    } else {
        free(text);
    }
    tsr_io_close(&io);
    return st;
}
