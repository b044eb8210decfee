/* session_file.c - a session's state as a checkpoint of its own: committed by rename, checksummed, visible to ls, cat and
 * verify. */
#include "model/model_priv.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KIND "tessera session"

typedef struct piece { /* of the state: one tensor of the file */
    char name[40];
    int64_t shape[3];
    int rank;
    tsr_dtype dtype;
    const void *data; /* backend memory; the tokens: host */
    bool host;
    uint64_t bytes;
} piece;

/* pieces: room for 2 * layers + 1. */
static uint32_t pieces_of(const tsr_session *s, const int32_t *tokens, int64_t length, piece *out)
{
    const tsr_spec *p = &s->m->spec;
    uint32_t n = 0;
    for (int32_t i = 0; i < p->layers; i++) {
        int64_t d = p->kda_head_dim, h = p->kda_heads;
        if (p->layer_kind[i] == TSR_LAYER_KDA) {
            out[n] = (piece){ .shape = { h, d, d }, .rank = 3, .dtype = TSR_DT_F32, .data = s->state[i] };
            (void)snprintf(out[n++].name, sizeof out->name, "layers.%d.state", i);
            out[n] = (piece){
                .shape = { 3, p->conv_kernel - 1, h * d }, .rank = 3, .dtype = TSR_DT_F32, .data = s->conv[i]
            };
            (void)snprintf(out[n++].name, sizeof out->name, "layers.%d.conv", i);
        } else {
            out[n] = (piece){ .shape = { length, p->kv_lora + p->qk_rope },
                              .rank = 2,
                              .dtype = s->dtype,
                              .data = s->cache[i] };
            (void)snprintf(out[n++].name, sizeof out->name, "layers.%d.cache", i);
        }
    }
    if (tokens != NULL) {
        out[n] = (piece){ .name = "tokens",
                          .shape = { length },
                          .rank = 1,
                          .dtype = TSR_DT_I32,
                          .data = tokens,
                          .host = true };
        n++;
    }
    for (uint32_t i = 0; i < n; i++) {
        bool fits = tsr_shape_bytes(out[i].dtype, out[i].rank, out[i].shape, &out[i].bytes);
        TSR_ASSERT(fits); /* the session has it in memory */
    }
    return n;
}

/* Hyper-parameters, and all small parameters: another model, or another step of the same, has another number. */
static tsr_status fingerprint(const tsr_session *s, uint64_t *out, tsr_err *err)
{
    const tsr_model *m = s->m;
    *out = tsr_hash64(&m->spec, sizeof m->spec);
    for (int64_t i = 0; i < m->p.count; i++) {
        const param *p = &m->p.list[i];
        if (p->w.rows > 1 || p->bytes > (1 << 22)) {
            continue;
        }
        void *copy = malloc(p->bytes);
        if (copy == NULL || m->b->download(m->b, copy, p->w.data, p->bytes) != TSR_OK) {
            free(copy);
            TSR_FAIL(err, TSR_E_IO, "%s: cannot read back parameters", m->b->name);
        }
        *out = *out * 0x9e3779b97f4a7c15u ^ tsr_hash64(copy, p->bytes);
        free(copy);
    }
    return TSR_OK;
}

typedef struct saver {
    const tsr_session *s;
    const piece *pieces;
} saver;

static tsr_status fill(void *payload, const tsr_slot *slot, void *dst, tsr_err *err)
{
    const saver *k = payload;
    const piece *p = &k->pieces[slot->tensor];
    const char *from = (const char *)p->data + slot->off;
    tsr_backend *b = k->s->m->b;
    if (p->host) {
        memcpy(dst, from, slot->bytes);
    } else if (b->download(b, dst, from, slot->bytes) != TSR_OK) {
        TSR_FAIL(err, TSR_E_IO, "%s: cannot read back %s", b->name, p->name);
    }
    return TSR_OK;
}

tsr_status tsr_session_save(const tsr_session *s, const char *path, const int32_t *tokens, tsr_err *err)
{
    uint64_t print;
    TSR_TRY(fingerprint(s, &print, err));
    piece *pieces = calloc(2 * (size_t)s->m->spec.layers + 1, sizeof *pieces);
    tsr_tensor_decl *decls = calloc(2 * (size_t)s->m->spec.layers + 1, sizeof *decls);
    tsr_status st = pieces != NULL && decls != NULL ? TSR_OK : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    if (st == TSR_OK) {
        uint32_t n = pieces_of(s, tokens, s->length, pieces);
        for (uint32_t i = 0; i < n; i++) {
            decls[i] = (tsr_tensor_decl){ .name = pieces[i].name,
                                          .dtype = pieces[i].dtype,
                                          .src_dtype = pieces[i].dtype,
                                          .rank = pieces[i].rank,
                                          .shape = pieces[i].shape,
                                          .klass = TSR_CLASS_DENSE,
                                          .layer = -1,
                                          .partner = -1 };
        }
        char note[256];
        (void)snprintf(note, sizeof note,
                       "{\"kind\": \"" KIND "\", \"positions\": %lld, \"model\": \"%016llx\"}",
                       (long long)s->length, (unsigned long long)print);
        saver k = { s, pieces };
        /* one thread: a backend takes calls from one thread at a time */
        tsr_save_opts o = { .arch = "raw", .train_json = note, .threads = 1 };
        st = tsr_save(path, decls, n, fill, &k, &o, err);
    }
    free(pieces);
    free(decls);
    return st;
}

