/* test_cli_opt.c - the option parser, numbers, globs, progress and text output of the program. */
#include "cli/glob.h"
#include "cli/opt.h"
#include "cli/out.h"
#include "cli/progress.h"

#include <fnmatch.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

static const tsr_opt own[] = {
    { "long", 'l', TSR_OPT_FLAG, NULL, 0, 0, "x" },
    { "all", 'r', TSR_OPT_FLAG, NULL, 0, 0, "x" },
    { "output", 'o', TSR_OPT_TEXT, "FILE", 0, 0, "x" },
    { "include", 0, TSR_OPT_LIST, "GLOB", 0, 0, "x" },
    { "experts", 0, TSR_OPT_UINT, "N", 1, 65536, "x" },
    { "format", 0, TSR_OPT_CHOICE, "text|raw|npy", 0, 0, "x" },
    { "temperature", 0, TSR_OPT_REAL, "X", 0, 100, "x" },
    { "prompt", 0, TSR_OPT_STRING, "TEXT", 0, 0, "x" },
    { "compress", 0, TSR_OPT_MAYBE, "LEVEL", 1, 19, "x" },
    TSR_OPT_END,
};
static const tsr_opt common[] = {
    { "mem-limit", 0, TSR_OPT_SIZE, "SIZE", 1, UINT64_MAX, "x" },
    TSR_OPT_END,
};

#define PARSE(a, err, ...)                                                                                   \
    parse_words((a), (err), (char *[]){ __VA_ARGS__, NULL }, sizeof(char *[]){ __VA_ARGS__ } / sizeof(char *))

static tsr_status parse_words(tsr_args *a, tsr_err *err, char **words, size_t count)
{
    return tsr_opt_parse(a, "ls", own, common, (int)count, words, err);
}

/* ---- options --------------------------------------------------------------------------------------------
 */

static void test_forms_of_options(void **state)
{
    (void)state;
    tsr_args a;
    tsr_err err;
    assert_int_equal(PARSE(&a, &err, "one", "-lr", "--output", "f", "--include=a*", "two", "--include", "b=c",
                           "--experts=12", "--compress", "3", "--mem-limit", "4MiB", "-", "--", "--long"),
                     TSR_OK);
    assert_true(tsr_opt_given(&a, "long") && tsr_opt_given(&a, "all"));
    assert_string_equal(tsr_opt_text(&a, "output", NULL), "f");
    assert_int_equal(tsr_opt_get(&a, "include")->list_count, 2);
    assert_string_equal(tsr_opt_get(&a, "include")->list[0], "a*");
    assert_string_equal(tsr_opt_get(&a, "include")->list[1], "b=c");
    assert_null(tsr_opt_get(&a, "include")->list[2]);
    assert_int_equal(tsr_opt_number(&a, "experts", 0), 12);
    assert_int_equal(tsr_opt_number(&a, "mem-limit", 0), 4 << 20);
    assert_true(tsr_opt_given(&a, "compress"));
    assert_int_equal(tsr_opt_number(&a, "compress", 7), 7); /* no value: the fallback; "3" is an operand */
    assert_int_equal(a.operand_count, 5);
    assert_string_equal(a.operands[0], "one");
    assert_string_equal(a.operands[1], "two");
    assert_string_equal(a.operands[2], "3");
    assert_string_equal(a.operands[3], "-");
    assert_string_equal(a.operands[4], "--long");
    assert_null(a.operands[5]);
    tsr_args_free(&a);
}

static void test_reals_and_empty_texts(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        double value;
    } good[] = { { "0", 0 },       { "0.7", 0.7 }, { ".5", 0.5 }, { "1.", 1 },
                 { "1e-3", 1e-3 }, { "2E+1", 20 }, { "100", 100 } };
    static const char *const bad[] = { "",   ".",  "-1",  "+1",    "0x10", "nan",     "inf",   "1e", "1e+",
                                       "1 ", " 1", "1,5", "1.5.2", "e5",   "100.001", "1e999", "--" };
    tsr_args a;
    tsr_err err;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        assert_int_equal(PARSE(&a, &err, "--temperature", (char *)(uintptr_t)good[i].text, "--prompt", ""),
                         TSR_OK);
        assert_true(tsr_opt_real(&a, "temperature", 7) == good[i].value);
        assert_true(tsr_opt_given(&a, "prompt"));
        assert_string_equal(tsr_opt_text(&a, "prompt", "x"), "");
        tsr_args_free(&a);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(PARSE(&a, &err, "--temperature", (char *)(uintptr_t)bad[i]), TSR_E_USAGE);
        tsr_args_free(&a);
    }
    assert_int_equal(PARSE(&a, &err, "--long"), TSR_OK);
    assert_true(tsr_opt_real(&a, "temperature", 7) == 7);
    tsr_args_free(&a);
}

