/* test_experts.c - the expert cache against a source in memory that is slow and fails on demand: on host memory, and on a
 * device whose memory nobody may touch. What is leased always holds the right bytes; what is counted adds up; without
 * guesses the hits are those of a simple model of the cache. */
#include "model/experts.h"
#include "tests/harness/bag.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

enum { LAYERS = 5, EXPERTS = 24, TOP = 4 };

/* ---- allocations are counted (the linker puts these in between) --------------------------------------------------- */

static _Atomic int64_t allocations;
void *__real_malloc(size_t n);
void *__real_calloc(size_t n, size_t each);
void *__real_realloc(void *p, size_t n);
int __real_posix_memalign(void **p, size_t align, size_t n);
void *__wrap_malloc(size_t n);
void *__wrap_calloc(size_t n, size_t each);
void *__wrap_realloc(void *p, size_t n);
int __wrap_posix_memalign(void **p, size_t align, size_t n);

void *__wrap_malloc(size_t n)
{
    allocations++;
    return __real_malloc(n);
}

void *__wrap_calloc(size_t n, size_t each)
{
    allocations++;
    return __real_calloc(n, each);
}

void *__wrap_realloc(void *p, size_t n)
{
    allocations++;
    return __real_realloc(p, n);
}

int __wrap_posix_memalign(void **p, size_t align, size_t n)
{
    allocations++;
    return __real_posix_memalign(p, align, n);
}

/* ---- source -------------------------------------------------------------------------------------------------------- */

/* Layer 1 has no experts, layer 3 no scales and smaller matrices; parts lie in another order than they are named. */
typedef struct fake {
    tsr_weight_source src;
    _Atomic int64_t reads, good, bytes, failed;
    _Atomic int active, most_active;
    _Atomic int fail[LAYERS][EXPERTS]; /* so many reads will fail */
    int delay_us;
    _Atomic bool hold; /* reads do not end */
    _Atomic int log_count;
    int log[512]; /* layer * EXPERTS + expert, in the order of reading */
} fake;

static const uint8_t has_experts[LAYERS] = { 1, 0, 1, 1, 1 };

static uint64_t part_size(int layer, int part)
{
    static const uint64_t sizes[TSR_PART_COUNT] = { 320, 328, 296, 24, 40, 16 };
    return layer == 3 ? part < 3 ? sizes[part] / 2 : 0 : sizes[part];
}

static uint8_t byte_of(int layer, int expert, int part, uint64_t i)
{
    return (uint8_t)((uint64_t)(layer * 151 + expert * 31 + part * 7) + i * 13 + (i >> 5));
}

static tsr_status fake_find(void *payload, const char *name, tsr_weight_info *out, tsr_err *err)
{
    static const char *const parts[] = { "gate.weight", "up.weight", "down.weight",
                                         "gate.scale",  "up.scale",  "down.scale" };
    (void)payload;
    int layer, expert, n = 0;
    CHECK(sscanf(name, "layers.%d.experts.%d.%n", &layer, &expert, &n) == 2 && n > 0);
    for (int p = 0; p < TSR_PART_COUNT; p++) {
        if (strcmp(name + n, parts[p]) == 0 && part_size(layer, p) > 0) {
            *out = (tsr_weight_info){ .dtype = p >= 3       ? TSR_DT_E8M0
                                               : layer == 3 ? TSR_DT_BF16
                                                            : TSR_DT_MXFP4,
                                      .bytes = part_size(layer, p) };
            return TSR_OK;
        }
    }
    TSR_FAIL(err, TSR_E_MISSING, "%s: none", name);
}

static tsr_status fake_bytes(void *payload, int32_t layer, uint64_t *bytes, tsr_err *err)
{
    (void)payload;
    (void)err;
    *bytes = 8; /* not at the start, not a multiple of anything */
    for (int p = 0; p < TSR_PART_COUNT; p++) {
        *bytes += part_size(layer, p);
    }
    return TSR_OK;
}

