/* cmd_completion.c - tessera completion: scripts for shells. */
#include "cli/cli.h"

#include <string.h>

static const char *const synopsis[] = { "bash|zsh", NULL };
static const char *const description[] = {
    "Prints a script that teaches the shell to complete commands, options and their values. An installation "
    "has put "
    "it in its place already.",
    NULL,
};
static const tsr_opt options[] = { TSR_OPT_END };
static const tsr_pair examples[] = {
    { "source <(tessera completion bash)", "Completion in this shell." },
    { 0 },
};

static tsr_status run(tsr_cli *cli, const tsr_args *a, tsr_err *err)
{
    (void)cli;
    if (strcmp(a->operands[0], "bash") == 0) {
        tsr_complete_bash(stdout);
    } else if (strcmp(a->operands[0], "zsh") == 0) {
        tsr_complete_zsh(stdout);
    } else {
        TSR_FAIL(err, TSR_E_USAGE, "%s: no completion for this shell (bash and zsh)", a->operands[0]);
    }
    return TSR_OK;
}

const tsr_cmd tsr_cmd_completion = { .name = "completion",
                                     .what = "Print a completion script for a shell",
                                     .synopsis = synopsis,
                                     .description = description,
                                     .options = options,
                                     .examples = examples,
                                     .operand_min = 1,
                                     .operand_max = 1,
                                     .run = run };
