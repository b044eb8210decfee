/* cmd_pack.c - tessera pack: a checkpoint folder into one tar. */
#include "cli/cli.h"
#include "cli/out.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define DEFAULT_LEVEL 3

static const char *const synopsis[] = { "[OPTION]... SRC OUT.tar", "[OPTION]... SRC -", NULL };
static const char *const description[] = {
    "Writes the checkpoint SRC into one tar file, or to standard output for \"-\". Checksums are verified on "
    "the way. "
    "An uncompressed tar is a checkpoint by itself: every command reads it in place, without unpacking.",
    "With --zstd the tar is compressed for transport and has to be unpacked before it is used. A name that "
    "ends in "
    ".zst asks for the same.",
    "OUT must not exist. It appears under its name when it is complete.",
    NULL,
};
static const tsr_opt options[] = {
    { "zstd", 0, TSR_OPT_MAYBE, "N", 1, 19, "Compress the tar with zstd at level N, 3 when not given." },
    { "directory", 'C', TSR_OPT_TEXT, "DIR", 0, 0, "Look for SRC below DIR." },
    TSR_OPT_END,
};
static const tsr_pair examples[] = {
    { "tessera pack model.tsr model.tar", "One file; \"tessera ls model.tar\" works." },
    { "tessera pack --zstd model.tsr - | ssh host tessera unpack - model.tsr",
      "Sends a checkpoint to another machine." },
    { 0 },
};
static const char *const see_also[] = { "unpack", "verify", NULL };

static bool ends_with(const char *s, const char *tail)
{
    size_t n = strlen(s), t = strlen(tail);
    return n >= t && strcmp(s + n - t, tail) == 0;
}

static tsr_status report(const tsr_cli *cli, const char *src, const char *out, int level, tsr_err *err)
{
    struct stat sb;
    char size[TSR_SIZE_TEXT];
    if (strcmp(out, "-") == 0) {
        return TSR_OK; /* standard output is the tar */
    }
    uint64_t bytes = stat(out, &sb) == 0 && sb.st_size > 0 ? (uint64_t)sb.st_size : 0;
    if (cli->json) {
        json_t *o = json_object();
        tsr_json_set(&o, "source", tsr_json_text(src));
        tsr_json_set(&o, "output", tsr_json_text(out));
        tsr_json_set(&o, "bytes", tsr_json_u64(bytes));
        tsr_json_set(&o, "zstd_level", json_integer(level));
        return tsr_json_print(o, false, err);
    }
    tsr_cli_say(cli, "%s: %s", out, tsr_size_text(bytes, size));
    return TSR_OK;
}

static tsr_status run(tsr_cli *cli, const tsr_args *a, tsr_err *err)
{
    char *src = NULL, *path = NULL;
    const char *out = a->operands[1];
    bool compress = tsr_opt_given(a, "zstd") || ends_with(out, ".zst");
    int level = compress ? (int)tsr_opt_number(a, "zstd", DEFAULT_LEVEL) : 0;
    tsr_status st;
    if (strcmp(out, "-") == 0 && isatty(STDOUT_FILENO)) {
        TSR_FAIL(err, TSR_E_USAGE, "standard output: is a terminal (redirect it, or name a file)");
    }
    TSR_GO(tsr_cli_join(&path, tsr_opt_text(a, "directory", NULL), a->operands[0], err));
    TSR_GO(tsr_cli_ckpt_path(cli, &src, path, err));
    TSR_GO(tsr_pack(src, out, level, &cli->progress, err));
    tsr_meter_clear(&cli->meter);
    st = report(cli, src, out, level, err);
out:
    free(src);
    free(path);
    return st;
}

const tsr_cmd tsr_cmd_pack = { .name = "pack",
                               .what = "Put a checkpoint into one tar file",
                               .synopsis = synopsis,
                               .description = description,
                               .options = options,
                               .examples = examples,
                               .see_also = see_also,
                               .operand_min = 2,
                               .operand_max = 2,
                               .run = run };
