/* check_moe.c - checks of kernels/ops/moe.h. */
#include "tests/kernels/check.h"
