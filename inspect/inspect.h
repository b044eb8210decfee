/* inspect.h - public API of inspect/: comparing checkpoints, looking at values. Works on any format convert/ reads. */
#ifndef TSR_INSPECT_INSPECT_H
#define TSR_INSPECT_INSPECT_H

#include "convert/convert.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- diff ------------------------------------------------------------------------------------------------------- */

typedef enum tsr_diff_state {
    TSR_DIFF_EQUAL,
    TSR_DIFF_ONLY_A,
    TSR_DIFF_ONLY_B,
    TSR_DIFF_DTYPE,
    TSR_DIFF_SHAPE,
    TSR_DIFF_BYTES
} tsr_diff_state;
const char *tsr_diff_state_name(tsr_diff_state s); /* "equal", "only in A", ... */

typedef struct tsr_diff_row {
    const char *name; /* canonical; with the expert's number */
    tsr_diff_state state;
    tsr_dtype dtype_a, dtype_b;
    uint64_t elements, different; /* different: elements whose bits (or, with values, values) differ */
    uint64_t first;               /* index of the first of them */
    /* with values, same float dtype */
    bool has_values;
    double max_abs, relative_l2; /* relative_l2: |a - b| / |a|; NaN and Inf are left out of both */
    uint64_t max_ulp, nan_a, nan_b, inf_a, inf_b;
} tsr_diff_row;

typedef struct tsr_diff_opts {
    bool values;              /* compare values: +0 equals -0, NaN equals NaN; else bits */
    bool hashes;              /* two Tessera checkpoints: compare 64-bit checksums instead of bytes */
    const char *const *globs; /* canonical names, NULL-terminated; NULL: all */
    bool equal_rows;          /* report equal tensors too */
    tsr_progress progress;
} tsr_diff_opts;
typedef struct tsr_diff_summary {
    uint64_t compared, equal, different, only_a, only_b;
    uint64_t bytes;
    bool arch_differs;   /* both sides name a model family (tsr_view_family), and not the same one */
    bool config_differs; /* both sides have a config.json, and not the same bytes */
} tsr_diff_summary;
/* Every tensor of a and b by canonical name. fn gets a row for each difference. TSR_OK also when they differ. */
TSR_NODISCARD tsr_status tsr_inspect_diff(const tsr_view *a, const tsr_view *b, const tsr_diff_opts *o,
                                          void (*fn)(void *payload, const tsr_diff_row *row), void *payload,
                                          tsr_diff_summary *out, tsr_err *err);

/* ---- cat ----------------------------------------------------------------------------------------------------------- */

typedef enum tsr_cat_format { TSR_CAT_TEXT, TSR_CAT_HEX, TSR_CAT_RAW, TSR_CAT_NPY } tsr_cat_format;
typedef struct tsr_cat_opts {
    tsr_cat_format format;
    const char *slice; /* "0:4,:,3" like Python's, no steps; NULL: all */
    tsr_dtype as;      /* TSR_DT_NONE: as stored; or F32, F64, BF16, F16: values are converted */
    bool mxfp4;        /* raw X.weight_packed with X.weight_scale: decode */
    bool codes;        /* MXFP4: bare codes, without scales */
    bool saturate;     /* overflow becomes the largest finite value instead of an error */
} tsr_cat_opts;
/* Writes item i of the view (an index of view->map) through put; put returns false to stop (an output error: the
 * status is TSR_E_IO). *to_inf counts finite values that became infinite in a conversion. Bounded memory.
 * TSR_E_USAGE: a slice that does not fit; TSR_E_NUMERIC: overflow, names tensor and row. */
TSR_NODISCARD tsr_status tsr_inspect_cat(const tsr_view *v, int64_t item, const tsr_cat_opts *o,
                                         bool (*put)(void *payload, const void *data, size_t n),
                                         void *payload, uint64_t *to_inf, tsr_err *err);

/* ---- scan ------------------------------------------------------------------------------------------------------------ */

/* NaN scale codes (255): each makes 32 NaN values. fn is told per tensor and row. Covers E8M0 tensors and raw pairs
 * X.weight_packed / X.weight_scale; a U8 X.weight_scale without its U8 X.weight_packed is no scale tensor. */
TSR_NODISCARD tsr_status tsr_inspect_scan_scales(const tsr_view *v,
                                                 void (*fn)(void *payload, const char *tensor, int64_t row,
                                                            int64_t nan_values),
                                                 void *payload, tsr_err *err);

#ifdef __cplusplus
}
#endif
#endif
