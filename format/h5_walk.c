/* h5_walk.c - a shard as libhdf5 sees it, read in a child process: damaged files can crash libhdf5, and then it is
 * the child that dies. The child sends records over a pipe; the parent checks their lengths and calls back. */
#include "format/shard_h5.h"

#include <errno.h>
#include <hdf5.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#define WALK_MEMORY_BYTES ((rlim_t)4 << 30)
#define WALK_CPU_SECONDS 600
#define NAME_MAX_BYTES 16384

/* What travels: a record, then its name and attribute text. */
typedef struct walk_rec {
    uint32_t kind; /* 1 data set, 2 chunk, 3 refusal (text in name), 4 done */
    uint32_t name_bytes, attr_bytes;
    int32_t rank;
    uint32_t elem_bytes, mask, has_chunk, group;
    uint64_t dims[TSR_RANK_MAX + 1], chunk[TSR_RANK_MAX + 1]; /* chunk record: dims holds the coordinates */
    uint64_t offset, bytes, chunk_count;
} walk_rec;

static const char *const groups[] = { "/tensors", "/experts", "/tessera" };

/* ---- child ------------------------------------------------------------------------------------------------- */

typedef struct child {
    int fd;
    hid_t file;
    uint32_t group;
    uint64_t base; /* what has to be added to libhdf5's chunk addresses */
} child;

static void send_all(int fd, const void *p, size_t n)
{
    const char *s = p;
    while (n > 0) {
        ssize_t put = write(fd, s, n);
        if (put < 0 && errno == EINTR) {
            continue;
        }
        if (put <= 0) {
            _exit(3);
        }
        s += put;
        n -= (size_t)put;
    }
}

static void send_rec(const child *c, walk_rec *r, const char *name, const char *attr)
{
    r->name_bytes = (uint32_t)strlen(name);
    r->attr_bytes = (uint32_t)strlen(attr);
    send_all(c->fd, r, sizeof *r);
    send_all(c->fd, name, r->name_bytes);
    send_all(c->fd, attr, r->attr_bytes);
}

static void refuse(const child *c, const char *what)
{
    walk_rec r = { .kind = 3 };
    send_rec(c, &r, what, "");
    _exit(0);
}

static void read_dtype_attr(hid_t set, char *out, size_t n)
{
    out[0] = '\0';
    if (H5Aexists(set, "dtype") <= 0) {
        return;
    }
    hid_t a = H5Aopen(set, "dtype", H5P_DEFAULT), t = H5Aget_type(a);
    if (H5Tget_class(t) == H5T_STRING && H5Tis_variable_str(t) == 0 && H5Tget_size(t) < n) {
        size_t len = H5Tget_size(t);
        if (H5Aread(a, t, out) < 0) {
            len = 0;
        }
        out[len] = '\0';
    }
    (void)H5Tclose(t);
    (void)H5Aclose(a);
}

static void send_chunks(const child *c, hid_t set, hid_t dcpl, const walk_rec *d, hid_t space)
{
    hsize_t n = d->chunk_count;
    for (hsize_t i = 0; i < n; i++) {
        walk_rec r = { .kind = 2, .rank = d->rank };
        hsize_t coords[TSR_RANK_MAX + 1] = { 0 }, size = 0;
        unsigned mask = 0;
        haddr_t addr = HADDR_UNDEF;
        if (d->has_chunk) {
            if (H5Dget_chunk_info(set, space, i, coords, &mask, &addr, &size) < 0) {
                refuse(c, "a chunk's place cannot be read");
            }
            addr += c->base;
        } else {
            addr = H5Dget_offset(set); /* this one includes the user block */
            size = H5Dget_storage_size(set);
        }
        for (int k = 0; k < d->rank; k++) {
            r.dims[k] = coords[k];
        }
        r.offset = addr;
        r.bytes = size;
        r.mask = mask;
        send_rec(c, &r, "", "");
    }
    (void)dcpl;
}

