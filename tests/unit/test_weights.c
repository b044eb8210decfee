/* test_weights.c - one model in every form it may be stored in gives the same bytes for every tensor and every expert. */
#include "convert/weights.h"
#include "tests/harness/bag.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static const char *const parts[TSR_PART_COUNT] = { "gate.weight", "up.weight", "down.weight",
                                                   "gate.scale",  "up.scale",  "down.scale" };

typedef struct opened {
    tsr_view view;
    tsr_weight_source source;
} opened;

static void open_path(opened *o, const char *path)
{
    tsr_err err;
    CHECK_OK(tsr_view_open(&o->view, path, NULL, NULL, NULL, &err));
    CHECK_OK(tsr_view_weights(&o->source, &o->view, &err));
}

static void close_path(opened *o)
{
    tsr_view_weights_done(&o->source);
    tsr_view_close(&o->view);
    assert_null(o->source.payload);
}

static void *read_all(const tsr_weight_source *s, const tsr_weight_info *w)
{
    tsr_err err;
    void *p = malloc(w->bytes + 1);
    assert_non_null(p);
    CHECK_OK(s->read(s->payload, w->id, p, w->bytes, &err));
    return p;
}

/* read_expert against single reads of the same source, and the bytes read against what was promised. */
static uint64_t compare_experts(const tsr_weight_source *s, int32_t layer, int32_t experts)
{
    tsr_err err;
    uint64_t bytes, read = 0, sum = 0;
    CHECK_OK(s->expert_bytes(s->payload, layer, &bytes, &err));
    uint8_t *dst = malloc(bytes);
    assert_non_null(dst);
    for (int32_t e = 0; e < experts; e++) {
        const void *part[TSR_PART_COUNT];
        CHECK_OK(s->read_expert(s->payload, layer, e, dst, bytes, part, &read, &err));
        sum += read;
        for (int p = 0; p < TSR_PART_COUNT; p++) {
            char name[64];
            tsr_weight_info w;
            (void)snprintf(name, sizeof name, "layers.%d.experts.%d.%s", layer, e, parts[p]);
            tsr_status st = s->find(s->payload, name, &w, &err);
            if (st == TSR_E_MISSING) {
                assert_true(p >= 3 && part[p] == NULL);
                continue;
            }
            assert_int_equal(st, TSR_OK);
            void *alone = read_all(s, &w);
            const uint8_t *at = part[p];
            assert_true(at >= dst && (uint64_t)(at - dst) + w.bytes <= bytes);
            assert_memory_equal(at, alone, w.bytes);
            free(alone);
        }
    }
    free(dst);
    return sum;
}

/* ---- the small model of the released layout ---------------------------------------------------------------------------- */

enum { TINY_LAYERS = 6, TINY_EXPERTS = 16 };

static void compare_models(const opened *a, const opened *b)
{
    char name[300];
    tsr_err err;
    assert_int_equal(a->view.map->count, b->view.map->count);
    for (int64_t i = 0; i < a->view.map->count; i++) {
        tsr_weight_info x, y;
        (void)tsr_map_name(a->view.map, i, name, sizeof name);
        CHECK_OK(a->source.find(a->source.payload, name, &x, &err));
        CHECK_OK(b->source.find(b->source.payload, name, &y, &err));
        assert_true(x.dtype == y.dtype && x.rank == y.rank && x.bytes == y.bytes);
        assert_memory_equal(x.shape, y.shape, (size_t)x.rank * sizeof x.shape[0]);
        void *p = read_all(&a->source, &x), *q = read_all(&b->source, &y);
        assert_memory_equal(p, q, x.bytes);
        free(p);
        free(q);
    }
    for (int32_t l = 1; l < TINY_LAYERS; l++) {
        (void)compare_experts(&b->source, l, TINY_EXPERTS);
    }
}

static void convert(const char *to, const tsr_convert_opts *o)
{
    tsr_convert_plan *p;
    tsr_err err;
    CHECK_OK(tsr_convert_plan_make(&p, TSR_TEST_DATA "/tiny-mxfp4", to, o, &err));
    CHECK_OK(tsr_convert_run(p, &err));
    tsr_convert_plan_free(&p);
}

