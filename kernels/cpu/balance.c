/* balance.c - reference: balancing by quantiles. Plain loops, f64 accumulators. Contracts: kernels/ops/balance.h. */
#include "kernels/backend_priv.h"
