/* test_roundtrip.c - random bags of tensors come back bit-identical, raw and compressed, in any partitioning, and
 * how they are saved does not show in the shards. */
#include "tests/harness/bag.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void round_trip(const char *dir, uint64_t seed)
{
    tsr_err err;
    uint64_t rng = seed * 77;
    uint32_t experts = (uint32_t)(bag_random(&rng) % 9) + 1;
    uint64_t max_bytes = seed % 5 == 0 ? (uint64_t)40 << 20 : (uint64_t)60000;
    bag *b = seed % 5 == 0 ? bag_make(seed, 3, 1, 2, max_bytes) : bag_make(seed, 30, 4, experts, max_bytes);
    char path[512];
    (void)snprintf(path, sizeof path, "%s/ckpt-%llu", dir, (unsigned long long)seed);
    tsr_save_opts o = { .compress = seed % 2 == 0,
                        .threads = (int)(seed % 3) + 1,
                        .expert_partitions = (uint32_t)(bag_random(&rng) % experts) + 1,
                        .allow_uneven = true,
                        .dense_files = (uint32_t)(bag_random(&rng) % 3) + 1 };
    if (seed % 5 == 0) {
        o.expert_partitions = 1;
    }
    CHECK_OK(tsr_save(path, b->decls, b->count, bag_fill, b, &o, &err));
    tsr_ckpt *c;
    CHECK_OK(tsr_ckpt_open(&c, path, &err));
    CHECK(tsr_ckpt_tensor_count(c) == b->count);
    int bad = bag_compare(b, c);
    tsr_ckpt_close(&c);
    CHECK(bad == 0);
    CHECK(tsr_save(path, b->decls, b->count, bag_fill, b, &o, &err) == TSR_E_CONFLICT);
    bag_free(b);
}

/* Fills like the bag until it has been asked often enough, then fails. */
typedef struct failing {
    bag *b;
    uint64_t left;
} failing;

static tsr_status failing_fill(void *payload, const tsr_slot *slot, void *dst, tsr_err *err)
{
    failing *f = payload;
    if (f->left-- == 0) {
        return TSR_ERR(err, TSR_E_IO, "fails on purpose");
    }
    return bag_fill(f->b, slot, dst, err);
}

/* The least memory that the save agrees to, within a factor of two. */
static uint64_t least_memory(const bag *b, tsr_save_opts o)
{
    tsr_err err;
    tsr_save_plan p;
    o.mem_limit = 1024;
    while (tsr_save_plan_make(&p, b->decls, b->count, &o, &err) != TSR_OK) {
        CHECK(o.mem_limit < (uint64_t)1 << 30);
        o.mem_limit *= 2;
    }
    return o.mem_limit;
}

/* Whatever the number of threads and the memory, in the background or not: the same shards.
 * Sizes are such that chunks travel alone, by the batch, and by full batches. */
static void same_bytes(const char *dir, uint64_t seed)
{
    tsr_err err;
    char path[512], cmd[1400];
    bag *b = seed % 3 == 0   ? bag_make(seed, 300, 2, 40, 300)
             : seed % 3 == 1 ? bag_make(seed, 60, 2, 12, 20000)
                             : bag_make(seed, 30, 3, 5, 250000);
    for (int i = 0; i < 7; i++) {
        tsr_save_opts o = {
            .compress = seed % 2 == 0, .threads = i + 1, .expert_partitions = 2, .allow_uneven = true
        };
        o.mem_limit = i % 2 == 1 ? least_memory(b, o) : 0;
        (void)snprintf(path, sizeof path, "%s/same-%d", dir, i);
        if (i == 3 || i == 4) {
            tsr_save_job *job;
            tsr_save_stats stats;
            CHECK_OK(tsr_save_start(&job, path, b->decls, b->count, bag_fill, b, &o, &err));
            CHECK_OK(tsr_save_wait(&job, &stats, &err));
            CHECK(stats.raw_bytes == b->bytes);
        } else {
            CHECK_OK(tsr_save(path, b->decls, b->count, bag_fill, b, &o, &err));
        }
        (void)snprintf(cmd, sizeof cmd,
                       "cd '%s' && for f in same-0/*.h5; do cmp $f same-%d/${f##*/} || exit 1; done", dir, i);
        CHECK(system(cmd) == 0);
    }
    for (uint64_t left = 0; left < 1000; left = left * 3 + 1) {
        failing f = { .b = b, .left = left };
        tsr_save_opts o = { .threads = 3, .expert_partitions = 1 };
        (void)snprintf(path, sizeof path, "%s/failing", dir);
        tsr_status st = tsr_save(path, b->decls, b->count, failing_fill, &f, &o, &err);
        CHECK(st == TSR_OK || (st == TSR_E_IO && strstr(err.msg, "on purpose") != NULL));
        (void)snprintf(cmd, sizeof cmd, "cd '%s' && rm -rf %s same-* && test -z \"$(ls -A | grep failing)\"",
                       dir, st == TSR_OK ? "failing" : "");
        CHECK(system(cmd) == 0);
    }
    bag_free(b);
}

int main(int argc, char **argv)
{
    uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 10) : 1,
             count = argc > 2 ? strtoull(argv[2], NULL, 10) : 12;
    char *dir = test_dir("roundtrip");
    for (uint64_t s = first; s < first + count; s++) {
        round_trip(dir, s);
        same_bytes(dir, s);
    }
    test_dir_remove(dir);
    printf("%llu bags came back bit-identical\n", (unsigned long long)count);
    return 0;
}
