/* test_tokenizer.c - ranks files, added tokens, pre-tokenisation and merges: answers of tiktoken
 * (tests/data/tokenizer), tables, and properties over random vocabularies and texts. */
#include "model/tokenizer_priv.h"
#include "model/utf8.h"

#include <jansson.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "tests/unit/random_text.h"

static const char *data_dir;

static tsr_tokenizer *open_bytes(bool with_added)
{
    tsr_tokenizer *t;
    OK(tsr_tokenizer_open(&t, &(tsr_tokenizer_opts){ .byte_added = with_added }, err));
    return t;
}

/* The text of ids decoded with flags, ended by NUL. */
static const char *decoded(const tsr_tokenizer *t, const int32_t *ids, size_t count, unsigned flags,
                           tsr_bytes *out)
{
    out->count = 0;
    OK(tsr_tokenizer_decode(t, ids, count, flags, out, err));
    OK(tok_append(out, "", 1, err));
    out->count--;
    return out->p;
}

static void expect_ids(const tsr_tokenizer *t, const char *text, unsigned flags, const int32_t *ids,
                       size_t count)
{
    tsr_tokens k = { 0 };
    OK(tsr_tokenizer_encode(t, text, strlen(text), flags, &k, err));
    if (k.count != count || (count > 0 && memcmp(k.ids, ids, count * sizeof *ids) != 0)) {
        for (size_t i = 0; i < k.count; i++) {
            print_error("%d ", k.ids[i]);
        }
        fail_msg("\"%s\": other ids", text);
    }
    tsr_tokens_free(&k);
}
#define EXPECT_IDS(t, text, flags, ...)                                                                      \
    expect_ids(t, text, flags, (const int32_t[]){ __VA_ARGS__ }, sizeof((const int32_t[]){ __VA_ARGS__ }) / 4)

static void refused(const tsr_tokenizer_opts *o, tsr_status want, const char *words)
{
    tsr_err err = { 0 };
    tsr_tokenizer *t = (tsr_tokenizer *)(uintptr_t)1;
    tsr_status st = tsr_tokenizer_open(&t, o, &err);
    assert_null(t);
    if (st != want || strstr(err.msg, words) == NULL) {
        fail_msg("%s \"%s\", expected %s \"%s\"", tsr_status_class(st), err.msg, tsr_status_class(want),
                 words);
    }
}

/* ---- ranks parser ------------------------------------------------------------------------------- */

static void test_ranks_spellings(void **state)
{
    (void)state;
    static const char *const ends[] = { "\n", "\r\n", " \n", "\n\n\n", "\t\r\n" };
    for (size_t e = 0; e < sizeof ends / sizeof ends[0]; e++) {
        tsr_bytes r = { 0 };
        line(&r, "he", 2, 1000, ends[e]); /* before its bytes, and with a gap between */
        for (int b = 255; b >= 0; b--) {
            uint8_t c = (uint8_t)b;
            line(&r, &c, 1, 2 * b + 7, b == 0 ? "" : ends[e]); /* the last line has no end */
        }
        tsr_tokenizer *t = open_ranks(&r);
        tsr_tokenizer_info i = tsr_tokenizer_info_of(t);
        assert_int_equal(i.ranks, 257);
        assert_int_equal(i.ids, 1001);
        assert_int_equal(i.longest, 2);
        assert_int_equal(i.repeated + i.added, 0);
        assert_int_equal(i.bos, -1);
        assert_false(i.built_in);
        EXPECT_IDS(t, "she", 0, 2 * 's' + 7, 1000);
        assert_int_equal(tsr_tokenizer_token(t, 1000).bytes, 2);
        assert_null(tsr_tokenizer_token(t, 8).p); /* in a gap */
        assert_null(tsr_tokenizer_token(t, -1).p);
        assert_null(tsr_tokenizer_token(t, 1001).p);
        assert_null(tsr_tokenizer_token(t, INT32_MAX).p);
        tsr_tokenizer_close(&t);
        assert_null(t);
        tsr_bytes_free(&r);
    }
}

