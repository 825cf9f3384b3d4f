// The simulated chip: devices whose memory is a range of host addresses of their own, and streams
// that are ordered queues, each run by a thread of its own.
#include "runtime.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kPage = 4096;
constexpr size_t kRange = size_t(64) << 30;  // addresses reserved for each device
constexpr size_t kInline = size_t(1) << 20;  // work up to this size runs at once on an idle stream

thread_local std::string last_error;
int wanted_devices = 1;

int fail(const std::string& text) {
  last_error = text;
  return 1;
}

struct Device {
  char* start = nullptr;
  size_t total = 0, used = 0;
  std::map<size_t, size_t> holes;   // offset -> bytes
  std::map<size_t, size_t> blocks;  // offset -> bytes
  std::mutex mutex;
};

// A point in a stream's queue.
struct Record {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  Clock::time_point when;

  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return done; });
  }
};

}  // namespace

// Streams that wait for an event wait for its last record, whatever is recorded afterwards.
struct dicp_rt_event_s {
  std::mutex mutex;
  std::shared_ptr<Record> record;  // the last one; null: it was never recorded

  std::shared_ptr<Record> last() {
    std::lock_guard<std::mutex> lock(mutex);
    return record;
  }
};

struct Task {
  std::function<int()> run;
  std::function<void()> finished;  // called once the stream no longer counts the task
};

struct dicp_rt_stream_s {
  int device = 0;
  std::mutex mutex;      // of the queue and its state
  std::mutex executing;  // held by whoever runs a task
  std::condition_variable changed;
  std::deque<Task> tasks;
  size_t pending = 0;
  bool stopping = false;
  int error = 0;
  std::string error_text;
  std::thread worker;

  // A small task of an idle stream runs at once: waking a thread costs more than the task.
  int submit(Task task, size_t bytes) {
    std::unique_lock<std::mutex> lock(mutex);
    if (pending == 0 && bytes <= kInline && executing.try_lock()) {
      ++pending;
      lock.unlock();
      const int result = task.run();
      lock.lock();
      finish(result);
      executing.unlock();
      lock.unlock();
      if (task.finished) task.finished();
      return 0;
    }
    ++pending;
    tasks.push_back(std::move(task));
    if (!worker.joinable()) worker = std::thread([this] { work(); });
    changed.notify_all();
    return 0;
  }

  void finish(int result) {
    --pending;
    if (result != 0 && error == 0) {
      error = result;
      error_text = last_error;
    }
    changed.notify_all();
  }

  void work() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return stopping || !tasks.empty(); });
      if (tasks.empty()) return;
      auto task = std::move(tasks.front());
      tasks.pop_front();
      lock.unlock();
      int result;
      {
        std::lock_guard<std::mutex> alone(executing);
        result = task.run();
      }
      const auto finished = std::move(task.finished);
      task = {};
      lock.lock();
      finish(result);
      if (!finished) continue;
      lock.unlock();
      finished();
      lock.lock();
    }
  }

  int synchronize() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return pending == 0; });
    if (error == 0) return 0;
    const int result = error;
    error = 0;
    last_error = error_text;
    return result;
  }
};

namespace {

struct Chip {
  std::vector<std::unique_ptr<Device>> devices;
  std::mutex mutex;
  std::vector<dicp_rt_stream> streams;

  Chip() {
    const size_t physical = size_t(sysconf(_SC_PHYS_PAGES)) * size_t(sysconf(_SC_PAGESIZE));
    const size_t total = std::min(physical, kRange) / kPage * kPage;
    for (int k = 0; k < wanted_devices; ++k) {
      auto device = std::make_unique<Device>();
      void* at = mmap(nullptr, kRange, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                      -1, 0);
      if (at == MAP_FAILED) break;
      device->start = static_cast<char*>(at);
      device->total = total;
      device->holes[0] = kRange;
      devices.push_back(std::move(device));
    }
  }
};

Chip& chip() {
  static Chip* const one = new Chip;  // never destroyed: threads may use it until the process ends
  return *one;
}

Device* device_at(int device) {
  auto& devices = chip().devices;
  if (device < 0 || size_t(device) >= devices.size()) {
    fail("there is no device " + std::to_string(device));
    return nullptr;
  }
  return devices[size_t(device)].get();
}

bool inside(const Device& device, const void* address, size_t bytes) {
  const char* at = static_cast<const char*>(address);
  return at >= device.start && at + bytes <= device.start + kRange;
}

int misplaced(const char* what, const void* address, int device) {
  char text[160];
  std::snprintf(text, sizeof text, "%s %p is not memory of device %d", what, address, device);
  return fail(text);
}

int copy(void* to, const void* from, size_t bytes, dicp_rt_stream stream) {
  auto task = [=] {
    std::memmove(to, from, bytes);
    return 0;
  };
  return stream ? stream->submit({task, {}}, bytes) : task();
}

}  // namespace

