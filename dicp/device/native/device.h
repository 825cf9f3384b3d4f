// What PyTorch asks of a device: allocator, guard, streams, random state, hooks.
#pragma once
#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <optional>
#include <string>
#include <vector>

#include "memory.h"

namespace dicp {

constexpr auto kType = c10::DeviceType::PrivateUse1;

// Raises the error of the last failed call of the runtime, if `status` says that it failed.
void check(int status, const char* action);
// `visible`: the runtime's numbers of the devices in use; all are without it.
void start(const std::vector<int64_t>& addresses, const std::optional<std::vector<int>>& visible,
           Options options, Algorithm host);
bool started();
void stop_using(const std::string& why);  // every later use of the device raises `why`
int device_count();
int current_device();
void set_device(int device);
bool host_addressable();
Pool& pool_at(int device);
// Memory without a tensor. Freeing raises for what is no live block: a double free, another pointer.
void* allocate_memory(size_t bytes, int device);
void free_memory(void* address);
void empty_caches();
c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);
Block* block_of(const c10::DataPtr& data);
// Which block a storage lost when it was resized, and where that had been allocated; else empty.
std::string lost_block(c10::StorageImpl* storage);

c10::Stream current_stream(int device);
c10::Stream stream_from_pool(int device, int priority);
void set_stream(c10::Stream stream);
dicp_rt_stream handle(c10::Stream stream);
// Waits for the current stream's queue, so that the host may touch what it works on.
void wait_for_queue(int device);
void synchronize(int device);
void synchronize_stream(c10::Stream stream);
// The message of an error inside a queue: the operator that caused it and how it failed.
void note_error(const std::string& text);

at::Generator& default_generator(int device);
at::Generator new_generator(int device);
at::Generator host_generator(const at::Generator& generator);

// While it lives, the calling thread's host tensors are allocated in the memory of `device`.
struct HostMemoryOnDevice {
  explicit HostMemoryOnDevice(int device);
  ~HostMemoryOnDevice();
  int before;
};

void register_mock_guard(bool on);

}  // namespace dicp
