/* test_gradients.c - loss and every gradient of a small model against a float64 reference, on every backend, with and
 * without recomputation; a Kimi-Linear model, for which there is no such file, against central differences. */
#include "tests/harness/random_model.h"
#include "tests/model/common.h"

static int32_t *ids_of(golden *g, int64_t *rows, int64_t *width)
{
    int rank;
    int64_t n;
    const int64_t *shape = golden_shape(g, "ids", &rank);
    int64_t *wide = golden_i64(g, "ids", &n);
    int32_t *out = malloc((size_t)n * sizeof *out);
    assert_true(rank == 2 && out != NULL);
    for (int64_t i = 0; i < n; i++) {
        out[i] = (int32_t)wide[i];
    }
    *rows = shape[0];
    *width = shape[1];
    free(wide);
    return out;
}

/* The canonical name of a gradient of the file, through the layout's table. */
static void canonical(const char *source, char *name, size_t room)
{
    char full[256];
    (void)snprintf(full, sizeof full, "language_model.%s", source);
    assert_non_null(tsr_layout_map(tsr_layout_find("kimi-k3"), false, full, TSR_DT_F32, name, room));
}

/* Where a parameter's gradient lies: a plain one, or one expert's part of a family. */
static const float *grad_of(const tsr_model *m, const char *name, int64_t *count)
{
    const tsr_param *p = tsr_model_param_find(m, name);
    const char *at = strstr(name, ".experts.");
    if (p == NULL && at != NULL) {
        char family[256], *end;
        long e = strtol(at + 9, &end, 10);
        (void)snprintf(family, sizeof family, "%.*s{e}%s", (int)(at + 9 - name), name, end);
        p = tsr_model_param_find(m, family);
        assert_non_null(p);
        *count = p->count / p->expert_count;
        return p->grad + e * *count;
    }
    if (p == NULL) {
        fail_msg("no parameter %s", name);
    }
    *count = p->count;
    return p->grad;
}

static void compare_gradients(golden *g, tsr_model *m, tsr_backend *b)
{
    int compared = 0;
    for (int64_t i = 0; i < g->source->count; i++) {
        const char *full = g->source->tensors[i].name;
        char name[256];
        int64_t n, have;
        if (strncmp(full, "grad.", 5) != 0) {
            continue;
        }
        canonical(full + 5, name, sizeof name);
        float *want = golden_f32(g, full, &n), *got = malloc((size_t)n * sizeof *got);
        const float *at = grad_of(m, name, &have);
        assert_int_equal(have, n);
        assert_int_equal(b->download(b, got, at, (size_t)n * sizeof *got), TSR_OK);
        double off = relative_l2(got, want, n);
        if (!(off <= 1e-4)) {
            fail_msg("%s: off by %.3g", full, off);
        }
        compared++;
        free(want);
        free(got);
    }
    assert_true(compared > 150);
}

static void gradients_on(const char *name, bool recompute)
{
    tsr_backend *b;
    tsr_err err;
    if (!open_backend(&b, name, 2)) {
        return;
    }
    opened o;
    golden g;
    open_files(&o, "tiny-grad");
    golden_open(&g, "tiny-grad/expected.safetensors");
    int64_t rows, width, n = 0;
    int32_t *all = ids_of(&g, &rows, &width), ids[256], targets[256];
    int64_t seg[8] = { 0 };
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t i = 0; i + 1 < width; i++, n++) {
            ids[n] = all[r * width + i];
            targets[n] = all[r * width + i + 1];
        }
        seg[r + 1] = n;
    }
    tsr_model_opts opts = {
        .train = true, .recompute = recompute, .max_tokens = n, .max_segs = rows, .kda_chunk = 16
    };
    tsr_model *m;
    tsr_loss loss;
    CHECK_OK(tsr_model_open(&m, &o.spec, &o.source, &opts, b, NULL, &err));
    tsr_batch batch = { .ids = ids, .targets = targets, .seg = seg, .n = n, .segs = rows };
    for (int round = 0; round < 2; round++) { /* twice: nothing is left over from a step */
        CHECK_OK(tsr_model_zero_grads(m, &err));
        CHECK_OK(tsr_model_loss(m, &batch, &loss, &err));
        CHECK_OK(tsr_model_backward(m, 1.0 / (double)loss.count, &err));
    }
    double *want = golden_f64(&g, "loss", NULL);
    assert_int_equal(loss.count, n);
    assert_true(fabs(loss.sum / (double)n - *want) <= 1e-6 * *want);
    compare_gradients(&g, m, b);
    assert_int_equal(tsr_model_backward(m, 1, &err), TSR_E_USAGE);
    free(want);
    free(all);
    tsr_model_close(&m);
    golden_close(&g);
    close_files(&o);
    tsr_backend_close(&b);
}

static void test_gradients(void **state)
{
    (void)state;
    for (int i = 0; backends[i] != NULL; i++) {
        gradients_on(backends[i], false);
        gradients_on(backends[i], true);
    }
}

/* ---- Kimi-Linear: unbounded gate, low-rank output gate, plain residual stream, SwiGLU, experts at full width ------------- */

