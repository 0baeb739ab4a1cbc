/* Stands in for the CUDA driver, its runtime and its management library, for XLA and without a GPU.

One device with one thread: device memory is the host's, what is put on a stream is done at once, kernels do nothing.
Streams are made by whoever sets `make_stream`, so that a twin of the driver knows them. Built once for each of the
three libraries that it stands in for. Numbers of attributes and statuses: cuda.h. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t u64;
typedef void *any;
enum { SUCCESS = 0, OUT_OF_MEMORY = 2, NOT_FOUND = 500, TOTAL = 1 << 30, PAGE = 4096 };

int own_allocations, own_frees, pools_set_up;
any (*make_stream)(void);
static u64 handles = 0x1000;
static __thread any current;

static int give(any *out) { *out = (any)(handles += 16); return SUCCESS; }
static int take(u64 *out, u64 bytes) {
  *out = (u64)aligned_alloc(PAGE, (bytes + PAGE - 1) / PAGE * PAGE);
  return *out ? SUCCESS : OUT_OF_MEMORY;
}
static int copy(u64 to, u64 from, u64 bytes) { memcpy((any)to, (any)from, bytes); return SUCCESS; }

/* -- the device */
int cuInit(unsigned f) { return SUCCESS; }
int cuDriverGetVersion(int *v) { *v = 13000; return SUCCESS; }
int cuDeviceGetCount(int *n) { *n = 1; return SUCCESS; }
int cuDeviceGet(int *d, int ordinal) { *d = ordinal; return SUCCESS; }
int cuDeviceGetName(char *s, int n, int d) { strncpy(s, "stand-in", n); return SUCCESS; }
int cuDeviceGetUuid_v2(char *u, int d) { memset(u, 0, 16); return SUCCESS; }
int cuDeviceGetUuid(char *u, int d) { return cuDeviceGetUuid_v2(u, d); }
int cuDeviceGetByPCIBusId(int *d, const char *s) { *d = 0; return SUCCESS; }
int cuDeviceGetPCIBusId(char *s, int n, int d) { strncpy(s, "0000:00:00.0", n); return SUCCESS; }
int cuDeviceTotalMem_v2(u64 *n, int d) { *n = TOTAL; return SUCCESS; }
int cuDeviceCanAccessPeer(int *v, int a, int b) { *v = 0; return SUCCESS; }
int cuDeviceGetAttribute(int *v, int attribute, int d) {
  switch (attribute) {
    case 1: case 2: case 3: *v = 1024; break;                /* threads of a block, its sizes */
    case 4: *v = 64; break;
    case 5: *v = 2147483647; break;                          /* blocks of a grid */
    case 6: case 7: *v = 65535; break;
    case 8: *v = 49152; break;                               /* shared memory */
    case 10: *v = 32; break;                                 /* threads of a warp */
    case 12: case 82: *v = 65536; break;                     /* registers */
    case 13: case 36: *v = 1000000; break;                   /* clocks */
    case 16: *v = 100; break;                                /* multiprocessors */
    case 37: *v = 1024; break;                               /* width of the memory bus */
    case 38: *v = 1 << 20; break;                            /* second level cache */
    case 39: *v = 2048; break;
    case 75: *v = 9; break;                                  /* compute capability */
    case 81: case 97: *v = 1 << 17; break;
    case 106: *v = 32; break;
    case 41: case 102: case 115: *v = 1; break;              /* one address space, virtual memory, memory pools */
    default: *v = 0;
  }
  return SUCCESS;
}
int cuDevicePrimaryCtxRetain(any *c, int d) { *c = (any)16; return SUCCESS; }
int cuDevicePrimaryCtxRelease_v2(int d) { return SUCCESS; }
int cuDevicePrimaryCtxGetState(int d, unsigned *f, int *active) { *f = 0; *active = 1; return SUCCESS; }
int cuDevicePrimaryCtxSetFlags_v2(int d, unsigned f) { return SUCCESS; }
int cuCtxGetCurrent(any *c) { *c = current; return SUCCESS; }
int cuCtxSetCurrent(any c) { current = c; return SUCCESS; }
int cuCtxGetDevice(int *d) { *d = 0; return SUCCESS; }
int cuCtxSynchronize(void) { return SUCCESS; }
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { *least = *greatest = 0; return SUCCESS; }
int cuGetErrorName(int e, const char **s) { *s = e == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "?"; return SUCCESS; }
int cuGetErrorString(int e, const char **s) { return cuGetErrorName(e, s); }

