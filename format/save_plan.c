/* save_plan.c - which bytes of which tensor go to which place of which shard; see save.h. Pure arithmetic. */
#include "format/codec.h"
#include "format/save.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FILTER_BYTES_MIN 4096 /* below that a filter pipeline costs more than it gains */

static bool is_expert_class(tsr_class k)
{
    return k == TSR_CLASS_EXPERTS || k == TSR_CLASS_OPTIM_EXPERTS;
}

void save_plan_free(save_plan *p)
{
    tsr_arena_free(&p->arena);
    *p = (save_plan){ 0 };
}

/* ---- declarations --------------------------------------------------------------------------------------- */

static tsr_status check_name(const tsr_tensor_decl *d, tsr_err *err)
{
    size_t n = strlen(d->name);
    if (n > TSR_NAME_BYTES_MAX) {
        TSR_FAIL(err, TSR_E_LIMIT, "%.80s...: a tensor name of %zu bytes (limit %u)", d->name, n,
                 TSR_NAME_BYTES_MAX);
    }
    if (d->expert_count == 0) {
        return TSR_OK;
    }
    const char *first = strstr(d->name, "{e}");
    if (first == NULL || strstr(first + 3, "{e}") != NULL) {
        TSR_FAIL(err, TSR_E_USAGE, "%s: a family's name holds {e} exactly once", d->name);
    }
    if (d->expert_count > TSR_EXPERT_COUNT_MAX) {
        TSR_FAIL(err, TSR_E_LIMIT, "%s: %u experts (limit %u)", d->name, d->expert_count,
                 TSR_EXPERT_COUNT_MAX);
    }
    return TSR_OK;
}

static tsr_status add_tensor(save_plan *p, const tsr_tensor_decl *d, uint32_t count, save_tensor *t,
                             tsr_err *err)
{
    TSR_TRY(check_name(d, err));
    if (!tsr_chunking_make(&t->k, d->dtype, d->rank, d->shape, TSR_CHUNK_TARGET_BYTES)) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: impossible shape for %s", d->name,
                 tsr_dtype_name((unsigned)d->dtype));
    }
    if (tsr_dtype_info((unsigned)d->src_dtype) == NULL || (unsigned)d->klass >= TSR_CLASS_COUNT ||
        is_expert_class(d->klass) != (d->expert_count > 0) || d->layer < -1 || d->partner >= (int64_t)count) {
        TSR_FAIL(err, TSR_E_USAGE, "%s: class, layer, dtype or partner of the declaration make no sense",
                 d->name);
    }
    if (d->expert_count > 0 && d->rank >= TSR_RANK_MAX) {
        TSR_FAIL(err, TSR_E_LIMIT, "%s: rank %d of an expert's matrix (limit %d)", d->name, d->rank,
                 TSR_RANK_MAX - 1);
    }
    t->d = *d;
    t->d.name = tsr_arena_strndup(p->arena, d->name, strlen(d->name));
    int64_t *shape = tsr_arena_alloc(p->arena, (size_t)d->rank * sizeof *shape);
    if (t->d.name == NULL || shape == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory for the plan");
    }
    if (d->rank > 0) {
        memcpy(shape, d->shape, (size_t)d->rank * sizeof *shape);
    }
    t->d.shape = shape;
    t->first_extent = p->extent_count;
    uint64_t items = d->expert_count > 0 ? d->expert_count : 1, extents, bytes;
    if (!tsr_mul_u64(items, t->k.chunks, &extents) ||
        !tsr_add_u64(p->extent_count, extents, &p->extent_count) || p->extent_count > TSR_EXTENT_COUNT_MAX ||
        !tsr_mul_u64(items, t->k.item_bytes, &bytes) ||
        !tsr_add_u64(p->payload_bytes, bytes, &p->payload_bytes) || p->payload_bytes > INT64_MAX) {
        TSR_FAIL(err, TSR_E_LIMIT, "%s: the checkpoint grows beyond %u extents", d->name,
                 TSR_EXTENT_COUNT_MAX);
    }
    if (t->k.chunk_bytes > p->largest_chunk) {
        p->largest_chunk = t->k.chunk_bytes;
    }
    return TSR_OK;
}

