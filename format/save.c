/* save.c - tsr_save: prepares the folder, feeds the workers, commits or cleans up. */
#include "format/save_job.h"
#include "format/codec.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define DEFAULT_MEM_LIMIT ((uint64_t)256 << 20)

uint64_t save_now_ns(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---- sizes ---------------------------------------------------------------------------------------------------- */

uint64_t save_disk_bytes(const save_plan *p, const tsr_save_opts *o)
{
    uint64_t bytes = 65536, in_experts = 0;
    for (uint32_t i = 0; i < p->tensor_count; i++) {
        const save_tensor *t = &p->tensors[i];
        uint64_t items = t->d.expert_count > 0 ? t->d.expert_count : 1;
        uint64_t payload = items * t->k.item_bytes;
        bytes += t->filtered ? payload / 5 * 3 : payload;
        bytes += 1024 + strlen(t->d.name) * 3 + 256;
        bytes += items * t->k.chunks * (2 * sizeof(tsr_extent_rec) + 24);
        if (t->d.expert_count > 0 && t->k.chunk_bytes >= 4096) {
            in_experts += items * t->k.chunks * 2048; /* half of the alignment, on average */
        }
    }
    bytes += in_experts + (uint64_t)p->file_count * 16384;
    for (uint32_t i = 0; i < o->asset_count; i++) {
        bytes += o->assets[i].bytes + 4096;
    }
    return bytes + (o->config_json != NULL ? strlen(o->config_json) * 2 : 0);
}

static int thread_count(const tsr_save_opts *o)
{
    long n = o->threads > 0 ? o->threads : sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : n > SAVE_THREADS_MAX ? SAVE_THREADS_MAX : (int)n;
}

tsr_status save_buffer_budget(const save_plan *p, const tsr_save_opts *o, bool snapshot, uint64_t *out,
                              uint64_t *total, tsr_err *err)
{
    uint64_t limit = o->mem_limit > 0 ? o->mem_limit : DEFAULT_MEM_LIMIT;
    uint64_t threads = (uint64_t)thread_count(o), chunk = p->largest_chunk + sizeof(save_buffer);
    uint64_t largest = p->largest_chunk > SAVE_BATCH_BYTES ? p->largest_chunk : SAVE_BATCH_BYTES;
    uint64_t coders = p->any_filtered ? threads * (tsr_codec_bound(largest) + largest + (8u << 20)) : 0;
    if (limit < coders + chunk) {
        TSR_FAIL(err, TSR_E_LIMIT,
                 "needs %llu bytes of memory for one chunk and %d threads, the limit is %llu (--mem-limit)",
                 (unsigned long long)(coders + chunk), thread_count(o), (unsigned long long)limit);
    }
    uint64_t useful = snapshot ? limit - coders : (2 * threads + 2) * (largest + sizeof(save_buffer));
    *out = limit - coders < useful ? limit - coders : useful;
    *total = *out + coders;
    return TSR_OK;
}

tsr_status tsr_save_plan_make(tsr_save_plan *out, const tsr_tensor_decl *decls, uint32_t count,
                              const tsr_save_opts *o, tsr_err *err)
{
    save_plan p;
    uint64_t buffers;
    *out = (tsr_save_plan){ 0 };
    TSR_TRY(save_plan_make(&p, decls, count, o, err));
    tsr_status st = save_buffer_budget(&p, o, false, &buffers, &out->buffer_bytes, err);
    out->payload_bytes = p.payload_bytes;
    out->disk_bytes = save_disk_bytes(&p, o);
    out->extent_count = p.extent_count;
    out->file_count = p.file_count;
    save_plan_free(&p);
    return st;
}

/* ---- set-up ------------------------------------------------------------------------------------------------------ */

static tsr_status copy_text(tsr_arena *a, const char **text, tsr_err *err)
{
    if (*text != NULL && (*text = tsr_arena_strndup(a, *text, strlen(*text))) == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    return TSR_OK;
}

static tsr_status check_asset_name(const char *name, tsr_err *err)
{
    const char *p = name;
    size_t n = strlen(name);
    bool bad = n == 0 || n > TSR_NAME_BYTES_MAX || name[0] == '/';
    while (!bad && *p != '\0') {
        size_t part = strcspn(p, "/");
        bad = part == 0 || (part == 1 && p[0] == '.') || (part == 2 && p[0] == '.' && p[1] == '.');
        p += part;
        if (*p == '/') {
            p++;
            bad = bad || *p == '\0';
        }
    }
    if (bad || !manifest_can_hold(name)) {
        TSR_FAIL(err, TSR_E_FORMAT,
                 "asset %.200s: not a plain relative name in UTF-8 (rename it, or leave it out)", name);
    }
    return TSR_OK;
}

/* The caller may free its options once a job runs in the background (snapshot); else assets in memory stay there. */
static tsr_status copy_opts(tsr_save_job *j, const tsr_save_opts *o, bool snapshot, tsr_err *err)
{
    tsr_arena *a = j->plan.arena;
    j->o = *o;
    j->o.partitions = NULL; /* used up by the plan */
    const char **texts[] = { &j->o.parent,      &j->o.resume_key, &j->o.arch,
                             &j->o.config_json, &j->o.train_json, &j->o.lineage_json };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        TSR_TRY(copy_text(a, texts[i], err));
    }
    tsr_asset *assets = tsr_arena_alloc(a, (size_t)o->asset_count * sizeof *assets);
    if (assets == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    for (uint32_t i = 0; i < o->asset_count; i++) {
        assets[i] = o->assets[i];
        TSR_TRY(check_asset_name(assets[i].name, err)); /* now, not after hours of writing */
        TSR_TRY(copy_text(a, &assets[i].name, err));
        TSR_TRY(copy_text(a, &assets[i].path, err));
        if (assets[i].path == NULL && snapshot) {
            void *data = tsr_arena_alloc(a, assets[i].bytes);
            if (data == NULL) {
                TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
            }
            if (assets[i].bytes > 0) {
                memcpy(data, o->assets[i].data, assets[i].bytes);
            }
            assets[i].data = data;
        }
    }
    j->o.assets = assets;
    return TSR_OK;
}

static tsr_status check_space(tsr_save_job *j, uint64_t already, tsr_err *err)
{
    uint64_t need = save_disk_bytes(&j->plan, &j->o), have;
    need = need > already ? need - already : 0;
    for (uint32_t i = 0; i < j->plan.file_count; i++) {
        if (j->plan.files[i].link_from >= 0) {
            need -= j->plan.files[i].payload_bytes < need ? j->plan.files[i].payload_bytes : need;
        }
    }
    if (j->o.zeros) {
        need = need > j->plan.payload_bytes ? need - j->plan.payload_bytes : 0;
    }
    if (j->o.parent != NULL) {
        return TSR_OK; /* how much is shared with the parent shows only while writing */
    }
    TSR_TRY(tsr_fs_free_bytes(j->temp, &have, err));
    if (have < need) {
        TSR_FAIL(err, TSR_E_IO,
                 "%s: No space left on device: need %llu bytes, %llu free (free some space and run the"
                 " same command again)",
                 j->real, (unsigned long long)need, (unsigned long long)have);
    }
    return TSR_OK;
}

/* Shards that an interrupted run finished. Half-written ones are removed. */
static tsr_status find_finished(tsr_save_job *j, uint64_t *bytes, tsr_err *err)
{
    for (uint32_t i = 0; i < j->plan.file_count; i++) {
        char *path, *part;
        if (asprintf(&path, "%s/%s", j->temp, j->plan.files[i].name) < 0) {
            TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
        }
        if (asprintf(&part, "%s.part", path) < 0) {
            free(path);
            TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
        }
        tsr_status st = tsr_fs_remove_tree(part, err);
        if (st == TSR_OK && tsr_fs_exists(path)) {
            if (j->plan.files[i].link_from < 0 &&
                save_shard_check(&j->plan, i, path, j->extents, &j->recs[i], NULL) == TSR_OK) {
                j->finished[i] = true;
                *bytes += j->recs[i].file_bytes;
                j->written += j->plan.files[i].payload_bytes;
            } else {
                st = tsr_fs_remove_tree(path, err); /* damaged, or for another plan: written anew */
            }
        }
        free(path);
        free(part);
        TSR_TRY(st);
    }
    return TSR_OK;
}

/* A resumable job's folder: locked, for the same source and options. */
static tsr_status enter_partial(tsr_save_job *j, tsr_err *err)
{
    char *lock = NULL, *note = NULL;
    tsr_status st;
    const char *key = j->o.resume_key != NULL ? j->o.resume_key : "";
    if (asprintf(&lock, "%s/lock", j->temp) < 0 || asprintf(&note, "%s/resume.txt", j->temp) < 0) {
        free(lock);
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    if (!tsr_fs_exists(j->temp)) {
        TSR_GO(tsr_fs_mkdirs(j->temp, err));
    }
    TSR_GO(tsr_fs_lock(lock, &j->lock_fd, err));
    if (!j->o.restart) {
        st = tsr_fs_check_note(note, key, j->real, j->temp, err);
        if (st != TSR_E_MISSING) {
            goto out;
        }
    }
    tsr_fs_unlock(&j->lock_fd);
    TSR_GO(tsr_fs_remove_tree(j->temp, err));
    TSR_GO(tsr_fs_mkdirs(j->temp, err));
    TSR_GO(tsr_fs_lock(lock, &j->lock_fd, err));
    st = tsr_fs_replace_file(note, key, strlen(key), err); /* whole or not at all */
out:
    free(lock);
    free(note);
    return st;
}

static tsr_status prepare(tsr_save_job *j, const char *path, tsr_err *err)
{
    const save_plan *p = &j->plan;
    TSR_TRY(tsr_fs_target(path, j->o.resumable, &j->real, &j->temp, err));
    j->extents = calloc(p->extent_count + 1, sizeof *j->extents);
    j->recs = calloc((size_t)p->file_count + 1, sizeof *j->recs);
    j->finished = calloc((size_t)p->file_count + 1, sizeof *j->finished);
    j->shards = calloc((size_t)p->file_count + 1, sizeof *j->shards);
    j->remaining = calloc((size_t)p->file_count + 1, sizeof *j->remaining);
    if (j->extents == NULL || j->recs == NULL || j->finished == NULL || j->shards == NULL ||
        j->remaining == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory for %llu extents", (unsigned long long)p->extent_count);
    }
    uint64_t already = 0;
    if (j->o.resumable) {
        TSR_TRY(enter_partial(j, err));
        TSR_TRY(find_finished(j, &already, err));
    } else {
        char *parent = strdup(j->temp);
        if (parent == NULL) {
            TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
        }
        char *slash = strrchr(parent, '/');
        if (slash != NULL) {
            slash[slash == parent ? 1 : 0] = '\0';
        }
        save_sweep(slash != NULL ? parent : ".");
        tsr_status st = slash != NULL ? tsr_fs_mkdirs(parent, err) : TSR_OK;
        free(parent);
        TSR_TRY(st);
        TSR_TRY(tsr_fs_remove_tree(j->temp, err)); /* of an earlier process with our number */
        TSR_TRY(tsr_fs_mkdir(j->temp, err));
    }
    TSR_TRY(check_space(j, already, err));
    return j->o.parent != NULL ? save_parent_open(j, err) : TSR_OK;
}

/* ---- feeding the workers --------------------------------------------------------------------------------------------- */

/* A buffer of at least n bytes, waiting while too many are in flight. NULL: the job failed. */
static save_buffer *take_buffer(tsr_save_job *j, size_t n)
{
    save_buffer *b = NULL;
    uint64_t waited = 0;
    (void)pthread_mutex_lock(&j->mu);
    while (j->st == TSR_OK) {
        for (save_buffer **p = &j->spare; *p != NULL; p = &(*p)->next) {
            if ((*p)->bytes >= n && (*p)->bytes / 4 <= n + 4096) {
                b = *p;
                *p = b->next;
                break;
            }
        }
        if (b != NULL) {
            break;
        }
        if (j->buffer_used == 0 || j->buffer_used + n <= j->buffer_limit) {
            while (j->spare != NULL) { /* none of them fits: make room */
                save_buffer *old = j->spare;
                j->spare = old->next;
                free(old);
            }
            b = malloc(sizeof *b + n);
            if (b == NULL) {
                __atomic_store_n(&j->st,
                                 TSR_ERR(&j->err, TSR_E_LIMIT, "out of memory for a buffer of %zu bytes", n),
                                 __ATOMIC_RELEASE);
                break;
            }
            b->bytes = n;
            break;
        }
        uint64_t from = save_now_ns();
        (void)pthread_cond_wait(&j->room, &j->mu);
        waited += save_now_ns() - from;
    }
    if (b != NULL) {
        j->buffer_used += b->bytes;
    }
    j->stall_ns += waited;
    (void)pthread_mutex_unlock(&j->mu);
    return b;
}

static void enqueue(tsr_save_job *j, save_batch *b)
{
    (void)pthread_mutex_lock(&j->mu);
    b->ticket = j->tickets++;
    b->next = NULL;
    if (j->tail != NULL) {
        j->tail->next = b;
    } else {
        j->head = b;
    }
    j->tail = b;
    (void)pthread_cond_signal(&j->work);
    (void)pthread_mutex_unlock(&j->mu);
}

static void hand_over(tsr_save_job *j)
{
    if (j->gathered != NULL) {
        enqueue(j, j->gathered);
        j->gathered = NULL;
    }
}

static bool is_small(const tsr_save_job *j, size_t n)
{
    return j->o.zeros || n <= j->batch_bytes / 4;
}

/* Where the next item, of n stored bytes, goes in j->gathered: it becomes part of the batch by counting it. *out
 * NULL: the failure is on record. */
static tsr_status gather(tsr_save_job *j, uint32_t file, size_t n, save_item **out, tsr_err *err)
{
    bool small = is_small(j, n);
    save_batch *b = j->gathered;
    *out = NULL;
    if (b != NULL &&
        (!small || b->count == SAVE_BATCH_ITEMS || (b->buf != NULL && n > b->buf->bytes - b->used))) {
        hand_over(j); /* before waiting for a buffer: this batch's may be the one to wait for */
        b = NULL;
    }
    if (b == NULL) {
        b = calloc(1, sizeof *b + (small ? SAVE_BATCH_ITEMS : 1) * sizeof *b->items);
        if (b == NULL) {
            TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
        }
        b->file = file;
        if (!j->o.zeros) {
            b->buf = take_buffer(j, small ? j->batch_bytes : n);
            if (b->buf == NULL) {
                free(b);
                return TSR_OK;
            }
        }
        j->gathered = b;
    }
    *out = &b->items[b->count];
    (*out)->data = b->buf != NULL ? b->buf->data + b->used : NULL;
    return TSR_OK;
}

static tsr_status feed_slot(tsr_save_job *j, const save_slot *s, tsr_err *err)
{
    tsr_extent_info x = { 0 };
    save_item *it;
    size_t n = s->raw_bytes;
    if (j->source.describe != NULL) {
        TSR_TRY(j->source.describe(j->source.payload, s, &x, err));
        n = x.stored_bytes;
    }
    TSR_TRY(gather(j, s->file, n, &it, err));
    if (it == NULL) {
        return TSR_OK;
    }
    it->slot = *s;
    it->x = x;
    if (it->data != NULL && j->source.describe != NULL) {
        TSR_TRY(j->source.stored(j->source.payload, s, &x, it->data, err));
    } else if (it->data != NULL) {
        tsr_slot slot = {
            .tensor = s->tensor, .item = s->item, .off = s->item_offset, .bytes = s->payload_bytes
        };
        TSR_TRY(j->source.fill(j->source.payload, &slot, it->data, err));
    }
    save_batch *b = j->gathered;
    size_t aligned = (n + 15) & ~(size_t)15;
    b->count++;
    if (b->buf != NULL) {
        b->used = aligned < b->buf->bytes - b->used ? b->used + aligned : b->buf->bytes;
    }
    if (!is_small(j, n)) {
        hand_over(j);
    }
    return TSR_OK;
}

static tsr_status feed_file(tsr_save_job *j, uint32_t file, tsr_err *err)
{
    save_cursor c = { 0 };
    save_slot s;
    bool link = j->plan.files[file].link_from >= 0;
    save_batch *opener = calloc(1, sizeof *opener);
    if (opener == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    opener->opens = true;
    opener->file = file;
    j->remaining[file] = 1 + (link ? 0 : j->plan.files[file].slot_count);
    enqueue(j, opener);
    while (!link && save_next_slot(&j->plan, file, &c, &s)) {
        if (j->o.progress.cancel != NULL && *j->o.progress.cancel != 0) {
            TSR_FAIL(err, TSR_E_CANCELLED, "%s: stopped%s", j->real,
                     j->o.resumable ? "; the same command continues it" : "");
        }
        TSR_TRY(feed_slot(j, &s, err));
        if (__atomic_load_n(&j->st, __ATOMIC_RELAXED) != TSR_OK) {
            break;
        }
        if (j->o.progress.report != NULL) {
            uint64_t done = __atomic_load_n(&j->written, __ATOMIC_RELAXED);
            j->o.progress.report(j->o.progress.payload, "write", done, j->plan.payload_bytes);
        }
    }
    hand_over(j);
    return TSR_OK;
}

static void feed(tsr_save_job *j)
{
    tsr_err err;
    for (uint32_t i = 0; i < j->plan.file_count; i++) {
        if (j->finished[i]) {
            continue;
        }
        if (__atomic_load_n(&j->st, __ATOMIC_RELAXED) != TSR_OK) {
            break;
        }
        tsr_status st = feed_file(j, i, &err);
        if (st != TSR_OK) {
            save_fail(j, st, &err);
            break;
        }
    }
    (void)pthread_mutex_lock(&j->mu);
    j->no_more = true;
    (void)pthread_cond_broadcast(&j->work);
    (void)pthread_mutex_unlock(&j->mu);
}

/* ---- the end ------------------------------------------------------------------------------------------------------------- */

static void clean_up(tsr_save_job *j)
{
    for (uint32_t i = 0; j->shards != NULL && i < j->plan.file_count; i++) {
        save_shard_abort(&j->shards[i]);
    }
    bool keep = j->o.resumable && (j->st == TSR_E_CANCELLED || j->st == TSR_E_CONFLICT);
    if (j->temp != NULL && !keep) {
        TSR_IGNORE(tsr_fs_remove_tree(j->temp, NULL)); /* the save's own error matters more */
    }
}

static void *finish(void *job)
{
    tsr_save_job *j = job;
    tsr_err err;
    for (int i = 0; i < j->worker_count; i++) {
        (void)pthread_join(j->workers[i], NULL);
    }
    if (j->st == TSR_OK) {
        tsr_status st = save_commit(j, &err);
        if (st != TSR_OK) {
            save_fail(j, st, &err);
        }
    }
    if (j->st != TSR_OK) {
        clean_up(j);
    }
    tsr_fs_unlock(&j->lock_fd);
    return NULL;
}

static void free_job(tsr_save_job **out)
{
    tsr_save_job *j = *out;
    if (j->gathered != NULL) { /* a failure while feeding */
        free(j->gathered->buf);
        free(j->gathered);
    }
    while (j->head != NULL) { /* fed after the workers had stopped for a failure */
        save_batch *b = j->head;
        j->head = b->next;
        free(b->buf);
        free(b);
    }
    while (j->spare != NULL) {
        save_buffer *b = j->spare;
        j->spare = b->next;
        free(b);
    }
    tsr_ckpt_close(&j->parent);
    free(j->parent_tensor);
    free(j->parent_file);
    free(j->same);
    free(j->extents);
    free(j->recs);
    free(j->finished);
    free(j->shards);
    free(j->remaining);
    free(j->real);
    free(j->temp);
    (void)pthread_mutex_destroy(&j->mu);
    (void)pthread_cond_destroy(&j->room);
    (void)pthread_cond_destroy(&j->work);
    (void)pthread_cond_destroy(&j->turn);
    save_plan_free(&j->plan);
    free(j);
    *out = NULL;
}

/* Linked files keep their places: their extents and heads come from the source's index. */
static tsr_status take_links(tsr_save_job *j, tsr_err *err)
{
    for (uint32_t i = 0; i < j->plan.file_count; i++) {
        const save_file *f = &j->plan.files[i];
        if (f->link_from < 0) {
            continue;
        }
        const tsr_index *ix = tsr_ckpt_index(j->source.link_source);
        const char *name;
        TSR_TRY(tsr_ckpt_check_file(j->source.link_source, (uint32_t)f->link_from, err));
        TSR_TRY(tsr_index_file(ix, (uint32_t)f->link_from, &j->recs[i], &name, err));
        j->recs[i].partition = f->partition;
        j->recs[i].of = f->of;
        j->recs[i].piece = f->piece;
        j->linked_files++;
        save_cursor c = { 0 };
        save_slot s;
        while (save_next_slot(&j->plan, i, &c, &s)) {
            tsr_extent_info x;
            TSR_TRY(j->source.describe(j->source.payload, &s, &x, err));
            j->extents[s.extent] = (tsr_extent_rec){ .offset = x.offset,
                                                     .stored_bytes = x.stored_bytes,
                                                     .raw_bytes = x.raw_bytes,
                                                     .hash = x.hash,
                                                     .raw_hash = x.raw_hash,
                                                     .file = i,
                                                     .codec = (uint8_t)x.codec };
        }
    }
    return TSR_OK;
}

static tsr_status start_threads(tsr_save_job *j, tsr_err *err)
{
    int n = thread_count(&j->o);
    for (int i = 0; i < n; i++) {
        if (pthread_create(&j->workers[i], NULL, save_worker, j) != 0) {
            break;
        }
        j->worker_count++;
    }
    if (j->worker_count == 0) {
        TSR_FAIL(err, TSR_E_LIMIT, "no thread can be started");
    }
    return TSR_OK;
}

static tsr_status job_start(tsr_save_job **out, const char *path, save_plan *plan, const save_source *source,
                            const tsr_save_opts *o, bool snapshot, tsr_err *err)
{
    *out = NULL;
    uint64_t total;
    tsr_save_job *j = calloc(1, sizeof *j);
    if (j == NULL) {
        save_plan_free(plan);
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    j->plan = *plan;
    *plan = (save_plan){ 0 };
    j->source = *source;
    j->lock_fd = -1;
    j->start_ns = save_now_ns();
    (void)pthread_mutex_init(&j->mu, NULL); /* these cannot fail with default attributes */
    (void)pthread_cond_init(&j->room, NULL);
    (void)pthread_cond_init(&j->work, NULL);
    (void)pthread_cond_init(&j->turn, NULL);
    tsr_status st = copy_opts(j, o, snapshot, err);
    if (st == TSR_OK) {
        st = save_buffer_budget(&j->plan, o, snapshot, &j->buffer_limit, &total, err);
    }
    if (st == TSR_OK) {
        uint64_t share = j->buffer_limit / (2 * (uint64_t)thread_count(o) + 2);
        j->batch_bytes = share < SAVE_BATCH_BYTES ? (size_t)share : SAVE_BATCH_BYTES;
        st = prepare(j, path, err);
    }
    if (st == TSR_OK) {
        st = take_links(j, err);
    }
    if (st == TSR_OK) {
        st = start_threads(j, err);
    }
    if (st != TSR_OK) {
        j->st = st;
        if (st != TSR_E_CONFLICT) {
            clean_up(j); /* on a conflict the folder is somebody else's, or the user's to decide on */
        }
        tsr_fs_unlock(&j->lock_fd);
        free_job(&j);
        return st;
    }
    feed(j);
    j->finisher_runs = pthread_create(&j->finisher, NULL, finish, j) == 0;
    if (!j->finisher_runs) {
        (void)finish(j); /* no thread to be had: the caller waits */
    }
    *out = j;
    return TSR_OK;
}

tsr_status save_job_start(tsr_save_job **out, const char *path, save_plan *plan, const save_source *source,
                          const tsr_save_opts *o, tsr_err *err)
{
    return job_start(out, path, plan, source, o, false, err);
}

tsr_status tsr_save_start(tsr_save_job **out, const char *path, const tsr_tensor_decl *decls, uint32_t count,
                          tsr_fill_fn fill, void *payload, const tsr_save_opts *o, tsr_err *err)
{
    *out = NULL;
    save_plan p;
    TSR_TRY(save_plan_make(&p, decls, count, o, err));
    save_source source = { .fill = fill, .payload = payload };
    return job_start(out, path, &p, &source, o, true, err);
}

tsr_status tsr_save_wait(tsr_save_job **job, tsr_save_stats *stats, tsr_err *err)
{
    tsr_save_job *j = *job;
    if (j->finisher_runs) {
        (void)pthread_join(j->finisher, NULL);
    }
    tsr_status st = j->st;
    if (st != TSR_OK && err != NULL) {
        *err = j->err;
    }
    if (stats != NULL) {
        *stats = (tsr_save_stats){ .stall_ns = j->stall_ns,
                                   .total_ns = save_now_ns() - j->start_ns,
                                   .raw_bytes = j->plan.payload_bytes,
                                   .stored_bytes = j->stored_bytes,
                                   .linked_files = j->linked_files };
    }
    if (st == TSR_OK && j->o.progress.report != NULL) {
        j->o.progress.report(j->o.progress.payload, "write", j->plan.payload_bytes, j->plan.payload_bytes);
    }
    free_job(job);
    return st;
}

tsr_status tsr_save(const char *path, const tsr_tensor_decl *decls, uint32_t count, tsr_fill_fn fill,
                    void *payload, const tsr_save_opts *o, tsr_err *err)
{
    save_plan p;
    tsr_save_job *j;
    TSR_TRY(save_plan_make(&p, decls, count, o, err));
    save_source source = { .fill = fill, .payload = payload };
    TSR_TRY(job_start(&j, path, &p, &source, o, false, err));
    return tsr_save_wait(&j, NULL, err);
}
