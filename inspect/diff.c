/* diff.c - two views compared tensor by tensor in bounded memory. */
#include "inspect/inspect.h"
#include "kernels/numeric.h"

#include <fnmatch.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PIECE ((size_t)1 << 20) /* bytes of each side at a time; a multiple of every element size */
#define NAME_ROOM 4400
#define FAMILY_ROOM 128

typedef struct differ {
    const tsr_view *a, *b;
    const tsr_diff_opts *o;
    void (*fn)(void *payload, const tsr_diff_row *row);
    void *payload;
    tsr_diff_summary *out;
    uint8_t *buf_a, *buf_b;
    double *val_a, *val_b;
    double sum_diff, sum_a; /* squares */
    uint64_t total;
} differ;

const char *tsr_diff_state_name(tsr_diff_state s)
{
    static const char *const names[] = { "equal",         "only in A",     "only in B",
                                         "dtype differs", "shape differs", "bytes differ" };
    return (unsigned)s < 6 ? names[s] : "?";
}

static bool selected(const tsr_diff_opts *o, const char *name)
{
    if (o->globs == NULL || o->globs[0] == NULL) {
        return true;
    }
    for (size_t i = 0; o->globs[i] != NULL; i++) {
        if (fnmatch(o->globs[i], name, 0) == 0) {
            return true;
        }
    }
    return false;
}

/* Distance of two floats of one dtype in steps of their own precision. */
static uint64_t ulps(tsr_dtype dt, const uint8_t *a, const uint8_t *b)
{
    unsigned n = tsr_dtype_info((unsigned)dt)->bytes_per_unit;
    uint64_t x = 0, y = 0, sign = (uint64_t)1 << (n * 8 - 1);
    memcpy(&x, a, n);
    memcpy(&y, b, n);
    int64_t i = (x & sign) != 0 ? -(int64_t)(x & (sign - 1)) : (int64_t)x;
    int64_t k = (y & sign) != 0 ? -(int64_t)(y & (sign - 1)) : (int64_t)y;
    return i > k ? (uint64_t)i - (uint64_t)k : (uint64_t)k - (uint64_t)i;
}

static void note(tsr_diff_row *r, uint64_t index)
{
    if (r->different++ == 0) {
        r->first = index;
    }
}

/* 64-bit integers, which a double would round. */
static void compare_integers(differ *d, bool is_signed, uint64_t base, uint64_t n, tsr_diff_row *r)
{
    for (uint64_t i = 0; i < n; i++) {
        uint64_t x, y;
        memcpy(&x, d->buf_a + i * 8, 8);
        memcpy(&y, d->buf_b + i * 8, 8);
        double p = is_signed ? (double)(int64_t)x : (double)x;
        d->sum_a += p * p;
        if (x == y) {
            continue;
        }
        note(r, base + i);
        bool more = is_signed ? (int64_t)x > (int64_t)y : x > y;
        double off = (double)(more ? x - y : y - x);
        d->sum_diff += off * off;
        r->max_abs = off > r->max_abs ? off : r->max_abs;
    }
}

/* Element values of one piece. */
static void compare_values(differ *d, tsr_dtype dt, uint64_t base, uint64_t n, tsr_diff_row *r)
{
    const tsr_dtype_traits *t = tsr_dtype_info((unsigned)dt);
    if (dt == TSR_DT_I64 || dt == TSR_DT_U64) {
        compare_integers(d, dt == TSR_DT_I64, base, n, r);
        return;
    }
    tsr_to_f64(dt, d->buf_a, 0, n, d->val_a);
    tsr_to_f64(dt, d->buf_b, 0, n, d->val_b);
    for (uint64_t i = 0; i < n; i++) {
        double x = d->val_a[i], y = d->val_b[i];
        r->nan_a += isnan(x) != 0;
        r->nan_b += isnan(y) != 0;
        r->inf_a += isinf(x) != 0;
        r->inf_b += isinf(y) != 0;
        if (isfinite(x) && isfinite(y)) {
            d->sum_a += x * x;
            d->sum_diff += (x - y) * (x - y);
            r->max_abs = fabs(x - y) > r->max_abs ? fabs(x - y) : r->max_abs;
        }
        if (x == y || (isnan(x) && isnan(y))) {
            continue;
        }
        note(r, base + i);
        if (isfinite(x) && isfinite(y) && t->is_float && t->elems_per_unit == 1 && dt != TSR_DT_E8M0) {
            uint64_t u = ulps(dt, d->buf_a + i * t->bytes_per_unit, d->buf_b + i * t->bytes_per_unit);
            r->max_ulp = u > r->max_ulp ? u : r->max_ulp;
        }
    }
}

