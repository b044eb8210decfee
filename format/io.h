/* io.h - the only raw file I/O. For format/, convert/ and tests; not installed. Everything above reads through tsr_io and
 * tsr_dir, so that a folder, a tar, a buffer in memory and a fault injector run the same code. */
#ifndef TSR_FORMAT_IO_H
#define TSR_FORMAT_IO_H

#include "format/base.h"

/* ---- one readable thing ------------------------------------------------------------------------- */

typedef struct tsr_io tsr_io;
typedef struct tsr_io_ops {
    /* Exactly n bytes at off, or an error. The caller (tsr_io_pread) has checked the range against size. */
    tsr_status (*pread)(tsr_io *io, void *dst, size_t n, uint64_t off, tsr_err *err);
    /* Whole content as a read-only mapping that lives until close, or NULL: use pread then. */
    const uint8_t *(*map)(tsr_io *io);
    /* Bytes [off, off + n) of the mapping are not needed for now; NULL: nothing to do. */
    void (*drop)(tsr_io *io, uint64_t off, uint64_t n);
    void (*close)(tsr_io *io);
} tsr_io_ops;
struct tsr_io {
    const tsr_io_ops *ops;
    uint64_t size;
    char *name; /* for messages */
};

/* Reads exactly n bytes; a range past the end is TSR_E_FORMAT "ends before". Thread-safe. */
TSR_NODISCARD tsr_status tsr_io_pread(tsr_io *io, void *dst, size_t n, uint64_t off, tsr_err *err);
/* Borrowed until close; NULL when it cannot be mapped (or is empty). Thread-safe. */
const uint8_t *tsr_io_map(tsr_io *io);
/* Takes pages of the mapping out of this process's memory (they stay in the page cache): a scan of a large file
 * then keeps a bounded resident size. */
void tsr_io_drop(tsr_io *io, uint64_t off, uint64_t n);
void tsr_io_close(tsr_io **io);

/* A regular file. Symbolic links are followed; a dangling one is TSR_E_MISSING and says so. */
TSR_NODISCARD tsr_status tsr_io_open_file(tsr_io **out, const char *path, tsr_err *err);
/* n bytes of memory, borrowed until close. */
TSR_NODISCARD tsr_status tsr_io_open_mem(tsr_io **out, const char *name, const void *p, size_t n,
                                         tsr_err *err);
/* Bytes [off, off + n) of base, which is borrowed and must outlive it. */
TSR_NODISCARD tsr_status tsr_io_open_window(tsr_io **out, const char *name, tsr_io *base, uint64_t off,
                                            uint64_t n, tsr_err *err);

/* ---- a flat set of named files (a folder, a tar's members, a table in memory) -------------------- */

typedef struct tsr_dir tsr_dir;
typedef struct tsr_dir_ops {
    /* name may hold '/' (assets/x). TSR_E_MISSING when absent. The io lives independently of other ios. */
    tsr_status (*open)(tsr_dir *d, const char *name, tsr_io **out, tsr_err *err);
    /* Size without opening; TSR_E_MISSING when absent. */
    tsr_status (*size)(tsr_dir *d, const char *name, uint64_t *out, tsr_err *err);
    /* Calls fn for each regular file (recursively, names relative, '/'-separated, sorted by name). Stops at
     * fn's first failure and returns it. */
    tsr_status (*each)(tsr_dir *d,
                       tsr_status (*fn)(void *payload, const char *name, uint64_t size, tsr_err *err),
                       void *payload, tsr_err *err);
    void (*close)(tsr_dir *d);
} tsr_dir_ops;
struct tsr_dir {
    const tsr_dir_ops *ops;
    char *path; /* for messages: the folder or the tar file */
};

TSR_NODISCARD tsr_status tsr_dir_open_posix(tsr_dir **out, const char *path, tsr_err *err);
void tsr_dir_close(tsr_dir **d);
/* Reads a whole member of at most limit bytes into malloc'ed memory with a NUL behind it; larger: TSR_E_LIMIT. */
TSR_NODISCARD tsr_status tsr_dir_read(tsr_dir *d, const char *name, size_t limit, char **out,
                                      size_t *bytes_out, tsr_err *err);

/* ---- writing: each call is one step that can fail, or be made to fail by a test ------------------- */

typedef enum tsr_fs_op {
    TSR_FS_CREATE, /* open with O_CREAT|O_EXCL */
    TSR_FS_WRITE,
    TSR_FS_FSYNC, /* of a file */
    TSR_FS_FSYNC_DIR,
    TSR_FS_RENAME,
    TSR_FS_MKDIR,
    TSR_FS_LINK,
    TSR_FS_UNLINK,
    TSR_FS_TRUNCATE
} tsr_fs_op;

