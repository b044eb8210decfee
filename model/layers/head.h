/* head.h - for model/ only: both ends of the model. */
#ifndef TSR_MODEL_LAYERS_HEAD_H
#define TSR_MODEL_LAYERS_HEAD_H

#include "model/model_priv.h"

tsr_status embed_forward(run *r, float *cur);
tsr_status embed_backward(run *r, const float *dcur);
/* k->normed [n][hidden] = rms(mix(bank, cur)) */
tsr_status final_forward(run *r, const float *cur, final_saved *k);
/* dnormed is overwritten; dcur = */
tsr_status final_backward(run *r, float *dnormed, float *dcur, const final_saved *k);
/* Logits of rows [first, n) to host memory [n - first][vocab]. */
tsr_status head_logits(run *r, const float *normed, int64_t first, float *host);
/* losses[n] = -log p of the targets, lse[n]; backend memory. */
tsr_status head_losses(run *r, const float *normed, float *losses, float *lse);
/* dnormed =, head += , of scale * sum of losses. */
tsr_status head_backward(run *r, const float *normed, const float *lse, double scale, float *dnormed);
int64_t head_block(const tsr_spec *s, int64_t n);

#endif
