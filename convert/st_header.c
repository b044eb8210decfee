/* st_header.c - see st_header.h. yajl reads the JSON as a stream; the rules of the format are checked here. */
#include "convert/st_header.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <yajl/yajl_parse.h>

bool st_utf8(const uint8_t *s, size_t n)
{
    for (size_t i = 0; i < n;) {
        uint8_t c = s[i];
        size_t more = c < 0x80                ? 0
                      : c >= 0xc2 && c < 0xe0 ? 1
                      : c >= 0xe0 && c < 0xf0 ? 2
                      : c >= 0xf0 && c < 0xf5 ? 3
                                              : 9;
        if (c == 0 || more == 9 || more >= n - i + 0u) {
            return false;
        }
        for (size_t k = 1; k <= more; k++) {
            if ((s[i + k] & 0xc0) != 0x80) {
                return false;
            }
        }
        if ((c == 0xe0 && s[i + 1] < 0xa0) || (c == 0xed && s[i + 1] > 0x9f) ||
            (c == 0xf0 && s[i + 1] < 0x90) || (c == 0xf4 && s[i + 1] > 0x8f)) {
            return false;
        }
        i += more + 1;
    }
    return true;
}

/* ---- what kind of file ---------------------------------------------------------------------------------------- */

static bool has_word(const uint8_t *p, size_t n, const char *word)
{
    size_t w = strlen(word);
    for (size_t i = 0; i + w <= n; i++) {
        size_t k = 0;
        while (k < w && (p[i + k] | 0x20) == (uint8_t)word[k]) {
            k++;
        }
        if (k == w) {
            return true;
        }
    }
    return false;
}

static tsr_status lfs_pointer(const char *file, const uint8_t *first, size_t n, tsr_err *err)
{
    char text[512];
    size_t len = n < sizeof text - 1 ? n : sizeof text - 1;
    memcpy(text, first, len);
    text[len] = '\0';
    const char *size = strstr(text, "\nsize ");
    int digits = size != NULL ? (int)strspn(size + 6, "0123456789") : 0;
    if (digits > 0) {
        TSR_FAIL(err, TSR_E_MISSING, "%s: Git LFS pointer, the real file has %.*s bytes (git lfs pull)", file,
                 digits, size + 6);
    }
    TSR_FAIL(err, TSR_E_MISSING, "%s: Git LFS pointer, the real file is not here (git lfs pull)", file);
}

tsr_status st_header_length(const char *file, const uint8_t *first, size_t first_bytes, uint64_t file_bytes,
                            uint64_t *out, tsr_err *err)
{
    static const char lfs[] = "version https://git-lfs";
    if (first_bytes >= sizeof lfs - 1 && memcmp(first, lfs, sizeof lfs - 1) == 0) {
        return lfs_pointer(file, first, first_bytes, err);
    }
    size_t blank = 0;
    while (blank < first_bytes &&
           (first[blank] == ' ' || first[blank] == '\n' || first[blank] == '\t' || first[blank] == '\r')) {
        blank++;
    }
    if (blank < first_bytes && first[blank] == '<' &&
        (has_word(first + blank, first_bytes - blank < 256 ? first_bytes - blank : 256, "<!doctype") ||
         has_word(first + blank, first_bytes - blank < 256 ? first_bytes - blank : 256, "<html"))) {
        TSR_FAIL(err, TSR_E_FORMAT,
                 "%s: looks like HTML, not safetensors (a login or error page was saved; download it again)",
                 file);
    }
    if (file_bytes < 8 || first_bytes < 8) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: file has %llu bytes, too short for safetensors (download it again)",
                 file, (unsigned long long)file_bytes);
    }
    uint64_t n;
    memcpy(&n, first, 8);
    if (n > file_bytes - 8) {
        bool text = first_bytes > 8 && first[8] == '{'; /* then it is a safetensors file that was cut */
        TSR_FAIL(
            err, TSR_E_FORMAT,
            text ? "%s: cut inside the header: file has %llu bytes, header promises %llu (download it again)"
                 : "%s: not a safetensors file: %llu bytes, but a header of %llu is promised",
            file, (unsigned long long)file_bytes, (unsigned long long)(n > UINT64_MAX - 8 ? n : n + 8));
    }
    if (n < 2 || n > ST_HEADER_BYTES_MAX || (first_bytes > 8 && first[8] != '{')) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: not a safetensors file: its header of %llu bytes is no JSON object",
                 file, (unsigned long long)n);
    }
    *out = n;
    return TSR_OK;
}

