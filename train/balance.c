/* balance.c - see balance.h. A token never sees statistics of its own step: biases change behind the step. */
#include "train/balance.h"
#include "train/optim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const tsr_param *bias_of(const balance *k, int32_t layer)
{
    char name[64];
    (void)snprintf(name, sizeof name, "layers.%d.moe.router.bias", layer);
    return tsr_model_param_find(k->m, name);
}

static tsr_status device_failed(const balance *k, tsr_err *err)
{
    TSR_FAIL(err, TSR_E_IO, "%s: %s", k->b->name, tsr_backend_trouble(k->b));
}

/* Shown the routing of one layer for one micro-batch. */
static tsr_status watch(void *payload, int32_t layer, const float *s, const float *w, const int32_t *ids,
                        int64_t n, tsr_err *err)
{
    balance *k = payload;
    const tsr_spec *spec = k->r->spec;
    int32_t at = k->row_of[layer];
    route_row *row = &k->row[at];
    size_t slots = (size_t)(n * spec->top_k);
    if (k->idle) {
        return TSR_OK;
    }
    if (k->b->download(k->b, k->ids, ids, slots * sizeof *k->ids) != TSR_OK ||
        k->b->download(k->b, k->w, w, slots * sizeof *k->w) != TSR_OK) {
        return device_failed(k, err);
    }
    for (size_t i = 0; i < slots; i++) {
        row->count[k->ids[i]]++;
        row->mass[k->ids[i]] += (double)k->w[i];
    }
    if (k->r->balance.kind == TSR_BALANCE_QUANTILE) {
        tsr_balance_count_args a = { .hist = k->hist[at],
                                     .s = s,
                                     .bias = bias_of(k, layer)->data,
                                     .n = n,
                                     .e = spec->experts,
                                     .k = spec->top_k,
                                     .bins = k->r->balance.bins,
                                     .low = k->low[at],
                                     .high = k->high[at] };
        return tsr_balance_count(k->b, &a) == TSR_OK ? TSR_OK : device_failed(k, err);
    }
    if (k->r->balance.kind == TSR_BALANCE_QUANTILE_EXACT) {
        TSR_ASSERT(k->seen[at] + n <= k->room);
        float *to = k->scores + ((int64_t)at * k->room + k->seen[at]) * spec->experts;
        tsr_copy2d_args a = { .dst = to,
                              .src = s,
                              .n = n,
                              .d = spec->experts,
                              .dst_stride = spec->experts,
                              .src_stride = spec->experts,
                              .dtype = TSR_DT_F32 };
        k->seen[at] += n;
        return tsr_copy2d(k->b, &a) == TSR_OK ? TSR_OK : device_failed(k, err);
    }
    return TSR_OK;
}

static tsr_status take(balance *k, int64_t max_tokens, tsr_err *err)
{
    const tsr_spec *s = k->r->spec;
    size_t e = (size_t)s->experts, n = (size_t)k->layers, slots = (size_t)(max_tokens * s->top_k);
    bool hist = k->r->balance.kind == TSR_BALANCE_QUANTILE, ok = true;
    k->row = calloc(n + 1, sizeof *k->row);
    k->hist = calloc(n + 1, sizeof *k->hist);
    k->low = calloc(n + 1, sizeof *k->low);
    k->high = calloc(n + 1, sizeof *k->high);
    k->seen = calloc(n + 1, sizeof *k->seen);
    k->ids = malloc(slots * sizeof *k->ids + 1);
    k->w = malloc(slots * sizeof *k->w + 1);
    k->sums = malloc(e * (size_t)(hist ? k->r->balance.bins : 1) * sizeof *k->sums + 1);
    ok = k->row && k->hist && k->low && k->high && k->seen && k->ids && k->w && k->sums;
    for (size_t i = 0; ok && i < n; i++) {
        route_row *row = &k->row[i];
        row->count = calloc(e, sizeof *row->count);
        row->mass = calloc(e, sizeof *row->mass);
        row->bias = calloc(e, sizeof *row->bias);
        ok = row->count && row->mass && row->bias &&
             (!hist || k->b->alloc(k->b, (void **)&k->hist[i], e * (size_t)k->r->balance.bins * 8) == TSR_OK);
    }
    if (ok && k->room > 0) {
        tsr_balance_exact_args a = { .n = k->room, .e = s->experts, .k = s->top_k, .rounds = 1 };
        k->work_bytes = tsr_balance_exact_workspace(&a);
        ok = k->b->alloc(k->b, (void **)&k->scores, n * (size_t)k->room * e * sizeof(float)) == TSR_OK &&
             k->b->alloc(k->b, (void **)&k->beta, e * sizeof *k->beta) == TSR_OK &&
             k->b->alloc(k->b, &k->work, k->work_bytes) == TSR_OK;
    }
    if (!ok) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory: counts of the routing");
    }
    return TSR_OK;
}

