/* norm.cu - norms on the GPU. Contracts: kernels/ops/norm.h. */
#include "kernels/cuda/cuda_priv.cuh"

namespace
{

constexpr int WARPS = 8;            /* of a block */
constexpr int64_t SHORT_ROW = 1024; /* a warp for each such row, a block for each longer one */

/* `TEAM` warps to a row: one, or the whole block. In place is safe: a thread overwrites only what it read, after the
 * sum, and no thread reads another's part of the row again. */
template <int TEAM, bool BY_FOUR>
__global__ void __launch_bounds__(WARPS * 32, 4) rms_rows(tsr_rmsnorm_fwd_args a)
{
    __shared__ float part[WARPS];
    constexpr int THREADS = TEAM * 32, ROWS = WARPS / TEAM;
    const int me = (int)threadIdx.x % THREADS;
    for (int64_t i = (int64_t)blockIdx.x * ROWS + threadIdx.x / THREADS; i < a.n;
         i += (int64_t)gridDim.x * ROWS) {
        const float *x = a.x + i * a.x_stride;
        float *y = a.y + i * a.y_stride, sum = 0;
        if constexpr (BY_FOUR) {
            for (int64_t j = me; j < a.d / 4; j += THREADS) {
                float4 v = ((const float4 *)x)[j];
                sum += v.x * v.x + v.y * v.y + (v.z * v.z + v.w * v.w);
            }
        } else {
            for (int64_t j = me; j < a.d; j += THREADS) {
                sum += x[j] * x[j];
            }
        }
        if constexpr (TEAM == 1) {
            sum = tsr_warp_sum(sum);
        } else {
            sum = tsr_block_sum(sum, part);
        }
        const float r = 1.0f / sqrtf(sum / (float)a.d + a.eps);
        if constexpr (BY_FOUR) {
            for (int64_t j = me; j < a.d / 4; j += THREADS) {
                float4 v = ((const float4 *)x)[j], w = make_float4(1, 1, 1, 1);
                if (a.w != NULL) {
                    w = ((const float4 *)a.w)[j];
                }
                ((float4 *)y)[j] = make_float4(v.x * r * w.x, v.y * r * w.y, v.z * r * w.z, v.w * r * w.w);
            }
        } else {
            for (int64_t j = me; j < a.d; j += THREADS) {
                y[j] = x[j] * r * (a.w != NULL ? a.w[j] : 1.0f);
            }
        }
        if (a.rstd != NULL && me == 0) {
            a.rstd[i] = r;
        }
    }
}

} // namespace

extern "C" tsr_status tsr_cuda_rmsnorm_fwd(tsr_queue *q, const tsr_rmsnorm_fwd_args *a)
{
    if (a->n == 0) {
        return TSR_OK;
    }
    const bool by_four = a->d % 4 == 0 && tsr_by_four(a->x, a->x_stride) && tsr_by_four(a->y, a->y_stride) &&
                         tsr_by_four(a->w, 0);
    const unsigned blocks = tsr_grid(a->d <= SHORT_ROW ? (a->n + WARPS - 1) / WARPS : a->n);
    if (a->d <= SHORT_ROW && by_four) {
        TSR_LAUNCH((rms_rows<1, true>), blocks, WARPS * 32, q, *a);
    } else if (a->d <= SHORT_ROW) {
        TSR_LAUNCH((rms_rows<1, false>), blocks, WARPS * 32, q, *a);
    } else if (by_four) {
        TSR_LAUNCH((rms_rows<WARPS, true>), blocks, WARPS * 32, q, *a);
    } else {
        TSR_LAUNCH((rms_rows<WARPS, false>), blocks, WARPS * 32, q, *a);
    }
    return tsr_launched(q, "rmsnorm_fwd");
}
