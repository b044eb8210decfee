/* bench_norm.c - benchmarks of kernels/ops/norm.h. */
#include "bench/kernels/bench_kernels.h"
