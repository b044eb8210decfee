/* map.c - a source seen through a layout: the ledger. Every source tensor becomes exactly one item; families are
 * complete; with a model layout the whole agrees with the catalogue. */
#include "convert/layouts.h"
#include "convert/map_check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_MEM_LIMIT ((uint64_t)256 << 20)
#define NAME_ROOM 4400

/* One source tensor on its way to its place. */
typedef struct placed {
    uint32_t group;
    int32_t expert; /* -1: plain */
} placed;

typedef struct builder {
    tsr_map *m;
    placed *where;         /* per source tensor */
    const char **partners; /* per group: canonical name of its scales, or NULL */
    int64_t *witness;      /* per group: a source tensor of it, for messages */
    uint32_t *highest;     /* per group: largest expert */
    uint32_t room;
    uint64_t limit;
} builder;

static tsr_status no_memory(const builder *b, tsr_err *err)
{
    TSR_FAIL(err, TSR_E_LIMIT, "%s: the plan needs more memory than allowed (--mem-limit)",
             b->m->source->path);
}

/* ---- groups ------------------------------------------------------------------------------------------------------ */

static tsr_status rehash(builder *b, tsr_err *err)
{
    tsr_map *m = b->m;
    uint64_t size = m->hash_size == 0 ? 64 : m->hash_size * 2;
    while (size < (uint64_t)m->group_count * 2) {
        size *= 2;
    }
    uint32_t *fresh = calloc(size, sizeof *fresh);
    if (fresh == NULL) {
        return no_memory(b, err);
    }
    for (uint32_t i = 0; i < m->group_count; i++) {
        uint64_t slot = tsr_hash64(m->groups[i].name, strlen(m->groups[i].name)) & (size - 1);
        while (fresh[slot] != 0) {
            slot = (slot + 1) & (size - 1);
        }
        fresh[slot] = i + 1;
    }
    free(m->hash);
    m->hash = fresh;
    m->hash_size = size;
    return TSR_OK;
}

static uint32_t find_group(const tsr_map *m, const char *name, bool family)
{
    for (uint64_t slot = tsr_hash64(name, strlen(name)) & (m->hash_size - 1);
         m->hash_size > 0 && m->hash[slot] != 0; slot = (slot + 1) & (m->hash_size - 1)) {
        uint32_t g = m->hash[slot] - 1;
        if (strcmp(m->groups[g].name, name) == 0 && (m->groups[g].expert_count > 0) == family) {
            return g;
        }
    }
    return UINT32_MAX;
}

static tsr_status grow_groups(builder *b, tsr_err *err)
{
    tsr_map *m = b->m;
    if (m->group_count < b->room) {
        return TSR_OK;
    }
    uint32_t room = b->room * 2 + 64;
    tsr_tensor_decl *groups = realloc(m->groups, (size_t)room * sizeof *groups);
    m->groups = groups != NULL ? groups : m->groups;
    const char **partners = realloc((void *)b->partners, (size_t)room * sizeof *partners);
    b->partners = partners != NULL ? partners : b->partners;
    int64_t *witness = realloc(b->witness, (size_t)room * sizeof *witness);
    b->witness = witness != NULL ? witness : b->witness;
    uint32_t *highest = realloc(b->highest, (size_t)room * sizeof *highest);
    b->highest = highest != NULL ? highest : b->highest;
    if (groups == NULL || partners == NULL || witness == NULL || highest == NULL) {
        return no_memory(b, err);
    }
    b->room = room;
    return TSR_OK;
}

/* Where a canonical name belongs: layer from "layers.N.", a family from "layers.N.experts.M." */
typedef struct place {
    int32_t layer, expert;
    size_t digits_at, digits; /* the expert's number in the name */
    tsr_class klass;
} place;

static int64_t small_number(const char *s, size_t *digits)
{
    size_t n = strspn(s, "0123456789");
    *digits = n;
    return n == 0 || n > 7 || (n > 1 && s[0] == '0') ? -1 : strtol(s, NULL, 10);
}

