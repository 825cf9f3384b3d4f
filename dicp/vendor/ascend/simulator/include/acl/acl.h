#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {

using aclError = int;
constexpr aclError ACL_SUCCESS = 0;
constexpr aclError ACL_ERROR_REPEAT_INITIALIZE = 100002;
constexpr aclError ACL_ERROR_INVALID_PARAM = 100000;
constexpr aclError ACL_ERROR_GE_FAILURE = 500002;
constexpr aclError ACL_ERROR_RT_CONTEXT_NULL = 107002;
constexpr aclError ACL_ERROR_RT_MEMORY_ALLOCATION = 207001;

enum aclDataType : int { ACL_DT_UNDEFINED = -1 };
enum aclFormat : int { ACL_FORMAT_ND = 2 };
enum aclrtMemMallocPolicy { ACL_MEM_MALLOC_HUGE_FIRST = 0 };
enum aclrtMemcpyKind { ACL_MEMCPY_HOST_TO_HOST = 0, ACL_MEMCPY_HOST_TO_DEVICE = 1,
                       ACL_MEMCPY_DEVICE_TO_HOST = 2, ACL_MEMCPY_DEVICE_TO_DEVICE = 3 };

struct aclDataBuffer;
struct aclTensorDesc;
struct aclmdlDataset;
struct aclmdlDesc;
using aclrtStream = void*;

aclError aclInit(const char* config);
aclError aclrtGetDeviceCount(uint32_t* count);
aclError aclrtSetDevice(int32_t device);
aclError aclrtGetDevice(int32_t* device);
aclError aclrtCreateStream(aclrtStream* stream);
aclError aclrtSynchronizeStream(aclrtStream stream);
aclError aclrtMalloc(void** memory, size_t size, aclrtMemMallocPolicy policy);
aclError aclrtFree(void* memory);
aclError aclrtMemcpy(void* to, size_t room, const void* from, size_t size, aclrtMemcpyKind kind);
const char* aclrtGetSocName();
const char* aclGetRecentErrMsg();

aclDataBuffer* aclCreateDataBuffer(void* data, size_t size);
aclError aclDestroyDataBuffer(const aclDataBuffer* buffer);
aclTensorDesc* aclCreateTensorDesc(aclDataType type, int rank, const int64_t* dims, aclFormat f);
void aclDestroyTensorDesc(const aclTensorDesc* desc);
aclmdlDataset* aclmdlCreateDataset();
aclError aclmdlDestroyDataset(const aclmdlDataset* dataset);
aclError aclmdlAddDatasetBuffer(aclmdlDataset* dataset, aclDataBuffer* buffer);
aclError aclmdlSetDatasetTensorDesc(aclmdlDataset* dataset, aclTensorDesc* desc, size_t index);

aclmdlDesc* aclmdlCreateDesc();
aclError aclmdlDestroyDesc(aclmdlDesc* desc);
aclError aclmdlGetDesc(aclmdlDesc* desc, uint32_t model);
aclError aclmdlLoadFromMem(const void* model, size_t size, uint32_t* id);
aclError aclmdlQuerySizeFromMem(const void* model, size_t size, size_t* work, size_t* weights);
aclError aclmdlLoadFromMemWithMem(const void* model, size_t size, uint32_t* id, void* work,
                                  size_t work_size, void* weights, size_t weight_size);
aclError aclmdlExecuteAsync(uint32_t model, const aclmdlDataset* inputs, aclmdlDataset* outputs,
                            aclrtStream stream);
aclError aclmdlUnload(uint32_t model);

}  // extern "C"
