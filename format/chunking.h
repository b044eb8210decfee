/* chunking.h - private: how the bytes of one item (a tensor, or one expert's matrix) are cut into extents.
 *
 * A chunk is a run of whole rows along one axis with every later axis whole and every earlier index fixed, so
 * that it is both an HDF5 chunk and one contiguous byte range of the item. Bytes before the axis form blocks:
 * an item is item_bytes / block_bytes blocks, each cut into chunks of chunk_bytes, the last maybe shorter. */
#ifndef TSR_FORMAT_CHUNKING_H
#define TSR_FORMAT_CHUNKING_H

#include "format/base.h"

#define TSR_CHUNK_TARGET_BYTES ((uint64_t)16 << 20)

typedef struct tsr_chunking {
    int axis;     /* the cut axis, 0 for rank 0 */
    int64_t rows; /* chunk's extent along axis, in storage units of that axis */
    uint64_t item_bytes, block_bytes, chunk_bytes;
    uint64_t per_block; /* chunks of one block */
    uint64_t chunks;    /* of the item; 0 when it has no bytes */
} tsr_chunking;

/* False when the shape is impossible (tsr_shape_bytes) or has more than 2^31 chunks. target > 0. */
bool tsr_chunking_make(tsr_chunking *out, tsr_dtype dtype, int rank, const int64_t *shape, uint64_t target);
/* Dimensions in storage units (bytes_per_unit each): packed dtypes have their last dimension divided. */
void tsr_storage_shape(tsr_dtype dtype, int rank, const int64_t *shape, int64_t *out);
/* Which bytes of the item chunk c holds. Needs only item, block and chunk bytes (as stored in the index). */
void tsr_chunk_range(uint64_t block_bytes, uint64_t chunk_bytes, uint64_t chunk, uint64_t *off,
                     uint64_t *bytes);
/* The number of chunks these three imply, or 0 when they do not fit together (or item_bytes is 0). */
uint64_t tsr_chunk_count(uint64_t item_bytes, uint64_t block_bytes, uint64_t chunk_bytes);
/* The chunk that holds byte off of the item. */
uint64_t tsr_chunk_at(uint64_t block_bytes, uint64_t chunk_bytes, uint64_t off);
/* HDF5 coordinates (storage units, rank entries) of the first element of chunk c. */
void tsr_chunk_coords(const tsr_chunking *k, tsr_dtype dtype, int rank, const int64_t *shape, uint64_t chunk,
                      int64_t *coords);

#endif
