/* test_sessions.c - what must hold of inference whatever the options: same bits for any number of threads and any expert
 * cache, state saved and restored, the training path agrees with it, nothing is allocated in a step. */
#include "tests/harness/random_model.h"
#include "tests/model/common.h"

#include <dirent.h>
#include <sys/stat.h>

enum { TOKENS = 75 };

/* ---- every call of malloc of this process passes here --------------------------------------------------------- */

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define COUNTS_MALLOC 1
extern void *__libc_malloc(size_t n);
extern void *__libc_calloc(size_t n, size_t size);
static volatile int64_t allocations;
void *malloc(size_t n);
void *calloc(size_t n, size_t size);
void *malloc(size_t n)
{
    (void)__atomic_fetch_add(&allocations, 1, __ATOMIC_RELAXED);
    return __libc_malloc(n);
}
void *calloc(size_t n, size_t size)
{
    (void)__atomic_fetch_add(&allocations, 1, __ATOMIC_RELAXED);
    return __libc_calloc(n, size);
}
#else
#define COUNTS_MALLOC 0
static int64_t allocations;
#endif

static const char k3_config[] =
    "{\"model_type\": \"kimi_k3\", \"text_config\": {\"hidden_size\": 64, \"num_hidden_layers\": 5, "
    "\"vocab_size\": 96,"
    "\"first_k_dense_replace\": 1, \"intermediate_size\": 96, \"num_attention_heads\": 3, \"q_lora_rank\": "
    "24,"
    "\"kv_lora_rank\": 32, \"qk_nope_head_dim\": 16, \"qk_rope_head_dim\": 8, \"v_head_dim\": 16, "
    "\"num_experts\": 40,"
    "\"num_experts_per_token\": 4, \"moe_intermediate_size\": 32, \"routed_expert_hidden_size\": 32,"
    "\"num_shared_experts\": 2, \"attn_res_block_size\": 2, \"hidden_act\": \"situ\", \"model_max_length\": "
    "4096,"
    "\"linear_attn_config\": {\"num_heads\": 3, \"head_dim\": 16, \"short_conv_kernel_size\": 4,"
    "\"gate_lower_bound\": -5.0, \"kda_layers\": [1, 2, 3], \"full_attn_layers\": [4, 5]}%s}}";

static void open_random(random_model *r, bool packed, tsr_dtype dense)
{
    char config[2048];
    (void)snprintf(config, sizeof config, k3_config,
                   packed ? ", \"quantization_config\": {\"format\": \"mxfp4-pack-quantized\"}" : "");
    random_model_open(r, config, dense);
}

static void random_ids(int32_t *ids, int64_t n)
{
    uint64_t rng = 77;
    for (int64_t i = 0; i < n; i++) {
        ids[i] = (int32_t)(bag_random(&rng) % 96);
    }
}

static uint64_t digest_of(random_model *r, tsr_backend *b, const tsr_model_opts *o, int64_t chunk,
                          const float **logits_out)
{
    static float logits[TOKENS * 96];
    int32_t ids[TOKENS];
    tsr_model *m;
    tsr_session *s;
    tsr_err err;
    random_ids(ids, TOKENS);
    CHECK_OK(tsr_model_open(&m, &r->spec, &r->source, o, b, NULL, &err));
    CHECK_OK(tsr_session_open(&s, m, TOKENS, TSR_DT_F32, &err));
    for (int64_t at = 0; at < TOKENS; at += chunk) {
        int64_t n = TOKENS - at < chunk ? TOKENS - at : chunk;
        tsr_forward_args a = { .ids = ids + at, .n = n, .logits = logits + at * 96, .logit_rows = n };
        CHECK_OK(tsr_model_forward(m, s, &a, &err));
    }
    tsr_session_close(&s);
    tsr_model_close(&m);
    if (logits_out != NULL) {
        *logits_out = logits;
    }
    return tsr_hash64(logits, sizeof logits);
}