static void test_forms(void **state)
{
    (void)state;
    char *dir = test_dir("weights"), raw[400], small[400], cut[400], tar[400];
    tsr_err err;
    (void)snprintf(raw, sizeof raw, "%s/raw", dir);
    (void)snprintf(small, sizeof small, "%s/small", dir);
    (void)snprintf(cut, sizeof cut, "%s/cut", dir);
    (void)snprintf(tar, sizeof tar, "%s/c.tar", dir);
    convert(raw, &(tsr_convert_opts){ .expert_partitions = 2 });
    convert(small, &(tsr_convert_opts){ .compress = true });
    CHECK_OK(tsr_pack(small, tar, 0, NULL, &err));
    tsr_ckpt *c;
    CHECK_OK(tsr_ckpt_open(&c, raw, &err));
    CHECK_OK(tsr_reshard(c, cut, &(tsr_reshard_opts){ .expert_partitions = 8, .rewrite = true }, &err));
    tsr_ckpt_close(&c);
    opened files, other;
    open_path(&files, TSR_TEST_DATA "/tiny-mxfp4");
    const char *const paths[] = { TSR_TEST_DATA "/tiny-mxfp4", raw, small, cut, tar };
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
        open_path(&other, paths[i]);
        compare_models(&files, &other);
        close_path(&other);
    }
    close_path(&files);
    test_dir_remove(dir);
}

static void test_refusals(void **state)
{
    (void)state;
    opened o;
    tsr_err err;
    uint64_t bytes, read;
    const void *part[TSR_PART_COUNT];
    tsr_weight_info w;
    open_path(&o, TSR_TEST_DATA "/tiny-mxfp4");
    const tsr_weight_source *s = &o.source;
    CHECK_OK(s->expert_bytes(s->payload, 2, &bytes, &err));
    uint8_t *dst = malloc(bytes);
    assert_int_equal(s->find(s->payload, "layers.2.nothing", &w, &err), TSR_E_MISSING);
    assert_int_equal(s->find(s->payload, "layers.2.experts.16.gate.weight", &w, &err), TSR_E_MISSING);
    assert_int_equal(s->find(s->payload, "layers.2.experts.{e}.gate.weight", &w, &err), TSR_E_MISSING);
    assert_int_equal(s->expert_bytes(s->payload, 0, &read, &err), TSR_E_MISSING);
    assert_int_equal(s->expert_bytes(s->payload, -1, &read, &err), TSR_E_MISSING);
    assert_int_equal(s->expert_bytes(s->payload, 6, &read, &err), TSR_E_MISSING);
    assert_int_equal(s->read_expert(s->payload, 2, 16, dst, bytes, part, &read, &err), TSR_E_MISSING);
    assert_int_equal(s->read_expert(s->payload, 2, -1, dst, bytes, part, &read, &err), TSR_E_MISSING);
    assert_int_equal(s->read_expert(s->payload, 0, 1, dst, bytes, part, &read, &err), TSR_E_MISSING);
    assert_int_equal(s->read_expert(s->payload, 2, 1, dst, bytes - 1, part, &read, &err), TSR_E_LIMIT);
    assert_non_null(strstr(err.msg, "layer 2"));
    free(dst);
    close_path(&o);
}

static bool keep_most(void *payload, const char *name)
{
    (void)payload;
    return strstr(name, "layers.3.block_sparse_moe.experts.5.w2") == NULL;
}

/* A part of a model: what is there can be read, what is not is named. */
static void test_partial(void **state)
{
    (void)state;
    opened o;
    tsr_err err;
    uint64_t bytes, read;
    const void *part[TSR_PART_COUNT];
    tsr_map_opts mo = { .partial = true, .keep = keep_most };
    CHECK_OK(tsr_view_open(&o.view, TSR_TEST_DATA "/tiny-mxfp4", NULL, NULL, &mo, &err));
    CHECK_OK(tsr_view_weights(&o.source, &o.view, &err));
    const tsr_weight_source *s = &o.source;
    CHECK_OK(s->expert_bytes(s->payload, 3, &bytes, &err));
    uint8_t *dst = malloc(bytes);
    for (int32_t e = 0; e < TINY_EXPERTS; e++) {
        tsr_status st = s->read_expert(s->payload, 3, e, dst, bytes, part, &read, &err);
        assert_int_equal(st, e == 5 ? TSR_E_MISSING : TSR_OK);
    }
    tsr_weight_info w;
    assert_int_equal(s->find(s->payload, "layers.3.experts.5.down.weight", &w, &err), TSR_E_MISSING);
    CHECK_OK(s->find(s->payload, "layers.3.experts.5.up.weight", &w, &err));
    free(dst);
    (void)compare_experts(s, 4, TINY_EXPERTS);
    close_path(&o);
}

