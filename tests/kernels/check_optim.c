/* check_optim.c - checks of kernels/ops/optim.h. */
#include "tests/kernels/check.h"
