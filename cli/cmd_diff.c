/* cmd_diff.c - tessera diff: two checkpoints of any formats, tensor by tensor. */
#include "cli/cli.h"
#include "cli/glob.h"
#include "cli/out.h"
#include "inspect/inspect.h"

#include <inttypes.h>
#include <string.h>

static const char *const synopsis[] = { "[OPTION]... A B [GLOB]...", NULL };
static const char *const description[] = {
    "Compares the tensors of two checkpoints of any formats by their canonical names: bit by bit, so that +0 "
    "and -0 "
    "differ and equal NaN bits are equal. Only differences are printed.",
    "With --values numbers are compared: zeros of either sign are equal, NaN equals NaN, and the largest "
    "absolute "
    "difference, the largest distance in units in the last place, and the counts of NaN and Inf are told.",
    "A GLOB limits the comparison to tensors whose canonical name matches. Without one, differing "
    "config.json files "
    "and two different model families (--arch) count as a difference too.",
    "The exit status is 0 when nothing differs and 1 otherwise.",
    NULL,
};
static const tsr_opt options[] = {
    { "values", 0, TSR_OPT_FLAG, NULL, 0, 0, "Compare numbers instead of bits." },
    { "stat", 0, TSR_OPT_FLAG, NULL, 0, 0,
      "Only the summary; between two Tessera checkpoints from checksums, without reading tensor data." },
    { "arch", 0, TSR_OPT_CHOICE, "auto|raw|kimi-k3|kimi-linear|canonical", 0, 0,
      "Names of foreign sources; auto chooses so that both sides have the same kind of names." },
    TSR_OPT_END,
};
static const tsr_pair examples[] = {
    { "tessera diff model/ model.tsr", "Is the converted checkpoint the same, bit by bit?" },
    { "tessera diff --values a.tsr b.tsr '*.experts.{0..3}.*'", "How far are four experts apart?" },
    { "tessera diff --stat run/step-100 run/step-200", "In a moment, from checksums." },
    { 0 },
};
static const char *const see_also[] = { "verify", "cat", NULL };

typedef struct comparison {
    tsr_cli *cli;
    bool stat;
    json_t *rows;
} comparison;

/* ---- rows -----------------------------------------------------------------------------------------------
 */

static void row_json(comparison *k, const tsr_diff_row *r)
{
    json_t *o = json_object();
    tsr_json_set(&o, "name", tsr_json_text(r->name));
    tsr_json_set(&o, "state", tsr_json_text(tsr_diff_state_name(r->state)));
    if (r->state != TSR_DIFF_ONLY_B) {
        tsr_json_set(&o, "dtype_a", tsr_json_text(tsr_dtype_name((unsigned)r->dtype_a)));
    }
    if (r->state != TSR_DIFF_ONLY_A) {
        tsr_json_set(&o, "dtype_b", tsr_json_text(tsr_dtype_name((unsigned)r->dtype_b)));
    }
    if (r->state == TSR_DIFF_BYTES) {
        tsr_json_set(&o, "elements", tsr_json_u64(r->elements));
        tsr_json_set(&o, "different", tsr_json_u64(r->different));
        tsr_json_set(&o, "first", tsr_json_u64(r->first));
    }
    if (r->has_values) {
        tsr_json_set(&o, "max_abs", tsr_json_number(r->max_abs));
        tsr_json_set(&o, "relative_l2", tsr_json_number(r->relative_l2));
        tsr_json_set(&o, "max_ulp", tsr_json_u64(r->max_ulp));
        tsr_json_set(&o, "nan_a", tsr_json_u64(r->nan_a));
        tsr_json_set(&o, "nan_b", tsr_json_u64(r->nan_b));
        tsr_json_set(&o, "inf_a", tsr_json_u64(r->inf_a));
        tsr_json_set(&o, "inf_b", tsr_json_u64(r->inf_b));
    }
    tsr_json_append(&k->rows, o);
}

static void row_text(const tsr_diff_row *r)
{
    tsr_out_text(stdout, r->name);
    (void)printf(": %s", tsr_diff_state_name(r->state));
    if (r->state == TSR_DIFF_DTYPE) {
        (void)printf(": %s, %s", tsr_dtype_name((unsigned)r->dtype_a), tsr_dtype_name((unsigned)r->dtype_b));
    }
    if (r->state == TSR_DIFF_BYTES && r->different > 0) {
        (void)printf(": %" PRIu64 " of %" PRIu64 " elements, first at %" PRIu64, r->different, r->elements,
                     r->first);
    }
    if (r->has_values) {
        (void)printf(", max abs %.9g, relative L2 %.9g, max ulp %" PRIu64 ", NaN %" PRIu64 " and %" PRIu64
                     ", Inf %" PRIu64 " and %" PRIu64,
                     r->max_abs, r->relative_l2, r->max_ulp, r->nan_a, r->nan_b, r->inf_a, r->inf_b);
    }
    (void)fputc('\n', stdout);
}

static void on_row(void *payload, const tsr_diff_row *r)
{
    comparison *k = payload;
    if (k->stat) {
        return;
    }
    tsr_meter_clear(&k->cli->meter);
    if (k->cli->json) {
        row_json(k, r);
    } else {
        row_text(r);
    }
}

