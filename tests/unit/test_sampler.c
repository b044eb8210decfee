/* test_sampler.c - the sampler against a plain reference, against the distribution it promises, and its refusals. */
#include "model/sampler.h"
#include "tests/harness/bag.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

enum { VOCAB_MAX = 300 };

static tsr_sampler *open_ok(int64_t vocab, tsr_sampler_opts o)
{
    tsr_sampler *s;
    tsr_err err = { 0 };
    if (tsr_sampler_open(&s, vocab, &o, &err) != TSR_OK) {
        fail_msg("open: %s", err.msg);
    }
    return s;
}

static int32_t pick_ok(tsr_sampler *s, const float *x, int64_t position)
{
    int32_t id = -1;
    tsr_err err = { 0 };
    if (tsr_sampler_pick(s, x, position, &id, &err) != TSR_OK) {
        fail_msg("pick: %s", err.msg);
    }
    return id;
}

/* ---- the reference: sorts everything, step by step as the header says --------------------------------------- */

static const float *sorting;

static int by_logit(const void *a, const void *b)
{
    int32_t i = *(const int32_t *)a, k = *(const int32_t *)b;
    return sorting[i] != sorting[k] ? (sorting[i] < sorting[k] ? 1 : -1) : (i > k) - (i < k);
}

static void normalise(double *p, const int32_t *order, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++) {
        sum += p[order[i]];
    }
    for (int i = 0; i < n; i++) {
        p[order[i]] /= sum;
    }
}

static bool on_border; /* of the last reference: a sum hits top_p to the last digits, so rounding decides */

/* p[id] of every token, 0 for those filtered out. Returns how many are left. */
static int reference(const float *x, int vocab, const tsr_sampler_opts *o, double *p)
{
    int32_t order[VOCAB_MAX];
    double q[VOCAB_MAX];
    int n = vocab;
    on_border = false;
    for (int i = 0; i < vocab; i++) {
        order[i] = i;
        p[i] = 0;
    }
    sorting = x;
    qsort(order, (size_t)vocab, sizeof *order, by_logit);
    for (int i = 0; i < vocab; i++) {
        q[i] = exp(((double)x[i] - (double)x[order[0]]) / o->temperature);
    }
    normalise(q, order, n);
    if (o->top_k > 0 && o->top_k < n) {
        n = (int)o->top_k;
        normalise(q, order, n);
    }
    if (o->top_p < 1) {
        double sum = 0;
        for (int i = 0; i < n; i++) {
            sum += q[order[i]];
            on_border = on_border || fabs(sum - o->top_p) < 1e-12;
            if (sum >= o->top_p) {
                n = i + 1;
            }
        }
        normalise(q, order, n);
    }
    int kept = 0;
    while (kept < n && q[order[kept]] >= o->min_p * q[order[0]]) {
        kept++;
    }
    normalise(q, order, kept);
    for (int i = 0; i < kept; i++) {
        p[order[i]] = q[order[i]];
    }
    return kept;
}

static void random_logits(uint64_t *state, float *x, int vocab)
{
    bool coarse = bag_random(state) % 3 == 0; /* many equal ones */
    for (int i = 0; i < vocab; i++) {
        double v = (double)(bag_random(state) % 20001) / 1000 - 10;
        x[i] = (float)(coarse ? floor(v / 4) : v);
    }
}

