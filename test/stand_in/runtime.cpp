// The CUDA runtime library, as far as PyTorch calls it, without a GPU: its memory is the host's.
//
// PyTorch's own kernels are not run (each is named once on standard error): gpu.py registers
// operators of the host in their place. Copies, memory sets and graph launches made while a stream
// is captured are told to a callback, which keeps and repeats them.

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

typedef unsigned long word;
enum Event { BEGIN, END, REPLAY, COPY, SET };
typedef void (*Callback)(int event, word a, word b, word c);

static Callback tell = nullptr;
static std::mutex lock;
static std::map<char *, size_t> device_memory, pinned_memory;
static std::map<const void *, const char *> kernel_names;
static std::set<const void *> skipped_kernels;
static std::atomic<word> next_handle{0x1000}, captured_stream{0};
static word captures = 0;
static thread_local int current_device = 0;
static thread_local struct { dim3 grid, block; size_t shared; void *stream; } configuration;

static int devices() {
  const char *given = getenv("STAND_IN_DEVICES");
  return given ? atoi(given) : 1;
}

static bool holds(std::map<char *, size_t> &memory, const void *place) {
  auto after = memory.upper_bound((char *)place);
  if (after == memory.begin()) return false;
  --after;
  return (char *)place < after->first + after->second;
}

static cudaError_t skip(const void *kernel) {
  std::lock_guard<std::mutex> guard(lock);
  if (skipped_kernels.insert(kernel).second)
    fprintf(stderr, "stand-in GPU: not run: %s\n", kernel_names[kernel]);
  return cudaSuccess;
}

static cudaError_t copy(void *to, const void *from, size_t size) {
  if (captured_stream && tell) tell(COPY, (word)to, (word)from, size);
  memmove(to, from, size);
  return cudaSuccess;
}

extern "C" {

void stand_in_callback(Callback callback) { tell = callback; }
int stand_in_is_device(void *place) {
  std::lock_guard<std::mutex> guard(lock);
  return holds(device_memory, place);
}

// ---- devices ------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int *count) { *count = devices(); return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { *device = current_device; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { current_device = device; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) { *can = 1; return cudaSuccess; }
const char *cudaGetErrorName(cudaError_t) { return "stand-in error"; }
const char *cudaGetErrorString(cudaError_t) { return "stand-in error"; }

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
  snprintf(text, size, "0000:%02d:00.0", device);
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device) {  // as an H200's
  memset(p, 0, sizeof *p);
  strcpy(p->name, "stand-in GPU");
  p->major = 9;
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->totalGlobalMem = 8ul << 30;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  for (int k = 0; k < 3; ++k) {
    p->maxThreadsDim[k] = k == 2 ? 64 : 1024;
    p->maxGridSize[k] = k ? 65535 : 2147483647;
  }
  p->l2CacheSize = 60 << 20;
  p->unifiedAddressing = p->concurrentKernels = p->cooperativeLaunch = 1;
  p->textureAlignment = 512;
  p->pciBusID = device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp p;
  cudaGetDeviceProperties(&p, device);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = p.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = p.sharedMemPerBlockOptin; break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    default: *value = 1;
  }
  return cudaSuccess;
}

// ---- memory -------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void **place, size_t size) {
  size = (size + 512) / 512 * 512;
  *place = aligned_alloc(512, size);
  memset(*place, 0xA5, size);  // nobody may count on zeros
  std::lock_guard<std::mutex> guard(lock);
  device_memory[(char *)*place] = size;
  return cudaSuccess;
}
cudaError_t cudaMallocAsync(void **place, size_t size, cudaStream_t) { return cudaMalloc(place, size); }

cudaError_t cudaFree(void *place) {
  std::lock_guard<std::mutex> guard(lock);
  device_memory.erase((char *)place);
  free(place);
  return cudaSuccess;
}
cudaError_t cudaFreeAsync(void *place, cudaStream_t) { return cudaFree(place); }

