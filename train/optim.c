/* optim.c - see optim.h. Updates themselves are kernels (kernels/ops/optim.h). */
#include "train/optim.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ALIGN 64

/* ---- which optimizer --------------------------------------------------------------------------------------------- */

static const char *leaf_of(const char *name)
{
    const char *dot = strncmp(name, "layers.", 7) == 0 ? strchr(name + 7, '.') : NULL;
    return dot != NULL ? dot + 1 : name;
}

static bool matrix(const tsr_param *p)
{
    return p->rank == 2 && p->shape[0] > 1 && p->shape[1] > 1;
}

/* Matrices of attention, MLP, latent projections and experts; not embedding, head and router. */
static bool hidden_matrix(const tsr_param *p)
{
    return matrix(p) && p->layer >= 0 && strcmp(leaf_of(p->name), "moe.router.weight") != 0;
}

/* Queries, keys and values are orthogonalised head by head. */
static int64_t heads_of(const tsr_param *p, const tsr_spec *s)
{
    static const char *const kda[] = { "attn.q.weight", "attn.k.weight", "attn.v.weight" };
    const char *leaf = leaf_of(p->name);
    bool full = s->layer_kind[p->layer] == TSR_LAYER_MLA;
    if (full) {
        bool per_head = strcmp(leaf, "attn.q_b.weight") == 0 || strcmp(leaf, "attn.kv_b.weight") == 0 ||
                        strcmp(leaf, "attn.q.weight") == 0;
        return per_head ? s->mla_heads : 1;
    }
    for (size_t i = 0; i < sizeof kda / sizeof *kda; i++) {
        if (strcmp(leaf, kda[i]) == 0) {
            return s->kda_heads;
        }
    }
    return 1;
}

static void choose(optim_param *q, const tsr_param *p, const tsr_recipe *r)
{
    bool hidden = hidden_matrix(p);
    q->p = p;
    q->o = hidden ? &r->matrices : &r->others;
    q->decays = matrix(p);
    if (!hidden || q->o->kind != TSR_OPTIM_MUON) {
        return;
    }
    int64_t heads = p->expert_count == 0 && q->o->per_head ? heads_of(p, r->spec) : 1;
    q->count = (p->expert_count > 0 ? p->expert_count : 1) * heads;
    q->rows = p->shape[0] / heads;
    q->cols = p->shape[1];
}

static tsr_muon_args muon_args(const optim_param *q)
{
    return (tsr_muon_args){ .w = q->p->data,
                            .m = q->m,
                            .g = q->p->grad,
                            .count = q->count,
                            .rows = q->rows,
                            .cols = q->cols,
                            .mu = q->o->momentum,
                            .nesterov = q->o->nesterov };
}

/* The largest first, each to the rank that has least. */
typedef struct load {
    int64_t index;
    int64_t count;
} load;

static int larger_first(const void *a, const void *b)
{
    const load *x = a, *y = b;
    return x->count != y->count ? (x->count < y->count) - (x->count > y->count)
                                : (x->index > y->index) - (x->index < y->index);
}

