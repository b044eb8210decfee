/* routing_file.c - see routing_file.h. */
#include "train/routing_file.h"

#include <errno.h>
#include <hdf5.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ROOM 128
#define CHUNK_BYTES 8192 /* not compressed: a kill while rows are added then spoils those rows only */

/* ---- one data set that grows ---------------------------------------------------------------------------------------- */

/* Appends rows [rows][cols] (cols 0: a plain list) behind row `at`; makes the data set when it is not there. */
static bool grow(hid_t where, const char *name, hid_t type, hsize_t at, hsize_t rows, hsize_t cols,
                 const void *data)
{
    int rank = cols > 0 ? 2 : 1;
    hsize_t none[2] = { 0, cols }, most[2] = { H5S_UNLIMITED, cols }, chunk[2] = { 0, cols };
    chunk[0] = CHUNK_BYTES / (8 * (cols > 0 ? cols : 1)) + 1;
    if (H5Lexists(where, name, H5P_DEFAULT) <= 0) {
        hid_t space = H5Screate_simple(rank, none, most), how = H5Pcreate(H5P_DATASET_CREATE);
        (void)H5Pset_chunk(how, rank, chunk);
        hid_t made = H5Dcreate2(where, name, type, space, H5P_DEFAULT, how, H5P_DEFAULT);
        (void)H5Pclose(how);
        (void)H5Sclose(space);
        if (made < 0 || H5Dclose(made) < 0) {
            return false;
        }
    }
    hid_t set = H5Dopen2(where, name, H5P_DEFAULT);
    if (set < 0) {
        return false;
    }
    hsize_t size[2] = { at + rows, cols }, start[2] = { at, 0 }, count[2] = { rows, cols };
    bool ok = H5Dset_extent(set, size) >= 0;
    hid_t file = ok ? H5Dget_space(set) : -1, memory = H5Screate_simple(rank, count, NULL);
    ok = ok && file >= 0 && H5Sselect_hyperslab(file, H5S_SELECT_SET, start, NULL, count, NULL) >= 0 &&
         (rows == 0 || H5Dwrite(set, type, memory, file, H5P_DEFAULT, data) >= 0);
    if (file >= 0) {
        (void)H5Sclose(file);
    }
    (void)H5Sclose(memory);
    return H5Dclose(set) >= 0 && ok;
}

static bool attribute(hid_t where, const char *name, int64_t value)
{
    if (H5Aexists(where, name) > 0) {
        return true;
    }
    hid_t space = H5Screate(H5S_SCALAR);
    hid_t a = H5Acreate2(where, name, H5T_STD_I64LE, space, H5P_DEFAULT, H5P_DEFAULT);
    bool ok = a >= 0 && H5Awrite(a, H5T_NATIVE_INT64, &value) >= 0;
    if (a >= 0) {
        (void)H5Aclose(a);
    }
    (void)H5Sclose(space);
    return ok;
}

static hsize_t length_of(hid_t file)
{
    hsize_t n[2] = { 0, 0 };
    if (H5Lexists(file, "step", H5P_DEFAULT) > 0) {
        hid_t set = H5Dopen2(file, "step", H5P_DEFAULT), space = set >= 0 ? H5Dget_space(set) : -1;
        if (space < 0 || H5Sget_simple_extent_ndims(space) != 1 ||
            H5Sget_simple_extent_dims(space, n, NULL) < 0) {
            n[0] = 0;
        }
        if (space >= 0) {
            (void)H5Sclose(space);
        }
        if (set >= 0) {
            (void)H5Dclose(set);
        }
    }
    return n[0];
}

