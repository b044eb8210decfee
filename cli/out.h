/* out.h - what reaches standard output and standard error: text from files made harmless, sizes for people,
 * JSON. */
#ifndef TSR_CLI_OUT_H
#define TSR_CLI_OUT_H

#include "format/base.h"

#include <jansson.h>
#include <stdio.h>

/* Writes s so that a terminal cannot be steered by it: control bytes and bytes that are not UTF-8 become
 * \xNN. */
void tsr_out_text(FILE *f, const char *s);

/* "17.5 MiB"; below 1 KiB "12 B". */
#define TSR_SIZE_TEXT 32
const char *tsr_size_text(uint64_t bytes, char buf[TSR_SIZE_TEXT]);
/* "[2, 3]", "[]" for a scalar. Cut at the buffer's end. */
const char *tsr_shape_text(int rank, const int64_t *shape, char *buf, size_t buf_bytes);
/* "0-3, 8"; cut with "..." at the buffer's end. ids ascend. */
const char *tsr_ranges_of(const uint32_t *ids, uint32_t count, char *buf, size_t buf_bytes);

/* Standard output so far, or flushed now: TSR_E_IO says why it cannot be written. */
TSR_NODISCARD tsr_status tsr_out_check(tsr_err *err);
TSR_NODISCARD tsr_status tsr_out_flush(tsr_err *err);
/* True when a write failed because the reader of the pipe has gone. */
bool tsr_out_pipe_gone(void);
/* Standard error is a terminal that wants colours (NO_COLOR is not set). */
bool tsr_out_colors(void);

/* ---- files ------------------------------------------------------------------------------------------- */

/* A file that has its name only when it is complete. */
typedef struct tsr_out_file {
    FILE *f;
    const char *name; /* borrowed */
    char *part;       /* its temporary name */
} tsr_out_file;
/* TSR_E_CONFLICT: name exists. */
TSR_NODISCARD tsr_status tsr_out_file_open(tsr_out_file *o, const char *name, tsr_err *err);
/* Ends it: with st TSR_OK it gets its name unless something cannot be written, otherwise it vanishes. Returns st or that
 * failure. */
TSR_NODISCARD tsr_status tsr_out_file_close(tsr_out_file *o, tsr_status st, tsr_err *err);

/* ---- JSON. A NULL object means "out of memory happened before"; it is passed through to tsr_json_print. */

/* Takes value over. On failure *obj becomes NULL. */
void tsr_json_set(json_t **obj, const char *key, json_t *value);
void tsr_json_append(json_t **list, json_t *value);
/* A string; bytes that are not UTF-8 become U+FFFD. NULL s: null. */
json_t *tsr_json_text(const char *s);
/* The same of n bytes, which may hold NUL. */
json_t *tsr_json_bytes(const char *p, size_t n);
/* Exact; a value beyond 2^63-1 becomes a string of digits. */
json_t *tsr_json_u64(uint64_t v);
json_t *tsr_json_shape(int rank, const int64_t *shape);
/* null when v is not finite. */
json_t *tsr_json_number(double v);
/* Prints with a newline to standard output and frees. lines: in one line. TSR_E_LIMIT when obj is NULL. */
TSR_NODISCARD tsr_status tsr_json_print(json_t *obj, bool lines, tsr_err *err);

#endif
