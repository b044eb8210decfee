/* simd.h - one vector of floats, as wide as this compilation's instruction set: every file of this folder is compiled
 * once for AVX2 + FMA (8 lanes) and once for AVX-512 (16 lanes). TSR_SIMD(op) names the kernel. */
#ifndef TSR_KERNELS_SIMD_SIMD_H
#define TSR_KERNELS_SIMD_SIMD_H

#include "kernels/backend_priv.h"

#include <immintrin.h>
#include <string.h>

#ifdef __AVX512F__
#define TSR_SIMD(op) tsr_avx512_##op
#define VL 16
typedef __m512 vf;
typedef __m512i vi;

static inline vf v_load(const float *p)
{
    return _mm512_loadu_ps(p);
}
static inline void v_store(float *p, vf v)
{
    _mm512_storeu_ps(p, v);
}
/* n in [0, VL): lanes from n on are 0, and not touched in memory. */
static inline vf v_load_n(const float *p, int64_t n)
{
    return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
}
static inline void v_store_n(float *p, vf v, int64_t n)
{
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), v);
}
static inline vf v_set1(float x)
{
    return _mm512_set1_ps(x);
}
static inline vf v_fma(vf a, vf b, vf c) /* a b + c */
{
    return _mm512_fmadd_ps(a, b, c);
}
static inline vf v_max(vf a, vf b)
{
    return _mm512_max_ps(a, b);
}
static inline vf v_min(vf a, vf b)
{
    return _mm512_min_ps(a, b);
}
static inline vf v_abs(vf a)
{
    return _mm512_abs_ps(a);
}
static inline vf v_sqrt(vf a)
{
    return _mm512_sqrt_ps(a);
}
static inline vf v_round(vf a)
{
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static inline vf v_less(vf a, vf b, vf yes, vf no) /* a < b ? yes : no */
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
static inline vf v_pow2(vf n) /* 2^n for whole n in [-126, 127] */
{
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
/* VL / 2 floats, widened. */
typedef __m512d vd;
static inline vd vd_load(const float *p)
{
    return _mm512_cvtps_pd(_mm256_loadu_ps(p));
}
static inline double vd_sum(vd v)
{
    __m256d h = _mm256_add_pd(_mm512_castpd512_pd256(v), _mm512_extractf64x4_pd(v, 1));
    __m128d s = _mm_add_pd(_mm256_castpd256_pd128(h), _mm256_extractf128_pd(h, 1));
    return _mm_cvtsd_f64(_mm_add_sd(s, _mm_unpackhi_pd(s, s)));
}
static inline vf v_bf16(const uint16_t *p)
{
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)p)), 16));
}
/* 2 VL of them: those at even places, those at odd places. */
static inline void v_bf16_pair(const void *p, vf *even, vf *odd)
{
    __m512i two = _mm512_loadu_si512(p);
    *even = _mm512_castsi512_ps(_mm512_slli_epi32(two, 16));
    *odd = _mm512_castsi512_ps(_mm512_and_si512(two, _mm512_set1_epi32((int)0xffff0000)));
}
static inline vi vi_load(const int32_t *p)
{
    return _mm512_loadu_si512(p);
}
static inline void vi_store(int32_t *p, vi v)
{
    _mm512_storeu_si512(p, v);
}
static inline vi vi_set1(int32_t x)
{
    return _mm512_set1_epi32(x);
}
static inline unsigned vi_more(vi a, vi b) /* bit i: a > b in lane i */
{
    return _mm512_cmpgt_epi32_mask(a, b);
}
/* Whole numbers in the order of the floats: -0 is 0, NaN comes below everything. */
static inline vi v_key(vf x)
{
    vi u = _mm512_castps_si512(_mm512_add_ps(x, _mm512_setzero_ps()));
    u = _mm512_xor_si512(u, _mm512_srli_epi32(_mm512_srai_epi32(u, 31), 1));
    return _mm512_mask_mov_epi32(u, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(INT32_MIN));
}
/* Adds the lanes in a fixed order. */
static inline float v_sum(vf v)
{
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
/* The sums of the lanes of four vectors. */
static inline __m128 v_sums4(vf a, vf b, vf c, vf d)
{
    __m256 x[4] = { _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)),
                    _mm256_add_ps(_mm512_castps512_ps256(b), _mm512_extractf32x8_ps(b, 1)),
                    _mm256_add_ps(_mm512_castps512_ps256(c), _mm512_extractf32x8_ps(c, 1)),
                    _mm256_add_ps(_mm512_castps512_ps256(d), _mm512_extractf32x8_ps(d, 1)) };
    __m256 h = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    return _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
}
/* to[j * ldt + i] = from[i * ldf + j] for a square of VL. */
static inline void v_transpose(float *to, int64_t ldt, const float *from, int64_t ldf)
{
    __m512 r[16], s[16];
    for (int i = 0; i < 16; i += 4) { /* squares of four inside each 128 bits */
        __m512 a = v_load(from + i * ldf), b = v_load(from + (i + 1) * ldf);
        __m512 c = v_load(from + (i + 2) * ldf), d = v_load(from + (i + 3) * ldf);
        __m512 lo = _mm512_unpacklo_ps(a, b), hi = _mm512_unpackhi_ps(a, b);
        __m512 lo2 = _mm512_unpacklo_ps(c, d), hi2 = _mm512_unpackhi_ps(c, d);
        r[i] = _mm512_shuffle_ps(lo, lo2, 0x44);
        r[i + 1] = _mm512_shuffle_ps(lo, lo2, 0xee);
        r[i + 2] = _mm512_shuffle_ps(hi, hi2, 0x44);
        r[i + 3] = _mm512_shuffle_ps(hi, hi2, 0xee);
    }
    for (int i = 0; i < 4; i++) { /* then the four by four of those */
        s[i] = _mm512_shuffle_f32x4(r[i], r[4 + i], 0x44);
        s[4 + i] = _mm512_shuffle_f32x4(r[i], r[4 + i], 0xee);
        s[8 + i] = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0x44);
        s[12 + i] = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        v_store(to + i * ldt, _mm512_shuffle_f32x4(s[i], s[8 + i], 0x88));
        v_store(to + (4 + i) * ldt, _mm512_shuffle_f32x4(s[i], s[8 + i], 0xdd));
        v_store(to + (8 + i) * ldt, _mm512_shuffle_f32x4(s[4 + i], s[12 + i], 0x88));
        v_store(to + (12 + i) * ldt, _mm512_shuffle_f32x4(s[4 + i], s[12 + i], 0xdd));
    }
}
#else
#define TSR_SIMD(op) tsr_avx2_##op
#define VL 8
typedef __m256 vf;
typedef __m256i vi;

