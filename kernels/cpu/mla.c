/* mla.c - reference: latent attention. Plain loops, f64 accumulators. Contracts: kernels/ops/mla.h. */
#include "kernels/backend_priv.h"
#include "kernels/numeric.h"

#include <math.h>

/* Logit of query t and key u for one head. */
static double logit(const tsr_mla_fwd_args *a, int64_t head, int64_t t, int64_t u)
{
    const float *q = a->q + (t * a->h + head) * (a->dn + a->dr),
                *k = a->kv + (u * a->h + head) * (a->dn + a->dv);
    double s = 0;
    for (int64_t j = 0; j < a->dn; j++) {
        s += (double)q[j] * (double)k[j];
    }
    for (int64_t j = 0; j < a->dr; j++) {
        s += (double)q[a->dn + j] * (double)a->kr[u * a->kr_stride + j];
    }
    return s * (double)a->scale;
}

static void attend(const tsr_mla_fwd_args *a, int64_t head, int64_t first, int64_t t, double *acc)
{
    double most = -INFINITY, sum = 0;
    float *o = a->o + (t * a->h + head) * a->dv;
    for (int64_t u = first; u <= t; u++) {
        double s = logit(a, head, t, u);
        most = s > most ? s : most;
    }
    for (int64_t j = 0; j < a->dv; j++) {
        acc[j] = 0;
    }
    for (int64_t u = first; u <= t; u++) {
        double p = exp(logit(a, head, t, u) - most);
        sum += p;
        for (int64_t j = 0; j < a->dv; j++) {
            acc[j] += p * (double)a->kv[(u * a->h + head) * (a->dn + a->dv) + a->dn + j];
        }
    }
    for (int64_t j = 0; j < a->dv; j++) {
        o[j] = (float)(acc[j] / sum);
    }
    if (a->lse != NULL) {
        a->lse[t * a->h + head] = (float)(most + log(sum));
    }
    if (a->max_logit != NULL && (float)most > a->max_logit[head]) {
        a->max_logit[head] = (float)most;
    }
}

tsr_status tsr_cpu_mla_fwd(tsr_queue *q, const tsr_mla_fwd_args *a)
{
    double *acc = tsr_scratch(q, 0);
    for (int64_t i = 0; i < a->segs; i++) {
        for (int64_t t = a->seg[i]; t < a->seg[i + 1]; t++) {
            for (int64_t head = 0; head < a->h; head++) {
                attend(a, head, a->seg[i], t, acc);
            }
        }
    }
    return TSR_OK;
}

/* One query of one head: adds to the sums of keys and values, sets its own gradient. dkv, dkr: f64 sums of the segment. */
static void attend_bwd(const tsr_mla_bwd_args *a, const tsr_mla_fwd_args *f, int64_t head, int64_t first,
                       int64_t t, double *dkv, double *dkr, double *dq)
{
    int64_t row = t * a->h + head, wide = a->dn + a->dv, qd = a->dn + a->dr;
    const float *dout = a->dout + row * a->dv, *o = a->o + row * a->dv, *q = a->q + row * qd;
    double delta = 0;
    for (int64_t j = 0; j < a->dv; j++) {
        delta += (double)dout[j] * (double)o[j];
    }
    for (int64_t j = 0; j < qd; j++) {
        dq[j] = 0;
    }
    for (int64_t u = first; u <= t; u++) {
        const float *kv = a->kv + (u * a->h + head) * wide, *kr = a->kr + u * a->kr_stride;
        double p = exp(logit(f, head, t, u) - (double)a->lse[row]), dp = 0;
        double *d = dkv + ((u - first) * a->h + head) * wide, *dr = dkr + (u - first) * a->dr;
        for (int64_t j = 0; j < a->dv; j++) {
            dp += (double)dout[j] * (double)kv[a->dn + j];
            d[a->dn + j] += p * (double)dout[j];
        }
        double ds = p * (dp - delta) * (double)a->scale;
        for (int64_t j = 0; j < a->dn; j++) {
            dq[j] += ds * (double)kv[j];
            d[j] += ds * (double)q[j];
        }
        for (int64_t j = 0; j < a->dr; j++) {
            dq[a->dn + j] += ds * (double)kr[j];
            dr[j] += ds * (double)q[a->dn + j];
        }
    }
    for (int64_t j = 0; j < qd; j++) {
        a->dq[row * qd + j] = (float)dq[j];
    }
}

tsr_status tsr_cpu_mla_bwd(tsr_queue *q, const tsr_mla_bwd_args *a)
{
    tsr_mla_fwd_args f = { .q = a->q,
                           .kv = a->kv,
                           .kr = a->kr,
                           .h = a->h,
                           .dn = a->dn,
                           .dr = a->dr,
                           .dv = a->dv,
                           .kr_stride = a->kr_stride,
                           .scale = a->scale };
    int64_t wide = a->dn + a->dv;
    for (int64_t i = 0; i < a->segs; i++) {
        int64_t first = a->seg[i], n = a->seg[i + 1] - first, size = n * a->h * wide;
        TSR_ASSERT((size_t)(size + n * a->dr + a->dn + a->dr) * sizeof(double) <= TSR_SCRATCH_BYTES);
        double *dkv = tsr_scratch(q, 0), *dkr = dkv + size, *dq = dkr + n * a->dr;
        for (int64_t j = 0; j < size + n * a->dr; j++) {
            dkv[j] = 0;
        }
        for (int64_t t = first; t < first + n; t++) {
            for (int64_t head = 0; head < a->h; head++) {
                attend_bwd(a, &f, head, first, t, dkv, dkr, dq);
            }
        }
        for (int64_t j = 0; j < size; j++) {
            a->dkv[first * a->h * wide + j] = (float)dkv[j];
        }
        for (int64_t t = 0; t < n; t++) {
            for (int64_t j = 0; j < a->dr; j++) {
                a->dkr[(first + t) * a->dkr_stride + j] = (float)dkr[t * a->dr + j];
            }
        }
    }
    return TSR_OK;
}

static double cached(const tsr_mla_absorbed_args *a, int64_t at)
{
    return a->dtype == TSR_DT_F32 ? (double)((const float *)a->cache)[at]
                                  : (double)tsr_bf16_to_f32(((const uint16_t *)a->cache)[at]);
}

tsr_status tsr_cpu_mla_absorbed(tsr_queue *q, const tsr_mla_absorbed_args *a)
{
    double *acc = tsr_scratch(q, 0);
    int64_t row = a->r + a->dr;
    for (int64_t t = 0; t < a->n; t++) {
        for (int64_t head = 0; head < a->h; head++) {
            const float *x = a->q + (t * a->h + head) * row;
            double most = -INFINITY, sum = 0;
            for (int64_t j = 0; j < a->r; j++) {
                acc[j] = 0;
            }
            for (int64_t u = 0; u <= a->past + t; u++) {
                double s = 0;
                for (int64_t j = 0; j < row; j++) {
                    s += (double)x[j] * cached(a, u * row + j);
                }
                s *= (double)a->scale;
                double now = s > most ? s : most, old = exp(most - now), p = exp(s - now);
                sum = sum * old + p;
                for (int64_t j = 0; j < a->r; j++) {
                    acc[j] = acc[j] * old + p * cached(a, u * row + j);
                }
                most = now;
            }
            for (int64_t j = 0; j < a->r; j++) {
                a->ctx[(t * a->h + head) * a->r + j] = (float)(acc[j] / sum);
            }
        }
    }
    return TSR_OK;
}
