/* tokenizer.h - text to token ids and back: byte-level BPE over a tiktoken ranks file, the pre-tokenisation of
 * Kimi K3, added tokens, a streaming detokeniser and the chat format XTML. Formats: docs/TOKENIZER.md.
 *
 * Nothing here reads files: the caller hands over their contents. A tokenizer never changes after it was opened; any
 * number of threads may use one at once. */
#ifndef TSR_MODEL_TOKENIZER_H
#define TSR_MODEL_TOKENIZER_H

#include "format/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Borrowed bytes, not ended by NUL. p NULL: absent, which is not the same as empty. */
typedef struct tsr_span {
    const char *p;
    size_t bytes;
} tsr_span;
/* Of a C string; NULL gives an absent span. */
tsr_span tsr_span_of(const char *s);

/* Growing arrays; start with { 0 }. Functions append to them; on failure the count is what it was before. */
typedef struct tsr_tokens {
    int32_t *ids;
    size_t count, room;
} tsr_tokens;
void tsr_tokens_free(tsr_tokens *t);
typedef struct tsr_bytes {
    char *p;
    size_t count, room;
} tsr_bytes;
void tsr_bytes_free(tsr_bytes *b);

/* ---- the tokenizer ------------------------------------------------------------------------------ */

#define TSR_TOKEN_ID_MAX ((int32_t)1 << 21)          /* ids are below it */
#define TSR_TOKEN_BYTES_MAX ((size_t)1 << 16)        /* of one token of a ranks file */
#define TSR_ADDED_BYTES_MAX ((size_t)1 << 10)        /* of one added token */
#define TSR_ADDED_COUNT_MAX ((size_t)1 << 16)        /* added tokens of a config */
#define TSR_RANKS_FILE_BYTES_MAX ((size_t)256 << 20) /* of a ranks file */
#define TSR_SPLIT_PIECE_CHARS 400000                 /* K3 cuts its input after so many characters ... */
#define TSR_SPLIT_RUN_CHARS 25000 /* ... and runs of white space, or of anything else, after so many */

typedef struct tsr_tokenizer tsr_tokenizer;

/* All zero: the built-in byte-level tokenizer without added tokens. */
typedef struct tsr_tokenizer_opts {
    tsr_span ranks; /* contents of tiktoken.model; absent: ids 0..255 are the bytes, nothing is merged */
    const char *ranks_name;  /* for messages; NULL: "tiktoken.model" */
    tsr_span config;         /* contents of tokenizer_config.json; absent: see below */
    const char *config_name; /* for messages; NULL: "tokenizer_config.json" */
    /* The pre-tokenisation as a PCRE2 pattern (UTF, UCP); NULL: Kimi K3's. K3's own pat_str in tiktoken's syntax is
     * recognised and means the same as NULL. */
    const char *pattern;
    /* Without ranks and config: K3's 256 added tokens behind the bytes ([BOS] 256, <|open|> 259, ...). */
    bool byte_added;
    int64_t vocab;      /* rows of the embedding; ids at or beyond it are refused. 0: not checked */
    size_t piece_chars; /* 0: TSR_SPLIT_PIECE_CHARS; at most 2^24 */
    size_t run_chars;   /* 0: TSR_SPLIT_RUN_CHARS */
    bool no_jit;        /* interpret the pattern */
} tsr_tokenizer_opts;

