/* pretoken.c - text into pieces by a regular expression. The one door to PCRE2.
 *
 * Three things differ between tiktoken's engine (Rust) and PCRE2, and would silently give other ids:
 * - [A&&[^B]] is an intersection there and two classes in a row here: K3's letters without Han are written as the
 *   complement of everything else;
 * - \p{Han} means the script there; here, from 10.40 on, also what is used together with Han (the full stop U+3002);
 * - \s is the property White_Space there; here it has U+180E too. */
#define PCRE2_CODE_UNIT_WIDTH 8

#include "model/tokenizer_priv.h"
#include "model/utf8.h"

#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

#define JIT_STACK_BYTES ((size_t)8 << 20)
#define PATTERN_BYTES_MAX 65536
#define MATCH_LIMIT 20000000u

#define SPACE                                                                                                \
    "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{" \
    "3000}"
/* {Lu,Lt,Lm,Lo,M} and {Ll,Lm,Lo,M}, both without Han, as complements. */
#define UPPER(han) "[^\\p{Ll}\\p{N}\\p{P}\\p{S}\\p{Z}\\p{C}" han "]"
#define LOWER(han) "[^\\p{Lu}\\p{Lt}\\p{N}\\p{P}\\p{S}\\p{Z}\\p{C}" han "]"
#define CONTRACTION "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
#define K3_PATTERN(han)                                                                                      \
    han "+"                                                                                                  \
        "|[^\\r\\n\\p{L}\\p{N}]?" UPPER(han) "*" LOWER(han) "+" CONTRACTION "|[^\\r\\n\\p{L}\\p{N}]?" UPPER( \
            han) "+" LOWER(han) "*" CONTRACTION "|\\p{N}{1,3}"                                               \
                                "| ?[^" SPACE "\\p{L}\\p{N}]+[\\r\\n]*"                                      \
                                "|[" SPACE "]*[\\r\\n]+"                                                     \
                                "|[" SPACE "]+(?![^" SPACE "])"                                              \
                                "|[" SPACE "]+"

/* K3's own spelling, which a caller may find in the model's files. */
static const char k3_tiktoken[] =
    "[\\p{Han}]+"
    "|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}&&["
    "^"
    "\\p{Han}]]+" CONTRACTION "|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]+[\\p{"
    "Ll}\\p{Lm}\\p{Lo}\\p{M}&&[^"
    "\\p{Han}]]*" CONTRACTION "|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

struct pretoken {
    pcre2_code *code;
    bool own, jit;
};

struct pretoken_run {
    const pretoken *pattern;
    pcre2_match_data *match;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
};

static pcre2_code *compile(const char *pattern, int *error, size_t *at)
{
    pcre2_compile_context *context = pcre2_compile_context_create(NULL);
    if (context == NULL) {
        *error = PCRE2_ERROR_NOMEMORY, *at = 0;
        return NULL;
    }
    (void)pcre2_set_max_pattern_length(context, PATTERN_BYTES_MAX);
    pcre2_code *code = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED,
                                     PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, error, at, context);
    pcre2_compile_context_free(context);
    return code;
}

/* Before 10.40 PCRE2 does not know sc:, and \p{Han} is the script. */
static pcre2_code *compile_k3(int *error, size_t *at)
{
    pcre2_code *code = compile(K3_PATTERN("\\p{sc:Han}"), error, at);
    return code != NULL ? code : compile(K3_PATTERN("\\p{Han}"), error, at);
}

static tsr_status check_own(const char *pattern, tsr_err *err)
{
    if (strstr(pattern, "&&") != NULL) {
        TSR_FAIL(err, TSR_E_UNSUPPORTED,
                 "pattern: && is tiktoken's intersection of sets, which PCRE2 lacks (write (?!\\p{Han})[...] "
                 "instead)");
    }
    return TSR_OK;
}

tsr_status pretoken_open(pretoken **out, const char *pattern, bool no_jit, tsr_err *err)
{
    *out = NULL;
    bool own = pattern != NULL && strcmp(pattern, k3_tiktoken) != 0;
    if (own) {
        TSR_TRY(check_own(pattern, err));
    }
    int error;
    size_t at;
    pcre2_code *code = own ? compile(pattern, &error, &at) : compile_k3(&error, &at);
    if (code == NULL) {
        char why[160] = "";
        (void)pcre2_get_error_message(error, (PCRE2_UCHAR *)why, sizeof why);
        TSR_FAIL(err, error == PCRE2_ERROR_NOMEMORY ? TSR_E_LIMIT : TSR_E_FORMAT, "pattern: byte %zu: %s", at,
                 why);
    }
    pretoken *p = malloc(sizeof *p);
    if (p == NULL) {
        pcre2_code_free(code);
        TSR_FAIL(err, TSR_E_LIMIT, "pattern: out of memory");
    }
    /* a failure of the compiler to machine code only costs time */
    *p = (pretoken){ code, own, !no_jit && pcre2_jit_compile(code, PCRE2_JIT_COMPLETE) == 0 };
    *out = p;
    return TSR_OK;
}

