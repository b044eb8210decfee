/* recipe_keys.c - structs by tables of keys; see recipe_keys.h. */
#include "train/recipe_keys.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KEYS_MAX 64 /* of one table */

/* ---- messages --------------------------------------------------------------------------------------------------- */

tsr_status recipe_fail(const recipe_reader *r, const tsr_tree *at, const char *path, tsr_status code,
                       const char *fmt, ...)
{
    char what[700];
    va_list ap;
    va_start(ap, fmt);
    (void)vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    const char *colon = path[0] != '\0' ? ": " : "";
    if (at != NULL && at->line == 0) {
        TSR_FAIL(r->err, code, "--set: %.300s%s%s", path, colon, what);
    }
    if (at == NULL) {
        TSR_FAIL(r->err, code, "%s: %.300s%s%s", r->name, path, colon, what);
    }
    TSR_FAIL(r->err, code, "%s:%d: %.300s%s%s", r->name, at->line, path, colon, what);
}

const char *recipe_path(const recipe_reader *r, const char *path, const char *key)
{
    char text[300];
    (void)snprintf(text, sizeof text, "%.200s%s%.80s", path, path[0] != '\0' ? "." : "", key);
    const char *kept = tsr_arena_strndup(r->arena, text, strlen(text));
    return kept != NULL ? kept : "(out of memory)";
}

/* Insertions, deletions, replacements and swaps of neighbours that make a of b. */
static size_t edits(const char *a, const char *b)
{
    size_t rows[3][TSR_NAME_MAX + 1], n = strlen(b);
    size_t *before = rows[0], *last = rows[1], *now = rows[2];
    for (size_t k = 0; k <= n; k++) {
        last[k] = k;
        before[k] = 0;
    }
    for (size_t i = 1; a[i - 1] != '\0'; i++) {
        now[0] = i;
        for (size_t k = 1; k <= n; k++) {
            size_t best = last[k - 1] + (a[i - 1] != b[k - 1]);
            best = last[k] + 1 < best ? last[k] + 1 : best;
            best = now[k - 1] + 1 < best ? now[k - 1] + 1 : best;
            if (i > 1 && k > 1 && a[i - 1] == b[k - 2] && a[i - 2] == b[k - 1] && before[k - 2] + 1 < best) {
                best = before[k - 2] + 1;
            }
            now[k] = best;
        }
        size_t *oldest = before;
        before = last;
        last = now;
        now = oldest;
    }
    return last[n];
}

const char *recipe_nearest(const char *word, const char *const *names, size_t count)
{
    const char *best = NULL;
    size_t length = strlen(word), least = length / 3 + 2; /* beyond, a hint would only confuse */
    for (size_t i = 0; i < count && length <= TSR_NAME_MAX; i++) {
        size_t n = strlen(names[i]) <= TSR_NAME_MAX ? edits(word, names[i]) : SIZE_MAX;
        if (n < least && n < length) {
            least = n;
            best = names[i];
        }
    }
    return best;
}

static tsr_status unknown(const recipe_reader *r, const tsr_tree *at, const char *path,
                          const recipe_key *keys)
{
    const char *names[KEYS_MAX];
    size_t n = 0;
    for (const recipe_key *k = keys; k->type != KEY_END; k++) {
        TSR_ASSERT(n < KEYS_MAX);
        names[n++] = k->name;
    }
    const char *near = recipe_nearest(at->key, names, n);
    return recipe_fail(r, at, recipe_path(r, path, at->key), TSR_E_FORMAT, "unknown key (%s%s%s)",
                       near != NULL ? "did you mean " : "docs/RECIPES.md lists them",
                       near != NULL ? near : "", near != NULL ? "?" : "");
}

/* ---- reading ------------------------------------------------------------------------------------------------------ */

tsr_status recipe_expect(const recipe_reader *r, const tsr_tree *at, const char *path, tsr_tree_kind kind,
                         const tsr_tree **out)
{
    static const char *const what[] = { "must be a single value", "must be a list", "must be a map of keys" };
    *out = NULL;
    if (tsr_tree_null(at)) {
        return TSR_OK;
    }
    if (at->kind != kind) {
        return recipe_fail(r, at, path, TSR_E_FORMAT, "%s", what[kind]);
    }
    *out = at;
    return TSR_OK;
}

static tsr_status out_of_range(const recipe_reader *r, const tsr_tree *at, const char *path,
                               const recipe_key *k, const char *kind)
{
    return recipe_fail(r, at, path, TSR_E_FORMAT, "must be %s from %.16g to %.16g (%s)", kind, k->low,
                       k->high, k->help);
}

