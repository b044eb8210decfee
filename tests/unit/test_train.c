/* test_train.c - training's parts on their own: optimizers against numbers worked out elsewhere, patterns of names, the state in a
 * checkpoint, checksums of event files, what a step is fed. */
#include "tests/harness/bag.h"
#include "format/io.h"
#include "tests/harness/golden.h"
#include "train/init.h"
#include "train/metrics.h"
#include "train/optim.h"
#include "train/state.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

static const char text[] =
    "model: {family: kimi-k3, layers: 2, hidden: 16, vocab: 24, first_dense: 1, dense_width: 20, kda_heads: "
    "2,"
    " kda_head_dim: 8, full_attention_every: 0, mla_heads: 2, q_lora: 12, kv_lora: 10, qk_nope: 6, qk_rope: "
    "4,"
    " v_head: 5, experts: 4, top_k: 2, shared_experts: 1, expert_width: 7, latent: 9, res_block: 1}\n"
    "data: {sources: [{name: letters, path: data}]}\n"
    "stages: [{name: only, context: 8, steps: 5, batch_tokens: 8, lr: 0.02}]\n"
    "optimizer: {matrices: {lr_scale: 0.5, weight_decay: 0.3, momentum: 0.9},"
    " others: {lr_scale: 2, weight_decay: 0.2, beta1: 0.8, beta2: 0.95, eps: 1e-8}}\n";

static tsr_recipe *recipe(const tsr_recipe_set *sets, size_t count)
{
    tsr_recipe *r;
    tsr_err err = { 0 };
    CHECK_OK(tsr_recipe_parse(&r, text, strlen(text), "test.yaml", sets, count, &err));
    return r;
}

/* ---- optimizers ---------------------------------------------------------------------------------------------------------- */

/* tests/tools/make_train_golden.py has the same numbers. */
static void numbers(float *out, const char *name, int step, int64_t n)
{
    char label[128];
    (void)snprintf(label, sizeof label, "%s/%d", name, step);
    uint64_t seed = (uint64_t)tf_crc32c(label, strlen(label)) << 32;
    for (int64_t i = 0; i < n; i++) {
        uint64_t z = seed + (uint64_t)i + 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        z = z ^ (z >> 31);
        out[i] = (float)((double)(z >> 40) / (1 << 23) - 1);
    }
}

typedef struct bench {
    tsr_recipe *r;
    tsr_backend *b;
    tsr_dist *d;
    tsr_model *m;
    optim o;
} bench;

static void bench_open(bench *k, const tsr_recipe_set *sets, size_t count)
{
    tsr_err err = { 0 };
    tsr_weight_source src;
    tsr_model_opts o = { .train = true, .max_tokens = 8, .max_segs = 8 };
    k->r = recipe(sets, count);
    CHECK_OK(tsr_backend_open(&k->b, "cpu", 1, &err));
    CHECK_OK(tsr_dist_self_open(&k->d, &err));
    CHECK_OK(tsr_init_source(&src, k->r->spec, 1, 0, &err));
    CHECK_OK(tsr_model_open(&k->m, k->r->spec, &src, &o, k->b, NULL, &err));
    tsr_init_source_done(&src);
    CHECK_OK(optim_open(&k->o, k->m, k->r, k->d, k->d, &err));
}

static void bench_close(bench *k)
{
    optim_close(&k->o);
    tsr_model_close(&k->m);
    tsr_dist_close(&k->d);
    tsr_backend_close(&k->b);
    tsr_recipe_free(&k->r);
}

/* Two steps with some parameters frozen, three without; learning rate and decay rise; gradients are clipped. */
static void five_updates(bench *k, const double *norms)
{
    tsr_err err = { 0 };
    tsr_stage some = { .freeze = { "layers.0.attn.?_conv.weight", "layers.0.attn.o.w*" }, .freeze_count = 2 },
              all = { .freeze_count = 0 };
    for (int64_t i = 0; i < k->o.count; i++) {
        const tsr_param *p = k->o.list[i].p;
        numbers(p->data, p->name, 0, p->count);
        for (int64_t j = 0; j < p->count; j++) {
            p->data[j] /= 8;
        }
    }
    for (int step = 1; step <= 5; step++) {
        double norm;
        optim_freeze(&k->o, step <= 2 ? &some : &all);
        for (int64_t i = 0; i < k->o.count; i++) {
            numbers(k->o.list[i].p->grad, k->o.list[i].p->name, step, k->o.list[i].p->count);
        }
        CHECK_OK(optim_finish_reduce(&k->o, &err));
        CHECK_OK(optim_norm(&k->o, k->d, &norm, &err));
        assert_true(fabs(norm / norms[step - 1] - 1) < 1e-6);
        CHECK_OK(optim_step(&k->o, 0.02 * step, 1 + 0.25 * (step - 1), 3 / norm, &err));
    }
}

