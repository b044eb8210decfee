/* k3_config.c - see k3_config.h. */
#include "tests/harness/k3_config.h"
#include "tests/harness/bag.h"

#include <stdio.h>
#include <stdlib.h>

/* 1-based layer numbers of one kind: every 4th and the last are full attention. */
static void list(FILE *f, int layers, bool full)
{
    const char *sep = "";
    for (int i = 1; i <= layers; i++) {
        if ((i % 4 == 0 || i == layers) == full) {
            (void)fprintf(f, "%s%d", sep, i);
            sep = ",";
        }
    }
}

char *config_k3(void)
{
    char *text;
    size_t n;
    FILE *f = open_memstream(&text, &n);
    CHECK(f != NULL);
    (void)fprintf(
        f,
        "{\"model_type\":\"kimi_k3\",\"tie_word_embeddings\":false,\"text_config\":{\"num_hidden_layers\":93,"
        "\"hidden_size\":7168,\"vocab_size\":163840,\"num_attention_heads\":96,\"q_lora_rank\":1536,"
        "\"kv_lora_rank\":512,\"qk_nope_head_dim\":128,\"qk_rope_head_dim\":64,\"v_head_dim\":128,"
        "\"mla_use_nope\":true,\"mla_use_output_gate\":true,\"intermediate_size\":33792,"
        "\"first_k_dense_replace\":1,\"num_experts\":896,\"num_experts_per_token\":16,"
        "\"num_shared_experts\":2,\"moe_intermediate_size\":3072,\"routed_expert_hidden_size\":3584,"
        "\"latent_moe_use_norm\":true,\"attn_res_block_size\":12,\"rms_norm_eps\":1e-05,"
        "\"max_position_embeddings\":1048576,\"linear_attn_config\":{\"head_dim\":128,\"num_heads\":96,"
        "\"short_conv_kernel_size\":4,\"use_full_rank_gate\":true,\"gate_lower_bound\":-5.0,\"kda_layers\":"
        "[");
    list(f, 93, false);
    (void)fputs("],\"full_attn_layers\":[", f);
    list(f, 93, true);
    (void)fputs("]},\"quantization_config\":{\"quant_method\":\"compressed-tensors\",\"format\":\"mxfp4-pack-"
                "quantized\"}}}",
                f);
    CHECK(fclose(f) == 0);
    return text;
}

char *config_kimi_linear(void)
{
    char *text;
    size_t n;
    FILE *f = open_memstream(&text, &n);
    CHECK(f != NULL);
    (void)fprintf(
        f, "{\"model_type\":\"kimi_linear\",\"tie_word_embeddings\":false,\"num_hidden_layers\":27,\"hidden_"
           "size\":2304,"
           "\"vocab_size\":163840,\"num_attention_heads\":32,\"q_lora_rank\":null,\"kv_lora_rank\":512,"
           "\"qk_nope_head_dim\":128,\"qk_rope_head_dim\":64,\"v_head_dim\":128,\"mla_use_nope\":true,"
           "\"intermediate_size\":9216,\"first_k_dense_replace\":1,\"num_experts\":256,"
           "\"num_experts_per_token\":8,\"num_shared_experts\":1,\"moe_intermediate_size\":1024,"
           "\"rms_norm_eps\":1e-05,\"linear_attn_config\":{\"head_dim\":128,\"num_heads\":32,"
           "\"short_conv_kernel_size\":4,\"kda_layers\":[");
    list(f, 27, false);
    (void)fputs("],\"full_attn_layers\":[", f);
    list(f, 27, true);
    (void)fputs("]}}", f);
    CHECK(fclose(f) == 0);
    return text;
}