extern "C" {

// The simulated chip's own: how many devices there are, before anything else is called.
void dicp_simulator_devices(int count) { wanted_devices = count; }

int dicp_rt_device_count(int* count) {
  *count = int(chip().devices.size());
  return 0;
}

int dicp_rt_set_device(int device) { return device_at(device) ? 0 : 1; }

int dicp_rt_device_properties(int device, dicp_rt_properties* properties) {
  Device* found = device_at(device);
  if (!found) return 1;
  std::memset(properties, 0, sizeof *properties);
  std::snprintf(properties->name, sizeof properties->name, "simulated chip");
  properties->total_memory = found->total;
  properties->major = 1;
  properties->multi_processor_count = int(std::thread::hardware_concurrency());
  properties->host_addressable = 1;
  return 0;
}

int dicp_rt_device_synchronize(int device) {
  if (!device_at(device)) return 1;
  std::vector<dicp_rt_stream> streams;
  {
    std::lock_guard<std::mutex> lock(chip().mutex);
    streams = chip().streams;
  }
  int result = 0;
  std::string text;
  for (auto* stream : streams) {
    if (stream->device != device) continue;
    const int one = stream->synchronize();
    if (one != 0 && result == 0) {
      result = one;
      text = last_error;
    }
  }
  if (result != 0) last_error = text;
  return result;
}

int dicp_rt_memory_info(int device, size_t* free_bytes, size_t* total_bytes) {
  Device* found = device_at(device);
  if (!found) return 1;
  std::lock_guard<std::mutex> lock(found->mutex);
  *total_bytes = found->total;
  *free_bytes = found->total - found->used;
  return 0;
}

int dicp_rt_malloc(int device, size_t bytes, void** address) {
  Device* found = device_at(device);
  if (!found) return 1;
  bytes = (bytes + kPage - 1) / kPage * kPage;
  std::lock_guard<std::mutex> lock(found->mutex);
  if (found->used + bytes > found->total) return fail("out of memory");
  for (auto hole = found->holes.begin(); hole != found->holes.end(); ++hole) {
    const auto [offset, size] = *hole;
    if (size < bytes) continue;
    char* at = found->start + offset;
    if (mprotect(at, bytes, PROT_READ | PROT_WRITE) != 0) return fail("the host has no memory");
    found->holes.erase(hole);
    if (size > bytes) found->holes[offset + bytes] = size - bytes;
    found->blocks[offset] = bytes;
    found->used += bytes;
    *address = at;
    return 0;
  }
  return fail("no addresses are left");
}

int dicp_rt_free(int device, void* address) {
  Device* found = device_at(device);
  if (!found) return 1;
  std::lock_guard<std::mutex> lock(found->mutex);
  if (!inside(*found, address, 0)) return misplaced("freed address", address, device);
  const size_t offset = size_t(static_cast<char*>(address) - found->start);
  auto block = found->blocks.find(offset);
  if (block == found->blocks.end()) return misplaced("freed address", address, device);
  size_t start = offset, size = block->second;
  found->used -= size;
  found->blocks.erase(block);
  madvise(address, size, MADV_DONTNEED);
  mprotect(address, size, PROT_NONE);  // a use after the free faults
  auto next = found->holes.find(start + size);
  if (next != found->holes.end()) {
    size += next->second;
    found->holes.erase(next);
  }
  auto after = found->holes.lower_bound(start);
  if (after != found->holes.begin()) {
    auto before = std::prev(after);
    if (before->first + before->second == start) {
      before->second += size;
      return 0;
    }
  }
  found->holes[start] = size;
  return 0;
}

int dicp_rt_host_malloc(size_t bytes, void** address) {
  *address = std::aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage);
  return *address ? 0 : fail("the host has no memory");
}

int dicp_rt_host_free(void* address) {
  std::free(address);
  return 0;
}

int dicp_rt_address_device(const void* address, int* device) {
  auto& devices = chip().devices;
  *device = -1;
  for (size_t k = 0; k < devices.size(); ++k)
    if (inside(*devices[k], address, 1)) *device = int(k);
  return 0;
}

int dicp_rt_copy_to_device(int device, void* to, const void* from, size_t bytes,
                           dicp_rt_stream stream) {
  Device* found = device_at(device);
  if (!found) return 1;
  if (!inside(*found, to, bytes)) return misplaced("destination", to, device);
  return copy(to, from, bytes, stream);
}

int dicp_rt_copy_to_host(int device, void* to, const void* from, size_t bytes,
                         dicp_rt_stream stream) {
  Device* found = device_at(device);
  if (!found) return 1;
  if (!inside(*found, from, bytes)) return misplaced("source", from, device);
  return copy(to, from, bytes, stream);
}

