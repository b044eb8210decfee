/* stored.cuh - weights in their stored formats, as f32. See tsr_weight in kernels/ops/matmul.h. Small formats are read
 * by moving exponent and mantissa to where f32 has them and multiplying by the power of two by which the biases differ:
 * exact, for subnormals too. */
#ifndef TSR_KERNELS_CUDA_STORED_CUH
#define TSR_KERNELS_CUDA_STORED_CUH

#include "kernels/cuda/cuda_priv.cuh"

static inline __device__ float tsr_of_bf16(uint32_t b)
{
    return __uint_as_float(b << 16);
}

static inline __device__ float tsr_of_f16(uint32_t h)
{
    uint32_t special = (h & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0; /* Inf and NaN */
    float v = __uint_as_float((h & 0x7fffu) << 13 | special) * 0x1p112f;
    return h & 0x8000u ? -v : v;
}

static inline __device__ float tsr_of_e4m3(uint32_t b)
{
    uint32_t nan = (b & 0x7fu) == 0x7fu ? 0x7f800000u : 0; /* no infinities */
    float v = __uint_as_float((b & 0x7fu) << 20 | nan) * 0x1p120f;
    return b & 0x80u ? -v : v;
}

static inline __device__ float tsr_of_e2m1(uint32_t b) /* the low four bits */
{
    float v = __uint_as_float((b & 7u) << 22) * 0x1p126f;
    return b & 8u ? -v : v;
}

static inline __device__ float tsr_of_e8m0(uint32_t b)
{
    return __uint_as_float(b == 0 ? 0x00400000u : b == 255 ? 0x7fc00000u : b << 23);
}

static inline __device__ float tsr_block_scale(const tsr_weight &w, int64_t r, int64_t c) /* F8_E4M3 */
{
    return ((const float *)w.scale)[r / 128 * ((w.cols + 127) / 128) + c / 128];
}

/* The weight in row r and column c. */
template <tsr_dtype D> static inline __device__ float tsr_weight_at(const tsr_weight &w, int64_t r, int64_t c)
{
    const int64_t i = r * w.cols + c;
    if constexpr (D == TSR_DT_F32) {
        return ((const float *)w.data)[i];
    } else if constexpr (D == TSR_DT_BF16) {
        return tsr_of_bf16(((const uint16_t *)w.data)[i]);
    } else if constexpr (D == TSR_DT_F16) {
        return tsr_of_f16(((const uint16_t *)w.data)[i]);
    } else if constexpr (D == TSR_DT_F8_E4M3) {
        return tsr_of_e4m3(((const uint8_t *)w.data)[i]) * tsr_block_scale(w, r, c);
    } else {
        static_assert(D == TSR_DT_MXFP4, "not a dtype of weights");
        return tsr_of_e2m1((uint32_t)((const uint8_t *)w.data)[i / 2] >> (c % 2 * 4)) *
               tsr_of_e8m0(((const uint8_t *)w.scale)[i / 32]);
    }
}

/* Columns c to c + 3 of row r at one go; c % 4 == 0, and tsr_weights_by_four said yes. */
template <tsr_dtype D>
static inline __device__ float4 tsr_weights_at(const tsr_weight &w, int64_t r, int64_t c)
{
    const int64_t i = r * w.cols + c;
    if constexpr (D == TSR_DT_F32) {
        return *(const float4 *)((const float *)w.data + i);
    } else if constexpr (D == TSR_DT_BF16) {
        uint2 v = *(const uint2 *)((const uint16_t *)w.data + i);
        return make_float4(tsr_of_bf16(v.x & 0xffffu), tsr_of_bf16(v.x >> 16), tsr_of_bf16(v.y & 0xffffu),
                           tsr_of_bf16(v.y >> 16));
    } else if constexpr (D == TSR_DT_F16) {
        uint2 v = *(const uint2 *)((const uint16_t *)w.data + i);
        return make_float4(tsr_of_f16(v.x & 0xffffu), tsr_of_f16(v.x >> 16), tsr_of_f16(v.y & 0xffffu),
                           tsr_of_f16(v.y >> 16));
    } else if constexpr (D == TSR_DT_F8_E4M3) {
        uint32_t v = *(const uint32_t *)((const uint8_t *)w.data + i);
        float s = tsr_block_scale(w, r, c);
        return make_float4(tsr_of_e4m3(v & 0xffu) * s, tsr_of_e4m3(v >> 8 & 0xffu) * s,
                           tsr_of_e4m3(v >> 16 & 0xffu) * s, tsr_of_e4m3(v >> 24) * s);
    } else {
        static_assert(D == TSR_DT_MXFP4, "not a dtype of weights");
        uint32_t v = *(const uint16_t *)((const uint8_t *)w.data + i / 2);
        float s = tsr_of_e8m0(((const uint8_t *)w.scale)[i / 32]);
        return make_float4(tsr_of_e2m1(v) * s, tsr_of_e2m1(v >> 4) * s, tsr_of_e2m1(v >> 8) * s,
                           tsr_of_e2m1(v >> 12) * s);
    }
}

/* Rows begin where four weights can be read at one go. */
static inline bool tsr_weights_by_four(const tsr_weight &w)
{
    const uintptr_t at = (uintptr_t)w.data;
    switch (w.dtype) {
    case TSR_DT_F32: return at % 16 == 0 && w.cols % 4 == 0;
    case TSR_DT_BF16:
    case TSR_DT_F16: return at % 8 == 0 && w.cols % 4 == 0;
    case TSR_DT_F8_E4M3: return at % 4 == 0 && w.cols % 4 == 0;
    default: return at % 2 == 0; /* MXFP4: rows of whole blocks of 32 */
    }
}

#endif
