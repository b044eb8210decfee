/* sampler.c - filters as beginnings of one order: a heap gives the order as far as it is needed. */
#include "model/sampler.h"

#include <math.h>
#include <stdlib.h>

struct tsr_sampler {
    tsr_sampler_opts o;
    int32_t vocab;
    int32_t *heap; /* [vocab]; what was taken from the heap stands behind it, in reverse */
};

tsr_status tsr_sampler_open(tsr_sampler **out, int64_t vocab, const tsr_sampler_opts *o, tsr_err *err)
{
    *out = NULL;
    TSR_ASSERT(vocab >= 1);
    if (!(o->temperature >= 0 && isfinite(o->temperature))) {
        TSR_FAIL(err, TSR_E_USAGE, "temperature %g: must be 0 or more", o->temperature);
    }
    if (o->top_k < 0) {
        TSR_FAIL(err, TSR_E_USAGE, "top-k %lld: must be 0 (all) or more", (long long)o->top_k);
    }
    if (!(o->top_p > 0 && o->top_p <= 1)) {
        TSR_FAIL(err, TSR_E_USAGE, "top-p %g: must be above 0 and at most 1", o->top_p);
    }
    if (!(o->min_p >= 0 && o->min_p <= 1)) {
        TSR_FAIL(err, TSR_E_USAGE, "min-p %g: must lie between 0 and 1", o->min_p);
    }
    tsr_sampler *s = vocab <= INT32_MAX ? calloc(1, sizeof *s) : NULL;
    if (s != NULL) {
        *s = (tsr_sampler){ .o = *o, .vocab = (int32_t)vocab };
        s->heap = malloc((size_t)vocab * sizeof *s->heap);
    }
    if (s == NULL || s->heap == NULL) {
        tsr_sampler_close(&s);
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory: sampling from %lld tokens", (long long)vocab);
    }
    *out = s;
    return TSR_OK;
}

void tsr_sampler_close(tsr_sampler **ps)
{
    if (*ps != NULL) {
        free((*ps)->heap);
        free(*ps);
        *ps = NULL;
    }
}

/* ---- the order of candidates -------------------------------------------------------------------------------- */

static bool before(const float *x, int32_t a, int32_t b)
{
    return x[a] > x[b] || (x[a] == x[b] && a < b);
}

static void sift(int32_t *heap, int32_t n, int32_t at, const float *x)
{
    int32_t moving = heap[at];
    for (;;) {
        int64_t child = 2 * (int64_t)at + 1;
        if (child >= n) {
            break;
        }
        if (child + 1 < n && before(x, heap[child + 1], heap[child])) {
            child++;
        }
        if (!before(x, heap[child], moving)) {
            break;
        }
        heap[at] = heap[child];
        at = (int32_t)child;
    }
    heap[at] = moving;
}

static void heap_make(tsr_sampler *s, const float *x)
{
    for (int32_t i = 0; i < s->vocab; i++) {
        s->heap[i] = i;
    }
    for (int32_t i = s->vocab / 2; i-- > 0;) {
        sift(s->heap, s->vocab, i, x);
    }
}

/* The candidate number `taken`, counted from 0, in order: taken is one more with each call. */
static int32_t heap_take(tsr_sampler *s, int32_t taken, const float *x)
{
    int32_t last = s->vocab - 1 - taken, first = s->heap[0];
    s->heap[0] = s->heap[last];
    s->heap[last] = first;
    sift(s->heap, last, 0, x);
    return first;
}

static int32_t nth(const tsr_sampler *s, int32_t n)
{
    return s->heap[s->vocab - 1 - n];
}

/* ---- choosing ------------------------------------------------------------------------------------------------- */

static tsr_status first_of(const tsr_sampler *s, const float *x, int64_t position, int32_t *out, tsr_err *err)
{
    *out = 0;
    for (int32_t i = 0; i < s->vocab; i++) {
        if (!isfinite(x[i])) {
            TSR_FAIL(
                err, TSR_E_NUMERIC,
                "position %lld: the logit of token %d is %s (the weights or an earlier result are broken)",
                (long long)position, i, isnan(x[i]) ? "NaN" : "infinite");
        }
        *out = x[i] > x[*out] ? i : *out;
    }
    return TSR_OK;
}

static double weight(const tsr_sampler *s, const float *x, int32_t i, float top)
{
    return exp(((double)x[i] - (double)top) / s->o.temperature);
}

/* The last candidate that top-k and top-p keep. */
static int32_t last_kept(tsr_sampler *s, const float *x, float top)
{
    int32_t k = s->o.top_k > 0 && s->o.top_k < s->vocab ? (int32_t)s->o.top_k : s->vocab, taken = 0;
    double total = 0, sum = 0;
    heap_make(s, x);
    if (k < s->vocab) {
        for (; taken < k; taken++) {
            total += weight(s, x, heap_take(s, taken, x), top);
        }
    } else {
        for (int32_t i = 0; i < s->vocab; i++) {
            total += weight(s, x, i, top);
        }
    }
    for (int32_t i = 0; i < k; i++) {
        int32_t id = i < taken ? nth(s, i) : heap_take(s, i, x);
        sum += weight(s, x, id, top);
        if (s->o.top_p < 1 && sum >= s->o.top_p * total) {
            return id;
        }
    }
    return nth(s, k - 1);
}

static double uniform(uint64_t seed, int64_t position)
{
    uint64_t z = seed + ((uint64_t)position + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    return (double)(z >> 11) * 0x1p-53;
}

tsr_status tsr_sampler_pick(tsr_sampler *s, const float *x, int64_t position, int32_t *id_out, tsr_err *err)
{
    int32_t first, last = -1;
    TSR_TRY(first_of(s, x, position, &first, err));
    *id_out = first;
    if (s->o.temperature == 0) {
        return TSR_OK;
    }
    float top = x[first];
    if ((s->o.top_k > 0 && s->o.top_k < s->vocab) || s->o.top_p < 1) {
        last = last_kept(s, x, top);
    }
    double total = 0, sum = 0;
    for (int pass = 0; pass < 2; pass++) {
        double goal = pass == 1 ? uniform(s->o.seed, position) * total : 0;
        for (int32_t i = 0; i < s->vocab; i++) {
            if (last >= 0 && i != last && !before(x, i, last)) {
                continue;
            }
            double w = weight(s, x, i, top);
            if (w < s->o.min_p) { /* the first one's weight is 1 */
                continue;
            }
            sum += w;
            if (pass == 1 && sum > goal) {
                *id_out = i;
                return TSR_OK;
            }
        }
        total = sum;
        sum = 0;
    }
    return TSR_OK; /* not reached: u is below 1, and both sums are added in the same order */
}

void tsr_sampler_logprobs(tsr_sampler *s, const float *x, tsr_candidate *chosen, tsr_candidate *top,
                          int64_t n)
{
    double most = (double)x[0], sum = 0;
    TSR_ASSERT(n <= s->vocab);
    for (int32_t i = 1; i < s->vocab; i++) {
        most = (double)x[i] > most ? (double)x[i] : most;
    }
    for (int32_t i = 0; i < s->vocab; i++) {
        sum += exp((double)x[i] - most);
    }
    double lse = most + log(sum);
    chosen->logprob = (double)x[chosen->id] - lse;
    if (n > 0) {
        heap_make(s, x);
    }
    for (int32_t i = 0; i < n; i++) {
        int32_t id = heap_take(s, i, x);
        top[i] = (tsr_candidate){ id, (double)x[id] - lse };
    }
}
