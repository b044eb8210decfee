/* params.c - the parameters of a model: which there are, where they lie, reading them. Matrices stay as they are stored;
 * vectors and convolutions become f32. For training everything becomes f32, with room for gradients. */
#include "kernels/numeric.h"
#include "model/model_priv.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ALIGN 64

/* ---- which field of which struct holds a tensor ------------------------------------------------------------ */

typedef struct slot {
    const char *leaf;
    size_t offset;
} slot;
#define SLOT(leaf, field)                                                                                    \
    {                                                                                                        \
        leaf, offsetof(layer_params, field)                                                                  \
    }
static const slot layer_slots[] = {
    SLOT("attn_norm.weight", attn_norm),
    SLOT("mlp_norm.weight", mlp_norm),
    SLOT("attn_res.norm.weight", attn_res_norm),
    SLOT("attn_res.proj.weight", attn_res_proj),
    SLOT("mlp_res.norm.weight", mlp_res_norm),
    SLOT("mlp_res.proj.weight", mlp_res_proj),
    SLOT("attn.q.weight", q),
    SLOT("attn.k.weight", k),
    SLOT("attn.v.weight", v),
    SLOT("attn.g.weight", g),
    SLOT("attn.g_a.weight", g_a),
    SLOT("attn.g_b.weight", g_b),
    SLOT("attn.o.weight", o),
    SLOT("attn.q_conv.weight", q_conv),
    SLOT("attn.k_conv.weight", k_conv),
    SLOT("attn.v_conv.weight", v_conv),
    SLOT("attn.f_a.weight", f_a),
    SLOT("attn.f_b.weight", f_b),
    SLOT("attn.b.weight", b),
    SLOT("attn.dt_bias", dt_bias),
    SLOT("attn.a_log", a_log),
    SLOT("attn.o_norm.weight", o_norm),
    SLOT("attn.q_a.weight", q_a),
    SLOT("attn.q_a_norm.weight", q_a_norm),
    SLOT("attn.q_b.weight", q_b),
    SLOT("attn.kv_a.weight", kv_a),
    SLOT("attn.kv_a_norm.weight", kv_a_norm),
    SLOT("attn.kv_b.weight", kv_b),
    SLOT("mlp.gate.weight", gate),
    SLOT("mlp.up.weight", up),
    SLOT("mlp.down.weight", down),
    SLOT("moe.router.weight", router),
    SLOT("moe.router.bias", bias),
    SLOT("moe.latent_down.weight", latent_down),
    SLOT("moe.latent_up.weight", latent_up),
    SLOT("moe.latent_norm.weight", latent_norm),
    SLOT("shared.gate.weight", shared_gate),
    SLOT("shared.up.weight", shared_up),
    SLOT("shared.down.weight", shared_down),
    SLOT("experts.{e}.gate.weight", e_gate),
    SLOT("experts.{e}.up.weight", e_up),
    SLOT("experts.{e}.down.weight", e_down),
};
static const slot top_slots[] = {
    { "embed.weight", offsetof(model_params, embed) },
    { "final_norm.weight", offsetof(model_params, final_norm) },
    { "head.weight", offsetof(model_params, head) },
    { "output_res.norm.weight", offsetof(model_params, output_res_norm) },
    { "output_res.proj.weight", offsetof(model_params, output_res_proj) },
};

static param **field_of(model_params *p, const tsr_tensor_rule *r)
{
    const slot *list = r->layer >= 0 ? layer_slots : top_slots;
    size_t n = r->layer >= 0 ? sizeof layer_slots / sizeof *layer_slots
                             : sizeof top_slots / sizeof *top_slots;
    char *base = r->layer >= 0 ? (char *)&p->layer[r->layer] : (char *)p;
    const char *leaf = r->name;
    if (r->layer >= 0) {
        leaf = strchr(strchr(r->name, '.') + 1, '.') + 1;
    }
    for (size_t i = 0; i < n; i++) {
        if (strcmp(list[i].leaf, leaf) == 0) {
            return (param **)(void *)(base + list[i].offset);
        }
    }
    return NULL;
}

/* ---- planning ---------------------------------------------------------------------------------------------------- */

typedef struct planner {
    model_params *p;
    const tsr_spec *s;
    const tsr_weight_source *src;
    bool train;
    const tsr_expert_group *group;
} planner;

/* Of the catalogue only what the text model computes with. */
static bool wanted(const planner *k, const tsr_tensor_rule *r)
{
    return field_of(k->p, r) != NULL && (r->expert_count == 0 || k->train);
}

static tsr_status count_rule(void *payload, const tsr_tensor_rule *r, tsr_err *err)
{
    planner *k = payload;
    (void)err;
    k->p->count += wanted(k, r);
    return TSR_OK;
}

