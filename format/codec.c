/* codec.c - see codec.h. */
#include "format/codec.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#define ZSTD_STATIC_LINKING_ONLY /* for ZSTD_c_literalCompressionMode, see set_up */
#include <zstd.h>
#include <zstd_errors.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

const char *tsr_codec_name(unsigned codec)
{
    static const char *const names[] = { "raw", "zstd", "shuffle+zstd" };
    return codec < 3 ? names[codec] : "?";
}

tsr_codec tsr_codec_for(tsr_dtype dtype)
{
    const tsr_dtype_traits *t = tsr_dtype_info((unsigned)dtype);
    if (t == NULL || t->elems_per_unit > 1) {
        return TSR_CODEC_RAW;
    }
    return t->bytes_per_unit > 1 ? TSR_CODEC_SHUFFLE_ZSTD : TSR_CODEC_ZSTD;
}

size_t tsr_codec_bound(size_t n)
{
    return ZSTD_compressBound(n);
}

/* ---- shuffle ------------------------------------------------------------------------------------- */

static void shuffle_plain(size_t elem, const uint8_t *src, size_t from, size_t count, uint8_t *dst)
{
    for (size_t j = 0; j < elem; j++) {
        for (size_t i = from; i < count; i++) {
            dst[j * count + i] = src[i * elem + j];
        }
    }
}

static void unshuffle_plain(size_t elem, const uint8_t *src, size_t from, size_t count, uint8_t *dst)
{
    for (size_t i = from; i < count; i++) {
        for (size_t j = 0; j < elem; j++) {
            dst[i * elem + j] = src[j * count + i];
        }
    }
}

#ifdef __SSE2__
static __m128i load(const uint8_t *p)
{
    return _mm_loadu_si128((const __m128i *)(const void *)p);
}

static void store(uint8_t *p, __m128i v)
{
    _mm_storeu_si128((__m128i *)(void *)p, v);
}

/* Each returns how many elements it did; the plain loop does the rest. */
static size_t shuffle2(const uint8_t *src, size_t count, uint8_t *dst)
{
    const __m128i low = _mm_set1_epi16(0x00ff);
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        __m128i a = load(src + i * 2), b = load(src + i * 2 + 16);
        store(dst + i, _mm_packus_epi16(_mm_and_si128(a, low), _mm_and_si128(b, low)));
        store(dst + count + i, _mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8)));
    }
    return i;
}

static size_t unshuffle2(const uint8_t *src, size_t count, uint8_t *dst)
{
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        __m128i a = load(src + i), b = load(src + count + i);
        store(dst + i * 2, _mm_unpacklo_epi8(a, b));
        store(dst + i * 2 + 16, _mm_unpackhi_epi8(a, b));
    }
    return i;
}

static size_t shuffle4(const uint8_t *src, size_t count, uint8_t *dst)
{
    const __m128i low = _mm_set1_epi16(0x00ff);
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        __m128i v[4], even[2], odd[2];
        for (int k = 0; k < 4; k++) {
            v[k] = load(src + i * 4 + (size_t)k * 16);
        }
        for (int k = 0; k < 2; k++) { /* bytes 0,2,0,2.. and 1,3,1,3.. of eight elements each */
            even[k] = _mm_packus_epi16(_mm_and_si128(v[2 * k], low), _mm_and_si128(v[2 * k + 1], low));
            odd[k] = _mm_packus_epi16(_mm_srli_epi16(v[2 * k], 8), _mm_srli_epi16(v[2 * k + 1], 8));
        }
        store(dst + i, _mm_packus_epi16(_mm_and_si128(even[0], low), _mm_and_si128(even[1], low)));
        store(dst + count + i, _mm_packus_epi16(_mm_and_si128(odd[0], low), _mm_and_si128(odd[1], low)));
        store(dst + 2 * count + i, _mm_packus_epi16(_mm_srli_epi16(even[0], 8), _mm_srli_epi16(even[1], 8)));
        store(dst + 3 * count + i, _mm_packus_epi16(_mm_srli_epi16(odd[0], 8), _mm_srli_epi16(odd[1], 8)));
    }
    return i;
}

