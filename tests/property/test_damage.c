/* test_damage.c - any single flipped byte, truncation, missing or foreign file is reported with the right file, and a
 * flip inside tensor data with the right tensor. */
#include "tests/harness/bag.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct seen {
    char file[256], item[512];
    int count;
} seen;

static void note(void *payload, const tsr_finding *f)
{
    seen *s = payload;
    if (f->code != TSR_OK && s->count++ == 0) {
        (void)snprintf(s->file, sizeof s->file, "%s", f->file);
        (void)snprintf(s->item, sizeof s->item, "%s", f->item);
    }
}

static seen verify(const char *path, tsr_verify_level level, tsr_status *worst)
{
    seen s = { "", "", 0 };
    tsr_err err;
    tsr_verify_report r;
    CHECK_OK(tsr_verify(path, level, 2, note, &s, NULL, &r, &err));
    *worst = r.worst;
    return s;
}

static const char *const files[] = { "manifest.json",
                                     "index.tsx",
                                     "dense-00000-of-00002.h5",
                                     "dense-00001-of-00002.h5",
                                     "experts-00000-of-00002.h5",
                                     "experts-00001-of-00002.h5",
                                     "assets/notes/a.txt",
                                     "train.json" };
enum { FILES = sizeof files / sizeof *files };

static char *make(const char *dir, bag *b)
{
    static const char text[] = "travels along";
    tsr_err err;
    char *path;
    tsr_asset a = { "notes/a.txt", NULL, text, sizeof text };
    tsr_save_opts o = { .compress = true,
                        .expert_partitions = 2,
                        .dense_files = 2,
                        .assets = &a,
                        .asset_count = 1,
                        .train_json = "{\"step\": 7}",
                        .config_json = "{\"hidden_size\": 8}",
                        .arch = "canonical" };
    CHECK(asprintf(&path, "%s/c", dir) >= 0);
    CHECK_OK(tsr_save(path, b->decls, b->count, bag_fill, b, &o, &err));
    return path;
}

static off_t size_of(const char *dir, const char *name)
{
    char p[600];
    struct stat s;
    (void)snprintf(p, sizeof p, "%s/%s", dir, name);
    CHECK(stat(p, &s) == 0);
    return s.st_size;
}

static void flip(const char *dir, const char *name, off_t at, unsigned char mask)
{
    char p[600];
    unsigned char c;
    (void)snprintf(p, sizeof p, "%s/%s", dir, name);
    int fd = open(p, O_RDWR);
    CHECK(fd >= 0 && pread(fd, &c, 1, at) == 1);
    c ^= mask;
    CHECK(pwrite(fd, &c, 1, at) == 1 && close(fd) == 0);
}

/* The tensor whose stored bytes hold file offset `at`, as verify should name it; false: none. */
static bool tensor_at(const tsr_ckpt *c, const char *file, uint64_t at, char *name, size_t room)
{
    tsr_err err;
    for (uint32_t i = 0; i < tsr_ckpt_tensor_count(c); i++) {
        tsr_tensor_info t;
        CHECK_OK(tsr_ckpt_tensor(c, i, &t, &err));
        uint32_t items = t.expert_count > 0 ? t.expert_count : 1;
        for (uint32_t e = 0; e < items; e++) {
            for (uint32_t k = 0; k < t.chunks; k++) {
                tsr_extent_info x;
                tsr_file_info f;
                CHECK_OK(tsr_ckpt_extent(c, &t, e, k, &x, &err));
                CHECK_OK(tsr_ckpt_file(c, x.file, &f, &err));
                if (strcmp(f.name, file) == 0 && at >= x.offset && at < x.offset + x.stored_bytes) {
                    (void)tsr_tensor_item_name(&t, e, name, room);
                    return true;
                }
            }
        }
    }
    return false;
}

