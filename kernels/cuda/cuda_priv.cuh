/* cuda_priv.cuh - for kernels/cuda only: the queue, launching, and sums over the threads of a warp or block.
 *
 * These files have two compilers: nvcc, and a C++ compiler that runs the kernels on the CPU for tests (tests/cuda-emu).
 * So kernels are launched by TSR_LAUNCH, tensor cores and other inline PTX belong in functions with a plain body beside
 * them, and what a file uses of CUDA must be in tests/cuda-emu/cuda_runtime.h.
 *
 * A kernel is `static __global__`, takes its arguments by value, and walks its work in steps of gridDim: a grid is cut
 * at TSR_GRID_MAX blocks. A launcher is `extern "C" tsr_status tsr_cuda_<op>(...)`, picks variant and grid, and ends with
 * tsr_launched; it never allocates or waits. Indices into tensors are 64 bits wide. */
#ifndef TSR_KERNELS_CUDA_PRIV_CUH
#define TSR_KERNELS_CUDA_PRIV_CUH

#include "kernels/backend_priv.h"

#include <cuda_runtime.h>

struct tsr_queue {
    cudaStream_t stream;
    tsr_backend *owner;
    char trouble[256]; /* the first failure, in words; owner->trouble points here then */
};

/* TSR_OK as long as nothing has failed; else TSR_E_IO. The first failure is kept in words. */
tsr_status tsr_cuda_status(tsr_queue *q, cudaError_t e, const char *doing);

/* After each launch: whether it began. Failures while it runs are seen by the next copy or sync. */
static inline tsr_status tsr_launched(tsr_queue *q, const char *op)
{
    return tsr_cuda_status(q, cudaGetLastError(), op);
}

#ifndef TSR_LAUNCH /* the emulation has its own */
#define TSR_LAUNCH(kernel, blocks, threads, q, ...)                                                          \
    kernel<<<(blocks), (threads), 0, (q)->stream>>>(__VA_ARGS__)
#endif

#ifndef TSR_GRID_MAX
#define TSR_GRID_MAX (1 << 30) /* the hardware's limit is 2^31 - 1 */
#endif

static inline unsigned tsr_grid(int64_t blocks)
{
    return (unsigned)(blocks < TSR_GRID_MAX ? blocks : TSR_GRID_MAX);
}

/* May be read and written four floats at a time, row by row. */
static inline bool tsr_by_four(const void *p, int64_t stride)
{
    return (uintptr_t)p % 16 == 0 && stride % 4 == 0;
}

/* The sum over a whole warp, in each of its lanes. */
static inline __device__ float tsr_warp_sum(float v)
{
    for (int step = 16; step > 0; step /= 2) {
        v += __shfl_xor_sync(0xffffffffu, v, step);
    }
    return v;
}

/* The sum over a block of WARPS whole warps, in each of its threads; part is shared and free again afterwards. */
template <int WARPS> static inline __device__ float tsr_block_sum(float v, float (&part)[WARPS])
{
    v = tsr_warp_sum(v);
    if (WARPS == 1) {
        return v;
    }
    if (threadIdx.x % 32 == 0) {
        part[threadIdx.x / 32] = v;
    }
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < WARPS; i++) {
        sum += part[i];
    }
    __syncthreads();
    return sum;
}

#endif
