/* backend.c - opening backends: the reference, the same with faster kernels laid over it, and the door to the plugin. */
#include "kernels/backend_priv.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define HUGE_PAGE ((size_t)2 << 20)

/* Kernels may call CBLAS from every thread of the pool: it must not start threads of its own. Other libraries than
 * OpenBLAS have no such function. */
extern void openblas_set_num_threads(int n) __attribute__((weak));

const char *const tsr_backend_names[] = {
#ifdef TSR_HAVE_SIMD
    "avx512", "avx2",
#endif
    "cpu",
#ifdef TSR_HAVE_CUDA
    "cuda", /* after "cpu", which there always is: not for "auto" until it has every op a model needs */
#endif
    NULL,
};

/* Those of any build. */
static const char *const all_names[] = { "avx512", "avx2", "cpu", "cuda", NULL };

/* Weights are read in full for every token: in huge pages, where the system grants them, that is half as fast again. */
static tsr_status host_alloc(tsr_backend *b, void **out, size_t bytes)
{
    (void)b;
    bool huge = bytes >= 2 * HUGE_PAGE;
    *out = NULL;
    if (posix_memalign(out, huge ? HUGE_PAGE : 64, bytes > 0 ? bytes : 64) != 0) {
        return TSR_E_LIMIT;
    }
    if (huge) {
        (void)madvise(*out, bytes / HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE);
    }
    return TSR_OK;
}

static void host_release(tsr_backend *b, void *p)
{
    (void)b;
    free(p);
}

static tsr_status host_copy(tsr_backend *b, void *dst, const void *src, size_t bytes)
{
    (void)b;
    if (bytes > 0) {
        memmove(dst, src, bytes);
    }
    return TSR_OK;
}

static tsr_status host_zero(tsr_backend *b, void *dst, size_t bytes)
{
    (void)b;
    if (bytes > 0) {
        memset(dst, 0, bytes);
    }
    return TSR_OK;
}

static tsr_status host_sync(tsr_backend *b)
{
    (void)b;
    return TSR_OK;
}

static void host_destroy(tsr_backend *b)
{
    tsr_pool_close(&b->queue);
    free(b);
}

#ifdef TSR_HAVE_SIMD
/* dst takes every slot that src fills: the reference stays under what is missing. */
static void overlay(tsr_kernels *dst, const tsr_kernels *src)
{
#define TSR_OP(op, cpu, simd, cuda)                                                                          \
    if (src->op != NULL) {                                                                                   \
        dst->op = src->op;                                                                                   \
    }
#include "kernels/ops.def"
#undef TSR_OP
}
#endif

/* NULL: this machine has it, or the name is unknown. */
static const char *lacking(const char *name)
{
#ifdef TSR_HAVE_SIMD
    __builtin_cpu_init();
    if (strcmp(name, "avx2") == 0 && !(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) {
        return "AVX2 and FMA";
    }
    if (strcmp(name, "avx512") == 0 &&
        !(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))) {
        return "AVX-512 (F, BW, DQ, VL)";
    }
#endif
    (void)name;
    return NULL;
}

static const char *best(void)
{
    for (size_t i = 0; tsr_backend_names[i] != NULL; i++) {
        if (lacking(tsr_backend_names[i]) == NULL) {
            return tsr_backend_names[i];
        }
    }
    return "cpu";
}

static tsr_status open_host(tsr_backend **out, const char *name, int threads, tsr_err *err)
{
    tsr_backend *b = malloc(sizeof *b);
    if (b == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    *b = (tsr_backend){ .name = name,
                        .k = tsr_cpu_kernels,
                        .host = true,
                        .alloc = host_alloc,
                        .release = host_release,
                        .upload = host_copy,
                        .download = host_copy,
                        .zero = host_zero,
                        .sync = host_sync,
                        .destroy = host_destroy };
#ifdef TSR_HAVE_SIMD
    if (strcmp(name, "avx2") == 0) {
        overlay(&b->k, &tsr_avx2_kernels);
    } else if (strcmp(name, "avx512") == 0) {
        overlay(&b->k, &tsr_avx512_kernels);
    }
#endif
    tsr_status st = tsr_pool_open(&b->queue, threads, err);
    if (st != TSR_OK) {
        free(b);
        return st;
    }
    b->threads = tsr_workers(b->queue);
    if (openblas_set_num_threads != NULL) {
        openblas_set_num_threads(1);
    }
    *out = b;
    return TSR_OK;
}

static const char *find(const char *const *names, const char *name)
{
    for (size_t i = 0; names[i] != NULL; i++) {
        if (strcmp(names[i], name) == 0) {
            return names[i];
        }
    }
    return NULL;
}

tsr_status tsr_backend_open(tsr_backend **out, const char *wanted, int threads, tsr_err *err)
{
    *out = NULL;
    const char *name = find(all_names, strcmp(wanted, "auto") == 0 ? best() : wanted);
    if (name == NULL) {
        TSR_FAIL(err, TSR_E_USAGE, "backend %s: no such name (see tessera backends)", wanted);
    }
    if (strcmp(name, "cuda") == 0) {
        return tsr_plugin_open(out, err);
    }
    if (find(tsr_backend_names, name) == NULL) {
        TSR_FAIL(err, TSR_E_UNSUPPORTED, "backend %s: not in this build (use auto)", name);
    }
    if (lacking(name) != NULL) {
        TSR_FAIL(err, TSR_E_UNSUPPORTED, "backend %s: this processor lacks %s (use auto)", name,
                 lacking(name));
    }
    return open_host(out, name, threads, err);
}

void tsr_backend_close(tsr_backend **b)
{
    if (*b != NULL) {
        (*b)->destroy(*b);
        *b = NULL;
    }
}

const char *tsr_backend_trouble(const tsr_backend *b)
{
    return b->trouble != NULL ? b->trouble : "the device failed";
}
