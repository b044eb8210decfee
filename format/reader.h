/* reader.h - private: what the other parts of format/ need of an open checkpoint. */
#ifndef TSR_FORMAT_READER_H
#define TSR_FORMAT_READER_H

#include "format/format.h"
#include "format/index.h"
#include "format/io.h"

/* Takes dir over, also on failure. lenient: shards that are missing or of a wrong size do not matter yet. */
TSR_NODISCARD tsr_status tsr_ckpt_open_dir(tsr_ckpt **out, tsr_dir *dir, bool lenient, tsr_err *err);
const tsr_index *tsr_ckpt_index(const tsr_ckpt *c);
tsr_dir *tsr_ckpt_dir(const tsr_ckpt *c);
/* The shard's io, opened and head-checked; borrowed. */
TSR_NODISCARD tsr_status tsr_ckpt_file_io(const tsr_ckpt *c, uint32_t file, tsr_io **out, tsr_err *err);
/* "2, 3" or "0-111": ids as compact ranges, in buf. */
void tsr_ranges_text(const uint32_t *ids, uint32_t count, char *buf, size_t buf_bytes);

#endif
