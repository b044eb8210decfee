/* test_stop_text.c - texts that end a generation: found wherever the pieces fall, nothing held back without need. */
#include "model/stop_text.h"
#include "tests/harness/bag.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static void append(tsr_bytes *b, const char *p, size_t n)
{
    if (b->room < b->count + n) {
        b->room = b->count + n + 64;
        b->p = realloc(b->p, b->room);
        assert_non_null(b->p);
    }
    if (n > 0) {
        memcpy(b->p + b->count, p, n);
    }
    b->count += n;
}

/* What a reader of the whole text would say: bytes in front of the stop text that is complete first, of several the longest. */
static size_t whole(const char *text, size_t n, const char *const *texts, bool *found)
{
    for (size_t end = 1; end <= n; end++) {
        size_t longest = 0;
        for (size_t i = 0; texts[i] != NULL; i++) {
            size_t k = strlen(texts[i]);
            longest = k <= end && k > longest && memcmp(text + end - k, texts[i], k) == 0 ? k : longest;
        }
        if (longest > 0) {
            *found = true;
            return end - longest;
        }
    }
    *found = false;
    return n;
}

static void test_any_pieces(void **unused)
{
    (void)unused;
    static const char *const sets[][4] = {
        { NULL },         { "b" },       { "abc", "b" },          { "aab" },
        { "abab", "bb" }, { "a", "ba" }, { "cab", "abc", "aaaa" }
    };
    uint64_t state = 99;
    int stops = 0;
    for (int round = 0; round < 20000; round++) {
        const char *const *texts = sets[bag_random(&state) % (sizeof sets / sizeof *sets)];
        char text[40];
        size_t n = bag_random(&state) % sizeof text;
        for (size_t i = 0; i < n; i++) {
            text[i] = (char)('a' + bag_random(&state) % 3);
        }
        bool want_found, found = false;
        size_t want = whole(text, n, texts, &want_found);
        stop_text s = { .texts = texts };
        tsr_bytes got = { 0 };
        for (size_t at = 0; at < n && !found;) {
            size_t k = 1 + bag_random(&state) % 6;
            k = k < n - at ? k : n - at;
            append(&s.held, text + at, k);
            at += k;
            tsr_span out = stop_text_take(&s, false, &found);
            append(&got, out.p, out.bytes);
            if (texts[0] == NULL) {
                assert_int_equal(got.count, at); /* nothing to wait for */
            }
        }
        if (!found) {
            tsr_span out = stop_text_take(&s, true, &found);
            append(&got, out.p, out.bytes);
            assert_false(found);
        }
        assert_int_equal(found, want_found);
        assert_int_equal(got.count, want);
        assert_true(want == 0 || memcmp(got.p, text, want) == 0);
        stops += found;
        tsr_bytes_free(&s.held);
        tsr_bytes_free(&got);
    }
    assert_true(stops > 5000);
}

/* Text goes out as soon as it cannot be part of a stop text any more. */
static void test_holds_back_little(void **unused)
{
    (void)unused;
    static const char *const texts[] = { "STOP", NULL };
    static const struct {
        const char *piece, *out;
    } steps[] = { { "hello ", "hello " }, { "S", "" },     { "TO", "" },
                  { "x", "STOx" },        { "SSTO", "S" }, { "P!", "" } };
    stop_text s = { .texts = texts };
    bool found = false;
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        append(&s.held, steps[i].piece, strlen(steps[i].piece));
        tsr_span out = stop_text_take(&s, false, &found);
        assert_int_equal(out.bytes, strlen(steps[i].out));
        assert_true(out.bytes == 0 || memcmp(out.p, steps[i].out, out.bytes) == 0);
        assert_int_equal(found, i + 1 == sizeof steps / sizeof *steps);
    }
    tsr_bytes_free(&s.held);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_any_pieces),
                                        cmocka_unit_test(test_holds_back_little) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
