/* emu.cc - see emu.h: fibers, schedules, device memory, and the calls of the CUDA runtime that kernels/cuda makes. */
#include "tests/cuda-emu/emu.h"
#include "kernels/backend_priv.h"

#include <cuda_runtime.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define EMU_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define EMU_ASAN 1
#endif
#endif
#ifdef EMU_ASAN
#include <sanitizer/asan_interface.h>
/* Frames that are still on a fiber's stack when it ends: their shadow would stay. */
#define PLAIN_FRAME __attribute__((no_sanitize("address"), noinline))
#else
#define PLAIN_FRAME __attribute__((noinline))
#endif

struct emu_stream {
    emu_schedule schedule;
    int threads;
    bool late;
    std::vector<std::function<void()>> work; /* not done yet */
};

namespace emu
{

/* ---- fibers ---------------------------------------------------------------------------------------------------- */

constexpr int THREADS_MAX = 1024;
#ifdef EMU_ASAN
constexpr size_t STACK = 256 << 10; /* redzones */
#else
constexpr size_t STACK = 64 << 10;
#endif
constexpr uint64_t CANARY = 0x5afe57ac5afe57acu;

enum state { READY, AT_BARRIER, IN_WARP, DONE };

struct fiber {
    void *sp;
    state st;
    int line;      /* of the barrier it waits at */
    unsigned mask; /* of the warp-wide call it waits in */
    uint64_t value, result;
    int from; /* the lane whose value it wants; -1: all, as a ballot */
    uint3 thread;
};

/* One thread of the system with the block it runs. */
struct worker {
    fiber f[THREADS_MAX];
    int n, live, waiting; /* threads of the block; not done; at a barrier */
    int current;
    emu_schedule schedule;
    void *home;
    char *stacks;
    place where;
    const std::function<void()> *body;
};

thread_local worker *me;

[[noreturn]] void die(const char *what)
{
    const place &p = me->where;
    fprintf(stderr, "emu: %s (block %u,%u,%u thread %u,%u,%u)\n", what, p.block.x, p.block.y, p.block.z,
            p.thread.x, p.thread.y, p.thread.z);
    abort();
}

/* Saves the callee's registers and the stack pointer, and goes on where `load` was saved. */
extern "C" void emu_switch(void **save, void *load);
asm(".text\n"
    ".type emu_switch,@function\n"
    "emu_switch:\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp,(%rdi)\n"
    "  movq %rsi,%rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  ret\n"
    ".size emu_switch,.-emu_switch\n");

/* The next to go on after thread i, or -1. */
static int choose(int i)
{
    const worker *w = me;
    if (w->schedule == EMU_AHEAD || w->schedule == EMU_AHEAD_BACKWARD) {
        const int base = i & ~31;
        for (int k = 1; k <= 32; k++) {
            const int j = base + ((i - base + k) & 31);
            if (j < w->n && w->f[j].st == READY) {
                return j;
            }
        }
    }
    const int step = w->schedule == EMU_FORWARD || w->schedule == EMU_AHEAD ? 1 : w->n - 1;
    for (int k = 0, j = i; k < w->n; k++) {
        j = (j + step) % w->n;
        if (w->f[j].st == READY) {
            return j;
        }
    }
    return -1;
}

/* From the current thread to whoever is next; home when all are done. */
PLAIN_FRAME static void go_on()
{
    worker *w = me;
    fiber *from = &w->f[w->current];
    const int next = choose(w->current);
    if (next < 0) {
        if (w->live > 0) {
            die("threads wait for each other: a barrier or warp-wide call that not all of them reach");
        }
        emu_switch(&from->sp, w->home);
    } else if (next != w->current) {
        w->current = next;
        w->where.thread = w->f[next].thread;
        emu_switch(&from->sp, w->f[next].sp);
    }
}

/* All who are not done have come: on they go. */
static void release_barrier()
{
    worker *w = me;
    int line = 0;
    for (int i = 0; i < w->n; i++) {
        if (w->f[i].st == AT_BARRIER) {
            if (line != 0 && w->f[i].line != line) {
                die("threads wait at different barriers");
            }
            line = w->f[i].line;
            w->f[i].st = READY;
        }
    }
    w->waiting = 0;
}

PLAIN_FRAME static void run_thread()
{
    worker *w = me;
    (*w->body)();
    w->f[w->current].st = DONE;
    w->live--;
    if (w->live > 0 && w->waiting == w->live) {
        release_barrier();
    }
    go_on();
    abort();
}

static void run_block(worker *w, uint3 block)
{
    w->where.block = block;
    w->live = w->n;
    w->waiting = 0;
    for (int i = 0; i < w->n; i++) {
        const unsigned t = (unsigned)i, dx = w->where.threads.x, dy = w->where.threads.y;
        char *low = w->stacks + STACK * (size_t)i;
        memcpy(low, &CANARY, sizeof CANARY);
        void **top = (void **)(low + STACK);
        *--top = NULL; /* where run_thread would return to */
        *--top = (void *)run_thread;
        for (int k = 0; k < 6; k++) {
            *--top = NULL;
        }
        w->f[i] = fiber{};
        w->f[i].sp = top;
        w->f[i].thread = uint3{ t % dx, t / dx % dy, t / (dx * dy) };
    }
    w->current = w->schedule == EMU_FORWARD || w->schedule == EMU_AHEAD ? 0 : w->n - 1;
    w->where.thread = w->f[w->current].thread;
    emu_switch(&w->home, w->f[w->current].sp);
    for (int i = 0; i < w->n; i++) {
        if (memcmp(w->stacks + STACK * (size_t)i, &CANARY, sizeof CANARY) != 0) {
            die("a thread's stack is too small");
        }
    }
}

const place &here()
{
    return me->where;
}

int lane()
{
    return me->current & 31;
}

void barrier(int line)
{
    worker *w = me;
    fiber *f = &w->f[w->current];
    f->st = AT_BARRIER;
    f->line = line;
    if (++w->waiting == w->live) {
        release_barrier();
    }
    go_on();
}

/* Waits until all lanes of mask are in the same kind of call; the last one to come serves all. */
static uint64_t meet(unsigned mask, uint64_t value, int from)
{
    worker *w = me;
    const int base = w->current & ~31, lanes = w->n - base < 32 ? w->n - base : 32;
    fiber *f = &w->f[w->current], *warp = &w->f[base];
    if ((mask >> lane() & 1) == 0) {
        die("a lane is not in the mask of its own call");
    }
    f->st = IN_WARP;
    f->mask = mask;
    f->value = value;
    f->from = from;
    unsigned came = 0, bits = 0;
    for (int i = 0; i < lanes; i++) {
        if ((mask >> i & 1) != 0 && warp[i].st == IN_WARP && warp[i].mask == mask) {
            if ((warp[i].from < 0) != (from < 0)) {
                die("the lanes of a warp are in different calls");
            }
            came |= 1u << i;
            bits |= warp[i].value != 0 ? 1u << i : 0;
        }
    }
    if (came == mask) {
        for (int i = 0; i < lanes; i++) {
            if ((mask >> i & 1) != 0) {
                if (from >= 0 && (mask >> warp[i].from & 1) == 0) {
                    die("a shuffle reads a lane that is not in the mask");
                }
                warp[i].result = from < 0 ? bits : warp[warp[i].from].value;
            }
        }
        for (int i = 0; i < lanes; i++) {
            if ((mask >> i & 1) != 0) {
                warp[i].st = READY;
            }
        }
    }
    if (f->st != READY || w->schedule == EMU_BACKWARD) {
        go_on();
    }
    return f->result;
}

uint64_t exchange(unsigned mask, uint64_t value, int from)
{
    return meet(mask, value, from);
}

unsigned ballot(unsigned mask, bool value)
{
    return (unsigned)meet(mask, value, -1);
}

/* Blocks are handed out one by one to the stream's threads. */
static void run_grid(int threads, emu_schedule schedule, dim3 blocks, dim3 size,
                     const std::function<void()> &body)
{
    const uint64_t total = (uint64_t)blocks.x * blocks.y * blocks.z;
    std::atomic<uint64_t> at{ 0 };
    auto work = [&] {
        worker *w = new worker();
        w->n = (int)(size.x * size.y * size.z);
        w->schedule = schedule;
        w->where.threads = size;
        w->where.blocks = blocks;
        w->body = &body;
        const size_t bytes = STACK * (size_t)w->n;
        w->stacks = (char *)mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (w->stacks == MAP_FAILED) {
            abort();
        }
        me = w;
        for (uint64_t i; (i = at.fetch_add(1)) < total;) {
            const uint64_t b = schedule == EMU_FORWARD || schedule == EMU_AHEAD ? i : total - 1 - i;
            run_block(w, uint3{ (unsigned)(b % blocks.x), (unsigned)(b / blocks.x % blocks.y),
                                (unsigned)(b / blocks.x / blocks.y) });
        }
        me = NULL;
        (void)munmap(w->stacks, bytes);
        delete w;
    };
    std::vector<std::thread> pool;
    for (int i = 1; i < threads && (uint64_t)i < total; i++) {
        pool.emplace_back(work);
    }
    work();
    for (std::thread &t : pool) {
        t.join();
    }
}

/* ---- failures on demand ---------------------------------------------------------------------------------------- */

static int calls_left; /* 0: none fails; -1: all do */
static cudaError_t last;

/* Every call of the runtime that can fail asks first. */
static bool fails()
{
    if (calls_left > 0 && --calls_left == 0) {
        calls_left = -1;
    }
    return calls_left < 0;
}

static cudaError_t answer(cudaError_t e)
{
    last = e != cudaSuccess ? e : last;
    return e;
}

void launch(cudaStream_t s, dim3 blocks, dim3 threads, std::function<void()> body)
{
    const uint64_t n = (uint64_t)threads.x * threads.y * threads.z;
    if (fails()) {
        (void)answer(cudaErrorLaunchFailure);
    } else if (n == 0 || n > THREADS_MAX || blocks.x == 0 || blocks.x > 0x7fffffffu || blocks.y == 0 ||
               blocks.y > 0xffffu || blocks.z == 0 || blocks.z > 0xffffu) {
        (void)answer(cudaErrorInvalidValue);
    } else if (s->late) {
        s->work.push_back([=] { run_grid(s->threads, s->schedule, blocks, threads, body); });
    } else {
        run_grid(s->threads, s->schedule, blocks, threads, body);
    }
}

/* ---- device memory --------------------------------------------------------------------------------------------- */

constexpr size_t PAGE = 4096, ALIGN = 64;
constexpr unsigned char BEHIND = 0xff; /* NaN too */

struct block {
    char *map;
    size_t map_bytes, bytes;
};
static std::map<void *, block> blocks;
static std::mutex blocks_lock;

/* The bytes between the end of a block and the page that nobody may touch. */
static size_t padding(const block &b)
{
    return (ALIGN - b.bytes % ALIGN) % ALIGN;
}

} // namespace emu

