/* chat.c - K3's chat format XTML: a conversation as elements made of marker tokens and ordinary text. */
#include "model/chat_json.h"
#include "model/utf8.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OPEN "<|open|>"
#define CLOSE "<|close|>"
#define SEP "<|sep|>"
#define END_OF_MSG "<|end_of_msg|>"

typedef struct writer {
    const tsr_chat *chat;
    tsr_chat_fn fn;
    void *payload;
    tsr_bytes scratch; /* for text that is put together */
    tsr_err *err;
    /* the latest assistant message, and how many tool messages came since */
    const tsr_chat_message *asked;
    size_t answers;
} writer;

/* ---- elements ----------------------------------------------------------------------------------- */

static tsr_status marker(writer *w, const char *text)
{
    return w->fn(w->payload, tsr_span_of(text), true, w->err);
}

static tsr_status text(writer *w, tsr_span s)
{
    return s.bytes > 0 ? w->fn(w->payload, s, false, w->err) : TSR_OK;
}

static tsr_status literal(writer *w, const char *s)
{
    return text(w, tsr_span_of(s));
}

/* Name, equals sign and quote, value and quote are encoded one by one, as K3's own renderer does. */
static tsr_status attribute(writer *w, const char *spaced_name, tsr_span value)
{
    w->scratch.count = 0;
    size_t from = 0;
    for (size_t i = 0; i < value.bytes; i++) {
        if (value.p[i] == '&' || value.p[i] == '"') {
            const char *entity = value.p[i] == '&' ? "&amp;" : "&quot;";
            TSR_TRY(tok_append(&w->scratch, value.p + from, i - from, w->err));
            TSR_TRY(tok_append(&w->scratch, entity, strlen(entity), w->err));
            from = i + 1;
        }
    }
    TSR_TRY(tok_append(&w->scratch, value.p + from, value.bytes - from, w->err));
    TSR_TRY(literal(w, spaced_name));
    TSR_TRY(literal(w, "=\""));
    TSR_TRY(text(w, (tsr_span){ w->scratch.p, w->scratch.count }));
    return literal(w, "\"");
}

static tsr_status begin(writer *w, const char *tag)
{
    TSR_TRY(marker(w, OPEN));
    return literal(w, tag);
}

static tsr_status close_tag(writer *w, const char *tag)
{
    TSR_TRY(marker(w, CLOSE));
    TSR_TRY(literal(w, tag));
    return marker(w, SEP);
}

static tsr_status open_tag(writer *w, const char *tag)
{
    TSR_TRY(begin(w, tag));
    return marker(w, SEP);
}

static tsr_status begin_message(writer *w, const char *role, const char *second, tsr_span value)
{
    TSR_TRY(begin(w, "message"));
    TSR_TRY(attribute(w, " role", tsr_span_of(role)));
    return value.bytes > 0 ? attribute(w, second, value) : TSR_OK;
}

static tsr_status end_message(writer *w)
{
    TSR_TRY(close_tag(w, "message"));
    return marker(w, END_OF_MSG);
}

/* A message of the system's own: its body is one segment. */
static tsr_status notice(writer *w, const char *type, tsr_span body)
{
    TSR_TRY(begin_message(w, "system", " type", tsr_span_of(type)));
    TSR_TRY(marker(w, SEP));
    TSR_TRY(text(w, body));
    return end_message(w);
}

/* ---- JSON --------------------------------------------------------------------------------------- */

/* *out NULL and TSR_OK: no JSON. */
static tsr_status parse(writer *w, tsr_span s, const char *what, json_t **out, json_error_t *e)
{
    *out = json_loadb(s.p, s.bytes, JSON_DECODE_ANY, e);
    if (*out == NULL && json_error_code(e) == json_error_numeric_overflow) {
        TSR_FAIL(w->err, TSR_E_LIMIT, "chat: %s: line %d: a number beyond 64 bits", what, e->line);
    }
    return TSR_OK;
}

/* before, JSON and after as the body of a notice. */
static tsr_status json_notice(writer *w, const char *type, const char *before, tsr_span source,
                              const char *what, bool array)
{
    json_t *v;
    json_error_t e;
    if (source.p == NULL) {
        TSR_FAIL(w->err, TSR_E_USAGE, "chat: %s: is missing", what);
    }
    TSR_TRY(parse(w, source, what, &v, &e));
    if (v == NULL) {
        TSR_FAIL(w->err, TSR_E_FORMAT, "chat: %s: line %d: %s", what, e.line, e.text);
    }
    tsr_status st = TSR_OK;
    tsr_bytes body = { 0 };
    if (array && !json_is_array(v)) {
        st = TSR_ERR(w->err, TSR_E_USAGE, "chat: %s: is no JSON array", what);
        goto out;
    }
    if (array && json_array_size(v) == 0) {
        goto out;
    }
    TSR_GO(tok_append(&body, before, strlen(before), w->err));
    TSR_GO(tok_append(&body, "```json\n", 8, w->err));
    TSR_GO(chat_json_put(&body, v, true, w->err));
    TSR_GO(tok_append(&body, "\n```", 4, w->err));
    TSR_GO(notice(w, type, (tsr_span){ body.p, body.count }));
out:
    tsr_bytes_free(&body);
    json_decref(v);
    return st;
}