static void visit_set(const child *c, hid_t set, const char *name)
{
    walk_rec r = { .kind = 1, .group = c->group };
    char attr[256];
    hid_t space = H5Dget_space(set), dcpl = H5Dget_create_plist(set), type = H5Dget_type(set);
    hsize_t dims[H5S_MAX_RANK] = { 0 }, chunk[H5S_MAX_RANK] = { 0 };
    if (space < 0 || dcpl < 0 || type < 0 || H5Pget_external_count(dcpl) != 0) {
        refuse(c, "a data set cannot be read, or keeps its data outside the file");
    }
    H5D_layout_t layout = H5Pget_layout(dcpl);
    if (layout != H5D_CONTIGUOUS && layout != H5D_CHUNKED) {
        refuse(c, "a data set is compact or virtual");
    }
    r.rank = H5Sget_simple_extent_dims(space, dims, NULL);
    r.elem_bytes = (uint32_t)H5Tget_size(type);
    r.has_chunk = layout == H5D_CHUNKED;
    if (r.has_chunk) {
        hsize_t n = 0;
        (void)H5Pget_chunk(dcpl, H5S_MAX_RANK, chunk);
        if (H5Dget_num_chunks(set, space, &n) < 0) {
            refuse(c, "a data set's chunks cannot be counted");
        }
        r.chunk_count = n;
    } else {
        r.chunk_count = H5Dget_storage_size(set) > 0;
    }
    for (int i = 0; i < r.rank; i++) {
        r.dims[i] = dims[i];
        r.chunk[i] = chunk[i];
    }
    read_dtype_attr(set, attr, sizeof attr);
    send_rec(c, &r, name, attr);
    send_chunks(c, set, dcpl, &r, space);
    (void)H5Tclose(type);
    (void)H5Pclose(dcpl);
    (void)H5Sclose(space);
}

static herr_t visit_link(hid_t g, const char *name, const H5L_info_t *info, void *arg)
{
    const child *c = arg;
    if (info->type != H5L_TYPE_HARD) {
        refuse(c, "holds a soft or external link");
    }
    hid_t o = H5Oopen(g, name, H5P_DEFAULT);
    if (o < 0 || H5Iget_type(o) != H5I_DATASET) {
        refuse(c, "holds something that is not a data set");
    }
    visit_set(c, o, name);
    (void)H5Oclose(o);
    return 0;
}

/* Whether this libhdf5's chunk addresses leave the user block out (1.10 does, 1.14 does not): a tiny file in memory
 * tells. Its chunk lies within the first 4096 bytes behind the user block. */
static bool addresses_exclude_user_block(void)
{
    hsize_t one = 1, zero = 0, size = 0;
    unsigned mask = 0;
    haddr_t addr = HADDR_UNDEF;
    signed char byte = 1;
    hid_t fapl = H5Pcreate(H5P_FILE_ACCESS), fcpl = H5Pcreate(H5P_FILE_CREATE),
          dcpl = H5Pcreate(H5P_DATASET_CREATE);
    (void)H5Pset_fapl_core(fapl, 4096, 0);
    (void)H5Pset_userblock(fcpl, 4096);
    (void)H5Pset_chunk(dcpl, 1, &one);
    hid_t f = H5Fcreate("tessera-probe", H5F_ACC_TRUNC, fcpl, fapl);
    hid_t space = H5Screate_simple(1, &one, NULL);
    hid_t set = H5Dcreate2(f, "x", H5T_STD_I8LE, space, H5P_DEFAULT, dcpl, H5P_DEFAULT);
    (void)H5Dwrite(set, H5T_STD_I8LE, H5S_ALL, H5S_ALL, H5P_DEFAULT, &byte);
    (void)H5Dget_chunk_info(set, space, 0, &zero, &mask, &addr, &size);
    (void)H5Dclose(set);
    (void)H5Sclose(space);
    (void)H5Fclose(f);
    (void)H5Pclose(dcpl);
    (void)H5Pclose(fcpl);
    (void)H5Pclose(fapl);
    return addr < 4096;
}

static void run_child(int fd, const char *path)
{
    struct rlimit mem = { WALK_MEMORY_BYTES, WALK_MEMORY_BYTES },
                  cpu = { WALK_CPU_SECONDS, WALK_CPU_SECONDS };
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) /* they reserve terabytes */
    (void)setrlimit(RLIMIT_AS, &mem);
#endif
    (void)mem;
    (void)setrlimit(RLIMIT_CPU, &cpu);
    struct rlimit core = { 0, 0 };
    (void)setrlimit(RLIMIT_CORE, &core);
    (void)alarm(WALK_CPU_SECONDS * 2);
    (void)H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    (void)H5PLset_loading_state(0);
    child c = { .fd = fd };
    hid_t fcpl;
    hsize_t base = 0;
    c.file = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT);
    if (c.file < 0 || (fcpl = H5Fget_create_plist(c.file)) < 0 || H5Pget_userblock(fcpl, &base) < 0) {
        refuse(&c, "libhdf5 cannot open it");
    }
    c.base = addresses_exclude_user_block() ? base : 0;
    for (c.group = 0; c.group < 3; c.group++) {
        if (H5Lexists(c.file, groups[c.group] + 1, H5P_DEFAULT) <= 0) {
            continue;
        }
        hid_t g = H5Gopen2(c.file, groups[c.group], H5P_DEFAULT);
        if (g < 0 || H5Literate(g, H5_INDEX_NAME, H5_ITER_NATIVE, NULL, visit_link, &c) < 0) {
            refuse(&c, "a group cannot be listed");
        }
        (void)H5Gclose(g);
    }
    walk_rec r = { .kind = 4 };
    send_rec(&c, &r, "", "");
    _exit(0);
}