int dicp_rt_copy_on_device(int device, void* to, const void* from, size_t bytes,
                           dicp_rt_stream stream) {
  Device* found = device_at(device);
  if (!found) return 1;
  if (!inside(*found, to, bytes)) return misplaced("destination", to, device);
  if (!inside(*found, from, bytes)) return misplaced("source", from, device);
  return copy(to, from, bytes, stream);
}

int dicp_rt_copy_between(int to_device, void* to, int from_device, const void* from, size_t bytes,
                         dicp_rt_stream stream) {
  Device *target = device_at(to_device), *source = device_at(from_device);
  if (!target || !source) return 1;
  if (!inside(*target, to, bytes)) return misplaced("destination", to, to_device);
  if (!inside(*source, from, bytes)) return misplaced("source", from, from_device);
  return copy(to, from, bytes, stream);
}

int dicp_rt_fill(int device, void* to, int value, size_t bytes, dicp_rt_stream stream) {
  Device* found = device_at(device);
  if (!found) return 1;
  if (!inside(*found, to, bytes)) return misplaced("destination", to, device);
  auto task = [=] {
    std::memset(to, value, bytes);
    return 0;
  };
  return stream ? stream->submit({task, {}}, bytes) : task();
}

int dicp_rt_stream_create(int device, int priority, dicp_rt_stream* stream) {
  (void)priority;  // the host's scheduler decides between threads
  if (!device_at(device)) return 1;
  *stream = new dicp_rt_stream_s;
  (*stream)->device = device;
  std::lock_guard<std::mutex> lock(chip().mutex);
  chip().streams.push_back(*stream);
  return 0;
}

int dicp_rt_stream_destroy(dicp_rt_stream stream) {
  {
    std::lock_guard<std::mutex> lock(chip().mutex);
    auto& all = chip().streams;
    for (auto one = all.begin(); one != all.end(); ++one)
      if (*one == stream) {
        all.erase(one);
        break;
      }
  }
  {
    std::lock_guard<std::mutex> lock(stream->mutex);
    stream->stopping = true;
    stream->changed.notify_all();
  }
  if (stream->worker.joinable()) stream->worker.join();
  delete stream;
  return 0;
}

int dicp_rt_stream_synchronize(dicp_rt_stream stream) { return stream->synchronize(); }

int dicp_rt_stream_idle(dicp_rt_stream stream, int* idle) {
  std::lock_guard<std::mutex> lock(stream->mutex);
  *idle = stream->pending == 0;
  return 0;
}

int dicp_rt_stream_wait(dicp_rt_stream stream, dicp_rt_event event) {
  int done = 0;
  dicp_rt_event_done(event, &done);
  if (done) return 0;
  auto task = [record = event->last()] {
    record->wait();
    return 0;
  };
  return stream->submit({task, {}}, kInline + 1);  // never at once: it would block the caller
}

int dicp_rt_stream_launch(dicp_rt_stream stream, dicp_rt_task task, void* argument, size_t bytes) {
  return stream->submit({[=] { return task(argument); }, {}}, bytes);
}

int dicp_rt_event_create(int device, int timing, dicp_rt_event* event) {
  (void)timing;
  if (!device_at(device)) return 1;
  *event = new dicp_rt_event_s;
  return 0;
}

int dicp_rt_event_destroy(dicp_rt_event event) {
  delete event;
  return 0;
}

int dicp_rt_event_record(dicp_rt_event event, dicp_rt_stream stream) {
  auto record = std::make_shared<Record>();
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    event->record = record;
  }
  auto reached = [record] {
    record->when = Clock::now();
    return 0;
  };
  auto finished = [record] {  // whoever waited for it finds the stream idle
    std::lock_guard<std::mutex> lock(record->mutex);
    record->done = true;
    record->changed.notify_all();
  };
  return stream->submit({reached, finished}, 0);
}

int dicp_rt_event_done(dicp_rt_event event, int* done) {
  const auto record = event->last();
  *done = 1;
  if (!record) return 0;
  std::lock_guard<std::mutex> lock(record->mutex);
  *done = record->done;
  return 0;
}

int dicp_rt_event_synchronize(dicp_rt_event event) {
  if (const auto record = event->last()) record->wait();
  return 0;
}

int dicp_rt_event_elapsed(dicp_rt_event start, dicp_rt_event end, double* milliseconds) {
  const auto from = start->last(), to = end->last();
  if (!from || !to) return fail("an event was never recorded");
  from->wait();
  to->wait();
  const auto passed = to->when - from->when;
  *milliseconds = std::chrono::duration<double, std::milli>(passed).count();
  return 0;
}

int dicp_rt_last_error(char* text, size_t bytes) {
  std::snprintf(text, bytes, "%s", last_error.c_str());
  return 0;
}

}  // extern "C"
