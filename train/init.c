/* init.c - see init.h. */
#include "train/init.h"
#include "train/data.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum fill { FILL_NORMAL, FILL_UNIFORM, FILL_ONE, FILL_ZERO, FILL_DT_BIAS, FILL_A_LOG } fill;

typedef struct entry {
    char *name;
    int rank;
    int64_t shape[4], count;
    uint32_t experts;
    fill how;
    double scale; /* standard deviation, or half width */
} entry;

typedef struct init {
    const tsr_spec *spec;
    uint64_t seed;
    double std;
    entry *list;
    int64_t count, room;
} init;

static bool ends(const char *s, const char *tail)
{
    size_t n = strlen(s), m = strlen(tail);
    return n >= m && strcmp(s + n - m, tail) == 0;
}

static void choose(const init *in, const tsr_tensor_rule *r, entry *e)
{
    double columns = (double)(r->rank > 0 ? r->shape[r->rank - 1] : 1);
    e->how = FILL_NORMAL;
    e->scale = in->std > 0 ? in->std : 1 / sqrt(columns);
    if (ends(r->name, "norm.weight")) {
        e->how = FILL_ONE;
    } else if (ends(r->name, "_res.proj.weight") || ends(r->name, "router.bias")) {
        e->how = FILL_ZERO;
    } else if (ends(r->name, "a_log")) {
        e->how = in->spec->gate_lower_bound < 0 ? FILL_ZERO : FILL_A_LOG;
    } else if (ends(r->name, "dt_bias")) {
        e->how = FILL_DT_BIAS;
    } else if (ends(r->name, "router.weight") || ends(r->name, "_conv.weight")) {
        e->how = FILL_UNIFORM; /* Kaiming with a = sqrt 5 */
        e->scale = 1 / sqrt(columns);
    } else if (strcmp(r->name, "embed.weight") == 0) {
        e->scale = in->std > 0 ? in->std : 0.02;
    }
}

static tsr_status add(void *payload, const tsr_tensor_rule *r, tsr_err *err)
{
    init *in = payload;
    if (r->optional || r->dtype == TSR_DT_E8M0 || strncmp(r->name, "vision", 6) == 0 ||
        strncmp(r->name, "projector", 9) == 0) {
        return TSR_OK; /* a tied head; scales of experts that are f32 here */
    }
    if (in->count == in->room) {
        int64_t room = in->room > 0 ? 2 * in->room : 256;
        entry *more = realloc(in->list, (size_t)room * sizeof *more);
        if (more == NULL) {
            TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
        }
        in->list = more;
        in->room = room;
    }
    entry *e = &in->list[in->count];
    *e = (entry){ .name = strdup(r->name), .rank = r->rank, .experts = r->expert_count, .count = 1 };
    if (e->name == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    for (int i = 0; i < r->rank; i++) {
        e->shape[i] = r->shape[i];
        e->count *= r->shape[i];
    }
    choose(in, r, e);
    in->count++;
    return TSR_OK;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const entry *)a)->name, ((const entry *)b)->name);
}

/* "layers.3.experts.17.up.weight" is looked up as "layers.3.experts.{e}.up.weight". */
static tsr_status find(void *payload, const char *name, tsr_weight_info *out, tsr_err *err)
{
    const init *in = payload;
    char family[256];
    uint64_t expert = 0;
    const char *mark = strstr(name, ".experts.");
    entry key = { .name = family };
    (void)snprintf(family, sizeof family, "%s", name);
    if (mark != NULL) {
        char *end;
        expert = strtoull(mark + 9, &end, 10);
        (void)snprintf(family, sizeof family, "%.*s{e}%s", (int)(mark + 9 - name), name, end);
    }
    const entry *e = bsearch(&key, in->list, (size_t)in->count, sizeof *e, by_name);
    if (e == NULL || (e->experts > 0 && expert >= e->experts)) {
        TSR_FAIL(err, TSR_E_MISSING, "%s: the model has no such tensor", name);
    }
    *out = (tsr_weight_info){ .id = (int64_t)(((uint64_t)(e - in->list) << 32) | expert),
                              .dtype = TSR_DT_F32,
                              .rank = e->rank,
                              .bytes = (uint64_t)e->count * sizeof(float) };
    memcpy(out->shape, e->shape, sizeof out->shape);
    return TSR_OK;
}

/* In (0, 1). */
static double uniform(uint64_t a, uint64_t b, uint64_t c)
{
    return ((double)(tsr_mix64(a, b, c) >> 12) + 0.5) / 4503599627370496.0;
}

static double value(const entry *e, uint64_t seed, uint64_t tensor, uint64_t i)
{
    const double tau = 6.283185307179586;
    double u = uniform(seed, tensor, 2 * i), dt;
    switch (e->how) {
    case FILL_NORMAL: /* Box and Muller */
        return e->scale * sqrt(-2 * log(u)) * cos(tau * uniform(seed, tensor, 2 * i + 1));
    case FILL_UNIFORM: return e->scale * (2 * u - 1);
    case FILL_DT_BIAS: /* softplus^-1 of a step, log-uniform in [0.001, 0.1] */
        dt = exp(log(1e-3) + u * (log(1e-1) - log(1e-3)));
        return dt + log(-expm1(-dt));
    case FILL_A_LOG: return log(1 + 15 * u);
    case FILL_ONE: return 1;
    case FILL_ZERO:
    default: return 0;
    }
}

static tsr_status read_numbers(void *payload, int64_t id, void *dst, size_t bytes, tsr_err *err)
{
    const init *in = payload;
    const entry *e = &in->list[(uint64_t)id >> 32];
    uint64_t expert = (uint64_t)id & 0xffffffff, tensor = tsr_hash64(e->name, strlen(e->name));
    float *out = dst;
    (void)err;
    TSR_ASSERT(bytes == (size_t)e->count * sizeof *out);
    for (int64_t i = 0; i < e->count; i++) {
        out[i] = (float)value(e, in->seed, tensor + expert, (uint64_t)i);
    }
    return TSR_OK;
}

tsr_status tsr_init_source(tsr_weight_source *out, const tsr_spec *spec, uint64_t seed, double std,
                           tsr_err *err)
{
    init *in = calloc(1, sizeof *in);
    *out = (tsr_weight_source){ .payload = in, .find = find, .read = read_numbers };
    if (in == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    *in = (init){ .spec = spec, .seed = seed, .std = std };
    tsr_status st = tsr_spec_each_tensor(spec, add, in, err);
    if (st != TSR_OK) {
        tsr_init_source_done(out);
        return st;
    }
    qsort(in->list, (size_t)in->count, sizeof *in->list, by_name);
    return TSR_OK;
}

void tsr_init_source_done(tsr_weight_source *s)
{
    init *in = s->payload;
    for (int64_t i = 0; in != NULL && i < in->count; i++) {
        free(in->list[i].name);
    }
    if (in != NULL) {
        free(in->list);
    }
    free(in);
    *s = (tsr_weight_source){ 0 };
}
