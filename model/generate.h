/* generate.h - text from a model: the prompt in chunks, then token by token, until something ends it. */
#ifndef TSR_MODEL_GENERATE_H
#define TSR_MODEL_GENERATE_H

#include "model/model.h"
#include "model/sampler.h"
#include "model/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What ended it. */
typedef enum tsr_stop {
    TSR_STOP_LENGTH,  /* max_tokens were made */
    TSR_STOP_ID,      /* one of stop_ids; it is among the ids, but not in the text */
    TSR_STOP_TEXT,    /* one of stop_texts; the text ends in front of it */
    TSR_STOP_CONTEXT, /* the session is full */
    TSR_STOP_CALLER   /* the callback asked for it */
} tsr_stop;
const char *tsr_stop_name(tsr_stop s); /* "length", "end", "text", "context", "caller" */

/* A token that was made, and the text that is ready with it: characters that are not complete, and what may become a stop
 * text, wait for later tokens. What is left at the end comes in one more call with id -1. */
typedef struct tsr_generated {
    int32_t id;
    int64_t position;    /* in the sequence, from 0 */
    const float *logits; /* host [vocab]: those it was chosen from; NULL with id -1 */
    tsr_span text;       /* valid during the call */
} tsr_generated;
/* *stop = true ends after this token. A failure ends at once and is passed on. */
typedef tsr_status (*tsr_generate_fn)(void *payload, const tsr_generated *g, bool *stop, tsr_err *err);

typedef struct tsr_generate_opts {
    tsr_session *session;     /* its state goes on */
    tsr_sampler *sampler;     /* of the model's vocabulary */
    const tsr_tokenizer *tok; /* NULL: ids only, no text */
    unsigned decode;          /* TSR_DECODE_* */
    const int32_t *prompt;    /* [prompt_count], at least one */
    int64_t prompt_count;
    int64_t chunk;      /* tokens of the prompt at once, 1 .. max_tokens of the model */
    int64_t max_tokens; /* 0: only the prompt is run */
    const int32_t *stop_ids;
    size_t stop_id_count;
    const char *const
        *stop_texts; /* NULL-terminated, none empty; NULL. The one that is complete first counts, of several
                                      the longest: how the text falls into tokens does not matter */
    bool run_last;   /* also run the last token, so that the session holds all of them */
    const volatile int *cancel; /* non-zero: TSR_E_CANCELLED before the next step; NULL */
    tsr_generate_fn fn;         /* NULL */
    void *payload;
} tsr_generate_opts;

typedef struct tsr_generate_part {
    int64_t tokens;
    uint64_t ns;
    tsr_experts_stats experts; /* differences: asked, hits, misses, prefetched, bytes_read, wait_ns */
} tsr_generate_part;
typedef struct tsr_generate_result {
    tsr_stop stop;
    int64_t tokens;            /* made, with the one that ended it */
    tsr_generate_part prefill; /* the prompt; with max_tokens its logits too */
    tsr_generate_part decode;  /* runs of made tokens: the last one is not run unless run_last */
    uint64_t first_token_ns;   /* from the call to the first token chosen */
    bool cached;               /* experts are not all resident: the differences mean something */
} tsr_generate_result;

/* Allocates at its start; per token only when text waits longer than before. An id without a token gives no text.
 * Errors: those of tsr_model_forward and tsr_sampler_pick, and the callback's; then the session must be reset.
 * TSR_E_LIMIT: the prompt does not fit the session, nothing was run. TSR_E_CANCELLED. */
TSR_NODISCARD tsr_status tsr_generate(tsr_model *m, const tsr_generate_opts *o, tsr_generate_result *out,
                                      tsr_err *err);

#ifdef __cplusplus
}
#endif
#endif
