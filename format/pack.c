/* pack.c - a checkpoint folder to a tar and back. Members of 4096 bytes and more begin at multiples of 4096, by
 * padding members before them, so that readers can map them inside the tar. */
#include "format/tar_dir.h"
#include "format/index.h"
#include "format/save.h"

#include <archive.h>
#include <archive_entry.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PIECE ((size_t)1 << 20)

typedef struct packer {
    struct archive *a;
    tsr_dir *dir;
    const char *root; /* leading folder */
    const char *out;  /* for messages */
    uint64_t at;      /* where the next header goes */
    unsigned pads;
    uint8_t *buf;
    const tsr_progress *progress;
    uint64_t done, total;
} packer;

static tsr_status archive_failure(struct archive *a, const char *path, tsr_err *err)
{
    const char *why = archive_error_string(a);
    tsr_status st = archive_errno(a) == ENOMEM ? TSR_E_LIMIT : TSR_E_IO;
    TSR_FAIL(err, st, "%s: %s", path, why != NULL ? why : "cannot be written");
}

static tsr_status put_header(packer *p, const char *name, uint64_t bytes, tsr_err *err)
{
    struct archive_entry *e = archive_entry_new();
    char *full = NULL;
    if (e == NULL || asprintf(&full, "%s/%s", p->root, name) < 0) {
        archive_entry_free(e);
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    archive_entry_set_pathname(e, full);
    archive_entry_set_filetype(e, AE_IFREG);
    archive_entry_set_perm(e, 0644);
    archive_entry_set_size(e, (la_int64_t)bytes);
    archive_entry_set_mtime(e, 0, 0); /* equal checkpoints give equal tars */
    int rc = archive_write_header(p->a, e);
    size_t n = strlen(full);
    p->at += 512 + (n > 99 ? 512 + tsr_align_up(n + 1, 512)
                           : 0); /* GNU tar: a long name takes a member of its own */
    archive_entry_free(e);
    free(full);
    return rc == ARCHIVE_OK ? TSR_OK : archive_failure(p->a, p->out, err);
}

static tsr_status put_bytes(packer *p, const void *data, size_t n, tsr_err *err)
{
    if (n > 0 && archive_write_data(p->a, data, n) != (la_ssize_t)n) {
        return archive_failure(p->a, p->out, err);
    }
    return TSR_OK;
}

/* A padding member so that the member named `name` has its data at a multiple of 4096. */
static tsr_status put_padding(packer *p, const char *name, tsr_err *err)
{
    size_t full = strlen(p->root) + 1 + strlen(name);
    uint64_t header = 512 + (full > 99 ? 512 + tsr_align_up(full + 1, 512) : 0);
    if ((p->at + header) % 4096 == 0) {
        return TSR_OK;
    }
    uint64_t data = tsr_align_up(p->at + 512 + header, 4096) - (p->at + 512 + header);
    char pad[64];
    (void)snprintf(pad, sizeof pad, TSR_PAD_PREFIX "%06u", p->pads++);
    TSR_TRY(put_header(p, pad, data, err));
    memset(p->buf, 0, data);
    p->at += data;
    return put_bytes(p, p->buf, data, err);
}

static tsr_status put_member(packer *p, const char *name, tsr_err *err)
{
    tsr_io *io;
    TSR_TRY(p->dir->ops->open(p->dir, name, &io, err));
    tsr_status st = io->size >= 4096 ? put_padding(p, name, err) : TSR_OK;
    if (st == TSR_OK) {
        st = put_header(p, name, io->size, err);
    }
    for (uint64_t at = 0; st == TSR_OK && at < io->size;) {
        size_t n = io->size - at < PIECE ? (size_t)(io->size - at) : PIECE;
        st = tsr_io_pread(io, p->buf, n, at, err);
        if (st == TSR_OK) {
            st = put_bytes(p, p->buf, n, err);
        }
        at += n;
        p->done += n;
        if (p->progress != NULL && p->progress->report != NULL) {
            p->progress->report(p->progress->payload, "pack", p->done, p->total);
        }
        if (st == TSR_OK && p->progress != NULL && p->progress->cancel != NULL && *p->progress->cancel != 0) {
            st = TSR_ERR(err, TSR_E_CANCELLED, "%s: stopped", p->out);
        }
    }
    p->at += tsr_align_up(io->size, 512);
    tsr_io_close(&io);
    return st;
}

static tsr_status put_rest(void *payload, const char *name, uint64_t size, tsr_err *err)
{
    (void)size;
    bool first = strcmp(name, TSR_MANIFEST_NAME) == 0 || strcmp(name, TSR_INDEX_NAME) == 0;
    return first ? TSR_OK : put_member(payload, name, err);
}

static tsr_status count_bytes(void *payload, const char *name, uint64_t size, tsr_err *err)
{
    (void)name, (void)err;
    *(uint64_t *)payload += size;
    return TSR_OK;
}

static tsr_status pack_into(packer *p, int fd, int zstd_level, tsr_err *err)
{
    char level[16];
    (void)snprintf(level, sizeof level, "%d", zstd_level);
    if (archive_write_set_format_gnutar(p->a) != ARCHIVE_OK ||
        (zstd_level > 0 &&
         (archive_write_add_filter_zstd(p->a) != ARCHIVE_OK ||
          archive_write_set_filter_option(p->a, "zstd", "compression-level", level) != ARCHIVE_OK)) ||
        archive_write_set_bytes_in_last_block(p->a, 1) != ARCHIVE_OK ||
        archive_write_open_fd(p->a, fd) != ARCHIVE_OK) {
        return archive_failure(p->a, p->out, err);
    }
    TSR_TRY(put_member(p, TSR_MANIFEST_NAME, err));
    TSR_TRY(put_member(p, TSR_INDEX_NAME, err));
    TSR_TRY(p->dir->ops->each(p->dir, put_rest, p, err));
    return archive_write_close(p->a) == ARCHIVE_OK ? TSR_OK : archive_failure(p->a, p->out, err);
}

/* The last component of the checkpoint's path, or "checkpoint" where that says nothing. */
static char *root_name(const char *path)
{
    char *full = realpath(path, NULL);
    const char *base = full != NULL ? strrchr(full, '/') : NULL;
    char *out = strdup(base != NULL && base[1] != '\0' ? base + 1 : "checkpoint");
    free(full);
    size_t n = out != NULL ? strlen(out) : 0;
    if (n > 4 && strcmp(out + n - 4, ".tar") == 0) {
        out[n - 4] = '\0';
    }
    return out;
}

static tsr_status check_source(const char *path, tsr_err *err)
{
    tsr_verify_report report;
    TSR_TRY(tsr_verify(path, TSR_VERIFY_QUICK, 1, NULL, NULL, NULL, &report, err));
    if (report.findings > 0) {
        TSR_FAIL(err, report.worst == TSR_E_MISSING ? TSR_E_MISSING : TSR_E_FORMAT,
                 "%s: is damaged or incomplete (tessera verify %s tells more)", path, path);
    }
    return TSR_OK;
}

tsr_status tsr_pack(const char *ckpt_path, const char *out, int zstd_level, const tsr_progress *progress,
                    tsr_err *err)
{
    bool to_stdout = strcmp(out, "-") == 0;
    char *root = NULL, *part = NULL;
    int fd = -1;
    packer p = { .out = out, .progress = progress };
    tsr_status st;
    TSR_GO(tsr_fs_is_dir(ckpt_path) || !tsr_fs_exists(ckpt_path) ? tsr_dir_open_posix(&p.dir, ckpt_path, err)
                                                                 : tsr_dir_open_tar(&p.dir, ckpt_path, err));
    TSR_GO(check_source(ckpt_path, err));
    TSR_GO(p.dir->ops->each(p.dir, count_bytes, &p.total, err));
    if (!to_stdout && tsr_fs_exists(out)) {
        st = TSR_ERR(err, TSR_E_CONFLICT, "%s: exists already (choose another name, or remove it)", out);
        goto out;
    }
    root = root_name(ckpt_path);
    p.root = root;
    p.buf = malloc(PIECE);
    p.a = archive_write_new();
    if (root == NULL || p.buf == NULL || p.a == NULL ||
        asprintf(&part, "%s.part-%ld", out, (long)getpid()) < 0) {
        st = TSR_ERR(err, TSR_E_LIMIT, "out of memory");
        goto out;
    }
    fd = to_stdout ? STDOUT_FILENO : open(part, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd < 0) {
        st = tsr_fs_error(err, errno, part, "cannot be created");
        goto out;
    }
    st = pack_into(&p, fd, zstd_level, err);
    if (!to_stdout) {
        if (st == TSR_OK && fsync(fd) != 0) {
            st = tsr_fs_error(err, errno, part, "cannot be synced");
        }
        if (st == TSR_OK) {
            st = tsr_fs_rename_new(part, out, err);
        }
        if (st != TSR_OK) {
            (void)unlink(part);
        }
    }
out:
    if (p.a != NULL) {
        (void)archive_write_free(p.a); /* closed above, or failed and told */
    }
    if (fd >= 0 && !to_stdout) {
        (void)close(fd);
    }
    tsr_dir_close(&p.dir);
    free(p.buf);
    free(part);
    free(root);
    return st;
}

/* ---- unpack ------------------------------------------------------------------------------------------------------- */

typedef struct unpacker {
    struct archive *a;
    const char *in, *temp;
    size_t skip; /* bytes of the leading folder; SIZE_MAX until the first member told it */
    char *root;
    uint64_t done;
    const tsr_progress *progress;
} unpacker;

static tsr_status copy_data(unpacker *u, tsr_file *f, const char *name, uint64_t size, tsr_err *err)
{
    const void *p;
    size_t n;
    la_int64_t at;
    uint64_t got = 0;
    for (;;) {
        int rc = archive_read_data_block(u->a, &p, &n, &at);
        if (rc == ARCHIVE_EOF) {
            break;
        }
        if (rc != ARCHIVE_OK) {
            const char *why = archive_error_string(u->a);
            TSR_FAIL(err, TSR_E_FORMAT, "%s: member %.200s: %s", u->in, name, why != NULL ? why : "damaged");
        }
        if (at < 0 || (uint64_t)at > size || n > size - (uint64_t)at) {
            TSR_FAIL(err, TSR_E_FORMAT, "%s: member %.200s: holds more than its %llu bytes", u->in, name,
                     (unsigned long long)size);
        }
        TSR_TRY(tsr_file_pwrite(f, p, n, (uint64_t)at, err));
        got += n;
        u->done += n;
        if (u->progress != NULL && u->progress->report != NULL) {
            u->progress->report(u->progress->payload, "unpack", u->done, 0);
        }
        if (u->progress != NULL && u->progress->cancel != NULL && *u->progress->cancel != 0) {
            TSR_FAIL(err, TSR_E_CANCELLED, "%s: stopped", u->in);
        }
    }
    if (got != size) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: member %.200s: %llu of its %llu bytes are there", u->in, name,
                 (unsigned long long)got, (unsigned long long)size);
    }
    return tsr_file_sync(f, err);
}

