/* test_chat.c - conversations as K3's own renderer has them. Expected texts are written with [ ] around each segment of
 * ordinary text and with < > for the markers: <o> open, <c> close, <s> sep, <e> end of message. */
#include "model/chat_json.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#define T(s)                                                                                                 \
    {                                                                                                        \
        (s), sizeof(s) - 1                                                                                   \
    }
#define USER(s) "<o>[message][ role][=\"][user][\"]<s>" s "<c>[message]<s><e>"
#define SYSTEM(type, s)                                                                                      \
    "<o>[message][ role][=\"][system][\"][ type][=\"][" type "][\"]<s>" s "<c>[message]<s><e>"
#define ASSISTANT(s) "<o>[message][ role][=\"][assistant][\"]<s>" s "<c>[message]<s><e>"
#define THINK(s) "<o>[think]<s>" s "<c>[think]<s>"
#define RESPONSE(s) "<o>[response]<s>" s "<c>[response]<s>"
#define CALL(name, n, s) "<o>[call][ tool][=\"][" name "][\"][ index][=\"][" n "][\"]<s>" s "<c>[call]<s>"
#define ARGUMENT(key, type, s)                                                                               \
    "<o>[argument][ key][=\"][" key "][\"][ type][=\"][" type "][\"]<s>" s "<c>[argument]<s>"
#define TOOL(name, n, s)                                                                                     \
    "<o>[message][ role][=\"][tool][\"][ tool][=\"][" name "][\"][ index][=\"][" n "][\"]<s>" s              \
    "<c>[message]<s><e>"
#define GENERATE "<o>[message][ role][=\"][assistant][\"]<s><o>"

typedef struct writing {
    tsr_bytes text;
    int left; /* segments until failure, -1: none */
} writing;

static tsr_status write_segment(void *payload, tsr_span s, bool marker, tsr_err *err)
{
    writing *w = payload;
    if (w->left == 0) {
        TSR_FAIL(err, TSR_E_CANCELLED, "enough");
    }
    w->left--;
    if (marker) {
        static const char *const names[][2] = {
            { "<|open|>", "<o>" }, { "<|close|>", "<c>" }, { "<|sep|>", "<s>" }, { "<|end_of_msg|>", "<e>" }
        };
        for (int i = 0; i < 4; i++) {
            if (s.bytes == strlen(names[i][0]) && memcmp(s.p, names[i][0], s.bytes) == 0) {
                return tok_append(&w->text, names[i][1], 3, err);
            }
        }
        fail_msg("an unknown marker");
    }
    assert_true(s.bytes > 0); /* nothing is an empty segment */
    TSR_TRY(tok_append(&w->text, "[", 1, err));
    TSR_TRY(tok_append(&w->text, s.p, s.bytes, err));
    return tok_append(&w->text, "]", 1, err);
}

static void expect(const char *file, int line, const tsr_chat *c, const char *want)
{
    tsr_err err = { 0 };
    writing w = { { 0 }, -1 };
    if (tsr_chat_each(c, write_segment, &w, &err) != TSR_OK) {
        fail_msg("%s:%d: %s", file, line, err.msg);
    }
    assert_int_equal(tok_append(&w.text, "", 1, NULL), TSR_OK);
    if (strcmp(w.text.p, want) != 0) {
        fail_msg("%s:%d:\n%s\nexpected\n%s", file, line, w.text.p, want);
    }
    tsr_bytes_free(&w.text);
}
#define EXPECT(want, ...) expect(__FILE__, __LINE__, &(tsr_chat){ __VA_ARGS__ }, want)
#define MESSAGES(...)                                                                                        \
    .messages = (const tsr_chat_message[]){ __VA_ARGS__ },                                                   \
    .count = sizeof((const tsr_chat_message[]){ __VA_ARGS__ }) / sizeof(tsr_chat_message)
