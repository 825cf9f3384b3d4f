/* NVIDIA's driver library without a device: it answers as one GPU of compute capability 9.0 would,
   and writes down what it is asked to load and to launch in the place of doing it. A launch's
   parameters are read as the driver reads them: as many and as wide as the kernel's binary says,
   which `stub_expect` tells for each kernel. */

#include <stdint.h>
#include <string.h>

enum { MOST = 256, WIDEST = 64 };

typedef struct {
  uint64_t function, stream;
  uint32_t grid[3], block[3], shared, count;
  uint64_t values[WIDEST];
} Launch;

typedef struct {
  uint32_t grid[3], block[3], shared;
  uint64_t stream;
  void *attributes;
  uint32_t attribute_count;
} Config; /* CUlaunchConfig */

typedef struct {
  char name[256];
  uint32_t count, widths[WIDEST], dynamic_shared;
} Function;

static Function functions[MOST];
static uint32_t function_count;
static const void *modules[MOST];
static uint32_t module_count;
static _Thread_local void *context;
Launch stub_launches[MOST];
uint32_t stub_launch_count, stub_set_attributes, stub_capturing, stub_unload_count;

void stub_expect(uint64_t function, uint32_t count, const uint32_t *widths) {
  Function *f = &functions[function - 0x7f0000000000];
  f->count = count;
  memcpy(f->widths, widths, count * sizeof *widths);
}

uint32_t stub_dynamic_shared(uint64_t function) {
  return functions[function - 0x7f0000000000].dynamic_shared;
}

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
int cuDeviceGetCount(int *count) { return *count = 1, 0; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal == 0 ? 0 : 101; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  /* cuda.h: shared memory by consent and per multiprocessor, capability, multiprocessors, warp */
  int known[][2] = {{97, 232448}, {81, 233472}, {75, 9}, {76, 0}, {16, 132}, {10, 32}, {12, 65536}};
  *value = 0;
  for (unsigned k = 0; k < sizeof known / sizeof *known; ++k)
    if (known[k][0] == attribute) *value = known[k][1];
  return 0;
}
int cuDevicePrimaryCtxRetain(void **found, int device) { return *found = (void *)0x77, 0; }
int cuCtxGetCurrent(void **found) { return *found = context, 0; }
int cuCtxSetCurrent(void *wanted) { return context = wanted, 0; }
int cuCtxGetDevice(int *device) { return *device = 0, context ? 0 : 201; }
int cuCtxGetLimit(size_t *value, int limit) { return *value = 0, 0; }
int cuCtxSetLimit(int limit, size_t value) { return 0; }
int cuStreamIsCapturing(void *stream, int *status) { return *status = stub_capturing, 0; }
int cuPointerGetAttribute(void *data, int attribute, uint64_t pointer) {
  return *(uint64_t *)data = pointer, 0;
}
int cuGetErrorString(int result, const char **text) { return *text = "refused by the stub", 0; }

int cuModuleLoadData(void **module, const void *image) {
  if (!context) return 201;
  if (memcmp(image, "\177ELF", 4)) return 200; /* CUDA_ERROR_INVALID_IMAGE */
  modules[module_count] = image;
  return *module = (void *)(uintptr_t)++module_count, 0;
}
int cuModuleUnload(void *module) { return ++stub_unload_count, 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
  if (!module || (uintptr_t)module > module_count) return 1;
  strncpy(functions[function_count].name, name, sizeof functions->name - 1);
  return *function = (void *)(0x7f0000000000 + function_count++), 0;
}
int cuFuncGetAttribute(int *value, int attribute, void *function) {
  return *value = attribute == 0 ? 1024 : 0, 0; /* threads of a block at most */
}
int cuFuncSetAttribute(void *function, int attribute, int value) {
  if (attribute == 17) return 1; /* a newer driver's */
  if (attribute == 8) functions[(uintptr_t)function - 0x7f0000000000].dynamic_shared = value;
  return attribute == 8 && value > 232448 ? 1 : 0;
}
int cuFuncSetCacheConfig(void *function, int config) { return 0; }
int cuOccupancyMaxActiveClusters(int *count, void *function, const void *config) { return 801; }
int cuTensorMapEncodeTiled(void) { return 801; }
int cuTensorMapEncodeIm2col(void) { return 801; }

int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads,
                   unsigned block_y, unsigned block_z, unsigned shared, void *stream,
                   void **parameters, void **extra) {
  if (!context) return 201;
  if (!x || !y || !z || !threads || threads > 1024 || extra) return 1;
  if (shared > 49152 && shared > functions[(uintptr_t)function - 0x7f0000000000].dynamic_shared)
    return 1;
  Function *f = &functions[(uintptr_t)function - 0x7f0000000000];
  Launch now = {(uintptr_t)function, (uintptr_t)stream, {x, y, z}, {threads, block_y, block_z},
                shared, f->count, {0}};
  for (unsigned k = 0; k < f->count; ++k) memcpy(&now.values[k], parameters[k], f->widths[k]);
  stub_launches[stub_launch_count++ % MOST] = now;
  return 0;
}
int cuLaunchKernelEx(const Config *c, void *function, void **parameters, void **extra) {
  if (c->attribute_count) return 1;
  return cuLaunchKernel(function, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1],
                        c->block[2], c->shared, (void *)c->stream, parameters, extra);
}
