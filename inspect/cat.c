/* cat.c - values of one tensor as text, hex, raw bytes or .npy; streams row by row. */
#include "inspect/inspect.h"
#include "kernels/numeric.h"

#include <errno.h>
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RUN_MAX 16384 /* elements of one row handled at a time; a multiple of 32 */

typedef struct selection {
    int64_t from[TSR_RANK_MAX], to[TSR_RANK_MAX];
    bool drop[TSR_RANK_MAX]; /* a single index: the dimension disappears */
} selection;

typedef struct printer {
    const tsr_view *v;
    const tsr_cat_opts *o;
    bool (*put)(void *payload, const void *data, size_t n);
    void *payload;
    const char *name;
    int64_t item, scales; /* items of the map; scales -1: none */
    tsr_dtype dtype, out; /* as stored; as written (TSR_DT_NONE: stored codes) */
    int rank;
    int64_t shape[TSR_RANK_MAX];
    selection sel;
    uint64_t *to_inf;
    uint8_t raw[RUN_MAX * 8 + 16], scale[RUN_MAX / 32 + 2], enc[RUN_MAX * 8];
    double val[RUN_MAX + 2];
    char text[RUN_MAX * 32];
} printer;

/* ---- slices ------------------------------------------------------------------------------------------------------ */

/* A number of a slice, counted from the end when negative; it may still lie outside the dimension. */
static bool parse_bound(const char **s, int64_t dim, int64_t fallback, int64_t *out)
{
    if (**s == ':' || **s == ',' || **s == '\0') {
        *out = fallback;
        return true;
    }
    char *end;
    errno = 0;
    long long v = strtoll(*s, &end, 10);
    if (end == *s || errno != 0) {
        return false;
    }
    *s = end;
    *out = v < 0 ? v + dim : v;
    return true;
}

/* Bounds of a range end at the dimension's, as in Python. */
static int64_t clamp(int64_t v, int64_t dim)
{
    return v < 0 ? 0 : v > dim ? dim : v;
}

static tsr_status parse_slice(printer *p, tsr_err *err)
{
    const char *s = p->o->slice;
    for (int i = 0; i < p->rank; i++) {
        p->sel.from[i] = 0;
        p->sel.to[i] = p->shape[i];
        p->sel.drop[i] = false;
    }
    for (int i = 0; s != NULL && *s != '\0'; i++) {
        while (*s == ' ') {
            s++;
        }
        const char *begin = s;
        if (i >= p->rank || !parse_bound(&s, p->shape[i], 0, &p->sel.from[i])) {
            TSR_FAIL(err, TSR_E_USAGE, "--slice %s: does not fit the %d dimensions of %s (write 0:4,:,3)",
                     p->o->slice, p->rank, p->name);
        }
        if (*s == ':') {
            s++;
            if (!parse_bound(&s, p->shape[i], p->shape[i], &p->sel.to[i])) {
                TSR_FAIL(err, TSR_E_USAGE, "--slice %s: not a slice (write 0:4,:,3)", p->o->slice);
            }
            p->sel.from[i] = clamp(p->sel.from[i], p->shape[i]);
            p->sel.to[i] = clamp(p->sel.to[i], p->shape[i]);
        } else {
            p->sel.drop[i] = true;
            if (s == begin || p->sel.from[i] < 0 || p->sel.from[i] >= p->shape[i]) {
                TSR_FAIL(err, TSR_E_USAGE, "--slice %s: index outside dimension %d of %s, which has %lld",
                         p->o->slice, i, p->name, (long long)p->shape[i]);
            }
            p->sel.to[i] = p->sel.from[i] + 1;
        }
        p->sel.to[i] = p->sel.to[i] < p->sel.from[i] ? p->sel.from[i] : p->sel.to[i];
        if (*s != ',' && *s != '\0') {
            TSR_FAIL(err, TSR_E_USAGE, "--slice %s: not a slice (write 0:4,:,3)", p->o->slice);
        }
        s += *s == ',';
    }
    return TSR_OK;
}