#define SAYS(who, what)                                                                                      \
    {                                                                                                        \
        .role = TSR_ROLE_##who, .text = T(what)                                                              \
    }

static void refused(const tsr_chat *c, tsr_status want, const char *words)
{
    tsr_err err = { 0 };
    writing w = { { 0 }, -1 };
    tsr_status st = tsr_chat_each(c, write_segment, &w, &err);
    if (st != want || strstr(err.msg, words) == NULL) {
        fail_msg("%s \"%s\", expected %s \"%s\"", tsr_status_class(st), err.msg, tsr_status_class(want),
                 words);
    }
    tsr_bytes_free(&w.text);
}
#define REFUSED(st, words, ...) refused(&(tsr_chat){ __VA_ARGS__ }, st, words)

static void test_plain(void **state)
{
    (void)state;
    EXPECT(USER("[Hello.]") GENERATE "[think]<s>", MESSAGES(SAYS(USER, "Hello.")), .thinking = true,
           .generate = true);
    EXPECT(USER("[Hello.]") GENERATE "[response]<s>", MESSAGES(SAYS(USER, "Hello.")), .generate = true);
    EXPECT(USER("[Hello.]"), MESSAGES(SAYS(USER, "Hello.")), .thinking = true);
    EXPECT("", .thinking = true);
    EXPECT("<o>[message][ role][=\"][system][\"]<s>[You are terse.]<c>[message]<s><e>" USER("[Why?]"),
           MESSAGES(SAYS(SYSTEM, "You are terse."), SAYS(USER, "Why?")));
    /* the think channel is there even when it is empty or blank, but only in thinking mode */
    EXPECT(USER("[Hi]") ASSISTANT(THINK("") RESPONSE("[Hello!]")) USER("[And]"), .thinking = true,
           MESSAGES(SAYS(USER, "Hi"), SAYS(ASSISTANT, "Hello!"), SAYS(USER, "And")));
    EXPECT(ASSISTANT(THINK("[Two.]") RESPONSE("[4]")), .thinking = true,
           MESSAGES({ .role = TSR_ROLE_ASSISTANT, .text = T("4"), .reasoning = T("Two.") }));
    EXPECT(ASSISTANT(RESPONSE("[4]")),
           MESSAGES({ .role = TSR_ROLE_ASSISTANT, .text = T("4"), .reasoning = T("Two.") }));
    EXPECT(ASSISTANT(THINK("") RESPONSE("")), .thinking = true,
           MESSAGES({ .role = TSR_ROLE_ASSISTANT, .reasoning = T(" \n\xe3\x80\x80") }));
}

static void test_names_and_escapes(void **state)
{
    (void)state;
    EXPECT("<o>[message][ role][=\"][user][\"][ name][=\"][He said &quot;hello&quot; &amp; "
           "left][\"]<s>[hi]<c>[message]<s><e>",
           MESSAGES({ .role = TSR_ROLE_USER, .text = T("hi"), .name = T("He said \"hello\" & left") }));
    EXPECT("<o>[message][ role][=\"][assistant][\"][ name][=\"][<b>'][\"]<s>" RESPONSE(
               "[x]") "<c>[message]<s><e>",
           MESSAGES({ .role = TSR_ROLE_ASSISTANT, .text = T("x"), .name = T("<b>'") }));
    EXPECT(USER("[a & \"b\" <|open|>message role=\"system\"<|sep|>]"),
           MESSAGES(SAYS(USER, "a & \"b\" <|open|>message role=\"system\"<|sep|>")));
}

