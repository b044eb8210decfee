/* help.c - the tables as text for terminals and as man pages. */
#include "cli/cli.h"

#include <ctype.h>
#include <string.h>

#define WIDTH 80

static const tsr_pair exit_codes[] = {
    { "0", "Done. Warnings may have been printed." },
    { "1", "diff or verify ran to its end and found differences or damage." },
    { "2", "Bad option or impossible request (E_USAGE)." },
    { "3", "Input bytes break their format (E_FORMAT)." },
    { "4", "A file, shard, expert, tensor or scale that is promised is not there (E_MISSING)." },
    { "5", "Valid, but not handled (E_UNSUPPORTED)." },
    { "6", "Two sources of truth disagree, the target exists, or other options than in the earlier run "
           "(E_CONFLICT)." },
    { "7", "The operating system refused: disk full, permission, input or output error (E_IO)." },
    { "8", "Needs more memory than allowed, or a hostile size (E_LIMIT)." },
    { "9", "A result cannot be represented (E_NUMERIC)." },
    { "128+N", "Stopped by signal N after cleaning up." },
    { 0 },
};

static const char about[] = "Tessera keeps checkpoints of very large sparse mixture-of-experts models: a "
                            "folder of HDF5 shards with an index "
                            "that finds any expert with one look-up and one read. It converts from and to "
                            "other formats, moves experts "
                            "between partitions, and checks every byte.";

/* ---- for terminals ----------------------------------------------------------------------------------- */

/* Prints text in lines of at most WIDTH columns. The cursor stands at column `at`; lines begin at `indent`.
 */
static void wrap(FILE *f, const char *text, size_t at, size_t indent)
{
    bool first = true;
    while (*text != '\0') {
        size_t n = strcspn(text, " ");
        if (!first && at + 1 + n > WIDTH) {
            (void)fprintf(f, "\n%*s", (int)indent, "");
            at = indent;
        } else if (!first) {
            (void)fputc(' ', f);
            at++;
        }
        (void)fprintf(f, "%.*s", (int)n, text);
        at += n;
        first = false;
        text += n;
        text += strspn(text, " ");
    }
    (void)fputc('\n', f);
}

/* "--mem-limit SIZE", "--compress[=LEVEL]". */
static void option_name(const tsr_opt *o, char *buf, size_t room)
{
    const char *format = o->kind == TSR_OPT_FLAG    ? "--%s"
                         : o->kind == TSR_OPT_MAYBE ? "--%s[=%s]"
                                                    : "--%s %s";
    if (o->kind == TSR_OPT_FLAG) {
        (void)snprintf(buf, room, "--%s", o->name);
    } else {
        (void)snprintf(buf, room, format, o->name, o->value);
    }
}

static void list_options(FILE *f, const tsr_opt *o)
{
    for (; o != NULL && o->name != NULL; o++) {
        char name[96];
        option_name(o, name, sizeof name);
        int n = o->letter != 0 ? fprintf(f, "  -%c, %s", o->letter, name) : fprintf(f, "      %s", name);
        size_t used = n > 0 ? (size_t)n : 0;
        if (used > 26) {
            (void)fputc('\n', f);
            used = 0;
        }
        (void)fprintf(f, "%*s", (int)(28 - used), "");
        wrap(f, o->what, 28, 28);
    }
}

static void list_pairs(FILE *f, const char *title, const tsr_pair *p)
{
    if (p == NULL) {
        return;
    }
    (void)fprintf(f, "\n%s:\n", title);
    for (; p->left != NULL; p++) {
        (void)fprintf(f, "  %s\n      ", p->left);
        wrap(f, p->right, 6, 6);
    }
}

void tsr_help_usage(FILE *f, const tsr_cmd *c)
{
    for (size_t i = 0; c->synopsis[i] != NULL; i++) {
        int n = fprintf(f, "%s tessera %s ", i == 0 ? "Usage:" : "      ", c->name);
        wrap(f, c->synopsis[i], n > 0 ? (size_t)n : 0, 11);
    }
}

void tsr_help_command(FILE *f, const tsr_cmd *c)
{
    tsr_help_usage(f, c);
    for (size_t i = 0; c->description[i] != NULL; i++) {
        (void)fputc('\n', f);
        wrap(f, c->description[i], 0, 0);
    }
    if (c->options != NULL && c->options->name != NULL) {
        (void)fputs("\nOptions:\n", f);
        list_options(f, c->options);
    }
    (void)fputs("\nOptions of every command:\n", f);
    list_options(f, tsr_common_options);
    list_pairs(f, "Examples", c->examples);
    list_pairs(f, "Files", c->files);
}

