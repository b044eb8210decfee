/* fuzz_st_index.c - model.safetensors.index.json. */
#include "convert/st_index.h"
#include "tests/fuzz/fuzz.h"

static tsr_status nothing(void *payload, const char *tensor, const char *shard, tsr_err *err)
{
    (void)err;
    *(size_t *)payload += (tensor[0] != '\0') + (shard[0] != '\0');
    return TSR_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    size_t count = 0;
    TSR_IGNORE(st_index_each("fuzz", data, size, nothing, &count, NULL)); /* only crashes matter here */
    return 0;
}
