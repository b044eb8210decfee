/* cmd_unpack.c - tessera unpack: a checkpoint folder out of a tar. */
#include "cli/cli.h"
#include "cli/out.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *const synopsis[] = { "[OPTION]... IN.tar DST", "[OPTION]... - DST", NULL };
static const char *const description[] = {
    "Unpacks a tar that \"tessera pack\" has written, compressed or not, into the new checkpoint folder DST. "
    "\"-\" reads "
    "standard input. Checksums are verified on the way; absolute paths, \"..\", links and duplicate members "
    "are refused.",
    "DST must not exist; an empty folder, or a link to one, is used. It appears under its name when it is "
    "complete.",
    NULL,
};
static const tsr_opt options[] = {
    { "directory", 'C', TSR_OPT_TEXT, "DIR", 0, 0, "Make DST below DIR." },
    TSR_OPT_END,
};
static const tsr_pair examples[] = {
    { "tessera unpack model.tar model.tsr", "Gives the folder back." },
    { "curl -s https://example.org/model.tar.zst | tessera unpack - model.tsr", "Unpacks while it arrives." },
    { 0 },
};
static const char *const see_also[] = { "pack", "verify", NULL };

static tsr_status run(tsr_cli *cli, const tsr_args *a, tsr_err *err)
{
    char *dst;
    if (strcmp(a->operands[0], "-") == 0 && isatty(STDIN_FILENO)) {
        TSR_FAIL(err, TSR_E_USAGE, "standard input: is a terminal (pipe a tar into it, or name a file)");
    }
    TSR_TRY(tsr_cli_join(&dst, tsr_opt_text(a, "directory", NULL), a->operands[1], err));
    tsr_status st = tsr_unpack(a->operands[0], dst, &cli->progress, err);
    tsr_meter_clear(&cli->meter);
    if (st == TSR_OK && cli->json) {
        json_t *o = json_object();
        tsr_json_set(&o, "source", tsr_json_text(a->operands[0]));
        tsr_json_set(&o, "destination", tsr_json_text(dst));
        st = tsr_json_print(o, false, err);
    } else if (st == TSR_OK) {
        tsr_cli_say(cli, "%s: unpacked and verified", dst);
    }
    free(dst);
    return st;
}

const tsr_cmd tsr_cmd_unpack = { .name = "unpack",
                                 .what = "Unpack a checkpoint from a tar",
                                 .synopsis = synopsis,
                                 .description = description,
                                 .options = options,
                                 .examples = examples,
                                 .see_also = see_also,
                                 .operand_min = 2,
                                 .operand_max = 2,
                                 .run = run };
