/* weights.c - a view as the source of a model's numbers. How experts lie is found out once, per layer. */
#include "convert/weights.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NONE UINT32_MAX
#define ALIGN 64

static const char *const part_names[TSR_PART_COUNT] = { "gate.weight", "up.weight", "down.weight",
                                                        "gate.scale",  "up.scale",  "down.scale" };

typedef enum reading {
    EACH,   /* one read per matrix */
    DIRECT, /* one read into the caller's memory; matrices that need decoding go behind it */
    SCRATCH /* one read into memory of ours; matrices are decoded or copied from there */
} reading;

typedef struct expert_layer {
    uint32_t group[TSR_PART_COUNT]; /* of the map; NONE */
    uint32_t experts;               /* 0: this layer has none */
    reading how;
    uint64_t bytes; /* what read_expert needs */
    uint64_t span;  /* the longest read */
} expert_layer;

/* Memory for one read, kept for the next one. */
typedef struct scratch {
    struct scratch *next;
    uint8_t data[];
} scratch;

typedef struct weights {
    tsr_source *source;
    const tsr_map *map;
    expert_layer *layers;
    int32_t layer_count;
    uint64_t scratch_bytes;
    pthread_mutex_t lock; /* guards idle */
    scratch *idle;
} weights;

/* ---- plain tensors ------------------------------------------------------------------------------------------------- */

static tsr_status find(void *payload, const char *name, tsr_weight_info *out, tsr_err *err)
{
    const weights *w = payload;
    uint32_t g;
    int64_t item = tsr_map_find(w->map, name, &g);
    if (item < 0 || w->map->src[item] < 0) {
        TSR_FAIL(err, TSR_E_MISSING, "%s: no tensor is called %.200s", w->source->path, name);
    }
    const tsr_tensor_decl *d = &w->map->groups[g];
    if (d->rank > 4) {
        TSR_FAIL(err, TSR_E_UNSUPPORTED, "%s: %.200s: has %d dimensions, a model's tensors at most 4",
                 w->source->path, name, d->rank);
    }
    *out = (tsr_weight_info){
        .id = item, .dtype = d->dtype, .rank = d->rank, .bytes = w->source->tensors[w->map->src[item]].bytes
    };
    for (int i = 0; i < d->rank; i++) {
        out->shape[i] = d->shape[i];
    }
    return TSR_OK;
}

static tsr_status read_item(void *payload, int64_t id, void *dst, size_t bytes, tsr_err *err)
{
    const weights *w = payload;
    TSR_ASSERT(id >= 0 && id < w->map->count && w->map->src[id] >= 0);
    TSR_ASSERT(bytes == w->source->tensors[w->map->src[id]].bytes);
    return tsr_map_read(w->map, id, 0, dst, bytes, err);
}

/* ---- how experts lie ------------------------------------------------------------------------------------------------ */

/* Source tensor of one part of one expert; -1: not there. */
static int64_t part_source(const weights *w, const expert_layer *l, uint32_t expert, int part)
{
    uint32_t g = l->group[part];
    return g == NONE ? -1 : w->map->src[w->map->group_first[g] + expert];
}

/* What one expert asks for, by way of reading it. */
typedef struct needs {
    uint64_t span;    /* bytes of the one read; 0: there is no such */
    uint64_t each;    /* room of all parts, aligned */
    uint64_t behind;  /* room of the parts that need decoding */
    uint64_t encoded; /* their bytes within the span */
} needs;

static bool more(uint64_t *sum, uint64_t bytes)
{
    return bytes <= UINT64_MAX - ALIGN && tsr_add_u64(*sum, tsr_align_up(bytes, ALIGN), sum);
}

