/* experts.c - which experts lie in memory.
 *
 * Least recently used goes first. An acquire may take any slot that it does not lease itself: free ones, then those used
 * longest ago, then what was asked for ahead. A prefetch gives way: it takes a free slot, or the one used longest ago
 * that is neither leased, nor itself guessed and still to be used, nor of the layer's own last acquire; and only while
 * top_k slots beside all guesses are left for the next acquire. A guess stops being one when its layer is acquired. */
#include "model/experts_priv.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_THREADS 64

static const char *const part_names[TSR_PART_COUNT] = { "gate.weight", "up.weight", "down.weight",
                                                        "gate.scale",  "up.scale",  "down.scale" };

static uint64_t now_ns(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---- open and close -------------------------------------------------------------------------------------------------- */

/* Dtype and sizes of a layer's parts, by those of its first expert. */
static tsr_status learn_layer(tsr_experts *x, int32_t layer, tsr_err *err)
{
    expert_layer *l = &x->layers[layer];
    for (int p = 0; p < TSR_PART_COUNT; p++) {
        char name[64];
        tsr_weight_info w;
        bool scale = p >= TSR_PART_GATE_SCALE;
        (void)snprintf(name, sizeof name, "layers.%d.experts.0.%s", layer, part_names[p]);
        tsr_status st = x->src->find(x->src->payload, name, &w, err);
        if (st == TSR_E_MISSING && scale && l->dtype != TSR_DT_MXFP4) {
            continue;
        }
        TSR_TRY(st);
        if (p > 0 && !scale && w.dtype != l->dtype) {
            TSR_FAIL(err, TSR_E_UNSUPPORTED, "%s: is %s, the gate of this expert is %s", name,
                     tsr_dtype_name((unsigned)w.dtype), tsr_dtype_name((unsigned)l->dtype));
        }
        l->dtype = p == 0 ? w.dtype : l->dtype;
        l->part_bytes[p] = w.bytes;
    }
    return x->src->expert_bytes(x->src->payload, layer, &l->bytes, err);
}

/* Layers, and how many slots of which size the budget gives. */
static tsr_status measure(tsr_experts *x, const tsr_experts_opts *o, tsr_err *err)
{
    uint64_t largest = 0, floor, all;
    int32_t count = 0;
    for (int32_t i = 0; i < o->layers; i++) {
        x->layers[i].ordinal = o->has_experts[i] ? count++ : -1;
        if (o->has_experts[i]) {
            TSR_TRY(learn_layer(x, i, err));
            largest = x->layers[i].bytes > largest ? x->layers[i].bytes : largest;
        }
    }
    x->total = (int64_t)count * x->experts;
    if (count == 0 || largest == 0 || largest > UINT64_MAX / 2 || x->total > INT32_MAX) {
        TSR_FAIL(err, TSR_E_LIMIT, "%d layers of %d experts of %llu bytes: nothing to hold, or too much",
                 count, x->experts, (unsigned long long)largest);
    }
    x->slot_bytes = tsr_align_up(largest, 64);
    if (!tsr_mul_u64(x->slot_bytes, (uint64_t)x->total, &all) ||
        !tsr_mul_u64(x->slot_bytes, (uint64_t)x->top_k, &floor)) {
        TSR_FAIL(err, TSR_E_LIMIT, "the experts' size does not fit 64 bits");
    }
    uint64_t budget = o->cache_bytes > 0 && o->cache_bytes < all ? o->cache_bytes : all;
    if (budget < floor) {
        TSR_FAIL(err, TSR_E_LIMIT,
                 "an expert cache of %llu bytes is too small: the %d experts of a token take %llu",
                 (unsigned long long)budget, x->top_k, (unsigned long long)floor);
    }
    x->slot_count = (int32_t)(budget / x->slot_bytes);
    x->stats.capacity_bytes = (uint64_t)x->slot_count * x->slot_bytes;
    return TSR_OK;
}

static tsr_status take_stages(tsr_experts *x, int threads, tsr_err *err)
{
    if (x->b->host) {
        return TSR_OK;
    }
    x->stage_count = threads + x->top_k; /* so that guesses do not stop for want of them */
    x->free_stages = malloc((size_t)x->stage_count * sizeof *x->free_stages);
    uint64_t bytes;
    if (x->free_stages == NULL || !tsr_mul_u64((uint64_t)x->stage_count, x->slot_bytes, &bytes) ||
        posix_memalign((void **)&x->stages, 64, bytes) != 0) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory: buffers for %d experts", x->stage_count);
    }
    for (int32_t i = 0; i < x->stage_count; i++) {
        x->free_stages[x->free_stage_count++] = i;
    }
    return TSR_OK;
}

