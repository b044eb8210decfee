/* st_index.h - private: model.safetensors.index.json, read as a stream (it may name half a million tensors). */
#ifndef TSR_CONVERT_ST_INDEX_H
#define TSR_CONVERT_ST_INDEX_H

#include "format/base.h"

/* Calls fn for each entry of weight_map. file names the index in messages. TSR_E_FORMAT: not such an index. */
TSR_NODISCARD tsr_status st_index_each(const char *file, const uint8_t *json, size_t n,
                                       tsr_status (*fn)(void *payload, const char *tensor, const char *shard,
                                                        tsr_err *err),
                                       void *payload, tsr_err *err);

#endif
