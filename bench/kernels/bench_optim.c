/* bench_optim.c - benchmarks of kernels/ops/optim.h. */
#include "bench/kernels/bench_kernels.h"