static void test_threads(void **state)
{
    (void)state;
    static const int64_t chunks[] = { 1, 9, TOKENS };
    for (int packed = 0; packed < 2; packed++) {
        random_model r;
        open_random(&r, packed != 0, TSR_DT_BF16);
        for (int c = 0; c < 3; c++) {
            uint64_t first = 0;
            for (int threads = 1; threads <= 4; threads *= 2) {
                tsr_backend *b;
                tsr_err err;
                CHECK_OK(tsr_backend_open(&b, "auto", threads, &err));
                uint64_t d = digest_of(&r, b, &(tsr_model_opts){ .max_tokens = TOKENS }, chunks[c], NULL);
                first = threads == 1 ? d : first;
                assert_int_equal(d, first);
                tsr_backend_close(&b);
            }
        }
        random_model_close(&r);
    }
}

static void test_expert_cache(void **state)
{
    (void)state;
    for (int packed = 0; packed < 2; packed++) {
        random_model r;
        tsr_backend *b;
        tsr_err err;
        open_random(&r, packed != 0, TSR_DT_BF16);
        CHECK_OK(tsr_backend_open(&b, getenv("B") ? getenv("B") : "auto", 2, &err));
        uint64_t one;
        CHECK_OK(r.source.expert_bytes(r.source.payload, 1, &one, &err));
        for (int64_t chunk = 1; chunk <= TOKENS; chunk += 37) {
            uint64_t all = digest_of(&r, b, &(tsr_model_opts){ .max_tokens = TOKENS }, chunk, NULL);
            for (uint64_t experts = 4; experts <= 64; experts *= 2) {
                tsr_model_opts o = { .max_tokens = TOKENS, .expert_cache = experts * one };
                if (digest_of(&r, b, &o, chunk, NULL) != all) { fail_msg("packed %d chunk %d experts %d", packed, (int)chunk, (int)experts); }
            }
        }
        tsr_model *m;
        tsr_model_opts o = { .expert_cache = 3 * one };
        assert_int_equal(tsr_model_open(&m, &r.spec, &r.source, &o, b, NULL, &err), TSR_E_LIMIT);
        tsr_backend_close(&b);
        random_model_close(&r);
    }
}

static void test_save_and_load(void **state)
{
    (void)state;
    enum { BEFORE = 31, AFTER = 20 };
    for (int half = 0; half < 2; half++) {
        random_model r;
        tsr_backend *b;
        tsr_err err;
        tsr_model *m;
        tsr_session *s;
        int32_t ids[BEFORE + AFTER], *back;
        static float want[AFTER * 96], got[AFTER * 96];
        int64_t count;
        char *dir = test_dir("sessions"), path[500];
        (void)snprintf(path, sizeof path, "%s/state", dir);
        random_ids(ids, BEFORE + AFTER);
        open_random(&r, true, TSR_DT_BF16);
        CHECK_OK(tsr_backend_open(&b, "auto", 2, &err));
        CHECK_OK(
            tsr_model_open(&m, &r.spec, &r.source, &(tsr_model_opts){ .max_tokens = 64 }, b, NULL, &err));
        tsr_dtype cache = half ? TSR_DT_BF16 : TSR_DT_F32;
        CHECK_OK(tsr_session_open(&s, m, 128, cache, &err));
        CHECK_OK(tsr_model_forward(m, s, &(tsr_forward_args){ .ids = ids, .n = BEFORE }, &err));
        CHECK_OK(tsr_session_save(s, path, ids, &err));
        tsr_forward_args a = { .ids = ids + BEFORE, .n = AFTER, .logits = want, .logit_rows = AFTER };
        CHECK_OK(tsr_model_forward(m, s, &a, &err));
        assert_int_equal(tsr_session_save(s, path, ids, &err), TSR_E_CONFLICT); /* it is there already */
        tsr_session_close(&s);
        CHECK_OK(tsr_session_open(&s, m, 100, cache, &err));
        CHECK_OK(tsr_session_load(s, path, &back, &count, &err));
        assert_int_equal(count, BEFORE);
        assert_int_equal(tsr_session_length(s), BEFORE);
        assert_memory_equal(back, ids, BEFORE * sizeof *ids);
        a.logits = got;
        CHECK_OK(tsr_model_forward(m, s, &a, &err));
        assert_memory_equal(want, got, sizeof want);
        tsr_session_close(&s);
        CHECK_OK(tsr_session_open(&s, m, BEFORE - 1, cache, &err));
        assert_int_equal(tsr_session_load(s, path, NULL, NULL, &err), TSR_E_LIMIT);
        tsr_session_close(&s);
        CHECK_OK(tsr_session_open(&s, m, 128, half ? TSR_DT_F32 : TSR_DT_BF16, &err));
        assert_int_equal(tsr_session_load(s, path, NULL, NULL, &err), TSR_E_CONFLICT);
        tsr_session_close(&s);
        tsr_model_close(&m);
        ((float *)(void *)random_model_find(&r, "layers.0.attn.a_log")->data)[0] += 1; /* another model */
        CHECK_OK(
            tsr_model_open(&m, &r.spec, &r.source, &(tsr_model_opts){ .max_tokens = 64 }, b, NULL, &err));
        CHECK_OK(tsr_session_open(&s, m, 128, cache, &err));
        assert_int_equal(tsr_session_load(s, path, NULL, NULL, &err), TSR_E_CONFLICT);
        tsr_session_close(&s);
        tsr_model_close(&m);
        free(back);
        tsr_backend_close(&b);
        random_model_close(&r);
        test_dir_remove(dir);
    }
}

