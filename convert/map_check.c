/* map_check.c - see map_check.h. */
#include "convert/map_check.h"
#include "convert/layouts.h"
#include "model/spec.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- tied embeddings ------------------------------------------------------------------------------------------------ */

static int64_t find_leaf(const tsr_source *s, const char *leaf)
{
    size_t n = strlen(leaf);
    for (int64_t i = 0; i < s->count; i++) {
        size_t have = strlen(s->tensors[i].name);
        if (have >= n && strcmp(s->tensors[i].name + have - n, leaf) == 0 &&
            (have == n || s->tensors[i].name[have - n - 1] == '.')) {
            return i;
        }
    }
    return -1;
}

static int64_t find_whole(const tsr_source *s, const char *name)
{
    for (int64_t i = 0; i < s->count; i++) {
        if (strcmp(s->tensors[i].name, name) == 0) {
            return i;
        }
    }
    return -1;
}

static tsr_status same_bytes(tsr_source *s, int64_t a, int64_t b, bool *same, tsr_err *err)
{
    enum { PIECE = 1 << 20 };
    uint64_t n = s->tensors[a].bytes;
    *same = s->tensors[a].dtype == s->tensors[b].dtype && n == s->tensors[b].bytes;
    uint8_t *buf = malloc(2 * (size_t)PIECE);
    if (buf == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    tsr_status st = TSR_OK;
    for (uint64_t at = 0; st == TSR_OK && *same && at < n; at += PIECE) {
        size_t len = n - at < PIECE ? (size_t)(n - at) : PIECE;
        st = tsr_source_read(s, a, at, buf, len, err);
        if (st == TSR_OK) {
            st = tsr_source_read(s, b, at, buf + PIECE, len, err);
        }
        *same = st == TSR_OK && memcmp(buf, buf + PIECE, len) == 0;
    }
    free(buf);
    return st;
}

tsr_status map_check_tied(tsr_source *s, const tsr_map_opts *o, tsr_err *err)
{
    if (s->config_json == NULL) {
        return TSR_OK;
    }
    json_t *root = json_loadb(s->config_json, s->config_bytes, 0, NULL);
    json_t *tied = json_object_get(root, "tie_word_embeddings");
    if (tied == NULL) {
        tied = json_object_get(json_object_get(root, "text_config"), "tie_word_embeddings");
    }
    bool known = json_is_boolean(tied), yes = json_is_true(tied);
    json_decref(root);
    int64_t embed = find_leaf(s, "embed_tokens.weight"), head = find_leaf(s, "lm_head.weight");
    embed = embed >= 0 ? embed : find_whole(s, "embed.weight"); /* in a checkpoint of ours */
    head = head >= 0 ? head : find_whole(s, "head.weight");
    if (!known || embed < 0) {
        return TSR_OK;
    }
    if (!yes && head < 0 && !o->tie_head && !o->partial) {
        TSR_FAIL(err, TSR_E_MISSING,
                 "%s: lm_head.weight missing and tie_word_embeddings is false (--tie-head accepts it)",
                 s->path);
    }
    if (yes && head >= 0 && !o->partial) {
        bool same;
        TSR_TRY(same_bytes(s, embed, head, &same, err));
        if (!same) {
            TSR_FAIL(err, TSR_E_CONFLICT,
                     "%s: tie_word_embeddings is true, but %s and %s differ (correct the config or drop one)",
                     s->path, s->tensors[head].name, s->tensors[embed].name);
        }
    }
    return TSR_OK;
}

/* ---- catalogue -------------------------------------------------------------------------------------------------------- */

/* The spec of the source's config, when the layout is that of a model. */
static tsr_status load_spec(const tsr_map *m, tsr_spec **out, tsr_err *err)
{
    *out = NULL;
    if (m->layout->row_count == 0 || m->source->config_json == NULL) {
        return TSR_OK;
    }
    *out = malloc(sizeof **out);
    if (*out == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    tsr_status st = tsr_spec_parse(*out, m->source->config_json, m->source->config_bytes, err);
    if (st != TSR_OK) {
        tsr_err_prefix(err, "%s", m->source->path);
        free(*out);
        *out = NULL;
    }
    return st;
}

typedef struct ranker {
    const tsr_map *m;
    uint32_t *rank, next;
} ranker;

static tsr_status rank_one(void *payload, const tsr_tensor_rule *r, tsr_err *err)
{
    (void)err;
    ranker *k = payload;
    uint32_t g;
    (void)tsr_map_find(k->m, r->name, &g); /* before items are numbered only the group means anything */
    if (g != UINT32_MAX) {
        k->rank[g] = k->next;
    }
    k->next++;
    return TSR_OK;
}

tsr_status map_rank_groups(const tsr_map *m, uint32_t *rank, int64_t *experts, tsr_err *err)
{
    tsr_spec *s;
    for (uint32_t g = 0; g < m->group_count; g++) {
        rank[g] = UINT32_MAX;
    }
    TSR_TRY(load_spec(m, &s, err));
    if (s == NULL) {
        return TSR_OK;
    }
    ranker k = { m, rank, 0 };
    *experts = s->experts;
    tsr_status st = tsr_spec_each_tensor(s, rank_one, &k, err);
    free(s);
    return st;
}

typedef struct checker {
    const tsr_map *m;
    const tsr_map_opts *o;
    char missing[500];
    size_t used;
    uint64_t missing_count;
} checker;

static bool is_float(tsr_dtype d)
{
    return d == TSR_DT_F32 || d == TSR_DT_BF16 || d == TSR_DT_F16;
}

static bool shape_fits(const tsr_tensor_decl *d, const tsr_tensor_rule *r)
{
    if (r->shape_loose) { /* padded, or with dimensions of one more or less */
        int64_t have = 1, want = 1;
        for (int i = 0; i < d->rank; i++) {
            have *= d->shape[i] > 0 && d->shape[i] < ((int64_t)1 << 30) ? d->shape[i] : 1;
        }
        for (int i = 0; i < r->rank; i++) {
            want *= r->shape[i];
        }
        return have == want || strstr(r->name, "a_log") != NULL;
    }
    return d->rank == r->rank && memcmp(d->shape, r->shape, (size_t)d->rank * sizeof *d->shape) == 0;
}

static void note_missing(checker *c, const tsr_tensor_rule *r)
{
    char source[300];
    if (tsr_layout_map(c->m->layout, true, r->name, r->dtype, source, sizeof source) == NULL) {
        char plain[300]; /* a family: ask for expert 0 */
        const char *at = strstr(r->name, "{e}");
        (void)snprintf(plain, sizeof plain, "%.*s0%s", at != NULL ? (int)(at - r->name) : 0, r->name,
                       at != NULL ? at + 3 : "");
        if (at == NULL ||
            tsr_layout_map(c->m->layout, true, plain, r->dtype, source, sizeof source) == NULL) {
            (void)snprintf(source, sizeof source, "%.290s", r->name);
        }
    }
    if (c->missing_count++ < 3) {
        c->used += (size_t)snprintf(c->missing + c->used, sizeof c->missing - c->used, "%s%.140s",
                                    c->used > 0 ? ", " : "", source);
    }
}

static tsr_status check_one(void *payload, const tsr_tensor_rule *r, tsr_err *err)
{
    checker *c = payload;
    uint32_t g;
    (void)tsr_map_find(c->m, r->name, &g);
    if (g == UINT32_MAX || (c->m->groups[g].expert_count > 0) != (r->expert_count > 0)) {
        if (!r->optional && !(c->o->tie_head && strcmp(r->name, "head.weight") == 0)) {
            note_missing(c, r);
        }
        return TSR_OK;
    }
    const tsr_tensor_decl *d = &c->m->groups[g];
    const char *source = c->m->source->tensors[c->m->src[c->m->group_first[g]]].name;
    if (d->expert_count != r->expert_count) {
        TSR_FAIL(err, TSR_E_CONFLICT, "%s: layer %d has %u experts, config.json promises %u",
                 c->m->source->path, d->layer, d->expert_count, r->expert_count);
    }
    if (!shape_fits(d, r)) {
        char have[200] = "", want[200] = "";
        size_t a = 0, b = 0;
        for (int i = 0; i < d->rank && a < 150; i++) {
            a += (size_t)snprintf(have + a, sizeof have - a, "%s%lld", i > 0 ? "," : "",
                                  (long long)d->shape[i]);
        }
        for (int i = 0; i < r->rank; i++) {
            b += (size_t)snprintf(want + b, sizeof want - b, "%s%lld", i > 0 ? "," : "",
                                  (long long)r->shape[i]);
        }
        TSR_FAIL(err, TSR_E_CONFLICT, "%s: %s: shape [%s], config.json implies [%s]", c->m->source->path,
                 source, have, want);
    }
    if (d->dtype != r->dtype && !(r->float_any && is_float(d->dtype)) &&
        !(r->expert_count > 0 && r->dtype == TSR_DT_MXFP4 && is_float(d->dtype))) {
        TSR_FAIL(err, TSR_E_CONFLICT, "%s: %s: is %s, the model has %s there", c->m->source->path, source,
                 tsr_dtype_name((unsigned)d->dtype), tsr_dtype_name((unsigned)r->dtype));
    }
    return TSR_OK;
}

tsr_status map_check_catalog(const tsr_map *m, const tsr_map_opts *o, tsr_err *err)
{
    tsr_spec *s;
    checker c = { .m = m, .o = o };
    TSR_TRY(load_spec(m, &s, err));
    if (s == NULL) {
        return TSR_OK;
    }
    tsr_status st = tsr_spec_each_tensor(s, check_one, &c, err);
    free(s);
    if (st == TSR_OK && c.missing_count > 0) {
        TSR_FAIL(err, TSR_E_MISSING, "%s: %llu tensor%s of the model missing: %s%s", m->source->path,
                 (unsigned long long)c.missing_count, c.missing_count > 1 ? "s" : "", c.missing,
                 c.missing_count > 3 ? ", ..." : "");
    }
    return st;
}
