/* Stands in for the pluggable allocator of PyTorch's build for CUDA, where that build is not installed.

Built twice: with -DCORE it is libc10_cuda.so, without libtorch_cuda.so. Names, and with them symbols, are PyTorch's. */
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <typeinfo>
#include <vector>

namespace c10::cuda::CUDACachingAllocator {
struct CUDAAllocator {
  virtual ~CUDAAllocator() = default;
  virtual void *raw_alloc(std::size_t bytes, int device, void *stream) = 0;
  virtual void raw_delete(void *address, std::size_t bytes, int device, void *stream) = 0;
  virtual void cacheInfo(signed char device, std::size_t *largest) = 0;
  virtual const char *name() const = 0;
};
extern std::atomic<CUDAAllocator *> allocator;
}  // namespace c10::cuda::CUDACachingAllocator

#ifdef CORE
std::atomic<c10::cuda::CUDACachingAllocator::CUDAAllocator *> c10::cuda::CUDACachingAllocator::allocator;
#else
namespace torch::cuda::CUDAPluggableAllocator {
typedef void *Allocate(std::size_t, int, void *);
typedef void Free(void *, std::size_t, int, void *);

struct CUDAPluggableAllocator : c10::cuda::CUDACachingAllocator::CUDAAllocator {
  CUDAPluggableAllocator(Allocate *allocate, Free *free) : allocate_(allocate), free_(free) {}
  void *raw_alloc(std::size_t bytes, int device, void *stream) override;
  void raw_delete(void *address, std::size_t bytes, int device, void *stream) override;
  void cacheInfo(signed char device, std::size_t *largest) override;
  const char *name() const override { return "pluggable"; }
  Allocate *allocate_;
  Free *free_;
};

void *CUDAPluggableAllocator::raw_alloc(std::size_t bytes, int device, void *stream) {
  return allocate_(bytes, device, stream);
}
void CUDAPluggableAllocator::raw_delete(void *address, std::size_t bytes, int device, void *stream) {
  free_(address, bytes, device, stream);
}
void CUDAPluggableAllocator::cacheInfo(signed char, std::size_t *) { throw std::runtime_error("no cacheInfo"); }
}  // namespace torch::cuda::CUDAPluggableAllocator

using c10::cuda::CUDACachingAllocator::allocator;
using namespace torch::cuda::CUDAPluggableAllocator;
enum { DEVICE = 0, BYTES = 65536 };
static void *const STREAM = (void *)0x10;
static const int64_t *live_bytes;

/* Frees, as destructors of C++ do, what is left when the interpreter is gone. */
static struct Left {
  std::vector<void *> addresses;
  ~Left() {
    for (void *address : addresses) allocator.load()->raw_delete(address, BYTES, DEVICE, STREAM);
    if (live_bytes) std::printf("at the end %ld\n", (long)*live_bytes), std::fflush(stdout);
  }
} left;

extern "C" {
void use_allocator(uint64_t allocate, uint64_t free) {
  allocator = new torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator((Allocate *)allocate, (Free *)free);
}
/* What cuDNN's autotuning may use, -1 where the allocator does not say. */
int64_t largest_workspace() {
  std::size_t largest = 0;
  try {
    allocator.load()->cacheInfo(DEVICE, &largest);
  } catch (const std::exception &) {
    return -1;
  }
  return (int64_t)largest;
}
/* Make a tensor on a device; the class and text of what was raised instead are copied. */
uint64_t make(uint64_t bytes, int device, char *raised, uint64_t room) {
  try {
    return (uint64_t)allocator.load()->raw_alloc(bytes, device, STREAM);
  } catch (const std::exception &error) {
    std::snprintf(raised, room, "%s: %s", typeid(error).name(), error.what());
    return 0;
  }
}
/* Make tensors whose frees come when the process ends, and then print what lives. */
void leave(int count, const int64_t *live) {
  live_bytes = live;
  for (int i = 0; i < count; i++) left.addresses.push_back(allocator.load()->raw_alloc(BYTES, DEVICE, STREAM));
}
const char *allocator_name() { return allocator.load()->name(); }
}
#endif