static place find_place(const char *name, bool families)
{
    place p = { .layer = -1, .expert = -1 };
    bool optim = strncmp(name, "optim.", 6) == 0;
    const char *at = strstr(name, "layers.");
    p.klass = optim ? TSR_CLASS_OPTIM_DENSE : TSR_CLASS_DENSE;
    if (!families || at == NULL || (at != name && !optim)) {
        return p;
    }
    size_t n;
    int64_t layer = small_number(at + 7, &n);
    if (layer < 0 || at[7 + n] != '.') {
        return p;
    }
    p.layer = (int32_t)layer;
    at += 8 + n;
    if (strncmp(at, "experts.", 8) != 0) {
        return p;
    }
    int64_t expert = small_number(at + 8, &n);
    if (expert < 0 || at[8 + n] != '.' || strstr(name, "{e}") != NULL) {
        return p;
    }
    p.expert = (int32_t)expert;
    p.digits_at = (size_t)(at + 8 - name);
    p.digits = n;
    p.klass = optim ? TSR_CLASS_OPTIM_EXPERTS : TSR_CLASS_EXPERTS;
    return p;
}

/* name with the expert's digits replaced by {e}, in buf. */
static void to_template(const char *name, const place *p, char *buf, size_t room)
{
    (void)snprintf(buf, room, "%.*s{e}%s", (int)p->digits_at, name, name + p->digits_at + p->digits);
}

static tsr_status make_shape(builder *b, const tsr_src_tensor *t, uint8_t packing, const int64_t **out,
                             tsr_err *err)
{
    *out = t->shape;
    if (packing == TSR_PACK_NONE) {
        return TSR_OK;
    }
    if (t->rank == 0 || t->shape[t->rank - 1] > INT64_MAX / 2) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: packed codes need at least one dimension", t->name);
    }
    int64_t *shape = tsr_arena_alloc(b->m->arena, (size_t)t->rank * sizeof *shape);
    if (shape == NULL) {
        return no_memory(b, err);
    }
    memcpy(shape, t->shape, (size_t)t->rank * sizeof *shape);
    shape[t->rank - 1] *= 2;
    *out = shape;
    return TSR_OK;
}

static bool same_shape(const tsr_tensor_decl *d, const tsr_src_tensor *t, uint8_t packing)
{
    if (d->rank != t->rank) {
        return false;
    }
    for (int i = 0; i < d->rank; i++) {
        int64_t want = packing != TSR_PACK_NONE && i == d->rank - 1 ? t->shape[i] * 2 : t->shape[i];
        if (d->shape[i] != want) {
            return false;
        }
    }
    return true;
}

