/* kda.c - delta attention, by vectors. Contracts: kernels/ops/kda.h. */
#include "kernels/simd/simd.h"
