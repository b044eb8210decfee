/* test_order.c - permutations and mixtures: each thing once, shares exact, streams without gaps. */
#include "train/data.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static void test_permutation(void **state)
{
    (void)state;
    for (int64_t n = 1; n <= 300; n++) {
        for (uint64_t key = 0; key < 5; key++) {
            bool seen[300] = { false };
            for (int64_t i = 0; i < n; i++) {
                int64_t at = tsr_shuffled(key, n, i);
                assert_true(at >= 0 && at < n && !seen[at]);
                seen[at] = true;
            }
        }
    }
}

static void test_large(void **state)
{
    (void)state;
    static const int64_t sizes[] = { 65536, 65537, 1 << 20, 1000003 };
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        uint8_t *seen = calloc((size_t)sizes[k], 1);
        assert_non_null(seen);
        for (int64_t i = 0; i < sizes[k]; i++) {
            int64_t at = tsr_shuffled(77 + k, sizes[k], i);
            assert_true(at >= 0 && at < sizes[k] && seen[at] == 0);
            seen[at] = 1;
        }
        free(seen);
    }
    static const int64_t huge[] = { ((int64_t)1 << 40) + 1, (int64_t)1 << 62, ((int64_t)1 << 62) + 1,
                                    INT64_MAX };
    for (size_t k = 0; k < sizeof huge / sizeof *huge; k++) {
        int64_t had[64];
        for (int64_t i = 0; i < 64; i++) {
            had[i] = tsr_shuffled(3, huge[k], i < 32 ? i : huge[k] - 64 + i);
            assert_true(had[i] >= 0 && had[i] < huge[k]);
            for (int64_t j = 0; j < i; j++) {
                assert_true(had[j] != had[i]);
            }
        }
    }
}

/* Every place is about as likely for an element as every other, and another key is another order. */
static void test_even(void **state)
{
    (void)state;
    enum { N = 10, KEYS = 20000 };
    int counts[N][N] = { { 0 } }, same = 0;
    for (uint64_t key = 0; key < KEYS; key++) {
        bool equal = true;
        for (int64_t i = 0; i < N; i++) {
            int64_t at = tsr_shuffled(key, N, i);
            counts[i][at]++;
            equal = equal && at == tsr_shuffled(key + 1, N, i);
        }
        same += equal;
    }
    for (int i = 0; i < N; i++) {
        for (int j = 0; j < N; j++) { /* 2000 expected, standard deviation 42 */
            assert_in_range(counts[i][j], 1700, 2300);
        }
    }
    assert_in_range(same, 0, 2);
}

static void test_shares(void **state)
{
    (void)state;
    int32_t share[5];
    tsr_mix_shares((const double[]){ 1 }, 1, share);
    assert_int_equal(share[0], TSR_MIX_BLOCK);
    tsr_mix_shares((const double[]){ 1, 1, 0, 1 }, 4, share);
    assert_int_equal(share[0], 1366); /* the first of equal remainders */
    assert_int_equal(share[1], 1365);
    assert_int_equal(share[2], 0);
    assert_int_equal(share[3], 1365);
    tsr_mix_shares((const double[]){ 1, 1e-9, 1e-300, 0 }, 4, share);
    assert_int_equal(share[0], TSR_MIX_BLOCK - 2);
    assert_int_equal(share[1], 1);
    assert_int_equal(share[2], 1);
    tsr_mix_shares((const double[]){ 1.7e308, 1.7e308, 0.85e308, 0.85e308 }, 4, share);
    assert_int_equal(share[0] + share[1] + share[2] + share[3], TSR_MIX_BLOCK);
    assert_int_equal(share[0], share[1]);
    assert_int_equal(share[2], share[3]);
    double many[TSR_MIX_BLOCK];
    static int32_t shares[TSR_MIX_BLOCK];
    for (int i = 0; i < TSR_MIX_BLOCK; i++) {
        many[i] = i == 7 ? 1e6 : 1e-6;
    }
    tsr_mix_shares(many, TSR_MIX_BLOCK, shares);
    for (int i = 0; i < TSR_MIX_BLOCK; i++) {
        assert_int_equal(shares[i], 1);
    }
}

static const int64_t counts[] = { 1000, 0, 3, 1 };

static tsr_mix mix_of(int32_t share[4])
{
    tsr_mix_shares((const double[]){ 10, 0, 3, 0.001 }, 4, share);
    return (tsr_mix){ .seed = 99, .sources = 4, .count = counts, .share = share };
}

static void test_mix(void **state)
{
    (void)state;
    enum { BLOCKS = 3 };
    int32_t share[4], in_block[4] = { 0 };
    int64_t used[4] = { 0 };
    tsr_mix m = mix_of(share);
    uint8_t *seen[4];
    for (int s = 0; s < 4; s++) {
        seen[s] = calloc((size_t)counts[s] + 1, 1);
        assert_non_null(seen[s]);
    }
    for (int64_t place = 0; place < BLOCKS * TSR_MIX_BLOCK; place++) {
        tsr_place p = tsr_mix_at(&m, place);
        assert_int_equal(p.epoch * counts[p.source] + p.index, used[p.source]);
        assert_in_range(p.index, 0, counts[p.source] - 1);
        if (place % 61 == 0) {
            for (int32_t s = 0; s < 4; s++) {
                assert_int_equal(tsr_mix_used(&m, place, s), used[s]);
            }
        }
        if (p.index == 0) { /* the epoch before has had every sequence */
            for (int64_t i = 0; i < counts[p.source]; i++) {
                assert_int_equal(seen[p.source][i], p.epoch > 0);
            }
            memset(seen[p.source], 0, (size_t)counts[p.source]);
        }
        assert_in_range(p.sequence, 0, counts[p.source] - 1);
        assert_int_equal(seen[p.source][p.sequence], 0);
        seen[p.source][p.sequence] = 1;
        used[p.source]++;
        in_block[p.source]++;
        if (place % TSR_MIX_BLOCK == TSR_MIX_BLOCK - 1) {
            assert_memory_equal(in_block, share, sizeof in_block);
            memset(in_block, 0, sizeof in_block);
        }
    }
    for (int s = 0; s < 4; s++) {
        free(seen[s]);
    }
}

/* Blocks, epochs and seeds have orders of their own. */
static void test_mix_varies(void **state)
{
    (void)state;
    int32_t share[4];
    tsr_mix m = mix_of(share), other = m;
    int same_block = 0, same_seed = 0, same_epoch = 0;
    other.seed = 100;
    for (int64_t i = 0; i < 500; i++) {
        tsr_place a = tsr_mix_at(&m, i);
        same_block += a.source == tsr_mix_at(&m, i + TSR_MIX_BLOCK).source;
        same_seed += a.source == tsr_mix_at(&other, i).source;
    }
    assert_in_range(same_block, 1, 400); /* about 0.64 are equal by chance */
    assert_in_range(same_seed, 1, 400);
    int64_t first[1000];
    for (int64_t place = 0, n = 0; n < 2000; place++) {
        tsr_place p = tsr_mix_at(&m, place);
        if (p.source == 0 && p.epoch == 0) {
            first[p.index] = p.sequence;
        } else if (p.source == 0 && p.epoch == 1) {
            same_epoch += first[p.index] == p.sequence;
        }
        n += p.source == 0;
    }
    assert_in_range(same_epoch, 0, 20);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_permutation), cmocka_unit_test(test_large), cmocka_unit_test(test_even),
        cmocka_unit_test(test_shares),      cmocka_unit_test(test_mix),   cmocka_unit_test(test_mix_varies),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
