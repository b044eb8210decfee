/* out.c - see out.h. */
#include "cli/out.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- text ----------------------------------------------------------------------------------------- */

/* Bytes of the UTF-8 character at s; 0 when it is none (overlong, surrogate, too large, cut). */
static size_t utf8_bytes(const char *s, uint32_t *code)
{
    const unsigned char *u = (const unsigned char *)s;
    size_t n = u[0] < 0x80 ? 1 : u[0] < 0xc2 ? 0 : u[0] < 0xe0 ? 2 : u[0] < 0xf0 ? 3 : u[0] < 0xf5 ? 4 : 0;
    *code = n <= 1 ? u[0] : (uint32_t)(u[0] & (0x7f >> n));
    for (size_t i = 1; i < n; i++) {
        if ((u[i] & 0xc0) != 0x80) {
            return 0;
        }
        *code = *code << 6 | (u[i] & 0x3f);
    }
    if ((n == 3 && *code < 0x800) || (n == 4 && (*code < 0x10000 || *code > 0x10ffff)) ||
        (*code >= 0xd800 && *code < 0xe000)) {
        return 0;
    }
    return n;
}

void tsr_out_text(FILE *f, const char *s)
{
    while (*s != '\0') {
        uint32_t code;
        size_t n = utf8_bytes(s, &code);
        bool harmless = n > 0 && code >= 0x20 && !(code >= 0x7f && code < 0xa0) &&
                        !(code >= 0x202a && code <= 0x202e) && !(code >= 0x2066 && code <= 0x2069);
        size_t step = n > 0 ? n : 1;
        for (size_t i = 0; !harmless && i < step; i++) {
            (void)fprintf(f, "\\x%02x", (unsigned char)s[i]);
        }
        if (harmless) {
            (void)fwrite(s, 1, step, f);
        }
        s += step;
    }
}

const char *tsr_size_text(uint64_t bytes, char buf[TSR_SIZE_TEXT])
{
    static const char *const units[] = { "B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB" };
    double v = (double)bytes;
    size_t u = 0;
    while (v >= 1023.95 && u + 1 < sizeof units / sizeof *units) {
        v /= 1024;
        u++;
    }
    if (bytes < 1024) {
        (void)snprintf(buf, TSR_SIZE_TEXT, "%u B", (unsigned)bytes);
    } else {
        (void)snprintf(buf, TSR_SIZE_TEXT, "%.1f %s", v, units[u]);
    }
    return buf;
}

const char *tsr_shape_text(int rank, const int64_t *shape, char *buf, size_t buf_bytes)
{
    size_t used = (size_t)snprintf(buf, buf_bytes, "[");
    for (int i = 0; i < rank && used < buf_bytes; i++) {
        used += (size_t)snprintf(buf + used, buf_bytes - used, i > 0 ? ", %" PRId64 : "%" PRId64, shape[i]);
    }
    if (used < buf_bytes) {
        (void)snprintf(buf + used, buf_bytes - used, "]");
    }
    return buf;
}

const char *tsr_ranges_of(const uint32_t *ids, uint32_t count, char *buf, size_t buf_bytes)
{
    size_t used = 0;
    buf[0] = '\0';
    for (uint32_t i = 0; i < count;) {
        uint32_t last = i;
        while (last + 1 < count && ids[last + 1] == ids[last] + 1) {
            last++;
        }
        char part[40];
        const char *comma = i > 0 ? ", " : "";
        if (last > i) {
            (void)snprintf(part, sizeof part, "%s%u-%u", comma, ids[i], ids[last]);
        } else {
            (void)snprintf(part, sizeof part, "%s%u", comma, ids[i]);
        }
        if (used + strlen(part) + 6 > buf_bytes) {
            (void)snprintf(buf + used, buf_bytes - used, ", ...");
            break;
        }
        used += (size_t)snprintf(buf + used, buf_bytes - used, "%s", part);
        i = last + 1;
    }
    return buf;
}

/* ---- standard output -------------------------------------------------------------------------------- */

