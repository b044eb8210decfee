/* sampler.h - from logits to a token. Host arithmetic in f64, one token at a time; allocates when it is opened and never
 * again. What is drawn depends on the logits, the options and the position alone: not on threads, batches or what was drawn
 * before. */
#ifndef TSR_MODEL_SAMPLER_H
#define TSR_MODEL_SAMPLER_H

#include "format/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Filters apply in the order of the fields. Candidates are ordered by logit, largest first, equal ones by id; every filter
 * keeps a beginning of that order, never less than its first.
 *   temperature  p = softmax(logits / temperature). 0: the first candidate, nothing is drawn, filters do not matter.
 *   top_k        keeps k candidates; 0: all. p is normalised again over what is left.
 *   top_p        keeps the fewest whose p add up to at least top_p; 1: all. p is normalised again.
 *   min_p        keeps those with p at least min_p times the first one's; 0: all. p is normalised again.
 * Then u in [0, 1) is drawn, and the chosen one is the first, by ascending id over what is kept, at which the running sum of
 * p exceeds u. u = (z >> 11) 2^-53, z the output number `position` (from 0) of SplitMix64 started with `seed`:
 *   z = seed + (position + 1) 0x9e3779b97f4a7c15; z = (z ^ z >> 30) 0xbf58476d1ce4e5b9;
 *   z = (z ^ z >> 27) 0x94d049bb133111eb; z = z ^ z >> 31        (modulo 2^64) */
typedef struct tsr_sampler_opts {
    double temperature;
    int64_t top_k;
    double top_p, min_p;
    uint64_t seed;
} tsr_sampler_opts;

typedef struct tsr_sampler tsr_sampler;

/* TSR_E_USAGE: temperature or top_k negative, top_p outside (0, 1], min_p outside [0, 1], not a number. */
TSR_NODISCARD tsr_status tsr_sampler_open(tsr_sampler **out, int64_t vocab, const tsr_sampler_opts *o,
                                          tsr_err *err);
void tsr_sampler_close(tsr_sampler **s);

/* logits: host [vocab]. position: of the token that is chosen, counted from the sequence's start.
 * TSR_E_NUMERIC: a logit is NaN or infinite; the message names position and id. */
TSR_NODISCARD tsr_status tsr_sampler_pick(tsr_sampler *s, const float *logits, int64_t position,
                                          int32_t *id_out, tsr_err *err);

typedef struct tsr_candidate {
    int32_t id;
    double logprob; /* of the model: log softmax of the logits as they are, without temperature and filters */
} tsr_candidate;
/* Fills chosen->logprob for chosen->id, and top[0 .. n) with the n most probable, n <= vocab. Logits as for pick. */
void tsr_sampler_logprobs(tsr_sampler *s, const float *logits, tsr_candidate *chosen, tsr_candidate *top,
                          int64_t n);

#ifdef __cplusplus
}
#endif
#endif
