/* Finds the driver's functions as XLA's stub does: each at its first call, by dlsym, and keeps what it found. */
#include <dlfcn.h>
#include <stdint.h>

typedef uint64_t u64;
typedef void *any;

static any find(const char *name) {
  static any driver;
  if (!driver) driver = dlopen(DRIVER, RTLD_NOW | RTLD_LOCAL);
  return driver ? dlsym(driver, name) : 0;
}

#define FUNCTION(name, parameters, arguments)   \
  int xla_##name parameters {                   \
    static int(*found) parameters;              \
    if (!found) found = find(#name);            \
    return found ? found arguments : -1;        \
  }

FUNCTION(cuMemAllocFromPoolAsync, (u64 * p, u64 n, any pool, any s), (p, n, pool, s))
FUNCTION(cuMemAllocAsync, (u64 * p, u64 n, any s), (p, n, s))
FUNCTION(cuMemFreeAsync, (u64 p, any s), (p, s))
FUNCTION(cuMemGetInfo_v2, (u64 * left, u64 *total), (left, total))
FUNCTION(cuDeviceTotalMem_v2, (u64 * total, int device), (total, device))
FUNCTION(cuMemPoolSetAttribute, (any pool, int attribute, any value), (pool, attribute, value))
FUNCTION(cuDriverGetVersion, (int *version), (version))

int xla_looks_up_at_its_end;

__attribute__((destructor)) static void end(void) {
  if (xla_looks_up_at_its_end) find("cuDriverGetVersion");
}
