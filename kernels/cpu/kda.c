/* kda.c - reference: delta attention, step by step. Plain loops, f64 accumulators. Contracts: kernels/ops/kda.h. */
#include "kernels/backend_priv.h"
#include "kernels/numeric.h"

#include <math.h>
#include <string.h>

tsr_status tsr_cpu_kda_gate_fwd(tsr_queue *q, const tsr_kda_gate_fwd_args *a)
{
    (void)q;
    int64_t row = a->h * a->d;
    for (int64_t i = 0; i < a->n * row; i++) {
        double rate = exp((double)a->a_log[i % row / a->d]);
        double u = (double)a->z[i] + (double)a->dt_bias[i % row];
        double soft = (u > 0 ? u : 0) + log1p(exp(-fabs(u)));
        a->g[i] = (float)(a->lower < 0 ? (double)a->lower / (1 + exp(-rate * u)) : -rate * soft);
    }
    return TSR_OK;
}

tsr_status tsr_cpu_kda_gate_bwd(tsr_queue *q, const tsr_kda_gate_bwd_args *a)
{
    (void)q;
    for (int64_t h = 0; h < a->h; h++) {
        double rate = exp((double)a->a_log[h]), d_log = 0;
        for (int64_t c = h * a->d; c < (h + 1) * a->d; c++) {
            double d_bias = 0;
            for (int64_t t = 0; t < a->n; t++) {
                int64_t i = t * a->h * a->d + c;
                double u = (double)a->z[i] + (double)a->dt_bias[c], dg = (double)a->dg[i], du;
                if (a->lower < 0) {
                    double e = exp(-fabs(rate * u)); /* s (1 - s) without the difference */
                    du = dg * (double)a->lower * rate * e / ((1 + e) * (1 + e));
                    d_log += du * u;
                } else {
                    du = -dg * rate / (1 + exp(-u));
                    d_log -= dg * rate * ((u > 0 ? u : 0) + log1p(exp(-fabs(u))));
                }
                a->dz[i] = (float)du;
                d_bias += du;
            }
            a->ddt_bias[c] = (float)((double)a->ddt_bias[c] + d_bias);
        }
        a->da_log[h] = (float)((double)a->da_log[h] + d_log);
    }
    return TSR_OK;
}

static double number(tsr_dtype dt, const void *p, int64_t i)
{
    return (double)(dt == TSR_DT_BF16 ? tsr_bf16_to_f32(((const uint16_t *)p)[i]) : ((const float *)p)[i]);
}

/* r = v - S^T k after S = diag(exp g) S; then S += beta k r^T. row: of this token and head. */
static void advance(const tsr_kda_fwd_args *a, int64_t row, double *S, double *r)
{
    for (int64_t j = 0; j < a->dv; j++) {
        r[j] = number(a->io, a->v, row * a->dv + j);
    }
    for (int64_t i = 0; i < a->dk; i++) {
        double decay = exp((double)a->g[row * a->dk + i]), k = number(a->io, a->k, row * a->dk + i);
        for (int64_t j = 0; j < a->dv; j++) {
            S[i * a->dv + j] *= decay;
            r[j] -= k * S[i * a->dv + j];
        }
    }
    for (int64_t i = 0; i < a->dk; i++) {
        double k = number(a->io, a->k, row * a->dk + i) * (double)a->beta[row];
        for (int64_t j = 0; j < a->dv; j++) {
            S[i * a->dv + j] += k * r[j];
        }
    }
}

static void narrow(float *dst, const double *src, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        dst[i] = (float)src[i];
    }
}

static void widen(double *dst, const float *src, int64_t n) /* src NULL: zeros */
{
    for (int64_t i = 0; i < n; i++) {
        dst[i] = src != NULL ? (double)src[i] : 0.0;
    }
}

tsr_status tsr_cpu_kda_fwd(tsr_queue *q, const tsr_kda_fwd_args *a)
{
    int64_t size = a->dk * a->dv;
    double *S = tsr_scratch(q, 0), *r = S + size;
    TSR_ASSERT((size_t)(size + a->dv) * sizeof *S <= TSR_SCRATCH_BYTES);
    for (int64_t s = 0, chunk0 = 0; s < a->segs; s++) {
        for (int64_t h = 0; h < a->h; h++) {
            float *state = a->state != NULL ? a->state + (s * a->h + h) * size : NULL;
            widen(S, state, size);
            for (int64_t t = a->seg[s]; t < a->seg[s + 1]; t++) {
                int64_t row = t * a->h + h, at = t - a->seg[s];
                if (a->saved != NULL && at % a->chunk == 0) {
                    narrow(a->saved + ((chunk0 + at / a->chunk) * a->h + h) * size, S, size);
                }
                advance(a, row, S, r);
                for (int64_t j = 0; j < a->dv; j++) {
                    double o = 0;
                    for (int64_t i = 0; i < a->dk; i++) {
                        o += number(a->io, a->q, row * a->dk + i) * S[i * a->dv + j];
                    }
                    a->o[row * a->dv + j] = (float)o;
                }
            }
            if (state != NULL) {
                narrow(state, S, size);
            }
        }
        chunk0 += (a->seg[s + 1] - a->seg[s] + a->chunk - 1) / a->chunk;
    }
    return TSR_OK;
}

