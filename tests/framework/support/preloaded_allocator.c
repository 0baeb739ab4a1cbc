/* An allocator that stands before the C library's, as jemalloc or tcmalloc do under LD_PRELOAD. */

#include <errno.h>
#include <stddef.h>

void *__libc_malloc(size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);
void __libc_free(void *address);

void *malloc(size_t bytes) { return __libc_malloc(bytes); }

void free(void *address) { __libc_free(address); }

void *aligned_alloc(size_t alignment, size_t bytes) { return __libc_memalign(alignment, bytes); }

int posix_memalign(void **address, size_t alignment, size_t bytes)
{
    void *found = __libc_memalign(alignment, bytes);

    if (found == NULL)
        return ENOMEM;
    *address = found;
    return 0;
}