using namespace emu;

cudaError_t cudaMalloc(void **p, size_t bytes)
{
    if (fails()) {
        return answer(cudaErrorMemoryAllocation);
    }
    block b = { NULL, 0, bytes };
    const size_t whole = bytes + padding(b), body = (whole + PAGE - 1) / PAGE * PAGE;
    b.map_bytes = body + PAGE;
    b.map = (char *)mmap(NULL, b.map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (b.map == MAP_FAILED || mprotect(b.map + body, PAGE, PROT_NONE) != 0) {
        return answer(cudaErrorMemoryAllocation);
    }
    char *at = b.map + body - whole;
    memset(at, 0xff, bytes); /* NaN */
    memset(at + bytes, BEHIND, padding(b));
#ifdef EMU_ASAN
    __asan_poison_memory_region(at + bytes, padding(b));
#endif
    std::lock_guard<std::mutex> hold(blocks_lock);
    blocks[at] = b;
    *p = at;
    return cudaSuccess;
}

cudaError_t cudaFree(void *p)
{
    if (p == NULL) {
        return cudaSuccess;
    }
    std::lock_guard<std::mutex> hold(blocks_lock);
    auto found = blocks.find(p);
    if (found == blocks.end()) {
        fprintf(stderr, "emu: freed what was not allocated\n");
        abort();
    }
    const block b = found->second;
    const char *end = (const char *)p + b.bytes;
#ifdef EMU_ASAN
    __asan_unpoison_memory_region(end, padding(b));
#endif
    for (size_t i = 0; i < padding(b); i++) {
        if ((unsigned char)end[i] != BEHIND) {
            fprintf(stderr, "emu: a kernel wrote behind a block of %zu bytes\n", b.bytes);
            abort();
        }
    }
    (void)munmap(b.map, b.map_bytes);
    blocks.erase(found);
    return fails() ? answer(cudaErrorLaunchFailure) : cudaSuccess;
}

/* ---- the rest of the runtime ----------------------------------------------------------------------------------- */

static void finish(cudaStream_t s)
{
    std::vector<std::function<void()>> work;
    work.swap(s->work);
    for (const std::function<void()> &w : work) {
        w();
    }
}

const char *cudaGetErrorString(cudaError_t e)
{
    return e == cudaErrorMemoryAllocation ? "out of memory"
           : e == cudaErrorNoDevice       ? "no device"
                                          : "made to fail";
}

cudaError_t cudaGetLastError()
{
    const cudaError_t e = last;
    last = cudaSuccess;
    return e;
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = 13000;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    if (fails()) {
        return answer(cudaErrorNoDevice);
    }
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    return fails() || device != 0 ? answer(cudaErrorInvalidValue) : cudaSuccess;
}

/* What the next stream is made like. */
static emu_stream next_stream = { EMU_FORWARD, 1, false, {} };

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags)
{
    (void)flags;
    if (fails()) {
        return answer(cudaErrorMemoryAllocation);
    }
    *s = new emu_stream(next_stream);
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    delete s;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    finish(s);
    return fails() ? answer(cudaErrorLaunchFailure) : cudaSuccess;
}

