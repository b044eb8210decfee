/* balance.c - reference: balancing experts by quantiles, in f64. Contracts: kernels/ops/balance.h. */
#include "kernels/backend_priv.h"

#include <math.h>
#include <string.h>

/* Midway between the k-th and the (k+1)-th largest of x[n], 1 <= k < n. Reorders x. */
static double between(double *x, int64_t n, int64_t k)
{
    for (int64_t from = 0, to = n - 1;
         from < to;) { /* until the k largest stand in front, the k-th last of them */
        double pivot = x[from + (to - from) / 2];
        int64_t i = from, j = to;
        while (i <= j) {
            for (; x[i] > pivot; i++) {
            }
            for (; x[j] < pivot; j--) {
            }
            if (i <= j) {
                double t = x[i];
                x[i++] = x[j];
                x[j--] = t;
            }
        }
        if (k - 1 <= j) {
            to = j;
        } else if (k - 1 >= i) {
            from = i;
        } else {
            break;
        }
    }
    double next = x[k];
    for (int64_t i = k + 1; i < n; i++) {
        next = x[i] > next ? x[i] : next;
    }
    return (x[k - 1] + next) / 2;
}

/* NaN would lead the search astray; below everything it is never chosen. */
static double low_nan(double x)
{
    return isnan(x) ? -INFINITY : x;
}

tsr_status tsr_cpu_balance_exact(tsr_queue *q, const tsr_balance_exact_args *a)
{
    (void)q;
    double *alpha = a->workspace, *x = alpha + a->n;
    for (int64_t round = 0; round < a->rounds; round++) {
        for (int64_t i = 0; i < a->n; i++) {
            for (int64_t j = 0; j < a->e; j++) {
                x[j] = low_nan((double)a->s[i * a->e + j] - a->beta[j]);
            }
            alpha[i] = between(x, a->e, a->k);
        }
        for (int64_t j = 0; j < a->e; j++) {
            for (int64_t i = 0; i < a->n; i++) {
                x[i] = low_nan((double)a->s[i * a->e + j] - alpha[i]);
            }
            a->beta[j] = between(x, a->n, a->n * a->k / a->e);
        }
    }
    return TSR_OK;
}

/* The (k+1)-th largest of s + bias, in f32 as the router adds them; NaN lowest. */
static float cutoff(const float *s, const float *bias, int64_t e, int64_t k, float *best)
{
    int64_t have = 0;
    for (int64_t j = 0; j < e; j++) {
        float x = s[j] + bias[j];
        x = isnan(x) ? -INFINITY : x;
        if (have == k + 1 && x <= best[k]) {
            continue;
        }
        int64_t at = have == k + 1 ? k : have++;
        for (; at > 0 && best[at - 1] < x; at--) {
            best[at] = best[at - 1];
        }
        best[at] = x;
    }
    return best[k];
}

tsr_status tsr_cpu_balance_count(tsr_queue *q, const tsr_balance_count_args *a)
{
    float *best = tsr_scratch(q, 0);
    double per = (double)a->bins / (a->high - a->low);
    for (int64_t i = 0; i < a->n; i++) {
        const float *s = a->s + i * a->e;
        double alpha = (double)cutoff(s, a->bias, a->e, a->k, best);
        for (int64_t j = 0; j < a->e; j++) {
            double x = (alpha - (double)s[j] - a->low) * per; /* NaN: the last bin */
            a->hist[j * a->bins + (x < (double)a->bins ? x > 0 ? (int64_t)x : 0 : a->bins - 1)]++;
        }
    }
    return TSR_OK;
}

/* The value below which q of the counted ones lie. */
static double quantile(const int64_t *hist, const tsr_balance_solve_args *a)
{
    double want = (double)a->tokens * (double)a->k / (double)a->e,
           width = (a->high - a->low) / (double)a->bins;
    int64_t before = 0;
    for (int64_t b = 0; b < a->bins; b++) {
        if (hist[b] > 0 && (double)(before + hist[b]) >= want) {
            return a->low + ((double)b + (want - (double)before) / (double)hist[b]) * width;
        }
        before += hist[b];
    }
    return a->high;
}

tsr_status tsr_cpu_balance_solve(tsr_queue *q, const tsr_balance_solve_args *a)
{
    (void)q;
    double mean = 0;
    for (int64_t j = 0; a->centre && j < a->e; j++) {
        mean += quantile(a->hist + j * a->bins, a) / (double)a->e;
    }
    for (int64_t j = 0; j < a->e; j++) {
        a->bias[j] = (float)(quantile(a->hist + j * a->bins, a) - mean);
    }
    return TSR_OK;
}

tsr_status tsr_cpu_balance_sign(tsr_queue *q, const tsr_balance_sign_args *a)
{
    (void)q;
    double mean = 0;
    for (int64_t j = 0; j < a->e; j++) {
        mean += (double)a->load[j] / (double)a->e;
    }
    for (int64_t j = 0; j < a->e; j++) {
        double off = mean - (double)a->load[j];
        a->bias[j] = (float)((double)a->bias[j] + a->rate * ((off > 0) - (off < 0)));
    }
    return TSR_OK;
}
