/* stored.h - weights in their stored formats, expanded in registers. See tsr_weight in kernels/ops/matmul.h.
 *
 * Rows of most formats are read VL columns at a time, in order. MXFP4 is read by groups of GROUP = 8 VL columns, VL
 * words of eight codes each: a vector then holds one code of each word, columns s, s + 8, s + 16 ... of the group. Sums
 * over columns do not mind, so what a group is multiplied with is put into that order once ("stored order": position
 * s L + j of a group is its column 8 j + s, with L = VL; in the last group, which may be short, L is the number of its
 * words, or VL again where short vectors are in the way). */
#ifndef TSR_KERNELS_SIMD_STORED_H
#define TSR_KERNELS_SIMD_STORED_H

#include "kernels/simd/simd.h"

#define ALWAYS static inline __attribute__((always_inline))
#define GROUP (8 * VL)

/* ---- pieces that the two instruction sets write differently ---------------------------------------------------- */

#ifdef __AVX512F__
ALWAYS vf f16_vec(const void *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256(p));
}

/* E4M3 bits moved to where f16 keeps them: the value times 2^-8; f16 knows the subnormals. */
ALWAYS vf e4m3_vec(const void *p)
{
    __m256i b = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(p)), 7);
    b = _mm256_and_si256(b, _mm256_set1_epi16((short)0xbfff));
    __m256i m = _mm256_set1_epi16(0x3f80);
    __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(b, m), m);
    return _mm512_cvtph_ps(_mm256_or_si256(b, _mm256_and_si256(nan, _mm256_set1_epi16(0x7e00)))) *
           v_set1(256.0f);
}

ALWAYS vi mx_codes(const void *p, int64_t blocks) /* 16 bytes a block; what is not there reads as 0 */
{
    return blocks >= 4 ? _mm512_loadu_si512(p)
                       : _mm512_maskz_loadu_epi32((__mmask16)((1u << (4 * blocks)) - 1), p);
}

/* s[i] for the four words of block i. */
ALWAYS vf mx_spread(__m128 s)
{
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
                                 _mm512_castps128_ps512(s));
}

ALWAYS vf mx_value(vi codes, int s) /* code s of each word */
{
    vf table = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    return _mm512_permutexvar_ps(s > 0 ? _mm512_srli_epi32(codes, (unsigned)(4 * s)) : codes, table);
}

ALWAYS vi mx_bytes(const void *p) /* VL bytes, one a word */
{
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(p));
}

ALWAYS void v_interleave(vf even, vf odd, vf *first, vf *second)
{
    *first = _mm512_permutex2var_ps(
        even, _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23), odd);
    *second = _mm512_permutex2var_ps(
        even, _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31), odd);
}
/* Code s of each word, for the eight s. Two at once: the upper halves of words are bf16. Multiplying shifts, on a unit
 * that has nothing else to do here. */
ALWAYS void mx_values(vi codes, vf v[8])
{
    const int a = 0x3f000000, b = 0x3fc03f80, c = 0x40404000, d = 0x40c04080, sign = (int)0x80008000;
    vi table = _mm512_setr_epi32(a, b, c, d, a | sign, b | sign, c | sign, d | sign, a, b, c, d, a | sign,
                                 b | sign, c | sign, d | sign);
#pragma GCC unroll 4
    for (int s = 0; s < 4; s++) {
        vi index = s > 0 ? _mm512_mulhi_epu16(codes, _mm512_set1_epi16((short)(1 << (16 - 4 * s)))) : codes;
        vi two = _mm512_permutexvar_epi16(index, table);
        v[s] = _mm512_castsi512_ps(_mm512_slli_epi32(two, 16));
        v[s + 4] = _mm512_castsi512_ps(_mm512_and_si512(two, _mm512_set1_epi32((int)0xffff0000)));
    }
}
#define MX_UNIT 1.0f /* mx_values gives multiples of this */
#else
ALWAYS vf f16_vec(const void *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128(p));
}

ALWAYS vf e4m3_vec(const void *p)
{
    __m128i b = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64(p)), 7);
    b = _mm_and_si128(b, _mm_set1_epi16((short)0xbfff));
    __m128i m = _mm_set1_epi16(0x3f80), nan = _mm_cmpeq_epi16(_mm_and_si128(b, m), m);
    return _mm256_cvtph_ps(_mm_or_si128(b, _mm_and_si128(nan, _mm_set1_epi16(0x7e00)))) * v_set1(256.0f);
}

ALWAYS vi mx_codes(const void *p, int64_t blocks)
{
    return blocks >= 2 ? _mm256_loadu_si256(p) : _mm256_zextsi128_si256(_mm_loadu_si128(p));
}

