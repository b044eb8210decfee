/* kda_fwd.c - delta attention, chunkwise forward. Contracts: kernels/ops/kda.h. One piece is one head of one segment;
 * its state stays in the worker's scratch from end to end. */
#include "kernels/simd/kda_tile.h"

typedef struct fwd_job {
    const tsr_kda_fwd_args *a;
    tsr_queue *q;
} fwd_job;

static void put_outputs(const tsr_kda_fwd_args *a, const tile *t, rows at)
{
    for (int64_t i = 0; i < at.count; i++) {
        const float *from = t->read.p + (STEPS + i) * t->vp;
        memcpy(a->o + (at.first + i * at.step) * a->dv, from, (size_t)a->dv * sizeof(float));
    }
}

static void fwd_piece(void *payload, int64_t i, int worker)
{
    const fwd_job *job = payload;
    const tsr_kda_fwd_args *a = job->a;
    int64_t s = i / a->h, h = i % a->h, size = a->dk * a->dv, first = a->seg[s], end = a->seg[s + 1],
            chunk = 0;
    for (int64_t j = 0; a->saved != NULL && j < s; j++) {
        chunk += (a->seg[j + 1] - a->seg[j] + a->chunk - 1) / a->chunk;
    }
    float *at = tsr_scratch(job->q, worker);
    tile t;
    tile_room(&t, &at, a->dk, a->dv);
    mat S = room(&at, t.kp, state_ld(a->dv));
    state_in(S, a->state != NULL ? a->state + i * size : NULL, a->dk, a->dv);
    for (int64_t from = first; from < end; from += STEPS) {
        if (a->saved != NULL && (from - first) % a->chunk == 0) {
            state_out(a->saved + (chunk++ * a->h + h) * size, S, a->dk, a->dv);
        }
        int64_t count = end - from < STEPS ? end - from : STEPS;
        rows q = { a->q, a->io, from * a->h + h, a->h, count, a->dk }, k = q, v = q, g = q;
        k.p = a->k;
        v.p = a->v;
        v.d = a->dv;
        g.p = a->g;
        g.io = TSR_DT_F32;
        tile_begin(&t, q, k, v, g, a->beta, a->bounded);
        product(t.read, t.start, false, S, 2 * STEPS, t.vp, t.kp, NULL);
        tile_solve(&t, true);
        tile_advance(&t, S);
        put_outputs(a, &t, v);
    }
    if (a->state != NULL) {
        state_out(a->state + i * size, S, a->dk, a->dv);
    }
}

tsr_status TSR_SIMD(kda_fwd)(tsr_queue *q, const tsr_kda_fwd_args *a)
{
    fwd_job job = { a, q };
    int64_t kp = padded(a->dk), vp = padded(a->dv);
    TSR_ASSERT((size_t)(kp * (state_ld(a->dv) + 12 * STEPS + 1) + vp * 5 * STEPS + 2 * STEPS * STEPS) *
                   sizeof(float) <=
               TSR_SCRATCH_BYTES);
    tsr_parallel(q, a->segs * a->h, fwd_piece, &job);
    return TSR_OK;
}
