/* loss.c - cross-entropy, by vectors. Contracts: kernels/ops/loss.h. */
#include "kernels/simd/simd.h"
