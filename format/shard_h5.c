/* shard_h5.c - lays out an .h5 shard with libhdf5; see shard_h5.h.
 *
 * A private virtual file driver stands between libhdf5 and the file. Metadata writes pass through to
 * tsr_file_pwrite; the write of a chunk is recognised by the marker address handed to H5Dwrite_chunk: the driver
 * notes where libhdf5 put it and writes nothing. */
#include "format/shard_h5.h"
#include "format/layout.h"

#include <hdf5.h>
#if H5_VERSION_GE(1, 13, 0)
#include <H5FDdevelop.h>
#endif
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ZSTD_FILTER 32015
#define OPEN_DATASETS_MAX 2048

static pthread_mutex_t h5_lock = PTHREAD_MUTEX_INITIALIZER; /* libhdf5 may not be built thread-safe */
static const char marker[1] = { 0 };                        /* its address stands for "a chunk's bytes" */

typedef struct dataset {
    hid_t id; /* -1 when closed again */
    char *path;
    int rank;
    unsigned filter_mask; /* all filters of the pipeline, for chunks stored raw */
} dataset;

struct tsr_h5_writer {
    tsr_file *f;
    hid_t file, lcpl, gcpl;
    dataset *sets;
    int set_count, set_room, open_count, evict;
    bool placed; /* the driver saw the marker */
    haddr_t place;
    bool swallow;  /* abort: writes are dropped so that closing cannot fail */
    tsr_status st; /* first failure of the driver's own I/O */
    tsr_err err;
    haddr_t eof;
    unsigned groups; /* bit per group made */
};

/* ---- the driver ------------------------------------------------------------------------------------------- */

typedef struct driver_info {
    tsr_h5_writer *w;
} driver_info;
typedef struct driver_file {
    H5FD_t pub; /* must be first */
    tsr_h5_writer *w;
    haddr_t eoa;
} driver_file;

/* Keeps the first failure and drops every later write: libhdf5 must never see one, since a file it could not
 * close would haunt the process until its end. The callers look at w->st. */
static void note(tsr_h5_writer *w, tsr_status st, const tsr_err *err)
{
    if (w->st == TSR_OK) {
        w->st = st;
        w->err = *err;
    }
    w->swallow = true;
}

static H5FD_t *drv_open(const char *name, unsigned flags, hid_t fapl, haddr_t maxaddr)
{
    (void)name, (void)flags, (void)maxaddr;
    const driver_info *info = H5Pget_driver_info(fapl);
    driver_file *d = calloc(1, sizeof *d);
    if (d != NULL && info != NULL) {
        d->w = info->w;
    }
    return (H5FD_t *)d;
}

static herr_t drv_close(H5FD_t *file)
{
    free(file);
    return 0;
}

static herr_t drv_query(const H5FD_t *file, unsigned long *flags)
{
    (void)file;
    *flags = H5FD_FEAT_AGGREGATE_METADATA | H5FD_FEAT_ACCUMULATE_METADATA;
    return 0;
}

static haddr_t drv_get_eoa(const H5FD_t *file, H5FD_mem_t type)
{
    (void)type;
    return ((const driver_file *)file)->eoa;
}

static herr_t drv_set_eoa(H5FD_t *file, H5FD_mem_t type, haddr_t addr)
{
    (void)type;
    ((driver_file *)file)->eoa = addr;
    return 0;
}

static haddr_t drv_get_eof(const H5FD_t *file, H5FD_mem_t type)
{
    (void)type;
    return ((const driver_file *)file)->w->eof;
}

static herr_t drv_read(H5FD_t *file, H5FD_mem_t type, hid_t dxpl, haddr_t addr, size_t size, void *buf)
{
    (void)type, (void)dxpl;
    tsr_h5_writer *w = ((driver_file *)file)->w;
    memset(buf, 0, size);
    if (addr >= w->eof) {
        return 0;
    }
    size_t have = w->eof - addr < size ? (size_t)(w->eof - addr) : size;
    tsr_err err;
    tsr_status st = tsr_file_pread(w->f, buf, have, addr, &err);
    if (st != TSR_OK) {
        note(w, st, &err);
    }
    return 0;
}

