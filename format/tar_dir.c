/* tar_dir - a tar of a checkpoint as a folder, read in place: libarchive walks the headers over one mapping, and
 * a member's data pointer tells where it lies; see tar_dir.h. */
#include "format/tar_dir.h"
#include "format/index.h"

#include <archive.h>
#include <archive_entry.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MEMBER_COUNT_MAX (1u << 20)

typedef struct member {
    char *name; /* below the checkpoint's folder */
    uint64_t off, bytes;
} member;

typedef struct tar_dir {
    tsr_dir dir;
    tsr_io *io;
    member *members;
    size_t count, room;
} tar_dir;

bool tsr_safe_name(const char *name)
{
    const char *p = name;
    if (*p == '\0' || *p == '/') {
        return false;
    }
    for (;;) {
        size_t n = strcspn(p, "/");
        if (n == 0 || (n <= 2 && strncmp(p, "..", n) == 0)) {
            return false;
        }
        p += n;
        if (*p == '\0') {
            return true;
        }
        p++;
    }
}

bool tsr_is_tar(const char *path)
{
    char head[512];
    FILE *f = fopen(path, "rb");
    if (f == NULL) {
        return false;
    }
    bool yes = fread(head, 1, sizeof head, f) == sizeof head && memcmp(head + 257, "ustar", 5) == 0;
    (void)fclose(f);
    return yes;
}

/* ---- reading the headers -------------------------------------------------------------------------------------- */

typedef struct feed {
    const uint8_t *base;
    size_t bytes;
    bool given;
} feed;

static la_ssize_t feed_read(struct archive *a, void *arg, const void **buf)
{
    (void)a;
    feed *f = arg;
    if (f->given) {
        return 0;
    }
    f->given = true;
    *buf = f->base;
    return (la_ssize_t)f->bytes;
}

static tsr_status add_member(tar_dir *t, const char *name, uint64_t off, uint64_t bytes, tsr_err *err)
{
    if (t->count >= MEMBER_COUNT_MAX) {
        TSR_FAIL(err, TSR_E_LIMIT, "%s: more than %u members", t->dir.path, MEMBER_COUNT_MAX);
    }
    if (t->count == t->room) {
        size_t room = t->room * 2 + 32;
        member *grown = realloc(t->members, room * sizeof *grown);
        if (grown == NULL) {
            TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
        }
        t->members = grown;
        t->room = room;
    }
    char *copy = strdup(name);
    if (copy == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    t->members[t->count++] = (member){ copy, off, bytes };
    return TSR_OK;
}

static tsr_status take_entry(tar_dir *t, struct archive *a, struct archive_entry *e, tsr_err *err)
{
    const char *name = archive_entry_pathname(e);
    if (name == NULL) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: a member's name cannot be read", t->dir.path);
    }
    while (name[0] == '.' && name[1] == '/') {
        name += 2; /* as `tar -c ./x` writes them */
    }
    if (archive_entry_filetype(e) == AE_IFDIR && archive_entry_hardlink(e) == NULL) {
        return TSR_OK;
    }
    if (!tsr_safe_name(name)) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: member %.200s: its name leaves the folder", t->dir.path, name);
    }
    if (archive_entry_filetype(e) != AE_IFREG || archive_entry_hardlink(e) != NULL ||
        archive_entry_symlink(e) != NULL) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: member %.200s: is a link or a device", t->dir.path, name);
    }
    int64_t size = archive_entry_size(e);
    if (size <= 0) {
        return size == 0 ? add_member(t, name, 0, 0, err)
                         : TSR_ERR(err, TSR_E_FORMAT, "%s: member %.200s: negative size", t->dir.path, name);
    }
    const uint8_t *base = tsr_io_map(t->io);
    const void *p = NULL;
    size_t n = 0;
    la_int64_t at = 0;
    int rc = archive_read_data_block(a, &p, &n, &at);
    uint64_t off = p != NULL && (uintptr_t)p >= (uintptr_t)base ? (uint64_t)((const uint8_t *)p - base)
                                                                : UINT64_MAX;
    if (rc != ARCHIVE_OK || at != 0 || archive_entry_sparse_count(e) > 0 || off > t->io->size ||
        (uint64_t)size > t->io->size - off) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: member %.200s: truncated, sparse or not stored plainly", t->dir.path,
                 name);
    }
    return add_member(t, name, off, (uint64_t)size, err);
}