static tsr_status refuse_doubles(const save_plan *p, tsr_err *err)
{
    uint64_t slots = 16;
    while (slots < (uint64_t)p->tensor_count * 2) {
        slots *= 2;
    }
    uint32_t *table = calloc(slots, sizeof *table);
    if (table == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory for the plan");
    }
    tsr_status st = TSR_OK;
    for (uint32_t i = 0; st == TSR_OK && i < p->tensor_count; i++) {
        const tsr_tensor_decl *d = &p->tensors[i].d;
        uint64_t slot = tsr_hash64(d->name, strlen(d->name)) & (slots - 1);
        for (; table[slot] != 0; slot = (slot + 1) & (slots - 1)) {
            const tsr_tensor_decl *o = &p->tensors[table[slot] - 1].d;
            if (strcmp(o->name, d->name) == 0 && (o->expert_count > 0) == (d->expert_count > 0)) {
                st = TSR_ERR(err, TSR_E_CONFLICT, "%s: declared twice", d->name);
                break;
            }
        }
        table[slot] = i + 1;
    }
    free(table);
    return st;
}

/* ---- files -------------------------------------------------------------------------------------------------- */

static tsr_status partitions_by_hand(uint32_t experts, const tsr_save_opts *o, uint32_t *part, tsr_err *err)
{
    for (uint32_t e = 0; e < experts; e++) {
        part[e] = UINT32_MAX;
    }
    for (uint32_t p = 0; p < o->expert_partitions; p++) {
        for (uint32_t r = 0; r < o->partitions[p].range_count; r++) {
            uint32_t first = o->partitions[p].ranges[2 * r], last = o->partitions[p].ranges[2 * r + 1];
            if (first > last || last >= experts) {
                TSR_FAIL(err, TSR_E_USAGE, "partition %u: experts %u-%u: experts go from 0 to %u", p, first,
                         last, experts - 1);
            }
            for (uint32_t e = first; e <= last; e++) {
                if (part[e] != UINT32_MAX) {
                    TSR_FAIL(err, TSR_E_USAGE, "expert %u is in partition %u and in partition %u", e, part[e],
                             p);
                }
                part[e] = p;
            }
        }
    }
    for (uint32_t e = 0; e < experts; e++) {
        if (part[e] == UINT32_MAX) {
            TSR_FAIL(err, TSR_E_USAGE, "expert %u is in no partition", e);
        }
    }
    return TSR_OK;
}

tsr_status save_partition_of(uint32_t experts, const tsr_save_opts *o, uint32_t *part, tsr_err *err)
{
    uint32_t n = o->expert_partitions > 0 ? o->expert_partitions : 1;
    if (o->partitions != NULL) {
        return partitions_by_hand(experts, o, part, err);
    }
    if (n > experts || (experts % n != 0 && !o->allow_uneven)) {
        char sizes[256] = "";
        size_t used = 0;
        for (uint32_t d = 1; d <= experts && used + 12 < sizeof sizes; d++) {
            if (experts % d == 0) {
                used += (size_t)snprintf(sizes + used, sizeof sizes - used, "%s%u", used > 0 ? ", " : "", d);
            }
        }
        TSR_FAIL(err, TSR_E_USAGE, "--experts %u: %u experts: possible sizes %s%s", n, experts, sizes,
                 n < experts ? " (--uneven allows others)" : "");
    }
    uint32_t each = experts / n, more = experts % n, e = 0;
    for (uint32_t p = 0; p < n; p++) {
        for (uint32_t i = 0; i < each + (p < more); i++) {
            part[e++] = p;
        }
    }
    return TSR_OK;
}

