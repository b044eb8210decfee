/* test_golden.c - a small model of the released layout against right answers from a float64 reference: on every backend,
 * prefilled at once, in pieces of every size, token by token. */
#include "tests/model/common.h"

#define TOLERANCE 1e-5

static void compare_rows(golden *g, const char *name, int32_t layer, const float *got)
{
    char full[64];
    int64_t n;
    (void)snprintf(full, sizeof full, layer >= 0 ? "%s.%d" : "%s", name, layer);
    float *want = golden_f32(g, full, &n);
    double off = relative_l2(got, want, n);
    if (!(off <= TOLERANCE)) {
        fail_msg("%s: off by %.3g", full, off);
    }
    free(want);
}

static void compare(golden *g, const traced *t)
{
    const tsr_spec *s = t->spec;
    compare_rows(g, "logits", -1, t->logits);
    compare_rows(g, "hidden", -1, t->hidden);
    for (int32_t i = 0; i < s->layers; i++) {
        char name[64];
        (void)snprintf(name, sizeof name, "route_ids.%d", i);
        if (golden_has(g, name)) {
            int32_t *ids = golden_i32(g, name, NULL);
            assert_memory_equal(ids, t->ids + i * t->tokens * s->top_k,
                                (size_t)(t->tokens * s->top_k) * sizeof *ids);
            compare_rows(g, "route_weights", i, t->w + i * t->tokens * s->top_k);
            free(ids);
        }
        (void)snprintf(name, sizeof name, "kda_state.%d", i);
        if (golden_has(g, name)) {
            compare_rows(g, "kda_state", i, t->state + i * s->kda_heads * s->kda_head_dim * s->kda_head_dim);
        }
    }
}

static void golden_on(const char *name)
{
    tsr_backend *b;
    tsr_err err;
    if (!open_backend(&b, name, 2)) {
        return;
    }
    opened o;
    golden g;
    open_files(&o, "tiny-mxfp4");
    golden_open(&g, "tiny-mxfp4/expected.safetensors");
    int64_t n;
    int64_t *wide = golden_i64(&g, "ids", &n);
    int32_t ids[64];
    for (int64_t i = 0; i < n; i++) {
        ids[i] = (int32_t)wide[i];
    }
    tsr_model *m;
    CHECK_OK(tsr_model_open(&m, &o.spec, &o.source, &(tsr_model_opts){ .max_tokens = n }, b, NULL, &err));
    for (int64_t chunk = 1; chunk <= n; chunk++) {
        tsr_session *s;
        traced t;
        traced_init(&t, &o.spec, n);
        CHECK_OK(tsr_session_open(&s, m, n, TSR_DT_F32, &err));
        run_traced(m, s, ids, n, chunk, &t);
        compare(&g, &t);
        tsr_session_close(&s);
        traced_free(&t);
    }
    tsr_model_close(&m);
    free(wide);
    golden_close(&g);
    close_files(&o);
    tsr_backend_close(&b);
}

static void test_cpu(void **state)
{
    (void)state;
    golden_on("cpu");
}

static void test_avx2(void **state)
{
    (void)state;
    golden_on("avx2");
}

static void test_avx512(void **state)
{
    (void)state;
    golden_on("avx512");
}

static void test_fence(void **state)
{
    (void)state;
    golden_on("fence");
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_cpu), cmocka_unit_test(test_avx2),
                                        cmocka_unit_test(test_avx512), cmocka_unit_test(test_fence) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
