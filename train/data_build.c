/* data_build.c - tsr_data_build: text becomes tokens on disk; see data.h.
 *
 * The calling thread reads documents into batches and writes finished batches in their order; the others tokenise. Batches are
 * a ring, so what is written depends on the input alone. */
#include "format/io.h"
#include "model/tokenizer.h"
#include "train/data_writer.h"
#include "train/text_source.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define THREADS_MAX 256
#define DEFAULT_MEM_LIMIT ((uint64_t)256 << 20)
#define DEFAULT_SHARD_TOKENS ((uint64_t)64 << 20)
#define BATCH_BYTES ((size_t)256 << 10) /* full when it holds so much */
#define SLOT_BYTES ((uint64_t)10 << 20) /* of a batch: text, and four bytes of ids for each of its bytes */
#define LINE_BYTES_MIN ((uint64_t)1 << 20)
#define ASSET_BYTES_MAX ((uint64_t)64 << 20)

typedef struct part {
    size_t from, bytes;
    size_t ids_end; /* set by the worker */
    uint64_t doc;
    tsr_split split;
    bool last;
} part;

typedef struct batch {
    char *text;
    size_t used, room;
    part *parts;
    size_t count, part_room;
    tsr_tokens ids;
    bool done;
    tsr_status st;
    tsr_err err;
} batch;

typedef struct loaded_file {
    char *p;
    size_t bytes;
} loaded_file;

typedef struct build {
    const tsr_data_build_opts *o;
    tsr_data_stats stats;
    text_list list;
    loaded_file files[DATA_TOKENIZER_FILES];
    tsr_tokenizer *tok;
    int32_t eos;
    text_source *source;
    data_writer *writer;
    char *real, *temp;
    /* the document that is being read, and the one that is being written */
    uint64_t doc, text_bytes;
    tsr_split split;
    bool skip;
    /* the ring: batches [written, produced) are under way, [written, taken) are with workers or done */
    batch *ring;
    uint64_t slots, produced, taken, written;
    pthread_mutex_t mu;
    pthread_cond_t work, done;
    bool quit;
    pthread_t threads[THREADS_MAX];
    int thread_count;
} build;

/* ---- the tokenizer ------------------------------------------------------------------------------------------------- */

static tsr_status load_file(build *b, size_t i, tsr_err *err)
{
    char *path;
    tsr_io *io = NULL;
    uint64_t limit = i == 0 ? TSR_RANKS_FILE_BYTES_MAX : ASSET_BYTES_MAX;
    if (asprintf(&path, "%s/%s", b->o->tokenizer, data_tokenizer_names[i]) < 0) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    if (i > 0 && !tsr_fs_exists(path)) {
        free(path);
        return TSR_OK;
    }
    tsr_status st = tsr_io_open_file(&io, path, err);
    if (st == TSR_OK && io->size > limit) {
        st = TSR_ERR(err, TSR_E_LIMIT, "%s: has %" PRIu64 " bytes (%" PRIu64 " at most)", path, io->size,
                     limit);
    }
    if (st == TSR_OK) {
        b->files[i].bytes = (size_t)io->size;
        b->files[i].p = malloc((size_t)io->size + 1);
        st = b->files[i].p != NULL ? tsr_io_pread(io, b->files[i].p, (size_t)io->size, 0, err)
                                   : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    }
    tsr_io_close(&io);
    free(path);
    return st;
}

static tsr_status open_tokenizer(build *b, tsr_err *err)
{
    tsr_tokenizer_opts o = { .byte_added = b->o->tokenizer == NULL };
    for (size_t i = 0; b->o->tokenizer != NULL && i < DATA_TOKENIZER_FILES; i++) {
        TSR_TRY(load_file(b, i, err));
    }
    if (b->files[0].p != NULL) {
        o.ranks = (tsr_span){ b->files[0].p, b->files[0].bytes };
        o.config = (tsr_span){ b->files[1].p, b->files[1].bytes };
    }
    tsr_status st = tsr_tokenizer_open(&b->tok, &o, err);
    if (st != TSR_OK) {
        tsr_err_prefix(err, "%s", b->o->tokenizer != NULL ? b->o->tokenizer : "bytes as tokens");
        return st;
    }
    b->eos = b->o->no_eos ? -1 : tsr_tokenizer_info_of(b->tok).eos;
    return TSR_OK;
}