static tsr_status fake_read(void *payload, int32_t layer, int32_t expert, void *dst, size_t dst_bytes,
                            const void *part[TSR_PART_COUNT], uint64_t *read_bytes, tsr_err *err)
{
    static const int order[TSR_PART_COUNT] = { 2, 5, 0, 3, 1, 4 };
    fake *f = payload;
    uint8_t *to = (uint8_t *)dst + 8;
    int now = atomic_fetch_add(&f->active, 1) + 1, at = f->log_count++;
    int64_t number = f->reads++;
    if (at < 512) {
        f->log[at] = layer * EXPERTS + expert;
    }
    for (int most = f->most_active;
         now > most && !atomic_compare_exchange_weak(&f->most_active, &most, now);) {
    }
    if (f->delay_us > 0) {
        (void)usleep((unsigned)(f->delay_us + number % 3 * f->delay_us));
    }
    while (f->hold) {
        (void)usleep(100);
    }
    tsr_status st = TSR_OK;
    if (f->fail[layer][expert] > 0) {
        f->fail[layer][expert]--;
        f->failed++;
        memset(dst, 0xee, dst_bytes);
        st = TSR_ERR(err, TSR_E_IO, "layer %d: expert %d: fails on purpose", layer, expert);
    }
    for (int k = 0; st == TSR_OK && k < TSR_PART_COUNT; k++) {
        int p = order[k];
        part[p] = part_size(layer, p) > 0 ? to : NULL;
        for (uint64_t i = 0; i < part_size(layer, p); i++) {
            *to++ = byte_of(layer, expert, p, i);
        }
    }
    if (st == TSR_OK) {
        CHECK((size_t)(to - (uint8_t *)dst) <= dst_bytes);
        *read_bytes = (uint64_t)(to - (uint8_t *)dst) - 8;
        f->bytes += (int64_t)*read_bytes;
        f->good++;
    }
    f->active--;
    return st;
}

static void fake_init(fake *f)
{
    memset((void *)f, 0, sizeof *f);
    f->src = (tsr_weight_source){
        .payload = f, .find = fake_find, .expert_bytes = fake_bytes, .read_expert = fake_read
    };
}

/* ---- a device: its addresses are no addresses of the host; one thread may call ------------------------------------------ */

#define FAR ((uintptr_t)1 << 62)
static pthread_t device_thread;
static int uploads_left; /* then they fail; -1: never */

static tsr_status device_alloc(tsr_backend *b, void **out, size_t bytes)
{
    (void)b;
    void *p = NULL;
    CHECK(posix_memalign(&p, 64, bytes) == 0);
    *out = (void *)((uintptr_t)p + FAR);
    return TSR_OK;
}

static void device_release(tsr_backend *b, void *p)
{
    (void)b;
    free((void *)((uintptr_t)p - FAR));
}

static tsr_status device_upload(tsr_backend *b, void *dst, const void *src, size_t bytes)
{
    (void)b;
    CHECK(pthread_equal(device_thread, pthread_self()));
    if (uploads_left == 0) {
        return TSR_E_IO;
    }
    uploads_left -= uploads_left > 0;
    memcpy((void *)((uintptr_t)dst - FAR), src, bytes);
    return TSR_OK;
}

static tsr_status device_download(tsr_backend *b, void *dst, const void *src, size_t bytes)
{
    (void)b;
    memcpy(dst, (const void *)((uintptr_t)src - FAR), bytes);
    return TSR_OK;
}

static tsr_status device_zero(tsr_backend *b, void *dst, size_t bytes)
{
    (void)b;
    memset((void *)((uintptr_t)dst - FAR), 0, bytes);
    return TSR_OK;
}

static tsr_backend device_backend = { .name = "device",
                                      .alloc = device_alloc,
                                      .release = device_release,
                                      .upload = device_upload,
                                      .download = device_download,
                                      .zero = device_zero };

/* ---- one cache under test ---------------------------------------------------------------------------------------------- */

typedef struct setup {
    fake f;
    tsr_backend *b;
    tsr_experts *x;
    uint64_t slot_bytes;
} setup;

static void open_cache(setup *t, bool device, int64_t slots, int threads)
{
    tsr_err err;
    uint64_t one;
    fake_init(&t->f);
    device_thread = pthread_self();
    uploads_left = -1;
    if (device) {
        t->b = &device_backend;
    } else {
        CHECK_OK(tsr_backend_open(&t->b, "cpu", 1, &err));
    }
    CHECK_OK(fake_bytes(NULL, 0, &one, &err));
    t->slot_bytes = tsr_align_up(one, 64);
    tsr_experts_opts o = { .layers = LAYERS,
                           .experts = EXPERTS,
                           .top_k = TOP,
                           .cache_bytes = (uint64_t)slots * t->slot_bytes,
                           .io_threads = threads,
                           .has_experts = has_experts };
    CHECK_OK(tsr_experts_open(&t->x, t->b, &t->f.src, &o, &err));
}