tsr_status balance_open(balance *out, tsr_model *m, const tsr_recipe *r, const tsr_stage *stage,
                        int64_t max_tokens, int64_t step_tokens, tsr_err *err)
{
    const tsr_spec *s = r->spec;
    balance *k = out;
    *k = (balance){ .r = r, .stage = stage, .m = m, .b = tsr_model_backend(m) };
    k->watch = (tsr_route_watch){ k, watch };
    k->room = r->balance.kind == TSR_BALANCE_QUANTILE_EXACT ? step_tokens : 0;
    k->row_of = malloc((size_t)s->layers * sizeof *k->row_of);
    if (k->row_of == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    for (int32_t i = 0; i < s->layers; i++) {
        k->row_of[i] = i >= s->first_dense ? k->layers++ : -1;
    }
    TSR_TRY(take(k, max_tokens, err));
    for (int32_t i = s->first_dense; i < s->layers; i++) {
        k->row[k->row_of[i]].layer = i;
    }
    return TSR_OK;
}

void balance_close(balance *k)
{
    for (int32_t i = 0; k->row != NULL && i < k->layers; i++) {
        free(k->row[i].count);
        free(k->row[i].mass);
        free(k->row[i].bias);
        if (k->hist != NULL && k->hist[i] != NULL) {
            k->b->release(k->b, k->hist[i]);
        }
    }
    void *const blocks[] = { k->scores, k->beta, k->work };
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) {
        if (blocks[i] != NULL) {
            k->b->release(k->b, blocks[i]);
        }
    }
    void *const host[] = { k->row_of, k->row, k->hist, k->low, k->high, k->seen, k->ids, k->w, k->sums };
    for (size_t i = 0; i < sizeof host / sizeof *host; i++) {
        free(host[i]);
    }
    *k = (balance){ .layers = 0 };
}

tsr_status balance_begin(balance *k, tsr_err *err)
{
    int64_t e = k->r->spec->experts;
    for (int32_t i = 0; i < k->layers; i++) {
        route_row *row = &k->row[i];
        memset(row->count, 0, (size_t)e * sizeof *row->count);
        memset(row->mass, 0, (size_t)e * sizeof *row->mass);
        k->seen[i] = 0;
        if (k->b->download(k->b, row->bias, bias_of(k, row->layer)->data, (size_t)e * sizeof(float)) !=
                TSR_OK ||
            (k->hist[i] != NULL &&
             k->b->zero(k->b, k->hist[i], (size_t)(e * k->r->balance.bins) * sizeof(int64_t)) != TSR_OK)) {
            return device_failed(k, err);
        }
        double low = (double)row->bias[0], high = low;
        for (int64_t j = 1; j < e; j++) {
            low = (double)row->bias[j] < low ? (double)row->bias[j] : low;
            high = (double)row->bias[j] > high ? (double)row->bias[j] : high;
        }
        k->low[i] = low - 1;
        k->high[i] = high + 1;
    }
    return TSR_OK;
}

tsr_status balance_sum(balance *k, tsr_dist *d, tsr_err *err)
{
    int64_t e = k->r->spec->experts;
    for (int32_t i = 0; i < k->layers; i++) {
        route_row *row = &k->row[i];
        int64_t all = 0, most = 0;
        TSR_TRY(d->all_reduce(d, row->count, (size_t)e, TSR_SUM_I64, err));
        TSR_TRY(d->all_reduce(d, row->mass, (size_t)e, TSR_SUM_F64, err));
        for (int64_t j = 0; j < e; j++) {
            all += row->count[j];
            most = row->count[j] > most ? row->count[j] : most;
        }
        row->maxvio = all > 0 ? (double)most * (double)e / (double)all - 1 : 0;
        if (k->hist[i] != NULL && d->ranks > 1) {
            size_t n = (size_t)(e * k->r->balance.bins);
            if (k->b->download(k->b, k->sums, k->hist[i], n * sizeof *k->sums) != TSR_OK) {
                return device_failed(k, err);
            }
            TSR_TRY(d->all_reduce(d, k->sums, n, TSR_SUM_I64, err));
            if (k->b->upload(k->b, k->hist[i], k->sums, n * sizeof *k->sums) != TSR_OK) {
                return device_failed(k, err);
            }
        }
    }
    return TSR_OK;
}

