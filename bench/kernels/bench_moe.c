/* bench_moe.c - benchmarks of kernels/ops/moe.h. */
#include "bench/kernels/bench_kernels.h"
