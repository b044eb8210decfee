/* opt.c - the option parser. Help, man pages and completions come from the same tables: see help.c,
 * complete.c. */
#include "cli/opt.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct parser {
    tsr_args *args;
    const char *command;
    int argc, at; /* at: number of the next word */
    char *const *argv;
    tsr_err *err;
} parser;

/* ---- nearest name ------------------------------------------------------------------------------- */

#define WORD_MAX 48

/* Edits (insert, delete, replace, swap of neighbours) that make b of a; longer words count as far apart. */
static size_t edits(const char *a, const char *b)
{
    size_t n = strlen(a), m = strlen(b), row[3][WORD_MAX + 1];
    if (n > WORD_MAX || m > WORD_MAX) {
        return SIZE_MAX;
    }
    for (size_t j = 0; j <= m; j++) {
        row[0][j] = j;
    }
    for (size_t i = 1; i <= n; i++) {
        size_t *now = row[i % 3], *before = row[(i + 2) % 3], *older = row[(i + 1) % 3];
        now[0] = i;
        for (size_t j = 1; j <= m; j++) {
            size_t best = before[j - 1] + (a[i - 1] != b[j - 1]);
            best = before[j] + 1 < best ? before[j] + 1 : best;
            best = now[j - 1] + 1 < best ? now[j - 1] + 1 : best;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] && older[j - 2] + 1 < best) {
                best = older[j - 2] + 1;
            }
            now[j] = best;
        }
    }
    return row[n % 3][m];
}

const char *tsr_nearest(const char *text, const char *const *names)
{
    const char *best = NULL;
    size_t best_edits = SIZE_MAX, n = strlen(text);
    for (; *names != NULL; names++) {
        /* A beginning ("--prog") is as near as one edit. */
        size_t d = n >= 2 && strncmp(*names, text, n) == 0 ? 1 : edits(text, *names);
        if (d < best_edits && d <= 1 + strlen(*names) / 4) {
            best = *names;
            best_edits = d;
        }
    }
    return best;
}

/* ---- parsing ------------------------------------------------------------------------------------- */

static void add_table(parser *p, const tsr_opt *table)
{
    for (; table != NULL && table->name != NULL; table++) {
        TSR_ASSERT(p->args->value_count < TSR_OPT_MAX);
        p->args->values[p->args->value_count++].opt = table;
    }
}

static tsr_status unknown(parser *p, const char *word, const char *name, size_t name_bytes)
{
    const char *names[TSR_OPT_MAX + 1];
    char typed[WORD_MAX + 1];
    for (size_t i = 0; i < p->args->value_count; i++) {
        names[i] = p->args->values[i].opt->name;
    }
    names[p->args->value_count] = NULL;
    const char *near = NULL;
    if (name_bytes > 0 && name_bytes <= WORD_MAX) {
        memcpy(typed, name, name_bytes);
        typed[name_bytes] = '\0';
        near = tsr_nearest(typed, names);
    }
    if (near != NULL) {
        TSR_FAIL(p->err, TSR_E_USAGE, "%s: %s: unknown option (did you mean --%s?)", p->command, word, near);
    }
    TSR_FAIL(p->err, TSR_E_USAGE, "%s: %s: unknown option (tessera %s --help lists them)", p->command, word,
             p->command);
}

static tsr_status choose(const tsr_opt_value *v, const char *shown, const char *text, tsr_err *err)
{
    size_t n = strlen(text);
    for (const char *word = v->opt->value; word != NULL;) {
        size_t len = strcspn(word, "|");
        if (n == len && memcmp(word, text, n) == 0) {
            return TSR_OK;
        }
        word = word[len] == '|' ? word + len + 1 : NULL;
    }
    TSR_FAIL(err, TSR_E_USAGE, "%s %s: is not one of %s", shown, text, v->opt->value);
}