static tsr_status take_member(unpacker *u, struct archive_entry *e, tsr_err *err)
{
    const char *name = archive_entry_pathname(e);
    while (name != NULL && name[0] == '.' && name[1] == '/') {
        name += 2;
    }
    if (archive_entry_filetype(e) == AE_IFDIR && archive_entry_hardlink(e) == NULL) {
        return TSR_OK;
    }
    if (name == NULL || !tsr_safe_name(name)) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: member %.200s: its name leaves the folder", u->in,
                 name != NULL ? name : "?");
    }
    if (archive_entry_filetype(e) != AE_IFREG || archive_entry_hardlink(e) != NULL ||
        archive_entry_size(e) < 0) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: member %.200s: is a link or a device", u->in, name);
    }
    if (u->skip == SIZE_MAX) {
        const char *slash = strchr(name, '/');
        u->skip = slash != NULL ? (size_t)(slash - name) + 1 : 0;
        u->root = strndup(name, u->skip);
    }
    if (u->root == NULL || strncmp(name, u->root, u->skip) != 0) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: member %.200s: lies outside the folder %s", u->in, name,
                 u->root != NULL ? u->root : "");
    }
    const char *inner = name + u->skip;
    if (strncmp(inner, TSR_PAD_PREFIX, strlen(TSR_PAD_PREFIX)) == 0) {
        return TSR_OK;
    }
    char *path;
    if (asprintf(&path, "%s/%s", u->temp, inner) < 0) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    char *slash = strrchr(path, '/');
    tsr_file *f = NULL;
    *slash = '\0';
    tsr_status st = tsr_fs_mkdirs(path, err);
    *slash = '/';
    if (st == TSR_OK && tsr_fs_exists(path)) {
        st = TSR_ERR(err, TSR_E_FORMAT, "%s: member %.200s: is there twice", u->in, name);
    }
    if (st == TSR_OK) {
        st = tsr_file_create(&f, path, err);
    }
    if (st == TSR_OK) {
        st = copy_data(u, f, name, (uint64_t)archive_entry_size(e), err);
    }
    tsr_file_close(&f);
    free(path);
    return st;
}

