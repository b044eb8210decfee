/* cmd_plan.c - tessera plan: sizes of a model that need not exist, and what each rank would hold. */
#include "cli/cli.h"
#include "cli/out.h"
#include "cli/plan_recipe.h"
#include "model/spec.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static const char *const synopsis[] = { "[--experts-per-rank N | --ranks N] [--json] CONFIG",
                                        "[--ep N] [--dp N] [--cp N] [--pp N] [--json] RECIPE", NULL };
static const char *const description[] = {
    "Reads a model configuration (config.json, a folder that holds one, or a checkpoint) and tells how many "
    "parameters "
    "and bytes the model has, how much one expert is, and what every rank holds when the experts of each "
    "layer are "
    "spread over ranks and everything else is on all of them. Weights only: optimizer state and activations "
    "are not "
    "counted. \"-\" reads the configuration from standard input.",
    "Of a recipe (a .yaml file, or the name of an installed one) it tells, stage by stage, what the rank "
    "that holds most has in "
    "memory while training (parameters, gradients, optimizer state, activations) and how many bytes it sends "
    "in a step. The "
    "ranks are those of the recipe's section parallel, unless options say otherwise.",
    NULL,
};
static const tsr_opt options[] = {
    { "experts-per-rank", 0, TSR_OPT_UINT, "N", 1, 1u << 20, "Experts of every layer that one rank holds." },
    { "ranks", 0, TSR_OPT_UINT, "N", 1, 1u << 20, "Number of ranks." },
    { "ep", 0, TSR_OPT_UINT, "N", 1, 65536, "Recipe: ranks that share the experts of a layer." },
    { "dp", 0, TSR_OPT_UINT, "N", 1, 65536, "Recipe: ranks that share a batch." },
    { "cp", 0, TSR_OPT_UINT, "N", 1, 65536, "Recipe: ranks that share a sequence." },
    { "pp", 0, TSR_OPT_UINT, "N", 1, 65536, "Recipe: ranks that share the layers." },
    TSR_OPT_END,
};
static const tsr_pair examples[] = {
    { "tessera plan config.json --experts-per-rank 14", "How much memory does each of the 64 ranks need?" },
    { "tessera plan --json model.tsr --ranks 8", "For scripts." },
    { "tessera plan k3-2.8t --ep 64 --dp 8 --pp 8", "What would training Kimi K3 take from each rank?" },
    { 0 },
};
static const char *const see_also[] = { "info", "reshard", NULL };

#define CONFIG_BYTES_MAX ((size_t)64 << 20)

/* ---- reading ----------------------------------------------------------------------------------------------
 */

static tsr_status read_all(FILE *f, const char *name, char **out, size_t *bytes, tsr_err *err)
{
    size_t room = 0;
    *out = NULL;
    *bytes = 0;
    for (;;) {
        if (room - *bytes < 2) {
            room = room * 2 + 65536;
            char *grown = room <= CONFIG_BYTES_MAX * 2 ? realloc(*out, room) : NULL;
            if (grown == NULL) {
                free(*out);
                *out = NULL;
                TSR_FAIL(err, TSR_E_LIMIT, "%s: is too large for a configuration", name);
            }
            *out = grown;
        }
        size_t n = fread(*out + *bytes, 1, room - *bytes - 1, f);
        *bytes += n;
        if (n == 0) {
            break;
        }
    }
    (*out)[*bytes] = '\0';
    if (ferror(f)) {
        free(*out);
        *out = NULL;
        TSR_FAIL(err, TSR_E_IO, "%s: cannot be read: %s", name, strerror(errno));
    }
    return TSR_OK;
}

static tsr_status read_file(const char *path, char **out, size_t *bytes, tsr_err *err)
{
    FILE *f = fopen(path, "re");
    if (f == NULL) {
        TSR_FAIL(err, errno == ENOENT ? TSR_E_MISSING : TSR_E_IO, "%s: cannot be opened: %s", path,
                 strerror(errno));
    }
    tsr_status st = read_all(f, path, out, bytes, err);
    (void)fclose(f);
    return st;
}