static void compare_bits(const differ *d, tsr_dtype dt, uint64_t base, size_t bytes, tsr_diff_row *r)
{
    const tsr_dtype_traits *t = tsr_dtype_info((unsigned)dt);
    if (memcmp(d->buf_a, d->buf_b, bytes) == 0) {
        return;
    }
    for (size_t i = 0; i < bytes; i += t->bytes_per_unit) {
        if (memcmp(d->buf_a + i, d->buf_b + i, t->bytes_per_unit) == 0) {
            continue;
        }
        uint64_t e = base + i / t->bytes_per_unit * t->elems_per_unit;
        if (t->elems_per_unit == 1) {
            note(r, e);
        } else {
            uint8_t x = d->buf_a[i] ^ d->buf_b[i];
            if ((x & 15) != 0) {
                note(r, e);
            }
            if ((x >> 4) != 0) {
                note(r, e + 1);
            }
        }
    }
}

static tsr_status compare_content(differ *d, int64_t ia, int64_t ib, tsr_dtype dt, uint64_t bytes,
                                  tsr_diff_row *r, tsr_err *err)
{
    const tsr_dtype_traits *t = tsr_dtype_info((unsigned)dt);
    d->sum_a = d->sum_diff = 0;
    for (uint64_t at = 0; at < bytes; at += PIECE) {
        size_t n = bytes - at < PIECE ? (size_t)(bytes - at) : PIECE;
        uint64_t base = at / t->bytes_per_unit * t->elems_per_unit;
        TSR_TRY(tsr_map_read(d->a->map, ia, at, d->buf_a, n, err));
        TSR_TRY(tsr_map_read(d->b->map, ib, at, d->buf_b, n, err));
        if (d->o->values) {
            compare_values(d, dt, base, n / t->bytes_per_unit * t->elems_per_unit, r);
        } else {
            compare_bits(d, dt, base, n, r);
        }
        d->out->bytes += n;
        if (d->o->progress.report != NULL) {
            d->o->progress.report(d->o->progress.payload, "diff", d->out->bytes, d->total);
        }
        if (d->o->progress.cancel != NULL && *d->o->progress.cancel != 0) {
            TSR_FAIL(err, TSR_E_CANCELLED, "comparison stopped");
        }
    }
    r->has_values = d->o->values;
    r->relative_l2 = d->sum_a > 0 ? sqrt(d->sum_diff / d->sum_a) : d->sum_diff > 0 ? HUGE_VAL : 0;
    return TSR_OK;
}

/* Both sides are checkpoints with the same chunks: checksums tell, without reading. -1: cannot tell. */
static int compare_hashes(const differ *d, uint32_t ga, uint32_t gb, int32_t expert)
{
    const tsr_ckpt *a = d->a->source->ckpt, *b = d->b->source->ckpt;
    tsr_tensor_info ta, tb;
    if (!d->o->hashes || a == NULL || b == NULL || tsr_ckpt_tensor(a, ga, &ta, NULL) != TSR_OK ||
        tsr_ckpt_tensor(b, gb, &tb, NULL) != TSR_OK || ta.chunks != tb.chunks ||
        ta.chunk_bytes != tb.chunk_bytes) {
        return -1;
    }
    uint32_t item = expert > 0 ? (uint32_t)expert : 0;
    for (uint32_t c = 0; c < ta.chunks; c++) {
        tsr_extent_info x, y;
        if (tsr_ckpt_extent(a, &ta, item, c, &x, NULL) != TSR_OK ||
            tsr_ckpt_extent(b, &tb, item, c, &y, NULL) != TSR_OK) {
            return -1;
        }
        if (x.raw_hash != y.raw_hash || x.payload_bytes != y.payload_bytes) {
            return 1;
        }
    }
    return 0;
}

static void tell(differ *d, tsr_diff_row *r)
{
    d->out->equal += r->state == TSR_DIFF_EQUAL;
    d->out->only_a += r->state == TSR_DIFF_ONLY_A;
    d->out->only_b += r->state == TSR_DIFF_ONLY_B;
    d->out->different += r->state > TSR_DIFF_ONLY_B;
    if (r->state != TSR_DIFF_EQUAL || d->o->equal_rows) {
        d->fn(d->payload, r);
    }
}