static tsr_status print_summary(comparison *k, const tsr_diff_summary *s, bool equal, tsr_err *err)
{
    char size[TSR_SIZE_TEXT];
    if (k->cli->json) {
        json_t *o = json_object();
        tsr_json_set(&o, "equal", json_boolean(equal));
        tsr_json_set(&o, "tensors_compared", tsr_json_u64(s->compared));
        tsr_json_set(&o, "tensors_equal", tsr_json_u64(s->equal));
        tsr_json_set(&o, "tensors_different", tsr_json_u64(s->different));
        tsr_json_set(&o, "only_a", tsr_json_u64(s->only_a));
        tsr_json_set(&o, "only_b", tsr_json_u64(s->only_b));
        tsr_json_set(&o, "bytes_compared", tsr_json_u64(s->bytes));
        tsr_json_set(&o, "arch_differs", json_boolean(s->arch_differs));
        tsr_json_set(&o, "config_differs", json_boolean(s->config_differs));
        tsr_json_set(&o, "differences", k->rows);
        k->rows = NULL;
        return tsr_json_print(o, false, err);
    }
    if (s->arch_differs) {
        tsr_cli_say(k->cli, "arch: differs");
    }
    if (s->config_differs) {
        tsr_cli_say(k->cli, "config.json: differs");
    }
    tsr_cli_say(k->cli,
                "%" PRIu64 " tensors compared (%s): %" PRIu64 " equal, %" PRIu64 " different, %" PRIu64
                " only in A, %" PRIu64 " only in B",
                s->compared, tsr_size_text(s->bytes, size), s->equal, s->different, s->only_a, s->only_b);
    return tsr_out_check(err);
}

/* ---- opening ----------------------------------------------------------------------------------------------
 */

static bool is_raw(const tsr_view *v)
{
    return strcmp(v->map->layout->arch, "raw") == 0;
}

/* One side with raw names and one with canonical names would have nothing in common: where one of them is
 * foreign it is opened again with the names of the other. */
static tsr_status agree_on_names(tsr_cli *cli, tsr_view v[2], const char *const *paths, tsr_err *err)
{
    if (is_raw(&v[0]) == is_raw(&v[1])) {
        return TSR_OK;
    }
    int canonical = is_raw(&v[0]) ? 1 : 0;
    if (v[canonical].source->ckpt != NULL) {
        return TSR_OK; /* its raw partner has no table to map it with, unless --arch names one */
    }
    tsr_view_close(&v[canonical]);
    return tsr_cli_open_view(cli, &v[canonical], paths[canonical], "raw", err);
}

static tsr_status diff(comparison *k, const tsr_args *a, const tsr_diff_opts *o, tsr_err *err)
{
    const char *arch = tsr_opt_text(a, "arch", "auto");
    bool choose = strcmp(arch, "auto") == 0;
    tsr_view v[2] = { 0 };
    tsr_diff_summary s = { 0 };
    tsr_status st;
    TSR_GO(tsr_cli_open_view(k->cli, &v[0], a->operands[0], arch, err));
    TSR_GO(tsr_cli_open_view(k->cli, &v[1], a->operands[1], arch, err));
    if (choose) {
        TSR_GO(agree_on_names(k->cli, v, a->operands, err));
    }
    TSR_GO(tsr_inspect_diff(&v[0], &v[1], o, on_row, k, &s, err));
    tsr_meter_clear(&k->cli->meter);
    if (a->operand_count > 2) {
        s.config_differs = s.arch_differs = false;
        if (s.compared + s.only_a + s.only_b == 0) {
            st = TSR_ERR(err, TSR_E_MISSING, "diff: no tensor of %s or %s matches", a->operands[0],
                         a->operands[1]);
            goto out;
        }
    }
    bool equal = s.different + s.only_a + s.only_b == 0 && !s.config_differs && !s.arch_differs;
    st = print_summary(k, &s, equal, err);
    if (st == TSR_OK && !equal) {
        err->msg[0] = '\0'; /* differences are the answer, not a failure: no error line */
        st = TSR_E_DIFF;
    }
out:
    for (int i = 0; i < 2; i++) {
        if (v[i].source != NULL) {
            tsr_view_close(&v[i]);
        }
    }
    return st;
}

static tsr_status run(tsr_cli *cli, const tsr_args *a, tsr_err *err)
{
    comparison k = { .cli = cli, .stat = tsr_opt_given(a, "stat"), .rows = json_array() };
    tsr_diff_opts o = { .values = tsr_opt_given(a, "values"), .progress = cli->progress };
    tsr_glob *g = NULL;
    tsr_status st;
    o.hashes = k.stat && !o.values;
    TSR_GO(tsr_glob_new(&g, a->operand_count > 2 ? a->operands + 2 : NULL, err));
    TSR_GO(tsr_glob_plain(g, &o.globs, err));
    st = diff(&k, a, &o, err);
out:
    tsr_glob_free(&g);
    json_decref(k.rows);
    return st;
}

const tsr_cmd tsr_cmd_diff = { .name = "diff",
                               .what = "Compare two checkpoints",
                               .synopsis = synopsis,
                               .description = description,
                               .options = options,
                               .examples = examples,
                               .see_also = see_also,
                               .operand_min = 2,
                               .operand_max = SIZE_MAX,
                               .run = run };
