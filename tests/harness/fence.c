/* fence.c - see fence.h. Memory comes from one reserved region; the part in use is made accessible for each call and
 * inaccessible after it. */
#include "tests/harness/fence.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define REGION ((size_t)4 << 30)
#define PAGE ((size_t)4096)

typedef struct fence {
    tsr_backend *host;
    char *region;
    size_t used;
} fence;

static fence *the_fence; /* kernels get the queue of the host backend and nothing else */

static void set(int protection)
{
    fence *f = the_fence;
    if (f->used > 0 && mprotect(f->region, f->used, protection) != 0) {
        abort();
    }
}

static void open_gate(void)
{
    set(PROT_READ | PROT_WRITE);
}

static void shut_gate(void)
{
    set(PROT_NONE);
}

/* Each block ends where its last page ends, so that what runs over by a page's worth hits the next block's guard page. */
static tsr_status fence_alloc(tsr_backend *b, void **out, size_t bytes)
{
    (void)b;
    fence *f = the_fence;
    size_t whole = (bytes + PAGE - 1) / PAGE * PAGE + PAGE;
    *out = NULL;
    if (whole > REGION - f->used) {
        return TSR_E_LIMIT;
    }
    *out = f->region + f->used;
    f->used += whole;
    open_gate();
    memset(*out, 0xff, whole); /* NaN */
    shut_gate();
    return TSR_OK;
}

/* Like an arena: a test's models are small, and a freed block must not come back by chance. */
static void fence_release(tsr_backend *b, void *p)
{
    (void)b;
    (void)p;
}

static tsr_status fence_copy(tsr_backend *b, void *dst, const void *src, size_t bytes)
{
    (void)b;
    open_gate();
    memcpy(dst, src, bytes);
    shut_gate();
    return TSR_OK;
}

static tsr_status fence_zero(tsr_backend *b, void *dst, size_t bytes)
{
    (void)b;
    open_gate();
    memset(dst, 0, bytes);
    shut_gate();
    return TSR_OK;
}

static tsr_status fence_sync(tsr_backend *b)
{
    (void)b;
    return TSR_OK;
}

static void fence_destroy(tsr_backend *b)
{
    (void)munmap(the_fence->region, REGION);
    tsr_backend_close(&the_fence->host);
    free(the_fence);
    the_fence = NULL;
    free(b);
}

#define TSR_OP(op, cpu, simd, cuda)                                                                          \
    static tsr_status fenced_##op(tsr_queue *q, const tsr_##op##_args *a)                                    \
    {                                                                                                        \
        open_gate();                                                                                         \
        tsr_status st = the_fence->host->k.op(q, a);                                                         \
        shut_gate();                                                                                         \
        return st;                                                                                           \
    }
#include "kernels/ops.def"
#undef TSR_OP

tsr_status tsr_fence_open(tsr_backend **out, const char *host_name, int threads, tsr_err *err)
{
    *out = NULL;
    TSR_ASSERT(the_fence == NULL);
    fence *f = calloc(1, sizeof *f);
    tsr_backend *b = malloc(sizeof *b);
    TSR_ASSERT(f != NULL && b != NULL);
    tsr_status st = tsr_backend_open(&f->host, host_name, threads, err);
    if (st != TSR_OK) {
        free(f);
        free(b);
        return st;
    }
    f->region = mmap(NULL, REGION, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TSR_ASSERT(f->region != MAP_FAILED);
    the_fence = f;
    *b = (tsr_backend){ .name = "fence",
                        .queue = f->host->queue,
                        .threads = f->host->threads,
                        .alloc = fence_alloc,
                        .release = fence_release,
                        .upload = fence_copy,
                        .download = fence_copy,
                        .zero = fence_zero,
                        .sync = fence_sync,
                        .destroy = fence_destroy,
                        .k = {
#define TSR_OP(op, cpu, simd, cuda) .op = f->host->k.op != NULL ? fenced_##op : NULL,
#include "kernels/ops.def"
#undef TSR_OP
                        } };
    *out = b;
    return TSR_OK;
}
