/* step.c - one step of training; see trainer.h. */
#include "train/trainer.h"

#include <math.h>
#include <string.h>

#define MEAN_KEEPS 0.98 /* of the running mean of the loss, a step */

/* The gradients of a layer are complete on this rank: they are summed while those of the layers below are made. */
static tsr_status layer_done(void *payload, int32_t layer, tsr_err *err)
{
    return optim_start_reduce(payload, layer, err);
}

/* Sums of this step's losses over all ranks; gradients of the mean loss are in the parameters of each rank. */
static tsr_status forward_backward(trainer *t, int64_t in_stage, double *loss, int64_t *tokens, tsr_err *err)
{
    int64_t first, last, targets, micros = feed_micros(&t->feed, shares(t));
    double sum = 0;
    feed_totals(&t->feed, in_stage, &targets, tokens);
    feed_share(&t->feed, share_rank(t), shares(t), &first, &last);
    tsr_grad_watch done = { &t->optim, layer_done };
    double scale = targets > 0 ? 1 / (double)targets : 0;
    for (int64_t i = 0; i < micros; i++) {
        int64_t from = first + i * t->feed.micro,
                to = from + t->feed.micro < last ? from + t->feed.micro : last;
        tsr_batch all = feed_batch(&t->feed, in_stage, from, to > from ? to : from);
        tsr_batch b = feed_part(&t->feed, &all, line_rank(t), &t->balance.idle);
        tsr_loss one;
        t->balance.idle = t->balance.idle || to <= from;
        b.watch = &t->balance.watch;
        b.done = i + 1 == micros ? &done : NULL;
        TSR_TRY(tsr_model_loss(t->m, &b, &one, err));
        TSR_TRY(tsr_model_backward(t->m, scale, err));
        sum += one.sum;
    }
    TSR_TRY(t->where.all->all_reduce(t->where.all, &sum, 1, TSR_SUM_F64, err));
    *loss = sum * scale;
    return TSR_OK;
}

/* What is wrong with this step; NULL: nothing. */
static const char *trouble(const trainer *t, double loss, double norm, tsr_guard_action *action)
{
    const tsr_recipe *r = t->r;
    *action = r->guard.nan;
    if (!isfinite(loss)) {
        return "the loss is not finite";
    }
    if (!isfinite(norm)) {
        return "the gradients are not finite";
    }
    *action = r->guard.spike;
    return r->guard.spike_factor > 0 && loss > r->guard.spike_factor * t->p.mean_loss ? "the loss jumped"
                                                                                      : NULL;
}

static tsr_status guard(trainer *t, const char *what, tsr_guard_action action, double loss, double norm,
                        tsr_err *err)
{
    t->p.skips_in_a_row++;
    if (action == TSR_GUARD_SKIP && t->p.skips_in_a_row <= t->r->guard.skips) {
        say(t, true, "step %lld: %s (loss %g, gradient norm %g): skipped, nothing was updated",
            (long long)t->p.step + 1, what, loss, norm);
        t->p.skipped++;
        t->line.skipped = true;
        return TSR_OK;
    }
    t->p.skips_in_a_row--;
    TSR_FAIL(err, TSR_E_NUMERIC,
             "step %lld: %s (loss %g, gradient norm %g): stopped; nothing of this step was kept",
             (long long)t->p.step + 1, what, loss, norm);
}

static tsr_status update(trainer *t, const tsr_stage *s, int64_t in_stage, int64_t tokens, double norm,
                         tsr_err *err)
{
    double scale = t->r->clip > 0 && norm > t->r->clip ? t->r->clip / norm : 1;
    TSR_TRY(optim_step(&t->optim, t->line.lr, tsr_stage_decay_factor(s, in_stage), scale, err));
    TSR_TRY(t->r->qk_clip > 0 ? clip_heads(t, err) : TSR_OK);
    return balance_update(&t->balance, tokens, err);
}

tsr_status train_step(trainer *t, tsr_err *err)
{
    int64_t in_stage, tokens;
    double loss, norm;
    tsr_guard_action action;
    const tsr_stage *s = &t->r->stage[tsr_recipe_stage_of(t->r, t->p.step, &in_stage)];
    t->line.skipped = false;
    t->line.lr = tsr_stage_lr(s, in_stage);
    TSR_TRY(tsr_model_zero_grads(t->m, err));
    TSR_TRY(t->r->qk_clip > 0 ? tsr_model_max_logits_reset(t->m, err) : TSR_OK);
    TSR_TRY(balance_begin(&t->balance, err));
    TSR_TRY(forward_backward(t, in_stage, &loss, &tokens, err));
    TSR_TRY(balance_sum(&t->balance, t->where.all, err));
    TSR_TRY(optim_finish_reduce(&t->optim, err));
    TSR_TRY(optim_norm(&t->optim, t->where.all, &norm, err));
    const char *what = trouble(t, loss, norm, &action);
    if (what != NULL) {
        TSR_TRY(guard(t, what, action, loss, norm, err));
    } else {
        TSR_TRY(update(t, s, in_stage, tokens, norm, err));
        t->p.skips_in_a_row = 0;
        t->p.mean_loss = isnan(t->p.mean_loss) ? loss : MEAN_KEEPS * t->p.mean_loss + (1 - MEAN_KEEPS) * loss;
    }
    t->p.step++;
    t->p.tokens += tokens;
    t->line_tokens += tokens;
    t->line.step = t->p.step;
    t->line.tokens = t->p.tokens;
    t->line.stage = s->name;
    t->line.loss = loss;
    t->line.grad_norm = norm;
    t->line.maxvio = balance_maxvio(&t->balance);
    return TSR_OK;
}
