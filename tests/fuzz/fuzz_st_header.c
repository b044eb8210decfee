/* fuzz_st_header.c - the header of a safetensors file, and what a file under that name is when it is none. */
#include "convert/st_header.h"
#include "tests/fuzz/fuzz.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint64_t n;
    st_header h;
    if (size > 8) { /* the JSON alone, whatever the length field says */
        tsr_arena *a = tsr_arena_new(size * 64 + (1 << 16)); /* hostile counts may not take more than this */
        if (a != NULL) {
            TSR_IGNORE(st_header_parse(&h, a, "fuzz", data + 8, size - 8, 1 << 20, (data[0] & 1) != 0, NULL));
        }
        tsr_arena_free(&a);
    }
    TSR_IGNORE(st_header_length("fuzz", data, size, size, &n, NULL));
    return 0;
}
