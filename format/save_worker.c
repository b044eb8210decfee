/* save_worker.c - the threads of a save: encode, hash, place in file order, write, close shards. */
#include "format/codec.h"
#include "format/save_job.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct worker {
    tsr_save_job *j;
    tsr_coder *coder;
    uint8_t *out; /* encoded bytes of a batch */
    size_t out_bytes, out_used;
    const uint8_t *stored[SAVE_BATCH_ITEMS]; /* per item of the batch: what to write; NULL for zeros */
    tsr_extent_rec extent[SAVE_BATCH_ITEMS];
} worker;

void save_fail(tsr_save_job *j, tsr_status st, const tsr_err *err)
{
    (void)pthread_mutex_lock(&j->mu);
    if (j->st == TSR_OK) {
        j->err = *err;
        __atomic_store_n(&j->st, st, __ATOMIC_RELEASE); /* also read without the lock */
    }
    (void)pthread_cond_broadcast(&j->work);
    (void)pthread_cond_broadcast(&j->room);
    (void)pthread_cond_broadcast(&j->turn);
    (void)pthread_mutex_unlock(&j->mu);
}

/* XXH3-64 of n zero bytes; a model has only a few sizes, so they are remembered. */
static uint64_t hash_zeros(tsr_save_job *j, uint64_t n)
{
    static const uint8_t zeros[4096];
    uint64_t hash = 0;
    (void)pthread_mutex_lock(&j->mu);
    for (int i = 0; i < j->zero_count; i++) {
        if (j->zero_hash[i].bytes == n) {
            hash = j->zero_hash[i].hash;
            (void)pthread_mutex_unlock(&j->mu);
            return hash;
        }
    }
    (void)pthread_mutex_unlock(&j->mu);
    tsr_hasher *h = tsr_hasher_new();
    if (h == NULL) {
        return 0; /* verification will say so; a plan is remade in no time */
    }
    for (uint64_t at = 0; at < n; at += sizeof zeros) {
        tsr_hasher_add(h, zeros, n - at < sizeof zeros ? (size_t)(n - at) : sizeof zeros);
    }
    hash = tsr_hasher_digest(h);
    tsr_hasher_free(&h);
    (void)pthread_mutex_lock(&j->mu);
    if (j->zero_count < 64) {
        j->zero_hash[j->zero_count].bytes = n;
        j->zero_hash[j->zero_count++].hash = hash;
    }
    (void)pthread_mutex_unlock(&j->mu);
    return hash;
}

/* Room for all that the batch may encode to. */
static tsr_status make_room(worker *w, const save_batch *b, tsr_err *err)
{
    size_t need = 0;
    w->out_used = 0;
    for (uint32_t i = 0; b->buf != NULL && w->j->source.describe == NULL && i < b->count; i++) {
        const save_slot *s = &b->items[i].slot;
        need += w->j->plan.tensors[s->tensor].filtered ? tsr_codec_bound(s->raw_bytes) : 0;
    }
    if (w->out_bytes < need) {
        free(w->out);
        w->out = malloc(need);
        w->out_bytes = w->out != NULL ? need : 0;
    }
    if (w->out_bytes < need) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory to encode");
    }
    return TSR_OK;
}