/* ---- input and options ------------------------------------------------------------------------------------------------ */

static const char *text_key(const build *b)
{
    return b->o->text_key != NULL ? b->o->text_key : "text";
}

static uint64_t shard_tokens(const build *b)
{
    return b->o->shard_tokens > 0 ? b->o->shard_tokens : DEFAULT_SHARD_TOKENS;
}

/* Of everything the result depends on, and of the input files' times. */
static tsr_status key_of(const build *b, uint64_t *out, tsr_err *err)
{
    tsr_hasher *h = tsr_hasher_new();
    if (h == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    const uint64_t facts[] = { DATA_VERSION, b->o->seed, shard_tokens(b), b->o->no_eos, b->list.count };
    tsr_hasher_add(h, facts, sizeof facts);
    tsr_hasher_add(h, &b->o->held_out, sizeof b->o->held_out);
    tsr_hasher_add(h, text_key(b), strlen(text_key(b)) + 1);
    for (size_t i = 0; i < DATA_TOKENIZER_FILES; i++) {
        const uint64_t file[] = { b->files[i].p != NULL, b->files[i].bytes };
        tsr_hasher_add(h, file, sizeof file);
        if (b->files[i].p != NULL) {
            tsr_hasher_add(h, b->files[i].p, b->files[i].bytes);
        }
    }
    for (size_t i = 0; i < b->list.count; i++) {
        const text_file *f = &b->list.files[i];
        const uint64_t file[] = { f->bytes, (uint64_t)f->mtime_ns };
        tsr_hasher_add(h, f->name, strlen(f->name) + 1);
        tsr_hasher_add(h, file, sizeof file);
    }
    *out = tsr_hasher_digest(h);
    tsr_hasher_free(&h);
    return TSR_OK;
}

static tsr_status prepare(build *b, const char *const *paths, size_t count, const char *out, tsr_err *err)
{
    uint64_t key, mem = b->o->mem_limit > 0 ? b->o->mem_limit : DEFAULT_MEM_LIMIT;
    uint64_t line = mem / 8 > LINE_BYTES_MIN ? mem / 8 : LINE_BYTES_MIN;
    struct stat s;
    if (!(b->o->held_out >= 0 && b->o->held_out <= 0.5)) {
        TSR_FAIL(err, TSR_E_USAGE, "held-out share %g: not in 0 to 0.5", b->o->held_out);
    }
    TSR_TRY(data_writer_places(out, &b->real, &b->temp, err));
    if (stat(b->temp, &s) == 0) {
        b->list.skip_dev = s.st_dev;
        b->list.skip_ino = s.st_ino;
    }
    for (size_t i = 0; i < count; i++) {
        TSR_TRY(text_list_add(&b->list, paths[i], err));
    }
    b->stats.files = b->list.count;
    TSR_TRY(open_tokenizer(b, err));
    TSR_TRY(key_of(b, &key, err));
    TSR_TRY(text_source_open(&b->source, &b->list, text_key(b), (size_t)line, err));
    const data_writer_opts o = { .real = b->real,
                                 .temp = b->temp,
                                 .key = key,
                                 .restart = b->o->restart,
                                 .vocab = tsr_tokenizer_info_of(b->tok).ids,
                                 .eos = b->eos,
                                 .shard_tokens = shard_tokens(b) };
    TSR_TRY(data_writer_open(&b->writer, &o, err));
    for (int k = 0; k < TSR_SPLIT_COUNT; k++) {
        b->stats.resumed_docs += data_writer_meta(b->writer)->split[k].documents;
    }
    return TSR_OK;
}

/* ---- workers ------------------------------------------------------------------------------------------------------------- */

static void tokenise(const build *b, batch *x)
{
    x->st = TSR_OK;
    x->ids.count = 0;
    for (size_t i = 0; x->st == TSR_OK && i < x->count; i++) {
        part *p = &x->parts[i];
        x->st = tsr_tokenizer_encode(b->tok, x->text + p->from, p->bytes, 0, &x->ids, &x->err);
        p->ids_end = x->ids.count;
    }
}

static void *worker(void *payload)
{
    build *b = payload;
    (void)pthread_mutex_lock(&b->mu);
    for (;;) {
        while (!b->quit && b->taken == b->produced) {
            (void)pthread_cond_wait(&b->work, &b->mu);
        }
        if (b->quit) {
            break;
        }
        batch *x = &b->ring[b->taken++ % b->slots];
        (void)pthread_mutex_unlock(&b->mu);
        tokenise(b, x);
        (void)pthread_mutex_lock(&b->mu);
        x->done = true;
        (void)pthread_cond_signal(&b->done);
    }
    (void)pthread_mutex_unlock(&b->mu);
    return NULL;
}

static tsr_status start(build *b, tsr_err *err)
{
    uint64_t mem = b->o->mem_limit > 0 ? b->o->mem_limit : DEFAULT_MEM_LIMIT;
    long n = b->o->threads > 0 ? b->o->threads : sysconf(_SC_NPROCESSORS_ONLN);
    n = n < 1 ? 1 : n > THREADS_MAX ? THREADS_MAX : n;
    b->slots = mem / 2 / SLOT_BYTES;
    b->slots = b->slots < 2 ? 2 : b->slots > 2 * (uint64_t)n + 1 ? 2 * (uint64_t)n + 1 : b->slots;
    b->ring = calloc(b->slots, sizeof *b->ring);
    if (b->ring == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    for (b->thread_count = 0; b->thread_count < n && (uint64_t)b->thread_count < b->slots;
         b->thread_count++) {
        if (pthread_create(&b->threads[b->thread_count], NULL, worker, b) != 0) {
            break;
        }
    }
    if (b->thread_count == 0) {
        TSR_FAIL(err, TSR_E_LIMIT, "no thread can be started");
    }
    return TSR_OK;
}

static void stop(build *b)
{
    (void)pthread_mutex_lock(&b->mu);
    b->quit = true;
    (void)pthread_cond_broadcast(&b->work);
    (void)pthread_mutex_unlock(&b->mu);
    for (int i = 0; i < b->thread_count; i++) {
        (void)pthread_join(b->threads[i], NULL);
    }
    for (uint64_t i = 0; b->ring != NULL && i < b->slots; i++) {
        free(b->ring[i].text);
        free(b->ring[i].parts);
        tsr_tokens_free(&b->ring[i].ids);
    }
    free(b->ring);
    b->ring = NULL;
}

/* ---- reading ----------------------------------------------------------------------------------------------------------------- */

static tsr_status go_on(const build *b, tsr_err *err)
{
    const tsr_progress *p = &b->o->progress;
    if (p->cancel != NULL && *p->cancel != 0) {
        TSR_FAIL(err, TSR_E_CANCELLED, "stopped; the same command goes on from what is finished");
    }
    if (p->report != NULL) {
        p->report(p->payload, "tokenise", text_source_done(b->source), b->list.bytes);
    }
    return TSR_OK;
}

static tsr_status batch_add(batch *x, const text_part *t, uint64_t doc, tsr_split split, tsr_err *err)
{
    if (x->room - x->used < t->bytes) {
        size_t room = x->used + t->bytes > BATCH_BYTES ? x->used + t->bytes : BATCH_BYTES;
        char *grown = realloc(x->text, room);
        if (grown == NULL) {
            TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
        }
        x->text = grown;
        x->room = room;
    }
    if (x->count == x->part_room) {
        size_t room = x->part_room * 2 + 64;
        part *grown = realloc(x->parts, room * sizeof *grown);
        if (grown == NULL) {
            TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
        }
        x->parts = grown;
        x->part_room = room;
    }
    if (t->bytes > 0) {
        memcpy(x->text + x->used, t->text, t->bytes);
    }
    x->parts[x->count++] = (part){
        .from = x->used, .bytes = t->bytes, .doc = doc, .split = split, .last = t->last
    };
    x->used += t->bytes;
    return TSR_OK;
}

/* Which split a document belongs to depends on its number in the input only. */
static tsr_split split_of(const build *b, uint64_t doc)
{
    double u = (double)(tsr_mix64(b->o->seed, doc, 0x68656c64) >> 11) * 0x1p-53;
    return u < b->o->held_out ? TSR_SPLIT_HELD : TSR_SPLIT_TRAIN;
}

/* Fills a batch; *end: the input has ended. */
static tsr_status read_batch(build *b, batch *x, bool *end, tsr_err *err)
{
    text_part t;
    bool got;
    x->used = x->count = 0;
    x->done = false;
    while (x->used < BATCH_BYTES) {
        TSR_TRY(go_on(b, err));
        TSR_TRY(text_source_next(b->source, &t, &got, err));
        if (!got) {
            *end = true;
            return TSR_OK;
        }
        b->stats.bytes += t.bytes;
        if (t.first && t.last && t.bytes == 0) {
            b->stats.skipped++;
            b->doc++;
            continue;
        }
        if (t.first) {
            b->split = split_of(b, b->doc);
            b->skip = b->doc < data_writer_finished(b->writer, b->split);
            b->stats.documents++;
        }
        if (!b->skip) {
            TSR_TRY(batch_add(x, &t, b->doc, b->split, err));
        }
        b->doc += t.last;
    }
    return TSR_OK;
}

static tsr_status write_batch(build *b, const batch *x, tsr_err *err)
{
    size_t from = 0;
    if (x->st != TSR_OK) {
        TSR_FAIL(err, x->st, "%s", x->err.msg);
    }
    for (size_t i = 0; i < x->count; i++) {
        const part *p = &x->parts[i];
        TSR_TRY(data_writer_add(b->writer, p->split, x->ids.ids + from, p->ids_end - from, err));
        from = p->ids_end;
        b->text_bytes += p->bytes;
        if (p->last) {
            if (b->eos >= 0) {
                TSR_TRY(data_writer_add(b->writer, p->split, &b->eos, 1, err));
            }
            TSR_TRY(data_writer_end(b->writer, p->split, p->doc, b->text_bytes, err));
            b->text_bytes = 0;
        }
    }
    return TSR_OK;
}

static tsr_status pump(build *b, tsr_err *err)
{
    for (bool end = false; !end || b->written < b->produced;) {
        batch *oldest = &b->ring[b->written % b->slots];
        bool room = !end && b->produced - b->written < b->slots;
        (void)pthread_mutex_lock(&b->mu);
        bool ready = b->written < b->produced && oldest->done;
        while (!ready && !room) {
            (void)pthread_cond_wait(&b->done, &b->mu);
            ready = oldest->done;
        }
        (void)pthread_mutex_unlock(&b->mu);
        if (ready) {
            TSR_TRY(write_batch(b, oldest, err));
            b->written++;
            TSR_TRY(go_on(b, err));
            continue;
        }
        TSR_TRY(read_batch(b, &b->ring[b->produced % b->slots], &end, err));
        (void)pthread_mutex_lock(&b->mu);
        b->produced++;
        (void)pthread_cond_signal(&b->work);
        (void)pthread_mutex_unlock(&b->mu);
    }
    return TSR_OK;
}

/* ---- all -------------------------------------------------------------------------------------------------------------------- */

static json_t *facts_of(const build *b)
{
    char seed[24];
    json_t *files = json_array();
    for (size_t i = 0; i < DATA_TOKENIZER_FILES; i++) {
        if (b->files[i].p != NULL) {
            char hash[DATA_HEX_BYTES];
            data_hex(tsr_hash64(b->files[i].p, b->files[i].bytes), hash);
            (void)json_array_append_new(files,
                                        json_pack("{s:s, s:I, s:s}", "name", data_tokenizer_names[i], "bytes",
                                                  (json_int_t)b->files[i].bytes, "xxh3", hash));
        }
    }
    (void)snprintf(seed, sizeof seed, "%" PRIu64, b->o->seed);
    const tsr_data_stats *s = &b->stats;
    return json_pack(
        "{s:s, s:i, s:I, s:i, s:s, s:{s:s, s:o}, s:{s:s, s:f, s:s, s:I, s:b}, s:{s:I, s:I, s:I, s:I}}",
        "format", DATA_FORMAT, "version", DATA_VERSION, "vocab",
        (json_int_t)tsr_tokenizer_info_of(b->tok).ids, "eos", b->eos, "dtype",
        tsr_dtype_name(data_dtype(tsr_tokenizer_info_of(b->tok).ids)), "tokenizer", "kind",
        b->o->tokenizer != NULL ? "tiktoken" : "bytes", "files", files, "options", "text_key", text_key(b),
        "held_out", b->o->held_out, "seed", seed, "shard_tokens", (json_int_t)shard_tokens(b), "no_eos",
        b->o->no_eos, "input", "files", (json_int_t)s->files, "documents", (json_int_t)s->documents,
        "skipped", (json_int_t)s->skipped, "text_bytes", (json_int_t)s->bytes);
}

static tsr_status finish(build *b, tsr_err *err)
{
    if (b->stats.documents == 0) {
        TSR_FAIL(err, TSR_E_MISSING,
                 "%s: no document with text in the input (%" PRIu64 " files, %" PRIu64 " empty)", b->real,
                 b->stats.files, b->stats.skipped);
    }
    for (size_t i = 0; i < DATA_TOKENIZER_FILES; i++) {
        if (b->files[i].p != NULL) {
            TSR_TRY(data_writer_file(b->writer, i, b->files[i].p, b->files[i].bytes, err));
        }
    }
    json_t *facts = facts_of(b);
    tsr_status st = facts != NULL
                        ? data_writer_commit(b->writer, facts, err)
                        : TSR_ERR(err, TSR_E_LIMIT, "out of memory, or the key of the text is not UTF-8");
    json_decref(facts);
    for (int s = 0; st == TSR_OK && s < TSR_SPLIT_COUNT; s++) {
        b->stats.docs[s] = data_writer_meta(b->writer)->split[s].documents;
        b->stats.tokens[s] = data_writer_meta(b->writer)->split[s].tokens;
    }
    return st;
}

tsr_status tsr_data_build(const char *const *paths, size_t count, const char *out,
                          const tsr_data_build_opts *o, tsr_data_stats *stats, tsr_err *err)
{
    build *b = calloc(1, sizeof *b);
    tsr_data_stats none = { 0 };
    if (stats != NULL) {
        *stats = none;
    }
    if (b == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    b->o = o;
    (void)pthread_mutex_init(&b->mu, NULL);
    (void)pthread_cond_init(&b->work, NULL);
    (void)pthread_cond_init(&b->done, NULL);
    tsr_status st = prepare(b, paths, count, out, err);
    st = st == TSR_OK ? start(b, err) : st;
    st = st == TSR_OK ? pump(b, err) : st;
    stop(b);
    st = st == TSR_OK ? finish(b, err) : st;
    bool later = st == TSR_E_IO || st == TSR_E_LIMIT; /* what may go away without other input */
    bool keep = st == TSR_E_CANCELLED || (later && b->writer != NULL && data_writer_shards(b->writer) > 0);
    data_writer_close(&b->writer, keep);
    if (stats != NULL && st == TSR_OK) {
        *stats = b->stats;
    }
    text_source_close(&b->source);
    tsr_tokenizer_close(&b->tok);
    text_list_free(&b->list);
    for (size_t i = 0; i < DATA_TOKENIZER_FILES; i++) {
        free(b->files[i].p);
    }
    (void)pthread_cond_destroy(&b->done);
    (void)pthread_cond_destroy(&b->work);
    (void)pthread_mutex_destroy(&b->mu);
    free(b->real);
    free(b->temp);
    free(b);
    return st;
}
