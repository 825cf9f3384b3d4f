// The Python module: the path of every operator, autocast, and what the Python side asks for.
#include <ATen/ScalarOps.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/op_registration/adaption.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_ops.h>
#include <ATen/record_function.h>
#include <c10/util/Backtrace.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <chrono>
#include <shared_mutex>
#include <thread>

#include "operators.h"

namespace dicp {

void register_mock_factories(bool on);
void register_collectives();

namespace {

constexpr size_t kOwnFrames = 3, kMostFrames = 32;  // of a C++ backtrace: the allocator's, and all
constexpr size_t kMostPlans = 4096;  // of one operator: a program whose sizes never repeat

struct Entry {
  std::shared_mutex mutex;
  std::unordered_map<std::string, std::shared_ptr<Plan>> plans;
  std::atomic<bool> has_plans{false}, on_host{false};
  std::atomic<int> generator{-1};  // its place among the arguments of an operator that draws
};

struct PythonSide {
  std::shared_mutex mutex;
  std::unordered_map<c10::OperatorHandle, std::unique_ptr<Entry>> entries;
  std::atomic<bool> watching{false}, closed{false};
  py::object handler;
};

PythonSide& python_side() {
  static PythonSide* const one = new PythonSide;
  return *one;
}

Entry& entry_of(const c10::OperatorHandle& op) {
  auto& all = python_side();
  {
    std::shared_lock<std::shared_mutex> lock(all.mutex);
    auto found = all.entries.find(op);
    if (found != all.entries.end()) return *found->second;
  }
  std::unique_lock<std::shared_mutex> lock(all.mutex);
  auto& entry = all.entries[op];
  if (!entry) entry = std::make_unique<Entry>();
  return *entry;
}

// Dynamo would trace the Python side of operators that a function in part compiled calls.
class OutsideDynamo {
 public:
  OutsideDynamo()
      : set_(py::module_::import("torch._C._dynamo.eval_frame").attr("set_eval_frame")),
        before_(set_(py::none())) {}
  ~OutsideDynamo() { set_(before_); }

