/* random_text.h - for tests of the tokenizer: ranks files, and texts of characters of many sorts. With cmocka. */
#ifndef TSR_TESTS_RANDOM_TEXT_H
#define TSR_TESTS_RANDOM_TEXT_H

#include "model/tokenizer_priv.h"
#include "tests/harness/bag.h"

#include <inttypes.h>
#include <stdio.h>

#define OK(call)                                                                                             \
    do {                                                                                                     \
        tsr_err ok_err_ = { 0 };                                                                             \
        tsr_err *err = &ok_err_;                                                                             \
        if ((call) != TSR_OK) {                                                                              \
            fail_msg("%s: %s", #call, ok_err_.msg);                                                          \
        }                                                                                                    \
    } while (0)

static inline uint64_t rnd(uint64_t *state, uint64_t below)
{
    return bag_random(state) % below;
}

/* ---- ranks files made here ---------------------------------------------------------------------- */

static inline void line(tsr_bytes *out, const void *token, size_t n, int64_t rank, const char *end)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const uint8_t *p = token;
    char quad[4], tail[40];
    for (size_t i = 0; i < n; i += 3) {
        uint32_t w = (uint32_t)p[i] << 16 | (i + 1 < n ? (uint32_t)p[i + 1] << 8 : 0) |
                     (i + 2 < n ? p[i + 2] : 0u);
        for (int k = 0; k < 4; k++) {
            quad[k] = i + (size_t)k > n ? '=' : digits[w >> (18 - 6 * k) & 63];
        }
        OK(tok_append(out, quad, 4, err));
    }
    int m = snprintf(tail, sizeof tail, " %" PRId64 "%s", rank, end);
    OK(tok_append(out, tail, (size_t)m, err));
}

static inline void byte_lines(tsr_bytes *out, int64_t rank)
{
    for (int b = 0; b < 256; b++) {
        uint8_t c = (uint8_t)b;
        line(out, &c, 1, rank + b, "\n");
    }
}

static inline tsr_span span(const tsr_bytes *b)
{
    return (tsr_span){ b->p != NULL ? b->p : "", b->count };
}

static inline tsr_tokenizer *open_ranks(const tsr_bytes *ranks)
{
    tsr_tokenizer *t;
    OK(tsr_tokenizer_open(&t, &(tsr_tokenizer_opts){ .ranks = span(ranks) }, err));
    return t;
}

/* ---- texts ------------------------------------------------------------------------------------------ */

static inline size_t put_utf8(uint32_t c, uint8_t *p)
{
    if (c < 0x80) {
        p[0] = (uint8_t)c;
        return 1;
    }
    size_t n = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (size_t i = n - 1; i > 0; i--, c >>= 6) {
        p[i] = (uint8_t)(0x80 | (c & 0x3f));
    }
    p[0] = (uint8_t)((n == 2 ? 0xc0 : n == 3 ? 0xe0 : 0xf0) | c);
    return n;
}

/* kind 0: characters of many sorts; 1: any bytes; 2: both */
static inline size_t random_text(uint64_t *seed, int kind, uint8_t *p, size_t room)
{
    static const uint32_t starts[] = { 'a',    'A',   '0',   ' ',     '\n', '!', 0x4f60,
                                       0x3042, 0x301, 0x430, 0x1f600, 0xe9, '<' };
    size_t n = 0, want = rnd(seed, room - 8);
    while (n < want) {
        if (kind == 1 || (kind == 2 && rnd(seed, 4) == 0)) {
            p[n++] = (uint8_t)rnd(seed, 256);
            continue;
        }
        uint32_t c = rnd(seed, 8) == 0
                         ? (uint32_t)rnd(seed, 0x110000)
                         : starts[rnd(seed, sizeof starts / sizeof starts[0])] + (uint32_t)rnd(seed, 8);
        if (c >= 0xd800 && c < 0xe000) {
            continue;
        }
        n += put_utf8(c, p + n);
    }
    return n;
}

#endif
