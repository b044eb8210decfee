/* spec.c - hyper-parameters out of config.json; see spec.h. Key names are those of the released configs. */
#include "model/spec.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>

#define DIM_MAX ((int64_t)1 << 24)

typedef struct reader {
    json_t *obj;
    const char *where; /* "text_config." or "" */
    tsr_err *err;
    tsr_status st; /* first failure */
} reader;

const char *tsr_arch_name(tsr_arch a)
{
    return a == TSR_ARCH_KIMI_K3 ? "kimi-k3" : "kimi-linear";
}

/* An integer in [low, high]; missing: fallback, or an error when that is negative. */
static int64_t integer(reader *r, const char *key, int64_t fallback, int64_t low, int64_t high)
{
    json_t *v = json_object_get(r->obj, key);
    if (r->st != TSR_OK) {
        return low;
    }
    if (v == NULL || json_is_null(v)) {
        if (fallback < 0) {
            r->st = TSR_ERR(r->err, TSR_E_MISSING, "config.json: %s%s: is missing", r->where, key);
            return low;
        }
        return fallback;
    }
    int64_t n = json_integer_value(v);
    if (!json_is_integer(v) || n < low || n > high) {
        r->st = TSR_ERR(r->err, TSR_E_FORMAT, "config.json: %s%s: must be a whole number from %lld to %lld",
                        r->where, key, (long long)low, (long long)high);
        return low;
    }
    return n;
}

static bool boolean(reader *r, const char *key, bool fallback)
{
    json_t *v = json_object_get(r->obj, key);
    if (r->st != TSR_OK || v == NULL || json_is_null(v)) {
        return fallback;
    }
    if (!json_is_boolean(v)) {
        r->st = TSR_ERR(r->err, TSR_E_FORMAT, "config.json: %s%s: must be true or false", r->where, key);
    }
    return json_is_true(v);
}

static double number(reader *r, const char *key, double fallback)
{
    json_t *v = json_object_get(r->obj, key);
    if (r->st != TSR_OK || v == NULL || json_is_null(v)) {
        return fallback;
    }
    if (!json_is_number(v)) {
        r->st = TSR_ERR(r->err, TSR_E_FORMAT, "config.json: %s%s: must be a number", r->where, key);
    }
    return json_number_value(v);
}

/* The string is one of two; missing: the fallback. Returns which. */
static int choice(reader *r, const char *key, const char *first, const char *second, int fallback)
{
    json_t *v = json_object_get(r->obj, key);
    if (r->st != TSR_OK || v == NULL || json_is_null(v)) {
        return fallback;
    }
    const char *s = json_string_value(v);
    if (s != NULL && strcmp(s, first) == 0) {
        return 0;
    }
    if (s != NULL && second != NULL && strcmp(s, second) == 0) {
        return 1;
    }
    r->st = TSR_ERR(r->err, s == NULL ? TSR_E_FORMAT : TSR_E_UNSUPPORTED,
                    "config.json: %s%s: %s (known: %s%s%s)", r->where, key,
                    s == NULL ? "must be a string" : s, first, second != NULL ? ", " : "",
                    second != NULL ? second : "");
    return fallback;
}

/* A number in [low, high]. */
static double bounded(reader *r, const char *key, double fallback, double low, double high)
{
    double x = number(r, key, fallback);
    if (r->st == TSR_OK && !(x >= low && x <= high)) {
        r->st = TSR_ERR(r->err, TSR_E_FORMAT, "config.json: %s%s: must lie between %g and %g", r->where, key,
                        low, high);
    }
    return x;
}

/* Values that mean another model than the one we compute. */
static void refuse(reader *r, const char *key, bool wrong, const char *why)
{
    if (r->st == TSR_OK && wrong) {
        r->st = TSR_ERR(r->err, TSR_E_UNSUPPORTED, "config.json: %s%s: %s", r->where, key, why);
    }
}

