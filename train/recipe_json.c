/* recipe_json.c - the resolved form of a recipe, and how two of them differ. */
#include "train/recipe_keys.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- printing --------------------------------------------------------------------------------------------------------- */

void recipe_real_text(double x, char out[TSR_REAL_TEXT])
{
    for (int digits = 15; digits <= 17; digits++) {
        (void)snprintf(out, TSR_REAL_TEXT - 2, "%.*g", digits, x);
        if (strtod(out, NULL) == x) {
            break;
        }
    }
    if (strpbrk(out, ".e") == NULL) {
        memcpy(out + strlen(out), ".0",
               sizeof ".0"); /* a number without point or exponent would read back as an integer */
    }
}

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* The keys of up to two objects, sorted, each once. malloc'ed; NULL: none, or no memory. */
static const char **sorted_keys(json_t *a, json_t *b, size_t *count)
{
    json_t *both[] = { a, b };
    size_t room = json_object_size(a) + json_object_size(b), n = 0, kept = 0;
    const char **keys = room > 0 ? malloc(room * sizeof *keys) : NULL;
    *count = 0;
    if (keys == NULL) {
        return NULL;
    }
    for (size_t i = 0; i < 2; i++) {
        for (void *it = json_object_iter(both[i]); it != NULL; it = json_object_iter_next(both[i], it)) {
            keys[n++] = json_object_iter_key(it);
        }
    }
    qsort((void *)keys, n, sizeof *keys, by_text);
    for (size_t i = 0; i < n; i++) {
        if (kept == 0 || strcmp(keys[kept - 1], keys[i]) != 0) {
            keys[kept++] = keys[i];
        }
    }
    *count = kept;
    return keys;
}

/* Characters that YAML, but not JSON, takes for line breaks or refuses: they are written as escapes, which both read. */
static unsigned awkward(const unsigned char *p, int *bytes)
{
    unsigned c = 0;
    if (p[0] == 0x7f) {
        c = 0x7f;
        *bytes = 1;
    } else if (p[0] == 0xc2 && p[1] >= 0x80 && p[1] <= 0x9f) {
        c = p[1];
        *bytes = 2;
    } else if (p[0] >= 0xe0 && p[0] < 0xf0 && p[1] != 0 && p[2] != 0) {
        unsigned u = (p[0] & 15u) << 12 | (p[1] & 63u) << 6 | (p[2] & 63u);
        c = u == 0x2028 || u == 0x2029 || u == 0xfeff || u >= 0xfffe ? u : 0;
        *bytes = 3;
    }
    return c;
}

static void put_text(FILE *f, const char *text)
{
    const unsigned char *p = (const unsigned char *)text;
    while (*p != '\0') {
        int bytes = 1;
        unsigned c = awkward(p, &bytes);
        if (c != 0) {
            (void)fprintf(f, "\\u%04x", c);
            p += bytes;
        } else {
            (void)fputc(*p++, f);
        }
    }
}

static void scalar(FILE *f, const json_t *v)
{
    if (json_is_real(v)) {
        char number[TSR_REAL_TEXT];
        recipe_real_text(json_real_value(v), number);
        (void)fputs(number, f);
        return;
    }
    char *text = json_dumps(v, JSON_ENCODE_ANY);
    put_text(f, text != NULL ? text : "null");
    free(text);
}

static void dump(FILE *f, json_t *v, int indent)
{
    bool map = json_is_object(v);
    if (!map && !json_is_array(v)) {
        scalar(f, v);
        return;
    }
    size_t count = json_array_size(v);
    const char **keys = map ? sorted_keys(v, NULL, &count) : NULL;
    bool flat = !map; /* lists of plain values stay on one line */
    for (size_t i = 0; flat && i < count; i++) {
        flat = !json_is_object(json_array_get(v, i)) && !json_is_array(json_array_get(v, i));
    }
    (void)fputc(map ? '{' : '[', f);
    for (size_t i = 0; i < count; i++) {
        if (flat) {
            (void)fputs(i > 0 ? ", " : "", f);
        } else {
            (void)fprintf(f, "%s\n%*s", i > 0 ? "," : "", indent + 2, "");
        }
        if (map) {
            json_t *key = json_string(keys[i]);
            scalar(f, key);
            json_decref(key);
            (void)fputs(": ", f);
        }
        dump(f, map ? json_object_get(v, keys[i]) : json_array_get(v, i), indent + 2);
    }
    if (!flat && count > 0) {
        (void)fprintf(f, "\n%*s", indent, "");
    }
    (void)fputc(map ? '}' : ']', f);
    free((void *)keys);
}

