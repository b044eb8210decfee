/* bench_attnres.c - benchmarks of kernels/ops/attnres.h. */
#include "bench/kernels/bench_kernels.h"
