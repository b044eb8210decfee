/* glob.h - patterns for tensor names: * ? [..] as in fnmatch (also across '/' and '.'), and braces: {a,b} is
 * either word, {0..7} a whole number from 0 to 7. Any other brace, {e} for instance, stands for itself. */
#ifndef TSR_CLI_GLOB_H
#define TSR_CLI_GLOB_H

#include "format/base.h"

#define TSR_GLOB_PATTERNS_MAX 65536u

typedef struct tsr_glob tsr_glob;

/* patterns: NULL-terminated, may be NULL. TSR_E_USAGE: the braces stand for more than TSR_GLOB_PATTERNS_MAX.
 */
TSR_NODISCARD tsr_status tsr_glob_new(tsr_glob **out, const char *const *patterns, tsr_err *err);
void tsr_glob_free(tsr_glob **g);
/* True when one of the patterns matches the whole name. Without patterns: always. */
bool tsr_glob_match(const tsr_glob *g, const char *name);
bool tsr_glob_empty(const tsr_glob *g);

/* The patterns with every brace written out, for libraries that know fnmatch only; NULL-terminated, borrowed
 * from g. NULL without patterns. TSR_E_USAGE as above. */
TSR_NODISCARD tsr_status tsr_glob_plain(tsr_glob *g, const char *const **out, tsr_err *err);

#endif