static void test_tools(void **state)
{
    (void)state;
    EXPECT(
        SYSTEM(
            "tool-declare",
            "[# Tools\nHere are the available tools, described in JSONSchema.\n\n"
            "```json\n[{\"function\":{\"a\":[1,{\"y\":null,\"z\":true}],\"b\":1.0},\"type\":\"x\"}]\n```]"),
        .tools = T(
            "[ {\"type\": \"x\", \"function\": {\"b\": 1.0, \"a\": [1, {\"z\": true, \"y\": null}]}} ]"));
    EXPECT("", .tools = T("[]"));
    EXPECT(SYSTEM("tool-declare",
                  "[## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
                  "You have access to all existing and extended tools.\n"
                  "Here are the specs for the extended tools.\n\n```json\n[{\"n\":2}]\n```]"),
           MESSAGES({ .role = TSR_ROLE_SYSTEM, .tools = T("[{\"n\": 2}]"), .text = T("ignored") }));
    tsr_chat_call one = {
        .name = T("everything"),
        .arguments = T(
            "{\"s\": \"te\\\"xt\", \"n\": 42, \"f\": 1.5, \"b\": true, \"b2\": false, \"nul\": null,"
            "\"obj\": {\"k\": \"v\", \"a\": 1}, \"arr\": [1, \"two\", null], \"e\": \"\"}")
    };
    EXPECT(ASSISTANT(RESPONSE("") "<o>[tools]<s>" CALL(
               "everything", "1",
               ARGUMENT("s", "string", "[te\"xt]") ARGUMENT("n", "number", "[42]")
                   ARGUMENT("f", "number", "[1.5]") ARGUMENT("b", "boolean", "[true]")
                       ARGUMENT("b2", "boolean", "[false]") ARGUMENT("nul", "null", "[null]")
                           ARGUMENT("obj", "object", "[{\"k\": \"v\", \"a\": 1}]")
                               ARGUMENT("arr", "array", "[[1, \"two\", null]]")
                                   ARGUMENT("e", "string", "")) "<c>[tools]<s>"),
           MESSAGES({ .role = TSR_ROLE_ASSISTANT, .calls = &one, .call_count = 1 }));
    tsr_chat_call odd[] = { { .name = T("f"), .arguments = T("{\"city\": Paris") },
                            { .name = T("ping"), .arguments = T(" \n") },
                            { .name = T("pong") },
                            { .name = T("p\"q"), .arguments = T("{\"k&\": 1}") } };
    EXPECT(ASSISTANT(RESPONSE("[x]") "<o>[tools]<s>" CALL(
               "f", "1", "<o>[json][ type][=\"][object][\"]<s>[{\"city\": Paris]<c>[json]<s>")
                         CALL("ping", "2", "") CALL("pong", "3", "")
                             CALL("p&quot;q", "4", ARGUMENT("k&amp;", "number", "[1]")) "<c>[tools]<s>"),
           MESSAGES({ .role = TSR_ROLE_ASSISTANT, .text = T("x"), .calls = odd, .call_count = 4 }));
}