static size_t unshuffle4(const uint8_t *src, size_t count, uint8_t *dst)
{
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        __m128i a = load(src + i), b = load(src + count + i);
        __m128i c = load(src + 2 * count + i), d = load(src + 3 * count + i);
        __m128i ab0 = _mm_unpacklo_epi8(a, b), ab1 = _mm_unpackhi_epi8(a, b);
        __m128i cd0 = _mm_unpacklo_epi8(c, d), cd1 = _mm_unpackhi_epi8(c, d);
        store(dst + i * 4, _mm_unpacklo_epi16(ab0, cd0));
        store(dst + i * 4 + 16, _mm_unpackhi_epi16(ab0, cd0));
        store(dst + i * 4 + 32, _mm_unpacklo_epi16(ab1, cd1));
        store(dst + i * 4 + 48, _mm_unpackhi_epi16(ab1, cd1));
    }
    return i;
}
#else
static size_t shuffle2(const uint8_t *src, size_t count, uint8_t *dst)
{
    (void)src, (void)count, (void)dst;
    return 0;
}
#define unshuffle2 shuffle2
#define shuffle4 shuffle2
#define unshuffle4 shuffle2
#endif

void tsr_shuffle(size_t elem, const void *src, size_t n, void *dst)
{
    TSR_ASSERT(elem > 0 && n % elem == 0);
    size_t count = n / elem, done = 0;
    if (elem == 2) {
        done = shuffle2(src, count, dst);
    } else if (elem == 4) {
        done = shuffle4(src, count, dst);
    }
    shuffle_plain(elem, src, done, count, dst);
}

void tsr_unshuffle(size_t elem, const void *src, size_t n, void *dst)
{
    TSR_ASSERT(elem > 0 && n % elem == 0);
    size_t count = n / elem, done = 0;
    if (elem == 2) {
        done = unshuffle2(src, count, dst);
    } else if (elem == 4) {
        done = unshuffle4(src, count, dst);
    }
    unshuffle_plain(elem, src, done, count, dst);
}

/* ---- zstd ---------------------------------------------------------------------------------------- */

struct tsr_coder {
    ZSTD_CCtx *cctx;
    ZSTD_DCtx *dctx;
    uint8_t *scratch;
    size_t scratch_bytes;
};

tsr_coder *tsr_coder_new(void)
{
    return calloc(1, sizeof(tsr_coder));
}

void tsr_coder_free(tsr_coder **c)
{
    if (c == NULL || *c == NULL) {
        return;
    }
    (void)ZSTD_freeCCtx((*c)->cctx); /* accepts NULL, returns 0 */
    (void)ZSTD_freeDCtx((*c)->dctx);
    free((*c)->scratch);
    free(*c);
    *c = NULL;
}

static tsr_status need_scratch(tsr_coder *c, size_t n, tsr_err *err)
{
    if (c->scratch_bytes >= n) {
        return TSR_OK;
    }
    free(c->scratch);
    c->scratch_bytes = 0;
    c->scratch = malloc(n);
    if (c->scratch == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory: %zu bytes to decode a chunk", n);
    }
    c->scratch_bytes = n;
    return TSR_OK;
}

/* Byte planes of model weights have next to no repeats: what shrinks is the skewed bytes themselves (exponents). So at
 * level 1 zstd is told to look for long matches only and to entropy-code literals all the same, which is both smaller
 * and several times faster, in either direction, than level 1 as it comes (docs/BENCHMARKS.md). The frame is an
 * ordinary one. The last parameter is from zstd's experimental part: where a library refuses it, level 1 as it comes
 * is what is left. */
static bool set_up(ZSTD_CCtx *c, tsr_codec codec, int level)
{
    if (ZSTD_isError(ZSTD_CCtx_reset(c, ZSTD_reset_session_and_parameters)) ||
        ZSTD_isError(ZSTD_CCtx_setParameter(c, ZSTD_c_compressionLevel, level))) {
        return false;
    }
    if (codec == TSR_CODEC_SHUFFLE_ZSTD && level == 1 &&
        !ZSTD_isError(ZSTD_CCtx_setParameter(c, ZSTD_c_literalCompressionMode, 1 /* always */))) {
        return !ZSTD_isError(ZSTD_CCtx_setParameter(c, ZSTD_c_minMatch, 7)) &&
               !ZSTD_isError(ZSTD_CCtx_setParameter(c, ZSTD_c_targetLength, 4096));
    }
    return true;
}

