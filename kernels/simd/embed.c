/* embed.c - embedding, attention residuals, by vectors. Contracts: kernels/ops/embed.h. */
#include "kernels/simd/simd.h"
