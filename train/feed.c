/* feed.c - see feed.h. Everything is a function of recipe, data and step: nothing has to be remembered to go on. */
#include "train/feed.h"

#include <stdlib.h>
#include <string.h>

tsr_status feed_open(feed *f, const tsr_recipe *r, int32_t line_ranks, tsr_err *err)
{
    *f = (feed){ .r = r, .at = -1, .line_ranks = line_ranks, .idle_target = -1 };
    for (int32_t i = 0; i < r->sources; i++) {
        tsr_status st = tsr_data_open(&f->data[i], r->source[i].path, err);
        if (st != TSR_OK) {
            tsr_err_prefix(err, "data source %s", r->source[i].name);
            return st;
        }
        if (tsr_data_vocab(f->data[i]) > r->spec->vocab) {
            TSR_FAIL(err, TSR_E_CONFLICT,
                     "data source %s: has ids up to %lld, the model's vocabulary has %lld", r->source[i].name,
                     (long long)tsr_data_vocab(f->data[i]) - 1, (long long)r->spec->vocab);
        }
    }
    return TSR_OK;
}

static void drop_packs(feed *f)
{
    for (int32_t i = 0; i < TSR_SOURCE_MAX; i++) {
        tsr_packed_free(&f->pack[i]);
        tsr_packed_free(&f->held[i]);
    }
}

void feed_close(feed *f)
{
    drop_packs(f);
    for (int32_t i = 0; i < TSR_SOURCE_MAX; i++) {
        tsr_data_close(&f->data[i]);
    }
    free(f->ids);
    free(f->targets);
    free(f->seg);
    free(f->seg_part);
    *f = (feed){ .at = -1 };
}

static int64_t most_pieces(const tsr_packed *p)
{
    int64_t most = 1;
    for (int64_t i = 0; p != NULL && i < tsr_packed_count(p); i++) {
        int64_t n;
        (void)tsr_packed_pieces(p, i, &n);
        most = n > most ? n : most;
    }
    return most;
}

static tsr_status pack_sources(feed *f, const tsr_stage *s, tsr_err *err)
{
    const tsr_recipe *r = f->r;
    tsr_mix_shares(s->mix, r->sources, f->share);
    for (int32_t i = 0; i < r->sources; i++) {
        f->count[i] = 0;
        if (f->share[i] == 0) {
            continue;
        }
        TSR_TRY(tsr_packed_make(&f->pack[i], f->data[i], TSR_SPLIT_TRAIN, s->context, err));
        f->count[i] = tsr_packed_count(f->pack[i]);
        if (f->count[i] == 0) {
            TSR_FAIL(err, TSR_E_MISSING, "data source %s: %s has no documents to train on", r->source[i].name,
                     r->source[i].path);
        }
        if (tsr_data_docs(f->data[i], TSR_SPLIT_HELD) > 0) {
            TSR_TRY(tsr_packed_make(&f->held[i], f->data[i], TSR_SPLIT_HELD, f->held_context, err));
        }
    }
    return TSR_OK;
}

tsr_status feed_stage(feed *f, int32_t stage, tsr_err *err)
{
    const tsr_recipe *r = f->r;
    const tsr_stage *s = &r->stage[stage];
    int64_t pieces = 1;
    drop_packs(f);
    f->at = stage;
    f->held_context = r->eval.context > 0 ? r->eval.context : s->context;
    TSR_TRY(pack_sources(f, s, err));
    f->mix = (tsr_mix){ .seed = tsr_mix64(r->seed, (uint64_t)stage, 0x6d6978),
                        .sources = r->sources,
                        .count = f->count,
                        .share = f->share };
    f->batch = s->batch_tokens / s->context > 1 ? s->batch_tokens / s->context : 1;
    f->micro = r->micro_tokens / s->context > 1 ? r->micro_tokens / s->context : 1;
    f->micro = f->micro < f->batch ? f->micro : f->batch;
    for (int32_t i = 0; i < r->sources; i++) {
        int64_t train = most_pieces(f->pack[i]) * f->micro, held = most_pieces(f->held[i]);
        pieces = train > pieces ? train : pieces;
        pieces = held > pieces ? held : pieces;
    }
    f->max_segs = pieces;
    f->max_tokens = f->micro * s->context > f->held_context ? f->micro * s->context : f->held_context;
    int64_t part = (f->max_tokens + f->line_ranks - 1) / f->line_ranks,
            least = (int64_t)f->line_ranks * TSR_LINE_LEAST;
    f->model_tokens = f->line_ranks == 1 ? f->max_tokens : part > least ? part : least;
    free(f->ids);
    free(f->targets);
    free(f->seg);
    free(f->seg_part);
    f->ids = malloc((size_t)f->max_tokens * sizeof *f->ids);
    f->targets = malloc((size_t)f->max_tokens * sizeof *f->targets);
    f->seg = malloc((size_t)(f->max_segs + 1) * sizeof *f->seg);
    f->seg_part = malloc((size_t)(f->max_segs + 1) * sizeof *f->seg_part);
    if (f->ids == NULL || f->targets == NULL || f->seg == NULL || f->seg_part == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory: %lld tokens of a batch", (long long)f->max_tokens);
    }
    return TSR_OK;
}

void feed_share(const feed *f, int32_t rank, int32_t ranks, int64_t *first, int64_t *last)
{
    *first = f->batch * rank / ranks;
    *last = f->batch * (rank + 1) / ranks;
}

