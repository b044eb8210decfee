/* bench_inventory.c - a checkpoint with every tensor of the Kimi K3 release (data as holes, no argument):
 * writing it, opening it and finding an expert, memory, reading experts against a bare pread of the same
 * bytes. */
#include "bench/bench.h"
#include "model/spec.h"
#include "tests/harness/k3_config.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#define READS 16

typedef struct list {
    tsr_tensor_decl *d;
    uint32_t count, room;
} list;

static tsr_status add(void *payload, const tsr_tensor_rule *r, tsr_err *err)
{
    (void)err;
    list *l = payload;
    if (l->count == l->room) {
        l->room = l->room * 2 + 64;
        l->d = realloc(l->d, l->room * sizeof *l->d);
        CHECK(l->d != NULL);
    }
    int64_t *shape = malloc(sizeof r->shape);
    char *name = strdup(r->name);
    CHECK(shape != NULL && name != NULL);
    memcpy(shape, r->shape, sizeof r->shape);
    l->d[l->count++] = (tsr_tensor_decl){ .name = name,
                                          .dtype = r->dtype,
                                          .src_dtype = r->dtype,
                                          .rank = r->rank,
                                          .shape = shape,
                                          .klass = r->klass,
                                          .layer = r->layer,
                                          .expert_count = r->expert_count,
                                          .partner = -1 };
    return TSR_OK;
}

static tsr_status no_fill(void *payload, const tsr_slot *slot, void *dst, tsr_err *err)
{
    (void)payload, (void)slot, (void)dst;
    return TSR_ERR(err, TSR_E_IO, "zeros are not asked for");
}

/* Of this program since it was started. */
static long peak_kib(void)
{
    char line[256];
    long kib = 0;
    FILE *f = fopen("/proc/self/status", "r");
    CHECK(f != NULL);
    while (fgets(line, sizeof line, f) != NULL) {
        if (strncmp(line, "VmHWM:", 6) == 0) {
            kib = strtol(line + 6, NULL, 10);
        }
    }
    CHECK(fclose(f) == 0);
    return kib;
}

typedef struct state {
    const char *path;
    tsr_ckpt *c;
    tsr_expert_span span[READS]; /* what the peer reads: looked up before */
    int fd[READS];
    uint64_t bytes;
    uint8_t *buf;
} state;

static int32_t layer_of(int i)
{
    return 1 + i * 37 % 92;
}

static uint32_t expert_of(int i)
{
    return (uint32_t)(i * 311 % 896);
}

/* Look-up and one read an expert, unchecked as the peer's. */
static void ours(void *payload)
{
    state *s = payload;
    tsr_err err;
    tsr_expert_span span;
    tsr_expert_matrix m[TSR_EXPERT_MATRIX_MAX];
    for (int i = 0; i < READS; i++) {
        CHECK_OK(tsr_ckpt_expert_span(s->c, layer_of(i), expert_of(i), TSR_CLASS_EXPERTS, &span, &err));
        CHECK_OK(tsr_ckpt_read_expert(s->c, layer_of(i), expert_of(i), TSR_CLASS_EXPERTS, s->buf, span.bytes,
                                      m, 0, &err));
    }
}

static void bare_pread(void *payload)
{
    state *s = payload;
    for (int i = 0; i < READS; i++) {
        CHECK(pread(s->fd[i], s->buf, s->span[i].bytes, (off_t)s->span[i].offset) ==
              (ssize_t)s->span[i].bytes);
    }
}

/* Median time from a path to where an expert lies. */
static void time_opening(const char *path)
{
    enum { OPENINGS = 101 };
    double t[OPENINGS];
    tsr_err err;
    for (int i = 0; i < OPENINGS; i++) {
        tsr_ckpt *c;
        tsr_expert_span span;
        double from = bench_now();
        CHECK_OK(tsr_ckpt_open(&c, path, &err));
        CHECK_OK(tsr_ckpt_expert_span(c, layer_of(i), expert_of(i), TSR_CLASS_EXPERTS, &span, &err));
        t[i] = bench_now() - from;
        tsr_ckpt_close(&c);
    }
    printf("open and find one expert, warm: %.3f ms\n", bench_median(t, OPENINGS) * 1e3);
}

