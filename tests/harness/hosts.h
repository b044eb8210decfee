/* hosts.h - for tests of kernels: the backends whose memory is ours, numbers drawn alike everywhere, slopes. With cmocka. */
#ifndef TSR_TESTS_HOSTS_H
#define TSR_TESTS_HOSTS_H

#include "kernels/kernels.h"

/* Uniform in (-1, 1). */
static inline double noise(uint64_t *s)
{
    *s = *s * 6364136223846793005u + 1442695040888963407u;
    return (double)(*s >> 11) / 4503599627370496.0 - 1.0;
}

/* The same numbers in f32 and in f64. */
static inline void noises(float *f, double *d, int64_t n, uint64_t *s)
{
    for (int64_t i = 0; i < n; i++) {
        d[i] = (double)(f[i] = (float)noise(s));
    }
}

/* The slope of f along *p, by a central difference. */
static inline double slope(double (*f)(const void *), const void *at, double *p)
{
    double here = *p, step = 1e-5;
    *p = here + step;
    double up = f(at);
    *p = here - step;
    double down = f(at);
    *p = here;
    return (up - down) / (2 * step);
}

/* Calls fn with each backend of this machine whose memory is ours. One that this machine lacks is skipped; one that
 * does not open for another reason fails the test. */
static inline void on_each_host(void (*fn)(tsr_backend *b))
{
    int opened = 0;
    for (int i = 0; tsr_backend_names[i] != NULL; i++) {
        tsr_backend *b = NULL;
        tsr_err err;
        tsr_status st = tsr_backend_open(&b, tsr_backend_names[i], 2, &err);
        if (st == TSR_E_UNSUPPORTED) {
            print_message("skipped: %s\n", err.msg);
            continue;
        }
        assert_int_equal(st, TSR_OK);
        if (b->host) {
            fn(b);
            opened++;
        }
        tsr_backend_close(&b);
    }
    assert_true(opened > 0);
}

#endif
