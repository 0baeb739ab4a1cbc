/* The CUDA runtime over the driver of software (cuda_driver.c): libcudart.so.13, as far as PyTorch 2.11 calls it, and
libcudart.so.12, as far as TensorFlow 2.21 does.

Prototypes and structures are those of the headers that come with these builds. Each function does what its driver's
function does, in the primary context of the thread's device. Kernels are launched without a name: the
driver does nothing for them. NVIDIA's libcudart cannot be used: it wants proof that the driver is NVIDIA's. */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static __thread int device;
static __thread cudaError_t last;
static CUcontext contexts[16];
#define KERNEL ((CUfunction)16) /* of no name: cuda_driver.c */

static cudaError_t said(CUresult status) { /* the numbers of both enumerations are the same */
  if (status) last = (cudaError_t)status;
  return (cudaError_t)status;
}
static CUresult enter(void) { /* make the primary context of this thread's device current */
  CUcontext current = 0;
  CUresult status = cuInit(0);
  if (!status) status = cuCtxGetCurrent(&current);
  if (status || current) return status;
  if (!contexts[device]) status = cuDevicePrimaryCtxRetain(&contexts[device], device);
  return status ? status : cuCtxSetCurrent(contexts[device]);
}
#define DO(call) { CUresult entered = enter(); return said(entered ? entered : (call)); }
#define ADDRESS(p) ((CUdeviceptr)(p))

