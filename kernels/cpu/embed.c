/* embed.c - reference: embedding, attention residuals. Plain loops, f64 accumulators. Contracts: kernels/ops/embed.h. */
#include "kernels/backend_priv.h"
