/* st_header.h - private: the header of a safetensors file, a pure function of bytes; and what a file under such a
 * name is when it is none. Format: https://github.com/huggingface/safetensors, "Format". */
#ifndef TSR_CONVERT_ST_HEADER_H
#define TSR_CONVERT_ST_HEADER_H

#include "format/base.h"

#define ST_HEADER_BYTES_MAX ((uint64_t)1 << 30)

typedef struct st_entry {
    const char *name;
    const int64_t *shape;
    uint64_t begin, end; /* in the data part */
    uint8_t dtype, rank;
} st_entry;

typedef struct st_header {
    st_entry *entries; /* in header order */
    int64_t count;
    uint64_t data_bytes; /* promised by the entries */
    uint64_t trailing;   /* bytes behind them */
    bool has_metadata;
} st_header;

/* Looks at the first bytes of a file of file_bytes and gives the length of its JSON header, or says what the file
 * is: TSR_E_MISSING for a Git LFS pointer, TSR_E_FORMAT for HTML, short or cut files. first holds first_bytes >= 8
 * of the file, or all of it. file names it in messages. */
TSR_NODISCARD tsr_status st_header_length(const char *file, const uint8_t *first, size_t first_bytes,
                                          uint64_t file_bytes, uint64_t *out, tsr_err *err);

/* json: n bytes (without the length). data_bytes: what follows in the file. Names and shapes go into the arena,
 * whose limit guards against hostile counts. Everything the format promises is checked: ranges tile the data, keys
 * are unique, shapes agree with ranges, text is UTF-8. */
TSR_NODISCARD tsr_status st_header_parse(st_header *out, tsr_arena *arena, const char *file,
                                         const uint8_t *json, size_t n, uint64_t data_bytes,
                                         bool allow_trailing, tsr_err *err);
/* Strict UTF-8: no overlong forms, no surrogates, at most U+10FFFF, no NUL. */
bool st_utf8(const uint8_t *s, size_t n);

#endif
