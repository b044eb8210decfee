/* kda.c - delta attention: decays, and the recurrence token by token. Contracts: kernels/ops/kda.h. The chunkwise
 * form is in kda_chunk.c. */
#include "kernels/simd/simd.h"

#include <math.h>

static inline vf load_part(const float *p, int64_t left)
{
    return left >= VL ? v_load(p) : v_load_n(p, left);
}

static inline void store_part(float *p, vf v, int64_t left)
{
    if (left >= VL) {
        v_store(p, v);
    } else {
        v_store_n(p, v, left);
    }
}

/* ---- decays ---------------------------------------------------------------------------------------------------- */

/* log(1 + e^u) = max(u, 0) + log(1 + y), y = e^-|u| in (0, 1]; log(1 + y) = 2 artanh(s), s = y / (2 + y) <= 1/3,
 * by its series: the first term left out is below 2e-9 of the sum. */
static inline vf softplus(vf u)
{
    vf y = v_exp(-v_abs(u)), s = y / (y + v_set1(2.0f)), ss = s * s, p = v_set1(1.0f / 15);
    for (int k = 13; k >= 3; k -= 2) {
        p = v_fma(p, ss, v_set1(1.0f / (float)k));
    }
    vf log1p = v_fma(s * ss * v_set1(2.0f), p, s + s);
    return v_max(u, v_zero()) + log1p;
}

enum { GATE_TILE = 16 };
typedef struct gate_job {
    const tsr_kda_gate_fwd_args *f;
    const tsr_kda_gate_bwd_args *b;
    tsr_queue *q;
} gate_job;

static void gate_fwd_piece(void *payload, int64_t i, int worker)
{
    (void)worker;
    const tsr_kda_gate_fwd_args *a = ((gate_job *)payload)->f;
    int64_t end = (i + 1) * GATE_TILE < a->n ? (i + 1) * GATE_TILE : a->n, d = a->d;
    vf lower = v_set1(a->lower);
    for (int64_t row = i * GATE_TILE * a->h; row < end * a->h; row++) {
        const float *z = a->z + row * d, *bias = a->dt_bias + row % a->h * d;
        vf rate = v_set1(expf(a->a_log[row % a->h]));
        for (int64_t c = 0; c < d; c += VL) {
            vf u = load_part(z + c, d - c) + load_part(bias + c, d - c);
            store_part(a->g + row * d + c, a->lower < 0 ? lower * v_sigmoid(rate * u) : -rate * softplus(u),
                       d - c);
        }
    }
}

tsr_status TSR_SIMD(kda_gate_fwd)(tsr_queue *q, const tsr_kda_gate_fwd_args *a)
{
    gate_job job = { .f = a, .q = q };
    tsr_parallel(q, (a->n + GATE_TILE - 1) / GATE_TILE, gate_fwd_piece, &job);
    return TSR_OK;
}

/* One head over all tokens. near: sums of the last GATE_TILE tokens, far: of all before; bias, then a_log by lanes. */
static void gate_bwd_piece(void *payload, int64_t h, int worker)
{
    const gate_job *job = payload;
    const tsr_kda_gate_bwd_args *a = job->b;
    int64_t d = a->d, room = (d + VL - 1) / VL * VL;
    float *near = tsr_scratch(job->q, worker), *far = near + 2 * room;
    memset(near, 0, (size_t)(4 * room) * sizeof *near);
    vf rate = v_set1(expf(a->a_log[h])), one = v_set1(1.0f), scale = v_set1(a->lower) * rate;
    for (int64_t t = 0; t < a->n; t++) {
        for (int64_t c = 0; c < d; c += VL) {
            int64_t at = (t * a->h + h) * d + c, left = d - c;
            vf u = load_part(a->z + at, left) + load_part(a->dt_bias + h * d + c, left);
            vf dg = load_part(a->dg + at, left), dz, dl;
            if (a->lower < 0) {
                vf e = v_exp(-v_abs(rate * u)), r = one / (one + e); /* s (1 - s) without the difference */
                dz = dg * scale * (e * r * r);
                dl = dz * u;
            } else {
                dz = -dg * rate * v_sigmoid(u);
                dl = -dg * rate * softplus(u);
            }
            store_part(a->dz + at, dz, left);
            v_store(near + c, v_load(near + c) + dz);
            v_store(near + room + c, v_load(near + room + c) + dl);
        }
        if (t % GATE_TILE == GATE_TILE - 1 || t == a->n - 1) {
            for (int64_t c = 0; c < 2 * room; c += VL) {
                v_store(far + c, v_load(far + c) + v_load(near + c));
                v_store(near + c, v_zero());
            }
        }
    }
    vf sum = v_zero();
    for (int64_t c = 0; c < d; c += VL) {
        float *bias = a->ddt_bias + h * d + c;
        store_part(bias, load_part(bias, d - c) + v_load(far + c), d - c);
        sum += d - c >= VL ? v_load(far + room + c) : v_load_n(far + room + c, d - c);
    }
    a->da_log[h] += v_sum(sum);
}