tsr_status save_plan_add_file(save_plan *p, tsr_class klass, uint32_t partition, uint32_t of, uint32_t piece,
                              uint32_t pieces, const uint32_t *experts, uint32_t expert_count, tsr_err *err)
{
    if (p->file_count >= TSR_FILE_COUNT_MAX) {
        TSR_FAIL(err, TSR_E_LIMIT, "more than %u shards", TSR_FILE_COUNT_MAX);
    }
    save_file *grown = p->files; /* has room up to the next power of two */
    if ((p->file_count & (p->file_count - 1)) == 0) {
        grown = tsr_arena_alloc(p->arena, ((size_t)p->file_count * 2 + 1) * sizeof *grown);
        if (grown != NULL && p->file_count > 0) {
            memcpy(grown, p->files, (size_t)p->file_count * sizeof *grown);
        }
    }
    char name[128];
    int n = pieces > 1
                ? snprintf(name, sizeof name, "%s-%05u-of-%05u.%u.h5", tsr_class_name(klass), partition, of,
                           piece)
                : snprintf(name, sizeof name, "%s-%05u-of-%05u.h5", tsr_class_name(klass), partition, of);
    char *kept = tsr_arena_strndup(p->arena, name, (size_t)n);
    uint32_t *ids = tsr_arena_alloc(p->arena, (size_t)expert_count * sizeof *ids);
    if (grown == NULL || kept == NULL || ids == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory for the plan");
    }
    if (expert_count > 0) {
        memcpy(ids, experts, (size_t)expert_count * sizeof *ids);
    }
    p->files = grown;
    p->files[p->file_count++] = (save_file){ .name = kept,
                                             .klass = klass,
                                             .partition = partition,
                                             .of = of,
                                             .piece = piece,
                                             .experts = ids,
                                             .expert_count = expert_count,
                                             .link_from = -1 };
    return TSR_OK;
}

/* Files of one expert class, or of one dense class, by the options. */
tsr_status save_plan_add_class(save_plan *p, tsr_class klass, uint32_t experts, const tsr_save_opts *o,
                               tsr_err *err)
{
    if (!is_expert_class(klass)) {
        uint32_t n = o->dense_files > 0 ? o->dense_files : 1;
        for (uint32_t i = 0; i < n; i++) {
            TSR_TRY(save_plan_add_file(p, klass, i, n, 0, 1, NULL, 0, err));
        }
        return TSR_OK;
    }
    uint32_t n = o->expert_partitions > 0 ? o->expert_partitions : 1;
    uint32_t *part = malloc((size_t)experts * 2 * sizeof *part);
    if (part == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory for the plan");
    }
    uint32_t *ids = part + experts;
    tsr_status st = save_partition_of(experts, o, part, err);
    for (uint32_t i = 0; st == TSR_OK && i < n; i++) {
        uint32_t count = 0;
        for (uint32_t e = 0; e < experts; e++) {
            if (part[e] == i) {
                ids[count++] = e;
            }
        }
        if (count > 0) {
            st = save_plan_add_file(p, klass, i, n, 0, 1, ids, count, err);
        }
    }
    free(part);
    return st;
}

static int compare_layers(const void *a, const void *b, void *arg)
{
    const save_tensor *t = arg;
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    if (t[x].d.layer != t[y].d.layer) {
        return t[x].d.layer < t[y].d.layer ? -1 : 1;
    }
    return x < y ? -1 : x > y;
}

