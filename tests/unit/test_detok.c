/* test_detok.c - tokens to text, one at a time: characters split over tokens, and the same text as all at once. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "tests/unit/random_text.h"

static void expect_stream(const tsr_tokenizer *t, unsigned flags, const int32_t *ids, size_t count,
                          const char *const *outs)
{
    tsr_detok d = { .flags = flags };
    tsr_bytes b = { 0 };
    for (size_t i = 0; i <= count; i++) {
        b.count = 0;
        if (i < count) {
            OK(tsr_detok_push(&d, t, ids[i], &b, err));
        } else {
            OK(tsr_detok_finish(&d, &b, err));
        }
        OK(tok_append(&b, "", 1, err));
        assert_string_equal(b.p, outs[i]);
    }
    tsr_bytes_free(&b);
}
#define STREAM(t, flags, count, ids, ...)                                                                    \
    expect_stream(t, flags, (const int32_t[])ids, count, (const char *[]){ __VA_ARGS__ })
#define IDS(...)                                                                                             \
    {                                                                                                        \
        __VA_ARGS__                                                                                          \
    }
#define FFFD "\xef\xbf\xbd"

/* A character split over two tokens. */
static void test_split_characters(void **state)
{
    (void)state;
    tsr_bytes r = { 0 };
    static const char first[] = "8J8= 0\nmIA= 1\n/w== 2\n4ow= 3\nIA== 4\n";
    OK(tok_append(&r, first, sizeof first - 1, err));
    byte_lines(&r, 5);
    tsr_tokenizer *t = open_ranks(&r);
    STREAM(t, 0, 2, IDS(0, 1), "", "\xf0\x9f\x98\x80", "");
    STREAM(t, 0, 2, IDS(0, 4), "", FFFD " ", "");
    STREAM(t, 0, 1, IDS(2), FFFD, "");
    STREAM(t, 0, 1, IDS(3), "", FFFD);
    STREAM(t, TSR_DECODE_RAW, 2, IDS(0, 1), "\xf0\x9f", "\x98\x80", "");
    STREAM(t, TSR_DECODE_RAW, 2, IDS(0, 4), "\xf0\x9f", " ", "");
    STREAM(t, TSR_DECODE_RAW, 1, IDS(2), "\xff", "");
    STREAM(t, TSR_DECODE_RAW, 1, IDS(3), "\xe2\x8c", "");
    /* further: the same over single bytes, a character begun anew, one that comes late */
    STREAM(t, 0, 4, IDS(5 + 0xf0, 5 + 0x9f, 5 + 0x98, 5 + 0x80), "", "", "", "\xf0\x9f\x98\x80", "");
    STREAM(t, 0, 3, IDS(0, 0, 1), "", FFFD, "\xf0\x9f\x98\x80", "");
    STREAM(t, 0, 2, IDS(3, 5 + 0x98), "", "\xe2\x8c\x98", "");
    STREAM(t, 0, 2, IDS(3, 3), "", FFFD, FFFD);
    /* maximal subparts: E0 80 is two, F0 9F 98 one, a surrogate three */
    STREAM(t, 0, 2, IDS(5 + 0xe0, 5 + 0x80), "", FFFD FFFD, "");
    STREAM(t, 0, 4, IDS(0, 5 + 0x98, 5 + 'x', 2), "", "", FFFD "x", FFFD, "");
    STREAM(t, 0, 3, IDS(5 + 0xed, 5 + 0xa0, 5 + 0x80), "", FFFD FFFD, FFFD, "");
    /* an id that no token has: nothing changes */
    tsr_detok d = { 0 };
    tsr_bytes b = { 0 };
    tsr_err e;
    OK(tsr_detok_push(&d, t, 0, &b, err));
    assert_int_equal(tsr_detok_push(&d, t, 261, &b, &e), TSR_E_FORMAT);
    assert_non_null(strstr(e.msg, "token id 261"));
    assert_int_equal(tsr_detok_push(&d, t, -1, &b, &e), TSR_E_FORMAT);
    OK(tsr_detok_push(&d, t, 1, &b, err));
    assert_int_equal(b.count, 4);
    assert_int_equal(tsr_tokenizer_decode(t, (int32_t[]){ 4, 4, 999 }, 3, 0, &b, &e), TSR_E_FORMAT);
    assert_int_equal(b.count, 4);
    tsr_bytes_free(&b);
    tsr_tokenizer_close(&t);
    tsr_bytes_free(&r);
}