static tsr_status unpack_all(unpacker *u, tsr_err *err)
{
    bool from_stdin = strcmp(u->in, "-") == 0;
    if (archive_read_support_format_tar(u->a) != ARCHIVE_OK ||
        archive_read_support_filter_none(u->a) != ARCHIVE_OK ||
        archive_read_support_filter_zstd(u->a) != ARCHIVE_OK ||
        archive_read_support_filter_gzip(u->a) != ARCHIVE_OK ||
        (from_stdin ? archive_read_open_fd(u->a, STDIN_FILENO, PIECE)
                    : archive_read_open_filename(u->a, u->in, PIECE)) != ARCHIVE_OK) {
        const char *why = archive_error_string(u->a);
        TSR_FAIL(err, archive_errno(u->a) == ENOENT ? TSR_E_MISSING : TSR_E_FORMAT, "%s: not a tar file (%s)",
                 u->in, why != NULL ? why : "unknown");
    }
    for (;;) {
        struct archive_entry *e;
        int rc = archive_read_next_header(u->a, &e);
        if (rc == ARCHIVE_EOF) {
            return TSR_OK;
        }
        if (rc != ARCHIVE_OK && rc != ARCHIVE_WARN) {
            const char *why = archive_error_string(u->a);
            TSR_FAIL(err, TSR_E_FORMAT, "%s: %s", u->in, why != NULL ? why : "damaged tar");
        }
        TSR_TRY(take_member(u, e, err));
    }
}