/* Adds source tensor i under canonical name; row may be NULL (names as they are). */
static tsr_status place_tensor(builder *b, int64_t i, const char *name, const tsr_name_row *row, tsr_err *err)
{
    tsr_map *m = b->m;
    const tsr_src_tensor *t = &m->source->tensors[i];
    place p = find_place(name, m->layout != &tsr_layout_raw);
    char tmpl[NAME_ROOM], partner[NAME_ROOM];
    const char *key = name;
    if (p.expert >= 0) {
        to_template(name, &p, tmpl, sizeof tmpl);
        key = tmpl;
    }
    uint8_t packing = row != NULL ? row->pack : TSR_PACK_NONE;
    uint8_t dtype = row != NULL && row->dtype != 0 ? row->dtype : t->dtype;
    uint32_t g = find_group(m, key, p.expert >= 0);
    if (g == UINT32_MAX) {
        TSR_TRY(grow_groups(b, err));
        if ((uint64_t)m->group_count * 2 >= m->hash_size) {
            TSR_TRY(rehash(b, err));
        }
        g = m->group_count;
        tsr_tensor_decl *d = &m->groups[g];
        *d = (tsr_tensor_decl){ .name = tsr_arena_strndup(m->arena, key, strlen(key)),
                                .dtype = (tsr_dtype)dtype,
                                .src_dtype = (tsr_dtype)t->dtype,
                                .rank = t->rank,
                                .klass = p.klass,
                                .layer = p.layer,
                                .expert_count = p.expert >= 0,
                                .partner = -1 };
        b->partners[g] = NULL;
        b->witness[g] = i;
        b->highest[g] = 0;
        if (d->name == NULL) {
            return no_memory(b, err);
        }
        TSR_TRY(make_shape(b, t, packing, &d->shape, err));
        layout_binding lb;
        if (row != NULL && row->partner != NULL && layout_match(row->canonical, name, &lb)) {
            (void)snprintf(lb.number[1], sizeof lb.number[1], "{e}");
            if (layout_emit(row->partner, &lb, partner, sizeof partner)) {
                b->partners[g] = tsr_arena_strndup(m->arena, partner, strlen(partner));
            }
        }
        m->group_count++;
        uint64_t slot = tsr_hash64(key, strlen(key)) & (m->hash_size - 1);
        while (m->hash[slot] != 0) {
            slot = (slot + 1) & (m->hash_size - 1);
        }
        m->hash[slot] = g + 1;
    } else {
        const tsr_tensor_decl *d = &m->groups[g];
        if (p.expert < 0) {
            TSR_FAIL(err, TSR_E_CONFLICT, "%s: %s and %s are both %s", m->source->path,
                     m->source->tensors[b->witness[g]].name, t->name, name);
        }
        if (d->dtype != (tsr_dtype)dtype || d->src_dtype != (tsr_dtype)t->dtype ||
            !same_shape(d, t, packing)) {
            TSR_FAIL(err, TSR_E_CONFLICT, "%s: %s: has another shape or dtype than %s of the same layer",
                     m->source->path, t->name, m->source->tensors[b->witness[g]].name);
        }
    }
    if (p.expert >= 0 && (uint32_t)p.expert > b->highest[g]) {
        b->highest[g] = (uint32_t)p.expert;
    }
    b->where[i] = (placed){ g, p.expert };
    return TSR_OK;
}

static tsr_status warn(builder *b, const char *text, tsr_err *err)
{
    tsr_map *m = b->m;
    const char **grown = tsr_arena_alloc(m->arena, ((size_t)m->warning_count + 1) * sizeof *grown);
    const char *copy = tsr_arena_strndup(m->arena, text, strlen(text));
    if (grown == NULL || copy == NULL) {
        return no_memory(b, err);
    }
    if (m->warning_count > 0) {
        memcpy(grown, m->warnings, (size_t)m->warning_count * sizeof *grown);
    }
    grown[m->warning_count++] = copy;
    m->warnings = grown;
    return TSR_OK;
}

static tsr_status place_all(builder *b, const tsr_map_opts *o, tsr_err *err)
{
    tsr_map *m = b->m;
    char name[NAME_ROOM], examples[400] = "";
    size_t used = 0;
    for (int64_t i = 0; i < m->source->count; i++) {
        const tsr_src_tensor *t = &m->source->tensors[i];
        b->where[i].group = UINT32_MAX;
        if (o->keep != NULL && !o->keep(o->keep_payload, t->name)) {
            m->ignored++;
            continue;
        }
        if (strlen(t->name) > 4096) {
            TSR_FAIL(err, TSR_E_LIMIT, "%s: %.80s...: a name of %zu bytes (limit 4096)", m->source->path,
                     t->name, strlen(t->name));
        }
        if (m->layout->row_count == 0) {
            TSR_TRY(place_tensor(b, i, t->name, NULL, err));
            continue;
        }
        const tsr_name_row *row = tsr_layout_map(m->layout, false, t->name, (tsr_dtype)t->dtype, name,
                                                 sizeof name);
        if (row == NULL) {
            (void)snprintf(name, sizeof name, "other.%s", t->name);
            if (m->unmapped++ < 3) {
                used += (size_t)snprintf(examples + used, sizeof examples - used, "%s%.120s",
                                         used > 0 ? ", " : "", t->name);
            }
        }
        TSR_TRY(place_tensor(b, i, name, row, err));
    }
    if (m->unmapped > 0) {
        char text[600];
        (void)snprintf(text, sizeof text, "%lld tensor%s unknown to the %s layout, kept as other.*: %s%s",
                       (long long)m->unmapped, m->unmapped > 1 ? "s are" : " is", m->layout->arch, examples,
                       m->unmapped > 3 ? ", ..." : "");
        return warn(b, text, err);
    }
    return TSR_OK;
}