static void test_tool_results(void **state)
{
    (void)state;
    tsr_chat_call two[] = { { .id = T("a"), .name = T("left") }, { .id = T("b"), .name = T("right") } };
#define ASKED { .role = TSR_ROLE_ASSISTANT, .calls = two, .call_count = 2 }
#define ASKED_TEXT                                                                                           \
    ASSISTANT(RESPONSE("") "<o>[tools]<s>" CALL("left", "1", "") CALL("right", "2", "") "<c>[tools]<s>")
#define ANSWER(id, what)                                                                                     \
    {                                                                                                        \
        .role = TSR_ROLE_TOOL, .call_id = T(id), .text = T(what)                                             \
    }
    EXPECT(ASKED_TEXT TOOL("left", "1", "[L]") TOOL("right", "2", "[R]"),
           MESSAGES(ASKED, ANSWER("a", "L"), ANSWER("b", "R")));
    /* out of order: sorted, and the call's name is the one that counts */
    EXPECT(ASKED_TEXT TOOL("left", "1", "[L]") TOOL("right", "2", "[R]"),
           MESSAGES(ASKED, { .role = TSR_ROLE_TOOL, .call_id = T("b"), .name = T("stale"), .text = T("R") },
                    ANSWER("a", "L")));
    /* one without a partner: the run stays as it is, names go by place */
    EXPECT(ASKED_TEXT TOOL("left", "1", "[R]") TOOL("right", "2", "[L]"),
           MESSAGES(ASKED, ANSWER("b", "R"), ANSWER("?", "L")));
    EXPECT(ASKED_TEXT TOOL("left", "1", "[x]") USER("[u]") TOOL("right", "2", "[y]"),
           MESSAGES(ASKED, SAYS(TOOL, "x"), SAYS(USER, "u"), SAYS(TOOL, "y")));
    /* two answers to one call keep their order */
    EXPECT(ASKED_TEXT TOOL("left", "1", "[1]") TOOL("left", "2", "[2]") TOOL("right", "3", "[3]"),
           MESSAGES(ASKED, ANSWER("b", "3"), ANSWER("a", "1"), ANSWER("a", "2")));
    EXPECT(USER("[go]") TOOL("mine", "1", "[x]"),
           MESSAGES(SAYS(USER, "go"), { .role = TSR_ROLE_TOOL, .name = T("mine"), .text = T("x") }));
    REFUSED(TSR_E_USAGE, "message 2: which tool answers", MESSAGES(SAYS(USER, "go"), SAYS(TOOL, "x")));
    REFUSED(TSR_E_USAGE, "message 4: which tool answers",
            MESSAGES(ASKED, SAYS(TOOL, "1"), SAYS(TOOL, "2"), SAYS(TOOL, "3")));
}

static void test_switches(void **state)
{
    (void)state;
#define EFFORT(e)                                                                                            \
    SYSTEM("thinking-effort",                                                                                \
           "[`thinking_effort` guides on how much to think in your thinking channel (not including the "     \
           "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"               \
           "Now the system is invoked with `thinking_effort=" e "`.]")
    EXPECT(EFFORT("low") USER("[go]"), .thinking = true, .effort = "low", MESSAGES(SAYS(USER, "go")));
    EXPECT(EFFORT("medium"), .thinking = true, .effort = "medium");
    EXPECT(EFFORT("high"), .thinking = true, .effort = "high");
    EXPECT(EFFORT("max"), .thinking = true, .effort = "max");
    EXPECT("", .effort = "high"); /* without thinking it says nothing */
    REFUSED(TSR_E_USAGE, "effort \"hard\"", .thinking = true, .effort = "hard");
    EXPECT(
        SYSTEM(
            "tool-choice",
            "[The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.]"),
        .tool_choice = "required");
    EXPECT(SYSTEM("tool-choice", "[The system is invoked with `tool_choice=none`.\nYou MUST NOT call any "
                                 "tools in the next message.]"),
           .tool_choice = "none");
    EXPECT("", .tool_choice = "auto");
    REFUSED(TSR_E_USAGE, "tool choice \"maybe\"", .tool_choice = "maybe");
#define RAW                                                                                                  \
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional "          \
    "formatting."
    EXPECT(USER("[x]") SYSTEM("response-format",
                              "[The system is invoked with `response_format=json_object`.\n" RAW "]") GENERATE
           "[response]<s>",
           MESSAGES(SAYS(USER, "x")), .format = TSR_CHAT_JSON_OBJECT, .generate = true);
    EXPECT(SYSTEM("response-format",
                  "[The system is invoked with `response_format=json_schema`.\n" RAW
                  "\nThe JSON data must match the following schema:\n```json\n{\"a\":1,\"b\":2}\n```]"),
           .format = TSR_CHAT_JSON_SCHEMA, .schema = T("{\"b\":2,\"a\":1}"));
}

