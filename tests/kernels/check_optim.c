/* check_optim.c - checks of kernels/ops/optim.h. */
#include "tests/kernels/check.h"

#include <math.h>
#include <string.h>

static void adamw_case(ck *t, int64_t n, int64_t step, double b1, double b2, double decay)
{
    size_t bytes = (size_t)n * sizeof(float);
    double lr = 0.01, c1 = 1 - pow(b1, (double)step), c2 = 1 - pow(b2, (double)step);
    tsr_adamw_args r = { .w = ck_normal(t, n, 1),
                         .m = ck_normal(t, n, 0.1f),
                         .v = ck_rand(t, n, 0.1f),
                         .g = ck_normal(t, n, 1),
                         .n = n,
                         .t = step,
                         .lr = lr,
                         .b1 = b1,
                         .b2 = b2,
                         .eps = 1e-8,
                         .decay = decay,
                         .grad_scale = 0.37 },
                   d = r;
    double *mw = ck_host(t, (size_t)n * sizeof *mw), *mm = ck_host(t, (size_t)n * sizeof *mm),
           *mv = ck_host(t, (size_t)n * sizeof *mv);
    for (int64_t i = 0; i < n; i++) {
        r.v[i] = i % 11 == 0 ? 0 : fabsf(r.v[i]);
        double g = fabs((double)r.g[i] * 0.37), m = fabs((double)r.m[i]), v = (double)r.v[i];
        mm[i] = (1 - b1) * (m + g);
        mv[i] = (1 - b2) * (v + g * g);
        double next = b2 * v + (1 - b2) * g * g, share = next > 0 ? 1 + mv[i] / next : 1;
        mw[i] = lr * (m + mm[i]) / c1 / (sqrt(next / c2) + 1e-8) * share + lr * decay * fabs((double)r.w[i]);
    }
    d.w = ck_dev(t, r.w, bytes);
    d.m = ck_dev(t, r.m, bytes);
    d.v = ck_dev(t, r.v, bytes);
    d.g = ck_dev(t, r.g, bytes);
    CK_RUN(t, adamw, &r, &d);
    /* The last rounding of each side; in m the roundings of the scale, of g scaled, of g - m and of 1 - b1, half an eps
     * of mm each; in v those of g count twice. */
    ck_f32(t, "m", r.m, d.m, mm, n, (ck_tol){ .abs = 1e-38, .ulps = 1, .red = 2 });
    ck_f32(t, "v", r.v, d.v, mv, n, (ck_tol){ .abs = 1e-38, .ulps = 1, .red = 3 });
    /* The update takes these over, v's halved by the root, and rounds six times more. */
    ck_f32(t, "w", r.w, d.w, mw, n, (ck_tol){ .abs = 1e-38, .ulps = 1, .red = 2.5 + 2 + 3 });
    ck_end(t);
}

void ck_adamw(ck *t)
{
    adamw_case(t, 0, 1, 0.9, 0.95, 0.1);
    adamw_case(t, 1, 1, 0.9, 0.95, 0.1);
    adamw_case(t, 7, 2, 0.9, 0.999, 0);
    adamw_case(t, 16, 1000, 0.9, 0.95, 0.1);
    adamw_case(t, 33, 3, 0, 0, 0.1);
    adamw_case(t, 70001, 5, 0.9, 0.95, 0.1);
}

static void muon_case(ck *t, int64_t count, int64_t rows, int64_t cols, int64_t scale_dim, bool nesterov)
{
    int64_t n = count * rows * cols;
    size_t bytes = (size_t)n * sizeof(float);
    tsr_muon_args r = { .w = ck_normal(t, n, 1),
                        .m = ck_normal(t, n, 1),
                        .g = ck_normal(t, n, 1),
                        .count = count,
                        .rows = rows,
                        .cols = cols,
                        .scale_dim = scale_dim,
                        .lr = 0.02,
                        .mu = 0.95,
                        .decay = 0.1,
                        .grad_scale = 0.37,
                        .nesterov = nesterov },
                  d = r;
    double *mag = ck_host(t, (size_t)n * sizeof *mag);
    for (int64_t i = 0; i < n; i++) {
        mag[i] = 0.95 * fabs((double)r.m[i]) + 0.37 * fabs((double)r.g[i]);
    }
    r.workspace_bytes = d.workspace_bytes = tsr_muon_workspace(&r);
    r.workspace = ck_host(t, (r.workspace_bytes + 63) / 64 * 64);
    d.workspace = ck_dev(t, r.workspace, (r.workspace_bytes + 63) / 64 * 64);
    d.w = ck_dev(t, r.w, bytes);
    d.m = ck_dev(t, r.m, bytes);
    d.g = ck_dev(t, r.g, bytes);
    CK_RUN(t, muon, &r, &d);
    /* mu, the scale and g scaled round once each, and both sides at the end. */
    ck_f32(t, "m", r.m, d.m, mag, n, (ck_tol){ .ulps = 1, .red = 1.5 });
    /* Newton-Schulz: each of five steps, and the start, rounds its x by eps / 2 of its norm or so (products are summed
     * over many terms, errors of either sign), which the later steps multiply together by up to 3.45 a step: x at step
     * s has norm 3.45^s at most, so each of six contributes 485 eps / 2. Spread over the elements, four deviations. */
    double scale = 0.02 * 0.2 * sqrt((double)(scale_dim > 0 ? scale_dim : rows > cols ? rows : cols));
    double error = 6 * 485 * 0.5 * 1.2e-7 * 4 / sqrt((double)(rows * cols));
    ck_f32(t, "w", r.w, d.w, NULL, n, (ck_tol){ .abs = scale * error, .ulps = 1.5 });
    ck_end(t);
}

void ck_muon(ck *t)
{
    muon_case(t, 1, 1, 1, 0, true);
    muon_case(t, 1, 5, 1, 0, true);
    muon_case(t, 3, 1, 17, 0, false);
    muon_case(t, 1, 24, 40, 0, true);
    muon_case(t, 2, 40, 24, 100, true);
    muon_case(t, 5, 31, 33, 0, false);
    muon_case(t, 1, 130, 129, 0, true);
    muon_case(t, 4, 16, 530, 0, true);
    muon_case(t, 1, 1030, 40, 0, true);
}
