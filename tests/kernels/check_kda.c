/* check_kda.c - checks of kernels/ops/kda.h. */
#include "tests/kernels/check.h"
