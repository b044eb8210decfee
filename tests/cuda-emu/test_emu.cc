/* test_emu.cc - the emulation finds what it is for, kernels that were broken on purpose; every call of CUDA that fails
 * becomes a status and a message; RMSNorm on odd shapes. */
#include "kernels/cuda/cuda_priv.cuh"
#include "tests/cuda-emu/emu.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#define CHECK(x)                                                                                             \
    do {                                                                                                     \
        if (!(x)) {                                                                                          \
            printf("not ok line %d: %s\n", __LINE__, #x);                                                    \
            failed++;                                                                                        \
        }                                                                                                    \
    } while (0)

namespace
{

int failed;

tsr_backend *open_emu(emu_schedule schedule, int threads, bool late)
{
    tsr_backend *b = NULL;
    tsr_err err;
    if (tsr_emu_open(&b, schedule, threads, late, &err) != TSR_OK) {
        printf("%s\n", err.msg);
        exit(1);
    }
    return b;
}

/* ---- planted mistakes ------------------------------------------------------------------------------------------ */

constexpr int N = 96;

enum mistake {
    NONE,
    NO_BARRIER,
    NO_SECOND_BARRIER,
    SPLIT_BARRIER,
    TWO_BARRIERS,
    LOST_LANE,
    ONE_TOO_MANY,
    MISTAKES
};
const char *const names[] = { "none",
                              "no barrier",
                              "no barrier before reuse",
                              "a barrier that some skip",
                              "two barriers for one",
                              "a shuffle without all its lanes",
                              "a write behind the end" };

/* Three times: each thread takes the number of its left neighbour and adds 1; then the sums over warps. */
__global__ void neighbours(int *x, int *sums, int wrong)
{
    __shared__ int s[N];
    const int i = (int)threadIdx.x;
    int mine = x[i];
    for (int round = 0; round < 3; round++) {
        s[i] = mine;
        if (wrong == SPLIT_BARRIER) {
            if (i < 64) {
                __syncthreads();
            }
        } else if (wrong == TWO_BARRIERS && i < 64) {
            __syncthreads();
        } else if (wrong != NO_BARRIER) {
            __syncthreads();
        }
        mine = s[(i + N - 1) % N] + 1;
        if (wrong != NO_SECOND_BARRIER) {
            __syncthreads();
        }
    }
    x[i + (wrong == ONE_TOO_MANY ? 1 : 0)] = mine;
    for (int step = 16; step > 0; step /= 2) {
        if (wrong != LOST_LANE || i != 5) {
            mine += __shfl_xor_sync(0xffffffffu, mine, step);
        }
    }
    if (i % 32 == 0) {
        sums[i / 32] = mine;
    }
}

bool right(const int *x, const int *sums)
{
    int want[3] = { 0, 0, 0 };
    bool ok = true;
    for (int i = 0; i < N; i++) {
        const int v = (i + N - 3) % N * 7 + 3;
        ok = ok && x[i] == v;
        want[i / 32] += v;
    }
    return ok && memcmp(want, sums, sizeof want) == 0;
}

int run_neighbours(emu_schedule schedule, mistake wrong)
{
    tsr_backend *b = open_emu(schedule, 1, true);
    void *x = NULL, *sums = NULL;
    int host[N], host_sums[3];
    for (int i = 0; i < N; i++) {
        host[i] = i * 7;
    }
    bool ok = b->alloc(b, &x, sizeof host) == TSR_OK && b->alloc(b, &sums, sizeof host_sums) == TSR_OK &&
              b->upload(b, x, host, sizeof host) == TSR_OK;
    memset(host, 0, sizeof host); /* upload has put the bytes aside */
    TSR_LAUNCH(neighbours, 1, N, b->queue, (int *)x, (int *)sums, (int)wrong);
    ok = ok && b->download(b, host, x, sizeof host) == TSR_OK &&
         b->download(b, host_sums, sums, sizeof host_sums) == TSR_OK;
    ok = ok && right(host, host_sums);
    b->release(b, x);
    b->release(b, sums);
    tsr_backend_close(&b);
    return ok ? 0 : 1;
}

/* In a process of its own: wrong result, abort or a report of a sanitizer. */
bool caught(emu_schedule schedule, mistake wrong)
{
    (void)fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        (void)freopen("/dev/null", "w", stderr);
        _exit(run_neighbours(schedule, wrong));
    }
    int status = 0;
    (void)waitpid(child, &status, 0);
    return !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void mistakes_are_found()
{
    for (int m = NONE; m < MISTAKES; m++) {
        int by = 0;
        for (int s = 0; s < EMU_SCHEDULES; s++) {
            by += caught((emu_schedule)s, (mistake)m) ? 1 : 0;
        }
        printf("# %s: found by %d of %d schedules\n", names[m], by, EMU_SCHEDULES);
        CHECK(m == NONE ? by == 0 : by > 0);
    }
}

/* ---- failing calls --------------------------------------------------------------------------------------------- */

/* All kinds of calls in turn. What failed: the status, and the words that came with it. */
tsr_status use_everything(const char **words, tsr_err *err, char *kept, size_t kept_bytes)
{
    tsr_backend *b = NULL;
    void *x = NULL;
    float host[8] = { 1, 2, 3, 4, 5, 6, 7, 8 };
    *words = err->msg;
    TSR_TRY(tsr_emu_open(&b, EMU_FORWARD, 1, false, err));
    tsr_status st = b->alloc(b, &x, sizeof host);
    const bool no_memory = st == TSR_E_LIMIT;
    CHECK(st != TSR_OK || x != NULL);
    tsr_rmsnorm_fwd_args a = {};
    a.x = a.y = (float *)x;
    a.n = 2;
    a.d = a.x_stride = a.y_stride = 4;
    a.eps = 1e-6f;
    st = st == TSR_OK ? b->zero(b, x, sizeof host) : st;
    st = st == TSR_OK ? b->upload(b, x, host, sizeof host) : st;
    st = st == TSR_OK ? b->k.rmsnorm_fwd(b->queue, &a) : st;
    st = st == TSR_OK ? b->sync(b) : st;
    st = st == TSR_OK ? b->download(b, host, x, sizeof host) : st;
    if (st != TSR_OK && !no_memory) {
        CHECK(st == TSR_E_IO && b->trouble != NULL);
        CHECK(b->sync(b) == TSR_E_IO &&
              b->k.rmsnorm_fwd(b->queue, &a) == TSR_E_IO); /* nothing works after it */
    }
    (void)snprintf(kept, kept_bytes, "%s", no_memory ? "no memory" : tsr_backend_trouble(b));
    *words = kept;
    b->release(b, x);
    tsr_backend_close(&b);
    return st;
}

void failures_are_told()
{
    int failures = 0;
    for (int nth = 1; nth < 100; nth++) {
        const char *words;
        char kept[256];
        tsr_err err = {};
        emu_fail(nth);
        const tsr_status st = use_everything(&words, &err, kept, sizeof kept);
        emu_fail(0);
        CHECK(emu_blocks() == 0);
        if (st == TSR_OK) {
            break;
        }
        printf("# call %d fails: %s: %s\n", nth, tsr_status_class(st), words);
        CHECK(words[0] != '\0');
        failures++;
    }
    CHECK(failures >= 10 && failures < 50);
}

void strangers_are_refused()
{
    tsr_backend *b = NULL;
    char why[256] = "";
    CHECK(tsr_cuda_open(&b, "0.0.0", tsr_plugin_layout(), why, sizeof why) == TSR_E_UNSUPPORTED && b == NULL);
    CHECK(strstr(why, "another build") != NULL);
    CHECK(tsr_cuda_open(&b, TSR_VERSION, tsr_plugin_layout() + 1, why, sizeof why) == TSR_E_UNSUPPORTED &&
          b == NULL);
}

/* ---- RMSNorm --------------------------------------------------------------------------------------------------- */

/* Bound. A thread adds at most 32 or, in rows longer than 1024, d / 256 squares, then 8 more sums come together, each with
 * a rounding of eps/2; the root halves the error, and y takes five more roundings: (d / 256 + 32 + 8) / 4 + 3 eps. */
void norm_case(tsr_backend *b, int64_t n, int64_t d, int64_t pad, bool in_place, bool with_w)
{
    const int64_t xs = d + pad, ys = in_place ? xs : d + 3 * pad, xn = n * xs, yn = n * ys;
    std::vector<float> x((size_t)xn + 1), w((size_t)d), want((size_t)yn + 1, -7.0f), got,
        rstd((size_t)n + 1, -7.0f), r2;
    for (size_t i = 0; i < x.size(); i++) {
        x[i] = (float)((double)(i * 2654435761u % 100003) / 50000.0 - 1.0);
    }
    for (size_t i = 0; i < w.size(); i++) {
        w[i] = (float)(i % 17) - 8.0f;
    }
    if (in_place) {
        want = x;
    }
    got = want;
    r2 = rstd;
    tsr_rmsnorm_fwd_args a = {};
    a.y = want.data();
    a.x = in_place ? a.y : x.data();
    a.w = with_w ? w.data() : NULL;
    a.rstd = rstd.data();
    a.n = n;
    a.d = d;
    a.x_stride = xs;
    a.y_stride = ys;
    a.eps = 1e-5f;
    (void)tsr_cpu_rmsnorm_fwd(NULL, &a);
    void *dx = NULL, *dy = NULL, *dw = NULL, *dr = NULL;
    CHECK(b->alloc(b, &dx, x.size() * 4) == TSR_OK && b->alloc(b, &dy, got.size() * 4) == TSR_OK &&
          b->alloc(b, &dw, w.size() * 4) == TSR_OK && b->alloc(b, &dr, r2.size() * 4) == TSR_OK);
    CHECK(b->upload(b, dx, x.data(), x.size() * 4) == TSR_OK &&
          b->upload(b, dy, got.data(), got.size() * 4) == TSR_OK &&
          b->upload(b, dw, w.data(), w.size() * 4) == TSR_OK &&
          b->upload(b, dr, r2.data(), r2.size() * 4) == TSR_OK);
    a.y = (float *)dy;
    a.x = in_place ? a.y : (const float *)dx;
    a.w = with_w ? (const float *)dw : NULL;
    a.rstd = (float *)dr;
    CHECK(tsr_rmsnorm_fwd(b, &a) == TSR_OK);
    memset(&a, 0xff, sizeof a); /* the kernel has its own copy */
    CHECK(b->download(b, got.data(), dy, got.size() * 4) == TSR_OK &&
          b->download(b, r2.data(), dr, r2.size() * 4) == TSR_OK);
    const double eps = 0x1p-23, allow = ((double)d / 256 + 40) / 4 + 3;
    int off = 0;
    for (size_t i = 0; i < got.size(); i++) { /* gaps between rows are as they were */
        off += !(std::fabs((double)got[i] - (double)want[i]) <= allow * eps * std::fabs((double)want[i]));
    }
    for (size_t i = 0; i < r2.size(); i++) {
        off += !(std::fabs((double)r2[i] - (double)rstd[i]) <= allow * eps * std::fabs((double)rstd[i]));
    }
    if (off > 0) {
        printf("# rmsnorm n %lld d %lld pad %lld: %d elements are off\n", (long long)n, (long long)d,
               (long long)pad, off);
    }
    CHECK(off == 0);
    b->release(b, dx);
    b->release(b, dy);
    b->release(b, dw);
    b->release(b, dr);
}

void norms_are_right()
{
    static const int64_t ds[] = {
        1, 3, 4, 31, 33, 64, 127, 128, 132, 1000, 1023, 1024, 1025, 1028, 2052, 7168
    };
    static const int64_t ns[] = { 0, 1, 2, 7, 9, 61 };
    for (int s = 0; s < EMU_SCHEDULES; s++) {
        tsr_backend *b = open_emu((emu_schedule)s, 1 + s, s % 2 == 1);
        int turn = s;
        for (int64_t d : ds) {
            for (int64_t n : ns) {
                turn++;
                norm_case(b, d > 2000 ? n % 10 : n, d,
                          turn % 3 == 0   ? 0
                          : turn % 3 == 1 ? 4
                                          : 5,
                          turn % 4 == 0, turn % 5 != 0);
            }
        }
        tsr_backend_close(&b);
    }
    CHECK(emu_blocks() == 0);
}

} // namespace

int main()
{
    mistakes_are_found();
    failures_are_told();
    strangers_are_refused();
    norms_are_right();
    printf("%s\n", failed == 0 ? "ok" : "not ok");
    return failed != 0;
}
