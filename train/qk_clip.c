/* qk_clip.c - weights of attention heads whose logits grew too large are scaled down (MuonClip: Kimi K2 report, arXiv 2507.20534;
 * docs/TRAINING.md). Heads without rotated positions share nothing but the k part that all heads see, which stays as it is: what it
 * would have to give is taken from its queries. */
#include "train/trainer.h"

#include <math.h>
#include <stdlib.h>

static void scale_rows(float *w, int64_t first, int64_t rows, int64_t cols, double by)
{
    for (int64_t i = first * cols; i < (first + rows) * cols; i++) {
        w[i] = (float)((double)w[i] * by);
    }
}

static tsr_status change(trainer *t, const tsr_param *p, const float *most, int64_t per_head, int64_t half,
                         int64_t full, tsr_err *err)
{
    if (optim_frozen(&t->r->stage[t->feed.at], p->name)) {
        return TSR_OK;
    }
    size_t bytes = (size_t)p->count * sizeof(float);
    float *host = malloc(bytes);
    if (host == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    tsr_status st = t->b->download(t->b, host, p->data, bytes);
    for (int64_t h = 0; st == TSR_OK && h < t->r->spec->mla_heads; h++) {
        double by = (double)most[h] > t->r->qk_clip ? t->r->qk_clip / (double)most[h] : 1;
        if (by < 1) {
            scale_rows(host, h * per_head, half, p->shape[1], sqrt(by));
            scale_rows(host, h * per_head + half, full, p->shape[1], by);
        }
    }
    st = st == TSR_OK ? t->b->upload(t->b, p->data, host, bytes) : st;
    free(host);
    return st == TSR_OK ? TSR_OK : TSR_ERR(err, TSR_E_IO, "%s: cannot copy %s", t->b->name, p->name);
}

tsr_status clip_heads(trainer *t, tsr_err *err)
{
    const tsr_spec *s = t->r->spec;
    float *most = malloc((size_t)(s->mla_heads + 1) * sizeof *most);
    tsr_status st = most != NULL ? TSR_OK : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    for (int32_t i = 0; st == TSR_OK && i < s->layers; i++) {
        char q[64], kv[64];
        bool any = false;
        if (s->layer_kind[i] != TSR_LAYER_MLA) {
            continue;
        }
        st = tsr_model_max_logits(t->m, i, most, err);
        st = st == TSR_OK
                 ? t->where.all->all_reduce(t->where.all, most, (size_t)s->mla_heads, TSR_MAX_F32, err)
                 : st;
        for (int64_t h = 0; st == TSR_OK && h < s->mla_heads; h++) {
            any = any || (double)most[h] > t->r->qk_clip;
        }
        if (st != TSR_OK || !any) {
            continue;
        }
        (void)snprintf(q, sizeof q, s->q_lora > 0 ? "layers.%d.attn.q_b.weight" : "layers.%d.attn.q.weight",
                       i);
        (void)snprintf(kv, sizeof kv, "layers.%d.attn.kv_b.weight", i);
        st = change(t, tsr_model_param_find(t->m, q), most, s->qk_nope + s->qk_rope, s->qk_nope, s->qk_rope,
                    err);
        st = st == TSR_OK
                 ? change(t, tsr_model_param_find(t->m, kv), most, s->qk_nope + s->v_head, s->qk_nope, 0, err)
                 : st;
    }
    free(most);
    return st;
}
