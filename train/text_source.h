/* text_source.h - documents of text out of files: plain, JSON lines, tar, each perhaps compressed. The one door to
 * libarchive in train/. */
#ifndef TSR_TRAIN_TEXT_SOURCE_H
#define TSR_TRAIN_TEXT_SOURCE_H

#include "format/base.h"

#include <sys/types.h>

/* ---- which files --------------------------------------------------------------------------------------------------- */

typedef struct text_file {
    char *name;
    uint64_t bytes;
    int64_t mtime_ns;
} text_file;
typedef struct text_list {
    text_file *files;
    size_t count, room;
    uint64_t bytes; /* of all files */
    dev_t skip_dev; /* a folder that is not entered, by number; skip_ino 0: none */
    ino_t skip_ino;
} text_list;

/* Appends a file, or the files of a folder in byte order of their names, folders at their own place.
 * TSR_E_MISSING: not there; TSR_E_UNSUPPORTED: no regular file, or a link to a folder inside a folder. */
TSR_NODISCARD tsr_status text_list_add(text_list *l, const char *path, tsr_err *err);
void text_list_free(text_list *l);

/* ---- their documents -------------------------------------------------------------------------------------------------- */

/* A document comes in parts, as K3's tokenizer would cut it: tokens of the parts are the tokens of the whole. */
#define TEXT_PART_CHARS 400000
#define TEXT_PART_BYTES_MAX ((size_t)4 * TEXT_PART_CHARS)
typedef struct text_part {
    const char *text; /* borrowed until the next call */
    size_t bytes;     /* 0: an empty document, or the end of one that was cut before */
    bool first, last; /* of its document */
} text_part;

typedef struct text_source text_source;
/* list and text_key are borrowed. line_max: bytes of a line of JSON. */
TSR_NODISCARD tsr_status text_source_open(text_source **out, const text_list *list, const char *text_key,
                                          size_t line_max, tsr_err *err);
void text_source_close(text_source **s);
/* *got false: the end. TSR_E_FORMAT: binary, no UTF-8, no JSON, damaged archives; TSR_E_CONFLICT: a file changed since
 * it was listed; TSR_E_LIMIT: a line beyond line_max. */
TSR_NODISCARD tsr_status text_source_next(text_source *s, text_part *part, bool *got, tsr_err *err);
/* Bytes of the files that were read. */
uint64_t text_source_done(const text_source *s);

#endif