static tsr_status read_config(tsr_cli *cli, const char *path, char **out, size_t *bytes, tsr_err *err)
{
    struct stat sb;
    *out = NULL;
    if (strcmp(path, "-") == 0) {
        return read_all(stdin, "standard input", out, bytes, err);
    }
    if (tsr_ckpt_probe(path)) {
        tsr_ckpt *c;
        TSR_TRY(tsr_cli_open_ckpt(cli, &c, path, err));
        tsr_status st = tsr_ckpt_read_member(c, "assets/config.json", CONFIG_BYTES_MAX, out, bytes, err);
        tsr_ckpt_close(&c);
        return st;
    }
    if (stat(path, &sb) == 0 && S_ISDIR(sb.st_mode)) {
        char *inner;
        TSR_TRY(tsr_cli_join(&inner, path, "config.json", err));
        tsr_status st = read_file(inner, out, bytes, err);
        free(inner);
        return st;
    }
    return read_file(path, out, bytes, err);
}

/* ---- sizes
 * ------------------------------------------------------------------------------------------------- */

typedef struct per_rank {
    uint64_t ranks, experts, experts_last; /* experts of a layer on each rank, and on the last one */
    uint64_t expert_bytes, bytes;          /* of a rank with `experts`; bytes: with everything else */
    uint64_t bytes_all;                    /* of all ranks together */
} per_rank;

/* Ranks and experts a rank from one of them. Uneven divisions leave fewer to the last ranks. */
static tsr_status spread(const tsr_spec *s, const tsr_spec_sizes *z, uint64_t ranks, uint64_t experts,
                         per_rank *out, tsr_err *err)
{
    uint64_t all = s->experts > 0 ? (uint64_t)s->experts : 0;
    if (all == 0) {
        TSR_FAIL(err, TSR_E_USAGE, "--ranks, --experts-per-rank: this model has no experts");
    }
    if (ranks > all || experts > all) {
        TSR_FAIL(err, TSR_E_USAGE, "%s: more than the %" PRIu64 " experts of a layer",
                 ranks > 0 ? "--ranks" : "--experts-per-rank", all);
    }
    out->experts = experts > 0 ? experts : (all + ranks - 1) / ranks;
    out->ranks = ranks > 0 ? ranks : (all + experts - 1) / experts;
    /* By --ranks the first all % ranks hold one more; by --experts-per-rank the last takes what remains. */
    out->experts_last = experts > 0 ? all - (out->ranks - 1) * experts : all / ranks;
    uint64_t one = z->bytes_experts / all, dense_all;
    if (!tsr_mul_u64(one, out->experts, &out->expert_bytes) ||
        !tsr_add_u64(out->expert_bytes, z->bytes_dense, &out->bytes) ||
        !tsr_mul_u64(z->bytes_dense, out->ranks, &dense_all) ||
        !tsr_add_u64(dense_all, z->bytes_experts, &out->bytes_all)) {
        TSR_FAIL(err, TSR_E_LIMIT, "the model's size does not fit 64 bits");
    }
    return TSR_OK;
}

/* ---- printing
 * ----------------------------------------------------------------------------------------------- */

static tsr_status print_json(const tsr_spec *s, const tsr_spec_sizes *z, const per_rank *r, tsr_err *err)
{
    json_t *o = json_object();
    tsr_json_set(&o, "arch", tsr_json_text(tsr_arch_name(s->arch)));
    tsr_json_set(&o, "layers", json_integer(s->layers));
    tsr_json_set(&o, "experts", json_integer(s->experts));
    tsr_json_set(&o, "top_k", json_integer(s->top_k));
    tsr_json_set(&o, "params_total", tsr_json_u64(z->params_total));
    tsr_json_set(&o, "params_routed", tsr_json_u64(z->params_routed));
    tsr_json_set(&o, "params_active", tsr_json_u64(z->params_active));
    tsr_json_set(&o, "bytes_total", tsr_json_u64(z->bytes_total));
    tsr_json_set(&o, "bytes_dense", tsr_json_u64(z->bytes_dense));
    tsr_json_set(&o, "bytes_experts", tsr_json_u64(z->bytes_experts));
    tsr_json_set(&o, "expert_bytes", tsr_json_u64(z->expert_bytes));
    tsr_json_set(&o, "tensors", tsr_json_u64(z->tensors));
    if (r->ranks > 0) {
        tsr_json_set(&o, "ranks", tsr_json_u64(r->ranks));
        tsr_json_set(&o, "experts_per_rank", tsr_json_u64(r->experts));
        tsr_json_set(&o, "experts_last_rank", tsr_json_u64(r->experts_last));
        tsr_json_set(&o, "bytes_per_rank", tsr_json_u64(r->bytes));
        tsr_json_set(&o, "expert_bytes_per_rank", tsr_json_u64(r->expert_bytes));
        tsr_json_set(&o, "dense_bytes_per_rank", tsr_json_u64(z->bytes_dense));
        tsr_json_set(&o, "bytes_all_ranks", tsr_json_u64(r->bytes_all));
    }
    return tsr_json_print(o, false, err);
}

