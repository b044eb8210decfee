/* complete.c - completion scripts for bash and zsh, from the same tables as the help. */
#include "cli/cli.h"

#include <string.h>

/* Options whose value is a path. */
static bool takes_path(const tsr_opt *o)
{
    return o->kind == TSR_OPT_TEXT && o->value != NULL &&
           (strcmp(o->value, "FILE") == 0 || strcmp(o->value, "DIR") == 0);
}

/* ---- bash -------------------------------------------------------------------------------------------------
 */

static void bash_words(FILE *f, const tsr_opt *o)
{
    for (; o != NULL && o->name != NULL; o++) {
        (void)fprintf(f, " --%s", o->name);
        if (o->letter != 0) {
            (void)fprintf(f, " -%c", o->letter);
        }
    }
}

/* One branch per option that is followed by a value: what the value may be. */
static void bash_values(FILE *f, const tsr_opt *o)
{
    for (; o != NULL && o->name != NULL; o++) {
        if (o->kind == TSR_OPT_FLAG || o->kind == TSR_OPT_MAYBE) {
            continue;
        }
        (void)fprintf(f, "        --%s", o->name);
        if (o->letter != 0) {
            (void)fprintf(f, "|-%c", o->letter);
        }
        (void)fputs(") ", f);
        if (o->kind == TSR_OPT_CHOICE) {
            (void)fputs("words='", f);
            for (const char *c = o->value; *c != '\0'; c++) {
                (void)fputc(*c == '|' ? ' ' : *c, f);
            }
            (void)fputs("'; kind=value ;;\n", f);
        } else {
            (void)fprintf(f, "kind=%s ;;\n", takes_path(o) ? "file" : "none");
        }
    }
}

void tsr_complete_bash(FILE *f)
{
    (void)fputs(
        "# bash completion for tessera\n"
        "_tessera() {\n"
        "    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} words='' kind=operand\n"
        "    local command=${COMP_WORDS[1]}\n"
        "    COMPREPLY=()\n"
        "    if [[ $cur == '=' ]]; then cur=''; fi\n"
        "    if [[ $prev == '=' ]]; then prev=${COMP_WORDS[COMP_CWORD-2]}; fi\n"
        "    if (( COMP_CWORD == 1 )); then\n"
        "        COMPREPLY=($(compgen -W '",
        f);
    for (size_t i = 0; tsr_cmds[i] != NULL; i++) {
        (void)fprintf(f, "%s%s", i > 0 ? " " : "", tsr_cmds[i]->name);
    }
    (void)fputs(" --help --version' -- \"$cur\"))\n        return\n    fi\n    case $command in\n", f);
    for (size_t i = 0; tsr_cmds[i] != NULL; i++) {
        const tsr_cmd *c = tsr_cmds[i];
        (void)fprintf(f, "    %s)\n        case $prev in\n", c->name);
        bash_values(f, c->options);
        bash_values(f, tsr_common_options);
        (void)fputs("        esac\n        if [[ $kind == operand ]]; then words='", f);
        bash_words(f, c->options);
        bash_words(f, tsr_common_options);
        (void)fputs("'; fi ;;\n", f);
    }
    (void)fputs("    esac\n"
                "    if [[ $kind == value || ( $kind == operand && $cur == -* ) ]]; then\n"
                "        COMPREPLY=($(compgen -W \"$words\" -- \"$cur\"))\n"
                "    elif [[ $command == help && $kind == operand ]]; then\n"
                "        COMPREPLY=($(compgen -W '",
                f);
    for (size_t i = 0; tsr_cmds[i] != NULL; i++) {
        (void)fprintf(f, "%s%s", i > 0 ? " " : "", tsr_cmds[i]->name);
    }
    (void)fputs("' -- \"$cur\"))\n"
                "    elif [[ $kind != none ]]; then\n"
                "        local IFS=$'\\n'\n"
                "        compopt -o filenames 2>/dev/null\n"
                "        COMPREPLY=($(compgen -f -- \"$cur\"))\n"
                "    fi\n"
                "}\n"
                "complete -F _tessera tessera\n",
                f);
}

/* ---- zsh
 * --------------------------------------------------------------------------------------------------- */