static void read_experts(state *s)
{
    tsr_err err;
    uint64_t largest = 0;
    for (int i = 0; i < READS; i++) {
        tsr_file_info f;
        char path[600];
        CHECK_OK(tsr_ckpt_expert_span(s->c, layer_of(i), expert_of(i), TSR_CLASS_EXPERTS, &s->span[i], &err));
        CHECK_OK(tsr_ckpt_file(s->c, s->span[i].file, &f, &err));
        (void)snprintf(path, sizeof path, "%s/%s", s->path, f.name);
        s->fd[i] = open(path, O_RDONLY | O_CLOEXEC);
        CHECK(s->fd[i] >= 0);
        s->bytes += s->span[i].bytes;
        largest = s->span[i].bytes > largest ? s->span[i].bytes : largest;
    }
    s->buf = malloc(largest);
    CHECK(s->buf != NULL);
    bench_pair("find and read experts of the full inventory, warm", "pread", s->bytes, ours, bare_pread, s);
    for (int i = 0; i < READS; i++) {
        CHECK(close(s->fd[i]) == 0);
    }
    free(s->buf);
}

/* In a process of its own, so that its memory is its own. */
static void look_up(const char *path)
{
    tsr_err err;
    state s = { .path = path };
    tsr_expert_matrix m[TSR_EXPERT_MATRIX_MAX];
    time_opening(path);
    CHECK_OK(tsr_ckpt_open(&s.c, path, &err));
    long before = peak_kib();
    CHECK_OK(tsr_ckpt_expert_span(s.c, 46, 511, TSR_CLASS_EXPERTS, &s.span[0], &err));
    void *one = malloc(s.span[0].bytes);
    CHECK(one != NULL);
    CHECK_OK(
        tsr_ckpt_read_expert(s.c, 46, 511, TSR_CLASS_EXPERTS, one, s.span[0].bytes, m, TSR_READ_CHECK, &err));
    printf("peak memory: opened %ld MiB, with one expert read %ld MiB, of them the expert %ld MiB\n",
           before / 1024, peak_kib() / 1024, (long)(s.span[0].bytes >> 20));
    free(one);
    read_experts(&s);
    tsr_ckpt_close(&s.c);
}

static void run_alone(const char *path)
{
    int status;
    (void)fflush(stdout);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        (void)execl("/proc/self/exe", "bench_inventory", "--look-up", path, (char *)NULL);
        _exit(127);
    }
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "--look-up") == 0) {
        look_up(argv[2]);
        return 0;
    }
    tsr_err err;
    char *dir = test_dir("bench"), *config = config_k3(), path[500];
    tsr_spec s;
    tsr_spec_sizes sizes;
    list l = { 0 };
    CHECK_OK(tsr_spec_parse(&s, config, strlen(config), &err));
    CHECK_OK(tsr_spec_sizes_of(&s, &sizes, &err));
    CHECK_OK(tsr_spec_each_tensor(&s, add, &l, &err));
    (void)snprintf(path, sizeof path, "%s/k3", dir);
    tsr_save_opts o = {
        .expert_partitions = 8, .dense_files = 2, .zeros = true, .arch = "kimi-k3", .config_json = config
    };
    double from = bench_now();
    tsr_status st = tsr_save(path, l.d, l.count, no_fill, NULL, &o, &err);
    if (st == TSR_E_IO) { /* a file system without sparse files of this size */
        printf("skipped: %s\n", err.msg);
        test_dir_remove(dir);
        return 77;
    }
    CHECK_OK(st);
    printf("write %llu tensors, %.0f GB apparent: %.1f s\n", (unsigned long long)sizes.tensors,
           (double)sizes.bytes_total / 1e9, bench_now() - from);
    run_alone(path);
    for (uint32_t i = 0; i < l.count; i++) {
        free((void *)(uintptr_t)l.d[i].name);
        free((void *)(uintptr_t)l.d[i].shape);
    }
    free(l.d);
    free(config);
    test_dir_remove(dir);
    return 0;
}
