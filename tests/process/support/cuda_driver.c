/* A CUDA driver of software: libcuda.so.1 and libnvidia-ml.so.1 for real builds of frameworks, without a GPU.

Device memory is the host's, in memfds where another process may import it. A stream does what it was given in order:
at once, or where it waits or is held, when a call or the thread of the device comes by again. Copies, fills, writes,
waits, events and host functions do what they say. Of kernels only Zico's own four do; all others do nothing and are
counted. The default stream does not wait for others, and others do not wait for it. A process that forks has no driver
in the child. Calls are counted by name (-finstrument-functions). Numbers of attributes and statuses, and layouts of
structures: cuda.h of CUDA 13.0. NVIDIA's libcudart asks the driver to prove that it is NVIDIA's, so it cannot stand
above this one: cuda_runtime.c does. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef uint64_t u64;
typedef void *any;
enum {
  SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
  INVALID_HANDLE = 400, ILLEGAL_STATE = 401, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700, LAUNCH_TIMEOUT = 702,
  NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, UNKNOWN = 999
};
enum { GRANULE = 2 << 20, PAGE = 4096, MOST_DEVICES = 4, PAUSE_US = 50, MOST_CONTEXTS = 16 };
#define NOT_COUNTED __attribute__((no_instrument_function))
#define HANDLE(type, handle) ((struct type *)(handle))

/* -- settings and counters, which tests write and read */
u64 total_bytes = 1ull << 30;      /* of each device; SOFTWARE_BYTES */
int devices = 1;                   /* SOFTWARE_DEVICES */
u64 deadline_s = 20;               /* of every wait */
u64 used_bytes, kernels_launched, nodes_launched, bad_calls, put_aside;

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static pthread_cond_t blocked = PTHREAD_COND_INITIALIZER;
static enum { FRESH, READY, FORKED } state; /* of this process's driver */

enum { SLOTS = 1024 };
static struct { any function; const char *name; u64 calls; } counted[SLOTS];
static int is_traced;

/* -- contexts that are put aside: every call but these waits. They are not counted, so they do not. */
static enum { RUNNING, LOCKED, ASIDE } process;
static pthread_mutex_t process_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t unlocked = PTHREAD_COND_INITIALIZER;
static NOT_COUNTED int change(int pid, int from, int to) {
  if (pid != getpid()) return INVALID_VALUE;
  pthread_mutex_lock(&process_lock);
  int status = (int)process == from ? SUCCESS : ILLEGAL_STATE;
  if (status == SUCCESS) __atomic_store_n(&process, to, __ATOMIC_RELEASE);
  put_aside += status == SUCCESS && to == ASIDE;
  pthread_cond_broadcast(&unlocked);
  pthread_mutex_unlock(&process_lock);
  return status;
}
NOT_COUNTED int cuCheckpointProcessLock(int pid, any arguments) { return change(pid, RUNNING, LOCKED); }
NOT_COUNTED int cuCheckpointProcessCheckpoint(int pid, any arguments) { return change(pid, LOCKED, ASIDE); }
NOT_COUNTED int cuCheckpointProcessRestore(int pid, any arguments) { return change(pid, ASIDE, LOCKED); }
NOT_COUNTED int cuCheckpointProcessUnlock(int pid, any arguments) { return change(pid, LOCKED, RUNNING); }
static NOT_COUNTED void await_unlocked(void) {
  pthread_mutex_lock(&process_lock);
  while (process != RUNNING) pthread_cond_wait(&unlocked, &process_lock);
  pthread_mutex_unlock(&process_lock);
}

NOT_COUNTED void __cyg_profile_func_enter(any function, any site) {
  for (u64 i = (u64)function >> 4;; i++) {
    any known = __atomic_load_n(&counted[i % SLOTS].function, __ATOMIC_ACQUIRE);
    if (known == function) {
      if (counted[i % SLOTS].name && __atomic_load_n(&process, __ATOMIC_ACQUIRE) != RUNNING) await_unlocked();
      __atomic_fetch_add(&counted[i % SLOTS].calls, 1, __ATOMIC_RELAXED);
      if (is_traced && counted[i % SLOTS].name) dprintf(2, "%s\n", counted[i % SLOTS].name);
      return;
    }
    if (!known) {
      Dl_info info = {0};
      int found = dladdr(function, &info) && info.dli_saddr == function;
      pthread_mutex_lock(&lock);
      if (!counted[i % SLOTS].function) {
        counted[i % SLOTS].name = found ? info.dli_sname : 0;
        __atomic_store_n(&counted[i % SLOTS].function, function, __ATOMIC_RELEASE);
      }
      pthread_mutex_unlock(&lock);
      i--; /* look at this slot again */
    }
  }
}
NOT_COUNTED void __cyg_profile_func_exit(any function, any site) { }
/* The name and the calls of what is counted in a slot: none where it has no name, an empty one behind the last slot. */
NOT_COUNTED const char *driver_function(int slot, u64 *calls) {
  if (slot < 0 || slot >= SLOTS) return "";
  *calls = counted[slot].calls;
  return counted[slot].name;
}
static NOT_COUNTED void after_fork(void) { if (state == READY) state = FORKED; }
static void set_up(void) __attribute__((constructor));
static NOT_COUNTED void set_up(void) {
  if (getenv("SOFTWARE_BYTES")) total_bytes = strtoull(getenv("SOFTWARE_BYTES"), 0, 0);
  if (getenv("SOFTWARE_DEVICES")) devices = atoi(getenv("SOFTWARE_DEVICES"));
  is_traced = getenv("SOFTWARE_TRACE") != 0;
  pthread_atfork(0, 0, after_fork);
}
static NOT_COUNTED int refuse(int status) { bad_calls++; return status; }

/* -- contexts: the primary ones */
static struct context { int device, holders; unsigned flags; } contexts[MOST_DEVICES];
static __thread any stack[MOST_CONTEXTS];
static __thread int depth;
#define CURRENT stack[depth]
#define IN_CONTEXT if (state != READY) return NOT_INITIALIZED; if (!CURRENT) return refuse(INVALID_CONTEXT)

