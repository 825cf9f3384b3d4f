#include "operators.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_cpu_dispatch.h>
#include <ATen/ops/empty_strided_cpu_dispatch.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/strides.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

namespace dicp {

namespace {

const c10::DispatchKeySet kDeviceKeys(c10::DispatchKey::PrivateUse1);
const c10::DispatchKeySet kHostKeys(c10::DispatchKey::CPU);

// Keys that a host kernel is called without: this side of the call has dealt with them.
const c10::DispatchKeySet kHandled =
    c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;

struct Held {
  c10::Storage storage;
};

void release_held(void* context) { delete static_cast<Held*>(context); }

// Memory of `storage` as `place` sees it; the storage lives as long as the memory is used.
c10::DataPtr share(const c10::Storage& storage, c10::Device place) {
  return {storage.unsafeGetStorageImpl()->mutable_data(), new Held{storage}, &release_held, place};
}

// As `share`, but a host storage with one reference gives its memory away.
c10::DataPtr moved_or_shared(const c10::Storage& storage, c10::Device place) {
  if (storage.use_count() > 1) return share(storage, place);
  auto data = storage.unsafeGetStorageImpl()->set_data_ptr({nullptr, storage.device()});
  data.unsafe_set_device(place);
  return data;
}

Block* block_under(const c10::DataPtr& data) {
  if (data.get_deleter() != &release_held) return block_of(data);
  return block_under(static_cast<Held*>(data.get_context())->storage.data_ptr());
}

at::Tensor over(const c10::Storage& storage, c10::DispatchKeySet keys, const at::Tensor& like,
                int64_t offset) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), offset);
  return made;
}

// From the first to the last element that a tensor's strides reach.
size_t extent_bytes(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return size_t(last + 1) * tensor.element_size();
}

bool on_this_kind(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

}  // namespace

void check_memory(const at::Tensor& tensor) {
  const auto needed = extent_bytes(tensor);
  const auto start = size_t(tensor.storage_offset()) * tensor.element_size();
  TORCH_CHECK(needed == 0 || start + needed <= tensor.storage().nbytes(),
              "use after free: a tensor of sizes ", tensor.sizes(), " on ", tensor.device(),
              " has no memory any more (its storage holds ", tensor.storage().nbytes(),
              " bytes, it needs ", start + needed, ")",
              lost_block(tensor.storage().unsafeGetStorageImpl()));
}

// ---- host views -----------------------------------------------------------------------------------

const c10::Storage* HostCall::twin_of(const Twins& all, const c10::StorageImpl* storage) {
  for (const auto& twin : all)
    if (twin.of == storage) return &twin.storage;
  return nullptr;
}

// Tensors that share memory share its copy, too, of which only what they reach over is filled.
const c10::Storage& HostCall::host_storage(const c10::Storage& storage) {
  auto* impl = storage.unsafeGetStorageImpl();
  if (const auto* known = twin_of(host_storages_, impl)) return *known;
  c10::Storage host;
  if (host_addressable())
    host = c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
                        share(storage, c10::kCPU), c10::GetCPUAllocator(), true);
  else
    host = at::detail::empty_cpu({int64_t(storage.nbytes())}, at::kByte).storage();
  device_storages_.push_back({host.unsafeGetStorageImpl(), storage});
  host_storages_.push_back({impl, std::move(host)});
  return host_storages_.back().storage;
}

