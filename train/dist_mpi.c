/* dist_mpi.c - processes started by mpirun: the plugin tessera-mpi.so. Every wait has an end: ranks that wait in vain report to
 * rank 0, which then knows who is missing. */
#include "train/dist_mpi.h"

#include <limits.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define PART ((size_t)1 << 28) /* elements of one MPI call */
#define TAG 7
#define GRACE_S 2.0 /* for reports of others, behind the timeout */

/* What all groups share. */
typedef struct world {
    MPI_Comm reports; /* whoever waits in vain says so here */
    double timeout_s;
    int rank, ranks, users;
} world;

typedef struct group {
    world *w;
    MPI_Comm comm;
    MPI_Request *begun; /* reductions that go on by themselves */
    int count, room;
} group;

static double now(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void pause_for(long ns)
{
    (void)nanosleep(&(struct timespec){ .tv_nsec = ns }, NULL);
}

/* ---- waiting --------------------------------------------------------------------------------------------------------- */

/* Rank 0: who of the others has reported. */
static void list_missing(world *w, char *out, size_t bytes)
{
    char *seen = calloc((size_t)w->ranks, 1);
    double until = now() + GRACE_S;
    size_t n = 0;
    while (seen != NULL && now() < until) {
        int there = 0;
        MPI_Status st;
        (void)MPI_Iprobe(MPI_ANY_SOURCE, TAG, w->reports, &there, &st);
        if (there) {
            (void)MPI_Recv(NULL, 0, MPI_BYTE, st.MPI_SOURCE, TAG, w->reports, &st);
            seen[st.MPI_SOURCE] = 1;
        } else {
            pause_for(1000000);
        }
    }
    out[0] = '\0';
    for (int i = 1; seen != NULL && i < w->ranks && n + 16 < bytes; i++) {
        n += seen[i] ? 0 : (size_t)snprintf(out + n, bytes - n, "%s%d", n > 0 ? ", " : "", i);
    }
    free(seen);
}

static tsr_status in_vain(world *w, const char *what, tsr_err *err)
{
    if (w->rank == 0) {
        char missing[160];
        list_missing(w, missing, sizeof missing);
        TSR_FAIL(err, TSR_E_IO,
                 "rank %s: no answer for %g s in %s (dead, hanging, or much slower than the others)",
                 missing[0] != '\0' ? missing : "unknown", w->timeout_s, what);
    }
    MPI_Request r;
    (void)MPI_Isend(NULL, 0, MPI_BYTE, 0, TAG, w->reports, &r);
    for (double until = now() + GRACE_S + w->timeout_s;
         now() < until;) { /* rank 0 ends the job, if it lives */
        int done = 0;
        (void)MPI_Test(&r, &done, MPI_STATUS_IGNORE);
        pause_for(1000000);
    }
    TSR_FAIL(err, TSR_E_IO, "rank 0: no answer for %g s in %s", w->timeout_s, what);
}

static tsr_status wait_for(group *g, MPI_Request *r, const char *what, tsr_err *err)
{
    double begin = now();
    for (int64_t i = 0;; i++) {
        int done = 0;
        if (MPI_Test(r, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) {
            TSR_FAIL(err, TSR_E_IO, "rank %d: MPI failed in %s", g->w->rank, what);
        }
        if (done) {
            return TSR_OK;
        }
        if (i > 2000) {
            pause_for(20000);
        }
        if (i % 256 == 255 && now() - begin > g->w->timeout_s) {
            return in_vain(g->w, what, err);
        }
    }
}

/* ---- calls --------------------------------------------------------------------------------------------------------------- */

static void kind_of(tsr_reduce what, MPI_Datatype *type, MPI_Op *op, size_t *size)
{
    *op = what == TSR_MAX_F32 || what == TSR_MAX_I64 ? MPI_MAX : MPI_SUM;
    *type = what == TSR_SUM_F64                          ? MPI_DOUBLE
            : what == TSR_SUM_F32 || what == TSR_MAX_F32 ? MPI_FLOAT
                                                         : MPI_INT64_T;
    *size = *type == MPI_FLOAT ? 4 : 8;
}

static tsr_status all_reduce(tsr_dist *d, void *data, size_t count, tsr_reduce what, tsr_err *err)
{
    group *g = d->impl;
    MPI_Datatype type;
    MPI_Op op;
    size_t size;
    kind_of(what, &type, &op, &size);
    for (size_t at = 0; at < count; at += PART) {
        MPI_Request r;
        int n = (int)(count - at < PART ? count - at : PART);
        (void)MPI_Iallreduce(MPI_IN_PLACE, (char *)data + at * size, n, type, op, g->comm, &r);
        TSR_TRY(wait_for(g, &r, "a sum over ranks", err));
    }
    return TSR_OK;
}

static tsr_status reduce(tsr_dist *d, float *data, size_t count, int32_t root, tsr_err *err)
{
    group *g = d->impl;
    for (size_t at = 0; at < count; at += PART) {
        MPI_Request r;
        int n = (int)(count - at < PART ? count - at : PART);
        bool here = d->rank == root;
        (void)MPI_Ireduce(here ? MPI_IN_PLACE : data + at, here ? data + at : NULL, n, MPI_FLOAT, MPI_SUM,
                          root, g->comm, &r);
        TSR_TRY(wait_for(g, &r, "a sum of gradients", err));
    }
    return TSR_OK;
}

static tsr_status start_reduce(tsr_dist *d, float *data, size_t count, int32_t root, tsr_err *err)
{
    group *g = d->impl;
    for (size_t at = 0; at < count; at += PART) {
        int n = (int)(count - at < PART ? count - at : PART);
        bool here = d->rank == root;
        if (g->count == g->room) {
            int room = g->room > 0 ? 2 * g->room : 64;
            MPI_Request *more = realloc(g->begun, (size_t)room * sizeof *more);
            if (more == NULL) {
                TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
            }
            g->begun = more;
            g->room = room;
        }
        (void)MPI_Ireduce(here ? MPI_IN_PLACE : data + at, here ? data + at : NULL, n, MPI_FLOAT, MPI_SUM,
                          root, g->comm, &g->begun[g->count++]);
    }
    return TSR_OK;
}

static void poll(tsr_dist *d)
{
    group *g = d->impl;
    int done;
    if (g->count > 0 && MPI_Testall(g->count, g->begun, &done, MPI_STATUSES_IGNORE) == MPI_SUCCESS && done) {
        g->count = 0;
    }
}

static tsr_status finish(tsr_dist *d, tsr_err *err)
{
    group *g = d->impl;
    for (int i = 0; i < g->count; i++) {
        TSR_TRY(wait_for(g, &g->begun[i], "a sum of gradients", err));
    }
    g->count = 0;
    return TSR_OK;
}

static tsr_status broadcast(tsr_dist *d, void *data, size_t bytes, int32_t root, tsr_err *err)
{
    group *g = d->impl;
    for (size_t at = 0; at < bytes; at += PART) {
        MPI_Request r;
        int n = (int)(bytes - at < PART ? bytes - at : PART);
        (void)MPI_Ibcast((char *)data + at, n, MPI_BYTE, root, g->comm, &r);
        TSR_TRY(wait_for(g, &r, "a broadcast", err));
    }
    return TSR_OK;
}

static tsr_status all_to_all(tsr_dist *d, const void *send, const size_t *send_bytes, void *recv,
                             const size_t *recv_bytes, tsr_err *err)
{
    group *g = d->impl;
    size_t n = (size_t)d->ranks, out = 0, in = 0;
    int *at = malloc(4 * n * sizeof *at);
    if (at == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    for (size_t i = 0; i < n; i++) {
        at[i] = (int)send_bytes[i];
        at[n + i] = (int)out;
        at[2 * n + i] = (int)recv_bytes[i];
        at[3 * n + i] = (int)in;
        out += send_bytes[i];
        in += recv_bytes[i];
    }
    tsr_status st = out > INT_MAX || in > INT_MAX
                        ? TSR_ERR(err, TSR_E_LIMIT,
                                  "%zu bytes in one exchange of tokens (take smaller micro-batches)",
                                  out > in ? out : in)
                        : TSR_OK;
    if (st == TSR_OK) {
        MPI_Request r;
        (void)MPI_Ialltoallv(send, at, at + n, MPI_BYTE, recv, at + 2 * n, at + 3 * n, MPI_BYTE, g->comm, &r);
        st = wait_for(g, &r, "an exchange of tokens", err);
    }
    free(at);
    return st;
}

static tsr_status all_gather(tsr_dist *d, const void *send, void *recv, size_t bytes, tsr_err *err)
{
    group *g = d->impl;
    MPI_Request r;
    if (bytes > INT_MAX) {
        TSR_FAIL(err, TSR_E_LIMIT, "%zu bytes from each rank in one gather", bytes);
    }
    (void)MPI_Iallgather(send, (int)bytes, MPI_BYTE, recv, (int)bytes, MPI_BYTE, g->comm, &r);
    return wait_for(g, &r, "a gather", err);
}

static tsr_status send_to(tsr_dist *d, const void *data, size_t bytes, int32_t to, tsr_err *err)
{
    group *g = d->impl;
    size_t at = 0;
    do {
        MPI_Request r;
        int n = (int)(bytes - at < PART ? bytes - at : PART);
        (void)MPI_Isend((const char *)data + at, n, MPI_BYTE, to, TAG, g->comm, &r);
        TSR_TRY(wait_for(g, &r, "a message", err));
        at += PART;
    } while (at < bytes);
    return TSR_OK;
}

static tsr_status receive(tsr_dist *d, void *data, size_t bytes, int32_t from, tsr_err *err)
{
    group *g = d->impl;
    size_t at = 0;
    do {
        MPI_Request r;
        int n = (int)(bytes - at < PART ? bytes - at : PART);
        (void)MPI_Irecv((char *)data + at, n, MPI_BYTE, from, TAG, g->comm, &r);
        TSR_TRY(wait_for(g, &r, "a message", err));
        at += PART;
    } while (at < bytes);
    return TSR_OK;
}

static tsr_status barrier(tsr_dist *d, tsr_err *err)
{
    MPI_Request r;
    (void)MPI_Ibarrier(((group *)d->impl)->comm, &r);
    return wait_for(d->impl, &r, "a barrier", err);
}

static void end(tsr_dist *d, int code)
{
    (void)d;
    (void)MPI_Abort(MPI_COMM_WORLD, code);
    _Exit(code);
}

/* ---- groups ------------------------------------------------------------------------------------------------------------------ */

static void destroy(tsr_dist *d)
{
    group *g = d->impl;
    world *w = g->w;
    if (g->comm != MPI_COMM_WORLD) {
        (void)MPI_Comm_free(&g->comm);
    }
    if (--w->users == 0) {
        (void)MPI_Comm_free(&w->reports);
        (void)MPI_Finalize();
        free(w);
    }
    free(g->begun);
    free(g);
    free(d);
}

static tsr_status split(tsr_dist *d, int32_t colour, tsr_dist **out, tsr_err *err);

static tsr_status make(tsr_dist **out, world *w, MPI_Comm comm, int32_t local, tsr_err *err)
{
    int rank, ranks;
    group *g = malloc(sizeof *g);
    tsr_dist *d = malloc(sizeof *d);
    *out = d;
    if (g == NULL || d == NULL) {
        free(g);
        free(d);
        *out = NULL;
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    (void)MPI_Comm_rank(comm, &rank);
    (void)MPI_Comm_size(comm, &ranks);
    *g = (group){ .w = w, .comm = comm };
    w->users++;
    *d = (tsr_dist){ .name = "mpi",
                     .rank = rank,
                     .ranks = ranks,
                     .local_ranks = local,
                     .all_reduce = all_reduce,
                     .reduce = reduce,
                     .start_reduce = start_reduce,
                     .poll = poll,
                     .finish = finish,
                     .broadcast = broadcast,
                     .all_to_all = all_to_all,
                     .all_gather = all_gather,
                     .send = send_to,
                     .receive = receive,
                     .barrier = barrier,
                     .split = split,
                     .abort = end,
                     .destroy = destroy,
                     .impl = g };
    return TSR_OK;
}

static tsr_status split(tsr_dist *d, int32_t colour, tsr_dist **out, tsr_err *err)
{
    group *g = d->impl;
    MPI_Comm comm;
    *out = NULL;
    if (MPI_Comm_split(g->comm, colour, d->rank, &comm) != MPI_SUCCESS) {
        TSR_FAIL(err, TSR_E_IO, "MPI cannot make a group of ranks");
    }
    return make(out, g->w, comm, d->local_ranks, err);
}

__attribute__((visibility("default"))) tsr_dist_mpi_fn tsr_dist_mpi_enter;

tsr_status tsr_dist_mpi_enter(tsr_dist **out, const char *version, size_t dist_bytes, double timeout_s,
                              char *why, size_t why_bytes)
{
    int level, local = 1;
    MPI_Comm here;
    tsr_err err;
    *out = NULL;
    if (strcmp(version, TSR_VERSION) != 0 || dist_bytes != sizeof(tsr_dist)) {
        (void)snprintf(why, why_bytes, "is of version %s, the program of %s", TSR_VERSION, version);
        return TSR_E_UNSUPPORTED;
    }
    world *w = calloc(1, sizeof *w);
    if (w == NULL || MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &level) != MPI_SUCCESS) {
        free(w);
        (void)snprintf(why, why_bytes, "MPI cannot be started");
        return TSR_E_UNSUPPORTED;
    }
    w->timeout_s = timeout_s;
    (void)MPI_Comm_rank(MPI_COMM_WORLD, &w->rank);
    (void)MPI_Comm_size(MPI_COMM_WORLD, &w->ranks);
    (void)MPI_Comm_dup(MPI_COMM_WORLD, &w->reports);
    if (MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &here) == MPI_SUCCESS) {
        (void)MPI_Comm_size(here, &local);
        (void)MPI_Comm_free(&here);
    }
    tsr_status st = make(out, w, MPI_COMM_WORLD, local, &err);
    if (st != TSR_OK) {
        (void)snprintf(why, why_bytes, "%s", err.msg);
    }
    return st;
}
