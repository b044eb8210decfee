/* tables.c - the tables of kernels, made from ops.def. */
#include "kernels/backend_priv.h"

const tsr_kernels tsr_cpu_kernels = {
#define TSR_OP(op, cpu, simd, cuda) .op = TSR_OR_NULL_##cpu(tsr_cpu_##op),
#include "kernels/ops.def"
#undef TSR_OP
};

#ifdef TSR_HAVE_SIMD
const tsr_kernels tsr_avx2_kernels = {
#define TSR_OP(op, cpu, simd, cuda) .op = TSR_OR_NULL_##simd(tsr_avx2_##op),
#include "kernels/ops.def"
#undef TSR_OP
};

const tsr_kernels tsr_avx512_kernels = {
#define TSR_OP(op, cpu, simd, cuda) .op = TSR_OR_NULL_##simd(tsr_avx512_##op),
#include "kernels/ops.def"
#undef TSR_OP
};
#endif

const char *tsr_op_name(tsr_op_id id)
{
    static const char *const names[] = {
#define TSR_OP(op, cpu, simd, cuda) #op,
#include "kernels/ops.def"
#undef TSR_OP
    };
    return (unsigned)id < TSR_OP_COUNT ? names[id] : "?";
}