static void test_ranks_refused(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        tsr_status st;
        const char *words;
    } bad[] = {
        { "", TSR_E_FORMAT, "mine: has no token" },
        { "\n\r\n\n", TSR_E_FORMAT, "mine: has no token" },
        { "IA== 4\nIQ==\n", TSR_E_FORMAT, "mine: line 2: has no rank" },
        { "IA== \n", TSR_E_FORMAT, "line 1: has no rank" },
        { " 4\n", TSR_E_FORMAT, "line 1: base64 of 0 digits" },
        { "IA= 4\n", TSR_E_FORMAT, "line 1: base64 of 3 digits" },
        { "\n\nI-== 4\n", TSR_E_FORMAT, "line 3: byte 0x2d is no base64 digit" },
        { "I=A= 4\n", TSR_E_FORMAT, "byte 0x3d" },
        { "==== 4\n", TSR_E_FORMAT, "byte 0x3d" },
        { "IB== 4\n", TSR_E_FORMAT, "bits left over" },
        { "IA== -4\n", TSR_E_FORMAT, "no decimal number" },
        { "IA== 4x\n", TSR_E_FORMAT, "no decimal number" },
        { "IA== 4 5\n", TSR_E_FORMAT, "no decimal number" },
        { "IA== 2097152\n", TSR_E_LIMIT, "rank beyond 2097151" },
        { "IA== 99999999999999999999999\n", TSR_E_LIMIT, "rank beyond" },
        { "IA== 4\nIQ== 5\nIg== 4\n", TSR_E_FORMAT, "line 3: rank 4 has a token already" },
        { "IA== 2097151\nIQ== 5\n", TSR_E_FORMAT, "no token is the single byte 0x00" },
        { "\xef\xbb\xbfIA== 4\n", TSR_E_FORMAT, "line 1: base64 of 7 digits" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        refused(&(tsr_tokenizer_opts){ .ranks = tsr_span_of(bad[i].text), .ranks_name = "mine" }, bad[i].st,
                bad[i].words);
    }
    tsr_bytes r = { 0 };
    byte_lines(&r, 0);
    tsr_span without_last = { r.p, r.count - 9 };
    refused(&(tsr_tokenizer_opts){ .ranks = without_last }, TSR_E_FORMAT,
            "tiktoken.model: no token is the single byte 0xff");
    static uint8_t big[TSR_TOKEN_BYTES_MAX + 3];
    line(&r, big, sizeof big, 256, "\n");
    refused(&(tsr_tokenizer_opts){ .ranks = span(&r) }, TSR_E_LIMIT, "line 257: a token of 65539 bytes");
    refused(&(tsr_tokenizer_opts){ .ranks = { "", TSR_RANKS_FILE_BYTES_MAX + 1 } }, TSR_E_LIMIT, "limit");
    refused(&(tsr_tokenizer_opts){ .piece_chars = ((size_t)1 << 24) + 1 }, TSR_E_USAGE, "characters");
    r.count = 0;
    byte_lines(&r, 10);
    refused(&(tsr_tokenizer_opts){ .ranks = span(&r), .vocab = 265 }, TSR_E_CONFLICT, "rank 265");
    tsr_bytes_free(&r);
}

/* Every id decodes, the last line's is used to encode. */
static void test_repeated_token(void **state)
{
    (void)state;
    tsr_bytes r = { 0 }, text = { 0 };
    line(&r, "ab", 2, 300, "\n");
    line(&r, "ab", 2, 299, "\n");
    byte_lines(&r, 0);
    line(&r, "a", 1, 298, "\n");
    tsr_tokenizer *t = open_ranks(&r);
    assert_int_equal(tsr_tokenizer_info_of(t).repeated, 2);
    EXPECT_IDS(t, "ab a", 0, 299, ' ', 298);
    assert_string_equal(decoded(t, (int32_t[]){ 300, 299, 97, 298 }, 4, 0, &text), "ababaa");
    tsr_tokenizer_close(&t);
    tsr_bytes_free(&r);
    tsr_bytes_free(&text);
}

static void test_built_in(void **state)
{
    (void)state;
    tsr_tokenizer *t = open_bytes(false);
    tsr_tokenizer_info i = tsr_tokenizer_info_of(t);
    assert_true(i.built_in && !i.own_pattern && !i.k3_names);
    assert_int_equal(i.ids, 256);
    assert_int_equal(i.added, 0);
    EXPECT_IDS(t, "Az\xe4", 0, 'A', 'z', 0xe4);
    EXPECT_IDS(t, "[BOS]", TSR_ENCODE_ADDED, '[', 'B', 'O', 'S', ']');
    tsr_tokenizer_close(&t);
    t = open_bytes(true);
    i = tsr_tokenizer_info_of(t);
    assert_true(i.built_in && i.k3_names);
    assert_int_equal(i.ids, 512);
    assert_int_equal(i.added, 256);
    assert_int_equal(i.bos, 256);
    assert_int_equal(i.eos, 257);
    assert_int_equal(i.unk, 510);
    assert_int_equal(i.pad, 511);
    EXPECT_IDS(t, "a<|open|>b<|reserved_token_300|>", TSR_ENCODE_ADDED, 'a', 259, 'b', 300);
    tsr_tokenizer_close(&t);
    tsr_tokenizer_close(&t); /* and NULL is fine */
    refused(&(tsr_tokenizer_opts){ .byte_added = true, .vocab = 511 }, TSR_E_CONFLICT, "id 511 ([PAD])");
}

/* ---- added tokens ------------------------------------------------------------------------------- */

static tsr_tokenizer *open_config(const char *config)
{
    tsr_tokenizer *t;
    OK(tsr_tokenizer_open(&t, &(tsr_tokenizer_opts){ .config = tsr_span_of(config) }, err));
    return t;
}

