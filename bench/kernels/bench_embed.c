/* bench_embed.c - benchmarks of kernels/ops/embed.h. */
#include "bench/kernels/bench_kernels.h"
