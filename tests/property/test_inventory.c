/* test_inventory.c - the whole inventory of the Kimi K3 release (93 layers, 896 experts, half a million matrices, 1.5 TB
 * apparent, data as holes) is written, opened, looked up, read, and planned for another partitioning. */
#include "model/spec.h"
#include "tests/harness/bag.h"
#include "tests/harness/k3_config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

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
    memcpy(shape, r->shape, sizeof r->shape);
    l->d[l->count++] = (tsr_tensor_decl){ .name = strdup(r->name),
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

static double now(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Of this program since it was started (getrusage would tell what its parent had). */
static long peak_mib(void)
{
    char line[256];
    long kib = 0;
    FILE *f = fopen("/proc/self/status", "r");
    while (f != NULL && fgets(line, sizeof line, f) != NULL) {
        if (strncmp(line, "VmHWM:", 6) == 0) {
            kib = strtol(line + 6, NULL, 10);
        }
    }
    if (f != NULL) {
        (void)fclose(f);
    }
    return kib / 1024;
}

/* In a fresh process, so that its memory is its own. */
static void look_up(const char *path)
{
    tsr_err err;
    tsr_ckpt *c;
    tsr_expert_span span;
    tsr_expert_matrix m[TSR_EXPERT_MATRIX_MAX];
    CHECK_OK(tsr_ckpt_open(&c, path, &err));
    CHECK_OK(tsr_ckpt_expert_span(c, 46, 511, TSR_CLASS_EXPERTS, &span, &err)); /* warm */
    tsr_ckpt_close(&c);
    double from = now();
    CHECK_OK(tsr_ckpt_open(&c, path, &err));
    CHECK_OK(tsr_ckpt_expert_span(c, 46, 511, TSR_CLASS_EXPERTS, &span, &err));
    double index_ms = (now() - from) * 1e3;
    CHECK(span.matrix_count == 6 && span.bytes >= 17547264u && span.bytes < 17547264u + 6u * 8192u);
    CHECK(span.offset % 4096 == 0);
    void *buf = malloc(span.bytes);
    CHECK(buf != NULL);
    CHECK_OK(tsr_ckpt_read_expert(c, 46, 511, TSR_CLASS_EXPERTS, buf, span.bytes, m, TSR_READ_CHECK, &err));
    for (int i = 0; i < 6; i++) {
        CHECK(m[i].data != NULL && m[i].data[m[i].tensor.item_bytes / 2] == 0);
    }
    tsr_tensor_info t;
    uint32_t item;
    CHECK_OK(tsr_ckpt_find(c, "layers.92.experts.895.down.weight", &t, &item, &err));
    CHECK(item == 895 && t.item_bytes == 3584u * 1536u);
    free(buf);
    printf("open and look-up %.3f ms, peak memory %ld MiB\n", index_ms, peak_mib());
    tsr_reshard_opts o = { .expert_partitions = 16 };
    tsr_reshard_plan plan;
    CHECK_OK(tsr_reshard_plan_make(&plan, c, &o, &err));
    CHECK(plan.moved_files == 16 && plan.moved_bytes > 1400000000000u);
    o.expert_partitions = 4; /* nests in 8 */
    CHECK_OK(tsr_reshard_plan_make(&plan, c, &o, &err));
    CHECK(plan.moved_files == 0);
    tsr_ckpt_close(&c);
}

int main(int argc, char **argv)
{
    if (argc > 1) {
        look_up(argv[1]);
        return 0;
    }
    tsr_err err;
    char *dir = test_dir("inventory"), *config = config_k3(), path[500];
    tsr_spec s;
    list l = { 0 };
    CHECK_OK(tsr_spec_parse(&s, config, strlen(config), &err));
    CHECK_OK(tsr_spec_each_tensor(&s, add, &l, &err));
    (void)snprintf(path, sizeof path, "%s/k3", dir);
    tsr_save_opts o = {
        .expert_partitions = 8, .dense_files = 2, .zeros = true, .arch = "kimi-k3", .config_json = config
    };
    double from = now();
    tsr_status st = tsr_save(path, l.d, l.count, no_fill, NULL, &o, &err);
    if (st == TSR_E_IO) { /* a file system without sparse files of this size */
        printf("skipped: %s\n", err.msg);
        test_dir_remove(dir);
        return 77;
    }
    CHECK_OK(st);
    printf("%u tensors and families written in %.1f s\n", l.count, now() - from);
    (void)fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        (void)execl("/proc/self/exe", "test_inventory", path, (char *)NULL);
        _exit(127);
    }
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    for (uint32_t i = 0; i < l.count; i++) {
        free((void *)(uintptr_t)l.d[i].name);
        free((void *)(uintptr_t)l.d[i].shape);
    }
    free(l.d);
    free(config);
    test_dir_remove(dir);
    return 0;
}
