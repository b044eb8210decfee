/* bag.c - see bag.h. */
#include "tests/harness/bag.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

uint64_t bag_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u; /* splitmix64 */
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Bytes [off, off + n) of an item: a quarter of the tensors compress well, the others do not. */
static void make_bytes(uint64_t seed, uint32_t tensor, uint32_t item, uint64_t off, uint64_t n, uint8_t *dst)
{
    for (uint64_t i = 0; i < n; i++) {
        uint64_t word = (off + i) / 8;
        uint64_t state = seed ^ ((uint64_t)tensor << 40) ^ ((uint64_t)item << 20) ^
                         (tensor % 4 == 0 ? word / 64 : word);
        uint64_t value = bag_random(&state);
        dst[i] = (uint8_t)(value >> ((off + i) % 8 * 8));
    }
}

static const tsr_dtype kinds[] = { TSR_DT_F64,     TSR_DT_F32,     TSR_DT_F16,         TSR_DT_BF16,
                                   TSR_DT_F8_E4M3, TSR_DT_F8_E5M2, TSR_DT_F8_E4M3FNUZ, TSR_DT_F8_E5M2FNUZ,
                                   TSR_DT_E8M0,    TSR_DT_F4_E2M1, TSR_DT_MXFP4,       TSR_DT_I64,
                                   TSR_DT_I32,     TSR_DT_I16,     TSR_DT_I8,          TSR_DT_U64,
                                   TSR_DT_U32,     TSR_DT_U16,     TSR_DT_U8,          TSR_DT_BOOL };
static const char *const odd_names[] = { "",         ".",          "/",  "a/b",      "%2E",
                                         "näme ünï", "with space", "..", "\x01\x02", "{e}" };

static void random_shape(bag *b, uint32_t i, uint64_t *rng, uint64_t max_bytes)
{
    tsr_tensor_decl *d = &b->decls[i];
    d->dtype = kinds[bag_random(rng) % (sizeof kinds / sizeof *kinds)];
    d->src_dtype = d->dtype;
    d->rank = (int)(bag_random(rng) % 5);
    const tsr_dtype_traits *t = tsr_dtype_info((unsigned)d->dtype);
    if (t->elems_per_unit > 1 && d->rank == 0) {
        d->rank = 1;
    }
    uint64_t left = max_bytes / t->bytes_per_unit;
    left = left > 0 ? bag_random(rng) % left + 1 : 1;
    for (int k = 0; k < d->rank; k++) {
        uint64_t dim = k == d->rank - 1 ? left : bag_random(rng) % 7 + (bag_random(rng) % 20 != 0);
        b->shapes[i][k] = (int64_t)(dim * (k == d->rank - 1 ? t->elems_per_unit : 1));
        left = dim > 0 ? left / dim : left;
        left = left > 0 ? left : 1;
    }
    d->shape = b->shapes[i];
}

bag *bag_make(uint64_t seed, uint32_t plain, uint32_t layers, uint32_t experts, uint64_t max_bytes)
{
    static const char *const parts[] = { "gate.weight", "gate.scale", "up.weight", "down.weight" };
    bag *b = calloc(1, sizeof *b);
    uint64_t rng = seed;
    b->seed = seed;
    b->count = plain + layers * 4;
    b->decls = calloc(b->count + 1, sizeof *b->decls);
    b->names = calloc(b->count + 1, sizeof *b->names);
    b->shapes = calloc(b->count + 1, sizeof *b->shapes);
    for (uint32_t i = 0; i < b->count; i++) {
        tsr_tensor_decl *d = &b->decls[i];
        random_shape(b, i, &rng, max_bytes);
        d->layer = -1;
        d->partner = -1;
        if (i < plain) {
            int n = i < sizeof odd_names / sizeof *odd_names ? asprintf(&b->names[i], "%s", odd_names[i])
                                                             : asprintf(&b->names[i], "tensor.%u.weight", i);
            CHECK(n >= 0);
        } else {
            uint32_t f = i - plain;
            CHECK(asprintf(&b->names[i], "layers.%u.experts.{e}.%s", f / 4, parts[f % 4]) >= 0);
            d->klass = TSR_CLASS_EXPERTS;
            d->layer = (int32_t)(f / 4);
            d->expert_count = f / 4 % 3 == 2 && experts > 1 ? experts - 1 : experts;
        }
        d->name = b->names[i];
        uint64_t bytes;
        CHECK(tsr_shape_bytes(d->dtype, d->rank, d->shape, &bytes));
        b->bytes += bytes * (d->expert_count > 0 ? d->expert_count : 1);
    }
    return b;
}

