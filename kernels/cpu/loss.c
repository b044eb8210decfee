/* loss.c - reference: cross-entropy. Plain loops, f64 accumulators. Contracts: kernels/ops/loss.h. */
#include "kernels/backend_priv.h"