int cuInit(unsigned flags) {
  if (flags) return INVALID_VALUE;
  if (state == FRESH) state = READY;
  return state == READY ? SUCCESS : NOT_INITIALIZED;
}
int cuDriverGetVersion(int *v) { *v = 13000; return SUCCESS; }
int cuDeviceGetCount(int *n) { *n = devices; return state == READY ? SUCCESS : NOT_INITIALIZED; }
int cuDeviceGet(int *d, int ordinal) {
  if (state != READY) return NOT_INITIALIZED;
  if (ordinal < 0 || ordinal >= devices) return INVALID_DEVICE;
  *d = ordinal;
  return SUCCESS;
}
int cuDeviceGetName(char *s, int n, int d) { snprintf(s, n, "software device %d", d); return SUCCESS; }
int cuDeviceGetUuid_v2(char *u, int d) { memcpy(u, "software device", 15), u[15] = (char)d; return SUCCESS; }
int cuDeviceGetUuid(char *u, int d) { return cuDeviceGetUuid_v2(u, d); }
int cuDeviceGetLuid(char *u, unsigned *mask, int d) { memset(u, 0, 8), *mask = 0; return SUCCESS; }
int cuDeviceGetByPCIBusId(int *d, const char *s) { *d = atoi(s + 5); return SUCCESS; }
int cuDeviceGetPCIBusId(char *s, int n, int d) { snprintf(s, n, "0000:%02d:00.0", d); return SUCCESS; }
int cuDeviceTotalMem_v2(u64 *n, int d) { *n = total_bytes; return SUCCESS; }
int cuDeviceCanAccessPeer(int *v, int a, int b) { *v = 0; return SUCCESS; }
int cuDeviceGetP2PAttribute(int *v, int attribute, int a, int b) { *v = 0; return SUCCESS; }
int cuDeviceGetAttribute(int *v, int attribute, int d) {
  if (d < 0 || d >= devices) return INVALID_DEVICE;
  switch (attribute) {
    case 1: case 2: case 3: *v = 1024; break;                /* threads of a block, its sizes */
    case 4: *v = 64; break;
    case 5: *v = 2147483647; break;                          /* blocks of a grid */
    case 6: case 7: *v = 65535; break;
    case 8: *v = 49152; break;                               /* shared memory */
    case 9: *v = 65536; break;
    case 10: *v = 32; break;                                 /* threads of a warp */
    case 11: *v = 2147483647; break;
    case 12: case 82: *v = 65536; break;                     /* registers */
    case 13: case 36: *v = 1000000; break;                   /* clocks */
    case 14: *v = 512; break;
    case 16: *v = 4; break;                                  /* multiprocessors */
    case 33: *v = d; break;                                  /* number on the bus */
    case 37: *v = 1024; break;                               /* width of the memory bus */
    case 38: *v = 1 << 20; break;                            /* second level cache */
    case 39: *v = 2048; break;
    case 40: *v = 2; break;
    case 75: *v = 9; break;                                  /* compute capability 9.0 */
    case 81: case 97: *v = 1 << 17; break;
    case 106: *v = 32; break;
    case 19: case 31: case 41: case 78: case 83: case 89: case 92: case 93: case 99: case 102: case 103: case 110: case 115:
    case 122: *v = 1; break; /* one address space, priorities, waits and writes on streams, virtual memory, pools */
    default: *v = 0;
  }
  return SUCCESS;
}
int cuDevicePrimaryCtxRetain(any *c, int d) {
  if (state != READY) return NOT_INITIALIZED;
  if (d < 0 || d >= devices) return INVALID_DEVICE;
  contexts[d].device = d, contexts[d].holders++;
  *c = &contexts[d];
  return SUCCESS;
}
int cuDevicePrimaryCtxRelease_v2(int d) {
  if (!contexts[d].holders) return INVALID_CONTEXT;
  contexts[d].holders--;
  return SUCCESS;
}
int cuDevicePrimaryCtxGetState(int d, unsigned *flags, int *active) {
  *flags = contexts[d].flags, *active = contexts[d].holders > 0;
  return SUCCESS;
}
int cuDevicePrimaryCtxSetFlags_v2(int d, unsigned flags) { contexts[d].flags = flags; return SUCCESS; }
int cuCtxGetCurrent(any *c) { *c = CURRENT; return state == READY ? SUCCESS : NOT_INITIALIZED; }
int cuCtxSetCurrent(any c) { CURRENT = c; return SUCCESS; }
int cuCtxPushCurrent_v2(any c) {
  if (depth + 1 == MOST_CONTEXTS) return UNKNOWN;
  stack[++depth] = c;
  return SUCCESS;
}
int cuCtxPopCurrent_v2(any *c) {
  if (c) *c = CURRENT;
  CURRENT = 0;
  if (depth) depth--;
  return SUCCESS;
}
int cuCtxGetDevice(int *d) { IN_CONTEXT; *d = HANDLE(context, CURRENT)->device; return SUCCESS; }
int cuCtxGetDevice_v2(int *d, any c) { *d = HANDLE(context, c ? c : CURRENT)->device; return SUCCESS; }
int cuCtxGetFlags(unsigned *flags) { IN_CONTEXT; *flags = HANDLE(context, CURRENT)->flags; return SUCCESS; }
int cuCtxGetId(any c, u64 *id) { *id = (u64)(c ? c : CURRENT); return SUCCESS; }
int cuCtxGetApiVersion(any c, unsigned *v) { *v = 13000; return SUCCESS; }
int cuCtxGetLimit(u64 *v, int limit) { *v = limit ? 8 << 20 : 1024; return SUCCESS; }
int cuCtxSetLimit(int limit, u64 v) { return SUCCESS; }
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { *least = 0, *greatest = -5; return SUCCESS; }
int cuGetErrorName(int e, const char **s) {
  static const struct { int status; const char *name; } names[] = {
    {SUCCESS, "no error"}, {INVALID_VALUE, "invalid argument"}, {OUT_OF_MEMORY, "out of memory"},
    {NOT_INITIALIZED, "initialization error"}, {INVALID_DEVICE, "invalid device ordinal"},
    {INVALID_CONTEXT, "invalid device context"}, {INVALID_HANDLE, "invalid resource handle"},
    {NOT_FOUND, "named symbol not found"}, {NOT_READY, "device not ready"},
    {ILLEGAL_ADDRESS, "an illegal memory access was encountered"}, {LAUNCH_TIMEOUT, "the launch timed out"},
    {NOT_SUPPORTED, "operation not supported"},
    {CAPTURE_INVALIDATED, "operation failed due to a previous error during capture"},
    {CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"},
  };
  *s = "unknown error";
  for (u64 i = 0; i < sizeof names / sizeof *names; i++) if (names[i].status == e) *s = names[i].name;
  return SUCCESS;
}
int cuGetErrorString(int e, const char **s) { return cuGetErrorName(e, s); }

/* -- looking functions up */
/* The newest form of a function that is here. Where an older one is asked for too: by the version of the newer one. */
int cuGetProcAddress_v2(const char *name, any *out, int version, u64 flags, int *found) {
  static any self;
  static const struct { const char *name, *older; int since; } forms[] = {
    {"cuCtxGetDevice", "cuCtxGetDevice", 13000}, {"cuCtxSynchronize", "cuCtxSynchronize", 13000},
    {"cuStreamGetCaptureInfo", "cuStreamGetCaptureInfo_v2", 12030}, {"cuGetProcAddress", "cuGetProcAddress", 12000},
  };
  if (!self) { Dl_info here; dladdr((any)cuInit, &here); self = dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD); }
  char whole[128];
  *out = 0;
  for (u64 i = 0; i < sizeof forms / sizeof *forms; i++)
    if (!strcmp(name, forms[i].name) && version < forms[i].since) *out = dlsym(self, forms[i].older);
  for (int form = 4; form > 0 && !*out; form--) {
    snprintf(whole, sizeof whole, form > 1 ? "%s_v%d" : "%s", name, form);
    *out = dlsym(self, whole);
  }
  if (!*out && is_traced) dprintf(2, "%s is not here\n", name);
  if (found) *found = *out ? 0 : 1;
  return *out ? SUCCESS : NOT_FOUND;
}
int cuGetProcAddress(const char *name, any *out, int version, u64 flags) {
  return cuGetProcAddress_v2(name, out, version, flags, 0);
}

