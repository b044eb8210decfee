/* test_inspect.c - comparing and scanning, against answers found another way. Tensors lie in memory, so that
 * every dtype can be had and reading can fail; checkpoints are used where they make a difference. */
#include "tests/harness/bag.h"
#include "tests/unit/memory_source.h"

#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#define MIB ((size_t)1 << 20)

/* ---- diff ---------------------------------------------------------------------------------------------- */

typedef struct rows {
    tsr_diff_row row[MEMORY_ROOM];
    char names[MEMORY_ROOM][64];
    size_t count;
} rows;

static void on_row(void *payload, const tsr_diff_row *r)
{
    rows *k = payload;
    assert_true(k->count < MEMORY_ROOM);
    k->row[k->count] = *r;
    (void)snprintf(k->names[k->count], sizeof k->names[0], "%s", r->name);
    k->row[k->count].name = k->names[k->count];
    k->count++;
}

static tsr_diff_summary diff(const tsr_view *a, const tsr_view *b, const tsr_diff_opts *o, rows *k)
{
    tsr_err err;
    tsr_diff_summary s;
    k->count = 0;
    CHECK_OK(tsr_inspect_diff(a, b, o, on_row, k, &s, &err));
    return s;
}

static const tsr_diff_row *row_of(const rows *k, const char *name)
{
    for (size_t i = 0; i < k->count; i++) {
        if (strcmp(k->row[i].name, name) == 0) {
            return &k->row[i];
        }
    }
    fail_msg("no row for %s", name);
    return NULL;
}

static void test_states(void **state)
{
    (void)state;
    static const uint8_t x[16] = { 1, 2, 3, 4 }, y[16] = { 1, 2, 3, 5 };
    memory a, b;
    memory_init(&a);
    memory_init(&b);
    memory_put1(&a, "same", TSR_DT_U8, x, 4);
    memory_put1(&a, "gone", TSR_DT_U8, x, 4);
    memory_put1(&a, "bytes", TSR_DT_U8, x, 4);
    memory_put1(&a, "kind", TSR_DT_I8, x, 4);
    memory_put(&a, "shape", TSR_DT_U8, x, 2, (int64_t[]){ 2, 2 });
    memory_put(&a, "scalar", TSR_DT_F32, x, 0, NULL);
    memory_put(&a, "empty", TSR_DT_F32, x, 2, (int64_t[]){ 0, 7 });
    memory_put(&b, "empty", TSR_DT_F32, x, 2, (int64_t[]){ 0, 7 });
    memory_put(&b, "scalar", TSR_DT_F32, y, 0, NULL);
    memory_put1(&b, "shape", TSR_DT_U8, x, 4);
    memory_put1(&b, "kind", TSR_DT_U8, x, 4);
    memory_put1(&b, "bytes", TSR_DT_U8, y, 4);
    memory_put1(&b, "fresh", TSR_DT_BF16, x, 2);
    memory_put1(&b, "same", TSR_DT_U8, x, 4);
    a.pub.config_json = "{\"a\":1}";
    a.pub.config_bytes = 7;
    b.pub.config_json = "{\"a\":2}";
    b.pub.config_bytes = 7;
    rows k;
    tsr_diff_opts o = { .equal_rows = true };
    tsr_diff_summary s = diff(memory_view(&a), memory_view(&b), &o, &k);
    assert_int_equal(k.count, 8);
    assert_int_equal(row_of(&k, "same")->state, TSR_DIFF_EQUAL);
    assert_int_equal(row_of(&k, "empty")->state, TSR_DIFF_EQUAL);
    assert_int_equal(row_of(&k, "gone")->state, TSR_DIFF_ONLY_A);
    assert_int_equal(row_of(&k, "fresh")->state, TSR_DIFF_ONLY_B);
    assert_int_equal(row_of(&k, "fresh")->dtype_b, TSR_DT_BF16);
    assert_int_equal(row_of(&k, "kind")->state, TSR_DIFF_DTYPE);
    assert_int_equal(row_of(&k, "kind")->dtype_a, TSR_DT_I8);
    assert_int_equal(row_of(&k, "kind")->dtype_b, TSR_DT_U8);
    assert_int_equal(row_of(&k, "shape")->state, TSR_DIFF_SHAPE);
    const tsr_diff_row *r = row_of(&k, "bytes");
    assert_int_equal(r->state, TSR_DIFF_BYTES);
    assert_true(r->elements == 4 && r->different == 1 && r->first == 3 && !r->has_values);
    r = row_of(&k, "scalar");
    assert_true(r->state == TSR_DIFF_BYTES && r->elements == 1 && r->different == 1 && r->first == 0);
    assert_true(s.compared == 6 && s.equal == 2 && s.different == 4 && s.only_a == 1 && s.only_b == 1);
    assert_true(s.bytes == 12 && s.config_differs);
    o.equal_rows = false;
    (void)diff(&a.view, &b.view, &o, &k);
    assert_int_equal(k.count, 6);
    s = diff(&a.view, &a.view, &o, &k);
    assert_true(k.count == 0 && s.equal == 7 && s.compared == 7 && !s.config_differs);
    memory_done(&a);
    memory_done(&b);
}