static bool write_layer(const routing_file *f, hid_t file, int32_t i, hsize_t at)
{
    char name[32];
    hsize_t e = (hsize_t)f->r->spec->experts, rows = (hsize_t)f->rows;
    int64_t from = (int64_t)i * f->room;
    (void)snprintf(name, sizeof name, "layer_%04d", f->layer[i]);
    hid_t g = H5Lexists(file, name, H5P_DEFAULT) > 0
                  ? H5Gopen2(file, name, H5P_DEFAULT)
                  : H5Gcreate2(file, name, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    bool ok = g >= 0 && grow(g, "count", H5T_NATIVE_INT64, at, rows, e, f->count + from * (int64_t)e) &&
              grow(g, "gate_mass", H5T_NATIVE_FLOAT, at, rows, e, f->mass + from * (int64_t)e) &&
              grow(g, "bias", H5T_NATIVE_FLOAT, at, rows, e, f->bias + from * (int64_t)e) &&
              grow(g, "max_violation", H5T_NATIVE_DOUBLE, at, rows, 0, f->maxvio + from);
    return g >= 0 && H5Gclose(g) >= 0 && ok;
}

static tsr_status append(const routing_file *f, const char *path, tsr_err *err)
{
    hid_t file = access(path, F_OK) == 0 ? H5Fopen(path, H5F_ACC_RDWR, H5P_DEFAULT)
                                         : H5Fcreate(path, H5F_ACC_EXCL, H5P_DEFAULT, H5P_DEFAULT);
    if (file < 0) {
        TSR_FAIL(err, TSR_E_IO, "%s: cannot be opened for writing", path);
    }
    hsize_t at = length_of(file), rows = (hsize_t)f->rows;
    bool ok = attribute(file, "version", 1) && attribute(file, "experts", f->r->spec->experts) &&
              attribute(file, "top_k", f->r->spec->top_k);
    for (int32_t i = 0; ok && i < f->layers; i++) {
        ok = write_layer(f, file, i, at);
    }
    /* The length of "step" is the file's: it grows when all else is in the file, so that a kill leaves whole rows. */
    ok = ok && grow(file, "stage", H5T_NATIVE_INT64, at, rows, 0, f->stage) &&
         grow(file, "tokens", H5T_NATIVE_INT64, at, rows, 0, f->tokens) &&
         H5Fflush(file, H5F_SCOPE_LOCAL) >= 0 && grow(file, "step", H5T_NATIVE_INT64, at, rows, 0, f->step);
    ok = H5Fclose(file) >= 0 && ok;
    return ok ? TSR_OK : TSR_ERR(err, TSR_E_IO, "%s: cannot be written", path);
}

/* ---- rows ------------------------------------------------------------------------------------------------------------------ */

void routing_add(routing_file *f, const balance *k, int64_t step, int32_t stage, int64_t tokens)
{
    int64_t e = f->r->spec->experts, at = f->rows;
    TSR_ASSERT(at < f->room);
    f->step[at] = step;
    f->stage[at] = stage;
    f->tokens[at] = tokens;
    for (int32_t i = 0; i < f->layers; i++) {
        int64_t to = ((int64_t)i * f->room + at) * e;
        memcpy(f->count + to, k->row[i].count, (size_t)e * sizeof *f->count);
        memcpy(f->bias + to, k->row[i].bias, (size_t)e * sizeof *f->bias);
        for (int64_t j = 0; j < e; j++) {
            f->mass[to + j] = (float)k->row[i].mass[j];
        }
        f->maxvio[(int64_t)i * f->room + at] = k->row[i].maxvio;
    }
    f->rows++;
}

tsr_status routing_flush(routing_file *f, tsr_err *err)
{
    if (f->layers == 0) {
        return TSR_OK;
    }
    TSR_TRY(append(f, f->run_path, err));
    TSR_TRY(append(f, f->window_path, err));
    f->rows = 0;
    return TSR_OK;
}

char *routing_take_window(routing_file *f, int64_t step)
{
    char path[4096];
    (void)snprintf(path, sizeof path, "%s.%lld", f->window_path, (long long)step);
    return f->layers > 0 && rename(f->window_path, path) == 0 ? strdup(path) : NULL;
}

/* ---- opening ------------------------------------------------------------------------------------------------------------------- */

static bool cut(hid_t where, const char *name, hsize_t rows)
{
    hid_t set = H5Dopen2(where, name, H5P_DEFAULT), space = set >= 0 ? H5Dget_space(set) : -1;
    hsize_t n[2] = { 0, 0 };
    bool ok = space >= 0 && H5Sget_simple_extent_ndims(space) <= 2 &&
              H5Sget_simple_extent_dims(space, n, NULL) >= 0;
    n[0] = rows;
    ok = ok && H5Dset_extent(set, n) >= 0;
    if (space >= 0) {
        (void)H5Sclose(space);
    }
    if (set >= 0) {
        (void)H5Dclose(set);
    }
    return ok;
}

/* Cuts every data set to the rows of steps up to `step`: also what an interrupted append left. */
static bool cut_file(const char *path, const routing_file *f, int64_t step)
{
    static const char *const lists[] = { "step", "stage", "tokens" };
    static const char *const tables[] = { "count", "gate_mass", "bias", "max_violation" };
    hid_t file = H5Fopen(path, H5F_ACC_RDWR, H5P_DEFAULT);
    if (file < 0) {
        return false;
    }
    hsize_t n = length_of(file), keep = 0;
    int64_t *steps = malloc((size_t)(n + 1) * sizeof *steps);
    hid_t set = n > 0 ? H5Dopen2(file, "step", H5P_DEFAULT) : -1;
    bool ok = steps != NULL && (n == 0 || (set >= 0 && H5Dread(set, H5T_NATIVE_INT64, H5S_ALL, H5S_ALL,
                                                               H5P_DEFAULT, steps) >= 0));
    if (set >= 0) {
        (void)H5Dclose(set);
    }
    int64_t last = 0; /* a kill may leave a row whose number was not written: 0 */
    while (ok && keep < n && steps[keep] > last && steps[keep] <= step) {
        last = steps[keep++];
    }
    for (size_t i = 0; ok && n > 0 && i < 3; i++) {
        ok = cut(file, lists[i], keep);
    }
    for (int32_t i = 0; ok && n > 0 && i < f->layers; i++) {
        char name[64];
        for (size_t k = 0; ok && k < 4; k++) {
            (void)snprintf(name, sizeof name, "layer_%04d/%s", f->layer[i], tables[k]);
            ok = cut(file, name, keep);
        }
    }
    free(steps);
    return H5Fclose(file) >= 0 && ok;
}

static tsr_status take(routing_file *f, const balance *k, tsr_err *err)
{
    size_t e = (size_t)f->r->spec->experts, n = (size_t)f->layers * ROOM;
    f->room = ROOM;
    f->step = malloc(ROOM * sizeof *f->step);
    f->stage = malloc(ROOM * sizeof *f->stage);
    f->tokens = malloc(ROOM * sizeof *f->tokens);
    f->count = malloc(n * e * sizeof *f->count + 1);
    f->mass = malloc(n * e * sizeof *f->mass + 1);
    f->bias = malloc(n * e * sizeof *f->bias + 1);
    f->maxvio = malloc(n * sizeof *f->maxvio + 1);
    f->layer = malloc((size_t)f->layers * sizeof *f->layer + 1);
    if (!f->step || !f->stage || !f->tokens || !f->count || !f->mass || !f->bias || !f->maxvio || !f->layer ||
        !f->run_path || !f->window_path) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory: routing of %d steps", ROOM);
    }
    for (int32_t i = 0; i < f->layers; i++) {
        f->layer[i] = k->row[i].layer;
    }
    return TSR_OK;
}

