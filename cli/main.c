/* main.c - finds the command, reads the common options, runs it, and turns its status into messages and exit
 * code. */
#include "cli/cli.h"
#include "cli/out.h"
#include "kernels/kernels.h"
#include "train/recipe.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TSR_CMD(name) extern const tsr_cmd tsr_cmd_##name;
#include "cli/cmds.def"
#undef TSR_CMD

#define TSR_CMD(name) &tsr_cmd_##name,
const tsr_cmd *const tsr_cmds[] = {
#include "cli/cmds.def"
    NULL,
};
#undef TSR_CMD

const tsr_opt tsr_common_options[] = {
    { "help", 'h', TSR_OPT_FLAG, NULL, 0, 0, "Print help and exit." },
    { "json", 0, TSR_OPT_FLAG, NULL, 0, 0, "Print facts as JSON." },
    { "quiet", 'q', TSR_OPT_FLAG, NULL, 0, 0, "No progress and no summary; warnings and errors stay." },
    { "verbose", 'v', TSR_OPT_FLAG, NULL, 0, 0, "Also print notes, such as what a path was taken for." },
    { "progress", 0, TSR_OPT_CHOICE, "auto|json|none", 0, 0,
      "How to show progress on standard error. auto: a line, on terminals only. json: one object per line." },
    { "mem-limit", 0, TSR_OPT_SIZE, "SIZE", (uint64_t)1 << 20, (uint64_t)1 << 46,
      "Memory for buffers and tables, such as 512MiB. 256MiB when not given; for generate and eval, which "
      "count "
      "the model too, no limit." },
    { "threads", 0, TSR_OPT_UINT, "N", 1, 1024, "Threads to use. As many as processors when not given." },
    TSR_OPT_END,
};

const tsr_cmd *tsr_cmd_find(const char *name)
{
    for (size_t i = 0; tsr_cmds[i] != NULL; i++) {
        if (strcmp(tsr_cmds[i]->name, name) == 0) {
            return tsr_cmds[i];
        }
    }
    return NULL;
}

/* A closed standard stream would give its number to the next file that is opened, and our own text would go
 * into a checkpoint. Such a number is taken by a descriptor on which reading (0) or writing (1, 2) fails. */
static void guard_standard_streams(void)
{
    for (int fd = 0; fd < 3; fd++) {
        if (fcntl(fd, F_GETFD) == -1) {
            int got = open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY);
            if (got >= 0 && got != fd) {
                (void)close(got);
            }
        }
    }
}

static void print_error(tsr_meter *meter, tsr_status st, const tsr_err *err)
{
    tsr_meter_clear(meter);
    bool colors = tsr_out_colors();
    (void)fprintf(stderr, "%serror[%s]%s ", colors ? "\033[1;31m" : "", tsr_status_class(st),
                  colors ? "\033[0m" : "");
    tsr_out_text(stderr, err->msg);
    (void)fputc('\n', stderr);
}

static int exit_code(tsr_status st)
{
    if (st == TSR_E_CANCELLED) {
        int seen = tsr_signals_seen();
        return 128 + (seen != 0 ? seen : SIGTERM);
    }
    return -(int)st;
}

static tsr_status check_operands(const tsr_cmd *c, const tsr_args *a, tsr_err *err)
{
    if (a->operand_count < c->operand_min) {
        TSR_FAIL(err, TSR_E_USAGE, "%s: needs %s%zu operand%s, has %zu (usage: tessera %s %s)", c->name,
                 c->operand_max > c->operand_min ? "at least " : "", c->operand_min,
                 c->operand_min == 1 ? "" : "s", a->operand_count, c->name, c->synopsis[0]);
    }
    if (a->operand_count > c->operand_max) {
        TSR_FAIL(err, TSR_E_USAGE, "%s: %s: is one operand too many (usage: tessera %s %s)", c->name,
                 a->operands[c->operand_max], c->name, c->synopsis[0]);
    }
    return TSR_OK;
}