at::Tensor HostCall::view_of(const at::Tensor& tensor) {
  check_memory(tensor);
  auto made = over(host_storage(tensor.storage()), kHostKeys, tensor, tensor.storage_offset());
  const auto bytes = extent_bytes(tensor);
  if (!host_addressable() && bytes > 0)
    check(runtime().copy_to_host(tensor.device().index(), made.data_ptr(), tensor.data_ptr(), bytes,
                                 nullptr),
          "copying to the host");
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

at::Tensor HostCall::on_host(const at::Tensor& tensor) {
  if (!on_this_kind(tensor)) return tensor;
  TORCH_CHECK(tensor.layout() == at::kStrided, "the device has no ", tensor.layout(), " tensors");
  for (const auto& pair : pairs_)
    if (pair.device.is_same(tensor)) return pair.host;
  auto host = view_of(tensor);
  if (tensor.is_conj()) host._set_conj(true);
  if (tensor.is_neg()) host._set_neg(true);
  pairs_.push_back({tensor, host});
  return host;
}

c10::IValue HostCall::on_host(const c10::IValue& value) {
  if (value.isTensor()) return on_host(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorList()) list.push_back(on_host(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
      list.push_back(tensor ? std::optional<at::Tensor>(on_host(*tensor)) : std::nullopt);
    return list;
  }
  if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::ListType) {
    c10::impl::GenericList list(value.toList().elementType());  // lists of lists of tensors
    for (const c10::IValue item : value.toList()) list.push_back(on_host(item));
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == kType) return c10::Device(c10::kCPU);
  if (value.isGenerator()) return host_generator(value.toGenerator());
  return value;
}

at::Tensor HostCall::on_device(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != c10::kCPU) return tensor;
  for (const auto& pair : pairs_)
    if (pair.host.is_same(tensor)) return pair.device;
  if (tensor.layout() != at::kStrided) return tensor;
  const c10::Device place(kType, c10::DeviceIndex(device_));
  auto* impl = tensor.storage().unsafeGetStorageImpl();
  at::Tensor made;
  if (tensor._is_zerotensor()) {  // which has no memory
    made = at::detail::empty_strided_generic(tensor.sizes(), tensor.strides(), device_allocator(),
                                             kDeviceKeys, tensor.scalar_type());
    fill_with_zeros(made);
  } else if (const auto* known = twin_of(device_storages_, impl)) {
    made = over(*known, kDeviceKeys, tensor, tensor.storage_offset());
  } else if (host_addressable() && (impl->nbytes() == 0 || block_of(impl->data_ptr()))) {
    c10::Storage storage(c10::Storage::use_byte_size_t(), impl->nbytes(),
                         moved_or_shared(tensor.storage(), place), device_allocator(), true);
    device_storages_.push_back({impl, storage});
    made = over(storage, kDeviceKeys, tensor, tensor.storage_offset());
  } else {
    made = at::detail::empty_strided_generic(tensor.sizes(), tensor.strides(), device_allocator(),
                                             kDeviceKeys, tensor.scalar_type());
    copy_from(tensor, made, false);
  }
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

c10::IValue HostCall::on_device(const c10::IValue& value) {
  if (value.isTensor()) return on_device(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorList()) list.push_back(on_device(tensor));
    return list;
  }
  if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::ListType) {
    c10::impl::GenericList list(value.toList().elementType());  // lists of lists of tensors
    for (const c10::IValue item : value.toList()) list.push_back(on_device(item));
    return list;
  }
  return value;
}

void HostCall::take_over(const Pair& pair) {
  const auto& storage = pair.device.storage();
  const auto& grown = pair.host.storage();
  bool copied = !host_addressable();
  if (grown.nbytes() > storage.nbytes()) {
    auto* to = storage.unsafeGetStorageImpl();
    copied = copied || !block_of(grown.data_ptr());
    if (copied) {
      at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(storage, grown.nbytes());
    } else {
      to->set_data_ptr_noswap(share(grown, c10::Device(kType, c10::DeviceIndex(device_))));
      to->set_nbytes(grown.nbytes());
    }
  }
  auto* impl = pair.device.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(pair.host.sizes(), pair.host.strides(), pair.host.storage_offset());
  if (copied) copy_back(pair);
}

void HostCall::copy_back(const Pair& pair) {
  const auto bytes = extent_bytes(pair.device);
  if (bytes > 0)
    check(runtime().copy_to_device(pair.device.device().index(), pair.device.data_ptr(),
                                   pair.host.data_ptr(), bytes, nullptr),
          "copying to the device");
}

