/* split_fused.h - private: expert stacks with gate and up fused, seen as one tensor per expert and matrix. */
#ifndef TSR_CONVERT_SPLIT_FUSED_H
#define TSR_CONVERT_SPLIT_FUSED_H

#include "convert/convert.h"

/* Stacks come in two layouts of one shape, so the shape cannot tell:
 *   halves:      gate_up_proj [E][2I][H], the first I rows are the gate; down_proj [E][H][I]
 *   interleaved: gate_up_proj [E][H][2I], even columns are the gate; down_proj [E][I][H]; both transposed
 * gate_up: "halves", "interleaved", or NULL: by the config's model_type, TSR_E_CONFLICT when that says nothing.
 * *s is replaced by a source of tensors layers.L.experts.E.{gate,up,down}.weight [out][in] and all others; unchanged
 * when there is nothing to split. *split tells. */
TSR_NODISCARD tsr_status split_fused(tsr_source **s, const char *gate_up, bool *split, tsr_err *err);

#endif
