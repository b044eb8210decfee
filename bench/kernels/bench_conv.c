/* bench_conv.c - benchmarks of kernels/ops/conv.h. */
#include "bench/kernels/bench_kernels.h"
