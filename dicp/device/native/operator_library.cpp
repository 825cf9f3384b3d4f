// What a vendor's operator library asks of the device: tensors, memory, the current stream.
#pragma GCC visibility push(default)
#include "operator_library.h"
#pragma GCC visibility pop

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/strides.h>

#include "operators.h"

using at::ScalarType;

namespace {

struct Kind {
  ScalarType ours;
  diopiDtype_t theirs;
};

constexpr Kind kKinds[] = {
    {ScalarType::Char, diopi_dtype_int8},        {ScalarType::Byte, diopi_dtype_uint8},
    {ScalarType::Short, diopi_dtype_int16},      {ScalarType::UInt16, diopi_dtype_uint16},
    {ScalarType::Int, diopi_dtype_int32},        {ScalarType::UInt32, diopi_dtype_uint32},
    {ScalarType::Long, diopi_dtype_int64},       {ScalarType::UInt64, diopi_dtype_uint64},
    {ScalarType::Half, diopi_dtype_float16},     {ScalarType::Float, diopi_dtype_float32},
    {ScalarType::Double, diopi_dtype_float64},   {ScalarType::Bool, diopi_dtype_bool},
    {ScalarType::BFloat16, diopi_dtype_bfloat16}, {ScalarType::ComplexHalf, diopi_dtype_complex32},
    {ScalarType::ComplexFloat, diopi_dtype_complex64},
    {ScalarType::ComplexDouble, diopi_dtype_complex128},
};

const at::Tensor& tensor_of(diopiConstTensorHandle_t handle) {
  return *reinterpret_cast<const at::Tensor*>(handle);
}

dicp::LibraryCall& call_of(diopiContextHandle_t handle) {
  return *reinterpret_cast<dicp::LibraryCall*>(handle);
}

diopiTensorHandle_t handle_of(const at::Tensor* tensor) {
  return reinterpret_cast<diopiTensorHandle_t>(const_cast<at::Tensor*>(tensor));
}

// Runs `read`; no exception leaves through the library's frames, the call raises it afterwards.
template <class Read>
diopiError_t guarded(diopiContextHandle_t context, Read read) {
  try {
    read();
    return diopiSuccess;
  } catch (...) {
    call_of(context).failure = std::current_exception();
    return diopiErrorOccurred;
  }
}

at::Tensor required(const dicp::LibraryCall& call, at::IntArrayRef sizes, at::IntArrayRef strides,
                    ScalarType dtype, diopiDevice_t where) {
  const auto keys = c10::DispatchKeySet(where == diopi_host ? c10::DispatchKey::CPU
                                                            : c10::DispatchKey::PrivateUse1);
  auto* memory = where == diopi_host ? c10::GetCPUAllocator() : dicp::device_allocator();
  c10::DeviceGuard here({dicp::kType, c10::DeviceIndex(call.device)});
  return at::detail::empty_strided_generic(sizes, strides, memory, keys, dtype);
}

at::IntArrayRef as_array(const diopiSize_t& size) { return {size.data, size_t(size.len)}; }

}  // namespace

diopiError_t diopiGetTensorData(diopiTensorHandle_t tensor, void** address) {
  *address = tensor_of(tensor).mutable_data_ptr();
  return diopiSuccess;
}

diopiError_t diopiGetTensorDataConst(diopiConstTensorHandle_t tensor, const void** address) {
  *address = tensor_of(tensor).const_data_ptr();
  return diopiSuccess;
}

diopiError_t diopiGetTensorShape(diopiConstTensorHandle_t tensor, diopiSize_t* sizes) {
  *sizes = {tensor_of(tensor).sizes().data(), tensor_of(tensor).dim()};
  return diopiSuccess;
}

diopiError_t diopiGetTensorStride(diopiConstTensorHandle_t tensor, diopiSize_t* strides) {
  *strides = {tensor_of(tensor).strides().data(), tensor_of(tensor).dim()};
  return diopiSuccess;
}

diopiError_t diopiGetTensorDtype(diopiConstTensorHandle_t tensor, diopiDtype_t* dtype) {
  *dtype = diopi_dtype_unsupported;
  for (const auto& kind : kKinds)
    if (kind.ours == tensor_of(tensor).scalar_type()) *dtype = kind.theirs;
  return diopiSuccess;
}

diopiError_t diopiGetTensorDevice(diopiConstTensorHandle_t tensor, diopiDevice_t* device) {
  *device = tensor_of(tensor).is_cpu() ? diopi_host : diopi_device;
  return diopiSuccess;
}

diopiError_t diopiGetTensorDeviceIndex(diopiConstTensorHandle_t tensor, diopiDeviceIndex_t* index) {
  *index = tensor_of(tensor).device().index();
  return diopiSuccess;
}

diopiError_t diopiGetTensorNumel(diopiConstTensorHandle_t tensor, int64_t* elements) {
  *elements = tensor_of(tensor).numel();
  return diopiSuccess;
}

diopiError_t diopiGetTensorElemSize(diopiConstTensorHandle_t tensor, int64_t* bytes) {
  *bytes = tensor_of(tensor).element_size();
  return diopiSuccess;
}

diopiError_t diopiGetTensorStoragePtr(diopiConstTensorHandle_t tensor, void** address) {
  *address = tensor_of(tensor).storage().mutable_data();
  return diopiSuccess;
}

diopiError_t diopiGetTensorStorageOffset(diopiConstTensorHandle_t tensor, int64_t* elements) {
  *elements = tensor_of(tensor).storage_offset();
  return diopiSuccess;
}

diopiError_t diopiGetTensorStorageNbytes(diopiConstTensorHandle_t tensor, size_t* bytes) {
  *bytes = tensor_of(tensor).storage().nbytes();
  return diopiSuccess;
}

diopiError_t diopiGetStream(diopiContextHandle_t context, diopiStreamHandle_t* stream) {
  return guarded(context, [&] {
    *stream = dicp::handle(dicp::current_stream(call_of(context).device));
  });
}

diopiError_t diopiRequireTensor(diopiContextHandle_t context, diopiTensorHandle_t* tensor,
                                const diopiSize_t* sizes, const diopiSize_t* strides,
                                const diopiDtype_t dtype, const diopiDevice_t device) {
  return guarded(context, [&] {
    auto& call = call_of(context);
    const auto given = as_array(*sizes);
    const auto packed = c10::contiguous_strides(given);
    for (const auto& kind : kKinds) {
      if (kind.theirs != dtype) continue;
      const auto steps = strides && strides->data ? as_array(*strides) : at::IntArrayRef(packed);
      *tensor = handle_of(call.hold(required(call, given, steps, kind.ours, device)));
      return;
    }
    TORCH_CHECK(false, "the operator library asks for a tensor of an unknown dtype, ", int(dtype));
  });
}

diopiError_t diopiRequireBuffer(diopiContextHandle_t context, diopiTensorHandle_t* tensor,
                                int64_t bytes, diopiDevice_t device) {
  const diopiSize_t size{&bytes, 1};
  return diopiRequireTensor(context, tensor, &size, nullptr, diopi_dtype_uint8, device);
}
