/* cmd_convert.c - tessera convert: plan, show the plan or carry it out. */
#include "cli/cli.h"
#include "cli/glob.h"
#include "cli/out.h"

#include <inttypes.h>

static const char *const synopsis[] = { "[OPTION]... SRC DST", NULL };
static const char *const description[] = {
    "Turns the checkpoint SRC into another format at DST. SRC is a safetensors folder, a single .safetensors "
    "file, a "
    "Tessera checkpoint folder, or an uncompressed tar of one; the format is found out by looking. Without "
    "--to a "
    "foreign format becomes a Tessera checkpoint, and a Tessera checkpoint becomes a safetensors folder.",
    "DST must not exist; an empty folder, or a link to one, is used. Everything is planned and checked "
    "before the first "
    "byte is written, every tensor is accounted for, and the result appears under its name only when it is "
    "complete. "
    "A conversion that was killed goes on where it stopped when the same command is given again; with other "
    "options "
    "it refuses, unless --restart is given.",
    "Files that hold no tensors (configuration, tokenizer, licence) travel along byte for byte.",
    "Times of a dry run are estimates at 400 MB a second.",
    NULL,
};
static const tsr_opt options[] = {
    { "to", 0, TSR_OPT_CHOICE, "tessera|safetensors", 0, 0, "Format to write." },
    { "arch", 0, TSR_OPT_CHOICE, "auto|raw|kimi-k3|kimi-linear|canonical", 0, 0,
      "Names of the source. auto: as its config.json says, else raw. raw: keep every name, no model "
      "knowledge." },
    { "experts", 0, TSR_OPT_UINT, "N", 1, 65536, "Spread the experts over N partitions. 1 when not given." },
    { "dense", 0, TSR_OPT_UINT, "M", 1, 65536, "Spread the other tensors over M files. 1 when not given." },
    { "uneven", 0, TSR_OPT_FLAG, NULL, 0, 0, "Accept an N that does not divide the number of experts." },
    { "compress", 0, TSR_OPT_MAYBE, "LEVEL", 1, 19,
      "Compress where it pays: byte shuffle and zstd. LEVEL is 1 when not given." },
    { "shard-size", 0, TSR_OPT_SIZE, "SIZE", 1, (uint64_t)1 << 60,
      "To safetensors: at most SIZE data bytes a file. As the source was, else 5GB, when not given." },
    { "include", 0, TSR_OPT_LIST, "GLOB", 0, 0,
      "Only tensors whose source name matches; may be given several times." },
    { "exclude", 0, TSR_OPT_LIST, "GLOB", 0, 0,
      "Not the tensors whose source name matches; may be given several times." },
    { "tie-head", 0, TSR_OPT_FLAG, NULL, 0, 0,
      "Accept a missing output head although the configuration says it is not tied." },
    { "gate-up", 0, TSR_OPT_CHOICE, "interleaved|halves", 0, 0,
      "How gate and up lie in stacks of fused experts (gate_up_proj). Without it the config's model_type "
      "decides." },
    { "allow-trailing", 0, TSR_OPT_FLAG, NULL, 0, 0,
      "Accept bytes behind the last tensor of a safetensors file." },
    { "restart", 0, TSR_OPT_FLAG, NULL, 0, 0, "Throw away what an interrupted run has left." },
    { "dry-run", 'n', TSR_OPT_FLAG, NULL, 0, 0, "Print the plan and write nothing." },
    TSR_OPT_END,
};
static const tsr_pair examples[] = {
    { "tessera convert model/ model.tsr --experts 8",
      "A safetensors folder becomes a checkpoint with eight expert partitions." },
    { "tessera convert model.tsr model-again/",
      "And back; the files are byte-identical to those that came in." },
    { "tessera convert -n --json model/ model.tsr", "Prints what would happen." },
    { 0 },
};
static const char *const see_also[] = { "reshard", "verify", "diff", NULL };

/* ---- printing ---------------------------------------------------------------------------------------- */

static tsr_status print_json(const tsr_convert_plan *p, const char *dst, bool dry, tsr_err *err)
{
    json_t *o = json_object(), *list = json_array();
    for (int64_t i = 0; i < p->warning_count; i++) {
        tsr_json_append(&list, tsr_json_text(p->warnings[i]));
    }
    tsr_json_set(&o, "format", tsr_json_text(p->from));
    tsr_json_set(&o, "to", tsr_json_text(p->to));
    tsr_json_set(&o, "arch", tsr_json_text(p->arch));
    tsr_json_set(&o, "destination", tsr_json_text(dst));
    tsr_json_set(&o, "dry_run", json_boolean(dry));
    tsr_json_set(&o, "tensors_in", json_integer(p->tensors_in));
    tsr_json_set(&o, "tensors_used", json_integer(p->tensors_used));
    tsr_json_set(&o, "tensors_ignored", json_integer(p->tensors_ignored));
    tsr_json_set(&o, "tensors_written", json_integer(p->tensors_written));
    tsr_json_set(&o, "bytes_in", tsr_json_u64(p->bytes_in));
    tsr_json_set(&o, "bytes_out", tsr_json_u64(p->bytes_out));
    tsr_json_set(&o, "files_out", json_integer(p->files_out));
    tsr_json_set(&o, "peak_memory_bytes", tsr_json_u64(p->peak_bytes));
    tsr_json_set(&o, "seconds_estimated", tsr_json_number(p->seconds));
    tsr_json_set(&o, "identical_files", json_boolean(p->identical_files));
    tsr_json_set(&o, "warnings", list);
    return tsr_json_print(o, false, err);
}