/* ---- elements ---------------------------------------------------------------------------------------------------- */

/* Elements [c, c + n) of row `row` (all but the last index, flattened): raw codes, then values. */
static tsr_status load_run(printer *p, int64_t row, int64_t c, int64_t n, tsr_err *err)
{
    const tsr_dtype_traits *t = tsr_dtype_info((unsigned)p->dtype);
    int64_t cols = p->rank > 0 ? p->shape[p->rank - 1] : 1;
    int64_t lead = c % t->elems_per_unit, from = c - lead, whole = n + lead + (n + lead) % t->elems_per_unit;
    uint64_t off = ((uint64_t)row * (uint64_t)cols + (uint64_t)from) / t->elems_per_unit * t->bytes_per_unit;
    TSR_TRY(tsr_map_read(p->v->map, p->item, off, p->raw,
                         (size_t)(whole / t->elems_per_unit) * t->bytes_per_unit, err));
    tsr_to_f64(p->dtype, p->raw, (uint64_t)lead, (uint64_t)n, p->val);
    if (p->scales < 0 || p->o->codes) {
        return TSR_OK;
    }
    int64_t first = c / 32, count = (c + n + 31) / 32 - first;
    TSR_TRY(tsr_map_read(p->v->map, p->scales, (uint64_t)row * (uint64_t)(cols / 32) + (uint64_t)first,
                         p->scale, (size_t)count, err));
    for (int64_t i = 0; i < n; i++) {
        p->val[i] *= (double)tsr_e8m0_to_f32(p->scale[(c + i) / 32 - first]);
        if (p->out != TSR_DT_F64 && p->out != TSR_DT_NONE && fabs(p->val[i]) > (double)FLT_MAX) {
            if (!p->o->saturate) {
                TSR_FAIL(err, TSR_E_NUMERIC,
                         "%s: row %lld: %g does not fit %s (--saturate accepts the largest value)", p->name,
                         (long long)row, p->val[i], tsr_dtype_name((unsigned)p->out));
            }
            p->val[i] = copysign((double)FLT_MAX, p->val[i]);
        }
    }
    return TSR_OK;
}

/* Rounds to odd, so that a second rounding to a shorter format gives what one rounding of v would have given. */
static float to_odd(double v)
{
    float f = (float)v;
    uint32_t u;
    if (!isfinite(v) || (double)f == v) {
        return f;
    }
    memcpy(&u, &f, sizeof u);
    u -= fabs((double)f) > fabs(v); /* towards zero; from infinity to the largest finite */
    u |= 1;
    memcpy(&f, &u, sizeof f);
    return f;
}

/* v to dt at dst. True when a finite v became infinite. */
static bool encode_one(tsr_dtype dt, double v, bool saturate, uint8_t *dst)
{
    static const float most_f16 = 65504, most_bf16 = 0x1.fep127f;
    float f = dt == TSR_DT_F32 ? (float)v : to_odd(v);
    double back;
    tsr_from_f32(dt, &f, 1, dst, NULL);
    tsr_to_f64(dt, dst, 0, 1, &back);
    if (!isinf(back) || isinf(v)) {
        return false;
    }
    if (saturate) {
        f = copysignf(dt == TSR_DT_F16 ? most_f16 : dt == TSR_DT_BF16 ? most_bf16 : FLT_MAX, f);
        tsr_from_f32(dt, &f, 1, dst, NULL);
    }
    return !saturate;
}

/* p->val to the output dtype in p->enc (bytes an element returned). */
static size_t encode_run(printer *p, int64_t n)
{
    size_t size = tsr_dtype_info((unsigned)p->out)->bytes_per_unit;
    if (p->dtype == p->out) { /* bits as they are, also of a signalling NaN */
        memcpy(p->enc, p->raw, (size_t)n * size);
    } else if (p->out == TSR_DT_F64) {
        memcpy(p->enc, p->val, (size_t)n * size);
    } else {
        for (int64_t i = 0; i < n; i++) {
            *p->to_inf += encode_one(p->out, p->val[i], p->o->saturate, p->enc + (size_t)i * size);
        }
    }
    return size;
}

