/* test_crash.c - a save that is killed or fails at any step leaves the checkpoints before it valid, and nothing under
 * the new name. Steps are made to fail by the fault hook, one after the other; then the process is killed at random
 * times. Arguments: number of random kills. */
#include "format/io.h"
#include "tests/harness/bag.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct plan {
    int at, seen; /* the at-th step fails */
    int errnum;   /* 0: the process is killed instead */
} plan;

static int fault(void *payload, tsr_fs_op op, const char *path)
{
    (void)op, (void)path;
    plan *p = payload;
    if (__atomic_add_fetch(&p->seen, 1, __ATOMIC_SEQ_CST) != p->at) {
        return 0;
    }
    if (p->errnum == 0) {
        (void)kill(getpid(), SIGKILL);
    }
    return p->errnum;
}

static tsr_status save_step(const char *run, int step, bag *b, bool compress, bool resumable, tsr_err *err)
{
    char path[600], name[32];
    (void)snprintf(name, sizeof name, "step-%d", step);
    (void)snprintf(path, sizeof path, "%s/%s", run, name);
    tsr_asset a = { "tokenizer/x", NULL, "text", 4 };
    tsr_save_opts o = { .compress = compress,
                        .expert_partitions = 2,
                        .dense_files = 2,
                        .assets = &a,
                        .asset_count = 1,
                        .resumable = resumable,
                        .resume_key = "key",
                        .train_json = "{}" };
    tsr_status st = tsr_save(path, b->decls, b->count, bag_fill, b, &o, err);
    return st == TSR_OK ? tsr_run_set_latest(run, name, err) : st;
}

/* The newest committed checkpoint is whole, and is `want` or (the rename was reached) want + 1. */
static int expect_good(const char *run, int want)
{
    tsr_err err;
    char *path, *note;
    tsr_verify_report r;
    CHECK_OK(tsr_run_latest(run, TSR_VERIFY_FULL, &path, &note, &err));
    if (note != NULL) {
        fprintf(stderr, "skipped: %s\n", note);
        exit(1); /* a half-made checkpoint had a final name */
    }
    int got = atoi(strrchr(path, '-') + 1);
    CHECK(got == want || got == want + 1);
    CHECK_OK(tsr_verify(path, TSR_VERIFY_FULL, 1, NULL, NULL, NULL, &r, &err));
    CHECK(r.findings == 0);
    free(path);
    return got;
}

static int count_entries(const char *run, const char *part)
{
    int n = 0;
    DIR *d = opendir(run);
    for (const struct dirent *e; (e = readdir(d)) != NULL;) {
        n += strstr(e->d_name, part) != NULL;
    }
    (void)closedir(d);
    return n;
}

/* Errors at each step: refused with the class of I/O, temporary files gone. Returns the number of steps. */
static int failing_steps(const char *run, bag *b, bool compress, int errnum)
{
    int newest = 1;
    tsr_err err;
    for (int at = 1;; at++) {
        plan p = { at, 0, errnum };
        tsr_fs_set_fault(fault, &p);
        tsr_status st = save_step(run, newest + 1, b, compress, false, &err);
        tsr_fs_set_fault(NULL, NULL);
        if (st == TSR_OK) {
            CHECK(p.seen < at); /* every step had its turn */
            (void)expect_good(run, newest + 1);
            return at - 1;
        }
        CHECK(st == TSR_E_IO);
        CHECK(p.errnum != ENOSPC || strstr(err.msg, "No space left on device") != NULL);
        int got = expect_good(run, newest);
        if (got > newest) { /* only `latest` could not be written: the checkpoint itself stands */
            newest = got;
        }
        CHECK(count_entries(run, ".tmp-") == 0 && count_entries(run, ".partial") == 0);
    }
}

static void kill_child(pid_t pid)
{
    int status;
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
}

/* SIGKILL at each step; with resumable the next run takes up what was finished. */
static void killed_steps(const char *run, bag *b, bool resumable)
{
    int newest = expect_good(run, 1);
    for (int at = 1;; at++) {
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            plan p = { at, 0, 0 };
            tsr_err err;
            tsr_fs_set_fault(fault, &p);
            tsr_status st = save_step(run, newest + 1, b, true, resumable, &err);
            if (st != TSR_OK) {
                fprintf(stderr, "step %d of a run that must end well: %s\n", at, err.msg);
            }
            _exit(st == TSR_OK ? 0 : 1);
        }
        int status;
        CHECK(waitpid(pid, &status, 0) == pid);
        newest = expect_good(run, newest);
        if (WIFEXITED(status)) {
            CHECK(WEXITSTATUS(status) == 0);
            return;
        }
    }
}

static void random_kills(const char *run, bag *b, int count)
{
    uint64_t rng = 3;
    tsr_err err;
    int newest = expect_good(run, 1);
    for (int i = 0; i < count; i++) {
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            for (int s = newest + 1;; s++) {
                CHECK_OK(save_step(run, s, b, s % 2 == 0, false, &err));
                tsr_retention keep = { 2, 0 };
                CHECK_OK(tsr_run_retain(run, &keep, NULL, &err));
            }
        }
        (void)usleep((useconds_t)(bag_random(&rng) % 60000 + 500));
        (void)kill(pid, SIGKILL);
        kill_child(pid);
        char *path, *note;
        CHECK_OK(tsr_run_latest(run, TSR_VERIFY_FULL, &path, &note, &err));
        CHECK(note == NULL);
        int got = atoi(strrchr(path, '-') + 1);
        CHECK(got >= newest);
        newest = got;
        free(path);
    }
    CHECK_OK(save_step(run, newest + 1, b, true, false, &err)); /* sweeps what the dead left */
    CHECK(count_entries(run, ".tmp-") == 0);
    printf("%d kills, newest step-%d\n", count, newest);
}

int main(int argc, char **argv)
{
    tsr_err err;
    char *dir = test_dir("crash");
    bag *b = bag_make(9, 6, 2, 4, 3000);
    char run[500];
    (void)snprintf(run, sizeof run, "%s/run", dir);
    CHECK_OK(tsr_fs_mkdir(run, &err));
    for (int k = 0; k < 4;
         k++) { /* each step once with a broken disk, once with a full one, raw and compressed */
        char sub[600];
        (void)snprintf(sub, sizeof sub, "%s/%d", run, k);
        CHECK_OK(tsr_fs_mkdir(sub, &err));
        CHECK_OK(save_step(sub, 1, b, k % 2 != 0, false, &err));
        int steps = failing_steps(sub, b, k % 2 != 0, k < 2 ? EIO : ENOSPC);
        printf("%d steps failed in turn: %s, %s\n", steps, k < 2 ? "EIO" : "ENOSPC",
               k % 2 != 0 ? "compressed" : "raw");
    }
    char run3[500];
    for (int resumable = 0; resumable < 2; resumable++) {
        (void)snprintf(run3, sizeof run3, "%s/kill%d", dir, resumable);
        CHECK_OK(tsr_fs_mkdir(run3, &err));
        CHECK_OK(save_step(run3, 1, b, true, false, &err));
        killed_steps(run3, b, resumable != 0);
    }
    (void)snprintf(run3, sizeof run3, "%s/random", dir);
    CHECK_OK(tsr_fs_mkdir(run3, &err));
    CHECK_OK(save_step(run3, 1, b, false, false, &err));
    random_kills(run3, b, argc > 1 ? atoi(argv[1]) : 40);
    bag_free(b);
    test_dir_remove(dir);
    return 0;
}