static tsr_status take_memory(tsr_experts *x, tsr_err *err)
{
    tsr_backend *b = x->b;
    size_t entries = (size_t)x->total * TSR_PART_COUNT, room = (size_t)x->slot_count;
    x->slots = calloc(room, sizeof *x->slots);
    x->where = malloc((size_t)x->total * sizeof *x->where);
    x->mirror = calloc(entries, sizeof *x->mirror);
    x->leased = malloc((size_t)x->experts * sizeof *x->leased);
    if (x->slots == NULL || x->where == NULL || x->mirror == NULL || x->leased == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    if (b->alloc(b, (void **)&x->arena, x->stats.capacity_bytes) != TSR_OK ||
        b->alloc(b, (void **)&x->table, entries * sizeof *x->table) != TSR_OK) {
        TSR_FAIL(err, TSR_E_LIMIT,
                 "%s: out of memory: %llu bytes for %d experts (a smaller cache can be %llu)", b->name,
                 (unsigned long long)x->stats.capacity_bytes, x->slot_count,
                 (unsigned long long)(x->slot_bytes * (uint64_t)x->top_k));
    }
    if (b->zero(b, (void *)x->table, entries * sizeof *x->table) != TSR_OK) {
        TSR_FAIL(err, TSR_E_IO, "%s: cannot clear the table of experts", b->name);
    }
    for (int64_t i = 0; i < x->total; i++) {
        x->where[i] = -1;
    }
    slot_list *const lists[] = { &x->free, &x->demand, &x->ahead, &x->staged, &x->lru };
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        *lists[i] = (slot_list){ -1, -1 };
    }
    for (int32_t i = 0; i < x->slot_count; i++) {
        x->slots[i] = (slot){ .layer = -1, .stage = -1 };
        list_push(x, &x->free, i);
    }
    return TSR_OK;
}

