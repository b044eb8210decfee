/* held_out.c - the loss on text that is never trained on, by how much of its document stands before a token in the same sequence;
 * see trainer.h. */
#include "train/trainer.h"

#include <math.h>
#include <string.h>

/* [0, c / 2^(n - 1)), ..., [c / 2, c): the last one also takes what lies behind it. */
static void edges(tsr_train_eval *e, int64_t context, int64_t buckets)
{
    e->buckets = (int32_t)(buckets < TSR_EVAL_BUCKET_MAX ? buckets : TSR_EVAL_BUCKET_MAX);
    e->edge[0] = 0;
    for (int32_t i = 1; i <= e->buckets; i++) {
        int shift = e->buckets - i;
        e->edge[i] = shift < 62 && context >> shift > e->edge[i - 1] ? context >> shift : e->edge[i - 1];
    }
}

static int32_t bucket_of(const tsr_train_eval *e, int64_t position)
{
    int32_t i = 0;
    while (i + 1 < e->buckets && position >= e->edge[i + 1]) {
        i++;
    }
    return i;
}

typedef struct sums {
    double loss[TSR_EVAL_BUCKET_MAX];
    double bytes; /* of text that the predicted tokens stand for, by their source's mean */
} sums;

static tsr_status one(trainer *t, int64_t i, int64_t most, tsr_train_eval *e, sums *s, tsr_err *err)
{
    int32_t source = 0;
    bool idle = i >= most;
    tsr_loss loss;
    tsr_batch all_ranks = idle ? feed_batch(&t->feed, 0, 0, 0) : feed_held(&t->feed, i, most, &source);
    bool nothing;
    tsr_batch b = feed_part(&t->feed, &all_ranks, line_rank(t), &nothing);
    idle = idle || nothing;
    TSR_TRY(tsr_model_loss(t->m, &b, &loss, err));
    const float *each = tsr_model_losses(t->m);
    const tsr_data *d = t->feed.data[source];
    int64_t all = tsr_data_tokens(d, TSR_SPLIT_HELD);
    double bytes = all > 0 ? (double)tsr_data_text_bytes(d, TSR_SPLIT_HELD) / (double)all : 0;
    for (int64_t k = 0; !idle && k < b.segs; k++) {
        for (int64_t j = b.seg[k]; j < b.seg[k + 1]; j++) {
            if (b.targets[j] >= 0) {
                int32_t at = bucket_of(e, j - b.seg[k] + (k == 0 ? b.before : 0));
                e->count[at]++;
                s->loss[at] += (double)each[j];
                s->bytes += bytes;
            }
        }
    }
    return TSR_OK;
}

tsr_status evaluate_held(trainer *t, tsr_train_eval *out, tsr_err *err)
{
    tsr_dist *d = t->where.all;
    int64_t in_stage, most = feed_held_count(&t->feed, t->r->eval.sequences);
    sums s = { .bytes = 0 };
    *out = (tsr_train_eval){ .step = t->p.step };
    out->stage = t->r->stage[tsr_recipe_stage_of(t->r, t->p.step > 0 ? t->p.step - 1 : 0, &in_stage)].name;
    edges(out, t->feed.held_context, t->r->eval.buckets);
    if (most == 0) {
        TSR_FAIL(err, TSR_E_MISSING,
                 "no held-out text (tessera data build --held-out SHARE sets some aside)");
    }
    int64_t rounds = (most + shares(t) - 1) / shares(t);
    for (int64_t i = 0; i < rounds; i++) {
        TSR_TRY(one(t, i * shares(t) + share_rank(t), most, out, &s, err));
    }
    TSR_TRY(d->all_reduce(d, s.loss, TSR_EVAL_BUCKET_MAX, TSR_SUM_F64, err));
    TSR_TRY(d->all_reduce(d, &s.bytes, 1, TSR_SUM_F64, err));
    TSR_TRY(d->all_reduce(d, out->count, TSR_EVAL_BUCKET_MAX, TSR_SUM_I64, err));
    double sum = 0;
    for (int32_t i = 0; i < out->buckets; i++) {
        out->bucket_loss[i] = out->count[i] > 0 ? s.loss[i] / (double)out->count[i] : NAN;
        out->tokens += out->count[i];
        sum += s.loss[i];
    }
    out->loss = out->tokens > 0 ? sum / (double)out->tokens : NAN;
    out->bits_per_byte = s.bytes > 0 ? sum / log(2) / s.bytes : -1;
    return TSR_OK;
}
