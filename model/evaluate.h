/* evaluate.h - how well a model predicts given tokens. */
#ifndef TSR_MODEL_EVALUATE_H
#define TSR_MODEL_EVALUATE_H

#include "model/model.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tsr_evaluate_opts {
    tsr_session *session; /* empty; its context is the window */
    const int32_t *ids;   /* host [count], at least one */
    int64_t count;
    int64_t chunk; /* tokens at once, 1 .. max_tokens of the model; windows begin a new one */
    int32_t bos;   /* put in front of every window; negative: nothing is */
    float *
        logprob; /* host [count]: log probability of each id given what stands before it in its window, NaN for one that
                       nothing stands before; NULL */
    const tsr_trace *trace; /* NULL; rows of bos are seen too */
    /* Logits of each chunk, host [rows][vocab]; NULL. */
    tsr_status (*logits)(void *payload, const float *logits, int64_t rows, tsr_err *err);
    void *logits_payload;
    const tsr_progress *progress; /* done and total in bytes of ids; NULL */
} tsr_evaluate_opts;

typedef struct tsr_evaluate_result {
    double loss;    /* sum of -log p over scored ids, f64, in order */
    int64_t scored; /* ids that something stands before */
    int64_t tokens; /* run, with every bos */
    int64_t
        windows; /* an id is run in exactly one window and predicted in that of the id before it, so that all but the first
                        are scored */
    uint64_t ns;
} tsr_evaluate_result;

/* Windows of as many tokens as the session takes, each from an empty state. Errors as of tsr_model_forward;
 * TSR_E_NUMERIC: a log probability is not a number, the message names the position. */
TSR_NODISCARD tsr_status tsr_evaluate(tsr_model *m, const tsr_evaluate_opts *o, tsr_evaluate_result *out,
                                      tsr_err *err);

#ifdef __cplusplus
}
#endif
#endif
