/* st_index.c - see st_index.h. */
#include "convert/st_index.h"
#include "convert/st_header.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <yajl/yajl_parse.h>

#define DEPTH_MAX 32

typedef struct parser {
    const char *file;
    tsr_status (*fn)(void *payload, const char *tensor, const char *shard, tsr_err *err);
    void *payload;
    tsr_err *err;
    tsr_status st;
    int depth;
    bool in_map, seen_map; /* inside the top-level weight_map */
    bool next_is_map;      /* the last top-level key was weight_map */
    char key[4096 + 1], value[4096 + 1];
} parser;

static int stop(parser *p, const char *what)
{
    p->st = TSR_ERR(p->err, TSR_E_FORMAT, "%s: %s", p->file, what);
    return 0;
}

static int on_scalar(void *ctx)
{
    parser *p = ctx;
    return p->in_map ? stop(p, "weight_map: a value is not a file name") : 1;
}

static int on_bool(void *ctx, int v)
{
    (void)v;
    return on_scalar(ctx);
}

static int on_number(void *ctx, const char *s, size_t n)
{
    (void)s, (void)n;
    return on_scalar(ctx);
}

static int on_string(void *ctx, const unsigned char *s, size_t n)
{
    parser *p = ctx;
    if (!p->in_map) {
        return 1;
    }
    if (n == 0 || n >= sizeof p->value || !st_utf8(s, n)) {
        return stop(p, "weight_map: a file name is empty, too long or not UTF-8");
    }
    memcpy(p->value, s, n);
    p->value[n] = '\0';
    if (strchr(p->value, '/') != NULL || strcmp(p->value, "..") == 0 || strcmp(p->value, ".") == 0) {
        return stop(p, "weight_map: a file name leaves the folder");
    }
    p->st = p->fn(p->payload, p->key, p->value, p->err);
    return p->st == TSR_OK;
}

static int on_open(parser *p, bool map)
{
    if (p->in_map) {
        return stop(p, "weight_map: a value is not a file name");
    }
    if (++p->depth > DEPTH_MAX) {
        return stop(p, "nested too deeply");
    }
    if (p->depth == 1 && !map) {
        return stop(p, "is not a JSON object");
    }
    if (p->depth == 2 && p->next_is_map) {
        if (!map || p->seen_map) {
            return stop(p, map ? "weight_map: duplicate key" : "weight_map is not an object");
        }
        p->in_map = p->seen_map = true;
    }
    return 1;
}

static int on_map(void *ctx)
{
    return on_open(ctx, true);
}

static int on_array(void *ctx)
{
    return on_open(ctx, false);
}

static int on_close(void *ctx)
{
    parser *p = ctx;
    p->depth--;
    p->in_map = false;
    return 1;
}

static int on_key(void *ctx, const unsigned char *s, size_t n)
{
    parser *p = ctx;
    if (p->depth == 1) {
        p->next_is_map = n == 10 && memcmp(s, "weight_map", 10) == 0;
    } else if (p->in_map) {
        if (n >= sizeof p->key || !st_utf8(s, n)) {
            return stop(p, "weight_map: a tensor name is too long or not UTF-8");
        }
        memcpy(p->key, s, n);
        p->key[n] = '\0';
    }
    return 1;
}

tsr_status st_index_each(const char *file, const uint8_t *json, size_t n,
                         tsr_status (*fn)(void *payload, const char *tensor, const char *shard, tsr_err *err),
                         void *payload, tsr_err *err)
{
    static const yajl_callbacks calls = { on_scalar, on_bool, NULL,     NULL,     on_number, on_string,
                                          on_map,    on_key,  on_close, on_array, on_close };
    tsr_err spare;
    parser *p = calloc(1, sizeof *p);
    yajl_handle h = p != NULL ? yajl_alloc(&calls, NULL, p) : NULL;
    if (h == NULL) {
        free(p);
        TSR_FAIL(err, TSR_E_LIMIT, "%s: out of memory", file);
    }
    p->file = file;
    p->fn = fn;
    p->payload = payload;
    p->err = err != NULL ? err : &spare;
    yajl_status ys = yajl_parse(h, json, n);
    if (ys == yajl_status_ok) {
        ys = yajl_complete_parse(h);
    }
    tsr_status st = p->st;
    if (st == TSR_OK && (ys != yajl_status_ok || !p->seen_map)) {
        st = ys != yajl_status_ok
                 ? TSR_ERR(err, TSR_E_FORMAT, "%s: not JSON at byte %zu", file, yajl_get_bytes_consumed(h))
                 : TSR_ERR(err, TSR_E_FORMAT, "%s: has no weight_map", file);
    }
    yajl_free(h);
    free(p);
    return st;
}