/* Expanded attention, chunked delta rule with saved states: the loss of training is the loss of inference. */
static void test_training_agrees(void **state)
{
    (void)state;
    random_model r;
    tsr_backend *b;
    tsr_err err;
    tsr_model *train, *infer;
    tsr_session *s;
    int32_t ids[TOKENS + 1];
    float logprob[TOKENS];
    tsr_loss loss;
    int64_t seg[2] = { 0, TOKENS };
    double sum = 0;
    random_ids(ids, TOKENS + 1);
    open_random(&r, true, TSR_DT_F32);
    CHECK_OK(tsr_backend_open(&b, "auto", 2, &err));
    tsr_model_opts o = { .train = true, .max_tokens = TOKENS };
    CHECK_OK(tsr_model_open(&train, &r.spec, &r.source, &o, b, NULL, &err));
    CHECK_OK(
        tsr_model_open(&infer, &r.spec, &r.source, &(tsr_model_opts){ .max_tokens = TOKENS }, b, NULL, &err));
    CHECK_OK(tsr_session_open(&s, infer, TOKENS, TSR_DT_F32, &err));
    tsr_batch in = { .ids = ids, .targets = ids + 1, .seg = seg, .n = TOKENS, .segs = 1 };
    CHECK_OK(tsr_model_loss(train, &in, &loss, &err));
    tsr_forward_args a = { .ids = ids, .n = TOKENS, .targets = ids + 1, .logprob = logprob };
    CHECK_OK(tsr_model_forward(infer, s, &a, &err));
    for (int i = 0; i < TOKENS; i++) {
        sum -= (double)logprob[i];
    }
    assert_true(fabs(sum - loss.sum) < 1e-5 * sum);
    tsr_session_close(&s);
    tsr_model_close(&train);
    tsr_model_close(&infer);
    tsr_backend_close(&b);
    random_model_close(&r);
}

