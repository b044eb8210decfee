/* test_recipe.c - recipes: those that are shipped, the resolved form, refusals with their messages, settings, schedules, sizes. */
#include "tests/harness/bag.h"
#include "tests/harness/k3_config.h"
#include "train/recipe.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

static const char *const shipped[] = { "tiny", "small", "k3-2.8t" };

static tsr_recipe *load_ok(const char *path, const tsr_recipe_set *sets, size_t count)
{
    tsr_recipe *r;
    tsr_err err = { 0 };
    if (tsr_recipe_load(&r, path, sets, count, &err) != TSR_OK) {
        fail_msg("%s: %s", path, err.msg);
    }
    return r;
}

static tsr_recipe *parse_ok(const char *text, const char *name)
{
    tsr_recipe *r;
    tsr_err err = { 0 };
    if (tsr_recipe_parse(&r, text, strlen(text), name, NULL, 0, &err) != TSR_OK) {
        fail_msg("%s: %s", name, err.msg);
    }
    return r;
}

/* Whole text of a small file. */
static char *slurp(const char *path)
{
    FILE *f = fopen(path, "re");
    CHECK(f != NULL);
    char *text = calloc(1, 1 << 20);
    CHECK(text != NULL && fread(text, 1, (1 << 20) - 1, f) > 0);
    (void)fclose(f);
    return text;
}

/* ---- what is shipped ------------------------------------------------------------------------------------------ */

static void shipped_recipes_resolve(void **unused)
{
    (void)unused;
    for (size_t i = 0; i < 3; i++) {
        tsr_recipe *r = load_ok(shipped[i], NULL, 0);
        char *json = tsr_recipe_json(r);
        tsr_recipe *again = parse_ok(json, "recipe.json");
        char *second = tsr_recipe_json(again), *diff = tsr_recipe_diff(json, second);
        assert_string_equal(json, second);
        assert_string_equal(diff, "");
        assert_string_equal(r->config_json, again->config_json);
        assert_int_equal(r->stages, again->stages);
        for (int32_t s = 0; s < r->stages; s++) {
            assert_memory_equal(&r->stage[s], &again->stage[s], sizeof r->stage[s]);
        }
        free(diff);
        free(second);
        free(json);
        tsr_recipe_free(&again);
        tsr_recipe_free(&r);
        assert_null(r);
    }
}

static void kimi_k3_has_its_size(void **unused)
{
    (void)unused;
    tsr_err err = { 0 };
    tsr_spec_sizes z;
    tsr_recipe *r = load_ok("k3-2.8t", NULL, 0);
    CHECK_OK(tsr_spec_sizes_of(r->spec, &z, &err));
    assert_true(fabs((double)z.params_total / 2.8e12 - 1) < 0.02);
    assert_true(fabs((double)z.params_active / 104e9 - 1) < 0.02);
    assert_int_equal(r->spec->arch, TSR_ARCH_KIMI_K3);
    assert_int_equal(r->spec->layer_kind[3], TSR_LAYER_MLA);
    assert_int_equal(r->spec->layer_kind[91], TSR_LAYER_MLA);
    assert_int_equal(r->spec->layer_kind[92], TSR_LAYER_MLA);
    assert_int_equal(r->spec->layer_kind[90], TSR_LAYER_KDA);
    assert_false(r->spec->experts_mxfp4);
    assert_int_equal(r->stage[3].context, 1048576);
    assert_int_equal(r->stage[0].steps, 16384 * 16);
    tsr_recipe_free(&r);
}

/* Every key of the resolved form stands in the documentation. */
static void every_key_is_documented(void **unused)
{
    (void)unused;
    char *docs = slurp(TSR_TEST_ROOT "/docs/RECIPES.md");
    tsr_recipe *r = load_ok(TSR_TEST_ROOT "/tests/data/train/recipe.yaml", NULL, 0);
    char *json = tsr_recipe_json(r);
    int keys = 0;
    for (const char *p = json; (p = strchr(p, '"')) != NULL;) {
        size_t n = strcspn(p + 1, "\"");
        char quoted[80];
        (void)snprintf(quoted, sizeof quoted, "`%.*s`", (int)n, p + 1);
        if (p[n + 2] == ':' && strcmp(quoted, "`text`") != 0) {
            keys++;
            if (strstr(docs, quoted) == NULL) {
                fail_msg("docs/RECIPES.md does not explain %s", quoted);
            }
        }
        p += n + 2;
    }
    assert_true(keys > 100);
    free(json);
    free(docs);
    tsr_recipe_free(&r);
}

