/* matmul.c - reference: matrix products. Plain loops, f64 accumulators. Contracts: kernels/ops/matmul.h. */
#include "kernels/backend_priv.h"