void bag_free(bag *b)
{
    for (uint32_t i = 0; i < b->count; i++) {
        free(b->names[i]);
    }
    free(b->names);
    free(b->shapes);
    free(b->decls);
    free(b);
}

tsr_status bag_fill(void *payload, const tsr_slot *slot, void *dst, tsr_err *err)
{
    (void)err;
    const bag *b = payload;
    make_bytes(b->seed, slot->tensor, slot->item, slot->off, slot->bytes, dst);
    return TSR_OK;
}

static int compare_item(const bag *b, const tsr_ckpt *c, const tsr_tensor_info *t, uint32_t i, uint32_t item)
{
    tsr_err err;
    uint8_t *want = malloc(t->item_bytes + 1), *got = malloc(t->item_bytes + 1);
    int bad = 0;
    make_bytes(b->seed, i, item, 0, t->item_bytes, want);
    tsr_status st = tsr_ckpt_read(c, t, item, 0, got, t->item_bytes, TSR_READ_CHECK, &err);
    if (st != TSR_OK || memcmp(want, got, t->item_bytes) != 0) {
        fprintf(stderr, "%s item %u: %s\n", t->name, item, st != TSR_OK ? err.msg : "bytes differ");
        bad = 1;
    }
    if (bad == 0 && t->item_bytes > 2) { /* a piece from the middle, unchecked path */
        uint64_t off = t->item_bytes / 3, n = t->item_bytes / 2;
        st = tsr_ckpt_read(c, t, item, off, got, n, 0, &err);
        if (st != TSR_OK || memcmp(want + off, got, n) != 0) {
            fprintf(stderr, "%s item %u: piece differs: %s\n", t->name, item, st != TSR_OK ? err.msg : "");
            bad = 1;
        }
    }
    free(want);
    free(got);
    return bad;
}

int bag_compare(const bag *b, const tsr_ckpt *c)
{
    int bad = 0;
    tsr_err err;
    for (uint32_t i = 0; i < b->count; i++) {
        const tsr_tensor_decl *d = &b->decls[i];
        tsr_tensor_info t;
        uint32_t items = d->expert_count > 0 ? d->expert_count : 1;
        for (uint32_t e = 0; e < items; e++) {
            char name[512];
            uint32_t item;
            t = (tsr_tensor_info){ .name = d->name, .expert_count = d->expert_count };
            (void)tsr_tensor_item_name(&t, e, name, sizeof name);
            tsr_status st = tsr_ckpt_find(c, name, &t, &item, &err);
            if (st != TSR_OK || item != e || t.dtype != d->dtype || t.rank != d->rank ||
                t.klass != d->klass || t.layer != d->layer || t.expert_count != d->expert_count ||
                (d->rank > 0 && memcmp(t.shape, d->shape, (size_t)d->rank * 8) != 0)) {
                fprintf(stderr, "%s: not as declared: %s\n", name, st != TSR_OK ? err.msg : "");
                bad++;
                continue;
            }
            bad += compare_item(b, c, &t, i, e);
        }
    }
    return bad;
}

char *test_dir(const char *name)
{
    const char *base = getenv("TMPDIR");
    char *path;
    CHECK(asprintf(&path, "%s/tsr-%s-XXXXXX", base != NULL ? base : "/tmp", name) >= 0);
    CHECK(mkdtemp(path) != NULL);
    return path;
}

void test_dir_remove(char *path)
{
    char *cmd;
    CHECK(asprintf(&cmd, "rm -rf '%s'", path) >= 0);
    CHECK(system(cmd) == 0);
    free(cmd);
    free(path);
}