static tsr_status put_all(printer *p, const void *data, size_t n, tsr_err *err)
{
    return p->put(p->payload, data, n) ? TSR_OK
                                       : TSR_ERR(err, TSR_E_IO, "%s: output cannot be written", p->name);
}

static uint64_t bits_at(const uint8_t *p, size_t size)
{
    uint64_t v = 0;
    memcpy(&v, p, size);
    return v;
}

/* One element as text; returns its length. */
static int text_of(const printer *p, int64_t i, char *buf, size_t room)
{
    tsr_dtype dt = p->out != TSR_DT_NONE ? p->out : p->dtype;
    if (p->o->format == TSR_CAT_HEX) {
        const tsr_dtype_traits *t = tsr_dtype_info((unsigned)dt);
        if (p->out == TSR_DT_NONE &&
            t->elems_per_unit == 2) { /* val holds bare codes' values: take the nibble */
            uint8_t byte = p->raw[i / 2];
            return snprintf(buf, room, "%x", i % 2 == 0 ? byte & 15 : byte >> 4);
        }
        const uint8_t *from = p->out != TSR_DT_NONE ? p->enc : p->raw;
        return snprintf(buf, room, "%0*" PRIx64, t->bytes_per_unit * 2,
                        bits_at(from + (size_t)i * t->bytes_per_unit, t->bytes_per_unit));
    }
    if (p->out == TSR_DT_NONE && (dt == TSR_DT_I64 || dt == TSR_DT_U64)) {
        uint64_t v = bits_at(p->raw + (size_t)i * 8, 8);
        return dt == TSR_DT_I64 ? snprintf(buf, room, "%" PRId64, (int64_t)v)
                                : snprintf(buf, room, "%" PRIu64, v);
    }
    double v = p->val[i];
    if (p->out != TSR_DT_NONE) { /* the value after rounding */
        tsr_to_f64(p->out, p->enc, (uint64_t)i, 1, &v);
    }
    if (isnan(v)) {
        return snprintf(buf, room, "nan");
    }
    bool integer = !tsr_dtype_info((unsigned)dt)->is_float;
    int digits = integer ? 10 : dt == TSR_DT_F64 ? 17 : 9; /* ten hold 32 bits */
    return snprintf(buf, room, "%.*g", digits, v);
}

static tsr_status print_run(printer *p, int64_t c, int64_t n, bool first, tsr_err *err)
{
    size_t size = p->out != TSR_DT_NONE ? encode_run(p, n) : 0;
    if (p->o->format == TSR_CAT_RAW || p->o->format == TSR_CAT_NPY) {
        const tsr_dtype_traits *t = tsr_dtype_info((unsigned)p->dtype);
        if (p->out == TSR_DT_NONE && t->elems_per_unit > 1 && (c % 2 != 0 || n % 2 != 0)) {
            TSR_FAIL(err, TSR_E_USAGE, "--slice: packed codes are cut at even columns only");
        }
        return p->out != TSR_DT_NONE
                   ? put_all(p, p->enc, (size_t)n * size, err)
                   : put_all(p, p->raw, (size_t)n / t->elems_per_unit * t->bytes_per_unit, err);
    }
    size_t used = 0;
    if (p->out == TSR_DT_NONE && tsr_dtype_info((unsigned)p->dtype)->elems_per_unit > 1 && c % 2 != 0) {
        for (int64_t i = 0; i < n; i++) { /* shift nibbles so that element i is at i */
            int64_t k = i + 1;
            uint8_t code = k % 2 == 0 ? p->raw[k / 2] & 15 : p->raw[k / 2] >> 4;
            p->enc[i] = code;
        }
        for (int64_t i = 0; i < n; i += 2) {
            p->raw[i / 2] = (uint8_t)(p->enc[i] | (i + 1 < n ? p->enc[i + 1] << 4 : 0));
        }
    }
    for (int64_t i = 0; i < n; i++) {
        if (!first || i > 0) {
            p->text[used++] = ' ';
        }
        used += (size_t)text_of(p, i, p->text + used, 31);
    }
    return put_all(p, p->text, used, err);
}

