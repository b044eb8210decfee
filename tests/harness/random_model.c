/* random_model.c - see random_model.h. */
#include "tests/harness/random_model.h"
#include "kernels/numeric.h"
#include "tests/harness/bag.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static double uniform(uint64_t *rng)
{
    return (double)(bag_random(rng) >> 11) / 9007199254740992.0 * 2 - 1;
}

/* Mean and half width of a tensor's values. */
static void range_of(const tsr_tensor_rule *r, double *mean, double *half)
{
    const char *n = r->name;
    int64_t in = r->rank > 0 ? r->shape[r->rank - 1] : 1;
    *mean = 0;
    *half = sqrt(3.0 / (double)in);
    if (strstr(n, "norm.weight") != NULL) {
        *mean = 1;
        *half = 0.2;
    } else if (strstr(n, "a_log") != NULL) {
        *mean = 0.7;
        *half = 0.7;
    } else if (strstr(n, "dt_bias") != NULL) {
        *mean = -1.5;
        *half = 1.5;
    } else if (strstr(n, "router.bias") != NULL) {
        *half = 0.05;
    } else if (strstr(n, "_conv.") != NULL) {
        *half = 0.8;
    } else if (strcmp(n, "embed.weight") == 0) {
        *half = 1;
    }
}

static void fill(random_tensor *t, const tsr_tensor_rule *r)
{
    uint64_t rng = tsr_hash64(r->name, strlen(r->name)) | 1, items = t->experts > 0 ? t->experts : 1;
    double mean, half;
    range_of(r, &mean, &half);
    if (t->dtype == TSR_DT_MXFP4) {
        for (uint64_t i = 0; i < t->bytes * items; i++) {
            t->data[i] = (uint8_t)bag_random(&rng);
        }
        return;
    }
    if (t->dtype == TSR_DT_E8M0) { /* codes average about 3: rows of length about one */
        int code = 127 + (int)lrint(log2(1 / (2.9 * sqrt(32.0 * (double)t->shape[1]))));
        for (uint64_t i = 0; i < t->bytes * items; i++) {
            t->data[i] = (uint8_t)(code + (int)(bag_random(&rng) % 3) - 1);
        }
        return;
    }
    bool wide = t->dtype == TSR_DT_F32;
    for (uint64_t i = 0; i < t->bytes * items / (wide ? 4 : 2); i++) {
        float x = (float)(mean + half * uniform(&rng));
        if (wide) {
            memcpy(t->data + i * 4, &x, 4);
        } else {
            uint16_t h = tsr_f32_to_bf16(x);
            memcpy(t->data + i * 2, &h, 2);
        }
    }
}

static tsr_status add(void *payload, const tsr_tensor_rule *r, tsr_err *err)
{
    random_model *m = payload;
    (void)err;
    if (r->optional || strncmp(r->name, "vision", 6) == 0 || strncmp(r->name, "projector", 9) == 0) {
        return TSR_OK;
    }
    m->list = realloc(m->list, (size_t)(m->count + 1) * sizeof *m->list);
    CHECK(m->list != NULL);
    random_tensor *t = &m->list[m->count++];
    *t = (random_tensor){ .dtype = r->dtype, .rank = r->rank, .experts = r->expert_count };
    (void)snprintf(t->name, sizeof t->name, "%s", r->name);
    memcpy(t->shape, r->shape, sizeof t->shape);
    if (t->dtype == TSR_DT_BF16) {
        t->dtype = m->dense;
    }
    CHECK(tsr_shape_bytes(t->dtype, t->rank, t->shape, &t->bytes));
    t->data = malloc(t->bytes * (t->experts > 0 ? t->experts : 1));
    CHECK(t->data != NULL);
    fill(t, r);
    return TSR_OK;
}

