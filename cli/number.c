/* number.c - numbers as people type them: whole numbers and sizes. Junk and overflow are refused. */
#include "cli/opt.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* Decimal digits at the start of text: how many, 0 for none. *fits tells whether the value fits 64 bits. */
static size_t digits(const char *text, uint64_t *out, bool *fits)
{
    size_t n = 0;
    *out = 0;
    *fits = true;
    for (; isdigit((unsigned char)text[n]); n++) {
        *fits = *fits && tsr_mul_u64(*out, 10, out) && tsr_add_u64(*out, (uint64_t)(text[n] - '0'), out);
    }
    return n;
}

static tsr_status in_range(const char *what, const char *text, bool fits, uint64_t value, uint64_t low,
                           uint64_t high, tsr_err *err)
{
    if (fits && value >= low && value <= high) {
        return TSR_OK;
    }
    if (high == UINT64_MAX) {
        TSR_FAIL(err, TSR_E_USAGE, "%s %s: is too %s (at least %llu)", what, text, fits ? "small" : "large",
                 (unsigned long long)low);
    }
    TSR_FAIL(err, TSR_E_USAGE, "%s %s: is out of range (%llu to %llu)", what, text, (unsigned long long)low,
             (unsigned long long)high);
}

tsr_status tsr_parse_uint(const char *what, const char *text, uint64_t low, uint64_t high, uint64_t *out,
                          tsr_err *err)
{
    bool fits;
    size_t n = digits(text, out, &fits);
    if (n == 0 || text[n] != '\0') {
        TSR_FAIL(err, TSR_E_USAGE, "%s %s: is not a whole number", what, text);
    }
    return in_range(what, text, fits, *out, low, high, err);
}

tsr_status tsr_parse_real(const char *what, const char *text, double low, double high, double *out,
                          tsr_err *err)
{
    size_t whole = strspn(text, "0123456789"), at = whole, part = 0;
    if (text[at] == '.') {
        part = strspn(text + at + 1, "0123456789");
        at += 1 + part;
    }
    bool ok = whole + part > 0;
    if (ok && (text[at] == 'e' || text[at] == 'E')) {
        size_t sign = text[at + 1] == '-' || text[at + 1] == '+',
               power = strspn(text + at + 1 + sign, "0123456789");
        ok = power > 0;
        at += 1 + sign + power;
    }
    if (!ok || text[at] != '\0') {
        TSR_FAIL(err, TSR_E_USAGE, "%s %s: is not a decimal number", what, text);
    }
    *out = strtod(text, NULL); /* the program never leaves the C locale */
    if (!(*out >= low && *out <= high)) {
        TSR_FAIL(err, TSR_E_USAGE, "%s %s: is out of range (%g to %g)", what, text, low, high);
    }
    return TSR_OK;
}

/* The factor of a unit, 0 when it is none. */
static uint64_t unit_bytes(const char *unit)
{
    static const char prefixes[] = "KMGTP";
    if (unit[0] == '\0' || strcasecmp(unit, "B") == 0) {
        return 1;
    }
    const char *at = strchr(prefixes, toupper((unsigned char)unit[0]));
    if (at == NULL) {
        return 0;
    }
    bool binary = unit[1] == '\0' || strcasecmp(unit + 1, "iB") == 0;
    if (!binary && strcasecmp(unit + 1, "B") != 0) {
        return 0;
    }
    uint64_t factor = 1;
    for (long i = 0; i <= at - prefixes; i++) {
        factor *= binary ? 1024 : 1000;
    }
    return factor;
}

tsr_status tsr_parse_size(const char *what, const char *text, uint64_t low, uint64_t high, uint64_t *out,
                          tsr_err *err)
{
    bool fits;
    size_t n = digits(text, out, &fits);
    uint64_t factor = n > 0 ? unit_bytes(text + n) : 0;
    if (factor == 0) {
        TSR_FAIL(err, TSR_E_USAGE, "%s %s: is not a size (like 4MiB, 5G, 5GB or 1000000)", what, text);
    }
    fits = fits && tsr_mul_u64(*out, factor, out);
    return in_range(what, text, fits, *out, low, high, err);
}
