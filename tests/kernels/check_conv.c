/* check_conv.c - checks of kernels/ops/conv.h. */
#include "tests/kernels/check.h"
