/* check_mla.c - checks of kernels/ops/mla.h. */
#include "tests/kernels/check.h"