void pretoken_close(pretoken **p)
{
    if (*p != NULL) {
        pcre2_code_free((*p)->code);
        free(*p);
        *p = NULL;
    }
}

bool pretoken_is_own(const pretoken *p)
{
    return p->own;
}

bool pretoken_has_jit(const pretoken *p)
{
    return p->jit;
}

tsr_status pretoken_run_open(pretoken_run **out, const pretoken *p, tsr_err *err)
{
    pretoken_run *r = *out = calloc(1, sizeof *r);
    if (r != NULL) {
        r->pattern = p;
        r->match = pcre2_match_data_create(1, NULL);
        r->context = pcre2_match_context_create(NULL);
        r->stack = p->jit ? pcre2_jit_stack_create(32 << 10, JIT_STACK_BYTES, NULL) : NULL;
    }
    if (r == NULL || r->match == NULL || r->context == NULL || (p->jit && r->stack == NULL)) {
        pretoken_run_close(out);
        TSR_FAIL(err, TSR_E_LIMIT, "pattern: out of memory");
    }
    (void)pcre2_set_match_limit(r->context, MATCH_LIMIT);
    if (r->stack != NULL) {
        pcre2_jit_stack_assign(r->context, NULL, r->stack);
    }
    return TSR_OK;
}

void pretoken_run_close(pretoken_run **out)
{
    pretoken_run *r = *out;
    if (r != NULL) {
        pcre2_match_data_free(r->match);
        pcre2_match_context_free(r->context);
        pcre2_jit_stack_free(r->stack);
        free(r);
        *out = NULL;
    }
}

/* The next match in valid UTF-8 at or after from; none: [n, n). Empty matches do not count. */
static tsr_status next_match(pretoken_run *r, const uint8_t *text, size_t n, size_t from, size_t *start,
                             size_t *end, tsr_err *err)
{
    /* the text was checked already; PCRE2 would do so again for every piece */
    uint32_t options = PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY;
    int rc = pcre2_match(r->pattern->code, text, n, from, options, r->match, r->context);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT) { /* the interpreter has the heap */
        rc = pcre2_match(r->pattern->code, text, n, from, options | PCRE2_NO_JIT, r->match, r->context);
    }
    *start = *end = n;
    if (rc == PCRE2_ERROR_NOMATCH) {
        return TSR_OK;
    }
    if (rc < 0) {
        char why[160] = "";
        (void)pcre2_get_error_message(rc, (PCRE2_UCHAR *)why, sizeof why);
        TSR_FAIL(err, TSR_E_LIMIT, "pattern: a piece of text after %zu of %zu bytes: %s", from, n, why);
    }
    const size_t *found = pcre2_get_ovector_pointer(r->match);
    if (found[0] < from || found[1] <= found[0]) { /* older versions let \K inside a lookaround do that */
        TSR_FAIL(err, TSR_E_UNSUPPORTED, "pattern: matches backwards (is there a \\K in it?)");
    }
    *start = found[0], *end = found[1];
    return TSR_OK;
}

static tsr_status each_valid(pretoken_run *r, const uint8_t *text, size_t n, pretoken_fn fn, void *payload,
                             tsr_err *err)
{
    for (size_t at = 0; at < n;) {
        size_t start, end;
        TSR_TRY(next_match(r, text, n, at, &start, &end, err));
        if (start > at) {
            TSR_TRY(fn(payload, text + at, start - at, err));
        }
        if (end > start) {
            TSR_TRY(fn(payload, text + start, end - start, err));
        }
        at = end;
    }
    return TSR_OK;
}

tsr_status pretoken_each(pretoken_run *r, const uint8_t *text, size_t bytes, pretoken_fn fn, void *payload,
                         tsr_err *err)
{
    for (size_t at = 0; at < bytes;) {
        size_t valid = at;
        int length = 0;
        while (valid < bytes && (length = utf8_at(text + valid, bytes - valid)) > 0) {
            valid += (size_t)length;
        }
        TSR_TRY(each_valid(r, text + at, valid - at, fn, payload, err));
        at = valid;
        /* every byte of an invalid sequence is a piece: what follows may be valid again */
        for (size_t bad = at < bytes ? (length < 0 ? (size_t)-length : bytes - at) : 0; bad > 0;
             bad--, at++) {
            TSR_TRY(fn(payload, text + at, 1, err));
        }
    }
    return TSR_OK;
}