static herr_t drv_write(H5FD_t *file, H5FD_mem_t type, hid_t dxpl, haddr_t addr, size_t size, const void *buf)
{
    (void)type, (void)dxpl;
    tsr_h5_writer *w = ((driver_file *)file)->w;
    if (buf == marker) {
        w->placed = true;
        w->place = addr;
        return 0; /* eof does not move: nothing is there yet, and libhdf5 never reads it */
    }
    tsr_err err;
    tsr_status st = w->swallow ? TSR_OK : tsr_file_pwrite(w->f, buf, size, addr, &err);
    if (st != TSR_OK) {
        note(w, st, &err);
    }
    w->eof = addr + size > w->eof ? addr + size : w->eof;
    return 0;
}

static herr_t drv_truncate(H5FD_t *file, hid_t dxpl, hbool_t closing)
{
    (void)dxpl, (void)closing;
    driver_file *d = (driver_file *)file;
    if (d->w->swallow || d->w->eof == d->eoa) {
        return 0;
    }
    tsr_err err;
    tsr_status st = tsr_file_truncate(d->w->f, d->eoa, &err);
    if (st != TSR_OK) {
        note(d->w, st, &err);
    }
    d->w->eof = d->eoa;
    return 0;
}

static hid_t driver_id(void)
{
    static hid_t id = -1;
    static const H5FD_class_t cls = {
#if H5_VERSION_GE(1, 13, 0)
        .version = H5FD_CLASS_VERSION,
        .value = (H5FD_class_value_t)600,
#endif
        .name = "tessera",
        .maxaddr = ((haddr_t)1 << 62) - 1,
        .fc_degree = H5F_CLOSE_STRONG,
        .fapl_size = sizeof(driver_info),
        .open = drv_open,
        .close = drv_close,
        .query = drv_query,
        .get_eoa = drv_get_eoa,
        .set_eoa = drv_set_eoa,
        .get_eof = drv_get_eof,
        .read = drv_read,
        .write = drv_write,
        .truncate = drv_truncate,
        .fl_map = H5FD_FLMAP_DICHOTOMY,
    };
    if (id < 0) {
        id = H5FDregister(&cls);
    }
    return id;
}

/* ---- errors --------------------------------------------------------------------------------------------------- */

static herr_t innermost(unsigned n, const H5E_error2_t *e, void *out)
{
    if (n == 0) {
        (void)snprintf(out, 160, "%s", e->desc != NULL ? e->desc : "?");
    }
    return 0;
}

/* The driver's own error when there is one, else libhdf5's innermost words. */
static tsr_status fail(tsr_h5_writer *w, const char *what, tsr_err *err)
{
    if (w->st != TSR_OK) {
        if (err != NULL) {
            *err = w->err;
        }
        return w->st;
    }
    char why[160] = "unknown reason";
    (void)H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, innermost, why);
    TSR_FAIL(err, TSR_E_IO, "%s: libhdf5: %s", what, why);
}

/* Every use of libhdf5 happens between these two. Errors are told by us, and the thread's error stack is emptied
 * again: libhdf5 could not close properly at exit while a finished thread holds error records. */
static void enter(void)
{
    (void)pthread_mutex_lock(&h5_lock);
    (void)H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
}

static void leave(void)
{
    (void)H5Eclear2(H5E_DEFAULT);
    (void)pthread_mutex_unlock(&h5_lock);
}

/* ---- types ------------------------------------------------------------------------------------------------------ */

static hid_t small_float(size_t sign, size_t epos, size_t esize, size_t msize, size_t bytes, size_t bias)
{
    hid_t t = H5Tcopy(H5T_IEEE_F32LE);
    if (t >= 0 && (H5Tset_fields(t, sign, epos, esize, 0, msize) < 0 || H5Tset_size(t, bytes) < 0 ||
                   H5Tset_ebias(t, bias) < 0)) {
        (void)H5Tclose(t);
        return -1;
    }
    return t;
}