static tsr_status append(tsr_opt_value *v, const char *text, tsr_err *err)
{
    const char **grown = realloc(v->list, (v->list_count + 2) * sizeof *grown);
    if (grown == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    v->list = grown;
    v->list[v->list_count++] = text;
    v->list[v->list_count] = NULL;
    return TSR_OK;
}

/* text NULL: the option stands alone. shown: how the user wrote it. */
static tsr_status take(parser *p, tsr_opt_value *v, const char *shown, const char *text)
{
    const tsr_opt *o = v->opt;
    v->given = true;
    v->text = text;
    if (text != NULL && text[0] == '\0' && o->kind != TSR_OPT_STRING) {
        TSR_FAIL(p->err, TSR_E_USAGE, "%s: %s: has an empty value", p->command, shown);
    }
    switch ((tsr_opt_kind)o->kind) {
    case TSR_OPT_FLAG:
    case TSR_OPT_TEXT:
    case TSR_OPT_STRING: return TSR_OK;
    case TSR_OPT_LIST: return append(v, text, p->err);
    case TSR_OPT_UINT: return tsr_parse_uint(shown, text, o->low, o->high, &v->number, p->err);
    case TSR_OPT_REAL: return tsr_parse_real(shown, text, (double)o->low, (double)o->high, &v->real, p->err);
    case TSR_OPT_SIZE: return tsr_parse_size(shown, text, o->low, o->high, &v->number, p->err);
    case TSR_OPT_CHOICE: return choose(v, shown, text, p->err);
    case TSR_OPT_MAYBE:
        v->number = 0;
        return text == NULL ? TSR_OK : tsr_parse_uint(shown, text, o->low, o->high, &v->number, p->err);
    }
    return TSR_OK;
}

/* The value of an option that needs one, from the next word. */
static tsr_status next_word(parser *p, const tsr_opt_value *v, const char *shown, const char **text)
{
    if (p->at >= p->argc) {
        TSR_FAIL(p->err, TSR_E_USAGE, "%s: %s: needs a value (%s)", p->command, shown, v->opt->value);
    }
    *text = p->argv[p->at++];
    return TSR_OK;
}

static bool alone(const tsr_opt_value *v)
{
    return v->opt->kind == TSR_OPT_FLAG || v->opt->kind == TSR_OPT_MAYBE;
}

static tsr_status long_option(parser *p, const char *word)
{
    const char *name = word + 2, *text = strchr(name, '=');
    size_t n = text != NULL ? (size_t)(text - name) : strlen(name);
    tsr_opt_value *v = NULL;
    for (size_t i = 0; i < p->args->value_count; i++) {
        const char *have = p->args->values[i].opt->name;
        if (strlen(have) == n && memcmp(have, name, n) == 0) {
            v = &p->args->values[i];
        }
    }
    if (v == NULL) {
        return unknown(p, word, name, n);
    }
    char shown[WORD_MAX + 3];
    (void)snprintf(shown, sizeof shown, "--%s", v->opt->name);
    if (text != NULL) {
        text++;
        if (v->opt->kind == TSR_OPT_FLAG) {
            TSR_FAIL(p->err, TSR_E_USAGE, "%s: %s: takes no value", p->command, shown);
        }
    } else if (!alone(v)) {
        TSR_TRY(next_word(p, v, shown, &text));
    }
    return take(p, v, shown, text);
}

/* "-lr", "-oFILE", "-o FILE". */
static tsr_status short_options(parser *p, const char *word)
{
    for (const char *c = word + 1; *c != '\0'; c++) {
        tsr_opt_value *v = NULL;
        for (size_t i = 0; i < p->args->value_count; i++) {
            if (p->args->values[i].opt->letter == *c) {
                v = &p->args->values[i];
            }
        }
        if (v == NULL) {
            return unknown(p, word, word + 1, strlen(word + 1) > 1 ? strlen(word + 1) : 0);
        }
        char shown[3] = { '-', *c, '\0' };
        if (alone(v)) {
            TSR_TRY(take(p, v, shown, NULL));
            continue;
        }
        const char *text = c + 1;
        if (*text == '\0') {
            TSR_TRY(next_word(p, v, shown, &text));
        }
        return take(p, v, shown, text);
    }
    return TSR_OK;
}

tsr_status tsr_opt_parse(tsr_args *out, const char *command, const tsr_opt *own, const tsr_opt *common,
                         int argc, char *const *argv, tsr_err *err)
{
    parser p = { .args = out, .command = command, .argc = argc, .argv = argv, .err = err };
    memset(out, 0, sizeof *out);
    out->operands = calloc((size_t)argc + 1, sizeof *out->operands);
    if (out->operands == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    add_table(&p, own);
    add_table(&p, common);
    bool ended = false;
    while (p.at < argc) {
        const char *word = argv[p.at++];
        if (ended || word[0] != '-' || word[1] == '\0') {
            out->operands[out->operand_count++] = word;
        } else if (strcmp(word, "--") == 0) {
            ended = true;
        } else if (word[1] == '-') {
            TSR_TRY(long_option(&p, word));
        } else {
            TSR_TRY(short_options(&p, word));
        }
    }
    return TSR_OK;
}

void tsr_args_free(tsr_args *a)
{
    for (size_t i = 0; i < a->value_count; i++) {
        free(a->values[i].list);
    }
    free(a->operands);
    memset(a, 0, sizeof *a);
}

/* ---- asking --------------------------------------------------------------------------------------- */

const tsr_opt_value *tsr_opt_get(const tsr_args *a, const char *name)
{
    const tsr_opt_value *found = NULL;
    for (size_t i = 0; i < a->value_count; i++) {
        if (strcmp(a->values[i].opt->name, name) == 0) {
            found = &a->values[i];
        }
    }
    TSR_ASSERT(found != NULL);
    return found;
}

bool tsr_opt_given(const tsr_args *a, const char *name)
{
    return tsr_opt_get(a, name)->given;
}

const char *tsr_opt_text(const tsr_args *a, const char *name, const char *fallback)
{
    const tsr_opt_value *v = tsr_opt_get(a, name);
    return v->text != NULL ? v->text : fallback;
}

uint64_t tsr_opt_number(const tsr_args *a, const char *name, uint64_t fallback)
{
    const tsr_opt_value *v = tsr_opt_get(a, name);
    return v->given && v->text != NULL ? v->number : fallback;
}

double tsr_opt_real(const tsr_args *a, const char *name, double fallback)
{
    const tsr_opt_value *v = tsr_opt_get(a, name);
    return v->given ? v->real : fallback;
}