static const char *type_name(const json_t *v)
{
    switch (json_typeof(v)) {
    case JSON_OBJECT: return "object";
    case JSON_ARRAY: return "array";
    case JSON_STRING: return "string";
    case JSON_INTEGER:
    case JSON_REAL: return "number";
    case JSON_TRUE:
    case JSON_FALSE: return "boolean";
    default: return "null";
    }
}

/* ---- messages ----------------------------------------------------------------------------------- */

static bool blank(tsr_span s)
{
    const uint8_t *p = (const uint8_t *)s.p;
    for (size_t i = 0; i < s.bytes;) {
        int length = utf8_at(p + i, s.bytes - i);
        if (length <= 0 || !utf8_is_space(utf8_value(p + i, length))) {
            return false;
        }
        i += (size_t)length;
    }
    return true;
}

static tsr_status argument(writer *w, const char *key, const json_t *value)
{
    TSR_TRY(begin(w, "argument"));
    TSR_TRY(attribute(w, " key", tsr_span_of(key)));
    TSR_TRY(attribute(w, " type", tsr_span_of(type_name(value))));
    TSR_TRY(marker(w, SEP));
    if (json_is_string(value)) {
        TSR_TRY(text(w, (tsr_span){ json_string_value(value), json_string_length(value) }));
    } else {
        w->scratch.count = 0;
        TSR_TRY(chat_json_put(&w->scratch, value, false, w->err));
        TSR_TRY(text(w, (tsr_span){ w->scratch.p, w->scratch.count }));
    }
    return close_tag(w, "argument");
}

static tsr_status arguments(writer *w, tsr_span source, size_t message, size_t call)
{
    json_t *v;
    json_error_t e;
    if (blank(source)) {
        return TSR_OK;
    }
    TSR_TRY(parse(w, source, "arguments of a call", &v, &e));
    if (v == NULL) { /* what the model wrote is kept as it is */
        TSR_TRY(begin(w, "json"));
        TSR_TRY(attribute(w, " type", tsr_span_of("object")));
        TSR_TRY(marker(w, SEP));
        TSR_TRY(text(w, source));
        return close_tag(w, "json");
    }
    tsr_status st = TSR_OK;
    if (!json_is_object(v)) {
        st = TSR_ERR(w->err, TSR_E_USAGE, "chat: message %zu: call %zu: arguments are JSON, but no object",
                     message, call);
        goto out;
    }
    const char *key;
    json_t *value;
    json_object_foreach(v, key, value)
    {
        TSR_GO(argument(w, key, value));
    }
out:
    json_decref(v);
    return st;
}

static tsr_status calls(writer *w, const tsr_chat_message *m, size_t number)
{
    TSR_TRY(open_tag(w, "tools"));
    for (size_t i = 0; i < m->call_count; i++) {
        if (m->calls[i].name.bytes == 0) {
            TSR_FAIL(w->err, TSR_E_USAGE, "chat: message %zu: call %zu: has no name", number, i + 1);
        }
        char index[24];
        (void)snprintf(index, sizeof index, "%zu", i + 1);
        TSR_TRY(begin(w, "call"));
        TSR_TRY(attribute(w, " tool", m->calls[i].name));
        TSR_TRY(attribute(w, " index", tsr_span_of(index)));
        TSR_TRY(marker(w, SEP));
        TSR_TRY(arguments(w, m->calls[i].arguments, number, i + 1));
        TSR_TRY(close_tag(w, "call"));
    }
    return close_tag(w, "tools");
}

static tsr_status assistant(writer *w, const tsr_chat_message *m, size_t number)
{
    w->asked = m;
    w->answers = 0;
    TSR_TRY(begin_message(w, "assistant", " name", m->name));
    TSR_TRY(marker(w, SEP));
    if (w->chat->thinking) {
        TSR_TRY(open_tag(w, "think"));
        TSR_TRY(blank(m->reasoning) ? TSR_OK : text(w, m->reasoning));
        TSR_TRY(close_tag(w, "think"));
    }
    TSR_TRY(open_tag(w, "response"));
    TSR_TRY(text(w, m->text));
    TSR_TRY(close_tag(w, "response"));
    if (m->call_count > 0) {
        TSR_TRY(calls(w, m, number));
    }
    return end_message(w);
}

