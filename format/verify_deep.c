/* verify_deep.c - proves that the HDF5 file and the index describe the same tensors at the same places. */
#include "format/chunking.h"
#include "format/verify.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct deep {
    verifier *v;
    uint32_t file;
    const char *name;
    uint32_t *experts;
    uint32_t expert_count;
    bool skip;           /* /tessera data sets are ours, but no tensors */
    tsr_tensor_info t;   /* of the data set told last */
    uint64_t seen, want; /* chunks */
} deep;

static void tell(deep *d, const char *item, const char *what)
{
    verify_tell(d->v, TSR_E_FORMAT, d->name, item, what);
}

static tsr_status on_dataset(void *payload, const tsr_h5_seen *s, tsr_err *err)
{
    (void)err;
    deep *d = payload;
    uint32_t item;
    d->skip = strcmp(s->group, "/tessera") == 0;
    if (d->skip) {
        return TSR_OK;
    }
    bool family = strcmp(s->group, "/experts") == 0;
    tsr_status st = tsr_ckpt_find(d->v->c, s->name, &d->t, &item, NULL);
    d->skip = st != TSR_OK || (d->t.expert_count > 0) != family || strcmp(d->t.name, s->name) != 0;
    if (d->skip) {
        tell(d, s->name, "libhdf5 sees a data set that the index does not know");
        return TSR_OK;
    }
    int64_t dims[TSR_RANK_MAX];
    int lead = family ? 1 : 0;
    tsr_storage_shape(d->t.dtype, d->t.rank, d->t.shape, dims);
    bool same = s->rank == d->t.rank + lead &&
                strcmp(s->dtype_attr, tsr_dtype_name((unsigned)d->t.dtype)) == 0 &&
                s->elem_bytes == tsr_dtype_info((unsigned)d->t.dtype)->bytes_per_unit;
    for (int i = 0; same && i < d->t.rank; i++) {
        same = s->dims[lead + i] == (uint64_t)dims[i];
    }
    uint64_t items = 1;
    for (items = family ? 0 : 1;
         family && items < d->expert_count && d->experts[items] < d->t.expert_count;) {
        items++;
    }
    same = same && (!family || s->dims[0] == items);
    if (!same) {
        tell(d, s->name, "dtype or shape in HDF5 differ from the index");
    }
    d->want += items * d->t.chunks;
    return TSR_OK;
}

static tsr_status on_chunk(void *payload, const tsr_h5_seen *s, const uint64_t *coords, uint64_t offset,
                           uint64_t bytes, unsigned mask, tsr_err *err)
{
    (void)err;
    deep *d = payload;
    if (d->skip) {
        return TSR_OK;
    }
    const tsr_tensor_info *t = &d->t;
    int lead = t->expert_count > 0 ? 1 : 0;
    uint32_t item = lead > 0 && coords[0] < d->expert_count ? d->experts[coords[0]] : 0;
    tsr_extent_info x;
    uint64_t at = 0;
    if (s->chunk != NULL) { /* byte offset of the chunk's first element in the item */
        int64_t dims[TSR_RANK_MAX];
        tsr_storage_shape(t->dtype, t->rank, t->shape, dims);
        for (int i = 0; i < t->rank; i++) {
            at = at * (uint64_t)dims[i] + coords[lead + i];
        }
        at *= tsr_dtype_info((unsigned)t->dtype)->bytes_per_unit;
    }
    uint64_t first = t->chunks > 0 ? tsr_chunk_at(t->block_bytes, t->chunk_bytes, at) : 0;
    uint64_t last = s->chunk != NULL ? first
                                     : t->chunks - 1; /* contiguous: one data set, all our extents in a row */
    uint64_t sum = 0;
    for (uint64_t k = first; k <= last && k < t->chunks; k++) {
        tsr_status st = tsr_ckpt_extent(d->v->c, t, item, (uint32_t)k, &x, NULL);
        bool raw_mask = (mask != 0) == (x.codec == TSR_CODEC_RAW) || !t->filtered;
        if (st != TSR_OK || x.file != d->file || x.offset != offset + sum || !raw_mask) {
            char name[700];
            (void)tsr_tensor_item_name(t, item, name, sizeof name);
            tell(d, name, "lies elsewhere in HDF5 than in the index");
            return TSR_OK;
        }
        sum += x.stored_bytes;
        d->seen++;
    }
    if (sum != bytes) {
        tell(d, t->name, "has another length in HDF5 than in the index");
    }
    return TSR_OK;
}

static tsr_status walk_file(verifier *v, uint32_t file, tsr_err *err)
{
    tsr_file_info f;
    deep d = { .v = v, .file = file };
    char *path;
    tsr_err why;
    TSR_TRY(tsr_ckpt_file(v->c, file, &f, err));
    d.name = f.name;
    TSR_TRY(tsr_ckpt_file_experts(v->c, file, &d.experts, &d.expert_count, err));
    if (asprintf(&path, "%s/%s", v->dir->path, f.name) < 0) {
        free(d.experts);
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    tsr_h5_visit visit = { on_dataset, on_chunk, &d };
    tsr_status st = tsr_h5_walk(path, &visit, &why);
    if (st != TSR_OK) {
        verify_tell(v, TSR_E_FORMAT, f.name, "HDF5 structure", why.msg);
    } else if (d.seen != d.want) {
        tell(&d, "HDF5 structure", "libhdf5 sees another number of chunks than the index");
    }
    free(path);
    free(d.experts);
    return TSR_OK;
}

tsr_status verify_deep(verifier *v, tsr_err *err)
{
    if (!tsr_fs_is_dir(v->dir->path)) {
        verify_tell(v, TSR_OK, v->dir->path, "HDF5 structure",
                    "not compared inside a tar (unpack it to do so)");
        return TSR_OK;
    }
    for (uint32_t i = 0; i < tsr_ckpt_file_count(v->c); i++) {
        TSR_TRY(walk_file(v, i, err));
    }
    return TSR_OK;
}