static u64 handles = 0x1000;
static int give(any *out) { *out = (any)(handles += 16); return SUCCESS; } /* something that nobody looks into */

/* -- memory: ranges of addresses, and handles that are mapped there */
enum { DEVICE_MEMORY, RESERVED, MAPPED, PINNED, MANAGED };
static struct range {
  struct range *next;
  u64 start, bytes;
  int kind, device;
  char *told; /* of each page of managed memory: the kind of place that it was told to go to */
} *ranges;
struct handle { int descriptor, device, references, is_host; u64 bytes; int for_rdma; };

static struct range *range_of(u64 address, u64 bytes) { /* the innermost: what came last stands first */
  for (struct range *one = ranges; one; one = one->next)
    if (address - one->start < one->bytes) return address - one->start + bytes <= one->bytes ? one : 0;
  return 0;
}
static int is_on_device(const struct range *one) {
  return one && (one->kind == DEVICE_MEMORY || one->kind == MAPPED || one->kind == MANAGED);
}
static u64 up(u64 bytes, u64 unit) { return (bytes + unit - 1) / unit * unit; }
static void add(u64 start, u64 bytes, int kind) {
  struct range *one = malloc(sizeof *one);
  *one = (struct range){ranges, start, bytes, kind, CURRENT ? HANDLE(context, CURRENT)->device : 0, 0};
  if (kind == MANAGED) one->told = calloc(up(bytes, PAGE) / PAGE, 1);
  ranges = one;
}
static int drop(u64 start, int kind) {
  for (struct range **at = &ranges; *at; at = &(*at)->next)
    if ((*at)->start == start && (*at)->kind == kind) {
      struct range *one = *at;
      *at = one->next;
      free(one->told), free(one);
      return 1;
    }
  return 0;
}
static int take(u64 *out, u64 bytes, int kind) {
  u64 whole = up(bytes, kind == PINNED ? PAGE : 512);
  int status = SUCCESS;
  pthread_mutex_lock(&lock);
  if (!bytes) status = INVALID_VALUE;
  else if (kind != PINNED && used_bytes + whole > total_bytes) status = OUT_OF_MEMORY;
  else {
    any address = mmap(0, up(whole, PAGE), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) status = OUT_OF_MEMORY;
    else {
      *out = (u64)address;
      add(*out, whole, kind);
      used_bytes += kind == PINNED ? 0 : whole;
    }
  }
  pthread_mutex_unlock(&lock);
  return status;
}
static int give_back(u64 address, int kind) {
  int status = INVALID_VALUE;
  pthread_mutex_lock(&lock);
  struct range *one = range_of(address, 1);
  if (one && one->start == address && one->kind == kind) {
    munmap((any)address, up(one->bytes, PAGE));
    used_bytes -= kind == PINNED ? 0 : one->bytes;
    drop(address, kind);
    status = SUCCESS;
  }
  pthread_mutex_unlock(&lock);
  return status == SUCCESS || !address ? SUCCESS : refuse(status);
}
int cuMemAlloc_v2(u64 *p, u64 n) { IN_CONTEXT; return take(p, n, DEVICE_MEMORY); }
int cuMemFree_v2(u64 p) { IN_CONTEXT; return give_back(p, DEVICE_MEMORY) ? give_back(p, MANAGED) : SUCCESS; }
int cuMemAllocManaged(u64 *p, u64 n, unsigned flags) { IN_CONTEXT; return take(p, n, MANAGED); }
int cuMemHostAlloc(u64 *p, u64 n, unsigned flags) { IN_CONTEXT; return take(p, n, PINNED); }
int cuMemAllocHost_v2(u64 *p, u64 n) { return cuMemHostAlloc(p, n, 0); }
int cuMemFreeHost(u64 p) { return give_back(p, PINNED); }
int cuMemHostRegister_v2(u64 p, u64 n, unsigned flags) {
  IN_CONTEXT;
  pthread_mutex_lock(&lock);
  add(p, n, PINNED);
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}
int cuMemHostUnregister(u64 p) {
  pthread_mutex_lock(&lock);
  int known = drop(p, PINNED);
  pthread_mutex_unlock(&lock);
  return known ? SUCCESS : refuse(INVALID_VALUE);
}
int cuMemHostGetDevicePointer_v2(u64 *d, u64 p, unsigned flags) { *d = p; return SUCCESS; }
int cuMemHostGetFlags(unsigned *flags, u64 p) {
  pthread_mutex_lock(&lock);
  struct range *one = range_of(p, 1);
  pthread_mutex_unlock(&lock);
  *flags = 0;
  return one && one->kind == PINNED ? SUCCESS : INVALID_VALUE;
}
int cuMemGetInfo_v2(u64 *left, u64 *total) {
  IN_CONTEXT;
  *left = total_bytes - used_bytes, *total = total_bytes;
  return SUCCESS;
}
int cuMemGetAddressRange_v2(u64 *start, u64 *bytes, u64 p) {
  pthread_mutex_lock(&lock);
  struct range *one = range_of(p, 1);
  if (is_on_device(one)) { if (start) *start = one->start; if (bytes) *bytes = one->bytes; }
  pthread_mutex_unlock(&lock);
  return is_on_device(one) ? SUCCESS : NOT_FOUND;
}
int cuMemGetAllocationGranularity(u64 *n, any properties, int option) { *n = GRANULE; return SUCCESS; }
int cuMemCreate(struct handle **out, u64 bytes, const int *properties, u64 flags) {
  if (state != READY) return NOT_INITIALIZED;
  int is_host = properties[2] != 1, status = SUCCESS; /* CU_MEM_LOCATION_TYPE_DEVICE */
  if (!bytes || bytes % GRANULE || flags) return refuse(INVALID_VALUE);
  pthread_mutex_lock(&lock);
  if (!is_host && used_bytes + bytes > total_bytes) status = OUT_OF_MEMORY;
  else {
    int descriptor = memfd_create("software device", MFD_CLOEXEC);
    if (descriptor < 0 || ftruncate(descriptor, (off_t)bytes)) status = UNKNOWN;
    else {
      *out = malloc(sizeof **out);
      **out = (struct handle){descriptor, properties[3], 1, is_host, bytes, properties[6] >> 8 & 1}; /* gpuDirectRDMACapable */
      used_bytes += is_host ? 0 : bytes;
    }
  }
  pthread_mutex_unlock(&lock);
  return status;
}
static void let_go(struct handle *one) {
  if (--one->references) return;
  close(one->descriptor);
  used_bytes -= one->is_host ? 0 : one->bytes;
  free(one);
}
int cuMemRelease(struct handle *one) {
  pthread_mutex_lock(&lock);
  let_go(one);
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}
int cuMemExportToShareableHandle(int *out, struct handle *one, int kind, u64 flags) {
  if (kind != 1) return NOT_SUPPORTED; /* CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR */
  *out = dup(one->descriptor);
  return *out < 0 ? 304 : SUCCESS; /* CUDA_ERROR_OPERATING_SYSTEM */
}
int cuMemImportFromShareableHandle(struct handle **out, u64 descriptor, int kind) {
  struct stat file;
  if (kind != 1 || fstat((int)descriptor, &file) || !S_ISREG(file.st_mode)) return INVALID_VALUE;
  *out = malloc(sizeof **out);
  **out = (struct handle){dup((int)descriptor), 0, 1, 1, (u64)file.st_size, 0}; /* counted where it was made */
  return SUCCESS;
}
int cuMemAddressReserve(u64 *out, u64 bytes, u64 alignment, u64 wanted, u64 flags) {
  u64 unit = alignment > GRANULE ? alignment : GRANULE;
  if (!bytes || bytes % GRANULE) return refuse(INVALID_VALUE);
  any address = mmap(0, bytes + unit, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) return OUT_OF_MEMORY;
  u64 start = up((u64)address, unit), end = (u64)address + bytes + unit;
  if (start > (u64)address) munmap(address, start - (u64)address);
  if (end > start + bytes) munmap((any)(start + bytes), end - start - bytes);
  pthread_mutex_lock(&lock);
  add(*out = start, bytes, RESERVED);
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}
int cuMemAddressFree(u64 start, u64 bytes) {
  pthread_mutex_lock(&lock);
  int known = drop(start, RESERVED);
  if (known) munmap((any)start, bytes);
  pthread_mutex_unlock(&lock);
  return known ? SUCCESS : refuse(INVALID_VALUE);
}
/* Handles of mapped ranges stand beside them: what is mapped keeps its handle. */
static struct mapping { struct mapping *next; u64 start; struct handle *handle; } *mappings;
int cuMemMap(u64 start, u64 bytes, u64 offset, struct handle *one, u64 flags) {
  int status = INVALID_VALUE;
  pthread_mutex_lock(&lock);
  struct range *inside = range_of(start, bytes);
  if (inside && inside->kind == RESERVED && !offset && !flags && bytes == one->bytes) {
    any address = mmap((any)start, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, one->descriptor, 0);
    struct mapping *made = malloc(sizeof *made);
    *made = (struct mapping){mappings, start, one};
    mappings = made;
    one->references++;
    add(start, bytes, MAPPED);
    ranges->device = one->device;
    status = address == MAP_FAILED ? UNKNOWN : SUCCESS;
  }
  pthread_mutex_unlock(&lock);
  return status ? refuse(status) : SUCCESS;
}
int cuMemSetAccess(u64 start, u64 bytes, any wanted, u64 count) {
  int flags = ((int *)wanted)[2]; /* behind a location of two words; 1: reads, 3: writes, too */
  return mprotect((any)start, bytes, PROT_READ | (flags & 2 ? PROT_WRITE : 0)) ? refuse(INVALID_VALUE) : SUCCESS;
}
int cuMemUnmap(u64 start, u64 bytes) {
  int known = 0;
  pthread_mutex_lock(&lock);
  for (struct mapping **at = &mappings; *at && !known; at = &(*at)->next)
    if ((*at)->start == start) {
      struct mapping *one = *at;
      mmap((any)start, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
      *at = one->next;
      let_go(one->handle);
      free(one);
      known = drop(start, MAPPED);
      break;
    }
  pthread_mutex_unlock(&lock);
  return known ? SUCCESS : INVALID_VALUE;
}
int cuMemRetainAllocationHandle(struct handle **out, u64 address) {
  int status = INVALID_VALUE;
  pthread_mutex_lock(&lock);
  for (struct mapping *one = mappings; one; one = one->next)
    if (address - one->start < one->handle->bytes) *out = one->handle, one->handle->references++, status = SUCCESS;
  pthread_mutex_unlock(&lock);
  return status;
}
int cuMemGetAllocationPropertiesFromHandle(int *properties, const struct handle *one) {
  memset(properties, 0, 32);
  properties[0] = properties[1] = 1, properties[2] = one->is_host ? 2 : 1, properties[3] = one->device, properties[6] = one->for_rdma << 8;
  return SUCCESS;
}
static int attribute_of(any out, int attribute, const struct range *one, u64 p) {
  int on_device = is_on_device(one);
  switch (attribute) {
    case 1: *(any *)out = one ? &contexts[one->device] : 0; break;
    case 2: *(int *)out = on_device ? 2 : 1; break; /* CU_MEMORYTYPE_DEVICE, _HOST */
    case 3: *(u64 *)out = p; break;
    case 4: *(u64 *)out = on_device && one->kind != MANAGED ? 0 : p; break;
    case 7: *(u64 *)out = one ? one->start : 0; break;
    case 8: *(int *)out = one && one->kind == MANAGED; break;
    case 9: *(int *)out = one ? one->device : -2; break;
    case 11: *(u64 *)out = one ? one->start : 0; break;
    case 12: *(u64 *)out = one ? one->bytes : 0; break;
    case 13: *(int *)out = one != 0; break;
    default: *(int *)out = 0;
  }
  return SUCCESS;
}
int cuPointerGetAttribute(any out, int attribute, u64 p) {
  pthread_mutex_lock(&lock);
  struct range *one = range_of(p, 1);
  int status = one && one->kind != RESERVED ? attribute_of(out, attribute, one, p) : INVALID_VALUE;
  pthread_mutex_unlock(&lock);
  return status;
}
int cuPointerGetAttributes(unsigned n, int *attributes, any *out, u64 p) {
  pthread_mutex_lock(&lock);
  struct range *one = range_of(p, 1);
  for (unsigned i = 0; i < n; i++)
    if (one && one->kind != RESERVED) attribute_of(out[i], attributes[i], one, p);
    else if (attributes[i] == 9) *(int *)out[i] = -2;
    else if (attributes[i] == 2 || attributes[i] == 8) *(int *)out[i] = 0;
    else *(u64 *)out[i] = 0;
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}

/* -- streams */
enum { COPY, FILL, WRITE, AWAIT, RECORD, FOLLOW, HOST_FUNCTION, DIGEST, KERNEL, LAUNCH, FREE };
struct op { struct op *next; int kind, width; u64 to, from, bytes, stop, given_up; any what, staged; };
struct event { struct event *next; u64 recorded, done, at_ns; struct graph *graph; };
struct graph { struct op *first, **last; u64 nodes; struct graph *next; };
struct stream {
  struct stream *next;
  struct op *first, **last;
  int is_destroyed, is_running, priority, capture; /* CUstreamCaptureStatus: none, active, invalidated */
  unsigned flags;
  u64 id;
  struct graph *graph;
  any context;
};
static struct stream *streams;
static struct event *events;
static u64 ids;
static int thread_runs;
static __thread int capture_mode;
u64 held; /* a stream's handle: what it is given waits until it is let go */

static u64 now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (u64)now.tv_sec * 1000000000 + (u64)now.tv_nsec;
}
static struct stream *make(unsigned flags, int priority) {
  struct stream *one = calloc(1, sizeof *one);
  *one = (struct stream){.next = streams, .flags = flags, .priority = priority, .id = ++ids, .context = CURRENT};
  one->last = &one->first;
  return streams = one;
}
static struct stream *default_streams[MOST_DEVICES];
static struct stream *stream_of(any handle) { /* 0 where there is none of that handle */
  if ((u64)handle <= 2) {
    struct context *context = CURRENT;
    struct stream **one = &default_streams[context ? context->device : 0];
    if (!*one) *one = make(0, 0);
    return *one;
  }
  for (struct stream *one = streams; one; one = one->next)
    if (one == handle) return one->is_destroyed ? 0 : one;
  return 0;
}
static int is_event(struct event *event) {
  for (struct event *one = events; one; one = one->next)
    if (one == event) return 1;
  return 0;
}
static int reached(const struct op *op) {
  if (op->kind == AWAIT) {
    if ((int64_t)(__atomic_load_n((u64 *)op->to, __ATOMIC_ACQUIRE) - op->from) >= 0) return 1;
    if (!op->stop || !__atomic_load_n((u64 *)op->stop, __ATOMIC_ACQUIRE)) return 0;
    __atomic_store_n((u64 *)op->given_up, op->from, __ATOMIC_RELEASE);
    return 1;
  }
  if (op->kind == FOLLOW) return !is_event(op->what) || HANDLE(event, op->what)->done >= op->from;
  return 1;
}
static void fill(u64 to, u64 value, int width, u64 count) {
  for (u64 i = 0; i < count; i++) memcpy((char *)to + i * width, &value, width);
}
static void add_digest(u64 *lanes, const u64 *words, u64 n) { /* as kernels/digest.py */
  for (u64 i = 0; i < n; i++) {
    u64 word = words[i] ^ i * 0x9E3779B97F4A7C15ull;
    word = (word ^ word >> 33) * 0xFF51AFD7ED558CCDull;
    word = (word ^ word >> 33) * 0xC4CEB9FE1A85EC53ull;
    lanes[i % 32] += word ^ word >> 33;
  }
}
static void do_one(struct stream *stream, struct op *op) {
  switch (op->kind) {
    case COPY: memmove((any)op->to, op->staged ? op->staged : (any)op->from, op->bytes); break;
    case FILL: fill(op->to, op->from, op->width, op->bytes); break;
    case WRITE: __atomic_store_n((u64 *)op->to, op->from, __ATOMIC_RELEASE); break;
    case RECORD:
      if (is_event(op->what)) HANDLE(event, op->what)->done = op->from, HANDLE(event, op->what)->at_ns = now_ns();
      break;
    case DIGEST: add_digest((u64 *)op->to, (const u64 *)op->from, op->bytes); break;
    case KERNEL: kernels_launched++; break;
    case FREE: give_back(op->to, DEVICE_MEMORY); break;
    case LAUNCH:
      for (struct op *node = HANDLE(graph, op->what)->first; node; node = node->next, nodes_launched++)
        do_one(stream, node);
      break;
    case HOST_FUNCTION:
      stream->is_running = 1;
      pthread_mutex_unlock(&lock);
      ((void (*)(any))op->what)((any)op->from);
      pthread_mutex_lock(&lock);
      stream->is_running = 0;
  }
}
static void go_on(void) { /* let every stream do what it can; one that was destroyed goes when its work is done */
  for (int again = 1; again;) {
    again = 0;
    for (struct stream *one = streams; one && !again; one = one->next)
      while (one->first && !one->is_running && (u64)one != held && reached(one->first)) {
        struct op *op = one->first;
        do_one(one, op);
        if (!(one->first = op->next)) one->last = &one->first;
        free(op->staged), free(op);
        again = 1;
      }
  }
  for (struct stream **at = &streams; *at;) {
    struct stream *one = *at;
    if (!one->is_destroyed || one->first || one->is_running) { at = &one->next; continue; }
    *at = one->next;
    free(one);
  }
}
static any device_thread(any nothing) {
  pthread_mutex_lock(&lock);
  for (;;) {
    int waits = 0;
    go_on();
    for (struct stream *one = streams; one; one = one->next) waits |= one->first != 0;
    if (waits) pthread_mutex_unlock(&lock), usleep(PAUSE_US), pthread_mutex_lock(&lock);
    else pthread_cond_wait(&blocked, &lock);
  }
  return nothing;
}
static int put(any handle, struct op op) {
  if (state != READY) return NOT_INITIALIZED;
  int status = SUCCESS;
  pthread_mutex_lock(&lock);
  struct stream *stream = stream_of(handle);
  if (!stream) status = refuse(INVALID_HANDLE);
  else if (stream->capture == 2) status = CAPTURE_INVALIDATED;
  else {
    struct op *made = malloc(sizeof *made);
    *made = op;
    made->next = 0;
    struct op ***last = stream->capture ? &stream->graph->last : &stream->last;
    **last = made, *last = &made->next;
    if (stream->capture) stream->graph->nodes++;
    else {
      go_on();
      if (stream->first && !thread_runs) {
        pthread_t thread;
        thread_runs = !pthread_create(&thread, 0, device_thread, 0) && !pthread_detach(thread);
      }
      if (stream->first) pthread_cond_signal(&blocked);
    }
  }
  pthread_mutex_unlock(&lock);
  return status;
}
static int spoil(struct stream *stream) { /* by waiting for it while it captures */
  stream->capture = 2;
  return refuse(CAPTURE_UNSUPPORTED);
}
static int await_stream(struct stream *stream) { /* with the lock held once */
  u64 end_ns = now_ns() + deadline_s * 1000000000;
  if (stream->capture) return spoil(stream);
  for (go_on(); stream->first || stream->is_running; go_on()) {
    if (now_ns() > end_ns) return LAUNCH_TIMEOUT;
    pthread_mutex_unlock(&lock);
    usleep(PAUSE_US);
    pthread_mutex_lock(&lock);
  }
  return SUCCESS;
}
int cuStreamCreateWithPriority(any *s, unsigned flags, int priority) {
  IN_CONTEXT;
  pthread_mutex_lock(&lock);
  *s = make(flags, priority);
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}
int cuStreamCreate(any *s, unsigned flags) { return cuStreamCreateWithPriority(s, flags, 0); }
#define WITH_STREAM(handle, ...)             \
  IN_CONTEXT;                                \
  int status = INVALID_HANDLE;               \
  pthread_mutex_lock(&lock);                 \
  struct stream *stream = stream_of(handle); \
  if (stream) { status = SUCCESS; __VA_ARGS__; } \
  pthread_mutex_unlock(&lock);               \
  return status == INVALID_HANDLE ? refuse(status) : status
