/* bench_elementwise.c - benchmarks of kernels/ops/elementwise.h. */
#include "bench/kernels/bench_kernels.h"
