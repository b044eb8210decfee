/* test_data.c - text to a data folder and back, and sequences packed of its documents. */
#include "format/io.h"
#include "model/tokenizer.h"
#include "tests/harness/bag.h"
#include "train/data.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static char *dir;
static uint64_t state_of_random = 5;

static uint64_t rnd(void)
{
    return state_of_random = tsr_mix64(state_of_random, 1, 2);
}

static const char *in_dir(const char *name)
{
    static char path[4][256];
    static int turn;
    turn = (turn + 1) % 4;
    (void)snprintf(path[turn], sizeof path[turn], "%s/%s", dir, name);
    return path[turn];
}

static void put(const char *name, const void *p, size_t n)
{
    assert_int_equal(tsr_fs_write_file(in_dir(name), p, n, NULL), TSR_OK);
}

/* JSON lines with a document of each length in bytes. */
static void put_lengths(const char *name, const int64_t *lengths, int64_t n)
{
    char *text = NULL;
    size_t bytes;
    FILE *f = open_memstream(&text, &bytes);
    assert_non_null(f);
    for (int64_t i = 0; i < n; i++) {
        (void)fputs("{\"text\": \"", f);
        for (int64_t k = 0; k < lengths[i]; k++) {
            (void)fputc((int)('a' + (i + k) % 26), f);
        }
        (void)fputs("\"}\n", f);
    }
    assert_int_equal(fclose(f), 0);
    put(name, text, bytes);
    free(text);
}

static tsr_data *built(const char *from, const char *to, const tsr_data_build_opts *o, tsr_data_stats *stats)
{
    tsr_err err = { 0 };
    tsr_data *d = NULL;
    const char *path = in_dir(from);
    if (tsr_data_build(&path, 1, in_dir(to), o, stats, &err) != TSR_OK ||
        tsr_data_open(&d, in_dir(to), &err) != TSR_OK || tsr_data_verify(d, NULL, &err) != TSR_OK) {
        fail_msg("%s", err.msg);
    }
    return d;
}

/* ---- building --------------------------------------------------------------------------------------------------- */

static void test_round_trip(void **state)
{
    (void)state;
    enum { N = 500 };
    int64_t lengths[N], at[TSR_SPLIT_COUNT] = { 0 };
    tsr_data_stats stats;
    uint64_t bytes = 0;
    for (int64_t i = 0; i < N; i++) {
        lengths[i] = i % 50 == 7 ? 0 : (int64_t)(rnd() % 300) + 1;
        bytes += (uint64_t)lengths[i];
    }
    put_lengths("a.jsonl", lengths, N);
    tsr_data *d = built(
        "a.jsonl", "a",
        &(tsr_data_build_opts){ .held_out = 0.2, .seed = 3, .shard_tokens = 5000, .threads = 3 }, &stats);
    assert_int_equal(stats.documents, N - 10);
    assert_int_equal(stats.skipped, 10);
    assert_int_equal(stats.bytes, bytes);
    assert_int_equal(tsr_data_vocab(d), 512);
    assert_int_equal(tsr_data_eos(d), 257);
    assert_null(tsr_data_tokenizer_file(d, 0));
    assert_in_range(tsr_data_docs(d, TSR_SPLIT_HELD), 70, 130);
    assert_int_equal(tsr_data_text_bytes(d, TSR_SPLIT_TRAIN) + tsr_data_text_bytes(d, TSR_SPLIT_HELD), bytes);
    for (int64_t i = 0; i < N; i++) { /* each document stands next in one of the two splits */
        int32_t ids[301];
        if (lengths[i] == 0) {
            continue;
        }
        int found = 0;
        for (int s = 0; s < TSR_SPLIT_COUNT && found == 0; s++) {
            if (at[s] < tsr_data_docs(d, (tsr_split)s) &&
                tsr_data_doc_length(d, (tsr_split)s, at[s]) == lengths[i] + 1) {
                tsr_data_copy(d, (tsr_split)s, at[s], 0, lengths[i] + 1, ids);
                bool same = ids[lengths[i]] == 257;
                for (int64_t k = 0; k < lengths[i]; k++) {
                    same = same && ids[k] == 'a' + (i + k) % 26;
                }
                found = same;
                at[s] += same;
            }
        }
        assert_int_equal(found, 1);
    }
    int32_t one[2];
    tsr_data_copy(d, TSR_SPLIT_TRAIN, 0, tsr_data_doc_length(d, TSR_SPLIT_TRAIN, 0) - 1, 1, one);
    assert_int_equal(one[0], 257);
    tsr_data_close(&d);
    assert_null(d);
}