int cuStreamDestroy_v2(any s) { WITH_STREAM(s, stream->is_destroyed = 1; go_on()); }
int cuStreamSynchronize(any s) { WITH_STREAM(s, status = await_stream(stream)); }
int cuStreamQuery(any s) {
  WITH_STREAM(s, {
    go_on();
    status = stream->capture ? spoil(stream) : stream->first || stream->is_running ? NOT_READY : SUCCESS;
  });
}
int cuStreamGetPriority(any s, int *v) { WITH_STREAM(s, *v = stream->priority); }
int cuStreamGetFlags(any s, unsigned *v) { WITH_STREAM(s, *v = stream->flags); }
int cuStreamGetId(any s, u64 *v) { WITH_STREAM(s, *v = stream->id); }
int cuStreamGetCtx(any s, any *c) { WITH_STREAM(s, *c = stream->context ? stream->context : CURRENT); }
int cuStreamGetDevice(any s, int *d) {
  WITH_STREAM(s, *d = stream->context ? HANDLE(context, stream->context)->device : 0);
}
int cuCtxSynchronize(void) {
  IN_CONTEXT;
  u64 end_ns = now_ns() + deadline_s * 1000000000;
  int status = NOT_READY;
  pthread_mutex_lock(&lock);
  while (status == NOT_READY) {
    status = SUCCESS;
    go_on();
    for (struct stream *one = streams; one && status < CAPTURE_UNSUPPORTED; one = one->next)
      status = one->capture ? spoil(one) : one->first || one->is_running ? NOT_READY : status;
    if (status == NOT_READY && now_ns() > end_ns) status = LAUNCH_TIMEOUT;
    pthread_mutex_unlock(&lock);
    if (status == NOT_READY) usleep(PAUSE_US);
    pthread_mutex_lock(&lock);
  }
  pthread_mutex_unlock(&lock);
  return status;
}
int cuCtxSynchronize_v2(any c) { return cuCtxSynchronize(); }
int cuStreamWriteValue64_v2(any s, u64 p, u64 v, unsigned flags) {
  return put(s, (struct op){.kind = WRITE, .to = p, .from = v});
}
int cuStreamWaitValue64_v2(any s, u64 p, u64 v, unsigned flags) {
  if (flags) return NOT_SUPPORTED;
  return put(s, (struct op){.kind = AWAIT, .to = p, .from = v});
}
int cuLaunchHostFunc(any s, any function, any data) {
  return put(s, (struct op){.kind = HOST_FUNCTION, .what = function, .from = (u64)data});
}

