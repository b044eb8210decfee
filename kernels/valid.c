/* valid.c - the contract of each op, as far as sizes and pointers tell, stated once for every backend. */
#include "kernels/kernels.h"

static bool glu(tsr_glu kind, float b1, float b2)
{
    return kind == TSR_GLU_SWIGLU || (kind == TSR_GLU_SITU && b1 > 0 && b2 > 0);
}

static bool format(tsr_dtype dt, int64_t cols, bool has_scale)
{
    switch (dt) {
    case TSR_DT_F32:
    case TSR_DT_BF16:
    case TSR_DT_F16: return true;
    case TSR_DT_MXFP4: return has_scale && cols % 32 == 0;
    case TSR_DT_F8_E4M3: return has_scale;
    default: return false;
    }
}

static bool weight(const tsr_weight *w)
{
    return w->data && w->rows > 0 && w->cols > 0 && format(w->dtype, w->cols, w->scale != NULL);
}

static bool stride(int64_t s, int64_t width)
{
    return s == 0 || s >= width;
}

static bool segments(const int64_t *seg, int64_t segs, int64_t n)
{
    return n >= 0 && segs >= 0 && seg && (n == 0 || segs > 0);
}

static bool chunk(int64_t c)
{
    return c == 16 || c == 32 || c == 64;
}

bool tsr_add_valid(const tsr_add_args *a)
{
    return a->n >= 0 && (a->n == 0 || (a->y && a->a && a->b));
}

bool tsr_copy2d_valid(const tsr_copy2d_args *a)
{
    return a->n >= 0 && (a->n == 0 || (a->dst && a->src)) && a->d > 0 && a->dst_stride >= a->d &&
           a->src_stride >= a->d && (a->dtype == TSR_DT_F32 || a->dtype == TSR_DT_BF16);
}

bool tsr_sigmoid_fwd_valid(const tsr_sigmoid_fwd_args *a)
{
    return a->n >= 0 && (a->n == 0 || (a->y && a->x));
}

bool tsr_sigmoid_bwd_valid(const tsr_sigmoid_bwd_args *a)
{
    return a->n >= 0 && (a->n == 0 || (a->dx && a->dy && a->y));
}

bool tsr_gate_fwd_valid(const tsr_gate_fwd_args *a)
{
    return a->n >= 0 && (a->n == 0 || (a->y && a->x && a->g));
}

bool tsr_gate_bwd_valid(const tsr_gate_bwd_args *a)
{
    return a->n >= 0 && (a->n == 0 || (a->dx && a->dg && a->dy && a->x && a->g));
}

bool tsr_glu_fwd_valid(const tsr_glu_fwd_args *a)
{
    return a->n >= 0 && (a->n == 0 || (a->y && a->g && a->u)) && glu(a->kind, a->b1, a->b2);
}

bool tsr_glu_bwd_valid(const tsr_glu_bwd_args *a)
{
    return a->n >= 0 && (a->n == 0 || (a->dg && a->du && a->dy && a->g && a->u)) &&
           glu(a->kind, a->b1, a->b2);
}

bool tsr_sum_squares_valid(const tsr_sum_squares_args *a)
{
    return a->n >= 0 && (a->out && (a->n == 0 || a->x));
}

bool tsr_rmsnorm_fwd_valid(const tsr_rmsnorm_fwd_args *a)
{
    return a->n >= 0 && (a->n == 0 || (a->y && a->x)) && a->d > 0 && a->x_stride >= a->d &&
           a->y_stride >= a->d && a->eps > 0;
}

bool tsr_rmsnorm_bwd_valid(const tsr_rmsnorm_bwd_args *a)
{
    return a->n >= 0 && (a->n == 0 || (a->dx && a->dy && a->x && a->rstd)) &&
           (a->w != NULL || a->dw == NULL) && a->d > 0 && a->x_stride >= a->d && a->dx_stride >= a->d &&
           a->dy_stride >= a->d && a->dx != a->x;
}

bool tsr_rmsnorm_gated_fwd_valid(const tsr_rmsnorm_gated_fwd_args *a)
{
    return a->n >= 0 && (a->n == 0 || (a->y && a->x && a->g && a->w)) && a->d > 0 && a->eps > 0;
}