static tsr_status compare_item(differ *d, int64_t ia, const char *name, tsr_err *err)
{
    int32_t expert;
    uint32_t ga = tsr_map_group(d->a->map, ia, &expert), gb;
    const tsr_tensor_decl *x = &d->a->map->groups[ga];
    int64_t ib = tsr_map_find(d->b->map, name, &gb);
    tsr_diff_row r = { .name = name, .state = TSR_DIFF_ONLY_A, .dtype_a = x->dtype };
    if (ib >= 0 && d->b->map->src[ib] >= 0) {
        const tsr_tensor_decl *y = &d->b->map->groups[gb];
        uint64_t bytes = d->a->source->tensors[d->a->map->src[ia]].bytes;
        d->out->compared++;
        r.dtype_b = y->dtype;
        r.elements = 1;
        for (int i = 0; i < x->rank; i++) {
            r.elements *= (uint64_t)x->shape[i];
        }
        bool shape = x->rank == y->rank &&
                     (x->rank == 0 || memcmp(x->shape, y->shape, (size_t)x->rank * 8) == 0);
        r.state = x->dtype != y->dtype ? TSR_DIFF_DTYPE : !shape ? TSR_DIFF_SHAPE : TSR_DIFF_EQUAL;
        int hashed = r.state == TSR_DIFF_EQUAL ? compare_hashes(d, ga, gb, expert) : -1;
        if (r.state == TSR_DIFF_EQUAL && hashed < 0) {
            TSR_TRY(compare_content(d, ia, ib, x->dtype, bytes, &r, err));
        }
        if (r.state == TSR_DIFF_EQUAL && (r.different > 0 || hashed > 0)) {
            r.state = TSR_DIFF_BYTES;
        }
    }
    tell(d, &r);
    return TSR_OK;
}

static tsr_status compare_all(differ *d, tsr_err *err)
{
    char name[NAME_ROOM];
    const tsr_map *a = d->a->map, *b = d->b->map;
    for (int64_t i = 0; i < a->source->count; i++) {
        d->total += a->source->tensors[i].bytes;
    }
    for (int64_t i = 0; i < a->count; i++) {
        (void)tsr_map_name(a, i, name, sizeof name);
        if (a->src[i] >= 0 && selected(d->o, name)) {
            TSR_TRY(compare_item(d, i, name, err));
        }
    }
    for (int64_t i = 0; i < b->count; i++) {
        (void)tsr_map_name(b, i, name, sizeof name);
        int64_t other = b->src[i] >= 0 && selected(d->o, name) ? tsr_map_find(a, name, NULL) : 0;
        if (b->src[i] >= 0 && selected(d->o, name) && (other < 0 || a->src[other] < 0)) {
            tsr_diff_row r = { .name = name,
                               .state = TSR_DIFF_ONLY_B,
                               .dtype_b = b->groups[tsr_map_group(b, i, NULL)].dtype };
            tell(d, &r);
        }
    }
    const tsr_source *s = d->a->source, *t = d->b->source;
    char family_a[FAMILY_ROOM], family_b[FAMILY_ROOM];
    d->out->arch_differs = tsr_view_family(d->a, family_a, sizeof family_a) &&
                           tsr_view_family(d->b, family_b, sizeof family_b) &&
                           strcmp(family_a, family_b) != 0;
    d->out->config_differs = s->config_json != NULL && t->config_json != NULL &&
                             (s->config_bytes != t->config_bytes ||
                              memcmp(s->config_json, t->config_json, s->config_bytes) != 0);
    return TSR_OK;
}

tsr_status tsr_inspect_diff(const tsr_view *a, const tsr_view *b, const tsr_diff_opts *o,
                            void (*fn)(void *payload, const tsr_diff_row *row), void *payload,
                            tsr_diff_summary *out, tsr_err *err)
{
    *out = (tsr_diff_summary){ 0 };
    size_t values = o->values ? PIECE * 2 * sizeof(double) : 0; /* packed types: two elements a byte */
    differ d = { .a = a, .b = b, .o = o, .fn = fn, .payload = payload, .out = out };
    uint8_t *all = malloc(2 * PIECE + 2 * values);
    if (all == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    d.buf_a = all;
    d.buf_b = all + PIECE;
    d.val_a = (double *)(void *)(all + 2 * PIECE);
    d.val_b = d.val_a + values / sizeof(double);
    tsr_status st = compare_all(&d, err);
    free(all);
    return st;
}
