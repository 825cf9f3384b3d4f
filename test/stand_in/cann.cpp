// A double of ACL for tests: devices with limited memory, threads without a context, streams whose
// work waits until somebody synchronizes. Device memory is the host's; models run in Python.
//
// It fails as ACL does, with ACL's statuses, and counts what is alive.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "acl/acl.h"
#include "callbacks.h"

namespace {

constexpr aclError INVALID_DEVICE = 107001, INVALID_STREAM = 107003, INVALID_MODEL = 145000,
                   DRIVER_ERROR = 507899, INVALID_MEMORY = 107000;

struct Block {
  size_t size;
  int32_t device;
};

struct Job {
  uint32_t model;
  std::vector<RunArgument> inputs, outputs;
  std::vector<std::vector<int64_t>> dims;
};

struct Stream {
  int32_t device;
  std::vector<Job> waiting;
};

struct Loaded {
  int32_t device;
  int handle;
  const void* work;
};

std::recursive_mutex mutex;
uint32_t devices = 2;
size_t room = size_t(1) << 40, wanted_work = 0, wanted_weights = 0;
bool initialized = false;
std::map<char*, Block> blocks;
std::set<Stream*> streams;
std::map<uint32_t, Loaded> models;
std::map<std::string, int> failures;  // by call: the status of the next one
std::map<std::string, int> calls;
std::atomic<int> objects = 0;  // of several threads
uint32_t next_model = 100;
thread_local int32_t current = -1;
thread_local std::string words;

aclError failed(aclError status, const std::string& why) {
  std::snprintf(message, sizeof message, "%s", why.c_str());
  return status;
}

// The status that a test wants of this call, or that of a thread without a context.
aclError begin(const char* call, bool needs_context = true) {
  ++calls[call];
  auto found = failures.find(call);
  if (found != failures.end()) {
    aclError status = found->second;
    failures.erase(found);
    return failed(status, std::string(call) + " was told to fail");
  }
  if (needs_context && current < 0) {
    return failed(ACL_ERROR_RT_CONTEXT_NULL, std::string(call) + ": context is null");
  }
  return ACL_SUCCESS;
}

size_t used(int32_t device) {
  size_t total = 0;
  for (auto& [data, block] : blocks) total += block.device == device ? block.size : 0;
  return total;
}

// Whether memory is a device's own, and there is as much of it.
bool holds(const void* data, size_t size, int32_t device) {
  if (size == 0) return true;
  auto* start = const_cast<char*>(static_cast<const char*>(data));
  auto found = blocks.upper_bound(start);
  if (found == blocks.begin()) return false;
  --found;
  return found->second.device == device && start + size <= found->first + found->second.size;
}

aclError run(Job& job) {
  for (auto* arguments : {&job.inputs, &job.outputs}) {
    for (auto& argument : *arguments) {
      if (!holds(argument.data, argument.size, models[job.model].device)) {
        return failed(DRIVER_ERROR, "a model reads memory that was freed");
      }
    }
  }
  int status = python.run(models[job.model].handle, job.inputs.data(), job.inputs.size(),
                          job.outputs.data(), job.outputs.size(), message, sizeof message);
  return status == 0 ? ACL_SUCCESS : ACL_ERROR_GE_FAILURE;
}

aclError drain(Stream* stream) {
  auto waiting = std::move(stream->waiting);
  stream->waiting.clear();
  for (Job& job : waiting) {
    aclError status = run(job);
    if (status != ACL_SUCCESS) return status;
  }
  return ACL_SUCCESS;
}

using Lock = std::lock_guard<std::recursive_mutex>;

}  // namespace

struct aclDataBuffer {
  void* data;
  uint64_t size;
};
struct aclTensorDesc {
  std::vector<int64_t> dims;
};
struct aclmdlDataset {
  std::vector<aclDataBuffer*> buffers;
  std::vector<aclTensorDesc*> descs;
};

