// Builds GE graphs into offline models, loads them and runs them through ACL.
//
// Every status is returned to the caller, who asks dicp_message for GE's and ACL's own words.
#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "acl/acl.h"
#include "ge/ge_api.h"
#include "ge/ge_ir_build.h"
#include "graph/graph.h"

namespace {

// Memory that models on one device work in; one run after the other uses it.
struct Workspace {
  void* memory = nullptr;
  size_t size = 0;
  int users = 0;
  aclrtStream stream = nullptr;  // of the last run
};

struct Model {
  uint32_t id = 0;
  int32_t device = 0;
  Workspace* work = nullptr;
  void* weights = nullptr;
};

struct Argument {  // one tensor of a run, as the caller describes it
  void* data;
  uint64_t size;
  int32_t dtype;
  int32_t rank;
  const int64_t* dims;
  bool on_host;
  bool written;  // by the graph: what the host has is brought up to date
};

// Of what follows, and of builds: GE's options belong to the process. Recursive: a build calls Python
// back, whose garbage collector may unload models there.
std::recursive_mutex mutex;
std::map<int32_t, aclrtStream> streams;
std::map<int32_t, std::vector<Workspace*>> workspaces;

// Makes a device this thread's own for a while: threads start without one, and the thread's owner
// may work on another.
class OnDevice {
 public:
  explicit OnDevice(int32_t device) {
    int32_t now = -1;
    bool has = aclrtGetDevice(&now) == ACL_SUCCESS;
    if (has && now == device) return;
    status = aclrtSetDevice(device);
    if (has && status == ACL_SUCCESS) before_ = now;
  }
  ~OnDevice() {
    if (before_ >= 0) aclrtSetDevice(before_);
  }
  aclError status = ACL_SUCCESS;

 private:
  int32_t before_ = -1;
};

// The tensors of one run, and all that ACL wants freed after it.
class Dataset {
 public:
  Dataset() : dataset_(aclmdlCreateDataset()) {}
  ~Dataset() {
    for (aclTensorDesc* desc : descs_) aclDestroyTensorDesc(desc);
    for (aclDataBuffer* buffer : buffers_) aclDestroyDataBuffer(buffer);
    for (auto& staged : staged_) aclrtFree(staged.second);
    aclmdlDestroyDataset(dataset_);
  }

  // Adds a tensor; one of the host's memory gets memory on the device, filled if `filled`.
  aclError add(const Argument& argument, bool filled, bool described) {
    void* data = argument.data;
    if (argument.on_host && argument.size > 0) {
      aclError status = aclrtMalloc(&data, argument.size, ACL_MEM_MALLOC_HUGE_FIRST);
      if (status != ACL_SUCCESS) return status;
      staged_.push_back({&argument, data});
      if (filled) {
        status = aclrtMemcpy(data, argument.size, argument.data, argument.size, ACL_MEMCPY_HOST_TO_DEVICE);
      }
      if (status != ACL_SUCCESS) return status;
    }
    buffers_.push_back(aclCreateDataBuffer(data, argument.size));
    aclError status = aclmdlAddDatasetBuffer(dataset_, buffers_.back());
    if (status != ACL_SUCCESS || !described) return status;
    descs_.push_back(aclCreateTensorDesc(static_cast<aclDataType>(argument.dtype), argument.rank,
                                         argument.dims, ACL_FORMAT_ND));
    return aclmdlSetDatasetTensorDesc(dataset_, descs_.back(), buffers_.size() - 1);
  }

  // Copies what the device has back to the host's tensors.
  aclError fetch() {
    aclError status = ACL_SUCCESS;
    for (auto& [argument, data] : staged_) {
      if (status != ACL_SUCCESS || !argument->written) continue;
      status = aclrtMemcpy(argument->data, argument->size, data, argument->size, ACL_MEMCPY_DEVICE_TO_HOST);
    }
    return status;
  }

  bool is_staged() const { return !staged_.empty(); }
  aclmdlDataset* get() { return dataset_; }

 private:
  aclmdlDataset* dataset_;
  std::vector<aclDataBuffer*> buffers_;
  std::vector<aclTensorDesc*> descs_;
  std::vector<std::pair<const Argument*, void*>> staged_;
};

// Memory of at least this size, shared with the other models of the device where one has it.
aclError claim(int32_t device, size_t size, Workspace** claimed) {
  auto& known = workspaces[device];
  auto found = std::find_if(known.begin(), known.end(), [&](auto* w) { return w->size >= size; });
  if (found == known.end()) {
    auto* made = new Workspace{nullptr, size};
    aclError status = aclrtMalloc(&made->memory, size, ACL_MEM_MALLOC_HUGE_FIRST);
    if (status != ACL_SUCCESS) return delete made, status;
    found = known.insert(known.end(), made);
  }
  ++(*found)->users;
  *claimed = *found;
  return ACL_SUCCESS;
}

void release(int32_t device, Workspace* work) {
  if (work == nullptr || --work->users > 0) return;
  auto& known = workspaces[device];
  known.erase(std::find(known.begin(), known.end(), work));
  aclrtFree(work->memory);
  delete work;
}

void destroy(Model* model) {
  release(model->device, model->work);
  if (model->weights != nullptr) aclrtFree(model->weights);
  delete model;
}

// A model of changing sizes asks for its own memory, run by run.
aclError load(const void* data, uint64_t size, bool dynamic, Model* model, uint64_t* wanted) {
  if (dynamic) return aclmdlLoadFromMem(data, size, &model->id);
  size_t work = 0, weights = 0;
  aclError status = aclmdlQuerySizeFromMem(data, size, &work, &weights);
  *wanted = work + weights;
  if (status == ACL_SUCCESS && work > 0) status = claim(model->device, work, &model->work);
  if (status == ACL_SUCCESS && weights > 0) {
    status = aclrtMalloc(&model->weights, weights, ACL_MEM_MALLOC_HUGE_FIRST);
  }
  if (status != ACL_SUCCESS) return status;
  void* memory = model->work == nullptr ? nullptr : model->work->memory;
  return aclmdlLoadFromMemWithMem(data, size, &model->id, memory, work, model->weights, weights);
}

aclError stream_of(int32_t device, aclrtStream* stream) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto found = streams.find(device);
  aclError status = ACL_SUCCESS;
  if (found == streams.end()) {
    status = aclrtCreateStream(stream);
    if (status == ACL_SUCCESS) streams[device] = *stream;
  } else {
    *stream = found->second;
  }
  return status;
}

