/* cli.h - what the commands share: the row that describes one, the settings of a run, messages, signals. */
#ifndef TSR_CLI_CLI_H
#define TSR_CLI_CLI_H

#include "cli/opt.h"
#include "cli/progress.h"
#include "convert/convert.h"
#include "format/base.h"
#include "format/format.h"

typedef struct tsr_cli tsr_cli;

typedef struct tsr_pair { /* of help texts */
    const char *left, *right;
} tsr_pair;

/* One command. Every list ends with NULL (pairs: left NULL); lists may be NULL. Texts are plain: help.c sets
 * them for terminals and for man pages. */
typedef struct tsr_cmd {
    const char *name;
    const char *what;                /* one line, no full stop */
    const char *const *synopsis;     /* what stands behind "tessera NAME" */
    const char *const *description;  /* paragraphs */
    const tsr_opt *options;          /* besides the common ones */
    const tsr_pair *examples;        /* command line, what it does */
    const tsr_pair *files;           /* name, meaning */
    const char *const *see_also;     /* names of commands */
    size_t operand_min, operand_max; /* SIZE_MAX: any number */
    tsr_status (*run)(tsr_cli *cli, const tsr_args *a, tsr_err *err);
} tsr_cmd;

/* In the order of cmds.def, NULL-terminated. */
extern const tsr_cmd *const tsr_cmds[];
extern const tsr_opt tsr_common_options[];
const tsr_cmd *tsr_cmd_find(const char *name);

/* The settings every command has. */
struct tsr_cli {
    const tsr_cmd *cmd;
    bool json, quiet, verbose;
    uint64_t mem_limit; /* bytes */
    int threads;        /* 0: as many as processors */
    tsr_meter meter;
    tsr_progress progress; /* hand it to every long function */
    bool hold;             /* keep messages until the end: the first line of a failure is the error */
    char *held;
    size_t held_bytes;
};

/* Messages go to standard error: "warning: ..." always, "note: ..." with --verbose only. */
void tsr_cli_warn(tsr_cli *cli, const char *fmt, ...) TSR_PRINTF(2, 3);
void tsr_cli_note(tsr_cli *cli, const char *fmt, ...) TSR_PRINTF(2, 3);
void tsr_cli_release_messages(tsr_cli *cli);
/* A line for people about what was done, on standard output; nothing with --quiet or --json. */
void tsr_cli_say(const tsr_cli *cli, const char *fmt, ...) TSR_PRINTF(2, 3);
/* For loops that print: TSR_E_CANCELLED after a signal, TSR_E_IO when standard output is broken. */
TSR_NODISCARD tsr_status tsr_cli_go_on(const tsr_cli *cli, tsr_err *err);

/* ---- paths ------------------------------------------------------------------------------------------ */

/* Opens what path leads to as a Tessera checkpoint, warning about what was skipped on the way. A foreign
 * format is TSR_E_UNSUPPORTED and the message says which, and what to do. */
TSR_NODISCARD tsr_status tsr_cli_open_ckpt(tsr_cli *cli, tsr_ckpt **out, const char *path, tsr_err *err);
/* The same for functions that take paths: a run folder becomes its newest checkpoint. *out malloc'ed. */
TSR_NODISCARD tsr_status tsr_cli_ckpt_path(tsr_cli *cli, char **out, const char *path, tsr_err *err);
/* Opens any format, partially if need be, prints its warnings. arch may be NULL. */
TSR_NODISCARD tsr_status tsr_cli_open_view(tsr_cli *cli, tsr_view *out, const char *path, const char *arch,
                                           tsr_err *err);
/* What opens this path: "Tessera checkpoint", "safetensors folder"; NULL: nothing. Looks at names only. */
const tsr_source_ops *tsr_cli_format_of(const char *path);
/* dir/path, or path itself when dir is NULL or path is absolute. malloc'ed. */
TSR_NODISCARD tsr_status tsr_cli_join(char **out, const char *dir, const char *path, tsr_err *err);

/* ---- signals ----------------------------------------------------------------------------------------- */

/* SIGINT, SIGTERM and SIGUSR1 ask for an end; a second one ends at once. SIGPIPE becomes a failed write. */
void tsr_signals_install(void);
const volatile int *tsr_signals_flag(void);
int tsr_signals_seen(void); /* the first signal's number, 0: none */
/* From now on SIGUSR1 does not end anything: take_save is true once after it came. */
void tsr_signals_usr1_saves(void);
bool tsr_signals_take_save(void);

/* ---- texts made from the tables (help.c, complete.c) ----------------------------------------------------
 */

void tsr_help_all(FILE *f);
void tsr_help_command(FILE *f, const tsr_cmd *c);
void tsr_help_usage(FILE *f, const tsr_cmd *c);
/* c NULL: the page of the program itself. */
void tsr_help_man(FILE *f, const tsr_cmd *c);
void tsr_complete_bash(FILE *f);
void tsr_complete_zsh(FILE *f);

/* Numbers to repeat in help texts. */
#define TSR_DEFAULT_MEM_LIMIT ((uint64_t)256 << 20)
#define TSR_RELEASE_DATE "2026-12-01"

#endif