ALWAYS vf mx_spread(__m128 s)
{
    return _mm256_permutevar8x32_ps(_mm256_castps128_ps256(s), _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
}

ALWAYS vf mx_value(vi codes, int s)
{
    vf table = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
    vf size = _mm256_permutevar8x32_ps(table, s > 0 ? _mm256_srli_epi32(codes, 4 * s) : codes);
    vf sign = _mm256_castsi256_ps(s < 7 ? _mm256_slli_epi32(codes, 28 - 4 * s) : codes);
    return _mm256_xor_ps(size, _mm256_and_ps(sign, _mm256_set1_ps(-0.0f)));
}

/* Code s of each word, for the eight s, times MX_UNIT: doubled they are whole numbers, and those in the top byte of a
 * word need no moving down. */
ALWAYS void mx_values(vi codes, vf v[8])
{
    const __m256i low = _mm256_set1_epi8(15), top = _mm256_set1_epi32((int)0xff000000);
    const __m256i table = _mm256_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12, 0, 1, 2,
                                           3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    __m256i half[2] = { _mm256_shuffle_epi8(table, _mm256_and_si256(codes, low)),
                        _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi32(codes, 4), low)) };
#pragma GCC unroll 8
    for (int s = 0; s < 8; s++) {
        __m256i b = s < 6 ? _mm256_slli_epi32(half[s % 2], 24 - s / 2 * 8) : half[s % 2];
        v[s] = _mm256_cvtepi32_ps(s < 2 ? b : _mm256_and_si256(b, top));
    }
}
#define MX_UNIT 33554432.0f /* 2^25 */

ALWAYS vi mx_bytes(const void *p)
{
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(p));
}

ALWAYS void v_interleave(vf even, vf odd, vf *first, vf *second)
{
    vf low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
    *first = _mm256_permute2f128_ps(low, high, 0x20);
    *second = _mm256_permute2f128_ps(low, high, 0x31);
}
#endif

/* ---- MXFP4 ------------------------------------------------------------------------------------------------------ */

/* Four E8M0 scales: 0 is the subnormal 2^-127, 255 is NaN. */
ALWAYS __m128 mx_scales(uint32_t four)
{
    __m128i s = _mm_cvtepu8_epi32(_mm_cvtsi32_si128((int)four));
    __m128i bits = _mm_max_epi32(_mm_slli_epi32(s, 23), _mm_set1_epi32(0x00400000));
    __m128i nan = _mm_srli_epi32(_mm_cmpeq_epi32(s, _mm_set1_epi32(255)), 1);
    return _mm_castsi128_ps(_mm_or_si128(bits, nan));
}

/* The codes and scales of the group that starts at column c of a row of `cols`. */
ALWAYS void mx_group(const char *row, const char *scale, int64_t c, int64_t cols, vi *codes, vf *scales)
{
    int64_t blocks = (cols - c) / 32;
    uint32_t s = 0;
    if (blocks >= VL / 4) {
        memcpy(&s, scale + c / 32, VL / 4);
    } else {
        for (int64_t i = 0; i < blocks; i++) {
            s |= (uint32_t)(uint8_t)scale[c / 32 + i] << (8 * i);
        }
    }
    *codes = mx_codes(row + c / 2, blocks);
    *scales = mx_spread(mx_scales(s));
}

/* ---- any format -------------------------------------------------------------------------------------------------- */

/* VL columns from c on of a row of any format but MXFP4. scale: of this row's blocks (F8_E4M3). */
ALWAYS vf stored_vec(const tsr_dtype dtype, const char *row, const char *scale, int64_t c)
{
    switch (dtype) {
    case TSR_DT_F32: return v_load((const float *)(const void *)row + c);
    case TSR_DT_BF16: return v_bf16((const uint16_t *)(const void *)row + c);
    case TSR_DT_F16: return f16_vec(row + 2 * c);
    default: return e4m3_vec(row + c) * v_set1(((const float *)(const void *)scale)[c / 128]);
    }
}

ALWAYS int64_t stored_bytes(const tsr_dtype dtype)
{
    return dtype == TSR_DT_F32 ? 4 : dtype == TSR_DT_F8_E4M3 ? 1 : 2;
}

/* The first n of them, n in [0, VL): the other lanes are 0. */
ALWAYS vf stored_vec_n(const tsr_dtype dtype, const char *row, const char *scale, int64_t c, int64_t n)
{
    _Alignas(64) char some[VL * 4] = { 0 };
    float s = dtype == TSR_DT_F8_E4M3 && n > 0 ? ((const float *)(const void *)scale)[c / 128] : 0;
    memcpy(some, row + c * stored_bytes(dtype), (size_t)(n * stored_bytes(dtype)));
    return stored_vec(dtype, some, (const char *)&s, 0);
}

static inline int64_t row_bytes(tsr_dtype dtype, int64_t cols)
{
    return dtype == TSR_DT_MXFP4 ? cols / 2 : cols * stored_bytes(dtype);
}

/* The scales of row r. */
static inline const char *scale_row(tsr_dtype dtype, const char *scale, int64_t r, int64_t cols)
{
    return dtype == TSR_DT_MXFP4     ? scale + r * (cols / 32)
           : dtype == TSR_DT_F8_E4M3 ? scale + r / 128 * ((cols + 127) / 128) * 4
                                     : NULL;
}

/* A vector of mx_values, as numbers. */
ALWAYS vf mx_plain(vf v)
{
    return MX_UNIT == 1.0f ? v : (vf)(v * v_set1(1.0f / MX_UNIT));
}

#endif