/* Two sequences in one batch give what each alone gives. */
static void test_segments(void **state)
{
    (void)state;
    random_model r;
    tsr_backend *b;
    tsr_err err;
    tsr_model *m;
    int32_t ids[TOKENS + 1];
    int64_t seg[4] = { 0, 17, 17, TOKENS }; /* the one in the middle is empty */
    tsr_loss both, first, second;
    random_ids(ids, TOKENS + 1);
    open_random(&r, false, TSR_DT_F32);
    CHECK_OK(tsr_backend_open(&b, "auto", 2, &err));
    tsr_model_opts o = { .train = true, .max_tokens = TOKENS, .max_segs = 3 };
    CHECK_OK(tsr_model_open(&m, &r.spec, &r.source, &o, b, NULL, &err));
    tsr_batch in = { .ids = ids, .targets = ids + 1, .seg = seg, .n = TOKENS, .segs = 3 };
    CHECK_OK(tsr_model_loss(m, &in, &both, &err));
    int64_t one[2] = { 0, 17 }, two[2] = { 0, TOKENS - 17 };
    in = (tsr_batch){ .ids = ids, .targets = ids + 1, .seg = one, .n = 17, .segs = 1 };
    CHECK_OK(tsr_model_loss(m, &in, &first, &err));
    in = (tsr_batch){ .ids = ids + 17, .targets = ids + 18, .seg = two, .n = TOKENS - 17, .segs = 1 };
    CHECK_OK(tsr_model_loss(m, &in, &second, &err));
    assert_true(fabs(first.sum + second.sum - both.sum) < 1e-6 * both.sum);
    in = (tsr_batch){
        .ids = ids, .targets = ids + 1, .seg = (int64_t[]){ 0, 18, 17, TOKENS }, .n = TOKENS, .segs = 3
    };
    assert_int_equal(tsr_model_loss(m, &in, &both, &err), TSR_E_USAGE);
    tsr_model_close(&m);
    tsr_backend_close(&b);
    random_model_close(&r);
}

static void test_no_allocation(void **state)
{
    (void)state;
    if (!COUNTS_MALLOC) {
        print_message("skipped: a sanitizer owns malloc\n");
        return;
    }
    random_model r;
    tsr_backend *b;
    tsr_err err;
    tsr_model *m;
    tsr_session *s;
    int32_t ids[TOKENS + 1];
    float logits[96];
    int64_t seg[2] = { 0, TOKENS };
    tsr_loss loss;
    random_ids(ids, TOKENS + 1);
    open_random(&r, true, TSR_DT_BF16);
    uint64_t one;
    CHECK_OK(r.source.expert_bytes(r.source.payload, 1, &one, &err));
    CHECK_OK(tsr_backend_open(&b, "auto", 2, &err));
    for (int leased = 0; leased < 2; leased++) {
        tsr_model_opts o = { .max_tokens = 64, .expert_cache = leased ? 10 * one : 0 };
        CHECK_OK(tsr_model_open(&m, &r.spec, &r.source, &o, b, NULL, &err));
        CHECK_OK(tsr_session_open(&s, m, 4 * TOKENS, TSR_DT_F32, &err));
        tsr_forward_args a = { .ids = ids, .n = 64, .logits = logits, .logit_rows = 1 };
        CHECK_OK(tsr_model_forward(m, s, &a, &err)); /* the first call may set up CBLAS */
        int64_t before = allocations;
        for (int i = 0; i < 5; i++) {
            a.n = i == 0 ? 64 : 1;
            CHECK_OK(tsr_model_forward(m, s, &a, &err));
        }
        assert_int_equal(allocations - before, 0);
        tsr_session_close(&s);
        tsr_model_close(&m);
    }
    tsr_model_opts o = { .train = true, .max_tokens = TOKENS };
    CHECK_OK(tsr_model_open(&m, &r.spec, &r.source, &o, b, NULL, &err));
    tsr_batch in = { .ids = ids, .targets = ids + 1, .seg = seg, .n = TOKENS, .segs = 1 };
    for (int i = 0; i < 3; i++) {
        int64_t before = allocations;
        CHECK_OK(tsr_model_zero_grads(m, &err));
        CHECK_OK(tsr_model_loss(m, &in, &loss, &err));
        CHECK_OK(tsr_model_backward(m, 1, &err));
        assert_true(i == 0 || allocations == before);
    }
    tsr_model_close(&m);
    tsr_backend_close(&b);
    random_model_close(&r);
}