/* ---- experts that compress, in one chunk and in many, beside a matrix no model knows -------------------------------------- */

enum { EXPERTS = 6 };

typedef struct made {
    tsr_tensor_decl decls[8];
    uint32_t count;
} made;

static void add(made *m, const char *name, tsr_dtype dt, const int64_t *shape, int32_t layer)
{
    m->decls[m->count++] = (tsr_tensor_decl){ .name = name,
                                              .dtype = dt,
                                              .src_dtype = dt,
                                              .rank = 2,
                                              .shape = shape,
                                              .klass = TSR_CLASS_EXPERTS,
                                              .layer = layer,
                                              .expert_count = EXPERTS,
                                              .partner = -1 };
}

/* Numbers whose high bytes are nearly equal; random bytes for U8. */
static tsr_status fill(void *payload, const tsr_slot *slot, void *dst, tsr_err *err)
{
    const made *m = payload;
    uint8_t *p = dst;
    (void)err;
    for (uint64_t i = 0; i < slot->bytes; i++) {
        uint64_t at = slot->off + i, rng = at * 977 + slot->tensor * 31 + slot->item * 7 + 1;
        bool high = m->decls[slot->tensor].dtype == TSR_DT_BF16 && at % 2 == 1;
        p[i] = high ? 0x3d : (uint8_t)bag_random(&rng);
    }
    return TSR_OK;
}

static void *reader(void *payload)
{
    const tsr_weight_source *s = payload;
    for (int round = 0; round < 3; round++) {
        (void)compare_experts(s, 1, EXPERTS);
    }
    return NULL;
}

static void compare_filled(const opened *o, made *m)
{
    for (uint32_t d = 0; d < m->count; d++) {
        for (uint32_t e = 0; e < EXPERTS; e++) {
            char name[64];
            tsr_weight_info w;
            tsr_err err;
            const char *mark = strstr(m->decls[d].name, "{e}");
            (void)snprintf(name, sizeof name, "%.*s%u%s", (int)(mark - m->decls[d].name), m->decls[d].name, e,
                           mark + 3);
            CHECK_OK(o->source.find(o->source.payload, name, &w, &err));
            uint8_t *got = read_all(&o->source, &w), *want = malloc(w.bytes);
            CHECK_OK(fill(m, &(tsr_slot){ .tensor = d, .item = e, .bytes = w.bytes }, want, &err));
            assert_memory_equal(got, want, w.bytes);
            free(got);
            free(want);
        }
    }
}

