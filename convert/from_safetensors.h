/* from_safetensors.h - private: what the exporter needs of a safetensors source's headers. */
#ifndef TSR_CONVERT_FROM_SAFETENSORS_H
#define TSR_CONVERT_FROM_SAFETENSORS_H

#include "convert/convert.h"

/* Name of the generated asset that keeps the source's headers, so that an export can give the files back byte for
 * byte: per file u32 name bytes, name, u64 header bytes, header as it was (length field, JSON, padding). */
#define ST_HEADERS_ASSET "source/safetensors-headers.bin"

extern const tsr_source_ops tsr_source_safetensors;
/* malloc'ed content of that asset. */
TSR_NODISCARD tsr_status st_source_headers(tsr_source *s, uint8_t **out, uint64_t *bytes, tsr_err *err);

#endif
