/* bench_train.c - training on random tokens: memory by token of context, planned and real; tokens a second of the first stage of a
 * recipe against the sgemm rate of the same run, and where the time goes.
 * Usage: bench_train TINY.yaml RECIPE.yaml [tokens that are really run, at most; 16384 [threads]]. The first recipe's model
 * is for memory, the second's for speed. */
#include "bench/bench.h"
#include "kernels/backend_priv.h"
#include "kernels/simd/blas.h"
#include "train/init.h"
#include "train/optim.h"
#include "train/recipe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ROUNDS = 3, GEMM = 1024 };

/* ---- time of each op: wrappers laid over a backend's kernels --------------------------------------------------- */

static tsr_kernels real;
static double spent[TSR_OP_COUNT];

#define TSR_OP(op, cpu, simd, cuda)                                                                          \
    static tsr_status timed_##op(tsr_queue *q, const tsr_##op##_args *a)                                     \
    {                                                                                                        \
        double t = bench_now();                                                                              \
        tsr_status st = real.op(q, a);                                                                       \
        spent[TSR_OP_##op] += bench_now() - t;                                                               \
        return st;                                                                                           \
    }
#include "kernels/ops.def"
#undef TSR_OP

static void watch_ops(tsr_backend *b)
{
    real = b->k;
#define TSR_OP(op, cpu, simd, cuda) b->k.op = timed_##op;
#include "kernels/ops.def"
#undef TSR_OP
}

static bool gemm_like(const char *name)
{
    return strncmp(name, "gemm", 4) == 0 || strncmp(name, "ggemm", 5) == 0;
}

static void print_shares(double all)
{
    double gemm = 0, known = 0;
    bool told[TSR_OP_COUNT] = { false };
    for (int i = 0; i < TSR_OP_COUNT; i++) {
        gemm += gemm_like(tsr_op_name((tsr_op_id)i)) ? spent[i] : 0;
        known += spent[i];
    }
    printf(
        "  of the time: %.0f %% in matrix products, %.0f %% in other kernels, %.0f %% outside of kernels\n",
        100 * gemm / all, 100 * (known - gemm) / all, 100 * (all - known) / all);
    printf("  the most:");
    for (int k = 0; k < 8; k++) {
        int best = -1;
        for (int i = 0; i < TSR_OP_COUNT; i++) {
            best = !told[i] && (best < 0 || spent[i] > spent[best]) ? i : best;
        }
        told[best] = true;
        printf(" %s %.0f %%", tsr_op_name((tsr_op_id)best), 100 * spent[best] / all);
    }
    printf("\n");
}

/* ---- a model on random tokens ------------------------------------------------------------------------------------ */

typedef struct subject {
    tsr_recipe *r;
    tsr_weight_source src;
    tsr_backend *b;
    tsr_model *m;
    int32_t *ids;
    int64_t n;
    int64_t seg[2];
} subject;

static void open_subject(subject *s, const char *recipe, int64_t n, bool recompute, int threads)
{
    tsr_err err;
    uint64_t rng = 5;
    tsr_model_opts o = { .train = true, .recompute = recompute, .max_tokens = n, .max_segs = 1 };
    *s = (subject){ .n = n, .seg = { 0, n } };
    CHECK_OK(tsr_recipe_load(&s->r, recipe, NULL, 0, &err));
    CHECK_OK(tsr_init_source(&s->src, s->r->spec, s->r->seed, s->r->init_std, &err));
    CHECK_OK(tsr_backend_open(&s->b, "auto", threads, &err));
    CHECK_OK(tsr_model_open(&s->m, s->r->spec, &s->src, &o, s->b, NULL, &err));
    s->ids = malloc((size_t)(n + 1) * sizeof *s->ids);
    CHECK(s->ids != NULL);
    for (int64_t i = 0; i <= n; i++) {
        s->ids[i] = (int32_t)(bag_random(&rng) % (uint64_t)s->r->spec->vocab);
    }
}

static void close_subject(subject *s)
{
    tsr_model_close(&s->m);
    tsr_backend_close(&s->b);
    tsr_init_source_done(&s->src);
    tsr_recipe_free(&s->r);
    free(s->ids);
}

static void forward_backward(subject *s)
{
    tsr_err err;
    tsr_loss loss;
    tsr_batch b = { .ids = s->ids, .targets = s->ids + 1, .seg = s->seg, .n = s->n, .segs = 1 };
    CHECK_OK(tsr_model_zero_grads(s->m, &err));
    CHECK_OK(tsr_model_loss(s->m, &b, &loss, &err));
    CHECK_OK(tsr_model_backward(s->m, 1 / (double)s->n, &err));
}

/* ---- memory ------------------------------------------------------------------------------------------------------- */

static uint64_t peak_bytes(void)
{
    struct rusage u;
    (void)getrusage(RUSAGE_SELF, &u);
    return (uint64_t)u.ru_maxrss * 1024;
}

/* The peak of a process that runs one sequence, beyond what it had before the model was opened; 0: it failed. */
static uint64_t real_bytes(const char *recipe, int64_t n, bool recompute, int threads)
{
    int ends[2];
    uint64_t used = 0;
    CHECK(pipe(ends) == 0);
    (void)fflush(stdout);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        subject s;
        uint64_t before = peak_bytes();
        open_subject(&s, recipe, n, recompute, threads);
        forward_backward(&s);
        used = peak_bytes() - before;
        _exit(write(ends[1], &used, sizeof used) == (ssize_t)sizeof used ? 0 : 1);
    }
    (void)close(ends[1]);
    if (read(ends[0], &used, sizeof used) != (ssize_t)sizeof used) {
        used = 0;
    }
    (void)close(ends[0]);
    (void)waitpid(pid, NULL, 0);
    return used;
}