 private:
  py::object set_, before_;
};

// A stack holds dtypes, layouts and memory formats as numbers.
py::object python_value(c10::IValue value, const c10::Argument& argument) {
  auto type = argument.real_type();
  if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  if (value.isInt()) switch (type->kind()) {
    case c10::TypeKind::ScalarTypeType: return py::cast(at::ScalarType(value.toInt()));
    case c10::TypeKind::MemoryFormatType: return py::cast(at::MemoryFormat(value.toInt()));
    case c10::TypeKind::LayoutType:
      return py::reinterpret_borrow<py::object>(
          reinterpret_cast<PyObject*>(torch::getTHPLayout(at::Layout(value.toInt()))));
    default: break;
  }
  return torch::jit::toPyObject(std::move(value));
}

void call_python(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  TORCH_CHECK(!python_side().closed, "the device is shut down");
  py::gil_scoped_acquire gil;
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const size_t first = stack->size() - arguments.size();
  py::list positional;
  py::dict named;
  for (size_t k = 0; k < arguments.size(); ++k) {
    auto value = python_value(std::move((*stack)[first + k]), arguments[k]);
    if (arguments[k].kwarg_only())
      named[py::str(arguments[k].name())] = value;
    else
      positional.append(value);
  }
  stack->resize(first);
  const OutsideDynamo outside;
  auto result = python_side().handler(torch::detail::getTorchApiFunction(op), py::tuple(positional),
                                named);
  const auto& returns = schema.returns();
  if (returns.size() == 1) {
    stack->push_back(torch::jit::toIValue(result, returns[0].type()));
  } else if (returns.size() > 1) {
    auto values = py::cast<py::sequence>(result);
    for (size_t k = 0; k < returns.size(); ++k)
      stack->push_back(torch::jit::toIValue(values[k], returns[k].type()));
  }
}

// PyTorch's operators whose operands may lie on several devices.
bool takes_several_devices(const std::string& name) {
  return name.rfind("aten::", 0) != 0 || name.rfind("aten::_foreach_", 0) == 0 ||
         name == "aten::bernoulli_" || name == "aten::is_set_to";
}

// Raises PyTorch's error unless the tensors lie on one device. Numbers and indices may lie on the host.
void check_devices(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& schema = op.schema();
  if (takes_several_devices(schema.name())) return;
  const auto& arguments = schema.arguments();
  const size_t first = stack.size() - arguments.size();
  std::optional<c10::Device> common;
  for (size_t k = 0; k < arguments.size(); ++k) {
    const auto check = [&](const at::Tensor& tensor) {
      if (tensor.defined() && (tensor.dim() > 0 || !tensor.is_cpu()))
        c10::impl::check_and_update_common_device(common, tensor, schema.name().c_str() + 6,
                                                  arguments[k].name().c_str());
    };
    const auto& value = stack[first + k];
    if (value.isTensor()) {
      check(value.toTensor());
    } else if (value.isTensorList()) {
      for (const c10::IValue& item : value.toListRef()) check(item.toTensor());
    }
  }
}

void choose_path(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check_devices(op, *stack);
  const c10::ArrayRef<const c10::IValue> arguments(
      stack->data() + stack->size() - op.schema().arguments().size(), stack->data() + stack->size());
  RECORD_USER_SCOPE_WITH_INPUTS("dipu_" + short_name(op.schema().name()), arguments);
  auto& entry = entry_of(op);
  if (!python_side().watching) {
    if (entry.has_plans) {
      thread_local std::string key;
      key.clear();
      std::shared_ptr<Plan> plan;
      if (signature(*stack, stack->size() - op.schema().arguments().size(), key)) {
        std::shared_lock<std::shared_mutex> lock(entry.mutex);
        auto found = entry.plans.find(key);
        if (found != entry.plans.end()) plan = found->second;
      }
      if (plan && run_plan(plan, op, stack)) return;
    }
    if (entry.on_host) {
      const size_t first = stack->size() - op.schema().arguments().size();
      const int device = device_of(*stack, first);
      if (entry.generator >= 0 && (*stack)[first + size_t(entry.generator)].isNone())
        (*stack)[first + size_t(entry.generator)] = default_generator(device);
      RECORD_USER_SCOPE("LaunchKernel_" + short_name(op.schema().name()));
      {
        RECORD_USER_SCOPE(kernel_row(op.schema().name(), device));
        call_on_host(op, stack, device);
      }
      return;
    }
  }
  call_python(op, stack);
}

c10::OperatorHandle operator_named(const std::string& name, const std::string& overload) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
}

// Once the target has taken it, `zero_` of memory without gaps is the runtime's fill: as every call
// of a boxed kernel, choose_path acquires the GIL twice for each tensor.
at::Tensor& zero(at::Tensor& self) {
  static const auto op = operator_named("aten::zero_", "");
  if (entry_of(op).has_plans && !python_side().watching && fill_with_zeros(self)) return self;
  torch::jit::Stack stack{self};
  choose_path(op, &stack);
  return self;
}

// Python sees a number where PyTorch has made a tensor of one.
c10::IValue value_of(py::handle value, const c10::TypePtr& type) {
  const bool number = PyFloat_Check(value.ptr()) || PyLong_Check(value.ptr()) ||
                      PyComplex_Check(value.ptr());
  if (!number || type->kind() != c10::TypeKind::TensorType) return torch::jit::toIValue(value, type);
  auto scalar = PyBool_Check(value.ptr())      ? at::Scalar(py::cast<bool>(value))
                : PyLong_Check(value.ptr())    ? at::Scalar(py::cast<int64_t>(value))
                : PyComplex_Check(value.ptr()) ? at::Scalar(py::cast<c10::complex<double>>(value))
                                               : at::Scalar(py::cast<double>(value));
  auto made = c10::scalar_to_tensor(scalar);
  made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

torch::jit::Stack stack_of(const c10::OperatorHandle& op, const py::tuple& args,
                           const py::dict& kwargs) {
  torch::jit::Stack stack;
  const auto& arguments = op.schema().arguments();
  for (size_t k = 0; k < arguments.size(); ++k) {
    const auto name = py::str(arguments[k].name());
    if (k < args.size())
      stack.push_back(value_of(args[k], arguments[k].type()));
    else if (kwargs.contains(name))
      stack.push_back(value_of(kwargs[name], arguments[k].type()));
    else
      stack.push_back(arguments[k].default_value().value_or(c10::IValue()));
  }
  return stack;
}

py::object results_of(torch::jit::Stack stack) {
  if (stack.empty()) return py::none();
  if (stack.size() == 1) return torch::jit::toPyObject(std::move(stack[0]));
  py::tuple result(stack.size());
  for (size_t k = 0; k < stack.size(); ++k) result[k] = torch::jit::toPyObject(std::move(stack[k]));
  return result;
}

py::object host_call(const std::string& name, const std::string& overload, const py::tuple& args,
                     const py::dict& kwargs) {
  auto op = operator_named(name, overload);
  auto stack = stack_of(op, args, kwargs);
  const int device = device_of(stack, 0);
  {
    py::gil_scoped_release free;
    call_on_host(op, &stack, device);
  }
  return results_of(std::move(stack));
}

// Holds a Python object for as long as a plan may run, and releases it while it holds the GIL.
struct Kept {
  explicit Kept(py::object object) : object(new py::object(std::move(object))) {}
  ~Kept() {
    if (!Py_IsInitialized()) return;
    py::gil_scoped_acquire gil;
    delete object;
  }
  py::object* object;
};

PlannedTensor planned(const py::dict& from) {
  PlannedTensor to;
  to.slot = py::cast<int>(from["slot"]);
  to.argument = py::cast<int>(from["argument"]);
  if (from.contains("copied")) to.copied = py::cast<bool>(from["copied"]);
  if (from.contains("sizes")) {
    to.sizes = py::cast<std::vector<int64_t>>(from["sizes"]);
    to.strides = py::cast<std::vector<int64_t>>(from["strides"]);
    to.dtype = py::cast<at::ScalarType>(from["dtype"]);
  }
  return to;
}

// None where no plan may serve the call.
py::object signature_of(const std::string& name, const std::string& overload, const py::tuple& args,
                        const py::dict& kwargs) {
  std::string key;
  if (!signature(stack_of(operator_named(name, overload), args, kwargs), 0, key)) return py::none();
  return py::bytes(key);
}

// Runs a call by a plan, as calls of its signature from now on; NotImplemented where a result overlaps
// a part of an operand.
py::object install(const std::string& name, const std::string& overload, const py::tuple& args,
                   const py::dict& kwargs, const py::bytes& key, const py::dict& from) {
  auto op = operator_named(name, overload);
  auto plan = std::make_shared<Plan>();
  const auto address = [&](const char* what) {
    return reinterpret_cast<void*>(py::cast<uintptr_t>(from[what]));
  };
  plan->run = reinterpret_cast<decltype(plan->run)>(address("run"));
  plan->launches = address("launches");
  plan->count = py::cast<int64_t>(from["count"]);
  for (auto value : py::cast<std::vector<uintptr_t>>(from["table"]))
    plan->table.push_back(reinterpret_cast<void*>(value));
  for (auto item : from["inputs"]) plan->inputs.push_back(planned(py::cast<py::dict>(item)));
  for (auto item : from["outputs"]) plan->outputs.push_back(planned(py::cast<py::dict>(item)));
  for (auto item : from["aliases"]) {
    const auto [slot, base, offset] = py::cast<std::tuple<int, int, int64_t>>(item);
    plan->aliases.push_back({slot, base, offset});
  }
  plan->workspace = py::cast<size_t>(from["workspace"]);
  for (auto item : from["parts"]) {
    const auto [slot, offset] = py::cast<std::tuple<int, int64_t>>(item);
    plan->parts.push_back({slot, -1, offset});
  }
  plan->pointwise = py::cast<bool>(from["pointwise"]);
  plan->keep = std::make_shared<Kept>(py::reinterpret_borrow<py::object>(from["keep"]));
  for (auto item : from["results"]) {
    const auto pair = py::cast<std::pair<int, py::object>>(item);
    PlannedResult result;
    result.output = pair.first;
    result.view = !pair.second.is_none();
    using View = std::tuple<std::vector<int64_t>, std::vector<int64_t>, int64_t>;
    if (result.view) std::tie(result.sizes, result.strides, result.offset) = py::cast<View>(pair.second);
    plan->results.push_back(std::move(result));
  }
  plan->bytes = py::cast<size_t>(from["bytes"]);
  plan->name = name + (overload.empty() ? "" : "." + overload);
  {
    auto& entry = entry_of(op);
    std::unique_lock<std::shared_mutex> lock(entry.mutex);
    if (entry.plans.size() >= kMostPlans) entry.plans.clear();
    entry.plans[std::string(key)] = plan;
    entry.has_plans = true;
  }
  auto stack = stack_of(op, args, kwargs);
  bool ran;
  {
    py::gil_scoped_release free;
    ran = run_plan(plan, op, &stack);
  }
  if (!ran) return py::reinterpret_borrow<py::object>(Py_NotImplemented);
  return results_of(std::move(stack));
}

void forget_paths() {
  auto& all = python_side();
  std::unique_lock<std::shared_mutex> lock(all.mutex);
  for (auto& [op, entry] : all.entries) {
    std::unique_lock<std::shared_mutex> inner(entry->mutex);
    entry->plans.clear();
    entry->has_plans = false;
    entry->on_host = false;
  }
}

// ---- autocast -------------------------------------------------------------------------------------

void cast_tensors(torch::jit::Stack* stack, size_t first, at::ScalarType dtype) {
  for (size_t k = first; k < stack->size(); ++k) {
    auto& value = (*stack)[k];
    if (value.isTensor()) {
      value = at::autocast::cached_cast(dtype, value.toTensor(), kType);
    } else if (value.isTensorList()) {
      value = at::autocast::cached_cast(dtype, value.toTensorVector(), kType);
    }
  }
}

enum class Cast { LOWER, SINGLE, SINGLE_IF_UNASKED, WIDEST };

template <Cast how>
void autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard once(c10::DispatchKey::AutocastPrivateUse1);
  const size_t first = stack->size() - op.schema().arguments().size();
  if constexpr (how == Cast::LOWER) {
    cast_tensors(stack, first, at::autocast::get_autocast_dtype(kType));
  } else if constexpr (how == Cast::SINGLE) {
    cast_tensors(stack, first, at::kFloat);
  } else if constexpr (how == Cast::SINGLE_IF_UNASKED) {
    const auto& arguments = op.schema().arguments();
    const auto& input = (*stack)[first].toTensor();
    for (size_t k = 0; k < arguments.size(); ++k)
      if (arguments[k].name() == "dtype" && (*stack)[first + k].isNone() &&
          at::autocast::is_autocast_eligible(input, kType) && input.is_floating_point())
        (*stack)[first + k] = at::kFloat;
  } else {
    auto widest = at::autocast::get_autocast_dtype(kType);
    for (size_t k = first; k < stack->size(); ++k)
      if ((*stack)[k].isTensor() && (*stack)[k].toTensor().defined())
        widest = at::autocast::prioritize(widest, (*stack)[k].toTensor(), kType);
    cast_tensors(stack, first, widest);
  }
  op.callBoxed(stack);
}

#define DICP_NAME1(op) #op
#define DICP_NAME2(op, overload) #op "." #overload
#define DICP_PICK(_1, _2, NAME, ...) NAME
#define DICP_NAME(...) DICP_PICK(__VA_ARGS__, DICP_NAME2, DICP_NAME1)(__VA_ARGS__)
#define DICP_LOWER(...) \
  m.impl(DICP_NAME(__VA_ARGS__), torch::CppFunction::makeFromBoxedFunction<&autocast<Cast::LOWER>>());
#define DICP_SINGLE(...) \
  m.impl(DICP_NAME(__VA_ARGS__), torch::CppFunction::makeFromBoxedFunction<&autocast<Cast::SINGLE>>());
#define DICP_UNASKED(...)                                                    \
  m.impl(DICP_NAME(__VA_ARGS__), torch::CppFunction::makeFromBoxedFunction< \
                                     &autocast<Cast::SINGLE_IF_UNASKED>>());
#define DICP_WIDEST(...) \
  m.impl(DICP_NAME(__VA_ARGS__), torch::CppFunction::makeFromBoxedFunction<&autocast<Cast::WIDEST>>());

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&choose_path>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { m.impl("zero_", &zero); }

// PyTorch computes attention by single operators on a device that has no choice of its own. Flash
// attention of the host serves the same sizes, dtypes and masks here.
namespace {

int64_t attention_choice(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& mask, double dropout, bool causal,
                         std::optional<double> scale, bool grouped) {
  return at::_ops::_fused_sdp_choice::redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), query,
                                                 key, value, mask, dropout, causal, scale, grouped);
}

}  // namespace

}  // namespace dicp

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &dicp::attention_choice)
}