/* ---- refusals --------------------------------------------------------------------------------------------------- */

/* The recipe tiny with one piece of its text replaced. */
static void expect_refusal(const char *from, const char *to, tsr_status code, const char *message)
{
    char *text = slurp(TSR_TEST_ROOT "/tests/data/train/recipe.yaml");
    char *at = strstr(text, from);
    CHECK(at != NULL);
    char *changed;
    CHECK(asprintf(&changed, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from)) > 0);
    tsr_recipe *r = NULL;
    tsr_err err = { 0 };
    tsr_status st = tsr_recipe_parse(&r, changed, strlen(changed), "t.yaml", NULL, 0, &err);
    assert_null(r);
    if (st != code || strstr(err.msg, message) == NULL) {
        fail_msg("\"%s\": %s: %s", to, tsr_status_class(st), err.msg);
    }
    assert_null(strchr(err.msg, '\n'));
    free(changed);
    free(text);
}

static void wrong_keys_and_types(void **unused)
{
    (void)unused;
    const tsr_status f = TSR_E_FORMAT;
    expect_refusal("hidden: 128", "hiden: 128", f,
                   "t.yaml:6: model.hiden: unknown key (did you mean hidden?)");
    expect_refusal("context: 256", "contxt: 256", f,
                   "t.yaml:31: stages.0.contxt: unknown key (did you mean context?)");
    expect_refusal("seed: 1", "sede: 1", f, "sede: unknown key (did you mean seed?)");
    expect_refusal("seed: 1", "zzzzzzz: 1", f, "zzzzzzz: unknown key (docs/RECIPES.md lists them)");
    expect_refusal("seed: 1", "seed: 1\nseed: 2", f, "seed: is there twice");
    expect_refusal("seed: 1", "seed: one", f, "seed: must be a whole number from 0");
    expect_refusal("seed: 1", "seed: \"1\"", f, "seed: must be a whole number");
    expect_refusal("seed: 1", "seed: 1.5", f, "seed: must be a whole number");
    expect_refusal("seed: 1", "seed: -1", f, "seed: must be a whole number");
    expect_refusal("seed: 1", "seed: 99999999999999999999", f, "seed: must be a whole number");
    expect_refusal("seed: 1", "seed: {a: 1}", f, "seed: must be a single value");
    expect_refusal("hidden: 128", "hidden: 0", f, "model.hidden: must be a whole number from 1 to 16777216");
    expect_refusal("  hidden: 128\n", "", f, "model.hidden: is missing");
    expect_refusal("layers: 4", "layers: 8K", f, "model.layers: must be a whole number");
    expect_refusal("lr: 0.005", "lr: nan", f, "stages.0.lr: must be a number from 0 to 100");
    expect_refusal("lr: 0.005", "lr: -1", f, "stages.0.lr: must be a number from 0 to 100");
    expect_refusal("warmup: 0.1", "warmup: 1.5", f,
                   "stages.0.warmup: must be a whole number of steps, or a share");
    expect_refusal("schedule: wsd", "schedule: wds", f,
                   "\"wds\" is none of its values (known: constant, cosine, wsd)");
    expect_refusal("recompute: true", "recompute: yes", f, "stages.3.recompute: must be true or false");
    expect_refusal("family: kimi-k3", "family: gpt", f, "model.family: \"gpt\" is none of its values");
    expect_refusal("name: 8k", "name: a/b", f, "stages.0.name: must be a name");
    expect_refusal("path: text", "path: ", f, "data.sources.0.path: must be the path of a data folder");
    expect_refusal("eval: {", "eval: [", f, "not YAML");
    expect_refusal("eval: {every: 50, sequences: 16}", "eval: 3", f, "eval: must be a map of keys");
    expect_refusal("seed: 1", "seed: 1\n---\nseed: 2", f, "more than one document");
    expect_refusal("checkpoint: {every: 50}", "checkpoint: &a {every: 50}\nlog: *a", f, "aliases");
    expect_refusal("seed: 1", "seed: !!int 1", f, "tags (!name) are not supported");
    expect_refusal("seed: 1", "? [1, 2]\n: 3", f, "a key must be text");
    expect_refusal("seed: 1", "seed: \"a\\0b\"", f, "a zero byte");
}

