/* mla.c - latent attention, by vectors. Contracts: kernels/ops/mla.h. */
#include "kernels/simd/simd.h"