void HostCall::write_back() {
  for (const auto& pair : pairs_) {
    if (pair.host.sizes() != pair.device.sizes() || pair.host.strides() != pair.device.strides())
      take_over(pair);
    else if (!host_addressable())
      copy_back(pair);
  }
}

int device_of(const torch::jit::Stack& stack, size_t first) {
  int asked = -1;
  const auto look = [](const at::Tensor& tensor) {
    return on_this_kind(tensor) ? int(tensor.device().index()) : -1;
  };
  for (size_t k = first; k < stack.size(); ++k) {
    const auto& value = stack[k];
    int found = -1;
    if (value.isTensor()) {
      found = look(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList())
        if (found < 0) found = look(tensor);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
        if (found < 0 && tensor) found = look(*tensor);
    } else if (value.isDevice() && value.toDevice().type() == kType && asked < 0) {
      asked = value.toDevice().has_index() ? value.toDevice().index() : current_device();
    }
    if (found >= 0) return found;
  }
  return asked >= 0 ? asked : current_device();
}

static bool is_work(const c10::IValue& value) {
  using Pointer = c10::intrusive_ptr<c10d::Work>;
  return value.isObject() && value.toObjectRef().type() == c10::getCustomClassType<Pointer>();
}

void call_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack, int device) {
  const auto count = op.schema().arguments().size();
  const size_t first = stack->size() - count;
  c10::impl::ExcludeDispatchKeyGuard handled(kHandled);
  wait_for_queue(device);
  HostCall call(device);
  for (size_t k = first; k < stack->size(); ++k) (*stack)[k] = call.on_host((*stack)[k]);
  {
    HostMemoryOnDevice memory(device);
    op.callBoxed(stack);
  }
  if (!host_addressable())  // a collective fills the host copies until its work is done
    for (size_t k = first; k < stack->size(); ++k)
      if (is_work((*stack)[k])) (*stack)[k].toCustomClass<c10d::Work>()->wait();
  call.write_back();
  for (size_t k = first; k < stack->size(); ++k) (*stack)[k] = call.on_device((*stack)[k]);
}

std::string short_name(const std::string& name) {
  return name.rfind("aten::", 0) == 0 ? name.substr(6) : name;
}

std::string kernel_row(const std::string& name, int device) {
  const auto* kind = host_addressable() ? " (simulated dipu:" : " (dipu:";
  return short_name(name) + kind + std::to_string(device) + ")";
}

// ---- plans ----------------------------------------------------------------------------------------

namespace {

template <class T>
void append(std::string& key, const T& value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof value);
}

bool append_tensor(const at::Tensor& tensor, std::string& key) {
  if (!tensor.defined()) {
    key.push_back('n');  // as an absent one
    return true;
  }
  auto* impl = tensor.unsafeGetTensorImpl();
  if (tensor.layout() != at::kStrided || tensor.is_conj() || tensor.is_neg() ||
      impl->is_python_dispatch())
    return false;
  key.push_back('t');
  key.push_back(char(tensor.scalar_type()));
  key.push_back(char(tensor.device().type()));
  key.push_back(char(tensor.device().index()));
  key.push_back(char(impl->is_wrapped_number()));
  key.push_back(char(tensor.dim()));
  for (auto size : tensor.sizes()) append(key, size);
  for (auto stride : tensor.strides()) append(key, stride);
  return true;
}

