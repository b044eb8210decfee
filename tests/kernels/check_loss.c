/* check_loss.c - checks of kernels/ops/loss.h. */
#include "tests/kernels/check.h"
