/* elementwise.c - reference: elementwise operations. Plain loops, f64 accumulators. Contracts: kernels/ops/elementwise.h. */
#include "kernels/backend_priv.h"
