/* fuzz_tar.c - a tar of a checkpoint read in place, down to the checkpoint inside. */
#include "format/reader.h"
#include "format/tar_dir.h"
#include "tests/fuzz/fuzz.h"

#include <stdlib.h>

static tsr_status look(void *payload, const char *name, uint64_t size, tsr_err *err)
{
    tsr_dir *d = payload;
    tsr_io *io;
    uint8_t first[16];
    if (d->ops->open(d, name, &io, err) == TSR_OK) {
        TSR_IGNORE(tsr_io_pread(io, first, size < sizeof first ? (size_t)size : sizeof first, 0, err));
        tsr_io_close(&io);
    }
    return TSR_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    tsr_dir *d;
    tsr_ckpt *c;
    if (tsr_dir_open_tar_mem(&d, "fuzz", data, size, NULL) != TSR_OK) {
        return 0;
    }
    TSR_IGNORE(d->ops->each(d, look, d, NULL));
    TSR_IGNORE(tsr_ckpt_open_dir(&c, d, false, NULL));
    tsr_ckpt_close(&c);
    return 0;
}