static void close_cache(setup *t)
{
    tsr_experts_close(&t->x);
    if (t->b != &device_backend) {
        tsr_backend_close(&t->b);
    }
}

/* Every leased part is right, every other entry NULL (or, with `all`, right too). */
static void check_table(setup *t, int32_t layer, const int32_t *ids, int32_t n, const tsr_expert_table *table,
                        bool all)
{
    const void *row[EXPERTS];
    uint8_t bytes[512];
    bool leased[EXPERTS] = { false };
    for (int32_t k = 0; k < n; k++) {
        leased[ids[k]] = true;
    }
    assert_int_equal(table->dtype, layer == 3 ? TSR_DT_BF16 : TSR_DT_MXFP4);
    for (int p = 0; p < TSR_PART_COUNT; p++) {
        uint64_t size = part_size(layer, p);
        assert_true((table->part[p] == NULL) == (size == 0));
        if (size == 0) {
            continue;
        }
        CHECK(t->b->download(t->b, row, table->part[p], sizeof row) == TSR_OK);
        for (int e = 0; e < EXPERTS; e++) {
            if (!all && !leased[e]) {
                assert_null(row[e]);
                continue;
            }
            assert_non_null(row[e]);
            CHECK(t->b->download(t->b, bytes, row[e], size) == TSR_OK);
            for (uint64_t i = 0; i < size; i++) {
                assert_int_equal(bytes[i], byte_of(layer, e, p, i));
            }
        }
    }
}

/* Reads under way end; then the counts agree with the source's. */
static void check_stats(setup *t, bool quiet)
{
    tsr_experts_stats s;
    for (int i = 0; i < 3000; i++) {
        tsr_experts_stats_get(t->x, &s);
        if (!quiet || (t->f.active == 0 && (int64_t)(s.resident + s.evicted) == t->f.good)) {
            break;
        }
        (void)usleep(1000);
    }
    assert_int_equal(s.asked, s.hits + s.misses);
    assert_true(s.prefetch_used <= s.prefetched);
    assert_true(s.resident * t->slot_bytes == s.resident_bytes && s.resident_bytes <= s.capacity_bytes);
    if (quiet) {
        assert_int_equal(s.resident + s.evicted, t->f.good);
        assert_int_equal(s.bytes_read, t->f.bytes);
        assert_true(t->f.failed > 0 || s.misses + s.prefetched >= (uint64_t)t->f.good);
    }
}

/* n different experts, some more often than others. */
static void draw(uint64_t *rng, int32_t *ids, int32_t n)
{
    bool seen[EXPERTS] = { false };
    for (int32_t k = 0; k < n;) {
        uint64_t r = bag_random(rng);
        int32_t e = (int32_t)(r % (r >> 60 < 9 ? EXPERTS / 3 : EXPERTS));
        if (!seen[e]) {
            seen[e] = true;
            ids[k++] = e;
        }
    }
}

static int32_t some_layer(uint64_t *rng)
{
    static const int32_t with[] = { 0, 2, 3, 4 };
    return with[bag_random(rng) % 4];
}

static int64_t slots_of(int budget)
{
    static const int64_t slots[] = { TOP, TOP + 1, 24, 96, 200 };
    return slots[budget];
}

/* ---- the model ----------------------------------------------------------------------------------------------------------- */

typedef struct lru_model {
    int64_t slots, time, count;
    int64_t used[LAYERS][EXPERTS]; /* 0: not resident */
    uint64_t hits, evicted;
} lru_model;

static void model_step(lru_model *m, int32_t layer, const int32_t *ids, int32_t n)
{
    int64_t now = m->time;
    for (int32_t k = 0; k < n; k++) {
        m->hits += m->used[layer][ids[k]] > 0;
        m->count += m->used[layer][ids[k]] == 0;
        m->used[layer][ids[k]] = ++m->time;
    }
    for (; m->count > m->slots; m->count--, m->evicted++) {
        int64_t *oldest = NULL;
        for (int64_t *u = &m->used[0][0]; u <= &m->used[LAYERS - 1][EXPERTS - 1]; u++) {
            if (*u > 0 && *u <= now && (oldest == NULL || *u < *oldest)) {
                oldest = u;
            }
        }
        assert_non_null(oldest);
        *oldest = 0;
    }
}