bool tsr_rmsnorm_gated_bwd_valid(const tsr_rmsnorm_gated_bwd_args *a)
{
    return a->n >= 0 && (a->n == 0 || (a->dx && a->dg && a->dy && a->x && a->g && a->w && a->rstd)) &&
           a->dw && a->d > 0;
}

bool tsr_l2norm_fwd_valid(const tsr_l2norm_fwd_args *a)
{
    return a->n >= 0 && (a->n == 0 || (a->y && a->x)) && a->d > 0 && a->eps > 0;
}

bool tsr_l2norm_bwd_valid(const tsr_l2norm_bwd_args *a)
{
    return a->n >= 0 && (a->n == 0 || (a->dx && a->dy && a->x && a->rstd)) && a->d > 0;
}

bool tsr_embed_fwd_valid(const tsr_embed_fwd_args *a)
{
    return a->n >= 0 && (a->n == 0 || (a->y && a->table && a->ids)) && a->d > 0 && a->v > 0 &&
           (a->dtype == TSR_DT_F32 || a->dtype == TSR_DT_BF16);
}

bool tsr_embed_bwd_valid(const tsr_embed_bwd_args *a)
{
    return a->n >= 0 && (a->dtable && (a->n == 0 || (a->dy && a->ids)) && a->d > 0 && a->v > 0);
}

bool tsr_attnres_fwd_valid(const tsr_attnres_fwd_args *a)
{
    return a->n >= 0 && (a->n == 0 || (a->y && a->bank && a->cur)) && a->norm && a->proj && a->d > 0 &&
           a->s >= 1 && a->bank_stride >= a->n * a->d && a->eps > 0;
}

bool tsr_attnres_bwd_valid(const tsr_attnres_bwd_args *a)
{
    return a->n >= 0 &&
           (a->n == 0 || (a->dbank && a->dcur && a->dy && a->p && a->rstd && a->bank && a->cur)) &&
           a->dnorm && a->dproj && a->norm && a->proj && a->d > 0 && a->s >= 1 &&
           a->bank_stride >= a->n * a->d && a->dbank_stride >= a->n * a->d;
}

bool tsr_xent_fwd_valid(const tsr_xent_fwd_args *a)
{
    return a->n >= 0 && (a->n == 0 || (a->loss && a->lse && a->logits && a->target)) && a->v > 0;
}

bool tsr_xent_bwd_valid(const tsr_xent_bwd_args *a)
{
    return a->n >= 0 && (a->n == 0 || (a->dlogits && a->logits && a->lse && a->target)) && a->v > 0;
}

bool tsr_gemm_nt_valid(const tsr_gemm_nt_args *a)
{
    return a->m >= 0 && (a->m == 0 || (a->y && a->x)) && weight(&a->w) && stride(a->x_stride, a->w.cols) &&
           stride(a->y_stride, a->w.rows) && a->y != a->x;
}

bool tsr_gemm_nn_valid(const tsr_gemm_nn_args *a)
{
    return a->m >= 0 && (a->m == 0 || (a->dx && a->dy)) && weight(&a->w) && stride(a->dy_stride, a->w.rows) &&
           stride(a->dx_stride, a->w.cols) && a->dx != a->dy;
}

bool tsr_gemm_tn_valid(const tsr_gemm_tn_args *a)
{
    return a->m >= 0 && (a->dw && (a->m == 0 || (a->dy && a->x)) && a->n > 0 && a->k > 0 &&
                         stride(a->dy_stride, a->n) && stride(a->x_stride, a->k));
}

bool tsr_ggemm_nt_valid(const tsr_ggemm_nt_args *a)
{
    return a->m >= 0 && (a->m == 0 || (a->y && a->x)) && a->offset && a->data && a->e_count > 0 && a->n > 0 &&
           a->k > 0 && format(a->dtype, a->k, a->scale != NULL);
}

bool tsr_ggemm_nn_valid(const tsr_ggemm_nn_args *a)
{
    return a->m >= 0 && (a->m == 0 || (a->dx && a->dy)) && a->offset && a->data && a->e_count > 0 &&
           a->n > 0 && a->k > 0 && format(a->dtype, a->k, a->scale != NULL);
}

