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

/* A 16-bit code by its definition; the code of infinity as the number that would come next. */
static double by_parts(uint32_t code, int ebits, int bias)
{
    int mbits = 15 - ebits, e = (int)(code >> mbits) & ((1 << ebits) - 1), m = (int)code & ((1 << mbits) - 1);
    double v = e > 0 ? ldexp(m + (1 << mbits), e - bias - mbits) : ldexp(m, 1 - bias - mbits);
    return (code & 0x8000) != 0 ? -v : v;
}

static void half_codes(void)
{
    for (uint32_t x = 0; x < 65536; x++) {
        uint16_t h = (uint16_t)x;
        for (int kind = 0; kind < 2; kind++) {
            uint32_t inf = kind ? 0x7c00 : 0x7f80, low = x & 0x7fff;
            float got = kind ? tsr_f16_to_f32(h) : tsr_bf16_to_f32(h);
            double want = low == inf ? (double)INFINITY : by_parts(low, kind ? 5 : 8, kind ? 15 : 127);
            CHECK((signbit(got) != 0) == (x > 0x7fff));
            CHECK(low > inf ? isnan(got) : (double)got == (x > 0x7fff ? -want : want));
            uint16_t back = kind ? tsr_f32_to_f16(got) : tsr_f32_to_bf16(got), quiet = kind ? 0x7e00 : 0x7fc0;
            CHECK(back == (low > inf ? quiet | (x & 0x8000) : x));
        }
    }
}

static void rounds_to(int kind, float x, uint32_t want)
{
    CHECK((kind ? tsr_f32_to_f16(x) : tsr_f32_to_bf16(x)) == want);
    CHECK((kind ? tsr_f32_to_f16(-x) : tsr_f32_to_bf16(-x)) == (want | 0x8000));
}

/* Between each two neighbours, up to infinity: the middle goes to the even one, its neighbours to the
 * nearer. */
