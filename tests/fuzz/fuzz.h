/* fuzz.h - every target is one function over bytes (libFuzzer's entry point). */
#ifndef TSR_TESTS_FUZZ_H
#define TSR_TESTS_FUZZ_H

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#endif
