// The interface between dicp's eager device and a vendor's operator library.
//
// Names and layouts are those of the public interface DIOPI, so that a library built for it serves
// here. The library exports functions such as
//   diopiError_t diopiAdd(context, out, input, other, alpha);
// `python -m dicp.oplib header` declares them all. It calls the functions declared
// here, which the device exports, for what it has to know of tensors, for memory and for the
// stream to work on. Every function returns diopiSuccess or another status.
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct diopiContext* diopiContextHandle_t;
typedef struct diopiTensor* diopiTensorHandle_t;
typedef const struct diopiTensor* diopiConstTensorHandle_t;
typedef void* diopiStreamHandle_t;  // a stream of the vendor's runtime
typedef int8_t diopiDeviceIndex_t;

typedef enum {
  diopiSuccess = 0,
  diopiErrorOccurred = 1,
  // The operator takes its other paths, without an error:
  diopi5DNotSupported = 12,
  diopiNoImplement = 13,
  diopiDtypeNotSupported = 1000
} diopiError_t;

typedef enum { diopi_host = 0, diopi_device = 1 } diopiDevice_t;

typedef enum {
  diopi_dtype_int8 = 0,
  diopi_dtype_uint8 = 1,
  diopi_dtype_int16 = 2,
  diopi_dtype_uint16 = 3,
  diopi_dtype_int32 = 4,
  diopi_dtype_uint32 = 5,
  diopi_dtype_int64 = 6,
  diopi_dtype_uint64 = 7,
  diopi_dtype_float16 = 8,
  diopi_dtype_float32 = 9,
  diopi_dtype_float64 = 10,
  diopi_dtype_bool = 11,
  diopi_dtype_bfloat16 = 12,
  diopi_dtype_complex32 = 14,
  diopi_dtype_complex64 = 15,
  diopi_dtype_complex128 = 16,
  diopi_dtype_unsupported = 255
} diopiDtype_t;

typedef struct {
  const int64_t* data;
  int64_t len;
} diopiSize_t;

typedef struct {
  diopiDtype_t stype;  // a floating-point type: fval, else ival
  union {
    double fval;
    int64_t ival;
  };
} diopiScalar_t;

// Sizes and strides are read-only, and valid as long as the tensor.
diopiError_t diopiGetTensorData(diopiTensorHandle_t, void** address);
diopiError_t diopiGetTensorDataConst(diopiConstTensorHandle_t, const void** address);
diopiError_t diopiGetTensorShape(diopiConstTensorHandle_t, diopiSize_t* sizes);
diopiError_t diopiGetTensorStride(diopiConstTensorHandle_t, diopiSize_t* strides);
diopiError_t diopiGetTensorDtype(diopiConstTensorHandle_t, diopiDtype_t* dtype);
diopiError_t diopiGetTensorDevice(diopiConstTensorHandle_t, diopiDevice_t* device);
diopiError_t diopiGetTensorDeviceIndex(diopiConstTensorHandle_t, diopiDeviceIndex_t* index);
diopiError_t diopiGetTensorNumel(diopiConstTensorHandle_t, int64_t* elements);
diopiError_t diopiGetTensorElemSize(diopiConstTensorHandle_t, int64_t* bytes);
diopiError_t diopiGetTensorStoragePtr(diopiConstTensorHandle_t, void** address);
diopiError_t diopiGetTensorStorageOffset(diopiConstTensorHandle_t, int64_t* elements);
diopiError_t diopiGetTensorStorageNbytes(diopiConstTensorHandle_t, size_t* bytes);

diopiError_t diopiGetStream(diopiContextHandle_t, diopiStreamHandle_t* stream);
// Tensors of the context, which end with the call: work on the stream may still use their memory.
// Without strides a tensor is contiguous.
diopiError_t diopiRequireTensor(diopiContextHandle_t, diopiTensorHandle_t* tensor,
                                const diopiSize_t* sizes, const diopiSize_t* strides,
                                const diopiDtype_t dtype, const diopiDevice_t device);
diopiError_t diopiRequireBuffer(diopiContextHandle_t, diopiTensorHandle_t* tensor, int64_t bytes,
                                diopiDevice_t device);

#ifdef __cplusplus
}
#endif
