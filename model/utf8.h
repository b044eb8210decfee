/* utf8.h - one character of UTF-8 at a time, by table 3-7 of the Unicode standard. Private to model/. */
#ifndef TSR_MODEL_UTF8_H
#define TSR_MODEL_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What stands at p[0..n), n >= 1: a character of 1 to 4 bytes gives its length; a sequence that only lacks bytes
 * beyond n gives 0; an invalid one gives minus the length of its maximal subpart, -1 to -3. */
static inline int utf8_at(const uint8_t *p, size_t n)
{
    if (p[0] < 0x80) {
        return 1;
    }
    int length = p[0] >= 0xc2 && p[0] <= 0xdf   ? 2
                 : (p[0] & 0xf0) == 0xe0        ? 3
                 : p[0] >= 0xf0 && p[0] <= 0xf4 ? 4
                                                : 0;
    if (length == 0) {
        return -1;
    }
    /* the second byte has a narrower range after E0 (overlong), ED (surrogates), F0 (overlong) and F4 (beyond 10FFFF) */
    uint8_t low = p[0] == 0xe0 ? 0xa0 : p[0] == 0xf0 ? 0x90 : 0x80;
    uint8_t high = p[0] == 0xed ? 0x9f : p[0] == 0xf4 ? 0x8f : 0xbf;
    for (int i = 1; i < length; i++) {
        if ((size_t)i == n) {
            return 0;
        }
        if (p[i] < low || p[i] > high) {
            return -i;
        }
        low = 0x80, high = 0xbf;
    }
    return length;
}

/* The code point of a valid character of that length. */
static inline uint32_t utf8_value(const uint8_t *p, int length)
{
    static const uint8_t mask[5] = { 0, 0x7f, 0x1f, 0x0f, 0x07 };
    uint32_t c = p[0] & mask[length];
    for (int i = 1; i < length; i++) {
        c = c << 6 | (p[i] & 0x3fu);
    }
    return c;
}

/* White space as Python's str.isspace has it: K3's splitter and chat renderer go by it. */
static inline bool utf8_is_space(uint32_t c)
{
    if (c <= 0x20) {
        return (c >= 0x09 && c <= 0x0d) || c >= 0x1c;
    }
    return c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 ||
           c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

#endif
