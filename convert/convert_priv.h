/* convert_priv.h - private: one planned conversion and its two executors. */
#ifndef TSR_CONVERT_CONVERT_PRIV_H
#define TSR_CONVERT_CONVERT_PRIV_H

#include "convert/convert.h"

#include <stdio.h>

/* One safetensors file to be written. */
typedef struct out_entry {
    int64_t item; /* of the map */
    uint64_t begin, end;
} out_entry;
typedef struct out_file {
    const char *name;
    const uint8_t *header; /* with its length field; NULL: made by export_header when the file is written */
    out_entry *entries;    /* by begin; NULL likewise */
    uint64_t header_bytes, data_bytes;
    int64_t first, count; /* items first .. first + count - 1, where entries is NULL */
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
    const char **warnings;
} conversion;

TSR_NODISCARD tsr_status convert_warn(conversion *c, const char *text, tsr_err *err);
/* Text naming source and options: a continued run must agree on it. In the arena. */
TSR_NODISCARD tsr_status convert_key(conversion *c, const char **out, tsr_err *err);
TSR_NODISCARD tsr_status import_plan(conversion *c, tsr_err *err);
TSR_NODISCARD tsr_status import_run(conversion *c, tsr_err *err);
TSR_NODISCARD tsr_status export_plan(conversion *c, tsr_err *err);
/* Header (with its length field) and entries of a file that is not as imported; both malloc'ed. */
TSR_NODISCARD tsr_status export_header(const conversion *c, const out_file *f, uint8_t **header,
                                       uint64_t *header_bytes, out_entry **entries, tsr_err *err);
/* Source name of item i through the export's layout. */
TSR_NODISCARD tsr_status export_name(const conversion *c, int64_t i, char *buf, size_t room, tsr_err *err);
/* A JSON string of s, written to f. */
void export_json_text(FILE *f, const char *s);
TSR_NODISCARD tsr_status export_run(conversion *c, tsr_err *err);

#endif