/* ---- JSON ------------------------------------------------------------------------------------------------------- */

enum where { AT_START, IN_TOP, IN_METADATA, IN_ENTRY, IN_SHAPE, IN_OFFSETS, AT_END };
enum field { F_NONE, F_DTYPE = 1, F_SHAPE = 2, F_OFFSETS = 4 };

typedef struct parser {
    tsr_arena *arena;
    const char *file;
    tsr_err *err;
    tsr_status st;
    enum where at;
    enum field field;
    unsigned seen; /* fields of this entry */
    const char *name;
    char dtype[24];
    int64_t dims[TSR_RANK_MAX];
    int rank;
    uint64_t offsets[2];
    int offset_count;
    st_entry *list;
    int64_t count, room;
    bool metadata;
    const char **meta_keys;
    int64_t meta_count, meta_room;
} parser;

#define STOP(p, code, ...) return (p)->st = TSR_ERR((p)->err, (code), __VA_ARGS__), 0

static const char *keep(parser *p, const unsigned char *s, size_t n)
{
    if (!st_utf8(s, n)) {
        p->st = TSR_ERR(p->err, TSR_E_FORMAT, "%s: header: a key is not UTF-8", p->file);
        return NULL;
    }
    const char *copy = tsr_arena_strndup(p->arena, (const char *)s, n);
    if (copy == NULL) {
        p->st = TSR_ERR(p->err, TSR_E_LIMIT, "%s: header needs more memory than allowed (--mem-limit)",
                        p->file);
    }
    return copy;
}

static int on_map(void *ctx)
{
    parser *p = ctx;
    if (p->at == AT_START) {
        p->at = IN_TOP;
    } else if (p->at == IN_TOP && p->name != NULL) {
        if (strcmp(p->name, "__metadata__") == 0) {
            if (p->metadata) {
                STOP(p, TSR_E_FORMAT, "%s: __metadata__: duplicate key", p->file);
            }
            p->metadata = true;
            p->at = IN_METADATA;
        } else {
            p->at = IN_ENTRY;
            p->seen = 0;
            p->field = F_NONE;
        }
    } else {
        STOP(p, TSR_E_FORMAT, "%s: %s: an object where none belongs", p->file,
             p->name != NULL ? p->name : "header");
    }
    return 1;
}

static int meta_key(parser *p, const unsigned char *s, size_t n)
{
    const char *key = keep(p, s, n);
    if (key == NULL) {
        return 0;
    }
    if (p->meta_count == p->meta_room) {
        p->meta_room = p->meta_room * 2 + 16;
        const char **grown = tsr_arena_alloc(p->arena, (size_t)p->meta_room * sizeof *grown);
        if (grown == NULL) {
            STOP(p, TSR_E_LIMIT, "%s: header needs more memory than allowed (--mem-limit)", p->file);
        }
        if (p->meta_count > 0) {
            memcpy(grown, p->meta_keys, (size_t)p->meta_count * sizeof *grown);
        }
        p->meta_keys = grown;
    }
    p->meta_keys[p->meta_count++] = key;
    return 1;
}

static int on_key(void *ctx, const unsigned char *s, size_t n)
{
    parser *p = ctx;
    if (p->at == IN_METADATA) {
        return meta_key(p, s, n);
    }
    if (p->at == IN_TOP) {
        p->name = keep(p, s, n);
        return p->name != NULL;
    }
    p->field = n == 5 && memcmp(s, "dtype", 5) == 0            ? F_DTYPE
               : n == 5 && memcmp(s, "shape", 5) == 0          ? F_SHAPE
               : n == 12 && memcmp(s, "data_offsets", 12) == 0 ? F_OFFSETS
                                                               : F_NONE;
    if (p->field == F_NONE) {
        STOP(p, TSR_E_FORMAT, "%s: %s: unknown key \"%.*s\"", p->file, p->name, (int)(n < 60 ? n : 60),
             (const char *)s);
    }
    if ((p->seen & (unsigned)p->field) != 0) {
        STOP(p, TSR_E_FORMAT, "%s: %s: duplicate key \"%.*s\"", p->file, p->name, (int)n, (const char *)s);
    }
    p->seen |= (unsigned)p->field;
    return 1;
}

