/* Replaces a CUDA driver and its device. It is preloaded into a process that has neither, so that torch's CUDA build runs the code that it
   runs on an H100, and the compiler writes its code for an H100. Memory consists of addresses without bytes, and nothing can be launched.
   Functions that are missing here are those of the real libcudart, which refuses the call because there is no driver. Signatures are those
   of CUDA 13. */
#include <cuda_runtime_api.h>
#include <string.h>

#define OK cudaSuccess

cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return OK; }
cudaError_t cudaGetDevice(int *device) { *device = 0; return OK; }
cudaError_t cudaSetDevice(int device) { return OK; }
cudaError_t cudaGetLastError(void) { return OK; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return OK; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return OK; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = 0; return OK; }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *of, int device) {
    memset(of, 0, sizeof *of);
    strcpy(of->name, "NVIDIA H100 80GB HBM3");
    of->major = 9;
    of->totalGlobalMem = 80ul << 30;
    of->multiProcessorCount = 132;
    of->warpSize = 32;
    of->maxThreadsPerBlock = 1024;
    of->maxThreadsPerMultiProcessor = 2048;
    of->regsPerBlock = of->regsPerMultiprocessor = 65536;
    of->sharedMemPerBlock = 48 << 10;
    of->sharedMemPerBlockOptin = 227 << 10;
    of->sharedMemPerMultiprocessor = 228 << 10;
    of->l2CacheSize = 50 << 20;
    return OK;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return OK; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    static char handles[1024], *next = handles;
    *stream = (cudaStream_t)next++;
    return OK;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return OK; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) { *status = cudaStreamCaptureStatusNone; return OK; }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count) {
    *status = cudaStreamCaptureStatusNone;
    return OK;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return OK; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { *event = (cudaEvent_t)1; return OK; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return OK; }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return OK; }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) { return OK; }

cudaError_t cudaMalloc(void **memory, size_t bytes) {
    static size_t next = 1ul << 40;
    *memory = (void *)next;
    next += (bytes + (1 << 20)) >> 20 << 20;
    return OK;
}
cudaError_t cudaFree(void *memory) { return OK; }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return kind == cudaMemcpyDeviceToHost ? cudaErrorInsufficientDriver : OK; /* any value that is read would be meaningless */
}

/* The driver itself: torch loads libcuda.so.1, which is the name of this library, and looks up these functions; it calls only one. */
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }

#define REFUSED(name) int name(void) { return cudaErrorInsufficientDriver; }
REFUSED(cuCtxGetCurrent) REFUSED(cuCtxSetCurrent) REFUSED(cuDeviceGet) REFUSED(cuDeviceGetAttribute) REFUSED(cuDevicePrimaryCtxRetain)
REFUSED(cuFuncGetAttribute) REFUSED(cuFuncSetAttribute) REFUSED(cuFuncSetCacheConfig) REFUSED(cuGetErrorString)
REFUSED(cuLaunchCooperativeKernel) REFUSED(cuLaunchKernel) REFUSED(cuLinkAddData_v2) REFUSED(cuLinkComplete) REFUSED(cuLinkCreate_v2)
REFUSED(cuModuleGetFunction) REFUSED(cuModuleLoad) REFUSED(cuModuleLoadData) REFUSED(cuModuleLoadDataEx) REFUSED(cuModuleUnload)
REFUSED(cuOccupancyMaxActiveBlocksPerMultiprocessor) REFUSED(cuPointerGetAttribute) REFUSED(cuTensorMapEncodeTiled)
