/* attnres.c - attention residuals, by vectors: a piece of work is a block of tokens. Contracts: kernels/ops/attnres.h. */
#include "kernels/simd/simd.h"

#include <math.h>

#define SOURCES_MAX 4097 /* one per layer at most, and the running sum */
#define ROWS 8
#define ROUND 32 /* blocks whose partial sums of dtheta are kept at once */

static void tokens_fwd(void *payload, int64_t block, int worker)
{
    const tsr_attnres_fwd_args *a = payload;
    float score[SOURCES_MAX];
    int64_t d = a->d, count = a->s + 1;
    (void)worker;
    for (int64_t t = block * ROWS; t < a->n && t < (block + 1) * ROWS; t++) {
        float *y = a->y + t * d, most = -INFINITY;
        double sum = 0;
        for (int64_t i = 0; i < count; i++) {
            const float *v = i < a->s ? a->bank + i * a->bank_stride + t * d : a->cur + t * d;
            vf ss = v_zero(), dot = v_zero();
            EACH(d)
            {
                vf x = LOAD(v);
                ss = v_fma(x, x, ss);
                dot = v_fma(x, LOAD(a->norm) * LOAD(a->proj), dot);
            }
            double r = 1 / sqrt((double)v_sum(ss) / (double)d + (double)a->eps);
            score[i] = (float)((double)v_sum(dot) * r);
            most = score[i] > most ? score[i] : most;
            if (a->rstd != NULL) {
                a->rstd[t * count + i] = (float)r;
            }
        }
        for (int64_t i = 0; i < count; i++) {
            score[i] = expf(score[i] - most);
            sum += (double)score[i];
        }
        for (int64_t i = 0; i < count; i++) {
            const float *v = i < a->s ? a->bank + i * a->bank_stride + t * d : a->cur + t * d;
            score[i] = (float)((double)score[i] / sum);
            vf p = v_set1(score[i]);
            EACH(d)
            {
                STORE(y, i > 0 ? v_fma(p, LOAD(v), LOAD(y)) : (vf)(p * LOAD(v)));
            }
        }
        if (a->p != NULL) {
            memcpy(a->p + t * count, score, (size_t)count * sizeof *score);
        }
    }
}

tsr_status TSR_SIMD(attnres_fwd)(tsr_queue *q, const tsr_attnres_fwd_args *a)
{
    TSR_ASSERT(a->s < SOURCES_MAX);
    tsr_parallel(q, (a->n + ROWS - 1) / ROWS, tokens_fwd, (void *)(uintptr_t)a);
    return TSR_OK;
}

typedef struct backward {
    const tsr_attnres_bwd_args *a;
    int64_t first;
    float *sums; /* [ROUND][d]: of ds n, the gradient of norm * proj */
} backward;

/* Of one token and source; see the reference for the formula. */
static void source_bwd(const tsr_attnres_bwd_args *a, int64_t t, int64_t i, float p, float ds, float *sum)
{
    int64_t d = a->d;
    const float *v = i < a->s ? a->bank + i * a->bank_stride + t * d : a->cur + t * d, *dy = a->dy + t * d;
    float *dv = i < a->s ? a->dbank + i * a->dbank_stride + t * d : a->dcur + t * d;
    float r = a->rstd[t * (a->s + 1) + i];
    vf score = v_zero();
    EACH(d)
    {
        score = v_fma(LOAD(v), LOAD(a->norm) * LOAD(a->proj), score);
    }
    vf pv = v_set1(p), dsr = v_set1(ds * r), c = v_set1(v_sum(score) * r * r / (float)d);
    EACH(d)
    {
        vf x = LOAD(v), theta = LOAD(a->norm) * LOAD(a->proj);
        STORE(sum, v_fma(dsr, x, LOAD(sum)));
        STORE(dv, LOAD(dv) + v_fma(pv, LOAD(dy), dsr * (theta - x * c)));
    }
}

static void tokens_bwd(void *payload, int64_t block, int worker)
{
    const backward *j = payload;
    const tsr_attnres_bwd_args *a = j->a;
    float dot[SOURCES_MAX], *sum = j->sums + block * a->d;
    int64_t d = a->d, count = a->s + 1, from = (j->first + block) * ROWS;
    (void)worker;
    memset(sum, 0, (size_t)d * sizeof *sum);
    for (int64_t t = from; t < a->n && t < from + ROWS; t++) {
        const float *dy = a->dy + t * d, *p = a->p + t * count;
        double mean = 0;
        for (int64_t i = 0; i < count; i++) {
            const float *v = i < a->s ? a->bank + i * a->bank_stride + t * d : a->cur + t * d;
            vf s = v_zero();
            EACH(d)
            {
                s = v_fma(LOAD(dy), LOAD(v), s);
            }
            dot[i] = v_sum(s);
            mean += (double)p[i] * (double)dot[i];
        }
        for (int64_t i = 0; i < count; i++) {
            source_bwd(a, t, i, p[i], (float)((double)p[i] * ((double)dot[i] - mean)), sum);
        }
    }
}

tsr_status TSR_SIMD(attnres_bwd)(tsr_queue *q, const tsr_attnres_bwd_args *a)
{
    backward j = { .a = a, .sums = tsr_scratch(q, 0) };
    int64_t d = a->d, blocks = (a->n + ROWS - 1) / ROWS;
    TSR_ASSERT(a->s < SOURCES_MAX && (size_t)d * ROUND * sizeof(float) <= TSR_SCRATCH_BYTES);
    for (j.first = 0; j.first < blocks; j.first += ROUND) {
        int64_t count = blocks - j.first < ROUND ? blocks - j.first : ROUND;
        tsr_parallel(q, count, tokens_bwd, &j);
        for (int64_t i = 0; i < count; i++) {
            const float *sum = j.sums + i * d;
            EACH(d)
            {
                STORE(a->dnorm, v_fma(LOAD(sum), LOAD(a->proj), LOAD(a->dnorm)));
                STORE(a->dproj, v_fma(LOAD(sum), LOAD(a->norm), LOAD(a->dproj)));
            }
        }
    }
    return TSR_OK;
}
