/* fuzz_recipe.c - recipes: YAML, tables of keys, and the resolved form, which must read back as itself. */
#include "tests/fuzz/fuzz.h"
#include "train/recipe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void must(bool good, const char *what)
{
    if (!good) {
        (void)fprintf(stderr, "fuzz_recipe: %s\n", what);
        abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    tsr_recipe *r, *again;
    tsr_err err = { 0 };
    tsr_status st = tsr_recipe_parse(&r, (const char *)data, size, "recipe.yaml", NULL, 0, &err);
    must((st == TSR_OK) == (r != NULL) && (st == TSR_OK || err.msg[0] != '\0'), "status, result and message");
    /* The start of the bytes as a setting, on what the rest says. */
    if (size > 2 && data[0] < size) {
        char key[256], value[256];
        (void)snprintf(key, sizeof key, "%.*s", data[0], (const char *)data + 1);
        (void)snprintf(value, sizeof value, "%.*s", data[0] / 2, (const char *)data + 1);
        tsr_recipe_set set = { key, value };
        TSR_IGNORE(tsr_recipe_parse(&again, (const char *)data + data[0], size - data[0], "recipe.yaml", &set, 1,
                                    NULL)); /* only crashes matter here */
        tsr_recipe_free(&again);
    }
    if (r == NULL) {
        return 0;
    }
    char *json = tsr_recipe_json(r);
    must(json != NULL, "no resolved form");
    st = tsr_recipe_parse(&again, json, strlen(json), "recipe.json", NULL, 0, &err);
    must(st == TSR_OK, err.msg);
    char *second = tsr_recipe_json(again);
    must(second != NULL && strcmp(json, second) == 0, "the resolved form reads back as another");
    for (int32_t i = 0; i < r->stages; i++) {
        (void)tsr_stage_lr(&r->stage[i], r->stage[i].steps / 2);
        (void)tsr_stage_decay_factor(&r->stage[i], r->stage[i].steps - 1);
    }
    free(second);
    free(json);
    tsr_recipe_free(&again);
    tsr_recipe_free(&r);
    return 0;
}