/* Kept sets, and the token at every one of many positions, equal the reference's. */
static void test_reference(void **unused)
{
    (void)unused;
    static const double ps[] = { 1, 0.95, 0.5, 0.1, 1e-9 }, ms[] = { 0, 0.05, 0.5, 1 },
                        ts[] = { 0.3, 1, 2.5 };
    uint64_t state = 20261201;
    int rounds = 0;
    for (int round = 0; round < 400; round++) {
        float x[VOCAB_MAX];
        double p[VOCAB_MAX];
        int vocab = 1 + (int)(bag_random(&state) % VOCAB_MAX), drawn = 0;
        random_logits(&state, x, vocab);
        tsr_sampler_opts o = { .temperature = ts[bag_random(&state) % 3],
                               .top_k = bag_random(&state) % 2 ? (int64_t)(bag_random(&state) % 40) : 0,
                               .top_p = ps[bag_random(&state) % 5],
                               .min_p = ms[bag_random(&state) % 4],
                               .seed = bag_random(&state) };
        int kept = reference(x, vocab, &o, p);
        if (on_border) {
            continue;
        }
        tsr_sampler *s = open_ok(vocab, o);
        bool seen[VOCAB_MAX] = { false };
        for (int64_t at = 0; at < 200; at++) {
            int32_t id = pick_ok(s, x, at);
            assert_true(p[id] > 0);
            drawn += !seen[id];
            seen[id] = true;
        }
        assert_true(drawn <= kept);
        if (kept <= 3) {
            int likely = 0;
            for (int i = 0; i < vocab; i++) {
                likely += p[i] > 0.1;
            }
            assert_true(drawn >= likely); /* 200 draws: missed with probability below 1e-9 */
        }
        tsr_sampler_close(&s);
        rounds++;
    }
    assert_true(rounds > 300);
}

/* Pearson's statistic of n draws; the cells that cannot come up must be empty. */
static double chi_square(const double *p, const int64_t *count, int vocab, int64_t n)
{
    double sum = 0;
    for (int i = 0; i < vocab; i++) {
        if (p[i] == 0) {
            assert_int_equal(count[i], 0);
            continue;
        }
        double want = p[i] * (double)n;
        sum += ((double)count[i] - want) * ((double)count[i] - want) / want;
    }
    return sum;
}

static void test_distribution(void **unused)
{
    (void)unused;
    static const float x[8] = { 1.5f, -0.5f, 0.25f, 1.5f, 0, -2, 0.75f, -1 };
    static const tsr_sampler_opts all[] = { { 1, 0, 1, 0, 1 },       { 0.7, 0, 1, 0, 2 },
                                            { 2, 0, 1, 0, 3 },       { 1, 4, 1, 0, 4 },
                                            { 1, 0, 0.8, 0, 5 },     { 1, 0, 1, 0.2, 6 },
                                            { 1.3, 6, 0.9, 0.1, 7 }, { 1, 0, 1, 0, UINT64_MAX },
                                            { 1, 1, 0.5, 0.5, 8 } };
    enum { DRAWS = 60000 };
    for (size_t k = 0; k < sizeof all / sizeof *all; k++) {
        double p[8];
        int64_t count[8] = { 0 };
        int kept = reference(x, 8, &all[k], p);
        tsr_sampler *s = open_ok(8, all[k]);
        for (int64_t at = 0; at < DRAWS; at++) {
            count[pick_ok(s, x, at)]++;
        }
        tsr_sampler_close(&s);
        double sum = chi_square(p, count, 8, DRAWS);
        assert_true(sum < (double)(kept - 1) + 6 * sqrt(2.0 * kept)); /* mean k - 1, variance 2(k - 1) */
        assert_true(kept < 3 || sum > 1e-3);                          /* and not too good to be drawn */
    }
}

static void test_positions_and_seeds(void **unused)
{
    (void)unused;
    float x[64] = { 0 };
    tsr_sampler *a = open_ok(64, (tsr_sampler_opts){ 1, 0, 1, 0, 42 }),
                *b = open_ok(64, (tsr_sampler_opts){ 1, 0, 1, 0, 42 }),
                *c = open_ok(64, (tsr_sampler_opts){ 1, 0, 1, 0, 43 });
    int same = 0;
    for (int64_t at = 0; at < 1000; at++) {
        (void)pick_ok(b, x, 999 - at); /* what was drawn before does not matter */
        int32_t id = pick_ok(a, x, at);
        assert_int_equal(id, pick_ok(b, x, at));
        same += id == pick_ok(c, x, at);
    }
    assert_true(same < 60);
    /* SplitMix64 started with 42, first outputs as published: 13679457532755275413, 2949826092126892291 */
    assert_int_equal(pick_ok(a, x, 0), (int)(13679457532755275413u >> 58));
    assert_int_equal(pick_ok(a, x, 1), (int)(2949826092126892291u >> 58));
    tsr_sampler_close(&a);
    tsr_sampler_close(&b);
    tsr_sampler_close(&c);
}

