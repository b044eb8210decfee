/* norm.c - norms, by vectors. Contracts: kernels/ops/norm.h. */
#include "kernels/simd/simd.h"