static void plan_of(tsr_plan *out, const tsr_recipe *r, int64_t n, bool recompute)
{
    tsr_err err;
    tsr_backend *b;
    tsr_weight_source src;
    tsr_model_opts o = { .train = true, .recompute = recompute, .max_tokens = n, .max_segs = 1 };
    CHECK_OK(tsr_init_source(&src, r->spec, r->seed, r->init_std, &err));
    CHECK_OK(tsr_backend_open(&b, "auto", 1, &err));
    CHECK_OK(tsr_model_plan(out, r->spec, &src, &o, b, 1, TSR_DT_F32, &err));
    tsr_backend_close(&b);
    tsr_init_source_done(&src);
}

static void memory(const char *recipe, int64_t most, int threads)
{
    static const int64_t sizes[] = { 8192, 65536, 262144 };
    tsr_err err;
    tsr_recipe *r;
    CHECK_OK(tsr_recipe_load(&r, recipe, NULL, 0, &err));
    printf("memory of one sequence, %s\n", recipe);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        double kept = 0;
        for (int again = 0; again < 2; again++) {
            tsr_plan p;
            plan_of(&p, r, sizes[i], again == 1);
            double all = (double)(p.weights + p.experts + p.grads + p.workspace), each;
            each = (double)p.workspace / (double)sizes[i];
            kept = again == 0 ? each : kept;
            printf("  %7lld tokens, %s: plan %.1f MB, workspace %.0f bytes a token", (long long)sizes[i],
                   again == 1 ? "recompute" : "kept     ", all / 1e6, each);
            if (again == 1) {
                printf(" (%.2f of kept)", each / kept);
            }
            if (sizes[i] <= most) {
                double used = (double)real_bytes(recipe, sizes[i], again == 1, threads);
                printf("; peak %.1f MB, %.2f of the plan", used / 1e6, used / all);
            }
            printf("\n");
            (void)fflush(stdout);
        }
    }
    tsr_recipe_free(&r);
}

/* ---- speed --------------------------------------------------------------------------------------------------------- */

typedef struct limit {
    float *a, *c;
} limit;

static void gemm_part(void *payload, int64_t i, int worker)
{
    const limit *l = payload;
    (void)worker;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, GEMM, GEMM, GEMM, 1.0f, l->a, GEMM,
                l->a + (size_t)GEMM * GEMM, GEMM, 0.0f, l->c + (size_t)i * GEMM * GEMM, GEMM);
}

static double gemm_rate(tsr_backend *b, limit *l)
{
    double t = bench_now();
    tsr_parallel(b->queue, b->threads, gemm_part, l);
    return 2.0 * GEMM * GEMM * GEMM * b->threads / (bench_now() - t);
}