static void test_short_values_and_last_wins(void **state)
{
    (void)state;
    tsr_args a;
    tsr_err err;
    assert_int_equal(
        PARSE(&a, &err, "-lofile", "-o", "second", "--compress=19", "--format", "raw", "--format=npy"),
        TSR_OK);
    assert_true(tsr_opt_given(&a, "long") && !tsr_opt_given(&a, "all"));
    assert_string_equal(tsr_opt_text(&a, "output", NULL), "second");
    assert_int_equal(tsr_opt_number(&a, "compress", 0), 19);
    assert_string_equal(tsr_opt_text(&a, "format", NULL), "npy");
    assert_int_equal(a.operand_count, 0);
    tsr_args_free(&a);
}

static void test_refused_options(void **state)
{
    (void)state;
    static const struct {
        const char *word, *second, *message;
    } rows[] = {
        { "--lnog", NULL, "did you mean --long?" },
        { "--expert", "4", "did you mean --experts?" },
        { "--mem-limti=1", NULL, "did you mean --mem-limit?" },
        { "--qqqqqqqq", NULL, "tessera ls --help" },
        { "-z", NULL, "-z: unknown option" },
        { "-lz", NULL, "-lz: unknown option" },
        { "--output", NULL, "--output: needs a value (FILE)" },
        { "-o", NULL, "-o: needs a value (FILE)" },
        { "--output=", NULL, "has an empty value" },
        { "--long=1", NULL, "--long: takes no value" },
        { "--experts", "0", "out of range (1 to 65536)" },
        { "--experts", "65537", "out of range" },
        { "--experts", "-1", "not a whole number" },
        { "--experts", "1e3", "not a whole number" },
        { "--experts", "99999999999999999999999", "out of range" },
        { "--format", "tex", "is not one of text|raw|npy" },
        { "--format", "text|raw", "is not one of" },
        { "--compress=20", NULL, "out of range (1 to 19)" },
        { "--compress=x", NULL, "not a whole number" },
        { "--mem-limit", "1e9", "is not a size" },
        { "--", "x", NULL },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        tsr_args a;
        tsr_err err = { .code = TSR_OK };
        char *words[] = { (char *)(uintptr_t)rows[i].word, (char *)(uintptr_t)rows[i].second, NULL };
        tsr_status st = parse_words(&a, &err, words, rows[i].second != NULL ? 2 : 1);
        assert_int_equal(st, rows[i].message != NULL ? TSR_E_USAGE : TSR_OK);
        if (rows[i].message != NULL && strstr(err.msg, rows[i].message) == NULL) {
            fail_msg("%s: message is \"%s\", wanted \"%s\"", rows[i].word, err.msg, rows[i].message);
        }
        tsr_args_free(&a);
    }
}

static void test_nearest(void **state)
{
    (void)state;
    static const char *const names[] = { "convert", "reshard", "pack", "unpack", "verify", "diff", NULL };
    assert_string_equal(tsr_nearest("covnert", names), "convert");
    assert_string_equal(tsr_nearest("conv", names), "convert");
    assert_string_equal(tsr_nearest("unpak", names), "unpack");
    assert_string_equal(tsr_nearest("dif", names), "diff");
    assert_null(tsr_nearest("zebra", names));
    assert_null(tsr_nearest("", names));
    char huge[5000];
    memset(huge, 'a', sizeof huge - 1);
    huge[sizeof huge - 1] = '\0';
    assert_null(tsr_nearest(huge, names));
}

/* ---- numbers ---------------------------------------------------------------------------------------------
 */