static void test_added(void **state)
{
    (void)state;
    tsr_tokenizer *t = open_config(
        "{\"x\": [1], \"added_tokens_decoder\": {"
        "\"256\": {\"content\": \"<a>\", \"special\": true, \"lstrip\": false},"
        "\"300\": {\"content\": \"<a><b>\"},"
        "\"257\": {\"content\": \"\\u4f60\", \"special\": false},"
        "\"0270\": {\"content\": \"<\"}},"
        "\"bos_token\": \"<a>\", \"eos_token\": {\"content\": \"<\"}, \"pad_token\": null,"
        "\"unk_token\": \"nowhere\"}");
    tsr_tokenizer_info i = tsr_tokenizer_info_of(t);
    assert_int_equal(i.added, 4);
    assert_int_equal(i.ids, 301);
    assert_int_equal(i.bos, 256);
    assert_int_equal(i.eos, 270);
    assert_int_equal(i.pad, -1);
    assert_int_equal(i.unk, -1);
    /* the longest of those that begin at the leftmost place */
    EXPECT_IDS(t, "x<a><b>", TSR_ENCODE_ADDED, 'x', 300);
    EXPECT_IDS(t, "<a><a><b", TSR_ENCODE_ADDED, 256, 256, 270, 'b');
    EXPECT_IDS(t, "\xe4\xbd\xa0<", TSR_ENCODE_ADDED, 257, 270);
    EXPECT_IDS(t, "\xe4\xbd", TSR_ENCODE_ADDED, 0xe4, 0xbd);
    /* never without the flag */
    EXPECT_IDS(t, "<a>\xe4\xbd\xa0", 0, '<', 'a', '>', 0xe4, 0xbd, 0xa0);
    bool special = false;
    assert_true(tsr_tokenizer_is_added(t, 256, &special) && special);
    assert_true(tsr_tokenizer_is_added(t, 300, &special) && !special);
    assert_false(tsr_tokenizer_is_added(t, 65, &special) || special);
    assert_false(tsr_tokenizer_is_added(t, -5, NULL));
    assert_int_equal(tsr_tokenizer_added_id(t, "<a>"), 256);
    assert_int_equal(tsr_tokenizer_added_id(t, "<a><"), -1);
    tsr_bytes text = { 0 };
    int32_t ids[] = { 'A', 256, 300, 0xe4, 256, 0xbd, 0xa0 };
    assert_string_equal(decoded(t, ids, 7, 0, &text), "A<a><a><b>\xef\xbf\xbd<a>\xef\xbf\xbd\xef\xbf\xbd");
    assert_string_equal(decoded(t, ids, 7, TSR_DECODE_SKIP_SPECIAL, &text), "A<a><b>\xe4\xbd\xa0");
    assert_string_equal(decoded(t, ids, 7, TSR_DECODE_SKIP_ADDED, &text), "A\xe4\xbd\xa0");
    assert_string_equal(decoded(t, ids, 7, TSR_DECODE_RAW, &text), "A<a><a><b>\xe4<a>\xbd\xa0");
    tsr_bytes_free(&text);
    tsr_tokenizer_close(&t);
}

static void test_added_refused(void **state)
{
    (void)state;
    static const struct {
        const char *entries;
        tsr_status st;
        const char *words;
    } bad[] = {
        { "\"65\": {\"content\": \"x\"}", TSR_E_CONFLICT, "added_tokens_decoder.65: the ranks have" },
        { "\"300\": {\"content\": \"x\"}, \"301\": {\"content\": \"x\"}", TSR_E_CONFLICT,
          "300 and 301 have the same" },
        { "\"300\": {\"content\": \"x\"}, \"0300\": {\"content\": \"y\"}", TSR_E_CONFLICT,
          "id 300 comes twice" },
        { "\"300\": {\"content\": \"\"}", TSR_E_FORMAT, "300.content" },
        { "\"300\": {}", TSR_E_FORMAT, "300.content" },
        { "\"300\": 5", TSR_E_FORMAT, "300.content" },
        { "\"300\": {\"content\": \"x\", \"special\": 1}", TSR_E_FORMAT, "300.special" },
        { "\"3e2\": {\"content\": \"x\"}", TSR_E_FORMAT, "\"3e2\" is no token id" },
        { "\"\": {\"content\": \"x\"}", TSR_E_FORMAT, "is no token id" },
        { "\"-1\": {\"content\": \"x\"}", TSR_E_FORMAT, "is no token id" },
        { "\"2097152\": {\"content\": \"x\"}", TSR_E_LIMIT, "2097152 is beyond" },
        { "\"99999999999999999999\": {\"content\": \"x\"}", TSR_E_LIMIT, "is beyond" },
        { "\"700\": {\"content\": \"x\"}", TSR_E_CONFLICT, "id 700 (x) is outside the vocabulary of 600" },
        { "\"300\": {\"content\": \"x\\u0000\"}", TSR_E_FORMAT, "line 1" },
        { "\"300\": {\"content\": \"x\"}, \"300\": {\"content\": \"x\"}", TSR_E_FORMAT, "line 1" },
    };
    char text[400];
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        (void)snprintf(text, sizeof text, "{\"added_tokens_decoder\": {%s}}", bad[i].entries);
        refused(&(tsr_tokenizer_opts){ .config = tsr_span_of(text), .vocab = 600 }, bad[i].st, bad[i].words);
    }
    refused(&(tsr_tokenizer_opts){ .config = { "", 0 } }, TSR_E_FORMAT, "tokenizer_config.json: line");
    refused(&(tsr_tokenizer_opts){ .config = { "[]", 2 }, .config_name = "c" }, TSR_E_FORMAT,
            "c: it is no JSON object");
    refused(&(tsr_tokenizer_opts){ .config = tsr_span_of("{\"added_tokens_decoder\": []}") }, TSR_E_FORMAT,
            "added_tokens_decoder is no JSON object");
    char name[TSR_ADDED_BYTES_MAX + 2] = "", big[TSR_ADDED_BYTES_MAX + 100];
    memset(name, 'x', sizeof name - 1);
    (void)snprintf(big, sizeof big, "{\"added_tokens_decoder\": {\"300\": {\"content\": \"%s\"}}}", name);
    refused(&(tsr_tokenizer_opts){ .config = tsr_span_of(big) }, TSR_E_LIMIT, "1025 bytes");
    tsr_tokenizer *t = open_config("{}"); /* says nothing, so there are none */
    assert_int_equal(tsr_tokenizer_info_of(t).added, 0);
    tsr_tokenizer_close(&t);
}