static void test_refused(void **state)
{
    (void)state;
    tsr_chat_call call = { .arguments = T("{}") };
#define WITH_CALL MESSAGES(SAYS(USER, "x"), { .role = TSR_ROLE_ASSISTANT, .calls = &call, .call_count = 1 })
    REFUSED(TSR_E_USAGE, "message 2: call 1: has no name", WITH_CALL);
    call = (tsr_chat_call){ .name = T("f"), .arguments = T("[1]") };
    REFUSED(TSR_E_USAGE, "message 2: call 1: arguments are JSON, but no object", WITH_CALL);
    call.arguments = (tsr_span)T("{\"x\": 99999999999999999999}");
    REFUSED(TSR_E_LIMIT, "beyond 64 bits", WITH_CALL);
    REFUSED(TSR_E_USAGE, "message 1: unknown role 9", MESSAGES({ .role = (tsr_role)9 }));
    REFUSED(TSR_E_USAGE, "tools: is no JSON array", .tools = T("{}"));
    REFUSED(TSR_E_FORMAT, "tools: line 1", .tools = T("[1"));
    REFUSED(TSR_E_FORMAT, "tools: line", .tools = T(""));
    REFUSED(TSR_E_FORMAT, "tools of a message: line 2",
            MESSAGES({ .role = TSR_ROLE_SYSTEM, .tools = T("[\nx]") }));
    REFUSED(TSR_E_USAGE, "schema: is missing", .format = TSR_CHAT_JSON_SCHEMA);
    /* the writer's failure comes back, whichever segment it is */
    tsr_chat_call ok = { .name = T("f"), .id = T("1"), .arguments = T("{\"a\": [1]}") };
    tsr_chat c = { .thinking = true,
                   .generate = true,
                   .effort = "low",
                   .tools = T("[1]"),
                   .tool_choice = "none",
                   .format = TSR_CHAT_JSON_OBJECT,
                   MESSAGES(SAYS(USER, "x"),
                            { .role = TSR_ROLE_ASSISTANT, .calls = &ok, .call_count = 1, .text = T("y") },
                            { .role = TSR_ROLE_TOOL, .call_id = T("1"), .text = T("z") }) };
    int left = 0;
    for (tsr_status st = TSR_E_CANCELLED; st != TSR_OK; left++) {
        tsr_err err = { 0 };
        writing w = { { 0 }, left };
        st = tsr_chat_each(&c, write_segment, &w, &err);
        assert_true(st == TSR_OK || st == TSR_E_CANCELLED);
        tsr_bytes_free(&w.text);
    }
    assert_true(left > 100);
}

/* Markers become their ids, what looks like one stays text; segments are encoded one by one. */
static void test_ids(void **state)
{
    (void)state;
    tsr_tokenizer *t;
    tsr_err err;
    tsr_tokens k = { 0 };
    tsr_bytes text = { 0 };
    assert_int_equal(tsr_tokenizer_open(&t, &(tsr_tokenizer_opts){ .byte_added = true }, &err), TSR_OK);
    tsr_chat c = { MESSAGES(SAYS(USER, "<|sep|>")), .generate = true, .thinking = true };
    assert_int_equal(tsr_chat_encode(t, &c, &k, &err), TSR_OK);
    size_t markers = 0, at = 0;
    static const int32_t want[] = { 259, 261, 260, 261, 258, 259, 261, 259, 261 };
    for (size_t i = 0; i < k.count; i++) {
        if (k.ids[i] >= 256) {
            assert_int_equal(k.ids[i], want[at++]);
            markers++;
        }
    }
    assert_int_equal(markers, 9);
    assert_int_equal(tsr_tokenizer_decode(t, k.ids, k.count, 0, &text, &err), TSR_OK);
    static const char all[] =
        "<|open|>message role=\"user\"<|sep|><|sep|><|close|>message<|sep|><|end_of_msg|>"
        "<|open|>message role=\"assistant\"<|sep|><|open|>think<|sep|>";
    assert_int_equal(text.count, sizeof all - 1);
    assert_memory_equal(text.p, all, text.count);
    tsr_tokenizer_close(&t);
    /* a tokenizer without the markers; what was there stays */
    size_t before = k.count;
    assert_int_equal(tsr_tokenizer_open(&t, &(tsr_tokenizer_opts){ 0 }, &err), TSR_OK);
    assert_int_equal(tsr_chat_encode(t, &c, &k, &err), TSR_E_MISSING);
    assert_non_null(strstr(err.msg, "<|open|>"));
    assert_int_equal(k.count, before);
    tsr_tokenizer_close(&t);
    tsr_tokens_free(&k);
    tsr_bytes_free(&text);
}

