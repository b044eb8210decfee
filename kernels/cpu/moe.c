/* moe.c - reference: routing and permutation. Plain loops, f64 accumulators. Contracts: kernels/ops/moe.h. */
#include "kernels/backend_priv.h"
