/* attnres.c - reference: attention residuals. Plain loops, f64 accumulators. Contracts: kernels/ops/attnres.h. */
#include "kernels/backend_priv.h"