static hid_t bool_type(void)
{
    signed char no = 0, yes = 1;
    hid_t t = H5Tenum_create(H5T_STD_I8LE);
    if (t >= 0 && (H5Tenum_insert(t, "FALSE", &no) < 0 || H5Tenum_insert(t, "TRUE", &yes) < 0)) {
        (void)H5Tclose(t);
        return -1;
    }
    return t;
}

/* E4M3 is kept as u8: libhdf5 takes an all-ones exponent for Inf or NaN, but in E4M3 those are 256..448. */
static hid_t h5_type(tsr_dtype d)
{
    switch (d) {
    case TSR_DT_F64: return H5Tcopy(H5T_IEEE_F64LE);
    case TSR_DT_F32: return H5Tcopy(H5T_IEEE_F32LE);
    case TSR_DT_F16: return small_float(15, 10, 5, 10, 2, 15);
    case TSR_DT_BF16: return small_float(15, 7, 8, 7, 2, 127);
    case TSR_DT_F8_E5M2: return small_float(7, 2, 5, 2, 1, 15);
    case TSR_DT_I64: return H5Tcopy(H5T_STD_I64LE);
    case TSR_DT_I32: return H5Tcopy(H5T_STD_I32LE);
    case TSR_DT_I16: return H5Tcopy(H5T_STD_I16LE);
    case TSR_DT_I8: return H5Tcopy(H5T_STD_I8LE);
    case TSR_DT_U64: return H5Tcopy(H5T_STD_U64LE);
    case TSR_DT_U32: return H5Tcopy(H5T_STD_U32LE);
    case TSR_DT_U16: return H5Tcopy(H5T_STD_U16LE);
    case TSR_DT_BOOL: return bool_type();
    default: return H5Tcopy(H5T_STD_U8LE);
    }
}

/* ---- names -------------------------------------------------------------------------------------------------------- */

char *tsr_h5_escape(const char *name)
{
    size_t n = strlen(name);
    char *out = malloc(n * 3 + 2), *p = out;
    if (out == NULL) {
        return NULL;
    }
    if (n == 0) {
        memcpy(out, "%", 2); /* never made by the rule below */
        return out;
    }
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)name[i];
        if (c < 32 || c == 127 || c == '/' || c == '%' || (c == '.' && n == 1)) {
            p += sprintf(p, "%%%02X", c);
        } else {
            *p++ = (char)c;
        }
    }
    *p = '\0';
    return out;
}

static int hex_digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

char *tsr_h5_unescape(const char *link)
{
    char *out = malloc(strlen(link) + 1), *p = out;
    if (out == NULL || strcmp(link, "%") == 0) {
        if (out != NULL) {
            *out = '\0';
        }
        return out;
    }
    for (const char *s = link; *s != '\0'; s++) {
        if (*s != '%') {
            *p++ = *s;
            continue;
        }
        int a = hex_digit(s[1]), b = a >= 0 ? hex_digit(s[2]) : -1;
        if (a < 0 || b < 0 || a * 16 + b == 0) {
            free(out);
            return NULL;
        }
        *p++ = (char)(a * 16 + b);
        s += 2;
    }
    *p = '\0';
    return out;
}

/* ---- file ----------------------------------------------------------------------------------------------------------- */

