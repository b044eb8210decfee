/* fence.h - a pretend device on the host: memory that can be touched only while one of its kernels or copies runs. Code
 * above the kernels that reads or writes tensor data dies at once, without a GPU. */
#ifndef TSR_TESTS_FENCE_H
#define TSR_TESTS_FENCE_H

#include "kernels/kernels.h"

/* A backend called "fence" over a host backend of this name. At most four at a time in a process. */
TSR_NODISCARD tsr_status tsr_fence_open(tsr_backend **out, const char *host_name, int threads, tsr_err *err);

#endif