static tsr_status read_headers(tar_dir *t, tsr_err *err)
{
    feed f = { tsr_io_map(t->io), t->io->size, false };
    if (f.base == NULL) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: is empty or cannot be mapped", t->dir.path);
    }
    struct archive *a = archive_read_new();
    if (a == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    tsr_status st = TSR_OK;
    if (archive_read_support_format_tar(a) != ARCHIVE_OK ||
        archive_read_support_filter_none(a) != ARCHIVE_OK ||
        archive_read_open(a, &f, NULL, feed_read, NULL) != ARCHIVE_OK) {
        st = TSR_ERR(err, TSR_E_FORMAT, "%s: not a tar file", t->dir.path);
    }
    while (st == TSR_OK) {
        struct archive_entry *e;
        int rc = archive_read_next_header(a, &e);
        if (rc == ARCHIVE_EOF) {
            break;
        }
        if (rc != ARCHIVE_OK && rc != ARCHIVE_WARN) {
            const char *why = archive_error_string(a);
            st = TSR_ERR(err, TSR_E_FORMAT, "%s: %s", t->dir.path, why != NULL ? why : "damaged tar");
            break;
        }
        st = take_entry(t, a, e, err);
    }
    (void)archive_read_free(a); /* reads nothing any more */
    return st;
}

/* ---- the folder inside ------------------------------------------------------------------------------------------- */

static int compare_members(const void *a, const void *b)
{
    return strcmp(((const member *)a)->name, ((const member *)b)->name);
}

