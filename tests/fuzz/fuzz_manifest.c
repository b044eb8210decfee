/* fuzz_manifest.c - manifest.json: the check value, and everything that reads its entries (verify, reshard's extras). */
#include "format/save.h"
#include "tests/fuzz/fuzz.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void put(const char *dir, const char *name, const void *data, size_t n)
{
    char path[300];
    (void)snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    if (f != NULL) {
        (void)fwrite(data, 1, n, f);
        (void)fclose(f);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static char dir[64];
    if (dir[0] == '\0') {
        (void)snprintf(dir, sizeof dir, "/tmp/tsr-fuzz-%ld", (long)getpid());
        TSR_IGNORE(tsr_fs_mkdirs(dir, NULL));
    }
    (void)manifest_intact((const char *)data, size);
    put(dir, "manifest.json", data, size);
    tsr_verify_report r;
    bool changed;
    TSR_IGNORE(
        tsr_verify(dir, TSR_VERIFY_FULL, 1, NULL, NULL, NULL, &r, NULL)); /* only crashes matter here */
    TSR_IGNORE(tsr_index_rebuild(dir, &changed, NULL));
    return 0;
}
