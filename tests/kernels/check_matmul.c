/* check_matmul.c - checks of kernels/ops/matmul.h. */
#include "tests/kernels/check.h"