/* name: the call's that it answers, absent when it answers none by id. */
static tsr_status tool(writer *w, const tsr_chat_message *m, tsr_span name, size_t number)
{
    w->answers++;
    if (name.p == NULL) {
        name = m->name;
    }
    if (name.bytes == 0 && w->asked != NULL && w->answers <= w->asked->call_count) {
        name = w->asked->calls[w->answers - 1].name;
    }
    if (name.bytes == 0) {
        TSR_FAIL(w->err, TSR_E_USAGE, "chat: message %zu: which tool answers is not known (give its name)",
                 number);
    }
    char index[24];
    (void)snprintf(index, sizeof index, "%zu", w->answers);
    TSR_TRY(begin_message(w, "tool", " tool", name));
    TSR_TRY(attribute(w, " index", tsr_span_of(index)));
    TSR_TRY(marker(w, SEP));
    TSR_TRY(text(w, m->text));
    return end_message(w);
}

/* The place of the call with this id, counted from 0; call_count: none. The first of equal ids counts. */
static size_t call_of(const tsr_chat_message *asked, tsr_span id)
{
    size_t i = 0;
    while (i < asked->call_count && (asked->calls[i].id.p == NULL || asked->calls[i].id.bytes != id.bytes ||
                                     memcmp(asked->calls[i].id.p, id.p, id.bytes) != 0)) {
        i++;
    }
    return i;
}

typedef struct answer {
    size_t call, message; /* indices */
} answer;

static int by_call(const void *x, const void *y)
{
    const answer *a = x, *b = y;
    return a->call != b->call ? (a->call > b->call) - (a->call < b->call)
                              : (a->message > b->message) - (a->message < b->message);
}

/* Messages [from, to) are a run of tool messages. They come in the order of the calls when each of them names one. */
static tsr_status answers(writer *w, size_t from, size_t to)
{
    const tsr_chat_message *all = w->chat->messages;
    answer *order = malloc((to - from) * sizeof *order);
    if (order == NULL) {
        TSR_FAIL(w->err, TSR_E_LIMIT, "chat: out of memory");
    }
    bool matched = w->asked != NULL;
    for (size_t i = from; i < to; i++) {
        size_t call = matched && all[i].call_id.p != NULL ? call_of(w->asked, all[i].call_id) : 0;
        matched = matched && all[i].call_id.p != NULL && call < w->asked->call_count;
        order[i - from] = (answer){ call, i };
    }
    if (matched) {
        qsort(order, to - from, sizeof *order, by_call);
    }
    tsr_status st = TSR_OK;
    for (size_t i = 0; i < to - from && st == TSR_OK; i++) {
        size_t index = matched ? order[i].message : from + i;
        tsr_span name = matched ? w->asked->calls[order[i].call].name : (tsr_span){ NULL, 0 };
        st = tool(w, &all[index], name, index + 1);
    }
    free(order);
    return st;
}

static const char more_tools[] = "## New Tools Available\n"
                                 "The system dynamically extends the toolset via lazy-loading.\n"
                                 "You have access to all existing and extended tools.\n"
                                 "Here are the specs for the extended tools.\n\n";

static tsr_status message(writer *w, const tsr_chat_message *m, size_t number)
{
    switch (m->role) {
    case TSR_ROLE_ASSISTANT: return assistant(w, m, number);
    case TSR_ROLE_SYSTEM:
        if (m->tools.p != NULL) {
            return json_notice(w, "tool-declare", more_tools, m->tools, "tools of a message", true);
        }
        break;
    case TSR_ROLE_USER: break;
    default: TSR_FAIL(w->err, TSR_E_USAGE, "chat: message %zu: unknown role %d", number, (int)m->role);
    }
    TSR_TRY(begin_message(w, m->role == TSR_ROLE_SYSTEM ? "system" : "user", " name", m->name));
    TSR_TRY(marker(w, SEP));
    TSR_TRY(text(w, m->text));
    return end_message(w);
}

static tsr_status messages(writer *w)
{
    const tsr_chat *c = w->chat;
    for (size_t i = 0; i < c->count;) {
        size_t to = i;
        while (to < c->count && c->messages[to].role == TSR_ROLE_TOOL) {
            to++;
        }
        if (to > i) {
            TSR_TRY(answers(w, i, to));
            i = to;
        } else {
            TSR_TRY(message(w, &c->messages[i], i + 1));
            i++;
        }
    }
    return TSR_OK;
}

