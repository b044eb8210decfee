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
    size_t from, used; /* blocks that live are in between */
    int live;
} fence;

enum { FENCES_MAX = 4 };
static fence *fences[FENCES_MAX];

/* Kernels get the queue of the host backend and nothing else. */
static fence *of(const tsr_queue *q)
{
    for (int i = 0; i < FENCES_MAX; i++) {
        if (fences[i] != NULL && fences[i]->host->queue == q) {
            return fences[i];
        }
    }
    abort();
}

static void set(fence *f, int protection)
{
    if (f->used > f->from && mprotect(f->region + f->from, f->used - f->from, protection) != 0) {
        abort();
    }
}

static void open_gate(fence *f)
{
    set(f, PROT_READ | PROT_WRITE);
}

static void shut_gate(fence *f)
{
    set(f, PROT_NONE);
}

/* Blocks are pages apart and start out as NaN. */
static tsr_status fence_alloc(tsr_backend *b, void **out, size_t bytes)
{
    fence *f = b->impl;
    size_t whole = (bytes + PAGE - 1) / PAGE * PAGE + PAGE;
    *out = NULL;
    if (whole > REGION - f->used) {
        return TSR_E_LIMIT;
    }
    *out = f->region + f->used;
    f->used += whole;
    f->live++;
    open_gate(f);
    memset(*out, 0xff, whole); /* NaN */
    shut_gate(f);
    return TSR_OK;
}

/* Like an arena: a test's models are small, and a freed block must not come back by chance. When nothing lives any more
 * the memory goes back, and its addresses stay closed until half of the region is used up. */
static void fence_release(tsr_backend *b, void *p)
{
    fence *f = b->impl;
    if (p == NULL || --f->live > 0) {
        return;
    }
    (void)madvise(f->region + f->from, f->used - f->from, MADV_DONTNEED);
    f->from = f->used = f->used > REGION / 2 ? 0 : f->used;
}

static tsr_status fence_copy(tsr_backend *b, void *dst, const void *src, size_t bytes)
{
    open_gate(b->impl);
    if (bytes > 0) {
        memcpy(dst, src, bytes);
    }
    shut_gate(b->impl);
    return TSR_OK;
}

static tsr_status fence_zero(tsr_backend *b, void *dst, size_t bytes)
{
    open_gate(b->impl);
    if (bytes > 0) {
        memset(dst, 0, bytes);
    }
    shut_gate(b->impl);
    return TSR_OK;
}

static tsr_status fence_sync(tsr_backend *b)
{
    (void)b;
    return TSR_OK;
}

static void fence_destroy(tsr_backend *b)
{
    fence *f = b->impl;
    for (int i = 0; i < FENCES_MAX; i++) {
        fences[i] = fences[i] == f ? NULL : fences[i];
    }
    (void)munmap(f->region, REGION);
    tsr_backend_close(&f->host);
    free(f);
    free(b);
}

#define TSR_OP(op, cpu, simd, cuda)                                                                          \
    static tsr_status fenced_##op(tsr_queue *q, const tsr_##op##_args *a)                                    \
    {                                                                                                        \
        fence *f = of(q);                                                                                    \
        open_gate(f);                                                                                        \
        tsr_status st = f->host->k.op(q, a);                                                                 \
        shut_gate(f);                                                                                        \
        return st;                                                                                           \
    }
#include "kernels/ops.def"
#undef TSR_OP

tsr_status tsr_fence_open(tsr_backend **out, const char *host_name, int threads, tsr_err *err)
{
    *out = NULL;
    int free_slot = 0;
    while (free_slot < FENCES_MAX && fences[free_slot] != NULL) {
        free_slot++;
    }
    TSR_ASSERT(free_slot < FENCES_MAX);
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
    fences[free_slot] = f;
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
                        .impl = f,
                        .k = {
#define TSR_OP(op, cpu, simd, cuda) .op = f->host->k.op != NULL ? fenced_##op : NULL,
#include "kernels/ops.def"
#undef TSR_OP
                        } };
    *out = b;
    return TSR_OK;
}
