/* bench_convert.c - import of a safetensors folder and a reshard that moves data, against cp + fsync of the
 * same bytes. Argument: MiB. */
#include "bench/bench.h"
#include "convert/convert.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct state {
    char *dir;
    char hf[500], ckpt[500], out[500], copy[500];
    const char *copied; /* what the peer copies */
} state;

static void shell(const char *fmt, const char *a, const char *b)
{
    char *cmd;
    CHECK(asprintf(&cmd, fmt, a, b) > 0);
    CHECK(system(cmd) == 0);
    free(cmd);
}

static void copy_synced(void *payload)
{
    const state *s = payload;
    shell("rm -rf '%1$s' && cp -r '%2$s' '%1$s' && find '%1$s' -type f -exec sync {} +", s->copy, s->copied);
}

static void import(void *payload)
{
    const state *s = payload;
    tsr_err err;
    tsr_convert_plan *p;
    tsr_convert_opts o = { .arch = "canonical", .expert_partitions = 4 };
    shell("rm -rf '%s'%s", s->out, "");
    CHECK_OK(tsr_convert_plan_make(&p, s->hf, s->out, &o, &err));
    CHECK_OK(tsr_convert_run(p, &err));
    tsr_convert_plan_free(&p);
}

static void reshard(void *payload)
{
    const state *s = payload;
    tsr_err err;
    tsr_ckpt *c;
    tsr_reshard_opts o = { .expert_partitions = 8, .dense_files = 2 };
    shell("rm -rf '%s'%s", s->out, "");
    CHECK_OK(tsr_ckpt_open(&c, s->ckpt, &err));
    CHECK_OK(tsr_reshard(c, s->out, &o, &err));
    tsr_ckpt_close(&c);
}

/* A folder of one safetensors file a layer with the tensors of bench_decls. */
static uint64_t make_source(const state *s, uint64_t bytes)
{
    tsr_tensor_decl *d;
    uint32_t count;
    uint64_t total = 0, rng = 3;
    bench_decls(bytes, &d, &count);
    CHECK(mkdir(s->hf, 0755) == 0);
    for (uint32_t l = 0; l * 4 < count; l++) {
        char path[600], *text;
        size_t n;
        uint64_t at = 0, b;
        (void)snprintf(path, sizeof path, "%s/model-%05u.safetensors", s->hf, l);
        FILE *m = open_memstream(&text, &n), *f = fopen(path, "wb");
        CHECK(m != NULL && f != NULL);
        for (uint32_t k = 0; k < 4; k++) {
            const tsr_tensor_decl *t = &d[l * 4 + k];
            CHECK(tsr_shape_bytes(t->dtype, 2, t->shape, &b));
            for (uint32_t e = 0; e < (t->expert_count > 0 ? t->expert_count : 1); e++) {
                char name[200];
                tsr_tensor_info info = { .name = t->name, .expert_count = t->expert_count };
                (void)tsr_tensor_item_name(&info, e, name, sizeof name);
                (void)fprintf(
                    m, "%s\"%s\":{\"dtype\":\"BF16\",\"shape\":[%lld,%lld],\"data_offsets\":[%llu,%llu]}",
                    at > 0 ? "," : "{", name, (long long)t->shape[0], (long long)t->shape[1],
                    (unsigned long long)at, (unsigned long long)(at + b));
                at += b;
            }
        }
        (void)fputc('}', m);
        CHECK(fclose(m) == 0);
        uint64_t length = n;
        CHECK(fwrite(&length, 8, 1, f) == 1 && fwrite(text, 1, n, f) == n);
        for (uint64_t i = 0; i < at; i += 4096) {
            uint64_t page[512];
            for (int k = 0; k < 512; k++) {
                page[k] = bag_random(&rng);
            }
            CHECK(fwrite(page, 1, 4096, f) == 4096);
        }
        CHECK(fclose(f) == 0);
        free(text);
        total += at;
    }
    return total;
}

int main(int argc, char **argv)
{
    state s = { .dir = test_dir("bench") };
    tsr_err err;
    (void)snprintf(s.hf, sizeof s.hf, "%s/hf", s.dir);
    (void)snprintf(s.ckpt, sizeof s.ckpt, "%s/ckpt", s.dir);
    (void)snprintf(s.out, sizeof s.out, "%s/out", s.dir);
    (void)snprintf(s.copy, sizeof s.copy, "%s/copy", s.dir);
    uint64_t bytes = make_source(&s, bench_bytes(argc, argv, 256));
    s.copied = s.hf;
    bench_pair("import from safetensors, synced", "cp + sync", bytes, import, copy_synced, &s);
    tsr_convert_plan *p;
    tsr_convert_opts o = { .arch = "canonical", .expert_partitions = 4 };
    CHECK_OK(tsr_convert_plan_make(&p, s.hf, s.ckpt, &o, &err));
    CHECK_OK(tsr_convert_run(p, &err));
    tsr_convert_plan_free(&p);
    s.copied = s.ckpt;
    bench_pair("reshard 4 to 8 partitions, data moves, synced", "cp + sync", bytes, reshard, copy_synced, &s);
    tsr_ckpt *c;
    tsr_reshard_opts link = { .expert_partitions = 2 };
    shell("rm -rf '%s'%s", s.out, "");
    CHECK_OK(tsr_ckpt_open(&c, s.ckpt, &err));
    double t = bench_now();
    CHECK_OK(tsr_reshard(c, s.out, &link, &err));
    printf("reshard 4 to 2 partitions, files are linked: %.1f ms\n", (bench_now() - t) * 1e3);
    tsr_ckpt_close(&c);
    test_dir_remove(s.dir);
    return 0;
}