static void optimizers(void **unused)
{
    (void)unused;
    bench k;
    golden file;
    int64_t n;
    golden_open(&file, "train/optim.safetensors");
    bench_open(&k, NULL, 0);
    double *norms = golden_f64(&file, "norms", &n);
    assert_int_equal(n, 5);
    five_updates(&k, norms);
    assert_int_equal(k.o.count, 52);
    for (int64_t i = 0; i < k.o.count; i++) {
        const tsr_param *p = k.o.list[i].p;
        if (!golden_has(&file, p->name)) {
            fail_msg("%s: is not in the fixture", p->name);
        }
        float *want = golden_f32(&file, p->name, &n);
        assert_int_equal(n, p->count);
        double off = relative_l2(p->data, want, n);
        if (!(off <= 1e-5)) {
            fail_msg("%s: off by %g", p->name, off);
        }
        bool late = strstr(p->name, "_conv.weight") != NULL || strcmp(p->name, "layers.0.attn.o.weight") == 0;
        assert_int_equal(k.o.list[i].updates, late ? 3 : 5);
        free(want);
    }
    free(norms);
    bench_close(&k);
    golden_close(&file);
}

/* Frozen parameters do not count in the norm, and do not change. */
static void frozen(void **unused)
{
    (void)unused;
    bench k;
    tsr_err err = { 0 };
    double norm;
    tsr_stage all = { .freeze = { "*" }, .freeze_count = 1 },
              but = { .freeze = { "[*", "l*", "o*", "f*", "h*" }, .freeze_count = 5 };
    bench_open(&k, NULL, 0);
    for (int64_t i = 0; i < k.o.count; i++) {
        numbers(k.o.list[i].p->grad, k.o.list[i].p->name, 1, k.o.list[i].p->count);
    }
    optim_freeze(&k.o, &all);
    CHECK_OK(optim_norm(&k.o, k.d, &norm, &err));
    assert_true(norm == 0);
    optim_freeze(&k.o, &but);
    CHECK_OK(optim_norm(&k.o, k.d, &norm, &err));
    const tsr_param *embed = tsr_model_param_find(k.m, "embed.weight"),
                    *head = tsr_model_param_find(k.m, "head.weight");
    double sum = 0;
    for (int64_t i = 0; i < embed->count; i++) {
        sum += (double)embed->grad[i] * (double)embed->grad[i];
    }
    assert_true(fabs(norm - sqrt(sum)) < 1e-6);
    float was = head->data[0], moved = embed->data[0];
    CHECK_OK(optim_step(&k.o, 0.1, 1, 1, &err));
    assert_true(head->data[0] == was);
    assert_true(embed->data[0] != moved);
    bench_close(&k);
}

static void patterns(void **unused)
{
    (void)unused;
    static const struct {
        const char *pattern, *name;
        bool yes;
    } rows[] = {
        { "", "", true },
        { "", "a", false },
        { "*", "", true },
        { "*", "layers.0.attn.q.weight", true },
        { "?", "", false },
        { "a?c", "abc", true },
        { "a?c", "ac", false },
        { "layers.*.attn.*", "layers.12.attn.o.weight", true },
        { "layers.*.attn.*", "layers.12.attn_norm.weight", false },
        { "layers.?.attn*", "layers.12.attn.o.weight", false },
        { "*.weight", "a.weight.weight", true },
        { "*.weight", "a.weights", false },
        { "*a*b", "xaxbxab", true },
        { "*a*b", "xaxbxa", false },
        { "**", "x", true },
        { "a*", "a", true },
        { "a**?", "a", false },
        { "layers.1.experts.{e}.*", "layers.1.experts.{e}.up.weight", true },
        { "embed.weigh", "embed.weight", false },
        { "embed.weight", "embed.weigh", false },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (optim_matches(rows[i].pattern, rows[i].name) != rows[i].yes) {
            fail_msg("\"%s\", \"%s\"", rows[i].pattern, rows[i].name);
        }
    }
}

