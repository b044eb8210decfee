/* layout.c - matching names against a layout's rows, in both directions. */
#include "convert/layouts.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const tsr_layout tsr_layout_canonical = { .arch = "canonical", .what = "Tessera's own names" };
const tsr_layout tsr_layout_raw = { .arch = "raw", .what = "any bag of tensors" };
const tsr_layout *const tsr_layouts[] = { &tsr_layout_kimi_k3, &tsr_layout_kimi_linear, &tsr_layout_canonical,
                                          &tsr_layout_raw, NULL };

const tsr_layout *tsr_layout_find(const char *arch)
{
    for (size_t i = 0; tsr_layouts[i] != NULL; i++) {
        if (strcmp(tsr_layouts[i]->arch, arch) == 0) {
            return tsr_layouts[i];
        }
    }
    return NULL;
}

/* The value of a top-level string key of a JSON text, copied to buf; false when it is not there. */
static bool top_string(const char *json, size_t bytes, const char *key, char *buf, size_t buf_bytes)
{
    json_t *root = json_loadb(json, bytes, 0, NULL);
    const char *v = json_string_value(json_object_get(root, key));
    bool ok = v != NULL && strlen(v) < buf_bytes;
    if (ok) {
        memcpy(buf, v, strlen(v) + 1);
    }
    json_decref(root);
    return ok;
}

tsr_status tsr_layout_pick(const tsr_layout **out, const char *arch, const tsr_source *s, tsr_err *err)
{
    char text[128];
    *out = NULL;
    if (arch != NULL && strcmp(arch, "auto") != 0) {
        *out = tsr_layout_find(arch);
        if (*out == NULL) {
            size_t used = 0;
            char known[256] = "";
            for (size_t i = 0; tsr_layouts[i] != NULL; i++) {
                used += (size_t)snprintf(known + used, sizeof known - used, ", %s", tsr_layouts[i]->arch);
            }
            TSR_FAIL(err, TSR_E_USAGE, "--arch %s: unknown (known: auto%s)", arch, known);
        }
        if (s->ckpt != NULL && *out != &tsr_layout_raw) {
            *out = &tsr_layout_canonical; /* its names are canonical already */
        }
        return TSR_OK;
    }
    if (s->ckpt != NULL) {
        size_t n;
        const char *m = tsr_ckpt_manifest(s->ckpt, &n);
        bool raw = top_string(m, n, "arch", text, sizeof text) && strcmp(text, "raw") == 0;
        *out = raw ? &tsr_layout_raw : &tsr_layout_canonical;
        return TSR_OK;
    }
    *out = &tsr_layout_raw;
    if (s->config_json != NULL &&
        top_string(s->config_json, s->config_bytes, "model_type", text, sizeof text)) {
        for (size_t i = 0; tsr_layouts[i] != NULL; i++) {
            for (size_t k = 0; tsr_layouts[i]->model_types != NULL && tsr_layouts[i]->model_types[k] != NULL;
                 k++) {
                if (strcmp(tsr_layouts[i]->model_types[k], text) == 0) {
                    *out = tsr_layouts[i];
                }
            }
        }
    }
    return TSR_OK;
}

bool tsr_view_family(const tsr_view *v, char *family, size_t room)
{
    const tsr_source *s = v->source;
    size_t n;
    if (s->ckpt != NULL) {
        const char *m = tsr_ckpt_manifest(s->ckpt, &n);
        if (!top_string(m, n, "arch", family, room)) {
            return false;
        }
    } else if ((size_t)snprintf(family, room, "%s", v->map->layout->arch) >= room) {
        return false;
    }
    return strcmp(family, tsr_layout_raw.arch) != 0 && strcmp(family, tsr_layout_canonical.arch) != 0;
}

/* ---- patterns --------------------------------------------------------------------------------------------------- */

/* A canonical decimal at s: its length, or 0. */
static size_t decimal(const char *s)
{
    size_t n = strspn(s, "0123456789");
    return n == 0 || n > 9 || (n > 1 && s[0] == '0') ? 0 : n;
}

bool layout_match(const char *pattern, const char *name, layout_binding *b)
{
    while (*pattern != '\0') {
        if (pattern[0] != '{') {
            if (*pattern++ != *name++) {
                return false;
            }
            continue;
        }
        if (pattern[1] == '*') {
            b->rest = name;
            return *name != '\0';
        }
        size_t n = decimal(name);
        if (n == 0) {
            return false;
        }
        char *to = b->number[pattern[1] == 'e'];
        memcpy(to, name, n);
        to[n] = '\0';
        name += n;
        pattern += 3;
    }
    return *name == '\0';
}

bool layout_emit(const char *pattern, const layout_binding *b, char *buf, size_t room)
{
    size_t used = 0;
    while (*pattern != '\0') {
        const char *add = pattern;
        size_t n = 1;
        if (pattern[0] == '{') {
            add = pattern[1] == '*' ? b->rest : b->number[pattern[1] == 'e'];
            n = strlen(add);
            pattern += 2;
        }
        pattern++;
        if (used + n + 1 > room) {
            return false;
        }
        memcpy(buf + used, add, n);
        used += n;
    }
    buf[used] = '\0';
    return true;
}

const tsr_name_row *tsr_layout_map(const tsr_layout *l, bool to_source, const char *name, tsr_dtype dtype,
                                   char *buf, size_t buf_bytes)
{
    for (size_t i = 0; i < l->row_count; i++) {
        const tsr_name_row *r = &l->rows[i];
        layout_binding b;
        uint8_t want = to_source ? r->dtype : r->src_dtype;
        if ((to_source && r->alias) || (want != 0 && want != (uint8_t)dtype) ||
            !layout_match(to_source ? r->canonical : r->source, name, &b)) {
            continue;
        }
        return layout_emit(to_source ? r->source : r->canonical, &b, buf, buf_bytes) ? r : NULL;
    }
    return NULL;
}
