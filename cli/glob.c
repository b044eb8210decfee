/* glob.c - see glob.h. Alternatives are written out once; ranges of numbers are kept and compared as numbers,
 * so that {0..895} costs one pattern and not 896. */
#include "cli/glob.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NUMBER_DIGITS 9

typedef struct list {
    char **items; /* NULL-terminated once something was added */
    size_t count, room;
} list;

struct tsr_glob {
    list patterns; /* without {a,b}, with {0..7} */
    list plain;    /* without braces; made on demand */
    bool plain_made;
};

/* ---- lists ---------------------------------------------------------------------------------------- */

static void list_free(list *l)
{
    for (size_t i = 0; i < l->count; i++) {
        free(l->items[i]);
    }
    free(l->items);
    memset(l, 0, sizeof *l);
}

/* Takes text over, also on failure. */
static tsr_status list_add(list *l, char *text, tsr_err *err)
{
    if (text != NULL && l->count + 2 > l->room) {
        size_t room = l->room * 2 + 16;
        char **grown = realloc(l->items, room * sizeof *grown);
        if (grown != NULL) {
            l->items = grown;
            l->room = room;
        }
    }
    if (text == NULL || l->count + 2 > l->room) {
        free(text);
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    l->items[l->count++] = text;
    l->items[l->count] = NULL;
    return TSR_OK;
}

/* ---- braces ----------------------------------------------------------------------------------------- */

typedef struct range {
    uint32_t low, high;
    size_t bytes; /* of the pattern, braces included */
} range;

/* "{12..34}" at s. Written with at most nine digits, so that no value overflows. */
static bool parse_range(const char *s, range *out)
{
    uint32_t v[2] = { 0, 0 };
    const char *p = s;
    if (*p++ != '{') {
        return false;
    }
    for (int i = 0; i < 2; i++) {
        int n = 0;
        for (; isdigit((unsigned char)*p) && n <= NUMBER_DIGITS; n++, p++) {
            v[i] = n < NUMBER_DIGITS ? v[i] * 10 + (uint32_t)(*p - '0') : v[i];
        }
        if (n == 0 || n > NUMBER_DIGITS) {
            return false;
        }
        if (i == 0) {
            if (p[0] != '.' || p[1] != '.') {
                return false;
            }
            p += 2;
        }
    }
    if (*p != '}') {
        return false;
    }
    *out = (range){ v[0] < v[1] ? v[0] : v[1], v[0] < v[1] ? v[1] : v[0], (size_t)(p + 1 - s) };
    return true;
}

/* The closing brace of the group at s, and whether the group has a comma of its own; NULL when it is not
 * closed. */
static const char *group_end(const char *s, bool *comma)
{
    int depth = 0;
    *comma = false;
    for (; *s != '\0'; s++) {
        if (*s == '\\' && s[1] != '\0') {
            s++;
        } else if (*s == '{') {
            depth++;
        } else if (*s == '}' && --depth == 0) {
            return s;
        } else if (*s == ',' && depth == 1) {
            *comma = true;
        }
    }
    return NULL;
}

/* The first group {a,b} of a pattern, NULL when there is none. */
static const char *first_group(const char *p, const char **end)
{
    for (; *p != '\0'; p++) {
        bool comma;
        if (*p == '\\' && p[1] != '\0') {
            p++;
        } else if (*p == '{' && (*end = group_end(p, &comma)) != NULL && comma) {
            return p;
        }
    }
    return NULL;
}

static tsr_status too_many(const char *pattern, tsr_err *err)
{
    TSR_FAIL(err, TSR_E_USAGE, "%.200s: stands for more than %u patterns (use fewer braces, or *)", pattern,
             TSR_GLOB_PATTERNS_MAX);
}

/* Adds pattern with its first group replaced by each of its alternatives in turn. */
static tsr_status split_group(list *to, const char *pattern, const char *open, const char *end, tsr_err *err)
{
    int depth = 0;
    const char *from = open + 1;
    for (const char *s = from; s <= end; s++) {
        if (*s == '\\' && s < end) {
            s++;
        } else if (s == end || (*s == ',' && depth == 0)) {
            char *text;
            if (asprintf(&text, "%.*s%.*s%s", (int)(open - pattern), pattern, (int)(s - from), from,
                         end + 1) < 0) {
                text = NULL;
            }
            TSR_TRY(list_add(to, text, err));
            from = s + 1;
        } else if (*s == '{') {
            depth++;
        } else if (*s == '}') {
            depth--;
        }
    }
    return TSR_OK;
}

/* Writes out alternatives: a pattern with a group is replaced by several, which wait for their own turn. */
static tsr_status add_pattern(list *to, const char *pattern, tsr_err *err)
{
    list waiting = { 0 };
    tsr_status st = strlen(pattern) > 65536
                        ? TSR_ERR(err, TSR_E_USAGE, "a pattern is longer than 65536 bytes")
                        : list_add(&waiting, strdup(pattern), err);
    while (st == TSR_OK && waiting.count > 0) {
        char *p = waiting.items[--waiting.count];
        const char *end, *open = first_group(p, &end);
        if (open == NULL) {
            st = list_add(to, p, err);
        } else {
            st = split_group(&waiting, p, open, end, err);
            free(p);
        }
        if (st == TSR_OK && to->count + waiting.count > TSR_GLOB_PATTERNS_MAX) {
            st = too_many(pattern, err);
        }
    }
    list_free(&waiting);
    return st;
}

/* ---- matching ---------------------------------------------------------------------------------------- */

/* A [..] at p against c: the byte behind it, or NULL when there is no closing bracket ('[' is itself then).
 */
static const char *match_set(const char *p, unsigned char c, bool *hit)
{
    bool negate = p[1] == '!' || p[1] == '^';
    const char *s = p + 1 + negate;
    *hit = false;
    for (bool first = true; *s != '\0' && (*s != ']' || first); first = false) {
        s += *s == '\\' && s[1] != '\0';
        unsigned char low = (unsigned char)*s, high = low;
        s++;
        if (s[0] == '-' && s[1] != ']' && s[1] != '\0') {
            s++;
            s += *s == '\\' && s[1] != '\0';
            high = (unsigned char)*s++;
        }
        *hit = *hit || (c >= low && c <= high);
    }
    *hit = *hit != negate;
    return *s == ']' ? s + 1 : NULL;
}

/* A whole number at name inside the range: its length, or 0. No leading zeros. */
static size_t match_range(const range *r, const char *name)
{
    uint32_t v = 0;
    size_t n = 0;
    for (; isdigit((unsigned char)name[n]); n++) {
        if (n == NUMBER_DIGITS) {
            return 0;
        }
        v = v * 10 + (uint32_t)(name[n] - '0');
    }
    bool canonical = n == 1 || (n > 1 && name[0] != '0');
    return canonical && v >= r->low && v <= r->high ? n : 0;
}

/* One pattern element (no star) against the start of name. */
static bool match_one(const char **pattern, const char **name)
{
    const char *p = *pattern, *s = *name, *behind;
    range r;
    bool hit;
    if (*p == '{' && parse_range(p, &r)) {
        size_t n = match_range(&r, s);
        *pattern = p + r.bytes;
        *name = s + n;
        return n > 0;
    }
    if (*s == '\0' || *p == '\0') {
        return false;
    }
    *name = s + 1;
    if (*p == '[' && (behind = match_set(p, (unsigned char)*s, &hit)) != NULL) {
        *pattern = behind;
        return hit;
    }
    if (*p == '?') {
        *pattern = p + 1;
        return true;
    }
    p += *p == '\\' && p[1] != '\0';
    *pattern = p + 1;
    return *p == *s;
}

/* Going back to the last star is enough: an earlier match of what stands between two stars leaves the later
 * star at least as much. Time is at most pattern times name. */
static bool match_pattern(const char *p, const char *s)
{
    const char *star = NULL, *retry = NULL;
    for (;;) {
        if (*p == '*') {
            star = ++p;
            retry = s;
            continue;
        }
        if (*p == '\0' && *s == '\0') {
            return true;
        }
        if (match_one(&p, &s)) {
            continue;
        }
        if (star == NULL || *retry == '\0') {
            return false;
        }
        p = star;
        s = ++retry;
    }
}

bool tsr_glob_match(const tsr_glob *g, const char *name)
{
    for (size_t i = 0; i < g->patterns.count; i++) {
        if (match_pattern(g->patterns.items[i], name)) {
            return true;
        }
    }
    return g->patterns.count == 0;
}

/* ---- the rest ------------------------------------------------------------------------------------------ */

tsr_status tsr_glob_new(tsr_glob **out, const char *const *patterns, tsr_err *err)
{
    *out = NULL;
    tsr_glob *g = calloc(1, sizeof *g);
    if (g == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    tsr_status st = TSR_OK;
    for (; st == TSR_OK && patterns != NULL && *patterns != NULL; patterns++) {
        st = add_pattern(&g->patterns, *patterns, err);
    }
    if (st != TSR_OK) {
        tsr_glob_free(&g);
    }
    *out = g;
    return st;
}

void tsr_glob_free(tsr_glob **g)
{
    if (g != NULL && *g != NULL) {
        list_free(&(*g)->patterns);
        list_free(&(*g)->plain);
        free(*g);
        *g = NULL;
    }
}

bool tsr_glob_empty(const tsr_glob *g)
{
    return g->patterns.count == 0;
}

/* The first range of a pattern, NULL when there is none. */
static const char *first_range(const char *p, range *r)
{
    for (; *p != '\0'; p++) {
        if (*p == '\\' && p[1] != '\0') {
            p++;
        } else if (parse_range(p, r)) {
            return p;
        }
    }
    return NULL;
}

/* Writes out ranges as add_pattern() writes out alternatives. */
static tsr_status add_plain(list *to, const char *pattern, tsr_err *err)
{
    list waiting = { 0 };
    tsr_status st = list_add(&waiting, strdup(pattern), err);
    while (st == TSR_OK && waiting.count > 0) {
        char *p = waiting.items[--waiting.count];
        range r;
        const char *at = first_range(p, &r);
        if (at == NULL) {
            st = list_add(to, p, err);
            continue;
        }
        if ((uint64_t)(r.high - r.low) + to->count + waiting.count >= TSR_GLOB_PATTERNS_MAX) {
            st = too_many(pattern, err);
        }
        for (uint32_t v = r.low; st == TSR_OK && v <= r.high; v++) {
            char *text;
            if (asprintf(&text, "%.*s%u%s", (int)(at - p), p, v, at + r.bytes) < 0) {
                text = NULL;
            }
            st = list_add(&waiting, text, err);
        }
        free(p);
    }
    list_free(&waiting);
    return st;
}

tsr_status tsr_glob_plain(tsr_glob *g, const char *const **out, tsr_err *err)
{
    *out = NULL;
    for (size_t i = 0; !g->plain_made && i < g->patterns.count; i++) {
        TSR_TRY(add_plain(&g->plain, g->patterns.items[i], err));
    }
    g->plain_made = true;
    *out = (const char *const *)(const void *)g->plain.items;
    return TSR_OK;
}