/* ---- loading ------------------------------------------------------------------------------------------------------- */

static tsr_status read_note(const tsr_ckpt *c, uint64_t print, int64_t *length, tsr_err *err)
{
    char *text = NULL, want[17];
    size_t bytes;
    json_error_t e;
    TSR_TRY(tsr_ckpt_read_member(c, "train.json", (size_t)1 << 20, &text, &bytes, err));
    json_t *note = json_loadb(text, bytes, 0, &e);
    free(text);
    const char *kind = json_string_value(json_object_get(note, "kind")),
               *model = json_string_value(json_object_get(note, "model"));
    json_t *positions = json_object_get(note, "positions");
    tsr_status st = TSR_OK;
    (void)snprintf(want, sizeof want, "%016llx", (unsigned long long)print);
    if (kind == NULL || strcmp(kind, KIND) != 0 || model == NULL || !json_is_integer(positions) ||
        json_integer_value(positions) < 0) {
        st = TSR_ERR(err, TSR_E_FORMAT, "%s: not the state of a session", tsr_ckpt_path(c));
    } else if (strcmp(model, want) != 0) {
        st = TSR_ERR(err, TSR_E_CONFLICT, "%s: the state of another model (%s, this one is %s)",
                     tsr_ckpt_path(c), model, want);
    } else {
        *length = json_integer_value(positions);
    }
    json_decref(note);
    return st;
}

/* One tensor into the backend, by pieces. */
static tsr_status read_piece(const tsr_ckpt *c, tsr_backend *b, const piece *p, void *buf, size_t room,
                             tsr_err *err)
{
    tsr_tensor_info t;
    uint32_t item;
    TSR_TRY(tsr_ckpt_find(c, p->name, &t, &item, err));
    if (t.dtype != p->dtype || t.item_bytes != p->bytes || t.rank != p->rank ||
        memcmp(t.shape, p->shape, (size_t)p->rank * sizeof *p->shape) != 0) {
        TSR_FAIL(err, TSR_E_CONFLICT, "%s: %s: another shape or dtype than this session's", tsr_ckpt_path(c),
                 p->name);
    }
    for (uint64_t at = 0; at < p->bytes; at += room) {
        size_t n = p->bytes - at < room ? (size_t)(p->bytes - at) : room;
        TSR_TRY(tsr_ckpt_read(c, &t, item, at, buf, n, TSR_READ_CHECK, err));
        if (b->upload(b, (char *)(uintptr_t)p->data + at, buf, n) != TSR_OK) {
            TSR_FAIL(err, TSR_E_IO, "%s: cannot copy %s to the device", b->name, p->name);
        }
    }
    return TSR_OK;
}

static tsr_status read_tokens(const tsr_ckpt *c, int64_t length, int32_t **out, tsr_err *err)
{
    tsr_tensor_info t;
    uint32_t item;
    *out = NULL;
    if (tsr_ckpt_find(c, "tokens", &t, &item, NULL) != TSR_OK) {
        return TSR_OK;
    }
    if (t.dtype != TSR_DT_I32 || t.item_bytes != (uint64_t)length * sizeof **out) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: tokens: not %lld ids", tsr_ckpt_path(c), (long long)length);
    }
    *out = malloc(t.item_bytes > 0 ? t.item_bytes : 1);
    if (*out == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    return tsr_ckpt_read(c, &t, item, 0, *out, t.item_bytes, TSR_READ_CHECK, err);
}

static tsr_status load(tsr_session *s, const tsr_ckpt *c, int32_t **tokens_out, int64_t *count_out,
                       tsr_err *err)
{
    enum { ROOM = 1 << 22 };
    uint64_t print;
    int64_t length;
    TSR_TRY(fingerprint(s, &print, err));
    TSR_TRY(read_note(c, print, &length, err));
    if (length > s->context) {
        TSR_FAIL(err, TSR_E_LIMIT,
                 "%s: has %lld positions, this session takes %lld (ask for a longer context)",
                 tsr_ckpt_path(c), (long long)length, (long long)s->context);
    }
    piece *pieces = calloc(2 * (size_t)s->m->spec.layers + 1, sizeof *pieces);
    void *buf = malloc(ROOM);
    tsr_status st = pieces != NULL && buf != NULL ? TSR_OK : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    uint32_t n = st == TSR_OK ? pieces_of(s, NULL, length, pieces) : 0;
    for (uint32_t i = 0; st == TSR_OK && i < n; i++) {
        st = read_piece(c, s->m->b, &pieces[i], buf, ROOM, err);
    }
    if (st == TSR_OK && tokens_out != NULL) {
        st = read_tokens(c, length, tokens_out, err);
    }
    free(pieces);
    free(buf);
    if (st == TSR_OK) {
        s->length = length;
        if (count_out != NULL) {
            *count_out = length;
        }
    }
    return st;
}

tsr_status tsr_session_load(tsr_session *s, const char *path, int32_t **tokens_out, int64_t *count_out,
                            tsr_err *err)
{
    tsr_ckpt *c;
    if (tokens_out != NULL) {
        *tokens_out = NULL;
    }
    TSR_ASSERT(s->length == 0);
    TSR_TRY(tsr_ckpt_open(&c, path, err));
    tsr_status st = load(s, c, tokens_out, count_out, err);
    tsr_ckpt_close(&c);
    if (st != TSR_OK) {
        tsr_session_reset(s);
        if (tokens_out != NULL) {
            free(*tokens_out);
            *tokens_out = NULL;
        }
    }
    return st;
}