/* Another way to the same answer: a table of all well-formed sequences, tried longest first on the whole text. */
static void one_shot(const uint8_t *p, size_t n, tsr_bytes *out)
{
    static const uint8_t table[9][9] = {
        /* length, then low and high of each byte: table 3-7 of the Unicode standard */
        { 1, 0x00, 0x7f },
        { 2, 0xc2, 0xdf, 0x80, 0xbf },
        { 3, 0xe0, 0xe0, 0xa0, 0xbf, 0x80, 0xbf },
        { 3, 0xe1, 0xec, 0x80, 0xbf, 0x80, 0xbf },
        { 3, 0xed, 0xed, 0x80, 0x9f, 0x80, 0xbf },
        { 3, 0xee, 0xef, 0x80, 0xbf, 0x80, 0xbf },
        { 4, 0xf0, 0xf0, 0x90, 0xbf, 0x80, 0xbf, 0x80, 0xbf },
        { 4, 0xf1, 0xf3, 0x80, 0xbf, 0x80, 0xbf, 0x80, 0xbf },
        { 4, 0xf4, 0xf4, 0x80, 0x8f, 0x80, 0xbf, 0x80, 0xbf },
    };
    for (size_t at = 0; at < n;) {
        size_t longest = 0;
        bool whole = false;
        for (int row = 0; row < 9; row++) {
            size_t i = 0;
            while (i < table[row][0] && at + i < n && p[at + i] >= table[row][1 + 2 * i] &&
                   p[at + i] <= table[row][2 + 2 * i]) {
                i++;
            }
            whole = whole || i == table[row][0];
            longest = i > longest ? i : longest;
        }
        if (whole) {
            OK(tok_append(out, p + at, longest, err));
        } else {
            OK(tok_append(out, FFFD, 3, err));
            longest = longest > 0 ? longest : 1;
        }
        at += longest;
    }
}

static void test_stream_is_one_shot(void **state)
{
    (void)state;
    uint64_t seed = 21;
    /* tokens of parts of characters: cut from random text, and from random bytes near the edges of the table */
    static const uint8_t edges[] = { 0x00, 0x7f, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf, 0xc0,
                                     0xc1, 0xc2, 0xdf, 0xe0, 0xe1, 0xec, 0xed, 0xee, 0xef,
                                     0xf0, 0xf1, 0xf3, 0xf4, 0xf5, 0xff, 'a' };
    tsr_bytes r = { 0 }, raw = { 0 }, streamed = { 0 }, want = { 0 };
    byte_lines(&r, 0);
    for (int i = 0; i < 400; i++) {
        uint8_t token[64];
        size_t n = random_text(&seed, 0, token, 20) % 12, from = n > 0 ? rnd(&seed, n) : 0;
        for (size_t k = 0; k < n && i % 2 == 0; k++) {
            token[k] = edges[rnd(&seed, sizeof edges)];
        }
        if (n - from > 0) {
            line(&r, token + from, n - from, 256 + i, "\n");
        }
    }
    tsr_tokenizer *t = open_ranks(&r);
    for (int round = 0; round < 20000; round++) {
        int32_t ids[40];
        size_t count = rnd(&seed, 40);
        tsr_detok d = { 0 };
        raw.count = streamed.count = want.count = 0;
        for (size_t i = 0; i < count; i++) {
            do {
                ids[i] = (int32_t)(rnd(&seed, 3) ? rnd(&seed, 656) : edges[rnd(&seed, sizeof edges)]);
            } while (tsr_tokenizer_token(t, ids[i]).p == NULL);
            OK(tsr_detok_push(&d, t, ids[i], &streamed, err));
            assert_true(d.held_count <= 3);
        }
        OK(tsr_detok_finish(&d, &streamed, err));
        OK(tsr_tokenizer_decode(t, ids, count, TSR_DECODE_RAW, &raw, err));
        one_shot((const uint8_t *)raw.p, raw.count, &want);
        assert_int_equal(streamed.count, want.count);
        assert_true(want.count == 0 || memcmp(streamed.p, want.p, want.count) == 0);
        want.count = 0;
        OK(tsr_tokenizer_decode(t, ids, count, 0, &want, err));
        assert_int_equal(streamed.count, want.count);
        assert_true(want.count == 0 || memcmp(streamed.p, want.p, want.count) == 0);
    }
    tsr_tokenizer_close(&t);
    tsr_bytes_free(&r);
    tsr_bytes_free(&raw);
    tsr_bytes_free(&streamed);
    tsr_bytes_free(&want);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_split_characters),
        cmocka_unit_test(test_stream_is_one_shot),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
