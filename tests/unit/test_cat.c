/* test_cat.c - values of tensors as text, hex, raw bytes and .npy, against answers found another way. */
#include "tests/harness/bag.h"
#include "tests/unit/memory_source.h"

#include <inttypes.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

/* ---- cat ----------------------------------------------------------------------------------------------- */

typedef struct text {
    char *p;
    size_t n, room, limit; /* limit: put refuses what goes beyond; 0: none */
} text;

static bool take(void *payload, const void *data, size_t n)
{
    text *t = payload;
    if (t->limit > 0 && t->n + n > t->limit) {
        return false;
    }
    if (t->n + n + 1 > t->room) {
        t->room = (t->n + n + 1) * 2;
        t->p = realloc(t->p, t->room);
        assert_non_null(t->p);
    }
    memcpy(t->p + t->n, data, n);
    t->n += n;
    t->p[t->n] = '\0';
    return true;
}

static tsr_status cat(const tsr_view *v, int64_t item, tsr_cat_opts o, text *out, uint64_t *to_inf,
                      tsr_err *err)
{
    out->n = 0;
    (void)take(out, "", 0);
    return tsr_inspect_cat(v, item, &o, take, out, to_inf, err);
}

/* One dimension of a slice: its text, and what Python takes from it. */
static int random_part(uint64_t *rng, int64_t dim, char *buf, size_t room, int64_t *from, int64_t *to)
{
    int64_t i = (int64_t)(bag_random(rng) % (uint64_t)(2 * dim + 5)) - dim - 2,
            j = (int64_t)(bag_random(rng) % (uint64_t)(2 * dim + 5)) - dim - 2;
    int64_t x = i < 0 ? i + dim : i, y = j < 0 ? j + dim : j;
    switch (bag_random(rng) % 5) {
    case 0: *from = 0, *to = dim; return snprintf(buf, room, ":");
    case 1: *from = x < 0 ? 0 : x > dim ? dim : x, *to = dim; return snprintf(buf, room, "%d:", (int)i);
    case 2: *from = 0, *to = y < 0 ? 0 : y > dim ? dim : y; return snprintf(buf, room, ":%d", (int)j);
    case 3:
        *from = x < 0 ? 0 : x > dim ? dim : x, *to = y < 0 ? 0 : y > dim ? dim : y;
        return snprintf(buf, room, "%d:%d", (int)i, (int)j);
    default:
        *from = x, *to = x >= 0 && x < dim ? x + 1 : -1; /* -1: Python refuses */
        return snprintf(buf, room, "%d", (int)i);
    }
}

static void test_slices(void **state)
{
    (void)state;
    uint64_t rng = 12;
    int refused = 0, empty = 0;
    text out = { 0 };
    for (int round = 0; round < 4000; round++) {
        int rank = 1 + (int)(bag_random(&rng) % 4), given = 1 + (int)(bag_random(&rng) % (uint64_t)rank);
        int64_t shape[4] = { 1, 1, 1, 1 }, from[4] = { 0 }, to[4] = { 1, 1, 1, 1 };
        int32_t data[6 * 6 * 6 * 6], want[6 * 6 * 6 * 6];
        size_t count = 0, used = 0;
        char slice[200] = "";
        bool bad = false;
        for (int k = 0; k < rank; k++) {
            to[k] = shape[k] = 1 + (int64_t)(bag_random(&rng) % 6);
        }
        for (int k = 0; k < given; k++) {
            used += (size_t)snprintf(slice + used, sizeof slice - used, "%s", k > 0 ? "," : "");
            used += (size_t)random_part(&rng, shape[k], slice + used, sizeof slice - used, &from[k], &to[k]);
            bad |= to[k] < 0;
        }
        for (int32_t i = 0; i < shape[0] * shape[1] * shape[2] * shape[3]; i++) {
            data[i] = i * 7;
            int64_t at[4] = { i / (shape[1] * shape[2] * shape[3]), i / (shape[2] * shape[3]) % shape[1],
                              i / shape[3] % shape[2], i % shape[3] };
            bool in = true;
            for (int k = 0; k < 4; k++) {
                in = in && at[k] >= from[k] && at[k] < to[k];
            }
            if (in) {
                want[count++] = data[i];
            }
        }
        memory m;
        tsr_err err;
        memory_init(&m);
        memory_put(&m, "t", TSR_DT_I32, data, rank, shape);
        tsr_status st = cat(memory_view(&m), 0, (tsr_cat_opts){ .format = TSR_CAT_RAW, .slice = slice }, &out,
                            NULL, &err);
        if (bad) {
            if (st != TSR_E_USAGE) {
                fail_msg("--slice %s of first dimension %d was not refused", slice, (int)shape[0]);
            }
            refused++;
        } else {
            assert_int_equal(st, TSR_OK);
            assert_int_equal(out.n, count * 4);
            assert_true(count == 0 || memcmp(out.p, want, count * 4) == 0);
            empty += count == 0;
        }
        memory_done(&m);
    }
    assert_true(refused > 100 && empty > 100);
    free(out.p);
}

