/* check_balance.c - checks of kernels/ops/balance.h. */
#include "tests/kernels/check.h"
