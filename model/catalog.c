/* catalog.c - every tensor of a model: canonical names, shapes, dtypes. Sizes after the released indexes. */
#include "model/spec.h"

#include <stdio.h>
#include <string.h>

typedef struct sink {
    const tsr_spec *s;
    tsr_tensor_rule_fn fn;
    void *payload;
    tsr_err *err;
    tsr_status st;
    int32_t layer; /* -1: none */
} sink;

static void emit(sink *k, const char *leaf, tsr_dtype dtype, tsr_tensor_rule r)
{
    char name[128], partner[128];
    if (k->st != TSR_OK) {
        return;
    }
    if (k->layer >= 0) {
        (void)snprintf(name, sizeof name, "layers.%d.%s", k->layer, leaf);
    } else {
        (void)snprintf(name, sizeof name, "%s", leaf);
    }
    if (r.partner != NULL) {
        (void)snprintf(partner, sizeof partner, "layers.%d.%s", k->layer, r.partner);
        r.partner = partner;
    }
    r.name = name;
    r.dtype = dtype;
    r.layer = k->layer;
    k->st = k->fn(k->payload, &r, k->err);
}

static void matrix(sink *k, const char *leaf, int64_t out, int64_t in)
{
    emit(k, leaf, TSR_DT_BF16, (tsr_tensor_rule){ .rank = 2, .shape = { out, in }, .float_any = true });
}

static void vector(sink *k, const char *leaf, tsr_dtype dtype, int64_t n)
{
    emit(k, leaf, dtype, (tsr_tensor_rule){ .rank = 1, .shape = { n }, .float_any = true });
}

static void kda(sink *k)
{
    const tsr_spec *s = k->s;
    int64_t width = s->kda_heads * s->kda_head_dim, d = s->kda_head_dim;
    bool k3 = s->arch == TSR_ARCH_KIMI_K3;
    tsr_dtype small = k3 ? TSR_DT_F32 : TSR_DT_BF16;
    matrix(k, "attn.q.weight", width, s->hidden);
    matrix(k, "attn.k.weight", width, s->hidden);
    matrix(k, "attn.v.weight", width, s->hidden);
    if (s->kda_full_rank_gate) {
        matrix(k, "attn.g.weight", width, s->hidden);
    } else {
        matrix(k, "attn.g_a.weight", d, s->hidden);
        matrix(k, "attn.g_b.weight", width, d);
    }
    matrix(k, "attn.o.weight", s->hidden, width);
    static const char *const conv[] = { "attn.q_conv.weight", "attn.k_conv.weight", "attn.v_conv.weight" };
    for (int i = 0; i < 3; i++) { /* also seen without the middle dimension */
        emit(k, conv[i], small,
             (tsr_tensor_rule){
                 .rank = 3, .shape = { width, 1, s->conv_kernel }, .float_any = true, .shape_loose = true });
    }
    matrix(k, "attn.f_a.weight", d, s->hidden);
    matrix(k, "attn.f_b.weight", width, d);
    matrix(k, "attn.b.weight", s->kda_heads, s->hidden);
    vector(k, "attn.dt_bias", TSR_DT_F32, width);
    if (k3) { /* one value a head, padded with zeros to the head dimension */
        emit(k, "attn.a_log", TSR_DT_F32,
             (tsr_tensor_rule){
                 .rank = 1, .shape = { s->kda_heads > d ? s->kda_heads : d }, .shape_loose = true });
    } else {
        emit(k, "attn.a_log", TSR_DT_F32,
             (tsr_tensor_rule){ .rank = 4, .shape = { 1, 1, s->kda_heads, 1 }, .shape_loose = true });
    }
    vector(k, "attn.o_norm.weight", small, d);
}

static void mla(sink *k)
{
    const tsr_spec *s = k->s;
    int64_t q = s->mla_heads * (s->qk_nope + s->qk_rope), v = s->mla_heads * s->v_head;
    if (s->q_lora > 0) {
        matrix(k, "attn.q_a.weight", s->q_lora, s->hidden);
        vector(k, "attn.q_a_norm.weight", TSR_DT_BF16, s->q_lora);
        matrix(k, "attn.q_b.weight", q, s->q_lora);
    } else {
        matrix(k, "attn.q.weight", q, s->hidden);
    }
    matrix(k, "attn.kv_a.weight", s->kv_lora + s->qk_rope, s->hidden);
    vector(k, "attn.kv_a_norm.weight", TSR_DT_BF16, s->kv_lora);
    matrix(k, "attn.kv_b.weight", s->mla_heads * (s->qk_nope + s->v_head), s->kv_lora);
    if (s->mla_gate) {
        matrix(k, "attn.g.weight", v, s->hidden);
    }
    matrix(k, "attn.o.weight", s->hidden, v);
}

static void expert_matrix(sink *k, const char *leaf, const char *scale, int64_t out, int64_t in)
{
    tsr_tensor_rule r = {
        .rank = 2, .shape = { out, in }, .klass = TSR_CLASS_EXPERTS, .expert_count = (uint32_t)k->s->experts
    };
    if (!k->s->experts_mxfp4) {
        r.float_any = true;
        emit(k, leaf, TSR_DT_BF16, r);
        return;
    }
    r.partner = scale;
    emit(k, leaf, TSR_DT_MXFP4, r);
    r.partner = NULL;
    r.shape[1] = in / 32;
    emit(k, scale, TSR_DT_E8M0, r);
}