/* Contiguous runs of about equal bytes; a packed tensor and its scales stay together. */
static void spread_dense(save_plan *p, tsr_class klass, uint32_t first_file, uint32_t files)
{
    uint64_t total = 0, sum = 0;
    for (uint32_t i = 0; i < p->tensor_count; i++) {
        total += p->tensors[i].d.klass == klass ? p->tensors[i].k.item_bytes : 0;
    }
    for (uint32_t i = 0; i < p->tensor_count; i++) {
        save_tensor *t = &p->tensors[i];
        if (t->d.klass != klass) {
            continue;
        }
        uint64_t mid = sum + t->k.item_bytes / 2;
        uint64_t f = total > 0 ? (uint64_t)((__uint128_t)mid * files / total) : 0;
        t->file = first_file + (uint32_t)(f < files ? f : files - 1);
        sum += t->k.item_bytes;
    }
    for (uint32_t i = 0; i < p->tensor_count; i++) {
        save_tensor *t = &p->tensors[i];
        if (t->d.klass == klass && t->d.partner >= 0 && p->tensors[t->d.partner].d.klass == klass) {
            p->tensors[t->d.partner].file = t->file;
        }
    }
}

static tsr_status assign_file(save_plan *p, uint32_t file, tsr_err *err)
{
    save_file *f = &p->files[file];
    bool experts = is_expert_class(f->klass);
    uint32_t count = 0;
    for (uint32_t i = 0; i < p->tensor_count; i++) {
        const save_tensor *t = &p->tensors[i];
        bool mine = t->d.klass == f->klass && (experts || t->file == file);
        count += mine && (!experts || f->experts[0] < t->d.expert_count);
    }
    f->tensors = tsr_arena_alloc(p->arena, (size_t)count * sizeof *f->tensors);
    if (f->tensors == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory for the plan");
    }
    f->tensor_count = 0;
    for (uint32_t i = 0; i < p->tensor_count; i++) {
        const save_tensor *t = &p->tensors[i];
        bool mine = t->d.klass == f->klass && (experts || t->file == file);
        if (!mine || (experts && f->experts[0] >= t->d.expert_count)) {
            continue;
        }
        f->tensors[f->tensor_count++] = i;
        uint64_t items = 1;
        if (experts) {
            items = 0;
            while (items < f->expert_count && f->experts[items] < t->d.expert_count) {
                items++;
            }
        }
        f->slot_count += items * t->k.chunks;
        f->payload_bytes += items * t->k.item_bytes;
    }
    if (experts) {
        qsort_r(f->tensors, f->tensor_count, sizeof *f->tensors, compare_layers, p->tensors);
    }
    return TSR_OK;
}

tsr_status save_plan_assign(save_plan *p, tsr_err *err)
{
    for (uint32_t i = 0; i < p->file_count; i++) {
        const save_file *f = &p->files[i];
        if (!is_expert_class(f->klass) && f->partition == 0 && f->piece == 0 && f->link_from < 0) {
            spread_dense(p, f->klass, i, f->of);
        }
    }
    for (uint32_t i = 0; i < p->file_count; i++) {
        TSR_TRY(assign_file(p, i, err));
    }
    return TSR_OK;
}

static tsr_status take_decls(save_plan *p, const tsr_tensor_decl *decls, uint32_t count, const bool *filtered,
                             const tsr_save_opts *o, tsr_err *err)
{
    p->arena = tsr_arena_new(0);
    p->tensors = p->arena != NULL ? tsr_arena_alloc(p->arena, (size_t)count * sizeof *p->tensors) : NULL;
    if (p->tensors == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory for the plan");
    }
    if (count > TSR_TENSOR_COUNT_MAX) {
        TSR_FAIL(err, TSR_E_LIMIT, "%u tensors (limit %u)", count, TSR_TENSOR_COUNT_MAX);
    }
    for (uint32_t i = 0; i < count; i++) {
        save_tensor *t = &p->tensors[i];
        TSR_TRY(add_tensor(p, &decls[i], count, t, err));
        t->filtered = filtered != NULL
                          ? filtered[i]
                          : o->compress && !o->zeros && tsr_codec_for(t->d.dtype) != TSR_CODEC_RAW &&
                                t->k.item_bytes >= FILTER_BYTES_MIN;
        p->any_filtered = p->any_filtered || t->filtered;
        p->tensor_count++;
    }
    return refuse_doubles(p, err);
}