/* ---- parent ---------------------------------------------------------------------------------------------------- */

static bool receive(int fd, void *p, size_t n)
{
    char *s = p;
    while (n > 0) {
        ssize_t got = read(fd, s, n);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            return false;
        }
        s += got;
        n -= (size_t)got;
    }
    return true;
}

typedef struct current {
    walk_rec rec;
    char name[NAME_MAX_BYTES + 1], attr[256 + 1];
    char *plain; /* unescaped name */
    tsr_h5_seen seen;
} current;

static tsr_status take_set(const char *path, const tsr_h5_visit *v, current *c, tsr_err *err)
{
    free(c->plain);
    c->plain = tsr_h5_unescape(c->name);
    if (c->plain == NULL || c->rec.rank < 0 || c->rec.rank > TSR_RANK_MAX || c->rec.group > 2) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: %.200s: not a data set of ours", path, c->name);
    }
    c->seen = (tsr_h5_seen){ .group = groups[c->rec.group],
                             .name = c->plain,
                             .dtype_attr = c->attr,
                             .elem_bytes = c->rec.elem_bytes,
                             .rank = c->rec.rank,
                             .dims = c->rec.dims,
                             .chunk = c->rec.has_chunk ? c->rec.chunk : NULL,
                             .chunk_count = c->rec.chunk_count };
    return v->dataset(v->payload, &c->seen, err);
}

/* *done: the child said that it told everything. */
static tsr_status take_records(int fd, const char *path, const tsr_h5_visit *v, current *c, bool *done,
                               tsr_err *err)
{
    walk_rec r;
    char name[NAME_MAX_BYTES + 1], attr[257];
    while (receive(fd, &r, sizeof r)) {
        if (r.name_bytes > NAME_MAX_BYTES || r.attr_bytes > 256 || !receive(fd, name, r.name_bytes) ||
            !receive(fd, attr, r.attr_bytes)) {
            return TSR_OK; /* the child broke off: reported from its exit status */
        }
        name[r.name_bytes] = attr[r.attr_bytes] = '\0';
        if (r.kind == 1) {
            c->rec = r;
            memcpy(c->name, name, r.name_bytes + 1u);
            memcpy(c->attr, attr, r.attr_bytes + 1u);
            TSR_TRY(take_set(path, v, c, err));
        } else if (r.kind == 2 && c->plain != NULL) {
            TSR_TRY(v->chunk(v->payload, &c->seen, r.dims, r.offset, r.bytes, r.mask, err));
        } else if (r.kind == 3) {
            TSR_FAIL(err, TSR_E_FORMAT, "%s: %s", path, name);
        } else {
            *done = r.kind == 4;
            return TSR_OK;
        }
    }
    return TSR_OK;
}

tsr_status tsr_h5_walk(const char *path, const tsr_h5_visit *v, tsr_err *err)
{
    int ends[2], status = 0;
    if (pipe(ends) != 0) {
        return tsr_fs_error(err, errno, path, "no pipe to look into it");
    }
    pid_t pid = fork();
    if (pid == 0) {
        (void)close(ends[0]);
        run_child(ends[1], path);
    }
    (void)close(ends[1]);
    if (pid < 0) {
        (void)close(ends[0]);
        return tsr_fs_error(err, errno, path, "no process to look into it");
    }
    current *c = calloc(1, sizeof *c);
    bool done = false;
    tsr_status st = c != NULL ? take_records(ends[0], path, v, c, &done, err)
                              : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    (void)close(ends[0]); /* an unfinished child gets SIGPIPE */
    if (st != TSR_OK) {
        (void)kill(pid, SIGKILL);
    }
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
    if (c != NULL) {
        free(c->plain);
    }
    free(c);
    if (st == TSR_OK && !done) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: libhdf5 could not read this file (%s %d)", path,
                 WIFSIGNALED(status) ? "signal" : "exit",
                 WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    }
    return st;
}