static tsr_status update_exact(balance *k, int32_t i, float *bias)
{
    const tsr_spec *s = k->r->spec;
    double *host = malloc((size_t)s->experts * sizeof *host), mean = 0;
    const float *old = k->row[i].bias;
    float *fresh = malloc((size_t)s->experts * sizeof *fresh);
    if (host == NULL || fresh == NULL) {
        free(host);
        free(fresh);
        return TSR_E_LIMIT;
    }
    for (int64_t j = 0; j < s->experts; j++) {
        host[j] = -(double)old[j];
    }
    tsr_balance_exact_args a = { .beta = k->beta,
                                 .s = k->scores + (int64_t)i * k->room * s->experts,
                                 .n = k->seen[i],
                                 .e = s->experts,
                                 .k = s->top_k,
                                 .rounds = 1,
                                 .workspace = k->work,
                                 .workspace_bytes = k->work_bytes };
    size_t bytes = (size_t)s->experts * sizeof *host;
    tsr_status st = k->b->upload(k->b, k->beta, host, bytes);
    st = st == TSR_OK ? tsr_balance_exact(k->b, &a) : st;
    st = st == TSR_OK ? k->b->download(k->b, host, k->beta, bytes) : st;
    for (int64_t j = 0; j < s->experts; j++) {
        mean += host[j] / (double)s->experts;
    }
    for (int64_t j = 0; j < s->experts; j++) {
        fresh[j] = (float)-(host[j] - (k->r->balance.centre ? mean : 0));
    }
    st = st == TSR_OK ? k->b->upload(k->b, bias, fresh, (size_t)s->experts * sizeof(float)) : st;
    free(host);
    free(fresh);
    return st;
}

tsr_status balance_update(balance *k, int64_t tokens, tsr_err *err)
{
    const tsr_spec *s = k->r->spec;
    for (int32_t i = 0; i < k->layers; i++) {
        const tsr_param *p = bias_of(k, k->row[i].layer);
        float *bias = p->data;
        tsr_status st = TSR_OK;
        if (optim_frozen(k->stage, p->name)) {
            continue;
        }
        if (k->r->balance.kind == TSR_BALANCE_QUANTILE) {
            tsr_balance_solve_args a = { .bias = bias,
                                         .hist = k->hist[i],
                                         .tokens = tokens,
                                         .e = s->experts,
                                         .k = s->top_k,
                                         .bins = k->r->balance.bins,
                                         .low = k->low[i],
                                         .high = k->high[i],
                                         .centre = k->r->balance.centre };
            st = tsr_balance_solve(k->b, &a);
        } else if (k->r->balance.kind == TSR_BALANCE_QUANTILE_EXACT) {
            st = k->seen[i] * s->top_k >= s->experts ? update_exact(k, i, bias) : TSR_OK;
        } else if (k->r->balance.kind == TSR_BALANCE_SIGN) {
            int64_t *load = k->sums;
            memcpy(load, k->row[i].count, (size_t)s->experts * sizeof *load);
            if (!k->b->host) {
                TSR_FAIL(err, TSR_E_UNSUPPORTED, "the sign rule needs a backend with host memory");
            }
            tsr_balance_sign_args a = {
                .bias = bias, .load = load, .e = s->experts, .rate = k->r->balance.rate
            };
            st = tsr_balance_sign(k->b, &a);
        }
        if (st != TSR_OK) {
            return device_failed(k, err);
        }
    }
    return TSR_OK;
}

double balance_maxvio(const balance *k)
{
    double most = 0;
    for (int32_t i = 0; i < k->layers; i++) {
        most = k->row[i].maxvio > most ? k->row[i].maxvio : most;
    }
    return most;
}
