// Builds GE graphs into offline models, loads them and runs them through ACL.
//
// Every status is returned to the caller, who asks dicp_message for GE's and ACL's own words.
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "acl/acl.h"
#include "ge/ge_api.h"
#include "ge/ge_ir_build.h"
#include "graph/graph.h"

namespace {

struct Model {
  uint32_t id = 0;
  void* work = nullptr;
  void* weights = nullptr;
};

struct Piece {  // one tensor of a run, as the caller describes it
  void* data;
  uint64_t size;
  int32_t dtype;
  int32_t rank;
  const int64_t* dims;
};

aclrtStream stream = nullptr;

// The tensors of one run, and all that ACL wants freed after it.
class Dataset {
 public:
  Dataset() : dataset_(aclmdlCreateDataset()) {}
  ~Dataset() {
    for (aclTensorDesc* desc : descs_) aclDestroyTensorDesc(desc);
    for (aclDataBuffer* buffer : buffers_) aclDestroyDataBuffer(buffer);
    aclmdlDestroyDataset(dataset_);
  }

  aclError add(const Piece& piece, bool described) {
    buffers_.push_back(aclCreateDataBuffer(piece.data, piece.size));
    aclError status = aclmdlAddDatasetBuffer(dataset_, buffers_.back());
    if (status != ACL_SUCCESS || !described) return status;
    descs_.push_back(aclCreateTensorDesc(static_cast<aclDataType>(piece.dtype), piece.rank,
                                         piece.dims, ACL_FORMAT_ND));
    return aclmdlSetDatasetTensorDesc(dataset_, descs_.back(), buffers_.size() - 1);
  }

  aclmdlDataset* get() { return dataset_; }

 private:
  aclmdlDataset* dataset_;
  std::vector<aclDataBuffer*> buffers_;
  std::vector<aclTensorDesc*> descs_;
};

}  // namespace

extern "C" {

int dicp_open(int32_t device) {
  aclError status = aclInit(nullptr);
  if (status == ACL_ERROR_REPEAT_INITIALIZE) status = ACL_SUCCESS;  // somebody else was first
  if (status == ACL_SUCCESS) status = aclrtSetDevice(device);
  if (status == ACL_SUCCESS) status = aclrtCreateStream(&stream);
  return status;
}

const char* dicp_soc() { return aclrtGetSocName(); }

// GE's words for a failed build, else ACL's for a failed call.
void dicp_message(bool build, char* text, uint64_t room) {
  const char* words = aclGetRecentErrMsg();
  std::string built = ge::GEGetErrorMsg();
  if (build && !built.empty()) words = built.c_str();
  std::strncpy(text, words == nullptr ? "" : words, room - 1);
}

int dicp_build(void (*define)(ge::Graph&), const char* name, const char* soc,
               const char* precision, const char* hf32, const char* gears,
               void (*receive)(const void*, uint64_t)) {
  std::map<ge::AscendString, ge::AscendString> global = {{ge::ir_option::SOC_VERSION, soc},
                                                         {ge::ir_option::PRECISION_MODE, precision},
                                                         {ge::ir_option::ALLOW_HF32, hf32}};
  uint32_t status = ge::aclgrphBuildInitialize(global);
  if (status != ge::GRAPH_SUCCESS) return static_cast<int>(status);
  ge::Graph graph(name);
  define(graph);
  std::map<ge::AscendString, ge::AscendString> options;
  if (gears[0] != 0) options.insert({ge::ir_option::DYNAMIC_DIMS, gears});
  ge::ModelBufferData model;
  status = ge::aclgrphBuildModel(graph, options, model);
  if (status == ge::GRAPH_SUCCESS) receive(model.data.get(), model.length);
  ge::aclgrphBuildFinalize();
  return static_cast<int>(status);
}

int dicp_load(const void* data, uint64_t size, Model** loaded, uint64_t* wanted) {
  size_t work = 0, weights = 0;
  aclError status = aclmdlQuerySizeFromMem(data, size, &work, &weights);
  Model* model = new Model;
  *wanted = work + weights;
  if (status == ACL_SUCCESS) status = aclrtMalloc(&model->work, work, ACL_MEM_MALLOC_HUGE_FIRST);
  if (status == ACL_SUCCESS) {
    status = aclrtMalloc(&model->weights, weights, ACL_MEM_MALLOC_HUGE_FIRST);
  }
  if (status == ACL_SUCCESS) {
    status = aclmdlLoadFromMemWithMem(data, size, &model->id, model->work, work, model->weights,
                                      weights);
  }
  *loaded = model;
  return status;
}

int dicp_unload(Model* model) {
  aclError status = aclmdlUnload(model->id);
  if (model->work != nullptr) aclrtFree(model->work);
  if (model->weights != nullptr) aclrtFree(model->weights);
  delete model;
  return status;
}

// Runs on the stream `on`, or on the driver's own if there is none.
int dicp_run(Model* model, const Piece* inputs, uint64_t in, const Piece* outputs, uint64_t out,
             bool described, bool wait, aclrtStream on) {
  if (on == nullptr) on = stream;
  Dataset given, made;
  aclError status = ACL_SUCCESS;
  for (uint64_t k = 0; k < in && status == ACL_SUCCESS; ++k) {
    status = given.add(inputs[k], described);
  }
  for (uint64_t k = 0; k < out && status == ACL_SUCCESS; ++k) {
    status = made.add(outputs[k], false);
  }
  if (status == ACL_SUCCESS) {
    status = aclmdlExecuteAsync(model->id, given.get(), made.get(), on);
  }
  if (status == ACL_SUCCESS && wait) status = aclrtSynchronizeStream(on);
  return status;
}

}  // extern "C"