static int on_string(void *ctx, const unsigned char *s, size_t n)
{
    parser *p = ctx;
    if (p->at == IN_METADATA) {
        if (!st_utf8(s, n)) {
            STOP(p, TSR_E_FORMAT, "%s: __metadata__: a value is not UTF-8", p->file);
        }
        return 1;
    }
    if (p->at != IN_ENTRY || p->field != F_DTYPE || n >= sizeof p->dtype) {
        STOP(p, TSR_E_FORMAT, "%s: %s: a string where none belongs", p->file,
             p->name != NULL ? p->name : "header");
    }
    memcpy(p->dtype, s, n);
    p->dtype[n] = '\0';
    return 1;
}

static int on_array(void *ctx)
{
    parser *p = ctx;
    if (p->at != IN_ENTRY || (p->field != F_SHAPE && p->field != F_OFFSETS)) {
        STOP(p, TSR_E_FORMAT, "%s: %s: a list where none belongs", p->file,
             p->name != NULL ? p->name : "header");
    }
    p->at = p->field == F_SHAPE ? IN_SHAPE : IN_OFFSETS;
    p->rank = p->field == F_SHAPE ? 0 : p->rank;
    p->offset_count = p->field == F_OFFSETS ? 0 : p->offset_count;
    return 1;
}

static int on_array_end(void *ctx)
{
    parser *p = ctx;
    if (p->at == IN_OFFSETS && p->offset_count != 2) {
        STOP(p, TSR_E_FORMAT, "%s: %s: data_offsets has %d numbers, not 2", p->file, p->name,
             p->offset_count);
    }
    p->at = IN_ENTRY;
    return 1;
}

static int on_number(void *ctx, const char *s, size_t n)
{
    parser *p = ctx;
    uint64_t v = 0;
    if (p->at != IN_SHAPE && p->at != IN_OFFSETS) {
        STOP(p, TSR_E_FORMAT, "%s: %s: a number where none belongs", p->file,
             p->name != NULL ? p->name : "header");
    }
    bool good = n > 0 && !(s[0] == '0' && n > 1);
    for (size_t i = 0; good && i < n; i++) {
        good = s[i] >= '0' && s[i] <= '9' && tsr_mul_u64(v, 10, &v) &&
               tsr_add_u64(v, (uint64_t)(s[i] - '0'), &v);
    }
    if (!good || v > INT64_MAX) {
        STOP(p, TSR_E_FORMAT, "%s: %s: %.*s is not a size", p->file, p->name, (int)(n < 40 ? n : 40), s);
    }
    if (p->at == IN_SHAPE) {
        if (p->rank >= TSR_RANK_MAX) {
            STOP(p, TSR_E_LIMIT, "%s: %s: more than %d dimensions", p->file, p->name, TSR_RANK_MAX);
        }
        p->dims[p->rank++] = (int64_t)v;
    } else {
        if (p->offset_count >= 2) {
            STOP(p, TSR_E_FORMAT, "%s: %s: data_offsets has more than 2 numbers", p->file, p->name);
        }
        p->offsets[p->offset_count++] = v;
    }
    return 1;
}

static int on_other(void *ctx)
{
    parser *p = ctx;
    STOP(p, TSR_E_FORMAT, "%s: %s: null where it does not belong", p->file,
         p->name != NULL ? p->name : "header");
}

static int on_bool(void *ctx, int v)
{
    (void)v;
    return on_other(ctx);
}

