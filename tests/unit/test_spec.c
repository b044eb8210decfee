/* test_spec.c - configs of the released models: sizes to the last parameter; every name maps there and back; bad
 * configs are refused by key. */
#include "convert/convert.h"
#include "model/spec.h"
#include "tests/harness/bag.h"
#include "tests/harness/k3_config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static tsr_spec parse(const char *text)
{
    tsr_err err;
    tsr_spec s;
    CHECK_OK(tsr_spec_parse(&s, text, strlen(text), &err));
    return s;
}

static void sizes(void)
{
    tsr_err err;
    tsr_spec_sizes z;
    char *text = config_k3();
    tsr_spec s = parse(text);
    CHECK_OK(tsr_spec_sizes_of(&s, &z, &err));
    CHECK(s.layer_kind[0] == TSR_LAYER_KDA && s.layer_kind[3] == TSR_LAYER_MLA &&
          s.layer_kind[91] == TSR_LAYER_MLA && s.layer_kind[92] == TSR_LAYER_MLA && s.top_k == 16);
    CHECK(z.params_routed == 2722740830208u);
    /* the report leaves the 32 padding zeros of A_log (69 layers) out; files hold them */
    CHECK(z.params_total == 2779484478208u || z.params_total - 69u * 32u == 2779484478208u);
    CHECK(z.params_active == 104189614848u || z.params_active - 69u * 32u == 104189614848u);
    CHECK(z.expert_bytes == 17547264u);
    CHECK(z.tensors == 497220u - 165u - 3u); /* without vision tower and projector */
    CHECK(z.bytes_total == 1560860324864u - (401214464u + 46144512u) * 2u); /* likewise, bf16 */
    free(text);
    text = config_kimi_linear();
    s = parse(text);
    CHECK_OK(tsr_spec_sizes_of(&s, &z, &err));
    CHECK(z.params_total == 49122681728u);
    CHECK(z.tensors == 20493u);
    free(text);
}

static tsr_status there_and_back(void *payload, const tsr_tensor_rule *r, tsr_err *err)
{
    (void)err;
    const tsr_layout *l = payload;
    char name[300], source[300], back[300];
    const char *at = strstr(r->name, "{e}");
    (void)snprintf(name, sizeof name, "%.*s%s%s", at != NULL ? (int)(at - r->name) : (int)strlen(r->name),
                   r->name, at != NULL ? "817" : "", at != NULL ? at + 3 : "");
    const tsr_name_row *row = tsr_layout_map(l, true, name, r->dtype, source, sizeof source);
    CHECK(row != NULL);
    tsr_dtype there = row->src_dtype != 0 ? (tsr_dtype)row->src_dtype : r->dtype;
    CHECK(tsr_layout_map(l, false, source, there, back, sizeof back) == row);
    CHECK(strcmp(back, name) == 0);
    return TSR_OK;
}

static void names(void)
{
    tsr_err err;
    char *k3 = config_k3(), *linear = config_kimi_linear();
    tsr_spec a = parse(k3), b = parse(linear);
    CHECK_OK(tsr_spec_each_tensor(&a, there_and_back, (void *)(uintptr_t)tsr_layout_find("kimi-k3"), &err));
    CHECK_OK(
        tsr_spec_each_tensor(&b, there_and_back, (void *)(uintptr_t)tsr_layout_find("kimi-linear"), &err));
    char buf[200];
    const tsr_layout *l = tsr_layout_find("kimi-k3");
    CHECK(tsr_layout_map(l, false, "language_model.model.layers.7.self_attention_res.proj_weight",
                         TSR_DT_BF16, buf, 200) != NULL);
    CHECK(strcmp(buf, "layers.7.attn_res.proj.weight") == 0); /* an older spelling loads */
    CHECK(tsr_layout_map(l, false, "language_model.model.layers.07.mlp_res_norm.weight", TSR_DT_BF16, buf,
                         200) == NULL);
    CHECK(tsr_layout_map(l, false, "vision_tower.encoder.blocks.3.wo.weight", TSR_DT_BF16, buf, 200) != NULL);
    CHECK(strcmp(buf, "vision.encoder.blocks.3.wo.weight") == 0);
    free(k3);
    free(linear);
}

/* text with `from` replaced by `to` is refused with this status, and the message holds `word`. */
static void refuse(const char *from, const char *to, tsr_status want, const char *word)
{
    char *text = config_k3(), *at = strstr(text, from), *bad;
    tsr_err err;
    tsr_spec s;
    CHECK(at != NULL);
    CHECK(asprintf(&bad, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from)) >= 0);
    tsr_status st = tsr_spec_parse(&s, bad, strlen(bad), &err);
    if (st != want || strstr(err.msg, word) == NULL) {
        fprintf(stderr, "%s -> %s: %s: %s\n", from, to, tsr_status_class(st), err.msg);
        exit(1);
    }
    free(text);
    free(bad);
}

static void bad_configs(void)
{
    refuse("\"kda_layers\":[1,", "\"kda_layers\":[", TSR_E_CONFLICT, "layer 1 is in neither list");
    refuse("\"kda_layers\":[1,", "\"kda_layers\":[0,", TSR_E_CONFLICT, "kda_layers");
    refuse("\"kda_layers\":[1,", "\"kda_layers\":[94,", TSR_E_CONFLICT, "kda_layers");
    refuse("\"kda_layers\":[1,", "\"kda_layers\":[1,4,", TSR_E_CONFLICT, "twice");
    refuse("\"num_experts\":896", "\"num_experts\":\"896\"", TSR_E_FORMAT, "num_experts");
    refuse("\"num_experts\":896,", "", TSR_E_MISSING, "num_experts");
    refuse("\"num_experts\":896", "\"num_experts\":8", TSR_E_FORMAT, "num_experts_per_token");
    refuse("\"num_experts_per_token\":16", "\"num_experts_per_token\":16,\"num_experts_per_tok\":8",
           TSR_E_CONFLICT, "num_experts_per_tok");
    refuse("\"hidden_size\":7168", "\"hidden_size\":-1", TSR_E_FORMAT, "hidden_size");
    refuse("\"kimi_k3\"", "\"gpt9\"", TSR_E_UNSUPPORTED, "gpt9");
    refuse("{\"model_type\"", "{{\"model_type\"", TSR_E_FORMAT, "line 1");
    refuse("\"kv_lora_rank\":512,", "\"kv_lora_rank\":512,\"kv_lora_rank\":512,", TSR_E_FORMAT, "duplicate");
}

int main(void)
{
    sizes();
    names();
    bad_configs();
    printf("sizes, names and refusals are right\n");
    return 0;
}