static int64_t elements(int rank, const int64_t *shape)
{
    int64_t n = 1;
    for (int i = 0; i < rank; i++) {
        n *= shape[i];
    }
    return n;
}

/* The stored shape is the catalogue's, or, where the rule is loose, one with at least as many elements. */
static tsr_status check_shape(const tsr_tensor_rule *r, const tsr_weight_info *w, tsr_err *err)
{
    bool same = r->rank == w->rank && memcmp(r->shape, w->shape, (size_t)r->rank * sizeof *r->shape) == 0;
    int64_t have = elements(w->rank, w->shape), want = elements(r->rank, r->shape);
    bool a_log = strstr(r->name, ".a_log") != NULL;
    if (!same && !(r->shape_loose && (a_log ? have >= 1 : have == want))) {
        TSR_FAIL(err, TSR_E_CONFLICT,
                 "%s: has %lld elements in %d dimensions, config.json makes it %lld in %d", r->name,
                 (long long)have, w->rank, (long long)want, r->rank);
    }
    return TSR_OK;
}

/* How a plain tensor lies in memory. */
static tsr_dtype memory_dtype(const tsr_tensor_rule *r, tsr_dtype stored, bool train)
{
    bool matrix = r->rank == 2 && r->shape[0] > 1;
    return !train && matrix && stored == TSR_DT_BF16 ? TSR_DT_BF16 : TSR_DT_F32;
}

static tsr_status look_up(planner *k, const tsr_tensor_rule *r, tsr_weight_info *w, tsr_err *err)
{
    char name[256];
    const char *mark = strstr(r->name, "{e}");
    if (mark != NULL) { /* a family: its first expert stands for all */
        (void)snprintf(name, sizeof name, "%.*s0%s", (int)(mark - r->name), r->name, mark + 3);
    } else {
        (void)snprintf(name, sizeof name, "%s", r->name);
    }
    TSR_TRY(k->src->find(k->src->payload, name, w, err));
    TSR_TRY(check_shape(r, w, err));
    bool ok = w->dtype == TSR_DT_F32 || w->dtype == TSR_DT_BF16 || w->dtype == TSR_DT_F16 ||
              w->dtype == TSR_DT_F64 || (r->expert_count > 0 && w->dtype == TSR_DT_MXFP4);
    if (!ok) {
        TSR_FAIL(err, TSR_E_UNSUPPORTED, "%s: a model does not compute with dtype %s here", r->name,
                 tsr_dtype_name(w->dtype));
    }
    return TSR_OK;
}

