/* dist_self.c - one process that trains alone. */
#include "train/dist.h"

#include <stdlib.h>
#include <string.h>

static tsr_status all_reduce(tsr_dist *d, void *data, size_t count, tsr_reduce what, tsr_err *err)
{
    (void)d;
    (void)data;
    (void)count;
    (void)what;
    (void)err;
    return TSR_OK;
}

static tsr_status reduce(tsr_dist *d, float *data, size_t count, int32_t root, tsr_err *err)
{
    (void)d;
    (void)data;
    (void)count;
    (void)err;
    TSR_ASSERT(root == 0);
    return TSR_OK;
}

static void poll(tsr_dist *d)
{
    (void)d;
}

static tsr_status broadcast(tsr_dist *d, void *data, size_t bytes, int32_t root, tsr_err *err)
{
    (void)d;
    (void)data;
    (void)bytes;
    (void)err;
    TSR_ASSERT(root == 0);
    return TSR_OK;
}

static tsr_status all_to_all(tsr_dist *d, const void *send, const size_t *send_bytes, void *recv,
                             const size_t *recv_bytes, tsr_err *err)
{
    (void)d;
    (void)err;
    TSR_ASSERT(send_bytes[0] == recv_bytes[0]);
    if (send_bytes[0] > 0) {
        memmove(recv, send, send_bytes[0]);
    }
    return TSR_OK;
}

static tsr_status all_gather(tsr_dist *d, const void *send, void *recv, size_t bytes, tsr_err *err)
{
    (void)d;
    (void)err;
    if (bytes > 0) {
        memmove(recv, send, bytes);
    }
    return TSR_OK;
}

static tsr_status nobody(tsr_err *err)
{
    TSR_FAIL(err, TSR_E_USAGE, "one process alone has nobody to talk to");
}

static tsr_status send(tsr_dist *d, const void *data, size_t bytes, int32_t to, tsr_err *err)
{
    (void)d;
    (void)data;
    (void)bytes;
    (void)to;
    return nobody(err);
}

static tsr_status receive(tsr_dist *d, void *data, size_t bytes, int32_t from, tsr_err *err)
{
    (void)d;
    (void)data;
    (void)bytes;
    (void)from;
    return nobody(err);
}

static tsr_status barrier(tsr_dist *d, tsr_err *err)
{
    (void)d;
    (void)err;
    return TSR_OK;
}

static tsr_status split(tsr_dist *d, int32_t colour, tsr_dist **out, tsr_err *err)
{
    (void)d;
    (void)colour;
    return tsr_dist_self_open(out, err);
}

static void end(tsr_dist *d, int code)
{
    (void)d;
    _Exit(code);
}

static void destroy(tsr_dist *d)
{
    free(d);
}

tsr_status tsr_dist_self_open(tsr_dist **out, tsr_err *err)
{
    *out = malloc(sizeof **out);
    if (*out == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    **out = (tsr_dist){ .name = "self",
                        .ranks = 1,
                        .local_ranks = 1,
                        .all_reduce = all_reduce,
                        .reduce = reduce,
                        .start_reduce = reduce,
                        .poll = poll,
                        .finish = barrier,
                        .broadcast = broadcast,
                        .all_to_all = all_to_all,
                        .all_gather = all_gather,
                        .send = send,
                        .receive = receive,
                        .barrier = barrier,
                        .split = split,
                        .abort = end,
                        .destroy = destroy };
    return TSR_OK;
}

void tsr_dist_close(tsr_dist **pd)
{
    tsr_dist *d = *pd;
    *pd = NULL;
    if (d != NULL) {
        d->destroy(d);
    }
}
