/* pack.c - documents packed into sequences: best fit, the longest first; see data.h.
 *
 * Sequences with room left stand in stacks, one for each size of room. Bitmaps of bitmaps say which stacks hold
 * something, so the smallest room that is large enough is found in a few steps whatever the number of sequences. */
#include "train/data.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define CONTEXT_MAX ((int64_t)1 << 24)
#define LEVELS 4 /* 64 ^ 4 sizes */

struct tsr_packed {
    int64_t count;
    int64_t *first; /* [count + 1] pieces of each sequence */
    tsr_piece *pieces;
};

/* ---- sets of numbers below 2^24 --------------------------------------------------------------------------------- */

typedef struct room_set {
    uint64_t *bits[LEVELS]; /* bits[0]: the numbers; bits[k]: which words of bits[k - 1] are not 0 */
} room_set;

static bool set_make(room_set *s, int64_t below)
{
    bool ok = true;
    for (int k = 0; k < LEVELS; k++) {
        below = (below + 63) / 64;
        s->bits[k] = calloc((size_t)below, sizeof(uint64_t));
        ok = ok && s->bits[k] != NULL;
    }
    return ok;
}

static void set_free(room_set *s)
{
    for (int k = 0; k < LEVELS; k++) {
        free(s->bits[k]);
    }
}

static void set_add(room_set *s, int64_t v)
{
    for (int k = 0; k < LEVELS; k++, v /= 64) {
        s->bits[k][v / 64] |= (uint64_t)1 << (v % 64);
    }
}

static void set_remove(room_set *s, int64_t v)
{
    for (int k = 0; k < LEVELS; k++, v /= 64) {
        s->bits[k][v / 64] &= ~((uint64_t)1 << (v % 64));
        if (s->bits[k][v / 64] != 0) {
            return;
        }
    }
}

/* The smallest member >= v, where v < below; -1: none. */
static int64_t set_next(const room_set *s, int64_t v, int64_t below)
{
    for (int k = 0; k < LEVELS; k++) {
        if (v >= below) {
            return -1;
        }
        uint64_t word = s->bits[k][v / 64] >> (v % 64);
        if (word != 0) {
            for (v += __builtin_ctzll(word); k > 0; k--) {
                v = v * 64 + __builtin_ctzll(s->bits[k - 1][v]);
            }
            return v;
        }
        v = v / 64 + 1; /* of the words behind this one */
        below = (below + 63) / 64;
    }
    return -1;
}

/* ---- packing ------------------------------------------------------------------------------------------------------ */

typedef struct packing {
    const tsr_data *d;
    tsr_split split;
    int64_t docs, context;
    int64_t cut;     /* sequences that are a piece of a longer document */
    int64_t short_n; /* documents, and ends of documents, that share sequences */
    int64_t *order;  /* [short_n] documents, by falling length of what is to be placed */
    int64_t *bin;    /* [short_n] the sequence of each of order */
    int64_t *next;   /* [short_n] stacks: the sequence below */
    int64_t *top;    /* [context + 1] stacks: the topmost sequence + 1, by room */
    room_set rooms;
} packing;

/* What of a document is placed with others: at off, n tokens, n < 1: nothing. */
static int64_t short_part(const packing *k, int64_t doc, int64_t *off)
{
    int64_t length = tsr_data_doc_length(k->d, k->split, doc);
    *off = length > k->context ? length / k->context * k->context : 0;
    return length - *off;
}

static tsr_status count_parts(packing *k, tsr_err *err)
{
    for (int64_t i = 0, off; i < k->docs; i++) {
        k->short_n += short_part(k, i, &off) > 0;
        k->cut += off / k->context;
    }
    size_t n = (size_t)k->short_n + 1;
    k->order = malloc(n * sizeof *k->order);
    k->bin = malloc(n * sizeof *k->bin);
    k->next = malloc(n * sizeof *k->next);
    k->top = calloc((size_t)k->context + 2, sizeof *k->top);
    if (k->order == NULL || k->bin == NULL || k->next == NULL || k->top == NULL ||
        !set_make(&k->rooms, k->context + 1)) {
        TSR_FAIL(err, TSR_E_LIMIT, "%s: out of memory for packing %" PRId64 " documents", tsr_data_path(k->d),
                 k->docs);
    }
    return TSR_OK;
}

