/* order.c - permutations and mixtures that can be asked at any place; see data.h. */
#include "train/data.h"

#define ROUNDS 6

static uint64_t splitmix(uint64_t z)
{
    z += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

uint64_t tsr_mix64(uint64_t a, uint64_t b, uint64_t c)
{
    return splitmix(splitmix(splitmix(a) ^ b) ^ c);
}

int64_t tsr_shuffled(uint64_t key, int64_t n, int64_t i)
{
    TSR_ASSERT(n > 0 && i >= 0 && i < n);
    unsigned half = 1; /* bits of each half */
    while (half < 32 && (uint64_t)1 << (2 * half) < (uint64_t)n) {
        half++;
    }
    uint64_t mask = ((uint64_t)1 << half) - 1, x = (uint64_t)i;
    do { /* the network permutes [0, 4^half): its cycle through i comes back into [0, n) */
        uint64_t left = x >> half, right = x & mask;
        for (uint64_t r = 0; r < ROUNDS; r++) {
            uint64_t next = left ^ (tsr_mix64(key, r, right) & mask);
            left = right;
            right = next;
        }
        x = left << half | right;
    } while (x >= (uint64_t)n);
    return (int64_t)x;
}

/* ---- mixtures ------------------------------------------------------------------------------------------------------ */

enum { OF_BLOCK = 0x626c6f63, OF_EPOCH = 0x65706f63 }; /* keep the two kinds of keys apart */

/* The sources of a block's places. */
static void block_sources(const tsr_mix *m, int64_t block, int32_t out[TSR_MIX_BLOCK])
{
    int64_t n = 0;
    for (int32_t s = 0; s < m->sources; s++) {
        TSR_ASSERT(m->share[s] >= 0 && m->share[s] <= TSR_MIX_BLOCK - n);
        for (int32_t k = 0; k < m->share[s]; k++) {
            out[n++] = s;
        }
    }
    TSR_ASSERT(n == TSR_MIX_BLOCK);
    uint64_t state = tsr_mix64(m->seed, OF_BLOCK, (uint64_t)block);
    for (uint64_t i = TSR_MIX_BLOCK - 1; i > 0; i--) {
        state = splitmix(state);
        uint64_t j = (state >> 32) * (i + 1) >> 32;
        int32_t had = out[i];
        out[i] = out[j];
        out[j] = had;
    }
}

static int64_t used_before(const tsr_mix *m, const int32_t *sources, int64_t place, int32_t source)
{
    int64_t n = place / TSR_MIX_BLOCK * m->share[source];
    for (int64_t i = 0; i < place % TSR_MIX_BLOCK; i++) {
        n += sources[i] == source;
    }
    return n;
}

tsr_place tsr_mix_at(const tsr_mix *m, int64_t place)
{
    int32_t sources[TSR_MIX_BLOCK];
    TSR_ASSERT(place >= 0);
    block_sources(m, place / TSR_MIX_BLOCK, sources);
    int32_t source = sources[place % TSR_MIX_BLOCK];
    int64_t at = used_before(m, sources, place, source), count = m->count[source];
    TSR_ASSERT(count > 0);
    tsr_place p = { .source = source, .epoch = at / count, .index = at % count };
    uint64_t key = tsr_mix64(tsr_mix64(m->seed, OF_EPOCH, (uint64_t)source), (uint64_t)p.epoch, 0);
    p.sequence = tsr_shuffled(key, count, p.index);
    return p;
}

int64_t tsr_mix_used(const tsr_mix *m, int64_t place, int32_t source)
{
    int32_t sources[TSR_MIX_BLOCK];
    TSR_ASSERT(place >= 0 && source >= 0 && source < m->sources);
    block_sources(m, place / TSR_MIX_BLOCK, sources);
    return used_before(m, sources, place, source);
}

void tsr_mix_shares(const double *weight, int32_t n, int32_t *share)
{
    double top = 0, sum = 0;
    int32_t left = TSR_MIX_BLOCK, above = 0;
    for (int32_t i = 0; i < n; i++) {
        TSR_ASSERT(weight[i] >= 0 && weight[i] <= 1.7976931348623157e308);
        top = weight[i] > top ? weight[i] : top;
        above += weight[i] > 0;
    }
    TSR_ASSERT(above > 0 && above <= TSR_MIX_BLOCK);
    for (int32_t i = 0; i < n; i++) {
        sum += weight[i] / top; /* sums of huge weights would overflow */
    }
    for (int32_t i = 0; i < n; i++) {
        share[i] = (int32_t)(weight[i] / top / sum * TSR_MIX_BLOCK);
        share[i] = share[i] == 0 && weight[i] > 0 ? 1 : share[i];
        left -= share[i];
    }
    while (left != 0) { /* one more for the largest remainder, or one less for the smallest that can give */
        int32_t best = -1, step = left > 0 ? 1 : -1;
        double best_by = 0;
        for (int32_t i = 0; i < n; i++) {
            double by = (weight[i] / top / sum * TSR_MIX_BLOCK - share[i]) * step;
            bool may = step > 0 ? weight[i] > 0 : share[i] > 1;
            if (may && (best < 0 || by > best_by)) {
                best = i;
                best_by = by;
            }
        }
        share[best] += step;
        left -= step;
    }
}