/* ---- order ---------------------------------------------------------------------------------------------------------- */

/* Digit runs compare as numbers, the rest as bytes. */
static int natural(const char *a, const char *b)
{
    while (*a != '\0' && *b != '\0') {
        size_t x = strspn(a, "0123456789"), y = strspn(b, "0123456789");
        if (x > 0 && y > 0) {
            if (x != y) {
                return x < y ? -1 : 1;
            }
            int c = strncmp(a, b, x);
            if (c != 0) {
                return c;
            }
            a += x;
            b += y;
        } else if (*a != *b) {
            return (unsigned char)*a < (unsigned char)*b ? -1 : 1;
        } else {
            a++;
            b++;
        }
    }
    return *a == *b ? 0 : *a == '\0' ? -1 : 1;
}

typedef struct order {
    const tsr_map *m;
    const uint32_t *rank; /* by the catalogue; UINT32_MAX: not in it */
} order;

static int compare_groups(const void *x, const void *y, void *arg)
{
    const order *o = arg;
    uint32_t a = *(const uint32_t *)x, b = *(const uint32_t *)y;
    if (o->rank[a] != o->rank[b]) {
        return o->rank[a] < o->rank[b] ? -1 : 1;
    }
    return natural(o->m->groups[a].name, o->m->groups[b].name);
}

static tsr_status sort_groups(builder *b, const uint32_t *rank, tsr_err *err)
{
    tsr_map *m = b->m;
    uint32_t n = m->group_count;
    uint32_t *to_old = malloc(((size_t)n + 1) * sizeof *to_old),
             *to_new = malloc(((size_t)n + 1) * sizeof *to_new);
    tsr_tensor_decl *sorted = malloc(((size_t)n + 1) * sizeof *sorted);
    const char **partners = malloc(((size_t)n + 1) * sizeof *partners);
    int64_t *witness = malloc(((size_t)n + 1) * sizeof *witness);
    uint32_t *highest = malloc(((size_t)n + 1) * sizeof *highest);
    tsr_status st = TSR_OK;
    if (to_old == NULL || to_new == NULL || sorted == NULL || partners == NULL || witness == NULL ||
        highest == NULL) {
        st = no_memory(b, err);
        free(sorted);
        free((void *)partners);
        free(witness);
        free(highest);
        goto out;
    }
    for (uint32_t i = 0; i < n; i++) {
        to_old[i] = i;
    }
    order o = { m, rank };
    qsort_r(to_old, n, sizeof *to_old, compare_groups, &o);
    for (uint32_t i = 0; i < n; i++) {
        to_new[to_old[i]] = i;
        sorted[i] = m->groups[to_old[i]];
        partners[i] = b->partners[to_old[i]];
        witness[i] = b->witness[to_old[i]];
        highest[i] = b->highest[to_old[i]];
    }
    for (int64_t i = 0; i < m->source->count; i++) {
        if (b->where[i].group != UINT32_MAX) {
            b->where[i].group = to_new[b->where[i].group];
        }
    }
    free(m->groups);
    free((void *)b->partners);
    free(b->witness);
    free(b->highest);
    m->groups = sorted;
    b->partners = partners;
    b->witness = witness;
    b->highest = highest;
    b->room = n;
    for (uint64_t i = 0; i < m->hash_size; i++) {
        m->hash[i] = m->hash[i] == 0 ? 0 : to_new[m->hash[i] - 1] + 1;
    }
out:
    free(to_old);
    free(to_new);
    return st;
}