bool append_value(const c10::IValue& value, std::string& key) {
  if (value.isTensor()) return append_tensor(value.toTensor(), key);
  if (value.isNone()) {
    key.push_back('n');
  } else if (value.isInt()) {
    key.push_back('i');
    append(key, value.toInt());
  } else if (value.isDouble()) {
    key.push_back('d');
    append(key, value.toDouble());
  } else if (value.isBool()) {
    key.push_back(value.toBool() ? 'y' : 'f');
  } else if (value.isString()) {
    key.push_back('s');
    key += value.toStringRef();
    key.push_back('\0');
  } else if (value.isIntList()) {
    key.push_back('l');
    for (auto item : value.toIntVector()) append(key, item);
    key.push_back(']');
  } else if (value.isBoolList()) {
    key.push_back('o');
    for (const bool item : value.toBoolList()) key.push_back(item ? 'y' : 'f');
    key.push_back(']');
  } else if (value.isDoubleList()) {
    key.push_back('e');
    for (auto item : value.toDoubleVector()) append(key, item);
    key.push_back(']');
  } else if (value.isDevice()) {
    key.push_back('v');
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    key.push_back('m');
    for (const c10::IValue& item : value.toListRef())
      if (!append_value(item, key)) return false;
    key.push_back(']');
  } else {
    return false;
  }
  return true;
}

using Tensors = c10::SmallVector<const at::Tensor*, 16>;

// The tensors of a call in the order of its arguments, those of lists included.
Tensors tensors_of(const torch::jit::Stack& stack, size_t first) {
  Tensors found;
  for (size_t k = first; k < stack.size(); ++k) {
    const auto& value = stack[k];
    if (value.isTensor()) {
      if (value.toTensor().defined()) found.push_back(&value.toTensor());
    } else if (value.isTensorList() || value.isOptionalTensorList()) {
      for (const c10::IValue& item : value.toListRef())
        if (item.isTensor() && item.toTensor().defined()) found.push_back(&item.toTensor());
    }
  }
  return found;
}

enum class Overlap { NONE, WHOLE, PART };

Overlap overlap_of(const at::Tensor& out, const at::Tensor& input) {
  if (out.storage().data() != input.storage().data()) return Overlap::NONE;
  const auto* a = static_cast<const char*>(out.data_ptr());
  const auto* b = static_cast<const char*>(input.data_ptr());
  if (a + extent_bytes(out) <= b || b + extent_bytes(input) <= a) return Overlap::NONE;
  const bool same = a == b && out.sizes() == input.sizes() && out.strides() == input.strides() &&
                    out.scalar_type() == input.scalar_type();
  return same ? Overlap::WHOLE : Overlap::PART;
}

at::Tensor fresh(const PlannedTensor& output) {
  RECORD_USER_SCOPE("wrapper_DIPU_empty_strided");
  return at::detail::empty_strided_generic(output.sizes, output.strides, device_allocator(),
                                           kDeviceKeys, output.dtype);
}

// A contiguous copy. It may be freed once the kernels that read it are in the queue.
at::Tensor without_gaps(const at::Tensor& tensor) {
  at::Tensor made = at::detail::empty_generic(tensor.sizes(), device_allocator(), kDeviceKeys,
                                              tensor.scalar_type(), std::nullopt);
  copy_from(tensor, made, false);
  return made;
}

// A host tensor for a queued kernel: the program may overwrite its own before the kernel runs.
at::Tensor unchanging(const at::Tensor& tensor) {
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
  c10::impl::ExcludeDispatchKeyGuard handled(kHandled);
  return tensor.clone();
}

struct Task {
  std::shared_ptr<Plan> plan;
  std::vector<at::Tensor> numbers;  // host tensors, which a queued kernel reads later
  std::vector<void*> table;
  int64_t status[4] = {0, 0, 0, 0};
  int device = 0;
  std::unique_ptr<at::ThreadLocalState> profiled;  // the launching thread's, where one records it
};

int64_t run_kernels(Task& task) {
  const auto& plan = *task.plan;
  if (!task.profiled) return plan.run(plan.launches, plan.count, task.table.data(), task.status);
  at::ThreadLocalStateGuard launched_in(*task.profiled);
  RECORD_USER_SCOPE(kernel_row(plan.name, task.device));
  return plan.run(plan.launches, plan.count, task.table.data(), task.status);
}

