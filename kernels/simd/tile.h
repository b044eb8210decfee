/* tile.h - the one inner loop of matrix products: a tile of outputs kept in registers.
 *
 * c[r][l] (+)= sum over t of a(r, t) b[t][l]: a is read one number at a time, b by vectors. TILE_ROWS x TILE_LANES
 * accumulators are enough for the multipliers to be busy all the time, and few enough for the registers. */
#ifndef TSR_KERNELS_SIMD_TILE_H
#define TSR_KERNELS_SIMD_TILE_H

#include "kernels/simd/stored.h"

#define TILE_ROWS (VL == 16 ? 12 : 6)
#define TILE_LANES (2 * VL)
#define TILE_T 128                  /* steps that are summed in one go */
#define TILE_A_STRIDE (TILE_T + 16) /* of rows of a: no power of two, for the cache's sake */

/* b: steps TILE_LANES apart, of which nv vectors are used. */
ALWAYS void tile_(const int rows, const int nv, const float *a, const int64_t row_step, const int64_t t_step,
                  const float *b, int64_t steps, float *c, int64_t c_stride, bool add)
{
    vf sum[TILE_ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        sum[r][0] = sum[r][1] = v_zero();
        for (int v = 0; v < nv * VL; v += 16) { /* it will be wanted at the end */
            _mm_prefetch((const char *)(c + r * c_stride + v), _MM_HINT_T0);
        }
    }
    for (int64_t t = 0; t < steps; t++) {
        vf b0 = v_load(b), b1 = nv > 1 ? v_load(b + VL) : v_zero();
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            vf x = v_set1(a[r * row_step]);
            sum[r][0] = v_fma(x, b0, sum[r][0]);
            sum[r][1] = nv > 1 ? v_fma(x, b1, sum[r][1]) : sum[r][1];
        }
        a += t_step;
        b += TILE_LANES;
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        for (int v = 0; v < nv; v++) {
            float *p = c + r * c_stride + v * VL;
            v_store(p, add ? (vf)(v_load(p) + sum[r][v]) : sum[r][v]);
        }
    }
}

typedef void tile_fn(const float *a, const float *b, int64_t steps, float *c, int64_t c_stride, bool add);

#define TILE(name, rows, nv, row_step, t_step)                                                               \
    static __attribute__((noinline, unused)) void name(const float *a, const float *b, int64_t steps,        \
                                                       float *c, int64_t c_stride, bool add)                 \
    {                                                                                                        \
        tile_(rows, nv, a, row_step, t_step, b, steps, c, c_stride, add);                                    \
    }
/* a by rows, TILE_A_STRIDE apart. */
TILE(tile_rows, TILE_ROWS, 2, TILE_A_STRIDE, 1)
TILE(tile_rows_narrow, TILE_ROWS, 1, TILE_A_STRIDE, 1)
TILE(tile_rows_half, TILE_ROWS / 2, 2, TILE_A_STRIDE, 1)
/* a by steps, TILE_ROWS numbers each. */
TILE(tile_steps, TILE_ROWS, 2, 1, TILE_ROWS)
TILE(tile_steps_half, TILE_ROWS / 2, 2, 1, TILE_ROWS)
#undef TILE

/* The same for a corner of a matrix: `rows` x `lanes` of the tile exist. */
static inline void tile_edge(tile_fn *fn, const float *a, const float *b, int64_t steps, float *c,
                             int64_t c_stride, bool add, int64_t rows, int64_t lanes)
{
    _Alignas(64) float whole[TILE_ROWS * TILE_LANES];
    fn(a, b, steps, whole, TILE_LANES, false);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t l = 0; l < lanes; l++) {
            float *p = &c[r * c_stride + l];
            *p = add ? *p + whole[r * TILE_LANES + l] : whole[r * TILE_LANES + l];
        }
    }
}

#endif
