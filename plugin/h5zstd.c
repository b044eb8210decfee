/* h5zstd.c - HDF5 filter plugin 32015 (zstd): lets h5py, h5dump and others read compressed shards where no such plugin
 * is installed. Load it with HDF5_PLUGIN_PATH. The filter's number and its one parameter, the level, are those of the
 * HDF Group's registry of filters. */
#include <H5PLextern.h>
#include <hdf5.h>
#include <stdlib.h>
#include <zstd.h>

#define ZSTD_FILTER 32015

static size_t zstd_filter(unsigned flags, size_t cd_count, const unsigned cd[], size_t bytes,
                          size_t *buf_bytes, void **buf)
{
    void *out;
    size_t got;
    if ((flags & H5Z_FLAG_REVERSE) != 0) {
        unsigned long long size = ZSTD_getFrameContentSize(*buf, bytes);
        if (size == ZSTD_CONTENTSIZE_UNKNOWN || size == ZSTD_CONTENTSIZE_ERROR ||
            size > ((unsigned long long)1 << 32)) {
            return 0; /* HDF5 chunks are smaller than 4 GiB */
        }
        out = malloc((size_t)size + 1);
        got = out != NULL ? ZSTD_decompress(out, (size_t)size, *buf, bytes) : 0;
        if (out == NULL || ZSTD_isError(got) || got != size) {
            free(out);
            return 0;
        }
        *buf_bytes = (size_t)size;
    } else {
        size_t room = ZSTD_compressBound(bytes);
        out = malloc(room);
        got = out != NULL ? ZSTD_compress(out, room, *buf, bytes, cd_count > 0 ? (int)cd[0] : 1) : 0;
        if (out == NULL || ZSTD_isError(got)) {
            free(out);
            return 0;
        }
        *buf_bytes = room;
    }
    free(*buf); /* HDF5 allocated it with malloc */
    *buf = out;
    return got;
}

static const H5Z_class2_t filter = { H5Z_CLASS_T_VERS, ZSTD_FILTER, 1, 1, "zstd", NULL, NULL, zstd_filter };

/* The two entries HDF5 asks a plugin for; exported although everything else is hidden. */
__attribute__((visibility("default"))) H5PL_type_t H5PLget_plugin_type(void)
{
    return H5PL_TYPE_FILTER;
}

__attribute__((visibility("default"))) const void *H5PLget_plugin_info(void)
{
    return &filter;
}