namespace dicp {

// Whole operators that PyTorch would otherwise take apart, or refuse, for an unknown device.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const char* name : {"convolution", "convolution_backward", "native_group_norm",
                           "native_group_norm_backward", "native_layer_norm", "mode.values", "addr",
                           "addr_", "addr.out"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&choose_path>());
  for (const char* name : kWindows)
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&choose_path>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(DICP_LOWER)
  AT_FORALL_FP32(DICP_SINGLE)
  AT_FORALL_FP32_SET_OPT_DTYPE(DICP_UNASKED)
  AT_FORALL_PROMOTE(DICP_WIDEST)
}

// ---- memory and streams for Python ----------------------------------------------------------------

namespace {

py::dict counter(const Counter& from) {
  py::dict to;
  to["current"] = from.current;
  to["peak"] = from.peak;
  to["allocated"] = from.added;
  to["freed"] = from.taken;
  return to;
}

py::dict statistics(int device) {
  const auto from = pool_at(device).statistics();
  py::dict to;
  to["allocation"] = counter(from.allocation);
  to["segment"] = counter(from.segment);
  to["active"] = counter(from.active);
  to["allocated_bytes"] = counter(from.allocated_bytes);
  to["reserved_bytes"] = counter(from.reserved_bytes);
  to["active_bytes"] = counter(from.active_bytes);
  to["requested_bytes"] = counter(from.requested_bytes);
  to["num_alloc_retries"] = from.retries;
  to["num_ooms"] = from.failures;
  return to;
}

py::list blocks(const std::vector<Block>& found) {
  py::list list;
  for (const auto& block : found) {
    py::dict one;
    one["address"] = reinterpret_cast<uintptr_t>(block.at);
    one["size"] = block.size;
    one["requested_size"] = block.requested;
    one["device"] = block.device;
    one["stream"] = reinterpret_cast<uintptr_t>(block.stream);
    one["allocated"] = !block.free;
    one["first"] = block.first;
    one["where"] = block.where;
    list.append(one);
  }
  return list;
}

void watch_memory(bool on, bool backtraces, int64_t most, int64_t interval, py::function where,
                  py::function print) {
  auto& check = checker();
  check.backtraces = backtraces;
  check.max_blocks = most;
  check.interval = interval;
  const auto kept = new py::function(std::move(where));
  const auto shown = new py::function(std::move(print));
  check.where = [kept] {
    const auto native = c10::get_backtrace(kOwnFrames, kMostFrames);
    py::gil_scoped_acquire gil;
    return py::cast<std::string>((*kept)()) + "C++ (most recent call first):\n" + native;
  };
  check.print = [shown](const std::string& text) {
    py::gil_scoped_acquire gil;
    (*shown)(text);
  };
  check.on = on;
}

Algorithm algorithm_named(const std::string& name) {
  return name == "RAW"  ? Algorithm::RAW
         : name == "BS" ? Algorithm::BS
         : name == "BF" ? Algorithm::BF
                        : Algorithm::TORCH;
}

int sleep_task(void* argument) {
  std::unique_ptr<double> milliseconds(static_cast<double*>(argument));
  std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(*milliseconds));
  return 0;
}

