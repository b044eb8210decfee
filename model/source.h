/* source.h - where a model's numbers come from: the one thing model/ asks of whoever opened the files. convert/weights.h
 * makes one from any format it reads; tests make one from memory. */
#ifndef TSR_MODEL_SOURCE_H
#define TSR_MODEL_SOURCE_H

#include "format/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tsr_weight_info {
    int64_t id; /* for read */
    tsr_dtype dtype;
    int rank;
    int64_t shape[4]; /* logical elements */
    uint64_t bytes;
} tsr_weight_info;

/* The three matrices of an expert and their scales, in this order. */
typedef enum tsr_expert_part {
    TSR_PART_GATE,
    TSR_PART_UP,
    TSR_PART_DOWN,
    TSR_PART_GATE_SCALE,
    TSR_PART_UP_SCALE,
    TSR_PART_DOWN_SCALE,
    TSR_PART_COUNT
} tsr_expert_part;

typedef struct tsr_weight_source {
    void *payload;
    /* A plain tensor, or one expert's matrix, by canonical name (docs/NAMES.md). TSR_E_MISSING: none. */
    tsr_status (*find)(void *payload, const char *name, tsr_weight_info *out, tsr_err *err);
    /* All its bytes, decoded, to host memory. Thread-safe. */
    tsr_status (*read)(void *payload, int64_t id, void *dst, size_t bytes, tsr_err *err);
    /* Host memory that one expert of this layer needs in read_expert: at least its matrices and scales, each part at a
     * multiple of 64 bytes or as it lies in the file. The same for all experts of a layer. */
    tsr_status (*expert_bytes)(void *payload, int32_t layer, uint64_t *bytes, tsr_err *err);
    /* Brings all matrices of one expert with one read where the format allows. part[i] points into dst; NULL for scales
     * that do not exist. *read_bytes: what was read from the file. Thread-safe. */
    tsr_status (*read_expert)(void *payload, int32_t layer, int32_t expert, void *dst, size_t dst_bytes,
                              const void *part[TSR_PART_COUNT], uint64_t *read_bytes, tsr_err *err);
} tsr_weight_source;

#ifdef __cplusplus
}
#endif
#endif