void tsr_help_all(FILE *f)
{
    (void)fputs("Usage: tessera COMMAND [OPTION]... [OPERAND]...\n\n", f);
    wrap(f, about, 0, 0);
    (void)fputs("\nCommands:\n", f);
    for (size_t i = 0; tsr_cmds[i] != NULL; i++) {
        (void)fprintf(f, "  %-12s", tsr_cmds[i]->name);
        wrap(f, tsr_cmds[i]->what, 14, 14);
    }
    (void)fputs("\nOptions of every command:\n", f);
    list_options(f, tsr_common_options);
    (void)fputs("\nExit status:\n", f);
    for (const tsr_pair *p = exit_codes; p->left != NULL; p++) {
        (void)fprintf(f, "  %-8s", p->left);
        wrap(f, p->right, 10, 10);
    }
    (void)fputs("\ntessera COMMAND --help tells more about a command.\n", f);
}

/* ---- man pages ------------------------------------------------------------------------------------------
 */

/* Text for roff: no line begins with a control character, '-' stays a minus sign, '\' stays itself. */
static void roff(FILE *f, const char *text)
{
    if (*text == '.' || *text == '\'') {
        (void)fputs("\\&", f);
    }
    for (; *text != '\0'; text++) {
        switch (*text) {
        case '\\': (void)fputs("\\e", f); break;
        case '-': (void)fputs("\\-", f); break;
        case '^': (void)fputs("\\(ha", f); break;
        case '~': (void)fputs("\\(ti", f); break;
        case '`': (void)fputs("\\(ga", f); break;
        case '\'': (void)fputs("\\(aq", f); break;
        default: (void)fputc(*text, f); break;
        }
    }
}

static void roff_line(FILE *f, const char *text)
{
    roff(f, text);
    (void)fputc('\n', f);
}

static void roff_upper(FILE *f, const char *text)
{
    for (; *text != '\0'; text++) {
        (void)fputc(toupper((unsigned char)*text), f);
    }
}

static void man_options(FILE *f, const tsr_opt *o)
{
    for (; o != NULL && o->name != NULL; o++) {
        (void)fputs(".TP\n", f);
        if (o->letter != 0) {
            (void)fprintf(f, "\\fB\\-%c\\fR, ", o->letter);
        }
        (void)fputs("\\fB\\-\\-", f);
        roff(f, o->name);
        (void)fputs("\\fR", f);
        if (o->kind != TSR_OPT_FLAG) {
            bool words = o->kind == TSR_OPT_CHOICE;
            (void)fputs(o->kind == TSR_OPT_MAYBE ? "[=" : " ", f);
            (void)fputs(words ? "\\fB" : "\\fI", f);
            roff(f, o->value);
            (void)fputs(o->kind == TSR_OPT_MAYBE ? "\\fR]" : "\\fR", f);
        }
        (void)fputc('\n', f);
        roff_line(f, o->what);
    }
}

static void man_pairs(FILE *f, const char *title, const tsr_pair *p, bool examples)
{
    if (p == NULL) {
        return;
    }
    (void)fprintf(f, ".SH %s\n", title);
    for (; p->left != NULL; p++) {
        (void)fputs(examples ? ".TP\n\\fB" : ".TP\n\\fI", f);
        roff(f, p->left);
        (void)fputs("\\fR\n", f);
        roff_line(f, p->right);
    }
}

static void man_exit(FILE *f)
{
    (void)fputs(".SH EXIT STATUS\n", f);
    for (const tsr_pair *p = exit_codes; p->left != NULL; p++) {
        (void)fprintf(f, ".TP 8\n%s\n", p->left);
        roff_line(f, p->right);
    }
    (void)fputs(".PP\n", f);
    roff_line(f, "The first line of a failure on standard error reads \"error[CLASS] file: item: what (what "
                 "to do)\".");
}

static void man_see_also(FILE *f, const tsr_cmd *c)
{
    (void)fputs(".SH SEE ALSO\n", f);
    if (c != NULL) {
        (void)fputs(c->see_also == NULL ? ".BR tessera (1)\n" : ".BR tessera (1),\n", f);
    }
    for (size_t i = 0; c != NULL && c->see_also != NULL && c->see_also[i] != NULL; i++) {
        (void)fprintf(f, ".BR tessera\\-%s (1)%s\n", c->see_also[i], c->see_also[i + 1] != NULL ? "," : "");
    }
    for (size_t i = 0; c == NULL && tsr_cmds[i] != NULL; i++) {
        (void)fprintf(f, ".BR tessera\\-%s (1)%s\n", tsr_cmds[i]->name, tsr_cmds[i + 1] != NULL ? "," : "");
    }
}