/* -- copies and fills. What is not the driver's is pageable: read at the call, and a copy into it is waited for */
enum { PAGEABLE, ITS_OWN, LOST };
static int place_of(u64 address, u64 bytes) {
  int place = PAGEABLE;
  pthread_mutex_lock(&lock);
  for (u64 end = address + bytes; address < end && place != LOST;) {
    struct range *one = range_of(address, 1);
    if (one ? one->kind == RESERVED : place == ITS_OWN) place = LOST;
    if (!one) break;
    if (place == PAGEABLE) place = ITS_OWN;
    address = one->start + one->bytes;
  }
  pthread_mutex_unlock(&lock);
  return place;
}
static int copy(u64 to, u64 from, u64 bytes, any s, int waits) {
  IN_CONTEXT;
  struct op op = {.kind = COPY, .to = to, .from = from, .bytes = bytes};
  if (!bytes) return SUCCESS;
  int source = place_of(from, bytes), target = place_of(to, bytes), captures = 0;
  if (source == LOST || target == LOST) return refuse(ILLEGAL_ADDRESS);
  pthread_mutex_lock(&lock);
  struct stream *stream = stream_of(s);
  if (stream) captures = stream->capture;
  pthread_mutex_unlock(&lock);
  if (source == PAGEABLE && !captures) op.staged = memcpy(malloc(bytes), (any)from, bytes);
  int status = put(s, op);
  if (status) free(op.staged);
  return status || captures || !(waits || target == PAGEABLE) ? status : cuStreamSynchronize(s);
}
int cuMemcpyAsync(u64 to, u64 from, u64 n, any s) { return copy(to, from, n, s, 0); }
int cuMemcpy(u64 to, u64 from, u64 n) { return copy(to, from, n, 0, 1); }
int cuMemcpyHtoDAsync_v2(u64 to, u64 from, u64 n, any s) { return copy(to, from, n, s, 0); }
int cuMemcpyDtoHAsync_v2(u64 to, u64 from, u64 n, any s) { return copy(to, from, n, s, 0); }
int cuMemcpyDtoDAsync_v2(u64 to, u64 from, u64 n, any s) { return copy(to, from, n, s, 0); }
int cuMemcpyHtoD_v2(u64 to, u64 from, u64 n) { return copy(to, from, n, 0, 1); }
int cuMemcpyDtoH_v2(u64 to, u64 from, u64 n) { return copy(to, from, n, 0, 1); }
int cuMemcpyDtoD_v2(u64 to, u64 from, u64 n) { return copy(to, from, n, 0, 1); }
static int set(u64 p, u64 v, int width, u64 n, any s, int waits) {
  IN_CONTEXT;
  if (n && place_of(p, n * width) != ITS_OWN) return refuse(INVALID_VALUE);
  int status = put(s, (struct op){.kind = FILL, .to = p, .from = v, .width = width, .bytes = n});
  return status || !waits ? status : cuStreamSynchronize(s);
}
int cuMemsetD8Async(u64 p, unsigned char v, u64 n, any s) { return set(p, v, 1, n, s, 0); }
int cuMemsetD32Async(u64 p, unsigned v, u64 n, any s) { return set(p, v, 4, n, s, 0); }
int cuMemsetD8_v2(u64 p, unsigned char v, u64 n) { return set(p, v, 1, n, 0, 1); }
int cuMemsetD32_v2(u64 p, unsigned v, u64 n) { return set(p, v, 4, n, 0, 1); }

