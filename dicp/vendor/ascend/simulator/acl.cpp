// The simulator's side of ACL: one device, which is the host; models run in Python, at once.
#include "acl/acl.h"

#include <cstdlib>
#include <cstring>
#include <vector>

#include "callbacks.h"

struct aclDataBuffer {
  void* data;
  uint64_t size;
};
struct aclTensorDesc {
  int type;
  std::vector<int64_t> dims;
};
struct aclmdlDataset {
  std::vector<aclDataBuffer*> buffers;
  std::vector<aclTensorDesc*> descs;
};
struct aclmdlDesc {
  uint32_t model;
};

namespace {

std::vector<RunArgument> arguments(const aclmdlDataset* d) {
  std::vector<RunArgument> found;
  for (size_t k = 0; k < d->buffers.size(); ++k) {
    aclTensorDesc* t = k < d->descs.size() ? d->descs[k] : nullptr;
    found.push_back({d->buffers[k]->data, d->buffers[k]->size,
                     t ? static_cast<int64_t>(t->dims.size()) : -1, t ? t->dims.data() : nullptr});
  }
  return found;
}

}  // namespace

extern "C" {

aclError aclInit(const char*) { return ACL_SUCCESS; }
aclError aclrtGetDeviceCount(uint32_t* count) { return *count = 1, ACL_SUCCESS; }
aclError aclrtSetDevice(int32_t) { return ACL_SUCCESS; }
aclError aclrtGetDevice(int32_t* device) { return *device = 0, ACL_SUCCESS; }
aclError aclrtCreateStream(aclrtStream* stream) { return *stream = nullptr, ACL_SUCCESS; }
aclError aclrtSynchronizeStream(aclrtStream) { return ACL_SUCCESS; }
aclError aclrtMalloc(void** memory, size_t size, aclrtMemMallocPolicy) {
  if (size == 0) return ACL_ERROR_INVALID_PARAM;
  *memory = std::malloc(size);
  return *memory ? ACL_SUCCESS : ACL_ERROR_RT_MEMORY_ALLOCATION;
}
aclError aclrtFree(void* memory) { return std::free(memory), ACL_SUCCESS; }
aclError aclrtMemcpy(void* to, size_t room, const void* from, size_t size, aclrtMemcpyKind) {
  if (size > room) return ACL_ERROR_INVALID_PARAM;
  std::memcpy(to, from, size);
  return ACL_SUCCESS;
}
const char* aclrtGetSocName() { return "Simulator"; }
const char* aclGetRecentErrMsg() { return message; }

aclDataBuffer* aclCreateDataBuffer(void* data, size_t size) {
  return new aclDataBuffer{data, size};
}
aclError aclDestroyDataBuffer(const aclDataBuffer* b) { return delete b, ACL_SUCCESS; }
aclTensorDesc* aclCreateTensorDesc(aclDataType type, int rank, const int64_t* dims, aclFormat) {
  return new aclTensorDesc{type, std::vector<int64_t>(dims, dims + rank)};
}
void aclDestroyTensorDesc(const aclTensorDesc* d) { delete d; }
aclmdlDataset* aclmdlCreateDataset() { return new aclmdlDataset; }
aclError aclmdlDestroyDataset(const aclmdlDataset* d) { return delete d, ACL_SUCCESS; }
aclError aclmdlAddDatasetBuffer(aclmdlDataset* d, aclDataBuffer* b) {
  return d->buffers.push_back(b), ACL_SUCCESS;
}
aclError aclmdlSetDatasetTensorDesc(aclmdlDataset* d, aclTensorDesc* desc, size_t index) {
  if (d->descs.size() <= index) d->descs.resize(index + 1);
  return d->descs[index] = desc, ACL_SUCCESS;
}

aclmdlDesc* aclmdlCreateDesc() { return new aclmdlDesc{}; }
aclError aclmdlDestroyDesc(aclmdlDesc* d) { return delete d, ACL_SUCCESS; }
aclError aclmdlGetDesc(aclmdlDesc* d, uint32_t model) { return d->model = model, ACL_SUCCESS; }
aclError aclmdlQuerySizeFromMem(const void*, size_t, size_t* work, size_t* weights) {
  return *work = 0, *weights = 0, ACL_SUCCESS;
}
static aclError load(const void* model, size_t size, bool with_memory, uint32_t* id) {
  int handle = python.load(model, size, with_memory, message, sizeof message);
  if (handle < 0) return ACL_ERROR_GE_FAILURE;
  *id = static_cast<uint32_t>(handle);
  return ACL_SUCCESS;
}
aclError aclmdlLoadFromMem(const void* model, size_t size, uint32_t* id) {
  return load(model, size, false, id);
}
aclError aclmdlLoadFromMemWithMem(const void* model, size_t size, uint32_t* id, void*, size_t,
                                  void*, size_t) {
  return load(model, size, true, id);
}
aclError aclmdlExecuteAsync(uint32_t model, const aclmdlDataset* in, aclmdlDataset* out,
                            aclrtStream) {
  auto inputs = arguments(in), outputs = arguments(out);
  return python.run(static_cast<int>(model), inputs.data(), inputs.size(), outputs.data(),
                    outputs.size(), message, sizeof message);
}
aclError aclmdlUnload(uint32_t model) {
  return python.unload(static_cast<int>(model)), ACL_SUCCESS;
}

}  // extern "C"
