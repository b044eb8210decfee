/* test_numeric.c - number formats against their definitions, over all codes where that is possible. */
#include "kernels/numeric.h"
#include "tests/harness/bag.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint32_t bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

static float value(uint32_t u)
{
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static void half_codes(void)
{
    for (uint32_t x = 0; x < 65536; x++) {
        uint16_t h = (uint16_t)x;
        bool nan16 = (h & 0x7c00) == 0x7c00 && (h & 0x3ff) != 0,
             nanb = (h & 0x7f80) == 0x7f80 && (h & 0x7f) != 0;
        CHECK(nan16 ? isnan(tsr_f16_to_f32(h)) : tsr_f32_to_f16(tsr_f16_to_f32(h)) == h);
        CHECK(nanb ? isnan(tsr_bf16_to_f32(h)) : tsr_f32_to_bf16(tsr_bf16_to_f32(h)) == h);
    }
}

/* The nearest of all codes, ties to the even one, found by looking at every neighbour. */
static void half_rounding(void)
{
    uint64_t rng = 8;
    for (int i = 0; i < 2000000; i++) {
        float x = value((uint32_t)bag_random(&rng));
        if (isnan(x) || isinf(x)) {
            continue;
        }
        for (int kind = 0; kind < 2; kind++) {
            uint16_t h = kind ? tsr_f32_to_f16(x) : tsr_f32_to_bf16(x);
            float (*back)(uint16_t) = kind ? tsr_f16_to_f32 : tsr_bf16_to_f32;
            double at = back(h), low = back((uint16_t)(h - 1)), high = back((uint16_t)(h + 1));
            if ((h & 0x7fff) == 0 || isinf(at) || isinf(high)) {
                continue; /* borders are below, by known answers */
            }
            double d = fabs(at - (double)x), dl = fabs(low - (double)x), dh = fabs(high - (double)x);
            CHECK(d <= dl && d <= dh);
            CHECK((d < dl && d < dh) || (h & 1) == 0);
        }
    }
}

static void known_answers(void)
{
    static const uint32_t in[] = { 0x7F800001, 0xFF800001, 0x3E89CCD5, 0x3F808000, 0x3F818000,
                                   0x7F7FFFFF, 0x80000000, 0x00000001, 0x80000001 };
    static const uint16_t out[] = { 0x7FC0, 0xFFC0, 0x3E8A, 0x3F80, 0x3F82, 0x7F80, 0x8000, 0x0000, 0x8000 };
    float f[9];
    uint16_t got[9];
    uint64_t to_inf;
    memcpy(f, in, sizeof in);
    tsr_from_f32(TSR_DT_BF16, f, 9, got, &to_inf);
    CHECK(memcmp(got, out, sizeof out) == 0 && to_inf == 1);
    CHECK(tsr_f32_to_f16(65504) == 0x7bff && tsr_f32_to_f16(65519) == 0x7bff &&
          tsr_f32_to_f16(65520) == 0x7c00);
    CHECK(tsr_f32_to_f16(0x1p-24f) == 1 && tsr_f32_to_f16(0x1p-25f) == 0 &&
          tsr_f32_to_f16(-0x1.8p-24f) == 0x8002);
    CHECK(tsr_f32_to_f16(value(0x7f800001)) == 0x7e00 && tsr_f32_to_f16(value(0xffc00001)) == 0xfe00);
}

static void eight_bits(void)
{
    static const struct {
        tsr_dtype dt;
        int ebits, mbits, bias;
        bool ieee, fnuz;
    } kinds[] = { { TSR_DT_F8_E4M3, 4, 3, 7, false, false },
                  { TSR_DT_F8_E5M2, 5, 2, 15, true, false },
                  { TSR_DT_F8_E4M3FNUZ, 4, 3, 8, false, true },
                  { TSR_DT_F8_E5M2FNUZ, 5, 2, 16, false, true } };
    for (size_t k = 0; k < 4; k++) {
        for (int x = 0; x < 256; x++) {
            int m = x & ((1 << kinds[k].mbits) - 1), e = (x >> kinds[k].mbits) & ((1 << kinds[k].ebits) - 1);
            float got = tsr_f8_to_f32(kinds[k].dt, (uint8_t)x);
            bool top = e == (1 << kinds[k].ebits) - 1;
            bool nan = kinds[k].fnuz ? x == 0x80 : kinds[k].ieee ? top && m != 0 : (x & 0x7f) == 0x7f;
            if (nan) {
                CHECK(isnan(got));
                continue;
            }
            double want = e == 0 ? ldexp(m, 1 - kinds[k].bias - kinds[k].mbits)
                                 : ldexp(m + (1 << kinds[k].mbits), e - kinds[k].bias - kinds[k].mbits);
            want = kinds[k].ieee && top ? (double)INFINITY : want;
            CHECK((double)got == ((x & 0x80) != 0 ? -want : want));
            CHECK(signbit(got) != 0 ? (x & 0x80) != 0 : (x & 0x80) == 0);
        }
    }
    static const uint8_t code[] = { 0x38, 0x01, 0x07, 0x08, 0x70, 0x78, 0x79, 0x7E, 0xFE };
    static const float want[] = { 1, 0x1p-9f, 0.013671875f, 0x1p-6f, 128, 256, 288, 448, -448 };
    for (int i = 0; i < 9; i++) {
        CHECK(tsr_f8_to_f32(TSR_DT_F8_E4M3, code[i]) == want[i]);
    }
}

static void mxfp4(void)
{
    static const uint8_t row[16] = { 0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe,
                                     0xef, 0xcd, 0xab, 0x89, 0x67, 0x45, 0x23, 0x01 };
    static const float up[16] = { 0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6 };
    static const uint8_t scales[6] = { 0, 1, 127, 134, 254, 255 };
    static const uint32_t want[5] = { 0x00400000, 0x00800000, 0x3F800000, 0x43000000, 0x7F000000 };
    float out[32 * 6];
    int64_t row_of;
    uint8_t one[16 * 6];
    tsr_mxfp4_to_f32(row, scales + 2, 1, 32, false, out, &row_of);
    for (int i = 0; i < 16; i++) {
        CHECK(bits(out[i]) == bits(up[i]) && bits(out[31 - i]) == bits(up[i]));
    }
    CHECK(row_of == -1);
    memset(one, 0x22, sizeof one); /* 1.0 */
    tsr_mxfp4_to_f32(one, scales, 6, 32, false, out, &row_of);
    for (int r = 0; r < 5; r++) {
        CHECK(bits(out[r * 32 + 31]) == want[r]);
    }
    CHECK(isnan(out[5 * 32]) && row_of == -1);
    memset(one, 0x11, 16); /* 0.5 with the smallest scale is subnormal */
    tsr_mxfp4_to_f32(one, scales, 1, 32, false, out, &row_of);
    CHECK(bits(out[0]) == 0x00200000);
    memset(one, 0x77, 16); /* 6.0 with the largest does not fit */
    tsr_mxfp4_to_f32(one, scales + 4, 1, 32, false, out, &row_of);
    CHECK(row_of == 0 && isinf(out[0]));
    tsr_mxfp4_to_f32(one, scales + 4, 1, 32, true, out, &row_of);
    CHECK(row_of == 0 && out[0] == FLT_MAX);
}

int main(void)
{
    half_codes();
    half_rounding();
    known_answers();
    eight_bits();
    mxfp4();
    printf("number formats agree with their definitions\n");
    return 0;
}