/* Strips the folder that holds the shallowest manifest.json; members elsewhere and padding are dropped. */
static tsr_status find_root(tar_dir *t, tsr_err *err)
{
    const char *best = NULL;
    size_t best_depth = SIZE_MAX;
    for (size_t i = 0; i < t->count; i++) {
        const char *base = strrchr(t->members[i].name, '/');
        size_t depth = 0;
        for (const char *p = t->members[i].name; *p != '\0'; p++) {
            depth += *p == '/';
        }
        if (strcmp(base != NULL ? base + 1 : t->members[i].name, TSR_MANIFEST_NAME) == 0 &&
            depth < best_depth) {
            best = t->members[i].name;
            best_depth = depth;
        }
    }
    if (best == NULL) {
        TSR_FAIL(err, TSR_E_MISSING, "%s: no %s inside: not the tar of a checkpoint", t->dir.path,
                 TSR_MANIFEST_NAME);
    }
    size_t skip = strlen(best) - strlen(TSR_MANIFEST_NAME), kept = 0;
    char *root = strndup(best, skip);
    if (root == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    for (size_t i = 0; i < t->count; i++) {
        member m = t->members[i];
        if (strncmp(m.name, root, skip) != 0 ||
            strncmp(m.name + skip, TSR_PAD_PREFIX, strlen(TSR_PAD_PREFIX)) == 0) {
            free(m.name);
            continue;
        }
        memmove(m.name, m.name + skip, strlen(m.name + skip) + 1);
        t->members[kept++] = m;
    }
    t->count = kept;
    free(root);
    qsort(t->members, t->count, sizeof *t->members, compare_members);
    for (size_t i = 0; i + 1 < t->count; i++) {
        if (strcmp(t->members[i].name, t->members[i + 1].name) == 0) {
            TSR_FAIL(err, TSR_E_FORMAT, "%s: member %.200s: is there twice", t->dir.path, t->members[i].name);
        }
    }
    return TSR_OK;
}

static const member *find_member(const tar_dir *t, const char *name)
{
    member key = { .name = (char *)(uintptr_t)name };
    return t->count > 0 ? bsearch(&key, t->members, t->count, sizeof key, compare_members) : NULL;
}

static tsr_status tar_open(tsr_dir *d, const char *name, tsr_io **out, tsr_err *err)
{
    tar_dir *t = (tar_dir *)(void *)d;
    const member *m = find_member(t, name);
    *out = NULL;
    if (m == NULL) {
        TSR_FAIL(err, TSR_E_MISSING, "%s: has no member %.200s", d->path, name);
    }
    return tsr_io_open_window(out, name, t->io, m->off, m->bytes, err);
}

static tsr_status tar_size(tsr_dir *d, const char *name, uint64_t *out, tsr_err *err)
{
    const member *m = find_member((const tar_dir *)(const void *)d, name);
    if (m == NULL) {
        TSR_FAIL(err, TSR_E_MISSING, "%s: has no member %.200s", d->path, name);
    }
    *out = m->bytes;
    return TSR_OK;
}

static tsr_status tar_each(tsr_dir *d,
                           tsr_status (*fn)(void *payload, const char *name, uint64_t size, tsr_err *err),
                           void *payload, tsr_err *err)
{
    const tar_dir *t = (const tar_dir *)(const void *)d;
    for (size_t i = 0; i < t->count; i++) {
        TSR_TRY(fn(payload, t->members[i].name, t->members[i].bytes, err));
    }
    return TSR_OK;
}

static void tar_close(tsr_dir *d)
{
    tar_dir *t = (tar_dir *)(void *)d;
    for (size_t i = 0; i < t->count; i++) {
        free(t->members[i].name);
    }
    free(t->members);
    tsr_io_close(&t->io);
    free(t->dir.path);
    free(t);
}

static bool looks_compressed(const uint8_t *p, size_t n)
{
    static const uint8_t zstd[] = { 0x28, 0xb5, 0x2f, 0xfd }, gz[] = { 0x1f, 0x8b },
                         xz[] = { 0xfd, '7', 'z', 'X', 'Z' };
    return (n >= 4 && memcmp(p, zstd, 4) == 0) || (n >= 2 && memcmp(p, gz, 2) == 0) ||
           (n >= 5 && memcmp(p, xz, 5) == 0);
}

/* Takes io over. */
static tsr_status open_tar(tsr_dir **out, const char *path, tsr_io *io, tsr_err *err)
{
    static const tsr_dir_ops ops = { tar_open, tar_size, tar_each, tar_close };
    *out = NULL;
    tar_dir *t = calloc(1, sizeof *t);
    char *copy = strdup(path);
    if (t == NULL || copy == NULL) {
        free(t);
        free(copy);
        tsr_io_close(&io);
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    t->dir.ops = &ops;
    t->dir.path = copy;
    t->io = io;
    const uint8_t *base = tsr_io_map(io);
    tsr_status st;
    if (base != NULL && looks_compressed(base, io->size)) {
        st = TSR_ERR(err, TSR_E_UNSUPPORTED, "%s: is compressed (tessera unpack it first)", path);
    } else {
        st = read_headers(t, err);
    }
    if (st == TSR_OK) {
        st = find_root(t, err);
    }
    if (st != TSR_OK) {
        tar_close(&t->dir);
        return st;
    }
    *out = &t->dir;
    return TSR_OK;
}

tsr_status tsr_dir_open_tar(tsr_dir **out, const char *path, tsr_err *err)
{
    tsr_io *io;
    *out = NULL;
    TSR_TRY(tsr_io_open_file(&io, path, err));
    return open_tar(out, path, io, err);
}

tsr_status tsr_dir_open_tar_mem(tsr_dir **out, const char *name, const void *p, size_t n, tsr_err *err)
{
    tsr_io *io;
    *out = NULL;
    TSR_TRY(tsr_io_open_mem(&io, name, p, n, err));
    return open_tar(out, name, io, err);
}