/* ---- families ------------------------------------------------------------------------------------------------------- */

/* experts: how many the config promises, 0 unknown. */
static tsr_status number_items(builder *b, int64_t experts, tsr_err *err)
{
    tsr_map *m = b->m;
    m->group_first = malloc(((size_t)m->group_count + 1) * sizeof *m->group_first);
    if (m->group_first == NULL) {
        return no_memory(b, err);
    }
    m->count = 0;
    for (uint32_t g = 0; g < m->group_count; g++) {
        tsr_tensor_decl *d = &m->groups[g];
        if (d->expert_count > 0) {
            d->expert_count = b->highest[g] + 1;
            if (d->klass == TSR_CLASS_EXPERTS && (int64_t)d->expert_count < experts) {
                d->expert_count = (uint32_t)experts;
            }
        }
        m->group_first[g] = m->count;
        m->count += d->expert_count > 0 ? d->expert_count : 1;
        if (m->count > m->source->count + ((int64_t)1 << 24)) {
            TSR_FAIL(err, TSR_E_FORMAT, "%s: %s: expert %u: a number out of all proportion", m->source->path,
                     d->name, b->highest[g]);
        }
    }
    m->group_first[m->group_count] = m->count;
    m->src = malloc(((size_t)m->count + 1) * sizeof *m->src);
    if (m->src == NULL) {
        return no_memory(b, err);
    }
    for (int64_t i = 0; i < m->count; i++) {
        m->src[i] = -1;
    }
    for (int64_t i = 0; i < m->source->count; i++) {
        if (b->where[i].group == UINT32_MAX) {
            continue; /* excluded on request */
        }
        int64_t to = m->group_first[b->where[i].group] + (b->where[i].expert > 0 ? b->where[i].expert : 0);
        if (m->src[to] >= 0) {
            TSR_FAIL(err, TSR_E_CONFLICT, "%s: %s and %s are the same matrix of the same expert",
                     m->source->path, m->source->tensors[m->src[to]].name, m->source->tensors[i].name);
        }
        m->src[to] = i;
    }
    return TSR_OK;
}

static tsr_status check_gaps(const builder *b, tsr_err *err)
{
    const tsr_map *m = b->m;
    for (uint32_t g = 0; g < m->group_count; g++) {
        char gaps[300] = "";
        size_t used = 0;
        uint32_t n = m->groups[g].expert_count;
        for (uint32_t e = 0; e < n && used + 40 < sizeof gaps; e++) {
            uint32_t to = e;
            while (to < n && m->src[m->group_first[g] + to] < 0) {
                to++;
            }
            if (to > e + 1) {
                used += (size_t)snprintf(gaps + used, sizeof gaps - used, "%s%u-%u", used > 0 ? ", " : "", e,
                                         to - 1);
            } else if (to > e) {
                used += (size_t)snprintf(gaps + used, sizeof gaps - used, "%s%u", used > 0 ? ", " : "", e);
            }
            e = to > e ? to - 1 : e;
        }
        if (used > 0) {
            TSR_FAIL(err, TSR_E_MISSING, "%s: layer %d: experts %s missing (beside %s)", m->source->path,
                     m->groups[g].layer, gaps, m->source->tensors[b->witness[g]].name);
        }
    }
    return TSR_OK;
}

static tsr_status join_partners(builder *b, bool partial, tsr_err *err)
{
    tsr_map *m = b->m;
    for (uint32_t g = 0; g < m->group_count; g++) {
        tsr_tensor_decl *d = &m->groups[g];
        const char *mine = m->source->tensors[b->witness[g]].name;
        if (b->partners[g] != NULL) {
            uint32_t p = find_group(m, b->partners[g], d->expert_count > 0);
            if (p != UINT32_MAX) {
                d->partner = p;
                continue;
            }
            if (!partial) {
                TSR_FAIL(err, TSR_E_MISSING, "%s: %s: its scales (.weight_scale) are missing",
                         m->source->path, mine);
            }
        }
    }
    for (uint32_t g = 0; g < m->group_count && !partial; g++) { /* scales nobody points at */
        bool used = m->groups[g].dtype != TSR_DT_E8M0 || m->layout->row_count == 0;
        for (uint32_t o = 0; !used && o < m->group_count; o++) {
            used = m->groups[o].partner == (int64_t)g;
        }
        if (!used) {
            TSR_FAIL(err, TSR_E_MISSING, "%s: %s: scales without their codes (.weight_packed)",
                     m->source->path, m->source->tensors[b->witness[g]].name);
        }
    }
    return TSR_OK;
}