static tsr_status add_rule(void *payload, const tsr_tensor_rule *r, tsr_err *err)
{
    planner *k = payload;
    model_params *p = k->p;
    tsr_weight_info w;
    if (r->expert_count > 0 && p->expert_dtype == TSR_DT_NONE && r->dtype != TSR_DT_E8M0) {
        TSR_TRY(look_up(k, r, &w, err));
        p->expert_dtype = w.dtype;
    }
    if (!wanted(k, r)) {
        return TSR_OK;
    }
    tsr_err why;
    tsr_status st = look_up(k, r, &w, &why);
    if (st == TSR_E_MISSING && r->optional) {
        return TSR_OK; /* the head of a tied model */
    }
    if (st != TSR_OK) {
        TSR_FAIL(err, st, "%s", why.msg);
    }
    tsr_dtype dt = memory_dtype(r, w.dtype, k->train);
    uint32_t ranks = k->group != NULL ? (uint32_t)k->group->ranks : 1, experts = r->expert_count / ranks;
    int64_t n = elements(w.rank, w.shape), items = r->expert_count > 0 ? experts : 1;
    param *q = &p->list[p->count++];
    q->pub = (tsr_param){ .name = tsr_arena_strndup(p->arena, r->name, strlen(r->name)),
                          .rank = w.rank,
                          .layer = r->layer,
                          .expert_count = experts,
                          .count = n * items };
    memcpy(q->pub.shape, w.shape, sizeof q->pub.shape);
    q->w = (tsr_weight){ .dtype = dt,
                         .rows = r->rank == 2 ? r->shape[0] : 1,
                         .cols = r->rank == 2 ? r->shape[1] : n };
    q->source_id = w.id;
    q->stored = w.dtype;
    q->stored_bytes = w.bytes;
    q->bytes = (uint64_t)(n * items) * (dt == TSR_DT_BF16 ? 2 : 4);
    if (q->pub.name == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    *field_of(p, r) = q;
    p->weight_bytes += tsr_align_up(q->bytes, ALIGN);
    bool bias = strstr(r->name, ".router.bias") != NULL;
    p->grad_bytes += k->train && !bias ? tsr_align_up(q->bytes, ALIGN) : 0;
    return TSR_OK;
}

tsr_status params_plan(model_params *p, const tsr_spec *s, const tsr_weight_source *src, bool train,
                       const tsr_expert_group *group, tsr_err *err)
{
    *p = (model_params){ 0 };
    planner k = { p, s, src, train, group };
    p->layer = calloc((size_t)s->layers, sizeof *p->layer);
    p->arena = tsr_arena_new(0);
    if (p->layer == NULL || p->arena == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    TSR_TRY(tsr_spec_each_tensor(s, count_rule, &k, err));
    p->list = calloc((size_t)p->count, sizeof *p->list);
    if (p->list == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    p->count = 0;
    TSR_TRY(tsr_spec_each_tensor(s, add_rule, &k, err));
    if (p->head == NULL) {
        p->head = p->embed;
    }
    for (int32_t i = 0; i < s->layers; i++) {
        param *a = p->layer[i].a_log;
        if (a != NULL && a->pub.count < s->kda_heads) {
            TSR_FAIL(err, TSR_E_CONFLICT, "%s: has %lld values for %lld heads", a->pub.name,
                     (long long)a->pub.count, (long long)s->kda_heads);
        }
    }
    return TSR_OK;
}

/* ---- loading ------------------------------------------------------------------------------------------------------- */

typedef struct loader {
    const tsr_expert_group *group;
    const tsr_weight_source *src;
    tsr_backend *b;
    const tsr_progress *progress;
    uint64_t done, total;
    uint8_t *raw;
    float *f32;
    size_t raw_room, f32_room;
    tsr_err *err;
} loader;

static tsr_status room(void **p, size_t *have, size_t want, tsr_err *err)
{
    if (want > *have) {
        free(*p);
        *p = malloc(want);
        *have = *p != NULL ? want : 0;
        if (*p == NULL) {
            TSR_FAIL(err, TSR_E_LIMIT, "out of memory: a tensor of %zu bytes", want);
        }
    }
    return TSR_OK;
}

static void to_f32(tsr_dtype dt, const void *src, int64_t n, float *dst)
{
    double piece[512];
    for (int64_t i = 0; i < n; i += 512) {
        int64_t m = n - i < 512 ? n - i : 512;
        tsr_to_f64(dt, src, (uint64_t)i, (uint64_t)m, piece);
        for (int64_t j = 0; j < m; j++) {
            dst[i + j] = (float)piece[j];
        }
    }
}

/* One stored tensor (scales for MXFP4) to n elements at dst. */
static tsr_status load_item(loader *l, int64_t id, tsr_dtype stored, uint64_t bytes, int64_t n, tsr_dtype dt,
                            void *dst, const tsr_weight_info *scale, int64_t cols)
{
    uint64_t scale_bytes = scale != NULL ? scale->bytes : 0;
    TSR_TRY(room((void **)&l->raw, &l->raw_room, bytes + scale_bytes, l->err));
    TSR_TRY(l->src->read(l->src->payload, id, l->raw, bytes, l->err));
    l->done += bytes + scale_bytes;
    if (l->progress != NULL && l->progress->cancel != NULL && *l->progress->cancel != 0) {
        TSR_FAIL(l->err, TSR_E_CANCELLED, "stopped while loading");
    }
    if (l->progress != NULL && l->progress->report != NULL) {
        l->progress->report(l->progress->payload, "load", l->done, l->total);
    }
    const void *from = l->raw;
    size_t out = (size_t)n * (dt == TSR_DT_BF16 ? 2 : 4);
    if (stored != dt) {
        TSR_TRY(room((void **)&l->f32, &l->f32_room, out, l->err));
        if (scale != NULL) {
            TSR_TRY(l->src->read(l->src->payload, scale->id, l->raw + bytes, scale_bytes, l->err));
            tsr_mxfp4_to_f32(l->raw, l->raw + bytes, n / cols, cols, false, l->f32, NULL);
        } else {
            to_f32(stored, l->raw, n, l->f32);
        }
        from = l->f32;
    }
    if (l->b->upload(l->b, dst, from, out) != TSR_OK) {
        TSR_FAIL(l->err, TSR_E_IO, "%s: cannot copy to the device", l->b->name);
    }
    return TSR_OK;
}

/* The experts this model holds: all, or its rank's. */
static tsr_status load_family(loader *l, const param *q)
{
    uint32_t first = l->group != NULL ? (uint32_t)l->group->rank * q->pub.expert_count : 0;
    int64_t n = q->pub.count / q->pub.expert_count;
    const char *mark = strstr(q->pub.name, "{e}");
    for (uint32_t e = 0; e < q->pub.expert_count; e++) {
        char name[256];
        tsr_weight_info w, scale;
        (void)snprintf(name, sizeof name, "%.*s%u%s", (int)(mark - q->pub.name), q->pub.name, first + e,
                       mark + 3);
        TSR_TRY(l->src->find(l->src->payload, name, &w, l->err));
        bool packed = w.dtype == TSR_DT_MXFP4;
        if (packed) {
            (void)snprintf(name + strlen(name) - strlen("weight"), 8, "scale");
            TSR_TRY(l->src->find(l->src->payload, name, &scale, l->err));
        }
        if (elements(w.rank, w.shape) != n || (packed && (int64_t)scale.bytes * 32 != n)) {
            TSR_FAIL(l->err, TSR_E_CONFLICT, "%s: another size than expert 0", name);
        }
        TSR_TRY(load_item(l, w.id, w.dtype, w.bytes, n, TSR_DT_F32, q->pub.data + (int64_t)e * n,
                          packed ? &scale : NULL, q->w.cols));
    }
    return TSR_OK;
}

/* Training: tables of pointers for the grouped products. */
static tsr_status make_tables(model_params *p, const tsr_spec *s, const tsr_expert_group *group,
                              tsr_backend *b, tsr_err *err)
{
    int64_t experts = s->experts / (group != NULL ? group->ranks : 1);
    size_t bytes = (size_t)experts * sizeof(void *);
    void **host = malloc(bytes);
    tsr_status st = host != NULL ? TSR_OK : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    for (int32_t i = 0; st == TSR_OK && i < s->layers; i++) {
        layer_params *l = &p->layer[i];
        param *parts[3] = { l->e_gate, l->e_up, l->e_down };
        for (int k = 0; st == TSR_OK && k < 6; k++) {
            param *q = parts[k % 3];
            if (q == NULL) {
                continue;
            }
            float *base = k < 3 ? q->pub.data : q->pub.grad;
            void *table;
            for (int64_t e = 0; e < experts; e++) {
                host[e] = base + e * (q->pub.count / experts);
            }
            if (b->alloc(b, &table, bytes) != TSR_OK || b->upload(b, table, host, bytes) != TSR_OK) {
                st = TSR_ERR(err, TSR_E_LIMIT, "%s: out of memory", b->name);
            } else if (k < 3) {
                l->e_data[k] = table;
            } else {
                l->e_grad[k - 3] = table;
            }
        }
    }
    free(host);
    return st;
}

tsr_status params_load(model_params *p, const tsr_spec *s, const tsr_weight_source *src, bool train,
                       const tsr_expert_group *group, tsr_backend *b, const tsr_progress *progress,
                       tsr_err *err)
{
    loader l = { .src = src, .group = group, .b = b, .progress = progress, .err = err };
    if (b->alloc(b, &p->data, p->weight_bytes) != TSR_OK ||
        (train && b->alloc(b, &p->grads, p->grad_bytes) != TSR_OK)) {
        TSR_FAIL(err, TSR_E_LIMIT, "%s: out of memory: the parameters take %llu bytes", b->name,
                 (unsigned long long)(p->weight_bytes + p->grad_bytes));
    }
    char *at = p->data, *grad = p->grads;
    for (int64_t i = 0; i < p->count; i++) {
        param *q = &p->list[i];
        q->pub.data = (float *)(void *)at;
        q->w.data = at;
        at += tsr_align_up(q->bytes, ALIGN);
        if (train && strstr(q->pub.name, ".router.bias") == NULL) {
            q->pub.grad = (float *)(void *)grad;
            grad += tsr_align_up(q->bytes, ALIGN);
        }
        l.total += q->stored_bytes * (q->pub.expert_count > 0 ? q->pub.expert_count : 1);
    }
    tsr_status st = TSR_OK;
    for (int64_t i = 0; st == TSR_OK && i < p->count; i++) {
        param *q = &p->list[i];
        st = q->pub.expert_count > 0 ? load_family(&l, q)
                                     : load_item(&l, q->source_id, q->stored, q->stored_bytes, q->pub.count,
                                                 q->w.dtype, q->pub.data, NULL, q->w.cols);
    }
    if (st == TSR_OK && train) {
        st = b->zero(b, p->grads, p->grad_bytes);
        st = st == TSR_OK ? make_tables(p, s, group, b, err) : st;
    }
    free(l.raw);
    free(l.f32);
    return st;
}

void params_free(model_params *p, tsr_backend *b)
{
    for (int64_t i = 0; p->layer != NULL && i < p->count; i++) {
        int32_t layer = p->list != NULL ? p->list[i].pub.layer : -1;
        for (int k = 0; layer >= 0 && k < 3; k++) {
            b->release(b, (void *)p->layer[layer].e_data[k]);
            b->release(b, (void *)p->layer[layer].e_grad[k]);
            p->layer[layer].e_data[k] = NULL;
            p->layer[layer].e_grad[k] = NULL;
        }
    }
    if (p->data != NULL) {
        b->release(b, p->data);
    }
    if (p->grads != NULL) {
        b->release(b, p->grads);
    }
    tsr_arena_free(&p->arena);
    free(p->layer);
    free(p->list);
    *p = (model_params){ 0 };
}