static void test_bad_slices(void **state)
{
    (void)state;
    static const char *const bad[] = { "x",   "0:1:2", "1,2,3", "0,,1",
                                       "0 1", "1.5",   "--1",   "99999999999999999999",
                                       "-",   ",",     "3",     "-4" };
    const int32_t data[6] = { 0 };
    memory m;
    tsr_err err;
    text out = { 0 };
    memory_init(&m);
    memory_put(&m, "t", TSR_DT_I32, data, 2, (int64_t[]){ 3, 2 });
    memory_put(&m, "scalar", TSR_DT_I32, data, 0, NULL);
    (void)memory_view(&m);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        if (cat(&m.view, 0, (tsr_cat_opts){ .slice = bad[i] }, &out, NULL, &err) != TSR_E_USAGE) {
            fail_msg("--slice %s was not refused", bad[i]);
        }
        assert_int_equal(out.n, 0);
    }
    assert_int_equal(cat(&m.view, 1, (tsr_cat_opts){ .slice = ":" }, &out, NULL, &err), TSR_E_USAGE);
    assert_int_equal(cat(&m.view, 1, (tsr_cat_opts){ .slice = NULL }, &out, NULL, &err), TSR_OK);
    assert_string_equal(out.p, "0\n");
    memory_done(&m);
    free(out.p);
}

static void test_text_and_hex(void **state)
{
    (void)state;
    static const struct {
        tsr_dtype dt;
        uint8_t bytes[16];
        int64_t n;
        const char *text, *hex;
    } rows_of[] = {
        { TSR_DT_F64,
          { 0x9a, 0x99, 0x99, 0x99, 0x99, 0x99, 0xb9, 0x3f },
          1,
          "0.10000000000000001",
          "3fb999999999999a" },
        { TSR_DT_F32,
          { 0, 0, 0xc0, 0x7f, 0xcd, 0xcc, 0xcc, 0x3d, 0, 0, 0, 0x80, 0, 0, 0x80, 0xff },
          4,
          "nan 0.100000001 -0 -inf",
          "7fc00000 3dcccccd 80000000 ff800000" },
        { TSR_DT_F16, { 0xff, 0x7b, 1, 0 }, 2, "65504 5.96046448e-08", "7bff 0001" },
        { TSR_DT_BF16, { 0x80, 0x3f, 0xc0, 0x7f }, 2, "1 nan", "3f80 7fc0" },
        { TSR_DT_F8_E4M3, { 0x38, 0x7e, 0xff }, 3, "1 448 nan", "38 7e ff" },
        { TSR_DT_F8_E5M2, { 0x3c, 0x7c, 0x7b }, 3, "1 inf 57344", "3c 7c 7b" },
        { TSR_DT_F8_E4M3FNUZ, { 0x40, 0x80, 0x7f }, 3, "1 nan 240", "40 80 7f" },
        { TSR_DT_F8_E5M2FNUZ, { 0x40, 0x80, 0x7f }, 3, "1 nan 57344", "40 80 7f" },
        { TSR_DT_E8M0, { 127, 128, 255 }, 3, "1 2 nan", "7f 80 ff" },
        { TSR_DT_F4_E2M1, { 0x17, 0xf8 }, 4, "6 0.5 -0 -6", "7 1 8 f" },
        { TSR_DT_I64,
          { 255, 255, 255, 255, 255, 255, 255, 127, 0, 0, 0, 0, 0, 0, 0, 128 },
          2,
          "9223372036854775807 -9223372036854775808",
          "7fffffffffffffff 8000000000000000" },
        { TSR_DT_I32, { 255, 255, 255, 127, 254, 255, 255, 255 }, 2, "2147483647 -2", "7fffffff fffffffe" },
        { TSR_DT_I16, { 0, 128 }, 1, "-32768", "8000" },
        { TSR_DT_I8, { 128, 127 }, 2, "-128 127", "80 7f" },
        { TSR_DT_U64,
          { 255, 255, 255, 255, 255, 255, 255, 255 },
          1,
          "18446744073709551615",
          "ffffffffffffffff" },
        { TSR_DT_U32, { 255, 255, 255, 255 }, 1, "4294967295", "ffffffff" },
        { TSR_DT_U16, { 255, 255 }, 1, "65535", "ffff" },
        { TSR_DT_U8, { 0, 255 }, 2, "0 255", "00 ff" },
        { TSR_DT_BOOL, { 0, 1 }, 2, "0 1", "00 01" },
    };
    text out = { 0 };
    for (size_t i = 0; i < sizeof rows_of / sizeof *rows_of; i++) {
        memory m;
        tsr_err err;
        memory_init(&m);
        memory_put1(&m, "t", rows_of[i].dt, rows_of[i].bytes, rows_of[i].n);
        CHECK_OK(cat(memory_view(&m), 0, (tsr_cat_opts){ .format = TSR_CAT_TEXT }, &out, NULL, &err));
        out.p[out.n - 1] = '\0';
        assert_string_equal(out.p, rows_of[i].text);
        CHECK_OK(cat(&m.view, 0, (tsr_cat_opts){ .format = TSR_CAT_HEX }, &out, NULL, &err));
        out.p[out.n - 1] = '\0';
        assert_string_equal(out.p, rows_of[i].hex);
        memory_done(&m);
    }
    free(out.p);
}