/* A vocabulary of K3's size gets K3's names, or the config's and reserved ones for the rest. */
static void test_k3_names(void **state)
{
    (void)state;
    tsr_bytes r = { 0 };
    byte_lines(&r, 0);
    for (int32_t id = 256; id < K3_RANKS - 1; id++) {
        uint8_t token[3] = { (uint8_t)(id >> 16), (uint8_t)(id >> 8), (uint8_t)id };
        line(&r, token, 3, id, "\n");
    }
    tsr_tokenizer *t = open_ranks(&r);
    assert_int_equal(tsr_tokenizer_info_of(t).added, 0); /* one short */
    tsr_tokenizer_close(&t);
    line(&r, "last", 4, K3_RANKS - 1, "\n");
    OK(tsr_tokenizer_open(&t, &(tsr_tokenizer_opts){ .ranks = span(&r), .vocab = 163840 }, err));
    static const struct {
        const char *text;
        int32_t id;
    } names[] = { { "[BOS]", 163584 },
                  { "[EOS]", 163585 },
                  { "<|end_of_msg|>", 163586 },
                  { "<|open|>", 163587 },
                  { "<|close|>", 163588 },
                  { "<|sep|>", 163589 },
                  { "[EOT]", 163593 },
                  { "<|media_pad|>", 163605 },
                  { "<osagent_mode>", 163649 },
                  { "[UNK]", 163838 },
                  { "[PAD]", 163839 },
                  { "<|reserved_token_163592|>", 163592 },
                  { "<|reserved_token_163837|>", 163837 },
                  { "<|reserved_token_163839|>", -1 } };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        assert_int_equal(tsr_tokenizer_added_id(t, names[i].text), names[i].id);
    }
    tsr_tokenizer_info info = tsr_tokenizer_info_of(t);
    assert_int_equal(info.ids, 163840);
    assert_int_equal(info.bos, 163584);
    bool special;
    assert_true(tsr_tokenizer_is_added(t, 163587, &special) && !special);
    assert_true(tsr_tokenizer_is_added(t, 163585, &special) && special);
    tsr_tokenizer_close(&t);
    tsr_tokenizer_opts o = { .ranks = span(&r),
                             .config = tsr_span_of(
                                 "{\"added_tokens_decoder\": {\"163584\": {\"content\": \"B\"}, "
                                 "\"163839\": {\"content\": \"P\"}}, \"bos_token\": \"B\"}") };
    OK(tsr_tokenizer_open(&t, &o, err));
    info = tsr_tokenizer_info_of(t);
    assert_int_equal(info.added, 256);
    assert_int_equal(info.bos, 163584);
    assert_int_equal(info.eos, -1);
    assert_false(info.k3_names);
    assert_int_equal(tsr_tokenizer_added_id(t, "[BOS]"), -1);
    assert_int_equal(tsr_tokenizer_added_id(t, "<|reserved_token_163587|>"), 163587);
    assert_int_equal(tsr_tokenizer_added_id(t, "<|reserved_token_163839|>"), -1);
    tsr_tokenizer_close(&t);
    tsr_bytes_free(&r);
}

/* ---- pre-tokenisation --------------------------------------------------------------------------- */

typedef struct joined {
    tsr_bytes text;
} joined;

static tsr_status join(void *payload, const uint8_t *piece, size_t n, tsr_err *err)
{
    joined *j = payload;
    if (j->text.count > 0) {
        TSR_TRY(tok_append(&j->text, "|", 1, err));
    }
    return tok_append(&j->text, piece, n, err);
}

/* Pieces of text under pattern, with | between them. */
static const char *pieces(pretoken_run *r, const char *text, joined *j)
{
    j->text.count = 0;
    OK(pretoken_each(r, (const uint8_t *)text, strlen(text), join, j, err));
    OK(tok_append(&j->text, "", 1, err));
    return j->text.p;
}

