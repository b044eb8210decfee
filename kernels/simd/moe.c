/* moe.c - routing and permutation, by vectors. Contracts: kernels/ops/moe.h. */
#include "kernels/simd/simd.h"