/* ---- npy --------------------------------------------------------------------------------------------------------------- */

static tsr_status npy_header(printer *p, tsr_err *err)
{
    static const char *const descr[TSR_DT_COUNT] = {
        [TSR_DT_F64] = "<f8", [TSR_DT_F32] = "<f4", [TSR_DT_F16] = "<f2", [TSR_DT_BF16] = "<u2",
        [TSR_DT_I64] = "<i8", [TSR_DT_I32] = "<i4", [TSR_DT_I16] = "<i2", [TSR_DT_I8] = "|i1",
        [TSR_DT_U64] = "<u8", [TSR_DT_U32] = "<u4", [TSR_DT_U16] = "<u2", [TSR_DT_BOOL] = "|b1",
    };
    tsr_dtype dt = p->out != TSR_DT_NONE ? p->out : p->dtype;
    char head[2048], shape[1024] = "";
    size_t used = 0;
    int kept = 0;
    for (int i = 0; i < p->rank; i++) {
        int64_t n = p->sel.to[i] - p->sel.from[i];
        if (i == p->rank - 1 && p->out == TSR_DT_NONE) {
            n /= tsr_dtype_info((unsigned)dt)->elems_per_unit;
        }
        if (!p->sel.drop[i]) {
            used += (size_t)snprintf(shape + used, sizeof shape - used, "%s%" PRId64, kept++ > 0 ? ", " : "",
                                     n);
        }
    }
    int n = snprintf(head, sizeof head - 64, "{'descr': '%s', 'fortran_order': False, 'shape': (%s%s), }",
                     descr[dt] != NULL ? descr[dt] : "|u1", shape, kept == 1 ? "," : "");
    size_t total = ((size_t)n + 11 + 63) / 64 * 64; /* magic + version + length + text + newline */
    memset(head + n, ' ', total - 11 - (size_t)n);
    head[total - 11] = '\n';
    size_t len = total - 10;
    uint8_t pre[10] = { 0x93, 'N', 'U', 'M', 'P', 'Y', 1, 0, (uint8_t)(len & 255), (uint8_t)(len >> 8) };
    TSR_TRY(put_all(p, pre, sizeof pre, err));
    return put_all(p, head, len, err);
}

/* ---- rows --------------------------------------------------------------------------------------------------------------- */

static tsr_status print_row(printer *p, int64_t row, tsr_err *err)
{
    int64_t from = p->rank > 0 ? p->sel.from[p->rank - 1] : 0, to = p->rank > 0 ? p->sel.to[p->rank - 1] : 1;
    for (int64_t c = from; c < to; c += RUN_MAX) {
        int64_t n = to - c < RUN_MAX ? to - c : RUN_MAX;
        TSR_TRY(load_run(p, row, c, n, err));
        TSR_TRY(print_run(p, c, n, c == from, err));
    }
    bool text = p->o->format == TSR_CAT_TEXT || p->o->format == TSR_CAT_HEX;
    return text ? put_all(p, "\n", 1, err) : TSR_OK;
}

static tsr_status print_all(printer *p, tsr_err *err)
{
    int64_t at[TSR_RANK_MAX];
    int outer = p->rank - 1;
    for (int i = 0; i < p->rank; i++) {
        if (p->sel.from[i] >= p->sel.to[i]) {
            return TSR_OK; /* nothing selected */
        }
        at[i] = p->sel.from[i];
    }
    for (;;) {
        int64_t row = 0;
        for (int i = 0; i < outer; i++) {
            row = row * p->shape[i] + at[i];
        }
        TSR_TRY(print_row(p, row, err));
        int k = outer - 1;
        while (k >= 0 && ++at[k] >= p->sel.to[k]) {
            at[k] = p->sel.from[k];
            k--;
        }
        if (k < 0) {
            return TSR_OK;
        }
    }
}

