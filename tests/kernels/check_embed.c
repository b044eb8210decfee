/* check_embed.c - checks of kernels/ops/embed.h. */
#include "tests/kernels/check.h"

static const int64_t shapes[][3] = { /* tokens, width, vocabulary */
    { 0, 4, 3 }, { 1, 1, 1 }, { 5, 7, 3 }, { 16, 16, 100 }, { 17, 33, 5 }, { 100, 256, 7 }, { 33, 257, 1000 }, { 9, 1000, 4 }
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

/* Some often, some never; the first and the last among them. */
static int32_t *ids(ck *t, int64_t n, int64_t v)
{
    int32_t *p = ck_host(t, (size_t)n * sizeof *p);
    for (int64_t i = 0; i < n; i++) {
        uint64_t some = ck_random(t) % (uint64_t)v;
        p[i] = (int32_t)(i % 5 == 0 ? 0 : i % 7 == 0 ? v - 1 : (int64_t)some);
    }
    return p;
}

void ck_embed_fwd(ck *t)
{
    for (int i = 0; i < 2 * SHAPES; i++) {
        int64_t n = shapes[i / 2][0], d = shapes[i / 2][1], v = shapes[i / 2][2];
        bool f32 = i % 2 == 0;
        float *wide = ck_normal(t, v * d, 1), *y = ck_nan(t, n * d), *dy = ck_dev(t, y, (size_t)(n * d) * sizeof *y);
        int32_t *id = ids(t, n, v);
        void *table = f32 ? (void *)wide : ck_bf16(t, wide, v * d);
        tsr_embed_fwd_args r = { y, table, id, n, d, v, f32 ? TSR_DT_F32 : TSR_DT_BF16 }, u = r;
        u.y = dy;
        u.table = ck_dev(t, table, (size_t)(v * d) * (f32 ? 4 : 2));
        u.ids = ck_dev(t, id, (size_t)n * sizeof *id);
        CK_RUN(t, embed_fwd, &r, &u);
        ck_exact(t, "y", y, dy, (size_t)(n * d) * sizeof *y);
        ck_end(t);
    }
}

void ck_embed_bwd(ck *t)
{
    for (int i = 0; i < SHAPES; i++) {
        int64_t n = shapes[i][0], d = shapes[i][1], v = shapes[i][2];
        size_t bytes = (size_t)(v * d) * sizeof(float);
        float *dtable = ck_normal(t, v * d, 1), *dev = ck_dev(t, dtable, bytes), *dy = ck_normal(t, n * d, 1);
        int32_t *id = ids(t, n, v);
        tsr_embed_bwd_args r = { dtable, dy, id, n, d, v }, u = r;
        u.dtable = dev;
        u.dy = ck_dev(t, dy, (size_t)(n * d) * sizeof *dy);
        u.ids = ck_dev(t, id, (size_t)n * sizeof *id);
        CK_RUN(t, embed_bwd, &r, &u);
        ck_exact(t, "dtable", dtable, dev, bytes); /* the order is part of the contract */
        ck_end(t);
    }
}
