/* trace_file.h - what a model computed on its way, gathered from all chunks and written as one safetensors file:
 *   ids I64 [T], hidden F32 [layers, T, hidden], logits F32 [T, vocab], route_ids.L I32 [T, k], route_weights.L F32 [T, k],
 *   kda_state.L F32 [heads, dk, dv] (at the end) */
#ifndef TSR_CLI_TRACE_FILE_H
#define TSR_CLI_TRACE_FILE_H

#include "model/model.h"

typedef struct tsr_trace_file tsr_trace_file;

/* For `tokens` tokens of one sequence. wanted false: only the experts are counted. */
TSR_NODISCARD tsr_status tsr_trace_file_open(tsr_trace_file **out, const tsr_spec *s, int64_t tokens,
                                             bool wanted, tsr_err *err);
void tsr_trace_file_close(tsr_trace_file **t);
/* Hand it to the forwards. */
const tsr_trace *tsr_trace_file_trace(tsr_trace_file *t);
TSR_NODISCARD tsr_status tsr_trace_file_logits(void *payload, const float *logits, int64_t rows,
                                               tsr_err *err);
/* How often each expert of a layer was chosen, [experts]; NULL: the layer has none. */
const uint64_t *tsr_trace_file_counts(const tsr_trace_file *t, int32_t layer);
/* DIR/trace.safetensors; DIR is made if need be. TSR_E_CONFLICT: the file exists. */
TSR_NODISCARD tsr_status tsr_trace_file_write(const tsr_trace_file *t, const char *dir, const int32_t *ids,
                                              tsr_err *err);
TSR_NODISCARD tsr_status tsr_trace_file_check(const char *dir, tsr_err *err);

#endif
