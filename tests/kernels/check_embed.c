/* check_embed.c - checks of kernels/ops/embed.h. */
#include "tests/kernels/check.h"
