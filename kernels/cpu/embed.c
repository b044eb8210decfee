/* embed.c - reference: token embedding. Contracts: kernels/ops/embed.h. */
#include "kernels/backend_priv.h"
#include "kernels/numeric.h"

tsr_status tsr_cpu_embed_fwd(tsr_queue *q, const tsr_embed_fwd_args *a)
{
    (void)q;
    for (int64_t i = 0; i < a->n; i++) {
        for (int64_t j = 0; j < a->d; j++) {
            int64_t at = a->ids[i] * a->d + j;
            a->y[i * a->d + j] = a->dtype == TSR_DT_F32 ? ((const float *)a->table)[at]
                                                        : tsr_bf16_to_f32(((const uint16_t *)a->table)[at]);
        }
    }
    return TSR_OK;
}

tsr_status tsr_cpu_embed_bwd(tsr_queue *q, const tsr_embed_bwd_args *a)
{
    (void)q;
    for (int64_t i = 0; i < a->n; i++) {
        for (int64_t j = 0; j < a->d; j++) {
            a->dtable[a->ids[i] * a->d + j] += a->dy[i * a->d + j];
        }
    }
    return TSR_OK;
}
