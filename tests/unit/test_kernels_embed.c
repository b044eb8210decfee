/* test_kernels_embed.c - rows of the table, and sums of gradients that share one. */
#include "kernels/backend_priv.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "tests/harness/hosts.h"

enum { N = 5, D = 18, V = 4 };
static const int32_t ids[N] = { 3, 0, 3, 1, 3 };

static void forward(tsr_backend *b)
{
    float table[V * D], y[N * D];
    uint16_t halves[V * D];
    for (int i = 0; i < V * D; i++) {
        table[i] = (float)i - 20; /* exact in bf16 */
        uint32_t bits;
        memcpy(&bits, &table[i], sizeof bits);
        halves[i] = (uint16_t)(bits >> 16);
    }
    for (int k = 0; k < 2; k++) {
        memset(y, 0, sizeof y);
        tsr_embed_fwd_args a = { y, k == 0 ? (void *)table : halves, ids, N, D, V, k == 0 ? TSR_DT_F32 : TSR_DT_BF16 };
        assert_int_equal(tsr_embed_fwd(b, &a), TSR_OK);
        for (int i = 0; i < N * D; i++) {
            assert_true(y[i] == (float)(ids[i / D] * D + i % D - 20));
        }
    }
}

static void backward(tsr_backend *b)
{
    float dtable[V * D], dy[N * D];
    for (int i = 0; i < V * D; i++) {
        dtable[i] = 1;
    }
    for (int i = 0; i < N * D; i++) {
        dy[i] = (float)(1 + i / D);
    }
    tsr_embed_bwd_args a = { dtable, dy, ids, N, D, V };
    assert_int_equal(tsr_embed_bwd(b, &a), TSR_OK);
    static const float want[V] = { 1 + 2, 1 + 4, 1, 1 + 1 + 3 + 5 };
    for (int i = 0; i < V * D; i++) {
        assert_true(dtable[i] == want[i / D]);
    }
}

static void on_every_backend(void **state)
{
    (void)state;
    on_each_host(forward);
    on_each_host(backward);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(on_every_backend),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