static void bytes_line(const char *key, uint64_t bytes)
{
    char size[TSR_SIZE_TEXT];
    (void)printf("%-22s %" PRIu64 " (%s)\n", key, bytes, tsr_size_text(bytes, size));
}

static void print_text(const tsr_spec *s, const tsr_spec_sizes *z, const per_rank *r)
{
    (void)printf("%-22s %s, %d layers, %" PRId64 " experts, top-k %" PRId64 "\n", "model",
                 tsr_arch_name(s->arch), s->layers, s->experts, s->top_k);
    (void)printf("%-22s %" PRIu64 "\n", "parameters", z->params_total);
    (void)printf("%-22s %" PRIu64 "\n", "parameters of experts", z->params_routed);
    (void)printf("%-22s %" PRIu64 "\n", "parameters active", z->params_active);
    (void)printf("%-22s %" PRIu64 "\n", "tensors", z->tensors);
    bytes_line("bytes", z->bytes_total);
    bytes_line("bytes of experts", z->bytes_experts);
    bytes_line("bytes of all else", z->bytes_dense);
    bytes_line("one expert, one layer", z->expert_bytes);
    if (r->ranks > 0) {
        (void)printf("%-22s %" PRIu64 "\n", "ranks", r->ranks);
        (void)printf("%-22s %" PRIu64, "experts per rank", r->experts);
        if (r->experts_last != r->experts) {
            (void)printf(" (the last: %" PRIu64 ")", r->experts_last);
        }
        (void)fputc('\n', stdout);
        bytes_line("bytes per rank", r->bytes);
        bytes_line("bytes of all ranks", r->bytes_all);
    }
}

static tsr_status run(tsr_cli *cli, const tsr_args *a, tsr_err *err)
{
    uint64_t ranks = tsr_opt_number(a, "ranks", 0), experts = tsr_opt_number(a, "experts-per-rank", 0);
    if (ranks > 0 && experts > 0) {
        TSR_FAIL(err, TSR_E_USAGE, "--ranks, --experts-per-rank: choose one");
    }
    bool recipe = tsr_plan_is_recipe(a->operands[0]);
    if (recipe && ranks + experts > 0) {
        TSR_FAIL(err, TSR_E_USAGE,
                 "--ranks, --experts-per-rank: are for configurations (a recipe takes --ep)");
    }
    if (!recipe && (tsr_opt_given(a, "ep") || tsr_opt_given(a, "dp") || tsr_opt_given(a, "cp") ||
                    tsr_opt_given(a, "pp"))) {
        TSR_FAIL(err, TSR_E_USAGE, "--ep, --dp, --cp, --pp: are for recipes (a configuration takes --ranks)");
    }
    if (recipe) {
        return tsr_plan_recipe(cli, a, err);
    }
    char *text;
    size_t bytes;
    TSR_TRY(read_config(cli, a->operands[0], &text, &bytes, err));
    tsr_spec *s = calloc(1, sizeof *s);
    tsr_spec_sizes z;
    per_rank r = { 0 };
    tsr_status st = s != NULL ? tsr_spec_parse(s, text, bytes, err)
                              : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    free(text);
    if (st == TSR_OK) {
        st = tsr_spec_sizes_of(s, &z, err);
    }
    if (st == TSR_OK && ranks + experts > 0) {
        st = spread(s, &z, ranks, experts, &r, err);
    }
    if (st == TSR_OK && cli->json) {
        st = print_json(s, &z, &r, err);
    } else if (st == TSR_OK) {
        print_text(s, &z, &r);
    }
    free(s);
    return st;
}

const tsr_cmd tsr_cmd_plan = { .name = "plan",
                               .what = "Tell the sizes of a model from its configuration",
                               .synopsis = synopsis,
                               .description = description,
                               .options = options,
                               .examples = examples,
                               .see_also = see_also,
                               .operand_min = 1,
                               .operand_max = 1,
                               .run = run };