/* -- managed memory: it is at its address wherever it was told to go, so a prefetch only keeps the stream's order */
static struct range *managed(u64 p, u64 n) { /* with the lock held */
  struct range *one = n ? range_of(p, n) : 0;
  return one && one->kind == MANAGED ? one : 0;
}
int cuMemPrefetchAsync_v2(u64 p, u64 n, u64 place, unsigned flags, any s) { /* a kind of place, then its number */
  IN_CONTEXT;
  pthread_mutex_lock(&lock);
  struct range *one = managed(p, n);
  int status = one && !flags ? put(s, (struct op){.kind = FILL}) : refuse(INVALID_VALUE);
  if (!status) {
    u64 first = (p - one->start) / PAGE, last = (p - one->start + n - 1) / PAGE;
    memset(one->told + first, (int)(unsigned)place, last - first + 1);
  }
  pthread_mutex_unlock(&lock);
  return status;
}
int cuMemAdvise_v2(u64 p, u64 n, int advice, u64 place) {
  IN_CONTEXT;
  pthread_mutex_lock(&lock);
  int status = managed(p, n) ? SUCCESS : refuse(INVALID_VALUE);
  pthread_mutex_unlock(&lock);
  return status;
}
/* The kind of place that all of a range was told to go to last, 0 where its pages differ; nothing else is known. */
int cuMemRangeGetAttribute(int *out, u64 bytes, int attribute, u64 p, u64 n) {
  IN_CONTEXT;
  if (attribute != 4) return NOT_SUPPORTED; /* CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION */
  int status = INVALID_VALUE;
  pthread_mutex_lock(&lock);
  struct range *one = bytes == sizeof *out ? managed(p, n) : 0;
  if (one) {
    u64 first = (p - one->start) / PAGE, last = (p - one->start + n - 1) / PAGE;
    int told = one->told[first];
    for (u64 page = first; page <= last; page++) if (one->told[page] != told) told = 0;
    *out = told == 1 ? 0 : told == 2 ? -1 : -2; /* the device, the processor, CU_DEVICE_INVALID */
    status = SUCCESS;
  }
  pthread_mutex_unlock(&lock);
  return status ? refuse(status) : SUCCESS;
}

