/* detok.c - ids to bytes that can be printed at once. */
#include "model/tokenizer_priv.h"
#include "model/utf8.h"

#include <string.h>

static const char replacement[] = "\xef\xbf\xbd"; /* U+FFFD */

/* Puts what is decided about p[0..n) at out, which has room for 3 n bytes; *used of it are consumed: the rest may yet
 * become a character. Returns the bytes put. */
static size_t sanitize(char *out, const uint8_t *p, size_t n, size_t *used)
{
    size_t put = 0, at = 0;
    while (at < n) {
        int length = utf8_at(p + at, n - at);
        if (length == 0) {
            break;
        }
        if (length > 0) {
            memcpy(out + put, p + at, (size_t)length);
            put += (size_t)length, at += (size_t)length;
        } else {
            memcpy(out + put, replacement, 3);
            put += 3, at += (size_t)-length;
        }
    }
    *used = at;
    return put;
}

tsr_status tsr_detok_push(tsr_detok *d, const tsr_tokenizer *t, int32_t id, tsr_bytes *out, tsr_err *err)
{
    tsr_span token = tsr_tokenizer_token(t, id);
    if (token.p == NULL) {
        TSR_FAIL(err, TSR_E_FORMAT, "token id %d: the tokenizer has no such token (ids end at %d)", id,
                 tsr_tokenizer_info_of(t).ids - 1);
    }
    bool special;
    if (tsr_tokenizer_is_added(t, id, &special) &&
        ((d->flags & TSR_DECODE_SKIP_ADDED) || (special && (d->flags & TSR_DECODE_SKIP_SPECIAL)))) {
        return TSR_OK;
    }
    if (d->flags & TSR_DECODE_RAW) {
        return tok_append(out, token.p, token.bytes, err);
    }
    TSR_TRY(tok_grow((void **)&out->p, &out->room, out->count + 3 * (token.bytes + 3), 1, err));
    /* first byte by byte until what was held back is decided, then the rest at once */
    size_t at = 0, used;
    while (d->held_count > 0 && at < token.bytes) {
        d->held[d->held_count++] = (uint8_t)token.p[at++];
        out->count += sanitize(out->p + out->count, d->held, d->held_count, &used);
        d->held_count = (uint8_t)(d->held_count - used);
        memmove(d->held, d->held + used, d->held_count);
    }
    const uint8_t *rest = (const uint8_t *)token.p + at;
    out->count += sanitize(out->p + out->count, rest, token.bytes - at, &used);
    if (at < token.bytes) {
        d->held_count = (uint8_t)(token.bytes - at - used);
        memcpy(d->held, rest + used, d->held_count);
    }
    return TSR_OK;
}

tsr_status tsr_detok_finish(tsr_detok *d, tsr_bytes *out, tsr_err *err)
{
    if (d->held_count > 0) {
        TSR_TRY(tok_append(out, replacement, 3, err));
    }
    d->held_count = 0;
    return TSR_OK;
}

tsr_status tsr_tokenizer_decode(const tsr_tokenizer *t, const int32_t *ids, size_t count, unsigned flags,
                                tsr_bytes *out, tsr_err *err)
{
    tsr_detok d = { .flags = flags };
    size_t before = out->count;
    tsr_status st = TSR_OK;
    for (size_t i = 0; i < count && st == TSR_OK; i++) {
        st = tsr_detok_push(&d, t, ids[i], out, err);
    }
    st = st == TSR_OK ? tsr_detok_finish(&d, out, err) : st;
    out->count = st == TSR_OK ? out->count : before;
    return st;
}
