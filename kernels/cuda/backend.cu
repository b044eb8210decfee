/* backend.cu - the backend "cuda": memory of the first GPU and one stream as its queue. The one door of the plugin,
 * tsr_cuda_open, is at the end. CUDA reports what went wrong in a kernel at a later call, so the first failure is kept in
 * words (tsr_backend.trouble), and all later calls fail: what is on the device can no longer be trusted. */
#include "kernels/cuda/cuda_priv.cuh"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef TSR_GPU_ARCH
#define TSR_GPU_ARCH "none"
#endif

namespace
{

const tsr_kernels kernels = {
#define TSR_OP(op, cpu, simd, cuda) TSR_OR_NULL_##cuda(tsr_cuda_##op),
#include "kernels/ops.def"
#undef TSR_OP
};

/* Launched once on opening: a GPU that this build has no code for is found out then. */
__global__ void nothing()
{
}

tsr_status cuda_alloc(tsr_backend *b, void **out, size_t bytes)
{
    *out = NULL;
    cudaError_t e = cudaMalloc(out, bytes > 0 ? bytes : 64); /* aligned at 256 */
    if (e != cudaSuccess) {
        *out = NULL;
        (void)cudaGetLastError(); /* or the next launch would be blamed */
    }
    return e == cudaErrorMemoryAllocation ? TSR_E_LIMIT : tsr_cuda_status(b->queue, e, "allocating memory");
}

/* Waits until nothing on the device uses it. */
void cuda_release(tsr_backend *b, void *p)
{
    (void)tsr_cuda_status(b->queue, cudaFree(p), "freeing memory"); /* the next call tells */
}

/* src is ordinary (pageable) memory: CUDA has copied it aside when the call returns, so it may change at once. */
tsr_status cuda_upload(tsr_backend *b, void *dst, const void *src, size_t bytes)
{
    if (bytes == 0) {
        return TSR_OK;
    }
    return tsr_cuda_status(b->queue,
                           cudaMemcpyAsync(dst, src, bytes, cudaMemcpyHostToDevice, b->queue->stream),
                           "copying to the GPU");
}

tsr_status cuda_sync(tsr_backend *b)
{
    return tsr_cuda_status(b->queue, cudaStreamSynchronize(b->queue->stream), "waiting for the GPU");
}

tsr_status cuda_download(tsr_backend *b, void *dst, const void *src, size_t bytes)
{
    if (bytes > 0) {
        TSR_TRY(tsr_cuda_status(b->queue,
                                cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToHost, b->queue->stream),
                                "copying from the GPU"));
    }
    return cuda_sync(b);
}

tsr_status cuda_zero(tsr_backend *b, void *dst, size_t bytes)
{
    if (bytes == 0) {
        return TSR_OK;
    }
    return tsr_cuda_status(b->queue, cudaMemsetAsync(dst, 0, bytes, b->queue->stream), "clearing memory");
}

void cuda_destroy(tsr_backend *b)
{
    if (b->queue->stream != NULL) {
        (void)cudaStreamSynchronize(b->queue->stream); /* nobody is left to tell */
        (void)cudaStreamDestroy(b->queue->stream);
    }
    free(b->queue);
    free(b);
}

/* A backend without a stream; NULL when the process is out of memory. */
tsr_backend *make()
{
    tsr_backend *b = (tsr_backend *)calloc(1, sizeof *b);
    tsr_queue *q = (tsr_queue *)calloc(1, sizeof *q);
    if (b == NULL || q == NULL) {
        free(b);
        free(q);
        return NULL;
    }
    b->name = "cuda";
    b->k = kernels;
    b->queue = q;
    b->threads = 1;
    b->alloc = cuda_alloc;
    b->release = cuda_release;
    b->upload = cuda_upload;
    b->download = cuda_download;
    b->zero = cuda_zero;
    b->sync = cuda_sync;
    b->destroy = cuda_destroy;
    q->owner = b;
    return b;
}

tsr_status refuse(char *why, size_t bytes, cudaError_t e, const char *what)
{
    (void)snprintf(why, bytes, "%s: %s", what, cudaGetErrorString(e));
    (void)cudaGetLastError();
    return TSR_E_UNSUPPORTED;
}

tsr_status start(tsr_queue *q, char *why, size_t bytes)
{
    int count = 0; /* left as it is where there is no driver */
    cudaError_t e = cudaGetDeviceCount(&count);
    if (e == cudaSuccess && count == 0) {
        e = cudaErrorNoDevice;
    }
    if (e != cudaSuccess) {
        int driver = 0;
        bool none = cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0;
        return refuse(why, bytes, e, none ? "no driver for NVIDIA GPUs is installed" : "no GPU can be used");
    }
    e = cudaSetDevice(0);
    if (e == cudaSuccess) {
        e = cudaStreamCreateWithFlags(&q->stream, cudaStreamNonBlocking);
    }
    if (e != cudaSuccess) {
        q->stream = NULL;
        return refuse(why, bytes, e, "the GPU cannot be opened");
    }
    TSR_LAUNCH(nothing, 1, 1, q);
    e = cudaGetLastError();
    if (e == cudaSuccess) {
        e = cudaStreamSynchronize(q->stream);
    }
    return e == cudaSuccess
               ? TSR_OK
               : refuse(why, bytes, e, "the GPU does not run this build's code (for " TSR_GPU_ARCH ")");
}

} // namespace

tsr_status tsr_cuda_status(tsr_queue *q, cudaError_t e, const char *doing)
{
    if (e != cudaSuccess && q->owner->trouble == NULL) {
        (void)snprintf(q->trouble, sizeof q->trouble, "%s: %s", doing, cudaGetErrorString(e));
        q->owner->trouble = q->trouble;
    }
    return q->owner->trouble == NULL ? TSR_OK : TSR_E_IO;
}

extern "C" __attribute__((visibility("default"))) tsr_status
tsr_cuda_open(tsr_backend **out, const char *version, uint64_t layout, char *why, size_t why_bytes)
{
    *out = NULL;
    if (strcmp(version, TSR_VERSION) != 0 || layout != tsr_plugin_layout()) {
        (void)snprintf(why, why_bytes, "the plugin belongs to another build of Tessera (%s)", TSR_VERSION);
        return TSR_E_UNSUPPORTED;
    }
    tsr_backend *b = make();
    if (b == NULL) {
        (void)snprintf(why, why_bytes, "out of memory");
        return TSR_E_LIMIT;
    }
    tsr_status st = start(b->queue, why, why_bytes);
    if (st != TSR_OK) {
        cuda_destroy(b);
        return st;
    }
    *out = b;
    return TSR_OK;
}
