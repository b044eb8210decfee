/* cuda_runtime.h - stands in for CUDA's own header when kernels/cuda is compiled for the CPU: see emu.h. Has what those
 * files use and grows with them. */
#ifndef TSR_TESTS_CUDA_RUNTIME_H
#define TSR_TESTS_CUDA_RUNTIME_H

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

/* ---- the language ---------------------------------------------------------------------------------------------- */

#define __global__ static
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ thread_local /* a block stays on its thread of the system */

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_)
    {
    }
};

#define EMU_VECTOR(T, name)                                                                                  \
    struct alignas(2 * sizeof(T)) name##2                                                                    \
    {                                                                                                        \
        T x, y;                                                                                              \
    };                                                                                                       \
    struct alignas(4 * sizeof(T)) name##4                                                                    \
    {                                                                                                        \
        T x, y, z, w;                                                                                        \
    };                                                                                                       \
    static inline name##2 make_##name##2(T x, T y)                                                           \
    {                                                                                                        \
        return { x, y };                                                                                     \
    }                                                                                                        \
    static inline name##4 make_##name##4(T x, T y, T z, T w)                                                 \
    {                                                                                                        \
        return { x, y, z, w };                                                                               \
    }
EMU_VECTOR(float, float)
EMU_VECTOR(int, int)
EMU_VECTOR(unsigned, uint)

/* ---- threads, barriers, warps: emu.cc -------------------------------------------------------------------------- */

namespace emu
{

struct place {
    uint3 thread, block;
    dim3 threads, blocks;
};
const place &here();
int lane();
void barrier(int line);
/* Waits for the lanes of mask, then gives the value that lane `from` of this warp brought. */
uint64_t exchange(unsigned mask, uint64_t value, int from);
/* Likewise; bit i says what lane i brought. */
unsigned ballot(unsigned mask, bool value);

template <class T> T shuffle(unsigned mask, T v, int from)
{
    static_assert(sizeof(T) <= 8, "shuffles take up to 64 bits");
    uint64_t bits = 0;
    memcpy(&bits, &v, sizeof v);
    bits = exchange(mask, bits, from);
    memcpy(&v, &bits, sizeof v);
    return v;
}

} // namespace emu

#define threadIdx (emu::here().thread)
#define blockIdx (emu::here().block)
#define blockDim (emu::here().threads)
#define gridDim (emu::here().blocks)
#define warpSize 32
#define __syncthreads() emu::barrier(__LINE__)

static inline void __syncwarp(unsigned mask = 0xffffffffu)
{
    (void)emu::ballot(mask, false);
}

static inline unsigned __ballot_sync(unsigned mask, int v)
{
    return emu::ballot(mask, v != 0);
}

template <class T> static inline T __shfl_sync(unsigned mask, T v, int from)
{
    return emu::shuffle(mask, v, from & 31);
}

template <class T> static inline T __shfl_xor_sync(unsigned mask, T v, int with)
{
    return emu::shuffle(mask, v, emu::lane() ^ with);
}

template <class T> static inline T __shfl_down_sync(unsigned mask, T v, unsigned by)
{
    int from = emu::lane() + (int)by;
    return emu::shuffle(mask, v, from < 32 ? from : emu::lane());
}

/* ---- arithmetic ------------------------------------------------------------------------------------------------ */

static inline float __uint_as_float(unsigned u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static inline unsigned __float_as_uint(float f)
{
    unsigned u;
    memcpy(&u, &f, sizeof u);
    return u;
}

/* ---- the runtime: emu.cc --------------------------------------------------------------------------------------- */

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorNoDevice = 100,
    cudaErrorLaunchFailure = 719
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2 };
enum { cudaStreamNonBlocking = 1 };
typedef struct emu_stream *cudaStream_t;

const char *cudaGetErrorString(cudaError_t e);
cudaError_t cudaGetLastError();
cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t s);
cudaError_t cudaStreamSynchronize(cudaStream_t s);
cudaError_t cudaMalloc(void **p, size_t bytes);
cudaError_t cudaFree(void *p);
cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind, cudaStream_t s);
cudaError_t cudaMemsetAsync(void *dst, int value, size_t bytes, cudaStream_t s);

namespace emu
{

void launch(cudaStream_t s, dim3 blocks, dim3 threads, std::function<void()> thread);

} // namespace emu

/* The arguments are copied, as by <<<>>>. */
#define TSR_LAUNCH(kernel, blocks, threads, q, ...)                                                          \
    emu::launch((q)->stream, blocks, threads, emu::bind(kernel __VA_OPT__(, ) __VA_ARGS__))

namespace emu
{

template <class... P, class... A> std::function<void()> bind(void (*kernel)(P...), A... a)
{
    return [=] { kernel(a...); };
}

} // namespace emu

#endif
