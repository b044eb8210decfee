/* opt.h - options as rows of a table: one parser, and the same rows become help, man pages and completions.
 */
#ifndef TSR_CLI_OPT_H
#define TSR_CLI_OPT_H

#include "format/base.h"

typedef enum tsr_opt_kind {
    TSR_OPT_FLAG,   /* --long */
    TSR_OPT_TEXT,   /* --output FILE */
    TSR_OPT_STRING, /* --prompt TEXT, which may be empty */
    TSR_OPT_LIST,   /* --include GLOB, as often as wanted */
    TSR_OPT_UINT,   /* --threads N, a whole number from low to high */
    TSR_OPT_REAL,   /* --temperature X, a decimal number from low to high */
    TSR_OPT_SIZE,   /* --mem-limit SIZE, bytes from low to high */
    TSR_OPT_CHOICE, /* --format text|raw: one of the words in `value`, separated by '|' */
    TSR_OPT_MAYBE   /* --compress[=LEVEL]: a whole number from low to high, or nothing */
} tsr_opt_kind;

typedef struct tsr_opt {
    const char *name;  /* without "--" */
    char letter;       /* short form, 0: none */
    uint8_t kind;      /* tsr_opt_kind */
    const char *value; /* how the value is called in help; the words of a choice; NULL for a flag */
    uint64_t low, high;
    const char *what; /* one sentence or two, no line breaks */
} tsr_opt;

/* A table ends with a row without a name. */
#define TSR_OPT_END                                                                                          \
    {                                                                                                        \
        0                                                                                                    \
    }
#define TSR_OPT_MAX 48

typedef struct tsr_opt_value {
    const tsr_opt *opt;
    bool given;
    const char *text;  /* as given, NULL for a flag or an omitted value */
    uint64_t number;   /* kinds UINT, SIZE, MAYBE */
    double real;       /* kind REAL */
    const char **list; /* kind LIST: NULL-terminated, never NULL when given */
    size_t list_count;
} tsr_opt_value;

/* A parsed command line. Texts are borrowed from argv. */
typedef struct tsr_args {
    tsr_opt_value values[TSR_OPT_MAX];
    size_t value_count;
    const char **operands; /* NULL-terminated */
    size_t operand_count;
} tsr_args;

/* Parses argv[0..argc) (without program and command) by two tables; either may be NULL. Options may stand
 * behind operands; "--" ends them; "-" is an operand; short flags may be joined. The last of several equal
 * ones counts. command is for messages. TSR_E_USAGE: unknown option (names the nearest), value missing,
 * superfluous or wrong. */
TSR_NODISCARD tsr_status tsr_opt_parse(tsr_args *out, const char *command, const tsr_opt *own,
                                       const tsr_opt *common, int argc, char *const *argv, tsr_err *err);
void tsr_args_free(tsr_args *a);

/* By long name, which must be in one of the tables that were parsed. */
const tsr_opt_value *tsr_opt_get(const tsr_args *a, const char *name);
bool tsr_opt_given(const tsr_args *a, const char *name);
/* The text, or fallback when it was not given. */
const char *tsr_opt_text(const tsr_args *a, const char *name, const char *fallback);
uint64_t tsr_opt_number(const tsr_args *a, const char *name, uint64_t fallback);
double tsr_opt_real(const tsr_args *a, const char *name, double fallback);

/* The name nearest to text, or NULL when none is near. names is NULL-terminated. */
const char *tsr_nearest(const char *text, const char *const *names);

/* A whole number: decimal digits and nothing else. what is put in front of messages ("--threads"). */
TSR_NODISCARD tsr_status tsr_parse_uint(const char *what, const char *text, uint64_t low, uint64_t high,
                                        uint64_t *out, tsr_err *err);
/* A decimal number such as 0.7, 12 or 1e-3: digits with at most one point between them, perhaps an exponent. */
TSR_NODISCARD tsr_status tsr_parse_real(const char *what, const char *text, double low, double high,
                                        double *out, tsr_err *err);
/* Bytes: digits and a unit: none or B; K M G T P (and KiB ..) are powers of 1024, KB MB .. powers of 1000. */
TSR_NODISCARD tsr_status tsr_parse_size(const char *what, const char *text, uint64_t low, uint64_t high,
                                        uint64_t *out, tsr_err *err);

#endif
