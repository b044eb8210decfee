/* elementwise.c - reference: elementwise operations. Plain loops in f64. Contracts: kernels/ops/elementwise.h. */
#include "kernels/backend_priv.h"
#include "kernels/numeric.h"

#include <math.h>

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

tsr_status tsr_cpu_add(tsr_queue *q, const tsr_add_args *a)
{
    (void)q;
    for (int64_t i = 0; i < a->n; i++) {
        a->y[i] = a->a[i] + a->b[i];
    }
    return TSR_OK;
}

tsr_status tsr_cpu_copy2d(tsr_queue *q, const tsr_copy2d_args *a)
{
    (void)q;
    for (int64_t i = 0; i < a->n; i++) {
        for (int64_t j = 0; j < a->d; j++) {
            float x = a->src[i * a->src_stride + j];
            if (a->dtype == TSR_DT_F32) {
                ((float *)a->dst)[i * a->dst_stride + j] = x;
            } else {
                ((uint16_t *)a->dst)[i * a->dst_stride + j] = tsr_f32_to_bf16(x);
            }
        }
    }
    return TSR_OK;
}

tsr_status tsr_cpu_sigmoid_fwd(tsr_queue *q, const tsr_sigmoid_fwd_args *a)
{
    (void)q;
    for (int64_t i = 0; i < a->n; i++) {
        a->y[i] = (float)sigmoid((double)a->x[i]);
    }
    return TSR_OK;
}

tsr_status tsr_cpu_sigmoid_bwd(tsr_queue *q, const tsr_sigmoid_bwd_args *a)
{
    (void)q;
    for (int64_t i = 0; i < a->n; i++) {
        double y = (double)a->y[i];
        a->dx[i] = (float)((double)a->dy[i] * y * (1 - y));
    }
    return TSR_OK;
}

tsr_status tsr_cpu_gate_fwd(tsr_queue *q, const tsr_gate_fwd_args *a)
{
    (void)q;
    for (int64_t i = 0; i < a->n; i++) {
        a->y[i] = (float)((double)a->x[i] * sigmoid((double)a->g[i]));
    }
    return TSR_OK;
}

tsr_status tsr_cpu_gate_bwd(tsr_queue *q, const tsr_gate_bwd_args *a)
{
    (void)q;
    for (int64_t i = 0; i < a->n; i++) {
        double s = sigmoid((double)a->g[i]), dy = (double)a->dy[i], x = (double)a->x[i];
        a->dg[i] = (float)(dy * x * s * (1 - s));
        a->dx[i] = (float)(dy * s);
    }
    return TSR_OK;
}

tsr_status tsr_cpu_glu_fwd(tsr_queue *q, const tsr_glu_fwd_args *a)
{
    (void)q;
    for (int64_t i = 0; i < a->n; i++) {
        double g = (double)a->g[i], u = (double)a->u[i], b1 = (double)a->b1, b2 = (double)a->b2;
        a->y[i] = (float)(a->kind == TSR_GLU_SITU ? b1 * tanh(g / b1) * sigmoid(g) * b2 * tanh(u / b2)
                                                  : g * sigmoid(g) * u);
    }
    return TSR_OK;
}

tsr_status tsr_cpu_glu_bwd(tsr_queue *q, const tsr_glu_bwd_args *a)
{
    (void)q;
    for (int64_t i = 0; i < a->n; i++) {
        double g = (double)a->g[i], u = (double)a->u[i], dy = (double)a->dy[i], s = sigmoid(g);
        double b1 = (double)a->b1, b2 = (double)a->b2;
        if (a->kind == TSR_GLU_SITU) {
            double t = tanh(g / b1), v = tanh(u / b2);
            a->dg[i] = (float)(dy * ((1 - t * t) * s + b1 * t * s * (1 - s)) * b2 * v);
            a->du[i] = (float)(dy * b1 * t * s * (1 - v * v));
        } else {
            a->dg[i] = (float)(dy * u * (s + g * s * (1 - s)));
            a->du[i] = (float)(dy * g * s);
        }
    }
    return TSR_OK;
}

tsr_status tsr_cpu_sum_squares(tsr_queue *q, const tsr_sum_squares_args *a)
{
    (void)q;
    double sum = 0;
    for (int64_t i = 0; i < a->n; i++) {
        sum += (double)a->x[i] * (double)a->x[i];
    }
    *a->out += sum;
    return TSR_OK;
}