static void test_pieces(void **state)
{
    (void)state;
    static const char *const rows[][2] = {
        /* 1: Han is a piece of its own; marks of punctuation used with Han are not Han */
        { "你好世界", "你好世界" },
        { "你好hello世界", "你好|hello|世界" },
        { "hello你好", "hello|你好" },
        { "A你b", "A|你|b" },
        { "你好。世界，", "你好|。|世界|，" },
        { "々〇〻、〆", "々〇〻|、〆" }, /* the first three have the script Han, the others are common */
        { " 你", " |你" },
        { "日本語のテキスト", "日本語|のテキスト" },
        /* 2 and 3: words by case, one character in front, contractions behind */
        { "Hello world", "Hello| world" },
        { "helloWorld McDonald", "hello|World| Mc|Donald" },
        { "HTMLParser ABC", "HTMLParser| ABC" },
        { "(word) -x _y", "(word|)| -|x| _|y" },
        { "it's IT'S we'll WE'LL I'm he'd you've they're don't",
          "it's| IT'S| we'll| WE'LL| I'm| he'd| you've| they're| don't" },
        { "it's's dogs'", "it's|'s| dogs|'" },
        { "it\xe2\x80\x99s", "it|\xe2\x80\x99s" }, /* the curly apostrophe contracts nothing */
        { "'tis x'y", "'tis| x|'y" },
        { "e\xcc\x81t\xcc\x81 \xcc\x81", "e\xcc\x81t\xcc\x81| \xcc\x81" },
        { "\tword\n", "\tword|\n" },
        { "caf\xc3\xa9 \xc3\x9c"
          "ber",
          "caf\xc3\xa9| \xc3\x9c"
          "ber" },
        /* 4: up to three digits, of any script; the blank before stays alone */
        { "1", "1" },
        { "1234567", "123|456|7" },
        { "a1b22", "a|1|b|22" },
        { "in 2026", "in| |202|6" },
        { "3.14", "3|.|14" },
        { "\xd9\xa3\xd9\xa4\xc2\xbd\xe2\x85\xa7", "\xd9\xa3\xd9\xa4\xc2\xbd|\xe2\x85\xa7" },
        /* 5: a blank, punctuation, line ends */
        { "a != b", "a| !=| b" },
        { "x;\n\n\ny", "x|;\n\n\n|y" },
        { "  ...\r\n z", " | ...\r\n| z" },
        { "\xf0\x9f\x98\x80\xf0\x9f\x9a\x80", "\xf0\x9f\x98\x80\xf0\x9f\x9a\x80" },
        /* 6: white space up to the last line end */
        { "a\n\nb", "a|\n\n|b" },
        { "a \t\r\n  b", "a| \t\r\n| | b" },
        { "\n \n  x", "\n \n| | x" },
        /* 7: white space but for its last character, which the next piece takes; all of it at the end */
        { "a    b", "a|   | b" },
        { "a    7", "a|   | |7" },
        { "hello   ", "hello|   " },
        { "     ", "     " },
        { "a\t\tb", "a|\t|\tb" },
        { "\xc2\xa0\xe3\x80\x80x", "\xc2\xa0|\xe3\x80\x80x" },
        /* 8 */
        { "a  \xe4\xbd\xa0", "a| | |\xe4\xbd\xa0" },
        /* the Mongolian vowel separator is no white space, though PCRE2's \s says so; nor is 1C, though Python does */
        { "a \xe1\xa0\x8e", "a| \xe1\xa0\x8e" },
        { "a \x1c\x1c b", "a| \x1c\x1c| b" },
        /* bytes that are no UTF-8 */
        { "a\xff"
          "b",
          "a|\xff|b" },
        { "\xe4\xbd \xf0\x9f\x98", "\xe4|\xbd| |\xf0|\x9f|\x98" },
        { "\xed\xa0\x80\xc0\xaf", "\xed|\xa0|\x80|\xc0|\xaf" },
        { "", "" },
    };
    for (int no_jit = 0; no_jit < 2; no_jit++) {
        pretoken *p;
        pretoken_run *r;
        joined j = { { 0 } };
        OK(pretoken_open(&p, NULL, no_jit, err));
        OK(pretoken_run_open(&r, p, err));
        assert_int_equal(pretoken_has_jit(p) && no_jit, 0);
        for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
            assert_string_equal(pieces(r, rows[i][0], &j), rows[i][1]);
        }
        pretoken_run_close(&r);
        pretoken_close(&p);
        tsr_bytes_free(&j.text);
    }
}

static void test_own_pattern(void **state)
{
    (void)state;
    static const struct {
        const char *pattern, *text, *want;
    } rows[] = {
        { "\\w+", "ab, cd!", "ab|, |cd|!" }, /* what does not match is a piece too */
        { "x*", "axxb", "a|xx|b" },          /* empty matches do not count */
        { "b\\Kc", "abcbd", "ab|c|bd" },     { "(?<=a)b", "abb", "a|b|b" }, { "q", "none", "none" },
    };
    joined j = { { 0 } };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        pretoken *p;
        pretoken_run *r;
        OK(pretoken_open(&p, rows[i].pattern, false, err));
        OK(pretoken_run_open(&r, p, err));
        assert_true(pretoken_is_own(p));
        assert_string_equal(pieces(r, rows[i].text, &j), rows[i].want);
        pretoken_run_close(&r);
        pretoken_close(&p);
    }
    tsr_bytes_free(&j.text);
    refused(&(tsr_tokenizer_opts){ .pattern = "[\\p{L}&&[^\\p{Han}]]" }, TSR_E_UNSUPPORTED, "&&");
    refused(&(tsr_tokenizer_opts){ .pattern = "(ab" }, TSR_E_FORMAT, "pattern: byte 3");
    char *big = calloc(1, 70000);
    assert_non_null(big);
    memset(big, 'x', 69999);
    refused(&(tsr_tokenizer_opts){ .pattern = big }, TSR_E_FORMAT, "pattern");
    free(big);
}

/* K3's own spelling is recognised and means K3's. */
static void test_k3_spelling(void **state)
{
    (void)state;
    static const char k3[] =
        "[\\p{Han}]+|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]*"
        "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        "|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]+"
        "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        "|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
    tsr_tokenizer *t;
    OK(tsr_tokenizer_open(&t, &(tsr_tokenizer_opts){ .pattern = k3 }, err));
    assert_false(tsr_tokenizer_info_of(t).own_pattern);
    tsr_tokenizer_close(&t);
}

