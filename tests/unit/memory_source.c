/* memory_source.c - see memory_source.h. */
#include "tests/unit/memory_source.h"
#include "tests/harness/bag.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static tsr_status memory_read(tsr_source *s, int64_t i, uint64_t off, void *dst, size_t n, tsr_err *err)
{
    memory *m = (memory *)(void *)s;
    if (m->reads_left == 0) {
        return TSR_ERR(err, TSR_E_IO, "memory: %s: reading fails on purpose", m->tensors[i].name);
    }
    m->reads_left -= m->reads_left > 0;
    memcpy(dst, (const uint8_t *)m->data[i] + off, n);
    return TSR_OK;
}

static void memory_close(tsr_source *s)
{
    (void)s;
}

static const tsr_source_ops memory_ops = { .name = "memory", .read = memory_read, .close = memory_close };

void memory_init(memory *m)
{
    *m = (memory){ .reads_left = -1, .pub = { .ops = &memory_ops, .path = "memory", .what = "memory" } };
    m->pub.tensors = m->tensors;
}

/* data: as many bytes as the shape says. */
void memory_put(memory *m, const char *name, tsr_dtype dt, const void *data, int rank, const int64_t *shape)
{
    int64_t i = m->pub.count++;
    CHECK(i < MEMORY_ROOM && rank <= 4);
    for (int k = 0; k < rank; k++) {
        m->shapes[i][k] = shape[k];
    }
    m->tensors[i] = (tsr_src_tensor){
        .name = name, .shape = m->shapes[i], .dtype = (uint8_t)dt, .rank = (uint8_t)rank
    };
    CHECK(tsr_shape_bytes(dt, rank, m->shapes[i], &m->tensors[i].bytes));
    m->data[i] = data;
}

void memory_put1(memory *m, const char *name, tsr_dtype dt, const void *data, int64_t n)
{
    memory_put(m, name, dt, data, 1, &n);
}

const tsr_view *memory_view(memory *m)
{
    tsr_err err;
    tsr_map_opts o = { .partial = true };
    m->view.source = &m->pub;
    CHECK_OK(tsr_map_make(&m->view.map, &m->pub, tsr_layout_find("raw"), &o, &err));
    return &m->view;
}

/* Item b holds the scales of item a, as the table of a model's names would say. */
void memory_join(memory *m, int64_t a, int64_t b)
{
    m->view.map->groups[a].partner = b;
}

void memory_done(memory *m)
{
    tsr_view_close(&m->view);
}