/* What will be stored for the item, and its extent record but for the offset. */
static tsr_status encode(worker *w, const save_item *it, const uint8_t **stored, tsr_extent_rec *e,
                         tsr_err *err)
{
    const save_slot *s = &it->slot;
    const save_tensor *t = &w->j->plan.tensors[s->tensor];
    *e = (tsr_extent_rec){ .raw_bytes = s->raw_bytes, .file = s->file };
    *stored = it->data;
    if (it->data == NULL) {
        e->stored_bytes = s->raw_bytes;
        e->raw_hash = hash_zeros(w->j, s->payload_bytes);
        e->hash = hash_zeros(w->j, s->raw_bytes);
        return TSR_OK;
    }
    if (w->j->source.describe != NULL) {
        e->codec = (uint8_t)it->x.codec;
        e->stored_bytes = it->x.stored_bytes;
        e->raw_hash = it->x.raw_hash;
        e->hash = tsr_hash64(it->data, it->x.stored_bytes);
        if (e->hash != it->x.hash) {
            TSR_FAIL(err, TSR_E_FORMAT, "%s: expert %u: checksum differs in the source: the data is damaged",
                     t->d.name, s->item);
        }
        return TSR_OK;
    }
    memset(it->data + s->payload_bytes, 0, s->raw_bytes - s->payload_bytes);
    e->raw_hash = tsr_hash64(it->data, s->payload_bytes);
    e->stored_bytes = s->raw_bytes;
    e->hash = e->raw_hash;
    if (t->filtered) {
        size_t got;
        tsr_codec codec = tsr_codec_for(t->d.dtype);
        TSR_TRY(tsr_codec_encode(w->coder, codec, tsr_dtype_info((unsigned)t->d.dtype)->bytes_per_unit,
                                 w->j->o.zstd_level > 0 ? w->j->o.zstd_level : 1, it->data, s->raw_bytes,
                                 w->out + w->out_used, w->out_bytes - w->out_used, &got, err));
        if (got > 0) {
            e->codec = (uint8_t)codec;
            e->stored_bytes = got;
            *stored = w->out + w->out_used;
            w->out_used += got;
        }
    }
    if (e->codec != TSR_CODEC_RAW || s->raw_bytes != s->payload_bytes) {
        e->hash = tsr_hash64(*stored, e->stored_bytes);
    }
    return TSR_OK;
}

/* A shard that is not written but linked from the source (reshard). */
static tsr_status link_file(tsr_save_job *j, uint32_t file, tsr_err *err)
{
    const save_file *f = &j->plan.files[file];
    tsr_file_info info;
    TSR_TRY(tsr_ckpt_file(j->source.link_source, (uint32_t)f->link_from, &info, err));
    char *src = NULL, *dst = NULL;
    tsr_status st = TSR_OK;
    if (asprintf(&src, "%s/%s", tsr_ckpt_path(j->source.link_source), info.name) < 0 ||
        asprintf(&dst, "%s/%s", j->temp, f->name) < 0) {
        st = TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    } else {
        st = tsr_fs_link_or_copy(src, dst, err);
    }
    free(src);
    free(dst);
    return st;
}

static tsr_status close_file(tsr_save_job *j, uint32_t file, tsr_err *err)
{
    const save_file *f = &j->plan.files[file];
    if (f->link_from >= 0) {
        return TSR_OK;
    }
    if (j->parent != NULL && j->parent_file[file] >= 0) {
        bool linked;
        TSR_TRY(save_parent_link(j, file, &linked, err));
        if (linked) {
            save_shard_abort(&j->shards[file]);
            return TSR_OK;
        }
        TSR_TRY(save_parent_copy(j, file, err));
    }
    return save_shard_close(&j->shards[file], j->extents, &j->recs[file], err);
}

/* Waits until it is this batch's turn to take places. False: the job has failed. */
static bool take_turn(tsr_save_job *j, uint64_t ticket)
{
    (void)pthread_mutex_lock(&j->mu);
    while (j->st == TSR_OK && j->next_ticket != ticket) {
        (void)pthread_cond_wait(&j->turn, &j->mu);
    }
    bool go = j->st == TSR_OK;
    (void)pthread_mutex_unlock(&j->mu);
    return go;
}

static void end_turn(tsr_save_job *j)
{
    (void)pthread_mutex_lock(&j->mu);
    j->next_ticket++;
    (void)pthread_cond_broadcast(&j->turn);
    (void)pthread_mutex_unlock(&j->mu);
}

static tsr_status open_file(tsr_save_job *j, uint32_t file, tsr_err *err)
{
    if (j->plan.files[file].link_from >= 0) {
        return link_file(j, file, err);
    }
    return save_shard_open(&j->shards[file], &j->plan, file, j->temp,
                           j->o.zstd_level > 0 ? j->o.zstd_level : 1, err);
}