/* -- devices and errors */
cudaError_t cudaRuntimeGetVersion(int *v) { *v = 13000; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *v) { return said(cuDriverGetVersion(v)); }
cudaError_t cudaGetDeviceCount(int *n) { CUresult s = cuInit(0); return said(s ? s : cuDeviceGetCount(n)); }
cudaError_t cudaGetDevice(int *d) {
  CUcontext current = 0;
  *d = device;
  return !cuCtxGetCurrent(&current) && current ? said(cuCtxGetDevice(d)) : cudaSuccess;
}
cudaError_t cudaSetDevice(int d) {
  CUdevice known;
  CUresult status = cuInit(0);
  if (!status) status = cuDeviceGet(&known, d);
  if (status) return said(status);
  device = d;
  cuCtxSetCurrent(0);
  return said(enter());
}
cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr attribute, int d) {
  return said(cuDeviceGetAttribute(v, (CUdevice_attribute)attribute, d));
}
cudaError_t cudaDeviceCanAccessPeer(int *v, int a, int b) { return said(cuDeviceCanAccessPeer(v, a, b)); }
cudaError_t cudaDeviceEnablePeerAccess(int d, unsigned flags) { return said(CUDA_ERROR_NOT_SUPPORTED); }
cudaError_t cudaDeviceGetPCIBusId(char *s, int n, int d) { return said(cuDeviceGetPCIBusId(s, n, d)); }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) DO(cuCtxGetStreamPriorityRange(least, greatest))
cudaError_t cudaDeviceSynchronize(void) DO(cuCtxSynchronize())
static int attribute(CUdevice_attribute a, int d) { int v = 0; cuDeviceGetAttribute(&v, a, d); return v; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  CUresult status = cuInit(0);
  CUdevice known;
  memset(p, 0, sizeof *p);
  if (!status) status = cuDeviceGet(&known, d);
  if (status) return said(status);
  cuDeviceGetName(p->name, sizeof p->name, d);
  cuDeviceGetUuid((CUuuid *)&p->uuid, d);
  cuDeviceTotalMem(&p->totalGlobalMem, d);
#define PROPERTY(field, name) p->field = attribute(CU_DEVICE_ATTRIBUTE_##name, d)
  PROPERTY(sharedMemPerBlock, MAX_SHARED_MEMORY_PER_BLOCK);
  PROPERTY(sharedMemPerBlockOptin, MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  PROPERTY(sharedMemPerMultiprocessor, MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
  PROPERTY(regsPerBlock, MAX_REGISTERS_PER_BLOCK);
  PROPERTY(regsPerMultiprocessor, MAX_REGISTERS_PER_MULTIPROCESSOR);
  PROPERTY(warpSize, WARP_SIZE);
  PROPERTY(maxThreadsPerBlock, MAX_THREADS_PER_BLOCK);
  PROPERTY(maxThreadsPerMultiProcessor, MAX_THREADS_PER_MULTIPROCESSOR);
  PROPERTY(maxBlocksPerMultiProcessor, MAX_BLOCKS_PER_MULTIPROCESSOR);
  for (int i = 0; i < 3; i++) {
    p->maxThreadsDim[i] = attribute(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X + i, d);
    p->maxGridSize[i] = attribute(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X + i, d);
  }
  PROPERTY(totalConstMem, TOTAL_CONSTANT_MEMORY);
  PROPERTY(major, COMPUTE_CAPABILITY_MAJOR);
  PROPERTY(minor, COMPUTE_CAPABILITY_MINOR);
  PROPERTY(multiProcessorCount, MULTIPROCESSOR_COUNT);
  PROPERTY(canMapHostMemory, CAN_MAP_HOST_MEMORY);
  PROPERTY(concurrentKernels, CONCURRENT_KERNELS);
  PROPERTY(pciBusID, PCI_BUS_ID);
  PROPERTY(asyncEngineCount, ASYNC_ENGINE_COUNT);
  PROPERTY(unifiedAddressing, UNIFIED_ADDRESSING);
  PROPERTY(l2CacheSize, L2_CACHE_SIZE);
  PROPERTY(memoryBusWidth, GLOBAL_MEMORY_BUS_WIDTH);
  PROPERTY(textureAlignment, TEXTURE_ALIGNMENT);
  return cudaSuccess;
}
cudaError_t cudaGetLastError(void) { cudaError_t e = last; last = cudaSuccess; return e; }
cudaError_t cudaPeekAtLastError(void) { return last; }
const char *cudaGetErrorName(cudaError_t e) {
  const char *s = "cudaErrorUnknown";
  cuGetErrorName((CUresult)e, &s);
  return s;
}
const char *cudaGetErrorString(cudaError_t e) { return cudaGetErrorName(e); }
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version,
    unsigned long long flags, enum cudaDriverEntryPointQueryResult *found) {
  CUdriverProcAddressQueryResult is_there;
  CUresult status = cuInit(0);
  if (status) return said(status);
  cuGetProcAddress(name, out, (int)version, flags, &is_there);
  if (found) *found = (enum cudaDriverEntryPointQueryResult)is_there;
  return cudaSuccess;
}
cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

/* -- memory */
cudaError_t cudaMalloc(void **p, size_t n) {
  if (!n) { *p = 0; return cudaSuccess; }
  DO(cuMemAlloc((CUdeviceptr *)p, n))
}
cudaError_t cudaFree(void *p) DO(p ? cuMemFree(ADDRESS(p)) : CUDA_SUCCESS)
cudaError_t cudaMallocAsync(void **p, size_t n, cudaStream_t s) { return said(CUDA_ERROR_NOT_SUPPORTED); }
cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { return said(CUDA_ERROR_NOT_SUPPORTED); }
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned flags) DO(cuMemHostAlloc(p, n, flags))
cudaError_t cudaFreeHost(void *p) DO(p ? cuMemFreeHost(p) : CUDA_SUCCESS)
cudaError_t cudaHostRegister(void *p, size_t n, unsigned flags) DO(cuMemHostRegister(p, n, flags))
cudaError_t cudaHostUnregister(void *p) DO(cuMemHostUnregister(p))
cudaError_t cudaMemGetInfo(size_t *left, size_t *total) DO(cuMemGetInfo(left, total))
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *p) {
  unsigned type = 0, managed = 0;
  int ordinal = -2;
  CUpointer_attribute names[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED,
      CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
  void *values[] = {&type, &managed, &ordinal};
  CUresult status = enter();
  if (!status) status = cuPointerGetAttributes(3, names, values, ADDRESS(p));
  memset(out, 0, sizeof *out);
  out->type = cudaMemoryTypeUnregistered;
  if (type == CU_MEMORYTYPE_HOST) out->type = cudaMemoryTypeHost;
  if (type == CU_MEMORYTYPE_DEVICE) out->type = managed ? cudaMemoryTypeManaged : cudaMemoryTypeDevice;
  out->device = ordinal;
  out->devicePointer = type ? (void *)p : 0;
  out->hostPointer = type == CU_MEMORYTYPE_DEVICE && !managed ? 0 : (void *)p;
  return said(status);
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind kind)
    DO(cuMemcpy(ADDRESS(to), ADDRESS(from), n))
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind kind, cudaStream_t s)
    DO(cuMemcpyAsync(ADDRESS(to), ADDRESS(from), n, s))
