/* check_norm.c - checks of kernels/ops/norm.h. */
#include "tests/kernels/check.h"