static void test_npy(void **state)
{
    (void)state;
    const float data[24] = { 1, 2, 3 };
    static const struct {
        const char *slice, *want;
        size_t count;
    } cases[] = { { NULL, "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3, 4), }", 24 },
                  { "1", "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }", 12 },
                  { ":,2,1:3", "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), }", 4 },
                  { "0,1", "{'descr': '<f4', 'fortran_order': False, 'shape': (4,), }", 4 },
                  { "0,0,0", "{'descr': '<f4', 'fortran_order': False, 'shape': (), }", 1 },
                  { "1:1", "{'descr': '<f4', 'fortran_order': False, 'shape': (0, 3, 4), }", 0 } };
    memory m;
    tsr_err err;
    text out = { 0 };
    memory_init(&m);
    memory_put(&m, "t", TSR_DT_F32, data, 3, (int64_t[]){ 2, 3, 4 });
    (void)memory_view(&m);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CHECK_OK(cat(&m.view, 0, (tsr_cat_opts){ .format = TSR_CAT_NPY, .slice = cases[i].slice }, &out, NULL,
                     &err));
        size_t head = (size_t)(uint8_t)out.p[8] | (size_t)(uint8_t)out.p[9] << 8, n = strlen(cases[i].want);
        assert_memory_equal(out.p, "\x93NUMPY\x01\x00", 8);
        assert_true((10 + head) % 64 == 0 && out.p[9 + head] == '\n');
        assert_memory_equal(out.p + 10, cases[i].want, n);
        assert_int_equal(strspn(out.p + 10 + n, " "), head - n - 1);
        assert_int_equal(out.n, 10 + head + cases[i].count * 4);
    }
    memory_done(&m);
    free(out.p);
}

/* ---- cat of scaled codes ------------------------------------------------------------------------------- */

static const double e2m1[16] = { 0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6 };

/* 256 rows, one per scale code, of three blocks: all 16 codes twice in each. */
static void make_scaled(uint8_t packed[256 * 48], uint8_t scales[256 * 3])
{
    for (int r = 0; r < 256; r++) {
        for (int i = 0; i < 48; i++) {
            packed[r * 48 + i] = (uint8_t)(i % 8 * 2 | (i % 8 * 2 + 1) << 4);
        }
        for (int b = 0; b < 3; b++) {
            scales[r * 3 + b] = (uint8_t)(r + b); /* blocks of one row differ */
        }
    }
}