/* A checkpoint is its own map. */
static tsr_status map_ckpt(builder *b, tsr_err *err)
{
    tsr_map *m = b->m;
    uint32_t n = tsr_ckpt_tensor_count(m->source->ckpt);
    m->groups = malloc(((size_t)n + 1) * sizeof *m->groups);
    m->group_first = malloc(((size_t)n + 1) * sizeof *m->group_first);
    m->src = malloc(((size_t)m->source->count + 1) * sizeof *m->src);
    if (m->groups == NULL || m->group_first == NULL || m->src == NULL) {
        return no_memory(b, err);
    }
    for (uint32_t i = 0; i < n; i++) {
        tsr_tensor_info t;
        TSR_TRY(tsr_ckpt_tensor(m->source->ckpt, i, &t, err));
        m->groups[i] = tsr_tensor_decl_of(&t);
        m->group_first[i] = m->count;
        m->count += t.expert_count > 0 ? t.expert_count : 1;
        m->group_count++;
    }
    m->group_first[n] = m->count;
    for (int64_t i = 0; i < m->count; i++) {
        m->src[i] = i;
    }
    return rehash(b, err);
}

static tsr_status make_map(builder *b, const tsr_map_opts *o, tsr_err *err)
{
    tsr_map *m = b->m;
    if (m->source->ckpt != NULL) {
        tsr_map_opts part = *o;
        part.tie_head = true; /* a checkpoint may hold a part of a model: whoever needs a head misses it */
        TSR_TRY(map_check_tied(m->source, &part, err));
        return map_ckpt(b, err);
    }
    TSR_TRY(map_check_tied(m->source, o, err));
    b->where = malloc(((size_t)m->source->count + 1) * sizeof *b->where);
    if (b->where == NULL) {
        return no_memory(b, err);
    }
    TSR_TRY(place_all(b, o, err));
    uint32_t *rank = malloc(((size_t)m->group_count + 1) * sizeof *rank);
    if (rank == NULL) {
        return no_memory(b, err);
    }
    int64_t experts = 0;
    tsr_status st = map_rank_groups(m, rank, &experts, err);
    if (st == TSR_OK && m->layout != &tsr_layout_raw) {
        st = sort_groups(b, rank, err); /* raw keeps the source's order */
    }
    free(rank);
    TSR_TRY(st);
    TSR_TRY(number_items(b, o->partial || o->keep != NULL ? 0 : experts, err));
    if (!o->partial) { /* a family with gaps cannot be written, whatever was asked for */
        TSR_TRY(check_gaps(b, err));
    }
    TSR_TRY(join_partners(b, o->partial || o->keep != NULL, err));
    return o->partial || o->keep != NULL ? TSR_OK : map_check_catalog(m, o, err);
}

