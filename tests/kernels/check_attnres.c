/* check_attnres.c - checks of kernels/ops/attnres.h. */
#include "tests/kernels/check.h"
