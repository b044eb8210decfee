/* golden.c - see golden.h. */
#include "tests/harness/golden.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void stop(const char *what, const char *name)
{
    (void)fprintf(stderr, "golden: %s: %s\n", name, what);
    exit(1);
}

void golden_open(golden *g, const char *path)
{
    char full[4096];
    tsr_err err;
    (void)snprintf(full, sizeof full, "%s/%s", TSR_TEST_DATA, path);
    if (tsr_source_open(&g->source, full, NULL, &err) != TSR_OK) {
        stop(err.msg, full);
    }
}

static const tsr_src_tensor *find(const golden *g, const char *name, int64_t *index)
{
    for (int64_t i = 0; i < g->source->count; i++) {
        if (strcmp(g->source->tensors[i].name, name) == 0) {
            *index = i;
            return &g->source->tensors[i];
        }
    }
    return NULL;
}

bool golden_has(const golden *g, const char *name)
{
    int64_t i;
    return find(g, name, &i) != NULL;
}

const int64_t *golden_shape(golden *g, const char *name, int *rank_out)
{
    int64_t i;
    const tsr_src_tensor *t = find(g, name, &i);
    if (t == NULL) {
        stop("no such tensor", name);
    }
    *rank_out = t->rank;
    return t->shape;
}

static void *get(golden *g, const char *name, tsr_dtype dt, size_t size, int64_t *n_out)
{
    int64_t i = 0;
    const tsr_src_tensor *t = find(g, name, &i);
    tsr_err err;
    if (t == NULL || t->dtype != dt) {
        stop("no such tensor of this dtype", name);
    }
    void *p = malloc(t->bytes > 0 ? t->bytes : 1);
    if (p == NULL || tsr_source_read(g->source, i, 0, p, t->bytes, &err) != TSR_OK) {
        stop("cannot read", name);
    }
    if (n_out != NULL) {
        *n_out = (int64_t)(t->bytes / size);
    }
    return p;
}

float *golden_f32(golden *g, const char *name, int64_t *n_out)
{
    return get(g, name, TSR_DT_F32, 4, n_out);
}

int32_t *golden_i32(golden *g, const char *name, int64_t *n_out)
{
    return get(g, name, TSR_DT_I32, 4, n_out);
}

int64_t *golden_i64(golden *g, const char *name, int64_t *n_out)
{
    return get(g, name, TSR_DT_I64, 8, n_out);
}

double *golden_f64(golden *g, const char *name, int64_t *n_out)
{
    return get(g, name, TSR_DT_F64, 8, n_out);
}

void golden_close(golden *g)
{
    tsr_source_close(&g->source);
}

double relative_l2(const float *got, const float *want, int64_t n)
{
    double d = 0, w = 0;
    for (int64_t i = 0; i < n; i++) {
        double x = (double)got[i] - (double)want[i];
        d += x * x;
        w += (double)want[i] * (double)want[i];
    }
    return sqrt(d / (w > 0 ? w : 1));
}
