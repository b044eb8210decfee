/* from_tessera.h - private: a Tessera checkpoint as a source. */
#ifndef TSR_CONVERT_FROM_TESSERA_H
#define TSR_CONVERT_FROM_TESSERA_H

#include "convert/convert.h"

extern const tsr_source_ops tsr_source_tessera;
/* Which tensor of the checkpoint (and which expert, or 0) tensor i of the source is. */
void tessera_source_tensor(const tsr_source *s, int64_t i, uint32_t *tensor, uint32_t *item);

#endif