tsr_status tsr_codec_encode(tsr_coder *c, tsr_codec codec, size_t elem_bytes, int level, const void *src,
                            size_t n, void *dst, size_t capacity, size_t *out_bytes, tsr_err *err)
{
    TSR_ASSERT(codec != TSR_CODEC_RAW);
    *out_bytes = 0;
    if (c->cctx == NULL) {
        c->cctx = ZSTD_createCCtx();
        if (c->cctx == NULL) {
            TSR_FAIL(err, TSR_E_LIMIT, "out of memory: no room for a zstd encoder");
        }
    }
    if (codec == TSR_CODEC_SHUFFLE_ZSTD) {
        TSR_TRY(need_scratch(c, n, err));
        tsr_shuffle(elem_bytes, src, n, c->scratch);
        src = c->scratch;
    }
    if (!set_up(c->cctx, codec, level)) {
        TSR_FAIL(err, TSR_E_USAGE, "zstd: level %d is not one", level);
    }
    size_t got = ZSTD_compress2(c->cctx, dst, capacity, src, n);
    if (ZSTD_isError(got)) {
        TSR_FAIL(err, TSR_E_LIMIT, "zstd: %s", ZSTD_getErrorName(got));
    }
    if (got < n - n / 33) { /* at least 3 % smaller */
        *out_bytes = got;
    }
    return TSR_OK;
}

tsr_status tsr_codec_decode(tsr_coder *c, tsr_codec codec, size_t elem_bytes, const void *src, size_t n,
                            void *dst, size_t raw, tsr_err *err)
{
    TSR_ASSERT(codec != TSR_CODEC_RAW);
    if (c->dctx == NULL) {
        c->dctx = ZSTD_createDCtx();
        if (c->dctx == NULL) {
            TSR_FAIL(err, TSR_E_LIMIT, "out of memory: no room for a zstd decoder");
        }
    }
    unsigned long long promised = ZSTD_getFrameContentSize(src, n);
    if (promised != raw) {
        TSR_FAIL(err, TSR_E_FORMAT, "zstd frame does not hold the %zu bytes the index promises", raw);
    }
    if (ZSTD_findFrameCompressedSize(src, n) != n) {
        TSR_FAIL(err, TSR_E_FORMAT, "zstd frame does not fill its %zu stored bytes", n);
    }
    uint8_t *to = dst;
    if (codec == TSR_CODEC_SHUFFLE_ZSTD) {
        TSR_TRY(need_scratch(c, raw, err));
        to = c->scratch;
    }
    size_t got = ZSTD_decompressDCtx(c->dctx, to, raw, src, n);
    if (ZSTD_isError(got) || got != raw) {
        TSR_FAIL(err, TSR_E_FORMAT, "zstd: %s", ZSTD_isError(got) ? ZSTD_getErrorName(got) : "short frame");
    }
    if (codec == TSR_CODEC_SHUFFLE_ZSTD) {
        if (raw % elem_bytes != 0) {
            TSR_FAIL(err, TSR_E_FORMAT, "shuffled chunk of %zu bytes is not whole elements of %zu", raw,
                     elem_bytes);
        }
        tsr_unshuffle(elem_bytes, to, raw, dst);
    }
    return TSR_OK;
}

/* ---- extents: one decoder a thread ---------------------------------------------------------------------- */

static pthread_key_t coder_key;
static pthread_once_t coder_once = PTHREAD_ONCE_INIT;

static void free_coder(void *p)
{
    tsr_coder *c = p;
    tsr_coder_free(&c);
}

static void make_coder_key(void)
{
    (void)pthread_key_create(&coder_key,
                             free_coder); /* on failure setspecific fails, and every decode reports it */
}

/* One decoder a thread, freed with the thread. */
static tsr_coder *thread_coder(void)
{
    (void)pthread_once(&coder_once, make_coder_key);
    tsr_coder *c = pthread_getspecific(coder_key);
    if (c == NULL) {
        c = tsr_coder_new();
        if (c != NULL && pthread_setspecific(coder_key, c) != 0) {
            tsr_coder_free(&c);
        }
    }
    return c;
}

tsr_status tsr_extent_decode(const tsr_extent_info *x, tsr_dtype dtype, const void *stored, void *dst,
                             tsr_err *err)
{
    if (x->codec == TSR_CODEC_RAW) {
        memcpy(dst, stored, x->raw_bytes);
        return TSR_OK;
    }
    tsr_coder *c = thread_coder();
    if (c == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    return tsr_codec_decode(c, x->codec, tsr_dtype_info((unsigned)dtype)->bytes_per_unit, stored,
                            x->stored_bytes, dst, x->raw_bytes, err);
}
