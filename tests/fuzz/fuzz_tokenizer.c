/* fuzz_tokenizer.c - the first byte chooses: a ranks file, a tokenizer_config.json, a text, JSON inside a chat, or ids.
 * Whatever was encoded must decode to the same bytes, in one go and streamed. */
#include "model/tokenizer.h"
#include "tests/fuzz/fuzz.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void must(bool x)
{
    if (!x) {
        abort();
    }
}

static tsr_tokenizer *opened(const char *ranks, size_t bytes, size_t run_chars)
{
    tsr_tokenizer *t;
    tsr_tokenizer_opts o = { .ranks = { ranks, bytes }, .byte_added = ranks == NULL, .run_chars = run_chars };
    o.piece_chars = run_chars > 0 ? 5 * run_chars : 0;
    return tsr_tokenizer_open(&t, &o, NULL) == TSR_OK ? t : NULL;
}

/* A vocabulary with merges over a few letters, behind the bytes. */
static tsr_tokenizer *small(void)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    static const char more[] =
        "YWI= 256\nYWJj 257\nYmM= 258\nICA= 259\nICAg 260\nw6k= 261\n5L2g 262\nIGE= 263\nYWE= 264\nYWFhYQ== "
        "265\nCgo= 266\nJ3M= 267\n";
    char text[256 * 9 + sizeof more];
    size_t n = 0;
    for (int b = 0; b < 256; b++) {
        n += (size_t)sprintf(text + n, "%c%c== %d\n", digits[b >> 2], digits[(b & 3) << 4], b);
    }
    memcpy(text + n, more, sizeof more - 1);
    return opened(text, n + sizeof more - 1, 7);
}

static void round_trip(const tsr_tokenizer *t, const char *text, size_t n, unsigned flags)
{
    tsr_tokens k = { 0 };
    tsr_bytes raw = { 0 }, whole = { 0 }, streamed = { 0 };
    must(tsr_tokenizer_encode(t, text, n, flags, &k, NULL) == TSR_OK);
    must(tsr_tokenizer_decode(t, k.ids, k.count, TSR_DECODE_RAW, &raw, NULL) == TSR_OK);
    must(raw.count == n && (n == 0 || memcmp(raw.p, text, n) == 0));
    must(tsr_tokenizer_decode(t, k.ids, k.count, 0, &whole, NULL) == TSR_OK);
    tsr_detok d = { 0 };
    for (size_t i = 0; i < k.count; i++) {
        must(tsr_detok_push(&d, t, k.ids[i], &streamed, NULL) == TSR_OK);
    }
    must(tsr_detok_finish(&d, &streamed, NULL) == TSR_OK);
    must(streamed.count == whole.count &&
         (whole.count == 0 || memcmp(streamed.p, whole.p, whole.count) == 0));
    tsr_tokens_free(&k);
    tsr_bytes_free(&raw);
    tsr_bytes_free(&whole);
    tsr_bytes_free(&streamed);
}

static void chat(const tsr_tokenizer *t, const char *p, size_t n)
{
    tsr_span all = { p, n };
    tsr_chat_call call = { .id = all, .name = { "f", 1 }, .arguments = all };
    tsr_chat_message m[] = {
        { .role = TSR_ROLE_USER, .name = all, .text = all },
        { .role = TSR_ROLE_ASSISTANT, .reasoning = all, .calls = &call, .call_count = 1 },
        { .role = TSR_ROLE_TOOL, .call_id = all, .text = all }
    };
    tsr_chat c = { .messages = m, .count = 3, .thinking = true, .generate = true };
    tsr_tokens k = { 0 };
    (void)!tsr_chat_encode(t, &c, &k, NULL); /* only crashes matter */
    c = (tsr_chat){ .tools = all, .format = TSR_CHAT_JSON_SCHEMA, .schema = all };
    (void)!tsr_chat_encode(t, &c, &k, NULL);
    tsr_tokens_free(&k);
}

static void any_ids(const tsr_tokenizer *t, const uint8_t *p, size_t n)
{
    tsr_detok d = { 0 };
    tsr_bytes out = { 0 };
    for (size_t i = 0; i + 1 < n; i += 2) {
        size_t before = out.count;
        int32_t id = (int32_t)(p[i] | (p[i + 1] & 1) << 8);
        bool known = tsr_tokenizer_token(t, id).p != NULL;
        must((tsr_detok_push(&d, t, id, &out, NULL) == TSR_OK) == known && out.count >= before &&
             d.held_count < 4);
    }
    must(tsr_detok_finish(&d, &out, NULL) == TSR_OK);
    tsr_bytes_free(&out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static tsr_tokenizer *bytes, *merging;
    if (bytes == NULL) {
        bytes = opened(NULL, 0, 0);
        merging = small();
        must(bytes != NULL && merging != NULL);
    }
    if (size == 0) {
        return 0;
    }
    const char *p = (const char *)data + 1;
    size_t n = size - 1;
    tsr_tokenizer *t;
    switch (data[0] % 5) {
    case 0:
        t = opened(p, n, 0);
        if (t != NULL) {
            round_trip(t, p, n < 500 ? n : 500, 0);
        }
        tsr_tokenizer_close(&t);
        break;
    case 1:
        if (tsr_tokenizer_open(&t, &(tsr_tokenizer_opts){ .config = { p, n } }, NULL) == TSR_OK) {
            round_trip(t, p, n, TSR_ENCODE_ADDED);
        }
        tsr_tokenizer_close(&t);
        break;
    case 2:
        round_trip(merging, p, n, 0);
        round_trip(bytes, p, n, TSR_ENCODE_ADDED);
        break;
    case 3: chat(bytes, p, n); break;
    default: any_ids(merging, data + 1, n);
    }
    return 0;
}
