/* cmd_index.c - tessera index: facts about the index, and a new one made from the shards. */
#include "cli/cli.h"
#include "cli/out.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static const char *const synopsis[] = { "[--rebuild] PATH", NULL };
static const char *const description[] = {
    "Prints what the index of a Tessera checkpoint counts. With --rebuild index.tsx is made again from the "
    "tables that "
    "every shard carries and from the manifest, and replaces the old one, also when that is damaged or gone.",
    NULL,
};
static const tsr_opt options[] = {
    { "rebuild", 0, TSR_OPT_FLAG, NULL, 0, 0, "Make index.tsx again from the shards." },
    TSR_OPT_END,
};
static const tsr_pair examples[] = { { "tessera index --rebuild model.tsr", "After index.tsx was lost." },
                                     { 0 } };
static const char *const see_also[] = { "verify", "info", NULL };

static tsr_status index_bytes(void *payload, const char *name, uint64_t size, tsr_err *err)
{
    (void)err;
    if (strcmp(name, "index.tsx") == 0) {
        *(uint64_t *)payload = size;
    }
    return TSR_OK;
}

static tsr_status show(tsr_cli *cli, const char *path, tsr_err *err)
{
    tsr_ckpt *c;
    uint64_t bytes = 0;
    TSR_TRY(tsr_cli_open_ckpt(cli, &c, path, err));
    tsr_status st = tsr_ckpt_each_member(c, index_bytes, &bytes, err);
    if (st == TSR_OK && cli->json) {
        json_t *o = json_object();
        tsr_json_set(&o, "path", tsr_json_text(tsr_ckpt_path(c)));
        tsr_json_set(&o, "index_bytes", tsr_json_u64(bytes));
        tsr_json_set(&o, "files", json_integer(tsr_ckpt_file_count(c)));
        tsr_json_set(&o, "tensors_and_families", json_integer(tsr_ckpt_tensor_count(c)));
        tsr_json_set(&o, "extents", tsr_json_u64(tsr_ckpt_extent_count(c)));
        tsr_json_set(&o, "experts", json_integer(tsr_ckpt_expert_count(c)));
        st = tsr_json_print(o, false, err);
    } else if (st == TSR_OK) {
        (void)printf("index bytes           %" PRIu64 "\nfiles                 %u\n", bytes,
                     tsr_ckpt_file_count(c));
        (void)printf("tensors and families  %u\nextents               %" PRIu64 "\n",
                     tsr_ckpt_tensor_count(c), tsr_ckpt_extent_count(c));
        (void)printf("experts               %u\n", tsr_ckpt_expert_count(c));
    }
    tsr_ckpt_close(&c);
    return st;
}

static tsr_status run(tsr_cli *cli, const tsr_args *a, tsr_err *err)
{
    char *path;
    bool changed;
    if (!tsr_opt_given(a, "rebuild")) {
        return show(cli, a->operands[0], err);
    }
    TSR_TRY(tsr_cli_ckpt_path(cli, &path, a->operands[0], err));
    tsr_status st = tsr_index_rebuild(path, &changed, err);
    if (st == TSR_OK && cli->json) {
        json_t *o = json_object();
        tsr_json_set(&o, "path", tsr_json_text(path));
        tsr_json_set(&o, "changed", json_boolean(changed));
        st = tsr_json_print(o, false, err);
    } else if (st == TSR_OK) {
        tsr_cli_say(cli, "%s/index.tsx: %s", path,
                    changed ? "made again, it was different before" : "made again, unchanged");
    }
    free(path);
    return st;
}

const tsr_cmd tsr_cmd_index = { .name = "index",
                                .what = "Show or rebuild the index of a checkpoint",
                                .synopsis = synopsis,
                                .description = description,
                                .options = options,
                                .examples = examples,
                                .see_also = see_also,
                                .operand_min = 1,
                                .operand_max = 1,
                                .run = run };