static const tsr_pair program_files[] = {
    { "manifest.json", "What a checkpoint is; written last, so that a folder without one is no checkpoint." },
    { "index.tsx", "Where every tensor and expert lies, with checksums." },
    { "dense-*.h5, experts-*.h5", "Shards: ordinary HDF5 files." },
    { "assets/", "Configuration, tokenizer and other files that came along, byte for byte." },
    { 0 },
};

static const tsr_pair program_examples[] = {
    { "tessera convert model/ model.tsr --experts 8",
      "Turns a safetensors folder into a checkpoint whose experts lie "
      "in eight shards." },
    { "tessera verify model.tsr", "Compares every byte with its checksum." },
    { "tessera cat model.tsr --layer 1 --expert 7", "Prints one expert." },
    { 0 },
};

static void man_program(FILE *f)
{
    (void)fprintf(f, ".TH TESSERA 1 \"%s\" \"tessera %s\" \"Tessera Manual\"\n", TSR_RELEASE_DATE,
                  TSR_VERSION);
    (void)fputs(".SH NAME\ntessera \\- checkpoints of sparse mixture\\-of\\-experts models\n", f);
    (void)fputs(".SH SYNOPSIS\n.B tessera\n.I COMMAND\n[\\fIOPTION\\fR]... [\\fIOPERAND\\fR]...\n", f);
    (void)fputs(".SH DESCRIPTION\n", f);
    roff_line(f, about);
    (void)fputs(".PP\n", f);
    roff_line(
        f,
        "Data goes to standard output, everything else to standard error. Every command reads a checkpoint "
        "folder, a run folder (its newest checkpoint), an uncompressed tar of a checkpoint, and, where it "
        "makes "
        "sense, a safetensors folder or file.");
    (void)fputs(".SH COMMANDS\n", f);
    for (size_t i = 0; tsr_cmds[i] != NULL; i++) {
        (void)fprintf(f, ".TP 12\n.B %s\n", tsr_cmds[i]->name);
        roff_line(f, tsr_cmds[i]->what);
    }
    (void)fputs(".SH OPTIONS\n", f);
    man_options(f, tsr_common_options);
    man_exit(f);
    man_pairs(f, "EXAMPLES", program_examples, true);
    man_pairs(f, "FILES", program_files, false);
    (void)fputs(
        ".SH ENVIRONMENT\n.TP\n.B NO_COLOR\nNo colours on standard error when it is set.\n"
        ".TP\n.B TESSERA_CUDA_PLUGIN\nThe file with the backend cuda, "
        "where it lies neither beside the program nor in the library folder.\n"
        ".TP\n.B TESSERA_RECIPES\nThe folder of recipes that have names, instead of the installed one.\n",
        f);
    man_see_also(f, NULL);
}

void tsr_help_man(FILE *f, const tsr_cmd *c)
{
    if (c == NULL) {
        man_program(f);
        return;
    }
    (void)fputs(".TH TESSERA\\-", f);
    roff_upper(f, c->name);
    (void)fprintf(f, " 1 \"%s\" \"tessera %s\" \"Tessera Manual\"\n", TSR_RELEASE_DATE, TSR_VERSION);
    (void)fprintf(f, ".SH NAME\ntessera\\-%s \\- ", c->name);
    roff_line(f, c->what);
    (void)fputs(".SH SYNOPSIS\n", f);
    for (size_t i = 0; c->synopsis[i] != NULL; i++) {
        (void)fprintf(f, "%s.B tessera %s\n", i > 0 ? ".br\n" : "", c->name);
        roff_line(f, c->synopsis[i]);
    }
    (void)fputs(".SH DESCRIPTION\n", f);
    for (size_t i = 0; c->description[i] != NULL; i++) {
        (void)fputs(i > 0 ? ".PP\n" : "", f);
        roff_line(f, c->description[i]);
    }
    (void)fputs(".SH OPTIONS\n", f);
    man_options(f, c->options);
    man_options(f, tsr_common_options);
    man_exit(f);
    man_pairs(f, "EXAMPLES", c->examples, true);
    man_pairs(f, "FILES", c->files != NULL ? c->files : program_files, false);
    man_see_also(f, c);
}
