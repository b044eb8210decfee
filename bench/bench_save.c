/* bench_save.c - saving uncompressed against write + fsync of the same bytes. Argument: MiB. */
#include "bench/bench.h"

#include <fcntl.h>
#include <unistd.h>

typedef struct state {
    char *dir, path[500], plain[500];
    tsr_tensor_decl *decls;
    uint32_t count;
    uint64_t bytes;
    uint8_t *source; /* 64 MiB of noise, read over and over */
} state;

#define SOURCE_BYTES ((uint64_t)64 << 20)

static tsr_status fill(void *payload, const tsr_slot *slot, void *dst, tsr_err *err)
{
    (void)err;
    const state *s = payload;
    uint64_t from = (slot->off + slot->item * 7919u * 4096u) % (SOURCE_BYTES - slot->bytes);
    memcpy(dst, s->source + from, slot->bytes);
    return TSR_OK;
}

static void ours(void *payload)
{
    state *s = payload;
    tsr_err err;
    tsr_save_opts o = { .expert_partitions = 1 };
    char cmd[600];
    (void)snprintf(cmd, sizeof cmd, "rm -rf '%s'", s->path);
    CHECK(system(cmd) == 0);
    CHECK_OK(tsr_save(s->path, s->decls, s->count, fill, s, &o, &err));
}

static void plain(void *payload)
{
    const state *s = payload;
    (void)unlink(s->plain);
    int fd = open(s->plain, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    CHECK(fd >= 0);
    for (uint64_t at = 0; at < s->bytes; at += (uint64_t)4 << 20) {
        CHECK(write(fd, s->source + at % SOURCE_BYTES, (size_t)4 << 20) > 0);
    }
    CHECK(fsync(fd) == 0 && close(fd) == 0);
}

int main(int argc, char **argv)
{
    state s = { .dir = test_dir("bench"), .source = malloc(SOURCE_BYTES) };
    uint64_t rng = 1;
    for (uint64_t i = 0; i < SOURCE_BYTES; i += 8) {
        uint64_t v = bag_random(&rng);
        memcpy(s.source + i, &v, 8);
    }
    bench_decls(bench_bytes(argc, argv, 256), &s.decls, &s.count);
    for (uint32_t i = 0; i < s.count; i++) {
        uint64_t b;
        CHECK(tsr_shape_bytes(s.decls[i].dtype, 2, s.decls[i].shape, &b));
        s.bytes += b * (s.decls[i].expert_count > 0 ? s.decls[i].expert_count : 1);
    }
    (void)snprintf(s.path, sizeof s.path, "%s/c", s.dir);
    (void)snprintf(s.plain, sizeof s.plain, "%s/plain", s.dir);
    bench_pair("save, synced", "write + fsync", s.bytes, ours, plain, &s);
    free(s.source);
    test_dir_remove(s.dir);
    return 0;
}