int run_task(void* argument) {
  std::unique_ptr<Task> task(static_cast<Task*>(argument));
  const auto& plan = *task->plan;
  const auto stopped = run_kernels(*task);
  if (stopped == 0) return 0;
  std::string text = plan.name;
  switch (task->status[0]) {
    case 2: text += ": integer division by zero"; break;
    case 3: text += ": no memory for scratch space"; break;
    default:
      text += ": index " + std::to_string(task->status[2]) + " is out of bounds for size " +
              std::to_string(task->status[3]);
  }
  note_error(text);
  return 1;
}

}  // namespace

bool signature(const torch::jit::Stack& stack, size_t first, std::string& key) {
  key.push_back(char(c10::get_default_dtype_as_scalartype()));  // of results of integers
  for (size_t k = first; k < stack.size(); ++k)
    if (!append_value(stack[k], key)) return false;
  return true;
}

bool run_plan(const std::shared_ptr<Plan>& plan, const c10::OperatorHandle& op,
              torch::jit::Stack* stack) {
  const size_t first = stack->size() - op.schema().arguments().size();
  const auto tensors = tensors_of(*stack, first);
  const int device = device_of(*stack, first);
  const c10::DeviceGuard here({kType, c10::DeviceIndex(device)});
  auto task = std::make_unique<Task>();
  task->plan = plan;
  task->table = plan->table;
  task->device = device;
  // Results are resized first: this may make them overlap inputs, and move an input's memory.
  for (const auto& output : plan->outputs) {
    if (output.argument < 0) continue;
    const auto& given = *tensors[size_t(output.argument)];
    if (given.sizes() != c10::IntArrayRef(output.sizes)) {
      given.resize_(output.sizes);
      given.unsafeGetTensorImpl()->set_sizes_and_strides(output.sizes, output.strides);
    }
    check_memory(given);
  }
  c10::SmallVector<at::Tensor, 4> copies;
  c10::SmallVector<bool, 4> staged(plan->outputs.size(), false);  // written over what is read
  for (const auto& input : plan->inputs) {
    const auto& tensor = *tensors[size_t(input.argument)];
    if (on_this_kind(tensor)) {
      check_memory(tensor);
      for (size_t k = 0; k < plan->outputs.size(); ++k) {
        if (plan->outputs[k].argument < 0) continue;
        const auto found = overlap_of(*tensors[size_t(plan->outputs[k].argument)], tensor);
        if (found == Overlap::PART) return false;
        if (found == Overlap::WHOLE && !plan->pointwise) staged[k] = true;
      }
    }
    const at::Tensor* read = &tensor;
    if (input.copied)
      read = &copies.emplace_back(without_gaps(tensor));
    else if (!on_this_kind(tensor))
      read = &task->numbers.emplace_back(unchanging(tensor));
    task->table[size_t(input.slot)] = read->data_ptr();
  }
  std::vector<at::Tensor> outputs, computed;
  for (size_t k = 0; k < plan->outputs.size(); ++k) {
    const auto& output = plan->outputs[k];
    const bool given = output.argument >= 0;
    outputs.push_back(given ? *tensors[size_t(output.argument)] : fresh(output));
    computed.push_back(staged[k] ? fresh(output) : outputs.back());
    if (auto* at = computed.back().data_ptr()) task->table[size_t(output.slot)] = at;
  }
  const auto scratch = device_allocator()->allocate(plan->workspace ? plan->workspace + 64 : 0);
  auto* const start = static_cast<char*>(scratch.get());
  for (const auto& part : plan->parts)
    task->table[size_t(part.slot)] = start + (-reinterpret_cast<uintptr_t>(start) & 63) + part.offset;
  for (const auto& alias : plan->aliases)
    task->table[size_t(alias.slot)] =
        static_cast<char*>(task->table[size_t(alias.base)]) + alias.offset;
  const auto stream = current_stream(device);
  {
    RECORD_USER_SCOPE("LaunchKernel_" + short_name(plan->name));
    if (at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE))
      task->profiled = std::make_unique<at::ThreadLocalState>();
    check(runtime().stream_launch(handle(stream), &run_task, task.release(), plan->bytes),
          "launching");
  }
  for (size_t k = 0; k < outputs.size(); ++k)
    if (staged[k]) copy_from(computed[k], outputs[k], false);
  stack->resize(first);
  for (const auto& result : plan->results) {
    if (result.output < 0) {
      stack->push_back(at::Tensor());
      continue;
    }
    const auto& output = outputs[size_t(result.output)];
    stack->push_back(result.view ? at::native::as_strided_tensorimpl(output, result.sizes,
                                                                     result.strides, result.offset)
                                 : output);
  }
  return true;
}

