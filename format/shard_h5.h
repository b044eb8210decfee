/* shard_h5.h - private: the only door to libhdf5. Lays out an .h5 shard (groups, datasets, attributes, chunk
 * places) without moving tensor data through libhdf5: it says where each chunk lies, and the caller writes
 * the bytes there with tsr_file_pwrite. */
#ifndef TSR_FORMAT_SHARD_H5_H
#define TSR_FORMAT_SHARD_H5_H

#include "format/base.h"
#include "format/io.h"

typedef struct tsr_h5_writer tsr_h5_writer;

typedef struct tsr_h5_attr { /* a short text attribute */
    const char *key, *value; /* value: at most 1023 bytes, UTF-8 */
} tsr_h5_attr;

typedef struct tsr_h5_dataset {
    const char *group;    /* "/tensors", "/experts"; made on first use */
    const char *name;     /* our tensor name, any bytes but NUL: escaped into a link name by tsr_h5_escape */
    tsr_dtype dtype;      /* decides the HDF5 type; see docs/FORMAT.md "HDF5 types" */
    int rank;             /* of the dataset: for a family, item rank + 1 */
    const int64_t *shape; /* logical elements; packed dtypes are stored as u8 with half the last dimension */
    const int64_t
        *chunk;    /* NULL: contiguous, allocated at once. Else rank chunk dims, logical elements, > 0 */
    bool compress; /* chunked only: filter pipeline shuffle (if element size > 1) + 32015 (zstd, level) */
    int zstd_level;
    const tsr_h5_attr *attrs;
    int attr_count;
} tsr_h5_dataset;

/* Starts an HDF5 file with a 4096-byte user block in f (just created, empty; borrowed). libver V110 bounds, no
 * times, so that equal content gives equal bytes. All metadata goes through tsr_file_pwrite (fault injection). */
TSR_NODISCARD tsr_status tsr_h5_create(tsr_h5_writer **out, tsr_file *f, tsr_err *err);
/* Adds a dataset. *id_out numbers it (for tsr_h5_place). Contiguous: *offset_out is the absolute file offset of
 * its bytes (user block included); 0 for a dataset without bytes. offset_out is untouched for chunked ones. */
TSR_NODISCARD tsr_status tsr_h5_add(tsr_h5_writer *w, const tsr_h5_dataset *d, int *id_out,
                                    uint64_t *offset_out, tsr_err *err);
/* Allocates the chunk that begins at coords (rank entries, storage units of the dataset, multiples of the chunk
 * dims) with stored_bytes in the file; *offset_out is absolute. Chunks of 4096 bytes and more are 4096-aligned.
 * filtered false in a compressed dataset: the chunk is stored raw (filter mask set for every filter). */
TSR_NODISCARD tsr_status tsr_h5_place(tsr_h5_writer *w, int id, const int64_t *coords, uint64_t stored_bytes,
                                      bool filtered, uint64_t *offset_out, tsr_err *err);
/* Closes all; *file_bytes_out is the end of the HDF5 file (the file is extended to it). Frees w. */
TSR_NODISCARD tsr_status tsr_h5_finish(tsr_h5_writer **w, uint64_t *file_bytes_out, tsr_err *err);
void tsr_h5_abort(tsr_h5_writer **w);

/* Zeroes the times in the superblock extension of a finished file; see h5_times.c. */
TSR_NODISCARD tsr_status tsr_h5_drop_times(tsr_file *f, uint64_t file_bytes, tsr_err *err);

/* Link name for a tensor name: '/' '%' and control bytes become %XX, the name "." becomes "%2E", "" becomes
 * "%". Invertible. malloc'ed; NULL when out of memory. */
char *tsr_h5_escape(const char *name);
char *tsr_h5_unescape(const char *link); /* NULL when not such a name, or out of memory */

/* ---- the shard as libhdf5 sees it (verify --deep) ------------------------------------------------------ */

typedef struct tsr_h5_seen {
    const char *group, *name; /* unescaped */
    const char *dtype_attr;   /* value of the attribute "dtype", "" when absent */
    size_t elem_bytes;
    int rank;
    const uint64_t *dims;  /* storage units */
    const uint64_t *chunk; /* NULL when contiguous */
    uint64_t chunk_count;  /* 1 for contiguous with bytes */
} tsr_h5_seen;
typedef struct tsr_h5_visit {
    tsr_status (*dataset)(void *payload, const tsr_h5_seen *d, tsr_err *err);
    /* For each chunk of the dataset told last; coords in storage units (rank entries, all 0 for contiguous).
     * mask as HDF5's filter mask. offset absolute. */
    tsr_status (*chunk)(void *payload, const tsr_h5_seen *d, const uint64_t *coords, uint64_t offset,
                        uint64_t bytes, unsigned mask, tsr_err *err);
    void *payload;
} tsr_h5_visit;
/* Walks a file in a child process with limits on memory and time (a damaged file may crash libhdf5: that is
 * reported as TSR_E_FORMAT); plugins are off, links out of the file, external and virtual storage are refused. */
TSR_NODISCARD tsr_status tsr_h5_walk(const char *path, const tsr_h5_visit *v, tsr_err *err);

#endif
