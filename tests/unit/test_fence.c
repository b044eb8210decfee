/* test_fence.c - the pretend device: what kernels and copies do arrives, and who else touches its memory dies. */
#include "tests/harness/fence.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { N = 1000 };

/* The signal a child dies of when it reads, or writes, one float; 0 when it lives. */
static int touch(volatile float *p, bool write_it)
{
    pid_t child = fork();
    if (child == 0) {
        (void)signal(SIGSEGV, SIG_DFL);
        if (write_it) {
            *p = 1;
        } else {
            float got = *p;
            (void)got;
        }
        _exit(0);
    }
    int status = 0;
    assert_true(child > 0 && waitpid(child, &status, 0) == child);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

static void kernels_pass_and_others_die(void **state)
{
    (void)state;
    tsr_backend *b = NULL, *other = NULL;
    tsr_err err;
    void *x = NULL, *y = NULL, *z = NULL;
    float in[N], out[N];
    assert_int_equal(tsr_fence_open(&b, "auto", 2, &err), TSR_OK);
    assert_int_equal(tsr_fence_open(&other, "cpu", 1, &err), TSR_OK);
    assert_false(b->host);
    for (int i = 0; i < N; i++) {
        in[i] = (float)i;
    }
    assert_true(b->alloc(b, &x, sizeof in) == TSR_OK && b->alloc(b, &y, sizeof in) == TSR_OK &&
                other->alloc(other, &z, sizeof in) == TSR_OK);
    assert_int_equal((uintptr_t)x % 64, 0);
    assert_int_equal(b->download(b, out, y, sizeof out), TSR_OK);
    assert_true(out[0] != out[0] && out[N - 1] != out[N - 1]); /* nothing to rely on */
    assert_true(b->upload(b, x, in, sizeof in) == TSR_OK && b->zero(b, y, sizeof in) == TSR_OK);
    tsr_add_args a = { .y = y, .a = x, .b = y, .n = N };
    assert_true(tsr_add(b, &a) == TSR_OK && tsr_add(b, &a) == TSR_OK && b->sync(b) == TSR_OK);
    assert_int_equal(b->download(b, out, y, sizeof out), TSR_OK);
    assert_true(out[1] == 2 && out[N - 1] == 2 * (N - 1));
    for (int w = 0; w < 2; w++) {
        assert_int_equal(touch((float *)x + 7, w == 1), SIGSEGV);
        assert_int_equal(touch((float *)y + N - 1, w == 1), SIGSEGV);
        assert_int_equal(touch((float *)z, w == 1), SIGSEGV);
        assert_int_equal(touch(in, w == 1), 0); /* the test itself can tell */
    }
    b->release(b, x);
    tsr_backend_close(&b);
    tsr_backend_close(&other);
    assert_null(b);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(kernels_pass_and_others_die) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
