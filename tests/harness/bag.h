/* bag.h - random bags of tensors for tests: declarations, their bytes as a pure function of (seed, tensor, item). */
#ifndef TSR_TESTS_BAG_H
#define TSR_TESTS_BAG_H

#include "format/format.h"

typedef struct bag {
    uint64_t seed;
    tsr_tensor_decl *decls;
    uint32_t count;
    uint64_t bytes;
    char **names;
    int64_t (*shapes)[8];
} bag;

uint64_t bag_random(uint64_t *state);
/* Every dtype, 0-d, empty, odd names, families in several layers; sizes up to max_bytes each. */
bag *bag_make(uint64_t seed, uint32_t plain, uint32_t layers, uint32_t experts, uint64_t max_bytes);
void bag_free(bag *b);
/* tsr_fill_fn; payload is the bag. */
tsr_status bag_fill(void *payload, const tsr_slot *slot, void *dst, tsr_err *err);
/* Compares every tensor of the checkpoint with the bag; returns the number of differences (prints them). */
int bag_compare(const bag *b, const tsr_ckpt *c);
/* A fresh folder below TMPDIR (or /tmp); malloc'ed. */
char *test_dir(const char *name);
/* Removes it with all content, and frees path. */
void test_dir_remove(char *path);

#define CHECK(x)                                                                                             \
    do {                                                                                                     \
        if (!(x)) {                                                                                          \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #x);                                  \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)
#define CHECK_OK(call)                                                                                       \
    do {                                                                                                     \
        tsr_status check_st = (call);                                                                        \
        if (check_st != TSR_OK) {                                                                            \
            fprintf(stderr, "%s:%d: %s: %s: %s\n", __FILE__, __LINE__, #call, tsr_status_class(check_st),    \
                    err.msg);                                                                                \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

#endif
