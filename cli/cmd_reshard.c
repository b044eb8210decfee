/* cmd_reshard.c - tessera reshard: experts into other partitions. */
#include "cli/cli.h"
#include "cli/out.h"

#include <stdlib.h>
#include <string.h>

static const char *const synopsis[] = { "[OPTION]... SRC DST --experts N [--dense M]",
                                        "[OPTION]... SRC DST --map \"0-3,8;4-7,9-11\"", NULL };
static const char *const description[] = {
    "Writes the Tessera checkpoint SRC once more at DST, with its experts in other partitions. Stored bytes "
    "are moved, "
    "never decoded; a shard that stays as it is is linked, not copied.",
    "Without --map each partition gets the same number of neighbouring experts. A map lists the experts of "
    "every "
    "partition by hand: ranges separated by commas, partitions by semicolons.",
    "DST must not exist; an empty folder, or a link to one, is used. A run that was killed goes on when the "
    "same "
    "command is given again.",
    NULL,
};
static const tsr_opt options[] = {
    { "experts", 0, TSR_OPT_UINT, "N", 1, 65536, "Number of expert partitions." },
    { "dense", 0, TSR_OPT_UINT, "M", 1, 65536,
      "Number of files for the other tensors. As it is when not given." },
    { "map", 0, TSR_OPT_TEXT, "MAP", 0, 0, "Experts of each partition by hand." },
    { "uneven", 0, TSR_OPT_FLAG, NULL, 0, 0, "Accept an N that does not divide the number of experts." },
    { "rewrite", 0, TSR_OPT_FLAG, NULL, 0, 0,
      "Write one file per partition even where linking files would do." },
    { "restart", 0, TSR_OPT_FLAG, NULL, 0, 0, "Throw away what an interrupted run has left." },
    { "dry-run", 'n', TSR_OPT_FLAG, NULL, 0, 0, "Print the plan and write nothing." },
    TSR_OPT_END,
};
static const tsr_pair examples[] = {
    { "tessera reshard model.tsr model-16.tsr --experts 16", "Sixteen partitions, for sixteen ranks." },
    { "tessera reshard -n model.tsr x --experts 4", "Says how many bytes would move." },
    { 0 },
};
static const char *const see_also[] = { "convert", "info", "plan", NULL };

/* ---- the map: "0-3,8;4-7,9-11" ------------------------------------------------------------------------ */

typedef struct expert_map {
    tsr_partition *parts;
    uint32_t count;
    uint32_t *numbers; /* all ranges of all partitions, in pairs */
} expert_map;

static void map_free(expert_map *m)
{
    free(m->parts);
    free(m->numbers);
}

/* Decimal digits at *s, at most nine of them. */
static bool number_at(const char **s, uint32_t *out)
{
    int n = 0;
    for (*out = 0; **s >= '0' && **s <= '9' && n < 10; n++, (*s)++) {
        *out = n < 9 ? *out * 10 + (uint32_t)(**s - '0') : *out;
    }
    return n > 0 && n < 10;
}