/* Of a forward and backward: 6 for each active parameter and token, and what attention does between tokens, 3 times its forward: the
 * causal half of MLA's products, and three products of a head's state in delta attention, as if it went token by token. */
static double flops_of(const tsr_spec *s, int64_t n, double *attention)
{
    tsr_spec_sizes size;
    tsr_err err;
    CHECK_OK(tsr_spec_sizes_of(s, &size, &err));
    *attention = 0;
    for (int32_t i = 0; i < s->layers; i++) {
        double pairs = (double)n * (double)(n + 1) / 2;
        *attention += s->layer_kind[i] == TSR_LAYER_MLA
                          ? 3 * pairs * 2 * (double)(s->mla_heads * (s->qk_nope + s->qk_rope + s->v_head))
                          : 3 * (double)n * 6 * (double)(s->kda_heads * s->kda_head_dim * s->kda_head_dim);
    }
    return 6 * (double)size.params_active * (double)n + *attention;
}

static double timed_update(optim *o)
{
    tsr_err err;
    double t = bench_now();
    CHECK_OK(optim_step(o, 1e-4, 1, 1, &err));
    return bench_now() - t;
}

static void speed(const char *recipe, int threads)
{
    tsr_err err;
    tsr_recipe *first;
    CHECK_OK(tsr_recipe_load(&first, recipe, NULL, 0, &err));
    int64_t n = first->stage[0].context, batch = first->stage[0].batch_tokens;
    bool recompute = first->stage[0].recompute;
    tsr_recipe_free(&first);
    subject s;
    open_subject(&s, recipe, n, recompute, threads);
    tsr_dist *self;
    optim o;
    CHECK_OK(tsr_dist_self_open(&self, &err));
    CHECK_OK(optim_open(&o, s.m, s.r, self, self, &err));
    limit l = { malloc((size_t)2 * GEMM * GEMM * sizeof(float)),
                malloc((size_t)s.b->threads * GEMM * GEMM * sizeof(float)) };
    CHECK(l.a != NULL && l.c != NULL);
    bench_gauss(l.a, (uint64_t)2 * GEMM * GEMM, 1);
    double g[ROUNDS], f[ROUNDS], u[ROUNDS], attention, all = 0;
    forward_backward(&s); /* warm */
    (void)timed_update(&o);
    (void)gemm_rate(s.b, &l);
    watch_ops(s.b);
    for (int i = 0; i < ROUNDS; i++) {
        g[i] = gemm_rate(s.b, &l);
        double t = bench_now();
        forward_backward(&s);
        f[i] = bench_now() - t;
        all += f[i];
    }
    double flops = flops_of(s.r->spec, n, &attention), tf = bench_median(f, ROUNDS),
           tg = bench_median(g, ROUNDS);
    printf("speed, %s: %d threads, %s, sequences of %lld tokens\n", recipe, s.b->threads, s.b->name,
           (long long)n);
    printf("  forward and backward: %.0f tokens/s; %.2f GFLOP a sequence, %.0f %% of it attention; %.1f "
           "GFLOP/s, "
           "%.0f %% of sgemm's %.1f\n",
           (double)n / tf, flops / 1e9, 100 * attention / flops, flops / tf / 1e9, 100 * flops / tf / tg,
           tg / 1e9);
    print_shares(all);
    for (int i = 0; i < ROUNDS; i++) {
        u[i] = timed_update(&o);
    }
    double tu = bench_median(u, ROUNDS), step = (double)batch / (double)n * tf + tu;
    printf("  update: %.3f s, %.0f %% of a step of %lld tokens; the step: %.0f tokens/s\n", tu,
           100 * tu / step, (long long)batch, (double)batch / step);
    free(l.a);
    free(l.c);
    optim_close(&o);
    tsr_dist_close(&self);
    close_subject(&s);
}

int main(int argc, char **argv)
{
    if (argc < 3) {
        (void)fprintf(stderr, "usage: bench_train TINY.yaml RECIPE.yaml [TOKENS [THREADS]]\n");
        return 2;
    }
    int64_t most = argc > 3 ? strtoll(argv[3], NULL, 10) : 16384;
    int threads = argc > 4 ? (int)strtol(argv[4], NULL, 10) : 0;
    memory(argv[1], most, threads);
    speed(argv[2], threads);
    return 0;
}
