/* check.c - see check.h. Usage: checkkern [SEED [OP|all [BACKEND]]]; without BACKEND those of the CPU, and the fence. The
 * last line counts. A backend that was named and is not there: exit 77. */
#include "tests/kernels/check.h"
#include "kernels/numeric.h"
#include "tests/harness/fence.h"
#ifdef TSR_HAVE_EMU
#include "tests/cuda-emu/emu.h"
#endif

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

static bool is_missing(const tsr_backend *dut, int id)
{
    switch (id) {
#define TSR_OP(op, cpu, simd, cuda)                                                                          \
    case TSR_OP_##op:                                                                                        \
        return dut->k.op == NULL;
#include "kernels/ops.def"
#undef TSR_OP
    }
    return true;
}

/* Slots that are just the reference: nothing to compare. */
static bool same_as_ref(const tsr_backend *ref, const tsr_backend *dut, int id)
{
    switch (id) {
#define TSR_OP(op, cpu, simd, cuda)                                                                          \
    case TSR_OP_##op:                                                                                        \
        return dut->k.op == ref->k.op;
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

/* Fibers of the emulation cannot be left by a jump: there a crash is the end. */
static void catch_crashes(const char *const *names)
{
    struct sigaction sa = { .sa_handler = on_crash };
    if (names[0] != NULL && strcmp(names[0], "emu") == 0) {
        return;
    }
    (void)sigaction(SIGSEGV, &sa, NULL);
    (void)sigaction(SIGBUS, &sa, NULL);
    (void)sigaction(SIGFPE, &sa, NULL);
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

/* Backends that must all give the same bits: one by threads, by schedule, or simply twice. */
enum { VARIANTS_MAX = 4 };
typedef struct variants {
    tsr_backend *b[VARIANTS_MAX];
    int n;
} variants;

static bool check_op(tsr_backend *ref, const variants *v, int id, uint64_t seed)
{
    uint64_t digest = 0;
    ck t = { 0 };
    for (int round = 0; round < v->n && t.failed == 0; round++) {
        double worst = t.worst;
        t = (ck){ .ref = ref,
                  .dut = v->b[round],
                  .op = tsr_op_name((tsr_op_id)id),
                  .rng = seed * 2654435761u + (uint64_t)id,
                  .worst = worst };
        guarded(checks[id], &t);
        if (t.compared == 0 && t.failed == 0) {
            ck_fail(&t, "nothing was compared");
        }
        if (round > 0 && t.failed == 0 && t.digest != digest) {
            ck_fail(&t, "run %d gives other bits (threads or schedules differ)", round);
        }
        digest = t.digest;
    }
    printf("%s %s/%s  worst %.2f of allowed\n", t.failed > 0 ? "not ok" : "ok", v->b[0]->name, t.op, t.worst);
    return t.failed == 0;
}

static void close_all(variants *v)
{
    for (int i = 0; i < v->n; i++) {
        tsr_backend_close(&v->b[i]);
    }
    v->n = 0;
}

/* "fence": the reference over memory that only kernels and copies may touch, as on a device. "emu": the kernels of the
 * GPU on the CPU, under each schedule, at once and late. */
static tsr_status open_one(tsr_backend **out, const char *name, int i, tsr_err *err)
{
    if (strcmp(name, "fence") == 0) {
        return tsr_fence_open(out, "cpu", i == 0 ? 1 : 4, err);
    }
    if (strcmp(name, "emu") == 0) {
#ifdef TSR_HAVE_EMU
        return tsr_emu_open(out, (emu_schedule)i, 1 + i, i % 2 == 1, err);
#else
        *out = NULL;
        TSR_FAIL(err, TSR_E_UNSUPPORTED, "backend emu: not in this build: " TSR_EMU_WHY_NOT);
#endif
    }
    return tsr_backend_open(out, name, i == 0 ? 1 : 4, err);
}

static tsr_status open_all(variants *v, const char *name, tsr_err *err)
{
    int n = strcmp(name, "emu") == 0 ? VARIANTS_MAX : 2;
    for (v->n = 0; v->n < n; v->n++) {
        tsr_status st = open_one(&v->b[v->n], name, v->n, err);
        if (st != TSR_OK) {
            close_all(v);
            return st;
        }
    }
    return TSR_OK;
}

typedef struct tally {
    int pass, fail, skip;
} tally;

static void check_all(tsr_backend *ref, const variants *v, const char *name, const char *only, uint64_t seed,
                      tally *sum)
{
    for (int id = 0; id < TSR_OP_COUNT; id++) {
        const char *op = tsr_op_name((tsr_op_id)id);
        if (only != NULL && strcmp(only, op) != 0) {
            continue;
        }
        if (!v->b[0]->host && is_missing(v->b[0], id)) {
            printf("# no kernel: %s/%s\n", name, op);
            sum->skip++;
        } else if (checks[id] == NULL) {
            printf("not ok %s/%s  has no check\n", name, op);
            sum->fail++;
        } else if (same_as_ref(ref, v->b[0], id)) {
            printf("# same as cpu: %s/%s\n", name, op);
            sum->skip++;
        } else if (check_op(ref, v, id, seed)) {
            sum->pass++;
        } else {
            sum->fail++;
        }
    }
}

int main(int argc, char **argv)
{
    static const char *const usual[] = { "avx2", "avx512", "fence", NULL };
    const char *named[] = { argc > 3 ? argv[3] : NULL, NULL };
    const char *const *names = argc > 3 ? named : usual;
    const char *only = argc > 2 && strcmp(argv[2], "all") != 0 ? argv[2] : NULL;
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 0) : 1;
    tally sum = { 0 };
    tsr_backend *ref = NULL;
    tsr_err err;
    catch_crashes(names);
    tsr_backend_set_plugin(getenv("TESSERA_CUDA_PLUGIN"));
    if (tsr_backend_open(&ref, "cpu", 1, &err) != TSR_OK) {
        printf("%s\n", err.msg);
        return 1;
    }
    printf("# seed %llu\n", (unsigned long long)seed);
    for (int b = 0; names[b] != NULL; b++) {
        variants v;
        if (open_all(&v, names[b], &err) == TSR_OK) {
            check_all(ref, &v, names[b], only, seed, &sum);
            close_all(&v);
        } else if (argc > 3) {
            printf("skipped: %s\n", err.msg);
            tsr_backend_close(&ref);
            return 77;
        } else {
            printf("# skipped %s: %s\n", names[b], err.msg);
        }
    }
    tsr_backend_close(&ref);
    printf("%d passed, %d failed, %d without a kernel of their own\n", sum.pass, sum.fail, sum.skip);
    return sum.fail != 0 || (argc > 3 && sum.pass == 0);
}