cudaError_t cudaHostAlloc(void **place, size_t size, unsigned) {
  *place = aligned_alloc(4096, (size + 4096) / 4096 * 4096);
  std::lock_guard<std::mutex> guard(lock);
  pinned_memory[(char *)*place] = size;
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void *place) {
  std::lock_guard<std::mutex> guard(lock);
  pinned_memory.erase((char *)place);
  free(place);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *a, const void *place) {
  memset(a, 0, sizeof *a);
  std::lock_guard<std::mutex> guard(lock);
  a->type = holds(device_memory, place)   ? cudaMemoryTypeDevice
            : holds(pinned_memory, place) ? cudaMemoryTypeHost
                                          : cudaMemoryTypeUnregistered;
  (a->type == cudaMemoryTypeDevice ? a->devicePointer : a->hostPointer) = (void *)place;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *left, size_t *total) {
  *left = 7ul << 30;
  *total = 8ul << 30;
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind) {
  memmove(to, from, size);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, cudaMemcpyKind, cudaStream_t) {
  return copy(to, from, size);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t size, cudaStream_t) {
  return copy(to, from, size);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind, cudaStream_t) {
  for (size_t k = 0; k < height; ++k)
    copy((char *)to + k * to_pitch, (const char *)from + k * from_pitch, width);
  return cudaSuccess;
}
cudaError_t cudaMemset(void *place, int value, size_t size) {
  memset(place, value, size);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *place, int value, size_t size, cudaStream_t) {
  if (captured_stream && tell) tell(SET, (word)place, value, size);
  return cudaMemset(place, value, size);
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int) {
  *pool = (cudaMemPool_t)1;
  return cudaSuccess;
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *value) {
  memset(value, 0, 8);
  return cudaSuccess;
}

// ---- streams, events, graphs ----------------------------------------------------------------------

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
  *stream = (cudaStream_t)(next_handle += 16);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int) {
  return cudaStreamCreate(stream);
}
cudaError_t cudaStreamGetPriority(cudaStream_t, int *priority) { *priority = 0; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
  return captured_stream ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t f, void *data, unsigned) {
  f(stream, cudaSuccess, data);
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t f, void *data) { f(data); return cudaSuccess; }

cudaError_t cudaEventCreate(cudaEvent_t *event) {
  *event = (cudaEvent_t)(next_handle += 16);
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) { return cudaEventCreate(event); }
cudaError_t cudaEventElapsedTime(float *time, cudaEvent_t, cudaEvent_t) { *time = 1; return cudaSuccess; }

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
  const bool captured = captured_stream && (word)stream == captured_stream;
  *status = captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
  if (id) *id = captures;
  if (graph) *graph = (cudaGraph_t)captures;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  if (captured_stream) return cudaErrorIllegalState;
  captured_stream = (word)stream;
  if (tell) tell(BEGIN, ++captures, 0, 0);
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *graph) {
  captured_stream = 0;
  *graph = (cudaGraph_t)captures;
  if (tell) tell(END, captures, 0, 0);
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *ready, cudaGraph_t graph, unsigned long long) {
  *ready = (cudaGraphExec_t)graph;
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t) {
  if (tell) tell(REPLAY, (word)graph, 0, 0);
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t *, size_t *count) { *count = 1; return cudaSuccess; }
cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t *, cudaGraphEdgeData *,
                                         size_t *count) {
  *count = 0;
  return cudaSuccess;
}

// ---- PyTorch's kernels ------------------------------------------------------------------------

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *a, const void *) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *, int, size_t) {
  *n = 8;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *, int, size_t,
                                                                   unsigned) {
  *n = 8;
  return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void **place, const void *symbol) {
  *place = (void *)symbol;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **place, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult *found) {
  static void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  *place = driver ? dlsym(driver, name) : nullptr;
  if (found)
    *found = *place ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void *f, dim3, dim3, void **, size_t, cudaStream_t) { return skip(f); }
cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3, dim3, void **, size_t, cudaStream_t) {
  return skip(f);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *, const void *f, void **) { return skip(f); }
cudaError_t __cudaLaunchKernel(cudaKernel_t f, dim3, dim3, void **, size_t, cudaStream_t) {
  return skip((const void *)f);
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *f) {
  *kernel = (cudaKernel_t)f;
  return cudaSuccess;
}
void **__cudaRegisterFatBinary(void *) {
  static void *handle;
  return &handle;
}
void __cudaRegisterFunction(void **, const char *f, char *, const char *name, int, void *, void *,
                            void *, void *, int *) {
  kernel_names[f] = name;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
  configuration = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *(void **)stream = configuration.stream;
  return cudaSuccess;
}
}
