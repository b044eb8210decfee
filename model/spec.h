/* spec.h - hyper-parameters of a model family, read from the Hugging Face style config, and the catalogue of
 * every tensor such a model has, under canonical names (docs/NAMES.md). Formulas and shapes: docs/MODEL.md. */
#ifndef TSR_MODEL_SPEC_H
#define TSR_MODEL_SPEC_H

#include "format/base.h"
#include "format/format.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum tsr_arch { TSR_ARCH_KIMI_K3, TSR_ARCH_KIMI_LINEAR } tsr_arch;
typedef enum tsr_layer_kind { TSR_LAYER_KDA, TSR_LAYER_MLA } tsr_layer_kind;

#define TSR_LAYER_MAX 4096

typedef struct tsr_spec {
    tsr_arch arch;
    int32_t layers;
    int64_t hidden, vocab;
    uint8_t layer_kind[TSR_LAYER_MAX]; /* tsr_layer_kind */
    int32_t first_dense;               /* layers below it have a dense MLP */
    int64_t dense_inter;               /* width of the dense MLP */
    /* KDA */
    int64_t kda_heads, kda_head_dim, conv_kernel;
    bool kda_full_rank_gate;
    double gate_lower_bound; /* 0: unbounded softplus gate */
    /* MLA */
    int64_t mla_heads, q_lora /* 0: none */, kv_lora, qk_nope, qk_rope, v_head;
    bool mla_gate;
    /* MoE */
    int64_t experts, top_k, shared_experts, moe_inter, latent /* 0: none */;
    bool latent_norm;
    bool experts_mxfp4;
    bool route_normalise; /* weights of the chosen experts are divided by their sum */
    double route_scale;
    bool situ; /* SiTU-GLU; false: SwiGLU */
    double situ_beta, situ_linear_beta;
    int64_t res_block; /* attention residual block size, 0: none */
    bool tied_embeddings;
    bool vision;              /* config has a vision part */
    int64_t context;          /* longest position count the config promises, 0 unknown */
    double rms_eps, lora_eps; /* lora_eps: of MLA's q_a and kv_a norms */
} tsr_spec;

/* From the text of config.json. TSR_E_FORMAT: not JSON, wrong type; TSR_E_CONFLICT: contradictory (a layer in
 * both lists or none, a list beyond the layers); TSR_E_UNSUPPORTED: an unknown model_type, activation, router or position scheme. err names the key. */
TSR_NODISCARD tsr_status tsr_spec_parse(tsr_spec *out, const char *config_json, size_t bytes, tsr_err *err);
const char *tsr_arch_name(tsr_arch a); /* "kimi-k3" */

/* One tensor the model has (or, for expert_count > 0, one family per layer). */
typedef struct tsr_tensor_rule {
    const char *name; /* canonical; family: with {e} */
    tsr_dtype dtype;  /* as released; others of the same meaning may be accepted (float_any) */
    bool float_any;   /* f32, bf16 and f16 are all fine */
    int rank;
    int64_t shape[4];
    bool
        shape_loose; /* A_log padded or [1,1,H,1]; conv of rank 2: element count may be larger or rank differ */
    bool optional;
    tsr_class klass;
    int32_t layer;
    uint32_t expert_count;
    const char *partner; /* canonical name of its scales, or NULL */
} tsr_tensor_rule;
typedef tsr_status (*tsr_tensor_rule_fn)(void *payload, const tsr_tensor_rule *r, tsr_err *err);
/* Calls fn once per tensor or family, in file order: embedding, layers, final norm, head, vision. The one source
 * of names and shapes. Stops at fn's first failure and returns it. */
TSR_NODISCARD tsr_status tsr_spec_each_tensor(const tsr_spec *s, tsr_tensor_rule_fn fn, void *payload,
                                              tsr_err *err);

/* Sizes of a model that need not exist yet. Parameters count logical elements (no scales). */
typedef struct tsr_spec_sizes {
    uint64_t params_total, params_routed,
        params_active; /* active: with top-k experts, without input embedding */
    uint64_t bytes_total, bytes_dense, bytes_experts;
    uint64_t expert_bytes; /* one expert of one layer */
    uint64_t tensors;      /* by per-expert names */
} tsr_spec_sizes;
TSR_NODISCARD tsr_status tsr_spec_sizes_of(const tsr_spec *s, tsr_spec_sizes *out, tsr_err *err);

#ifdef __cplusplus
}
#endif
#endif