tsr_status save_plan_begin(save_plan *p, const tsr_tensor_decl *decls, uint32_t count, const bool *filtered,
                           const tsr_save_opts *o, tsr_err *err)
{
    *p = (save_plan){ 0 };
    tsr_status st = take_decls(p, decls, count, filtered, o, err);
    if (st != TSR_OK) {
        save_plan_free(p);
    }
    return st;
}

tsr_status save_plan_make(save_plan *p, const tsr_tensor_decl *decls, uint32_t count, const tsr_save_opts *o,
                          tsr_err *err)
{
    TSR_TRY(save_plan_begin(p, decls, count, NULL, o, err));
    tsr_status st = TSR_OK;
    for (int k = 0; st == TSR_OK && k < TSR_CLASS_COUNT; k++) {
        uint32_t experts = 0;
        bool any = k == TSR_CLASS_DENSE && count == 0; /* an empty bag still has one shard */
        for (uint32_t i = 0; i < count; i++) {
            const tsr_tensor_decl *d = &p->tensors[i].d;
            if (d->klass == (tsr_class)k) {
                any = true;
                experts = d->expert_count > experts ? d->expert_count : experts;
            }
        }
        if (any) {
            st = save_plan_add_class(p, (tsr_class)k, experts, o, err);
        }
    }
    if (st == TSR_OK) {
        st = save_plan_assign(p, err);
    }
    if (st != TSR_OK) {
        save_plan_free(p);
    }
    return st;
}

/* ---- slots ---------------------------------------------------------------------------------------------------- */

/* Moves to the run of families of the next layer (or, in a dense file, to the next tensor). */
static bool next_group(const save_plan *p, const save_file *f, save_cursor *c)
{
    c->group_first = c->started ? c->group_end : 0;
    c->started = true;
    if (c->group_first >= f->tensor_count) {
        return false;
    }
    c->group_end = c->group_first + 1;
    int32_t layer = p->tensors[f->tensors[c->group_first]].d.layer;
    while (is_expert_class(f->klass) && c->group_end < f->tensor_count &&
           p->tensors[f->tensors[c->group_end]].d.layer == layer) {
        c->group_end++;
    }
    c->member = c->group_first;
    c->local = 0;
    c->chunk = 0;
    return true;
}

bool save_next_slot(const save_plan *p, uint32_t file, save_cursor *c, save_slot *out)
{
    const save_file *f = &p->files[file];
    uint32_t items = is_expert_class(f->klass) ? f->expert_count : 1;
    if (!c->started && !next_group(p, f, c)) {
        return false;
    }
    for (;;) {
        if (c->local >= items) {
            if (!next_group(p, f, c)) {
                return false;
            }
            continue;
        }
        if (c->member >= c->group_end) {
            c->member = c->group_first;
            c->local++;
            continue;
        }
        uint32_t id = f->tensors[c->member];
        const save_tensor *t = &p->tensors[id];
        uint32_t item = t->d.expert_count > 0 ? f->experts[c->local] : 0;
        if (c->chunk >= t->k.chunks || (t->d.expert_count > 0 && item >= t->d.expert_count)) {
            c->chunk = 0;
            c->member++;
            continue;
        }
        *out = (save_slot){ .file = file,
                            .tensor = id,
                            .member = c->member,
                            .item = item,
                            .local = c->local,
                            .chunk = c->chunk,
                            .extent = t->first_extent + (uint64_t)item * t->k.chunks + c->chunk };
        tsr_chunk_range(t->k.block_bytes, t->k.chunk_bytes, c->chunk, &out->item_offset, &out->payload_bytes);
        bool chunked = t->filtered ||
                       t->d.expert_count > 0; /* HDF5 chunks are whole: edges are padded with zeros */
        out->raw_bytes = chunked ? t->k.chunk_bytes : out->payload_bytes;
        c->chunk++;
        return true;
    }
}