/* Test hook, NULL in production: called before each step; a non-zero result is taken as the errno of that
 * step (for TSR_FS_WRITE, after half of the bytes were written). It may also kill the process. */
typedef int (*tsr_fs_fault_fn)(void *payload, tsr_fs_op op, const char *path);
void tsr_fs_set_fault(tsr_fs_fault_fn fn, void *payload);

/* A file open for reading and writing. */
typedef struct tsr_file tsr_file;
TSR_NODISCARD tsr_status tsr_file_create(tsr_file **out, const char *path, tsr_err *err); /* must not exist */
TSR_NODISCARD tsr_status tsr_file_pwrite(tsr_file *f, const void *src, size_t n, uint64_t off, tsr_err *err);
TSR_NODISCARD tsr_status tsr_file_pread(tsr_file *f, void *dst, size_t n, uint64_t off, tsr_err *err);
TSR_NODISCARD tsr_status tsr_file_truncate(tsr_file *f, uint64_t size, tsr_err *err);
/* Tells the kernel to start writing back [off, off+n): keeps the final fsync short. Never fails. */
void tsr_file_writeback(tsr_file *f, uint64_t off, uint64_t n);
TSR_NODISCARD tsr_status tsr_file_sync(tsr_file *f, tsr_err *err);
/* Closes; does not sync. Accepts NULL and sets NULL. */
void tsr_file_close(tsr_file **f);

TSR_NODISCARD tsr_status tsr_fs_mkdir(const char *path, tsr_err *err);
TSR_NODISCARD tsr_status tsr_fs_mkdirs(const char *path, tsr_err *err); /* parents too; existing is fine */
TSR_NODISCARD tsr_status tsr_fs_sync_dir(const char *path, tsr_err *err);
/* Replaces dst when it is a file. */
TSR_NODISCARD tsr_status tsr_fs_rename(const char *src, const char *dst, tsr_err *err);
/* Fails with TSR_E_CONFLICT when dst exists (renameat2 RENAME_NOREPLACE, with a checked fallback). */
TSR_NODISCARD tsr_status tsr_fs_rename_new(const char *src, const char *dst, tsr_err *err);
/* Hard link, else reflink, else copy + fsync; dst must not exist. */
TSR_NODISCARD tsr_status tsr_fs_link_or_copy(const char *src, const char *dst, tsr_err *err);
/* create + write + fsync of a small file at path (which must not exist). */
TSR_NODISCARD tsr_status tsr_fs_write_file(const char *path, const void *src, size_t n, tsr_err *err);
/* This machine's name, for temporary names that only its own processes may tidy up. */
void tsr_fs_host(char out[65]);
/* Temp file beside path, fsync, rename over path, fsync of the folder. */
TSR_NODISCARD tsr_status tsr_fs_replace_file(const char *path, const void *src, size_t n, tsr_err *err);
/* Removes a tree of ours (no error when absent; never follows links). Best effort, first error is reported. */
TSR_NODISCARD tsr_status tsr_fs_remove_tree(const char *path, tsr_err *err);
/* Free bytes for this user on the file system that holds path (or its nearest existing parent). */
TSR_NODISCARD tsr_status tsr_fs_free_bytes(const char *path, uint64_t *out, tsr_err *err);
bool tsr_fs_exists(const char *path); /* lstat succeeds */
bool tsr_fs_is_dir(const char *path); /* follows links */

/* flock on a file in a folder of ours; *fd_out to be closed by tsr_fs_unlock. TSR_E_CONFLICT when another holds it. */
TSR_NODISCARD tsr_status tsr_fs_lock(const char *path, int *fd_out, tsr_err *err);
void tsr_fs_unlock(int *fd);
/* Resolves where a new checkpoint goes: dst must not exist, or be (a link to) an empty folder. Returns the real
 * path and the temporary one beside it (both malloc'ed). */
TSR_NODISCARD tsr_status tsr_fs_target(const char *dst, bool resumable, char **real, char **temp,
                                       tsr_err *err);

/* A resumable run's note in temp holds this key. TSR_E_MISSING: there is none; TSR_E_CONFLICT: another key. */
TSR_NODISCARD tsr_status tsr_fs_check_note(const char *note, const char *key, const char *real,
                                           const char *temp, tsr_err *err);

/* errno to class: ENOENT is TSR_E_MISSING, ENOSPC and the like TSR_E_IO; message "path: what: strerror". */
tsr_status tsr_fs_error(tsr_err *err, int errnum, const char *path, const char *what);

#endif
