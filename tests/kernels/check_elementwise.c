/* check_elementwise.c - checks of kernels/ops/elementwise.h. */
#include "tests/kernels/check.h"
