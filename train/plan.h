/* plan.h - public: what a rank of a training run would hold and send, by arithmetic alone. No weights, no ranks are needed.
 *
 * Ranks: pp * cp * dp * ep of them. The layers are cut into pp runs of nearly equal length. A sequence is cut into cp parts. The
 * sequences of a step are spread over dp * ep ranks. The experts of a layer are spread over ep ranks, so each is on dp * cp of them;
 * everything else of a run of layers is on dp * cp * ep ranks. Numbers are those of the rank that holds most.
 *
 * Parameters, gradients, activations and messages are f32. Optimizer state lies once on the ranks that hold a parameter: two numbers
 * a parameter by AdamW, one by Muon. Activations count what the layers of model/ keep for backward, for the micro-batches that are
 * in flight in a pipeline, and what one layer needs beside it; without scratch of kernels. */
#ifndef TSR_TRAIN_PLAN_H
#define TSR_TRAIN_PLAN_H

#include "train/recipe.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tsr_train_plan {
    int32_t ep, dp, cp, pp;         /* as used: dp 0 became 1 */
    int64_t ranks;                  /* of the whole run */
    int32_t first_layer, layers;    /* of the rank's run of layers */
    int64_t step_tokens;            /* of a step, of one rank */
    int64_t micro_tokens, micros;   /* of one forward of one rank; how many a step */
    uint64_t params, params_routed; /* of the rank; routed: in its experts */
    /* memory of the rank, bytes */
    uint64_t parameters, gradients, optimizer;
    uint64_t activations, activations_recompute; /* everything kept; inputs of layers only */
    uint64_t total;                              /* with what the stage says of recompute */
    /* bytes that the rank sends in a step */
    uint64_t
        expert_all_to_all; /* step tokens * top-k * width of routed experts, there and back, in forward and backward, and in
                                 * forward again when recomputed; without the share that stays on the rank */
    uint64_t reduce_scatter, all_gather; /* gradients; parameters after the step */
    uint64_t
        cp_states; /* states of delta attention (heads * width of key * width of value a layer) and convolution history that
                         * are handed on, and their gradients back */
    uint64_t cp_cache; /* compressed keys and values of MLA to the other cp - 1 ranks, and their gradients */
    uint64_t
        pipeline; /* residual stream and finished residual blocks at the end of the run of layers, and gradients */
    uint64_t traffic; /* all of it */
} tsr_train_plan;

/* Of one stage of the recipe. TSR_E_LIMIT: a number does not fit 63 bits; errors of tsr_spec_each_tensor. */
TSR_NODISCARD tsr_status tsr_train_plan_of(tsr_train_plan *out, const tsr_recipe *r, int32_t stage,
                                           tsr_err *err);

#ifdef __cplusplus
}
#endif
#endif