char *recipe_dump(const json_t *v)
{
    char *text = NULL;
    size_t bytes;
    FILE *f = v != NULL ? open_memstream(&text, &bytes) : NULL;
    if (f == NULL) {
        return NULL;
    }
    dump(f, (json_t *)(uintptr_t)v, 0);
    (void)fputc('\n', f);
    bool broken = ferror(f) != 0;
    if (fclose(f) != 0 || broken) {
        free(text);
        return NULL;
    }
    return text;
}

/* ---- the resolved form --------------------------------------------------------------------------------------------------- */

static json_t *write_stage(const tsr_recipe *r, const tsr_stage *s)
{
    recipe_stage_raw raw = { .s = *s, .warmup = (double)s->warmup, .decay = (double)s->decay };
    json_t *o = json_object(), *mix = json_object(), *freeze = json_array();
    recipe_write(o, recipe_stage_keys, &raw);
    for (int32_t i = 0; i < r->sources; i++) {
        (void)json_object_set_new(mix, r->source[i].name, json_real(s->mix[i]));
    }
    for (int32_t i = 0; i < s->freeze_count; i++) {
        (void)json_array_append_new(freeze, json_string(s->freeze[i]));
    }
    (void)json_object_set_new(o, "mix", mix);
    (void)json_object_set_new(o, "freeze", freeze);
    (void)json_object_del(o, "tokens"); /* resolved: steps */
    return o;
}

char *tsr_recipe_json(const tsr_recipe *r)
{
    json_t *o = json_object(), *stages = json_array(), *sources = json_array();
    recipe_write(o, recipe_root_keys, r);
    for (int32_t i = 0; i < r->stages; i++) {
        (void)json_array_append_new(stages, write_stage(r, &r->stage[i]));
    }
    for (int32_t i = 0; i < r->sources; i++) {
        (void)json_array_append_new(
            sources, json_pack("{s:s,s:s}", "name", r->source[i].name, "path", r->source[i].path));
    }
    (void)json_object_set_new(o, "model", recipe_write_model(r));
    (void)json_object_set_new(o, "data", json_pack("{s:o}", "sources", sources));
    (void)json_object_set_new(o, "stages", stages);
    char *text = recipe_dump(o);
    json_decref(o);
    return text;
}

/* ---- differences ------------------------------------------------------------------------------------------------------------ */

static void one_side(FILE *f, const json_t *v)
{
    if (v == NULL) {
        (void)fputs("(none)", f);
    } else if (json_is_object(v) || json_is_array(v)) {
        char *text = json_dumps(v, JSON_COMPACT | JSON_SORT_KEYS);
        (void)fputs(text != NULL ? text : "?", f);
        free(text);
    } else {
        scalar(f, v);
    }
}

static void differ(FILE *f, const char *path, json_t *a, json_t *b)
{
    char inner[512];
    if (a != NULL && b != NULL && json_equal(a, b)) {
        return;
    }
    const char *dot = path[0] != '\0' ? "." : "";
    if (json_is_object(a) && json_is_object(b)) {
        size_t count;
        const char **keys = sorted_keys(a, b, &count);
        for (size_t i = 0; i < count; i++) {
            (void)snprintf(inner, sizeof inner, "%s%s%s", path, dot, keys[i]);
            differ(f, inner, json_object_get(a, keys[i]), json_object_get(b, keys[i]));
        }
        free((void *)keys);
        return;
    }
    if (json_is_array(a) && json_is_array(b)) {
        size_t n = json_array_size(a), m = json_array_size(b);
        for (size_t i = 0; i < (n > m ? n : m); i++) {
            (void)snprintf(inner, sizeof inner, "%s%s%zu", path, dot, i);
            differ(f, inner, json_array_get(a, i), json_array_get(b, i));
        }
        return;
    }
    (void)fprintf(f, "%s: ", path);
    one_side(f, a);
    (void)fputs(" -> ", f);
    one_side(f, b);
    (void)fputc('\n', f);
}

char *tsr_recipe_diff(const char *json_a, const char *json_b)
{
    char *text = NULL;
    size_t bytes;
    FILE *f = open_memstream(&text, &bytes);
    if (f == NULL) {
        return NULL;
    }
    json_t *a = json_loads(json_a, 0, NULL), *b = json_loads(json_b, 0, NULL);
    differ(f, "", a, b);
    json_decref(a);
    json_decref(b);
    bool broken = ferror(f) != 0;
    if (fclose(f) != 0 || broken) {
        free(text);
        return NULL;
    }
    return text;
}