/* From the host: the bytes are put aside at once, as for pageable memory. To the host: when all before it is done. */
cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind, cudaStream_t s)
{
    if (fails()) {
        return answer(cudaErrorLaunchFailure);
    }
    if (kind == cudaMemcpyHostToDevice && s->late) {
        std::vector<char> aside((const char *)src, (const char *)src + bytes);
        s->work.push_back([=] { memcpy(dst, aside.data(), aside.size()); });
    } else {
        finish(s);
        memcpy(dst, src, bytes);
    }
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *dst, int value, size_t bytes, cudaStream_t s)
{
    if (fails()) {
        return answer(cudaErrorLaunchFailure);
    }
    s->work.push_back([=] { memset(dst, value, bytes); });
    if (!s->late) {
        finish(s);
    }
    return cudaSuccess;
}

/* ---- emu.h ----------------------------------------------------------------------------------------------------- */

tsr_status tsr_emu_open(tsr_backend **out, emu_schedule schedule, int threads, bool late, tsr_err *err)
{
    char why[256] = "";
    next_stream.schedule = schedule;
    next_stream.threads = threads > 0 ? threads : (int)std::thread::hardware_concurrency();
    next_stream.late = late;
    tsr_status st = tsr_cuda_open(out, TSR_VERSION, tsr_plugin_layout(), why, sizeof why);
    if (st != TSR_OK) {
        TSR_FAIL(err, st, "emu: %s", why);
    }
    (*out)->name = "emu";
    return TSR_OK;
}

void emu_fail(int nth)
{
    calls_left = nth;
    last = cudaSuccess;
}

int emu_blocks(void)
{
    std::lock_guard<std::mutex> hold(blocks_lock);
    return (int)blocks.size();
}
