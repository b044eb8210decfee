/* session.c - the state of one sequence in inference. */
#include "model/model_priv.h"

#include <stdlib.h>

void session_sizes(const tsr_spec *s, int32_t layer, tsr_dtype cache, size_t *state, size_t *conv,
                   size_t *per_token)
{
    size_t h = (size_t)s->kda_heads, d = (size_t)s->kda_head_dim, size = cache == TSR_DT_BF16 ? 2 : 4;
    bool kda = s->layer_kind[layer] == TSR_LAYER_KDA;
    *state = kda ? h * d * d * sizeof(float) : 0;
    *conv = kda ? 3 * (size_t)(s->conv_kernel - 1) * h * d * sizeof(float) : 0;
    *per_token = kda ? 0 : (size_t)(s->kv_lora + s->qk_rope) * size;
}

/* Where each layer's state lies in the session's one block. */
static size_t place(tsr_session *s, char *base)
{
    const tsr_spec *spec = &s->m->spec;
    size_t at = 0;
    for (int32_t i = 0; i < spec->layers; i++) {
        size_t state, conv, per_token;
        session_sizes(spec, i, s->dtype, &state, &conv, &per_token);
        if (base != NULL && state > 0) {
            s->state[i] = (float *)(void *)(base + at);
            s->conv[i] = (float *)(void *)(base + at + tsr_align_up(state, 64));
        } else if (base != NULL) {
            s->cache[i] = base + at;
        }
        at += tsr_align_up(state, 64) + tsr_align_up(conv, 64) +
              tsr_align_up(per_token * (size_t)s->context, 64);
    }
    return at;
}

tsr_status tsr_session_open(tsr_session **out, tsr_model *m, int64_t context, tsr_dtype cache_dtype,
                            tsr_err *err)
{
    *out = NULL;
    if (context < 1 || (cache_dtype != TSR_DT_F32 && cache_dtype != TSR_DT_BF16)) {
        TSR_FAIL(err, TSR_E_USAGE, "a session of %lld positions in %s: wants at least one, f32 or bf16",
                 (long long)context, tsr_dtype_name(cache_dtype));
    }
    uint64_t limit;
    if (!tsr_mul_u64((uint64_t)context,
                     (uint64_t)m->spec.layers * (uint64_t)(m->spec.kv_lora + m->spec.qk_rope) * 4, &limit) ||
        limit > (uint64_t)INT64_MAX / 2) {
        TSR_FAIL(err, TSR_E_LIMIT, "a session of %lld positions does not fit any memory", (long long)context);
    }
    tsr_session *s = calloc(1, sizeof *s);
    size_t layers = (size_t)m->spec.layers;
    if (s != NULL) {
        *s = (tsr_session){ .m = m, .context = context, .dtype = cache_dtype };
        s->state = calloc(layers, sizeof *s->state);
        s->conv = calloc(layers, sizeof *s->conv);
        s->cache = calloc(layers, sizeof *s->cache);
        s->bytes = place(s, NULL);
    }
    if (s == NULL || s->state == NULL || s->conv == NULL || s->cache == NULL ||
        m->b->alloc(m->b, &s->memory, s->bytes) != TSR_OK) {
        size_t bytes = s != NULL ? s->bytes : 0;
        tsr_session_close(&s);
        TSR_FAIL(err, TSR_E_LIMIT, "%s: out of memory: the state of %lld positions takes %zu bytes",
                 m->b->name, (long long)context, bytes);
    }
    (void)place(s, s->memory);
    tsr_session_reset(s);
    *out = s;
    return TSR_OK;
}

void tsr_session_close(tsr_session **ps)
{
    tsr_session *s = *ps;
    if (s == NULL) {
        return;
    }
    *ps = NULL;
    if (s->memory != NULL) {
        s->m->b->release(s->m->b, s->memory);
    }
    free(s->state);
    free(s->conv);
    free(s->cache);
    free(s);
}

/* Recurrent states start at zero; of the cache only what was written is read. */
void tsr_session_reset(tsr_session *s)
{
    s->length = 0;
    for (int32_t i = 0; i < s->m->spec.layers; i++) {
        size_t state, conv, per_token;
        session_sizes(&s->m->spec, i, s->dtype, &state, &conv, &per_token);
        if (state > 0) {
            TSR_IGNORE(
                s->m->b->zero(s->m->b, s->state[i], state)); /* a broken device shows in the next forward */
            TSR_IGNORE(s->m->b->zero(s->m->b, s->conv[i], conv));
        }
    }
}

int64_t tsr_session_length(const tsr_session *s)
{
    return s->length;
}

int64_t tsr_session_context(const tsr_session *s)
{
    return s->context;
}

uint64_t tsr_session_bytes(const tsr_session *s, uint64_t *per_token)
{
    uint64_t fixed = 0, each = 0;
    for (int32_t i = 0; i < s->m->spec.layers; i++) {
        size_t state, conv, one;
        session_sizes(&s->m->spec, i, s->dtype, &state, &conv, &one);
        fixed += state + conv;
        each += one;
    }
    if (per_token != NULL) {
        *per_token = each;
    }
    return fixed + each * (uint64_t)s->length;
}
