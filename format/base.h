/* base.h - status codes, errors, checked arithmetic, dtypes, arena, hash. Includes nothing of ours. */
#ifndef TSR_FORMAT_BASE_H
#define TSR_FORMAT_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TSR_NODISCARD __attribute__((warn_unused_result))
#define TSR_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))

/* What went wrong, by class. The exit code of a command is the negated value for -1..-9. */
typedef enum tsr_status {
    TSR_OK = 0,
    TSR_E_DIFF = -1,        /* a comparison or verification ran to its end and found differences */
    TSR_E_USAGE = -2,       /* bad option or impossible request */
    TSR_E_FORMAT = -3,      /* input bytes break their format */
    TSR_E_MISSING = -4,     /* a promised file, shard, tensor or expert is not there */
    TSR_E_UNSUPPORTED = -5, /* valid, but not handled */
    TSR_E_CONFLICT = -6,    /* two sources of truth disagree, or ambiguous, or other options than before */
    TSR_E_IO = -7,          /* the operating system refused: full, read-only, permission, EIO */
    TSR_E_LIMIT = -8,       /* needs more memory than allowed, or a hostile size */
    TSR_E_NUMERIC = -9,     /* a result cannot be represented */
    TSR_E_CANCELLED = -10   /* stopped on request (signal) after cleaning up */
} tsr_status;

#define TSR_ERR_MSG_BYTES 1536

/* Lives on the caller's stack; no allocation, no global state. msg reads "file: item: what (what to do)". */
typedef struct tsr_err {
    tsr_status code;
    int line;         /* where in our source it was raised */
    const char *file; /* static string */
    char msg[TSR_ERR_MSG_BYTES];
} tsr_err;

/* "E_FORMAT" and so on; "OK" for TSR_OK. Static string. */
const char *tsr_status_class(tsr_status s);

/* Fills *e (may be NULL) and returns code. Use TSR_FAIL and TSR_ERR instead. */
tsr_status tsr_err_set_(tsr_err *e, tsr_status code, const char *file, int line, const char *fmt, ...)
    TSR_PRINTF(5, 6) __attribute__((cold));

/* Puts text in front of an error that is on its way up: "prefix: msg". e may be NULL. */
void tsr_err_prefix(tsr_err *e, const char *fmt, ...) TSR_PRINTF(2, 3) __attribute__((cold));

/* Tells the compiler that an error is never TSR_OK: it then sees that outputs are set wherever they are used. */
static inline tsr_status tsr_failed_(tsr_status s)
{
    if (s == TSR_OK) {
        __builtin_unreachable();
    }
    return s;
}

void tsr_panic_(const char *what, const char *file, int line) __attribute__((noreturn, cold));

/* TSR_ERR makes an error value; TSR_FAIL returns it; TSR_TRY passes a failure on. */
#define TSR_ERR(e, code, ...) tsr_failed_(tsr_err_set_((e), (code), __FILE__, __LINE__, __VA_ARGS__))
#define TSR_FAIL(e, code, ...) return TSR_ERR((e), (code), __VA_ARGS__)
#define TSR_TRY(expr)                                                                                        \
    do {                                                                                                     \
        tsr_status tsr_try_ = (expr);                                                                        \
        if (tsr_try_ != TSR_OK) {                                                                            \
            return tsr_try_;                                                                                 \
        }                                                                                                    \
    } while (0)
/* For functions with resources: needs `tsr_status st` and a label `out:`. */
#define TSR_GO(expr)                                                                                         \
    do {                                                                                                     \
        st = (expr);                                                                                         \
        if (st != TSR_OK) {                                                                                  \
            goto out;                                                                                        \
        }                                                                                                    \
    } while (0)
/* Drops a status on purpose; say why beside it. */
#define TSR_IGNORE(expr)                                                                                     \
    do {                                                                                                     \
        tsr_status tsr_ignored_ = (expr);                                                                    \
        (void)tsr_ignored_;                                                                                  \
    } while (0)
