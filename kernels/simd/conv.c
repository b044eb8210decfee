/* conv.c - short causal convolution, by vectors. Contracts: kernels/ops/conv.h. */
#include "kernels/simd/simd.h"
