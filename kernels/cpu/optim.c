/* optim.c - reference: optimizer updates, in f64. Contracts: kernels/ops/optim.h. */
#include "kernels/backend_priv.h"

#include <math.h>

tsr_status tsr_cpu_adamw(tsr_queue *q, const tsr_adamw_args *a)
{
    (void)q;
    double c1 = 1 - pow(a->b1, (double)a->t), c2 = 1 - pow(a->b2, (double)a->t);
    for (int64_t i = 0; i < a->n; i++) {
        double g = (double)a->g[i] * a->grad_scale, w = (double)a->w[i];
        double m = a->b1 * (double)a->m[i] + (1 - a->b1) * g;
        double v = a->b2 * (double)a->v[i] + (1 - a->b2) * g * g;
        a->w[i] = (float)(w * (1 - a->lr * a->decay) - a->lr * (m / c1) / (sqrt(v / c2) + a->eps));
        a->m[i] = (float)m;
        a->v[i] = (float)v;
    }
    return TSR_OK;
}

/* out[low][low] = x y^T, x and y [low][n]. */
static void times_transposed(double *out, const double *x, const double *y, int64_t low, int64_t n)
{
    for (int64_t i = 0; i < low; i++) {
        for (int64_t j = 0; j < low; j++) {
            double s = 0;
            for (int64_t c = 0; c < n; c++) {
                s += x[i * n + c] * y[j * n + c];
            }
            out[i * low + j] = s;
        }
    }
}

/* Five steps on x [low][high], with two matrices [low][low] and a column. */
static void newton_schulz(double *x, int64_t low, int64_t high, double *p, double *pp, double *column)
{
    double norm = 0;
    for (int64_t i = 0; i < low * high; i++) {
        norm += x[i] * x[i];
    }
    norm = sqrt(norm) + 1e-7;
    for (int64_t i = 0; i < low * high; i++) {
        x[i] /= norm;
    }
    for (int step = 0; step < 5; step++) {
        times_transposed(p, x, x, low, high);
        times_transposed(pp, p, p, low, low); /* p is symmetric */
        for (int64_t i = 0; i < low * low; i++) {
            p[i] = -4.7750 * p[i] + 2.0315 * pp[i];
        }
        for (int64_t c = 0; c < high; c++) {
            for (int64_t i = 0; i < low; i++) {
                column[i] = x[i * high + c];
            }
            for (int64_t i = 0; i < low; i++) {
                double s = 3.4445 * column[i];
                for (int64_t j = 0; j < low; j++) {
                    s += p[i * low + j] * column[j];
                }
                x[i * high + c] = s;
            }
        }
    }
}

tsr_status tsr_cpu_muon(tsr_queue *q, const tsr_muon_args *a)
{
    (void)q;
    int64_t n = a->rows * a->cols, low = a->rows < a->cols ? a->rows : a->cols, high = n / low;
    double *x = a->workspace, *p = x + n, *pp = p + low * low, *column = pp + low * low;
    double rate = a->lr * 0.2 * sqrt((double)(a->scale_dim > 0 ? a->scale_dim : high));
    for (int64_t h = 0; h < a->count; h++) {
        float *w = a->w + h * n, *m = a->m + h * n;
        for (int64_t i = 0; i < n; i++) {
            double g = (double)a->g[h * n + i] * a->grad_scale, v = a->mu * (double)m[i] + g;
            int64_t at = a->rows > a->cols ? i % a->cols * a->rows + i / a->cols : i;
            x[at] = a->nesterov ? g + a->mu * v : v;
            m[i] = (float)v;
        }
        newton_schulz(x, low, high, p, pp, column);
        for (int64_t i = 0; i < n; i++) {
            int64_t at = a->rows > a->cols ? i % a->cols * a->rows + i / a->cols : i;
            w[i] = (float)((double)w[i] * (1 - a->lr * a->decay) - rate * x[at]);
        }
    }
    return TSR_OK;
}