static void trace_exact(bool device, int64_t slots, int threads)
{
    setup t;
    lru_model m = { .slots = slots < 96 ? slots : 96 };
    tsr_err err;
    uint64_t rng = (uint64_t)slots * 8 + (uint64_t)threads * 2 + device;
    open_cache(&t, device, slots, threads);
    for (int step = 0; step < 300; step++) {
        int32_t layer = some_layer(&rng), ids[EXPERTS], taken;
        int32_t n = 1 + (int32_t)(bag_random(&rng) % (step % 7 == 0 ? EXPERTS : TOP));
        draw(&rng, ids, n);
        for (int32_t at = 0; at < n; at += taken) {
            tsr_expert_table table;
            CHECK_OK(tsr_experts_acquire(t.x, layer, ids + at, n - at, &taken, &table, &err));
            assert_int_equal(taken, n - at < m.slots ? n - at : m.slots);
            check_table(&t, layer, ids + at, taken, &table, false);
            model_step(&m, layer, ids + at, taken);
            tsr_experts_release(t.x, layer);
        }
    }
    tsr_experts_stats s;
    tsr_experts_stats_get(t.x, &s);
    assert_int_equal(s.hits, m.hits);
    assert_int_equal(s.evicted, m.evicted);
    assert_int_equal(s.resident, m.count);
    assert_int_equal(s.prefetched, 0);
    assert_int_equal(s.misses, t.f.good);
    assert_true(s.wait_ns > 0);
    check_stats(&t, true);
    close_cache(&t);
}

static void test_model(void **state)
{
    (void)state;
    for (int budget = 0; budget < 5; budget++) {
        for (int threads = 1; threads <= 3; threads++) {
            trace_exact(false, slots_of(budget), threads);
            trace_exact(true, slots_of(budget), threads);
        }
    }
}

/* ---- guesses and failures at any moment ------------------------------------------------------------------------------------ */

static void prefetch_some(setup *t, uint64_t *rng)
{
    int32_t ids[16], n = 1 + (int32_t)(bag_random(rng) % 8);
    draw(rng, ids, n);
    for (int32_t k = 0; k < n / 2; k++) {
        ids[n + k] = ids[k]; /* a token's choice may repeat another's */
    }
    tsr_experts_prefetch(t->x, (int32_t)(bag_random(rng) % LAYERS), ids, n + n / 2);
}

static void trace_racing(bool device, int64_t slots, int threads, bool failures)
{
    setup t;
    tsr_err err;
    uint64_t rng = (uint64_t)slots * 16 + (uint64_t)threads * 4 + (uint64_t)failures * 2 + device + 77;
    open_cache(&t, device, slots, threads);
    t.f.delay_us = slots > 20 ? 20 : 5;
    int failed = 0;
    for (int step = 0; step < 250; step++) {
        int32_t layer = some_layer(&rng), ids[EXPERTS], taken;
        int32_t n = 1 + (int32_t)(bag_random(&rng) % (step % 9 == 0 ? EXPERTS : TOP));
        draw(&rng, ids, n);
        if (failures && step % 3 == 0) {
            t.f.fail[layer][ids[bag_random(&rng) % (uint64_t)n]] = 1 + (int)(bag_random(&rng) % 3);
            uploads_left = device && step % 2 == 0 ? (int)(bag_random(&rng) % 12) : -1;
        }
        tsr_experts_prefetch(t.x, layer, ids, (int32_t)(bag_random(&rng) % (uint64_t)(n + 1)));
        prefetch_some(&t, &rng);
        for (int32_t at = 0; at < n;) {
            tsr_expert_table table;
            tsr_status st = tsr_experts_acquire(t.x, layer, ids + at, n - at, &taken, &table, &err);
            if (st != TSR_OK) {
                assert_true(failures && st == TSR_E_IO && taken == 0);
                assert_non_null(strstr(err.msg, "layer"));
                uploads_left = bag_random(&rng) % 4 == 0 ? 2 : -1;
                failed++;
                continue;
            }
            uploads_left = -1;
            prefetch_some(&t, &rng);
            check_table(&t, layer, ids + at, taken, &table, false);
            tsr_experts_release(t.x, layer);
            at += taken;
        }
        check_stats(&t, step % 50 == 49);
    }
    assert_true(!failures || slots >= 96 || failed > 10); /* what is resident is not read again */
    check_stats(&t, true);
    close_cache(&t);
}

