/* elementwise.c - elementwise operations, by vectors. Contracts: kernels/ops/elementwise.h. */
#include "kernels/simd/simd.h"
#include "kernels/numeric.h"

/* Elements of one piece of work: a thread is woken for about 20 us of it. */
#define PIECE ((int64_t)1 << 14)

static int64_t pieces(int64_t n)
{
    return (n + PIECE - 1) / PIECE;
}

static int64_t end_of(int64_t i, int64_t n)
{
    return (i + 1) * PIECE < n ? (i + 1) * PIECE : n;
}

/* Defines a kernel whose element i depends on elements i alone. */
#define ELEMENTWISE(op, ...)                                                                                 \
    static void op##_piece(void *payload, int64_t piece, int worker)                                         \
    {                                                                                                        \
        const tsr_##op##_args *a = payload;                                                                  \
        (void)worker;                                                                                        \
        for (int64_t at = piece * PIECE, end = end_of(piece, a->n); at < end; at += VL) {                    \
            const int64_t lanes = end - at < VL ? end - at : VL;                                             \
            __VA_ARGS__                                                                                      \
        }                                                                                                    \
    }                                                                                                        \
    tsr_status TSR_SIMD(op)(tsr_queue * q, const tsr_##op##_args *a)                                         \
    {                                                                                                        \
        tsr_parallel(q, pieces(a->n), op##_piece, (void *)(uintptr_t)a);                                     \
        return TSR_OK;                                                                                       \
    }

ELEMENTWISE(add, STORE(a->y, LOAD(a->a) + LOAD(a->b));)
ELEMENTWISE(sigmoid_fwd, STORE(a->y, v_sigmoid(LOAD(a->x)));)
ELEMENTWISE(sigmoid_bwd, {
    vf y = LOAD(a->y);
    STORE(a->dx, LOAD(a->dy) * y * (v_set1(1) - y));
})
ELEMENTWISE(gate_fwd, STORE(a->y, LOAD(a->x) * v_sigmoid(LOAD(a->g)));)
ELEMENTWISE(gate_bwd, {
    vf s = v_sigmoid(LOAD(a->g)), dy = LOAD(a->dy), x = LOAD(a->x);
    STORE(a->dg, dy * x * s * (v_set1(1) - s));
    STORE(a->dx, dy * s);
})

static inline vf situ(vf g, vf u, vf b1, vf b2)
{
    return b1 * v_tanh(g / b1) * v_sigmoid(g) * b2 * v_tanh(u / b2);
}

ELEMENTWISE(glu_fwd, {
    vf g = LOAD(a->g), u = LOAD(a->u);
    STORE(a->y,
          a->kind == TSR_GLU_SITU ? situ(g, u, v_set1(a->b1), v_set1(a->b2)) : (vf)(g * v_sigmoid(g) * u));
})

ELEMENTWISE(glu_bwd, {
    vf g = LOAD(a->g), u = LOAD(a->u), dy = LOAD(a->dy), s = v_sigmoid(g), one = v_set1(1);
    if (a->kind == TSR_GLU_SITU) {
        vf b1 = v_set1(a->b1), b2 = v_set1(a->b2), t = v_tanh(g / b1), v = v_tanh(u / b2);
        STORE(a->dg, dy * (v_fma(-t, t, one) * s + b1 * t * s * (one - s)) * b2 * v);
        STORE(a->du, dy * b1 * t * s * v_fma(-v, v, one));
    } else {
        STORE(a->dg, dy * u * (s + g * s * (one - s)));
        STORE(a->du, dy * g * s);
    }
})

/* ---- rows ------------------------------------------------------------------------------------------------------ */

static void copy_rows(void *payload, int64_t i, int worker)
{
    const tsr_copy2d_args *a = payload;
    (void)worker;
    int64_t step = PIECE / a->d > 0 ? PIECE / a->d : 1, last = (i + 1) * step < a->n ? (i + 1) * step : a->n;
    for (int64_t r = i * step; r < last; r++) {
        const float *src = a->src + r * a->src_stride;
        if (a->dtype == TSR_DT_F32) {
            memcpy((float *)a->dst + r * a->dst_stride, src, (size_t)a->d * sizeof *src);
            continue;
        }
        tsr_from_f32(TSR_DT_BF16, src, (uint64_t)a->d, (uint16_t *)a->dst + r * a->dst_stride, NULL);
    }
}

tsr_status TSR_SIMD(copy2d)(tsr_queue *q, const tsr_copy2d_args *a)
{
    int64_t step = PIECE / a->d > 0 ? PIECE / a->d : 1;
    tsr_parallel(q, (a->n + step - 1) / step, copy_rows, (void *)(uintptr_t)a);
    return TSR_OK;
}

/* ---- sum of squares ---------------------------------------------------------------------------------------------- */

#define ROUND 256 /* pieces whose sums are kept at once */

typedef struct squares {
    const tsr_sum_squares_args *a;
    double *part;
} squares;

/* Products of f32 are exact in f64. */
static void squares_piece(void *payload, int64_t piece, int worker)
{
    const squares *j = payload;
    (void)worker;
    double s[8] = { 0 };
    int64_t at = piece * PIECE, end = end_of(piece, j->a->n);
    for (; at + 8 <= end; at += 8) {
        for (int k = 0; k < 8; k++) {
            s[k] += (double)j->a->x[at + k] * (double)j->a->x[at + k];
        }
    }
    for (; at < end; at++) {
        s[0] += (double)j->a->x[at] * (double)j->a->x[at];
    }
    j->part[piece % ROUND] = ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}

typedef struct squares_round {
    squares j;
    int64_t first;
} squares_round;

static void squares_shifted(void *payload, int64_t i, int worker)
{
    squares_round *r = payload;
    squares_piece(&r->j, r->first + i, worker);
}

tsr_status TSR_SIMD(sum_squares)(tsr_queue *q, const tsr_sum_squares_args *a)
{
    int64_t count = pieces(a->n);
    squares_round r = { .j = { a, tsr_scratch(q, 0) } };
    for (r.first = 0; r.first < count; r.first += ROUND) {
        int64_t n = count - r.first < ROUND ? count - r.first : ROUND;
        tsr_parallel(q, n, squares_shifted, &r);
        for (int64_t i = 0; i < n; i++) {
            *a->out += r.j.part[i];
        }
    }
    return TSR_OK;
}
