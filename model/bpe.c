/* bpe.c - byte pair merges of one piece: again and again the adjacent pair whose bytes have the lowest rank, the
 * leftmost of equals. The pieces are a linked list, the pairs a heap with stale entries, so n bytes cost O(n log n). */
#include "model/tokenizer_priv.h"

#include <stdlib.h>

void bpe_run_free(bpe_run *r)
{
    free(r->next);
    free(r->prev);
    free(r->rank);
    free(r->heap);
    *r = (bpe_run){ 0 };
}

/* Every merge takes one pair away and adds at most two to the heap: 3 n entries suffice. */
static tsr_status reserve(bpe_run *r, size_t bytes, tsr_err *err)
{
    if (bytes <= r->room) {
        return TSR_OK;
    }
    size_t room = bytes < 256 ? 256 : bytes;
    bpe_run_free(r);
    r->next = malloc((room + 1) * sizeof *r->next);
    r->prev = malloc((room + 1) * sizeof *r->prev);
    r->rank = malloc((room + 1) * sizeof *r->rank);
    r->heap = malloc(3 * room * sizeof *r->heap);
    if (r->next == NULL || r->prev == NULL || r->rank == NULL || r->heap == NULL) {
        bpe_run_free(r);
        TSR_FAIL(err, TSR_E_LIMIT, "tokenizer: out of memory for a piece of %zu bytes", bytes);
    }
    r->room = room;
    return TSR_OK;
}

static void heap_down(uint64_t *heap, size_t count, size_t i)
{
    uint64_t key = heap[i];
    for (size_t child; (child = 2 * i + 1) < count; i = child) {
        child += child + 1 < count && heap[child + 1] < heap[child];
        if (key <= heap[child]) {
            break;
        }
        heap[i] = heap[child];
    }
    heap[i] = key;
}

static void heap_up(uint64_t *heap, size_t i)
{
    uint64_t key = heap[i];
    for (size_t parent; i > 0 && heap[parent = (i - 1) / 2] > key; i = parent) {
        heap[i] = heap[parent];
    }
    heap[i] = key;
}

/* Looks up the pair that begins at byte i and puts it on the heap when it has a rank. */
static void pair(const vocab *v, bpe_run *r, const uint8_t *piece, size_t bytes, uint32_t i,
                 size_t *heap_count)
{
    uint32_t second = r->next[i];
    r->rank[i] = second < bytes ? vocab_find(v, piece + i, r->next[second] - i) : -1;
    if (r->rank[i] >= 0) {
        r->heap[*heap_count] = (uint64_t)r->rank[i] << 32 | i;
        heap_up(r->heap, (*heap_count)++);
    }
}

static void merge_all(const vocab *v, bpe_run *r, const uint8_t *piece, size_t bytes)
{
    size_t heap_count = 0;
    for (uint32_t i = 0; i < bytes; i++) {
        r->next[i] = i + 1;
        r->prev[i] = i - 1; /* that of the first is never used */
        r->rank[i] = i + 1 < bytes ? v->pair_id[piece[i] << 8 | piece[i + 1]] : -1;
        if (r->rank[i] >= 0) {
            r->heap[heap_count++] = (uint64_t)r->rank[i] << 32 | i;
        }
    }
    for (size_t i = heap_count / 2; i-- > 0;) {
        heap_down(r->heap, heap_count, i);
    }
    while (heap_count > 0) {
        uint64_t top = r->heap[0];
        r->heap[0] = r->heap[--heap_count];
        heap_down(r->heap, heap_count, 0);
        uint32_t i = (uint32_t)top;
        /* A pair only ever grows, and other bytes have another rank: an entry of equal rank is the current one. */
        if (r->rank[i] != (int32_t)(top >> 32)) {
            continue;
        }
        uint32_t gone = r->next[i];
        r->rank[gone] = -1;
        r->next[i] = r->next[gone];
        if (r->next[i] < bytes) {
            r->prev[r->next[i]] = i;
        }
        pair(v, r, piece, bytes, i, &heap_count);
        if (i > 0) {
            pair(v, r, piece, bytes, r->prev[i], &heap_count);
        }
    }
}

tsr_status bpe_piece(const vocab *v, bpe_run *r, const uint8_t *piece, size_t bytes, tsr_tokens *out,
                     tsr_err *err)
{
    TSR_ASSERT(bytes > 0 && bytes < UINT32_MAX / 2);
    int32_t whole = vocab_find(v, piece, bytes);
    if (whole >= 0) {
        return tok_push(out, whole, err);
    }
    TSR_TRY(reserve(r, bytes, err));
    merge_all(v, r, piece, bytes);
    for (uint32_t i = 0; i < bytes; i = r->next[i]) {
        int32_t id = vocab_find(v, piece + i, r->next[i] - i);
        TSR_ASSERT(id >= 0); /* all single bytes are tokens, and merges make tokens */
        TSR_TRY(tok_push(out, id, err));
    }
    return TSR_OK;
}