/* An own pattern that explodes is stopped; the output stays as it was. */
static void test_bad_matches(void **state)
{
    (void)state;
    char text[3000];
    memset(text, 'a', sizeof text);
    for (int no_jit = 0; no_jit < 2; no_jit++) {
        tsr_tokenizer *t;
        tsr_err e;
        tsr_tokens k = { 0 };
        OK(tsr_tokenizer_open(&t, &(tsr_tokenizer_opts){ .pattern = "z|(?:a|a)+[bc]", .no_jit = no_jit },
                              err));
        OK(tsr_tokenizer_encode(t, "zz", 2, 0, &k, err));
        assert_int_equal(tsr_tokenizer_encode(t, text, sizeof text, 0, &k, &e), TSR_E_LIMIT);
        assert_non_null(strstr(e.msg, "after 0 of 3000 bytes"));
        assert_int_equal(k.count, 2);
        tsr_tokenizer_close(&t);
        tsr_tokens_free(&k);
    }
}

/* ---- answers of tiktoken ------------------------------------------------------------------------ */

static tsr_span file(const char *name)
{
    char path[1024];
    (void)snprintf(path, sizeof path, "%s/%s", data_dir, name);
    FILE *f = fopen(path, "rb");
    if (f == NULL) {
        fail_msg("%s is missing", path);
    }
    static char *buf;
    buf = malloc(1 << 20);
    assert_non_null(buf);
    size_t n = fread(buf, 1, 1 << 20, f);
    (void)fclose(f);
    return (tsr_span){ buf, n };
}

static size_t unhex(const char *hex, uint8_t *out)
{
    size_t n = 0;
    for (unsigned b; sscanf(hex + 2 * n, "%2x", &b) == 1; n++) {
        out[n] = (uint8_t)b;
    }
    return n;
}

static void golden(const tsr_tokenizer_opts *base, json_t *c)
{
    static uint8_t text[1 << 16];
    size_t n = unhex(json_string_value(json_object_get(c, "text")), text);
    tsr_tokenizer_opts o = *base;
    o.piece_chars = (size_t)json_integer_value(json_object_get(c, "piece"));
    o.run_chars = (size_t)json_integer_value(json_object_get(c, "run"));
    unsigned flags = json_is_true(json_object_get(c, "added")) ? TSR_ENCODE_ADDED : 0;
    tsr_tokenizer *t;
    tsr_tokens k = { 0 };
    tsr_bytes back = { 0 };
    OK(tsr_tokenizer_open(&t, &o, err));
    OK(tsr_tokenizer_encode(t, text, n, flags, &k, err));
    json_t *ids = json_object_get(c, "ids");
    assert_int_equal(k.count, json_array_size(ids));
    for (size_t i = 0; i < k.count; i++) {
        assert_int_equal(k.ids[i], json_integer_value(json_array_get(ids, i)));
    }
    OK(tsr_tokenizer_decode(t, k.ids, k.count, 0, &back, err));
    assert_int_equal(back.count, n);
    assert_memory_equal(back.p != NULL ? back.p : "", text, n);
    tsr_bytes_free(&back);
    tsr_tokens_free(&k);
    tsr_tokenizer_close(&t);
}

static void test_goldens(void **state)
{
    (void)state;
    tsr_span cases = file("cases.json");
    tsr_tokenizer_opts o = { .ranks = file("ranks.txt"), .config = file("config.json") };
    json_t *root = json_loadb(cases.p, cases.bytes, 0, NULL);
    assert_true(json_array_size(root) > 200);
    for (size_t i = 0; i < json_array_size(root); i++) {
        golden(&o, json_array_get(root, i));
    }
    json_decref(root);
    free((void *)(uintptr_t)cases.p);
    free((void *)(uintptr_t)o.ranks.p);
    free((void *)(uintptr_t)o.config.p);
}

/* ---- merges ------------------------------------------------------------------------------------- */

/* The definition, word for word: the adjacent pair of lowest rank, the leftmost of equals, until there is none. */
static size_t naive(const vocab *v, const uint8_t *p, size_t n, int32_t *ids)
{
    size_t cut[400], parts = n;
    for (size_t i = 0; i <= n; i++) {
        cut[i] = i;
    }
    while (vocab_find(v, p, n) < 0) {
        size_t best = SIZE_MAX;
        int32_t rank = INT32_MAX;
        for (size_t i = 0; i + 2 <= parts; i++) {
            int32_t r = vocab_find(v, p + cut[i], cut[i + 2] - cut[i]);
            if (r >= 0 && r < rank) {
                rank = r;
                best = i;
            }
        }
        if (best == SIZE_MAX) {
            for (size_t i = 0; i < parts; i++) {
                ids[i] = vocab_find(v, p + cut[i], cut[i + 1] - cut[i]);
            }
            return parts;
        }
        memmove(cut + best + 1, cut + best + 2, (parts - best - 1) * sizeof cut[0]);
        parts--;
    }
    ids[0] = vocab_find(v, p, n);
    return 1;
}

