/* registry.c - the formats we read: one row each; the highest bid opens a path. */
#include "convert/convert.h"
#include "convert/from_safetensors.h"
#include "convert/from_tessera.h"
#include "format/io.h"

#include <stdio.h>
#include <string.h>

const tsr_source_ops *const tsr_source_formats[] = { &tsr_source_tessera, &tsr_source_safetensors, NULL };

/* What a file nobody bids for looks like, for the message. */
static const char *looks_like(const char *path)
{
    static const struct {
        const char *magic;
        size_t bytes;
        const char *what;
    } known[] = {
        { "GGUF", 4, "a GGUF file" },
        { "PK\003\004", 4, "a zip file (a PyTorch or NumPy archive?)" },
        { "\x89HDF\r\n", 6, "an HDF5 file (a shard is opened by its checkpoint's folder)" },
        { "\x28\xb5\x2f\xfd", 4, "a zstd-compressed file" },
        { "version https://git-lfs", 23, "a Git LFS pointer" },
        { "\x80\x02", 2, "a Python pickle" },
    };
    uint8_t first[64] = { 0 };
    tsr_io *io;
    if (tsr_fs_is_dir(path)) {
        return "a folder without manifest.json or .safetensors files";
    }
    if (tsr_io_open_file(&io, path, NULL) != TSR_OK) {
        return "unreadable";
    }
    size_t n = io->size < sizeof first ? (size_t)io->size : sizeof first;
    bool ok = tsr_io_pread(io, first, n, 0, NULL) == TSR_OK;
    tsr_io_close(&io);
    for (size_t i = 0; ok && i < sizeof known / sizeof *known; i++) {
        if (n >= known[i].bytes && memcmp(first, known[i].magic, known[i].bytes) == 0) {
            return known[i].what;
        }
    }
    return "nothing this version reads";
}

tsr_status tsr_source_open(tsr_source **out, const char *path, const tsr_source_opts *o, tsr_err *err)
{
    static const tsr_source_opts none = { 0 };
    *out = NULL;
    const tsr_source_ops *best = NULL;
    int best_bid = 0;
    for (size_t i = 0; tsr_source_formats[i] != NULL; i++) {
        int bid = tsr_source_formats[i]->bid(path);
        if (bid > best_bid) {
            best = tsr_source_formats[i];
            best_bid = bid;
        }
    }
    if (best != NULL) {
        return best->open(out, path, o != NULL ? o : &none, err);
    }
    if (!tsr_fs_exists(path)) {
        TSR_FAIL(err, TSR_E_MISSING, "%s: does not exist", path);
    }
    tsr_io *io;
    if (!tsr_fs_is_dir(path)) { /* a dangling link or an unreadable file has its own message */
        TSR_TRY(tsr_io_open_file(&io, path, err));
        tsr_io_close(&io);
    }
    TSR_FAIL(err, TSR_E_UNSUPPORTED, "%s: is %s (reads Tessera checkpoints, tars of them, and safetensors)",
             path, looks_like(path));
}

tsr_status tsr_source_read(tsr_source *s, int64_t i, uint64_t off, void *dst, size_t n, tsr_err *err)
{
    TSR_ASSERT(i >= 0 && i < s->count && off <= s->tensors[i].bytes && n <= s->tensors[i].bytes - off);
    return n > 0 ? s->ops->read(s, i, off, dst, n, err) : TSR_OK;
}

void tsr_source_close(tsr_source **s)
{
    if (s != NULL && *s != NULL) {
        (*s)->ops->close(*s);
        *s = NULL;
    }
}
