/* bench_balance.c - benchmarks of kernels/ops/balance.h. */
#include "bench/kernels/bench_kernels.h"
