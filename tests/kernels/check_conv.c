/* check_conv.c - checks of kernels/ops/conv.h. */
#include "tests/kernels/check.h"

#include <math.h>
#include <string.h>

/* Borders of segments from lengths; returns n. */
static int64_t borders(int64_t *seg, const int64_t *lengths, int64_t segs)
{
    seg[0] = 0;
    for (int64_t i = 0; i < segs; i++) {
        seg[i + 1] = seg[i] + lengths[i];
    }
    return seg[segs];
}

typedef struct shape {
    int64_t c, kw, pad, segs, lengths[6];
} shape;

static const shape shapes[] = {
    { 1, 1, 0, 1, { 5 } },
    { 7, 4, 3, 3, { 0, 1, 2 } },
    { 8, 4, 0, 4, { 3, 4, 5, 0 } },
    { 15, 3, 1, 2, { 63, 64 } },
    { 16, 4, 5, 2, { 65, 1 } },
    { 17, 5, 0, 3, { 2, 130, 7 } },
    { 255, 4, 2, 6, { 1, 1, 1, 1, 1, 1 } },
    { 256, 2, 0, 1, { 1 } },
    { 257, 4, 0, 2, { 129, 3 } },
    { 515, 4, 1, 1, { 33 } },
    { 40, 9, 1, 3, { 4, 0, 80 } },
    { 9, 4, 0, 0, { 0 } },
};

static void fwd(ck *t, const shape *s, bool keeps)
{
    int64_t seg[8], n = borders(seg, s->lengths, s->segs), xs = s->c + s->pad, ys = s->c + 2 * s->pad;
    float *x = ck_normal(t, n * xs, 2.0f), *w = ck_normal(t, s->c * s->kw, 1.0f);
    int64_t states = s->segs * (s->kw - 1) * s->c;
    float *state = ck_normal(t, states, 1.0f), *y = ck_rand(t, n * ys, 1.0f);
    size_t y_bytes = (size_t)(n * ys) * 4, state_bytes = (size_t)states * 4;
    tsr_conv_fwd_args r = { y, keeps ? state : NULL, x, w, seg, n, s->c, s->kw, s->segs, xs, ys };
    tsr_conv_fwd_args d = r;
    d.y = ck_dev(t, y, y_bytes);
    d.state = keeps ? ck_dev(t, state, state_bytes) : NULL;
    d.x = ck_dev(t, x, (size_t)(n * xs) * 4);
    d.w = ck_dev(t, w, (size_t)(s->c * s->kw) * 4);
    d.seg = ck_dev(t, seg, (size_t)(s->segs + 1) * sizeof *seg);
    /* |silu'| <= 1.1: y is off by the sum's rounding, and by the few roundings of the sigmoid. The sum has kw terms of
     * at most 8 sigma in x and 4 in w at these sizes; the typical ones are far smaller. */
    double *mag = ck_host(t, (size_t)(n * ys) * sizeof *mag);
    for (int64_t i = 0; i < n * ys; i++) {
        mag[i] = 0;
    }
    for (int64_t g = 0; g < s->segs; g++) {
        for (int64_t i = seg[g]; i < seg[g + 1]; i++) {
            for (int64_t j = 0; j < s->kw; j++) {
                int64_t at = i - s->kw + 1 + j - seg[g];
                for (int64_t c = 0; c < s->c; c++) {
                    float old = at >= 0 ? x[(seg[g] + at) * xs + c]
                                        : (keeps ? state[(g * (s->kw - 1) + s->kw - 1 + at) * s->c + c] : 0);
                    mag[i * ys + c] += fabs((double)(old * w[c * s->kw + j]));
                }
            }
        }
    }
    CK_RUN(t, conv_fwd, &r, &d);
    ck_f32(t, "y", y, d.y, mag, n * ys, (ck_tol){ 1e-37, 4, 0.6 * (double)s->kw + 0.5 });
    if (keeps) {
        ck_exact(t, "state", state, d.state, state_bytes);
    }
    ck_end(t);
}

void ck_conv_fwd(ck *t)
{
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        fwd(t, &shapes[i], true);
        fwd(t, &shapes[i], false);
    }
}

/* Sums of the magnitudes that make dx and dw, the magnitude of du = dy silu'(u) standing for its own error too. */
static void magnitudes(const tsr_conv_bwd_args *a, double *dx, double *dw)
{
    for (int64_t g = 0; g < a->segs; g++) {
        for (int64_t i = a->seg[g]; i < a->seg[g + 1]; i++) {
            for (int64_t c = 0; c < a->c; c++) {
                double u = 0; /* the sum's magnitude: its error moves silu', whose slope is at most a half */
                for (int64_t j = 0; j < a->kw; j++) {
                    int64_t at = i - a->kw + 1 + j;
                    u += at >= a->seg[g] ? fabs((double)(a->w[c * a->kw + j] * a->x[at * a->x_stride + c]))
                                         : 0;
                }
                double du = fabs((double)a->dy[i * a->dy_stride + c]) * (1.1 + 0.5 * u);
                for (int64_t j = 0; j < a->kw; j++) {
                    int64_t at = i - a->kw + 1 + j;
                    if (at >= a->seg[g]) {
                        dx[at * a->dx_stride + c] += du * fabs((double)a->w[c * a->kw + j]);
                        dw[c * a->kw + j] += du * fabs((double)a->x[at * a->x_stride + c]);
                    }
                }
            }
        }
    }
}

void ck_conv_bwd(ck *t)
{
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const shape *s = &shapes[i];
        int64_t seg[8], n = borders(seg, s->lengths, s->segs);
        int64_t xs = s->c + s->pad, ys = s->c + 2 * s->pad, ds = s->c + 3 * s->pad, taps = s->c * s->kw;
        float *x = ck_normal(t, n * xs, 2.0f), *w = ck_normal(t, taps, 1.0f),
              *dy = ck_normal(t, n * ys, 1.0f);
        float *dx = ck_rand(t, n * ds, 1.0f), *dw = ck_normal(t, taps, 1.0f);
        tsr_conv_bwd_args r = { dx, dw, dy, x, w, seg, n, s->c, s->kw, s->segs, xs, ys, ds }, d = r;
        d.dx = ck_dev(t, dx, (size_t)(n * ds) * 4);
        d.dw = ck_dev(t, dw, (size_t)taps * 4);
        d.dy = ck_dev(t, dy, (size_t)(n * ys) * 4);
        d.x = ck_dev(t, x, (size_t)(n * xs) * 4);
        d.w = ck_dev(t, w, (size_t)taps * 4);
        d.seg = ck_dev(t, seg, (size_t)(s->segs + 1) * sizeof *seg);
        double *mx = ck_host(t, (size_t)(n * ds) * sizeof *mx), *mw = ck_host(t, (size_t)taps * sizeof *mw);
        memset(mx, 0, (size_t)(n * ds) * sizeof *mx);
        for (int64_t k = 0; k < taps; k++) {
            mw[k] = fabs((double)dw[k]);
        }
        magnitudes(&r, mx, mw);
        CK_RUN(t, conv_bwd, &r, &d);
        /* Each du carries about kw / 2 roundings of its sum and four of silu'; then dx adds kw terms, dw n, of which
         * only the square root of the roundings add up. */
        ck_f32(t, "dx", dx, d.dx, mx, n * ds, (ck_tol){ 1e-37, 1, 2 + 0.25 * (double)s->kw });
        ck_f32(t, "dw", dw, d.dw, mw, taps, (ck_tol){ 1e-37, 1, 2 + 0.25 * (double)s->kw });
        ck_end(t);
    }
}