/* One of the two 1-based layer lists. */
static void layer_list(reader *r, tsr_spec *s, const char *key, tsr_layer_kind kind, uint8_t *seen)
{
    json_t *list = json_object_get(r->obj, key), *v;
    size_t i;
    if (r->st != TSR_OK) {
        return;
    }
    if (!json_is_array(list)) {
        r->st = TSR_ERR(r->err, list == NULL ? TSR_E_MISSING : TSR_E_FORMAT,
                        "config.json: %s%s: must be a list of layer numbers", r->where, key);
        return;
    }
    json_array_foreach(list, i, v)
    {
        int64_t n = json_integer_value(v);
        if (!json_is_integer(v) || n < 1 || n > s->layers) {
            r->st = TSR_ERR(r->err, TSR_E_CONFLICT,
                            "config.json: %s%s: entry %zu is no layer (they count from 1 to %d)", r->where,
                            key, i, s->layers);
            return;
        }
        if (seen[n - 1]) {
            r->st = TSR_ERR(r->err, TSR_E_CONFLICT, "config.json: %s%s: layer %lld is listed twice", r->where,
                            key, (long long)n);
            return;
        }
        seen[n - 1] = 1;
        s->layer_kind[n - 1] = (uint8_t)kind;
    }
}

static void linear_attention(reader *text, tsr_spec *s)
{
    reader r = { json_object_get(text->obj, "linear_attn_config"), "linear_attn_config.", text->err,
                 text->st };
    uint8_t seen[TSR_LAYER_MAX] = { 0 };
    if (r.st == TSR_OK && !json_is_object(r.obj)) {
        r.st = TSR_ERR(r.err, TSR_E_MISSING, "config.json: %slinear_attn_config: is missing", text->where);
    }
    s->kda_heads = integer(&r, "num_heads", -1, 1, DIM_MAX);
    s->kda_head_dim = integer(&r, "head_dim", -1, 1, DIM_MAX);
    s->conv_kernel = integer(&r, "short_conv_kernel_size", 4, 1, 64);
    s->gate_lower_bound = bounded(&r, "gate_lower_bound", 0, -5, 0);
    s->kda_full_rank_gate = boolean(&r, "use_full_rank_gate",
                                    boolean(text, "use_full_rank_gate", s->arch == TSR_ARCH_KIMI_K3));
    layer_list(&r, s, "kda_layers", TSR_LAYER_KDA, seen);
    layer_list(&r, s, "full_attn_layers", TSR_LAYER_MLA, seen);
    for (int32_t i = 0; r.st == TSR_OK && i < s->layers; i++) {
        if (!seen[i]) {
            r.st = TSR_ERR(r.err, TSR_E_CONFLICT,
                           "config.json: linear_attn_config: layer %d is in neither list (they count from 1)",
                           i + 1);
        }
    }
    text->st = r.st;
}

static void moe(reader *r, tsr_spec *s)
{
    s->experts = integer(r, "num_experts", -1, 1, (int64_t)1 << 20);
    int64_t a = integer(r, "num_experts_per_token", 0, 1, s->experts),
            b = integer(r, "num_experts_per_tok", 0, 1, s->experts);
    if (r->st == TSR_OK && a != 0 && b != 0 && a != b) {
        r->st = TSR_ERR(r->err, TSR_E_CONFLICT,
                        "config.json: %snum_experts_per_token is %lld, num_experts_per_tok is %lld", r->where,
                        (long long)a, (long long)b);
    }
    s->top_k = a != 0 ? a : b;
    if (r->st == TSR_OK && s->top_k == 0) {
        r->st = TSR_ERR(r->err, TSR_E_MISSING, "config.json: %snum_experts_per_token: is missing", r->where);
    }
    s->shared_experts = integer(r, "num_shared_experts", 0, 0, 4096);
    s->moe_inter = integer(r, "moe_intermediate_size", -1, 1, DIM_MAX);
    s->latent = integer(r, "routed_expert_hidden_size", 0, 0, DIM_MAX);
    s->latent_norm = s->latent > 0 && boolean(r, "latent_moe_use_norm", true);
    s->first_dense = (int32_t)integer(r, "first_k_dense_replace", 0, 0, s->layers);
    s->route_normalise = boolean(r, "moe_renormalize", true);
    s->route_scale = bounded(r, "routed_scaling_factor", 1, 1e-6, 1e6);
    (void)choice(r, "moe_router_activation_func", "sigmoid", NULL, 0);
    refuse(r, "num_expert_group", integer(r, "num_expert_group", 1, 0, INT32_MAX) > 1,
           "choosing experts by groups is not supported");
    refuse(r, "moe_layer_freq", integer(r, "moe_layer_freq", 1, 1, INT32_MAX) != 1,
           "dense layers between mixtures of experts are not supported");
    s->situ = choice(r, "hidden_act", "situ", "silu", s->arch == TSR_ARCH_KIMI_K3 ? 0 : 1) == 0;
    s->situ_beta = bounded(r, "activation_situ_beta", 4, 1e-3, 1e6);
    s->situ_linear_beta = bounded(r, "activation_situ_linear_beta", 25, 1e-3, 1e6);
}

