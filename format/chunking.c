/* chunking.c - see chunking.h. Pure arithmetic. */
#include "format/chunking.h"

void tsr_storage_shape(tsr_dtype dtype, int rank, const int64_t *shape, int64_t *out)
{
    for (int i = 0; i < rank; i++) {
        out[i] = shape[i];
    }
    if (rank > 0) {
        out[rank - 1] /= tsr_dtype_info((unsigned)dtype)->elems_per_unit;
    }
}

uint64_t tsr_chunk_count(uint64_t item_bytes, uint64_t block_bytes, uint64_t chunk_bytes)
{
    if (item_bytes == 0 || block_bytes == 0 || chunk_bytes == 0 || chunk_bytes > block_bytes ||
        item_bytes % block_bytes != 0) {
        return 0;
    }
    uint64_t per_block = block_bytes / chunk_bytes + (block_bytes % chunk_bytes != 0);
    uint64_t count;
    return tsr_mul_u64(item_bytes / block_bytes, per_block, &count) ? count : 0;
}

void tsr_chunk_range(uint64_t block_bytes, uint64_t chunk_bytes, uint64_t chunk, uint64_t *off,
                     uint64_t *bytes)
{
    uint64_t per_block = block_bytes / chunk_bytes + (block_bytes % chunk_bytes != 0);
    uint64_t inside = chunk % per_block * chunk_bytes;
    *off = chunk / per_block * block_bytes + inside;
    *bytes = block_bytes - inside < chunk_bytes ? block_bytes - inside : chunk_bytes;
}

uint64_t tsr_chunk_at(uint64_t block_bytes, uint64_t chunk_bytes, uint64_t off)
{
    uint64_t per_block = block_bytes / chunk_bytes + (block_bytes % chunk_bytes != 0);
    return off / block_bytes * per_block + off % block_bytes / chunk_bytes;
}

/* The largest divisor of n in [limit / 2, limit], else limit: even cuts leave no padded edge chunk. */
static int64_t even_cut(int64_t n, int64_t limit)
{
    if (limit >= n) {
        return n;
    }
    int64_t lowest = limit / 2 > 0 ? limit / 2 : 1;
    if (limit > ((int64_t)1 << 20)) { /* long vectors of tiny rows: a bounded search is enough */
        lowest = limit - ((int64_t)1 << 16);
    }
    for (int64_t k = limit; k >= lowest; k--) {
        if (n % k == 0) {
            return k;
        }
    }
    return limit;
}

bool tsr_chunking_make(tsr_chunking *out, tsr_dtype dtype, int rank, const int64_t *shape, uint64_t target)
{
    *out = (tsr_chunking){ 0 };
    if (!tsr_shape_bytes(dtype, rank, shape, &out->item_bytes)) {
        return false;
    }
    if (out->item_bytes == 0) {
        return true;
    }
    int64_t dims[TSR_RANK_MAX];
    tsr_storage_shape(dtype, rank, shape, dims);
    uint64_t inner = tsr_dtype_info((unsigned)dtype)->bytes_per_unit;
    int axis = rank > 0 ? rank - 1 : 0;
    /* Walk outwards while the rows of the next outer axis still fit into one chunk. */
    while (axis > 0 && inner * (uint64_t)dims[axis] <= target) {
        inner *= (uint64_t)dims[axis];
        axis--;
    }
    int64_t length = rank > 0 ? dims[axis] : 1;
    uint64_t limit = target / inner > 0 ? target / inner : 1;
    out->axis = axis;
    out->rows = even_cut(length, limit > (uint64_t)length ? length : (int64_t)limit);
    out->block_bytes = inner * (uint64_t)length;
    out->chunk_bytes = inner * (uint64_t)out->rows;
    out->per_block = out->block_bytes / out->chunk_bytes + (out->block_bytes % out->chunk_bytes != 0);
    out->chunks = tsr_chunk_count(out->item_bytes, out->block_bytes, out->chunk_bytes);
    return out->chunks <= (uint64_t)1 << 31;
}

void tsr_chunk_coords(const tsr_chunking *k, tsr_dtype dtype, int rank, const int64_t *shape, uint64_t chunk,
                      int64_t *coords)
{
    int64_t dims[TSR_RANK_MAX];
    tsr_storage_shape(dtype, rank, shape, dims);
    for (int i = 0; i < rank; i++) {
        coords[i] = 0;
    }
    if (rank == 0) {
        return;
    }
    coords[k->axis] = (int64_t)(chunk % k->per_block) * k->rows;
    uint64_t outer = chunk / k->per_block;
    for (int i = k->axis - 1; i >= 0; i--) {
        coords[i] = (int64_t)(outer % (uint64_t)dims[i]);
        outer /= (uint64_t)dims[i];
    }
}
