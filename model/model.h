/* model.h - public: a model of the Kimi K3 family in memory: forward, backward, inference state.
 *
 * Everything is written once against the table of kernels (kernels/kernels.h): the backend decides where it runs. Memory
 * is planned, then taken once; forward and backward allocate nothing. Results do not depend on the number of threads.
 * Mathematics: docs/MODEL.md. One thread at a time may use a model and its sessions. */
#ifndef TSR_MODEL_MODEL_H
#define TSR_MODEL_MODEL_H

#include "kernels/kernels.h"
#include "model/experts.h"
#include "model/parallel.h"
#include "model/source.h"
#include "model/spec.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tsr_model tsr_model;
typedef struct tsr_session tsr_session;

typedef struct tsr_model_opts {
    bool train;         /* parameters as f32 with gradients, activations are kept; else weights as stored */
    bool recompute;     /* train: keep only each layer's input, run its forward again in backward */
    int64_t max_tokens; /* of one call; 0: 512 */
    int64_t max_segs;   /* train: sequences of one call; 0: 1 */
    int64_t kda_chunk;  /* 16, 32, 64; 0: 64 */
    uint64_t expert_cache; /* bytes for routed experts; 0: all of them resident. Not with train */
    int io_threads;        /* that read experts; 0: 2 */
    uint64_t mem_limit;    /* refuse plans beyond; 0: none */
    const tsr_expert_group
        *group; /* train: this model holds its part of the experts only; NULL: all. Borrowed */
    const tsr_sequence_line *line; /* train: ranks that share sequences; NULL: none. Borrowed */
} tsr_model_opts;

/* Bytes of backend memory, before anything is loaded. */
typedef struct tsr_plan {
    uint64_t weights;         /* dense parameters as they will lie in memory */
    uint64_t experts;         /* room for routed experts: the cache, or all */
    uint64_t experts_all;     /* all of them */
    uint64_t expert_floor;    /* the smallest cache that works: the chosen experts of one token */
    uint64_t grads;           /* train */
    uint64_t workspace;       /* activations of max_tokens */
    uint64_t state_fixed;     /* of one session: delta attention states and convolution history */
    uint64_t state_per_token; /* of one session: compressed cache, per position */
    uint64_t total; /* weights + experts + grads + workspace, and one session of `context` positions */
} tsr_plan;

/* Reads what the source says of names, dtypes and shapes; no data, no memory taken. Compares them with the catalogue:
 * TSR_E_MISSING, TSR_E_CONFLICT (shape), TSR_E_UNSUPPORTED (dtype) name the tensor. TSR_E_LIMIT: beyond mem_limit. */
TSR_NODISCARD tsr_status tsr_model_plan(tsr_plan *out, const tsr_spec *spec, const tsr_weight_source *src,
                                        const tsr_model_opts *o, tsr_backend *b, int64_t context,
                                        tsr_dtype cache_dtype, tsr_err *err);
/* Plans, takes the memory, loads. Borrows src and b: both must outlive the model (src: unless all experts are
 * resident). progress in bytes. */
TSR_NODISCARD tsr_status tsr_model_open(tsr_model **out, const tsr_spec *spec, const tsr_weight_source *src,
                                        const tsr_model_opts *o, tsr_backend *b, const tsr_progress *p,
                                        tsr_err *err);
void tsr_model_close(tsr_model **m);
const tsr_spec *tsr_model_spec(const tsr_model *m);
tsr_backend *tsr_model_backend(const tsr_model *m);
const tsr_plan *tsr_model_plan_of(const tsr_model *m);
/* false: all experts are resident, or the model is for training. */
bool tsr_model_expert_stats(const tsr_model *m, tsr_experts_stats *out);

/* ---- inference ------------------------------------------------------------------------------------------- */

/* The state of one sequence: delta attention states, convolution history, compressed cache for `context` positions.
 * cache_dtype: F32 or BF16. Must be closed before the model. */
TSR_NODISCARD tsr_status tsr_session_open(tsr_session **out, tsr_model *m, int64_t context,
                                          tsr_dtype cache_dtype, tsr_err *err);
void tsr_session_close(tsr_session **s);
void tsr_session_reset(tsr_session *s);
int64_t tsr_session_length(const tsr_session *s); /* positions so far */
int64_t tsr_session_context(const tsr_session *s);
/* Bytes of state now, and what of it grows by each position. */
uint64_t tsr_session_bytes(const tsr_session *s, uint64_t *per_token);

/* The state as a Tessera checkpoint at path (committed by rename; verify, ls and cat understand it): layers.N.state,
 * .conv, .cache, and the tokens seen. tokens: tsr_session_length ids, or NULL. */
TSR_NODISCARD tsr_status tsr_session_save(const tsr_session *s, const char *path, const int32_t *tokens,
                                          tsr_err *err);
/* Into a session that is empty. *tokens_out (may be NULL): malloc'ed ids, NULL when none were saved.
 * TSR_E_CONFLICT: of another model or cache dtype; TSR_E_LIMIT: longer than the session's context. */
TSR_NODISCARD tsr_status tsr_session_load(tsr_session *s, const char *path, int32_t **tokens_out,
                                          int64_t *count_out, tsr_err *err);

