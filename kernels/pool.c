/* pool.c - threads for host kernels. Workers spin for a short while between jobs (a decode step has hundreds of
 * them), then sleep. */
#include "kernels/backend_priv.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define SPINS 4000

typedef struct seat {
    tsr_queue *q;
    int worker;
    pthread_t thread;
} seat;

/* The gate of the current job: its number in the upper half, whether it may still be entered, how many workers are inside.
 * The caller waits for those who came in only: one that the system keeps from running holds nobody up. */
#define GATE_OPEN ((uint64_t)1 << 31)
#define GATE_INSIDE (GATE_OPEN - 1)

struct tsr_queue {
    int workers;
    void **scratch;
    seat *seats;                                      /* [1, workers) have threads; 0 is the caller */
    void (*fn)(void *payload, int64_t i, int worker); /* these three change while nobody is inside */
    void *payload;
    int64_t n;
    _Atomic int64_t next; /* index to take */
    _Atomic uint64_t gate;
    _Atomic bool stop;
    _Atomic int asleep;
    pthread_mutex_t lock;
    pthread_cond_t wake;
};

static void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void take_all(tsr_queue *q, int worker)
{
    for (;;) {
        int64_t i = atomic_fetch_add_explicit(&q->next, 1, memory_order_relaxed);
        if (i >= q->n) {
            return;
        }
        q->fn(q->payload, i, worker);
    }
}

static bool something_new(tsr_queue *q, uint32_t seen)
{
    uint64_t gate = atomic_load(&q->gate);
    return (gate & GATE_OPEN && (uint32_t)(gate >> 32) != seen) || atomic_load(&q->stop);
}

static void wait_for_job(tsr_queue *q, uint32_t seen)
{
    for (int i = 0; i < SPINS; i++) {
        if (something_new(q, seen)) {
            return;
        }
        pause_cpu();
    }
    (void)pthread_mutex_lock(&q->lock);
    atomic_fetch_add(&q->asleep, 1);
    while (!something_new(q, seen)) {
        (void)pthread_cond_wait(&q->wake, &q->lock);
    }
    atomic_fetch_sub(&q->asleep, 1);
    (void)pthread_mutex_unlock(&q->lock);
}

static void *work(void *p)
{
    seat *s = p;
    tsr_queue *q = s->q;
    uint32_t seen = 0;
    while (!atomic_load(&q->stop)) {
        wait_for_job(q, seen);
        uint64_t gate = atomic_load_explicit(&q->gate, memory_order_acquire);
        if (gate & GATE_OPEN && atomic_compare_exchange_strong(&q->gate, &gate, gate + 1)) {
            seen = (uint32_t)(gate >> 32);
            take_all(q, s->worker);
            atomic_fetch_sub_explicit(&q->gate, 1, memory_order_release);
        }
    }
    return NULL;
}

static void wake_sleepers(tsr_queue *q)
{
    if (atomic_load(&q->asleep) > 0) {
        (void)pthread_mutex_lock(&q->lock);
        (void)pthread_cond_broadcast(&q->wake);
        (void)pthread_mutex_unlock(&q->lock);
    }
}

void tsr_parallel(tsr_queue *q, int64_t n, void (*fn)(void *payload, int64_t i, int worker), void *payload)
{
    if (n <= 1 || q->workers == 1) {
        for (int64_t i = 0; i < n; i++) {
            fn(payload, i, 0);
        }
        return;
    }
    q->fn = fn;
    q->payload = payload;
    q->n = n;
    atomic_store_explicit(&q->next, 0, memory_order_relaxed);
    uint64_t job = (atomic_load_explicit(&q->gate, memory_order_relaxed) >> 32) + 1;
    atomic_store(&q->gate, job << 32 | GATE_OPEN);
    wake_sleepers(q);
    take_all(q, 0);
    atomic_fetch_and(&q->gate, ~GATE_OPEN);
    for (int spins = 0; (atomic_load_explicit(&q->gate, memory_order_acquire) & GATE_INSIDE) > 0; spins++) {
        if (spins < SPINS) {
            pause_cpu();
        } else {
            (void)usleep(20);
        }
    }
}

int tsr_workers(const tsr_queue *q)
{
    return q->workers;
}

void *tsr_scratch(tsr_queue *q, int worker)
{
    return q->scratch[worker];
}

void tsr_pool_close(tsr_queue **pq)
{
    tsr_queue *q = *pq;
    if (q == NULL) {
        return;
    }
    *pq = NULL;
    atomic_store(&q->stop, true);
    wake_sleepers(q);
    for (int i = 1; i < q->workers; i++) {
        (void)pthread_join(q->seats[i].thread, NULL);
    }
    for (int i = 0; i < q->workers; i++) {
        if (q->scratch[i] != NULL) {
            (void)munmap(q->scratch[i], TSR_SCRATCH_BYTES);
        }
    }
    (void)pthread_mutex_destroy(&q->lock);
    (void)pthread_cond_destroy(&q->wake);
    free(q->scratch);
    free(q->seats);
    free(q);
}

tsr_status tsr_pool_open(tsr_queue **out, int threads, tsr_err *err)
{
    *out = NULL;
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    int n = threads > 0 ? threads : processors > 0 ? (int)processors : 1;
    tsr_queue *q = calloc(1, sizeof *q);
    if (q == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    (void)pthread_mutex_init(&q->lock, NULL);
    (void)pthread_cond_init(&q->wake, NULL);
    q->scratch = calloc((size_t)n, sizeof *q->scratch);
    q->seats = calloc((size_t)n, sizeof *q->seats);
    bool ok = q->scratch != NULL && q->seats != NULL;
    for (int i = 0; ok && i < n; i++) {
        void *p = mmap(NULL, TSR_SCRATCH_BYTES, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        ok = p != MAP_FAILED;
        q->scratch[i] = ok ? p : NULL;
        q->seats[i] = (seat){ .q = q, .worker = i };
        ok = ok && (i == 0 || pthread_create(&q->seats[i].thread, NULL, work, &q->seats[i]) == 0);
        q->workers = ok ? i + 1 : q->workers;
        if (!ok && q->scratch[i] != NULL) {
            (void)munmap(q->scratch[i], TSR_SCRATCH_BYTES);
        }
    }
    if (!ok) {
        tsr_pool_close(&q);
        TSR_FAIL(err, TSR_E_LIMIT, "cannot start %d threads", n);
    }
    *out = q;
    return TSR_OK;
}