static tsr_status map_parse(expert_map *m, const char *text, tsr_err *err)
{
    size_t room = strlen(text) + 2;
    memset(m, 0, sizeof *m);
    m->parts = calloc(room, sizeof *m->parts);
    m->numbers = calloc(room * 2, sizeof *m->numbers);
    if (m->parts == NULL || m->numbers == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    size_t used = 0;
    m->parts[0].ranges = m->numbers;
    m->count = 1;
    for (const char *s = text;; s++) {
        uint32_t low, high;
        bool ok = number_at(&s, &low);
        high = low;
        if (ok && *s == '-') {
            s++;
            ok = number_at(&s, &high);
        }
        if (!ok || high < low || (*s != ',' && *s != ';' && *s != '\0')) {
            TSR_FAIL(err, TSR_E_USAGE,
                     "--map %.200s: cannot be read at byte %td (write it like \"0-3,8;4-7,9-11\")", text,
                     s - text);
        }
        m->numbers[used++] = low;
        m->numbers[used++] = high;
        m->parts[m->count - 1].range_count++;
        if (*s == '\0') {
            return TSR_OK;
        }
        if (*s == ';') {
            m->parts[m->count++].ranges = m->numbers + used;
        }
    }
}

/* ---- running ------------------------------------------------------------------------------------------- */

/* What the result's manifest says about how it came to be. malloc'ed, NULL when out of memory. */
static char *lineage_step(const tsr_ckpt *src, const tsr_args *a)
{
    size_t n;
    const char *text = tsr_ckpt_manifest(src, &n);
    json_t *root = json_loadb(text, n, 0, NULL), *o = json_object();
    tsr_json_set(&o, "op", tsr_json_text("reshard"));
    tsr_json_set(&o, "tool", tsr_json_text("tessera " TSR_VERSION));
    tsr_json_set(&o, "parent", tsr_json_text(json_string_value(json_object_get(root, "uuid"))));
    if (tsr_opt_given(a, "experts")) {
        tsr_json_set(&o, "experts", tsr_json_u64(tsr_opt_number(a, "experts", 0)));
    }
    if (tsr_opt_given(a, "dense")) {
        tsr_json_set(&o, "dense", tsr_json_u64(tsr_opt_number(a, "dense", 0)));
    }
    if (tsr_opt_given(a, "map")) {
        tsr_json_set(&o, "map", tsr_json_text(tsr_opt_text(a, "map", "")));
    }
    char *out = o != NULL ? json_dumps(o, JSON_COMPACT) : NULL;
    json_decref(root);
    json_decref(o);
    return out;
}

static tsr_status print(const tsr_cli *cli, const tsr_reshard_plan *p, const char *dst, bool dry,
                        tsr_err *err)
{
    char a[TSR_SIZE_TEXT], b[TSR_SIZE_TEXT], c[TSR_SIZE_TEXT];
    if (cli->json) {
        json_t *o = json_object();
        tsr_json_set(&o, "destination", tsr_json_text(dst));
        tsr_json_set(&o, "dry_run", json_boolean(dry));
        tsr_json_set(&o, "moved_bytes", tsr_json_u64(p->moved_bytes));
        tsr_json_set(&o, "linked_bytes", tsr_json_u64(p->linked_bytes));
        tsr_json_set(&o, "moved_files", json_integer(p->moved_files));
        tsr_json_set(&o, "linked_files", json_integer(p->linked_files));
        tsr_json_set(&o, "disk_bytes", tsr_json_u64(p->disk_bytes));
        tsr_json_set(&o, "peak_memory_bytes", tsr_json_u64(p->buffer_bytes));
        return tsr_json_print(o, false, err);
    }
    tsr_cli_say(cli, "%s: %s %s in %u file%s, %s %s in %u file%s", dst, dry ? "would move" : "moved",
                tsr_size_text(p->moved_bytes, a), p->moved_files, p->moved_files == 1 ? "" : "s",
                dry ? "link" : "linked", tsr_size_text(p->linked_bytes, b), p->linked_files,
                p->linked_files == 1 ? "" : "s");
    if (dry) {
        tsr_cli_say(cli, "disk %s, memory %s", tsr_size_text(p->disk_bytes, a),
                    tsr_size_text(p->buffer_bytes, c));
    }
    return TSR_OK;
}

static tsr_status reshard(tsr_cli *cli, const tsr_args *a, const tsr_reshard_opts *given, tsr_err *err)
{
    tsr_ckpt *src = NULL;
    tsr_reshard_opts o = *given;
    tsr_reshard_plan plan;
    char *step = NULL;
    bool dry = tsr_opt_given(a, "dry-run");
    tsr_status st;
    TSR_GO(tsr_cli_open_ckpt(cli, &src, a->operands[0], err));
    step = lineage_step(src, a);
    if (step == NULL) {
        st = TSR_ERR(err, TSR_E_LIMIT, "out of memory");
        goto out;
    }
    o.lineage_step_json = step;
    TSR_GO(tsr_reshard_plan_make(&plan, src, &o, err));
    if (!dry) {
        TSR_GO(tsr_reshard(src, a->operands[1], &o, err));
    }
    tsr_meter_clear(&cli->meter);
    st = print(cli, &plan, a->operands[1], dry, err);
out:
    free(step);
    tsr_ckpt_close(&src);
    return st;
}

static tsr_status run(tsr_cli *cli, const tsr_args *a, tsr_err *err)
{
    expert_map map = { 0 };
    const char *text = tsr_opt_text(a, "map", NULL);
    tsr_reshard_opts o = { .expert_partitions = (uint32_t)tsr_opt_number(a, "experts", 0),
                           .dense_files = (uint32_t)tsr_opt_number(a, "dense", 0),
                           .allow_uneven = tsr_opt_given(a, "uneven"),
                           .rewrite = tsr_opt_given(a, "rewrite"),
                           .resumable = true,
                           .restart = tsr_opt_given(a, "restart"),
                           .threads = cli->threads,
                           .mem_limit = cli->mem_limit,
                           .progress = cli->progress };
    if (o.expert_partitions == 0 && o.dense_files == 0 && text == NULL) {
        TSR_FAIL(err, TSR_E_USAGE, "reshard: needs --experts, --dense or --map");
    }
    tsr_status st = text != NULL ? map_parse(&map, text, err) : TSR_OK;
    if (st == TSR_OK && text != NULL && o.expert_partitions != 0 && o.expert_partitions != map.count) {
        st = TSR_ERR(err, TSR_E_USAGE, "--experts %u: but --map lists %u partitions", o.expert_partitions,
                     map.count);
    }
    if (st == TSR_OK) {
        if (text != NULL) {
            o.partitions = map.parts;
            o.expert_partitions = map.count;
        }
        st = reshard(cli, a, &o, err);
    }
    map_free(&map);
    return st;
}

const tsr_cmd tsr_cmd_reshard = { .name = "reshard",
                                  .what = "Put the experts of a checkpoint into other partitions",
                                  .synopsis = synopsis,
                                  .description = description,
                                  .options = options,
                                  .examples = examples,
                                  .see_also = see_also,
                                  .operand_min = 2,
                                  .operand_max = 2,
                                  .run = run };