/* One matrix in a checkpoint: its room when decoded, its stored bytes, whether it lies ready in one piece. */
static tsr_status stored_part(const tsr_ckpt *c, uint32_t tensor, uint32_t expert, uint64_t *room,
                              uint64_t *stored, bool *ready, tsr_err *err)
{
    tsr_tensor_info t;
    uint64_t next = 0;
    TSR_TRY(tsr_ckpt_tensor(c, tensor, &t, err));
    *room = t.item_bytes;
    *stored = 0;
    *ready = t.chunks > 0;
    for (uint32_t k = 0; k < t.chunks; k++) {
        tsr_extent_info x;
        uint64_t end;
        TSR_TRY(tsr_ckpt_extent(c, &t, expert, k, &x, err));
        if (!tsr_add_u64(x.item_offset, x.raw_bytes, &end) || !tsr_add_u64(*stored, x.stored_bytes, stored)) {
            TSR_FAIL(err, TSR_E_LIMIT, "%s: %s: too large", tsr_ckpt_path(c), t.name);
        }
        *ready = *ready && x.codec == TSR_CODEC_RAW && x.raw_bytes == x.payload_bytes &&
                 (k == 0 || x.offset == next);
        *room = end > *room ? end : *room; /* a padded last chunk decodes to more than the matrix */
        next = x.offset + x.stored_bytes;
    }
    return TSR_OK;
}

static tsr_status ckpt_needs(const weights *w, const expert_layer *l, int32_t layer, uint32_t expert,
                             needs *out, tsr_err *err)
{
    const tsr_ckpt *c = w->source->ckpt;
    tsr_expert_span span;
    *out = (needs){ 0 };
    tsr_status st = tsr_ckpt_expert_span(c, layer, expert, TSR_CLASS_EXPERTS, &span, err);
    if (st != TSR_OK && st != TSR_E_UNSUPPORTED) {
        return st;
    }
    out->span = st == TSR_OK ? span.bytes : 0;
    for (int p = 0; p < TSR_PART_COUNT; p++) {
        uint64_t room, stored;
        bool ready, fits = true;
        if (l->group[p] == NONE) {
            continue;
        }
        TSR_TRY(stored_part(c, l->group[p], expert, &room, &stored, &ready, err));
        if (!ready) {
            fits = more(&out->behind, room) && tsr_add_u64(out->encoded, stored, &out->encoded);
        }
        if (!fits || !more(&out->each, room)) {
            TSR_FAIL(err, TSR_E_LIMIT, "%s: layer %d: expert %u: too large", w->source->path, layer, expert);
        }
    }
    return TSR_OK;
}

/* Where the parts of one expert lie in a file. True when one read brings them and little else. */
static bool file_span(const weights *w, const expert_layer *l, uint32_t expert, uint32_t *file,
                      uint64_t *begin, uint64_t *end)
{
    uint64_t sum = 0;
    *file = NONE;
    *begin = UINT64_MAX;
    *end = 0;
    for (int p = 0; p < TSR_PART_COUNT; p++) {
        int64_t i = part_source(w, l, expert, p);
        if (i < 0) {
            continue;
        }
        const tsr_src_tensor *t = &w->source->tensors[i];
        if (*file != NONE && t->file != *file) {
            return false;
        }
        *file = t->file;
        *begin = t->offset < *begin ? t->offset : *begin;
        *end = t->offset + t->bytes > *end ? t->offset + t->bytes : *end;
        sum += t->bytes;
    }
    return w->source->ops->read_range != NULL && sum > 0 && *end - *begin <= sum + sum / 16;
}

static tsr_status file_needs(const weights *w, const expert_layer *l, uint32_t expert, needs *out,
                             tsr_err *err)
{
    uint32_t file;
    uint64_t begin, end;
    *out = (needs){ 0 };
    for (int p = 0; p < TSR_PART_COUNT; p++) {
        int64_t i = part_source(w, l, expert, p);
        if (i >= 0 && !more(&out->each, w->source->tensors[i].bytes)) {
            TSR_FAIL(err, TSR_E_LIMIT, "%s: %s: too large", w->source->path, w->source->tensors[i].name);
        }
    }
    out->span = file_span(w, l, expert, &file, &begin, &end) ? end - begin : 0;
    return TSR_OK;
}

