// NVIDIA's driver library, as far as PyTorch and dicp call it, without a GPU: a launch is handed to
// a callback, and a thread without a context is told so.

#include <cstddef>
#include <cstring>

struct Launch {
  unsigned long function, stream;
  unsigned grid[3], block[3], shared;
  void **parameters;
};

static int (*run)(Launch *) = nullptr;
static thread_local void *context = nullptr;
static unsigned long modules = 0x7000;
enum { SUCCESS = 0, NO_CONTEXT = 201, NOT_SUPPORTED = 801 };

extern "C" {

void stand_in_launches(int (*callback)(Launch *)) { run = callback; }

int cuInit(unsigned) { return SUCCESS; }
int cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
int cuDeviceGet(int *device, int index) { *device = index; return SUCCESS; }
int cuDeviceGetAttribute(int *value, int, int) { *value = 1; return SUCCESS; }
int cuCtxGetCurrent(void **found) { *found = context; return SUCCESS; }
int cuCtxSetCurrent(void *given) { context = given; return SUCCESS; }
int cuDevicePrimaryCtxGetState(int, unsigned *flags, int *active) {
  *flags = 0;
  *active = 1;
  return SUCCESS;
}
int cuDevicePrimaryCtxRetain(void **found, int device) {
  *found = (void *)(0x100l + device);
  return SUCCESS;
}
int cuGetErrorString(int, const char **text) { *text = "stand-in result"; return SUCCESS; }

int cuModuleLoadData(void **module, const void *) {
  *module = (void *)(modules += 16);
  return SUCCESS;
}
int cuModuleGetFunction(void **function, void *module, const char *) {
  *function = (char *)module + 8;
  return SUCCESS;
}
int cuModuleUnload(void *) { return SUCCESS; }
int cuFuncSetAttribute(void *, int, int) { return SUCCESS; }
int cuFuncGetAttribute(int *value, int, void *) { *value = 0; return SUCCESS; }
int cuFuncSetCacheConfig(void *, int) { return SUCCESS; }

int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void *stream, void **parameters, void **) {
  if (!context) return NO_CONTEXT;
  Launch launch = {(unsigned long)function, (unsigned long)stream, {gx, gy, gz}, {bx, by, bz},
                   shared, parameters};
  return run ? run(&launch) : SUCCESS;
}

#define REFUSED(name) \
  int name() { return NOT_SUPPORTED; }
REFUSED(cuLaunchCooperativeKernel)
REFUSED(cuModuleLoad)
REFUSED(cuModuleLoadDataEx)
REFUSED(cuPointerGetAttribute)
REFUSED(cuLinkAddData_v2)
REFUSED(cuLinkComplete)
REFUSED(cuLinkCreate_v2)
REFUSED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
REFUSED(cuTensorMapEncodeTiled)
}