static void test_scaled_codes(void **state)
{
    (void)state;
    static uint8_t packed[256 * 48], scales[256 * 3];
    make_scaled(packed, scales);
    memory m;
    tsr_err err;
    text out = { 0 };
    memory_init(&m);
    memory_put(&m, "w", TSR_DT_MXFP4, packed, 2, (int64_t[]){ 256, 96 });
    memory_put(&m, "w.scale", TSR_DT_E8M0, scales, 2, (int64_t[]){ 256, 3 });
    (void)memory_view(&m);
    memory_join(&m, 0, 1);
    tsr_cat_opts o = { .format = TSR_CAT_RAW, .as = TSR_DT_F64 };
    for (int odd = 0; odd < 2; odd++) { /* whole rows, and from an odd column inside a block */
        int from = odd ? 37 : 0;
        o.slice = odd ? ":,37:" : NULL;
        CHECK_OK(cat(&m.view, 0, o, &out, NULL, &err));
        assert_int_equal(out.n, 256u * (96u - (unsigned)from) * 8u);
        for (int r = 0; r < 256; r++) {
            for (int c = from; c < 96; c++) {
                double got, want = ldexp(e2m1[c % 16], (uint8_t)(r + c / 32) - 127);
                memcpy(&got, out.p + (size_t)(r * (96 - from) + c - from) * 8, 8);
                if ((uint8_t)(r + c / 32) == 255) {
                    assert_true(isnan(got));
                } else {
                    assert_memory_equal(&got, &want, 8);
                }
            }
        }
    }
    o = (tsr_cat_opts){ .format = TSR_CAT_RAW }; /* as stored: the packed bytes */
    CHECK_OK(cat(&m.view, 0, o, &out, NULL, &err));
    assert_true(out.n == sizeof packed && memcmp(out.p, packed, sizeof packed) == 0);
    o.slice = "7,1:5";
    assert_int_equal(cat(&m.view, 0, o, &out, NULL, &err), TSR_E_USAGE);
    o = (tsr_cat_opts){ .format = TSR_CAT_TEXT, .codes = true, .slice = "200,5:9" };
    CHECK_OK(cat(&m.view, 0, o, &out, NULL, &err));
    assert_string_equal(out.p, "3 4 6 -0\n");
    o.codes = false; /* row 128: scale 2 */
    o.slice = "128,5:9";
    CHECK_OK(cat(&m.view, 0, o, &out, NULL, &err));
    assert_string_equal(out.p, "6 8 12 -0\n");
    o = (tsr_cat_opts){ .format = TSR_CAT_HEX, .codes = true, .slice = "0,5:9" };
    CHECK_OK(cat(&m.view, 0, o, &out, NULL, &err));
    assert_string_equal(out.p, "5 6 7 8\n");
    memory_done(&m);
    free(out.p);
}

static void test_scaled_overflow(void **state)
{
    (void)state;
    uint8_t packed[3 * 16], scales[3] = { 127, 254, 254 };
    memset(packed, 0x22, 16);
    memset(packed + 16, 0x11, 16);
    memset(packed + 32, 0xf7, 16); /* 6, -6 */
    static const struct {
        tsr_dtype as;
        const char *most;
    } kinds[] = { { TSR_DT_F32, "7f7fffff ff7fffff" },
                  { TSR_DT_BF16, "7f7f ff7f" },
                  { TSR_DT_F16, "7bff fbff" } };
    memory m;
    tsr_err err;
    text out = { 0 };
    uint64_t to_inf;
    memory_init(&m);
    memory_put(&m, "w", TSR_DT_MXFP4, packed, 2, (int64_t[]){ 3, 32 });
    memory_put(&m, "w.scale", TSR_DT_E8M0, scales, 2, (int64_t[]){ 3, 1 });
    (void)memory_view(&m);
    memory_join(&m, 0, 1);
    for (int i = 0; i < 3; i++) {
        tsr_cat_opts o = { .format = TSR_CAT_HEX, .as = kinds[i].as, .slice = ":,0:2" };
        assert_int_equal(cat(&m.view, 0, o, &out, NULL, &err), TSR_E_NUMERIC);
        assert_non_null(strstr(err.msg, "w: row 2: "));
        o.saturate = true;
        CHECK_OK(cat(&m.view, 0, o, &out, &to_inf, &err));
        const char *last = strchr(strchr(out.p, '\n') + 1, '\n') + 1;
        out.p[out.n - 1] = '\0';
        assert_string_equal(last, kinds[i].most);
        assert_int_equal(to_inf, 0);
    }
    CHECK_OK(cat(&m.view, 0, (tsr_cat_opts){ .as = TSR_DT_F64, .slice = "2,:1" }, &out, NULL, &err));
    assert_string_equal(out.p, "1.0208471007628154e+39\n"); /* a double holds it */
    memory_done(&m);
    free(out.p);
}