/* ---- around the messages ------------------------------------------------------------------------- */

static tsr_status effort(writer *w)
{
    const char *e = w->chat->effort;
    if (e == NULL || !w->chat->thinking) {
        return TSR_OK;
    }
    if (strcmp(e, "low") != 0 && strcmp(e, "medium") != 0 && strcmp(e, "high") != 0 &&
        strcmp(e, "max") != 0) {
        TSR_FAIL(w->err, TSR_E_USAGE, "chat: thinking effort \"%.40s\" (low, medium, high or max)", e);
    }
    char body[256];
    (void)snprintf(
        body, sizeof body,
        "`thinking_effort` guides on how much to think in your thinking channel (not including the "
        "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
        "Now the system is invoked with `thinking_effort=%s`.",
        e);
    return notice(w, "thinking-effort", tsr_span_of(body));
}

static tsr_status tool_choice(writer *w)
{
    const char *choice = w->chat->tool_choice != NULL ? w->chat->tool_choice : "auto";
    if (strcmp(choice, "required") == 0) {
        return notice(w, "tool-choice",
                      tsr_span_of("The system is invoked with `tool_choice=required`.\n"
                                  "You MUST call tools in the next message."));
    }
    if (strcmp(choice, "none") == 0) {
        return notice(w, "tool-choice",
                      tsr_span_of("The system is invoked with `tool_choice=none`.\n"
                                  "You MUST NOT call any tools in the next message."));
    }
    if (strcmp(choice, "auto") != 0) {
        TSR_FAIL(w->err, TSR_E_USAGE, "chat: tool choice \"%.40s\" (required, none or auto)", choice);
    }
    return TSR_OK;
}

#define RAW_JSON                                                                                             \
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional "          \
    "formatting."

static tsr_status response_format(writer *w)
{
    switch (w->chat->format) {
    case TSR_CHAT_JSON_OBJECT:
        return notice(w, "response-format",
                      tsr_span_of("The system is invoked with `response_format=json_object`.\n" RAW_JSON));
    case TSR_CHAT_JSON_SCHEMA:
        return json_notice(w, "response-format",
                           "The system is invoked with `response_format=json_schema`.\n" RAW_JSON
                           "\nThe JSON data must match the following schema:\n",
                           w->chat->schema, "schema", false);
    default: return TSR_OK;
    }
}

static tsr_status everything(writer *w)
{
    const tsr_chat *c = w->chat;
    if (c->tools.p != NULL) {
        TSR_TRY(json_notice(w, "tool-declare",
                            "# Tools\nHere are the available tools, described in JSONSchema.\n\n", c->tools,
                            "tools", true));
    }
    TSR_TRY(effort(w));
    TSR_TRY(messages(w));
    TSR_TRY(tool_choice(w));
    TSR_TRY(response_format(w));
    if (c->generate) {
        TSR_TRY(begin_message(w, "assistant", "", (tsr_span){ NULL, 0 }));
        TSR_TRY(marker(w, SEP));
        TSR_TRY(open_tag(w, c->thinking ? "think" : "response"));
    }
    return TSR_OK;
}

tsr_status tsr_chat_each(const tsr_chat *c, tsr_chat_fn fn, void *payload, tsr_err *err)
{
    writer w = { .chat = c, .fn = fn, .payload = payload, .err = err };
    tsr_status st = everything(&w);
    tsr_bytes_free(&w.scratch);
    return st;
}

/* ---- ids ---------------------------------------------------------------------------------------- */

typedef struct encoder {
    const tsr_tokenizer *t;
    tsr_tokens *out;
} encoder;

static tsr_status encode(void *payload, tsr_span s, bool is_marker, tsr_err *err)
{
    encoder *e = payload;
    if (!is_marker) {
        return tsr_tokenizer_encode(e->t, s.p, s.bytes, 0, e->out, err);
    }
    int32_t id = tsr_tokenizer_added_id(e->t, s.p); /* markers are C strings */
    if (id < 0) {
        TSR_FAIL(err, TSR_E_MISSING, "tokenizer: added token %s: is missing (the chat format is Kimi K3's)",
                 s.p);
    }
    return tok_push(e->out, id, err);
}

tsr_status tsr_chat_encode(const tsr_tokenizer *t, const tsr_chat *c, tsr_tokens *out, tsr_err *err)
{
    encoder e = { t, out };
    size_t before = out->count;
    tsr_status st = tsr_chat_each(c, encode, &e, err);
    out->count = st == TSR_OK ? out->count : before;
    return st;
}
