/* dist.h - public: processes that train together. One interface, a back end each: self (one process), mpi.
 *
 * Every call is collective over the group: all ranks make the same calls in the same order. Results of reductions are the same
 * bits on every rank. A rank that dies or does not answer within the timeout ends the job: the call fails on the others, or the
 * process is ended by the back end after one line that names the rank. */
#ifndef TSR_TRAIN_DIST_H
#define TSR_TRAIN_DIST_H

#include "format/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum tsr_reduce { TSR_SUM_F32, TSR_SUM_F64, TSR_SUM_I64, TSR_MAX_F32, TSR_MAX_I64 } tsr_reduce;

typedef struct tsr_dist tsr_dist;
struct tsr_dist {
    const char *name;
    int32_t rank, ranks;
    int32_t local_ranks; /* on this machine */
    /* data [count], in and out. */
    tsr_status (*all_reduce)(tsr_dist *d, void *data, size_t count, tsr_reduce what, tsr_err *err);
    /* The sum ends at root only; elsewhere data is undefined afterwards. f32. */
    tsr_status (*reduce)(tsr_dist *d, float *data, size_t count, int32_t root, tsr_err *err);
    /* The same begun and left to go on by itself: data is not to be touched until finish. poll, called now and then, helps it on;
     * finish waits for all that were begun. */
    tsr_status (*start_reduce)(tsr_dist *d, float *data, size_t count, int32_t root, tsr_err *err);
    void (*poll)(tsr_dist *d);
    tsr_status (*finish)(tsr_dist *d, tsr_err *err);
    tsr_status (*broadcast)(tsr_dist *d, void *data, size_t bytes, int32_t root, tsr_err *err);
    /* Blocks for and from each rank lie one behind the other, in rank order. */
    tsr_status (*all_to_all)(tsr_dist *d, const void *send, const size_t *send_bytes, void *recv,
                             const size_t *recv_bytes, tsr_err *err);
    /* bytes from each rank, in rank order. */
    tsr_status (*all_gather)(tsr_dist *d, const void *send, void *recv, size_t bytes, tsr_err *err);
    tsr_status (*send)(tsr_dist *d, const void *data, size_t bytes, int32_t to, tsr_err *err);
    tsr_status (*receive)(tsr_dist *d, void *data, size_t bytes, int32_t from, tsr_err *err);
    tsr_status (*barrier)(tsr_dist *d, tsr_err *err);
    /* A new group of the ranks that name the same colour, in order of their ranks here. */
    tsr_status (*split)(tsr_dist *d, int32_t colour, tsr_dist **out, tsr_err *err);
    /* Ends the whole job at once with an exit code; for failures of one rank that the others cannot know. */
    void (*abort)(tsr_dist *d, int code);
    void (*destroy)(tsr_dist *d);
    void *impl;
};

/* One process: every call returns what it was given. */
TSR_NODISCARD tsr_status tsr_dist_self_open(tsr_dist **out, tsr_err *err);
/* The processes that mpirun started. MPI's code is in a plugin, tessera-mpi.so: plugin is its path, NULL: beside the program,
 * or in the library folder. timeout_s: how long a call may wait for the others; then it fails with TSR_E_IO and names the ranks
 * that do not answer. TSR_E_UNSUPPORTED: this build has no MPI, or its library cannot be loaded. */
TSR_NODISCARD tsr_status tsr_dist_mpi_open(tsr_dist **out, const char *plugin, double timeout_s,
                                           tsr_err *err);
void tsr_dist_close(tsr_dist **d);

#ifdef __cplusplus
}
#endif
#endif