tsr_status TSR_SIMD(kda_gate_bwd)(tsr_queue *q, const tsr_kda_gate_bwd_args *a)
{
    gate_job job = { .b = a, .q = q };
    TSR_ASSERT((size_t)(a->d + VL) * 4 * sizeof(float) <= TSR_SCRATCH_BYTES);
    tsr_parallel(q, a->h, gate_bwd_piece, &job);
    return TSR_OK;
}

/* ---- token by token -------------------------------------------------------------------------------------------- */

typedef struct step_job {
    const tsr_kda_step_args *a;
    tsr_queue *q;
} step_job;

enum { WIDE = 4 }; /* vectors of a row that are summed at once */

/* read[dv] = (k exp g)^T S and seen[dv] = (q exp g)^T S over columns [j, j + w VL), w <= WIDE: one pass that only reads.
 * left: columns from j on. */
static inline __attribute__((always_inline)) void look(const float *S, int64_t dk, int64_t dv,
                                                       const float *ka, const float *qa, float *read,
                                                       float *seen, int w, int64_t left)
{
    vf r[WIDE], o[WIDE];
    for (int i = 0; i < w; i++) {
        r[i] = o[i] = v_zero();
    }
    for (int64_t k = 0; k < dk; k++) {
        vf kk = v_set1(ka[k]), qq = v_set1(qa[k]);
        for (int i = 0; i < w; i++) {
            vf s = left >= w * VL ? v_load(S + k * dv + i * VL) : v_load_n(S + k * dv, left);
            r[i] = v_fma(kk, s, r[i]);
            o[i] = v_fma(qq, s, o[i]);
        }
    }
    for (int i = 0; i < w; i++) {
        v_store(read + i * VL, r[i]);
        v_store(seen + i * VL, o[i]);
    }
}

/* With S' = diag(exp g) S: the new state is S' + k e^T, e = beta (v - S'^T k), so o = S'^T q + (q k) e. The state is
 * read once for both products with it, then updated once. */
static void one_step(const tsr_kda_step_args *a, int64_t row, float *S, float *room)
{
    int64_t dk = a->dk, dv = a->dv, kr = (dk + VL - 1) / VL * VL, vr = (dv + VL - 1) / VL * VL + WIDE * VL;
    float *decay = room, *ka = room + kr, *qa = room + 2 * kr, *e = room + 3 * kr, *seen = e + vr;
    const float *q = a->q + row * dk, *k = a->k + row * dk, *g = a->g + row * dk, *v = a->v + row * dv;
    vf dot = v_zero();
    for (int64_t i = 0; i < dk; i += VL) {
        vf x = v_exp(load_part(g + i, dk - i)), kk = load_part(k + i, dk - i), qq = load_part(q + i, dk - i);
        v_store(decay + i, x);
        v_store(ka + i, kk * x);
        v_store(qa + i, qq * x);
        dot = v_fma(kk, qq, dot);
    }
    int64_t j = 0;
    for (; j + WIDE * VL <= dv; j += WIDE * VL) {
        look(S + j, dk, dv, ka, qa, e + j, seen + j, WIDE, dv - j);
    }
    for (; j < dv; j += VL) {
        look(S + j, dk, dv, ka, qa, e + j, seen + j, 1, dv - j);
    }
    vf beta = v_set1(a->beta[row]), qk = v_set1(v_sum(dot));
    for (j = 0; j < dv; j += VL) {
        vf x = beta * (load_part(v + j, dv - j) - v_load(e + j));
        v_store(e + j, x);
        store_part(a->o + row * dv + j, v_fma(qk, x, v_load(seen + j)), dv - j);
    }
    for (int64_t i = 0; i < dk; i++) {
        vf x = v_set1(decay[i]), kk = v_set1(k[i]);
        float *s = S + i * dv;
        for (j = 0; j + VL <= dv; j += VL) {
            v_store(s + j, v_fma(kk, v_load(e + j), x * v_load(s + j)));
        }
        if (j < dv) {
            v_store_n(s + j, v_fma(kk, v_load(e + j), x * v_load_n(s + j, dv - j)), dv - j);
        }
    }
}

static void step_piece(void *payload, int64_t i, int worker)
{
    const step_job *job = payload;
    const tsr_kda_step_args *a = job->a;
    int64_t s = i / a->h, h = i % a->h;
    for (int64_t t = a->seg[s]; t < a->seg[s + 1]; t++) {
        one_step(a, t * a->h + h, a->state + i * a->dk * a->dv, tsr_scratch(job->q, worker));
    }
}

tsr_status TSR_SIMD(kda_step)(tsr_queue *q, const tsr_kda_step_args *a)
{
    step_job job = { a, q };
    TSR_ASSERT((size_t)(3 * (a->dk + VL) + 2 * (a->dv + (WIDE + 1) * VL)) * sizeof(float) <=
               TSR_SCRATCH_BYTES);
    tsr_parallel(q, a->segs * a->h, step_piece, &job);
    return TSR_OK;
}