static void print_plan(const tsr_cli *cli, const tsr_convert_plan *p)
{
    char a[TSR_SIZE_TEXT], b[TSR_SIZE_TEXT], c[TSR_SIZE_TEXT];
    tsr_cli_say(cli, "from             %s, names: %s", p->from, p->arch);
    tsr_cli_say(cli, "to               %s", p->to);
    tsr_cli_say(cli, "tensors in       %" PRId64 " (%s)", p->tensors_in, tsr_size_text(p->bytes_in, a));
    tsr_cli_say(cli, "tensors used     %" PRId64, p->tensors_used);
    tsr_cli_say(cli, "tensors ignored  %" PRId64, p->tensors_ignored);
    tsr_cli_say(cli, "tensors written  %" PRId64 " (at most %s in %u file%s)", p->tensors_written,
                tsr_size_text(p->bytes_out, b), p->files_out, p->files_out == 1 ? "" : "s");
    tsr_cli_say(cli, "peak memory      %s", tsr_size_text(p->peak_bytes, c));
    tsr_cli_say(cli, "time             about %.1f s", p->seconds);
    if (p->identical_files) {
        tsr_cli_say(cli, "files            byte-identical to those imported");
    }
}

/* ---- running --------------------------------------------------------------------------------------------
 */

static void read_options(const tsr_cli *cli, const tsr_args *a, tsr_convert_opts *o)
{
    const char *arch = tsr_opt_text(a, "arch", "auto");
    *o = (tsr_convert_opts){
        .to = tsr_opt_text(a, "to", NULL),
        .arch = arch,
        .gate_up = tsr_opt_text(a, "gate-up", NULL),
        .expert_partitions = (uint32_t)tsr_opt_number(a, "experts", 0),
        .dense_files = (uint32_t)tsr_opt_number(a, "dense", 0),
        .allow_uneven = tsr_opt_given(a, "uneven"),
        .compress = tsr_opt_given(a, "compress"),
        .zstd_level = (int)tsr_opt_number(a, "compress", 0),
        .tie_head = tsr_opt_given(a, "tie-head"),
        .allow_trailing = tsr_opt_given(a, "allow-trailing"),
        .restart = tsr_opt_given(a, "restart"),
        .threads = cli->threads,
        .mem_limit = cli->mem_limit,
        .shard_bytes = tsr_opt_number(a, "shard-size", 0),
        .progress = cli->progress,
    };
}

static tsr_status convert(tsr_cli *cli, const tsr_args *a, const tsr_convert_opts *o, tsr_err *err)
{
    tsr_convert_plan *p;
    const char *dst = a->operands[1];
    bool dry = tsr_opt_given(a, "dry-run");
    TSR_TRY(tsr_convert_plan_make(&p, a->operands[0], dst, o, err));
    tsr_cli_note(cli, "%s: taken for a %s, names: %s", a->operands[0], p->from, p->arch);
    for (int64_t i = 0; i < p->warning_count; i++) {
        tsr_cli_warn(cli, "%s", p->warnings[i]);
    }
    tsr_status st = dry ? TSR_OK : tsr_convert_run(p, err);
    tsr_meter_clear(&cli->meter);
    if (st == TSR_OK && cli->json) {
        st = print_json(p, dst, dry, err);
    } else if (st == TSR_OK && dry) {
        print_plan(cli, p);
    } else if (st == TSR_OK) {
        char size[TSR_SIZE_TEXT];
        tsr_cli_say(cli, "%s: %" PRId64 " tensors, %s, from a %s (%" PRId64 " ignored)", dst,
                    p->tensors_written, tsr_size_text(p->bytes_in, size), p->from, p->tensors_ignored);
    }
    tsr_convert_plan_free(&p);
    return st;
}

static tsr_status run(tsr_cli *cli, const tsr_args *a, tsr_err *err)
{
    tsr_convert_opts o;
    tsr_glob *in = NULL, *ex = NULL;
    tsr_status st;
    read_options(cli, a, &o);
    if ((o.expert_partitions > 0 || o.dense_files > 0 || o.compress) && o.to != NULL && o.to[0] == 's') {
        TSR_FAIL(err, TSR_E_USAGE, "--experts, --dense, --compress: have no meaning with --to safetensors");
    }
    TSR_GO(tsr_glob_new(&in, tsr_opt_get(a, "include")->list, err));
    TSR_GO(tsr_glob_new(&ex, tsr_opt_get(a, "exclude")->list, err));
    TSR_GO(tsr_glob_plain(in, &o.include, err));
    TSR_GO(tsr_glob_plain(ex, &o.exclude, err));
    st = convert(cli, a, &o, err);
out:
    tsr_glob_free(&in);
    tsr_glob_free(&ex);
    return st;
}

const tsr_cmd tsr_cmd_convert = { .name = "convert",
                                  .what = "Turn a checkpoint into another format",
                                  .synopsis = synopsis,
                                  .description = description,
                                  .options = options,
                                  .examples = examples,
                                  .see_also = see_also,
                                  .operand_min = 2,
                                  .operand_max = 2,
                                  .run = run };