tsr_status tsr_cpu_kda_step(tsr_queue *q, const tsr_kda_step_args *a)
{
    tsr_kda_fwd_args f = { .o = a->o, .state = a->state, .q = a->q, .k = a->k, .v = a->v, .g = a->g };
    f.beta = a->beta;
    f.seg = a->seg;
    f.n = a->n;
    f.h = a->h;
    f.dk = a->dk;
    f.dv = a->dv;
    f.segs = a->segs;
    f.chunk = 64;
    f.io = TSR_DT_F32;
    return tsr_cpu_kda_fwd(q, &f);
}

/* One token backwards. before: the state before it; G: gradient of the state after it, made that of `before`. */
static void retreat(const tsr_kda_bwd_args *a, int64_t row, const double *before, double *G, double *r)
{
    const float *q = a->q + row * a->dk, *k = a->k + row * a->dk, *g = a->g + row * a->dk;
    const float *dout = a->dout + row * a->dv;
    double beta = (double)a->beta[row], dbeta = 0, *dr = r + a->dv;
    for (int64_t j = 0; j < a->dv; j++) {
        r[j] = (double)a->v[row * a->dv + j];
        dr[j] = 0;
    }
    for (int64_t i = 0; i < a->dk; i++) {
        for (int64_t j = 0; j < a->dv; j++) {
            r[j] -= (double)k[i] * exp((double)g[i]) * before[i * a->dv + j];
            G[i * a->dv + j] += (double)q[i] * (double)dout[j];
            dr[j] += beta * (double)k[i] * G[i * a->dv + j];
        }
    }
    for (int64_t i = 0; i < a->dk; i++) {
        double dq = 0, dk = 0, dg = 0, decay = exp((double)g[i]);
        for (int64_t j = 0; j < a->dv; j++) {
            double *Gij = &G[i * a->dv + j], old = decay * before[i * a->dv + j];
            dq += (old + beta * (double)k[i] * r[j]) * (double)dout[j];
            dbeta += (double)k[i] * *Gij * r[j];
            dk += beta * *Gij * r[j] - old * dr[j];
            *Gij -= (double)k[i] * dr[j];
            dg += *Gij * old;
            *Gij *= decay;
        }
        a->dq[row * a->dk + i] = (float)dq;
        a->d_k[row * a->dk + i] = (float)dk;
        a->dg[row * a->dk + i] = (float)dg;
    }
    narrow(a->d_v + row * a->dv, dr, a->dv);
    a->dbeta[row] = (float)dbeta;
}

tsr_status tsr_cpu_kda_bwd(tsr_queue *queue, const tsr_kda_bwd_args *a)
{
    int64_t size = a->dk * a->dv;
    double *G = tsr_scratch(queue, 0), *r = G + size,
           *states = r + 2 * a->dv; /* before each step of a chunk */
    TSR_ASSERT((size_t)((a->chunk + 2) * size + 2 * a->dv) * sizeof *G <= TSR_SCRATCH_BYTES);
    tsr_kda_fwd_args f = { .q = a->q, .k = a->k, .v = a->v, .g = a->g, .beta = a->beta };
    f.dk = a->dk;
    f.dv = a->dv;
    f.io = TSR_DT_F32;
    for (int64_t s = 0, chunk0 = 0; s < a->segs; s++) {
        int64_t first = a->seg[s], length = a->seg[s + 1] - first;
        int64_t chunks = (length + a->chunk - 1) / a->chunk;
        for (int64_t h = 0; h < a->h; h++) {
            int64_t at = (s * a->h + h) * size;
            widen(G, a->dstate != NULL ? a->dstate + at : NULL, size);
            for (int64_t c = chunks - 1; c >= 0; c--) {
                int64_t t0 = first + c * a->chunk;
                int64_t steps = length - c * a->chunk < a->chunk ? length - c * a->chunk : a->chunk;
                widen(states, a->saved + ((chunk0 + c) * a->h + h) * size, size);
                for (int64_t i = 0; i < steps; i++) {
                    memcpy(states + (i + 1) * size, states + i * size, (size_t)size * sizeof *states);
                    advance(&f, (t0 + i) * a->h + h, states + (i + 1) * size, r);
                }
                for (int64_t i = steps - 1; i >= 0; i--) {
                    retreat(a, (t0 + i) * a->h + h, states + i * size, G, r);
                }
            }
            if (a->dstate0 != NULL) {
                narrow(a->dstate0 + at, G, size);
            }
        }
        chunk0 += chunks;
    }
    return TSR_OK;
}