/* Ranks file: lines "base64 rank", LF or CR LF, the last one with or without; empty lines are skipped. Ranks are the
 * ids; they need not be ordered or without gaps, but no rank may come twice. A token may: every one of its ids decodes,
 * and the last line's is used to encode, as tiktoken's loader does. Every single byte must be a token.
 *
 * Added tokens come from the config's added_tokens_decoder ({"163584": {"content": "[BOS]", "special": true}, ...}).
 * Ranks 0..163583 without a gap mean Kimi K3 (or K2): the 256 ids behind them that the config does not name are called
 * <|reserved_token_ID|>; without a config, K3's published names stand there. Other ranks without a config: none.
 *
 * TSR_E_FORMAT: a line, JSON or field that is not as described (the message names line or key), no line at all, a single
 *   byte that is missing, a pattern PCRE2 does not compile.
 * TSR_E_CONFLICT: an added token at an id that a rank has, one text at two ids, an id at or beyond vocab.
 * TSR_E_UNSUPPORTED: a pattern with && (tiktoken's set intersection: write a lookahead or a negated class).
 * TSR_E_LIMIT: beyond the limits above, or out of memory. TSR_E_USAGE: piece_chars beyond 2^24. */
TSR_NODISCARD tsr_status tsr_tokenizer_open(tsr_tokenizer **out, const tsr_tokenizer_opts *opts,
                                            tsr_err *err);
void tsr_tokenizer_close(tsr_tokenizer **t);

typedef struct tsr_tokenizer_info {
    int32_t ranks;              /* lines of the ranks file; 256 when built in */
    int32_t ids;                /* one past the largest id that has a token */
    int32_t added;              /* added tokens, reserved ones included */
    int32_t repeated;           /* tokens that came again under another rank: worth a warning */
    int32_t longest;            /* bytes of the longest ranked token */
    int32_t bos, eos, unk, pad; /* what the config names so (or K3's); -1: none */
    bool built_in;              /* no ranks file */
    bool k3_names;              /* added tokens are K3's published ones, not the config's */
    bool own_pattern;           /* not K3's */
    bool jit;                   /* the pattern is compiled to machine code */
} tsr_tokenizer_info;
tsr_tokenizer_info tsr_tokenizer_info_of(const tsr_tokenizer *t);

/* The bytes of a token, valid as long as the tokenizer; an absent span when no token has this id. */
tsr_span tsr_tokenizer_token(const tsr_tokenizer *t, int32_t id);
/* The id of an added token by its text; -1: none. */
int32_t tsr_tokenizer_added_id(const tsr_tokenizer *t, const char *text);
/* True for added tokens; *special (may be NULL) then says whether the config calls it special. */
bool tsr_tokenizer_is_added(const tsr_tokenizer *t, int32_t id, bool *special);

/* ---- encoding ------------------------------------------------------------------------------------ */

/* Texts of added tokens become their ids. Never for text that a user, a tool or a document wrote. */
#define TSR_ENCODE_ADDED 1u

/* Appends the ids of text; no begin or end token is put in. Any bytes are welcome: each byte that is not part of valid
 * UTF-8 becomes a piece, and so a token, of its own, and decoding gives the very bytes back. Time is O(n log n).
 * Text is cut as K3 does (TSR_SPLIT_*), then, with TSR_ENCODE_ADDED, at added tokens (leftmost, longest), then by the
 * pattern; text the pattern does not match is a piece too.
 * TSR_E_LIMIT: out of memory, or PCRE2's match limits (own patterns only). TSR_E_UNSUPPORTED: an own pattern that matches
 * backwards. */
TSR_NODISCARD tsr_status tsr_tokenizer_encode(const tsr_tokenizer *t, const void *text, size_t bytes,
                                              unsigned flags, tsr_tokens *out, tsr_err *err);

/* ---- decoding ------------------------------------------------------------------------------------ */

#define TSR_DECODE_RAW 1u          /* bytes as they are; otherwise always valid UTF-8 comes out */
#define TSR_DECODE_SKIP_SPECIAL 2u /* leaves out added tokens that the config calls special */
#define TSR_DECODE_SKIP_ADDED 4u   /* leaves out all added tokens */

/* Ids one at a time, for printing while they are generated. Start with { .flags = ... }; no memory of its own.
 * A character that is not complete is held back; an invalid sequence gives one U+FFFD per maximal subpart, as Unicode
 * recommends (section 3.9), as soon as it is known to be one. */
