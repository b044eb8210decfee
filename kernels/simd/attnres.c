/* attnres.c - attention residuals, by vectors. Contracts: kernels/ops/attnres.h. */
#include "kernels/simd/simd.h"
