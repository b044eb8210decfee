/* split_fused.c - see split_fused.h. Model types: the released configs and modelling code of transformers. */
#include "convert/split_fused.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MATRIX_BYTES_MAX                                                                                     \
    ((uint64_t)1 << 30) /* one expert of an interleaved stack is held whole while it is turned */

typedef struct piece {
    int64_t src;    /* tensor of the inner source */
    int32_t expert; /* -1: passed through */
    int32_t part;   /* 0 gate, 1 up, 2 down */
} piece;

typedef struct split_source {
    tsr_source pub; /* first */
    tsr_source *inner;
    tsr_arena *arena;
    piece *pieces;
    bool interleaved;
} split_source;

/* 0: no stack of experts, 1: gate_up, 2: down. *layer is its layer. */
static int stack_kind(const tsr_src_tensor *t, int64_t *layer)
{
    const char *at = strstr(t->name, "layers.");
    if (at == NULL || t->rank != 3 || t->bytes == 0 || t->shape[0] > (1 << 20) ||
        tsr_dtype_info(t->dtype)->elems_per_unit != 1) {
        return 0;
    }
    *layer = strtol(at + 7, NULL, 10);
    const char *leaf = strstr(t->name, ".experts.");
    if (strspn(at + 7, "0123456789") == 0 || strspn(at + 7, "0123456789") > 7 || leaf == NULL) {
        return 0;
    }
    leaf += strlen(".experts.");
    if (strcmp(leaf, "gate_up_proj") == 0 || strcmp(leaf, "gate_up_proj.weight") == 0) {
        return 1;
    }
    return strcmp(leaf, "down_proj") == 0 || strcmp(leaf, "down_proj.weight") == 0 ? 2 : 0;
}

static tsr_status choose(const tsr_source *s, const char *gate_up, const char *name, bool *interleaved,
                         tsr_err *err)
{
    static const char *const halves[] = { "mixtral",     "qwen2_moe", "qwen3_moe",
                                          "deepseek_v3", "kimi_k2",   "glm4_moe" };
    char type[64] = "";
    if (gate_up != NULL) {
        *interleaved = strcmp(gate_up, "interleaved") == 0;
        return *interleaved || strcmp(gate_up, "halves") == 0
                   ? TSR_OK
                   : TSR_ERR(err, TSR_E_USAGE, "--gate-up %s: interleaved or halves", gate_up);
    }
    if (s->config_json != NULL) {
        json_t *root = json_loadb(s->config_json, s->config_bytes, 0, NULL);
        const char *t = json_string_value(json_object_get(root, "model_type"));
        (void)snprintf(type, sizeof type, "%s", t != NULL ? t : "");
        json_decref(root);
    }
    *interleaved = strcmp(type, "gpt_oss") == 0;
    for (size_t i = 0; !*interleaved && i < sizeof halves / sizeof *halves; i++) {
        if (strcmp(type, halves[i]) == 0) {
            return TSR_OK;
        }
    }
    if (*interleaved) {
        return TSR_OK;
    }
    TSR_FAIL(err, TSR_E_CONFLICT,
             "%s: %s: gate and up may be interleaved or halves, and model_type \"%s\" does not tell"
             " (--gate-up interleaved|halves; --arch raw keeps it whole)",
             s->path, name, type);
}

static void split_close(tsr_source *pub)
{
    split_source *s = (split_source *)(void *)pub;
    tsr_source_close(&s->inner);
    free(s->pieces);
    free((void *)(uintptr_t)s->pub.tensors);
    tsr_arena_free(&s->arena);
    free(s);
}

/* Bytes [off, off + n) of part [out][in] of an interleaved stack's expert, whose matrix is [in][width]. */
static tsr_status turn(const split_source *s, const piece *p, const tsr_src_tensor *t, uint64_t off,
                       uint8_t *dst, size_t n, tsr_err *err)
{
    uint64_t elem = tsr_dtype_info(t->dtype)->bytes_per_unit, in = (uint64_t)t->shape[1],
             width = (uint64_t)t->shape[2];
    uint64_t step = p->part == 2 ? 1 : 2, matrix = in * width * elem;
    if (matrix > MATRIX_BYTES_MAX) {
        TSR_FAIL(err, TSR_E_LIMIT, "%s: one expert has %llu bytes, too many to be turned", t->name,
                 (unsigned long long)matrix);
    }
    uint8_t *m = malloc(matrix + 1);
    if (m == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "%s: out of memory", t->name);
    }
    tsr_status st = tsr_source_read(s->inner, p->src, (uint64_t)p->expert * matrix, m, matrix, err);
    for (uint64_t i = 0; st == TSR_OK && i < n; i++) { /* byte by byte: a read may begin inside an element */
        uint64_t e = (off + i) / elem, row = e / in, col = e % in;
        uint64_t from = col * width + row * step + (p->part == 1);
        dst[i] = m[from * elem + (off + i) % elem];
    }
    free(m);
    return st;
}