/* -- memory in stream order: freed when the stream comes there. The pools are all one, the device's memory */
int cuMemAllocAsync(u64 *p, u64 n, any s) { IN_CONTEXT; return take(p, n, DEVICE_MEMORY); }
int cuMemAllocFromPoolAsync(u64 *p, u64 n, any pool, any s) { return cuMemAllocAsync(p, n, s); }
int cuMemFreeAsync(u64 p, any s) { IN_CONTEXT; return put(s, (struct op){.kind = FREE, .to = p}); }
int cuDeviceGetDefaultMemPool(any *pool, int d) { return give(pool); }
int cuMemPoolCreate(any *pool, any properties) { return give(pool); }
int cuMemPoolDestroy(any pool) { return SUCCESS; }
int cuMemPoolSetAttribute(any pool, int a, any v) { return SUCCESS; }
int cuMemPoolGetAttribute(any pool, int a, u64 *v) { *v = 0; return SUCCESS; }
int cuMemPoolSetAccess(any pool, any access, u64 n) { return SUCCESS; }

/* -- events */
int cuEventCreate(struct event **out, unsigned flags) {
  IN_CONTEXT;
  pthread_mutex_lock(&lock);
  struct event *one = calloc(1, sizeof *one);
  one->next = events;
  *out = events = one;
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}
#define WITH_EVENT(event, ...)                  \
  if (state != READY) return NOT_INITIALIZED; \
  int status = INVALID_HANDLE;                   \
  pthread_mutex_lock(&lock);                     \
  if (is_event(event)) { status = SUCCESS; __VA_ARGS__; } \
  pthread_mutex_unlock(&lock);                   \
  return status == INVALID_HANDLE ? refuse(status) : status
int cuEventDestroy_v2(struct event *e) {
  WITH_EVENT(e, {
    for (struct event **at = &events; *at; at = &(*at)->next) if (*at == e) { *at = e->next; break; }
    free(e);
  });
}
int cuEventRecord(struct event *e, any s) {
  WITH_EVENT(e, {
    struct stream *stream = stream_of(s);
    e->graph = stream && stream->capture == 1 ? stream->graph : 0;
    if (!e->graph) status = put(s, (struct op){.kind = RECORD, .what = e, .from = ++e->recorded});
  });
}
int cuEventRecordWithFlags(struct event *e, any s, unsigned flags) { return cuEventRecord(e, s); }
int cuEventQuery(struct event *e) {
  WITH_EVENT(e, {
    go_on();
    status = e->graph ? CAPTURE_UNSUPPORTED : e->done >= e->recorded ? SUCCESS : NOT_READY;
  });
}
int cuEventSynchronize(struct event *e) {
  u64 end_ns = now_ns() + deadline_s * 1000000000;
  int status;
  while ((status = cuEventQuery(e)) == NOT_READY && now_ns() < end_ns) usleep(PAUSE_US);
  return status == NOT_READY ? LAUNCH_TIMEOUT : status;
}
int cuEventElapsedTime_v2(float *ms, struct event *a, struct event *b) {
  WITH_EVENT(a, {
    if (!a->done || !b->done) status = NOT_READY;
    else *ms = (float)((double)(b->at_ns - a->at_ns) / 1e6);
  });
}
int cuEventElapsedTime(float *ms, struct event *a, struct event *b) { return cuEventElapsedTime_v2(ms, a, b); }
int cuStreamWaitEvent(any s, struct event *e, unsigned flags) {
  WITH_EVENT(e, {
    struct stream *stream = stream_of(s);
    if (!stream) status = refuse(INVALID_HANDLE);
    else if (!e->graph) status = put(s, (struct op){.kind = FOLLOW, .what = e, .from = e->recorded});
    else if (!stream->capture) stream->capture = 1, stream->graph = e->graph; /* it joins the capture */
  });
}

/* -- graphs: what a captured stream was given, in that order */
int cuThreadExchangeStreamCaptureMode(int *mode) {
  int before = capture_mode;
  capture_mode = *mode, *mode = before;
  return SUCCESS;
}
int cuStreamBeginCapture_v2(any s, int mode) {
  WITH_STREAM(s, {
    if (stream->capture || (u64)s <= 2) status = refuse(CAPTURE_UNSUPPORTED);
    else {
      stream->graph = calloc(1, sizeof *stream->graph);
      stream->graph->last = &stream->graph->first;
      stream->capture = 1;
    }
  });
}
int cuStreamEndCapture(any s, any *graph) {
  WITH_STREAM(s, {
    *graph = 0;
    if (!stream->capture) status = refuse(INVALID_VALUE);
    else {
      struct graph *made = stream->graph;
      if (stream->capture == 2) status = CAPTURE_INVALIDATED;
      else *graph = made;
      for (struct stream *one = streams; one; one = one->next) if (one->graph == made) one->capture = 0, one->graph = 0;
    }
  });
}
int cuStreamIsCapturing(any s, int *v) { WITH_STREAM(s, *v = stream->capture); }
int cuStreamGetCaptureInfo_v3(any s, int *v, u64 *id, any *graph, any *nodes, any *edges, u64 *n) {
  WITH_STREAM(s, {
    *v = stream->capture;
    if (id) *id = (u64)stream->graph;
    if (graph) *graph = stream->graph;
    if (nodes) *(any *)nodes = 0;
    if (edges) *(any *)edges = 0;
    if (n) *n = 0;
  });
}
int cuStreamGetCaptureInfo_v2(any s, int *v, u64 *id, any *graph, any *nodes, u64 *n) {
  return cuStreamGetCaptureInfo_v3(s, v, id, graph, nodes, 0, n);
}
int cuGraphInstantiateWithFlags(any *out, any graph, u64 flags) { *out = graph; return SUCCESS; }
int cuGraphInstantiateWithParams(any *out, any graph, any params) { *out = graph; return SUCCESS; }
int cuGraphLaunch(any graph, any s) { return put(s, (struct op){.kind = LAUNCH, .what = graph}); }
int cuGraphUpload(any graph, any s) { return SUCCESS; }
int cuGraphGetNodes(any graph, any nodes, u64 *n) { *n = HANDLE(graph, graph)->nodes; return SUCCESS; }
int cuGraphExecDestroy(any graph) { return SUCCESS; } /* the same thing as its graph, and as small */
int cuGraphDestroy(any graph) { return SUCCESS; }

