/* bench_read.c - reading: one expert against a bare pread, everything against pread, verify against XXH3
 * over the same mapping. Argument: MiB. */
#include "bench/bench.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct state {
    char *path;
    tsr_ckpt *c;
    void *buf;
    tsr_expert_span span;
    uint64_t total;
    int expert;
} state;

static tsr_status fill(void *payload, const tsr_slot *slot, void *dst, tsr_err *err)
{
    (void)err;
    uint64_t rng = slot->tensor * 1000 + slot->item + slot->off;
    uint64_t *p = dst;
    for (uint64_t i = 0; i < slot->bytes / 8; i++) {
        p[i] = bag_random(&rng);
    }
    (void)payload;
    return TSR_OK;
}

static void expert_ours(void *payload)
{
    state *s = payload;
    tsr_err err;
    tsr_expert_matrix m[TSR_EXPERT_MATRIX_MAX];
    for (uint32_t e = 0; e < 8; e++) {
        CHECK_OK(tsr_ckpt_read_expert(s->c, 0, e, TSR_CLASS_EXPERTS, s->buf, s->span.bytes, m, 0, &err));
    }
}

static void expert_pread(void *payload)
{
    state *s = payload;
    tsr_err err;
    char path[600];
    tsr_file_info f;
    CHECK_OK(tsr_ckpt_file(s->c, s->span.file, &f, &err));
    (void)snprintf(path, sizeof path, "%s/%s", s->path, f.name);
    int fd = open(path, O_RDONLY);
    CHECK(fd >= 0);
    for (uint32_t e = 0; e < 8; e++) {
        CHECK(pread(fd, s->buf, s->span.bytes, (off_t)(s->span.offset + e * s->span.bytes)) > 0);
    }
    CHECK(close(fd) == 0);
}

static void all_ours(void *payload)
{
    state *s = payload;
    tsr_err err;
    for (uint32_t i = 0; i < tsr_ckpt_tensor_count(s->c); i++) {
        tsr_tensor_info t;
        CHECK_OK(tsr_ckpt_tensor(s->c, i, &t, &err));
        for (uint32_t e = 0; e < (t.expert_count > 0 ? t.expert_count : 1); e++) {
            CHECK_OK(tsr_ckpt_read(s->c, &t, e, 0, s->buf, t.item_bytes, 0, &err));
        }
    }
}

/* Each .h5 file to fn, whole. */
static void each_file(const state *s, void (*fn)(const state *s, int fd, uint64_t bytes))
{
    DIR *d = opendir(s->path);
    CHECK(d != NULL);
    for (const struct dirent *e; (e = readdir(d)) != NULL;) {
        if (strstr(e->d_name, ".h5") != NULL) {
            int fd = openat(dirfd(d), e->d_name, O_RDONLY);
            struct stat st;
            CHECK(fd >= 0 && fstat(fd, &st) == 0);
            fn(s, fd, (uint64_t)st.st_size);
            CHECK(close(fd) == 0);
        }
    }
    (void)closedir(d);
}

static void pread_file(const state *s, int fd, uint64_t bytes)
{
    for (uint64_t at = 0; at < bytes; at += (uint64_t)16 << 20) {
        CHECK(pread(fd, s->buf, bytes - at < (uint64_t)16 << 20 ? bytes - at : (uint64_t)16 << 20,
                    (off_t)at) > 0);
    }
}

static void all_pread(void *payload)
{
    each_file(payload, pread_file);
}

static void verify_ours(void *payload)
{
    const state *s = payload;
    tsr_err err;
    tsr_verify_report r;
    CHECK_OK(tsr_verify(s->path, TSR_VERIFY_FULL, 1, NULL, NULL, NULL, &r, &err));
    CHECK(r.findings == 0);
}

static uint64_t sink;

static void hash_file(const state *s, int fd, uint64_t bytes)
{
    (void)s;
    void *p = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
    CHECK(p != MAP_FAILED);
    sink += tsr_hash64(p, bytes);
    CHECK(munmap(p, bytes) == 0);
}

static void verify_hash(void *payload)
{
    each_file(payload, hash_file);
}

int main(int argc, char **argv)
{
    tsr_err err;
    uint64_t bytes = bench_bytes(argc, argv, 256);
    char *dir = test_dir("bench"), path[500];
    tsr_tensor_decl *decls;
    uint32_t count;
    bench_decls(bytes, &decls, &count);
    (void)snprintf(path, sizeof path, "%s/c", dir);
    tsr_save_opts o = { .expert_partitions = 1 };
    CHECK_OK(tsr_save(path, decls, count, fill, NULL, &o, &err));
    state s = { .path = path, .buf = malloc((uint64_t)64 << 20) };
    CHECK_OK(tsr_ckpt_open(&s.c, path, &err));
    CHECK_OK(tsr_ckpt_expert_span(s.c, 0, 0, TSR_CLASS_EXPERTS, &s.span, &err));
    for (uint32_t i = 0; i < tsr_ckpt_file_count(s.c); i++) {
        tsr_file_info f;
        CHECK_OK(tsr_ckpt_file(s.c, i, &f, &err));
        s.total += f.bytes;
    }
    bench_pair("read 8 experts, one at a time", "pread", s.span.bytes * 8, expert_ours, expert_pread, &s);
    bench_pair("read everything, warm", "pread", s.total, all_ours, all_pread, &s);
    bench_pair("verify, one thread", "XXH3 over the mapping", s.total, verify_ours, verify_hash, &s);
    tsr_ckpt_close(&s.c);
    free(s.buf);
    test_dir_remove(dir);
    return 0;
}
