/* names_kimi.c - names of the Kimi K3 and Kimi-Linear releases <-> canonical names. Source: the released index and
 * modelling code as described in docs/MODEL.md. Data only: rows print, invert and are tested for bijection. */
#include "convert/layouts.h"

#define LAYER "layers.{l}."

/* A weight matrix or vector under one spelling. */
#define ROW(src, canon)                                                                                      \
    {                                                                                                        \
        .source = src, .canonical = canon                                                                    \
    }
#define ALIAS(src, canon)                                                                                    \
    {                                                                                                        \
        .source = src, .canonical = canon, .alias = true                                                     \
    }
/* One matrix of an expert: MXFP4 with scales (compressed-tensors), or any plain dtype. */
#define EXPERT(src, canon)                                                                                   \
    { .source = src ".weight_packed",                                                                        \
      .canonical = canon ".weight",                                                                          \
      .src_dtype = TSR_DT_U8,                                                                                \
      .dtype = TSR_DT_MXFP4,                                                                                 \
      .pack = TSR_PACK_NIBBLES,                                                                              \
      .partner = canon ".scale" },                                                                           \
        { .source = src ".weight_scale",                                                                     \
          .canonical = canon ".scale",                                                                       \
          .src_dtype = TSR_DT_U8,                                                                            \
          .dtype = TSR_DT_E8M0 },                                                                            \
        ROW(src ".weight", canon ".weight")

/* Tensors both families have. P: prefix of the text model, L: prefix of a layer. */
#define COMMON(P, L)                                                                                         \
    ROW(P "model.embed_tokens.weight", "embed.weight"), ROW(P "model.norm.weight", "final_norm.weight"),     \
        ROW(P "lm_head.weight", "head.weight"), ROW(L "input_layernorm.weight", LAYER "attn_norm.weight"),   \
        ROW(L "post_attention_layernorm.weight", LAYER "mlp_norm.weight"),                                   \
        ROW(L "self_attn.q_proj.weight", LAYER "attn.q.weight"),                                             \
        ROW(L "self_attn.k_proj.weight", LAYER "attn.k.weight"),                                             \
        ROW(L "self_attn.v_proj.weight", LAYER "attn.v.weight"),                                             \
        ROW(L "self_attn.o_proj.weight", LAYER "attn.o.weight"),                                             \
        ROW(L "self_attn.q_conv1d.weight", LAYER "attn.q_conv.weight"),                                      \
        ROW(L "self_attn.k_conv1d.weight", LAYER "attn.k_conv.weight"),                                      \
        ROW(L "self_attn.v_conv1d.weight", LAYER "attn.v_conv.weight"),                                      \
        ROW(L "self_attn.f_a_proj.weight", LAYER "attn.f_a.weight"),                                         \
        ROW(L "self_attn.f_b_proj.weight", LAYER "attn.f_b.weight"),                                         \
        ROW(L "self_attn.b_proj.weight", LAYER "attn.b.weight"),                                             \
        ROW(L "self_attn.dt_bias", LAYER "attn.dt_bias"), ROW(L "self_attn.A_log", LAYER "attn.a_log"),      \
        ROW(L "self_attn.o_norm.weight", LAYER "attn.o_norm.weight"),                                        \
        ROW(L "self_attn.kv_a_proj_with_mqa.weight", LAYER "attn.kv_a.weight"),                              \
        ROW(L "self_attn.kv_a_layernorm.weight", LAYER "attn.kv_a_norm.weight"),                             \
        ROW(L "self_attn.kv_b_proj.weight", LAYER "attn.kv_b.weight"),                                       \
        ROW(L "mlp.gate_proj.weight", LAYER "mlp.gate.weight"),                                              \
        ROW(L "mlp.up_proj.weight", LAYER "mlp.up.weight"),                                                  \
        ROW(L "mlp.down_proj.weight", LAYER "mlp.down.weight"),                                              \
        ROW(L "block_sparse_moe.gate.weight", LAYER "moe.router.weight"),                                    \
        ROW(L "block_sparse_moe.gate.e_score_correction_bias", LAYER "moe.router.bias"),                     \
        ROW(L "block_sparse_moe.shared_experts.gate_proj.weight", LAYER "shared.gate.weight"),               \
        ROW(L "block_sparse_moe.shared_experts.up_proj.weight", LAYER "shared.up.weight"),                   \
        ROW(L "block_sparse_moe.shared_experts.down_proj.weight", LAYER "shared.down.weight"),               \
        EXPERT(L "block_sparse_moe.experts.{e}.w1", LAYER "experts.{e}.gate"),                               \
        EXPERT(L "block_sparse_moe.experts.{e}.w3", LAYER "experts.{e}.up"),                                 \
        EXPERT(L "block_sparse_moe.experts.{e}.w2", LAYER "experts.{e}.down")

