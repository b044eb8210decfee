/* vocab.c - the ranked tokens: by id an array, by bytes a hash table; tokens of one and two bytes have tables of their
 * own, because every merge begins with them. */
#include "model/tokenizer_priv.h"

#include <stdlib.h>
#include <string.h>

tsr_status vocab_from_bytes(vocab *v, tsr_err *err)
{
    v->blob = malloc(256);
    v->tokens = calloc(256, sizeof *v->tokens);
    if (v->blob == NULL || v->tokens == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "tokenizer: out of memory");
    }
    for (uint32_t i = 0; i < 256; i++) {
        v->blob[i] = (uint8_t)i;
        v->tokens[i] = (vocab_token){ i, 1 };
    }
    v->id_count = v->count = 256;
    return vocab_index(v, err);
}

void vocab_free(vocab *v)
{
    free(v->blob);
    free(v->tokens);
    free(v->slots);
    free(v->pair_id);
    *v = (vocab){ 0 };
}

/* The slot of these bytes, or the free one where they belong. The table is never full. */
static uint32_t slot_of(const vocab *v, const uint8_t *p, size_t n, uint32_t *tag)
{
    uint64_t h = tsr_hash64(p, n);
    *tag = (uint32_t)(h >> 32);
    for (uint32_t i = (uint32_t)h & v->mask;; i = (i + 1) & v->mask) {
        const vocab_slot *s = &v->slots[i];
        if (s->id < 0) {
            return i;
        }
        const vocab_token *t = &v->tokens[s->id];
        if (s->tag == *tag && t->bytes == n && memcmp(v->blob + t->at, p, n) == 0) {
            return i;
        }
    }
}

static void index_token(vocab *v, int32_t id)
{
    const vocab_token *t = &v->tokens[id];
    const uint8_t *p = v->blob + t->at;
    uint32_t tag, i = slot_of(v, p, t->bytes, &tag);
    if (v->slots[i].id >= 0) {
        v->repeated++;
        /* blob is in the order of lines, so the later line is the one further on */
        if (v->tokens[v->slots[i].id].at > t->at) {
            return;
        }
    }
    v->slots[i] = (vocab_slot){ tag, id };
    if (t->bytes == 1) {
        v->byte_id[p[0]] = id;
    } else if (t->bytes == 2) {
        v->pair_id[p[0] << 8 | p[1]] = id;
    }
    v->longest = t->bytes > v->longest ? t->bytes : v->longest;
}

tsr_status vocab_index(vocab *v, tsr_err *err)
{
    uint32_t size = 1024;
    while (size < 2 * (uint32_t)v->count) {
        size *= 2;
    }
    v->slots = malloc(size * sizeof *v->slots);
    v->pair_id = malloc(65536 * sizeof *v->pair_id);
    if (v->slots == NULL || v->pair_id == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "tokenizer: out of memory for %d tokens", v->count);
    }
    v->mask = size - 1;
    memset(v->slots, 0xff, size * sizeof *v->slots);
    memset(v->pair_id, 0xff, 65536 * sizeof *v->pair_id);
    memset(v->byte_id, 0xff, sizeof v->byte_id);
    for (int32_t id = 0; id < v->id_count; id++) {
        if (v->tokens[id].bytes > 0) {
            index_token(v, id);
        }
    }
    return TSR_OK;
}

int32_t vocab_find(const vocab *v, const uint8_t *p, size_t n)
{
    if (n <= 2) {
        return n == 1 ? v->byte_id[p[0]] : v->pair_id[p[0] << 8 | p[1]];
    }
    if (n > v->longest) {
        return -1;
    }
    uint32_t tag;
    return v->slots[slot_of(v, p, n, &tag)].id;
}
