/* balance.c - the histogram of required biases, over the pool: once a step on every score. The rest of the family runs
 * once a step on a row per expert and stays with the reference. Contracts: kernels/ops/balance.h. */
#include "kernels/simd/simd.h"

/* Tokens whose cutoffs are kept at a time, and of a piece of the search; experts of a piece of the counting: their
 * bins stay in the second-level cache, and a piece reads whole cache lines. */
enum { TOKENS = 1 << 20, SEARCH = 32, EXPERTS = 128 };

typedef struct count_job {
    const tsr_balance_count_args *a;
    tsr_queue *q;
    float *alpha; /* of tokens [first, last) */
    int64_t first, last;
} count_job;

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* The (k+1)-th largest of s + bias; best, k + 1 of them, is kept sorted. */
static float cutoff(const float *s, const float *bias, int64_t e, int64_t k, float *best)
{
    const vf lowest = v_set1(-__builtin_inff());
    for (int64_t j = 0; j <= k; j++) {
        best[j] = -__builtin_inff();
    }
    for (int64_t j = 0; j < e; j += VL) {
        float lane[VL];
        int64_t n = least(VL, e - j);
        vf x = n == VL ? v_load(s + j) + v_load(bias + j) : v_load_n(s + j, n) + v_load_n(bias + j, n);
        x = v_max(x, lowest); /* NaN gives the second operand */
        v_store(lane, x);
        unsigned above = vi_more(v_key(x), v_key(v_set1(best[k]))) & ((1u << n) - 1);
        for (; above != 0; above &= above - 1) {
            float y = lane[__builtin_ctz(above)];
            int64_t at = k;
            if (!(y > best[k])) { /* the bar may have risen */
                continue;
            }
            for (; at > 0 && best[at - 1] < y; at--) {
                best[at] = best[at - 1];
            }
            best[at] = y;
        }
    }
    return best[k];
}

static void search_piece(void *payload, int64_t piece, int worker)
{
    const count_job *job = payload;
    const tsr_balance_count_args *a = job->a;
    float *best = (float *)tsr_scratch(job->q, worker) + (worker == 0 ? TOKENS : 0);
    int64_t from = job->first + piece * SEARCH;
    for (int64_t i = from; i < least(from + SEARCH, job->last); i++) {
        job->alpha[i - job->first] = cutoff(a->s + i * a->e, a->bias, a->e, a->k, best);
    }
}

static void count_piece(void *payload, int64_t piece, int worker)
{
    (void)worker;
    const count_job *job = payload;
    const tsr_balance_count_args *a = job->a;
    double per = (double)a->bins / (a->high - a->low), bins = (double)a->bins;
    int64_t from = piece * EXPERTS, to = least(from + EXPERTS, a->e);
    for (int64_t i = job->first; i < job->last; i++) {
        double alpha = (double)job->alpha[i - job->first];
        for (int64_t j = from; j < to; j++) {
            double x = (alpha - (double)a->s[i * a->e + j] - a->low) * per; /* NaN: the last bin */
            a->hist[j * a->bins + (x < bins ? x > 0 ? (int64_t)x : 0 : a->bins - 1)]++;
        }
    }
}

tsr_status TSR_SIMD(balance_count)(tsr_queue *q, const tsr_balance_count_args *a)
{
    TSR_ASSERT((size_t)(TOKENS + a->k + 1) * sizeof(float) <= TSR_SCRATCH_BYTES);
    count_job job = { .a = a, .q = q, .alpha = tsr_scratch(q, 0) };
    for (job.first = 0; job.first < a->n; job.first = job.last) {
        job.last = least(job.first + TOKENS, a->n);
        tsr_parallel(q, (job.last - job.first + SEARCH - 1) / SEARCH, search_piece, &job);
        tsr_parallel(q, (a->e + EXPERTS - 1) / EXPERTS, count_piece, &job);
    }
    return TSR_OK;
}
