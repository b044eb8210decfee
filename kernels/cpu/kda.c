/* kda.c - reference: delta attention. Plain loops, f64 accumulators. Contracts: kernels/ops/kda.h. */
#include "kernels/backend_priv.h"
