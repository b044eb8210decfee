/* numeric.c - see numeric.h. Obvious, not fast. */
#include "kernels/numeric.h"

#include <float.h>
#include <math.h>
#include <string.h>

static float from_bits(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static uint32_t to_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

float tsr_bf16_to_f32(uint16_t x)
{
    return from_bits((uint32_t)x << 16);
}

uint16_t tsr_f32_to_bf16(float x)
{
    uint32_t u = to_bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) {
        return (uint16_t)((u >> 31) << 15 | 0x7fc0u);
    }
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >>
                      16); /* ties to even; carries into the exponent are right */
}

/* A small float by its parts: sign, exponent and mantissa bits, bias; ieee: all-ones exponent is Inf or NaN. */
static float small_to_f32(uint32_t x, unsigned ebits, unsigned mbits, int bias, bool ieee)
{
    uint32_t sign = x >> (ebits + mbits), e = (x >> mbits) & ((1u << ebits) - 1), m = x & ((1u << mbits) - 1);
    float v;
    if (ieee && e == (1u << ebits) - 1) {
        return from_bits(sign << 31 | 0x7f800000u | m << (23 - mbits));
    }
    if (e == 0) {
        v = ldexpf((float)m, 1 - bias - (int)mbits);
    } else {
        v = ldexpf((float)(m | 1u << mbits), (int)e - bias - (int)mbits);
    }
    return sign ? -v : v;
}

float tsr_f16_to_f32(uint16_t x)
{
    return small_to_f32(x, 5, 10, 15, true);
}

uint16_t tsr_f32_to_f16(float x)
{
    uint32_t u = to_bits(x), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u) {
        return (uint16_t)(sign | 0x7e00u);
    }
    if (a >= 0x477ff000u) { /* 65520 and more rounds to infinity */
        return (uint16_t)(sign | 0x7c00u);
    }
    if (a >= 0x38800000u) { /* normal: 2^-14 and more */
        uint32_t r = a - 0x38000000u;
        return (uint16_t)(sign | (r + 0xfffu + ((r >> 13) & 1u)) >> 13);
    }
    float m = fabsf(x) * 0x1p24f; /* in units of the smallest subnormal: exact */
    return (uint16_t)(sign | (uint32_t)rintf(m));
}

float tsr_f8_to_f32(tsr_dtype dt, uint8_t x)
{
    switch (dt) {
    case TSR_DT_F8_E4M3:
        return (x & 0x7f) == 0x7f ? from_bits((uint32_t)(x >> 7) << 31 | 0x7fc00000u)
                                  : small_to_f32(x, 4, 3, 7, false);
    case TSR_DT_F8_E5M2: return small_to_f32(x, 5, 2, 15, true);
    case TSR_DT_F8_E4M3FNUZ: return x == 0x80 ? from_bits(0x7fc00000u) : small_to_f32(x, 4, 3, 8, false);
    case TSR_DT_F8_E5M2FNUZ: return x == 0x80 ? from_bits(0x7fc00000u) : small_to_f32(x, 5, 2, 16, false);
    default: tsr_panic_("not an 8-bit float dtype", __FILE__, __LINE__);
    }
}

float tsr_e8m0_to_f32(uint8_t x)
{
    return x == 255 ? from_bits(0x7fc00000u) : x == 0 ? from_bits(0x00400000u) : from_bits((uint32_t)x << 23);
}

float tsr_e2m1_to_f32(uint8_t x)
{
    static const float values[16] = { 0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6 };
    return values[x & 15];
}

#define EACH(type, expr)                                                                                     \
    for (uint64_t i = 0; i < n; i++) {                                                                       \
        type v;                                                                                              \
        memcpy(&v, p + (first + i) * sizeof v, sizeof v);                                                    \
        dst[i] = (double)(expr);                                                                             \
    }                                                                                                        \
    return

void tsr_to_f64(tsr_dtype dt, const void *src, uint64_t first, uint64_t n, double *dst)
{
    const uint8_t *p = src;
    switch (dt) {
    case TSR_DT_F64: EACH(double, v);
    case TSR_DT_F32: EACH(float, v);
    case TSR_DT_F16: EACH(uint16_t, tsr_f16_to_f32(v));
    case TSR_DT_BF16: EACH(uint16_t, tsr_bf16_to_f32(v));
    case TSR_DT_F8_E4M3:
    case TSR_DT_F8_E5M2:
    case TSR_DT_F8_E4M3FNUZ:
    case TSR_DT_F8_E5M2FNUZ: EACH(uint8_t, tsr_f8_to_f32(dt, v));
    case TSR_DT_E8M0: EACH(uint8_t, tsr_e8m0_to_f32(v));
    case TSR_DT_F4_E2M1:
    case TSR_DT_MXFP4:
        for (uint64_t i = 0; i < n; i++) {
            uint8_t b = p[(first + i) / 2];
            dst[i] = (double)tsr_e2m1_to_f32((first + i) % 2 == 0 ? b : b >> 4);
        }
        return;
    case TSR_DT_I64: EACH(int64_t, v);
    case TSR_DT_I32: EACH(int32_t, v);
    case TSR_DT_I16: EACH(int16_t, v);
    case TSR_DT_I8: EACH(int8_t, v);
    case TSR_DT_U64: EACH(uint64_t, v);
    case TSR_DT_U32: EACH(uint32_t, v);
    case TSR_DT_U16: EACH(uint16_t, v);
    case TSR_DT_U8:
    case TSR_DT_BOOL: EACH(uint8_t, v);
    default: tsr_panic_("not a dtype", __FILE__, __LINE__);
    }
}

void tsr_mxfp4_to_f32(const uint8_t *packed, const uint8_t *scales, int64_t rows, int64_t cols, bool saturate,
                      float *dst, int64_t *overflow_row)
{
    TSR_ASSERT(cols % 32 == 0);
    if (overflow_row != NULL) {
        *overflow_row = -1;
    }
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < cols; c++) {
            uint8_t byte = packed[r * (cols / 2) + c / 2], scale = scales[r * (cols / 32) + c / 32];
            double v = (double)tsr_e2m1_to_f32(c % 2 == 0 ? byte : byte >> 4) *
                       (double)tsr_e8m0_to_f32(scale);
            if (fabs(v) > (double)FLT_MAX) { /* a finite code times a finite scale */
                if (overflow_row != NULL && *overflow_row < 0) {
                    *overflow_row = r;
                }
                v = saturate ? copysign((double)FLT_MAX, v) : v;
            }
            dst[r * cols + c] = (float)v;
        }
    }
}

void tsr_from_f32(tsr_dtype dt, const float *src, uint64_t n, void *dst, uint64_t *to_inf)
{
    uint8_t *p = dst;
    uint64_t inf = 0;
    for (uint64_t i = 0; i < n; i++) {
        uint16_t h = 0;
        if (dt == TSR_DT_F32) {
            memcpy(p + i * 4, &src[i], 4);
            continue;
        }
        TSR_ASSERT(dt == TSR_DT_BF16 || dt == TSR_DT_F16);
        h = dt == TSR_DT_BF16 ? tsr_f32_to_bf16(src[i]) : tsr_f32_to_f16(src[i]);
        inf += !isinf(src[i]) && (h & 0x7fffu) == (dt == TSR_DT_BF16 ? 0x7f80u : 0x7c00u);
        memcpy(p + i * 2, &h, 2);
    }
    if (to_inf != NULL) {
        *to_inf = inf;
    }
}