/* Families: an expert's codes go with the same expert's scales. */
static tsr_status family_fill(void *payload, const tsr_slot *slot, void *dst, tsr_err *err)
{
    (void)payload, (void)err;
    memset(dst, slot->tensor == 0 ? 0x22 : (int)(127 + slot->item), slot->bytes);
    return TSR_OK;
}

static void test_scales_of_experts(void **state)
{
    (void)state;
    static const int64_t codes[2] = { 4, 64 }, scales[2] = { 4, 2 };
    tsr_tensor_decl d[2] = { { .name = "layers.1.experts.{e}.up.weight",
                               .dtype = TSR_DT_MXFP4,
                               .src_dtype = TSR_DT_U8,
                               .rank = 2,
                               .shape = codes,
                               .klass = TSR_CLASS_EXPERTS,
                               .layer = 1,
                               .expert_count = 5,
                               .partner = 1 },
                             { .name = "layers.1.experts.{e}.up.scale",
                               .dtype = TSR_DT_E8M0,
                               .src_dtype = TSR_DT_U8,
                               .rank = 2,
                               .shape = scales,
                               .klass = TSR_CLASS_EXPERTS,
                               .layer = 1,
                               .expert_count = 5,
                               .partner = -1 } };
    char *dir = test_dir("inspect"), path[500];
    tsr_save_opts so = { .expert_partitions = 5 };
    tsr_view v;
    tsr_err err;
    text out = { 0 };
    (void)snprintf(path, sizeof path, "%s/c", dir);
    CHECK_OK(tsr_save(path, d, 2, family_fill, NULL, &so, &err));
    CHECK_OK(tsr_view_open(&v, path, "auto", NULL, NULL, &err));
    for (int e = 0; e < 5; e++) {
        char name[100], want[100];
        (void)snprintf(name, sizeof name, "layers.1.experts.%d.up.weight", e);
        (void)snprintf(want, sizeof want, "%d %d\n", 1 << e, 1 << e);
        int64_t item = tsr_map_find(v.map, name, NULL);
        CHECK_OK(cat(&v, item, (tsr_cat_opts){ .slice = "3,31:33" }, &out, NULL, &err));
        assert_string_equal(out.p, want);
    }
    tsr_view_close(&v);
    test_dir_remove(dir);
    free(out.p);
}

static void test_raw_pairs(void **state)
{
    (void)state;
    uint8_t packed[2 * 32], scales[4] = { 127, 128, 129, 130 };
    memset(packed, 0x42, sizeof packed); /* 1, 2 */
    memory m;
    tsr_err err;
    text out = { 0 };
    memory_init(&m);
    memory_put(&m, "w.weight_packed", TSR_DT_U8, packed, 2, (int64_t[]){ 2, 32 });
    memory_put(&m, "w.weight_scale", TSR_DT_U8, scales, 2, (int64_t[]){ 2, 2 });
    memory_put(&m, "alone.weight_packed", TSR_DT_U8, packed, 2, (int64_t[]){ 2, 32 });
    memory_put(&m, "kind.weight_packed", TSR_DT_F32, packed, 2, (int64_t[]){ 1, 16 });
    memory_put(&m, "short.weight_packed", TSR_DT_U8, packed, 2, (int64_t[]){ 2, 32 });
    memory_put(&m, "short.weight_scale", TSR_DT_U8, scales, 2, (int64_t[]){ 1, 2 });
    memory_put(&m, "odd.weight_packed", TSR_DT_U8, packed, 2, (int64_t[]){ 2, 24 });
    memory_put(&m, "odd.weight_scale", TSR_DT_U8, scales, 2, (int64_t[]){ 2, 1 });
    memory_put(&m, "huge.weight_packed", TSR_DT_U8, packed, 2, (int64_t[]){ 0, INT64_MAX });
    memory_put(&m, "huge.weight_scale", TSR_DT_U8, scales, 2, (int64_t[]){ 0, 1 });
    memory_put(&m, "w.other", TSR_DT_U8, scales, 0, NULL);
    (void)memory_view(&m);
    tsr_cat_opts o = { .mxfp4 = true, .slice = ":,30:34" };
    CHECK_OK(cat(&m.view, 0, o, &out, NULL, &err));
    assert_string_equal(out.p, "1 2 2 4\n4 8 8 16\n");
    o.slice = NULL;
    assert_int_equal(cat(&m.view, 2, o, &out, NULL, &err), TSR_E_MISSING);
    assert_non_null(strstr(err.msg, "alone.weight_scale"));
    assert_int_equal(cat(&m.view, 3, o, &out, NULL, &err), TSR_E_USAGE);
    assert_int_equal(cat(&m.view, 4, o, &out, NULL, &err), TSR_E_FORMAT);
    assert_int_equal(cat(&m.view, 6, o, &out, NULL, &err), TSR_E_FORMAT);
    assert_int_equal(cat(&m.view, 8, o, &out, NULL, &err), TSR_E_FORMAT);
    assert_int_equal(cat(&m.view, 10, o, &out, NULL, &err), TSR_E_USAGE);
    memory_done(&m);
    free(out.p);
}