/* Random tokens, most of them two others put together; ranks in random order with gaps. letters: of the alphabet. */
static tsr_tokenizer *random_tokenizer(uint64_t *seed, int merges, unsigned letters)
{
    tsr_bytes r = { 0 };
    uint8_t tokens[1500][24];
    size_t size[1500];
    int count = 0;
    int32_t rank[1500];
    int32_t next = 0;
    for (int i = 0; i < 256; i++) {
        tokens[count][0] = (uint8_t)i;
        size[count++] = 1;
    }
    /* a small alphabet runs out of new tokens: the tries are counted */
    for (int tries = 0; tries < 20 * merges && count < 256 + merges; tries++) {
        int part[2];
        for (int i = 0; i < 2; i++) {
            int merged = count - 256;
            part[i] = merged == 0 || rnd(seed, 2) ? (int)(97 + rnd(seed, letters))
                                                  : 256 + (int)rnd(seed, (uint64_t)merged);
        }
        size_t n = size[part[0]] + size[part[1]];
        if (n > 24) {
            continue;
        }
        memcpy(tokens[count], tokens[part[0]], size[part[0]]);
        memcpy(tokens[count] + size[part[0]], tokens[part[1]], size[part[1]]);
        bool old = false;
        for (int i = 256; i < count && !old; i++) {
            old = size[i] == n && memcmp(tokens[i], tokens[count], n) == 0;
        }
        size[count] = n;
        count += !old;
    }
    for (int i = 0; i < count; i++) {
        next += 1 + (int32_t)rnd(seed, 2);
        rank[i] = next;
    }
    for (int i = count - 1; i > 0; i--) {
        int k = (int)rnd(seed, (uint64_t)i + 1);
        int32_t swap = rank[i];
        rank[i] = rank[k], rank[k] = swap;
    }
    for (int i = 0; i < count; i++) {
        line(&r, tokens[i], size[i], rank[i], "\n");
    }
    tsr_tokenizer *t = open_ranks(&r);
    tsr_bytes_free(&r);
    return t;
}

static void test_merges(void **state)
{
    (void)state;
    uint64_t seed = 3;
    bpe_run run = { 0 };
    tsr_tokens k = { 0 };
    size_t merged = 0, whole = 0;
    for (int v = 0; v < 60; v++) {
        unsigned letters = 1 + (unsigned)rnd(&seed, 5);
        tsr_tokenizer *t = random_tokenizer(&seed, (int)rnd(&seed, 300), letters);
        for (int round = 0; round < 300; round++) {
            uint8_t piece[300];
            int32_t want[300];
            size_t n = 1 + rnd(&seed, round % 10 == 0 ? 300 : 20);
            for (size_t i = 0; i < n; i++) {
                piece[i] = (uint8_t)(rnd(&seed, 30) == 0 ? rnd(&seed, 256) : 97 + rnd(&seed, letters));
            }
            size_t count = naive(&t->vocab, piece, n, want);
            k.count = 0;
            OK(bpe_piece(&t->vocab, &run, piece, n, &k, err));
            assert_int_equal(k.count, count);
            assert_memory_equal(k.ids, want, count * sizeof want[0]);
            merged += count < n;
            whole += count == 1 && n > 1;
        }
        tsr_tokenizer_close(&t);
    }
    assert_true(merged > 5000 && whole > 100);
    bpe_run_free(&run);
    tsr_tokens_free(&k);
}

/* ---- round trips -------------------------------------------------------------------------------- */

static void test_round_trip(void **state)
{
    (void)state;
    uint64_t seed = 9;
    tsr_tokenizer *t[3] = { random_tokenizer(&seed, 200, 5), open_bytes(true), NULL };
    tsr_tokenizer_opts o = {
        .ranks = file("ranks.txt"), .config = file("config.json"), .piece_chars = 50, .run_chars = 7
    };
    OK(tsr_tokenizer_open(&t[2], &o, err));
    free((void *)(uintptr_t)o.ranks.p);
    free((void *)(uintptr_t)o.config.p); /* the tokenizer has copies */
    static uint8_t text[600];
    tsr_tokens k = { 0 };
    tsr_bytes back = { 0 };
    for (int round = 0; round < 6000; round++) {
        const tsr_tokenizer *which = t[round % 3];
        int kind = (int)rnd(&seed, 3);
        size_t n = random_text(&seed, kind, text, round % 20 == 0 ? sizeof text : 60);
        k.count = back.count = 0;
        OK(tsr_tokenizer_encode(which, text, n, round % 2 ? TSR_ENCODE_ADDED : 0, &k, err));
        OK(tsr_tokenizer_decode(which, k.ids, k.count, kind == 0 ? 0 : TSR_DECODE_RAW, &back, err));
        assert_int_equal(back.count, n);
        assert_true(n == 0 || memcmp(back.p, text, n) == 0);
    }
    tsr_tokens_free(&k);
    tsr_bytes_free(&back);
    for (int i = 0; i < 3; i++) {
        tsr_tokenizer_close(&t[i]);
    }
}

/* Cuts: a run of more than run_chars gives pieces of that length, counted in characters; so do windows. */
static void test_cuts(void **state)
{
    (void)state;
    tsr_bytes r = { 0 };
    byte_lines(&r, 0);
    static const char *const tokens[] = { "aa", "aaa", "aaaa", "  ", "   ", "\xc3\xa9\xc3\xa9", "\xc3\xa9" };
    for (int i = 0; i < 7; i++) {
        line(&r, tokens[i], strlen(tokens[i]), 256 + i, "\n");
    }
    tsr_tokenizer *t;
    OK(tsr_tokenizer_open(&t, &(tsr_tokenizer_opts){ .ranks = span(&r), .run_chars = 3 }, err));
    EXPECT_IDS(t, "aaaa", 0, 257, 'a');
    EXPECT_IDS(t, "aaaaaa", 0, 257, 257);
    EXPECT_IDS(t, "    ", 0, 260, ' ');
    EXPECT_IDS(t, "\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9", 0, 261, 262, 262);
    EXPECT_IDS(t, "aa aa aa", 0, 256, ' ', 256, ' ', 256);
    tsr_tokenizer_close(&t);
    OK(tsr_tokenizer_open(&t, &(tsr_tokenizer_opts){ .ranks = span(&r), .piece_chars = 4 }, err));
    EXPECT_IDS(t, "aaaaaaa", 0, 258, 257);
    EXPECT_IDS(t, "aaa aaa", 0, 257, ' ', 257);
    EXPECT_IDS(t, "    aaaa", 0, 259, 259, 258); /* all four blanks are one window: none goes to the word */
    tsr_tokenizer_close(&t);
    t = open_ranks(&r);
    EXPECT_IDS(t, "aaaaaaa", 0, 258, 257);
    EXPECT_IDS(t, "    aaaa", 0, 260, ' ', 258);
    tsr_tokenizer_close(&t);
    tsr_bytes_free(&r);
}