/* -- memory */
int cuMemAllocAsync(u64 *p, u64 n, any s) { own_allocations++; return take(p, n); }
int cuMemAllocFromPoolAsync(u64 *p, u64 n, any pool, any s) { return cuMemAllocAsync(p, n, s); }
int cuMemFreeAsync(u64 p, any s) { own_frees++; free((any)p); return SUCCESS; }
int cuMemGetInfo_v2(u64 *left, u64 *total) { *left = TOTAL / 2; *total = TOTAL; return SUCCESS; }
int cuDeviceGetDefaultMemPool(any *pool, int d) { return give(pool); }
int cuMemPoolCreate(any *pool, any properties) { return give(pool); }
int cuMemPoolDestroy(any pool) { return SUCCESS; }
int cuMemPoolSetAttribute(any pool, int a, any v) { pools_set_up++; return SUCCESS; }
int cuMemPoolGetAttribute(any pool, int a, u64 *v) { *v = 0; return SUCCESS; }
int cuMemPoolSetAccess(any pool, any access, u64 n) { return SUCCESS; }
int cuMemGetAllocationGranularity(u64 *n, any properties, int o) { *n = 2 << 20; return SUCCESS; }
int cuMemAlloc_v2(u64 *p, u64 n) { return take(p, n); }
int cuMemFree_v2(u64 p) { free((any)p); return SUCCESS; }
int cuMemHostAlloc(any *p, u64 n, unsigned f) { return take((u64 *)p, n); }
int cuMemAllocHost_v2(any *p, u64 n) { return take((u64 *)p, n); }
int cuMemFreeHost(any p) { free(p); return SUCCESS; }
int cuMemHostRegister_v2(any p, u64 n, unsigned f) { return SUCCESS; }
int cuMemHostUnregister(any p) { return SUCCESS; }
int cuMemHostGetDevicePointer_v2(u64 *d, any p, unsigned f) { *d = (u64)p; return SUCCESS; }
int cuPointerGetAttribute(any out, int a, u64 p) { *(int *)out = a == 2 ? 2 : 0; return SUCCESS; } /* on the device */
int cuMemcpyHtoDAsync_v2(u64 to, u64 from, u64 n, any s) { return copy(to, from, n); }
int cuMemcpyDtoHAsync_v2(u64 to, u64 from, u64 n, any s) { return copy(to, from, n); }
int cuMemcpyDtoDAsync_v2(u64 to, u64 from, u64 n, any s) { return copy(to, from, n); }
int cuMemcpyAsync(u64 to, u64 from, u64 n, any s) { return copy(to, from, n); }
int cuMemcpyHtoD_v2(u64 to, u64 from, u64 n) { return copy(to, from, n); }
int cuMemcpyDtoH_v2(u64 to, u64 from, u64 n) { return copy(to, from, n); }
int cuMemsetD8_v2(u64 p, unsigned char v, u64 n) { memset((any)p, v, n); return SUCCESS; }
int cuMemsetD8Async(u64 p, unsigned char v, u64 n, any s) { memset((any)p, v, n); return SUCCESS; }
int cuMemsetD32Async(u64 p, unsigned v, u64 n, any s) {
  for (u64 i = 0; i < n; i++) ((unsigned *)p)[i] = v;
  return SUCCESS;
}
int cuMemsetD32_v2(u64 p, unsigned v, u64 n) { return cuMemsetD32Async(p, v, n, 0); }

/* -- streams, events, kernels */
int cuStreamCreateWithPriority(any *s, unsigned f, int p) {
  if (!make_stream) return give(s);
  return (*s = make_stream()) ? SUCCESS : NOT_FOUND;
}
int cuStreamCreate(any *s, unsigned f) { return cuStreamCreateWithPriority(s, f, 0); }
int cuStreamDestroy_v2(any s) { return SUCCESS; }
int cuStreamSynchronize(any s) { return SUCCESS; }
int cuStreamQuery(any s) { return SUCCESS; }
int cuStreamWaitEvent(any s, any e, unsigned f) { return SUCCESS; }
int cuStreamIsCapturing(any s, int *v) { *v = 0; return SUCCESS; }
int cuEventCreate(any *e, unsigned f) { return give(e); }
int cuEventDestroy_v2(any e) { return SUCCESS; }
int cuEventRecord(any e, any s) { return SUCCESS; }
int cuEventQuery(any e) { return SUCCESS; }
int cuEventSynchronize(any e) { return SUCCESS; }
int cuEventElapsedTime(float *ms, any a, any b) { *ms = 1; return SUCCESS; }
int cuLaunchHostFunc(any s, void (*function)(any), any data) { function(data); return SUCCESS; }
int cuModuleLoadDataEx(any *m, any image, unsigned n, any o, any v) { return give(m); }
int cuModuleLoadFatBinary(any *m, any image) { return give(m); }
int cuModuleUnload(any m) { return SUCCESS; }
int cuModuleGetFunction(any *f, any m, const char *name) { return give(f); }
int cuModuleGetGlobal_v2(u64 *p, u64 *n, any m, const char *name) { return NOT_FOUND; }
int cuFuncGetAttribute(int *v, int a, any f) { *v = a == 0 ? 1024 : 0; return SUCCESS; }
int cuFuncSetAttribute(any f, int a, int v) { return SUCCESS; }
int cuFuncSetCacheConfig(any f, int c) { return SUCCESS; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, any f, int threads, u64 bytes) { *n = 1; return SUCCESS; }
int cuLaunchKernel(any f, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c, unsigned n, any s,
                   any *arguments, any *extra) { return SUCCESS; }
int cuLaunchKernelEx(any config, any f, any arguments, any extra) { return SUCCESS; }

/* -- the runtime and the management library, as far as XLA needs them */
int cudaRuntimeGetVersion(int *v) { *v = 13000; return SUCCESS; }
int cudaDriverGetVersion(int *v) { *v = 13000; return SUCCESS; }
int cudaGetDeviceCount(int *n) { *n = 1; return SUCCESS; }
int cudaGetDevice(int *d) { *d = 0; return SUCCESS; }
int cudaSetDevice(int d) { return SUCCESS; }
int cudaPeekAtLastError(void) { return SUCCESS; }
int cudaGetLastError(void) { return SUCCESS; }
const char *cudaGetErrorName(int e) { return "?"; }
const char *cudaGetErrorString(int e) { return "?"; }
int nvmlInit_v2(void) { return SUCCESS; }
int nvmlInit(void) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