py::dict properties(int device) {
  dicp_rt_properties from;
  check(runtime().device_properties(device, &from), "asking for properties");
  py::dict to;
  to["name"] = std::string(from.name);
  to["total_memory"] = from.total_memory;
  to["major"] = from.major;
  to["minor"] = from.minor;
  to["multi_processor_count"] = from.multi_processor_count;
  return to;
}

struct HostMemory {
  explicit HostMemory(int device) : device(device) {}
  void enter() { held = std::make_unique<HostMemoryOnDevice>(device); }
  void exit(py::args) { held.reset(); }
  int device;
  std::unique_ptr<HostMemoryOnDevice> held;
};

}  // namespace

PYBIND11_MODULE(dicp_device_native, m) {
  m.def("start", [](const std::vector<int64_t>& addresses,
                    const std::optional<std::vector<int>>& visible, const std::string& algorithm,
                    const std::string& host, size_t max_split, double collect_above) {
    Options options;
    options.algorithm = algorithm_named(algorithm);
    if (max_split > 0) options.max_split = max_split;
    options.collect_above = collect_above;
    start(addresses, visible, options, algorithm_named(host));
  });
  m.def("stop_using", &stop_using);
  m.def("mock", [](bool on) {
    register_mock_guard(on);
    register_mock_factories(on);
  });
  m.def("hold", [](py::object library) { new py::object(std::move(library)); });
  // At exit: threads of PyTorch may still free tensors, but no longer call into Python.
  m.def("close", [] {
    python_side().closed = true;
    auto& check = checker();
    check.on = false;
    check.where = nullptr;
    check.print = nullptr;
  });
  m.def("register_collectives", &register_collectives);
  m.def("set_handler", [](py::object handler) { python_side().handler = std::move(handler); });
  m.def("set_watching", [](bool on) { python_side().watching = on; });
  m.def("run_on_host", [](const std::string& name, const std::string& overload) {
    const auto op = operator_named(name, overload);
    auto& entry = entry_of(op);
    entry.generator = op.schema().argumentIndexWithName("generator").value_or(-1);
    entry.on_host = true;
  });
  m.def("forget_paths", &forget_paths);
  m.def("signature", &signature_of);
  m.def("install", &install);
  m.def("host_call", &host_call);

  m.def("device_count", &device_count);
  m.def("current_device", &current_device);
  m.def("set_device", &set_device);
  m.def("current_stream_handle", [](int device) {
    return reinterpret_cast<uintptr_t>(handle(current_stream(device)));
  });
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("host_addressable", &host_addressable);
  m.def("properties", &properties);
  m.def("synchronize", &synchronize, py::call_guard<py::gil_scoped_release>());
  m.def("wait_for_queue", &wait_for_queue, py::call_guard<py::gil_scoped_release>());
  m.def("sleep", [](double milliseconds) {
    auto stream = handle(current_stream(current_device()));
    check(runtime().stream_launch(stream, &sleep_task, new double(milliseconds), SIZE_MAX),
          "launching");
  });

  m.def("statistics", &statistics);
  m.def("memory_info", [](int device) {
    size_t free = 0, total = 0;
    check(runtime().memory_info(device, &free, &total), "asking for memory");
    return std::make_pair(free, total);
  });
  m.def("empty_cache", &empty_caches, py::call_guard<py::gil_scoped_release>());
  m.def("reset_peak", [](int device) { pool_at(device).reset_peak(); });
  m.def("reset_accumulated", [](int device) { pool_at(device).reset_accumulated(); });
  m.def("limit", [](int device, size_t bytes) { pool_at(device).limit(bytes); });
  m.def("allocate", [](size_t bytes, int device) {
    return reinterpret_cast<uintptr_t>(allocate_memory(bytes, device));
  });
  m.def("free", [](uintptr_t address) { free_memory(reinterpret_cast<void*>(address)); });
  m.def("live_blocks", [](int device) { return blocks(pool_at(device).live()); });
  m.def("all_blocks", [](int device) { return blocks(pool_at(device).all()); });
  m.def("watch_memory", &watch_memory);
  m.def("checker_line", &checker_line);

  py::class_<HostCall>(m, "HostCall")
      .def(py::init<int>())
      .def("on_host", py::overload_cast<const at::Tensor&>(&HostCall::on_host))
      .def("on_device", py::overload_cast<const at::Tensor&>(&HostCall::on_device))
      .def("write_back", &HostCall::write_back);
  py::class_<LibraryCall>(m, "LibraryCall")
      .def(py::init<int>())
      .def("handle", [](LibraryCall& call, const at::Tensor& tensor) {
        check_memory(tensor);
        return reinterpret_cast<uintptr_t>(call.hold(tensor));
      })
      .def_property_readonly("context", [](LibraryCall& call) {
        return reinterpret_cast<uintptr_t>(&call);
      })
      .def("check", [](LibraryCall& call) {
        if (call.failure) std::rethrow_exception(call.failure);
      });
  py::class_<HostMemory>(m, "HostMemory")
      .def(py::init<int>())
      .def("__enter__", &HostMemory::enter)
      .def("__exit__", &HostMemory::exit);
}

}  // namespace dicp
