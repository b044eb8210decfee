/* memory_source.h - for tests: a source whose tensors lie in memory, seen through a raw map. Every dtype, and
 * reads that fail on request. */
#ifndef TSR_TESTS_MEMORY_SOURCE_H
#define TSR_TESTS_MEMORY_SOURCE_H

#include "inspect/inspect.h"

#define MEMORY_ROOM 40

typedef struct memory {
    tsr_source pub; /* first; config_json may be set by hand */
    tsr_src_tensor tensors[MEMORY_ROOM];
    const void *data[MEMORY_ROOM]; /* borrowed */
    int64_t shapes[MEMORY_ROOM][4];
    int reads_left; /* then reading fails; -1: never */
    tsr_view view;
} memory;

/* Fill in, then put tensors, then take the view; done frees what the view holds. */
void memory_init(memory *m);
/* data: as many bytes as the shape says; borrowed. */
void memory_put(memory *m, const char *name, tsr_dtype dt, const void *data, int rank, const int64_t *shape);
void memory_put1(memory *m, const char *name, tsr_dtype dt, const void *data, int64_t n);
const tsr_view *memory_view(memory *m);
/* Item b holds the scales of item a, as the table of a model's names would say. */
void memory_join(memory *m, int64_t a, int64_t b);
void memory_done(memory *m);

#endif