static void contradictions(void **unused)
{
    (void)unused;
    const tsr_status c = TSR_E_CONFLICT;
    expect_refusal("steps: 100,", "steps: 100, tokens: 1M,", c, "stages.0: give steps or tokens, not both");
    expect_refusal("steps: 100,", "", c, "stages.0: give steps or tokens");
    expect_refusal("steps: 100,", "steps: 100, mix: {txet: 1},", c,
                   "mix.txet: no source has this name (did you mean text?)");
    expect_refusal("steps: 100,", "steps: 100, mix: {text: 0},", c, "has no weight above 0");
    expect_refusal("warmup: 0.1", "warmup: 90", c, "warmup (90) and decay (20) are more than the 100 steps");
    expect_refusal("schedule: cosine", "schedule: cosine, decay: 3", c, "decay: is of schedule wsd only");
    expect_refusal("batch_tokens: 4096", "batch_tokens: 255", c, "less than one sequence");
    expect_refusal("name: 64k", "name: 8k", c, "stages.1: a stage of the name 8k is there already");
    expect_refusal("top_k: 4", "top_k: 65", c, "model.top_k: is 65, but a layer has 64 experts");
    expect_refusal("first_dense: 1", "first_dense: 5", c, "model.first_dense: is more than the 4 layers");
    expect_refusal("family: kimi-k3", "family: kimi-linear", c, "model.res_block: attention residuals");
    expect_refusal("hidden: 128", "hidden: 128\n  context: 512", c,
                   "model.context: is 512, but a stage has sequences of 2048");
    expect_refusal("hidden: 128", "hidden: 128\n  config: x.json", c, "not both");
    expect_refusal("seed: 1", "parallel: {ep: 3}", c, "parallel.ep: 3 ranks cannot share 64 experts evenly");
    expect_refusal("seed: 1", "parallel: {cp: 3}", c, "parallel.cp: 3 ranks");
    expect_refusal("seed: 1", "parallel: {pp: 5}", c, "parallel.pp: 5 ranks are more than the 4 layers");
    expect_refusal("seed: 1", "parallel: {ep: 2}\nbalance: {kind: exact}", c,
                   "exact works in one process only");
    expect_refusal("seed: 1", "optimizer: {others: {kind: muon}}", c, "Muon is for matrices only");
}

static void refuse_text(const char *text, size_t bytes, const char *message)
{
    tsr_recipe *r = NULL;
    tsr_err err = { 0 };
    assert_int_equal(tsr_recipe_parse(&r, text, bytes, "h.yaml", NULL, 0, &err), TSR_E_FORMAT);
    assert_null(r);
    if (strstr(err.msg, message) == NULL) {
        fail_msg("%s", err.msg);
    }
}

static void hostile_texts(void **unused)
{
    (void)unused;
    static char big[(1 << 20) + 1], deep[2 * 40 + 1];
    memset(big, ' ', sizeof big);
    refuse_text(big, sizeof big, "is too large for a recipe");
    memset(deep, '[', 40);
    memset(deep + 40, ']', 40);
    refuse_text(deep, 80, "is nested too deeply");
    refuse_text("", 0, "is empty");
    refuse_text("- 1", 3, "must be a map");
    refuse_text("&a [*a]", 7, "aliases");
    refuse_text("a: \x01", 4, "not YAML");
    static const char laughs[] = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n";
    refuse_text(laughs, sizeof laughs - 1, "aliases");
    tsr_recipe *r;
    tsr_err err = { 0 };
    assert_int_equal(tsr_recipe_load(&r, "no-such-recipe", NULL, 0, &err), TSR_E_MISSING);
    assert_non_null(strstr(err.msg, "no-such-recipe: no such recipe, here or in "));
}

/* ---- settings ---------------------------------------------------------------------------------------------------- */

