/* tar_dir.h - private: a tar of a checkpoint as a folder, read in place. */
#ifndef TSR_FORMAT_TAR_DIR_H
#define TSR_FORMAT_TAR_DIR_H

#include "format/io.h"

#define TSR_PAD_PREFIX ".pad/"

/* An uncompressed tar of one checkpoint folder. Only headers are touched. TSR_E_UNSUPPORTED: compressed.
 * TSR_E_FORMAT: truncated, sparse or doubled members, names that leave the folder. */
TSR_NODISCARD tsr_status tsr_dir_open_tar(tsr_dir **out, const char *path, tsr_err *err);
/* The same over memory that outlives it. */
TSR_NODISCARD tsr_status tsr_dir_open_tar_mem(tsr_dir **out, const char *name, const void *p, size_t n,
                                              tsr_err *err);
/* The file begins like a tar (a ustar magic at 257). */
bool tsr_is_tar(const char *path);
/* Relative, without empty, "." or ".." parts. */
bool tsr_safe_name(const char *name);

#endif
