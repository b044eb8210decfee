/* schedule.c - learning rates and weight decay by step; see recipe.h. */
#include "train/recipe.h"

#include <math.h>

int64_t tsr_recipe_steps(const tsr_recipe *r)
{
    int64_t steps = 0;
    for (int32_t i = 0; i < r->stages; i++) {
        steps += r->stage[i].steps; /* at most 16 times 2^40 */
    }
    return steps;
}

int32_t tsr_recipe_stage_of(const tsr_recipe *r, int64_t step, int64_t *in_stage)
{
    int32_t i = 0;
    while (i < r->stages - 1 && step >= r->stage[i].steps) {
        step -= r->stage[i].steps;
        i++;
    }
    if (in_stage != NULL) {
        *in_stage = step;
    }
    return i;
}

double tsr_stage_lr(const tsr_stage *s, int64_t step)
{
    double n = (double)(step < s->steps ? step + 1 : s->steps);
    double warmup = (double)s->warmup, steps = (double)s->steps, decay = (double)s->decay;
    if (n < warmup) {
        return s->lr * n / warmup;
    }
    if (s->schedule == TSR_SCHEDULE_COSINE && steps > warmup) {
        double done = (n - warmup) / (steps - warmup);
        return s->lr_final + (s->lr - s->lr_final) * (1 + cos(3.14159265358979323846 * done)) / 2;
    }
    if (s->schedule == TSR_SCHEDULE_WSD && n > steps - decay) {
        return s->lr + (s->lr_final - s->lr) * (n - (steps - decay)) / decay;
    }
    return s->lr;
}

double tsr_stage_decay_factor(const tsr_stage *s, int64_t step)
{
    if (s->steps < 2) {
        return 1;
    }
    double done = (double)(step < s->steps - 1 ? step : s->steps - 1) / (double)(s->steps - 1);
    return 1 + (s->weight_decay_final - 1) * done;
}