static tsr_status create_file(tsr_h5_writer *w, tsr_err *err)
{
    driver_info info = { w };
    hid_t fapl = H5Pcreate(H5P_FILE_ACCESS), fcpl = H5Pcreate(H5P_FILE_CREATE);
    w->lcpl = H5Pcreate(H5P_LINK_CREATE);
    w->gcpl = H5Pcreate(H5P_GROUP_CREATE);
    bool ok = fapl >= 0 && fcpl >= 0 && w->lcpl >= 0 && w->gcpl >= 0 &&
              H5Pset_driver(fapl, driver_id(), &info) >= 0 &&
              H5Pset_libver_bounds(fapl, H5F_LIBVER_V110, H5F_LIBVER_V110) >= 0 &&
              H5Pset_alignment(fapl, 4096, 4096) >= 0 && H5Pset_fclose_degree(fapl, H5F_CLOSE_STRONG) >= 0 &&
              H5Pset_userblock(fcpl, TSR_HEAD_BYTES) >= 0 && H5Pset_obj_track_times(fcpl, 0) >= 0 &&
              /* no free-space manager: gaps left by alignment must not attract chunks of another expert */
              H5Pset_file_space_strategy(fcpl, H5F_FSPACE_STRATEGY_NONE, 0, 1) >= 0 &&
              H5Pset_obj_track_times(w->gcpl, 0) >= 0 && H5Pset_char_encoding(w->lcpl, H5T_CSET_UTF8) >= 0;
    if (ok) {
        w->file = H5Fcreate("tessera-shard", H5F_ACC_TRUNC, fcpl, fapl);
    }
    tsr_status st = w->file >= 0 ? TSR_OK : fail(w, "shard", err);
    if (fapl >= 0) {
        (void)H5Pclose(fapl);
    }
    if (fcpl >= 0) {
        (void)H5Pclose(fcpl);
    }
    return st;
}

