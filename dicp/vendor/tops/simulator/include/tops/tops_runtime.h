// The part of the Tops runtime's interface that the driver uses.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {
typedef enum { topsSuccess = 0, topsErrorInvalidValue = 1, topsErrorOutOfMemory = 2,
               topsErrorLaunchFailure = 719 } topsError_t;
typedef struct topsStreamRecord* topsStream_t;
typedef struct topsExecutableRecord* topsExecutable_t;
typedef struct topsResourceRecord* topsResource_t;
typedef enum { topsMemcpyHostToDevice = 1, topsMemcpyDeviceToHost = 2 } topsMemcpyKind;
typedef enum { topsExecutableInfoInputCount = 0, topsExecutableInfoOutputCount = 1,
               topsExecutableInfoInputSizeList = 2, topsExecutableInfoOutputSizeList = 3
} topsExecutableInfoType_t;

topsError_t topsGetDeviceCount(int* count);
topsError_t topsSetDevice(int device);
topsError_t topsMalloc(void** memory, size_t size);
topsError_t topsFree(void* memory);
topsError_t topsMemcpyAsync(void* to, const void* from, size_t size, topsMemcpyKind kind,
                            topsStream_t stream);
topsError_t topsStreamCreate(topsStream_t* stream);
topsError_t topsStreamSynchronize(topsStream_t stream);
topsError_t topsCreateExecutable(topsExecutable_t* executable, const void* binary, size_t size);
topsError_t topsDestroyExecutable(topsExecutable_t executable);
topsError_t topsExecutableQueryInfo(topsExecutable_t executable, topsExecutableInfoType_t kind,
                                    uint64_t* value);
topsError_t topsLaunchExecutableV2(topsExecutable_t executable, topsResource_t resource,
                                   void** inputs, size_t in, int64_t* input_dims,
                                   size_t* input_ranks, void** outputs, size_t out,
                                   topsStream_t stream);
}
