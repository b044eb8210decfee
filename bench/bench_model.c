/* bench_model.c - whole models: prefill against the sgemm rate, decoding against the rate of reading memory, both measured
 * in the same run with the same threads. Usage: bench_model [CHECKPOINT [threads [expert cache in MiB]]]; without a
 * checkpoint a random model of about 0.4 GB (64 experts, top 8). */
#include "bench/bench.h"
#include "convert/weights.h"
#include "kernels/backend_priv.h"
#include "kernels/simd/blas.h"
#include "model/model.h"
#include "tests/harness/bag.h"
#include "tests/harness/random_model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PREFILL = 512, DECODE = 64, ROUNDS = 5, GEMM = 1024, READ_PARTS = 64 };

static const char small_config[] =
    "{\"model_type\": \"kimi_k3\", \"text_config\": {\"hidden_size\": 1024, \"num_hidden_layers\": 9, "
    "\"vocab_size\": 8192,"
    "\"first_k_dense_replace\": 1, \"intermediate_size\": 3072, \"num_attention_heads\": 8, \"q_lora_rank\": "
    "256,"
    "\"kv_lora_rank\": 128, \"qk_nope_head_dim\": 128, \"qk_rope_head_dim\": 64, \"v_head_dim\": 128, "
    "\"num_experts\": 64,"
    "\"num_experts_per_token\": 8, \"moe_intermediate_size\": 448, \"routed_expert_hidden_size\": 512,"
    "\"num_shared_experts\": 2, \"attn_res_block_size\": 4, \"hidden_act\": \"situ\", \"model_max_length\": "
    "4096,"
    "\"linear_attn_config\": {\"num_heads\": 8, \"head_dim\": 128, \"short_conv_kernel_size\": 4,"
    "\"gate_lower_bound\": -5.0, \"kda_layers\": [1, 2, 3, 5, 6, 7], \"full_attn_layers\": [4, 8, 9]},"
    "\"quantization_config\": {\"format\": \"mxfp4-pack-quantized\"}}}";

/* ---- limits --------------------------------------------------------------------------------------------------- */

typedef struct limit {
    float *a, *c;
    size_t bytes;
    uint64_t sink[READ_PARTS];
} limit;

static void gemm_part(void *payload, int64_t i, int worker)
{
    (void)worker;
    limit *l = payload;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, GEMM, GEMM, GEMM, 1.0f, l->a, GEMM,
                l->a + GEMM * GEMM, GEMM, 0.0f, l->c + i * GEMM * GEMM, GEMM);
}

static void read_part(void *payload, int64_t i, int worker)
{
    (void)worker;
    limit *l = payload;
    const uint64_t *p = (const uint64_t *)(const void *)l->a;
    size_t n = l->bytes / 8 / READ_PARTS;
    uint64_t s[8] = { 0 };
    for (size_t k = (size_t)i * n; k + 8 <= (size_t)(i + 1) * n; k += 8) {
        for (int j = 0; j < 8; j++) {
            s[j] += p[k + (size_t)j];
        }
    }
    for (int j = 0; j < 8; j++) {
        l->sink[i] += s[j];
    }
}

static double gemm_rate(tsr_backend *b, limit *l)
{
    double t = bench_now();
    tsr_parallel(b->queue, b->threads, gemm_part, l);
    return 2.0 * GEMM * GEMM * GEMM * b->threads / (bench_now() - t);
}

static double read_rate(tsr_backend *b, limit *l)
{
    double t = bench_now();
    tsr_parallel(b->queue, READ_PARTS, read_part, l);
    return (double)l->bytes / (bench_now() - t);
}

/* ---- what a token costs ------------------------------------------------------------------------------------------- */

typedef struct cost {
    const tsr_weight_source *src;
    const tsr_spec *s;
    double flops, bytes;
} cost;

static tsr_status add_cost(void *payload, const tsr_tensor_rule *r, tsr_err *err)
{
    cost *c = payload;
    char name[256];
    const char *mark = strstr(r->name, "{e}");
    tsr_weight_info w;
    if (strncmp(r->name, "vision", 6) == 0 || strncmp(r->name, "projector", 9) == 0) {
        return TSR_OK;
    }
    (void)snprintf(name, sizeof name, "%.*s%s%s", mark != NULL ? (int)(mark - r->name) : 200, r->name,
                   mark != NULL ? "0" : "", mark != NULL ? mark + 3 : "");
    if (c->src->find(c->src->payload, name, &w, err) != TSR_OK || strcmp(r->name, "embed.weight") == 0) {
        return TSR_OK; /* one row of the embedding is nothing */
    }
    double times = r->expert_count > 0 ? (double)c->s->top_k : 1;
    c->bytes += times * (double)w.bytes;
    c->flops += r->rank == 2 && r->dtype != TSR_DT_E8M0 ? times * 2 * (double)(r->shape[0] * r->shape[1]) : 0;
    return TSR_OK;
}

static cost cost_of(const tsr_spec *s, const tsr_weight_source *src)
{
    tsr_err err;
    cost c = { .src = src, .s = s };
    CHECK_OK(tsr_spec_each_tensor(s, add_cost, &c, &err));
    return c;
}

/* ---- runs ------------------------------------------------------------------------------------------------------------ */

static double prefill(tsr_model *m, const int32_t *ids, float *logits)
{
    tsr_err err;
    tsr_session *s;
    CHECK_OK(tsr_session_open(&s, m, PREFILL + DECODE, TSR_DT_F32, &err));
    double t = bench_now();
    tsr_forward_args a = { .ids = ids, .n = PREFILL, .logits = logits, .logit_rows = 1 };
    CHECK_OK(tsr_model_forward(m, s, &a, &err));
    t = bench_now() - t;
    tsr_session_close(&s);
    return t / PREFILL;
}