/* A document beyond the tokenizer's window is read in parts; its tokens must be those of the whole. */
static void test_long_document(void **state)
{
    (void)state;
    static const char *const pieces[] = { "the ", "ab", "\xc3\xa9", "\xe2\x82\xac ", "\xf0\x9f\x98\x80",
                                          "\n\n", "  ", "1234" };
    size_t n = 0, room = (size_t)5 << 20;
    char *text = malloc(room);
    assert_non_null(text);
    while (n < room - 8) {
        const char *p = pieces[rnd() % 8];
        memcpy(text + n, p, strlen(p));
        n += strlen(p);
    }
    put("long.txt", text, n);
    tsr_data *d = built("long.txt", "long", &(tsr_data_build_opts){ .no_eos = true, .threads = 2 }, NULL);
    tsr_tokenizer *t;
    tsr_tokens want = { 0 };
    assert_int_equal(tsr_tokenizer_open(&t, &(tsr_tokenizer_opts){ .byte_added = true }, NULL), TSR_OK);
    assert_int_equal(tsr_tokenizer_encode(t, text, n, 0, &want, NULL), TSR_OK);
    assert_int_equal(tsr_data_docs(d, TSR_SPLIT_TRAIN), 1);
    assert_int_equal(tsr_data_eos(d), -1);
    assert_int_equal(tsr_data_doc_length(d, TSR_SPLIT_TRAIN, 0), want.count);
    int32_t *have = malloc(want.count * sizeof *have);
    assert_non_null(have);
    tsr_data_copy(d, TSR_SPLIT_TRAIN, 0, 0, (int64_t)want.count, have);
    assert_memory_equal(have, want.ids, want.count * sizeof *have);
    free(have);
    free(text);
    tsr_tokens_free(&want);
    tsr_tokenizer_close(&t);
    tsr_data_close(&d);
}

/* Exactly one window: the part behind it is empty. */
static void test_window_borders(void **state)
{
    (void)state;
    char *text = malloc(800001);
    assert_non_null(text);
    memset(text, 'x', 800001);
    static const size_t sizes[] = { 399999, 400000, 400001, 800000, 800001 };
    for (size_t i = 0; i < 5; i++) {
        char from[32], to[32];
        tsr_data_stats stats;
        (void)snprintf(from, sizeof from, "w%zu.txt", i);
        (void)snprintf(to, sizeof to, "w%zu", i);
        put(from, text, sizes[i]);
        tsr_data *d = built(from, to, &(tsr_data_build_opts){ .threads = 1 }, &stats);
        assert_int_equal(stats.documents, 1);
        assert_int_equal(tsr_data_doc_length(d, TSR_SPLIT_TRAIN, 0), sizes[i] + 1);
        tsr_data_close(&d);
    }
    free(text);
}

typedef struct stop_at {
    volatile int cancel;
    uint64_t at;
} stop_at;

static void on_report(void *payload, const char *what, uint64_t done, uint64_t total)
{
    stop_at *s = payload;
    (void)what;
    assert_true(done <= total);
    s->cancel = done >= s->at;
}

/* A cancelled build goes on and gives what one in one go gives; other options do not. */
static void test_cancelled(void **state)
{
    (void)state;
    enum { N = 3000 };
    static int64_t lengths[N];
    for (int64_t i = 0; i < N; i++) {
        lengths[i] = (int64_t)(rnd() % 900) + 1;
    }
    put_lengths("c.jsonl", lengths, N);
    tsr_data_build_opts o = { .held_out = 0.1, .shard_tokens = 20000, .threads = 2, .mem_limit = 1 };
    tsr_data *whole = built("c.jsonl", "whole", &o, NULL), *pieces;
    stop_at stop = { .at = 1000000 };
    tsr_data_stats stats;
    tsr_err err;
    const char *path = in_dir("c.jsonl");
    o.progress = (tsr_progress){ .report = on_report, .payload = &stop, .cancel = &stop.cancel };
    assert_int_equal(tsr_data_build(&path, 1, in_dir("pieces"), &o, &stats, &err), TSR_E_CANCELLED);
    assert_true(tsr_fs_is_dir(in_dir(".pieces.partial")));
    stop = (stop_at){ .at = UINT64_MAX };
    o.seed = 1;
    assert_int_equal(tsr_data_build(&path, 1, in_dir("pieces"), &o, &stats, &err), TSR_E_CONFLICT);
    o.seed = 0;
    pieces = built("c.jsonl", "pieces", &o, &stats);
    assert_int_equal(tsr_data_hash(pieces), tsr_data_hash(whole));
    assert_in_range(stats.resumed_docs, 1, N - 1);
    assert_int_equal(stats.documents, N);
    assert_false(tsr_fs_exists(in_dir(".pieces.partial")));
    tsr_data_close(&whole);
    tsr_data_close(&pieces);
}

/* ---- packing ------------------------------------------------------------------------------------------------------- */

