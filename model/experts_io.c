/* experts_io.c - requests for experts and the threads that serve them: what is waited for before what is guessed. */
#include "model/experts_priv.h"

#include <stdlib.h>
#include <string.h>

/* ---- lists ------------------------------------------------------------------------------------------------------- */

static void link_between(tsr_experts *x, slot_list *l, int32_t prev, int32_t i, int32_t next)
{
    slot *s = x->slots;
    s[i].prev = prev;
    s[i].next = next;
    *(prev >= 0 ? &s[prev].next : &l->head) = i;
    *(next >= 0 ? &s[next].prev : &l->tail) = i;
}

void list_push(tsr_experts *x, slot_list *l, int32_t i)
{
    link_between(x, l, l->tail, i, -1);
}

void list_push_front(tsr_experts *x, slot_list *l, int32_t i)
{
    link_between(x, l, -1, i, l->head);
}

void list_remove(tsr_experts *x, slot_list *l, int32_t i)
{
    slot *s = x->slots;
    *(s[i].prev >= 0 ? &s[s[i].prev].next : &l->head) = s[i].next;
    *(s[i].next >= 0 ? &s[s[i].next].prev : &l->tail) = s[i].prev;
    s[i].prev = s[i].next = -1;
}

static slot_list *list_of(tsr_experts *x, const slot *s)
{
    switch ((slot_state)s->state) {
    case SLOT_FREE: return &x->free;
    case SLOT_QUEUED: return s->demand ? &x->demand : &x->ahead;
    case SLOT_STAGED: return &x->staged;
    case SLOT_READY: return &x->lru;
    case SLOT_READING: break;
    }
    return NULL;
}

/* ---- requests ------------------------------------------------------------------------------------------------------ */

void slot_request(tsr_experts *x, int32_t i, int32_t layer, int32_t expert, bool demand)
{
    slot *s = &x->slots[i];
    *s = (slot){ .layer = layer,
                 .expert = expert,
                 .prev = -1,
                 .next = -1,
                 .stage = -1,
                 .state = SLOT_QUEUED,
                 .demand = demand,
                 .ahead = !demand,
                 .guess = !demand };
    *where_of(x, layer, expert) = i;
    x->pending += demand;
    x->guesses += !demand;
    list_push(x, list_of(x, s), i);
    (void)pthread_cond_signal(&x->work);
}

void slot_demand(tsr_experts *x, int32_t i)
{
    slot *s = &x->slots[i];
    TSR_ASSERT(!s->demand && (s->state == SLOT_QUEUED || s->state == SLOT_READING));
    if (s->state == SLOT_QUEUED) {
        list_remove(x, &x->ahead, i);
        s->ahead = false; /* nothing was gained by the guess */
        list_push(x, &x->demand, i);
    }
    s->demand = true;
    x->pending++;
}

static void unguess(tsr_experts *x, slot *s)
{
    x->guesses -= s->guess;
    s->guess = false;
}

/* Bytes of the slot are no longer those of an expert. */
static void forget(tsr_experts *x, int32_t i)
{
    slot *s = &x->slots[i];
    if (s->layer >= 0) {
        *where_of(x, s->layer, s->expert) = -1;
    }
    if (s->stage >= 0) {
        x->free_stages[x->free_stage_count++] = s->stage;
        (void)pthread_cond_signal(&x->work);
    }
    unguess(x, s);
    x->pending -= s->demand;
    *s = (slot){ .layer = -1, .prev = -1, .next = -1, .stage = -1, .state = SLOT_FREE };
}

void slot_take(tsr_experts *x, int32_t i)
{
    slot *s = &x->slots[i];
    list_remove(x, list_of(x, s), i);
    if (s->state == SLOT_READY || s->state == SLOT_STAGED) {
        x->stats.resident--;
        x->stats.evicted++;
    }
    forget(x, i);
}

void slot_drop(tsr_experts *x, int32_t i)
{
    forget(x, i);
    list_push(x, &x->free, i);
}

static void note_failure(tsr_experts *x, const slot *s, tsr_status st, const tsr_err *err)
{
    if (s->demand && (x->failure == TSR_OK || s->rank < x->failure_rank)) {
        x->failure = st;
        x->failure_rank = s->rank;
        x->failure_err = *err;
    }
}

static void ready(tsr_experts *x, int32_t i)
{
    slot *s = &x->slots[i];
    s->state = SLOT_READY;
    x->pending -= s->demand;
    x->loaded += s->demand ? x->layers[s->layer].bytes : 0;
    s->demand = false;
    list_push(x, &x->lru, i);
}

/* ---- the calling thread ------------------------------------------------------------------------------------------ */

void upload_one(tsr_experts *x)
{
    int32_t i = x->staged.head;
    slot *s = &x->slots[i];
    const char *from = x->stages + (uint64_t)s->stage * x->slot_bytes;
    char *to = slot_memory(x, i);
    list_remove(x, &x->staged, i);
    s->state = SLOT_READING;
    (void)pthread_mutex_unlock(&x->lock);
    tsr_status st = x->b->upload(x->b, to, from, x->layers[s->layer].bytes);
    (void)pthread_mutex_lock(&x->lock);
    if (st != TSR_OK) {
        tsr_err err;
        st = TSR_ERR(&err, TSR_E_IO, "%s: layer %d: expert %d cannot be copied to the device", x->b->name,
                     s->layer, s->expert);
        note_failure(x, s, st, &err);
        x->stats.resident--;
        x->stats.evicted++;
        slot_drop(x, i);
        return;
    }
    for (int p = 0; p < TSR_PART_COUNT; p++) {
        s->part[p] = s->part[p] != NULL ? to + ((const char *)s->part[p] - from) : NULL;
    }
    x->free_stages[x->free_stage_count++] = s->stage;
    s->stage = -1;
    ready(x, i);
    (void)pthread_cond_signal(&x->work);
}