/* A raw pair X.weight_packed / X.weight_scale becomes one MXFP4 tensor. */
static tsr_status join_pair(printer *p, tsr_err *err)
{
    char other[4400];
    size_t n = strlen(p->name), tail = strlen("_packed");
    if (n < tail || strcmp(p->name + n - tail, "_packed") != 0 || p->dtype != TSR_DT_U8 || p->rank == 0) {
        TSR_FAIL(err, TSR_E_USAGE, "--mxfp4: %s: wants a u8 tensor called X.weight_packed", p->name);
    }
    if (p->shape[p->rank - 1] > INT64_MAX / 2) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: %lld columns of two codes are too many", p->name,
                 (long long)p->shape[p->rank - 1]);
    }
    (void)snprintf(other, sizeof other, "%.*s_scale", (int)(n - tail), p->name);
    p->scales = tsr_map_find(p->v->map, other, NULL);
    if (p->scales < 0 || p->v->map->src[p->scales] < 0) {
        TSR_FAIL(err, TSR_E_MISSING, "--mxfp4: %s: its scales %s are not there", p->name, other);
    }
    p->dtype = TSR_DT_MXFP4;
    p->shape[p->rank - 1] *= 2;
    return TSR_OK;
}

static tsr_status set_up(printer *p, tsr_err *err)
{
    const tsr_map *m = p->v->map;
    int32_t expert;
    const tsr_tensor_decl *d = &m->groups[tsr_map_group(m, p->item, &expert)];
    p->dtype = d->dtype;
    p->rank = d->rank;
    p->scales = -1;
    if (d->rank > 0) {
        memcpy(p->shape, d->shape, (size_t)d->rank * sizeof *p->shape);
    }
    if (d->partner >= 0) {
        p->scales = m->group_first[d->partner] + (expert > 0 ? expert : 0);
    }
    if (p->o->mxfp4 && d->dtype != TSR_DT_MXFP4) {
        TSR_TRY(join_pair(p, err));
    }
    p->out = p->o->as;
    if (p->scales >= 0) {
        int64_t cols = p->shape[p->rank - 1];
        uint64_t rows = 1;
        for (int i = 0; i < p->rank - 1; i++) {
            rows *= (uint64_t)p->shape[i];
        }
        if (cols % 32 != 0 || m->source->tensors[m->src[p->scales]].bytes != rows * (uint64_t)(cols / 32)) {
            TSR_FAIL(err, TSR_E_FORMAT,
                     "%s: %lld columns need one scale per 32, its scale tensor has another size", p->name,
                     (long long)cols);
        }
        bool values = p->o->format == TSR_CAT_TEXT || p->o->format == TSR_CAT_NPY;
        if (p->out == TSR_DT_NONE && values && !p->o->codes) {
            p->out = TSR_DT_F32; /* true values */
        }
    }
    return parse_slice(p, err);
}

tsr_status tsr_inspect_cat(const tsr_view *v, int64_t item, const tsr_cat_opts *o,
                           bool (*put)(void *payload, const void *data, size_t n), void *payload,
                           uint64_t *to_inf, tsr_err *err)
{
    char name[4400];
    uint64_t spare = 0;
    printer *p = calloc(1, sizeof *p);
    if (p == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    (void)tsr_map_name(v->map, item, name, sizeof name);
    p->v = v;
    p->o = o;
    p->put = put;
    p->payload = payload;
    p->name = name;
    p->item = item;
    p->to_inf = to_inf != NULL ? to_inf : &spare;
    *p->to_inf = 0;
    tsr_status st = set_up(p, err);
    if (st == TSR_OK && o->format == TSR_CAT_NPY) {
        st = npy_header(p, err);
    }
    if (st == TSR_OK) {
        st = print_all(p, err);
    }
    free(p);
    return st;
}