static int end_entry(parser *p)
{
    if (p->seen != (F_DTYPE | F_SHAPE | F_OFFSETS)) {
        STOP(p, TSR_E_FORMAT, "%s: %s: dtype, shape or data_offsets is missing", p->file, p->name);
    }
    tsr_dtype dt = tsr_dtype_from_st(p->dtype);
    if (dt == TSR_DT_NONE) {
        STOP(p, TSR_E_UNSUPPORTED, "%s: %s: dtype %s is not supported", p->file, p->name, p->dtype);
    }
    uint64_t bytes;
    if (!tsr_shape_bytes(dt, p->rank, p->dims, &bytes)) {
        STOP(p, TSR_E_FORMAT, "%s: %s: size mismatch: the shape is impossible for %s", p->file, p->name,
             p->dtype);
    }
    if (p->offsets[0] > p->offsets[1] || p->offsets[1] - p->offsets[0] != bytes) {
        STOP(p, TSR_E_FORMAT, "%s: %s: size mismatch: shape needs %llu bytes, range has %lld", p->file,
             p->name, (unsigned long long)bytes, (long long)(p->offsets[1] - p->offsets[0]));
    }
    if (p->count == p->room) {
        int64_t room = p->room * 2 + 32;
        st_entry *grown = tsr_arena_alloc(p->arena, (size_t)room * sizeof *grown);
        if (grown == NULL) {
            STOP(p, TSR_E_LIMIT, "%s: header needs more memory than allowed (--mem-limit)", p->file);
        }
        if (p->count > 0) {
            memcpy(grown, p->list, (size_t)p->count * sizeof *grown);
        }
        p->list = grown;
        p->room = room;
    }
    int64_t *shape = tsr_arena_alloc(p->arena, (size_t)p->rank * sizeof *shape);
    if (shape == NULL) {
        STOP(p, TSR_E_LIMIT, "%s: header needs more memory than allowed (--mem-limit)", p->file);
    }
    memcpy(shape, p->dims, (size_t)p->rank * sizeof *shape);
    p->list[p->count++] = (st_entry){ .name = p->name,
                                      .shape = shape,
                                      .begin = p->offsets[0],
                                      .end = p->offsets[1],
                                      .dtype = (uint8_t)dt,
                                      .rank = (uint8_t)p->rank };
    return 1;
}

static int on_map_end(void *ctx)
{
    parser *p = ctx;
    int go = 1;
    if (p->at == IN_ENTRY) {
        go = end_entry(p);
    }
    p->at = p->at == IN_TOP ? AT_END : IN_TOP;
    p->name = NULL;
    return go;
}

static tsr_status run_parser(parser *p, const uint8_t *json, size_t n)
{
    static const yajl_callbacks calls = { on_other, on_bool, NULL,       NULL,     on_number,   on_string,
                                          on_map,   on_key,  on_map_end, on_array, on_array_end };
    yajl_handle h = yajl_alloc(&calls, NULL, p);
    if (h == NULL) {
        return TSR_ERR(p->err, TSR_E_LIMIT, "out of memory");
    }
    yajl_status ys = yajl_parse(h, json, n);
    if (ys == yajl_status_ok) {
        ys = yajl_complete_parse(h);
    }
    if (p->st == TSR_OK && ys != yajl_status_ok) {
        unsigned char *text = yajl_get_error(h, 0, json, n);
        char line[160];
        (void)snprintf(line, sizeof line, "%.150s", text != NULL ? (const char *)text : "?");
        line[strcspn(line, "\n")] = '\0';
        p->st = TSR_ERR(p->err, TSR_E_FORMAT, "%s: header: %s at byte %zu", p->file, line,
                        yajl_get_bytes_consumed(h));
        yajl_free_error(h, text);
    }
    yajl_free(h);
    if (p->st == TSR_OK && p->at != AT_END) {
        p->st = TSR_ERR(p->err, TSR_E_FORMAT, "%s: header: is not a JSON object", p->file);
    }
    return p->st;
}

/* ---- rules over all entries ------------------------------------------------------------------------------------------ */

static int by_name(const void *a, const void *b)
{
    return strcmp((*(const st_entry *const *)a)->name, (*(const st_entry *const *)b)->name);
}