/* A whole number in decimal, with a suffix where the row takes one. */
static bool whole(const char *s, bool suffix, int64_t *out)
{
    char *end;
    if (s[0] != '-' && (s[0] < '0' || s[0] > '9')) {
        return false;
    }
    errno = 0;
    long long n = strtoll(s, &end, 10);
    if (errno != 0 || end == s) {
        return false;
    }
    int64_t unit = 1;
    if (suffix && *end != '\0' && end[1] == '\0') {
        unit = *end == 'K'   ? (int64_t)1 << 10
               : *end == 'M' ? (int64_t)1 << 20
               : *end == 'G' ? (int64_t)1 << 30
                             : 0;
        end += unit != 0;
    }
    return *end == '\0' && !__builtin_mul_overflow((int64_t)n, unit, out);
}

/* A finite decimal number. */
static bool real(const char *s, double *out)
{
    char *end;
    if (s[0] == '\0' || s[strspn(s, "0123456789+-.eE")] != '\0') {
        return false;
    }
    *out = strtod(s, &end);
    return *end == '\0' && isfinite(*out);
}

static tsr_status read_integer(const recipe_reader *r, const tsr_tree *at, const char *path,
                               const recipe_key *k, void *field)
{
    int64_t n = 0;
    if (!at->plain || !whole(at->text, k->type == KEY_SIZE, &n) || (double)n < k->low ||
        (double)n > k->high) {
        return out_of_range(r, at, path, k, "a whole number");
    }
    int32_t small = (int32_t)n;
    uint32_t natural = (uint32_t)n;
    if (k->type == KEY_I32) {
        memcpy(field, &small, sizeof small);
    } else if (k->type == KEY_U32) {
        memcpy(field, &natural, sizeof natural);
    } else {
        memcpy(field, &n, sizeof n); /* KEY_U64 too: its range begins at 0 */
    }
    return TSR_OK;
}

static tsr_status read_real(const recipe_reader *r, const tsr_tree *at, const char *path, const recipe_key *k,
                            void *field)
{
    double x = 0;
    if (!at->plain || !real(at->text, &x) || x < k->low || x > k->high) {
        return out_of_range(r, at, path, k, "a number");
    }
    if (k->type == KEY_STEPS && x >= 1 && x != floor(x)) {
        return recipe_fail(r, at, path, TSR_E_FORMAT,
                           "must be a whole number of steps, or a share below 1 (%s)", k->help);
    }
    x += 0.0; /* no negative zero: it would print as -0 */
    memcpy(field, &x, sizeof x);
    return TSR_OK;
}

static tsr_status read_choice(const recipe_reader *r, const tsr_tree *at, const char *path,
                              const recipe_key *k, void *field)
{
    char known[200] = "";
    for (const recipe_choice *c = k->choices; c->name != NULL; c++) {
        if (strcmp(at->text, c->name) == 0) {
            memcpy(field, &c->value, sizeof c->value);
            return TSR_OK;
        }
        size_t n = strlen(known);
        (void)snprintf(known + n, sizeof known - n, "%s%s", n > 0 ? ", " : "", c->name);
    }
    return recipe_fail(r, at, path, TSR_E_FORMAT, "\"%.60s\" is none of its values (known: %s)", at->text,
                       known);
}

