/* bench_loss.c - benchmarks of kernels/ops/loss.h. */
#include "bench/kernels/bench_kernels.h"