tsr_status tsr_map_make(tsr_map **out, tsr_source *s, const tsr_layout *l, const tsr_map_opts *o,
                        tsr_err *err)
{
    *out = NULL;
    tsr_map *m = calloc(1, sizeof *m);
    if (m == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    builder b = { .m = m };
    m->layout = l;
    m->source = s;
    m->arena = tsr_arena_new(o->mem_limit > 0 ? o->mem_limit : DEFAULT_MEM_LIMIT);
    tsr_status st = m->arena != NULL ? make_map(&b, o, err) : no_memory(&b, err);
    free(b.where);
    free((void *)b.partners);
    free(b.witness);
    free(b.highest);
    if (st != TSR_OK) {
        tsr_map_free(&m);
    }
    *out = m;
    return st;
}

void tsr_map_free(tsr_map **m)
{
    if (m == NULL || *m == NULL) {
        return;
    }
    free((*m)->src);
    free((*m)->groups);
    free((*m)->group_first);
    free((*m)->hash);
    tsr_arena_free(&(*m)->arena);
    free(*m);
    *m = NULL;
}

/* ---- use ------------------------------------------------------------------------------------------------------------ */

int64_t tsr_map_find(const tsr_map *m, const char *canonical, uint32_t *group)
{
    uint32_t g = find_group(m, canonical, false);
    int64_t item = g != UINT32_MAX && m->group_first != NULL ? m->group_first[g] : -1;
    size_t n = strlen(canonical);
    if (g == UINT32_MAX && strstr(canonical, "{e}") != NULL) {
        g = find_group(m, canonical, true);
    }
    for (size_t i = 0; g == UINT32_MAX && n < NAME_ROOM - 8 && i < n; i++) {
        place p = { .digits_at = i, .digits = strspn(canonical + i, "0123456789") };
        if (p.digits == 0) {
            continue;
        }
        size_t digits;
        int64_t e = small_number(canonical + i, &digits);
        char tmpl[NAME_ROOM];
        to_template(canonical, &p, tmpl, sizeof tmpl);
        uint32_t f = e >= 0 ? find_group(m, tmpl, true) : UINT32_MAX;
        if (f != UINT32_MAX && e < (int64_t)m->groups[f].expert_count) {
            g = f;
            item = m->group_first != NULL ? m->group_first[f] + e : -1;
        }
        i += p.digits;
    }
    if (group != NULL) {
        *group = g;
    }
    return item;
}

uint32_t tsr_map_group(const tsr_map *m, int64_t i, int32_t *expert)
{
    uint32_t lo = 0, hi = m->group_count;
    while (hi - lo > 1) {
        uint32_t mid = lo + (hi - lo) / 2;
        if (m->group_first[mid] <= i) {
            lo = mid;
        } else {
            hi = mid;
        }
    }
    if (expert != NULL) {
        *expert = m->groups[lo].expert_count > 0 ? (int32_t)(i - m->group_first[lo]) : -1;
    }
    return lo;
}

size_t tsr_map_name(const tsr_map *m, int64_t i, char *buf, size_t buf_bytes)
{
    int32_t expert;
    const tsr_tensor_decl *d = &m->groups[tsr_map_group(m, i, &expert)];
    tsr_tensor_info t = { .name = d->name, .expert_count = d->expert_count };
    return tsr_tensor_item_name(&t, expert >= 0 ? (uint32_t)expert : 0, buf, buf_bytes);
}

tsr_status tsr_map_read(const tsr_map *m, int64_t i, uint64_t off, void *dst, size_t n, tsr_err *err)
{
    TSR_ASSERT(i >= 0 && i < m->count && m->src[i] >= 0);
    return tsr_source_read(m->source, m->src[i], off, dst, n, err);
}

tsr_status tsr_view_open(tsr_view *out, const char *path, const char *arch, const tsr_source_opts *so,
                         const tsr_map_opts *mo, tsr_err *err)
{
    static const tsr_map_opts loose = { .partial = true };
    const tsr_layout *l;
    *out = (tsr_view){ 0 };
    TSR_TRY(tsr_source_open(&out->source, path, so, err));
    tsr_status st = tsr_layout_pick(&l, arch, out->source, err);
    if (st == TSR_OK) {
        st = tsr_map_make(&out->map, out->source, l, mo != NULL ? mo : &loose, err);
    }
    if (st != TSR_OK) {
        tsr_view_close(out);
    }
    return st;
}

void tsr_view_close(tsr_view *v)
{
    tsr_map_free(&v->map);
    tsr_source_close(&v->source);
}
