/* optim.c - reference: optimizer updates. Plain loops, f64 accumulators. Contracts: kernels/ops/optim.h. */
#include "kernels/backend_priv.h"