static void test_sizes(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        uint64_t bytes;
    } good[] = {
        { "0", 0 },
        { "1000000", 1000000 },
        { "12B", 12 },
        { "4K", 4096 },
        { "4k", 4096 },
        { "4KiB", 4096 },
        { "4KB", 4000 },
        { "4MiB", (uint64_t)4 << 20 },
        { "5G", (uint64_t)5 << 30 },
        { "5GB", 5000000000u },
        { "2T", (uint64_t)2 << 40 },
        { "1PiB", (uint64_t)1 << 50 },
        { "16383P", (uint64_t)16383 << 50 },
        { "18446744073709551615", UINT64_MAX },
    };
    static const char *const bad[] = { "",       " 4",
                                       "4 ",     "1e9",
                                       "1.5G",   "4X",
                                       "-1",     "+1",
                                       "G",      "4iB",
                                       "4MiBx",  "0x10",
                                       "4M B",   "4MBB",
                                       "4Ki",    "18446744073709551616",
                                       "16384P", "99999999999999999999G" };
    tsr_err err;
    uint64_t v;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        assert_int_equal(tsr_parse_size("--x", good[i].text, 0, UINT64_MAX, &v, &err), TSR_OK);
        assert_true(v == good[i].bytes);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        if (tsr_parse_size("--x", bad[i], 0, UINT64_MAX, &v, &err) != TSR_E_USAGE) {
            fail_msg("\"%s\" was taken for a size", bad[i]);
        }
    }
    assert_int_equal(tsr_parse_size("--x", "1K", 1024, 2048, &v, &err), TSR_OK);
    assert_int_equal(tsr_parse_size("--x", "1023", 1024, 2048, &v, &err), TSR_E_USAGE);
    assert_int_equal(tsr_parse_size("--x", "2049", 1024, 2048, &v, &err), TSR_E_USAGE);
}

/* ---- globs ------------------------------------------------------------------------------------------------
 */

static bool matches(const char *pattern, const char *name)
{
    const char *patterns[] = { pattern, NULL };
    tsr_glob *g;
    tsr_err err;
    assert_int_equal(tsr_glob_new(&g, patterns, &err), TSR_OK);
    bool yes = tsr_glob_match(g, name);
    tsr_glob_free(&g);
    return yes;
}

static void test_glob_matches(void **state)
{
    (void)state;
    static const struct {
        const char *pattern, *name;
        bool yes;
    } rows[] = {
        { "*", "", true },
        { "*", "a/b.c", true },
        { "a?c", "abc", true },
        { "a?c", "ac", false },
        { "*.w", "x.y.w", true },
        { "*.w", "x.wz", false },
        { "a*b*c", "aXbXbYc", true },
        { "a*b*c", "aXbXbY", false },
        { "[ab]x", "bx", true },
        { "[!ab]x", "bx", false },
        { "[!ab]x", "cx", true },
        { "[a-c]", "b", true },
        { "[]x]", "]", true },
        { "[", "[", true },
        { "\\*", "*", true },
        { "\\*", "a", false },
        { "{gate,up}.w", "gate.w", true },
        { "{gate,up}.w", "up.w", true },
        { "{gate,up}.w", "down.w", false },
        { "{a,}b", "b", true },
        { "{a,b{c,d}}e", "bde", true },
        { "{a,b{c,d}}e", "be", false },
        { "x{0..7}y", "x7y", true },
        { "x{0..7}y", "x8y", false },
        { "x{0..7}y", "x07y", false },
        { "x{7..0}y", "x3y", true },
        { "x{0..895}y", "x895y", true },
        { "x{0..895}y", "x896y", false },
        { "*.{0..1}.*", "layers.12.experts.1.w", true },
        { "*.{0..1}.*", "layers.12.experts.2.w", false },
        { "{a,{0..3}}z", "2z", true },
        { "*.experts.{e}.w", "l.experts.{e}.w", true },
        { "*.experts.{e}.w", "l.experts.5.w", false },
        { "*.experts.*.w", "l.experts.{e}.w", true },
        { "{0..}", "{0..}", true },
        { "{9999999999..1}", "5", false },
        { "{", "{", true },
        { "a{b", "a{b", true },
        { "{0..9}", "12345678901234567890", false },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (matches(rows[i].pattern, rows[i].name) != rows[i].yes) {
            fail_msg("\"%s\" and \"%s\": wanted %d", rows[i].pattern, rows[i].name, rows[i].yes);
        }
    }
    tsr_glob *g;
    assert_int_equal(tsr_glob_new(&g, NULL, NULL), TSR_OK);
    assert_true(tsr_glob_empty(g) && tsr_glob_match(g, "anything"));
    tsr_glob_free(&g);
}

/* Without braces our matcher and fnmatch agree, over random patterns and names of a small alphabet. */
static void test_glob_agrees_with_fnmatch(void **state)
{
    (void)state;
    static const char letters[] = "ab*?.";
    uint64_t seed = 42;
    for (int round = 0; round < 20000; round++) {
        char pattern[9] = "", name[9] = "";
        for (int i = 0; i < 8; i++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            pattern[i] = (seed >> 60) == 0 ? '\0' : letters[(seed >> 40) % 5];
            name[i] = (seed >> 56 & 7) == 0 ? '\0' : letters[(seed >> 32) % 2];
        }
        if (pattern[0] == '\0') {
            continue;
        }
        if (matches(pattern, name) != (fnmatch(pattern, name, 0) == 0)) {
            fail_msg("\"%s\" and \"%s\"", pattern, name);
        }
    }
}