static tsr_status run_command(tsr_cli *cli, int argc, char **argv, tsr_err *err)
{
    tsr_args a;
    tsr_status st = tsr_opt_parse(&a, cli->cmd->name, cli->cmd->options, tsr_common_options, argc, argv, err);
    if (st == TSR_OK && tsr_opt_given(&a, "help")) {
        tsr_help_command(stdout, cli->cmd);
        tsr_args_free(&a);
        return TSR_OK;
    }
    if (st == TSR_OK) {
        st = check_operands(cli->cmd, &a, err);
    }
    if (st == TSR_OK) {
        cli->json = tsr_opt_given(&a, "json");
        cli->quiet = tsr_opt_given(&a, "quiet");
        cli->verbose = tsr_opt_given(&a, "verbose");
        cli->mem_limit = tsr_opt_number(&a, "mem-limit", TSR_DEFAULT_MEM_LIMIT);
        cli->threads = (int)tsr_opt_number(&a, "threads", 0);
        const char *mode = tsr_opt_text(&a, "progress", "auto");
        tsr_meter_init(&cli->meter, cli->quiet && strcmp(mode, "auto") == 0 ? "none" : mode, stderr);
        st = cli->cmd->run(cli, &a, err);
    }
    tsr_args_free(&a);
    return st;
}

/* The command of the line, or NULL: then *st says whether that was an error. */
static const tsr_cmd *find_command(int argc, char **argv, tsr_status *st, tsr_err *err)
{
    const char *names[64];
    size_t n = 0;
    *st = TSR_OK;
    if (argc < 2) {
        *st = TSR_ERR(err, TSR_E_USAGE, "tessera: needs a command (tessera help lists them)");
        return NULL;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) {
        return tsr_cmd_find("help");
    }
    if (strcmp(argv[1], "--version") == 0 || strcmp(argv[1], "-V") == 0) {
        return tsr_cmd_find("version");
    }
    const tsr_cmd *c = tsr_cmd_find(argv[1]);
    if (c == NULL) {
        for (; tsr_cmds[n] != NULL && n + 1 < sizeof names / sizeof *names; n++) {
            names[n] = tsr_cmds[n]->name;
        }
        names[n] = NULL;
        const char *near = tsr_nearest(argv[1], names);
        *st = near != NULL
                  ? TSR_ERR(err, TSR_E_USAGE, "%s: unknown command (did you mean %s?)", argv[1], near)
                  : TSR_ERR(err, TSR_E_USAGE, "%s: unknown command (tessera help lists them)", argv[1]);
    }
    return c;
}

int main(int argc, char **argv)
{
    tsr_err err = { .code = TSR_OK };
    tsr_status st;
    guard_standard_streams();
    tsr_signals_install();
    const char *plugin = getenv("TESSERA_CUDA_PLUGIN");
    tsr_backend_set_plugin(plugin != NULL && plugin[0] != '\0' ? plugin : NULL);
    const char *recipes = getenv("TESSERA_RECIPES");
    tsr_recipe_set_folder(recipes != NULL && recipes[0] != '\0' ? recipes : TSR_RECIPE_FOLDER);
    tsr_cli cli = { .mem_limit = TSR_DEFAULT_MEM_LIMIT, .hold = !isatty(STDERR_FILENO) };
    tsr_meter_init(&cli.meter, "none", stderr);
    cli.progress = (tsr_progress){ tsr_meter_report, &cli.meter, tsr_signals_flag() };
    cli.cmd = find_command(argc, argv, &st, &err);
    if (cli.cmd != NULL) {
        st = run_command(&cli, argc - 2, argv + 2, &err);
    }
    tsr_err late;
    tsr_status out = tsr_out_flush(&late);
    if (out != TSR_OK && (st == TSR_OK || st == TSR_E_DIFF)) {
        st = out;
        err = late;
    }
    tsr_meter_clear(&cli.meter);
    if (st == TSR_E_IO && tsr_out_pipe_gone()) { /* `tessera ls | head`: nobody wants to hear about it */
        tsr_cli_release_messages(&cli);
        return 128 + SIGPIPE;
    }
    if (st != TSR_OK && !(st == TSR_E_DIFF && err.msg[0] == '\0')) {
        print_error(&cli.meter, st, &err);
    }
    tsr_cli_release_messages(&cli);
    return exit_code(st);
}