static tsr_status share_out(optim *o, tsr_dist *group, tsr_err *err)
{
    load *list = malloc((size_t)(o->count + 1) * sizeof *list);
    int64_t *has = calloc((size_t)group->ranks, sizeof *has), n = 0;
    if (list == NULL || has == NULL) {
        free(list);
        free(has);
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    for (int64_t i = 0; i < o->count; i++) {
        if (o->list[i].group == group) {
            list[n++] = (load){ i, o->list[i].p->count };
        }
    }
    qsort(list, (size_t)n, sizeof *list, larger_first);
    for (int64_t i = 0; i < n; i++) {
        int32_t best = 0;
        for (int32_t k = 1; k < group->ranks; k++) {
            best = has[k] < has[best] ? k : best;
        }
        has[best] += list[i].count;
        o->list[list[i].index].owner = best;
        o->list[list[i].index].mine = best == group->rank;
    }
    free(list);
    free(has);
    return TSR_OK;
}

static tsr_status take_memory(optim *o, tsr_err *err)
{
    for (int64_t i = 0; i < o->count; i++) {
        optim_param *q = &o->list[i];
        uint64_t one = tsr_align_up((uint64_t)q->p->count * sizeof(float), ALIGN);
        if (q->mine && q->count > 0) {
            tsr_muon_args a = muon_args(q);
            size_t need = tsr_muon_workspace(&a);
            o->workspace_bytes = need > o->workspace_bytes ? need : o->workspace_bytes;
        }
        o->state_bytes += q->mine ? one * (q->count > 0 ? 1 : 2) : 0;
    }
    tsr_backend *b = o->b;
    if (b->alloc(b, &o->state, o->state_bytes) != TSR_OK || b->zero(b, o->state, o->state_bytes) != TSR_OK ||
        b->alloc(b, &o->workspace, o->workspace_bytes) != TSR_OK ||
        b->alloc(b, (void **)&o->sum, sizeof *o->sum) != TSR_OK) {
        TSR_FAIL(err, TSR_E_LIMIT, "%s: out of memory: the optimizer takes %llu bytes", b->name,
                 (unsigned long long)(o->state_bytes + o->workspace_bytes));
    }
    char *at = o->state;
    for (int64_t i = 0; i < o->count; i++) {
        optim_param *q = &o->list[i];
        size_t one = tsr_align_up((uint64_t)q->p->count * sizeof(float), ALIGN);
        if (q->mine) {
            q->m = (float *)(void *)at;
            q->v = q->count > 0 ? NULL : (float *)(void *)(at + one);
            at += one * (q->count > 0 ? 1 : 2);
        }
    }
    return TSR_OK;
}

tsr_status optim_open(optim *out, tsr_model *m, const tsr_recipe *r, tsr_dist *all, tsr_dist *copies,
                      tsr_err *err)
{
    *out = (optim){ .b = NULL };
    out->list = calloc((size_t)tsr_model_param_count(m), sizeof *out->list);
    if (out->list == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    for (int64_t i = 0; i < tsr_model_param_count(m); i++) {
        const tsr_param *p = tsr_model_param(m, i);
        if (p->grad != NULL) {
            optim_param *q = &out->list[out->count++];
            choose(q, p, r);
            q->group = p->expert_count > 0 ? copies : all;
        }
    }
    out->b = tsr_model_backend(m);
    out->all = all;
    out->copies = copies;
    TSR_TRY(share_out(out, all, err));
    if (copies != all) {
        TSR_TRY(share_out(out, copies, err));
    }
    return take_memory(out, err);
}

void optim_close(optim *o)
{
    void *const blocks[] = { o->state, o->workspace, o->sum };
    for (size_t i = 0; o->b != NULL && i < sizeof blocks / sizeof *blocks; i++) {
        if (blocks[i] != NULL) {
            o->b->release(o->b, blocks[i]);
        }
    }
    free(o->list);
    *o = (optim){ .b = NULL };
}

/* ---- frozen parameters ------------------------------------------------------------------------------------------- */

bool optim_matches(const char *pattern, const char *name)
{
    const char *star = NULL, *back = NULL;
    while (*name != '\0') {
        if (*pattern == '*') {
            star = pattern++;
            back = name;
        } else if (*pattern == '?' || *pattern == *name) {
            pattern++;
            name++;
        } else if (star != NULL) {
            pattern = star + 1;
            name = ++back;
        } else {
            return false;
        }
    }
    while (*pattern == '*') {
        pattern++;
    }
    return *pattern == '\0';
}

bool optim_frozen(const tsr_stage *s, const char *name)
{
    for (int32_t k = 0; k < s->freeze_count; k++) {
        if (optim_matches(s->freeze[k], name)) {
            return true;
        }
    }
    return false;
}

void optim_freeze(optim *o, const tsr_stage *s)
{
    for (int64_t i = 0; i < o->count; i++) {
        o->list[i].frozen = optim_frozen(s, o->list[i].p->name);
    }
}

/* ---- one step ------------------------------------------------------------------------------------------------------ */

tsr_status optim_start_reduce(optim *o, int32_t layer, tsr_err *err)
{
    for (int64_t i = 0; i < o->count; i++) {
        optim_param *q = &o->list[i];
        if (q->p->layer == layer && !q->frozen && q->group->ranks > 1) {
            TSR_TRY(q->group->start_reduce(q->group, q->p->grad, (size_t)q->p->count, q->owner, err));
        }
    }
    o->all->poll(o->all);
    o->copies->poll(o->copies);
    return TSR_OK;
}

tsr_status optim_finish_reduce(optim *o, tsr_err *err)
{
    TSR_TRY(o->all->finish(o->all, err));
    return o->copies->finish(o->copies, err);
}

tsr_status optim_norm(optim *o, tsr_dist *all, double *out, tsr_err *err)
{
    double sum;
    bool failed = o->b->zero(o->b, o->sum, sizeof *o->sum) !=
                  TSR_OK; /* each number has one owner among all ranks */
    for (int64_t i = 0; !failed && i < o->count; i++) {
        const optim_param *q = &o->list[i];
        if (q->mine && !q->frozen) {
            tsr_sum_squares_args a = { .out = o->sum, .x = q->p->grad, .n = q->p->count };
            failed = tsr_sum_squares(o->b, &a) != TSR_OK;
        }
    }
    if (failed || o->b->download(o->b, &sum, o->sum, sizeof sum) != TSR_OK) {
        TSR_FAIL(err, TSR_E_IO, "%s: %s", o->b->name, tsr_backend_trouble(o->b));
    }
    TSR_TRY(all->all_reduce(all, &sum, 1, TSR_SUM_F64, err));
    *out = sqrt(sum);
    return TSR_OK;
}

static tsr_status update(optim *o, optim_param *q, double lr, double decay, double scale)
{
    q->updates++;
    if (q->count > 0) {
        tsr_muon_args a = muon_args(q);
        a.lr = lr;
        a.decay = decay;
        a.grad_scale = scale;
        a.workspace = o->workspace;
        a.workspace_bytes = o->workspace_bytes;
        return tsr_muon(o->b, &a);
    }
    tsr_adamw_args a = { .w = q->p->data,
                         .m = q->m,
                         .v = q->v,
                         .g = q->p->grad,
                         .n = q->p->count,
                         .t = q->updates,
                         .lr = lr,
                         .b1 = q->o->beta1,
                         .b2 = q->o->beta2,
                         .eps = q->o->eps,
                         .decay = decay,
                         .grad_scale = scale };
    return tsr_adamw(o->b, &a);
}

tsr_status optim_step(optim *o, double lr, double decay_factor, double grad_scale, tsr_err *err)
{
    for (int64_t i = 0; i < o->count; i++) {
        optim_param *q = &o->list[i];
        double decay = q->decays ? q->o->weight_decay * decay_factor : 0;
        if (q->frozen) {
            continue;
        }
        if (!q->mine) {
            q->updates++;
        } else if (update(o, q, lr * q->o->lr_scale, decay, grad_scale) != TSR_OK) {
            TSR_FAIL(err, TSR_E_IO, "%s: %s", o->b->name, tsr_backend_trouble(o->b));
        }
    }
    if (o->b->sync(o->b) != TSR_OK) {
        TSR_FAIL(err, TSR_E_IO, "%s: %s", o->b->name, tsr_backend_trouble(o->b));
    }
    for (int64_t i = 0; i < o->count; i++) {
        optim_param *q = &o->list[i];
        if (!q->frozen && q->group->ranks > 1) {
            TSR_TRY(q->group->broadcast(q->group, q->p->data, (size_t)q->p->count * sizeof(float), q->owner,
                                        err));
        }
    }
    return TSR_OK;
}

const char *optim_state_name(const optim_param *p, int which)
{
    static const char *const adamw[] = { "exp_avg", "exp_avg_sq" };
    return p->count > 0 ? (which == 0 ? "momentum" : NULL) : which < 2 ? adamw[which] : NULL;
}

float *optim_state_of(const optim_param *p, int which)
{
    return which == 0 ? p->m : p->v;
}
