// Operators on the device: host views of its tensors, native operators, plans of compiled kernels.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <deque>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "device.h"

namespace dicp {

// Host tensors over the memory of device tensors, for one call. On a runtime whose memory the host
// cannot address they are copies, which `write_back` copies to the device.
class HostCall {
 public:
  explicit HostCall(int device) : device_(device) {}
  at::Tensor on_host(const at::Tensor& tensor);
  c10::IValue on_host(const c10::IValue& value);
  at::Tensor on_device(const at::Tensor& tensor);
  c10::IValue on_device(const c10::IValue& value);
  // Sizes and memory of tensors that the call resized, and contents where they were copied.
  void write_back();

 private:
  struct Pair {
    at::Tensor device, host;
  };
  const c10::Storage& host_storage(const c10::Storage& storage);
  at::Tensor view_of(const at::Tensor& tensor);
  void take_over(const Pair& pair);
  void copy_back(const Pair& pair);
  int device_;
  struct Twin {
    c10::StorageImpl* of;
    c10::Storage storage;
  };
  using Twins = c10::SmallVector<Twin, 4>;  // few: a search is cheaper than a hash table
  static const c10::Storage* twin_of(const Twins& all, const c10::StorageImpl* storage);
  c10::SmallVector<Pair, 4> pairs_;
  Twins host_storages_, device_storages_;
};

// Runs an operator by its host kernel, on host views of the tensors.
void call_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack, int device);
// Factories whose kernel for every device asks for one of the device that fills the tensor.
constexpr const char* kWindows[] = {"kaiser_window", "kaiser_window.periodic",
                                    "kaiser_window.beta"};
// The device of the first device tensor in the arguments, else of the first device argument.
int device_of(const torch::jit::Stack& stack, size_t first);

struct PlannedTensor {
  int slot = 0;
  int argument = -1;  // its position among the call's tensors, lists included; -1: a fresh result
  bool copied = false;  // an input whose memory has gaps: the kernels read a contiguous copy
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype = at::kFloat;
};

struct PlannedAlias {
  int slot = 0, base = 0;
  int64_t offset = 0;
};

struct PlannedResult {
  int output = 0;     // below 0: none, such as a gradient that is not needed
  bool view = false;  // of these sizes, strides and offset in elements
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
};

// A compiled operator, ready to run for one exact signature of arguments.
struct Plan {
  int64_t (*run)(void* launches, int64_t count, void* table, void* status) = nullptr;
  void* launches = nullptr;
  int64_t count = 0;
  std::vector<void*> table;
  std::vector<PlannedTensor> inputs, outputs;
  std::vector<PlannedAlias> aliases;
  size_t workspace = 0;  // bytes, whose parts are aliases of no base
  std::vector<PlannedAlias> parts;
  std::vector<PlannedResult> results;  // in the order of the operator's results
  size_t bytes = 0;
  bool pointwise = false;  // a result may lie exactly on an input
  std::shared_ptr<void> keep;
  std::string name;
};

// Names of ranges of the profiler: without the namespace, and of work on a device.
std::string short_name(const std::string& name);
std::string kernel_row(const std::string& name, int device);

// The exact signature of a call's arguments; false where no plan may serve it.
bool signature(const torch::jit::Stack& stack, size_t first, std::string& key);
bool run_plan(const std::shared_ptr<Plan>& plan, const c10::OperatorHandle& op,
              torch::jit::Stack* stack);

// A call of a function of a vendor's operator library: the context that its callbacks are given.
struct LibraryCall {
  explicit LibraryCall(int device) : device(device) {}
  // The tensor's address, which is its handle; the call keeps the tensor.
  const at::Tensor* hold(const at::Tensor& tensor) {
    tensors.push_back(tensor);
    return &tensors.back();
  }
  int device;
  std::deque<at::Tensor> tensors;
  std::exception_ptr failure;  // of a callback
};

// Raises where the tensor's memory was freed.
void check_memory(const at::Tensor& tensor);
// False where the memory has gaps or overlaps.
bool fill_with_zeros(const at::Tensor& self);
void copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking);

}  // namespace dicp