static void settings(void **unused)
{
    (void)unused;
    static const tsr_recipe_set sets[] = { { "stages.1.lr", "1e-3" },
                                           { "optimizer.matrices.lr_scale", "0.5" },
                                           { "stages.0.steps", "" },
                                           { "stages.0.tokens", "1M" },
                                           { "stages.0.freeze", "[embed*, layers.0.*]" },
                                           { "log", "{samples: true}" },
                                           { "balance.kind", "sign" } };
    tsr_recipe *plain = load_ok(TSR_TEST_ROOT "/tests/data/train/recipe.yaml", NULL, 0),
               *r = load_ok(TSR_TEST_ROOT "/tests/data/train/recipe.yaml", sets, 7);
    assert_true(r->stage[1].lr == 1e-3 && r->stage[1].lr_final == 1e-3 * 0.1);
    assert_true(r->matrices.lr_scale == 0.5 && r->others.lr_scale == 1);
    assert_int_equal(r->stage[0].steps, 256);
    assert_int_equal(r->stage[0].warmup, 26);
    assert_int_equal(r->stage[0].freeze_count, 2);
    assert_string_equal(r->stage[0].freeze[1], "layers.0.*");
    assert_true(r->log.samples && r->log.every == 1);
    char *a = tsr_recipe_json(plain), *b = tsr_recipe_json(r), *diff = tsr_recipe_diff(a, b);
    assert_string_equal(diff, "balance.kind: \"quantile\" -> \"sign\"\n"
                              "log.samples: false -> true\n"
                              "optimizer.matrices.lr_scale: 1.0 -> 0.5\n"
                              "stages.0.decay: 20 -> 51\n"
                              "stages.0.freeze.0: (none) -> \"embed*\"\n"
                              "stages.0.freeze.1: (none) -> \"layers.0.*\"\n"
                              "stages.0.steps: 100 -> 256\n"
                              "stages.0.warmup: 10 -> 26\n"
                              "stages.1.lr: 0.002 -> 0.001\n");
    free(diff);
    free(a);
    free(b);
    tsr_recipe_free(&r);
    tsr_recipe_free(&plain);
}

static void wrong_settings(void **unused)
{
    (void)unused;
    static const struct {
        tsr_recipe_set set;
        const char *message;
    } rows[] = {
        { { "stages.1.contxt", "3" }, "--set: stages.1.contxt: unknown key (did you mean context?)" },
        { { "stages.7.lr", "3" }, "--set stages.7.lr: leads nowhere at \"7\"" },
        { { "stages.x.lr", "3" }, "--set stages.x.lr: leads nowhere at \"x\"" },
        { { "seed.x", "3" }, "--set seed.x: leads nowhere at \"x\"" },
        { { "", "3" }, "leads nowhere" },
        { { "seed", "[1" }, "--set seed:" },
        { { "seed", "x" }, "--set: seed: must be a whole number" },
        { { "a.b.c.d.e.f.g.h.i.j.k.l.m.n.o.p.q", "1" }, "leads nowhere" },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        tsr_recipe *r;
        tsr_err err = { 0 };
        assert_int_equal(
            tsr_recipe_load(&r, TSR_TEST_ROOT "/tests/data/train/recipe.yaml", &rows[i].set, 1, &err),
            TSR_E_FORMAT);
        if (strstr(err.msg, rows[i].message) == NULL) {
            fail_msg("%s: %s", rows[i].set.key, err.msg);
        }
    }
}

static void paths_start_from_the_recipe(void **unused)
{
    (void)unused;
    char *text = slurp(TSR_TEST_ROOT "/tests/data/train/recipe.yaml");
    tsr_recipe *r = parse_ok(text, "some/where/t.yaml");
    assert_string_equal(r->source[0].path, "some/where/text");
    tsr_recipe_free(&r);
    tsr_recipe_set set = { "data.sources.0.path", "/data/text" };
    tsr_err err = { 0 };
    CHECK_OK(tsr_recipe_parse(&r, text, strlen(text), "some/where/t.yaml", &set, 1, &err));
    assert_string_equal(r->source[0].path, "/data/text");
    tsr_recipe_free(&r);
    r = load_ok("tiny", NULL, 0);
    assert_string_equal(r->source[0].path, "manuals");
    tsr_recipe_free(&r);
    free(text);
}

/* A model given as config.json: from a file and, in the resolved form, as its content. */
static void model_from_a_config(void **unused)
{
    (void)unused;
    char *config = config_k3(), path[] = "/tmp/tsr-recipe-XXXXXX", *text;
    int fd = mkstemp(path);
    CHECK(fd >= 0 && write(fd, config, strlen(config)) == (ssize_t)strlen(config) && close(fd) == 0);
    CHECK(asprintf(&text,
                   "model: {config: %s}\ndata: {sources: [{name: a, path: \"/d/\\u2028\\x7f\\\"b\"}]}\n"
                   "stages: [{name: one, context: 8K, steps: 5, batch_tokens: 8K, lr: 1}]\n",
                   path) > 0);
    tsr_recipe *r = parse_ok(text, "t.yaml");
    assert_int_equal(r->spec->experts, 896);
    assert_false(r->spec->experts_mxfp4);
    assert_int_equal(r->shape.layers, 0);
    CHECK(unlink(path) == 0);
    char *json = tsr_recipe_json(r);
    tsr_recipe *again = parse_ok(json, "r.json");
    char *second = tsr_recipe_json(again);
    assert_string_equal(json, second);
    assert_string_equal(again->source[0].path, "/d/\xe2\x80\xa8\x7f\"b");
    assert_memory_equal(r->spec, again->spec, sizeof *r->spec);
    free(second);
    free(json);
    tsr_recipe_free(&again);
    tsr_recipe_free(&r);
    free(text);
    free(config);
}