static double decode(tsr_model *m, const int32_t *ids, float *logits)
{
    tsr_err err;
    tsr_session *s;
    CHECK_OK(tsr_session_open(&s, m, PREFILL + DECODE, TSR_DT_F32, &err));
    double t = bench_now();
    for (int i = 0; i < DECODE; i++) {
        tsr_forward_args a = { .ids = ids + i, .n = 1, .logits = logits, .logit_rows = 1 };
        CHECK_OK(tsr_model_forward(m, s, &a, &err));
    }
    t = bench_now() - t;
    tsr_session_close(&s);
    return t / DECODE;
}

static void measure(const tsr_spec *spec, const tsr_weight_source *src, int threads, uint64_t cache)
{
    tsr_backend *b;
    tsr_model *m;
    tsr_err err;
    int32_t ids[PREFILL];
    double p[ROUNDS], d[ROUNDS], g[ROUNDS], r[ROUNDS];
    cost c = cost_of(spec, src);
    CHECK_OK(tsr_backend_open(&b, "auto", threads, &err));
    CHECK_OK(tsr_model_open(&m, spec, src, &(tsr_model_opts){ .max_tokens = PREFILL, .expert_cache = cache },
                            b, NULL, &err));
    limit l = { .bytes = (size_t)256 << 20 };
    CHECK(b->alloc(b, (void **)&l.a, l.bytes) == TSR_OK); /* as the weights are */
    l.c = malloc((size_t)b->threads * GEMM * GEMM * sizeof *l.c);
    float *logits = malloc((size_t)spec->vocab * sizeof *logits);
    CHECK(l.c != NULL && logits != NULL);
    for (size_t i = 0; i < l.bytes / 4; i++) {
        l.a[i] = (float)(i % 997) * 1e-3f;
    }
    uint64_t rng = 3;
    for (int i = 0; i < PREFILL; i++) {
        ids[i] = (int32_t)(bag_random(&rng) % (uint64_t)spec->vocab);
    }
    (void)gemm_rate(b, &l);
    (void)prefill(m, ids, logits);
    tsr_experts_stats before, after;
    (void)tsr_model_expert_stats(m, &before);
    for (int i = 0; i < ROUNDS; i++) {
        g[i] = gemm_rate(b, &l);
        p[i] = prefill(m, ids, logits);
    }
    for (int i = 0; i < ROUNDS; i++) {
        r[i] = read_rate(b, &l);
        d[i] = decode(m, ids, logits);
    }
    double tp = bench_median(p, ROUNDS), td = bench_median(d, ROUNDS), rg = bench_median(g, ROUNDS),
           rr = bench_median(r, ROUNDS);
    printf(
        "%d threads, %s: %.3f GFLOP and %.1f MB of weights a token; sgemm %.1f GFLOP/s, reading %.1f GB/s\n",
        b->threads, b->name, c.flops / 1e9, c.bytes / 1e6, rg / 1e9, rr / 1e9);
    printf("prefill of %d: %.1f tokens/s, %.1f GFLOP/s, %.0f %% of sgemm (best of each %.0f %%)\n", PREFILL,
           1 / tp, c.flops / tp / 1e9, 100 * c.flops / tp / rg, 100 * c.flops / p[0] / g[ROUNDS - 1]);
    printf("decode: %.1f tokens/s, %.1f GB/s, %.0f %% of reading (best of each %.0f %%)\n", 1 / td,
           c.bytes / td / 1e9, 100 * c.bytes / td / rr, 100 * c.bytes / d[0] / r[ROUNDS - 1]);
    if (tsr_model_expert_stats(m, &after)) {
        double asked = (double)(after.asked - before.asked);
        printf("expert cache %.0f MB: hit rate %.3f, %.1f MB read a token, waited %.0f %% of the time\n",
               (double)after.capacity_bytes / 1e6, (double)(after.hits - before.hits) / asked,
               (double)(after.bytes_read - before.bytes_read) / (ROUNDS * (PREFILL + DECODE)) / 1e6,
               (double)(after.wait_ns - before.wait_ns) / 1e9 / (ROUNDS * (PREFILL * tp + DECODE * td)) *
                   100);
    }
    b->release(b, l.a);
    free(l.c);
    free(logits);
    tsr_model_close(&m);
    tsr_backend_close(&b);
}

int main(int argc, char **argv)
{
    tsr_err err;
    int threads = argc > 2 ? (int)strtol(argv[2], NULL, 10) : 0;
    uint64_t cache = argc > 3 ? strtoull(argv[3], NULL, 10) << 20 : 0;
    if (argc > 1) {
        tsr_view v;
        tsr_weight_source src;
        tsr_spec spec;
        CHECK_OK(tsr_view_open(&v, argv[1], NULL, NULL, NULL, &err));
        CHECK_OK(tsr_spec_parse(&spec, v.source->config_json, v.source->config_bytes, &err));
        CHECK_OK(tsr_view_weights(&src, &v, &err));
        measure(&spec, &src, threads, cache);
        tsr_view_weights_done(&src);
        tsr_view_close(&v);
        return 0;
    }
    random_model r;
    random_model_open(&r, small_config, TSR_DT_BF16);
    measure(&r.spec, &r.source, threads, cache);
    random_model_close(&r);
    return 0;
}