static void test_racing(void **state)
{
    (void)state;
    for (int budget = 0; budget < 5; budget++) {
        for (int threads = 1; threads <= 3; threads++) {
            for (int kind = 0; kind < 4; kind++) {
                trace_racing((kind & 1) != 0, slots_of(budget), threads, kind >= 2);
            }
        }
    }
}

static void acquire_all(setup *t, int32_t layer, const int32_t *ids, int32_t n, bool keep)
{
    tsr_err err;
    int32_t taken;
    tsr_expert_table table;
    CHECK_OK(tsr_experts_acquire(t->x, layer, ids, n, &taken, &table, &err));
    assert_int_equal(taken, n);
    check_table(t, layer, ids, n, &table, false);
    if (!keep) {
        tsr_experts_release(t->x, layer);
    }
}

/* Until so many reads have ended well and none is under way. */
static void wait_reads(const setup *t, int64_t n)
{
    tsr_experts_stats s;
    for (int i = 0; i < 5000; i++) {
        tsr_experts_stats_get(t->x, &s);
        if (t->f.active == 0 && t->f.reads >= n) {
            return;
        }
        (void)usleep(1000);
    }
    fail_msg("%lld reads, not %lld", (long long)t->f.reads, (long long)n);
}

static void test_failure(void **state)
{
    (void)state;
    for (int device = 0; device < 2; device++) {
        setup t;
        tsr_err err;
        tsr_experts_stats s;
        tsr_expert_table table;
        int32_t taken, ids[TOP] = { 5, 6, 7, 8 };
        open_cache(&t, device != 0, 12, 1);
        t.f.fail[2][7] = 1;
        assert_int_equal(tsr_experts_acquire(t.x, 2, ids, TOP, &taken, &table, &err), TSR_E_IO);
        assert_non_null(strstr(err.msg, "layer 2: expert 7"));
        tsr_experts_stats_get(t.x, &s);
        assert_int_equal(s.asked, 0);
        assert_int_equal(s.resident, 2); /* 5 and 6; 8 was given up */
        acquire_all(&t, 2, ids, TOP, false);
        tsr_experts_stats_get(t.x, &s);
        assert_int_equal(s.hits, 2);
        assert_int_equal(s.misses, 2);
        /* a guess that fails is forgotten; when it fails again it is told */
        int64_t before = t.f.reads;
        t.f.fail[4][1] = 2;
        tsr_experts_prefetch(t.x, 4, &(int32_t){ 1 }, 1);
        wait_reads(&t, before + 1);
        assert_int_equal(tsr_experts_acquire(t.x, 4, &(int32_t){ 1 }, 1, &taken, &table, &err), TSR_E_IO);
        assert_int_equal(t.f.reads, before + 2);
        acquire_all(&t, 4, &(int32_t){ 1 }, 1, false);
        check_stats(&t, true);
        close_cache(&t);
    }
}

static void test_several_at_once(void **state)
{
    (void)state;
    setup t;
    int32_t ids[TOP] = { 0, 1, 2, 3 };
    open_cache(&t, false, 12, 4);
    t.f.delay_us = 20000;
    acquire_all(&t, 0, ids, TOP, false);
    assert_true(t.f.most_active >= 3);
    close_cache(&t);
}

static void test_demand_first(void **state)
{
    (void)state;
    setup t;
    int32_t guesses[8] = { 0, 1, 2, 3, 4, 5, 6, 7 };
    open_cache(&t, false, 24, 1);
    t.f.delay_us = 2000;
    tsr_experts_prefetch(t.x, 4, guesses, 8);
    acquire_all(&t, 0, &(int32_t){ 9 }, 1, false);
    bool soon = t.f.log[0] == 9 || t.f.log[1] == 9; /* at most the one under way comes before */
    assert_true(soon);
    acquire_all(&t, 4, &(int32_t){ 7 }, 1, false); /* the last guess is not waited for in line */
    assert_true(t.f.log_count <= 5);
    wait_reads(&t, 9);
    check_stats(&t, true);
    tsr_experts_stats s;
    tsr_experts_stats_get(t.x, &s);
    assert_int_equal(s.prefetched, 7);
    assert_int_equal(s.misses, 2);
    close_cache(&t);
}

