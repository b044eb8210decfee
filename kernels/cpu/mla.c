/* mla.c - reference: latent attention. Plain loops, f64 accumulators. Contracts: kernels/ops/mla.h. */
#include "kernels/backend_priv.h"
