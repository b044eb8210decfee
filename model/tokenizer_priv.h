/* tokenizer_priv.h - the tokenizer's parts among themselves: vocabulary, added tokens, pattern, merges. */
#ifndef TSR_MODEL_TOKENIZER_PRIV_H
#define TSR_MODEL_TOKENIZER_PRIV_H

#include "model/tokenizer.h"

#define K3_RANKS 163584 /* lines of Kimi K2's and K3's ranks file */
#define K3_ADDED 256    /* ids behind them */

/* ---- vocabulary (vocab.c), filled by ranks.c ---- */

typedef struct vocab_token {
    uint32_t at, bytes; /* in blob; 0 bytes: no token has this id */
} vocab_token;

typedef struct vocab_slot {
    uint32_t tag; /* upper half of the hash */
    int32_t id;   /* -1: free */
} vocab_slot;

typedef struct vocab {
    uint8_t *blob;
    vocab_token *tokens; /* by id */
    int32_t id_count;    /* one past the largest rank */
    int32_t count;       /* ids that have a token */
    int32_t repeated;
    uint32_t longest;  /* bytes */
    vocab_slot *slots; /* open addressing */
    uint32_t mask;
    int32_t byte_id[256];
    int32_t *pair_id; /* 65536: id of the token of two bytes, -1: none */
} vocab;

tsr_status vocab_from_bytes(vocab *v, tsr_err *err); /* the built-in one */
tsr_status vocab_from_ranks(vocab *v, tsr_span text, const char *name, tsr_err *err);
/* Hash table and tables of short tokens, from blob and tokens. */
tsr_status vocab_index(vocab *v, tsr_err *err);
void vocab_free(vocab *v);
/* The id to encode these bytes with, -1: none. n >= 1. */
int32_t vocab_find(const vocab *v, const uint8_t *p, size_t n);

/* ---- added tokens (added.c) ---- */

typedef struct added_token {
    int32_t id;
    uint32_t bytes;
    char *text; /* own, ended by NUL */
    bool special;
} added_token;

typedef struct added {
    added_token *by_text; /* sorted by bytes */
    uint32_t *by_id;      /* indices into by_text, sorted by id */
    size_t count, room;
    bool first[256]; /* a token begins with this byte */
    int32_t bos, eos, unk, pad;
    bool k3_names;
} added;

/* Fills a; v is complete. config absent and not K3's ranks (or opts->byte_added): none. */
tsr_status added_fill(added *a, const vocab *v, const tsr_tokenizer_opts *opts, tsr_err *err);
void added_free(added *a);
const added_token *added_by_id(const added *a, int32_t id);
const added_token *added_by_text(const added *a, const char *text, size_t bytes);
/* The longest added token that begins at p, or NULL. */
const added_token *added_at(const added *a, const uint8_t *p, size_t n);

/* ---- pattern (pretoken.c) ---- */

typedef struct pretoken pretoken;
typedef struct pretoken_run pretoken_run; /* what one thread needs to match */
typedef tsr_status (*pretoken_fn)(void *payload, const uint8_t *piece, size_t bytes, tsr_err *err);

tsr_status pretoken_open(pretoken **out, const char *pattern, bool no_jit, tsr_err *err);
void pretoken_close(pretoken **p);
bool pretoken_is_own(const pretoken *p);
bool pretoken_has_jit(const pretoken *p);
tsr_status pretoken_run_open(pretoken_run **out, const pretoken *p, tsr_err *err);
void pretoken_run_close(pretoken_run **r);
/* Calls fn with every piece of text in order: they are disjoint and make up all of it. Any bytes. */
tsr_status pretoken_each(pretoken_run *r, const uint8_t *text, size_t bytes, pretoken_fn fn, void *payload,
                         tsr_err *err);

/* ---- merges (bpe.c) ---- */

typedef struct bpe_run {
    uint32_t *next, *prev;
    int32_t *rank; /* of the pair that begins here, -1: none */
    uint64_t *heap;
    size_t room; /* bytes of a piece the arrays suffice for */
} bpe_run;

/* Appends the ids of one piece. */
tsr_status bpe_piece(const vocab *v, bpe_run *r, const uint8_t *piece, size_t bytes, tsr_tokens *out,
                     tsr_err *err);
void bpe_run_free(bpe_run *r);

/* ---- whole ---- */

struct tsr_tokenizer {
    vocab vocab;
    added added;
    pretoken *pattern;
    size_t piece_chars, run_chars;
    bool built_in;
};

/* Makes room for count items of item bytes in all, doubling. */
tsr_status tok_grow(void **p, size_t *room, size_t count, size_t item, tsr_err *err);
tsr_status tok_push(tsr_tokens *out, int32_t id, tsr_err *err);
tsr_status tok_append(tsr_bytes *out, const void *p, size_t n, tsr_err *err);

#endif