static void test_prefetch_rules(void **state)
{
    (void)state;
    for (int device = 0; device < 2; device++) {
        setup t;
        tsr_experts_stats s;
        int32_t a[TOP] = { 0, 1, 2, 3 }, b[TOP] = { 10, 11, 12, 13 }, none[TOP] = { 20, 21, 22, 23 };
        open_cache(&t, device != 0, TOP, 1); /* no room beside a token's experts: nothing is guessed */
        tsr_experts_prefetch(t.x, 0, a, TOP);
        acquire_all(&t, 2, b, TOP, false);
        assert_int_equal(t.f.reads, TOP);
        close_cache(&t);

        open_cache(&t, device != 0, 2 * TOP, 1);
        tsr_experts_prefetch(t.x, 1, a, TOP); /* has no experts */
        tsr_experts_prefetch(t.x, 0, a, TOP);
        wait_reads(&t, TOP);
        acquire_all(&t, 0, a, TOP, false);
        tsr_experts_stats_get(t.x, &s);
        assert_int_equal(s.prefetched, TOP);
        assert_int_equal(s.prefetch_used, TOP);
        assert_int_equal(s.hits, TOP);
        /* leased experts stay, whatever is guessed; so do those the layer used last */
        acquire_all(&t, 2, b, TOP, true);
        tsr_experts_prefetch(t.x, 0, none, TOP);
        (void)usleep(2000);
        assert_int_equal(t.f.reads, 2 * TOP);
        tsr_experts_prefetch(t.x, 4, none, TOP); /* of another layer: takes the place of a */
        wait_reads(&t, 3 * TOP);
        tsr_experts_release(t.x, 2);
        acquire_all(&t, 2, b, TOP, false);
        assert_int_equal(t.f.reads, 3 * TOP);
        tsr_experts_prefetch(t.x, 3, none, TOP); /* as many guesses as there may be */
        (void)usleep(2000);
        assert_int_equal(t.f.reads, 3 * TOP);
        acquire_all(&t, 4, &(int32_t){ 20 }, 1, false); /* the others were wrong: room for new ones */
        tsr_experts_prefetch(t.x, 3, none, TOP);
        wait_reads(&t, 4 * TOP);
        tsr_experts_stats_get(t.x, &s);
        assert_int_equal(s.prefetch_used, TOP + 1);
        check_stats(&t, true);
        close_cache(&t);
    }
}

/* ---- all of them ------------------------------------------------------------------------------------------------------------- */

typedef struct told {
    uint64_t done, total;
    int calls, cancel_at;
    volatile int cancel;
} told;

static void on_progress(void *payload, const char *what, uint64_t done, uint64_t total)
{
    told *p = payload;
    (void)what;
    assert_true(done >= p->done && done <= total);
    p->done = done;
    p->total = total;
    p->cancel = ++p->calls == p->cancel_at;
}

static void test_load_all(void **state)
{
    (void)state;
    for (int device = 0; device < 2; device++) {
        setup t;
        tsr_err err;
        told p = { .cancel_at = 5 };
        tsr_progress progress = { on_progress, &p, &p.cancel };
        open_cache(&t, device != 0, 0, 2);
        t.f.delay_us = 300;
        tsr_experts_prefetch(t.x, 4, (int32_t[]){ 1, 2, 3 }, 3);
        assert_int_equal(tsr_experts_load_all(t.x, &progress, &err), TSR_E_CANCELLED);
        assert_true(t.f.reads < 20);
        check_stats(&t, false);
        t.f.fail[3][3] = 1;
        assert_int_equal(tsr_experts_load_all(t.x, NULL, &err), TSR_E_IO);
        assert_non_null(strstr(err.msg, "layer 3: expert 3"));
        assert_false(tsr_experts_all_resident(t.x));
        acquire_all(&t, 4, &(int32_t){ 2 }, 1, false);
        p = (told){ .cancel_at = -1 };
        CHECK_OK(tsr_experts_load_all(t.x, &progress, &err));
        assert_int_equal(p.done, p.total);
        assert_true(tsr_experts_all_resident(t.x));
        assert_int_equal(t.f.good, 4 * EXPERTS);
        for (int32_t l = 0; l < LAYERS; l++) {
            if (has_experts[l]) {
                tsr_expert_table table = tsr_experts_table(t.x, l);
                int32_t taken;
                check_table(&t, l, NULL, 0, &table, true);
                CHECK_OK(tsr_experts_acquire(t.x, l, NULL, 7, &taken, &table, &err));
                assert_int_equal(taken, 7);
                check_table(&t, l, NULL, 0, &table, true);
                tsr_experts_release(t.x, l);
            }
        }
        tsr_experts_prefetch(t.x, 0, (int32_t[]){ 1 }, 1);
        assert_int_equal(t.f.good, 4 * EXPERTS);
        close_cache(&t);

        open_cache(&t, device != 0, 30, 3); /* as many as there is room for */
        CHECK_OK(tsr_experts_load_all(t.x, NULL, &err));
        assert_int_equal(t.f.good, 30);
        assert_false(tsr_experts_all_resident(t.x));
        acquire_all(&t, 4, (int32_t[]){ 1, 5 }, 2, false);
        tsr_experts_stats s;
        tsr_experts_stats_get(t.x, &s);
        assert_int_equal(s.evicted, 2);
        close_cache(&t);
    }
}

