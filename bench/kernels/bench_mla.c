/* bench_mla.c - benchmarks of kernels/ops/mla.h. */
#include "bench/kernels/bench_kernels.h"
