/* scan.c - NaN scale codes of MXFP4 tensors. */
#include "inspect/inspect.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NAME_ROOM 4400

/* One scale tensor: rows of all but its last dimension. */
static tsr_status scan_item(const tsr_view *v, int64_t item, const tsr_tensor_decl *d,
                            void (*fn)(void *payload, const char *tensor, int64_t row, int64_t nan_values),
                            void *payload, tsr_err *err)
{
    enum { PIECE = 1 << 18 };
    uint64_t bytes = v->map->source->tensors[v->map->src[item]].bytes;
    uint64_t cols = d->rank > 0 && d->shape[d->rank - 1] > 0 ? (uint64_t)d->shape[d->rank - 1] : 1;
    uint8_t *buf = malloc(PIECE);
    if (buf == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    char name[NAME_ROOM];
    (void)tsr_map_name(v->map, item, name, sizeof name);
    int64_t row = -1, bad = 0;
    tsr_status st = TSR_OK;
    for (uint64_t at = 0; st == TSR_OK && at < bytes; at += PIECE) {
        size_t n = bytes - at < PIECE ? (size_t)(bytes - at) : PIECE;
        st = tsr_map_read(v->map, item, at, buf, n, err);
        for (size_t i = 0; st == TSR_OK && i < n; i++) {
            if (buf[i] != 255) {
                continue;
            }
            int64_t r = (int64_t)((at + i) / cols);
            if (r != row && bad > 0) {
                fn(payload, name, row, bad);
                bad = 0;
            }
            row = r;
            bad += 32;
        }
    }
    if (st == TSR_OK && bad > 0) {
        fn(payload, name, row, bad);
    }
    free(buf);
    return st;
}

static bool ends_with(const char *s, const char *tail)
{
    size_t n = strlen(s), t = strlen(tail);
    return n >= t && strcmp(s + n - t, tail) == 0;
}

/* Scales of a raw pair: bytes alone could be anything, so the codes they belong to must be there. */
static bool has_codes(const tsr_map *m, const tsr_tensor_decl *d)
{
    static const char tail[] = ".weight_scale", partner[] = ".weight_packed";
    char name[NAME_ROOM];
    if (d->dtype != TSR_DT_U8 || !ends_with(d->name, tail)) {
        return false;
    }
    int stem = (int)(strlen(d->name) - strlen(tail));
    if ((size_t)snprintf(name, sizeof name, "%.*s%s", stem, d->name, partner) >= sizeof name) {
        return false;
    }
    uint32_t g;
    int64_t i = tsr_map_find(m, name, &g);
    return g != UINT32_MAX && m->groups[g].dtype == TSR_DT_U8 && (i < 0 || m->src[i] >= 0);
}

tsr_status tsr_inspect_scan_scales(const tsr_view *v,
                                   void (*fn)(void *payload, const char *tensor, int64_t row,
                                              int64_t nan_values),
                                   void *payload, tsr_err *err)
{
    const tsr_map *m = v->map;
    for (uint32_t g = 0; g < m->group_count; g++) {
        const tsr_tensor_decl *d = &m->groups[g];
        if (d->dtype != TSR_DT_E8M0 && !has_codes(m, d)) {
            continue;
        }
        for (int64_t i = m->group_first[g]; i < m->group_first[g + 1]; i++) {
            if (m->src[i] >= 0) {
                TSR_TRY(scan_item(v, i, d, fn, payload, err));
            }
        }
    }
    return TSR_OK;
}
