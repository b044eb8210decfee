/* cmd_extend.c - tessera extend: a checkpoint made ready to be trained on longer sequences. */
#include "cli/cli.h"
#include "cli/out.h"
#include "train/train.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static const char *const synopsis[] = { "[OPTION]... CKPT DST --context N [--recipe FILE]", NULL };
static const char *const description[] = {
    "Writes the checkpoint CKPT once more at DST, ready to be trained on sequences of up to N tokens: the "
    "same "
    "weights bit for bit, config.json with the longer context, and a training state that stands at the "
    "beginning of the next stage. Shards that stay as they are are linked, not copied. DST must not exist.",
    "With --recipe, its stages are what is trained from here on; one of them must have the context N, none a "
    "longer one, and its model must have the checkpoint's shape. The stages that are done stay in front, so "
    "that numbers of steps go on. Without --recipe, the last stage that is done is repeated at the new "
    "context. "
    "Stages of the checkpoint's own recipe that were not begun are replaced. A checkpoint from the middle of "
    "a "
    "stage is refused. One with weights only, such as a converted model, needs --recipe and begins at step "
    "0.",
    "To go on, give DST the name of its step inside the folder of a new run; tessera train finds it there. "
    "The "
    "recipe in the checkpoint counts, as always on going on.",
    "Kimi K3 and Kimi Linear do not rotate positions, so nothing is rescaled: weights learn what is "
    "far by being trained on it. A model whose positions are rotated is refused.",
    NULL,
};
static const tsr_opt options[] = {
    { "context", 'c', TSR_OPT_SIZE, "N", 1, (uint64_t)1 << 40,
      "Tokens of the longest sequence from here on: 65536, or 64K." },
    { "recipe", 0, TSR_OPT_TEXT, "FILE", 0, 0, "What to train from here on." },
    { "drop-optimizer", 0, TSR_OPT_FLAG, NULL, 0, 0,
      "Leave the optimizer's moments behind: they start from zero." },
    TSR_OPT_END,
};
static const tsr_pair examples[] = {
    { "mkdir run && tessera extend old/step-00000100 run/step-00000100 --context 65536",
      "The last stage once more, on sequences of 65536 tokens." },
    { "tessera train my.yaml --out run", "Goes on from there." },
    { "tessera extend k3.tsr run/step-00000000 --context 64K --recipe long.yaml",
      "A converted model, to be trained by a recipe." },
    { 0 },
};
static const char *const see_also[] = { "train", "plan", "info", NULL };

static tsr_status print_json(const char *dst, const tsr_extend_report *r, tsr_err *err)
{
    json_t *o = json_object();
    tsr_json_set(&o, "destination", tsr_json_text(dst));
    tsr_json_set(&o, "step", json_integer(r->step));
    tsr_json_set(&o, "context_before", json_integer(r->context_before));
    tsr_json_set(&o, "context", json_integer(r->context));
    tsr_json_set(&o, "stages_done", json_integer(r->stages_done));
    tsr_json_set(&o, "stages_replaced", json_integer(r->stages_replaced));
    tsr_json_set(&o, "stages_added", json_integer(r->stages_added));
    tsr_json_set(&o, "next_stage", tsr_json_text(r->next_stage));
    tsr_json_set(&o, "tensors", json_integer(r->tensors));
    tsr_json_set(&o, "optimizer_tensors", json_integer(r->optim_tensors));
    tsr_json_set(&o, "optimizer_tensors_dropped", json_integer(r->optim_dropped));
    tsr_json_set(&o, "files", json_integer(r->files));
    tsr_json_set(&o, "linked_files", json_integer(r->linked_files));
    tsr_json_set(&o, "positions", tsr_json_text(r->positions));
    return tsr_json_print(o, false, err);
}

static void print(const tsr_cli *cli, const char *dst, const tsr_extend_report *r)
{
    if (r->context_before > 0) {
        tsr_cli_say(cli, "context    %" PRId64 " -> %" PRId64 " tokens", r->context_before, r->context);
    } else {
        tsr_cli_say(cli, "context    unknown -> %" PRId64 " tokens", r->context);
    }
    tsr_cli_say(cli, "positions  %s", r->positions);
    tsr_cli_say(
        cli, "stages     %" PRId32 " done, %" PRId32 " not begun and replaced, %" PRId32 " to come, %s first",
        r->stages_done, r->stages_replaced, r->stages_added, r->next_stage);
    tsr_cli_say(cli,
                "tensors    %" PRIu32 " carried, %" PRIu32 " of them moments of the optimizer; %" PRIu32
                " moments dropped",
                r->tensors, r->optim_tensors, r->optim_dropped);
    tsr_cli_say(cli, "%s: at step %" PRId64 ", %" PRIu32 " of %" PRIu32 " shards linked", dst, r->step,
                r->linked_files, r->files);
}

static tsr_status run(tsr_cli *cli, const tsr_args *a, tsr_err *err)
{
    tsr_recipe *recipe = NULL;
    tsr_extend_report r;
    char *src = NULL;
    const char *file = tsr_opt_text(a, "recipe", NULL), *dst = a->operands[1];
    if (!tsr_opt_given(a, "context")) {
        TSR_FAIL(err, TSR_E_USAGE, "extend: needs --context N, the tokens of the longest sequence");
    }
    tsr_status st = tsr_cli_ckpt_path(cli, &src, a->operands[0], err);
    st = st == TSR_OK && file != NULL ? tsr_recipe_load(&recipe, file, NULL, 0, err) : st;
    if (st == TSR_OK) {
        tsr_extend_opts o = { .context = (int64_t)tsr_opt_number(a, "context", 0),
                              .recipe = recipe,
                              .keep_optimizer = !tsr_opt_given(a, "drop-optimizer"),
                              .progress = cli->progress,
                              .report = &r };
        st = tsr_extend(src, dst, &o, err);
        tsr_meter_clear(&cli->meter);
    }
    if (st == TSR_OK && cli->json) {
        st = print_json(dst, &r, err);
    } else if (st == TSR_OK) {
        print(cli, dst, &r);
    }
    tsr_recipe_free(&recipe);
    free(src);
    return st;
}

const tsr_cmd tsr_cmd_extend = { .name = "extend",
                                 .what = "make a checkpoint ready for training on longer sequences",
                                 .synopsis = synopsis,
                                 .description = description,
                                 .options = options,
                                 .examples = examples,
                                 .see_also = see_also,
                                 .operand_min = 2,
                                 .operand_max = 2,
                                 .run = run };