static tsr_status place(worker *w, const save_batch *b, tsr_err *err)
{
    for (uint32_t i = 0; i < b->count; i++) {
        tsr_extent_rec *e = &w->extent[i];
        TSR_TRY(save_shard_place(w->j->shards[b->file], &b->items[i].slot, e->stored_bytes,
                                 e->codec != TSR_CODEC_RAW, &e->offset, err));
    }
    return TSR_OK;
}

static tsr_status write_items(const worker *w, const save_batch *b, tsr_err *err)
{
    tsr_save_job *j = w->j;
    for (uint32_t i = 0; i < b->count; i++) {
        const save_slot *s = &b->items[i].slot;
        const tsr_extent_rec *e = &w->extent[i];
        const uint8_t *stored = w->stored[i];
        if (j->parent != NULL && stored != NULL && save_parent_has(j, s, e, stored)) {
            j->same[s->extent] = 1;
        } else if (stored != NULL) {
            TSR_TRY(save_shard_write(j->shards[b->file], e->offset, stored, e->stored_bytes, err));
        }
        j->extents[s->extent] = *e;
    }
    return TSR_OK;
}

static tsr_status process(worker *w, const save_batch *b, tsr_err *err)
{
    tsr_save_job *j = w->j;
    uint64_t payload = 0, stored = 0;
    TSR_TRY(make_room(w, b, err));
    for (uint32_t i = 0; i < b->count; i++) {
        TSR_TRY(encode(w, &b->items[i], &w->stored[i], &w->extent[i], err));
        payload += b->items[i].slot.payload_bytes;
        stored += w->extent[i].stored_bytes;
    }
    if (!take_turn(j, b->ticket)) {
        return TSR_OK; /* the failure is on record */
    }
    /* After a failure the turn does not pass on: nobody may go by a broken shard; save_fail wakes those who wait. */
    TSR_TRY(b->opens ? open_file(j, b->file, err) : place(w, b, err));
    end_turn(j);
    TSR_TRY(write_items(w, b, err));
    (void)pthread_mutex_lock(&j->mu);
    j->remaining[b->file] -= b->opens ? 1 : b->count;
    bool last = j->remaining[b->file] == 0;
    (void)__atomic_fetch_add(&j->written, payload, __ATOMIC_RELAXED);
    j->stored_bytes += stored;
    (void)pthread_mutex_unlock(&j->mu);
    return last ? close_file(j, b->file, err) : TSR_OK;
}

static void give_back(tsr_save_job *j, save_batch *b)
{
    (void)pthread_mutex_lock(&j->mu);
    if (b->buf != NULL) {
        b->buf->next = j->spare;
        j->spare = b->buf;
        j->buffer_used -= b->buf->bytes;
        (void)pthread_cond_signal(&j->room);
    }
    (void)pthread_mutex_unlock(&j->mu);
    free(b);
}

static save_batch *next_batch(tsr_save_job *j)
{
    (void)pthread_mutex_lock(&j->mu);
    while (j->head == NULL && !j->no_more && j->st == TSR_OK) {
        (void)pthread_cond_wait(&j->work, &j->mu);
    }
    save_batch *b = j->head;
    if (b != NULL) {
        j->head = b->next;
        j->tail = j->head == NULL ? NULL : j->tail;
    }
    (void)pthread_mutex_unlock(&j->mu);
    return b;
}

void *save_worker(void *job)
{
    worker w = { .j = job, .coder = tsr_coder_new() };
    tsr_err err;
    if (w.coder == NULL) {
        save_fail(w.j, TSR_ERR(&err, TSR_E_LIMIT, "out of memory"), &err);
    }
    for (save_batch *b; (b = next_batch(w.j)) != NULL;) {
        if (__atomic_load_n(&w.j->st, __ATOMIC_RELAXED) == TSR_OK) {
            tsr_status st = process(&w, b, &err);
            if (st != TSR_OK) {
                save_fail(w.j, st, &err);
            }
        }
        give_back(w.j, b);
    }
    tsr_coder_free(&w.coder);
    free(w.out);
    return NULL;
}