static void check_packing(const tsr_data *d, int64_t context)
{
    tsr_packed *p;
    int64_t docs = tsr_data_docs(d, TSR_SPLIT_TRAIN), tokens = tsr_data_tokens(d, TSR_SPLIT_TRAIN), sum = 0,
            n;
    assert_int_equal(tsr_packed_make(&p, d, TSR_SPLIT_TRAIN, context, NULL), TSR_OK);
    uint8_t **seen = calloc((size_t)docs, sizeof *seen);
    assert_non_null(seen);
    for (int64_t i = 0; i < docs; i++) {
        seen[i] = calloc((size_t)tsr_data_doc_length(d, TSR_SPLIT_TRAIN, i), 1);
        assert_non_null(seen[i]);
    }
    int64_t waste_over_half = 0;
    for (int64_t s = 0; s < tsr_packed_count(p); s++) {
        const tsr_piece *x = tsr_packed_pieces(p, s, &n);
        int64_t here = 0;
        assert_true(n > 0);
        for (int64_t i = 0; i < n; i++) {
            int64_t length = tsr_data_doc_length(d, TSR_SPLIT_TRAIN, x[i].doc);
            assert_true(x[i].n > 0 && x[i].off >= 0 && x[i].off + x[i].n <= length);
            assert_true(length > context || x[i].n == length);
            assert_true(i == 0 || x[i].n <= x[i - 1].n); /* the longest first */
            for (int64_t k = 0; k < x[i].n; k++) {
                assert_int_equal(seen[x[i].doc][x[i].off + k], 0);
                seen[x[i].doc][x[i].off + k] = 1;
            }
            here += x[i].n;
        }
        assert_true(here <= context);
        waste_over_half += here * 2 <= context;
        sum += here;
    }
    assert_int_equal(sum, tokens); /* and none twice: every token once */
    assert_true(waste_over_half <= 1);
    for (int64_t i = 0; i < docs; i++) {
        free(seen[i]);
    }
    free(seen);
    tsr_packed_free(&p);
    assert_null(p);
}

static void test_packing(void **state)
{
    (void)state;
    enum { N = 2000 };
    static int64_t lengths[N];
    for (int64_t i = 0; i < N; i++) {
        lengths[i] = rnd() % 20 == 0 ? (int64_t)(rnd() % 3000) + 1 : (int64_t)(rnd() % 60) + 1;
    }
    put_lengths("p.jsonl", lengths, N);
    tsr_data *d = built("p.jsonl", "p", &(tsr_data_build_opts){ .no_eos = true }, NULL);
    static const int64_t contexts[] = {
        1, 2, 3, 7, 63, 64, 65, 100, 512, 1000, 4096, 5000, 1 << 20, 1 << 24
    };
    for (size_t i = 0; i < sizeof contexts / sizeof *contexts; i++) {
        check_packing(d, contexts[i]);
    }
    tsr_packed *p;
    assert_int_equal(tsr_packed_make(&p, d, TSR_SPLIT_TRAIN, 0, NULL), TSR_E_USAGE);
    assert_int_equal(tsr_packed_make(&p, d, TSR_SPLIT_TRAIN, (1 << 24) + 1, NULL), TSR_E_USAGE);
    assert_int_equal(tsr_packed_make(&p, d, TSR_SPLIT_HELD, 10, NULL), TSR_OK); /* no documents */
    assert_int_equal(tsr_packed_count(p), 0);
    tsr_packed_free(&p);
    tsr_data_close(&d);
}

/* Best fit, the longest first, by hand: 10, 10, 7 and 3, 6 and 4, 5 and 3 and 2. */
static void test_best_fit(void **state)
{
    (void)state;
    static const int64_t lengths[] = { 2, 3, 4, 5, 6, 7, 23 }, want[] = { 10, 10, 10, 10, 10 };
    put_lengths("b.jsonl", lengths, 7);
    tsr_data *d = built("b.jsonl", "b", &(tsr_data_build_opts){ .no_eos = true }, NULL);
    tsr_packed *p;
    assert_int_equal(tsr_packed_make(&p, d, TSR_SPLIT_TRAIN, 10, NULL), TSR_OK);
    assert_int_equal(tsr_packed_count(p), 5);
    for (int64_t s = 0; s < 5; s++) {
        int64_t n, sum = 0;
        const tsr_piece *x = tsr_packed_pieces(p, s, &n);
        for (int64_t i = 0; i < n; i++) {
            sum += x[i].n;
        }
        assert_int_equal(sum, want[s]);
    }
    tsr_packed_free(&p);
    tsr_data_close(&d);
}

static int make_dir(void **state)
{
    (void)state;
    dir = test_dir("data");
    return dir == NULL;
}

static int remove_dir(void **state)
{
    (void)state;
    test_dir_remove(dir);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),     cmocka_unit_test(test_long_document),
        cmocka_unit_test(test_window_borders), cmocka_unit_test(test_cancelled),
        cmocka_unit_test(test_packing),        cmocka_unit_test(test_best_fit),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
