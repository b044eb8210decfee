/* test_roundtrip.c - random bags of tensors come back bit-identical, raw and compressed, in any partitioning. */
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

int main(int argc, char **argv)
{
    uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 10) : 1,
             count = argc > 2 ? strtoull(argv[2], NULL, 10) : 12;
    char *dir = test_dir("roundtrip");
    for (uint64_t s = first; s < first + count; s++) {
        round_trip(dir, s);
    }
    test_dir_remove(dir);
    printf("%llu bags came back bit-identical\n", (unsigned long long)count);
    return 0;
}
