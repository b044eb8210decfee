/* replay.c - runs a fuzz target over a corpus folder without libFuzzer, and over N simple mutations of each file
 * (flips, cuts, swaps; a fixed seed). The ordinary test of the corpus; findings become corpus files. */
#include "tests/fuzz/fuzz.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t state = 42;

static uint64_t rnd(void)
{
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static void mutate(uint8_t *p, size_t n)
{
    static const uint64_t odd[] = {
        0, 1, 0xff, 0x7fffffff, 0xffffffff, 0x7fffffffffffffff, 0xffffffffffffffff, 4096
    };
    for (uint64_t k = rnd() % 4 + 1; k > 0 && n > 0; k--) {
        size_t at = rnd() % n;
        switch (rnd() % 4) {
        case 0: p[at] ^= (uint8_t)(1u << (rnd() % 8)); break;
        case 1: p[at] = (uint8_t)rnd(); break;
        case 2: p[at] = p[rnd() % n]; break;
        default: {
            size_t len = n - at < 8 ? n - at : (size_t)1 << (rnd() % 4);
            memcpy(p + at, &odd[rnd() % 8], len < n - at ? len : n - at);
        }
        }
    }
}

int main(int argc, char **argv)
{
    long rounds = argc > 2 ? atol(argv[2]) : 0;
    DIR *d = argc > 1 ? opendir(argv[1]) : NULL;
    if (d == NULL) {
        fprintf(stderr, "usage: %s CORPUS [MUTATIONS]\n", argv[0]);
        return 2;
    }
    int files = 0;
    for (const struct dirent *e; (e = readdir(d)) != NULL;) {
        char path[1024];
        (void)snprintf(path, sizeof path, "%s/%s", argv[1], e->d_name);
        FILE *f = e->d_name[0] == '.' ? NULL : fopen(path, "rb");
        if (f == NULL) {
            continue;
        }
        static uint8_t buf[1 << 20], copy[1 << 20];
        size_t n = fread(buf, 1, sizeof buf, f);
        (void)fclose(f);
        (void)LLVMFuzzerTestOneInput(buf, n);
        for (long i = 0; i < rounds; i++) {
            size_t m = rnd() % 8 == 0 ? rnd() % (n + 1) : n;
            memcpy(copy, buf, m);
            mutate(copy, m);
            (void)LLVMFuzzerTestOneInput(copy, m);
        }
        files++;
    }
    (void)closedir(d);
    printf("%d files, %ld mutations of each\n", files, rounds);
    return files > 0 ? 0 : 1;
}
