/* ranks.c - the tiktoken ranks file: a line per token, "base64 rank". */
#include "model/tokenizer_priv.h"

#include <stdlib.h>
#include <string.h>

typedef struct reader {
    const char *name;
    size_t line; /* counted from 1 */
    vocab *v;
    size_t room;   /* entries of v->tokens */
    uint32_t used; /* bytes of v->blob */
    tsr_err *err;
} reader;

/* The six bits of a base64 digit, -1: not one. */
static int digit(char c)
{
    if (c >= 'A' && c <= 'Z') {
        return c - 'A';
    }
    if (c >= 'a' && c <= 'z') {
        return c - 'a' + 26;
    }
    return c >= '0' && c <= '9' ? c - '0' + 52 : c == '+' ? 62 : c == '/' ? 63 : -1;
}

/* Appends the decoded bytes to the blob, which has room for them. */
static tsr_status base64(reader *r, const char *p, size_t n, uint32_t *bytes_out)
{
    if (n == 0 || n % 4 != 0) {
        TSR_FAIL(r->err, TSR_E_FORMAT, "%s: line %zu: base64 of %zu digits (a multiple of 4 is needed)",
                 r->name, r->line, n);
    }
    size_t pad = (p[n - 1] == '=') + (size_t)(p[n - 1] == '=' && p[n - 2] == '=');
    size_t bytes = n / 4 * 3 - pad;
    if (bytes > TSR_TOKEN_BYTES_MAX) {
        TSR_FAIL(r->err, TSR_E_LIMIT, "%s: line %zu: a token of %zu bytes (limit %zu)", r->name, r->line,
                 bytes, TSR_TOKEN_BYTES_MAX);
    }
    uint8_t *dst = r->v->blob + r->used;
    uint32_t word = 0;
    size_t done = 0;
    for (size_t i = 0; i < n; i++) {
        int d = i < n - pad ? digit(p[i]) : 0;
        if (d < 0) {
            TSR_FAIL(r->err, TSR_E_FORMAT, "%s: line %zu: byte 0x%02x is no base64 digit", r->name, r->line,
                     (uint8_t)p[i]);
        }
        word = word << 6 | (uint32_t)d;
        if (i % 4 == 3) {
            for (int k = 16; k >= 0; k -= 8, done++) {
                if (done < bytes) {
                    dst[done] = (uint8_t)(word >> k);
                } else if ((uint8_t)(word >> k) != 0) {
                    TSR_FAIL(r->err, TSR_E_FORMAT, "%s: line %zu: base64 with bits left over", r->name,
                             r->line);
                }
            }
            word = 0;
        }
    }
    *bytes_out = (uint32_t)bytes;
    return TSR_OK;
}

static tsr_status rank_of(reader *r, const char *p, size_t n, int32_t *out)
{
    int64_t rank = 0;
    for (size_t i = 0; i < n; i++) {
        if (p[i] < '0' || p[i] > '9') {
            TSR_FAIL(r->err, TSR_E_FORMAT, "%s: line %zu: the rank is no decimal number", r->name, r->line);
        }
        rank = rank * 10 + (p[i] - '0');
        if (rank >= TSR_TOKEN_ID_MAX) {
            TSR_FAIL(r->err, TSR_E_LIMIT, "%s: line %zu: rank beyond %d", r->name, r->line,
                     TSR_TOKEN_ID_MAX - 1);
        }
    }
    if (n == 0) {
        TSR_FAIL(r->err, TSR_E_FORMAT, "%s: line %zu: has no rank (\"base64 rank\" is expected)", r->name,
                 r->line);
    }
    *out = (int32_t)rank;
    return TSR_OK;
}

static bool blank(char c)
{
    return c == ' ' || c == '\t';
}

static tsr_status line(reader *r, const char *p, size_t n)
{
    vocab *v = r->v;
    size_t token = 0;
    while (token < n && !blank(p[token])) {
        token++;
    }
    size_t from = token, to = n;
    while (from < n && blank(p[from])) {
        from++;
    }
    while (to > from && blank(p[to - 1])) {
        to--;
    }
    uint32_t bytes;
    int32_t rank;
    TSR_TRY(base64(r, p, token, &bytes));
    TSR_TRY(rank_of(r, p + from, to - from, &rank));
    size_t before = r->room;
    TSR_TRY(tok_grow((void **)&v->tokens, &r->room, (size_t)rank + 1, sizeof *v->tokens, r->err));
    memset(v->tokens + before, 0, (r->room - before) * sizeof *v->tokens);
    if (v->tokens[rank].bytes > 0) {
        TSR_FAIL(r->err, TSR_E_FORMAT, "%s: line %zu: rank %d has a token already", r->name, r->line, rank);
    }
    v->tokens[rank] = (vocab_token){ r->used, bytes };
    r->used += bytes;
    v->id_count = rank >= v->id_count ? rank + 1 : v->id_count;
    v->count++;
    return TSR_OK;
}

tsr_status vocab_from_ranks(vocab *v, tsr_span text, const char *name, tsr_err *err)
{
    if (text.bytes > TSR_RANKS_FILE_BYTES_MAX) {
        TSR_FAIL(err, TSR_E_LIMIT, "%s: %zu bytes (limit %zu)", name, text.bytes, TSR_RANKS_FILE_BYTES_MAX);
    }
    reader r = { name, 0, v, 0, 0, err };
    v->blob = malloc(text.bytes / 4 * 3 + 3);
    if (v->blob == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "%s: out of memory for %zu bytes", name, text.bytes);
    }
    for (size_t at = 0; at < text.bytes;) {
        const char *p = text.p + at, *end = memchr(p, '\n', text.bytes - at);
        size_t n = end != NULL ? (size_t)(end - p) : text.bytes - at;
        at += n + 1;
        r.line++;
        n -= n > 0 && p[n - 1] == '\r';
        if (n > 0) {
            TSR_TRY(line(&r, p, n));
        }
    }
    if (v->count == 0) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: has no token (is the file empty?)", name);
    }
    TSR_TRY(vocab_index(v, err));
    for (int i = 0; i < 256; i++) {
        if (v->byte_id[i] < 0) {
            TSR_FAIL(err, TSR_E_FORMAT, "%s: no token is the single byte 0x%02x (all 256 are needed)", name,
                     i);
        }
    }
    return TSR_OK;
}
