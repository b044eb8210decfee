/* elementwise.c - elementwise operations, by vectors. Contracts: kernels/ops/elementwise.h. */
#include "kernels/simd/simd.h"