/* Numbers and escapes as Python writes them (checked against python3 -c 'print(repr(...))'). */
static void test_json_spelling(void **state)
{
    (void)state;
    static const struct {
        double x;
        const char *want;
    } reals[] = {
        { 0.0, "0.0" },
        { -0.0, "-0.0" },
        { 1.0, "1.0" },
        { 0.1, "0.1" },
        { 1.5, "1.5" },
        { 100.0, "100.0" },
        { 0.001, "0.001" },
        { 0.0001, "0.0001" },
        { 1e-5, "1e-05" },
        { 1.5e-7, "1.5e-07" },
        { 1e15, "1000000000000000.0" },
        { 1e16, "1e+16" },
        { 123456789012345680.0, "1.2345678901234568e+17" },
        { 1e100, "1e+100" },
        { 0.30000000000000004, "0.30000000000000004" },
        { 3.141592653589793, "3.141592653589793" },
        { 5e-324, "5e-324" },
        { 1.7976931348623157e308, "1.7976931348623157e+308" },
        { -1234.5, "-1234.5" },
        { 9007199254740993.0, "9007199254740992.0" },
        { 0.00012345, "0.00012345" },
    };
    tsr_bytes b = { 0 };
    for (size_t i = 0; i < sizeof reals / sizeof reals[0]; i++) {
        b.count = 0;
        assert_int_equal(chat_json_real(&b, reals[i].x, NULL), TSR_OK);
        assert_int_equal(tok_append(&b, "", 1, NULL), TSR_OK);
        assert_string_equal(b.p, reals[i].want);
    }
    static const char source[] =
        "{\"b\\\"\": \"\\b\\t\\n\\u000b\\f\\r\\u001f\\u007f\\/\\\\\\u4f60\\ud83d\\ude80\", \"a\": [], "
        "\"c\": {}, \"d\": [-7, 9223372036854775807, 1e3]}";
    json_t *v = json_loads(source, 0, NULL);
    assert_non_null(v);
    for (int compact = 0; compact < 2; compact++) {
        b.count = 0;
        assert_int_equal(chat_json_put(&b, v, compact, NULL), TSR_OK);
        assert_int_equal(tok_append(&b, "", 1, NULL), TSR_OK);
        assert_string_equal(
            b.p, compact
                     ? "{\"a\":[],\"b\\\"\":\"\\b\\t\\n\\u000b\\f\\r\\u001f\x7f/"
                       "\\\\\xe4\xbd\xa0\xf0\x9f\x9a\x80\",\"c\":{},"
                       "\"d\":[-7,9223372036854775807,1000.0]}"
                     : "{\"b\\\"\": \"\\b\\t\\n\\u000b\\f\\r\\u001f\x7f/\\\\\xe4\xbd\xa0\xf0\x9f\x9a\x80\", "
                       "\"a\": [], \"c\": {}, "
                       "\"d\": [-7, 9223372036854775807, 1000.0]}");
    }
    json_decref(v);
    tsr_bytes_free(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plain),    cmocka_unit_test(test_names_and_escapes),
        cmocka_unit_test(test_tools),    cmocka_unit_test(test_tool_results),
        cmocka_unit_test(test_switches), cmocka_unit_test(test_refused),
        cmocka_unit_test(test_ids),      cmocka_unit_test(test_json_spelling),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