static void attention(reader *r, tsr_spec *s)
{
    s->mla_heads = integer(r, "num_attention_heads", -1, 1, DIM_MAX);
    s->q_lora = integer(r, "q_lora_rank", 0, 0, DIM_MAX);
    s->kv_lora = integer(r, "kv_lora_rank", -1, 1, DIM_MAX);
    s->qk_nope = integer(r, "qk_nope_head_dim", -1, 1, DIM_MAX);
    s->qk_rope = integer(r, "qk_rope_head_dim", 0, 0, DIM_MAX);
    s->v_head = integer(r, "v_head_dim", -1, 1, DIM_MAX);
    s->mla_gate = boolean(r, "mla_use_output_gate", s->arch == TSR_ARCH_KIMI_K3);
    refuse(r, "mla_use_nope", !boolean(r, "mla_use_nope", true), "rotary positions are not supported");
    int64_t kv_heads = integer(r, "num_key_value_heads", 0, 0, DIM_MAX);
    refuse(r, "num_key_value_heads", kv_heads != 0 && kv_heads != s->mla_heads,
           "must equal num_attention_heads: the latent cache has no heads of its own");
    linear_attention(r, s);
}

static tsr_status fill(tsr_spec *s, json_t *root, json_t *text, tsr_err *err)
{
    reader r = { text, text == root ? "" : "text_config.", err, TSR_OK };
    s->layers = (int32_t)integer(&r, "num_hidden_layers", -1, 1, TSR_LAYER_MAX);
    s->hidden = integer(&r, "hidden_size", -1, 1, DIM_MAX);
    s->vocab = integer(&r, "vocab_size", -1, 1, (int64_t)1 << 31);
    s->dense_inter = integer(&r, "intermediate_size", -1, 1, DIM_MAX);
    s->res_block = integer(&r, "attn_res_block_size", 0, 0, TSR_LAYER_MAX);
    s->rms_eps = bounded(&r, "rms_norm_eps", 1e-5, 1e-12, 1);
    s->lora_eps = bounded(&r, "mla_lora_norm_eps", 1e-6, 1e-12, 1); /* the released code's class default */
    s->context = integer(&r, "max_position_embeddings", integer(&r, "model_max_length", 0, 0, INT64_MAX), 0,
                         INT64_MAX);
    moe(&r, s);
    attention(&r, s);
    reader top = { root, "", err, r.st };
    s->tied_embeddings = boolean(&top, "tie_word_embeddings", boolean(&r, "tie_word_embeddings", false));
    TSR_TRY(r.st);
    json_t *q = json_object_get(text, "quantization_config");
    q = q != NULL ? q : json_object_get(root, "quantization_config");
    const char *format = json_string_value(json_object_get(q, "format"));
    s->experts_mxfp4 = format != NULL && strcmp(format, "mxfp4-pack-quantized") == 0;
    s->vision = json_is_object(json_object_get(root, "vision_config"));
    return top.st;
}

tsr_status tsr_spec_parse(tsr_spec *out, const char *config_json, size_t bytes, tsr_err *err)
{
    *out = (tsr_spec){ 0 };
    json_error_t e;
    json_t *root = json_loadb(config_json, bytes, JSON_REJECT_DUPLICATES, &e);
    if (root == NULL) {
        TSR_FAIL(err, TSR_E_FORMAT, "config.json: line %d: %s", e.line, e.text);
    }
    json_t *text = json_object_get(root, "text_config");
    text = json_is_object(text) ? text : root;
    const char *type = json_string_value(json_object_get(root, "model_type"));
    tsr_status st = TSR_OK;
    if (type != NULL && strcmp(type, "kimi_k3") == 0) {
        out->arch = TSR_ARCH_KIMI_K3;
    } else if (type != NULL && strcmp(type, "kimi_linear") == 0) {
        /* K3's language part alone has this type too: block residuals tell them apart */
        out->arch = json_object_get(text, "attn_res_block_size") != NULL ? TSR_ARCH_KIMI_K3
                                                                         : TSR_ARCH_KIMI_LINEAR;
    } else {
        st = TSR_ERR(err, type == NULL ? TSR_E_MISSING : TSR_E_UNSUPPORTED,
                     "config.json: model_type: %s (known: kimi_k3, kimi_linear)",
                     type == NULL ? "is missing" : type);
    }
    if (st == TSR_OK) {
        st = fill(out, root, text, err);
    }
    json_decref(root);
    return st;
}