static void half_rounding(void)
{
    for (int kind = 0; kind < 2; kind++) {
        for (uint32_t h = 0; h < (kind ? 0x7c00u : 0x7f80u); h++) {
            int ebits = kind ? 5 : 8, bias = kind ? 15 : 127;
            float mid = (float)((by_parts(h, ebits, bias) + by_parts(h + 1, ebits, bias)) / 2);
            rounds_to(kind, mid, h + (h & 1));
            rounds_to(kind, nextafterf(mid, 0), h);
            rounds_to(kind, nextafterf(mid, INFINITY), h + 1);
        }
        rounds_to(kind, FLT_MAX, kind ? 0x7c00 : 0x7f80);
        rounds_to(kind, 0x1p-149f, 0);
        rounds_to(kind, INFINITY, kind ? 0x7c00 : 0x7f80);
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

/* All codes with all scales, two blocks a row with scales of their own. */
static void mxfp4_products(void)
{
    uint8_t packed[256 * 32], scales[256 * 2];
    float out[256 * 64];
    int64_t row;
    for (int r = 0; r < 256; r++) {
        scales[r * 2] = (uint8_t)r;
        scales[r * 2 + 1] = (uint8_t)(255 - r);
        for (int i = 0; i < 32; i++) {
            packed[r * 32 + i] = (uint8_t)((r * 5 + i * 2) % 16 | (r * 5 + i * 2 + 1) % 16 << 4);
        }
    }
    for (int saturate = 0; saturate < 2; saturate++) {
        tsr_mxfp4_to_f32(packed, scales, 256, 64, saturate != 0, out, &row);
        int64_t first = -1;
        for (int r = 0; r < 256; r++) {
            for (int c = 0; c < 64; c++) {
                int code = (r * 5 + c) % 16, scale = scales[r * 2 + c / 32];
                double up[8] = { 0, 0.5, 1, 1.5, 2, 3, 4, 6 }, v = ldexp(up[code & 7], scale - 127);
                float got = out[r * 64 + c];
                bool over = scale != 255 && v > (double)FLT_MAX;
                first = over && first < 0 ? r : first;
                if (scale == 255) {
                    CHECK(isnan(got));
                    continue;
                }
                float want = over ? (saturate ? FLT_MAX : INFINITY) : (float)v;
                CHECK(bits(got) == (bits(want) | (code > 7 ? 0x80000000u : 0)));
            }
        }
        CHECK(first == 1 && row == first); /* row 1 has scale 254 */
    }
    tsr_mxfp4_to_f32(packed, scales, 256, 64, true, out, NULL);
    for (int x = 0; x < 256; x++) {
        float e = tsr_e8m0_to_f32((uint8_t)x);
        CHECK(x == 255 ? isnan(e) : (double)e == ldexp(1, x - 127));
        CHECK(bits(tsr_e2m1_to_f32((uint8_t)x)) == bits(tsr_e2m1_to_f32((uint8_t)(x & 15))));
    }
}

/* Every dtype to double: three elements from the second on. */
static void to_double(void)
{
    static const struct {
        tsr_dtype dt;
        uint8_t bytes[32];
        double want[3];
    } rows[] = {
        { TSR_DT_F64, { [14] = 0xf0, [15] = 0x3f, [16] = 1, [31] = 0x80 }, { 1, 0x1p-1074, -0.0 } },
        { TSR_DT_F32,
          { [6] = 0x80, [7] = 0x3f, [8] = 1, [14] = 0x80, [15] = 0xff },
          { 1, 0x1p-149, -INFINITY } },
        { TSR_DT_F16, { [3] = 0x3c, [4] = 1, [7] = 0xfc }, { 1, 0x1p-24, -INFINITY } },
        { TSR_DT_BF16, { [2] = 0x80, 0x3f, 1, 0, 0x80, 0xff }, { 1, 0x1p-133, -INFINITY } },
        { TSR_DT_F8_E4M3, { 0, 0x38, 1, 0xfe }, { 1, 0x1p-9, -448 } },
        { TSR_DT_F8_E5M2, { 0, 0x3c, 1, 0xfc }, { 1, 0x1p-16, -INFINITY } },
        { TSR_DT_F8_E4M3FNUZ, { 0, 0x40, 1, 0xff }, { 1, 0x1p-10, -240 } },
        { TSR_DT_F8_E5M2FNUZ, { 0, 0x40, 1, 0xff }, { 1, 0x1p-17, -57344 } },
        { TSR_DT_E8M0, { 0, 127, 0, 254 }, { 1, 0x1p-127, 0x1p127 } },
        { TSR_DT_F4_E2M1, { 0x20, 0xf1 }, { 1, 0.5, -6 } },
        { TSR_DT_MXFP4, { 0x20, 0xf1 }, { 1, 0.5, -6 } },
        { TSR_DT_I64, { [8] = 1, [22] = 0x20, [31] = 0x80 }, { 1, 0x1p53, -0x1p63 } },
        { TSR_DT_I32, { [4] = 1, [8] = 255, 255, 255, 127, [15] = 0x80 }, { 1, 2147483647, -2147483648.0 } },
        { TSR_DT_I16, { [2] = 1, [4] = 255, 127, 0, 128 }, { 1, 32767, -32768 } },
        { TSR_DT_I8, { 0, 1, 127, 128 }, { 1, 127, -128 } },
        { TSR_DT_U64, { [8] = 1, [22] = 0x20, [31] = 0x80 }, { 1, 0x1p53, 0x1p63 } },
        { TSR_DT_U32, { [4] = 1, [8] = 255, 255, 255, 127, [15] = 0x80 }, { 1, 2147483647, 2147483648.0 } },
        { TSR_DT_U16, { [2] = 1, [4] = 255, 127, 0, 128 }, { 1, 32767, 32768 } },
        { TSR_DT_U8, { 0, 1, 127, 128 }, { 1, 127, 128 } },
        { TSR_DT_BOOL, { 0, 1, 0, 1 }, { 1, 0, 1 } },
    };
    unsigned seen = 0;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        double got[4] = { 7, 7, 7, 7 };
        tsr_to_f64(rows[i].dt, rows[i].bytes, 1, 3, got);
        CHECK(memcmp(got, rows[i].want, sizeof rows[i].want) == 0 && got[3] == 7);
        seen |= 1u << rows[i].dt;
    }
    for (unsigned dt = 0; dt < TSR_DT_COUNT; dt++) { /* none is left out */
        CHECK((tsr_dtype_info(dt) != NULL) == ((seen >> dt & 1) != 0));
    }
}

static void from_f32(void)
{
    static const float in[] = { 65519, 65520, -65520, INFINITY, 3e38f, 3.4e38f, -FLT_MAX, 0 };
    uint16_t h[8];
    float same[8];
    uint64_t to_inf = 99;
    tsr_from_f32(TSR_DT_F16, in, 8, h, &to_inf);
    CHECK(to_inf == 5 && h[0] == 0x7bff && h[2] == 0xfc00 && h[3] == 0x7c00 && h[7] == 0);
    tsr_from_f32(TSR_DT_BF16, in, 8, h, &to_inf);
    CHECK(to_inf == 2 && h[4] == 0x7f62 && h[5] == 0x7f80 && h[6] == 0xff80);
    tsr_from_f32(TSR_DT_F32, in, 8, same, &to_inf);
    CHECK(to_inf == 0 && memcmp(same, in, sizeof in) == 0);
    tsr_from_f32(TSR_DT_F16, in, 8, h, NULL);
}

int main(void)
{
    half_codes();
    half_rounding();
    known_answers();
    eight_bits();
    mxfp4();
    mxfp4_products();
    to_double();
    from_f32();
    printf("number formats agree with their definitions\n");
    return 0;
}