cudaError_t cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t n, cudaStream_t s)
    DO(cuMemcpyAsync(ADDRESS(to), ADDRESS(from), n, s))
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
    size_t height, enum cudaMemcpyKind kind, cudaStream_t s) {
  CUresult status = enter();
  for (size_t i = 0; i < height && !status; i++)
    status = cuMemcpyAsync(ADDRESS(to) + i * to_pitch, ADDRESS(from) + i * from_pitch, width, s);
  return said(status);
}
cudaError_t cudaMemset(void *p, int v, size_t n) DO(cuMemsetD8(ADDRESS(p), (unsigned char)v, n))
cudaError_t cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t s)
    DO(cuMemsetD8Async(ADDRESS(p), (unsigned char)v, n, s))
cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t n, size_t offset,
    enum cudaMemcpyKind kind) {
  return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void **p, const void *symbol) { return said(CUDA_ERROR_NOT_FOUND); }
#define NOT_HERE(name, ...) cudaError_t name(__VA_ARGS__) { return said(CUDA_ERROR_NOT_SUPPORTED); }
NOT_HERE(cudaDeviceGetDefaultMemPool, cudaMemPool_t *pool, int d)
NOT_HERE(cudaMemPoolGetAttribute, cudaMemPool_t pool, enum cudaMemPoolAttr a, void *v)
NOT_HERE(cudaMemPoolSetAttribute, cudaMemPool_t pool, enum cudaMemPoolAttr a, void *v)
NOT_HERE(cudaMemPoolSetAccess, cudaMemPool_t pool, const struct cudaMemAccessDesc *access, size_t n)
NOT_HERE(cudaMemPoolTrimTo, cudaMemPool_t pool, size_t n)
NOT_HERE(cudaIpcCloseMemHandle, void *p)
NOT_HERE(cudaIpcGetEventHandle, cudaIpcEventHandle_t *out, cudaEvent_t e)
NOT_HERE(cudaIpcGetMemHandle, cudaIpcMemHandle_t *out, void *p)
NOT_HERE(cudaIpcOpenEventHandle, cudaEvent_t *out, cudaIpcEventHandle_t handle)
NOT_HERE(cudaIpcOpenMemHandle, void **out, cudaIpcMemHandle_t handle, unsigned flags)

/* -- streams and events */
cudaError_t cudaStreamCreate(cudaStream_t *s) DO(cuStreamCreate(s, 0))
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) DO(cuStreamCreate(s, flags))
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority)
    DO(cuStreamCreateWithPriority(s, flags, priority))
cudaError_t cudaStreamDestroy(cudaStream_t s) DO(cuStreamDestroy(s))
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *v) DO(cuStreamGetPriority(s, v))
cudaError_t cudaStreamQuery(cudaStream_t s) DO(cuStreamQuery(s))
cudaError_t cudaStreamSynchronize(cudaStream_t s) DO(cuStreamSynchronize(s))
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) DO(cuStreamWaitEvent(s, e, flags))
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *data) DO(cuLaunchHostFunc(s, f, data))
struct callback { cudaStreamCallback_t function; cudaStream_t stream; void *data; };
static void call_back(void *data) {
  struct callback *one = data;
  one->function(one->stream, cudaSuccess, one->data);
  free(one);
}
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void *data, unsigned flags) {
  struct callback *one = malloc(sizeof *one);
  *one = (struct callback){f, s, data};
  DO(cuLaunchHostFunc(s, call_back, one))
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) DO(cuEventCreate(e, flags))
cudaError_t cudaEventCreate(cudaEvent_t *e) DO(cuEventCreate(e, 0))
cudaError_t cudaEventDestroy(cudaEvent_t e) DO(cuEventDestroy(e))
cudaError_t cudaEventQuery(cudaEvent_t e) DO(cuEventQuery(e))
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) DO(cuEventRecord(e, s))
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags)
    DO(cuEventRecordWithFlags(e, s, flags))
cudaError_t cudaEventSynchronize(cudaEvent_t e) DO(cuEventSynchronize(e))
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) DO(cuEventElapsedTime(ms, a, b))

/* -- graphs */
cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode)
    DO(cuStreamBeginCapture(s, (CUstreamCaptureMode)mode))
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph) DO(cuStreamEndCapture(s, graph))
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *v)
    DO(cuStreamIsCapturing(s, (CUstreamCaptureStatus *)v))
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
  return said(cuThreadExchangeStreamCaptureMode((CUstreamCaptureMode *)mode));
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags)
    DO(cuGraphInstantiateWithFlags(out, graph, flags))
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t s) DO(cuGraphLaunch(graph, s))
cudaError_t cudaGraphDestroy(cudaGraph_t graph) DO(cuGraphDestroy(graph))
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) DO(cuGraphExecDestroy(graph))
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *n) DO(cuGraphGetNodes(graph, nodes, n))
NOT_HERE(cudaGraphDebugDotPrint, cudaGraph_t graph, const char *path, unsigned flags)
NOT_HERE(cudaGraphConditionalHandleCreate, cudaGraphConditionalHandle *handle, cudaGraph_t graph, unsigned value,
    unsigned flags)
