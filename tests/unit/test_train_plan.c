/* test_train_plan.c - sizes of ranks: against the memory a model really plans, and against plain arithmetic. */
#include "model/model.h"
#include "tests/harness/bag.h"
#include "tests/harness/random_model.h"
#include "train/plan.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static tsr_recipe *load(const char *name, const tsr_recipe_set *sets, size_t count)
{
    tsr_recipe *r;
    tsr_err err = { 0 };
    CHECK_OK(tsr_recipe_load(&r, name, sets, count, &err));
    return r;
}

static tsr_train_plan plan_of(const tsr_recipe *r, int32_t stage)
{
    tsr_train_plan p;
    tsr_err err = { 0 };
    CHECK_OK(tsr_train_plan_of(&p, r, stage, &err));
    return p;
}

/* The estimate of activations lies near the workspace of a model that trains. */
static void compare(const char *name, int32_t stage)
{
    tsr_err err = { 0 };
    tsr_recipe *r = load(name, NULL, 0);
    tsr_train_plan p = plan_of(r, stage);
    random_model m;
    random_model_open(&m, r->config_json, TSR_DT_F32);
    tsr_backend *b;
    CHECK_OK(tsr_backend_open(&b, "cpu", 1, &err));
    for (int recompute = 0; recompute < 2; recompute++) {
        tsr_plan real;
        tsr_model_opts o = { .train = true, .recompute = recompute != 0, .max_tokens = p.micro_tokens };
        CHECK_OK(tsr_model_plan(&real, &m.spec, &m.source, &o, b, 0, TSR_DT_F32, &err));
        double ratio = (double)(recompute ? p.activations_recompute : p.activations) / (double)real.workspace;
        if (!(ratio > 0.8 && ratio < 1.25)) {
            fail_msg("%s, stage %d, recompute %d: %.2f of %llu", name, stage, recompute, ratio,
                     (unsigned long long)real.workspace);
        }
    }
    tsr_backend_close(&b);
    random_model_close(&m);
    tsr_recipe_free(&r);
}

static void activations_are_near_the_real_ones(void **unused)
{
    (void)unused;
    compare("tiny", 0);
    compare("tiny", 3);
    compare("small", 1);
}

static void one_rank_holds_everything(void **unused)
{
    (void)unused;
    tsr_err err = { 0 };
    tsr_spec_sizes z;
    tsr_recipe *r = load(TSR_TEST_ROOT "/tests/data/train/recipe.yaml", NULL, 0);
    tsr_train_plan p = plan_of(r, 0);
    CHECK_OK(tsr_spec_sizes_of(r->spec, &z, &err));
    assert_int_equal(p.params, z.params_total);
    assert_int_equal(p.params_routed, z.params_routed);
    assert_int_equal(p.params_routed, 3 * 64 * 3 * 32 * 64);
    assert_int_equal(p.parameters, 4 * z.params_total);
    assert_int_equal(p.gradients, 4 * z.params_total);
    assert_true(p.optimizer > 4 * z.params_total && p.optimizer < 8 * z.params_total);
    assert_int_equal(p.total, p.parameters + p.gradients + p.optimizer + p.activations);
    assert_int_equal(p.ranks, 1);
    assert_int_equal(p.traffic, 0);
    assert_int_equal(p.step_tokens, 4096);
    assert_int_equal(p.micros, 16);
    assert_int_equal(plan_of(r, 3).total,
                     p.parameters + p.gradients + p.optimizer + plan_of(r, 3).activations_recompute);
    tsr_recipe_free(&r);
    static const tsr_recipe_set adamw[] = { { "optimizer.matrices.kind", "adamw" } };
    r = load(TSR_TEST_ROOT "/tests/data/train/recipe.yaml", adamw, 1);
    assert_int_equal(plan_of(r, 0).optimizer, 8 * z.params_total);
    tsr_recipe_free(&r);
}

static void ranks_share(void **unused)
{
    (void)unused;
    static const tsr_recipe_set sets[] = { { "parallel", "{ep: 4, dp: 2, cp: 2}" },
                                           { "optimizer.matrices.kind", "adamw" } };
    tsr_recipe *r = load(TSR_TEST_ROOT "/tests/data/train/recipe.yaml", sets, 2);
    tsr_train_plan p = plan_of(r, 0);
    const uint64_t routed = 3 * 64 * 3 * 32 * 64, dense = 1914720 - routed;
    assert_int_equal(p.ranks, 16);
    assert_int_equal(p.params_routed, routed / 4);
    assert_int_equal(p.params, dense + routed / 4);
    assert_int_equal(p.optimizer, 8 * dense / 16 + 8 * (routed / 4) / 4);
    assert_int_equal(p.step_tokens, 4096 / (4 * 2 * 2)); /* two sequences of 256, half of each */
    assert_int_equal(p.micro_tokens, 128);
    assert_int_equal(p.micros, 2);
    /* three MoE layers, 256 tokens, top-4, width 64, two directions, forward and backward, three quarters leave */
    assert_int_equal(p.expert_all_to_all, 3 * 256 * 4 * 64 * 4 * 2 * 2 * 3 / 4);
    assert_int_equal(p.reduce_scatter, 4 * dense * 15 / 16 + 4 * (routed / 4) * 3 / 4);
    assert_int_equal(p.all_gather, p.reduce_scatter);
    /* three KDA layers, two sequences: 2 heads of 64 x 64, three convolutions of 128 with a history of 3 */
    assert_int_equal(p.cp_states, 3 * 2 * 4 * 2 * (2 * 64 * 64 + 3 * 128 * 3));
    assert_int_equal(p.cp_cache, 256 * 4 * 2 * (32 + 16));
    assert_int_equal(p.pipeline, 0);
    assert_int_equal(p.traffic, p.expert_all_to_all + 2 * p.reduce_scatter + p.cp_states + p.cp_cache);
    /* one sequence of 2048 for a rank and its partner, recomputed */
    assert_int_equal(plan_of(r, 3).expert_all_to_all, 3 * 1024 * 4 * 64 * 4 * 2 * 3 * 3 / 4);
    tsr_recipe_free(&r);
}

static void pipelines_cut_the_layers(void **unused)
{
    (void)unused;
    static const tsr_recipe_set sets[] = { { "parallel", "{pp: 3}" } };
    tsr_recipe *r = load(TSR_TEST_ROOT "/tests/data/train/recipe.yaml", sets, 1);
    tsr_train_plan p = plan_of(r, 0);
    assert_int_equal(p.ranks, 3);
    assert_true(p.layers == 2 || p.layers == 1);
    assert_true(p.params < 1914720 && p.total > 0);
    /* the first run has two layers: the stream and one finished block of two layers go on */
    assert_int_equal(p.first_layer, 0);
    assert_int_equal(p.pipeline, 4096 * 128 * 4 * 2);
    tsr_recipe_free(&r);
    r = load("k3-2.8t", NULL, 0);
    p = plan_of(r, 0);
    assert_int_equal(p.ranks, 64 * 8 * 8);
    assert_true(p.params < 20000000000 && p.params_routed > 0);
    tsr_recipe_free(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(activations_are_near_the_real_ones),
        cmocka_unit_test(one_rank_holds_everything),
        cmocka_unit_test(ranks_share),
        cmocka_unit_test(pipelines_cut_the_layers),
    };
    tsr_recipe_set_folder(TSR_TEST_ROOT "/recipes");
    return cmocka_run_group_tests(tests, NULL, NULL);
}
