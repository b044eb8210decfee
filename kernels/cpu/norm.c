/* norm.c - reference: norms. Plain loops, f64 accumulators. Contracts: kernels/ops/norm.h. */
#include "kernels/backend_priv.h"