static void test_glob_written_out(void **state)
{
    (void)state;
    const char *patterns[] = { "e.{0..2}.{w,v}", "x{e}", NULL }, *const * plain;
    static const char *const names[] = { "e.0.w", "e.1.v", "e.2.w", "x{e}" };
    tsr_glob *g;
    tsr_err err;
    assert_int_equal(tsr_glob_new(&g, patterns, &err), TSR_OK);
    assert_int_equal(tsr_glob_plain(g, &plain, &err), TSR_OK);
    size_t count = 0;
    while (plain[count] != NULL) {
        count++;
    }
    assert_int_equal(count, 7);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        size_t hits = 0;
        for (size_t k = 0; k < count; k++) {
            hits += fnmatch(plain[k], names[i], 0) == 0;
        }
        assert_int_equal(hits, 1);
    }
    tsr_glob_free(&g);
}

static void test_glob_limits(void **state)
{
    (void)state;
    char bomb[200] = "";
    const char *patterns[] = { bomb, NULL }, *const * plain;
    tsr_glob *g;
    tsr_err err;
    for (int i = 0; i < 20; i++) {
        strcat(bomb, "{a,b,c}");
    }
    assert_int_equal(tsr_glob_new(&g, patterns, &err), TSR_E_USAGE);
    assert_null(g);
    strcpy(bomb, "{0..999999999}{0..999999999}");
    assert_int_equal(tsr_glob_new(&g, patterns, &err), TSR_OK);
    assert_true(tsr_glob_match(g, "123456789999999999") ==
                false); /* the first number takes every digit it can */
    assert_int_equal(tsr_glob_plain(g, &plain, &err), TSR_E_USAGE);
    tsr_glob_free(&g);
}

/* ---- progress ---------------------------------------------------------------------------------------------
 */

static uint64_t fake_ns;
static uint64_t fake_clock(void)
{
    return fake_ns;
}

static size_t count_lines(const char *s)
{
    size_t n = 0;
    for (; *s != '\0'; s++) {
        n += *s == '\n';
    }
    return n;
}

static void test_progress_json(void **state)
{
    (void)state;
    char *text;
    size_t bytes;
    FILE *f = open_memstream(&text, &bytes);
    tsr_meter m;
    tsr_meter_init(&m, "json", f);
    m.now_ns = fake_clock;
    fake_ns = 5000000000u;
    for (uint64_t i = 0; i <= 1000; i++) { /* one report a millisecond, one second in all */
        tsr_meter_report(&m, "save", i, 1000);
        fake_ns += 1000000u;
    }
    tsr_meter_report(&m, "save", 1000, 1000);
    assert_int_equal(fclose(f), 0);
    size_t lines = count_lines(text);
    assert_true(lines >= 10 && lines <= 12);
    for (char *line = strtok(text, "\n"); line != NULL; line = strtok(NULL, "\n")) {
        json_error_t e;
        json_t *o = json_loads(line, JSON_REJECT_DUPLICATES, &e);
        assert_non_null(o);
        assert_string_equal(json_string_value(json_object_get(o, "progress")), "save");
        int64_t done = json_integer_value(json_object_get(o, "done_bytes"));
        if (done > 0) { /* 1000 bytes a second */
            assert_float_equal(json_number_value(json_object_get(o, "bytes_per_second")), 1000, 1);
            assert_float_equal(json_number_value(json_object_get(o, "eta_seconds")),
                               (double)(1000 - done) / 1000, 0.06);
        } else {
            assert_true(json_is_null(json_object_get(o, "eta_seconds")));
        }
        json_decref(o);
    }
    free(text);
}

static void test_progress_silent_in_pipes(void **state)
{
    (void)state;
    FILE *f = tmpfile(); /* no terminal */
    tsr_meter m;
    assert_non_null(f);
    tsr_meter_init(&m, "auto", f);
    assert_int_equal(m.mode, TSR_METER_NONE);
    tsr_meter_report(&m, "save", 1, 2);
    tsr_meter_clear(&m);
    assert_int_equal(ftell(f), 0);
    assert_int_equal(fclose(f), 0);
}

static void test_progress_line(void **state)
{
    (void)state;
    char *text;
    size_t bytes;
    FILE *f = open_memstream(&text, &bytes);
    tsr_meter m = { .mode = TSR_METER_LINE, .to = f, .now_ns = fake_clock };
    fake_ns = 1000000000u;
    tsr_meter_report(&m, "verify", 500, 4000); /* the first 500 were done before: they are no speed */
    fake_ns += 1000000000u;
    tsr_meter_report(&m, "verify", 1500, 4000);
    tsr_meter_clear(&m);
    assert_int_equal(fclose(f), 0);
    assert_non_null(strstr(text, "verify  38 %"));
    assert_non_null(strstr(text, "ETA 0:00:03")); /* 2500 bytes at 1000 a second */
    assert_int_equal(count_lines(text), 0);
    free(text);
}