static void drop_queued(tsr_experts *x)
{
    while (x->demand.head >= 0) {
        int32_t i = x->demand.head;
        list_remove(x, &x->demand, i);
        slot_drop(x, i);
    }
}

bool wait_demanded(tsr_experts *x, const tsr_progress *p, uint64_t total)
{
    bool cancelled = false;
    for (;;) {
        if (x->failure != TSR_OK || cancelled) {
            drop_queued(x);
        }
        if (x->pending == 0) {
            return !cancelled;
        }
        if (x->staged.head >= 0) {
            upload_one(x);
        } else {
            (void)pthread_cond_wait(&x->done, &x->lock);
        }
        if (p != NULL && x->failure == TSR_OK && !cancelled) {
            uint64_t so_far = x->loaded;
            (void)pthread_mutex_unlock(&x->lock);
            if (p->report != NULL) {
                p->report(p->payload, "experts", so_far, total);
            }
            cancelled = p->cancel != NULL && *p->cancel != 0;
            (void)pthread_mutex_lock(&x->lock);
        }
    }
}

/* ---- reading threads ---------------------------------------------------------------------------------------------- */

/* The next request, out of its queue; -1: none, or no memory to read it into. */
static int32_t next_request(tsr_experts *x)
{
    if (!x->b->host && x->free_stage_count == 0) {
        return -1;
    }
    slot_list *l = x->demand.head >= 0 ? &x->demand : &x->ahead;
    int32_t i = l->head;
    if (i >= 0) {
        list_remove(x, l, i);
        x->slots[i].state = SLOT_READING;
        if (!x->b->host) {
            x->slots[i].stage = x->free_stages[--x->free_stage_count];
        }
    }
    return i;
}

/* A source that points elsewhere has broken its contract. */
static void check_parts(const tsr_experts *x, const expert_layer *l, const char *dst,
                        const void *const part[TSR_PART_COUNT])
{
    for (int p = 0; p < TSR_PART_COUNT; p++) {
        TSR_ASSERT((part[p] != NULL) == (l->part_bytes[p] > 0));
        const char *at = part[p];
        TSR_ASSERT(at == NULL || (at >= dst && (uint64_t)(at - dst) <= x->slot_bytes &&
                                  l->part_bytes[p] <= x->slot_bytes - (uint64_t)(at - dst)));
    }
}

/* Reads a request; the lock is given up meanwhile. */
static void serve(tsr_experts *x, int32_t i)
{
    slot *s = &x->slots[i];
    const void *part[TSR_PART_COUNT];
    uint64_t bytes = 0;
    tsr_err err;
    int32_t layer = s->layer, expert = s->expert;
    char *dst = x->b->host ? slot_memory(x, i) : x->stages + (uint64_t)s->stage * x->slot_bytes;
    (void)pthread_mutex_unlock(&x->lock);
    tsr_status st = x->src->read_expert(x->src->payload, layer, expert, dst, x->slot_bytes, part, &bytes,
                                        &err);
    if (st == TSR_OK) {
        check_parts(x, &x->layers[layer], dst, part);
    }
    (void)pthread_mutex_lock(&x->lock);
    if (st != TSR_OK) {
        note_failure(x, s, st,
                     &err); /* what nobody waits for is forgotten, and read again when it is wanted */
        slot_drop(x, i);
        if (x->failure != TSR_OK) {
            drop_queued(x); /* whoever waits for them has failed */
        }
        return;
    }
    memcpy((void *)s->part, part, sizeof part);
    x->stats.bytes_read += bytes;
    x->stats.resident++;
    x->stats.prefetched += s->ahead;
    s->unused = s->ahead;
    if (x->b->host) {
        ready(x, i);
        return;
    }
    s->state = SLOT_STAGED;
    if (s->demand) {
        list_push_front(x, &x->staged, i);
    } else {
        list_push(x, &x->staged, i);
    }
}

static void *reader(void *payload)
{
    tsr_experts *x = payload;
    (void)pthread_mutex_lock(&x->lock);
    while (!x->stop) {
        int32_t i = next_request(x);
        if (i < 0) {
            (void)pthread_cond_wait(&x->work, &x->lock);
            continue;
        }
        serve(x, i);
        (void)pthread_cond_signal(&x->done);
    }
    (void)pthread_mutex_unlock(&x->lock);
    return NULL;
}

tsr_status threads_start(tsr_experts *x, int count, tsr_err *err)
{
    x->threads = calloc((size_t)count, sizeof *x->threads);
    if (x->threads == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    for (; x->thread_count < count; x->thread_count++) {
        if (pthread_create(&x->threads[x->thread_count], NULL, reader, x) != 0) {
            TSR_FAIL(err, TSR_E_LIMIT, "cannot start %d threads that read experts", count);
        }
    }
    return TSR_OK;
}

void threads_stop(tsr_experts *x)
{
    (void)pthread_mutex_lock(&x->lock);
    x->stop = true;
    (void)pthread_cond_broadcast(&x->work);
    (void)pthread_mutex_unlock(&x->lock);
    for (int i = 0; i < x->thread_count; i++) {
        (void)pthread_join(x->threads[i], NULL);
    }
    free(x->threads);
}