/* Any single bit anywhere, beyond the first piece too, is found in its element. */
static void test_every_bit_counts(void **state)
{
    (void)state;
    size_t n = 5 * MIB / 2;
    uint8_t *x = malloc(n), *y = malloc(n);
    uint64_t rng = 11;
    assert_true(x != NULL && y != NULL);
    for (size_t i = 0; i < n; i += 8) {
        uint64_t v = bag_random(&rng);
        memcpy(x + i, &v, 8);
    }
    memcpy(y, x, n);
    for (unsigned dt = 1; dt < TSR_DT_COUNT; dt++) {
        const tsr_dtype_traits *t = tsr_dtype_info(dt);
        if (t == NULL) {
            continue;
        }
        uint64_t bits = 8u * t->bytes_per_unit / t->elems_per_unit, lowest = UINT64_MAX;
        memory a, b;
        rows k;
        tsr_diff_opts o = { 0 };
        memory_init(&a);
        memory_init(&b);
        memory_put1(&a, "w", (tsr_dtype)dt, x, (int64_t)(n * 8 / bits));
        memory_put1(&b, "w", (tsr_dtype)dt, y, (int64_t)(n * 8 / bits));
        (void)memory_view(&a);
        (void)memory_view(&b);
        for (uint64_t i = 0; i < 12;
             i++) { /* the last bit, the first of a piece, any; so few never share an element */
            uint64_t at = i == 0 ? n * 8 - 1 : i == 1 ? MIB * 8 : bag_random(&rng) % (n * 8);
            y[at / 8] ^= (uint8_t)(1u << at % 8);
            lowest = at / bits < lowest ? at / bits : lowest;
            tsr_diff_summary s = diff(&a.view, &b.view, &o, &k);
            assert_true(s.different == 1 && s.bytes == n && k.row[0].state == TSR_DIFF_BYTES);
            assert_int_equal(k.row[0].first, lowest);
            assert_int_equal(k.row[0].different, i + 1);
        }
        memcpy(y, x, n);
        memory_done(&a);
        memory_done(&b);
    }
    free(x);
    free(y);
}