/* ---- text
 * -------------------------------------------------------------------------------------------------- */

static void test_text_is_harmless(void **state)
{
    (void)state;
    static const struct {
        const char *in, *out;
    } rows[] = {
        { "plain", "plain" },
        { "a\033[31mb\n", "a\\x1b[31mb\\x0a" },
        { "\xc3\xa9\xe6\x97\xa5\xf0\x9f\x98\x80", "\xc3\xa9\xe6\x97\xa5\xf0\x9f\x98\x80" },
        { "\xc2\x9b", "\\xc2\\x9b" },                   /* the one-byte escape sequence introducer */
        { "\xe2\x80\xae", "\\xe2\\x80\\xae" },          /* right-to-left override */
        { "\xff\xc0\xaf", "\\xff\\xc0\\xaf" },          /* not UTF-8 */
        { "\xed\xa0\x80", "\\xed\\xa0\\x80" },          /* a surrogate */
        { "\xe2\x82", "\\xe2\\x82" },                   /* cut */
        { "\xf4\x90\x80\x80", "\\xf4\\x90\\x80\\x80" }, /* beyond U+10FFFF */
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char *text;
        size_t bytes;
        FILE *f = open_memstream(&text, &bytes);
        tsr_out_text(f, rows[i].in);
        assert_int_equal(fclose(f), 0);
        assert_string_equal(text, rows[i].out);
        free(text);
    }
}

static void test_small_texts(void **state)
{
    (void)state;
    char buf[64], size[TSR_SIZE_TEXT];
    const int64_t shape[] = { 2, 0, 3 };
    const uint32_t ids[] = { 0, 1, 2, 5, 7, 8 };
    assert_string_equal(tsr_size_text(0, size), "0 B");
    assert_string_equal(tsr_size_text(1023, size), "1023 B");
    assert_string_equal(tsr_size_text(1024, size), "1.0 KiB");
    assert_string_equal(tsr_size_text(((uint64_t)1 << 20) - 1, size), "1.0 MiB");
    assert_string_equal(tsr_size_text(18350080, size), "17.5 MiB");
    assert_string_equal(tsr_size_text(UINT64_MAX, size), "16.0 EiB");
    assert_string_equal(tsr_shape_text(3, shape, buf, sizeof buf), "[2, 0, 3]");
    assert_string_equal(tsr_shape_text(0, shape, buf, sizeof buf), "[]");
    assert_string_equal(tsr_ranges_of(ids, 6, buf, sizeof buf), "0-2, 5, 7-8");
    assert_string_equal(tsr_ranges_of(ids, 0, buf, sizeof buf), "");
    assert_string_equal(tsr_ranges_of(ids, 6, buf, 14), "0-2, 5, ...");
}

static void test_json_is_strict(void **state)
{
    (void)state;
    json_t *v = tsr_json_number(0.0 / 0.0);
    assert_true(json_is_null(v));
    json_decref(v);
    v = tsr_json_text("a\xff");
    assert_string_equal(json_string_value(v), "a\xef\xbf\xbd");
    json_decref(v);
    v = tsr_json_u64(UINT64_MAX);
    assert_string_equal(json_string_value(v), "18446744073709551615");
    json_decref(v);
    json_t *o = json_object();
    tsr_json_set(&o, "x", NULL); /* an allocation that failed before */
    assert_null(o);
    tsr_json_set(&o, "y", json_true());
    tsr_err err;
    assert_int_equal(tsr_json_print(o, false, &err), TSR_E_LIMIT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forms_of_options),
        cmocka_unit_test(test_reals_and_empty_texts),
        cmocka_unit_test(test_short_values_and_last_wins),
        cmocka_unit_test(test_refused_options),
        cmocka_unit_test(test_nearest),
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_glob_matches),
        cmocka_unit_test(test_glob_agrees_with_fnmatch),
        cmocka_unit_test(test_glob_written_out),
        cmocka_unit_test(test_glob_limits),
        cmocka_unit_test(test_progress_json),
        cmocka_unit_test(test_progress_silent_in_pipes),
        cmocka_unit_test(test_progress_line),
        cmocka_unit_test(test_text_is_harmless),
        cmocka_unit_test(test_small_texts),
        cmocka_unit_test(test_json_is_strict),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