/* ---- cat: long rows, conversions, failures ------------------------------------------------------------- */

static void test_long_rows(void **state)
{
    (void)state;
    enum { N = 70016 };
    int32_t *x = malloc(N * sizeof *x);
    uint8_t *codes = malloc(N / 2), *scales = malloc(N / 32);
    char *want = malloc(N * 12 + 16);
    assert_true(x != NULL && codes != NULL && scales != NULL && want != NULL);
    uint64_t rng = 3;
    for (int i = 0; i < N; i++) {
        x[i] = (int32_t)bag_random(&rng);
        codes[i / 2] = (uint8_t)bag_random(&rng);
        scales[i / 32] = (uint8_t)(100 + bag_random(&rng) % 50);
    }
    memory m;
    tsr_err err;
    text out = { 0 };
    memory_init(&m);
    memory_put1(&m, "x", TSR_DT_I32, x, N);
    memory_put1(&m, "w", TSR_DT_MXFP4, codes, N);
    memory_put1(&m, "w.scale", TSR_DT_E8M0, scales, N / 32);
    (void)memory_view(&m);
    memory_join(&m, 1, 2);
    for (int round = 0; round < 4; round++) {
        int from = round == 0 ? 0 : (int)(bag_random(&rng) % 30000), to = round == 0 ? N : 50000 + round;
        char slice[40];
        size_t used = 0;
        (void)snprintf(slice, sizeof slice, "%d:%d", from, to);
        for (int i = from; i < to; i++) {
            used += (size_t)snprintf(want + used, 16, "%s%" PRId32, i > from ? " " : "", x[i]);
        }
        CHECK_OK(cat(&m.view, 0, (tsr_cat_opts){ .slice = slice }, &out, NULL, &err));
        assert_true(out.n == used + 1 && out.p[used] == '\n' && memcmp(out.p, want, used) == 0);
        tsr_cat_opts o = { .format = TSR_CAT_RAW, .as = TSR_DT_F32, .slice = slice };
        CHECK_OK(cat(&m.view, 1, o, &out, NULL, &err));
        assert_int_equal(out.n, (size_t)(to - from) * 4);
        for (int i = from; i < to; i++) {
            float got, right = (float)ldexp(e2m1[i % 2 == 0 ? codes[i / 2] & 15 : codes[i / 2] >> 4],
                                            scales[i / 32] - 127);
            memcpy(&got, out.p + (size_t)(i - from) * 4, 4);
            assert_memory_equal(&got, &right, 4);
        }
    }
    memory_done(&m);
    free(out.p);
    free(x);
    free(codes);
    free(scales);
    free(want);
}

