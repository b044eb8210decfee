/* matmul.cu - matrix products on the GPU, in f32 arithmetic. Contracts: kernels/ops/matmul.h.
 *
 * Many rows of x go by tiles of y that are kept in registers, with tiles of x and W in shared memory, so that each weight
 * is expanded once for 64 rows. Few rows, as when one token is generated, are bound by reading W: a warp takes a row of
 * it, and every weight is used for all rows of x as it comes. */
#include "kernels/cuda/stored.cuh"

namespace
{

constexpr int THREADS = 256;
constexpr int TILE = 64;        /* rows and columns of a tile of y */
constexpr int DEPTH = 32;       /* columns of x and W in shared memory at a time */
constexpr int PITCH = TILE + 4; /* keeps four floats aligned and spreads rows over the banks */
constexpr int64_t CHAIN = 256; /* terms summed before the sum is added to others: bounds the rounding error */
constexpr int FEW = 8;         /* rows of x that go without tiles */

struct product {
    tsr_gemm_nt_args a;
    int64_t xs, ys; /* strides, no longer 0 */
    bool x_by_four, w_by_four;
};

/* Columns c to c + 3 of a row of x, zeros where there are none. */
__device__ float4 x_at(const product &p, int64_t i, int64_t c)
{
    const float *x = p.a.x + i * p.xs + c;
    const int64_t k = p.a.w.cols - c;
    if (p.x_by_four && k >= 4) {
        return *(const float4 *)x;
    }
    return make_float4(k > 0 ? x[0] : 0, k > 1 ? x[1] : 0, k > 2 ? x[2] : 0, k > 3 ? x[3] : 0);
}

template <tsr_dtype D> __device__ float4 w_at(const product &p, int64_t j, int64_t c)
{
    const tsr_weight &w = p.a.w;
    const int64_t k = w.cols - c;
    if (p.w_by_four && k >= 4) {
        return tsr_weights_at<D>(w, j, c);
    }
    return make_float4(k > 0 ? tsr_weight_at<D>(w, j, c) : 0, k > 1 ? tsr_weight_at<D>(w, j, c + 1) : 0,
                       k > 2 ? tsr_weight_at<D>(w, j, c + 2) : 0, k > 3 ? tsr_weight_at<D>(w, j, c + 3) : 0);
}

__device__ void put(const product &p, int64_t i, int64_t j, float sum)
{
    float *y = p.a.y + i * p.ys + j;
    *y = p.a.accumulate ? *y + sum : sum;
}

using slab = float[DEPTH][PITCH];

/* Four columns of one row of x or W, to where its column of a slab is. */
__device__ void spread(slab &s, int at, int row, float4 v)
{
    s[at][row] = v.x;
    s[at + 1][row] = v.y;
    s[at + 2][row] = v.z;
    s[at + 3][row] = v.w;
}

/* Columns c to c + DEPTH - 1 of the rows of a tile: eight threads a row, so that a warp reads whole lines. */
template <tsr_dtype D>
__device__ void fill(const product &p, slab &x, slab &w, int64_t i0, int64_t j0, int64_t c)
{
    const int at = (int)threadIdx.x % 8 * 4;
    for (int row = (int)threadIdx.x / 8; row < TILE; row += THREADS / 8) {
        const float4 none = make_float4(0, 0, 0, 0);
        spread(x, at, row, i0 + row < p.a.m ? x_at(p, i0 + row, c + at) : none);
        spread(w, at, row, j0 + row < p.a.w.rows ? w_at<D>(p, j0 + row, c + at) : none);
    }
}

/* Each thread has 4 x 4 elements of the tile. */
__device__ void multiply(float (&sum)[4][4], const slab &x, const slab &w)
{
    const int col = (int)threadIdx.x % 16 * 4, row = (int)threadIdx.x / 16 * 4;
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
        const float4 u = *(const float4 *)&x[d][row], v = *(const float4 *)&w[d][col];
        const float us[4] = { u.x, u.y, u.z, u.w }, vs[4] = { v.x, v.y, v.z, v.w };
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                sum[i][j] += us[i] * vs[j];
            }
        }
    }
}

