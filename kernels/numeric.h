/* numeric.h - public: number formats, element by element: the plain reference for every conversion. */
#ifndef TSR_KERNELS_NUMERIC_H
#define TSR_KERNELS_NUMERIC_H

#include "format/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Single codes. Sources: IEEE 754; OCP 8-bit Floating Point Specification 1.0; OCP Microscaling Formats 1.0. */
float tsr_bf16_to_f32(uint16_t x);
float tsr_f16_to_f32(uint16_t x);
float tsr_f8_to_f32(tsr_dtype dt, uint8_t x); /* the four 8-bit float dtypes */
float tsr_e8m0_to_f32(uint8_t x);             /* 2^(x-127); 0 -> 2^-127 (subnormal), 255 -> NaN */
float tsr_e2m1_to_f32(uint8_t x);             /* low four bits; code 8 is -0 */
uint16_t tsr_f32_to_bf16(float x); /* round to nearest even; NaN -> quiet NaN of the same sign 7fc0/ffc0 */
uint16_t tsr_f32_to_f16(float x);  /* likewise; 7e00/fe00 */

/* n elements, starting at element first, of packed data to double (every dtype but 64-bit integers beyond 2^53
 * is exact). For MXFP4 the values are bare E2M1; scale them with tsr_mxfp4_to_f32. first and n even for packed
 * types unless n ends the data. */
void tsr_to_f64(tsr_dtype dt, const void *src, uint64_t first, uint64_t n, double *dst);

/* rows x cols of MXFP4: packed [rows][cols/2], scales [rows][cols/32] to dst [rows][cols]. Products are exact or
 * round once. overflow_row (may be NULL): first row whose finite code times scale does not fit f32, -1 none; with
 * saturate such values become +-FLT_MAX. */
void tsr_mxfp4_to_f32(const uint8_t *packed, const uint8_t *scales, int64_t rows, int64_t cols, bool saturate,
                      float *dst, int64_t *overflow_row);

/* n elements of f32 to dt (f32, bf16, f16). *to_inf counts finite values that became infinite. */
void tsr_from_f32(tsr_dtype dt, const float *src, uint64_t n, void *dst, uint64_t *to_inf);

#ifdef __cplusplus
}
#endif
#endif
