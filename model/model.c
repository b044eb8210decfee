/* model.c - planning, opening and closing a model. */
#include "model/model_priv.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static tsr_model_opts with_defaults(const tsr_model_opts *o)
{
    tsr_model_opts out = o != NULL ? *o : (tsr_model_opts){ 0 };
    out.max_tokens = out.max_tokens > 0 ? out.max_tokens : 512;
    out.max_segs = out.train && out.max_segs > 0 ? out.max_segs : 1;
    out.kda_chunk = out.kda_chunk > 0 ? out.kda_chunk : 64;
    return out;
}

static tsr_status expert_plan(tsr_plan *out, const tsr_model *m, const tsr_weight_source *src, tsr_err *err)
{
    uint64_t largest = 0;
    for (int32_t i = m->spec.first_dense; !m->o.train && i < m->spec.layers; i++) {
        uint64_t bytes, all;
        TSR_TRY(src->expert_bytes(src->payload, i, &bytes, err));
        bytes = tsr_align_up(bytes, 64);
        if (!tsr_mul_u64(bytes, (uint64_t)m->spec.experts, &all) ||
            !tsr_add_u64(out->experts_all, all, &out->experts_all)) {
            TSR_FAIL(err, TSR_E_LIMIT, "the experts' size does not fit 64 bits");
        }
        largest = bytes > largest ? bytes : largest;
    }
    out->expert_floor = largest * (uint64_t)m->spec.top_k;
    out->experts = m->o.expert_cache > 0 && m->o.expert_cache < out->experts_all ? m->o.expert_cache
                                                                                 : out->experts_all;
    if (out->experts < out->expert_floor) {
        TSR_FAIL(err, TSR_E_LIMIT,
                 "an expert cache of %llu bytes is too small: %lld experts of a token take %llu",
                 (unsigned long long)out->experts, (long long)m->spec.top_k,
                 (unsigned long long)out->expert_floor);
    }
    return TSR_OK;
}

static uint64_t workspace_of(tsr_model *m)
{
    size_t most = run_bytes(m, m->o.max_tokens, m->o.max_segs), one = run_bytes(m, 1, 1);
    return one > most ? one : most;
}