static void test_compressed(void **state)
{
    (void)state;
    static const int64_t small[2] = { 64, 256 }, odd[2] = { 77, 123 }, large[2] = { 2305, 2048 };
    made m = { .count = 0 };
    add(&m, "layers.1.experts.{e}.gate.weight", TSR_DT_BF16, small, 1);
    add(&m, "layers.1.experts.{e}.up.weight", TSR_DT_U8, odd, 1);
    add(&m, "layers.1.experts.{e}.down.weight", TSR_DT_BF16, odd, 1);
    add(&m, "layers.1.experts.{e}.extra", TSR_DT_BF16, small, 1);
    add(&m, "layers.2.experts.{e}.gate.weight", TSR_DT_BF16, large, 2); /* 9 MB: several chunks */
    add(&m, "layers.2.experts.{e}.up.weight", TSR_DT_BF16, small, 2);
    add(&m, "layers.2.experts.{e}.down.weight", TSR_DT_U8, large, 2);
    add(&m, "layers.2.experts.{e}.gate.scale", TSR_DT_U8, odd, 2);
    char *dir = test_dir("weights"), path[400];
    tsr_err err;
    for (int kind = 0; kind < 2; kind++) {
        opened o;
        (void)snprintf(path, sizeof path, "%s/%d", dir, kind);
        CHECK_OK(tsr_save(
            path, m.decls, m.count, fill, &m,
            &(tsr_save_opts){ .compress = kind == 1, .expert_partitions = 2, .arch = "canonical" }, &err));
        open_path(&o, path);
        compare_filled(&o, &m);
        uint64_t one = compare_experts(&o.source, 1, EXPERTS), two = compare_experts(&o.source, 2, EXPERTS);
        uint64_t whole = EXPERTS * (uint64_t)(2 * 2 * 64 * 256 + 77 * 123 * 3);
        assert_true(kind == 0 ? one >= whole : one < whole * 3 / 4);
        assert_true(two > 0);
        pthread_t other;
        assert_int_equal(pthread_create(&other, NULL, reader, &o.source), 0);
        (void)reader(&o.source);
        assert_int_equal(pthread_join(other, NULL), 0);
        close_path(&o);
    }
    test_dir_remove(dir);
}

/* ---- safetensors whose experts lie scattered, and other names ---------------------------------------------------------------- */

/* Kimi-Linear names. Not together: an expert's matrices lie among those of others. */
static void write_file(const char *path, bool together)
{
    static const char *const names[3] = { "w1", "w3", "w2" };
    char head[8192];
    size_t n = 0;
    enum { BYTES = 32 };
    for (int e = 0; e < EXPERTS; e++) {
        for (int p = 0; p < 3; p++) {
            int at = (together ? e * 3 + p : p * EXPERTS + e) * BYTES;
            n += (size_t)snprintf(head + n, sizeof head - n,
                                  "%s\"model.layers.1.block_sparse_moe.experts.%d.%s.weight\":{\"dtype\":"
                                  "\"BF16\",\"shape\":[4,4],\"data_offsets\":[%d,%d]}",
                                  n > 0 ? "," : "{", e, names[p], at, at + BYTES);
        }
    }
    n += (size_t)snprintf(head + n, sizeof head - n, "}");
    FILE *f = fopen(path, "wb");
    uint64_t length = n;
    assert_non_null(f);
    assert_int_equal(fwrite(&length, 8, 1, f), 1);
    assert_int_equal(fwrite(head, n, 1, f), 1);
    for (int i = 0; i < EXPERTS * 3 * BYTES; i++) {
        int item = i / BYTES, id = together ? item : item % EXPERTS * 3 + item / EXPERTS;
        assert_true(fputc((id * 32 + i % BYTES) & 255, f) != EOF);
    }
    assert_int_equal(fclose(f), 0);
}

static void test_scattered(void **state)
{
    (void)state;
    char *dir = test_dir("weights"), path[400];
    tsr_err err;
    for (int together = 0; together < 2; together++) {
        opened o;
        tsr_weight_info w;
        (void)snprintf(path, sizeof path, "%s/%d.safetensors", dir, together);
        write_file(path, together != 0);
        CHECK_OK(tsr_view_open(&o.view, path, "kimi-linear", NULL, NULL, &err));
        CHECK_OK(tsr_view_weights(&o.source, &o.view, &err));
        uint64_t bytes;
        CHECK_OK(o.source.expert_bytes(o.source.payload, 1, &bytes, &err));
        assert_int_equal(bytes, together ? 128 : 192); /* as it lies, or each part aligned */
        assert_int_equal(compare_experts(&o.source, 1, EXPERTS), EXPERTS * 96);
        CHECK_OK(o.source.find(o.source.payload, "layers.1.experts.2.up.weight", &w, &err));
        uint8_t *p = read_all(&o.source, &w);
        for (int i = 0; i < 32; i++) {
            assert_int_equal(p[i], ((2 * 3 + 1) * 32 + i) & 255);
        }
        free(p);
        close_path(&o);
    }
    test_dir_remove(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_forms), cmocka_unit_test(test_refusals),
                                        cmocka_unit_test(test_partial), cmocka_unit_test(test_compressed),
                                        cmocka_unit_test(test_scattered) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