/* A broken promise between our own functions. Stays in release builds; never used on file or user data. */
#define TSR_ASSERT(x)                                                                                        \
    do {                                                                                                     \
        if (!(x)) {                                                                                          \
            tsr_panic_(#x, __FILE__, __LINE__);                                                              \
        }                                                                                                    \
    } while (0)

/* Checked arithmetic: false on overflow, *out then undefined. */
static inline bool tsr_add_u64(uint64_t a, uint64_t b, uint64_t *out)
{
    return !__builtin_add_overflow(a, b, out);
}
static inline bool tsr_mul_u64(uint64_t a, uint64_t b, uint64_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}
/* Rounds up to a multiple of align (a power of two). The caller guarantees a + align fits. */
static inline uint64_t tsr_align_up(uint64_t a, uint64_t align)
{
    return (a + align - 1) & ~(align - 1);
}

/* ---- dtypes ------------------------------------------------------------------------------------ */

/* Codes are stored in checkpoints: never renumber. A different meaning is a different code. */
typedef enum tsr_dtype {
    TSR_DT_NONE = 0,
    TSR_DT_F64 = 1,
    TSR_DT_F32 = 2,
    TSR_DT_F16 = 3,
    TSR_DT_BF16 = 4,
    TSR_DT_F8_E4M3 = 5,     /* "fn": no infinities, 0x7f/0xff NaN, largest 448 */
    TSR_DT_F8_E5M2 = 6,     /* IEEE-like */
    TSR_DT_F8_E4M3FNUZ = 7, /* bias 8, 0x80 NaN, no negative zero */
    TSR_DT_F8_E5M2FNUZ = 8,
    TSR_DT_E8M0 = 9,     /* 2^(code-127), 255 = NaN */
    TSR_DT_F4_E2M1 = 10, /* bare E2M1 codes, two a byte, low nibble first */
    TSR_DT_MXFP4 = 11,   /* E2M1 codes as above, scaled by a partner tensor of E8M0, one per 32 columns */
    TSR_DT_I64 = 16,
    TSR_DT_I32 = 17,
    TSR_DT_I16 = 18,
    TSR_DT_I8 = 19,
    TSR_DT_U64 = 20,
    TSR_DT_U32 = 21,
    TSR_DT_U16 = 22,
    TSR_DT_U8 = 23,
    TSR_DT_BOOL = 24,
    TSR_DT_COUNT = 25 /* one past the largest code */
} tsr_dtype;

typedef struct tsr_dtype_traits {
    const char *name;       /* ours: "bf16"; NULL for unused codes */
    const char *st_name;    /* safetensors': "BF16"; NULL where safetensors has none */
    uint8_t elems_per_unit; /* 1, or 2 for four-bit types */
    uint8_t bytes_per_unit; /* bytes of one unit of elems_per_unit elements */
    bool is_float;
} tsr_dtype_traits;

#define TSR_RANK_MAX 32

/* NULL for a code that is not a dtype. Static. */
const tsr_dtype_traits *tsr_dtype_info(unsigned code);
/* "?" for a code that is not a dtype. */
const char *tsr_dtype_name(unsigned code);
/* By our name ("bf16"), or TSR_DT_NONE. */
tsr_dtype tsr_dtype_parse(const char *name);
/* By safetensors' name ("BF16"), or TSR_DT_NONE. */
tsr_dtype tsr_dtype_from_st(const char *name);

/* Bytes of a tensor of logical shape[rank]; every product checked. Packed dtypes need rank >= 1 and a last
 * dimension that is a multiple of elems_per_unit. Returns false on overflow, a negative dimension, a bad
 * dtype, rank above TSR_RANK_MAX, or such a last dimension. A zero-size tensor has 0 bytes. */
bool tsr_shape_bytes(tsr_dtype dtype, int rank, const int64_t *shape, uint64_t *bytes_out);

/* ---- arena ------------------------------------------------------------------------------------- */

/* Bump allocator with a byte limit given at birth; memory is zeroed; freed whole. Not thread-safe. */
typedef struct tsr_arena tsr_arena;
/* NULL when the process is out of memory. limit_bytes 0: no limit. */
tsr_arena *tsr_arena_new(size_t limit_bytes);
void tsr_arena_free(tsr_arena **a);
/* NULL when the limit or the process's memory is reached. Alignment 16. n may be 0. */
void *tsr_arena_alloc(tsr_arena *a, size_t n);
/* Copies n bytes of s and adds a NUL. */
char *tsr_arena_strndup(tsr_arena *a, const char *s, size_t n);
size_t tsr_arena_used(const tsr_arena *a);

/* ---- hashes (xxHash XXH3) ---------------------------------------------------------------------- */

typedef struct tsr_hash128 {
    uint8_t b[16]; /* canonical, big-endian as xxHash prints it */
} tsr_hash128;

uint64_t tsr_hash64(const void *p, size_t n);
tsr_hash128 tsr_hash_128(const void *p, size_t n);
/* Streaming XXH3-64 over pieces. NULL when out of memory. */
typedef struct tsr_hasher tsr_hasher;
tsr_hasher *tsr_hasher_new(void);
void tsr_hasher_reset(tsr_hasher *h);
void tsr_hasher_add(tsr_hasher *h, const void *p, size_t n);
uint64_t tsr_hasher_digest(const tsr_hasher *h);
tsr_hash128 tsr_hasher_digest128(const tsr_hasher *h); /* only meaningful when made by tsr_hasher_new128() */
tsr_hasher *tsr_hasher_new128(void);
void tsr_hasher_free(tsr_hasher **h);
/* 32 hex digits and a NUL. */
void tsr_hash128_hex(const tsr_hash128 *h, char out[33]);

/* ---- cancellation and progress ------------------------------------------------------------------ */

/* Long functions take one. Every field may be NULL / 0. Called from the thread that called the long function. */
typedef struct tsr_progress {
    /* done and total in bytes; what is a short static word ("convert", "verify"). */
    void (*report)(void *payload, const char *what, uint64_t done, uint64_t total);
    void *payload;
    /* When *cancel becomes non-zero the function cleans up and returns TSR_E_CANCELLED. */
    const volatile int *cancel;
} tsr_progress;

#ifdef __cplusplus
}
#endif
#endif
