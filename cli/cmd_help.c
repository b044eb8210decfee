/* cmd_help.c - tessera help: help and man pages of every command. */
#include "cli/cli.h"

static const char *const synopsis[] = { "[--man] [COMMAND]", NULL };
static const char *const description[] = {
    "Prints what the program can do, or what a command does. With --man the text is a man page: "
    "\"tessera help --man ls | man -l -\".",
    NULL,
};
static const tsr_opt options[] = {
    { "man", 0, TSR_OPT_FLAG, NULL, 0, 0, "Print the source of the man page." },
    TSR_OPT_END,
};
static const tsr_pair examples[] = { { "tessera help cat", "The same as \"tessera cat --help\"." }, { 0 } };

static tsr_status run(tsr_cli *cli, const tsr_args *a, tsr_err *err)
{
    const tsr_cmd *c = NULL;
    (void)cli;
    if (a->operand_count > 0 && (c = tsr_cmd_find(a->operands[0])) == NULL) {
        TSR_FAIL(err, TSR_E_USAGE, "%s: unknown command (tessera help lists them)", a->operands[0]);
    }
    if (tsr_opt_given(a, "man")) {
        tsr_help_man(stdout, c);
    } else if (c != NULL) {
        tsr_help_command(stdout, c);
    } else {
        tsr_help_all(stdout);
    }
    return TSR_OK;
}

const tsr_cmd tsr_cmd_help = { .name = "help",
                               .what = "Print help",
                               .synopsis = synopsis,
                               .description = description,
                               .options = options,
                               .examples = examples,
                               .operand_min = 0,
                               .operand_max = 1,
                               .run = run };