int64_t feed_micros(const feed *f, int32_t ranks)
{
    int64_t most = (f->batch + ranks - 1) / ranks;
    return (most + f->micro - 1) / f->micro;
}

tsr_place feed_place(const feed *f, int64_t step, int64_t i)
{
    return tsr_mix_at(&f->mix, step * f->batch + i);
}

void feed_totals(const feed *f, int64_t step, int64_t *targets, int64_t *tokens)
{
    *targets = *tokens = 0;
    for (int64_t i = 0; i < f->batch; i++) {
        tsr_place p = feed_place(f, step, i);
        int64_t n;
        const tsr_piece *piece = tsr_packed_pieces(f->pack[p.source], p.sequence, &n);
        for (int64_t k = 0; k < n; k++) {
            int64_t length = tsr_data_doc_length(f->data[p.source], TSR_SPLIT_TRAIN, piece[k].doc);
            *tokens += piece[k].n;
            *targets += piece[k].n - (piece[k].off + piece[k].n == length);
        }
    }
}

static void append(feed *f, tsr_batch *b, int32_t source, tsr_split split, const tsr_piece *p)
{
    const tsr_data *d = f->data[source];
    bool ends = p->off + p->n == tsr_data_doc_length(d, split, p->doc);
    TSR_ASSERT(b->n + p->n <= f->max_tokens && b->segs < f->max_segs);
    tsr_data_copy(d, split, p->doc, p->off, p->n, f->ids + b->n);
    tsr_data_copy(d, split, p->doc, p->off + 1, p->n - ends, f->targets + b->n);
    b->n += p->n;
    if (ends) {
        f->targets[b->n - 1] = -1;
    }
    f->seg[++b->segs] = b->n;
}

tsr_batch feed_batch(feed *f, int64_t step, int64_t first, int64_t last)
{
    tsr_batch b = { .ids = f->ids, .targets = f->targets, .seg = f->seg };
    f->seg[0] = 0;
    for (int64_t i = first; i < last; i++) {
        tsr_place p = feed_place(f, step, i);
        int64_t n;
        const tsr_piece *piece = tsr_packed_pieces(f->pack[p.source], p.sequence, &n);
        for (int64_t k = 0; k < n; k++) {
            append(f, &b, p.source, TSR_SPLIT_TRAIN, &piece[k]);
        }
    }
    if (b.n == 0) {
        f->ids[0] = 0;
        f->targets[0] = -1;
        f->seg[1] = 1;
        b.n = b.segs = 1;
    }
    return b;
}

static tsr_batch idle_batch(feed *f)
{
    f->seg_part[0] = 0;
    f->seg_part[1] = 1;
    return (
        tsr_batch){ .ids = &f->idle_id, .targets = &f->idle_target, .seg = f->seg_part, .n = 1, .segs = 1 };
}

tsr_batch feed_part(feed *f, const tsr_batch *b, int32_t rank, bool *idle)
{
    int32_t ranks = f->line_ranks;
    *idle = false;
    if (ranks == 1) {
        return *b;
    }
    if (b->n < (int64_t)ranks * TSR_LINE_LEAST) {
        *idle = rank > 0;
        return rank > 0 ? idle_batch(f) : *b;
    }
    int64_t first = tsr_line_first(b->n, rank, ranks), last = tsr_line_first(b->n, rank + 1, ranks);
    tsr_batch part = { .ids = b->ids + first,
                       .targets = b->targets + first,
                       .seg = f->seg_part,
                       .n = last - first,
                       .total = b->n };
    f->seg_part[0] = 0;
    for (int64_t i = 0; i < b->segs; i++) {
        int64_t from = b->seg[i], to = b->seg[i + 1];
        if (to <= first || from >= last) {
            continue;
        }
        part.before = from < first ? first - from : part.before;
        part.goes_on = to > last;
        f->seg_part[++part.segs] = (to < last ? to : last) - first;
    }
    return part;
}

/* ---- held-out text ----------------------------------------------------------------------------------------------- */

int64_t feed_held_count(const feed *f, int64_t most)
{
    int64_t n = 0;
    for (int32_t i = 0; i < f->r->sources; i++) {
        n += f->held[i] != NULL ? tsr_packed_count(f->held[i]) : 0;
    }
    return n < most ? n : most;
}

/* The i-th of all, in an order that does not depend on how many are wanted nor on the step. */
tsr_batch feed_held(feed *f, int64_t i, int64_t most, int32_t *source)
{
    int64_t all = feed_held_count(f, INT64_MAX), n;
    tsr_batch b = { .ids = f->ids, .targets = f->targets, .seg = f->seg };
    TSR_ASSERT(i < all && i < most);
    int64_t at = tsr_shuffled(tsr_mix64(f->r->seed, 0x68656c64, 0), all, i);
    *source = 0;
    while (f->held[*source] == NULL || at >= tsr_packed_count(f->held[*source])) {
        at -= f->held[*source] != NULL ? tsr_packed_count(f->held[*source]) : 0;
        (*source)++;
    }
    const tsr_piece *piece = tsr_packed_pieces(f->held[*source], at, &n);
    f->seg[0] = 0;
    for (int64_t k = 0; k < n; k++) {
        append(f, &b, *source, TSR_SPLIT_HELD, &piece[k]);
    }
    return b;
}