static void test_limits(void **state)
{
    (void)state;
    setup t;
    tsr_err err;
    open_cache(&t, false, TOP, 1);
    tsr_experts *x;
    char text[32];
    (void)snprintf(text, sizeof text, "%llu", (unsigned long long)(TOP * t.slot_bytes));
    tsr_experts_opts o = { .layers = LAYERS,
                           .experts = EXPERTS,
                           .top_k = TOP,
                           .cache_bytes = TOP * t.slot_bytes - 1,
                           .has_experts = has_experts };
    assert_int_equal(tsr_experts_open(&x, t.b, &t.f.src, &o, &err), TSR_E_LIMIT);
    assert_null(x);
    assert_non_null(strstr(err.msg, text));
    o.has_experts = (const uint8_t[LAYERS]){ 0 };
    assert_int_equal(tsr_experts_open(&x, t.b, &t.f.src, &o, &err), TSR_E_LIMIT);
    close_cache(&t);
    tsr_experts_close(&x);
}

/* Closing while reads are under way and queued. */
static void test_close_early(void **state)
{
    (void)state;
    for (int device = 0; device < 2; device++) {
        setup t;
        open_cache(&t, device != 0, 40, 2);
        t.f.delay_us = 500;
        tsr_experts_prefetch(t.x, 0, (int32_t[]){ 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 }, 10);
        close_cache(&t);
        assert_true(t.f.reads <= 4);
    }
}

/* A guess that never ends keeps its slot; everything else can still be leased, and then all of it. */
static void test_slow_guess(void **state)
{
    (void)state;
    setup t;
    int32_t ids[TOP + 1] = { 0, 1, 2, 3, 4 };
    open_cache(&t, false, TOP + 1, 1);
    t.f.hold = true;
    tsr_experts_prefetch(t.x, 0, &(int32_t){ 9 }, 1);
    while (t.f.active == 0) {
        (void)usleep(100);
    }
    t.f.hold = false;
    acquire_all(&t, 2, ids, TOP + 1, false); /* takes the guess's slot too, once it can */
    check_stats(&t, true);
    close_cache(&t);
}

static void test_no_allocation(void **state)
{
    (void)state;
    for (int device = 0; device < 2; device++) {
        setup t;
        tsr_err err;
        uint64_t rng = 3;
        open_cache(&t, device != 0, 20, 2);
        (void)usleep(10000); /* threads have started */
        int64_t before = allocations;
        assert_true(before > 0); /* they are counted */
        for (int step = 0; step < 500; step++) {
            int32_t layer = some_layer(&rng), ids[EXPERTS], taken;
            tsr_expert_table table;
            draw(&rng, ids, TOP);
            t.f.fail[layer][ids[0]] = step % 50 == 0;
            if (tsr_experts_acquire(t.x, layer, ids, TOP, &taken, &table, &err) == TSR_OK) {
                prefetch_some(&t, &rng);
                tsr_experts_release(t.x, layer);
            }
        }
        assert_int_equal(allocations - before, 0);
        close_cache(&t);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_model),         cmocka_unit_test(test_racing),
        cmocka_unit_test(test_failure),       cmocka_unit_test(test_several_at_once),
        cmocka_unit_test(test_demand_first),  cmocka_unit_test(test_prefetch_rules),
        cmocka_unit_test(test_load_all),      cmocka_unit_test(test_limits),
        cmocka_unit_test(test_close_early),   cmocka_unit_test(test_slow_guess),
        cmocka_unit_test(test_no_allocation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