/* -- code: handles, and of Zico's own kernels what they mean */
static const char *const meant[] = {"zico_progress", "zico_spin", "zico_scrub", "zico_digest", "zico_tell_digest"};
enum { PROGRESS = 1, SPIN, SCRUB, MIX, TELL, LANES_BYTES = 256, OTHER = 16 };
int cuModuleLoadData(any *m, any image) { IN_CONTEXT; return give(m); }
int cuModuleLoad(any *m, const char *path) { return cuModuleLoadData(m, (any)path); }
int cuModuleLoadDataEx(any *m, any image, unsigned n, any o, any v) { return cuModuleLoadData(m, image); }
int cuModuleLoadFatBinary(any *m, any image) { return cuModuleLoadData(m, image); }
int cuModuleUnload(any m) { return SUCCESS; }
int cuModuleGetLoadingMode(int *mode) { *mode = 2; return SUCCESS; } /* lazily */
int cuModuleGetFunction(any *f, any m, const char *name) {
  *f = (any)OTHER;
  for (u64 i = 0; i < 5; i++) if (!strcmp(name, meant[i])) *f = (any)(PROGRESS + i);
  return SUCCESS;
}
int cuModuleGetGlobal_v2(u64 *p, u64 *n, any m, const char *name) { return NOT_FOUND; }
int cuLibraryLoadData(any *l, any code, any a, any b, unsigned c, any d, any e, unsigned f) { return give(l); }
int cuLibraryUnload(any l) { return SUCCESS; }
int cuLibraryGetKernel(any *k, any l, const char *name) { return cuModuleGetFunction(k, l, name); }
int cuLibraryGetModule(any *m, any l) { *m = l; return SUCCESS; }
int cuLibraryGetGlobal(u64 *p, u64 *n, any l, const char *name) { *n = 1 << 16; return cuMemAlloc_v2(p, *n); }
int cuLibraryGetManaged(u64 *p, u64 *n, any l, const char *name) { return cuLibraryGetGlobal(p, n, l, name); }
int cuKernelGetFunction(any *f, any k) { *f = k; return SUCCESS; }
int cuKernelGetAttribute(int *v, int a, any k, int d) { *v = a == 0 ? 1024 : 0; return SUCCESS; }
int cuKernelSetAttribute(int a, int v, any k, int d) { return SUCCESS; }
int cuFuncGetAttribute(int *v, int a, any f) { *v = a == 0 ? 1024 : 0; return SUCCESS; }
int cuFuncSetAttribute(any f, int a, int v) { return SUCCESS; }
int cuFuncSetCacheConfig(any f, int c) { return SUCCESS; }
int cuFuncGetModule(any *m, any f) { *m = f; return SUCCESS; }
int cuFuncGetName(const char **s, any f) { *s = "a kernel"; return SUCCESS; }
int cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, any f, int threads, u64 bytes, unsigned flags) {
  *n = 2;
  return SUCCESS;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, any f, int threads, u64 bytes) { *n = 2; return SUCCESS; }
int cuLaunchKernel(any f, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c, unsigned n, any s,
                   u64 **arguments, any extra) {
  switch ((u64)f) {
    case PROGRESS: return put(s, (struct op){.kind = WRITE, .to = *arguments[0], .from = *arguments[1]});
    case SPIN:
      return put(s, (struct op){.kind = AWAIT, .to = *arguments[0], .from = *arguments[1], .stop = *arguments[2],
                                .given_up = *arguments[3]});
    case SCRUB: return put(s, (struct op){.kind = FILL, .to = *arguments[0], .width = 1, .bytes = *arguments[1]});
    case MIX:
      return put(s, (struct op){.kind = DIGEST, .from = *arguments[0], .bytes = *arguments[1], .to = *arguments[2]});
    case TELL: {
      int status = put(s, (struct op){.kind = COPY, .to = *arguments[1], .from = *arguments[0], .bytes = LANES_BYTES});
      return status ? status : put(s, (struct op){.kind = FILL, .to = *arguments[0], .width = 1, .bytes = LANES_BYTES});
    }
    default: return put(s, (struct op){.kind = KERNEL});
  }
}
int cuLaunchKernelEx(const any *config, any f, u64 **arguments, any extra) { /* the stream is its fifth word */
  return cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, config[4], arguments, extra);
}
/* What PyTorch looks up and a device may lack: multicast, contexts of parts of a device. */
#define LACKS(name) int name(void) { return NOT_SUPPORTED; }
LACKS(cuMulticastCreate) LACKS(cuMulticastAddDevice) LACKS(cuMulticastBindMem) LACKS(cuMulticastUnbind)
LACKS(cuGreenCtxCreate) LACKS(cuGreenCtxDestroy) LACKS(cuGreenCtxStreamCreate) LACKS(cuCtxFromGreenCtx)
LACKS(cuDeviceGetDevResource) LACKS(cuDevResourceGenerateDesc) LACKS(cuDevSmResourceSplitByCount)
LACKS(cuStreamWriteValue32_v2)
int cuProfilerStart(void) { return SUCCESS; }
int cuProfilerStop(void) { return SUCCESS; }

/* -- the management library */
int nvmlInit_v2(void) { return SUCCESS; }
int nvmlInit(void) { return SUCCESS; }
int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = (unsigned)devices; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, any *d) { *d = (any)(u64)(i + 1); return SUCCESS; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *s, any *d) { *d = (any)1; return SUCCESS; }
int nvmlDeviceGetMemoryInfo(any d, u64 *out) {
  out[0] = total_bytes, out[1] = total_bytes - used_bytes, out[2] = used_bytes;
  return SUCCESS;
}
const char *nvmlErrorString(int status) { return status ? "not supported" : "success"; }
int nvmlDeviceGetCurrPcieLinkGeneration(any d, unsigned *v) { *v = 5; return SUCCESS; }
int nvmlDeviceGetCurrPcieLinkWidth(any d, unsigned *v) { *v = 16; return SUCCESS; }
#define HAS_NO(name) int name(void) { return 3; } /* NVML_ERROR_NOT_SUPPORTED */
HAS_NO(nvmlDeviceGetNvLinkRemoteDeviceType) HAS_NO(nvmlDeviceGetNvLinkRemotePciInfo_v2) HAS_NO(nvmlDeviceGetNvLinkState)
HAS_NO(nvmlDeviceGetGpuFabricInfoV)
int nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = 13000; return SUCCESS; }
int nvmlDeviceGetComputeRunningProcesses(any d, unsigned *n, any out) { *n = 0; return SUCCESS; }
