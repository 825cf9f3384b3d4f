// The simulator's Tops runtime: device memory is the host's, executables run in Python.
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "callbacks.h"
#include "tops/tops_runtime.h"

struct topsExecutableRecord {
  int handle;
  std::vector<uint64_t> inputs, outputs;  // bytes of each
};

namespace {

std::vector<uint64_t> numbers(std::istream& line) {
  size_t count = 0;
  line >> count;
  std::vector<uint64_t> found(count);
  for (uint64_t& number : found) line >> number;
  return found;
}

std::vector<RunArgument> arguments(void** data, const std::vector<uint64_t>& sizes) {
  std::vector<RunArgument> found;
  for (size_t k = 0; k < sizes.size(); ++k) found.push_back({data[k], sizes[k], -1, nullptr});
  return found;
}

}  // namespace

extern "C" {

topsError_t topsGetDeviceCount(int* count) { return *count = 1, topsSuccess; }
topsError_t topsSetDevice(int device) { return device == 0 ? topsSuccess : topsErrorInvalidValue; }
topsError_t topsMalloc(void** memory, size_t size) {
  *memory = std::malloc(size);
  return *memory == nullptr && size > 0 ? topsErrorOutOfMemory : topsSuccess;
}
topsError_t topsFree(void* memory) { return std::free(memory), topsSuccess; }
topsError_t topsMemcpyAsync(void* to, const void* from, size_t size, topsMemcpyKind, topsStream_t) {
  if (size > 0) std::memcpy(to, from, size);
  return topsSuccess;
}
topsError_t topsStreamCreate(topsStream_t* stream) { return *stream = nullptr, topsSuccess; }
topsError_t topsStreamSynchronize(topsStream_t) { return topsSuccess; }

topsError_t topsCreateExecutable(topsExecutable_t* executable, const void* binary, size_t size) {
  const char* text = static_cast<const char*>(binary);
  const char* end = static_cast<const char*>(std::memchr(text, '\n', size));
  if (end == nullptr) return topsErrorInvalidValue;
  size_t rest = size - static_cast<size_t>(end + 1 - text);
  int handle = python.load(end + 1, rest, false, message, sizeof message);
  if (handle < 0) return topsErrorInvalidValue;
  std::istringstream line(std::string(text, end));
  std::vector<uint64_t> inputs = numbers(line), outputs = numbers(line);
  *executable = new topsExecutableRecord{handle, inputs, outputs};
  return topsSuccess;
}
topsError_t topsDestroyExecutable(topsExecutable_t executable) {
  python.unload(executable->handle);
  delete executable;
  return topsSuccess;
}
topsError_t topsExecutableQueryInfo(topsExecutable_t executable, topsExecutableInfoType_t kind,
                                    uint64_t* value) {
  bool in = kind == topsExecutableInfoInputCount || kind == topsExecutableInfoInputSizeList;
  const std::vector<uint64_t>& sizes = in ? executable->inputs : executable->outputs;
  if (kind == topsExecutableInfoInputCount || kind == topsExecutableInfoOutputCount) {
    *value = sizes.size();
  } else {
    std::copy(sizes.begin(), sizes.end(), value);
  }
  return topsSuccess;
}
topsError_t topsLaunchExecutableV2(topsExecutable_t executable, topsResource_t, void** inputs,
                                   size_t in, int64_t*, size_t*, void** outputs, size_t out,
                                   topsStream_t) {
  if (in != executable->inputs.size() || out != executable->outputs.size()) {
    return topsErrorInvalidValue;
  }
  auto given = arguments(inputs, executable->inputs), made = arguments(outputs, executable->outputs);
  int status = python.run(executable->handle, given.data(), in, made.data(), out, message,
                          sizeof message);
  return status == 0 ? topsSuccess : topsErrorLaunchFailure;
}

}  // extern "C"
