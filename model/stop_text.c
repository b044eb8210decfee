/* stop_text.c - stop texts are found at their last byte, byte after byte, so that it does not matter in which pieces the text
 * arrives. */
#include "model/stop_text.h"

#include <string.h>

/* Length of the longest stop text that ends with byte `end` (exclusive) of the held text. */
static size_t ends_at(const stop_text *s, size_t end)
{
    size_t longest = 0;
    for (size_t i = 0; s->texts != NULL && s->texts[i] != NULL; i++) {
        size_t n = strlen(s->texts[i]);
        if (n > longest && n <= end && memcmp(s->held.p + end - n, s->texts[i], n) == 0) {
            longest = n;
        }
    }
    return longest;
}

/* Bytes at the end that may become a stop text. */
static size_t beginnings(const stop_text *s)
{
    size_t most = 0;
    for (size_t i = 0; s->texts != NULL && s->texts[i] != NULL; i++) {
        size_t n = strlen(s->texts[i]) - 1;
        for (n = n < s->held.count ? n : s->held.count; n > most; n--) {
            if (memcmp(s->held.p + s->held.count - n, s->texts[i], n) == 0) {
                most = n;
            }
        }
    }
    return most;
}

tsr_span stop_text_take(stop_text *s, bool last, bool *found)
{
    if (s->given > 0) {
        memmove(s->held.p, s->held.p + s->given, s->held.count - s->given);
        s->held.count -= s->given;
        s->seen -= s->given;
        s->given = 0;
    }
    *found = false;
    for (size_t end = s->seen + 1; end <= s->held.count; end++) {
        size_t n = ends_at(s, end);
        if (n > 0) {
            *found = true;
            s->held.count = end - n;
            break;
        }
    }
    s->given = s->held.count - (last || *found ? 0 : beginnings(s));
    s->seen = s->held.count;
    return (tsr_span){ s->held.p, s->given };
}
