/* emu.h - runs kernels/cuda on the CPU, for tests: a backend "emu" whose kernels are those of the GPU, compiled by a C++
 * compiler against this folder's cuda_runtime.h.
 *
 * Each CUDA thread is a fiber. A block runs on one thread of the system, from one barrier or warp-wide call to the next,
 * in the order of a schedule; blocks run side by side. Found that way: missing barriers, barriers and warp-wide calls
 * that not all reach, and (by padding, guard pages and AddressSanitizer) accesses out of bounds. Not found: weak memory
 * ordering between blocks, and what the hardware rounds differently. Shared memory keeps what an earlier block left. */
#ifndef TSR_TESTS_EMU_H
#define TSR_TESTS_EMU_H

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Who goes on when a thread waits. A mistake shows under some of them only. */
typedef enum emu_schedule {
    EMU_FORWARD,        /* the next thread */
    EMU_BACKWARD,       /* the thread before */
    EMU_AHEAD,          /* a thread of the same warp, as long as one can go on */
    EMU_AHEAD_BACKWARD, /* likewise; else the thread before */
    EMU_SCHEDULES
} emu_schedule;

/* late: kernels run only when somebody waits for them, as on a GPU that is busy. threads 0: as many as processors. */
TSR_NODISCARD tsr_status tsr_emu_open(tsr_backend **out, emu_schedule schedule, int threads, bool late,
                                      tsr_err *err);

/* The nth call of the CUDA runtime from now on fails (0: none does), and all after it. */
void emu_fail(int nth);
/* Blocks of device memory that are not freed. */
int emu_blocks(void);

#ifdef __cplusplus
}
#endif
#endif
