/* Places every allocation of torch next to a page without access.
 *
 *   cc -O2 -shared -fPIC -o fence.so fence.c -ldl
 *   LD_PRELOAD=./fence.so FENCE_ALIGN=16 python ...
 *
 * torch and oneDNN allocate tensors with posix_memalign. After fence_enable(1) each such allocation has
 * separate pages: it ends (or, for every second one, begins) at the border of a page without access. A kernel
 * that reads or writes one byte too far ends with SIGSEGV instead of reading the memory of another value.
 * fence_fill(byte) fills new memory, so that a result that was never written differs between two calls.
 * Freed pages also lose their access, and their addresses are never used again.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE 4096UL
#define REGION (1UL << 40)      /* bytes of addresses; only accessible pages use memory */
#define LARGEST (1UL << 28)     /* larger allocations are not fenced */

static uint8_t *region;
static uint32_t *lengths;       /* pages of the allocation that begins at a page; 0 if none does */
static atomic_size_t next_page;
static atomic_int enabled;
static atomic_int fill = -1;    /* the byte that new memory contains; -1 leaves it at 0 */
static size_t alignment_used = 16;
static int (*real_memalign)(void **, size_t, size_t);
static void (*real_free)(void *);
static void *(*real_realloc)(void *, size_t);
static size_t (*real_usable)(void *);

static void setup(void) {
    real_memalign = dlsym(RTLD_NEXT, "posix_memalign");
    real_free = dlsym(RTLD_NEXT, "free");
    real_realloc = dlsym(RTLD_NEXT, "realloc");
    real_usable = dlsym(RTLD_NEXT, "malloc_usable_size");
}

/* Turns the fence on or off. Returns 0, or -1 if the addresses cannot be reserved. */
int fence_enable(int on) {
    if (on && !region) {
        const char *text = getenv("FENCE_ALIGN");
        if (text) alignment_used = strtoul(text, NULL, 10);
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        void *at = mmap(NULL, REGION, PROT_NONE, flags, -1, 0);
        void *table = mmap(NULL, REGION / PAGE * sizeof(uint32_t), PROT_READ | PROT_WRITE, flags, -1, 0);
        if (at == MAP_FAILED || table == MAP_FAILED) return -1;
        lengths = table;
        region = at;
    }
    atomic_store(&enabled, on);
    return 0;
}

/* Sets the byte that new memory contains. A value that depends on it was never written. */
void fence_fill(int byte) { atomic_store(&fill, byte); }

/* Returns the number of allocations that were fenced so far, times the pages that each took. */
size_t fence_pages(void) { return atomic_load(&next_page); }

static int inside(const void *p) {
    return region && (const uint8_t *)p >= region && (const uint8_t *)p < region + REGION;
}

static size_t first_page(const void *p) {
    size_t page = (size_t)((const uint8_t *)p - region) / PAGE;
    while (page > 0 && !lengths[page]) page--;
    return page;
}

static void *fenced(size_t size) {
    size_t rounded = (size + alignment_used - 1) / alignment_used * alignment_used;
    size_t pages = (rounded + PAGE - 1) / PAGE;
    if (!pages) pages = 1;
    size_t page = atomic_fetch_add(&next_page, pages + 1) + 1;     /* a page without access on both sides */
    if ((page + pages + 1) * PAGE > REGION) return NULL;
    uint8_t *at = region + page * PAGE;
    if (mprotect(at, pages * PAGE, PROT_READ | PROT_WRITE)) return NULL;
    lengths[page] = (uint32_t)pages;
    int byte = atomic_load(&fill);
    if (byte >= 0) memset(at, byte, pages * PAGE);
    return page % 2 ? at + pages * PAGE - rounded : at;
}

int posix_memalign(void **out, size_t alignment, size_t size) {
    if (!real_memalign) setup();
    if (atomic_load(&enabled) && size && size <= LARGEST && alignment <= PAGE) {
        void *p = fenced(size);
        if (p) { *out = p; return 0; }
    }
    return real_memalign(out, alignment, size);
}

void free(void *p) {
    if (!real_free) setup();
    if (!inside(p)) { real_free(p); return; }
    size_t page = first_page(p);
    size_t bytes = lengths[page] * PAGE;
    lengths[page] = 0;
    madvise(region + page * PAGE, bytes, MADV_DONTNEED);
    mprotect(region + page * PAGE, bytes, PROT_NONE);
}

size_t malloc_usable_size(void *p) {
    if (!real_usable) setup();
    if (!inside(p)) return real_usable(p);
    size_t page = first_page(p);
    return (size_t)(region + (page + lengths[page]) * PAGE - (uint8_t *)p);
}

void *realloc(void *p, size_t size) {
    if (!real_realloc) setup();
    if (!inside(p)) return real_realloc(p, size);
    size_t old = malloc_usable_size(p);
    uint8_t *fresh = malloc(size);
    if (!fresh) return NULL;
    for (size_t i = 0; i < (old < size ? old : size); i++) fresh[i] = ((uint8_t *)p)[i];
    free(p);
    return fresh;
}