bool fill_with_zeros(const at::Tensor& self) {
  if (self.numel() == 0) return true;
  if (!self.is_non_overlapping_and_dense()) return false;
  check_memory(self);
  const int device = self.device().index();
  check(runtime().fill(device, self.data_ptr(), 0, self.nbytes(), handle(current_stream(device))),
        "filling");
  return true;
}

// ---- native operators -----------------------------------------------------------------------------

void copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return;
  const auto& ours = on_this_kind(to) ? to : from;
  const int device = ours.device().index();
  const bool plain = from.scalar_type() == to.scalar_type() && from.sizes() == to.sizes() &&
                     from.strides() == to.strides() && from.is_non_overlapping_and_dense() &&
                     from.is_conj() == to.is_conj() && from.is_neg() == to.is_neg();
  if (plain) {
    if (on_this_kind(from)) check_memory(from);
    if (on_this_kind(to)) check_memory(to);
    auto* const target = to.data_ptr();
    const auto* const source = from.data_ptr();
    const size_t bytes = to.nbytes();
    const bool one_device = on_this_kind(from) && on_this_kind(to);
    const bool later = one_device ? from.device() == to.device()
                                  : non_blocking && is_pinned(on_this_kind(to) ? source : target);
    auto stream = later ? handle(current_stream(device)) : nullptr;
    if (!later) {
      wait_for_queue(device);
      if (one_device) wait_for_queue(from.device().index());
    }
    int status;
    if (!one_device)
      status = on_this_kind(to) ? runtime().copy_to_device(device, target, source, bytes, stream)
                                : runtime().copy_to_host(device, target, source, bytes, stream);
    else if (from.device() == to.device())
      status = runtime().copy_on_device(device, target, source, bytes, stream);
    else
      status = runtime().copy_between(device, target, from.device().index(), source, bytes, stream);
    check(status, "copying");
    return;
  }
  c10::impl::ExcludeDispatchKeyGuard handled(kHandled);
  wait_for_queue(device);
  if (on_this_kind(from)) wait_for_queue(from.device().index());
  HostCall call(device);
  auto source = call.on_host(from);
  call.on_host(to).copy_(source);
  call.write_back();
}

namespace {

c10::Device placed(std::optional<at::Device> device) {
  const int index = device && device->has_index() ? device->index() : current_device();
  return {kType, c10::DeviceIndex(index)};
}

bool fills_fresh_memory() {
  const auto& context = at::globalContext();
  return context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory();
}

// Under deterministic algorithms eager fills memory without values: with NaN or the largest integer.
at::Tensor filled(at::Tensor fresh) {
  if (!fills_fresh_memory() || fresh.numel() == 0) return fresh;
  c10::impl::ExcludeDispatchKeyGuard handled(kHandled);
  wait_for_queue(fresh.device().index());
  HostCall call(fresh.device().index());
  auto host = call.on_host(fresh);
  at::native::fill_empty_deterministic_(host);
  call.write_back();
  return fresh;
}

// `bytes`: those that the storage of `self` had before.
void fill_grown(const at::Tensor& self, size_t bytes) {
  const auto size = self.element_size();
  const auto first = int64_t(bytes) / size, end = int64_t(self.storage().nbytes()) / size;
  if (end > first) filled(at::native::as_strided_tensorimpl(self, {end - first}, {1}, first));
}

at::Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> layout, std::optional<at::Device> device,
                 std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "only host tensors are pinned");
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "the device has no ", *layout,
              " tensors");
  RECORD_USER_SCOPE("wrapper_DIPU_empty");
  c10::DeviceGuard here(placed(device));
  return filled(at::detail::empty_generic(sizes, device_allocator(), kDeviceKeys,
                                          c10::dtype_or_default(dtype), format));
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "only host tensors are pinned");
  RECORD_USER_SCOPE("wrapper_DIPU_empty_strided");
  c10::DeviceGuard here(placed(device));
  return filled(at::detail::empty_strided_generic(sizes, strides, device_allocator(), kDeviceKeys,
                                                  c10::dtype_or_default(dtype)));
}

