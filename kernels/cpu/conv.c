/* conv.c - reference: short causal convolution. Plain loops, f64 accumulators. Contracts: kernels/ops/conv.h. */
#include "kernels/backend_priv.h"