static const char linear_config[] =
    "{\"model_type\": \"kimi_linear\", \"hidden_size\": 32, \"num_hidden_layers\": 3, \"vocab_size\": 50,"
    "\"first_k_dense_replace\": 1, \"intermediate_size\": 40, \"num_attention_heads\": 2, \"q_lora_rank\": "
    "null,"
    "\"kv_lora_rank\": 16, \"qk_nope_head_dim\": 8, \"qk_rope_head_dim\": 4, \"v_head_dim\": 8, "
    "\"mla_use_nope\": true,"
    "\"num_experts\": 6, \"num_experts_per_token\": 2, \"num_shared_experts\": 1, \"moe_intermediate_size\": "
    "12,"
    "\"moe_renormalize\": true, \"moe_router_activation_func\": \"sigmoid\", \"routed_scaling_factor\": "
    "2.446,"
    "\"hidden_act\": \"silu\", \"rms_norm_eps\": 1e-5, \"linear_attn_config\": {\"num_heads\": 2, "
    "\"head_dim\": 16,"
    "\"short_conv_kernel_size\": 4, \"kda_layers\": [1, 3], \"full_attn_layers\": [2]}}";

enum { TOKENS = 41 };

static void make_batch(int32_t *ids, int32_t *targets, int64_t seg[3])
{
    uint64_t rng = 5;
    for (int i = 0; i < TOKENS; i++) {
        ids[i] = (int32_t)(bag_random(&rng) % 50);
        targets[i] = i % 7 == 3 ? -1 : (int32_t)(bag_random(&rng) % 50);
    }
    seg[0] = 0;
    seg[1] = 19;
    seg[2] = TOKENS;
}

static double loss_of(tsr_model *m, const tsr_batch *in)
{
    tsr_err err;
    tsr_loss loss;
    CHECK_OK(tsr_model_loss(m, in, &loss, &err));
    return loss.sum;
}

/* Central differences of f32 losses are good to about 1e-3: they tell a wrong formula, not a rounding. The directional
 * derivative along a random direction of a whole tensor is compared. */
static void check_direction(tsr_model *m, const tsr_batch *in, const tsr_param *p)
{
    float *old = malloc((size_t)p->count * sizeof *old);
    double slope = 0, up, down, norm = 0;
    uint64_t rng = tsr_hash64(p->name, strlen(p->name));
    assert_non_null(old);
    memcpy(old, p->data, (size_t)p->count * sizeof *old);
    float *dir = malloc((size_t)p->count * sizeof *dir);
    assert_non_null(dir);
    for (int64_t i = 0; i < p->count; i++) {
        dir[i] = (float)((double)(bag_random(&rng) >> 40) / 8388608.0 - 1) +
                 0.5f * (p->grad[i] > 0 ? 1.0f : -1.0f);
        slope += (double)dir[i] * (double)p->grad[i];
        norm += (double)dir[i] * (double)dir[i];
    }
    float h = (float)(2e-3 / sqrt(norm / (double)p->count) / sqrt(sqrt((double)p->count)));
    for (int64_t i = 0; i < p->count; i++) {
        p->data[i] = old[i] + h * dir[i];
    }
    up = loss_of(m, in);
    for (int64_t i = 0; i < p->count; i++) {
        p->data[i] = old[i] - h * dir[i];
    }
    down = loss_of(m, in);
    memcpy(p->data, old, (size_t)p->count * sizeof *old);
    double measured = (up - down) / (2 * (double)h);
    if (fabs(measured - slope) > 2e-2 * fabs(slope) + 2e-2) {
        fail_msg("%s: slope %.6g, measured %.6g", p->name, slope, measured);
    }
    free(old);
    free(dir);
}

static void test_kimi_linear(void **state)
{
    (void)state;
    random_model r;
    tsr_backend *b;
    tsr_err err;
    tsr_model *m;
    int32_t ids[TOKENS], targets[TOKENS];
    int64_t seg[3];
    tsr_loss loss;
    make_batch(ids, targets, seg);
    random_model_open(&r, linear_config, TSR_DT_F32);
    CHECK_OK(tsr_backend_open(&b, "auto", 2, &err));
    tsr_model_opts o = { .train = true, .max_tokens = TOKENS, .max_segs = 2, .kda_chunk = 16 };
    CHECK_OK(tsr_model_open(&m, &r.spec, &r.source, &o, b, NULL, &err));
    tsr_batch in = { .ids = ids, .targets = targets, .seg = seg, .n = TOKENS, .segs = 2 };
    CHECK_OK(tsr_model_loss(m, &in, &loss, &err));
    CHECK_OK(tsr_model_backward(m, 1, &err));
    int64_t checked = 0;
    for (int64_t i = 0; i < tsr_model_param_count(m); i++) {
        const tsr_param *p = tsr_model_param(m, i);
        if (p->grad != NULL) {
            check_direction(m, &in, p);
            checked++;
        }
    }
    assert_true(checked > 40);
    tsr_model_close(&m);
    tsr_backend_close(&b);
    random_model_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_gradients),
                                        cmocka_unit_test(test_kimi_linear) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
