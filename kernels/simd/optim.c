/* optim.c - optimizer updates, by vectors. Contracts: kernels/ops/optim.h. */
#include "kernels/simd/simd.h"