extern "C" {

// ---- for tests ----

void double_reset(uint32_t count, uint64_t memory, uint64_t work, uint64_t weights) {
  devices = count, room = memory, wanted_work = work, wanted_weights = weights;
  failures.clear(), calls.clear();
}
void double_fail(const char* call, int status) { failures[call] = status; }
int double_calls(const char* call) { return calls[call]; }
uint64_t double_used(int32_t device) { return used(device); }
int double_models() { return static_cast<int>(models.size()); }
int double_objects() { return objects; }
int double_workspaces() {
  std::set<const void*> found;
  for (auto& [id, model] : models) if (model.work != nullptr) found.insert(model.work);
  return static_cast<int>(found.size());
}
int32_t double_current() { return current; }
void double_forget_device() { current = -1; }

// ---- ACL ----

aclError aclInit(const char*) {
  Lock lock(mutex);
  if (aclError status = begin("aclInit", false)) return status;
  if (initialized) return ACL_ERROR_REPEAT_INITIALIZE;
  initialized = true;
  return ACL_SUCCESS;
}
aclError aclrtGetDeviceCount(uint32_t* count) {
  Lock lock(mutex);
  if (aclError status = begin("aclrtGetDeviceCount", false)) return status;
  return *count = devices, ACL_SUCCESS;
}
aclError aclrtSetDevice(int32_t device) {
  Lock lock(mutex);
  if (aclError status = begin("aclrtSetDevice", false)) return status;
  if (device < 0 || device >= static_cast<int32_t>(devices)) {
    return failed(INVALID_DEVICE, "there is no device " + std::to_string(device));
  }
  return current = device, ACL_SUCCESS;
}
aclError aclrtGetDevice(int32_t* device) {
  if (current < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  return *device = current, ACL_SUCCESS;
}
aclError aclrtCreateStream(aclrtStream* stream) {
  Lock lock(mutex);
  if (aclError status = begin("aclrtCreateStream")) return status;
  auto* made = new Stream{current, {}};
  streams.insert(made);
  return *stream = made, ACL_SUCCESS;
}
aclError aclrtSynchronizeStream(aclrtStream stream) {
  Lock lock(mutex);
  if (aclError status = begin("aclrtSynchronizeStream")) return status;
  auto* given = static_cast<Stream*>(stream);
  if (streams.count(given) == 0) return failed(INVALID_STREAM, "no such stream");
  return drain(given);
}
aclError aclrtMalloc(void** memory, size_t size, aclrtMemMallocPolicy) {
  Lock lock(mutex);
  if (aclError status = begin("aclrtMalloc")) return status;
  if (size == 0) return failed(ACL_ERROR_INVALID_PARAM, "aclrtMalloc of 0 bytes");
  if (used(current) + size > room) {
    return failed(ACL_ERROR_RT_MEMORY_ALLOCATION, "the device's memory is used up");
  }
  auto* made = static_cast<char*>(std::malloc(size));
  blocks[made] = {size, current};
  return *memory = made, ACL_SUCCESS;
}
aclError aclrtFree(void* memory) {
  Lock lock(mutex);
  if (aclError status = begin("aclrtFree")) return status;
  if (blocks.erase(static_cast<char*>(memory)) == 0) {
    return failed(INVALID_MEMORY, "aclrtFree of what is no allocation");
  }
  return std::free(memory), ACL_SUCCESS;
}
aclError aclrtMemcpy(void* to, size_t space, const void* from, size_t size, aclrtMemcpyKind kind) {
  Lock lock(mutex);
  if (aclError status = begin("aclrtMemcpy")) return status;
  const void* there = kind == ACL_MEMCPY_HOST_TO_DEVICE ? to : from;
  if (size > space || !holds(there, size, current)) {
    return failed(ACL_ERROR_INVALID_PARAM, "aclrtMemcpy of memory that is not the device's");
  }
  std::memcpy(to, from, size);
  return ACL_SUCCESS;
}
const char* aclrtGetSocName() { return "Ascend910B1"; }
const char* aclGetRecentErrMsg() { return message; }

aclDataBuffer* aclCreateDataBuffer(void* data, size_t size) {
  return ++objects, new aclDataBuffer{data, size};
}
aclError aclDestroyDataBuffer(const aclDataBuffer* b) { return --objects, delete b, ACL_SUCCESS; }
aclTensorDesc* aclCreateTensorDesc(aclDataType, int rank, const int64_t* dims, aclFormat) {
  return ++objects, new aclTensorDesc{std::vector<int64_t>(dims, dims + rank)};
}
void aclDestroyTensorDesc(const aclTensorDesc* d) { --objects, delete d; }
aclmdlDataset* aclmdlCreateDataset() { return ++objects, new aclmdlDataset; }
aclError aclmdlDestroyDataset(const aclmdlDataset* d) { return --objects, delete d, ACL_SUCCESS; }
aclError aclmdlAddDatasetBuffer(aclmdlDataset* d, aclDataBuffer* b) {
  return d->buffers.push_back(b), ACL_SUCCESS;
}
aclError aclmdlSetDatasetTensorDesc(aclmdlDataset* d, aclTensorDesc* desc, size_t index) {
  if (d->descs.size() <= index) d->descs.resize(index + 1);
  return d->descs[index] = desc, ACL_SUCCESS;
}

aclError aclmdlQuerySizeFromMem(const void*, size_t, size_t* work, size_t* weights) {
  Lock lock(mutex);
  if (aclError status = begin("aclmdlQuerySizeFromMem")) return status;
  return *work = wanted_work, *weights = wanted_weights, ACL_SUCCESS;
}

static aclError load(const void* data, size_t size, bool with_memory, const void* work,
                     uint32_t* id) {
  int handle = python.load(data, size, with_memory, message, sizeof message);
  if (handle < 0) return ACL_ERROR_GE_FAILURE;
  *id = next_model++;
  models[*id] = {current, handle, work};
  return ACL_SUCCESS;
}
aclError aclmdlLoadFromMem(const void* data, size_t size, uint32_t* id) {
  Lock lock(mutex);
  if (aclError status = begin("aclmdlLoadFromMem")) return status;
  return load(data, size, false, nullptr, id);
}
aclError aclmdlLoadFromMemWithMem(const void* data, size_t size, uint32_t* id, void* work,
                                  size_t work_size, void* weights, size_t weight_size) {
  Lock lock(mutex);
  if (aclError status = begin("aclmdlLoadFromMemWithMem")) return status;
  if (work_size < wanted_work || !holds(work, work_size, current) ||
      !holds(weights, weight_size, current)) {
    return failed(ACL_ERROR_INVALID_PARAM, "memory for the model that is not the device's");
  }
  return load(data, size, true, work, id);
}
aclError aclmdlExecuteAsync(uint32_t model, const aclmdlDataset* in, aclmdlDataset* out,
                            aclrtStream stream) {
  Lock lock(mutex);
  if (aclError status = begin("aclmdlExecuteAsync")) return status;
  auto* on = static_cast<Stream*>(stream);
  if (models.count(model) == 0) return failed(INVALID_MODEL, "no such model");
  int32_t device = models[model].device;
  if (device != current) return failed(ACL_ERROR_INVALID_PARAM, "the model is another device's");
  if (streams.count(on) == 0 || on->device != device) {
    return failed(INVALID_STREAM, "the stream is not the device's");
  }
  Job job{model, {}, {}, {}};
  job.dims.reserve(in->descs.size());
  auto add = [&](const aclmdlDataset* set, std::vector<RunArgument>& arguments) {
    for (size_t k = 0; k < set->buffers.size(); ++k) {
      auto* buffer = set->buffers[k];
      if (!holds(buffer->data, buffer->size, device)) return false;
      RunArgument argument{buffer->data, buffer->size, -1, nullptr};
      if (k < set->descs.size() && set->descs[k] != nullptr) {
        job.dims.push_back(set->descs[k]->dims);
        argument.rank = static_cast<int64_t>(job.dims.back().size());
        argument.dims = job.dims.back().data();
      }
      arguments.push_back(argument);
    }
    return true;
  };
  if (!add(in, job.inputs) || !add(out, job.outputs)) {
    return failed(ACL_ERROR_INVALID_PARAM, "a tensor is not in the device's memory");
  }
  on->waiting.push_back(std::move(job));
  return ACL_SUCCESS;
}
aclError aclmdlUnload(uint32_t model) {
  Lock lock(mutex);
  if (aclError status = begin("aclmdlUnload")) return status;
  if (models.count(model) == 0) return failed(INVALID_MODEL, "no such model");
  python.unload(models[model].handle);
  return models.erase(model), ACL_SUCCESS;
}

}  // extern "C"