bool tsr_ggemm_tn_valid(const tsr_ggemm_tn_args *a)
{
    return a->m >= 0 &&
           (a->dw && a->offset && (a->m == 0 || (a->dy && a->x)) && a->e_count > 0 && a->n > 0 && a->k > 0);
}

bool tsr_gemm_heads_valid(const tsr_gemm_heads_args *a)
{
    return a->m >= 0 && (a->m == 0 || (a->y && a->x)) && weight(&a->w) &&
           (a->w.dtype == TSR_DT_F32 || a->w.dtype == TSR_DT_BF16) && a->heads > 0 && a->in > 0 &&
           a->out > 0 && a->row0 >= 0 && (a->transposed ? a->out == a->w.cols : a->in == a->w.cols) &&
           a->row0 + (a->heads - 1) * a->row_step + (a->transposed ? a->in : a->out) <= a->w.rows;
}

bool tsr_conv_fwd_valid(const tsr_conv_fwd_args *a)
{
    return segments(a->seg, a->segs, a->n) && (a->n == 0 || (a->y && a->x)) && a->w && a->c > 0 &&
           a->kw > 0 && a->x_stride >= a->c && a->y_stride >= a->c && a->y != a->x;
}

bool tsr_conv_bwd_valid(const tsr_conv_bwd_args *a)
{
    return segments(a->seg, a->segs, a->n) && (a->n == 0 || (a->dx && a->dy && a->x)) && a->dw && a->w &&
           a->c > 0 && a->kw > 0 && a->x_stride >= a->c && a->dy_stride >= a->c && a->dx_stride >= a->c &&
           a->dx != a->dy;
}

bool tsr_kda_gate_fwd_valid(const tsr_kda_gate_fwd_args *a)
{
    return a->n >= 0 && (a->n == 0 || (a->g && a->z)) && a->dt_bias && a->a_log && a->h > 0 && a->d > 0 &&
           a->lower <= 0;
}

bool tsr_kda_gate_bwd_valid(const tsr_kda_gate_bwd_args *a)
{
    return a->n >= 0 && (a->n == 0 || (a->dz && a->dg && a->z)) && a->ddt_bias && a->da_log && a->dt_bias &&
           a->a_log && a->h > 0 && a->d > 0 && a->lower <= 0;
}

bool tsr_kda_step_valid(const tsr_kda_step_args *a)
{
    return segments(a->seg, a->segs, a->n) &&
           (a->n == 0 || (a->o && a->q && a->k && a->v && a->g && a->beta)) && a->state && a->h > 0 &&
           a->dk > 0 && a->dv > 0;
}

bool tsr_kda_fwd_valid(const tsr_kda_fwd_args *a)
{
    return segments(a->seg, a->segs, a->n) &&
           (a->n == 0 || (a->o && a->q && a->k && a->v && a->g && a->beta)) && a->h > 0 && a->dk > 0 &&
           a->dv > 0 && chunk(a->chunk) && (a->io == TSR_DT_F32 || a->io == TSR_DT_BF16) &&
           a->workspace_bytes >= tsr_kda_fwd_workspace(a) && (a->workspace || a->workspace_bytes == 0);
}

bool tsr_kda_bwd_valid(const tsr_kda_bwd_args *a)
{
    return segments(a->seg, a->segs, a->n) &&
           (a->n == 0 || (a->dq && a->d_k && a->d_v && a->dg && a->dbeta && a->dout && a->q && a->k && a->v &&
                          a->g && a->beta && a->saved)) &&
           a->h > 0 && a->dk > 0 && a->dv > 0 && chunk(a->chunk) &&
           a->workspace_bytes >= tsr_kda_bwd_workspace(a) && (a->workspace || a->workspace_bytes == 0);
}

bool tsr_mla_fwd_valid(const tsr_mla_fwd_args *a)
{
    return segments(a->seg, a->segs, a->n) &&
           (a->n == 0 || (a->o && a->q && a->kv && (a->kr || a->dr == 0))) && a->h > 0 && a->dn > 0 &&
           a->dr >= 0 && a->dv > 0 && a->kr_stride >= a->dr;
}