/* By falling length; equal ones by their numbers. */
static void sort_parts(packing *k)
{
    int64_t *at = k->top, sum = 0, off; /* used for counting first */
    for (int64_t i = 0; i < k->docs; i++) {
        at[short_part(k, i, &off)]++;
    }
    for (int64_t n = k->context; n > 0; n--) {
        int64_t here = at[n];
        at[n] = sum;
        sum += here;
    }
    for (int64_t i = 0; i < k->docs; i++) {
        int64_t n = short_part(k, i, &off);
        if (n > 0) {
            k->order[at[n]++] = i;
        }
    }
    memset(at, 0, ((size_t)k->context + 2) * sizeof *at);
}

/* Puts each part into a sequence; returns how many sequences there are. */
static int64_t place_parts(packing *k)
{
    int64_t bins = 0, off;
    for (int64_t i = 0; i < k->short_n; i++) {
        int64_t n = short_part(k, k->order[i], &off), room = set_next(&k->rooms, n, k->context + 1), b;
        if (room < 0) {
            b = bins++;
            room = k->context;
        } else {
            b = k->top[room] - 1;
            k->top[room] = k->next[b];
            if (k->top[room] == 0) {
                set_remove(&k->rooms, room);
            }
        }
        k->bin[i] = b;
        room -= n;
        if (room > 0) {
            if (k->top[room] == 0) {
                set_add(&k->rooms, room);
            }
            k->next[b] = k->top[room];
            k->top[room] = b + 1;
        }
    }
    return bins;
}

static tsr_status collect(const packing *k, int64_t bins, tsr_packed *p, tsr_err *err)
{
    int64_t at = 0, off;
    p->count = k->cut + bins;
    p->first = calloc((size_t)p->count + 3, sizeof *p->first);
    p->pieces = malloc(((size_t)k->cut + (size_t)k->short_n + 1) * sizeof *p->pieces);
    if (p->first == NULL || p->pieces == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "%s: out of memory for %" PRId64 " sequences", tsr_data_path(k->d),
                 p->count);
    }
    for (int64_t i = 0; i < k->docs; i++) {
        (void)short_part(k, i, &off);
        for (int64_t from = 0; from < off; from += k->context) {
            p->first[at] = at;
            p->pieces[at++] = (tsr_piece){ i, from, k->context };
        }
    }
    int64_t *first = p->first + k->cut;
    for (int64_t i = 0; i < k->short_n; i++) {
        first[k->bin[i] + 2]++;
    }
    first[0] = first[1] =
        k->cut; /* first[b + 1] is where sequence b begins, until its pieces have moved it to its end */
    for (int64_t b = 2; b <= bins; b++) {
        first[b] += first[b - 1];
    }
    for (int64_t i = 0; i < k->short_n; i++) {
        int64_t n = short_part(k, k->order[i], &off);
        p->pieces[first[k->bin[i] + 1]++] = (tsr_piece){ k->order[i], off, n };
    }
    return TSR_OK;
}

tsr_status tsr_packed_make(tsr_packed **out, const tsr_data *d, tsr_split s, int64_t context, tsr_err *err)
{
    packing k = { .d = d, .split = s, .docs = tsr_data_docs(d, s), .context = context };
    *out = NULL;
    if (context < 1 || context > CONTEXT_MAX) {
        TSR_FAIL(err, TSR_E_USAGE, "%s: a context of %" PRId64 " tokens (1 to %" PRId64 ")", tsr_data_path(d),
                 context, CONTEXT_MAX);
    }
    tsr_packed *p = calloc(1, sizeof *p);
    tsr_status st = p != NULL ? count_parts(&k, err) : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    if (st == TSR_OK) {
        sort_parts(&k);
        st = collect(&k, place_parts(&k), p, err);
    }
    free(k.order);
    free(k.bin);
    free(k.next);
    free(k.top);
    set_free(&k.rooms);
    if (st != TSR_OK) {
        tsr_packed_free(&p);
    }
    *out = p;
    return st;
}

void tsr_packed_free(tsr_packed **p)
{
    if (*p != NULL) {
        free((*p)->first);
        free((*p)->pieces);
        free(*p);
        *p = NULL;
    }
}

int64_t tsr_packed_count(const tsr_packed *p)
{
    return p->count;
}

const tsr_piece *tsr_packed_pieces(const tsr_packed *p, int64_t sequence, int64_t *count)
{
    TSR_ASSERT(sequence >= 0 && sequence < p->count);
    *count = p->first[sequence + 1] - p->first[sequence];
    return p->pieces + p->first[sequence];
}