static void test_greedy(void **unused)
{
    (void)unused;
    float x[5] = { 1, 3, -7, 3, 2 };
    tsr_sampler *s = open_ok(5, (tsr_sampler_opts){ 0, 1, 0.5, 1, 9 });
    assert_int_equal(pick_ok(s, x, 0), 1); /* of equal ones the lower id */
    x[3] = 3.0000002f;
    assert_int_equal(pick_ok(s, x, 0), 3);
    for (int i = 0; i < 5; i++) {
        x[i] = -3e38f;
    }
    assert_int_equal(pick_ok(s, x, 0), 0);
    tsr_sampler_close(&s);
    s = open_ok(2, (tsr_sampler_opts){ 1e-300, 0, 1, 0, 9 }); /* as good as greedy, and no overflow */
    assert_int_equal(pick_ok(s, (float[]){ -3e38f, 3e38f }, 5), 1);
    tsr_sampler_close(&s);
}

static void test_logprobs(void **unused)
{
    (void)unused;
    uint64_t state = 5;
    float x[100];
    random_logits(&state, x, 100);
    tsr_sampler *s = open_ok(100, (tsr_sampler_opts){ 0.5, 3, 0.5, 0.5, 1 });
    double p[VOCAB_MAX];
    (void)reference(x, 100, &(tsr_sampler_opts){ 1, 0, 1, 0, 0 }, p);
    tsr_candidate chosen = { .id = 17 }, top[100];
    tsr_sampler_logprobs(s, x, &chosen, top, 100);
    assert_true(fabs(chosen.logprob - log(p[17])) < 1e-9);
    for (int i = 0; i < 100; i++) {
        assert_true(fabs(top[i].logprob - log(p[top[i].id])) < 1e-9);
        assert_true(i == 0 || x[top[i - 1].id] > x[top[i].id] ||
                    (x[top[i - 1].id] == x[top[i].id] && top[i - 1].id < top[i].id));
    }
    tsr_sampler_close(&s);
}

static void test_refusals(void **unused)
{
    (void)unused;
    static const tsr_sampler_opts bad[] = { { -1, 0, 1, 0, 0 },   { 1, -1, 1, 0, 0 },
                                            { 1, 0, 0, 0, 0 },    { 1, 0, 1.1, 0, 0 },
                                            { 1, 0, 1, -0.1, 0 }, { 1, 0, 1, 1.1, 0 },
                                            { NAN, 0, 1, 0, 0 },  { INFINITY, 0, 1, 0, 0 },
                                            { 1, 0, NAN, 0, 0 },  { 1, 0, 1, NAN, 0 } };
    tsr_sampler *s;
    tsr_err err;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(tsr_sampler_open(&s, 10, &bad[i], &err), TSR_E_USAGE);
        assert_null(s);
    }
    static const float broken[] = { NAN, INFINITY, -INFINITY };
    for (int t = 0; t < 2; t++) {
        s = open_ok(3, (tsr_sampler_opts){ t, 2, 0.5, 0, 0 });
        for (size_t i = 0; i < 3; i++) {
            float x[3] = { 1, 2, broken[i] };
            int32_t id;
            assert_int_equal(tsr_sampler_pick(s, x, 77, &id, &err), TSR_E_NUMERIC);
            assert_non_null(strstr(err.msg, "position 77"));
            assert_non_null(strstr(err.msg, "token 2"));
        }
        tsr_sampler_close(&s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_reference),
                                        cmocka_unit_test(test_distribution),
                                        cmocka_unit_test(test_positions_and_seeds),
                                        cmocka_unit_test(test_greedy),
                                        cmocka_unit_test(test_logprobs),
                                        cmocka_unit_test(test_refusals) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