// Runs after whatever else works in the model's memory.
aclError execute(Model* model, aclmdlDataset* given, aclmdlDataset* made, aclrtStream stream) {
  Workspace* work = model->work;
  if (work == nullptr) return aclmdlExecuteAsync(model->id, given, made, stream);
  std::lock_guard<std::recursive_mutex> lock(mutex);
  aclError status = ACL_SUCCESS;
  if (work->stream != nullptr && work->stream != stream) {
    status = aclrtSynchronizeStream(work->stream);
  }
  work->stream = stream;
  return status == ACL_SUCCESS ? aclmdlExecuteAsync(model->id, given, made, stream) : status;
}

}  // namespace

extern "C" {

int dicp_open(int32_t device) {
  aclError status = aclInit(nullptr);
  if (status == ACL_ERROR_REPEAT_INITIALIZE) status = ACL_SUCCESS;  // somebody else was first
  if (status != ACL_SUCCESS) return status;
  return OnDevice(device).status;
}

const char* dicp_soc() { return aclrtGetSocName(); }

// GE's words for a failed build, else ACL's for a failed call.
void dicp_message(bool build, char* text, uint64_t room) {
  const char* words = aclGetRecentErrMsg();
  std::string built = ge::GEGetErrorMsg();
  if (build && !built.empty()) words = built.c_str();
  std::strncpy(text, words == nullptr ? "" : words, room - 1);
}

// `shapes` has the inputs' sizes if some are not known; it is empty if all are.
int dicp_build(void (*define)(ge::Graph&), const char* name, const char* soc,
               const char* precision, const char* shapes,
               void (*receive)(const void*, uint64_t)) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  std::map<ge::AscendString, ge::AscendString> global = {{ge::ir_option::SOC_VERSION, soc},
                                                         {ge::ir_option::PRECISION_MODE, precision}};
  uint32_t status = ge::aclgrphBuildInitialize(global);
  if (status != ge::GRAPH_SUCCESS) return static_cast<int>(status);
  ge::Graph graph(name);
  define(graph);
  std::map<ge::AscendString, ge::AscendString> options;
  if (shapes[0] != 0) {
    options.insert({ge::ir_option::INPUT_FORMAT, "ND"});
    options.insert({ge::ir_option::INPUT_SHAPE, shapes});
  }
  ge::ModelBufferData model;
  status = ge::aclgrphBuildModel(graph, options, model);
  if (status == ge::GRAPH_SUCCESS) receive(model.data.get(), model.length);
  ge::aclgrphBuildFinalize();
  return static_cast<int>(status);
}

int dicp_load(const void* data, uint64_t size, int32_t device, bool dynamic, Model** loaded,
              uint64_t* wanted) {
  OnDevice on(device);
  if (on.status != ACL_SUCCESS) return on.status;
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto* model = new Model;
  model->device = device;
  aclError status = load(data, size, dynamic, model, wanted);
  if (status == ACL_SUCCESS) {
    *loaded = model;
  } else {
    destroy(model);
  }
  return status;
}

int dicp_unload(Model* model) {
  OnDevice on(model->device);
  std::lock_guard<std::recursive_mutex> lock(mutex);
  if (model->work != nullptr && model->work->stream != nullptr) {
    aclrtSynchronizeStream(model->work->stream);
  }
  aclError status = aclmdlUnload(model->id);
  destroy(model);
  return status;
}

// Runs on the stream `on`, or on the driver's own of the device if there is none. Tensors of the
// host are copied there, and back where they are written to.
int dicp_run(Model* model, const Argument* inputs, uint64_t in, const Argument* outputs, uint64_t out,
             bool described, aclrtStream on) {
  OnDevice device(model->device);
  aclError status = device.status;
  if (status == ACL_SUCCESS && on == nullptr) status = stream_of(model->device, &on);
  Dataset given, made;
  for (uint64_t k = 0; k < in && status == ACL_SUCCESS; ++k) {
    status = given.add(inputs[k], true, described);
  }
  for (uint64_t k = 0; k < out && status == ACL_SUCCESS; ++k) {
    status = made.add(outputs[k], false, false);
  }
  if (status == ACL_SUCCESS) status = execute(model, given.get(), made.get(), on);
  if (given.is_staged() || made.is_staged()) {  // their memory is freed below, in any case
    aclError done = aclrtSynchronizeStream(on);
    if (status == ACL_SUCCESS) status = done;
    if (status == ACL_SUCCESS) status = made.fetch();
    if (status == ACL_SUCCESS) status = given.fetch();
  }
  return status;
}

}  // extern "C"