typedef struct tsr_detok {
    unsigned flags; /* TSR_DECODE_* */
    uint8_t held[4], held_count;
} tsr_detok;
/* Appends what can be printed now. TSR_E_FORMAT: no token has this id (nothing changes); TSR_E_LIMIT: out of memory. */
TSR_NODISCARD tsr_status tsr_detok_push(tsr_detok *d, const tsr_tokenizer *t, int32_t id, tsr_bytes *out,
                                        tsr_err *err);
/* The end of the text: an incomplete character gives one U+FFFD. d may be used again. */
TSR_NODISCARD tsr_status tsr_detok_finish(tsr_detok *d, tsr_bytes *out, tsr_err *err);
/* Pushes all and finishes. */
TSR_NODISCARD tsr_status tsr_tokenizer_decode(const tsr_tokenizer *t, const int32_t *ids, size_t count,
                                              unsigned flags, tsr_bytes *out, tsr_err *err);

/* ---- chat (XTML) --------------------------------------------------------------------------------- */

typedef enum tsr_role { TSR_ROLE_SYSTEM, TSR_ROLE_USER, TSR_ROLE_ASSISTANT, TSR_ROLE_TOOL } tsr_role;

typedef struct tsr_chat_call {
    tsr_span id; /* opaque; absent: none */
    tsr_span name;
    tsr_span arguments; /* a JSON object; absent or blank: none; text that is no JSON is passed on as it is */
} tsr_chat_call;

typedef struct tsr_chat_message {
    tsr_role role;
    tsr_span
        name; /* absent or empty: none. For TSR_ROLE_TOOL the tool; absent: the call's of that id or place */
    tsr_span text;
    tsr_span reasoning; /* assistant: the think channel; blank counts as empty */
    const tsr_chat_call *calls;
    size_t call_count;
    tsr_span call_id; /* tool: the call it answers */
    tsr_span tools;   /* system: a JSON array of more tools, instead of text */
} tsr_chat_message;

typedef enum tsr_chat_format { TSR_CHAT_TEXT, TSR_CHAT_JSON_OBJECT, TSR_CHAT_JSON_SCHEMA } tsr_chat_format;

typedef struct tsr_chat {
    const tsr_chat_message *messages;
    size_t count;
    bool thinking;           /* K3's own default is true */
    bool generate;           /* ends with the open assistant message, for the model to go on */
    const char *effort;      /* "low", "medium", "high", "max"; NULL: not said. Only with thinking */
    tsr_span tools;          /* JSON array of tool schemas; absent or []: none */
    const char *tool_choice; /* "required", "none", "auto"; NULL as "auto" */
    tsr_chat_format format;
    tsr_span schema; /* JSON, for TSR_CHAT_JSON_SCHEMA */
} tsr_chat;

/* The conversation as segments, in order: marker true for the text of an added token, false for ordinary text, which is
 * to be encoded on its own and without TSR_ENCODE_ADDED. text is valid during the call only. */
typedef tsr_status (*tsr_chat_fn)(void *payload, tsr_span text, bool marker, tsr_err *err);
/* Stops at fn's first failure and returns it.
 * TSR_E_USAGE: unknown role, effort or tool_choice; a call without name; arguments that are JSON but no object; tools that
 * are no array; a tool message whose tool is not known. TSR_E_FORMAT: tools or schema that are no JSON. TSR_E_LIMIT: an
 * integer beyond 64 bits in JSON, or out of memory. The message names message and call, counted from 1. */
TSR_NODISCARD tsr_status tsr_chat_each(const tsr_chat *c, tsr_chat_fn fn, void *payload, tsr_err *err);
/* Appends the ids. In addition TSR_E_MISSING: the tokenizer lacks a marker (it is not K3's). The model ends its turn with
 * <|end_of_msg|>. */
TSR_NODISCARD tsr_status tsr_chat_encode(const tsr_tokenizer *t, const tsr_chat *c, tsr_tokens *out,
                                         tsr_err *err);

#ifdef __cplusplus
}
#endif
#endif