/* Ids are index + count of tensors * expert. */
static tsr_status find(void *payload, const char *name, tsr_weight_info *out, tsr_err *err)
{
    random_model *m = payload;
    for (int64_t i = 0; i < m->count; i++) {
        random_tensor *t = &m->list[i];
        const char *mark = strstr(t->name, "{e}");
        int64_t expert = 0;
        if (mark != NULL) {
            size_t head = (size_t)(mark - t->name);
            char *end;
            if (strncmp(name, t->name, head) != 0) {
                continue;
            }
            expert = strtol(name + head, &end, 10);
            if (end == name + head || strcmp(end, mark + 3) != 0 || expert >= t->experts) {
                continue;
            }
        } else if (strcmp(name, t->name) != 0) {
            continue;
        }
        *out = (tsr_weight_info){
            .id = i + m->count * expert, .dtype = t->dtype, .rank = t->rank, .bytes = t->bytes
        };
        memcpy(out->shape, t->shape, sizeof out->shape);
        return TSR_OK;
    }
    TSR_FAIL(err, TSR_E_MISSING, "%s: no such tensor", name);
}

static tsr_status read_item(void *payload, int64_t id, void *dst, size_t bytes, tsr_err *err)
{
    random_model *m = payload;
    random_tensor *t = &m->list[id % m->count];
    (void)err;
    CHECK(bytes == t->bytes);
    memcpy(dst, t->data + (uint64_t)(id / m->count) * t->bytes, bytes);
    return TSR_OK;
}

static const char *const parts[TSR_PART_COUNT] = { "gate.weight", "up.weight", "down.weight",
                                                   "gate.scale",  "up.scale",  "down.scale" };

static random_tensor *part_of(random_model *m, int32_t layer, int part)
{
    char name[64];
    (void)snprintf(name, sizeof name, "layers.%d.experts.{e}.%s", layer, parts[part]);
    return random_model_find(m, name);
}

static tsr_status expert_bytes(void *payload, int32_t layer, uint64_t *bytes, tsr_err *err)
{
    random_model *m = payload;
    (void)err;
    *bytes = 0;
    for (int i = 0; i < TSR_PART_COUNT; i++) {
        random_tensor *t = part_of(m, layer, i);
        *bytes += t != NULL ? tsr_align_up(t->bytes, 64) : 0;
    }
    return TSR_OK;
}

static tsr_status read_expert(void *payload, int32_t layer, int32_t expert, void *dst, size_t dst_bytes,
                              const void *part[TSR_PART_COUNT], uint64_t *read_bytes, tsr_err *err)
{
    random_model *m = payload;
    uint64_t at = 0;
    (void)err;
    for (int i = 0; i < TSR_PART_COUNT; i++) {
        random_tensor *t = part_of(m, layer, i);
        part[i] = NULL;
        if (t != NULL) {
            CHECK(at + t->bytes <= dst_bytes);
            memcpy((char *)dst + at, t->data + (uint64_t)expert * t->bytes, t->bytes);
            part[i] = (char *)dst + at;
            at += tsr_align_up(t->bytes, 64);
        }
    }
    *read_bytes = at;
    return TSR_OK;
}

random_tensor *random_model_find(random_model *m, const char *name)
{
    for (int64_t i = 0; i < m->count; i++) {
        if (strcmp(m->list[i].name, name) == 0) {
            return &m->list[i];
        }
    }
    return NULL;
}

void random_model_open(random_model *m, const char *config, tsr_dtype dense)
{
    tsr_err err;
    *m = (random_model){ .dense = dense };
    CHECK_OK(tsr_spec_parse(&m->spec, config, strlen(config), &err));
    CHECK_OK(tsr_spec_each_tensor(&m->spec, add, m, &err));
    m->source = (tsr_weight_source){ .payload = m,
                                     .find = find,
                                     .read = read_item,
                                     .expert_bytes = expert_bytes,
                                     .read_expert = read_expert };
}

void random_model_close(random_model *m)
{
    for (int64_t i = 0; i < m->count; i++) {
        free(m->list[i].data);
    }
    free(m->list);
    *m = (random_model){ 0 };
}
