/* cmd_backends.c - tessera backends: what can compute, and which operations are fast there. */
#include "cli/cli.h"
#include "cli/out.h"
#include "kernels/kernels.h"

#include <string.h>

static const char *const synopsis[] = { "[--json]", NULL };
static const char *const description[] = {
    "Lists the backends this program knows, whether this build has them and this machine can run them, which "
    "one \"auto\" "
    "takes, and, for every operation of a model, where it has code of its own (fast), where the plain "
    "reference stands in "
    "(plain), and where it cannot run (-).",
    "The backend cuda comes in a plugin of its own, which the environment may name (TESSERA_CUDA_PLUGIN). "
    "\"auto\" does not take it as long as it lacks operations that models need.",
    NULL,
};
static const tsr_opt options[] = { TSR_OPT_END };
static const tsr_pair examples[] = { { "tessera backends", "What will a model run on here?" }, { 0 } };
static const char *const see_also[] = { "generate", "eval", NULL };

typedef struct column {
    const char *name;
    bool built, usable, automatic;
    tsr_err why; /* not usable */
} column;

/* As in the table of kernels. */
static column columns[] = { { .name = "cpu" }, { .name = "avx2" }, { .name = "avx512" }, { .name = "cuda" } };
enum { COLUMNS = sizeof columns / sizeof *columns };

typedef struct op_row {
    const char *name;
    bool simd, cuda;
} op_row;
static const op_row ops[] = {
#define TSR_OP(op, cpu, simd, cuda) { #op, simd, cuda },
#include "kernels/ops.def"
#undef TSR_OP
};
enum { OPS = sizeof ops / sizeof *ops };

/* Backends are opened with one thread: the machine is asked, not a list. */
static tsr_status look(tsr_err *err)
{
    tsr_backend *best;
    TSR_TRY(tsr_backend_open(&best, "auto", 1, err));
    for (size_t i = 0; i < COLUMNS; i++) {
        column *c = &columns[i];
        tsr_backend *b = NULL;
        for (size_t k = 0; tsr_backend_names[k] != NULL; k++) {
            c->built = c->built || strcmp(tsr_backend_names[k], c->name) == 0;
        }
        c->usable = c->built && tsr_backend_open(&b, c->name, 1, &c->why) == TSR_OK;
        c->automatic = strcmp(best->name, c->name) == 0;
        tsr_backend_close(&b);
    }
    tsr_backend_close(&best);
    return TSR_OK;
}

static const char *how(const op_row *o, const column *c)
{
    if (!c->built) {
        return "-";
    }
    if (strcmp(c->name, "cuda") == 0) {
        return o->cuda ? "fast" : "-";
    }
    return strcmp(c->name, "cpu") != 0 && o->simd ? "fast" : "plain";
}

static tsr_status print_json(tsr_err *err)
{
    json_t *o = json_object(), *list = json_array(), *table = json_object();
    for (size_t i = 0; i < COLUMNS; i++) {
        const column *c = &columns[i];
        json_t *b = json_object();
        tsr_json_set(&b, "name", tsr_json_text(c->name));
        tsr_json_set(&b, "in_build", json_boolean(c->built));
        tsr_json_set(&b, "usable", json_boolean(c->usable));
        tsr_json_set(&b, "auto", json_boolean(c->automatic));
        tsr_json_set(&b, "why_not", c->built && !c->usable ? tsr_json_text(c->why.msg) : json_null());
        tsr_json_append(&list, b);
    }
    for (size_t k = 0; k < OPS; k++) {
        json_t *row = json_object();
        for (size_t i = 0; i < COLUMNS; i++) {
            tsr_json_set(&row, columns[i].name, tsr_json_text(how(&ops[k], &columns[i])));
        }
        tsr_json_set(&table, ops[k].name, row);
    }
    tsr_json_set(&o, "backends", list);
    tsr_json_set(&o, "ops", table);
    return tsr_json_print(o, false, err);
}

static void print_text(void)
{
    for (size_t i = 0; i < COLUMNS; i++) {
        const column *c = &columns[i];
        (void)printf("%-8s %s%s\n", c->name,
                     !c->built    ? "not in this build"
                     : !c->usable ? c->why.msg
                                  : "usable",
                     c->automatic ? ", auto" : "");
    }
    (void)printf("\n%-20s", "operation");
    for (size_t i = 0; i < COLUMNS; i++) {
        (void)printf(" %-7s", columns[i].name);
    }
    for (size_t k = 0; k < OPS; k++) {
        (void)printf("\n%-20s", ops[k].name);
        for (size_t i = 0; i < COLUMNS; i++) {
            (void)printf(" %-7s", how(&ops[k], &columns[i]));
        }
    }
    (void)putchar('\n');
}

static tsr_status run(tsr_cli *cli, const tsr_args *a, tsr_err *err)
{
    (void)a;
    TSR_TRY(look(err));
    if (cli->json) {
        return print_json(err);
    }
    print_text();
    return TSR_OK;
}

const tsr_cmd tsr_cmd_backends = { .name = "backends",
                                   .what = "List what can compute here",
                                   .synopsis = synopsis,
                                   .description = description,
                                   .options = options,
                                   .examples = examples,
                                   .see_also = see_also,
                                   .operand_min = 0,
                                   .operand_max = 0,
                                   .run = run };