tsr_status routing_open(routing_file *f, const char *run, const tsr_recipe *r, const balance *k, int64_t step,
                        char **note, tsr_err *err)
{
    char path[4096];
    *f = (routing_file){ .r = r, .layers = k->layers };
    *note = NULL;
    (void)snprintf(path, sizeof path, "%s/routing.h5", run);
    f->run_path = strdup(path);
    (void)snprintf(path, sizeof path, "%s/.routing-window.h5", run);
    f->window_path = strdup(path);
    TSR_TRY(take(f, k, err));
    (void)H5Eset_auto2(H5E_DEFAULT, NULL, NULL); /* failures are told by us */
    (void)unlink(f->window_path);
    if (access(f->run_path, F_OK) == 0 && !cut_file(f->run_path, f, step)) {
        (void)snprintf(path, sizeof path, "%s.damaged", f->run_path);
        if (rename(f->run_path, path) != 0) {
            TSR_FAIL(err, TSR_E_IO, "%s: damaged, and cannot be renamed: %s", f->run_path, strerror(errno));
        }
        char text[4200];
        (void)snprintf(text, sizeof text,
                       "%s cannot be read (an interrupted write): renamed to routing.h5.damaged; each "
                       "checkpoint still holds its own part",
                       f->run_path);
        *note = strdup(text);
    }
    return TSR_OK;
}

void routing_close(routing_file *f)
{
    if (f->window_path != NULL) {
        (void)unlink(f->window_path);
    }
    void *const blocks[] = { f->run_path, f->window_path, f->step, f->stage,  f->tokens,
                             f->count,    f->mass,        f->bias, f->maxvio, f->layer };
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) {
        free(blocks[i]);
    }
    *f = (routing_file){ .rows = 0 };
}
