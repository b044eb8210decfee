/* bench_kda.c - benchmarks of kernels/ops/kda.h. */
#include "bench/kernels/bench_kernels.h"
