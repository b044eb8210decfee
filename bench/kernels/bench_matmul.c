/* bench_matmul.c - benchmarks of kernels/ops/matmul.h. */
#include "bench/kernels/bench_kernels.h"
