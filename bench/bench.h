/* bench.h - interleaved timing of ours against a peer or a physical limit, in one run. */
#ifndef TSR_BENCH_H
#define TSR_BENCH_H

#include "tests/harness/bag.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BENCH_ROUNDS 5

double bench_now(void); /* seconds */
/* Sorts t[n] and returns the middle one. */
double bench_median(double *t, size_t n);
/* Runs ours and peer alternately and prints one line: medians in GB/s of `bytes`, and their ratio. */
void bench_pair(const char *what, const char *peer_name, uint64_t bytes, void (*ours)(void *),
                void (*peer)(void *), void *payload);
/* Megabytes from the command line, or the default. */
uint64_t bench_bytes(int argc, char **argv, uint64_t default_mib);
/* n floats from N(0, sigma), fixed seed. */
void bench_gauss(float *dst, uint64_t n, double sigma);
/* Declarations of about so many bytes: each layer one dense tensor of 16 MiB and three families of 8 experts
 * of 4 MiB. Never freed. */
void bench_decls(uint64_t bytes, tsr_tensor_decl **decls, uint32_t *count);

#endif
