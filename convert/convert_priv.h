/* convert_priv.h - private: one planned conversion and its two executors. */
#ifndef TSR_CONVERT_CONVERT_PRIV_H
#define TSR_CONVERT_CONVERT_PRIV_H

#include "convert/convert.h"

/* One safetensors file to be written. */
typedef struct out_entry {
    int64_t item; /* of the map */
    uint64_t begin, end;
} out_entry;
typedef struct out_file {
    const char *name;
    const uint8_t *header; /* with its length field */
    uint64_t header_bytes, data_bytes;
    out_entry *entries; /* by begin */
    int64_t count;
} out_file;

typedef struct conversion {
    tsr_convert_plan pub; /* first */
    tsr_convert_opts o;
    tsr_arena *arena;
    char *dst;
    tsr_source *source;
    tsr_map *map;
    bool to_tessera, single; /* single: dst is one .safetensors file */
    /* export */
    const tsr_layout *layout; /* whose names the files get */
    out_file *files;
    uint32_t file_count;
    uint8_t *source_headers; /* content of the headers asset */
    uint64_t source_headers_bytes;
    char *index_json; /* a new index, when the files are not identical to the imported ones */
    const char **warnings;
} conversion;

TSR_NODISCARD tsr_status convert_warn(conversion *c, const char *text, tsr_err *err);
/* Text naming source and options: a continued run must agree on it. In the arena. */
TSR_NODISCARD tsr_status convert_key(conversion *c, const char **out, tsr_err *err);
TSR_NODISCARD tsr_status import_plan(conversion *c, tsr_err *err);
TSR_NODISCARD tsr_status import_run(conversion *c, tsr_err *err);
TSR_NODISCARD tsr_status export_plan(conversion *c, tsr_err *err);
TSR_NODISCARD tsr_status export_run(conversion *c, tsr_err *err);

#endif
