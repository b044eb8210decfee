/* matmul.c - matrix products, by vectors. Contracts: kernels/ops/matmul.h. */
#include "kernels/simd/simd.h"