static tsr_status split_read(tsr_source *pub, int64_t i, uint64_t off, void *dst, size_t n, tsr_err *err)
{
    const split_source *s = (const split_source *)(const void *)pub;
    const piece *p = &s->pieces[i];
    const tsr_src_tensor *t = &s->inner->tensors[p->src];
    if (p->expert < 0) {
        return tsr_source_read(s->inner, p->src, off, dst, n, err);
    }
    if (s->interleaved) {
        return turn(s, p, t, off, dst, n, err);
    }
    uint64_t matrix = t->bytes / (uint64_t)t->shape[0];
    uint64_t from = (uint64_t)p->expert * matrix + (p->part == 1 ? matrix / 2 : 0);
    return tsr_source_read(s->inner, p->src, from + off, dst, n, err);
}

static tsr_status split_read_asset(tsr_source *pub, int64_t asset, char **out, tsr_err *err)
{
    const split_source *s = (const split_source *)(const void *)pub;
    return s->inner->ops->read_asset(s->inner, asset, out, err);
}

static const tsr_source_ops split_ops = { .name = "fused",
                                          .what = "fused experts",
                                          .read = split_read,
                                          .read_asset = split_read_asset,
                                          .close = split_close };

/* One expert's matrix as a tensor of its own. */
static tsr_status add_piece(split_source *s, tsr_src_tensor *list, int64_t src, int32_t e, int32_t part,
                            int64_t layer, tsr_err *err)
{
    static const char *const leaf[] = { "gate", "up", "down" };
    const tsr_src_tensor *t = &s->inner->tensors[src];
    char name[128];
    int n = snprintf(name, sizeof name, "layers.%lld.experts.%d.%s.weight", (long long)layer, e, leaf[part]);
    int64_t *shape = tsr_arena_alloc(s->arena, 2 * sizeof *shape);
    const char *kept = tsr_arena_strndup(s->arena, name, (size_t)n);
    if (shape == NULL || kept == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    int64_t a = t->shape[s->interleaved ? 2 : 1], b = t->shape[s->interleaved ? 1 : 2];
    shape[0] = part == 2 ? a : a / 2;
    shape[1] = b;
    list[s->pub.count] = (tsr_src_tensor){ .name = kept,
                                           .shape = shape,
                                           .bytes = t->bytes / (uint64_t)t->shape[0] / (part == 2 ? 1 : 2),
                                           .offset = t->offset,
                                           .file = t->file,
                                           .dtype = t->dtype,
                                           .rank = 2 };
    s->pieces[s->pub.count++] = (piece){ src, e, part };
    return TSR_OK;
}

static tsr_status fill(split_source *s, tsr_src_tensor *list, tsr_err *err)
{
    for (int64_t i = 0; i < s->inner->count; i++) {
        const tsr_src_tensor *t = &s->inner->tensors[i];
        int64_t layer;
        int kind = stack_kind(t, &layer);
        if (kind == 0) {
            list[s->pub.count] = *t;
            s->pieces[s->pub.count++] = (piece){ i, -1, 0 };
            continue;
        }
        if (kind == 1 && t->shape[s->interleaved ? 2 : 1] % 2 != 0) {
            TSR_FAIL(err, TSR_E_FORMAT, "%s: %s: an odd number of rows cannot be gate and up", s->inner->path,
                     t->name);
        }
        for (int32_t e = 0; e < t->shape[0]; e++) {
            for (int32_t part = kind == 1 ? 0 : 2; part < (kind == 1 ? 2 : 3); part++) {
                TSR_TRY(add_piece(s, list, i, e, part, layer, err));
            }
        }
    }
    return TSR_OK;
}

tsr_status split_fused(tsr_source **source, const char *gate_up, bool *split, tsr_err *err)
{
    tsr_source *in = *source;
    int64_t layer, room = in->count, first = -1;
    bool interleaved = false;
    *split = false;
    for (int64_t i = 0; i < in->count; i++) {
        int kind = stack_kind(&in->tensors[i], &layer);
        room += kind != 0 ? 2 * in->tensors[i].shape[0] : 0;
        first = kind == 1 && first < 0 ? i : first;
    }
    if (first < 0) {
        return TSR_OK;
    }
    TSR_TRY(choose(in, gate_up, in->tensors[first].name, &interleaved, err));
    split_source *s = calloc(1, sizeof *s);
    tsr_src_tensor *list = malloc(((size_t)room + 1) * sizeof *list);
    tsr_arena *arena = tsr_arena_new(0);
    piece *pieces = malloc(((size_t)room + 1) * sizeof *pieces);
    if (s == NULL || list == NULL || arena == NULL || pieces == NULL) {
        free(s);
        free(list);
        free(pieces);
        tsr_arena_free(&arena);
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    s->pub = *in;
    s->pub.ops = &split_ops;
    s->pub.tensors = list;
    s->pub.count = 0;
    s->arena = arena;
    s->pieces = pieces;
    s->interleaved = interleaved;
    s->inner = in;
    tsr_status st = fill(s, list, err);
    if (st != TSR_OK) {
        s->inner = NULL; /* stays the caller's */
        split_close(&s->pub);
        return st;
    }
    *source = &s->pub;
    *split = true;
    return TSR_OK;
}