tsr_status tsr_h5_create(tsr_h5_writer **out, tsr_file *f, tsr_err *err)
{
    *out = NULL;
    tsr_h5_writer *w = calloc(1, sizeof *w);
    if (w == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    w->f = f;
    w->file = w->lcpl = w->gcpl = -1;
    enter();
    tsr_status st = create_file(w, err);
    leave();
    if (st != TSR_OK) {
        tsr_h5_abort(&w);
    }
    *out = w;
    return st;
}

/* ---- data sets ----------------------------------------------------------------------------------------------------- */

static bool ensure_group(tsr_h5_writer *w, const char *group)
{
    static const char *const known[] = { "/tensors", "/experts", "/tessera" };
    for (unsigned i = 0; i < 3; i++) {
        if (strcmp(group, known[i]) != 0) {
            continue;
        }
        if ((w->groups & 1u << i) == 0) {
            hid_t g = H5Gcreate2(w->file, group, H5P_DEFAULT, w->gcpl, H5P_DEFAULT);
            if (g < 0) {
                return false;
            }
            (void)H5Gclose(g);
            w->groups |= 1u << i;
        }
        return true;
    }
    return false;
}

static bool put_attr(hid_t set, const char *key, const char *value)
{
    size_t n = strlen(value);
    hid_t t = H5Tcopy(H5T_C_S1), s = H5Screate(H5S_SCALAR), a = -1;
    bool ok = t >= 0 && s >= 0 && H5Tset_size(t, n > 0 ? n : 1) >= 0 && H5Tset_cset(t, H5T_CSET_UTF8) >= 0 &&
              H5Tset_strpad(t, H5T_STR_NULLPAD) >= 0 &&
              (a = H5Acreate2(set, key, t, s, H5P_DEFAULT, H5P_DEFAULT)) >= 0 && H5Awrite(a, t, value) >= 0;
    if (a >= 0) {
        (void)H5Aclose(a);
    }
    (void)H5Sclose(s);
    (void)H5Tclose(t);
    return ok;
}

/* Creation properties, and how many filters the pipeline has. */
static hid_t make_dcpl(const tsr_h5_dataset *d, const hsize_t *chunk, unsigned *filters)
{
    hid_t p = H5Pcreate(H5P_DATASET_CREATE);
    unsigned level = (unsigned)d->zstd_level;
    bool ok = p >= 0 && H5Pset_obj_track_times(p, 0) >= 0 && H5Pset_fill_time(p, H5D_FILL_TIME_NEVER) >= 0;
    *filters = 0;
    if (ok && d->chunk != NULL) {
        ok = H5Pset_chunk(p, d->rank, chunk) >= 0 && H5Pset_alloc_time(p, H5D_ALLOC_TIME_INCR) >= 0;
        if (ok && d->compress && tsr_dtype_info((unsigned)d->dtype)->bytes_per_unit > 1) {
            ok = H5Pset_shuffle(p) >= 0;
            (*filters)++;
        }
        if (ok && d->compress) {
            ok = H5Pset_filter(p, ZSTD_FILTER, H5Z_FLAG_OPTIONAL, 1, &level) >= 0;
            (*filters)++;
        }
    } else if (ok) {
        ok = H5Pset_layout(p, H5D_CONTIGUOUS) >= 0 && H5Pset_alloc_time(p, H5D_ALLOC_TIME_EARLY) >= 0;
    }
    if (!ok && p >= 0) {
        (void)H5Pclose(p);
        return -1;
    }
    return p;
}

static hid_t create_set(tsr_h5_writer *w, const tsr_h5_dataset *d, const char *path, unsigned *filters)
{
    hsize_t dims[TSR_RANK_MAX + 1] = { 0 }, chunk[TSR_RANK_MAX + 1] = { 0 };
    unsigned pack = tsr_dtype_info((unsigned)d->dtype)->elems_per_unit;
    for (int i = 0; i < d->rank; i++) {
        unsigned unit = i == d->rank - 1 ? pack : 1;
        dims[i] = (hsize_t)d->shape[i] / unit;
        chunk[i] = d->chunk != NULL ? (hsize_t)d->chunk[i] / unit : 0;
    }
    hid_t type = h5_type(d->dtype);
    hid_t space = d->rank > 0 ? H5Screate_simple(d->rank, dims, NULL) : H5Screate(H5S_SCALAR);
    hid_t dcpl = make_dcpl(d, chunk, filters);
    hid_t set = type >= 0 && space >= 0 && dcpl >= 0
                    ? H5Dcreate2(w->file, path, type, space, w->lcpl, dcpl, H5P_DEFAULT)
                    : -1;
    if (dcpl >= 0) {
        (void)H5Pclose(dcpl);
    }
    if (space >= 0) {
        (void)H5Sclose(space);
    }
    if (type >= 0) {
        (void)H5Tclose(type);
    }
    bool ok = set >= 0 && put_attr(set, "dtype", tsr_dtype_name((unsigned)d->dtype));
    for (int i = 0; ok && i < d->attr_count; i++) {
        ok = strlen(d->attrs[i].value) >= 1024 || put_attr(set, d->attrs[i].key, d->attrs[i].value);
    }
    if (!ok && set >= 0) {
        (void)H5Dclose(set);
        return -1;
    }
    return set;
}

static tsr_status remember(tsr_h5_writer *w, hid_t set, char *path, int rank, unsigned filters, int *id,
                           tsr_err *err)
{
    if (w->set_count == w->set_room) {
        int room = w->set_room * 2 + 64;
        dataset *grown = realloc(w->sets, (size_t)room * sizeof *grown);
        if (grown == NULL) {
            (void)H5Dclose(set);
            free(path);
            TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
        }
        w->sets = grown;
        w->set_room = room;
    }
    *id = w->set_count;
    w->sets[w->set_count++] = (dataset){ set, path, rank, (1u << filters) - 1 };
    return TSR_OK;
}

/* Keeps the number of open data sets bounded: half a million may be declared. */
static void make_handle_room(tsr_h5_writer *w)
{
    while (w->open_count >= OPEN_DATASETS_MAX) {
        dataset *d = &w->sets[w->evict];
        if (d->id >= 0) {
            (void)H5Dclose(d->id);
            d->id = -1;
            w->open_count--;
        }
        w->evict = (w->evict + 1) % w->set_count;
    }
}

static tsr_status add(tsr_h5_writer *w, const tsr_h5_dataset *d, int *id, uint64_t *offset, tsr_err *err)
{
    char *link = tsr_h5_escape(d->name), *path = NULL;
    if (link == NULL || asprintf(&path, "%s/%s", d->group, link) < 0) {
        free(link);
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    free(link);
    unsigned filters = 0;
    hid_t set = ensure_group(w, d->group) ? create_set(w, d, path, &filters) : -1;
    if (set < 0) {
        tsr_status st = fail(w, d->name, err);
        free(path);
        return st;
    }
    if (d->chunk == NULL) {
        haddr_t at = H5Dget_offset(set); /* absolute: includes the user block */
        *offset = at == HADDR_UNDEF ? 0 : at;
        (void)H5Dclose(set);
        set = -1;
        free(path);
        path = NULL;
    } else {
        make_handle_room(w);
        w->open_count++;
    }
    return remember(w, set, path, d->rank, filters, id, err);
}

tsr_status tsr_h5_add(tsr_h5_writer *w, const tsr_h5_dataset *d, int *id_out, uint64_t *offset_out,
                      tsr_err *err)
{
    TSR_ASSERT(d->rank >= 0 && d->rank <= TSR_RANK_MAX);
    enter();
    tsr_status st = add(w, d, id_out, offset_out, err);
    leave();
    return st;
}

static tsr_status place(tsr_h5_writer *w, dataset *d, const int64_t *coords, uint64_t stored, bool filtered,
                        uint64_t *offset, tsr_err *err)
{
    hsize_t at[TSR_RANK_MAX + 1] = { 0 };
    for (int i = 0; i < d->rank; i++) {
        at[i] = (hsize_t)coords[i];
    }
    if (d->id < 0) {
        make_handle_room(w);
        d->id = H5Dopen2(w->file, d->path, H5P_DEFAULT);
        if (d->id < 0) {
            return fail(w, d->path, err);
        }
        w->open_count++;
    }
    w->placed = false;
    if (H5Dwrite_chunk(d->id, H5P_DEFAULT, filtered ? 0 : d->filter_mask, at, stored, marker) < 0) {
        return fail(w, d->path, err);
    }
    if (w->st != TSR_OK) {
        return fail(w, d->path, err);
    }
    if (!w->placed) {
        TSR_FAIL(err, TSR_E_IO, "%s: libhdf5 did not hand the chunk to the driver", d->path);
    }
    *offset = w->place;
    return TSR_OK;
}

tsr_status tsr_h5_place(tsr_h5_writer *w, int id, const int64_t *coords, uint64_t stored_bytes, bool filtered,
                        uint64_t *offset_out, tsr_err *err)
{
    TSR_ASSERT(id >= 0 && id < w->set_count && w->sets[id].path != NULL);
    enter();
    tsr_status st = place(w, &w->sets[id], coords, stored_bytes, filtered, offset_out, err);
    leave();
    return st;
}

/* ---- the end --------------------------------------------------------------------------------------------------------- */

static bool close_all(tsr_h5_writer *w)
{
    bool ok = true;
    for (int i = 0; i < w->set_count; i++) {
        if (w->sets[i].id >= 0) {
            ok = H5Dclose(w->sets[i].id) >= 0 && ok;
        }
        free(w->sets[i].path);
    }
    free(w->sets);
    w->sets = NULL;
    w->set_count = 0;
    if (w->gcpl >= 0) {
        (void)H5Pclose(w->gcpl);
    }
    if (w->lcpl >= 0) {
        (void)H5Pclose(w->lcpl);
    }
    w->gcpl = w->lcpl = -1;
    if (w->file >= 0) {
        ok = H5Fclose(w->file) >= 0 && ok;
        w->file = -1;
    }
    return ok;
}

tsr_status tsr_h5_finish(tsr_h5_writer **w, uint64_t *file_bytes_out, tsr_err *err)
{
    enter();
    bool ok = close_all(*w);
    tsr_status st = ok && (*w)->st == TSR_OK ? TSR_OK : fail(*w, "shard", err);
    *file_bytes_out = (*w)->eof;
    leave();
    free(*w);
    *w = NULL;
    return st;
}

void tsr_h5_abort(tsr_h5_writer **w)
{
    if (w == NULL || *w == NULL) {
        return;
    }
    enter();
    (*w)->swallow = true;
    (void)close_all(*w);
    leave();
    free(*w);
    *w = NULL;
}
