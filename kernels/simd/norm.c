/* norm.c - norms, by vectors: a piece of work is a block of rows. Gradients of weights are summed per block of rows into
 * f32 partial sums of fixed blocks, which are added in order. Contracts: kernels/ops/norm.h. */
#include "kernels/simd/simd.h"

#include <math.h>

/* Elements of a block of rows. */
#define PIECE ((int64_t)1 << 14)

static int64_t rows_of(int64_t d)
{
    return d >= PIECE ? 1 : PIECE / d;
}

static int64_t blocks_of(int64_t n, int64_t d)
{
    return (n + rows_of(d) - 1) / rows_of(d);
}

/* Sums of squares in f64, four accumulators: a norm's factor is shared by a whole row, and its error by all that follows. */
static double squares(const float *x, int64_t d)
{
    vd s[4] = { 0 };
    int64_t j = 0;
    for (; j + 2 * VL <= d; j += 2 * VL) {
        for (int k = 0; k < 4; k++) {
            vd v = vd_load(x + j + k * VL / 2);
            s[k] += v * v;
        }
    }
    double sum = vd_sum((s[0] + s[1]) + (s[2] + s[3]));
    for (; j < d; j++) {
        sum += (double)x[j] * (double)x[j];
    }
    return sum;
}

static void rms_rows(void *payload, int64_t i, int worker)
{
    const tsr_rmsnorm_fwd_args *a = payload;
    int64_t rows = rows_of(a->d);
    (void)worker;
    for (int64_t r = i * rows; r < a->n && r < (i + 1) * rows; r++) {
        const float *x = a->x + r * a->x_stride;
        float *y = a->y + r * a->y_stride;
        float rstd = (float)(1 / sqrt(squares(x, a->d) / (double)a->d + (double)a->eps));
        EACH(a->d)
        {
            vf v = LOAD(x) * v_set1(rstd);
            STORE(y, a->w != NULL ? (vf)(v * LOAD(a->w)) : v);
        }
        if (a->rstd != NULL) {
            a->rstd[r] = rstd;
        }
    }
}

tsr_status TSR_SIMD(rmsnorm_fwd)(tsr_queue *q, const tsr_rmsnorm_fwd_args *a)
{
    tsr_parallel(q, blocks_of(a->n, a->d), rms_rows, (void *)(uintptr_t)a);
    return TSR_OK;
}

static void gated_rows(void *payload, int64_t i, int worker)
{
    const tsr_rmsnorm_gated_fwd_args *a = payload;
    int64_t rows = rows_of(a->d);
    (void)worker;
    for (int64_t r = i * rows; r < a->n && r < (i + 1) * rows; r++) {
        const float *x = a->x + r * a->d, *g = a->g + r * a->d;
        float *y = a->y + r * a->d;
        float rstd = (float)(1 / sqrt(squares(x, a->d) / (double)a->d + (double)a->eps));
        EACH(a->d)
        {
            STORE(y, LOAD(x) * v_set1(rstd) * LOAD(a->w) * v_sigmoid(LOAD(g)));
        }
        if (a->rstd != NULL) {
            a->rstd[r] = rstd;
        }
    }
}

tsr_status TSR_SIMD(rmsnorm_gated_fwd)(tsr_queue *q, const tsr_rmsnorm_gated_fwd_args *a)
{
    tsr_parallel(q, blocks_of(a->n, a->d), gated_rows, (void *)(uintptr_t)a);
    return TSR_OK;
}

static void l2_rows(void *payload, int64_t i, int worker)
{
    const tsr_l2norm_fwd_args *a = payload;
    int64_t rows = rows_of(a->d);
    (void)worker;
    for (int64_t r = i * rows; r < a->n && r < (i + 1) * rows; r++) {
        const float *x = a->x + r * a->d;
        float *y = a->y + r * a->d;
        double rstd = 1 / sqrt(squares(x, a->d) + (double)a->eps);
        vf f = v_set1((float)(rstd * (double)a->scale));
        EACH(a->d)
        {
            STORE(y, LOAD(x) * f);
        }
        if (a->rstd != NULL) {
            a->rstd[r] = (float)rstd;
        }
    }
}

tsr_status TSR_SIMD(l2norm_fwd)(tsr_queue *q, const tsr_l2norm_fwd_args *a)
{
    tsr_parallel(q, blocks_of(a->n, a->d), l2_rows, (void *)(uintptr_t)a);
    return TSR_OK;
}

static void l2_rows_bwd(void *payload, int64_t i, int worker)
{
    const tsr_l2norm_bwd_args *a = payload;
    int64_t rows = rows_of(a->d);
    (void)worker;
    for (int64_t r = i * rows; r < a->n && r < (i + 1) * rows; r++) {
        const float *x = a->x + r * a->d, *dy = a->dy + r * a->d;
        float *dx = a->dx + r * a->d;
        vf dot = v_zero(), rstd = v_set1(a->rstd[r]);
        EACH(a->d)
        {
            dot = v_fma(LOAD(x), LOAD(dy), dot);
        }
        vf c = v_set1(v_sum(dot)) * rstd * rstd;
        EACH(a->d)
        {
            STORE(dx, rstd * v_set1(a->scale) * (LOAD(dy) - LOAD(x) * c));
        }
    }
}