tsr_status tsr_experts_open(tsr_experts **out, tsr_backend *b, const tsr_weight_source *src,
                            const tsr_experts_opts *o, tsr_err *err)
{
    TSR_ASSERT(o->layers >= 1 && o->top_k >= 1 && o->top_k <= o->experts && o->has_experts != NULL);
    *out = NULL;
    tsr_experts *x = calloc(1, sizeof *x);
    if (x == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    x->b = b;
    x->src = src;
    x->experts = o->experts;
    x->top_k = o->top_k;
    x->layer_count = o->layers;
    x->leased_layer = -1;
    (void)pthread_mutex_init(&x->lock, NULL); /* these cannot fail with default attributes */
    (void)pthread_cond_init(&x->work, NULL);
    (void)pthread_cond_init(&x->done, NULL);
    int threads = o->io_threads <= 0 ? 2 : o->io_threads < MAX_THREADS ? o->io_threads : MAX_THREADS;
    tsr_status st = TSR_OK;
    x->layers = calloc((size_t)o->layers, sizeof *x->layers);
    if (x->layers == NULL) {
        st = TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    }
    st = st == TSR_OK ? measure(x, o, err) : st;
    st = st == TSR_OK ? take_memory(x, err) : st;
    st = st == TSR_OK ? take_stages(x, threads, err) : st;
    st = st == TSR_OK ? threads_start(x, threads, err) : st;
    if (st != TSR_OK) {
        tsr_experts_close(&x);
    }
    *out = x;
    return st;
}

void tsr_experts_close(tsr_experts **px)
{
    tsr_experts *x = *px;
    if (x == NULL) {
        return;
    }
    *px = NULL;
    threads_stop(x);
    if (x->arena != NULL) {
        x->b->release(x->b, x->arena);
    }
    if (x->table != NULL) {
        x->b->release(x->b, (void *)x->table);
    }
    (void)pthread_cond_destroy(&x->done);
    (void)pthread_cond_destroy(&x->work);
    (void)pthread_mutex_destroy(&x->lock);
    free(x->stages);
    free(x->free_stages);
    free(x->leased);
    free((void *)x->mirror);
    free(x->where);
    free(x->slots);
    free(x->layers);
    free(x);
}

/* ---- tables --------------------------------------------------------------------------------------------------------- */

static size_t row_of(const tsr_experts *x, int32_t layer, int part)
{
    return ((size_t)x->layers[layer].ordinal * TSR_PART_COUNT + (size_t)part) * (size_t)x->experts;
}

/* Makes a layer's table in backend memory that of the leased experts, or of all that are ready. */
static tsr_status write_table(tsr_experts *x, int32_t layer, bool all, tsr_err *err)
{
    const void **rows = x->mirror + row_of(x, layer, 0);
    bool stale = x->layers[layer].stale;
    int32_t first = stale ? 0 : x->experts, last = stale ? x->experts - 1 : -1;
    (void)pthread_mutex_lock(&x->lock);
    for (int32_t e = 0; e < x->experts; e++) {
        int32_t i = *where_of(x, layer, e);
        const slot *s = i >= 0 && (all || x->slots[i].leased) ? &x->slots[i] : NULL;
        bool differs = false;
        int parts = s != NULL || rows[e] != NULL ? TSR_PART_COUNT : 0; /* most are neither there nor were */
        for (int p = 0; p < parts; p++) {
            const void *want = s != NULL ? s->part[p] : NULL, **have = &rows[p * (int64_t)x->experts + e];
            differs = differs || *have != want;
            *have = want;
        }
        first = differs && e < first ? e : first;
        last = differs && e > last ? e : last;
    }
    (void)pthread_mutex_unlock(&x->lock);
    for (int p = 0; p < TSR_PART_COUNT && last >= 0; p++) {
        size_t at = row_of(x, layer, p) + (size_t)first;
        if (x->layers[layer].part_bytes[p] > 0 &&
            x->b->upload(x->b, (void *)(x->table + at), (const void *)(x->mirror + at),
                         (size_t)(last - first + 1) * sizeof *x->table) != TSR_OK) {
            x->layers[layer].stale = true;
            TSR_FAIL(err, TSR_E_IO, "%s: layer %d: the table of experts cannot be written", x->b->name,
                     layer);
        }
    }
    x->layers[layer].stale = false;
    return TSR_OK;
}

tsr_expert_table tsr_experts_table(const tsr_experts *x, int32_t layer)
{
    TSR_ASSERT(layer >= 0 && layer < x->layer_count && x->layers[layer].ordinal >= 0);
    tsr_expert_table t = { .dtype = x->layers[layer].dtype };
    for (int p = 0; p < TSR_PART_COUNT; p++) {
        t.part[p] = x->layers[layer].part_bytes[p] > 0 ? x->table + row_of(x, layer, p) : NULL;
    }
    return t;
}

/* ---- lease ------------------------------------------------------------------------------------------------------------- */

/* The slot used longest ago that may be taken; guesses only when they may be. */
static int32_t oldest(const tsr_experts *x, bool guesses)
{
    int32_t i = x->lru.head;
    while (i >= 0 && (x->slots[i].leased || (x->slots[i].guess && !guesses))) {
        i = x->slots[i].next;
    }
    return i;
}

/* A slot for an expert that is waited for. There is one that is not leased; at worst it is being read into. */
static int32_t claim(tsr_experts *x)
{
    for (;;) {
        int32_t i = x->free.head;
        i = i >= 0 ? i : oldest(x, false);
        i = i >= 0 ? i : x->ahead.tail;
        i = i >= 0 ? i : oldest(x, true);
        for (int32_t k = x->staged.tail; i < 0 && k >= 0; k = x->slots[k].prev) {
            i = x->slots[k].leased ? -1 : k;
        }
        if (i >= 0) {
            slot_take(x, i);
            return i;
        }
        (void)pthread_cond_wait(&x->done, &x->lock);
    }
}

/* Leases what is there and asks for the rest; returns how many have to be waited for. */
static int32_t ask(tsr_experts *x, int32_t layer, const int32_t *ids, int32_t n)
{
    int32_t misses = 0;
    for (int32_t k = 0; k < n; k++) { /* first of all, so that none of them is evicted for another */
        TSR_ASSERT(ids[k] >= 0 && ids[k] < x->experts);
        int32_t i = *where_of(x, layer, ids[k]);
        x->leased[k] = ids[k];
        if (i < 0) {
            continue;
        }
        slot *s = &x->slots[i];
        TSR_ASSERT(!s->leased); /* each once */
        s->leased = true;
        s->rank = k;
        x->guesses -= s->guess; /* no longer one */
        s->guess = false;
        if (s->state == SLOT_READY) {
            list_remove(x, &x->lru, i);
            list_push(x, &x->lru, i);
        } else {
            slot_demand(x, i);
            misses++;
        }
    }
    x->leased_count = n;
    x->leased_layer = layer;
    for (int32_t k = 0; k < n; k++) {
        if (*where_of(x, layer, ids[k]) < 0) {
            int32_t i = claim(x);
            slot_request(x, i, layer, ids[k], true);
            x->slots[i].leased = true;
            x->slots[i].rank = k;
            misses++;
        }
    }
    return misses;
}

/* Ends the lease. */
static void unlease(tsr_experts *x)
{
    for (int32_t k = 0; k < x->leased_count; k++) {
        int32_t i = *where_of(x, x->leased_layer, x->leased[k]);
        if (i >= 0) {
            x->slots[i].leased = false;
        }
    }
    x->leased_count = 0;
    x->leased_layer = -1;
}

/* Everything leased is ready: what was guessed for this layer is now known to be right or wrong. */
static void settle(tsr_experts *x, int32_t layer, int32_t misses)
{
    x->stats.asked += (uint64_t)x->leased_count;
    x->stats.misses += (uint64_t)misses;
    x->stats.hits += (uint64_t)(x->leased_count - misses);
    for (int32_t k = 0; k < x->leased_count; k++) {
        int32_t i = *where_of(x, layer, x->leased[k]);
        slot *s = &x->slots[i];
        list_remove(x, &x->lru,
                    i); /* in the order asked for, whichever was read first: what is evicted later on */
        list_push(x, &x->lru, i); /* does not depend on threads */
        x->stats.prefetch_used += s->unused;
        s->unused = false;
        s->step = x->layers[layer].step;
    }
    for (int32_t e = 0; x->guesses > 0 && e < x->experts; e++) {
        int32_t i = *where_of(x, layer, e);
        if (i >= 0 && x->slots[i].guess) {
            x->slots[i].guess = false;
            x->guesses--;
        }
    }
}

tsr_status tsr_experts_acquire(tsr_experts *x, int32_t layer, const int32_t *ids, int32_t n,
                               int32_t *taken_out, tsr_expert_table *table, tsr_err *err)
{
    TSR_ASSERT(layer >= 0 && layer < x->layer_count && x->layers[layer].ordinal >= 0);
    TSR_ASSERT(n >= 1 && n <= x->experts && x->leased_layer < 0);
    *taken_out = 0;
    *table = tsr_experts_table(x, layer);
    if (x->all) {
        x->stats.asked += (uint64_t)n;
        x->stats.hits += (uint64_t)n;
        x->leased_layer = layer;
        *taken_out = n;
        return TSR_OK;
    }
    (void)pthread_mutex_lock(&x->lock);
    while (x->staged.head >= 0) {
        upload_one(x);
    }
    x->failure = TSR_OK;
    x->layers[layer].step++;
    uint64_t start = now_ns();
    int32_t take = n < x->slot_count ? n : x->slot_count;
    int32_t misses = ask(x, layer, ids, take);
    if (misses > 0) {
        (void)wait_demanded(x, NULL, 0);
        x->stats.wait_ns += now_ns() - start;
    }
    tsr_status st = x->failure;
    if (st == TSR_OK) {
        settle(x, layer, misses);
    } else if (err != NULL) {
        *err = x->failure_err;
    }
    (void)pthread_mutex_unlock(&x->lock);
    st = st == TSR_OK ? write_table(x, layer, false, err) : st;
    if (st != TSR_OK) {
        (void)pthread_mutex_lock(&x->lock);
        unlease(x);
        (void)pthread_mutex_unlock(&x->lock);
        return st;
    }
    *taken_out = take;
    return TSR_OK;
}

void tsr_experts_release(tsr_experts *x, int32_t layer)
{
    TSR_ASSERT(layer >= 0 && x->leased_layer == layer);
    (void)pthread_mutex_lock(&x->lock);
    unlease(x);
    (void)pthread_mutex_unlock(&x->lock);
}

/* ---- ahead of time ------------------------------------------------------------------------------------------------------- */

/* The slot a guess for this layer may take, or -1: see the top of this file. */
static int32_t spare(const tsr_experts *x, int32_t layer)
{
    if (x->guesses >= x->slot_count - x->top_k) {
        return -1;
    }
    int32_t i = x->free.head >= 0 ? x->free.head : x->lru.head;
    for (; i >= 0; i = x->slots[i].next) {
        const slot *s = &x->slots[i];
        bool recent = s->layer == layer && s->step == x->layers[layer].step && s->step > 0;
        if (!s->leased && !s->guess && !recent) {
            break;
        }
    }
    return i;
}

void tsr_experts_prefetch(tsr_experts *x, int32_t layer, const int32_t *ids, int32_t n)
{
    if (x->all || layer < 0 || layer >= x->layer_count || x->layers[layer].ordinal < 0) {
        return;
    }
    (void)pthread_mutex_lock(&x->lock);
    while (x->staged.head >= 0) {
        upload_one(x);
    }
    for (int32_t k = 0; k < n; k++) {
        TSR_ASSERT(ids[k] >= 0 && ids[k] < x->experts);
        int32_t i = *where_of(x, layer, ids[k]);
        if (i >= 0 && x->slots[i].state == SLOT_READY) {
            list_remove(x, &x->lru, i);
            list_push(x, &x->lru, i);
        }
        if (i >= 0) {
            continue;
        }
        i = spare(x, layer);
        if (i < 0) {
            break;
        }
        slot_take(x, i);
        slot_request(x, i, layer, ids[k], false);
    }
    (void)pthread_mutex_unlock(&x->lock);
}

/* Asks for every expert that is not there while there are free slots; *total: bytes that will be read. */
static void ask_all(tsr_experts *x, uint64_t *total)
{
    int32_t rank = 0;
    for (int32_t l = 0; l < x->layer_count; l++) {
        for (int32_t e = 0; x->layers[l].ordinal >= 0 && e < x->experts; e++) {
            int32_t i = *where_of(x, l, e);
            if (i < 0 && x->free.head >= 0) {
                i = x->free.head;
                slot_take(x, i);
                slot_request(x, i, l, e, true);
            } else if (i >= 0 && x->slots[i].state != SLOT_READY) {
                slot_demand(x, i);
            } else {
                continue;
            }
            x->slots[i].rank = rank++;
            *total += x->layers[l].bytes;
        }
    }
}

tsr_status tsr_experts_load_all(tsr_experts *x, const tsr_progress *p, tsr_err *err)
{
    TSR_ASSERT(x->leased_layer < 0);
    (void)pthread_mutex_lock(&x->lock);
    while (x->staged.head >= 0) {
        upload_one(x);
    }
    uint64_t total = 0;
    x->failure = TSR_OK;
    x->loaded = 0;
    ask_all(x, &total);
    bool finished = wait_demanded(x, p, total);
    tsr_status st = x->failure;
    if (st != TSR_OK && err != NULL) {
        *err = x->failure_err;
    }
    bool all = (int64_t)x->stats.resident == x->total;
    (void)pthread_mutex_unlock(&x->lock);
    if (st == TSR_OK && !finished) {
        st = TSR_ERR(err, TSR_E_CANCELLED, "reading experts was cancelled");
    }
    for (int32_t l = 0; st == TSR_OK && all && l < x->layer_count; l++) {
        st = x->layers[l].ordinal >= 0 ? write_table(x, l, true, err) : TSR_OK;
    }
    x->all = st == TSR_OK && all;
    return st;
}

bool tsr_experts_all_resident(const tsr_experts *x)
{
    return x->all;
}

void tsr_experts_stats_get(const tsr_experts *x, tsr_experts_stats *out)
{
    pthread_mutex_t *lock = (pthread_mutex_t *)(uintptr_t)&x->lock; /* invisible to the caller */
    (void)pthread_mutex_lock(lock);
    *out = x->stats;
    (void)pthread_mutex_unlock(lock);
    out->resident_bytes = out->resident * x->slot_bytes;
}