static void flips(const char *path, int count)
{
    uint64_t rng = 11;
    tsr_err err;
    tsr_ckpt *c;
    CHECK_OK(tsr_ckpt_open(&c, path, &err));
    int inside = 0;
    for (int i = 0; i < count; i++) {
        const char *name = files[bag_random(&rng) % FILES];
        off_t at = (off_t)(bag_random(&rng) % (uint64_t)size_of(path, name));
        unsigned char mask = (unsigned char)(1u << (bag_random(&rng) % 8));
        char tensor[512];
        bool data = tensor_at(c, name, (uint64_t)at, tensor, sizeof tensor);
        tsr_status worst;
        flip(path, name, at, mask);
        seen s = verify(path, TSR_VERIFY_FULL, &worst);
        flip(path, name, at, mask);
        bool right_file = strcmp(s.file, name) == 0 ||
                          /* index and manifest vouch for each other: damage of one may be told of the pair */
                          ((strcmp(name, "index.tsx") == 0 || strcmp(name, "manifest.json") == 0) &&
                           (strcmp(s.file, "index.tsx") == 0 || strcmp(s.file, "manifest.json") == 0));
        if (s.count == 0 || worst != TSR_E_DIFF || !right_file || (data && strcmp(s.item, tensor) != 0)) {
            fprintf(stderr, "%s byte %lld mask %02x: told %d findings, first %s: %s (wanted %s)\n", name,
                    (long long)at, mask, s.count, s.file, s.item, data ? tensor : "the file");
            exit(1);
        }
        inside += data;
    }
    CHECK(inside > count / 20); /* the sample did reach tensor data */
    tsr_ckpt_close(&c);
}

static void run(const char *fmt, const char *a, const char *b)
{
    char *cmd;
    CHECK(asprintf(&cmd, fmt, a, b) >= 0);
    CHECK(system(cmd) == 0);
    free(cmd);
}

static void missing_and_foreign(const char *path)
{
    tsr_status worst;
    for (int i = 1; i < FILES; i++) { /* each but the manifest, cut and gone */
        char p[600], q[600];
        (void)snprintf(p, sizeof p, "%s/%s", path, files[i]);
        (void)snprintf(q, sizeof q, "%s.away", path);
        run("cp '%s' '%s'", p, q);
        CHECK(truncate(p, size_of(path, files[i]) - 1) == 0);
        seen s = verify(path, TSR_VERIFY_QUICK, &worst);
        CHECK(s.count > 0 && worst == TSR_E_DIFF && strcmp(s.file, files[i]) == 0);
        CHECK(unlink(p) == 0);
        s = verify(path, TSR_VERIFY_QUICK, &worst);
        CHECK(s.count > 0 && worst == TSR_E_MISSING && strcmp(s.file, files[i]) == 0);
        run("mv '%s' '%s'", q, p);
    }
    run("touch '%s/%s'", path, "stranger");
    seen s = verify(path, TSR_VERIFY_QUICK, &worst);
    CHECK(s.count == 1 && strcmp(s.file, "stranger") == 0);
    run("rm '%s/%s'", path, "stranger");
    run("cp '%1$s/experts-00000-of-00002.h5' '%1$s.a'; cp '%1$s/experts-00001-of-00002.h5' '%1$s.b'; :%2$s",
        path, "");
    char p[600];
    (void)snprintf(p, sizeof p, "%s/experts-00001-of-00002.h5", path);
    run("cp '%s.a' '%s'", path, p);
    s = verify(path, TSR_VERIFY_QUICK, &worst);
    CHECK(s.count > 0 && strcmp(s.file, "experts-00001-of-00002.h5") == 0);
    run("cp '%s.b' '%s'", path, p);
    CHECK(verify(path, TSR_VERIFY_FULL, &worst).count == 0);
}

int main(int argc, char **argv)
{
    char *dir = test_dir("damage");
    bag *b = bag_make(5, 20, 2, 4, 2500);
    char *path = make(dir, b);
    tsr_status worst;
    CHECK(verify(path, TSR_VERIFY_FULL, &worst).count == 0 && worst == TSR_OK);
    CHECK(verify(path, TSR_VERIFY_DEEP, &worst).count == 0);
    flips(path, argc > 1 ? atoi(argv[1]) : 2000);
    missing_and_foreign(path);
    free(path);
    bag_free(b);
    test_dir_remove(dir);
    printf("every flip, cut, missing and foreign file was named\n");
    return 0;
}