/* Each conversion rounds once, to nearest, ties to even, and counts what became infinite. */
static void test_conversions(void **state)
{
    (void)state;
    static const double d[8] = { 1 + 0x1p-8 + 0x1p-40,  /* just above the middle of two bf16 */
                                 1 + 0x1p-11 + 0x1p-50, /* of two f16 */
                                 1 + 0x1p-24 + 0x1p-52, /* of two f32 */
                                 1e300,
                                 -1e39,
                                 65520,
                                 INFINITY,
                                 -0.0 };
    static const uint32_t f[4] = { 0x7f800001, 0xff800001, 0x7f7fffff, 0x80000001 };
    static const uint64_t nan64 = 0x7ff0000000000001;
    static const uint16_t nan16 = 0x7c01, nanb = 0xff81;
    static const int64_t i = 16777217;
    static const struct {
        int64_t item;
        tsr_dtype as;
        uint64_t to_inf;
        const char *hex;
    } cases[] = {
        { 0, TSR_DT_F32, 2, "3f808000 3f801000 3f800001 7f800000 ff800000 477ff000 7f800000 80000000\n" },
        { 0, TSR_DT_BF16, 2, "3f81 3f80 3f80 7f80 ff80 4780 7f80 8000\n" },
        { 0, TSR_DT_F16, 3, "3c04 3c01 3c00 7c00 fc00 7c00 7c00 8000\n" },
        { 1, TSR_DT_F32, 0, "7f800001 ff800001 7f7fffff 80000001\n" }, /* its own dtype: no bit changes */
        { 1, TSR_DT_BF16, 1, "7fc0 ffc0 7f80 8000\n" },
        { 1, TSR_DT_F16, 1, "7e00 fe00 7c00 8000\n" },
        { 2, TSR_DT_F64, 0, "7ff0000000000001\n" },
        { 3, TSR_DT_F16, 0, "7c01\n" },
        { 4, TSR_DT_BF16, 0, "ff81\n" },
        { 5, TSR_DT_F32, 0, "4b800000\n" },
        { 5, TSR_DT_F64, 0, "4170000010000000\n" },
        { 5, TSR_DT_F16, 1, "7c00\n" },
    };
    memory m;
    tsr_err err;
    text out = { 0 };
    memory_init(&m);
    memory_put1(&m, "d", TSR_DT_F64, d, 8);
    memory_put1(&m, "f", TSR_DT_F32, f, 4);
    memory_put1(&m, "nan64", TSR_DT_F64, &nan64, 1);
    memory_put1(&m, "nan16", TSR_DT_F16, &nan16, 1);
    memory_put1(&m, "nanb", TSR_DT_BF16, &nanb, 1);
    memory_put1(&m, "i", TSR_DT_I64, &i, 1);
    (void)memory_view(&m);
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        uint64_t to_inf = 99;
        tsr_cat_opts o = { .format = TSR_CAT_HEX, .as = cases[k].as };
        CHECK_OK(cat(&m.view, cases[k].item, o, &out, &to_inf, &err));
        assert_string_equal(out.p, cases[k].hex);
        assert_int_equal(to_inf, cases[k].to_inf);
    }
    memory_done(&m);
    free(out.p);
}

static void test_cat_failures(void **state)
{
    (void)state;
    uint8_t *codes = calloc(1, 40000), scales[1250 * 2];
    memory m;
    tsr_err err;
    text out = { .limit = 20000 };
    assert_non_null(codes);
    memset(scales, 127, sizeof scales);
    memory_init(&m);
    memory_put1(&m, "w", TSR_DT_MXFP4, codes, 80000);
    memory_put1(&m, "w.scale", TSR_DT_E8M0, scales, 2500);
    (void)memory_view(&m);
    memory_join(&m, 0, 1);
    for (tsr_cat_format k = TSR_CAT_TEXT; k <= TSR_CAT_NPY;
         k++) { /* the first piece, or the second, is refused */
        tsr_cat_opts o = { .format = k };
        out.limit = k == TSR_CAT_RAW || k == TSR_CAT_HEX ? 10000 : 20000;
        assert_int_equal(cat(&m.view, 0, o, &out, NULL, &err), TSR_E_IO);
        assert_non_null(strstr(err.msg, "w: output"));
    }
    out.limit = 0;
    for (int reads = 0; reads < 10; reads++) { /* five runs: codes, scales, codes, ... */
        m.reads_left = reads;
        assert_int_equal(cat(&m.view, 0, (tsr_cat_opts){ 0 }, &out, NULL, &err), TSR_E_IO);
        assert_non_null(strstr(err.msg, reads % 2 == 0 ? "w: reading" : "w.scale: reading"));
    }
    m.reads_left = 10;
    assert_int_equal(cat(&m.view, 0, (tsr_cat_opts){ 0 }, &out, NULL, &err), TSR_OK);
    memory_done(&m);
    free(codes);
    free(out.p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_slices),
        cmocka_unit_test(test_bad_slices),
        cmocka_unit_test(test_text_and_hex),
        cmocka_unit_test(test_npy),
        cmocka_unit_test(test_scaled_codes),
        cmocka_unit_test(test_scaled_overflow),
        cmocka_unit_test(test_scales_of_experts),
        cmocka_unit_test(test_raw_pairs),
        cmocka_unit_test(test_long_rows),
        cmocka_unit_test(test_conversions),
        cmocka_unit_test(test_cat_failures),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
