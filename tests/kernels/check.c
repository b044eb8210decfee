/* check.c - see check.h. Usage: checkkern [seed]. The last line counts. */
#include "tests/kernels/check.h"
#include "kernels/numeric.h"
#include "tests/harness/fence.h"

#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static const double eps_f32 = 1.1920928955078125e-7;
enum { BUFS_MAX = 512 };
static struct {
    void *map;
    size_t bytes;
    void *dev;
    tsr_backend *b;
} bufs[BUFS_MAX];
static int bufs_n;

void *ck_host(ck *t, size_t bytes)
{
    (void)t;
    size_t page = (size_t)sysconf(_SC_PAGESIZE), body = (bytes + page - 1) / page * page;
    char *m = mmap(NULL, body + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (m == MAP_FAILED || bufs_n == BUFS_MAX || mprotect(m + body, page, PROT_NONE) != 0) {
        abort();
    }
    bufs[bufs_n].map = m;
    bufs[bufs_n].bytes = body + page;
    bufs[bufs_n].dev = NULL;
    bufs_n++;
    return m + body - bytes;
}

uint64_t ck_random(ck *t)
{
    t->rng = t->rng * 6364136223846793005u + 1442695040888963407u;
    uint64_t x = t->rng ^ t->rng >> 33;
    x *= 0xff51afd7ed558ccdu;
    return x ^ x >> 29;
}

float *ck_rand(ck *t, int64_t n, float scale)
{
    float *p = ck_host(t, (size_t)n * sizeof *p);
    for (int64_t i = 0; i < n; i++) {
        p[i] = scale * (float)((double)(ck_random(t) >> 40) / 8388608.0 - 1.0);
    }
    return p;
}

float *ck_normal(ck *t, int64_t n, float sigma)
{
    float *p = ck_host(t, (size_t)n * sizeof *p);
    for (int64_t i = 0; i < n; i++) {
        double u = ((double)(ck_random(t) >> 11) + 1) / 9007199254740993.0;
        double v = (double)(ck_random(t) >> 11) / 9007199254740992.0;
        p[i] = sigma * (float)(sqrt(-2 * log(u)) * cos(6.283185307179586 * v));
    }
    return p;
}

float *ck_nan(ck *t, int64_t n)
{
    float *p = ck_host(t, (size_t)n * sizeof *p);
    for (int64_t i = 0; i < n; i++) {
        p[i] = (float)NAN;
    }
    return p;
}

uint16_t *ck_bf16(ck *t, const float *x, int64_t n)
{
    uint16_t *p = ck_host(t, (size_t)n * sizeof *p);
    for (int64_t i = 0; i < n; i++) {
        p[i] = tsr_f32_to_bf16(x[i]);
    }
    return p;
}

void *ck_dev(ck *t, const void *host, size_t bytes)
{
    if (t->dut->host) {
        void *p = ck_host(t, bytes);
        if (bytes > 0) {
            memcpy(p, host, bytes);
        }
        return p;
    }
    void *p = NULL;
    if (bufs_n == BUFS_MAX || t->dut->alloc(t->dut, &p, bytes) != TSR_OK ||
        t->dut->upload(t->dut, p, host, bytes) != TSR_OK) {
        abort();
    }
    bufs[bufs_n].map = NULL;
    bufs[bufs_n].dev = p;
    bufs[bufs_n].b = t->dut;
    bufs_n++;
    return p;
}

void ck_fail(ck *t, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    printf("# %s/%s: ", t->dut->name, t->op);
    (void)vprintf(fmt, ap);
    printf("\n");
    va_end(ap);
    t->failed++;
}

void *ck_back(ck *t, const void *dev, size_t bytes)
{
    void *p = ck_host(t, bytes);
    if (t->dut->sync(t->dut) != TSR_OK || t->dut->download(t->dut, p, dev, bytes) != TSR_OK) {
        ck_fail(t, "cannot read back");
    }
    t->digest = t->digest * 0x9e3779b97f4a7c15u ^ tsr_hash64(p, bytes);
    t->compared++;
    return p;
}

void ck_f32(ck *t, const char *what, const float *want, const void *got_dev, const double *mag, int64_t n,
            ck_tol tol)
{
    const float *got = ck_back(t, got_dev, (size_t)n * sizeof *got);
    for (int64_t i = 0; i < n; i++) {
        double w = (double)want[i], g = (double)got[i];
        if ((isnan(w) && isnan(g)) || w == g) {
            continue;
        }
        double d = fabs(g - w);
        double allow = tol.abs + tol.ulps * eps_f32 * fabs(w) +
                       tol.red * eps_f32 * (mag != NULL ? mag[i] : 0.0);
        if (!(d <= allow)) {
            ck_fail(t, "%s[%lld]: want %.9g got %.9g, off by %.3g, allowed %.3g", what, (long long)i, w, g, d,
                    allow);
            return;
        }
        t->worst = d / allow > t->worst ? d / allow : t->worst;
    }
}

void ck_exact(ck *t, const char *what, const void *want, const void *got_dev, size_t bytes)
{
    const uint8_t *got = ck_back(t, got_dev, bytes), *w = want;
    for (size_t i = 0; i < bytes; i++) {
        if (got[i] != w[i]) {
            ck_fail(t, "%s: byte %zu differs", what, i);
            return;
        }
    }
}

void ck_end(ck *t)
{
    (void)t;
    while (bufs_n > 0) {
        bufs_n--;
        if (bufs[bufs_n].map != NULL) {
            (void)munmap(bufs[bufs_n].map, bufs[bufs_n].bytes);
        } else {
            bufs[bufs_n].b->release(bufs[bufs_n].b, bufs[bufs_n].dev);
        }
    }
}

typedef void (*check_fn)(ck *);

static const check_fn checks[] = {
#define TSR_OP(op, cpu, simd, cuda) ck_##op,
#include "kernels/ops.def"
#undef TSR_OP
};

/* Slots that are just the reference: nothing to compare. */
static bool same_as_ref(const tsr_backend *ref, const tsr_backend *dut, int id)
{
    switch (id) {
#define TSR_OP(op, cpu, simd, cuda)                                                                          \
    case TSR_OP_##op:                                                                                        \
        return dut->k.op == NULL || dut->k.op == ref->k.op;
#include "kernels/ops.def"
#undef TSR_OP
    }
    return true;
}

static sigjmp_buf crash;

static void on_crash(int sig)
{
    siglongjmp(crash, sig);
}

static void guarded(check_fn check, ck *t)
{
    int sig = sigsetjmp(crash, 1);
    if (sig == 0) {
        check(t);
    } else {
        ck_fail(t, "died of signal %d", sig);
    }
    ck_end(t);
}

/* One op on one backend: with one thread, then with four. */
static bool check_op(tsr_backend *ref, tsr_backend *one, tsr_backend *four, int id, uint64_t seed)
{
    uint64_t digest = 0;
    ck t = { 0 };
    for (int round = 0; round < 2; round++) {
        double worst = t.worst;
        t = (ck){ .ref = ref,
                  .dut = round == 0 ? one : four,
                  .op = tsr_op_name((tsr_op_id)id),
                  .rng = seed * 2654435761u + (uint64_t)id,
                  .worst = worst };
        guarded(checks[id], &t);
        if (t.compared == 0 && t.failed == 0) {
            ck_fail(&t, "nothing was compared");
        }
        if (round == 1 && t.failed == 0 && t.digest != digest) {
            ck_fail(&t, "one and four threads give different bits");
        }
        digest = t.digest;
        if (t.failed > 0) {
            break;
        }
    }
    printf("%s %s/%s  worst %.2f of allowed\n", t.failed > 0 ? "not ok" : "ok", one->name, t.op, t.worst);
    return t.failed == 0;
}

/* "fence": the reference over memory that only kernels and copies may touch, as on a device. */
static tsr_status open_named(tsr_backend **out, const char *name, int threads, tsr_err *err)
{
    return strcmp(name, "fence") == 0 ? tsr_fence_open(out, "cpu", threads, err)
                                      : tsr_backend_open(out, name, threads, err);
}

int main(int argc, char **argv)
{
    static const char *const names[] = { "avx2", "avx512", "cuda", "fence" };
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 0) : 1;
    const char *only = argc > 2 ? argv[2] : NULL;
    int pass = 0, fail = 0, skip = 0;
    tsr_backend *ref = NULL;
    tsr_err err;
    struct sigaction sa = { .sa_handler = on_crash };
    (void)sigaction(SIGSEGV, &sa, NULL);
    (void)sigaction(SIGBUS, &sa, NULL);
    (void)sigaction(SIGFPE, &sa, NULL);
    if (tsr_backend_open(&ref, "cpu", 1, &err) != TSR_OK) {
        printf("%s\n", err.msg);
        return 1;
    }
    printf("# seed %llu\n", (unsigned long long)seed);
    for (size_t b = 0; b < sizeof names / sizeof *names; b++) {
        tsr_backend *one = NULL, *four = NULL;
        if (open_named(&one, names[b], 1, &err) != TSR_OK || open_named(&four, names[b], 4, &err) != TSR_OK) {
            printf("# skipped %s: %s\n", names[b], err.msg);
            tsr_backend_close(&one);
            continue;
        }
        for (int id = 0; id < TSR_OP_COUNT; id++) {
            if (only != NULL && strcmp(only, tsr_op_name((tsr_op_id)id)) != 0) {
                continue;
            }
            if (checks[id] == NULL) {
                printf("not ok %s/%s  has no check\n", names[b], tsr_op_name((tsr_op_id)id));
                fail++;
            } else if (same_as_ref(ref, one, id)) {
                printf("# same as cpu: %s/%s\n", names[b], tsr_op_name((tsr_op_id)id));
                skip++;
            } else if (check_op(ref, one, four, id, seed)) {
                pass++;
            } else {
                fail++;
            }
        }
        tsr_backend_close(&one);
        tsr_backend_close(&four);
    }
    tsr_backend_close(&ref);
    printf("%d passed, %d failed, %d same as cpu\n", pass, fail, skip);
    return fail != 0;
}
