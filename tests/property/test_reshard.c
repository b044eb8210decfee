/* test_reshard.c - partitions there and back keep every bit; files are linked where they nest; the tar reads in place;
 * the index comes back from the shards; equal shards of a parent are linked. */
#include "tests/harness/bag.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static void expect_same(const bag *b, const char *path)
{
    tsr_err err;
    tsr_ckpt *c;
    tsr_verify_report r;
    CHECK_OK(tsr_ckpt_open_any(&c, path, NULL, &err));
    CHECK(bag_compare(b, c) == 0);
    tsr_ckpt_close(&c);
    CHECK_OK(tsr_verify(path, TSR_VERIFY_FULL, 2, NULL, NULL, NULL, &r, &err));
    CHECK(r.findings == 0);
}

static char *at(const char *dir, const char *name)
{
    char *p;
    CHECK(asprintf(&p, "%s/%s", dir, name) >= 0);
    return p;
}

static void circle(const bag *b, const char *dir, const char *first)
{
    static const uint32_t steps[] = { 4, 2, 8, 3, 1 };
    char *from = at(dir, first);
    tsr_err err;
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        char name[64];
        tsr_ckpt *c;
        (void)snprintf(name, sizeof name, "%s-%zu", first, i);
        char *to = at(dir, name);
        tsr_reshard_opts o = { .expert_partitions = steps[i],
                               .allow_uneven = true,
                               .dense_files = i % 2 == 0 ? 3 : 0,
                               .rewrite = i == 4,
                               .resumable = true };
        tsr_reshard_plan plan;
        CHECK_OK(tsr_ckpt_open(&c, from, &err));
        CHECK_OK(tsr_reshard_plan_make(&plan, c, &o, &err));
        CHECK_OK(tsr_reshard(c, to, &o, &err));
        if (i == 1) { /* 4 -> 2 nests, dense is as it was: nothing moves */
            CHECK(plan.moved_files == 0 && plan.linked_files > 0);
        }
        tsr_ckpt_close(&c);
        expect_same(b, to);
        free(from);
        from = to;
    }
    free(from);
}

static void tar_and_index(const bag *b, const char *dir)
{
    tsr_err err;
    char *c = at(dir, "raw"), *tar = at(dir, "raw.tar"), *zst = at(dir, "raw.tar.zst"),
         *back = at(dir, "back"), *back2 = at(dir, "back2"), *ix = at(dir, "raw/index.tsx"),
         *keep = at(dir, "index.keep"), *cmd;
    CHECK_OK(tsr_pack(c, tar, 0, NULL, &err));
    expect_same(b, tar);
    CHECK_OK(tsr_unpack(tar, back, NULL, &err));
    expect_same(b, back);
    CHECK_OK(tsr_pack(c, zst, 3, NULL, &err));
    CHECK_OK(tsr_unpack(zst, back2, NULL, &err));
    expect_same(b, back2);
    tsr_ckpt *none;
    CHECK(tsr_ckpt_open_any(&none, zst, NULL, &err) == TSR_E_UNSUPPORTED);
    CHECK(tsr_unpack(tar, back, NULL, &err) == TSR_E_CONFLICT);
    CHECK(asprintf(&cmd, "diff -r '%s' '%s' && mv '%s' '%s'", c, back, ix, keep) >= 0);
    CHECK(system(cmd) == 0);
    free(cmd);
    bool changed;
    CHECK_OK(tsr_index_rebuild(c, &changed, &err));
    CHECK(changed);
    CHECK(asprintf(&cmd, "cmp '%s' '%s'", ix, keep) >= 0);
    CHECK(system(cmd) == 0); /* byte for byte the index the writer made */
    free(cmd);
    CHECK_OK(tsr_index_rebuild(c, &changed, &err));
    CHECK(!changed);
    free(c), free(tar), free(zst), free(back), free(back2), free(ix), free(keep);
}

typedef struct changed_bag {
    bag *b;
    uint32_t tensor; /* its first byte differs */
} changed_bag;

static tsr_status fill_changed(void *payload, const tsr_slot *slot, void *dst, tsr_err *err)
{
    const changed_bag *c = payload;
    tsr_status st = bag_fill(c->b, slot, dst, err);
    if (slot->tensor == c->tensor && slot->off == 0 && slot->item == 0) {
        *(unsigned char *)dst ^= 1;
    }
    return st;
}

static void parent_links(bag *b, const char *dir)
{
    tsr_err err;
    char *parent = at(dir, "raw"), *next = at(dir, "next");
    tsr_save_opts o = { .expert_partitions = 1, .allow_uneven = true, .parent = parent };
    changed_bag c = { b, 0 };
    while (b->decls[c.tensor].klass != TSR_CLASS_EXPERTS) {
        c.tensor++;
    }
    tsr_save_job *job;
    tsr_save_stats stats;
    CHECK_OK(tsr_save_start(&job, next, b->decls, b->count, fill_changed, &c, &o, &err));
    CHECK_OK(tsr_save_wait(&job, &stats, &err));
    CHECK(stats.linked_files == 1); /* the dense shard; the experts' changed */
    char *p = at(dir, "next/dense-00000-of-00001.h5");
    struct stat s;
    CHECK(stat(p, &s) == 0 && s.st_nlink >= 2);
    tsr_verify_report r;
    CHECK_OK(tsr_verify(next, TSR_VERIFY_FULL, 2, NULL, NULL, NULL, &r, &err));
    CHECK(r.findings == 0);
    free(parent), free(next), free(p);
}

int main(void)
{
    char *dir = test_dir("reshard");
    bag *b = bag_make(21, 25, 3, 8, 30000);
    tsr_err err;
    for (int compress = 0; compress < 2; compress++) {
        char *p = at(dir, compress ? "zstd" : "raw");
        tsr_save_opts o = { .compress = compress != 0 };
        CHECK_OK(tsr_save(p, b->decls, b->count, bag_fill, b, &o, &err));
        free(p);
        circle(b, dir, compress ? "zstd" : "raw");
    }
    tar_and_index(b, dir);
    parent_links(b, dir);
    bag_free(b);
    test_dir_remove(dir);
    printf("partitions, tar, index and links keep every bit\n");
    return 0;
}
