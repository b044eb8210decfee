/* weights.h - public: any checkpoint that convert/ reads, as the source of a model's numbers (model/source.h). */
#ifndef TSR_CONVERT_WEIGHTS_H
#define TSR_CONVERT_WEIGHTS_H

#include "convert/convert.h"
#include "model/source.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Looks at every matrix of every expert once (headers and index only, no data) and remembers how each layer's experts
 * lie, so that read_expert is one read wherever they lie side by side: always in Tessera checkpoints and tars, and in
 * safetensors files that keep an expert together. Matrices stored as they are stay where that read put them;
 * compressed ones are decoded, and compared with their checksum.
 * v is borrowed: it must outlive *out, which tsr_view_weights_done empties. On failure *out is empty.
 * read_expert allocates only when a layer's experts are mostly compressed, and then once per thread that reads at once.
 * TSR_E_UNSUPPORTED: a layer's matrices are not one family each; TSR_E_FORMAT: damaged index. What a partial view
 * lacks is TSR_E_MISSING when it is asked for. */
TSR_NODISCARD tsr_status tsr_view_weights(tsr_weight_source *out, const tsr_view *v, tsr_err *err);
void tsr_view_weights_done(tsr_weight_source *s);

#ifdef __cplusplus
}
#endif
#endif
