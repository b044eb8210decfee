/* model_priv.h - for model/ only: parameters in memory, the workspace, one run through the layers. */
#ifndef TSR_MODEL_MODEL_PRIV_H
#define TSR_MODEL_MODEL_PRIV_H

#include "model/model.h"

/* ---- parameters -------------------------------------------------------------------------------------------- */

typedef struct param {
    tsr_param pub;
    tsr_weight w;   /* one item: what the gemm ops take */
    uint64_t bytes; /* in memory, all experts */
    int64_t source_id;
    tsr_dtype stored;
    uint64_t stored_bytes;
} param;

/* The parameters of a layer; NULL where it has none. */
typedef struct layer_params {
    param *attn_norm, *mlp_norm, *attn_res_norm, *attn_res_proj, *mlp_res_norm, *mlp_res_proj;
    param *q, *k, *v, *g, *g_a, *g_b, *o; /* both kinds of attention: g is the output gate of either */
    param *q_conv, *k_conv, *v_conv, *f_a, *f_b, *b, *dt_bias, *a_log, *o_norm;
    param *q_a, *q_a_norm, *q_b, *kv_a, *kv_a_norm, *kv_b;
    param *gate, *up, *down; /* dense */
    param *router, *bias, *latent_down, *latent_up, *latent_norm, *shared_gate, *shared_up, *shared_down;
    param *e_gate, *e_up, *e_down; /* training: families */
    const void **e_data[3];        /* training: pointers of the experts, backend memory */
    float **e_grad[3];
} layer_params;

typedef struct model_params {
    param *list;
    int64_t count;
    layer_params *layer;
    param *embed, *final_norm, *head, *output_res_norm, *output_res_proj;
    tsr_arena *arena;
    tsr_dtype expert_dtype; /* of the routed experts as stored */
    uint64_t weight_bytes, grad_bytes;
    void *data, *grads; /* one block each, backend memory */
} model_params;

/* Names, shapes, dtypes against the catalogue; sets where each will lie. */
tsr_status params_plan(model_params *p, const tsr_spec *s, const tsr_weight_source *src, bool train,
                       const tsr_expert_group *group, tsr_err *err);
tsr_status params_load(model_params *p, const tsr_spec *s, const tsr_weight_source *src, bool train,
                       const tsr_expert_group *group, tsr_backend *b, const tsr_progress *progress,
                       tsr_err *err);
void params_free(model_params *p, tsr_backend *b);

/* ---- workspace ---------------------------------------------------------------------------------------------- */

/* Memory of one run, taken and given back like a stack. Dry: only counts; base is then no address of anything. */
typedef struct stack {
    char *base;
    size_t size, used, peak;
} stack;

/* ---- one run ------------------------------------------------------------------------------------------------ */

struct layer_saved;

typedef struct run {
    tsr_model *m;
    tsr_backend *b;
    const tsr_spec *spec;
    stack *ws;
    bool dry, train;
    int64_t n, segs;
    const int64_t *seg; /* backend */
    const int32_t *ids, *targets;
    tsr_session *s;      /* NULL in training */
    float *bank, *dbank; /* banked block vectors [banks][n][hidden], and their gradients */
    int64_t banks;
    const tsr_trace *trace;
    const tsr_route_watch *watch;
    const tsr_grad_watch *done;
    int64_t total, before; /* total > 0: tokens are shared with a line of ranks */
    bool goes_on;
    tsr_err *err;
} run;

/* n elements of backend memory from the run's workspace, 64-byte aligned. */
void *ws_bytes(run *r, size_t bytes);
float *ws_f32(run *r, int64_t n);
static inline size_t ws_mark(const run *r)
{
    return r->ws->used;
}
static inline void ws_release(run *r, size_t mark)
{
    r->ws->used = mark;
}