#define K3 "language_model."
#define K3L "language_model.model.layers.{l}."

static const tsr_name_row k3_rows[] = {
    COMMON(K3, K3L),
    ROW(K3 "model.output_attn_res_norm.weight", "output_res.norm.weight"),
    ROW(K3 "model.output_attn_res_proj.weight", "output_res.proj.weight"),
    ROW(K3L "self_attention_res_norm.weight", LAYER "attn_res.norm.weight"),
    ROW(K3L "self_attention_res_proj.weight", LAYER "attn_res.proj.weight"),
    ROW(K3L "mlp_res_norm.weight", LAYER "mlp_res.norm.weight"),
    ROW(K3L "mlp_res_proj.weight", LAYER "mlp_res.proj.weight"),
    ROW(K3L "self_attn.g_proj.weight", LAYER "attn.g.weight"),
    ROW(K3L "self_attn.q_a_proj.weight", LAYER "attn.q_a.weight"),
    ROW(K3L "self_attn.q_a_layernorm.weight", LAYER "attn.q_a_norm.weight"),
    ROW(K3L "self_attn.q_b_proj.weight", LAYER "attn.q_b.weight"),
    ROW(K3L "block_sparse_moe.routed_expert_down_proj.weight", LAYER "moe.latent_down.weight"),
    ROW(K3L "block_sparse_moe.routed_expert_up_proj.weight", LAYER "moe.latent_up.weight"),
    ROW(K3L "block_sparse_moe.routed_expert_norm.weight", LAYER "moe.latent_norm.weight"),
    ROW("vision_tower.{*}", "vision.{*}"),
    ROW("mm_projector.{*}", "projector.{*}"),
    /* older exports */
    ALIAS(K3 "model.output_attn_res.norm_weight", "output_res.norm.weight"),
    ALIAS(K3 "model.output_attn_res.proj_weight", "output_res.proj.weight"),
    ALIAS(K3L "self_attention_res.norm_weight", LAYER "attn_res.norm.weight"),
    ALIAS(K3L "self_attention_res.proj_weight", LAYER "attn_res.proj.weight"),
    ALIAS(K3L "mlp_res.norm_weight", LAYER "mlp_res.norm.weight"),
    ALIAS(K3L "mlp_res.proj_weight", LAYER "mlp_res.proj.weight"),
};

static const tsr_name_row linear_rows[] = {
    COMMON("", "model.layers.{l}."),
    ROW("model.layers.{l}.self_attn.g_a_proj.weight", LAYER "attn.g_a.weight"),
    ROW("model.layers.{l}.self_attn.g_b_proj.weight", LAYER "attn.g_b.weight"),
};

static const char *const k3_types[] = { "kimi_k3", NULL };
static const char *const linear_types[] = { "kimi_linear", NULL };

const tsr_layout tsr_layout_kimi_k3 = { "kimi-k3", "Kimi K3 (Hugging Face names)", k3_types, k3_rows,
                                        sizeof k3_rows / sizeof *k3_rows };
const tsr_layout tsr_layout_kimi_linear = { "kimi-linear", "Kimi-Linear (Hugging Face names)", linear_types,
                                            linear_rows, sizeof linear_rows / sizeof *linear_rows };