typedef struct first_finding {
    char text[600];
} first_finding;

static void keep_first(void *payload, const tsr_finding *f)
{
    first_finding *k = payload;
    if (k->text[0] == '\0' && f->code != TSR_OK) {
        (void)snprintf(k->text, sizeof k->text, "%.150s: %.200s: %.200s", f->file, f->item, f->what);
    }
}

static tsr_status check_result(const char *in, const char *temp, const tsr_progress *p, tsr_err *err)
{
    first_finding first = { "" };
    tsr_verify_report report;
    TSR_TRY(tsr_verify(temp, TSR_VERIFY_FULL, 0, keep_first, &first, p, &report, err));
    if (report.findings > 0) {
        TSR_FAIL(err, report.worst == TSR_E_MISSING ? TSR_E_MISSING : TSR_E_FORMAT, "%s: %s", in, first.text);
    }
    return TSR_OK;
}

tsr_status tsr_unpack(const char *in, const char *dst, const tsr_progress *progress, tsr_err *err)
{
    char *real = NULL, *temp = NULL;
    unpacker u = { .in = in, .skip = SIZE_MAX, .progress = progress };
    tsr_status st;
    TSR_GO(tsr_fs_target(dst, false, &real, &temp, err));
    u.temp = temp;
    u.a = archive_read_new();
    if (u.a == NULL) {
        st = TSR_ERR(err, TSR_E_LIMIT, "out of memory");
        goto out;
    }
    TSR_GO(tsr_fs_remove_tree(temp, err));
    TSR_GO(tsr_fs_mkdirs(temp, err));
    st = unpack_all(&u, err);
    if (st == TSR_OK) {
        st = check_result(in, temp, progress, err);
    }
    if (st == TSR_OK) {
        st = tsr_fs_sync_dir(temp, err);
    }
    if (st == TSR_OK) {
        st = tsr_fs_exists(real) ? tsr_fs_rename(temp, real, err) : tsr_fs_rename_new(temp, real, err);
    }
    if (st != TSR_OK) {
        TSR_IGNORE(tsr_fs_remove_tree(temp, NULL)); /* the failure matters more */
    }
out:
    if (u.a != NULL) {
        (void)archive_read_free(u.a);
    }
    free(u.root);
    free(real);
    free(temp);
    return st;
}
