/* blas.h - the only door to CBLAS. Kernels call it from every thread of the pool at once, each call on one thread and on
 * a block whose size depends on the problem only: results then do not depend on the number of threads. */
#ifndef TSR_KERNELS_SIMD_BLAS_H
#define TSR_KERNELS_SIMD_BLAS_H

#include <cblas.h>

#endif