at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

at::Tensor view(const at::Tensor& self, c10::IntArrayRef sizes) {
  return at::native::view(self, sizes);
}

at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef sizes,
                         c10::IntArrayRef strides) {
  return at::native::_reshape_alias(self, sizes, strides);
}

at::Tensor unfold(const at::Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}

void grow_storage(c10::StorageImpl* storage, size_t bytes) {
  if (bytes > storage->nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(
        c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage)), bytes);
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef sizes,
                         std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != sizes) {  // strides stay those of a tensor that has the sizes
    impl->set_sizes_contiguous(sizes);
    const auto bytes = at::detail::computeStorageNbytesContiguous(
        sizes, self.element_size(), size_t(self.storage_offset()));
    const auto before = self.storage().nbytes();
    grow_storage(self.storage().unsafeGetStorageImpl(), bytes);
    if (fills_fresh_memory()) fill_grown(self, before);
  }
  if (format) impl->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset,
                        c10::IntArrayRef sizes, c10::IntArrayRef given) {
  auto* impl = self.unsafeGetTensorImpl();
  const auto row_major = c10::contiguous_strides(sizes);
  const auto strides = given.empty() ? c10::IntArrayRef(row_major) : given;
  at::native::checkSetStorage(self, std::move(source), offset, sizes, strides, false);
  const auto bytes = at::detail::computeStorageNbytes(sizes, strides, self.element_size(),
                                                      size_t(offset));
  impl->set_sizes_and_strides(sizes, strides, offset);
  if (self.numel() > 0) grow_storage(impl->unsafe_storage().unsafeGetStorageImpl(), bytes);
  return self;
}

at::Tensor& set_source(at::Tensor& self, at::Storage source) {
  const auto length = int64_t(source.nbytes() / self.element_size());
  return set_storage(self, std::move(source), 0, {length}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  if (self.unsafeGetTensorImpl() == source.unsafeGetTensorImpl()) return self;
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(),
                     source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  c10::DeviceGuard guard(self.device());
  c10::Storage fresh(c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0),
                     device_allocator(), true);
  return set_storage(self, std::move(fresh), 0, {0}, {1});
}

at::Scalar local_scalar(const at::Tensor& self) {
  wait_for_queue(self.device().index());
  HostCall call(self.device().index());
  return at::native::_local_scalar_dense_cpu(call.on_host(self));
}

at::Tensor copy_from_kernel(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (from.sizes() != to.sizes()) {
    copy_from(from.expand_as(to), to, non_blocking);
  } else {
    copy_from(from, to, non_blocking);
  }
  return to;
}

at::Tensor copy_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  copy_from(from, to, false);
  return to;
}

// PyTorch's own kernel knows the devices between which `tensor.data` may change; this one is among
// them, so that `module.to(device)` keeps its parameters, which optimizers hold.
bool has_compatible_type(const at::Tensor& self, const at::Tensor& from) {
  const auto dense = [](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && (tensor.is_cpu() || on_this_kind(tensor)) &&
           !tensor.unsafeGetTensorImpl()->is_python_dispatch();
  };
  return self.key_set() == from.key_set() || (dense(self) && dense(from));
}

