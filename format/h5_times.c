/* h5_times.c - takes the times out of the superblock extension. libhdf5 cannot be told not to put them there, and with
 * them equal content would give unequal files. Layout: HDF5 File Format Specification 3.0, II.A (superblock 3) and
 * IV.A.1.b (object header 2); checksum: Bob Jenkins' lookup3, which the specification names. */
#include "format/layout.h"
#include "format/shard_h5.h"

#include <string.h>

#define HEADER_BYTES_MAX 4096u

static uint32_t rotate(uint32_t x, int k)
{
    return x << k | x >> (32 - k);
}

static uint32_t lookup3(const uint8_t *p, size_t n)
{
    static const uint8_t turns[6] = { 4, 6, 8, 16, 19, 4 }, last[7] = { 14, 11, 25, 16, 4, 14, 24 };
    uint32_t s[3], k[3];
    s[0] = s[1] = s[2] = 0xdeadbeefu + (uint32_t)n;
    for (; n > 12; p += 12, n -= 12) {
        memcpy(k, p, 12);
        for (int i = 0; i < 3; i++) {
            s[i] += k[i];
        }
        for (unsigned i = 0; i < 6; i++) { /* a, b, c take turns */
            uint32_t *x = &s[i % 3], *y = &s[(i + 1) % 3], *z = &s[(i + 2) % 3];
            *x = (*x - *z) ^ rotate(*z, turns[i]);
            *z += *y;
        }
    }
    if (n == 0) {
        return s[2];
    }
    memset(k, 0, sizeof k);
    memcpy(k, p, n);
    for (int i = 0; i < 3; i++) {
        s[i] += k[i];
    }
    for (unsigned i = 0; i < 7; i++) { /* c, a, b take turns */
        uint32_t *x = &s[(i + 2) % 3], y = s[(i + 1) % 3];
        *x = (*x ^ y) - rotate(y, last[i]);
    }
    return s[2];
}

tsr_status tsr_h5_drop_times(tsr_file *f, uint64_t file_bytes, tsr_err *err)
{
    uint8_t super[48], h[HEADER_BYTES_MAX];
    uint64_t at, body;
    uint32_t sum;
    if (file_bytes < TSR_HEAD_BYTES + sizeof super) {
        return TSR_OK;
    }
    TSR_TRY(tsr_file_pread(f, super, sizeof super, TSR_HEAD_BYTES, err));
    memcpy(&at, super + 20, 8); /* the extension's place, from the user block's end */
    if (super[8] != 3 || at > file_bytes - TSR_HEAD_BYTES) {
        return TSR_OK; /* there is none */
    }
    at += TSR_HEAD_BYTES;
    size_t have = file_bytes - at < sizeof h ? (size_t)(file_bytes - at) : sizeof h;
    TSR_TRY(tsr_file_pread(f, h, have, at, err));
    if (have < 64 || memcmp(h, "OHDR\2", 5) != 0 || (h[5] & 0x20) == 0) {
        return TSR_OK; /* no times in it */
    }
    size_t pos = 22 + ((h[5] & 0x10) != 0 ? 4 : 0), width = (size_t)1 << (h[5] & 3);
    body = 0;
    memcpy(&body, h + pos, width);
    pos += width;
    if (body > have - pos - 4) {
        TSR_FAIL(err, TSR_E_IO, "shard: libhdf5 made a superblock extension that cannot be read");
    }
    size_t covered = pos + (size_t)body;
    memcpy(&sum, h + covered, 4);
    if (sum != lookup3(h, covered)) {
        TSR_FAIL(err, TSR_E_IO, "shard: the superblock extension's checksum is not as expected");
    }
    memset(h + 6, 0, 16);
    sum = lookup3(h, covered);
    memcpy(h + covered, &sum, 4);
    return tsr_file_pwrite(f, h, covered + 4, at, err);
}