tsr_status TSR_SIMD(l2norm_bwd)(tsr_queue *q, const tsr_l2norm_bwd_args *a)
{
    tsr_parallel(q, blocks_of(a->n, a->d), l2_rows_bwd, (void *)(uintptr_t)a);
    return TSR_OK;
}

/* ---- backward with weights ------------------------------------------------------------------------------------------ */

/* Blocks are worked on in rounds of ROUND, so that their partial sums fit the scratch of worker 0. */
#define ROUND 32

typedef struct weighted {
    const tsr_rmsnorm_bwd_args *plain;
    const tsr_rmsnorm_gated_bwd_args *gated;
    int64_t first, rows; /* first block of the round; rows of a block */
    float *sums;         /* [ROUND][d] */
} weighted;

static void rms_rows_bwd(void *payload, int64_t i, int worker)
{
    const weighted *j = payload;
    const tsr_rmsnorm_bwd_args *a = j->plain;
    float *sum = j->sums + i * a->d;
    int64_t from = (j->first + i) * j->rows;
    (void)worker;
    memset(sum, 0, (size_t)a->d * sizeof *sum);
    for (int64_t r = from; r < a->n && r < from + j->rows; r++) {
        const float *x = a->x + r * a->x_stride, *dy = a->dy + r * a->dy_stride;
        float *dx = a->dx + r * a->dx_stride;
        vf dot = v_zero(), rstd = v_set1(a->rstd[r]);
        EACH(a->d)
        {
            vf g = LOAD(dy);
            dot = v_fma(a->w != NULL ? (vf)(g * LOAD(a->w)) : g, LOAD(x), dot);
        }
        vf c = v_set1((float)((double)v_sum(dot) / (double)a->d)) * rstd * rstd;
        EACH(a->d)
        {
            vf d = LOAD(dy), v = LOAD(x), g = a->w != NULL ? (vf)(d * LOAD(a->w)) : d;
            STORE(sum, v_fma(d, v * rstd, LOAD(sum)));
            STORE(dx, rstd * (g - c * v));
        }
    }
}

static void gated_rows_bwd(void *payload, int64_t i, int worker)
{
    const weighted *j = payload;
    const tsr_rmsnorm_gated_bwd_args *a = j->gated;
    float *sum = j->sums + i * a->d;
    int64_t from = (j->first + i) * j->rows;
    (void)worker;
    memset(sum, 0, (size_t)a->d * sizeof *sum);
    for (int64_t r = from; r < a->n && r < from + j->rows; r++) {
        const float *x = a->x + r * a->d, *dy = a->dy + r * a->d, *g = a->g + r * a->d;
        float *dx = a->dx + r * a->d, *dg = a->dg + r * a->d;
        vf dot = v_zero(), rstd = v_set1(a->rstd[r]), one = v_set1(1);
        EACH(a->d)
        {
            dot = v_fma(LOAD(dy) * v_sigmoid(LOAD(g)) * LOAD(a->w), LOAD(x), dot);
        }
        vf c = v_set1((float)((double)v_sum(dot) / (double)a->d)) * rstd * rstd;
        EACH(a->d)
        {
            vf d = LOAD(dy), v = LOAD(x), s = v_sigmoid(LOAD(g)), w = LOAD(a->w);
            STORE(dg, d * v * rstd * w * s * (one - s));
            STORE(sum, v_fma(d * s, v * rstd, LOAD(sum)));
            STORE(dx, rstd * (d * s * w - c * v));
        }
    }
}

static void in_rounds(tsr_queue *q, weighted *j, int64_t n, int64_t d, float *dw,
                      void (*fn)(void *payload, int64_t i, int worker))
{
    j->rows = rows_of(d);
    j->sums = tsr_scratch(q, 0);
    TSR_ASSERT((size_t)d * ROUND * sizeof(float) <= TSR_SCRATCH_BYTES);
    int64_t blocks = blocks_of(n, d);
    for (j->first = 0; j->first < blocks; j->first += ROUND) {
        int64_t count = blocks - j->first < ROUND ? blocks - j->first : ROUND;
        tsr_parallel(q, count, fn, j);
        for (int64_t i = 0; dw != NULL && i < count; i++) {
            const float *sum = j->sums + i * d;
            EACH(d)
            {
                STORE(dw, LOAD(dw) + LOAD(sum));
            }
        }
    }
}

tsr_status TSR_SIMD(rmsnorm_bwd)(tsr_queue *q, const tsr_rmsnorm_bwd_args *a)
{
    weighted j = { .plain = a };
    in_rounds(q, &j, a->n, a->d, a->dw, rms_rows_bwd);
    return TSR_OK;
}

tsr_status TSR_SIMD(rmsnorm_gated_bwd)(tsr_queue *q, const tsr_rmsnorm_gated_bwd_args *a)
{
    weighted j = { .gated = a };
    in_rounds(q, &j, a->n, a->d, a->dw, gated_rows_bwd);
    return TSR_OK;
}