/* A megabyte of one character, with and without the cuts: neither pattern nor merges may be quadratic (the test's
 * time limit says so). */
static void test_long_runs(void **state)
{
    (void)state;
    static const char *const units[] = { "a",
                                         "A",
                                         " ",
                                         "\n",
                                         "!",
                                         "\xff",
                                         "\xe3\x81\x82",
                                         "\xcc\x81",
                                         "\xe4\xbd\xa0",
                                         "1",
                                         "aA",
                                         " 'l",
                                         "\n ",
                                         "<|reserved_token_" };
    uint64_t seed = 4;
    tsr_tokenizer *t[3] = { random_tokenizer(&seed, 60, 1), NULL, NULL };
    tsr_bytes r = { 0 };
    byte_lines(&r, 0);
    int32_t rank = 256;
    char run[1025];
    for (size_t n = 2; n <= 1024; n *= 2) {
        memset(run, 'a', n);
        line(&r, run, n, rank++, "\n");
        memset(run, ' ', n);
        line(&r, run, n, rank++, "\n");
    }
    tsr_tokenizer_opts o = { .ranks = span(&r), .piece_chars = 1 << 24, .run_chars = 1 << 24 };
    OK(tsr_tokenizer_open(&t[1], &o, err));
    o.no_jit = true;
    OK(tsr_tokenizer_open(&t[2], &o, err));
    const size_t size = 1 << 20;
    char *text = malloc(size);
    assert_non_null(text);
    tsr_tokens k = { 0 };
    tsr_bytes back = { 0 };
    for (size_t u = 0; u < sizeof units / sizeof units[0]; u++) {
        size_t unit = strlen(units[u]);
        for (size_t i = 0; i < size; i++) {
            text[i] = units[u][i % unit];
        }
        for (int i = 0; i < 3; i++) {
            k.count = back.count = 0;
            OK(tsr_tokenizer_encode(t[i], text, size, TSR_ENCODE_ADDED, &k, err));
            OK(tsr_tokenizer_decode(t[i], k.ids, k.count, TSR_DECODE_RAW, &back, err));
            assert_int_equal(back.count, size);
            assert_memory_equal(back.p, text, size);
            if (i > 0 && units[u][0] == 'a' && unit == 1) {
                assert_int_equal(k.count, size / 1024);
            }
        }
    }
    free(text);
    tsr_tokens_free(&k);
    tsr_bytes_free(&back);
    tsr_bytes_free(&r);
    for (int i = 0; i < 3; i++) {
        tsr_tokenizer_close(&t[i]);
    }
}

/* ---- threads ------------------------------------------------------------------------------------ */

static const tsr_tokenizer *shared;

static void *encode_often(void *payload)
{
    tsr_tokens *k = payload;
    static const char text[] =
        "One tokenizer, many threads: 你好 don't 12345 aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\n";
    for (int i = 0; i < 200; i++) {
        k->count = 0;
        if (tsr_tokenizer_encode(shared, text, sizeof text - 1, TSR_ENCODE_ADDED, k, NULL) != TSR_OK) {
            k->count = 0;
            break;
        }
    }
    return NULL;
}

static void test_threads(void **state)
{
    (void)state;
    uint64_t seed = 77;
    tsr_tokenizer *t = random_tokenizer(&seed, 200, 5);
    shared = t;
    pthread_t threads[4];
    tsr_tokens k[4] = { { 0 } };
    for (int i = 0; i < 4; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, encode_often, &k[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        assert_true(k[i].count > 20);
        assert_int_equal(k[i].count, k[0].count);
        assert_memory_equal(k[i].ids, k[0].ids, k[0].count * sizeof(int32_t));
    }
    for (int i = 0; i < 4; i++) {
        tsr_tokens_free(&k[i]);
    }
    tsr_tokenizer_close(&t);
}

int main(int argc, char **argv)
{
    data_dir = argc > 1 ? argv[1] : "tests/data/tokenizer";
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ranks_spellings),
        cmocka_unit_test(test_ranks_refused),
        cmocka_unit_test(test_repeated_token),
        cmocka_unit_test(test_built_in),
        cmocka_unit_test(test_added),
        cmocka_unit_test(test_added_refused),
        cmocka_unit_test(test_k3_names),
        cmocka_unit_test(test_pieces),
        cmocka_unit_test(test_own_pattern),
        cmocka_unit_test(test_k3_spelling),
        cmocka_unit_test(test_bad_matches),
        cmocka_unit_test(test_goldens),
        cmocka_unit_test(test_merges),
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_cuts),
        cmocka_unit_test(test_long_runs),
        cmocka_unit_test(test_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