static void checksums(void **unused)
{
    (void)unused;
    static const uint8_t zero[32] = { 0 };
    assert_int_equal(tf_crc32c("123456789", 9), 0xe3069283u);
    assert_int_equal(tf_crc32c("", 0), 0);
    assert_int_equal(tf_crc32c(zero, sizeof zero), 0x8a9136aau); /* RFC 3720, B.4 */
}

/* ---- data ----------------------------------------------------------------------------------------------------------------- */

enum { FIRST = '#', LAST = '[' }; /* every letter once in all documents; neither a quote nor a backslash */
static const int lengths[] = { 20, 1, 13, 2, 7, 8, 3, 1, 2 };
static char folder[64], data[96];
static char ends[256]; /* 1: last letter of a document */

static int make_data(void **unused)
{
    (void)unused;
    tsr_err err = { 0 };
    char path[96];
    int c = FIRST;
    (void)snprintf(folder, sizeof folder, "/tmp/tsr-train-XXXXXX");
    CHECK(mkdtemp(folder) != NULL);
    (void)snprintf(path, sizeof path, "%s/text.jsonl", folder);
    (void)snprintf(data, sizeof data, "%s/data", folder);
    FILE *f = fopen(path, "w");
    CHECK(f != NULL);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        (void)fprintf(f, "{\"text\":\"");
        for (int k = 0; k < lengths[i]; k++) {
            (void)fputc(c++, f);
        }
        ends[c - 1] = 1;
        (void)fprintf(f, "\"}\n");
    }
    CHECK(fclose(f) == 0 && c == LAST + 1);
    const char *paths[] = { path };
    tsr_data_build_opts o = { .no_eos = true };
    tsr_data_stats stats;
    CHECK_OK(tsr_data_build(paths, 1, data, &o, &stats, &err));
    return 0;
}

static int remove_data(void **unused)
{
    (void)unused;
    tsr_err err = { 0 };
    CHECK_OK(tsr_fs_remove_tree(folder, &err));
    return 0;
}

/* Takes all batches of `steps` steps; times[c]: how often the letter was an input. */
static void take(const char *batch, const char *micro, int64_t steps, int64_t *sequences, int times[256])
{
    tsr_err err = { 0 };
    tsr_recipe_set sets[] = { { "data.sources.0.path", data },
                              { "model.vocab", "512" },
                              { "stages.0.batch_tokens", batch },
                              { "micro_tokens", micro } };
    tsr_recipe *r = recipe(sets, 4);
    feed f;
    CHECK_OK(feed_open(&f, r, 1, &err));
    CHECK_OK(feed_stage(&f, 0, &err));
    *sequences = f.count[0];
    steps = steps > 0 ? steps : 2 * f.count[0] / f.batch;
    memset(times, 0, 256 * sizeof *times);
    for (int64_t s = 0; s < steps; s++) {
        int64_t targets, tokens, seen = 0, wanted = 0;
        feed_totals(&f, s, &targets, &tokens);
        for (int64_t i = 0; i < feed_micros(&f, 1); i++) {
            int64_t to = (i + 1) * f.micro < f.batch ? (i + 1) * f.micro : f.batch;
            tsr_batch b = feed_batch(&f, s, i * f.micro, to);
            assert_true(b.n <= f.max_tokens && b.segs <= f.max_segs && b.seg[0] == 0 && b.seg[b.segs] == b.n);
            for (int64_t k = 0; k < b.n; k++) {
                int32_t id = b.ids[k];
                assert_in_range(id, FIRST, LAST);
                assert_int_equal(b.targets[k], ends[id] ? -1 : id + 1);
                times[id]++;
                wanted += b.targets[k] >= 0;
            }
            for (int64_t k = 0; k < b.segs; k++) { /* a segment is a run of one document */
                for (int64_t j = b.seg[k] + 1; j < b.seg[k + 1]; j++) {
                    assert_true(b.ids[j] == b.ids[j - 1] + 1 && !ends[b.ids[j - 1]]);
                }
            }
            seen += b.n;
        }
        assert_int_equal(seen, tokens);
        assert_int_equal(wanted, targets);
    }
    feed_close(&f);
    tsr_recipe_free(&r);
}

static void epochs(void **unused)
{
    (void)unused;
    int times[256];
    int64_t sequences, again;
    take("8", "0", 1, &sequences, times);
    take("8", "0", sequences, &again, times);
    for (int c = 0; c < 256; c++) {
        assert_int_equal(times[c], c >= FIRST && c <= LAST);
    }
    take("16", "16", sequences, &again, times); /* two sequences a step: two epochs, whole as well */
    for (int c = 0; c < 256; c++) {
        assert_int_equal(times[c], c >= FIRST && c <= LAST ? 2 : 0);
    }
    take("24", "16", sequences, &again, times); /* three in two micro-batches */
    for (int c = FIRST; c <= LAST; c++) {
        assert_int_equal(times[c], 3);
    }
}