template <tsr_dtype D> __device__ void tile(const product &p, slab &x, slab &w, int64_t i0, int64_t j0)
{
    float total[4][4] = {};
    for (int64_t c0 = 0; c0 < p.a.w.cols; c0 += CHAIN) {
        float sum[4][4] = {};
        for (int64_t c = c0; c < c0 + CHAIN && c < p.a.w.cols; c += DEPTH) {
            fill<D>(p, x, w, i0, j0, c);
            __syncthreads();
            multiply(sum, x, w);
            __syncthreads();
        }
        for (int i = 0; i < 16; i++) {
            total[i / 4][i % 4] += sum[i / 4][i % 4];
        }
    }
    for (int i = 0; i < 16; i++) {
        const int64_t row = i0 + threadIdx.x / 16 * 4 + i / 4, col = j0 + threadIdx.x % 16 * 4 + i % 4;
        if (row < p.a.m && col < p.a.w.rows) {
            put(p, row, col, total[i / 4][i % 4]);
        }
    }
}

/* Tiles below each other come first: they share rows of W. */
template <tsr_dtype D> __global__ void __launch_bounds__(THREADS) nt_tiles(product p)
{
    alignas(16) __shared__ slab x, w;
    const int64_t down = (p.a.m + TILE - 1) / TILE, tiles = down * ((p.a.w.rows + TILE - 1) / TILE);
    for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
        tile<D>(p, x, w, t % down * TILE, t / down * TILE);
    }
}

template <tsr_dtype D> __global__ void __launch_bounds__(THREADS) nt_few(product p)
{
    const int lane = (int)threadIdx.x % 32;
    for (int64_t j = (int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32; j < p.a.w.rows;
         j += (int64_t)gridDim.x * (THREADS / 32)) {
        float sum[FEW] = {};
        for (int64_t c = lane * 4; c < p.a.w.cols; c += 32 * 4) {
            const float4 w = w_at<D>(p, j, c);
#pragma unroll
            for (int i = 0; i < FEW; i++) {
                if (i < p.a.m) {
                    const float4 x = x_at(p, i, c);
                    sum[i] += x.x * w.x + x.y * w.y + (x.z * w.z + x.w * w.w);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < FEW; i++) {
            if (i < p.a.m) {
                const float all = tsr_warp_sum(sum[i]);
                if (lane == 0) {
                    put(p, i, j, all);
                }
            }
        }
    }
}

template <tsr_dtype D> void launch(tsr_queue *q, const product &p)
{
    const int64_t m = p.a.m, n = p.a.w.rows;
    if (m <= FEW) {
        TSR_LAUNCH(nt_few<D>, tsr_grid((n + THREADS / 32 - 1) / (THREADS / 32)), THREADS, q, p);
    } else {
        TSR_LAUNCH(nt_tiles<D>, tsr_grid((m + TILE - 1) / TILE * ((n + TILE - 1) / TILE)), THREADS, q, p);
    }
}

} // namespace

extern "C" tsr_status tsr_cuda_gemm_nt(tsr_queue *q, const tsr_gemm_nt_args *a)
{
    if (a->m == 0) {
        return TSR_OK;
    }
    product p = { *a, a->x_stride > 0 ? a->x_stride : a->w.cols, a->y_stride > 0 ? a->y_stride : a->w.rows,
                  false, tsr_weights_by_four(a->w) };
    p.x_by_four = tsr_by_four(a->x, p.xs);
    switch (a->w.dtype) {
    case TSR_DT_F32: launch<TSR_DT_F32>(q, p); break;
    case TSR_DT_BF16: launch<TSR_DT_BF16>(q, p); break;
    case TSR_DT_F16: launch<TSR_DT_F16>(q, p); break;
    case TSR_DT_F8_E4M3: launch<TSR_DT_F8_E4M3>(q, p); break;
    default: launch<TSR_DT_MXFP4>(q, p); break; /* the contract knows no other */
    }
    return tsr_launched(q, "gemm_nt");
}