/* Fills m->p and m->plan. */
static tsr_status plan(tsr_model *m, const tsr_weight_source *src, int64_t context, tsr_dtype cache,
                       tsr_err *err)
{
    tsr_plan *out = &m->plan;
    TSR_TRY(params_plan(&m->p, &m->spec, src, m->o.train, m->o.group, err));
    m->saved = calloc((size_t)m->spec.layers, sizeof *m->saved);
    if (m->saved == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    out->weights = m->p.weight_bytes;
    out->grads = m->p.grad_bytes;
    TSR_TRY(expert_plan(out, m, src, err));
    out->workspace = workspace_of(m);
    for (int32_t i = 0; !m->o.train && i < m->spec.layers; i++) {
        size_t state, conv, per_token;
        session_sizes(&m->spec, i, cache, &state, &conv, &per_token);
        out->state_fixed += state + conv;
        out->state_per_token += per_token;
    }
    out->total = out->weights + out->experts + out->grads + out->workspace + out->state_fixed +
                 out->state_per_token * (uint64_t)context;
    if (m->o.mem_limit > 0 && out->total > m->o.mem_limit) {
        TSR_FAIL(err, TSR_E_LIMIT,
                 "needs %llu MiB of memory, %llu are allowed (weights %llu, experts %llu, workspace %llu, "
                 "state %llu; a smaller "
                 "expert cache can be as little as %llu)",
                 (unsigned long long)(out->total >> 20), (unsigned long long)(m->o.mem_limit >> 20),
                 (unsigned long long)(out->weights >> 20), (unsigned long long)(out->experts >> 20),
                 (unsigned long long)(out->workspace >> 20),
                 (unsigned long long)((out->state_fixed + out->state_per_token * (uint64_t)context) >> 20),
                 (unsigned long long)((out->expert_floor + ((uint64_t)1 << 20) - 1) >> 20));
    }
    return TSR_OK;
}

static tsr_model *make(const tsr_spec *spec, const tsr_model_opts *o, tsr_backend *b)
{
    tsr_model *m = calloc(1, sizeof *m);
    if (m != NULL) {
        m->spec = *spec;
        m->o = with_defaults(o);
        m->b = b;
    }
    return m;
}

tsr_status tsr_model_plan(tsr_plan *out, const tsr_spec *spec, const tsr_weight_source *src,
                          const tsr_model_opts *o, tsr_backend *b, int64_t context, tsr_dtype cache_dtype,
                          tsr_err *err)
{
    tsr_model *m = make(spec, o, b);
    if (m == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    tsr_status st = plan(m, src, context, cache_dtype, err);
    *out = m->plan;
    tsr_model_close(&m);
    return st;
}

/* A device backend without a kernel that the model needs is refused before anything is loaded. */
static tsr_status check_ops(const tsr_backend *b, tsr_err *err)
{
    if (b->host) {
        return TSR_OK; /* the reference is under every slot */
    }
#define TSR_OP(op, cpu, simd, cuda)                                                                          \
    if (b->k.op == NULL) {                                                                                   \
        TSR_FAIL(err, TSR_E_UNSUPPORTED, "backend %s: has no kernel for " #op " (use auto)", b->name);       \
    }
#include "kernels/ops.def"
#undef TSR_OP
    return TSR_OK;
}

/* What depends on the number of tokens of a call. */
static tsr_status take_workspace(tsr_model *m, tsr_err *err)
{
    tsr_backend *b = m->b;
    size_t n = (size_t)m->o.max_tokens;
    m->ws = (stack){ .size = m->plan.workspace };
    m->route_host = malloc(n * (size_t)m->spec.top_k * sizeof *m->route_host);
    m->host_f32 = malloc(n * sizeof *m->host_f32);
    size_t rows = m->o.group != NULL ? (size_t)(m->o.group->ranks * m->spec.top_k) * n : 0;
    m->trip_order = malloc(2 * rows * sizeof *m->trip_order + 1);
    bool ok = m->route_host != NULL && m->host_f32 != NULL && m->trip_order != NULL;
    ok = ok && b->alloc(b, &m->ws_memory, m->ws.size) == TSR_OK;
    ok = ok && b->alloc(b, (void **)&m->ids, n * sizeof *m->ids) == TSR_OK;
    ok = ok && b->alloc(b, (void **)&m->targets, n * sizeof *m->targets) == TSR_OK;
    ok = ok && b->alloc(b, (void **)&m->seg, (size_t)(m->o.max_segs + 1) * sizeof *m->seg) == TSR_OK;
    m->seg_host = malloc((size_t)(m->o.max_segs + 1) * sizeof *m->seg_host);
    ok = ok && m->seg_host != NULL &&
         b->alloc(b, (void **)&m->seg_line, (size_t)(m->o.max_segs + 1) * sizeof *m->seg_line) == TSR_OK;
    ok = ok && b->alloc(b, (void **)&m->losses, n * sizeof *m->losses) == TSR_OK;
    ok = ok && b->alloc(b, (void **)&m->lse, n * sizeof *m->lse) == TSR_OK;
    m->ws.base = m->ws_memory;
    if (!ok) {
        TSR_FAIL(err, TSR_E_LIMIT,
                 "%s: out of memory: the workspace takes %llu bytes (fewer tokens at once need less)",
                 b->name, (unsigned long long)m->ws.size);
    }
    return TSR_OK;
}

static void give_workspace(tsr_model *m)
{
    void **const blocks[] = { &m->ws_memory,    (void **)&m->ids,      (void **)&m->targets,
                              (void **)&m->seg, (void **)&m->seg_line, (void **)&m->losses,
                              (void **)&m->lse };
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) {
        if (*blocks[i] != NULL) {
            m->b->release(m->b, *blocks[i]);
            *blocks[i] = NULL;
        }
    }
    free(m->route_host);
    free(m->host_f32);
    free(m->trip_order);
    free(m->seg_host);
    m->trip_order = NULL;
    m->seg_host = NULL;
    m->route_host = NULL;
    m->host_f32 = NULL;
}

/* Numbers about rows that go to other ranks. */
static bool take_trips(tsr_model *m)
{
    size_t layers = (size_t)m->spec.layers, ranks = (size_t)m->o.group->ranks,
           e = (size_t)m->spec.experts + 1;
    m->trips = calloc(layers, sizeof *m->trips);
    m->trip_numbers = calloc(layers * 2 * ranks, sizeof *m->trip_numbers);
    m->counts_out = calloc(e, sizeof *m->counts_out);
    m->counts_in = calloc(e, sizeof *m->counts_in);
    bool ok = m->trips != NULL && m->trip_numbers != NULL && m->counts_out != NULL && m->counts_in != NULL;
    for (size_t i = 0; ok && i < layers; i++) {
        m->trips[i] = (moe_trip){ m->trip_numbers + 2 * i * ranks, m->trip_numbers + (2 * i + 1) * ranks };
    }
    return ok;
}

static tsr_status take_memory(tsr_model *m, tsr_err *err)
{
    size_t heads = (size_t)(m->spec.mla_heads > 0 ? m->spec.mla_heads : 1);
    m->distinct = malloc((size_t)m->spec.experts * sizeof *m->distinct);
    m->seen = malloc((size_t)m->spec.experts);
    m->no_logits = malloc(heads * sizeof *m->no_logits);
    bool ok = m->distinct != NULL && m->seen != NULL && m->no_logits != NULL;
    ok = ok && (m->o.group == NULL || take_trips(m));
    ok = ok && (!m->o.train || m->b->alloc(m->b, (void **)&m->max_logits,
                                           (size_t)m->spec.layers * heads * sizeof *m->max_logits) == TSR_OK);
    if (!ok) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    for (size_t i = 0; i < heads; i++) {
        m->no_logits[i] = -INFINITY;
    }
    TSR_TRY(m->o.train ? tsr_model_max_logits_reset(m, err) : TSR_OK);
    return take_workspace(m, err);
}

static tsr_status open_experts(tsr_model *m, const tsr_weight_source *src, const tsr_progress *p,
                               tsr_err *err)
{
    if (m->o.train || m->spec.first_dense >= m->spec.layers) {
        return TSR_OK;
    }
    uint8_t *has = calloc((size_t)m->spec.layers, 1);
    if (has == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    memset(has + m->spec.first_dense, 1, (size_t)(m->spec.layers - m->spec.first_dense));
    bool all = m->plan.experts == m->plan.experts_all;
    tsr_experts_opts o = { .layers = m->spec.layers,
                           .experts = (int32_t)m->spec.experts,
                           .top_k = (int32_t)m->spec.top_k,
                           .cache_bytes = all ? 0 : m->plan.experts,
                           .io_threads = m->o.io_threads,
                           .has_experts = has };
    tsr_status st = tsr_experts_open(&m->experts, m->b, src, &o, err);
    free(has);
    return st == TSR_OK && all ? tsr_experts_load_all(m->experts, p, err) : st;
}

tsr_status tsr_model_open(tsr_model **out, const tsr_spec *spec, const tsr_weight_source *src,
                          const tsr_model_opts *o, tsr_backend *b, const tsr_progress *p, tsr_err *err)
{
    *out = NULL;
    TSR_TRY(check_ops(b, err));
    if (o != NULL && o->group != NULL && (!o->train || !b->host || spec->experts % o->group->ranks != 0)) {
        TSR_FAIL(err, TSR_E_UNSUPPORTED,
                 "%lld experts on %d ranks: only in training, on a backend with host memory, in equal parts",
                 (long long)spec->experts, o->group->ranks);
    }
    tsr_model *m = make(spec, o, b);
    if (m == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    tsr_status st = plan(m, src, 0, TSR_DT_F32, err);
    st = st == TSR_OK ? take_memory(m, err) : st;
    st = st == TSR_OK ? params_load(&m->p, &m->spec, src, m->o.train, m->o.group, b, p, err) : st;
    st = st == TSR_OK ? open_experts(m, src, p, err) : st;
    if (st != TSR_OK) {
        tsr_model_close(&m);
        return st;
    }
    *out = m;
    return TSR_OK;
}

void tsr_model_close(tsr_model **pm)
{
    tsr_model *m = *pm;
    if (m == NULL) {
        return;
    }
    *pm = NULL;
    tsr_backend *b = m->b;
    tsr_experts_close(&m->experts);
    params_free(&m->p, b);
    give_workspace(m);
    if (m->max_logits != NULL) {
        b->release(b, m->max_logits);
    }
    free(m->no_logits);
    free(m->trips);
    free(m->trip_numbers);
    free(m->counts_out);
    free(m->counts_in);
    free(m->distinct);
    free(m->seen);
    free(m->saved);
    free(m);
}

const tsr_spec *tsr_model_spec(const tsr_model *m)
{
    return &m->spec;
}

tsr_backend *tsr_model_backend(const tsr_model *m)
{
    return m->b;
}

const tsr_plan *tsr_model_plan_of(const tsr_model *m)
{
    return &m->plan;
}

bool tsr_model_expert_stats(const tsr_model *m, tsr_experts_stats *out)
{
    if (m->experts == NULL || tsr_experts_all_resident(m->experts)) {
        *out = (tsr_experts_stats){ 0 };
        return false;
    }
    tsr_experts_stats_get(m->experts, out);
    return true;
}

int64_t tsr_model_param_count(const tsr_model *m)
{
    return m->p.count;
}

const tsr_param *tsr_model_param(const tsr_model *m, int64_t i)
{
    return &m->p.list[i].pub;
}

const tsr_param *tsr_model_param_find(const tsr_model *m, const char *name)
{
    for (int64_t i = 0; i < m->p.count; i++) {
        if (strcmp(m->p.list[i].pub.name, name) == 0) {
            return &m->p.list[i].pub;
        }
    }
    return NULL;
}

tsr_status tsr_model_zero_grads(tsr_model *m, tsr_err *err)
{
    TSR_ASSERT(m->o.train);
    if (m->b->zero(m->b, m->p.grads, m->p.grad_bytes) != TSR_OK) {
        TSR_FAIL(err, TSR_E_IO, "%s: cannot clear the gradients", m->b->name);
    }
    return TSR_OK;
}

tsr_status tsr_model_reshape(tsr_model *m, const tsr_model_opts *o, tsr_err *err)
{
    TSR_ASSERT(m->o.train && o->train);
    m->can_go_back = false;
    const tsr_expert_group *group = m->o.group;
    const tsr_sequence_line *line = m->o.line;
    m->o = with_defaults(o);
    m->o.group = group;
    m->o.line = line;
    give_workspace(m);
    m->plan.total -= m->plan.workspace;
    m->plan.workspace = workspace_of(m);
    m->plan.total += m->plan.workspace;
    if (m->o.mem_limit > 0 && m->plan.total > m->o.mem_limit) {
        TSR_FAIL(err, TSR_E_LIMIT, "needs %llu MiB of memory, %llu are allowed",
                 (unsigned long long)(m->plan.total >> 20), (unsigned long long)(m->o.mem_limit >> 20));
    }
    return take_workspace(m, err);
}

tsr_status tsr_model_max_logits(const tsr_model *m, int32_t layer, float *out, tsr_err *err)
{
    TSR_ASSERT(m->o.train && layer >= 0 && layer < m->spec.layers &&
               m->spec.layer_kind[layer] == TSR_LAYER_MLA);
    const float *at = m->max_logits + (int64_t)layer * m->spec.mla_heads;
    if (m->b->download(m->b, out, at, (size_t)m->spec.mla_heads * sizeof *out) != TSR_OK) {
        TSR_FAIL(err, TSR_E_IO, "%s: cannot read back attention logits", m->b->name);
    }
    return TSR_OK;
}

tsr_status tsr_model_max_logits_reset(tsr_model *m, tsr_err *err)
{
    size_t heads = (size_t)m->spec.mla_heads;
    for (size_t i = 0; i < (size_t)m->spec.layers && heads > 0; i++) {
        if (m->b->upload(m->b, m->max_logits + i * heads, m->no_logits, heads * sizeof(float)) != TSR_OK) {
            TSR_FAIL(err, TSR_E_IO, "%s: cannot copy to the device", m->b->name);
        }
    }
    return TSR_OK;
}