static void shares(void **unused)
{
    (void)unused;
    feed f = { .batch = 7, .micro = 2 };
    for (int32_t ranks = 1; ranks <= 9; ranks++) {
        int64_t next = 0, most = 0;
        for (int32_t i = 0; i < ranks; i++) {
            int64_t first, last;
            feed_share(&f, i, ranks, &first, &last);
            assert_int_equal(first, next);
            most = last - first > most ? last - first : most;
            next = last;
        }
        assert_int_equal(next, 7);
        assert_int_equal(feed_micros(&f, ranks), (most + 1) / 2);
    }
}

/* ---- state ------------------------------------------------------------------------------------------------------------------ */

static json_t *state_of(const progress_state *p, const bench *k, const feed *f)
{
    char *json = state_json(p, k->r, f, &k->o);
    assert_non_null(json);
    json_t *root = json_loads(json, JSON_REJECT_DUPLICATES, NULL);
    assert_non_null(root);
    free(json);
    return root;
}

static void same_progress(const progress_state *p, const json_t *root)
{
    progress_state q;
    tsr_err err = { 0 };
    CHECK_OK(state_parse(root, &q, &err));
    assert_true(q.step == p->step && q.tokens == p->tokens && q.skipped == p->skipped &&
                q.skips_in_a_row == p->skips_in_a_row);
    assert_true(isnan(p->mean_loss) ? isnan(q.mean_loss) : q.mean_loss == p->mean_loss);
}

static void same_recipe(const bench *k, const json_t *root)
{
    tsr_err err = { 0 };
    char *found;
    tsr_recipe *again;
    CHECK_OK(state_recipe_text(root, &found, &err));
    CHECK_OK(tsr_recipe_parse(&again, found, strlen(found), "train.json", NULL, 0, &err));
    char *a = tsr_recipe_json(k->r), *b = tsr_recipe_json(again);
    assert_string_equal(a, b);
    free(a);
    free(b);
    free(found);
    tsr_recipe_free(&again);
}

static void state(void **unused)
{
    (void)unused;
    bench k;
    feed f;
    tsr_err err = { 0 };
    tsr_recipe_set sets[] = { { "data.sources.0.path", data },
                              { "model.vocab", "512" },
                              { "seed", "9007199254740991" } };
    bench_open(&k, sets, 3);
    CHECK_OK(feed_open(&f, k.r, 1, &err));
    CHECK_OK(feed_stage(&f, 0, &err));
    progress_state rows[] = { { .mean_loss = NAN },
                              { .step = 4,
                                .tokens = INT64_MAX,
                                .mean_loss = 0x1.921fb54442d18p+1,
                                .skipped = 2,
                                .skips_in_a_row = 1 },
                              { .step = 5, .tokens = 40, .mean_loss = 0x1p-1074 } };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        k.o.list[3].updates = 77;
        json_t *root = state_of(&rows[i], &k, &f);
        same_progress(&rows[i], root);
        same_recipe(&k, root);
        CHECK_OK(state_check_data(root, &f, &err));
        assert_int_equal(
            json_integer_value(json_object_get(json_object_get(root, "updates"), k.o.list[3].p->name)), 77);
        (void)json_object_set_new(json_array_get(json_object_get(root, "data"), 0), "hash",
                                  json_string("0123456789abcdef"));
        assert_int_equal(state_check_data(root, &f, &err), TSR_E_CONFLICT);
        (void)json_object_set_new(root, "step", json_real(4));
        progress_state q;
        assert_int_equal(state_parse(root, &q, &err), TSR_E_FORMAT);
        (void)json_object_del(root, "recipe");
        char *found;
        assert_int_equal(state_recipe_text(root, &found, &err), TSR_E_FORMAT);
        json_decref(root);
    }
    feed_close(&f);
    bench_close(&k);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(optimizers), cmocka_unit_test(frozen), cmocka_unit_test(patterns),
        cmocka_unit_test(checksums),  cmocka_unit_test(epochs), cmocka_unit_test(shares),
        cmocka_unit_test(state),
    };
    return cmocka_run_group_tests(tests, make_data, remove_data);
}
