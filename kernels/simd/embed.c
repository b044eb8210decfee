/* embed.c - token embedding, by vectors. Contracts: kernels/ops/embed.h. */
#include "kernels/simd/simd.h"

#define ROWS 16
#define COLUMNS 256

static void rows_fwd(void *payload, int64_t i, int worker)
{
    const tsr_embed_fwd_args *a = payload;
    (void)worker;
    for (int64_t r = i * ROWS; r < a->n && r < (i + 1) * ROWS; r++) {
        float *y = a->y + r * a->d;
        int64_t from = a->ids[r] * a->d;
        if (a->dtype == TSR_DT_F32) {
            memcpy(y, (const float *)a->table + from, (size_t)a->d * sizeof *y);
            continue;
        }
        const uint16_t *row = (const uint16_t *)a->table + from;
        int64_t j = 0;
        for (; j + VL <= a->d; j += VL) {
            v_store(y + j, v_bf16(row + j));
        }
        for (; j < a->d; j++) {
            uint32_t bits = (uint32_t)row[j] << 16;
            memcpy(y + j, &bits, sizeof bits);
        }
    }
}

tsr_status TSR_SIMD(embed_fwd)(tsr_queue *q, const tsr_embed_fwd_args *a)
{
    tsr_parallel(q, (a->n + ROWS - 1) / ROWS, rows_fwd, (void *)(uintptr_t)a);
    return TSR_OK;
}

/* A piece is a range of columns: tokens that share a row of the table then never meet. */
static void columns_bwd(void *payload, int64_t i, int worker)
{
    const tsr_embed_bwd_args *a = payload;
    (void)worker;
    int64_t from = i * COLUMNS, end = from + COLUMNS < a->d ? from + COLUMNS : a->d;
    for (int64_t r = 0; r < a->n; r++) {
        float *row = a->dtable + a->ids[r] * a->d;
        const float *dy = a->dy + r * a->d;
        for (int64_t j = from; j < end; j++) {
            row[j] += dy[j];
        }
    }
}

tsr_status TSR_SIMD(embed_bwd)(tsr_queue *q, const tsr_embed_bwd_args *a)
{
    tsr_parallel(q, (a->d + COLUMNS - 1) / COLUMNS, columns_bwd, (void *)(uintptr_t)a);
    return TSR_OK;
}