static void test_plan(void **state)
{
    (void)state;
    random_model r;
    tsr_backend *b;
    tsr_err err;
    tsr_plan p;
    open_random(&r, true, TSR_DT_BF16);
    CHECK_OK(tsr_backend_open(&b, "auto", 2, &err));
    tsr_model_opts o = { .max_tokens = 64 };
    CHECK_OK(tsr_model_plan(&p, &r.spec, &r.source, &o, b, 1 << 20, TSR_DT_BF16, &err));
    assert_int_equal(p.state_per_token, 2 * (32 + 8) * 2); /* layers, latent + shared key, bytes */
    assert_int_equal(p.state_fixed, 3 * (3 * 16 * 16 + 3 * 3 * 48) * 4);
    assert_int_equal(p.total,
                     p.weights + p.experts + p.workspace + p.state_fixed + (p.state_per_token << 20));
    CHECK_OK(tsr_model_plan(&p, &r.spec, &r.source, &o, b, 1 << 20, TSR_DT_F32, &err));
    assert_int_equal(p.state_per_token, 2 * (32 + 8) * 4);
    o.mem_limit = 1 << 20;
    assert_int_equal(tsr_model_plan(&p, &r.spec, &r.source, &o, b, 1 << 20, TSR_DT_F32, &err), TSR_E_LIMIT);
    o = (tsr_model_opts){ .train = true, .max_tokens = 64 };
    uint64_t kept;
    CHECK_OK(tsr_model_plan(&p, &r.spec, &r.source, &o, b, 0, TSR_DT_F32, &err));
    kept = p.workspace;
    o.recompute = true;
    CHECK_OK(tsr_model_plan(&p, &r.spec, &r.source, &o, b, 0, TSR_DT_F32, &err));
    assert_true(p.workspace < kept / 2); /* one layer of five at a time */
    tsr_backend_close(&b);
    random_model_close(&r);
}

static void test_refusals(void **state)
{
    (void)state;
    random_model r;
    tsr_backend *b;
    tsr_err err;
    tsr_model *m;
    tsr_session *s;
    int32_t ids[3] = { 1, 2, 96 };
    open_random(&r, true, TSR_DT_BF16);
    CHECK_OK(tsr_backend_open(&b, "auto", 2, &err));
    CHECK_OK(tsr_model_open(&m, &r.spec, &r.source, &(tsr_model_opts){ .max_tokens = 8 }, b, NULL, &err));
    assert_int_equal(tsr_session_open(&s, m, 0, TSR_DT_F32, &err), TSR_E_USAGE);
    assert_int_equal(tsr_session_open(&s, m, 8, TSR_DT_F16, &err), TSR_E_USAGE);
    assert_int_equal(tsr_session_open(&s, m, INT64_MAX / 2, TSR_DT_F32, &err), TSR_E_LIMIT);
    CHECK_OK(tsr_session_open(&s, m, 2, TSR_DT_F32, &err));
    assert_int_equal(tsr_model_forward(m, s, &(tsr_forward_args){ .ids = ids, .n = 3 }, &err), TSR_E_LIMIT);
    assert_int_equal(tsr_model_forward(m, s, &(tsr_forward_args){ .ids = ids + 1, .n = 2 }, &err),
                     TSR_E_USAGE);
    assert_non_null(strstr(err.msg, "token 1: id 96"));
    assert_int_equal(tsr_model_forward(m, s, &(tsr_forward_args){ .ids = ids, .n = 9 }, &err), TSR_E_USAGE);
    assert_int_equal(tsr_session_length(s), 0);
    CHECK_OK(tsr_model_forward(m, s, &(tsr_forward_args){ .ids = ids, .n = 2 }, &err));
    tsr_session_close(&s);
    tsr_model_close(&m);
    random_model_find(&r, "layers.2.attn.o.weight")->shape[1]++;
    assert_int_equal(tsr_model_open(&m, &r.spec, &r.source, NULL, b, NULL, &err), TSR_E_CONFLICT);
    assert_non_null(strstr(err.msg, "layers.2.attn.o.weight"));
    random_model_find(&r, "layers.2.attn.o.weight")->name[0] = 'x';
    assert_int_equal(tsr_model_open(&m, &r.spec, &r.source, NULL, b, NULL, &err), TSR_E_MISSING);
    tsr_backend_close(&b);
    random_model_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_threads),       cmocka_unit_test(test_expert_cache),
        cmocka_unit_test(test_save_and_load), cmocka_unit_test(test_training_agrees),
        cmocka_unit_test(test_segments),      cmocka_unit_test(test_no_allocation),
        cmocka_unit_test(test_plan),          cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
