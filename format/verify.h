/* verify.h - private: shared by verify.c and verify_deep.c. */
#ifndef TSR_FORMAT_VERIFY_H
#define TSR_FORMAT_VERIFY_H

#include "format/reader.h"
#include "format/save.h"

#include <pthread.h>

typedef struct verifier {
    tsr_dir *dir;
    tsr_ckpt *c; /* NULL when it does not open */
    tsr_verify_level level;
    int threads;
    tsr_finding_fn fn;
    void *payload;
    const tsr_progress *progress;
    tsr_verify_report *out;
    pthread_mutex_t mu; /* guards out and fn */
    uint64_t total_bytes;
    bool damage, missing;
} verifier;

/* Tells one finding; code TSR_OK is a warning. */
void verify_tell(verifier *v, tsr_status code, const char *file, const char *item, const char *what);
/* What libhdf5 sees in each shard against the index, and every chunk decoded against its raw checksum. */
TSR_NODISCARD tsr_status verify_deep(verifier *v, tsr_err *err);
/* Decodes the chunk and compares its raw checksum. item for messages. */
void verify_decoded(verifier *v, const tsr_tensor_info *t, uint32_t item, const tsr_extent_info *x,
                    const char *file, const uint8_t *stored);

#endif