static int by_range(const void *a, const void *b)
{
    const st_entry *x = *(const st_entry *const *)a, *y = *(const st_entry *const *)b;
    if (x->begin != y->begin) {
        return x->begin < y->begin ? -1 : 1;
    }
    return x->end < y->end ? -1 : x->end > y->end;
}

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static tsr_status check_tiling(const st_entry **sorted, int64_t n, st_header *h, const char *file,
                               uint64_t head_bytes, uint64_t data_bytes, bool allow_trailing, tsr_err *err)
{
    const st_entry *last = NULL;
    uint64_t at = 0;
    for (int64_t i = 0; i < n; i++) {
        const st_entry *e = sorted[i];
        if (e->begin == e->end) {
            continue; /* no bytes: may stand anywhere */
        }
        if (e->begin < at) {
            bool same = last->begin == e->begin && last->end == e->end;
            TSR_FAIL(err, TSR_E_FORMAT,
                     same ? "%s: %s and %s: same range for two tensors" : "%s: %s and %s overlap", file,
                     last->name, e->name);
        }
        if (e->begin > at) {
            TSR_FAIL(err, TSR_E_FORMAT, "%s: hole of %llu bytes between %s and %s", file,
                     (unsigned long long)(e->begin - at), last != NULL ? last->name : "the header", e->name);
        }
        at = e->end;
        last = e;
    }
    for (int64_t i = 0; i < n; i++) {
        if (sorted[i]->begin == sorted[i]->end && sorted[i]->begin > at) {
            TSR_FAIL(err, TSR_E_FORMAT, "%s: %s: size mismatch: its empty range lies behind the data", file,
                     sorted[i]->name);
        }
    }
    h->data_bytes = at;
    if (at > data_bytes) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: %s: file has %llu bytes, header promises %llu (download it again)",
                 file, last->name, (unsigned long long)(head_bytes + data_bytes),
                 (unsigned long long)(head_bytes + at));
    }
    h->trailing = data_bytes - at;
    if (h->trailing > 0 && !allow_trailing) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: %llu trailing bytes behind %s (--allow-trailing accepts them)", file,
                 (unsigned long long)h->trailing, last != NULL ? last->name : "the header");
    }
    return TSR_OK;
}

tsr_status st_header_parse(st_header *out, tsr_arena *arena, const char *file, const uint8_t *json, size_t n,
                           uint64_t data_bytes, bool allow_trailing, tsr_err *err)
{
    tsr_err spare;
    parser p = {
        .arena = arena, .file = file, .err = err != NULL ? err : &spare, .st = TSR_OK, .at = AT_START
    };
    *out = (st_header){ 0 };
    uint64_t head_bytes = 8 + (uint64_t)n;
    while (n > 0 && json[n - 1] == ' ') {
        n--; /* padding */
    }
    TSR_TRY(run_parser(&p, json, n));
    out->entries = p.list;
    out->count = p.count;
    out->has_metadata = p.metadata;
    if (p.meta_count > 1) {
        qsort(p.meta_keys, (size_t)p.meta_count, sizeof *p.meta_keys, by_text);
        for (int64_t i = 0; i + 1 < p.meta_count; i++) {
            if (strcmp(p.meta_keys[i], p.meta_keys[i + 1]) == 0) {
                TSR_FAIL(err, TSR_E_FORMAT, "%s: __metadata__: duplicate key \"%.200s\"", file,
                         p.meta_keys[i]);
            }
        }
    }
    const st_entry **sorted = malloc(((size_t)p.count + 1) * sizeof *sorted);
    if (sorted == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "%s: out of memory", file);
    }
    for (int64_t i = 0; i < p.count; i++) {
        sorted[i] = &p.list[i];
    }
    tsr_status st = TSR_OK;
    qsort(sorted, (size_t)p.count, sizeof *sorted, by_name);
    for (int64_t i = 0; st == TSR_OK && i + 1 < p.count; i++) {
        if (strcmp(sorted[i]->name, sorted[i + 1]->name) == 0) {
            st = TSR_ERR(err, TSR_E_FORMAT, "%s: %s: duplicate key", file, sorted[i]->name);
        }
    }
    if (st == TSR_OK) {
        qsort(sorted, (size_t)p.count, sizeof *sorted, by_range);
        st = check_tiling(sorted, p.count, out, file, head_bytes, data_bytes, allow_trailing, err);
    }
    free(sorted);
    return st;
}
