// Compiles HLIR graphs into executables, loads them and runs them on a device.
//
// Every status is returned to the caller, who asks dicp_call which call it is of.
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "dtu/hlir_builder/hlir_builder.h"
#include "dtu_compiler/tops_graph_compiler.h"
#include "tops/tops_runtime.h"

// Found where the SDK has them; the compiler's own words are not had otherwise.
extern "C" int topsgraphGetProgramLogSize(topsgraphProgram, size_t*) __attribute__((weak));
extern "C" int topsgraphGetProgramLog(topsgraphProgram, char*) __attribute__((weak));

namespace {

struct Argument {  // one tensor of a run, as the caller describes it
  void* data;
  uint64_t size;
  bool on_host;
};

struct Buffer {  // device memory that stands in for a tensor of the host, kept between runs
  void* memory = nullptr;
  uint64_t size = 0;
};

struct Executable {
  topsExecutable_t handle = nullptr;
  int32_t device = 0;
  std::vector<uint64_t> inputs, outputs;  // bytes of each
  std::vector<Buffer> in, out;
  std::mutex running;  // of the buffers: one run at a time
};

std::mutex mutex;  // of the streams
std::map<int32_t, topsStream_t> streams;
thread_local std::string log_text;
thread_local const char* last_call = "";

int check(const char* call, int status) {
  if (status != 0) last_call = call;
  return status;
}

#define TRY(call, ...)                                 \
  do {                                                 \
    if (int status = check(#call, call(__VA_ARGS__))) return status; \
  } while (false)

int stream_of(int32_t device, topsStream_t* stream) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = streams.find(device);
  if (found == streams.end()) {
    TRY(topsStreamCreate, stream);
    streams[device] = *stream;
  } else {
    *stream = found->second;
  }
  return 0;
}

int query(topsExecutable_t handle, topsExecutableInfoType_t count, topsExecutableInfoType_t list,
          std::vector<uint64_t>* sizes) {
  uint64_t number = 0;
  TRY(topsExecutableQueryInfo, handle, count, &number);
  sizes->resize(number);
  if (number > 0) TRY(topsExecutableQueryInfo, handle, list, sizes->data());
  return 0;
}

int load(const void* data, uint64_t size, Executable* made) {
  TRY(topsSetDevice, made->device);
  TRY(topsCreateExecutable, &made->handle, data, size);
  if (int status = query(made->handle, topsExecutableInfoInputCount,
                         topsExecutableInfoInputSizeList, &made->inputs)) {
    return status;
  }
  return query(made->handle, topsExecutableInfoOutputCount, topsExecutableInfoOutputSizeList,
               &made->outputs);
}

int place(const Argument& argument, Buffer* buffer, void** where) {
  *where = argument.data;
  if (!argument.on_host) return 0;
  if (buffer->size < argument.size) {
    if (buffer->memory != nullptr) TRY(topsFree, buffer->memory);
    buffer->memory = nullptr;
    buffer->size = 0;
    TRY(topsMalloc, &buffer->memory, argument.size);
    buffer->size = argument.size;
  }
  *where = buffer->memory;
  return 0;
}

int compile(topsgraphProgram program, int count, const char** options,
            void (*receive)(const void*, uint64_t)) {
  if (int status = check("topsgraphCompileProgram",
                         topsgraphCompileProgram(program, count, options))) {
    size_t size = 0;
    if (topsgraphGetProgramLogSize && topsgraphGetProgramLog &&
        topsgraphGetProgramLogSize(program, &size) == 0 && size > 1) {
      std::vector<char> words(size);
      if (topsgraphGetProgramLog(program, words.data()) == 0) log_text = words.data();
    }
    return status;
  }
  size_t size = 0;
  TRY(topsgraphGetBinSize, program, &size);
  std::vector<char> binary(size);
  TRY(topsgraphGetBin, program, binary.data());
  receive(binary.data(), size);
  return 0;
}

}  // namespace

extern "C" {

const char* dicp_call() { return last_call; }

void dicp_log(char* text, uint64_t room) {
  std::strncpy(text, log_text.c_str(), room - 1);
  log_text.clear();
}

int dicp_devices(int* count) { return check("topsGetDeviceCount", topsGetDeviceCount(count)); }

int dicp_build(void (*define)(std::shared_ptr<builder::Builder>&), int count, const char** options,
               void (*receive)(const void*, uint64_t)) {
  std::shared_ptr<builder::Builder> made;
  define(made);
  auto module = made->GetModule();
  topsgraphProgram program = nullptr;
  TRY(topsgraphCreateProgramFromModule, &program, module.get());
  int status = compile(program, count, options, receive);
  int destroyed = check("topsgraphDestroyProgram", topsgraphDestroyProgram(&program));
  return status != 0 ? status : destroyed;
}

int dicp_load(const void* data, uint64_t size, int32_t device, Executable** loaded) {
  auto made = std::make_unique<Executable>();
  made->device = device;
  int status = load(data, size, made.get());
  if (status == 0) *loaded = made.release();
  return status;
}

// How many inputs and outputs an executable has, then the bytes of each.
void dicp_sizes(const Executable* executable, uint64_t* counts, uint64_t* sizes) {
  counts[0] = executable->inputs.size();
  counts[1] = executable->outputs.size();
  if (sizes == nullptr) return;
  for (uint64_t size : executable->inputs) *sizes++ = size;
  for (uint64_t size : executable->outputs) *sizes++ = size;
}

// Frees all that it can; the first status that is no success.
int dicp_unload(Executable* executable) {
  int first = 0;
  auto note = [&first](const char* call, int status) {
    if (first == 0) first = check(call, status);
  };
  note("topsSetDevice", topsSetDevice(executable->device));
  for (auto* buffers : {&executable->in, &executable->out}) {
    for (Buffer& buffer : *buffers) {
      if (buffer.memory != nullptr) note("topsFree", topsFree(buffer.memory));
    }
  }
  note("topsDestroyExecutable", topsDestroyExecutable(executable->handle));
  delete executable;
  return first;
}

// Runs on the stream `on`, or, to the end, on the driver's own of the device if there is none.
// Tensors of the host are copied there and back.
int dicp_run(Executable* executable, const Argument* inputs, uint64_t in, const Argument* outputs,
             uint64_t out, topsStream_t on) {
  std::lock_guard<std::mutex> lock(executable->running);
  TRY(topsSetDevice, executable->device);
  bool waits = on == nullptr;
  if (waits) {
    if (int status = stream_of(executable->device, &on)) return status;
  }
  executable->in.resize(in);
  executable->out.resize(out);
  std::vector<void*> given(in), made(out);
  for (uint64_t k = 0; k < in; ++k) {
    if (int status = place(inputs[k], &executable->in[k], &given[k])) return status;
    if (!inputs[k].on_host) continue;
    waits = true;
    TRY(topsMemcpyAsync, given[k], inputs[k].data, inputs[k].size, topsMemcpyHostToDevice, on);
  }
  for (uint64_t k = 0; k < out; ++k) {
    if (int status = place(outputs[k], &executable->out[k], &made[k])) return status;
  }
  TRY(topsLaunchExecutableV2, executable->handle, nullptr, given.data(), in, nullptr, nullptr,
      made.data(), out, on);
  for (uint64_t k = 0; k < out; ++k) {
    if (!outputs[k].on_host) continue;
    waits = true;
    TRY(topsMemcpyAsync, outputs[k].data, made[k], outputs[k].size, topsMemcpyDeviceToHost, on);
  }
  if (waits) TRY(topsStreamSynchronize, on);
  return 0;
}

}  // extern "C"