static inline vf v_load(const float *p)
{
    return _mm256_loadu_ps(p);
}
static inline void v_store(float *p, vf v)
{
    _mm256_storeu_ps(p, v);
}
static inline __m256i v_mask_(int64_t n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline vf v_load_n(const float *p, int64_t n)
{
    return _mm256_maskload_ps(p, v_mask_(n));
}
static inline void v_store_n(float *p, vf v, int64_t n)
{
    _mm256_maskstore_ps(p, v_mask_(n), v);
}
static inline vf v_set1(float x)
{
    return _mm256_set1_ps(x);
}
static inline vf v_fma(vf a, vf b, vf c)
{
    return _mm256_fmadd_ps(a, b, c);
}
static inline vf v_max(vf a, vf b)
{
    return _mm256_max_ps(a, b);
}
static inline vf v_min(vf a, vf b)
{
    return _mm256_min_ps(a, b);
}
static inline vf v_abs(vf a)
{
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a);
}
static inline vf v_sqrt(vf a)
{
    return _mm256_sqrt_ps(a);
}
static inline vf v_round(vf a)
{
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static inline vf v_less(vf a, vf b, vf yes, vf no)
{
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
static inline vf v_pow2(vf n)
{
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
typedef __m256d vd;
static inline vd vd_load(const float *p)
{
    return _mm256_cvtps_pd(_mm_loadu_ps(p));
}
static inline double vd_sum(vd v)
{
    __m128d s = _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
    return _mm_cvtsd_f64(_mm_add_sd(s, _mm_unpackhi_pd(s, s)));
}
static inline vf v_bf16(const uint16_t *p)
{
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)p)), 16));
}
static inline void v_bf16_pair(const void *p, vf *even, vf *odd)
{
    __m256i two = _mm256_loadu_si256((const __m256i *)p);
    *even = _mm256_castsi256_ps(_mm256_slli_epi32(two, 16));
    *odd = _mm256_castsi256_ps(_mm256_and_si256(two, _mm256_set1_epi32((int)0xffff0000)));
}
static inline vi vi_load(const int32_t *p)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)p);
}
static inline void vi_store(int32_t *p, vi v)
{
    _mm256_storeu_si256((__m256i *)(void *)p, v);
}
static inline vi vi_set1(int32_t x)
{
    return _mm256_set1_epi32(x);
}
static inline unsigned vi_more(vi a, vi b)
{
    return (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(a, b)));
}
static inline vi v_key(vf x)
{
    vi u = _mm256_castps_si256(_mm256_add_ps(x, _mm256_setzero_ps()));
    u = _mm256_xor_si256(u, _mm256_srli_epi32(_mm256_srai_epi32(u, 31), 1));
    vi nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(u, _mm256_set1_epi32(INT32_MIN), nan);
}
static inline float v_sum(vf v)
{
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
static inline __m128 v_sums4(vf a, vf b, vf c, vf d)
{
    __m256 h = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
}
/* to[j * ldt + i] = from[i * ldf + j] for a square of VL. */
static inline void v_transpose(float *to, int64_t ldt, const float *from, int64_t ldf)
{
    __m256 r[8];
    for (int i = 0; i < 8; i += 4) {
        __m256 a = v_load(from + i * ldf), b = v_load(from + (i + 1) * ldf);
        __m256 c = v_load(from + (i + 2) * ldf), d = v_load(from + (i + 3) * ldf);
        __m256 lo = _mm256_unpacklo_ps(a, b), hi = _mm256_unpackhi_ps(a, b);
        __m256 lo2 = _mm256_unpacklo_ps(c, d), hi2 = _mm256_unpackhi_ps(c, d);
        r[i] = _mm256_shuffle_ps(lo, lo2, 0x44);
        r[i + 1] = _mm256_shuffle_ps(lo, lo2, 0xee);
        r[i + 2] = _mm256_shuffle_ps(hi, hi2, 0x44);
        r[i + 3] = _mm256_shuffle_ps(hi, hi2, 0xee);
    }
    for (int i = 0; i < 4; i++) {
        v_store(to + i * ldt, _mm256_permute2f128_ps(r[i], r[4 + i], 0x20));
        v_store(to + (4 + i) * ldt, _mm256_permute2f128_ps(r[i], r[4 + i], 0x31));
    }
}
#endif

static inline vf v_zero(void)
{
    return v_set1(0.0f);
}

/* e^x within 2 ulp over the whole range: x = n ln 2 + r, |r| <= ln 2 / 2, polynomial of degree 6 (minimax over that
 * interval); 2^n in two factors, so that results down to the subnormals and up to infinity are right. */
static inline vf v_exp(vf x)
{
    x = v_min(v_set1(89.0f), v_max(v_set1(-104.0f), x)); /* beyond: 0 and infinity; this order keeps NaN */
    vf n = v_round(x * v_set1(1.44269504088896341f));
    vf r = v_fma(n, v_set1(-0.693359375f), x);
    r = v_fma(n, v_set1(2.12194440e-4f), r);
    vf p = v_set1(1.9875691500e-4f);
    p = v_fma(p, r, v_set1(1.3981999507e-3f));
    p = v_fma(p, r, v_set1(8.3334519073e-3f));
    p = v_fma(p, r, v_set1(4.1665795894e-2f));
    p = v_fma(p, r, v_set1(1.6666665459e-1f));
    p = v_fma(p, r, v_set1(5.0000001201e-1f));
    p = v_fma(p * r, r, r) + v_set1(1.0f);
    vf half = v_round(n * v_set1(0.5f));
    return p * v_pow2(half) * v_pow2(n - half);
}

static inline vf v_sigmoid(vf x)
{
    return v_set1(1.0f) / (v_set1(1.0f) + v_exp(-x));
}

/* tanh within 3 ulp: an odd polynomial below 0.625, 1 - 2 / (e^2x + 1) beyond (coefficients: Cephes, tanhf). */
static inline vf v_tanh(vf x)
{
    vf a = v_abs(x), s = x * x;
    vf p = v_set1(-5.70498872745e-3f);
    p = v_fma(p, s, v_set1(2.06390887954e-2f));
    p = v_fma(p, s, v_set1(-5.37397155531e-2f));
    p = v_fma(p, s, v_set1(1.33314422036e-1f));
    p = v_fma(p, s, v_set1(-3.33332819422e-1f));
    vf small = v_fma(p * s, x, x);
    vf big = v_set1(1.0f) - v_set1(2.0f) / (v_exp(a + a) + v_set1(1.0f));
    big = v_less(x, v_zero(), -big, big);
    return v_less(a, v_set1(0.625f), small, big);
}

/* Loops over a row of d elements by vectors: `at` is where, `lanes` how many are left of the vector; LOAD and STORE touch
 * no more than those. */
#define EACH(d) for (int64_t at = 0, lanes; at < (d) && (lanes = (d)-at < VL ? (d)-at : VL, true); at += VL)
#define LOAD(p) (lanes == VL ? v_load((p) + at) : v_load_n((p) + at, lanes))
#define STORE(p, v) (lanes == VL ? v_store((p) + at, v) : v_store_n((p) + at, v, lanes))

#endif
