/* base.c - status names, errors, dtype traits, arena, hashes. */
#include "format/base.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "checkpoints are little-endian and read in place");

const char *tsr_status_class(tsr_status s)
{
    switch (s) {
    case TSR_OK: return "OK";
    case TSR_E_DIFF: return "DIFF";
    case TSR_E_USAGE: return "E_USAGE";
    case TSR_E_FORMAT: return "E_FORMAT";
    case TSR_E_MISSING: return "E_MISSING";
    case TSR_E_UNSUPPORTED: return "E_UNSUPPORTED";
    case TSR_E_CONFLICT: return "E_CONFLICT";
    case TSR_E_IO: return "E_IO";
    case TSR_E_LIMIT: return "E_LIMIT";
    case TSR_E_NUMERIC: return "E_NUMERIC";
    case TSR_E_CANCELLED: return "CANCELLED";
    }
    return "E_UNKNOWN";
}

tsr_status tsr_err_set_(tsr_err *e, tsr_status code, const char *file, int line, const char *fmt, ...)
{
    if (e != NULL) {
        va_list ap;
        e->code = code;
        e->file = file;
        e->line = line;
        va_start(ap, fmt);
        (void)vsnprintf(e->msg, sizeof e->msg, fmt, ap);
        va_end(ap);
    }
    return code;
}

void tsr_err_prefix(tsr_err *e, const char *fmt, ...)
{
    if (e == NULL) {
        return;
    }
    char old[TSR_ERR_MSG_BYTES];
    memcpy(old, e->msg, sizeof old);
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(e->msg, sizeof e->msg, fmt, ap);
    va_end(ap);
    if (n < 0 || (size_t)n + 3 > sizeof e->msg) {
        return;
    }
    size_t used = (size_t)n, room = sizeof e->msg - used - 3, len = strlen(old);
    memcpy(e->msg + used, ": ", 2);
    memcpy(e->msg + used + 2, old, len < room ? len : room);
    e->msg[used + 2 + (len < room ? len : room)] = '\0';
}

void tsr_panic_(const char *what, const char *file, int line)
{
    fprintf(stderr, "%s:%d: broken invariant: %s\n", file, line, what);
    abort();
}

/* ---- dtypes ------------------------------------------------------------------------------------ */

static const tsr_dtype_traits traits[TSR_DT_COUNT] = {
    [TSR_DT_F64] = { "f64", "F64", 1, 8, true },
    [TSR_DT_F32] = { "f32", "F32", 1, 4, true },
    [TSR_DT_F16] = { "f16", "F16", 1, 2, true },
    [TSR_DT_BF16] = { "bf16", "BF16", 1, 2, true },
    [TSR_DT_F8_E4M3] = { "f8_e4m3", "F8_E4M3", 1, 1, true },
    [TSR_DT_F8_E5M2] = { "f8_e5m2", "F8_E5M2", 1, 1, true },
    [TSR_DT_F8_E4M3FNUZ] = { "f8_e4m3fnuz", "F8_E4M3FNUZ", 1, 1, true },
    [TSR_DT_F8_E5M2FNUZ] = { "f8_e5m2fnuz", "F8_E5M2FNUZ", 1, 1, true },
    [TSR_DT_E8M0] = { "e8m0", "F8_E8M0", 1, 1, true },
    [TSR_DT_F4_E2M1] = { "f4_e2m1", "F4", 2, 1, true },
    [TSR_DT_MXFP4] = { "mxfp4", NULL, 2, 1, true },
    [TSR_DT_I64] = { "i64", "I64", 1, 8, false },
    [TSR_DT_I32] = { "i32", "I32", 1, 4, false },
    [TSR_DT_I16] = { "i16", "I16", 1, 2, false },
    [TSR_DT_I8] = { "i8", "I8", 1, 1, false },
    [TSR_DT_U64] = { "u64", "U64", 1, 8, false },
    [TSR_DT_U32] = { "u32", "U32", 1, 4, false },
    [TSR_DT_U16] = { "u16", "U16", 1, 2, false },
    [TSR_DT_U8] = { "u8", "U8", 1, 1, false },
    [TSR_DT_BOOL] = { "bool", "BOOL", 1, 1, false },
};

const tsr_dtype_traits *tsr_dtype_info(unsigned code)
{
    return code < TSR_DT_COUNT && traits[code].name != NULL ? &traits[code] : NULL;
}

const char *tsr_dtype_name(unsigned code)
{
    const tsr_dtype_traits *t = tsr_dtype_info(code);
    return t != NULL ? t->name : "?";
}

tsr_dtype tsr_dtype_parse(const char *name)
{
    for (unsigned i = 0; i < TSR_DT_COUNT; i++) {
        if (traits[i].name != NULL && strcmp(traits[i].name, name) == 0) {
            return (tsr_dtype)i;
        }
    }
    return TSR_DT_NONE;
}

tsr_dtype tsr_dtype_from_st(const char *name)
{
    for (unsigned i = 0; i < TSR_DT_COUNT; i++) {
        if (traits[i].st_name != NULL && strcmp(traits[i].st_name, name) == 0) {
            return (tsr_dtype)i;
        }
    }
    return TSR_DT_NONE;
}