bool tsr_mla_bwd_valid(const tsr_mla_bwd_args *a)
{
    return segments(a->seg, a->segs, a->n) &&
           (a->n == 0 || (a->dq && a->dkv && a->dout && a->o && a->lse && a->q && a->kv &&
                          ((a->kr && a->dkr) || a->dr == 0))) &&
           a->h > 0 && a->dn > 0 && a->dr >= 0 && a->dv > 0 && a->kr_stride >= a->dr &&
           a->dkr_stride >= a->dr;
}

bool tsr_mla_absorbed_valid(const tsr_mla_absorbed_args *a)
{
    return a->n >= 0 && (a->n == 0 || (a->ctx && a->q && a->cache)) && a->h > 0 && a->r > 0 && a->dr >= 0 &&
           a->past >= 0 && (a->dtype == TSR_DT_F32 || a->dtype == TSR_DT_BF16);
}

bool tsr_router_fwd_valid(const tsr_router_fwd_args *a)
{
    return a->n >= 0 && (a->n == 0 || (a->s && a->w && a->ids && a->logits)) && a->bias && a->e > 0 &&
           a->k > 0 && a->k <= a->e;
}

bool tsr_router_bwd_valid(const tsr_router_bwd_args *a)
{
    return a->n >= 0 && (a->n == 0 || (a->dlogits && a->dw && a->s && a->w && a->ids)) && a->e > 0 &&
           a->k > 0 && a->k <= a->e;
}

bool tsr_moe_plan_valid(const tsr_moe_plan_args *a)
{
    return a->n >= 0 && (a->offset && (a->n == 0 || (a->order && a->pos && a->ids)) && a->e > 0 && a->k > 0 &&
                         a->n <= INT32_MAX / a->k);
}

bool tsr_moe_gather_valid(const tsr_moe_gather_args *a)
{
    return a->n >= 0 && (a->n == 0 || (a->xs && a->x && a->order)) && a->k > 0 && a->d > 0;
}

bool tsr_moe_scatter_valid(const tsr_moe_scatter_args *a)
{
    return a->n >= 0 && (a->n == 0 || (a->dx && a->dxs && a->pos)) && a->k > 0 && a->d > 0;
}

bool tsr_moe_combine_fwd_valid(const tsr_moe_combine_fwd_args *a)
{
    return a->n >= 0 && (a->n == 0 || (a->u && a->y && a->w && a->pos)) && a->k > 0 && a->d > 0;
}

bool tsr_moe_combine_bwd_valid(const tsr_moe_combine_bwd_args *a)
{
    return a->n >= 0 && (a->n == 0 || (a->dy && a->dw && a->du && a->y && a->w && a->pos)) && a->k > 0 &&
           a->d > 0;
}

bool tsr_adamw_valid(const tsr_adamw_args *a)
{
    return a->n >= 0 && (a->n == 0 || (a->w && a->m && a->v && a->g)) && a->t >= 1 && a->eps > 0;
}

bool tsr_muon_valid(const tsr_muon_args *a)
{
    return (a->w && a->m && a->g && a->count > 0 && a->rows > 0 && a->cols > 0 && a->scale_dim >= 0 &&
            a->workspace_bytes >= tsr_muon_workspace(a) && (a->workspace || a->workspace_bytes == 0));
}

bool tsr_balance_exact_valid(const tsr_balance_exact_args *a)
{
    return a->n >= 0 && a->beta && a->s && a->n > 0 && a->e > 0 && a->k > 0 && a->k < a->e &&
           a->n * a->k >= a->e && a->n * a->k / a->e < a->n && a->rounds >= 0 && a->workspace &&
           a->workspace_bytes >= tsr_balance_exact_workspace(a);
}

bool tsr_balance_count_valid(const tsr_balance_count_args *a)
{
    return a->n >= 0 && (a->hist && a->bias && (a->n == 0 || a->s) && a->e > 0 && a->k > 0 && a->k < a->e &&
                         a->bins > 0 && a->low < a->high);
}

bool tsr_balance_solve_valid(const tsr_balance_solve_args *a)
{
    return a->bias && a->hist && a->tokens > 0 && a->e > 0 && a->k > 0 && a->k < a->e && a->bins > 0 &&
           a->low < a->high;
}

bool tsr_balance_sign_valid(const tsr_balance_sign_args *a)
{
    return a->bias && a->load && a->e > 0;
}
