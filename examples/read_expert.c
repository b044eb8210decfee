/* read_expert.c - opens a checkpoint and reads one expert with one read. Needs only tsr_read: libc, zstd, xxHash.
 *
 *     read_expert CHECKPOINT LAYER EXPERT */
#include "format/format.h"

#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv)
{
    if (argc != 4) {
        fprintf(stderr, "usage: read_expert CHECKPOINT LAYER EXPERT\n");
        return 2;
    }
    int32_t layer = (int32_t)strtol(argv[2], NULL, 10);
    uint32_t expert = (uint32_t)strtoul(argv[3], NULL, 10);
    tsr_err err = { 0 };
    tsr_ckpt *c = NULL;
    tsr_expert_span span;
    tsr_expert_matrix m[TSR_EXPERT_MATRIX_MAX];
    void *buf = NULL;
    tsr_status st = tsr_ckpt_open(&c, argv[1], &err);
    if (st == TSR_OK) {
        st = tsr_ckpt_expert_span(c, layer, expert, TSR_CLASS_EXPERTS, &span, &err);
    }
    if (st == TSR_OK && (buf = malloc(span.bytes + 1)) != NULL) {
        st = tsr_ckpt_read_expert(c, layer, expert, TSR_CLASS_EXPERTS, buf, span.bytes, m, TSR_READ_CHECK,
                                  &err);
    }
    if (st != TSR_OK || buf == NULL) {
        fprintf(stderr, "error[%s] %s\n", tsr_status_class(st), err.msg);
        tsr_ckpt_close(&c);
        return st != TSR_OK ? -st : 8;
    }
    printf("%llu bytes in one read\n", (unsigned long long)span.bytes);
    for (uint32_t i = 0; i < span.matrix_count; i++) {
        char name[256];
        (void)tsr_tensor_item_name(&m[i].tensor, expert, name, sizeof name);
        printf("%s %s %llu bytes\n", name, tsr_dtype_name((unsigned)m[i].tensor.dtype),
               (unsigned long long)m[i].tensor.item_bytes);
    }
    free(buf);
    tsr_ckpt_close(&c);
    return 0;
}