/* Chooses how this layer's experts are read: the same way for all of them. */
static tsr_status choose(weights *w, int32_t layer, tsr_err *err)
{
    expert_layer *l = &w->layers[layer];
    uint64_t each = 0, direct = 0;
    bool spans = true, ready = true;
    for (uint32_t e = 0; e < l->experts; e++) {
        needs n;
        if (part_source(w, l, e, TSR_PART_GATE) < 0) {
            continue; /* of a partial view */
        }
        TSR_TRY(w->source->ckpt != NULL ? ckpt_needs(w, l, layer, e, &n, err) : file_needs(w, l, e, &n, err));
        uint64_t whole = n.behind;
        if (!more(&whole, n.span)) {
            TSR_FAIL(err, TSR_E_LIMIT, "%s: layer %d: expert %u: too large", w->source->path, layer, e);
        }
        spans = spans && n.span > 0;
        ready = ready && n.encoded <= n.span / 16; /* the room that is lost to it */
        each = n.each > each ? n.each : each;
        direct = whole > direct ? whole : direct;
        l->span = n.span > l->span ? n.span : l->span;
    }
    l->how = !spans ? EACH : ready ? DIRECT : SCRATCH;
    l->bytes = l->how == DIRECT ? direct : each;
    if (l->how == SCRATCH && l->span > w->scratch_bytes) {
        w->scratch_bytes = l->span;
    }
    return TSR_OK;
}

/* The families of one layer. */
static tsr_status find_layer(weights *w, int32_t layer, tsr_err *err)
{
    expert_layer *l = &w->layers[layer];
    for (int p = 0; p < TSR_PART_COUNT; p++) {
        char name[64];
        (void)snprintf(name, sizeof name, "layers.%d.experts.{e}.%s", layer, part_names[p]);
        (void)tsr_map_find(w->map, name, &l->group[p]);
        uint32_t n = l->group[p] != NONE ? w->map->groups[l->group[p]].expert_count : 0;
        if (n > 0 && l->experts > 0 && n != l->experts) {
            TSR_FAIL(err, TSR_E_UNSUPPORTED, "%s: %s: %u experts, others of this layer have %u",
                     w->source->path, name, n, l->experts);
        }
        l->experts = n > 0 ? n : l->experts;
        l->group[p] = n > 0 ? l->group[p] : NONE;
    }
    if (l->group[TSR_PART_GATE] == NONE || l->group[TSR_PART_UP] == NONE || l->group[TSR_PART_DOWN] == NONE) {
        l->experts = 0; /* expert_bytes says so */
    }
    return l->experts > 0 ? choose(w, layer, err) : TSR_OK;
}