static void moe(sink *k)
{
    const tsr_spec *s = k->s;
    int64_t in = s->latent > 0 ? s->latent : s->hidden, shared = s->shared_experts * s->moe_inter;
    matrix(k, "moe.router.weight", s->experts, s->hidden);
    vector(k, "moe.router.bias", s->arch == TSR_ARCH_KIMI_K3 ? TSR_DT_F32 : TSR_DT_BF16, s->experts);
    if (s->latent > 0) {
        matrix(k, "moe.latent_down.weight", s->latent, s->hidden);
        matrix(k, "moe.latent_up.weight", s->hidden, s->latent);
    }
    if (s->latent_norm) {
        vector(k, "moe.latent_norm.weight", TSR_DT_BF16, s->latent);
    }
    if (shared > 0) {
        matrix(k, "shared.gate.weight", shared, s->hidden);
        matrix(k, "shared.up.weight", shared, s->hidden);
        matrix(k, "shared.down.weight", s->hidden, shared);
    }
    expert_matrix(k, "experts.{e}.gate.weight", "experts.{e}.gate.scale", s->moe_inter, in);
    expert_matrix(k, "experts.{e}.up.weight", "experts.{e}.up.scale", s->moe_inter, in);
    expert_matrix(k, "experts.{e}.down.weight", "experts.{e}.down.scale", in, s->moe_inter);
}

static void residual(sink *k, const char *norm, const char *proj)
{
    if (k->s->res_block > 0) {
        vector(k, norm, TSR_DT_BF16, k->s->hidden);
        matrix(k, proj, 1, k->s->hidden);
    }
}

static void layer(sink *k)
{
    const tsr_spec *s = k->s;
    vector(k, "attn_norm.weight", TSR_DT_BF16, s->hidden);
    vector(k, "mlp_norm.weight", TSR_DT_BF16, s->hidden);
    residual(k, "attn_res.norm.weight", "attn_res.proj.weight");
    residual(k, "mlp_res.norm.weight", "mlp_res.proj.weight");
    if (s->layer_kind[k->layer] == TSR_LAYER_KDA) {
        kda(k);
    } else {
        mla(k);
    }
    if (k->layer < s->first_dense) {
        matrix(k, "mlp.gate.weight", s->dense_inter, s->hidden);
        matrix(k, "mlp.up.weight", s->dense_inter, s->hidden);
        matrix(k, "mlp.down.weight", s->hidden, s->dense_inter);
    } else {
        moe(k);
    }
}

tsr_status tsr_spec_each_tensor(const tsr_spec *s, tsr_tensor_rule_fn fn, void *payload, tsr_err *err)
{
    sink k = { s, fn, payload, err, TSR_OK, -1 };
    matrix(&k, "embed.weight", s->vocab, s->hidden);
    for (k.layer = 0; k.st == TSR_OK && k.layer < s->layers; k.layer++) {
        layer(&k);
    }
    k.layer = -1;
    vector(&k, "final_norm.weight", TSR_DT_BF16, s->hidden);
    residual(&k, "output_res.norm.weight", "output_res.proj.weight");
    emit(
        &k, "head.weight", TSR_DT_BF16,
        (tsr_tensor_rule){
            .rank = 2, .shape = { s->vocab, s->hidden }, .float_any = true, .optional = s->tied_embeddings });
    return k.st;
}

/* ---- sizes ------------------------------------------------------------------------------------------------------ */

typedef struct sizer {
    const tsr_spec *s;
    tsr_spec_sizes *out;
    int32_t expert_layer; /* the layer whose expert bytes are counted into expert_bytes */
} sizer;

static tsr_status add_sizes(void *payload, const tsr_tensor_rule *r, tsr_err *err)
{
    sizer *z = payload;
    uint64_t bytes, elems = 1, items = r->expert_count > 0 ? r->expert_count : 1;
    bool fits = tsr_shape_bytes(r->dtype, r->rank, r->shape, &bytes) && tsr_mul_u64(bytes, items, &bytes);
    for (int i = 0; i < r->rank; i++) {
        fits = fits && tsr_mul_u64(elems, (uint64_t)r->shape[i], &elems);
    }
    fits = fits && tsr_mul_u64(elems, items, &elems) &&
           tsr_add_u64(z->out->bytes_total, bytes, &z->out->bytes_total);
    if (!fits) {
        TSR_FAIL(err, TSR_E_LIMIT, "config.json: %s: its size does not fit 64 bits", r->name);
    }
    bool head_is_embed = r->optional; /* tied: the same numbers */
    if (head_is_embed) {
        z->out->bytes_total -= bytes;
        return TSR_OK;
    }
    z->out->tensors += items;
    if (r->dtype != TSR_DT_E8M0) {
        z->out->params_total += elems;
        z->out->params_routed += r->expert_count > 0 ? elems : 0;
    }
    if (r->expert_count > 0) {
        z->out->bytes_experts += bytes;
        z->expert_layer = z->expert_layer < 0 ? r->layer : z->expert_layer;
        z->out->expert_bytes += r->layer == z->expert_layer ? bytes / items : 0;
    } else {
        z->out->bytes_dense += bytes;
    }
    return TSR_OK;
}

tsr_status tsr_spec_sizes_of(const tsr_spec *s, tsr_spec_sizes *out, tsr_err *err)
{
    *out = (tsr_spec_sizes){ 0 };
    sizer z = { s, out, -1 };
    TSR_TRY(tsr_spec_each_tensor(s, add_sizes, &z, err));
    uint64_t routed_active = s->experts > 0 ? out->params_routed / (uint64_t)s->experts * (uint64_t)s->top_k
                                            : 0;
    uint64_t embed = (uint64_t)s->vocab * (uint64_t)s->hidden;
    out->params_active = out->params_total - out->params_routed + routed_active -
                         (s->tied_embeddings ? 0 : embed);
    return TSR_OK;
}