/* ---- schedules ------------------------------------------------------------------------------------------------------ */

static void near(double a, double b)
{
    if (!(fabs(a - b) <= 1e-15 * fabs(b) + 1e-300)) {
        fail_msg("%.17g is not %.17g", a, b);
    }
}

static void schedules_follow_their_formulas(void **unused)
{
    (void)unused;
    tsr_stage s = { .steps = 20, .warmup = 3, .lr = 2e-3, .lr_final = 2e-4, .weight_decay_final = 2 };
    for (int64_t i = 0; i < 25; i++) {
        double n = i < 20 ? (double)i + 1 : 20, up = n < 3 ? 2e-3 * n / 3 : 2e-3;
        s.schedule = TSR_SCHEDULE_CONSTANT;
        near(tsr_stage_lr(&s, i), up);
        s.schedule = TSR_SCHEDULE_COSINE;
        near(tsr_stage_lr(&s, i), n < 3 ? up : 2e-4 + (2e-3 - 2e-4) * (1 + cos(acos(-1) * (n - 3) / 17)) / 2);
        s.schedule = TSR_SCHEDULE_WSD;
        s.decay = 5;
        near(tsr_stage_lr(&s, i), n <= 15 ? up : 2e-3 + (2e-4 - 2e-3) * (n - 15) / 5);
        near(0.1 * tsr_stage_decay_factor(&s, i), 0.1 * (1 + (i < 19 ? (double)i : 19) / 19));
    }
    near(0.1 * tsr_stage_decay_factor(&s, 0), 0.1);
    near(0.1 * tsr_stage_decay_factor(&s, 19), 0.2);
    s.schedule = TSR_SCHEDULE_COSINE;
    near(tsr_stage_lr(&s, 19), 2e-4);
    s.steps = s.warmup; /* nothing is left for the descent */
    near(tsr_stage_lr(&s, 2), 2e-3);
    s.steps = 1;
    s.warmup = 0;
    near(tsr_stage_decay_factor(&s, 0), 1);
}

static void steps_and_stages(void **unused)
{
    (void)unused;
    int64_t in;
    tsr_recipe *r = load_ok(TSR_TEST_ROOT "/tests/data/train/recipe.yaml", NULL, 0);
    assert_int_equal(tsr_recipe_steps(r), 180);
    assert_int_equal(tsr_recipe_stage_of(r, 0, &in), 0);
    assert_int_equal(in, 0);
    assert_int_equal(tsr_recipe_stage_of(r, 99, &in), 0);
    assert_int_equal(in, 99);
    assert_int_equal(tsr_recipe_stage_of(r, 100, &in), 1);
    assert_int_equal(in, 0);
    assert_int_equal(tsr_recipe_stage_of(r, 179, NULL), 3);
    assert_int_equal(tsr_recipe_stage_of(r, 200, &in), 3);
    assert_int_equal(in, 40);
    tsr_recipe_free(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shipped_recipes_resolve),
        cmocka_unit_test(kimi_k3_has_its_size),
        cmocka_unit_test(every_key_is_documented),
        cmocka_unit_test(wrong_keys_and_types),
        cmocka_unit_test(contradictions),
        cmocka_unit_test(hostile_texts),
        cmocka_unit_test(settings),
        cmocka_unit_test(wrong_settings),
        cmocka_unit_test(paths_start_from_the_recipe),
        cmocka_unit_test(model_from_a_config),
        cmocka_unit_test(schedules_follow_their_formulas),
        cmocka_unit_test(steps_and_stages),
    };
    tsr_recipe_set_folder(TSR_TEST_ROOT "/recipes");
    return cmocka_run_group_tests(tests, NULL, NULL);
}