static int write_errno; /* of the first failed flush; 0: none */

tsr_status tsr_out_check(tsr_err *err)
{
    if (!ferror(stdout)) {
        return TSR_OK;
    }
    if (write_errno == 0) {
        write_errno = errno != 0 ? errno : EIO;
    }
    TSR_FAIL(err, TSR_E_IO, "standard output: cannot be written: %s", strerror(write_errno));
}

tsr_status tsr_out_flush(tsr_err *err)
{
    TSR_TRY(tsr_out_check(err));
    errno = 0;
    if (fflush(stdout) != 0) {
        write_errno = errno != 0 ? errno : EIO;
        TSR_FAIL(err, TSR_E_IO, "standard output: cannot be written: %s", strerror(write_errno));
    }
    return TSR_OK;
}

bool tsr_out_pipe_gone(void)
{
    struct pollfd p = { .fd = STDOUT_FILENO }; /* stdio may have lost the errno: ask the pipe itself */
    return write_errno == EPIPE || (write_errno != 0 && poll(&p, 1, 0) == 1 && (p.revents & POLLERR) != 0);
}

bool tsr_out_colors(void)
{
    const char *no = getenv("NO_COLOR"), *term = getenv("TERM");
    return isatty(STDERR_FILENO) && (no == NULL || no[0] == '\0') && term != NULL &&
           strcmp(term, "dumb") != 0;
}

/* ---- JSON --------------------------------------------------------------------------------------------- */

void tsr_json_set(json_t **obj, const char *key, json_t *value)
{
    if (*obj == NULL) {
        json_decref(value);
    } else if (json_object_set_new(*obj, key, value) != 0) {
        json_decref(*obj);
        *obj = NULL;
    }
}

void tsr_json_append(json_t **list, json_t *value)
{
    if (*list == NULL) {
        json_decref(value);
    } else if (json_array_append_new(*list, value) != 0) {
        json_decref(*list);
        *list = NULL;
    }
}

json_t *tsr_json_bytes(const char *p, size_t n)
{
    json_t *v = json_stringn(p != NULL ? p : "", n);
    if (v != NULL) {
        return v;
    }
    char *copy = malloc(n + 1), *clean = malloc(n * 3 + 1); /* with the NUL that ends a cut character */
    size_t used = 0;
    if (copy != NULL && clean != NULL) {
        memcpy(copy, p, n);
        copy[n] = '\0';
        for (const char *s = copy; s < copy + n;) {
            uint32_t code = 0;
            size_t k = *s != '\0' ? utf8_bytes(s, &code) : 1;
            memcpy(clean + used, k > 0 ? s : "\xef\xbf\xbd", k > 0 ? k : 3);
            used += k > 0 ? k : 3;
            s += k > 0 ? k : 1;
        }
        v = json_stringn(clean, used);
    }
    free(copy);
    free(clean);
    return v;
}

json_t *tsr_json_text(const char *s)
{
    return s != NULL ? tsr_json_bytes(s, strlen(s)) : json_null();
}

json_t *tsr_json_u64(uint64_t v)
{
    return v <= INT64_MAX ? json_integer((json_int_t)v) : json_sprintf("%" PRIu64, v);
}

json_t *tsr_json_shape(int rank, const int64_t *shape)
{
    json_t *list = json_array();
    for (int i = 0; i < rank; i++) {
        tsr_json_append(&list, json_integer(shape[i]));
    }
    return list;
}

json_t *tsr_json_number(double v)
{
    return isfinite(v) ? json_real(v) : json_null();
}

tsr_status tsr_json_print(json_t *obj, bool lines, tsr_err *err)
{
    if (obj == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    size_t flags = JSON_REAL_PRECISION(17) | (lines ? JSON_COMPACT : JSON_INDENT(2));
    int rc = json_dumpf(obj, stdout, flags);
    json_decref(obj);
    (void)fputc('\n', stdout); /* a failure shows in tsr_out_check */
    TSR_TRY(tsr_out_check(err));
    if (rc != 0) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    return TSR_OK;
}