static tsr_status find_layers(weights *w, tsr_err *err)
{
    for (uint32_t g = 0; g < w->map->group_count; g++) {
        const tsr_tensor_decl *d = &w->map->groups[g];
        if (d->klass == TSR_CLASS_EXPERTS && d->layer >= w->layer_count && d->layer < 1 << 20) {
            w->layer_count = d->layer + 1;
        }
    }
    w->layers = calloc((size_t)w->layer_count + 1, sizeof *w->layers);
    if (w->layers == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    for (int32_t i = 0; i < w->layer_count; i++) {
        TSR_TRY(find_layer(w, i, err));
    }
    return TSR_OK;
}

/* ---- reading experts -------------------------------------------------------------------------------------------------- */

static tsr_status layer_of(const weights *w, int32_t layer, const expert_layer **out, tsr_err *err)
{
    *out = layer >= 0 && layer < w->layer_count ? &w->layers[layer] : NULL;
    if (*out == NULL || (*out)->experts == 0) {
        TSR_FAIL(err, TSR_E_MISSING, "%s: layer %d has no experts with gate, up and down", w->source->path,
                 layer);
    }
    return TSR_OK;
}

static tsr_status expert_bytes(void *payload, int32_t layer, uint64_t *bytes, tsr_err *err)
{
    const expert_layer *l;
    *bytes = 0;
    TSR_TRY(layer_of(payload, layer, &l, err));
    *bytes = l->bytes;
    return TSR_OK;
}

/* What is left of the caller's memory. */
typedef struct room {
    uint8_t *at;
    uint64_t left;
} room;

static uint8_t *take(room *r, uint64_t bytes)
{
    uint64_t n = tsr_align_up(bytes, ALIGN);
    TSR_ASSERT(n <= r->left); /* choose() counted it */
    uint8_t *p = r->at;
    r->at += n;
    r->left -= n;
    return p;
}

static tsr_status read_each(const weights *w, const expert_layer *l, uint32_t expert, room r,
                            const void *part[TSR_PART_COUNT], uint64_t *read_bytes, tsr_err *err)
{
    for (int p = 0; p < TSR_PART_COUNT; p++) {
        uint64_t stored, bytes;
        bool ready;
        if (l->group[p] == NONE) {
            continue;
        }
        int64_t item = w->map->group_first[l->group[p]] + expert;
        bytes = stored = w->source->tensors[w->map->src[item]].bytes;
        if (w->source->ckpt != NULL) {
            TSR_TRY(stored_part(w->source->ckpt, l->group[p], expert, &bytes, &stored, &ready, err));
        }
        uint8_t *to = take(&r, bytes);
        TSR_TRY(tsr_map_read(w->map, item, 0, to, w->source->tensors[w->map->src[item]].bytes, err));
        part[p] = to;
        *read_bytes += stored;
    }
    return TSR_OK;
}

static tsr_status read_range(const weights *w, const expert_layer *l, uint32_t expert, uint8_t *dst,
                             const void *part[TSR_PART_COUNT], uint64_t *read_bytes, tsr_err *err)
{
    uint32_t file;
    uint64_t begin, end;
    bool one = file_span(w, l, expert, &file, &begin, &end);
    TSR_ASSERT(one); /* choose() saw it */
    TSR_TRY(w->source->ops->read_range(w->source, file, begin, dst, end - begin, err));
    for (int p = 0; p < TSR_PART_COUNT; p++) {
        int64_t i = part_source(w, l, expert, p);
        part[p] = i >= 0 ? dst + (w->source->tensors[i].offset - begin) : NULL;
    }
    *read_bytes = end - begin;
    return TSR_OK;
}

/* One matrix that was read with its expert, chunk by chunk to its place. */
static tsr_status decode(const weights *w, const tsr_tensor_info *t, uint32_t expert,
                         const tsr_expert_span *span, const uint8_t *bytes, uint8_t *to, tsr_err *err)
{
    char name[600];
    (void)tsr_tensor_item_name(t, expert, name, sizeof name);
    for (uint32_t k = 0; k < t->chunks; k++) { /* ascending: padding of a chunk is overwritten by the next */
        tsr_extent_info x;
        TSR_TRY(tsr_ckpt_extent(w->source->ckpt, t, expert, k, &x, err));
        const uint8_t *from = bytes + (x.offset - span->offset);
        if (x.codec == TSR_CODEC_RAW) {
            memcpy(to + x.item_offset, from, x.payload_bytes);
            continue;
        }
        if (tsr_hash64(from, x.stored_bytes) != x.hash) {
            TSR_FAIL(err, TSR_E_FORMAT, "%s: %s: checksum differs: the data is damaged (tessera verify)",
                     w->source->path, name);
        }
        tsr_status st = tsr_extent_decode(&x, t->dtype, from, to + x.item_offset, err);
        if (st != TSR_OK) {
            tsr_err_prefix(err, "%s: %s", w->source->path, name);
            return st;
        }
    }
    return TSR_OK;
}

/* bytes: where the one read goes, dst itself or scratch. */
static tsr_status read_span(const weights *w, const expert_layer *l, int32_t layer, uint32_t expert,
                            uint8_t *bytes, room r, const void *part[TSR_PART_COUNT], uint64_t *read_bytes,
                            tsr_err *err)
{
    tsr_expert_matrix m[TSR_EXPERT_MATRIX_MAX];
    tsr_expert_span span;
    bool direct = l->how == DIRECT;
    TSR_TRY(tsr_ckpt_expert_span(w->source->ckpt, layer, expert, TSR_CLASS_EXPERTS, &span, err));
    TSR_ASSERT(span.bytes <= l->span);
    if (direct) {
        (void)take(&r, span.bytes);
    }
    TSR_TRY(tsr_ckpt_read_expert(w->source->ckpt, layer, expert, TSR_CLASS_EXPERTS, bytes, span.bytes, m, 0,
                                 err));
    *read_bytes = span.bytes;
    for (uint32_t i = 0; i < span.matrix_count; i++) {
        int p = 0;
        while (p < TSR_PART_COUNT && l->group[p] != m[i].tensor.id) {
            p++;
        }
        if (p == TSR_PART_COUNT) {
            continue; /* a matrix no model asks for */
        }
        if (direct && m[i].data != NULL) {
            part[p] = m[i].data;
            continue;
        }
        uint64_t need, stored;
        bool ready;
        TSR_TRY(stored_part(w->source->ckpt, l->group[p], expert, &need, &stored, &ready, err));
        uint8_t *to = take(&r, need);
        TSR_TRY(decode(w, &m[i].tensor, expert, &span, bytes, to, err));
        part[p] = to;
    }
    return TSR_OK;
}

static scratch *borrow(weights *w, tsr_err *err)
{
    (void)pthread_mutex_lock(&w->lock);
    scratch *s = w->idle;
    w->idle = s != NULL ? s->next : NULL;
    (void)pthread_mutex_unlock(&w->lock);
    s = s != NULL ? s : malloc(sizeof *s + w->scratch_bytes);
    if (s == NULL) {
        TSR_IGNORE(TSR_ERR(err, TSR_E_LIMIT, "out of memory: %llu bytes for a compressed expert",
                           (unsigned long long)w->scratch_bytes)); /* NULL says it */
    }
    return s;
}

static void give_back(weights *w, scratch *s)
{
    (void)pthread_mutex_lock(&w->lock);
    s->next = w->idle;
    w->idle = s;
    (void)pthread_mutex_unlock(&w->lock);
}

static tsr_status read_expert(void *payload, int32_t layer, int32_t expert, void *dst, size_t dst_bytes,
                              const void *part[TSR_PART_COUNT], uint64_t *read_bytes, tsr_err *err)
{
    weights *w = payload;
    const expert_layer *l;
    uint32_t e = (uint32_t)expert;
    *read_bytes = 0;
    memset((void *)part, 0, TSR_PART_COUNT * sizeof *part);
    TSR_TRY(layer_of(w, layer, &l, err));
    if (expert < 0 || e >= l->experts) {
        TSR_FAIL(err, TSR_E_MISSING, "%s: layer %d: expert %d: experts go from 0 to %u", w->source->path,
                 layer, expert, l->experts - 1);
    }
    for (int p = 0; p < TSR_PART_COUNT; p++) {
        if (l->group[p] != NONE && part_source(w, l, e, p) < 0) {
            TSR_FAIL(err, TSR_E_MISSING, "%s: layer %d: expert %d: %s is missing", w->source->path, layer,
                     expert, part_names[p]);
        }
    }
    if (dst_bytes < l->bytes) {
        TSR_FAIL(err, TSR_E_LIMIT, "%s: layer %d: an expert takes %llu bytes, there is room for %zu",
                 w->source->path, layer, (unsigned long long)l->bytes, dst_bytes);
    }
    room r = { dst, dst_bytes };
    if (l->how == EACH) {
        return read_each(w, l, e, r, part, read_bytes, err);
    }
    if (w->source->ckpt == NULL) {
        return read_range(w, l, e, dst, part, read_bytes, err);
    }
    if (l->how == DIRECT) {
        return read_span(w, l, layer, e, dst, r, part, read_bytes, err);
    }
    scratch *s = borrow(w, err);
    if (s == NULL) {
        return TSR_E_LIMIT;
    }
    tsr_status st = read_span(w, l, layer, e, s->data, r, part, read_bytes, err);
    give_back(w, s);
    return st;
}

/* ---- the source ------------------------------------------------------------------------------------------------------ */

void tsr_view_weights_done(tsr_weight_source *s)
{
    weights *w = s->payload;
    *s = (tsr_weight_source){ 0 };
    if (w == NULL) {
        return;
    }
    while (w->idle != NULL) {
        scratch *next = w->idle->next;
        free(w->idle);
        w->idle = next;
    }
    (void)pthread_mutex_destroy(&w->lock);
    free(w->layers);
    free(w);
}

tsr_status tsr_view_weights(tsr_weight_source *out, const tsr_view *v, tsr_err *err)
{
    *out = (tsr_weight_source){ 0 };
    weights *w = calloc(1, sizeof *w);
    if (w == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    w->source = v->source;
    w->map = v->map;
    (void)pthread_mutex_init(&w->lock, NULL); /* cannot fail with default attributes */
    *out = (tsr_weight_source){ .payload = w,
                                .find = find,
                                .read = read_item,
                                .expert_bytes = expert_bytes,
                                .read_expert = read_expert };
    tsr_status st = find_layers(w, err);
    if (st != TSR_OK) {
        tsr_view_weights_done(out);
    }
    return st;
}