void record_stream(at::Tensor& self, at::Stream stream) {
  if (Block* block = block_under(self.storage().data_ptr()))
    pool_at(block->device).record(block, handle(stream));
}

// Runs an operator asked for the other device's name on this device.
void call_on_meant(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  bool meant = false;
  for (size_t k = stack->size() - op.schema().arguments().size(); k < stack->size(); ++k) {
    auto& value = (*stack)[k];
    if (!value.isDevice() || !value.toDevice().is_cuda()) continue;
    value = placed(value.toDevice());
    meant = true;
  }
  TORCH_CHECK(meant, op.operator_name(), " was called for a device that is not there");
  op.callBoxed(stack);
}

// Under the mock, factories asked for the other device's name make tensors of this device.
at::Tensor mock_empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                      std::optional<at::Layout> layout, std::optional<at::Device> device,
                      std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  return empty(sizes, dtype, layout, placed(device), pin, format);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_source);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("_copy_from", &copy_from_kernel);
  m.impl("_copy_from_and_resize", &copy_and_resize);
  m.impl("record_stream", &record_stream);
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_type);
}

namespace {

void no_sparse(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, short_name(op.schema().name()),
                              ": the device has no sparse tensors; keep them on the CPU, or make "
                              "dense ones (Embedding(sparse=False), Tensor.to_dense())");
}

}  // namespace

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&no_sparse>());
}

TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&no_sparse>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const char* name : {"_to_sparse", "_to_sparse.sparse_dim", "_to_sparse_csr",
                           "_to_sparse_csc", "_to_sparse_bsr", "_to_sparse_bsc"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&no_sparse>());
}

// Copies resolve conjugates and negatives themselves: PyTorch would resolve them by a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
  m.impl("_copy_from_and_resize", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
  m.impl("_copy_from_and_resize", torch::CppFunction::makeFallthrough());
}

namespace {

void collective(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t first = stack->size() - op.schema().arguments().size();
  // Gloo splits the gathered tensor along its first dimension, which may be 1.
  if (op.schema().name() == "c10d::_allgather_base_")
    for (size_t k = first; k < first + 2; ++k)
      (*stack)[k] = (*stack)[k].toTensor().view({-1});
  call_on_host(op, stack, device_of(*stack, first));
}

// Takes the notice that kernels are replaced, which is meant here.
struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

}  // namespace

// PyTorch's kernels of collectives look for a backend of the tensors' device; these pass host views
// to the backend of the host.
void register_collectives() {
  static torch::Library* library = nullptr;
  if (library) return;
  Silent silent;
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  library = new torch::Library(torch::Library::IMPL, "c10d", c10::DispatchKey::PrivateUse1,
                               __FILE__, __LINE__);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("c10d::", 0) != 0) continue;
    auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    const auto full = name.name.substr(6) + (name.overload_name.empty() ? "" : ".") +
                      name.overload_name;
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&collective>());
  }
}

void register_mock_factories(bool on) {
  static std::unique_ptr<torch::Library> library;
  static std::unique_ptr<torch::Library> others;  // operators without a kernel of that key
  library = nullptr;
  others = nullptr;
  if (!on) return;
  others = std::make_unique<torch::Library>(torch::Library::IMPL, "_", c10::DispatchKey::CUDA,
                                            __FILE__, __LINE__);
  others->fallback(torch::CppFunction::makeFromBoxedFunction<&call_on_meant>());
  library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA,
                                             __FILE__, __LINE__);
  library->impl("empty.memory_format", &mock_empty);
  library->impl("empty_strided", &empty_strided);
  for (const char* name : kWindows)
    library->impl(name, torch::CppFunction::makeFromBoxedFunction<&call_on_meant>());
}

}  // namespace dicp