/* Text inside a single-quoted zsh word that _arguments reads: quotes, brackets and colons would end it. */
static void zsh_text(FILE *f, const char *text)
{
    for (; *text != '\0' && !(text[0] == '.' && (text[1] == ' ' || text[1] == '\0')); text++) {
        if (*text == '\'') {
            (void)fputs("'\\''", f);
            continue;
        }
        if (strchr("[]:\\", *text) != NULL) {
            (void)fputc('\\', f);
        }
        (void)fputc(*text, f);
    }
}

static void zsh_option(FILE *f, const tsr_opt *o, bool letter)
{
    bool several = o->kind == TSR_OPT_LIST;
    (void)fputs(several ? "            '*" : "            '", f);
    if (letter) {
        (void)fprintf(f, "-%c", o->letter);
    } else {
        (void)fprintf(f, "--%s", o->name);
    }
    if (o->kind != TSR_OPT_FLAG) {
        (void)fputs(letter                     ? (o->kind == TSR_OPT_MAYBE ? "" : "+")
                    : o->kind == TSR_OPT_MAYBE ? "=-"
                                               : "=",
                    f);
    }
    (void)fputc('[', f);
    zsh_text(f, o->what);
    (void)fputc(']', f);
    if (o->kind != TSR_OPT_FLAG && !(letter && o->kind == TSR_OPT_MAYBE)) {
        (void)fprintf(f, "%s%s:", o->kind == TSR_OPT_MAYBE ? "::" : ":",
                      o->kind == TSR_OPT_CHOICE ? "value" : o->value);
        if (o->kind == TSR_OPT_CHOICE) {
            (void)fputc('(', f);
            for (const char *c = o->value; *c != '\0'; c++) {
                (void)fputc(*c == '|' ? ' ' : *c, f);
            }
            (void)fputc(')', f);
        } else if (takes_path(o)) {
            (void)fputs("_files", f);
        }
    }
    (void)fputs("' \\\n", f);
}

static void zsh_options(FILE *f, const tsr_opt *o)
{
    for (; o != NULL && o->name != NULL; o++) {
        zsh_option(f, o, false);
        if (o->letter != 0) {
            zsh_option(f, o, true);
        }
    }
}

void tsr_complete_zsh(FILE *f)
{
    (void)fputs("#compdef tessera\n"
                "# zsh completion for tessera\n"
                "_tessera() {\n"
                "    local -a commands\n"
                "    commands=(\n",
                f);
    for (size_t i = 0; tsr_cmds[i] != NULL; i++) {
        (void)fprintf(f, "        '%s:", tsr_cmds[i]->name);
        zsh_text(f, tsr_cmds[i]->what);
        (void)fputs("'\n", f);
    }
    (void)fputs("    )\n"
                "    if (( CURRENT == 2 )); then\n"
                "        _describe -t commands 'tessera command' commands\n"
                "        return\n"
                "    fi\n"
                "    local command=$words[2]\n"
                "    shift words\n"
                "    (( CURRENT-- ))\n"
                "    case $command in\n",
                f);
    for (size_t i = 0; tsr_cmds[i] != NULL; i++) {
        const tsr_cmd *c = tsr_cmds[i];
        (void)fprintf(f, "    %s)\n        _arguments \\\n", c->name);
        zsh_options(f, c->options);
        zsh_options(f, tsr_common_options);
        if (strcmp(c->name, "help") == 0) {
            (void)fputs("            '1:command:(", f);
            for (size_t k = 0; tsr_cmds[k] != NULL; k++) {
                (void)fprintf(f, "%s%s", k > 0 ? " " : "", tsr_cmds[k]->name);
            }
            (void)fputs(")' ;;\n", f);
        } else if (strcmp(c->name, "completion") == 0) {
            (void)fputs("            '1:shell:(bash zsh)' ;;\n", f);
        } else {
            (void)fputs("            '*:path:_files' ;;\n", f);
        }
    }
    (void)fputs(
        "    esac\n"
        "}\n"
        "if [[ $funcstack[1] == _tessera ]]; then _tessera \"$@\"; else compdef _tessera tessera; fi\n",
        f);
}