bool tsr_shape_bytes(tsr_dtype dtype, int rank, const int64_t *shape, uint64_t *bytes_out)
{
    const tsr_dtype_traits *t = tsr_dtype_info((unsigned)dtype);
    if (t == NULL || rank < 0 || rank > TSR_RANK_MAX) {
        return false;
    }
    bool empty = false;
    for (int i = 0; i < rank; i++) {
        if (shape[i] < 0) {
            return false;
        }
        empty = empty || shape[i] == 0;
    }
    if (t->elems_per_unit > 1 && (rank == 0 || shape[rank - 1] % t->elems_per_unit != 0)) {
        return false;
    }
    if (empty) {
        *bytes_out = 0;
        return true;
    }
    uint64_t units = 1;
    for (int i = 0; i < rank; i++) {
        uint64_t d = (uint64_t)shape[i];
        if (i == rank - 1) {
            d /= t->elems_per_unit;
        }
        if (!tsr_mul_u64(units, d, &units)) {
            return false;
        }
    }
    return tsr_mul_u64(units, t->bytes_per_unit, bytes_out) && *bytes_out <= INT64_MAX;
}

/* ---- arena ------------------------------------------------------------------------------------- */

#define ARENA_BLOCK_BYTES ((size_t)1 << 18)

typedef struct arena_block {
    struct arena_block *next;
    size_t used, size;
    _Alignas(16) unsigned char data[];
} arena_block;

struct tsr_arena {
    arena_block *head;
    size_t used, limit;
};

tsr_arena *tsr_arena_new(size_t limit_bytes)
{
    tsr_arena *a = calloc(1, sizeof *a);
    if (a != NULL) {
        a->limit = limit_bytes;
    }
    return a;
}

void tsr_arena_free(tsr_arena **a)
{
    if (a == NULL || *a == NULL) {
        return;
    }
    for (arena_block *b = (*a)->head; b != NULL;) {
        arena_block *next = b->next;
        free(b);
        b = next;
    }
    free(*a);
    *a = NULL;
}

void *tsr_arena_alloc(tsr_arena *a, size_t n)
{
    if (n > SIZE_MAX / 2) {
        return NULL;
    }
    size_t need = (n + 15) & ~(size_t)15;
    if (a->limit != 0 && (need > a->limit || a->used > a->limit - need)) {
        return NULL;
    }
    if (a->head == NULL || a->head->size - a->head->used < need) {
        size_t size = need > ARENA_BLOCK_BYTES / 4 ? need : ARENA_BLOCK_BYTES;
        arena_block *b = calloc(1, sizeof *b + size);
        if (b == NULL) {
            return NULL;
        }
        b->size = size;
        if (a->head != NULL && size == need) { /* a big one: keep filling the current block */
            b->next = a->head->next;
            a->head->next = b;
            b->used = need;
            a->used += need;
            return b->data;
        }
        b->next = a->head;
        a->head = b;
    }
    void *p = a->head->data + a->head->used;
    a->head->used += need;
    a->used += need;
    return p;
}

char *tsr_arena_strndup(tsr_arena *a, const char *s, size_t n)
{
    char *p = tsr_arena_alloc(a, n + 1);
    if (p != NULL) {
        memcpy(p, s, n);
        p[n] = '\0';
    }
    return p;
}

size_t tsr_arena_used(const tsr_arena *a)
{
    return a->used;
}

/* ---- hashes ------------------------------------------------------------------------------------ */

struct tsr_hasher {
    XXH3_state_t *state;
    bool wide;
};

static tsr_hash128 canonical(XXH128_hash_t h)
{
    tsr_hash128 out;
    XXH128_canonical_t c;
    XXH128_canonicalFromHash(&c, h);
    memcpy(out.b, c.digest, sizeof out.b);
    return out;
}

uint64_t tsr_hash64(const void *p, size_t n)
{
    return XXH3_64bits(p, n);
}

tsr_hash128 tsr_hash_128(const void *p, size_t n)
{
    return canonical(XXH3_128bits(p, n));
}

static tsr_hasher *hasher_new(bool wide)
{
    tsr_hasher *h = calloc(1, sizeof *h);
    if (h == NULL) {
        return NULL;
    }
    h->wide = wide;
    h->state = XXH3_createState();
    if (h->state == NULL) {
        free(h);
        return NULL;
    }
    tsr_hasher_reset(h);
    return h;
}

tsr_hasher *tsr_hasher_new(void)
{
    return hasher_new(false);
}

tsr_hasher *tsr_hasher_new128(void)
{
    return hasher_new(true);
}

void tsr_hasher_reset(tsr_hasher *h)
{
    if (h->wide) {
        (void)XXH3_128bits_reset(h->state); /* fails only for a NULL state */
    } else {
        (void)XXH3_64bits_reset(h->state);
    }
}

void tsr_hasher_add(tsr_hasher *h, const void *p, size_t n)
{
    if (h->wide) {
        (void)XXH3_128bits_update(h->state, p, n);
    } else {
        (void)XXH3_64bits_update(h->state, p, n);
    }
}

uint64_t tsr_hasher_digest(const tsr_hasher *h)
{
    TSR_ASSERT(!h->wide);
    return XXH3_64bits_digest(h->state);
}

tsr_hash128 tsr_hasher_digest128(const tsr_hasher *h)
{
    TSR_ASSERT(h->wide);
    return canonical(XXH3_128bits_digest(h->state));
}

void tsr_hasher_free(tsr_hasher **h)
{
    if (h == NULL || *h == NULL) {
        return;
    }
    (void)XXH3_freeState((*h)->state);
    free(*h);
    *h = NULL;
}

void tsr_hash128_hex(const tsr_hash128 *h, char out[33])
{
    for (int i = 0; i < 16; i++) {
        (void)snprintf(out + (size_t)i * 2, 3, "%02x", h->b[i]);
    }
}