/* Calls a kernel with named arguments; nothing in a dry run. */
#define RUN(r, op, ...)                                                                                      \
    do {                                                                                                     \
        if (!(r)->dry) {                                                                                     \
            tsr_##op##_args args_ = { __VA_ARGS__ };                                                         \
            if (tsr_##op((r)->b, &args_) != TSR_OK) {                                                        \
                TSR_FAIL((r)->err, TSR_E_IO, "%s: the device failed in " #op, (r)->b->name);                 \
            }                                                                                                \
        }                                                                                                    \
    } while (0)

/* y[n][out] = (or +=) x W^T; strides 0: dense. */
tsr_status linear(run *r, const param *w, const float *x, int64_t x_stride, float *y, int64_t y_stride,
                  int64_t n, bool accumulate);
/* w.grad += dy^T x;  dx = (or +=) dy W. dx NULL: not wanted. */
tsr_status linear_bwd(run *r, const param *w, const float *x, int64_t x_stride, const float *dy,
                      int64_t dy_stride, float *dx, int64_t dx_stride, int64_t n, bool accumulate);
tsr_status trace_out(run *r, tsr_trace_kind kind, int32_t layer, const void *data, int64_t rows,
                     int64_t cols);
tsr_status copy_rows(run *r, float *dst, const float *src, int64_t n, int64_t d);
static inline const float *vec(const param *p)
{
    return p->w.data;
}

/* ---- layers: what each keeps for its backward ------------------------------------------------------------------ */

typedef struct kda_saved {
    float *u[3], *c[3]; /* inputs of the convolutions, and their outputs (c[2] is v) */
    float *q, *k, *rstd_q, *rstd_k, *f_a, *z, *g, *beta, *o, *states, *g_a, *gate, *normed, *rstd;
    float *history[3]; /* of a line: last inputs of the convolutions on the rank before */
} kda_saved;
typedef struct mla_saved {
    float *q_a, *rstd_qa, *q_an, *q, *kv_a, *c, *rstd_c, *kv, *o, *lse, *gate, *gated;
    float *qx, *cx, *krx, *ox; /* of a line: with the rows that stand before, which have queries of zero */
} mla_saved;
typedef struct mlp_saved {
    float *g, *u, *a;
} mlp_saved;
/* Of one layer: rows that went to each rank, and came from it. Host [ranks]. */
typedef struct moe_trip {
    int64_t *sent, *got;
} moe_trip;
typedef struct moe_saved {
    const float *z;
    float *s, *w, *xs, *g, *u, *a, *y, *sum, *rstd, *normed;
    int32_t *ids, *order, *pos;
    int64_t *offset;
    /* Rows as the experts here see them: their own copies when experts are shared with other ranks. */
    float *xe, *ye;
    int64_t *eoffset, erows;
    int32_t *eorder, *epos; /* between rows as they came, and by expert */
    mlp_saved shared;
} moe_saved;
typedef struct res_saved {
    float *p, *rstd;
} res_saved;

typedef struct layer_saved {
    float *cur0, *x1, *n1, *rstd1, *cur1, *x2, *n2, *rstd2, *cur2;
    res_saved res1, res2;
    int64_t banks; /* before the layer */
    union {
        kda_saved kda;
        mla_saved mla;
    } attn;
    union {
        mlp_saved mlp;
        moe_saved moe;
    } ffn;
} layer_saved;

typedef struct final_saved {
    const float *cur, *x;
    float *normed, *rstd;
    res_saved res;
} final_saved;

/* Each: y [n][hidden] = layer(x [n][hidden]); backward: dx =, parameters +=. In inference what is kept may be
 * overwritten by the next layer. */
tsr_status kda_forward(run *r, int32_t layer, const float *x, float *y, kda_saved *k);
tsr_status kda_backward(run *r, int32_t layer, const float *x, const float *dy, float *dx,
                        const kda_saved *k);
tsr_status mla_forward(run *r, int32_t layer, const float *x, float *y, mla_saved *k);
tsr_status mla_backward(run *r, int32_t layer, const float *x, const float *dy, float *dx,
                        const mla_saved *k);
/* y = (or +=) down(act(gate x, up x)) */
tsr_status mlp_forward(run *r, const param *gate, const param *up, const param *down, const float *x,
                       float *y, bool accumulate, mlp_saved *k);
tsr_status mlp_backward(run *r, const param *gate, const param *up, const param *down, const float *x,
                        const float *dy, float *dx, const mlp_saved *k);
tsr_status moe_forward(run *r, int32_t layer, const float *x, float *y, moe_saved *k);
tsr_status moe_backward(run *r, int32_t layer, const float *x, const float *dy, float *dx,
                        const moe_saved *k);

/* Experts this model holds. */
int64_t local_experts(const tsr_model *m);
/* Most rows that its experts can get from all ranks at once. */
int64_t rows_at_most(const run *r);
/* layers/moe_exchange.c: sets what of k the experts work on from xs; brings back what they made; the same for gradients: dye from
 * dy, and dxs from dxe. Rows are `width` wide. */
tsr_status exchange_in(run *r, int32_t layer, moe_saved *k, int64_t width);
tsr_status exchange_out(run *r, int32_t layer, moe_saved *k, int64_t width);
tsr_status exchange_in_bwd(run *r, int32_t layer, const moe_saved *k, const float *dy, float *dye,
                           int64_t width);
tsr_status exchange_out_bwd(run *r, int32_t layer, const moe_saved *k, const float *dxe, float *dxs,
                            int64_t width);

/* ---- layers/line.c: one sequence on several ranks --------------------------------------------------------------- */

/* Whether this run talks to the other ranks of its line; a dry run counts as if it did. */
bool in_line(const run *r);
/* Rows this rank's attention sees: those that stand before, and its own. */
int64_t line_rows(const run *r);
/* Borders of the segments when the first one is longer by `more`: backend, valid until the next call. */
tsr_status line_borders(run *r, int64_t more, const int64_t **out);
/* Last kw - 1 rows of u go to the next rank; *history: those of the rank before, zeros where there are none. */
tsr_status conv_history(run *r, const float *u, int64_t width, int64_t kw, float **history);
/* Gradients of a convolution whose first segment has history: du [n][width] =, dw +=. */
tsr_status conv_line_bwd(run *r, const float *u, const float *history, const float *w, const float *dy,
                         float *du, float *dw, int64_t width, int64_t kw);
/* states [segs][size]: the first one comes from the rank before; or the last one goes on, to the next rank. */
tsr_status state_in(run *r, float **states, int64_t size);
tsr_status state_out(run *r, const float *states, int64_t size);
/* The same for gradients, backwards: the last one comes from the next rank; the first one goes to the rank before. */
tsr_status dstate_in(run *r, float **dstates, int64_t size);
tsr_status dstate_out(run *r, const float *dstates, int64_t size);
/* all [line_rows][width]: rows [n][width] of this rank (rows `stride` apart), with those that stand before them in front. */
tsr_status rows_before(run *r, const float *rows, int64_t stride, int64_t width, float *all);
/* The gradient of that: drows [n][width] = what all ranks of the line have for this rank's rows. */
tsr_status rows_before_bwd(run *r, const float *dall, int64_t width, float *drows, int64_t stride);

/* y = mix of the banked vectors and cur. */
tsr_status residual_mix(run *r, const param *norm, const param *proj, const float *cur, float *y,
                        res_saved *k);
/* dcur +=, dbank +=. */
tsr_status residual_mix_bwd(run *r, const param *norm, const param *proj, const float *cur, const float *dy,
                            float *dcur, const res_saved *k);
tsr_status layer_forward(run *r, int32_t layer, float *cur, layer_saved *k);
/* dcur [n][hidden]: in the gradient of the layer's output, out that of its input. */
tsr_status layer_backward(run *r, int32_t layer, float *dcur, layer_saved *k);

/* ---- model and session ----------------------------------------------------------------------------------------- */

struct tsr_model {
    tsr_spec spec;
    tsr_model_opts o;
    tsr_backend *b;
    model_params p;
    tsr_experts *experts; /* inference */
    tsr_plan plan;
    stack ws;
    void *ws_memory;
    /* inputs of a run: host staging and backend copies */
    int32_t *ids, *targets; /* backend [max_tokens] */
    int64_t *seg;           /* backend [max_segs + 1] */
    int32_t *route_host;    /* ids of one layer's routing, and the distinct ones */
    int32_t *distinct;
    uint8_t *seen;
    /* of the last tsr_model_loss */
    layer_saved *saved;
    run last;
    bool can_go_back;
    final_saved final;
    float *losses, *lse; /* backend [max_tokens] */
    float *host_f32;     /* host [max_tokens] */
    float *max_logits;   /* training: backend [layers][mla_heads] */
    float *no_logits;    /* host [mla_heads]: all -inf */
    /* with a group of ranks that share the experts */
    moe_trip *trips;                 /* [layers] */
    int64_t *trip_numbers;           /* what they point into */
    int64_t *counts_out, *counts_in; /* host [ranks][local experts] */
    int32_t *trip_order;             /* host, two lists of rows */
    int64_t *seg_host, *seg_line; /* with a line: borders of the segments, host and backend [max_segs + 1] */
};

struct tsr_session {
    tsr_model *m;
    int64_t context, length;
    tsr_dtype dtype;
    void *memory;
    size_t bytes;
    float **state, **conv; /* per layer, NULL for MLA: [h][dk][dv]; [3][kw - 1][h d] */
    void **cache;          /* per layer, NULL for KDA: [context][kv_lora + qk_rope] */
};

/* Workspace of one call with n tokens in segs segments, found by running it dry. */
size_t run_bytes(tsr_model *m, int64_t n, int64_t segs);
/* Sizes of one layer's state in bytes; cache per position. */
void session_sizes(const tsr_spec *s, int32_t layer, tsr_dtype cache, size_t *state, size_t *conv,
                   size_t *per_token);

#endif
