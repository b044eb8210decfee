/* codec.h - private: byte shuffle + zstd, exactly HDF5's pipeline (filters 2 and 32015). The only door to zstd. */
#ifndef TSR_FORMAT_CODEC_H
#define TSR_FORMAT_CODEC_H

#include "format/base.h"
#include "format/format.h"

/* Which codec is worth trying for a dtype when compression is wanted: packed four-bit codes are noise. */
tsr_codec tsr_codec_for(tsr_dtype dtype);
/* Largest encoded size of n bytes. */
size_t tsr_codec_bound(size_t n);

/* Contexts and scratch of one thread. scratch grows to the largest chunk seen. */
typedef struct tsr_coder tsr_coder;
tsr_coder *tsr_coder_new(void); /* NULL: out of memory */
void tsr_coder_free(tsr_coder **c);

/* Encodes n bytes to dst (capacity >= tsr_codec_bound(n)). *out_bytes 0: gains less than 3 %, store it raw. */
TSR_NODISCARD tsr_status tsr_codec_encode(tsr_coder *c, tsr_codec codec, size_t elem_bytes, int level,
                                          const void *src, size_t n, void *dst, size_t capacity,
                                          size_t *out_bytes, tsr_err *err);
/* Decodes to exactly raw bytes; a frame without content size, with another size, a dictionary, or trailing bytes
 * is TSR_E_FORMAT. Never allocates by what the frame says. */
TSR_NODISCARD tsr_status tsr_codec_decode(tsr_coder *c, tsr_codec codec, size_t elem_bytes, const void *src,
                                          size_t n, void *dst, size_t raw, tsr_err *err);

/* dst[j * count + i] = src[i * elem + j], and back. n is a multiple of elem. */
void tsr_shuffle(size_t elem, const void *src, size_t n, void *dst);
void tsr_unshuffle(size_t elem, const void *src, size_t n, void *dst);

#endif