static float f32_of(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static void test_values(void **state)
{
    (void)state;
    const float nan1 = f32_of(0x7fc00001), nan2 = f32_of(0xffc00000);
    const float x[8] = { 0, nan1, 3, INFINITY, 1, -2, 0x1p-149f, 4 };
    const float y[8] = { -0.0f, nan2, 3, INFINITY, 1.0f + FLT_EPSILON, -2.5f, -0x1p-149f, nan1 };
    memory a, b;
    rows k;
    memory_init(&a);
    memory_init(&b);
    memory_put1(&a, "w", TSR_DT_F32, x, 8);
    memory_put1(&a, "zeros", TSR_DT_F32, x, 1);
    memory_put1(&b, "w", TSR_DT_F32, y, 8);
    memory_put1(&b, "zeros", TSR_DT_F32, y, 1);
    tsr_diff_opts o = { .values = true, .equal_rows = true };
    (void)diff(memory_view(&a), memory_view(&b), &o, &k);
    const tsr_diff_row *r = row_of(&k, "w");
    assert_true(r->has_values && r->different == 4 && r->first == 4);
    assert_true(r->nan_a == 1 && r->nan_b == 2 && r->inf_a == 1 && r->inf_b == 1);
    assert_true(r->max_abs == 0.5);
    assert_int_equal(r->max_ulp, 2097152); /* 2 to 2.5: a quarter of a binade */
    double eps = (double)FLT_EPSILON, tiny = 0x1p-148;
    double want = sqrt((eps * eps + 0.25 + tiny * tiny) / (9 + 1 + 4 + 0x1p-149 * 0x1p-149));
    assert_true(fabs(r->relative_l2 - want) <= 1e-15);
    assert_int_equal(row_of(&k, "zeros")->state, TSR_DIFF_EQUAL);
    assert_true(row_of(&k, "zeros")->relative_l2 == 0);
    o.values = false; /* by bits, zeros and NaN differ too */
    (void)diff(&a.view, &b.view, &o, &k);
    assert_true(row_of(&k, "w")->different == 6 && row_of(&k, "w")->first == 0);
    assert_int_equal(row_of(&k, "zeros")->state, TSR_DIFF_BYTES);
    memory_done(&a);
    memory_done(&b);
}

/* A double holds 53 bits; neighbours beyond are still two numbers. */
static void test_values_of_large_integers(void **state)
{
    (void)state;
    const int64_t x[3] = { 1, INT64_MAX - 1, -9007199254740993 }, y[3] = { 1, INT64_MAX, -9007199254740992 };
    const int64_t minus = -1, plus = 1;
    const uint64_t u[2] = { UINT64_MAX, 7 }, v[2] = { UINT64_MAX - 3, 7 };
    memory a, b;
    rows k;
    memory_init(&a);
    memory_init(&b);
    memory_put1(&a, "i", TSR_DT_I64, x, 3);
    memory_put1(&a, "u", TSR_DT_U64, u, 2);
    memory_put1(&b, "i", TSR_DT_I64, y, 3);
    memory_put1(&b, "u", TSR_DT_U64, v, 2);
    memory_put1(&a, "sign", TSR_DT_I64, &minus, 1);
    memory_put1(&b, "sign", TSR_DT_I64, &plus, 1);
    tsr_diff_opts o = { .values = true, .equal_rows = true };
    (void)diff(memory_view(&a), memory_view(&b), &o, &k);
    const tsr_diff_row *i = row_of(&k, "i"), *w = row_of(&k, "u");
    assert_true(i->state == TSR_DIFF_BYTES && i->different == 2 && i->first == 1 && i->max_abs == 1);
    assert_true(w->state == TSR_DIFF_BYTES && w->different == 1 && w->first == 0 && w->max_abs == 3);
    assert_true(row_of(&k, "sign")->max_abs == 2 && row_of(&k, "sign")->relative_l2 == 2);
    memory_done(&a);
    memory_done(&b);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* Value of an 8-bit float code by its definition; NaN where it is none. */
static double code_value(tsr_dtype dt, unsigned code)
{
    bool fnuz = dt == TSR_DT_F8_E4M3FNUZ || dt == TSR_DT_F8_E5M2FNUZ;
    int mbits = dt == TSR_DT_F8_E4M3 || dt == TSR_DT_F8_E4M3FNUZ ? 3 : 2, bias = (mbits == 3 ? 7 : 15) + fnuz;
    int e = (int)(code & 127) >> mbits, m = (int)code & ((1 << mbits) - 1);
    if ((fnuz && code == 128) || (dt == TSR_DT_F8_E4M3 && (code & 127) == 127) ||
        (dt == TSR_DT_F8_E5M2 && e == 31)) {
        return NAN;
    }
    double v = ldexp(e > 0 ? m + (1 << mbits) : m, (e > 0 ? e : 1) - bias - mbits);
    return code > 127 ? -v : v;
}

static void check_steps(const tsr_diff_row *r, double p, double q, const double *all, size_t n)
{
    if (isnan(p) || isnan(q)) {
        return;
    }
    const double *i = bsearch(&p, all, n, sizeof *all, by_value),
                 *j = bsearch(&q, all, n, sizeof *all, by_value);
    assert_non_null(i);
    assert_non_null(j);
    assert_int_equal(r->max_ulp, i > j ? i - j : j - i);
    assert_true(r->max_abs == fabs(p - q));
    assert_int_equal(r->different, p != q);
}

/* Steps between two values are counted in a sorted list of all values the dtype has. */
static void test_steps_between_values(void **state)
{
    (void)state;
    static const tsr_dtype kinds[] = { TSR_DT_F8_E4M3, TSR_DT_F8_E5M2, TSR_DT_F8_E4M3FNUZ,
                                       TSR_DT_F8_E5M2FNUZ };
    char names[MEMORY_ROOM][8];
    uint64_t rng = 6;
    for (size_t d = 0; d < 4; d++) {
        double all[256];
        size_t n = 0, kept = 0;
        for (unsigned c = 0; c < 256; c++) {
            double v = code_value(kinds[d], c);
            if (!isnan(v)) {
                all[n++] = v;
            }
        }
        qsort(all, n, sizeof *all, by_value);
        for (size_t i = 0; i < n; i++) {
            if (kept == 0 || all[i] != all[kept - 1]) { /* the zeros are one value */
                all[kept++] = all[i];
            }
        }
        for (int round = 0; round < 10; round++) {
            uint8_t x[MEMORY_ROOM], y[MEMORY_ROOM];
            memory a, b;
            rows k;
            tsr_diff_opts o = { .values = true, .equal_rows = true };
            memory_init(&a);
            memory_init(&b);
            for (size_t i = 0; i < MEMORY_ROOM; i++) {
                x[i] = (uint8_t)bag_random(&rng);
                y[i] = (uint8_t)(round == 0 ? x[i] ^ 128 : bag_random(&rng)); /* also across zero */
                (void)snprintf(names[i], sizeof names[i], "w%zu", i);
                memory_put1(&a, names[i], kinds[d], &x[i], 1);
                memory_put1(&b, names[i], kinds[d], &y[i], 1);
            }
            (void)diff(memory_view(&a), memory_view(&b), &o, &k);
            for (size_t i = 0; i < MEMORY_ROOM; i++) {
                check_steps(row_of(&k, names[i]), code_value(kinds[d], x[i]), code_value(kinds[d], y[i]), all,
                            kept);
            }
            memory_done(&a);
            memory_done(&b);
        }
    }
}

typedef struct watch {
    uint64_t done, total, calls;
    volatile int stop;
} watch;

static void on_progress(void *payload, const char *what, uint64_t done, uint64_t total)
{
    watch *w = payload;
    assert_string_equal(what, "diff");
    assert_true(done >= w->done && done <= total);
    w->done = done;
    w->total = total;
    w->stop = ++w->calls == 2;
}

static void test_selection_progress_and_stopping(void **state)
{
    (void)state;
    uint8_t *x = calloc(1, 3 * MIB);
    const char *globs[] = { "b.*", "c", NULL };
    memory a, b;
    rows k;
    watch w = { 0 };
    tsr_err err;
    tsr_diff_summary s;
    assert_non_null(x);
    memory_init(&a);
    memory_init(&b);
    memory_put1(&a, "a", TSR_DT_U8, x, (int64_t)(3 * MIB));
    memory_put1(&a, "b.1", TSR_DT_U8, x, 10);
    memory_put1(&a, "b.2", TSR_DT_U8, x, 10);
    memory_put1(&b, "b.1", TSR_DT_U8, x, 10);
    memory_put1(&b, "c", TSR_DT_U8, x, 10);
    memory_put1(&b, "d", TSR_DT_U8, x, 10);
    tsr_diff_opts o = { .globs = globs };
    s = diff(memory_view(&a), memory_view(&b), &o, &k);
    assert_true(s.compared == 1 && s.equal == 1 && s.only_a == 1 && s.only_b == 1 && k.count == 2);
    assert_int_equal(row_of(&k, "b.2")->state, TSR_DIFF_ONLY_A);
    assert_int_equal(row_of(&k, "c")->state, TSR_DIFF_ONLY_B);
    o = (tsr_diff_opts){ .progress = { .report = on_progress, .payload = &w } };
    s = diff(&a.view, &a.view, &o, &k);
    assert_true(w.calls == 5 && w.done == w.total && w.total == 3 * MIB + 20 && s.bytes == w.total);
    w = (watch){ 0 };
    o.progress.cancel = &w.stop;
    assert_int_equal(tsr_inspect_diff(&a.view, &a.view, &o, on_row, &k, &s, &err), TSR_E_CANCELLED);
    assert_int_equal(w.calls, 2);
    o = (tsr_diff_opts){ 0 };
    for (int reads = 0; reads < 10; reads++) { /* one side, then the other, fails at each piece */
        b.reads_left = -1;
        a.reads_left = reads;
        assert_int_equal(tsr_inspect_diff(&a.view, &a.view, &o, on_row, &k, &s, &err), TSR_E_IO);
        assert_non_null(strstr(err.msg, "fails on purpose"));
    }
    a.reads_left = 10;
    assert_int_equal(tsr_inspect_diff(&a.view, &a.view, &o, on_row, &k, &s, &err), TSR_OK);
    a.reads_left = -1;
    b.reads_left = 0;
    assert_int_equal(tsr_inspect_diff(&a.view, &b.view, &o, on_row, &k, &s, &err), TSR_E_IO);
    memory_done(&a);
    memory_done(&b);
    free(x);
}

/* ---- diff of checkpoints ------------------------------------------------------------------------------- */

typedef struct touched {
    const bag *b;
    uint32_t tensor, item;
    uint64_t at; /* of this byte one bit is turned over; UINT64_MAX: none */
} touched;

static tsr_status touched_fill(void *payload, const tsr_slot *slot, void *dst, tsr_err *err)
{
    const touched *t = payload;
    union {
        const bag *b;
        void *payload;
    } u = { .b = t->b };
    TSR_TRY(bag_fill(u.payload, slot, dst, err));
    if (slot->tensor == t->tensor && slot->item == t->item && t->at >= slot->off &&
        t->at < slot->off + slot->bytes) {
        ((uint8_t *)dst)[t->at - slot->off] ^= 1;
    }
    return TSR_OK;
}

static void save_and_open(const char *path, touched *t, const tsr_save_opts *o, tsr_view *v)
{
    tsr_err err;
    char cmd[600];
    (void)snprintf(cmd, sizeof cmd, "rm -rf '%s'", path);
    assert_int_equal(system(cmd), 0);
    CHECK_OK(tsr_save(path, t->b->decls, t->b->count, touched_fill, t, o, &err));
    CHECK_OK(tsr_view_open(v, path, "auto", NULL, NULL, &err));
}

static void test_checkpoints(void **state)
{
    (void)state;
    char *dir = test_dir("inspect"), a[500], b[500], name[500];
    bag *tensors = bag_make(77, 12, 2, 4, 60000);
    touched t = { .b = tensors, .at = UINT64_MAX };
    tsr_view va, vb;
    rows k;
    uint64_t rng = 4, tried = 0;
    (void)snprintf(a, sizeof a, "%s/a", dir);
    (void)snprintf(b, sizeof b, "%s/b", dir);
    save_and_open(a, &t, &(tsr_save_opts){ .expert_partitions = 1 }, &va);
    for (int round = 0; round < 25; round++) {
        tsr_save_opts so = { .expert_partitions = 2, .allow_uneven = true, .compress = round % 2 == 0 };
        uint64_t bytes = 0;
        t.tensor = (uint32_t)(bag_random(&rng) % tensors->count);
        const tsr_tensor_decl *d = &tensors->decls[t.tensor];
        t.item = d->expert_count > 0 ? (uint32_t)(bag_random(&rng) % d->expert_count) : 0;
        assert_true(tsr_shape_bytes(d->dtype, d->rank, d->shape, &bytes));
        t.at = round > 0 && bytes > 0 ? bag_random(&rng) % bytes : UINT64_MAX;
        save_and_open(b, &t, &so, &vb);
        tsr_tensor_info info = { .name = d->name, .expert_count = d->expert_count };
        (void)tsr_tensor_item_name(&info, t.item, name, sizeof name);
        for (int hashes = 0; hashes < 2; hashes++) {
            tsr_diff_opts o = { .hashes = hashes != 0 };
            tsr_diff_summary s = diff(&va, &vb, &o, &k);
            if (!so.compress) { /* equal chunks: checksums are enough, nothing is read */
                assert_true((s.bytes == 0) == (hashes != 0));
            }
            assert_true(s.only_a == 0 && s.only_b == 0 && s.compared == (uint64_t)va.map->count);
            assert_int_equal(k.count, t.at != UINT64_MAX);
            assert_int_equal(s.different, t.at != UINT64_MAX);
            if (k.count > 0) {
                assert_string_equal(k.row[0].name, name);
                assert_int_equal(k.row[0].state, TSR_DIFF_BYTES);
                tried++;
            }
        }
        tsr_view_close(&vb);
    }
    assert_true(tried > 30); /* empty tensors have no bit to turn */
    tsr_view_close(&va);
    bag_free(tensors);
    test_dir_remove(dir);
}

/* A checkpoint's manifest names its family; raw and canonical ones have none. */
static void test_families(void **state)
{
    (void)state;
    static const char *const arch[] = { "kimi-k3", "kimi-linear", "canonical", "raw" };
    char *dir = test_dir("inspect"), path[500], family[16];
    bag *tensors = bag_make(5, 3, 1, 2, 300);
    touched t = { .b = tensors, .at = UINT64_MAX };
    tsr_view v[5];
    rows k;
    for (size_t i = 0; i < 5; i++) {
        (void)snprintf(path, sizeof path, "%s/%zu", dir, i);
        save_and_open(path, &t, &(tsr_save_opts){ .arch = arch[i % 4] }, &v[i]);
        assert_int_equal(tsr_view_family(&v[i], family, sizeof family), i % 4 < 2);
        assert_true(i % 4 >= 2 || strcmp(family, arch[i % 4]) == 0);
        assert_false(tsr_view_family(&v[i], family, 7)); /* "kimi-k3" has eight with its end */
    }
    for (size_t i = 0; i < 5; i++) {
        for (size_t j = 0; j < 5; j++) { /* 0 and 4 are the same family */
            tsr_diff_summary s = diff(&v[i], &v[j], &(tsr_diff_opts){ 0 }, &k);
            assert_int_equal(s.arch_differs, i % 4 < 2 && j % 4 < 2 && i % 4 != j % 4);
        }
    }
    memory m;
    memory_init(&m);
    memory_put1(&m, "w", TSR_DT_U8, "", 1);
    (void)memory_view(&m);
    assert_false(diff(&m.view, &v[0], &(tsr_diff_opts){ 0 }, &k).arch_differs);
    m.view.map->layout = tsr_layout_find("kimi-linear"); /* as --arch would have it */
    assert_false(tsr_view_family(&m.view, family, 11));
    assert_true(diff(&m.view, &v[0], &(tsr_diff_opts){ 0 }, &k).arch_differs);
    assert_true(diff(&v[4], &m.view, &(tsr_diff_opts){ 0 }, &k).arch_differs);
    assert_false(diff(&m.view, &v[1], &(tsr_diff_opts){ 0 }, &k).arch_differs);
    memory_done(&m);
    for (size_t i = 0; i < 5; i++) {
        tsr_view_close(&v[i]);
    }
    bag_free(tensors);
    test_dir_remove(dir);
}

/* ---- scan ---------------------------------------------------------------------------------------------- */

typedef struct told {
    char names[200][64];
    int64_t row[200], values[200];
    size_t count;
} told;

static void on_nan(void *payload, const char *tensor, int64_t row, int64_t nan_values)
{
    told *t = payload;
    assert_true(t->count < 200);
    (void)snprintf(t->names[t->count], sizeof t->names[0], "%s", tensor);
    t->row[t->count] = row;
    t->values[t->count++] = nan_values;
}

static void test_scan(void **state)
{
    (void)state;
    enum { ROWS = 3 * 211, COLS = 1000 }; /* rows lie across the borders of pieces */
    uint8_t *s = malloc((size_t)ROWS * COLS);
    static told t;
    int64_t want[ROWS] = { 0 };
    uint64_t rng = 21;
    memory m;
    tsr_err err;
    assert_non_null(s);
    for (size_t i = 0; i < (size_t)ROWS * COLS; i++) {
        s[i] = (uint8_t)(bag_random(&rng) % 255);
    }
    for (int i = 0; i < 120; i++) {
        size_t at = i == 0   ? (size_t)ROWS * COLS - 1
                    : i == 1 ? 0
                    : i < 6  ? ((size_t)1 << 18) - 4 + (size_t)i /* on both sides of a border */
                             : bag_random(&rng) % ((size_t)ROWS * COLS);
        want[at / COLS] += s[at] != 255 ? 32 : 0;
        s[at] = 255;
    }
    memory_init(&m);
    memory_put(&m, "scales", TSR_DT_E8M0, s, 3, (int64_t[]){ 3, 211, COLS });
    memory_put(&m, "bytes", TSR_DT_U8, s, 2, (int64_t[]){ ROWS, COLS });
    memory_put(&m, "floats", TSR_DT_F8_E4M3, s, 2, (int64_t[]){ ROWS, COLS });
    memory_put(&m, "p.weight_packed", TSR_DT_U8, s, 2, (int64_t[]){ 1, 16 });
    memory_put(&m, "p.weight_scale", TSR_DT_U8, s, 2, (int64_t[]){ 1, 1 });
    memory_put(&m, "one", TSR_DT_E8M0, s, 0, NULL);
    memory_put(&m, "none", TSR_DT_E8M0, s, 2, (int64_t[]){ 5, 0 });
    CHECK_OK(tsr_inspect_scan_scales(memory_view(&m), on_nan, &t, &err));
    size_t k = 0;
    for (int64_t r = 0; r < ROWS; r++) {
        if (want[r] > 0) {
            assert_string_equal(t.names[k], "scales");
            assert_int_equal(t.row[k], r);
            assert_int_equal(t.values[k++], want[r]);
        }
    }
    assert_int_equal(t.count, k + 2);
    assert_true(k > 50);
    assert_string_equal(t.names[k], "p.weight_scale");
    assert_string_equal(t.names[k + 1], "one");
    assert_true(t.row[k] == 0 && t.values[k] == 32 && t.row[k + 1] == 0 && t.values[k + 1] == 32);
    m.reads_left = 2;
    assert_int_equal(tsr_inspect_scan_scales(&m.view, on_nan, &(told){ 0 }, &err), TSR_E_IO);
    memory_done(&m);
    free(s);
}

/* A name alone makes no scales: the codes must be there. */
static void test_scan_wants_pairs(void **state)
{
    (void)state;
    static const uint8_t s[4] = { 255, 0, 0, 0 };
    static const char *const partner[] = { "p.weight_packed", "p.weight", "weight_packed", "q.weight_packed",
                                           "p.weight_packed.x" };
    for (size_t i = 0; i < 7; i++) {
        told t = { 0 };
        memory m;
        tsr_err err;
        memory_init(&m);
        memory_put1(&m, "p.weight_scale", TSR_DT_U8, s, 4);
        if (i < 6) {
            memory_put1(&m, partner[i % 5], i < 5 ? TSR_DT_U8 : TSR_DT_F32, s, 1);
        }
        CHECK_OK(tsr_inspect_scan_scales(memory_view(&m), on_nan, &t, &err));
        assert_int_equal(t.count, i == 0);
        assert_true(i != 0 || (strcmp(t.names[0], "p.weight_scale") == 0 && t.values[0] == 32));
        memory_done(&m);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_states),
        cmocka_unit_test(test_every_bit_counts),
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_values_of_large_integers),
        cmocka_unit_test(test_steps_between_values),
        cmocka_unit_test(test_selection_progress_and_stopping),
        cmocka_unit_test(test_checkpoints),
        cmocka_unit_test(test_families),
        cmocka_unit_test(test_scan),
        cmocka_unit_test(test_scan_wants_pairs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
