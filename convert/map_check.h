/* map_check.h - private: a map against what the config promises. */
#ifndef TSR_CONVERT_MAP_CHECK_H
#define TSR_CONVERT_MAP_CHECK_H

#include "convert/convert.h"

/* Tied embeddings: what config.json says against the tensors that are there; in the first second, not at the end. */
TSR_NODISCARD tsr_status map_check_tied(tsr_source *s, const tsr_map_opts *o, tsr_err *err);
/* The catalogue's position of each group (UINT32_MAX: not in it), and the number of experts it promises (0: no
 * catalogue for this layout or source). */
TSR_NODISCARD tsr_status map_rank_groups(const tsr_map *m, uint32_t *rank, int64_t *experts, tsr_err *err);
/* Every tensor of the catalogue is there with the right shape. */
TSR_NODISCARD tsr_status map_check_catalog(const tsr_map *m, const tsr_map_opts *o, tsr_err *err);

#endif