NOT_HERE(cudaStreamBeginCaptureToGraph, cudaStream_t s, cudaGraph_t graph, const cudaGraphNode_t *from,
    const cudaGraphEdgeData *edges, size_t n, enum cudaStreamCaptureMode mode)

/* -- kernels, and what compiled code registers */
static __thread struct { dim3 grid, block; size_t bytes; cudaStream_t stream; } configuration;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t bytes, cudaStream_t s) {
  configuration.grid = grid, configuration.block = block, configuration.bytes = bytes, configuration.stream = s;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *bytes, void *s) {
  *grid = configuration.grid, *block = configuration.block, *bytes = configuration.bytes;
  *(cudaStream_t *)s = configuration.stream;
  return cudaSuccess;
}
void **__cudaRegisterFatBinary(void *code) { static void *handle; return &handle; }
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterFunction(void **h, const char *f, char *g, const char *name, int limit, uint3 *t, uint3 *b,
    dim3 *bd, dim3 *gd, int *w) {}
void __cudaRegisterVar(void **h, char *v, char *a, const char *name, int e, size_t n, int c, int g) {}
char __cudaInitModule(void **handle) { return 1; }
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *f) { *kernel = (cudaKernel_t)KERNEL; return cudaSuccess; }
static CUresult launch(cudaStream_t s) { return cuLaunchKernel(KERNEL, 1, 1, 1, 1, 1, 1, 0, s, 0, 0); }
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t bytes,
    cudaStream_t s)
    DO(launch(s))
cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **arguments, size_t bytes, cudaStream_t s)
    DO(launch(s))
cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 grid, dim3 block, void **arguments, size_t bytes,
    cudaStream_t s)
    DO(launch(s))
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **arguments) DO(launch(c->stream))
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024, a->numRegs = 32;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute a, int v) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int threads, size_t bytes) {
  *n = 2;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int threads, size_t bytes,
    unsigned flags) {
  *n = 2;
  return cudaSuccess;
}

/* -- what CUDA 13 alone has, or has with other arguments */
#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *v, unsigned long long *id,
    cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *n)
    DO(cuStreamGetCaptureInfo(s, (CUstreamCaptureStatus *)v, (cuuint64_t *)id, graph, nodes,
        (const CUgraphEdgeData **)edges, n))
NOT_HERE(cudaGraphNodeGetDependencies, cudaGraphNode_t node, cudaGraphNode_t *others, cudaGraphEdgeData *edges,
    size_t *n)
NOT_HERE(cudaGraphAddNode, cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *from,
    const cudaGraphEdgeData *edges, size_t n, struct cudaGraphNodeParams *parameters)
NOT_HERE(cudaStreamUpdateCaptureDependencies, cudaStream_t s, cudaGraphNode_t *nodes, const cudaGraphEdgeData *edges,
    size_t n, unsigned flags)
NOT_HERE(cudaLibraryGetKernel, cudaKernel_t *kernel, cudaLibrary_t library, const char *name)
NOT_HERE(cudaLibraryLoadData, cudaLibrary_t *library, const void *code, enum cudaJitOption *options, void **values,
    unsigned n, enum cudaLibraryOption *more, void **more_values, unsigned n_more)
NOT_HERE(cudaLibraryUnload, cudaLibrary_t library)
NOT_HERE(cudaDeviceGetGraphMemAttribute, int device, enum cudaGraphMemAttributeType a, void *value)
NOT_HERE(cudaDeviceSetGraphMemAttribute, int device, enum cudaGraphMemAttributeType a, void *value)
NOT_HERE(cudaUserObjectCreate, cudaUserObject_t *object, void *what, cudaHostFn_t destroy, unsigned n, unsigned flags)
NOT_HERE(cudaUserObjectRelease, cudaUserObject_t object, unsigned n)
NOT_HERE(cudaGraphRetainUserObject, cudaGraph_t graph, cudaUserObject_t object, unsigned n, unsigned flags)
NOT_HERE(cudaKernelSetAttributeForDevice, cudaKernel_t kernel, enum cudaFuncAttribute a, int value, int device)
#endif
