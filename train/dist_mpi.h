/* dist_mpi.h - for train/: the door between the program and its MPI plugin. */
#ifndef TSR_TRAIN_DIST_MPI_H
#define TSR_TRAIN_DIST_MPI_H

#include "train/dist.h"

#define TSR_DIST_PLUGIN "tessera-mpi.so"
#define TSR_DIST_MPI_ENTRY "tsr_dist_mpi_enter"
/* version and bytes of tsr_dist must be the program's own. why: what went wrong. */
typedef tsr_status tsr_dist_mpi_fn(tsr_dist **out, const char *version, size_t dist_bytes, double timeout_s,
                                   char *why, size_t why_bytes);

#endif
