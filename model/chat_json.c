/* chat_json.c - JSON text with Python's spelling; see chat_json.h. jansson's own writer has other escapes and digits. */
#include "model/chat_json.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static tsr_status put(tsr_bytes *out, const char *s, tsr_err *err)
{
    return tok_append(out, s, strlen(s), err);
}

tsr_status chat_json_real(tsr_bytes *out, double x, tsr_err *err)
{
    char text[40], digits[20];
    for (int precision = 0; precision <= 16; precision++) {
        (void)snprintf(text, sizeof text, "%.*e", precision, x);
        if (strtod(text, NULL) == x) {
            break;
        }
    }
    /* text is [-]d[.ddd]e[+-]xx */
    const char *e = strchr(text, 'e');
    int exponent = (int)strtol(e + 1, NULL, 10), count = 0;
    for (const char *c = text; c < e; c++) {
        if (*c >= '0' && *c <= '9') {
            digits[count++] = *c;
        }
    }
    digits[count] = '\0';
    TSR_TRY(put(out, text[0] == '-' ? "-" : "", err));
    char buf[64];
    if (exponent < -4 || exponent >= 16) {
        (void)snprintf(buf, sizeof buf, "%c%s%se%s%02d", digits[0], count > 1 ? "." : "", digits + 1,
                       exponent < 0 ? "-" : "+", abs(exponent));
    } else if (exponent < 0) {
        (void)snprintf(buf, sizeof buf, "0.%.*s%s", -exponent - 1, "000", digits);
    } else if (exponent + 1 >= count) {
        (void)snprintf(buf, sizeof buf, "%s%.*s.0", digits, exponent + 1 - count, "0000000000000000");
    } else {
        (void)snprintf(buf, sizeof buf, "%.*s.%s", exponent + 1, digits, digits + exponent + 1);
    }
    return put(out, buf, err);
}

static tsr_status put_text(tsr_bytes *out, const char *s, size_t n, tsr_err *err)
{
    TSR_TRY(put(out, "\"", err));
    size_t from = 0;
    for (size_t i = 0; i < n; i++) {
        uint8_t c = (uint8_t)s[i];
        if (c >= 0x20 && c != '"' && c != '\\') {
            continue;
        }
        static const char letters[] = "btn\0fr"; /* of 08 to 0d; 0b has none */
        char escape[8];
        if (c >= 8 && c <= 13 && c != 11) {
            (void)snprintf(escape, sizeof escape, "\\%c", letters[c - 8]);
        } else if (c < 0x20) {
            (void)snprintf(escape, sizeof escape, "\\u%04x", c);
        } else {
            (void)snprintf(escape, sizeof escape, "\\%c", c);
        }
        TSR_TRY(tok_append(out, s + from, i - from, err));
        TSR_TRY(put(out, escape, err));
        from = i + 1;
    }
    TSR_TRY(tok_append(out, s + from, n - from, err));
    return put(out, "\"", err);
}

static int by_bytes(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static tsr_status put_object(tsr_bytes *out, const json_t *v, bool compact, tsr_err *err)
{
    size_t count = json_object_size(v), n = 0;
    const char **keys = malloc((count + 1) * sizeof *keys);
    if (keys == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "chat: out of memory");
    }
    tsr_status st = TSR_OK;
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)v, key, value)
    {
        keys[n++] = key;
    }
    if (compact) {
        qsort(keys, n, sizeof *keys, by_bytes);
    }
    TSR_GO(put(out, "{", err));
    for (size_t i = 0; i < n; i++) {
        TSR_GO(put(out, i == 0 ? "" : compact ? "," : ", ", err));
        TSR_GO(put_text(out, keys[i], strlen(keys[i]), err));
        TSR_GO(put(out, compact ? ":" : ": ", err));
        TSR_GO(chat_json_put(out, json_object_get(v, keys[i]), compact, err));
    }
    TSR_GO(put(out, "}", err));
out:
    free(keys);
    return st;
}

static tsr_status put_array(tsr_bytes *out, const json_t *v, bool compact, tsr_err *err)
{
    TSR_TRY(put(out, "[", err));
    for (size_t i = 0; i < json_array_size(v); i++) {
        TSR_TRY(put(out, i == 0 ? "" : compact ? "," : ", ", err));
        TSR_TRY(chat_json_put(out, json_array_get(v, i), compact, err));
    }
    return put(out, "]", err);
}

/* As deep as the document: jansson refuses more than 2048 levels when it reads. */
tsr_status chat_json_put(tsr_bytes *out, const json_t *v, bool compact, tsr_err *err)
{
    char buf[32];
    switch (json_typeof(v)) {
    case JSON_OBJECT: return put_object(out, v, compact, err);
    case JSON_ARRAY: return put_array(out, v, compact, err);
    case JSON_STRING: return put_text(out, json_string_value(v), json_string_length(v), err);
    case JSON_INTEGER:
        (void)snprintf(buf, sizeof buf, "%lld", (long long)json_integer_value(v));
        return put(out, buf, err);
    case JSON_REAL: return chat_json_real(out, json_real_value(v), err);
    case JSON_TRUE: return put(out, "true", err);
    case JSON_FALSE: return put(out, "false", err);
    default: return put(out, "null", err);
    }
}