typedef enum tsr_trace_kind {
    TSR_TRACE_HIDDEN,        /* f32 [n][hidden]: the running sum after a layer */
    TSR_TRACE_ROUTE_IDS,     /* i32 [n][k] */
    TSR_TRACE_ROUTE_WEIGHTS, /* f32 [n][k] */
    TSR_TRACE_KDA_STATE      /* f32 [heads dk][dv] after the call */
} tsr_trace_kind;
typedef struct tsr_trace {
    void *payload;
    /* data is host memory, valid during the call. */
    void (*fn)(void *payload, tsr_trace_kind kind, int32_t layer, const void *data, int64_t rows,
               int64_t cols);
} tsr_trace;

typedef struct tsr_forward_args {
    const int32_t *ids; /* host [n]; each in [0, vocab) or TSR_E_USAGE */
    int64_t n;          /* 1 .. max_tokens; the session must have room: TSR_E_LIMIT */
    float *logits;      /* host, of the last `logit_rows` tokens [logit_rows][vocab]; NULL */
    int64_t logit_rows;
    const int32_t *targets; /* host [n]: with logprob; negative: not wanted */
    float *logprob;         /* host [n]: log probability of targets (0 where not wanted); NULL */
    const tsr_trace *trace; /* NULL; tracing may allocate */
} tsr_forward_args;
/* Appends n tokens to the session. Allocates nothing (but for a trace). After a failure the session must be reset. */
TSR_NODISCARD tsr_status tsr_model_forward(tsr_model *m, tsr_session *s, const tsr_forward_args *a,
                                           tsr_err *err);

/* ---- training --------------------------------------------------------------------------------------------- */

/* Is shown the routing of each mixture layer while tsr_model_loss goes forward, once, whether or not activations are
 * recomputed: s [n][experts] scores, w and ids [n][k], backend memory, valid during the call. */
typedef struct tsr_route_watch {
    void *payload;
    tsr_status (*fn)(void *payload, int32_t layer, const float *s, const float *w, const int32_t *ids,
                     int64_t n, tsr_err *err);
} tsr_route_watch;
/* Is told when backward has added all that this call adds to the gradients of a layer's parameters: last layer first, then -1 for
 * those of no layer. */
typedef struct tsr_grad_watch {
    void *payload;
    tsr_status (*fn)(void *payload, int32_t layer, tsr_err *err);
} tsr_grad_watch;
typedef struct tsr_batch {
    const int32_t *ids, *targets; /* host [n]; negative targets do not count */
    const int64_t *seg; /* host [segs + 1]: sequences one behind the other, state and attention start anew */
    int64_t n, segs;
    const tsr_trace *trace;
    const tsr_route_watch *watch; /* NULL */
    const tsr_grad_watch *done;   /* NULL; of the backward that follows */
    /* With a line of ranks: these n tokens are the rank's share of `total` (tsr_line_first says which), and all ranks of
     * the line make this call. before: tokens of the first segment that lie on earlier ranks; goes_on: the last segment
     * goes on on the next one. total 0: not shared, nobody else takes part. At least TSR_LINE_LEAST tokens a rank. */
    int64_t total, before;
    bool goes_on;
} tsr_batch;
#define TSR_LINE_LEAST 16
/* The first of `total` tokens that rank has; rank == ranks: total. */
static inline int64_t tsr_line_first(int64_t total, int32_t rank, int32_t ranks)
{
    return total * rank / ranks;
}
typedef struct tsr_loss {
    double sum;    /* of -log p over the counted targets, f64 */
    int64_t count; /* counted targets */
} tsr_loss;
/* Forward and loss; keeps what backward needs. TSR_E_USAGE: a bad id or segment. */
TSR_NODISCARD tsr_status tsr_model_loss(tsr_model *m, const tsr_batch *in, tsr_loss *out, tsr_err *err);
/* Of the last tsr_model_loss: -log p of each target, 0 where none counts. Host [n], valid until the next call. */
const float *tsr_model_losses(const tsr_model *m);
/* Gradients of (scale * sum of losses) of the last tsr_model_loss: parameters +=. Mean loss: scale = 1 / count. */
TSR_NODISCARD tsr_status tsr_model_backward(tsr_model *m, double scale, tsr_err *err);
TSR_NODISCARD tsr_status tsr_model_zero_grads(tsr_model *m, tsr_err *err);
/* Other max_tokens, max_segs and recompute from here on: takes a new workspace, parameters stay. After a failure the model can
 * only be closed. */
TSR_NODISCARD tsr_status tsr_model_reshape(tsr_model *m, const tsr_model_opts *o, tsr_err *err);
/* Largest attention logit of each head of a layer of full attention since the last reset (-inf: none), for QK-clip. out: host
 * [mla_heads]. */
TSR_NODISCARD tsr_status tsr_model_max_logits(const tsr_model *m, int32_t layer, float *out, tsr_err *err);
TSR_NODISCARD tsr_status tsr_model_max_logits_reset(tsr_model *m, tsr_err *err);

/* One parameter of a model opened for training. */
typedef struct tsr_param {
    const char *name; /* canonical; a family's holds {e} */
    int rank;
    int64_t shape[4];
    int32_t layer;         /* -1: none */
    uint32_t expert_count; /* 0: plain; else data and grad are [expert_count][shape] */
    int64_t count;         /* elements, all experts */
    float *data, *grad;    /* backend memory; grad NULL: has none (the router's bias) */
} tsr_param;
int64_t tsr_model_param_count(const tsr_model *m);
const tsr_param *tsr_model_param(const tsr_model *m, int64_t i);
/* By canonical name; NULL: none. */
const tsr_param *tsr_model_param_find(const tsr_model *m, const char *name);

#ifdef __cplusplus
}
#endif
#endif