tsr_status recipe_read_name(const recipe_reader *r, const tsr_tree *at, const char *path,
                            char out[TSR_NAME_MAX])
{
    static const char allowed[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-";
    size_t n = at->kind == TSR_TREE_TEXT ? strlen(at->text) : 0;
    if (n == 0 || n >= TSR_NAME_MAX || at->text[strspn(at->text, allowed)] != '\0') {
        return recipe_fail(r, at, path, TSR_E_FORMAT,
                           "must be a name of letters, digits, _ and -, at most %d long", TSR_NAME_MAX - 1);
    }
    memset(out, 0, TSR_NAME_MAX);
    memcpy(out, at->text, n);
    return TSR_OK;
}

tsr_status recipe_read_value(const recipe_reader *r, const tsr_tree *at, const char *path,
                             const recipe_key *k, void *base)
{
    char *field = (char *)base + k->offset;
    if (at->kind != TSR_TREE_TEXT) {
        return recipe_fail(r, at, path, TSR_E_FORMAT, "must be a single value (%s)", k->help);
    }
    switch (k->type) {
    case KEY_REAL:
    case KEY_STEPS: return read_real(r, at, path, k, field);
    case KEY_CHOICE: return read_choice(r, at, path, k, field);
    case KEY_NAME: return recipe_read_name(r, at, path, field);
    case KEY_FLAG: {
        bool yes = strcmp(at->text, "true") == 0;
        if (!at->plain || (!yes && strcmp(at->text, "false") != 0)) {
            return recipe_fail(r, at, path, TSR_E_FORMAT, "must be true or false (%s)", k->help);
        }
        memcpy(field, &yes, sizeof yes);
        return TSR_OK;
    }
    default: return read_integer(r, at, path, k, field);
    }
}

/* A key that is not there. */
static tsr_status read_default(const recipe_reader *r, const tsr_tree *map, const char *path,
                               const recipe_key *k, void *base)
{
    if (k->fallback == NULL) {
        return recipe_fail(r, map, path, TSR_E_FORMAT, "is missing (%s)", k->help);
    }
    if (k->fallback[0] == '\0') {
        int64_t none = KEY_UNSET_INT;
        double nothing = NAN;
        char *field = (char *)base + k->offset;
        TSR_ASSERT(k->type == KEY_I64 || k->type == KEY_SIZE || k->type == KEY_REAL || k->type == KEY_STEPS);
        if (k->type == KEY_REAL || k->type == KEY_STEPS) {
            memcpy(field, &nothing, sizeof nothing);
        } else {
            memcpy(field, &none, sizeof none);
        }
        return TSR_OK;
    }
    tsr_tree t = { .kind = TSR_TREE_TEXT, .plain = true, .text = k->fallback };
    tsr_status st = recipe_read_value(r, &t, path, k, base);
    TSR_ASSERT(st == TSR_OK); /* defaults lie in their ranges */
    return st;
}

tsr_status recipe_read(const recipe_reader *r, const tsr_tree *map, const char *path, const recipe_key *keys,
                       void *base)
{
    TSR_TRY(recipe_expect(r, map, path, TSR_TREE_MAP, &map));
    for (const tsr_tree *c = map != NULL ? map->first : NULL; c != NULL; c = c->next) {
        const recipe_key *k = keys;
        while (k->type != KEY_END && strcmp(k->name, c->key) != 0) {
            k++;
        }
        if (k->type == KEY_END) {
            return unknown(r, c, path, keys);
        }
    }
    for (const recipe_key *k = keys; k->type != KEY_END; k++) {
        const tsr_tree *c = tsr_tree_get(map, k->name);
        const char *here = recipe_path(r, path, k->name);
        if (k->type == KEY_MAP) {
            TSR_TRY(recipe_read(r, c, here, k->keys, base));
        } else if (k->type == KEY_OTHER) {
            continue;
        } else if (tsr_tree_null(c)) {
            TSR_TRY(read_default(r, c != NULL ? c : map, here, k, base));
        } else {
            TSR_TRY(recipe_read_value(r, c, here, k, base));
        }
    }
    return TSR_OK;
}

/* ---- writing ------------------------------------------------------------------------------------------------------- */

static json_t *value_of(const recipe_key *k, const void *field)
{
    int64_t n = 0;
    int32_t small = 0;
    uint32_t natural = 0;
    double x = 0;
    bool yes = false;
    switch (k->type) {
    case KEY_I32: memcpy(&small, field, sizeof small); return json_integer(small);
    case KEY_U32: memcpy(&natural, field, sizeof natural); return json_integer(natural);
    case KEY_REAL: memcpy(&x, field, sizeof x); return json_real(x);
    case KEY_STEPS: memcpy(&x, field, sizeof x); return json_integer((json_int_t)x);
    case KEY_FLAG: memcpy(&yes, field, sizeof yes); return json_boolean(yes);
    case KEY_NAME: return json_string(field);
    case KEY_CHOICE: {
        int value;
        memcpy(&value, field, sizeof value);
        const recipe_choice *c = k->choices;
        while (c->name != NULL && c->value != value) {
            c++;
        }
        return c->name != NULL ? json_string(c->name) : json_null();
    }
    default: memcpy(&n, field, sizeof n); return json_integer(n);
    }
}

void recipe_write(json_t *o, const recipe_key *keys, const void *base)
{
    for (const recipe_key *k = keys; k->type != KEY_END; k++) {
        if (k->type == KEY_MAP) {
            json_t *inner = json_object();
            recipe_write(inner, k->keys, base);
            (void)json_object_set_new(o, k->name, inner);
        } else if (k->type != KEY_OTHER) {
            (void)json_object_set_new(o, k->name, value_of(k, (const char *)base + k->offset));
        }
    }
}
