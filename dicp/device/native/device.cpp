#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceCapability.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <deque>
#include <mutex>
#include <sstream>
#include <unordered_map>

#include "visible.h"

namespace dicp {

namespace {

constexpr int kStreamsPerPriority = 16;
constexpr size_t kMostLost = 10000;  // storages remembered to name the block of a use after free

struct Queue {
  dicp_rt_stream handle = nullptr;
  int priority = 0;
};

struct Lost {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // so that its address means no other one
  std::string block;
};

struct State {
  int devices = 0;
  bool addressable = false;
  std::vector<std::unique_ptr<Pool>> pools;
  std::unique_ptr<Pool> host_pool;  // pinned memory
  std::vector<std::vector<Queue>> queues;  // of each device; 0 is the default stream
  std::vector<size_t> next_urgent, next_plain;
  std::vector<at::Generator> generators;
  std::mutex mutex;
  std::deque<std::string> errors;
  std::unordered_map<const void*, size_t> pinned;
  std::unordered_map<const c10::StorageImpl*, Lost> lost;
  std::atomic<bool> running{false};
  std::string stopped;
};

State& state() {
  static State* const one = new State;
  return *one;
}

thread_local int this_device = 0;
thread_local std::vector<int> this_stream;
thread_local int redirected = -1;

int index_of(int device) { return device < 0 ? this_device : device; }

void check_device(int device) {
  TORCH_CHECK(state().stopped.empty(), state().stopped);
  TORCH_CHECK(device >= 0 && device < state().devices, "there is no device ", device,
              "; valid indices are 0 to ", state().devices - 1);
}

Queue& queue_of(int device, int id) {
  check_device(device);
  std::lock_guard<std::mutex> lock(state().mutex);
  auto& queues = state().queues[size_t(device)];
  TORCH_CHECK(id >= 0 && size_t(id) < queues.size(), "there is no stream ", id);
  auto& queue = queues[size_t(id)];
  if (!queue.handle)
    check(runtime().stream_create(device, queue.priority, &queue.handle), "creating a stream");
  return queue;
}

int stream_id(int device) {
  if (this_stream.size() <= size_t(device)) this_stream.resize(size_t(state().devices), 0);
  return this_stream[size_t(device)];
}

void report_to_profiler(void* address, int64_t bytes, int device) {
  if (!c10::memoryProfilingEnabled()) return;
  const auto now = state().pools[size_t(device)]->statistics();
  c10::reportMemoryUsageToProfiler(address, bytes, size_t(now.allocated_bytes.current),
                                   size_t(now.reserved_bytes.current),
                                   c10::Device(kType, c10::DeviceIndex(device)));
}

// What is wrong with freeing device memory at `address`; empty where it is freed.
std::string freed(void* address) {
  int device = -1;
  if (runtime().address_device(address, &device) != 0 || device < 0) {
    std::ostringstream text;
    text << "free of " << address << ", which is not memory of a device";
    return text.str();
  }
  auto& pool = *state().pools[size_t(device)];
  const Block* block = c10::memoryProfilingEnabled() ? pool.block_at(address) : nullptr;
  const auto bytes = block ? int64_t(block->size) : 0;
  const auto fault = pool.free(address);
  if (bytes > 0) report_to_profiler(address, -bytes, device);
  return fault;
}

// The deleter of a block's memory; its address is the context, as PyTorch wants of memory without
// an owner.
void free_block(void* address) {
  if (!state().stopped.empty()) return;
  const auto fault = freed(address);
  if (!fault.empty() && checker().print) checker().print("dipu memory checker: " + fault);
}

c10::DeleterFnPtr free_on_host = nullptr;

// Frees memory of the redirecting allocator, which is the device's or the host's.
void free_anywhere(void* address) {
  int device = -1;
  runtime().address_device(address, &device);
  (device >= 0 ? &free_block : free_on_host)(address);
}

c10::DataPtr allocate_on(size_t bytes, int device) {
  const c10::Device place(kType, c10::DeviceIndex(device));
  if (bytes == 0) return {nullptr, place};
  auto* at = allocate_memory(bytes, device);
  return {at, at, &free_block, place};
}

namespace stats = c10::CachingAllocator;

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override { return allocate_on(bytes, this_device); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    wait_for_queue(this_device);
    check(runtime().copy_on_device(this_device, to, from, bytes, nullptr), "copying");
  }
  bool initialized() override { return state().running; }
  void emptyCache(c10::MempoolId_t) override {
    empty_caches();
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (Block* block = block_of(data)) pool_at(block->device).record(block, handle(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const auto from = pool_at(index_of(device)).statistics();
    c10::CachingDeviceAllocator::DeviceStats to;
    const auto set = [](stats::StatArray& array, const Counter& counter) {
      auto& one = array[size_t(stats::StatType::AGGREGATE)];
      one.current = counter.current;
      one.peak = counter.peak;
      one.allocated = counter.added;
      one.freed = counter.taken;
    };
    set(to.allocation, from.allocation);
    set(to.segment, from.segment);
    set(to.active, from.active);
    set(to.allocated_bytes, from.allocated_bytes);
    set(to.reserved_bytes, from.reserved_bytes);
    set(to.active_bytes, from.active_bytes);
    set(to.requested_bytes, from.requested_bytes);
    to.num_alloc_retries = from.retries;
    to.num_ooms = from.failures;
    return to;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    pool_at(index_of(device)).reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override { pool_at(index_of(device)).reset_peak(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    size_t free = 0, total = 0;
    check(runtime().memory_info(index_of(device), &free, &total), "asking for memory");
    return {free, total};
  }
};

// The host's allocator, that of the device where HostMemoryOnDevice says so.
struct Redirecting final : c10::Allocator {
  explicit Redirecting(c10::Allocator* host) : host(host) { free_on_host = host->raw_deleter(); }
  c10::DataPtr allocate(size_t bytes) override {
    if (redirected < 0 || bytes == 0) return host->allocate(bytes);
    auto data = allocate_on(bytes, redirected);
    data.unsafe_set_device(c10::Device(c10::kCPU));
    return data;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_anywhere; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  c10::Allocator* host;
};

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    void* at = nullptr;
    try {
      at = state().host_pool->allocate(bytes, nullptr)->at;
    } catch (const OutOfMemory& error) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
    }
    std::lock_guard<std::mutex> lock(state().mutex);
    state().pinned[at] = bytes;
    return {at, at, &Pinned::release, c10::Device(c10::kCPU)};
  }
  static void release(void* at) {
    if (!state().stopped.empty()) return;  // no thread of the streams runs in a forked process
    // A copy that still reads or writes the memory has to end first.
    for (int device = 0; device < state().devices; ++device) runtime().device_synchronize(device);
    {
      std::lock_guard<std::mutex> lock(state().mutex);
      state().pinned.erase(at);
    }
    state().host_pool->free(at);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Pinned::release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

std::string description(const Block& block) {
  std::ostringstream text;
  text << "its block of " << block.requested << " bytes at " << static_cast<void*>(block.at);
  if (!block.where.empty())
    text << ", allocated at\n" << block.where;
  else
    text << "; DIPU_MEM_CHECK=1 DIPU_MEM_CHECK_ENABLE_BACKTRACE=1 shows where it was allocated";
  return text.str();
}

void remember_lost(c10::StorageImpl* storage) {
  const Block* block = block_of(storage->data_ptr());
  if (!block) return;
  auto text = description(*block);
  std::lock_guard<std::mutex> lock(state().mutex);
  auto& lost = state().lost;
  if (lost.size() >= kMostLost) lost.clear();
  auto held = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage);
  lost.insert_or_assign(storage, Lost{c10::weak_intrusive_ptr<c10::StorageImpl>(held), text});
}

// The random state of a device: a host generator of its own, since kernels here draw on the host.
struct Generator final : c10::GeneratorImpl {
  Generator(c10::DeviceIndex device, at::Generator host)
      : GeneratorImpl(c10::Device(kType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(std::move(host)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  // The host's generator has no offset; copies and pickled generators carry one for every device.
  void set_offset(uint64_t offset) override {
    TORCH_CHECK(offset == 0, "a generator of the device has no offset; its state is in get_state()");
  }
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return const_cast<at::Generator&>(host).seed(); }
  void set_state(const c10::TensorImpl& given) override {
    host.unsafeGetGeneratorImpl()->set_state(given);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override { return new Generator(device().index(), host.clone()); }
  mutable at::Generator host;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  explicit Guard(c10::DeviceType shown) : shown(shown) {}
  c10::DeviceType type() const override { return shown; }
  c10::Device place(int device) const { return {shown, c10::DeviceIndex(device)}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const int before = this_device;
    if (device.has_index()) set_device(device.index());
    return place(before);
  }
  c10::Device getDevice() const override { return place(this_device); }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) set_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) this_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return current_stream(index_of(device.index()));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    const c10::Device place(kType, c10::DeviceIndex(index_of(device.index())));
    return c10::Stream(c10::Stream::DEFAULT, place);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool urgent) const override {
    return stream_from_pool(index_of(device.index()), urgent ? -1 : 0);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return stream_from_pool(index_of(device.index()), priority);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = current_stream(stream.device_index());
    set_stream(stream);
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return handle(stream); }
  c10::DeviceIndex deviceCount() const noexcept override {
    return c10::DeviceIndex(state().devices);
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event) runtime().event_destroy(static_cast<dicp_rt_event>(event));
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    auto* made = static_cast<dicp_rt_event>(*event);
    if (!made)
      check(runtime().event_create(stream.device_index(), 1, &made), "creating an event");
    *event = made;
    check(runtime().event_record(made, handle(stream)), "recording an event");
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event)
      check(runtime().stream_wait(handle(stream), static_cast<dicp_rt_event>(event)), "waiting");
  }
  bool queryEvent(void* event) const override {
    int done = 1;
    if (event) check(runtime().event_done(static_cast<dicp_rt_event>(event), &done), "asking");
    return done != 0;
  }
  bool queryStream(const c10::Stream& stream) const override {
    int idle = 1;
    check(runtime().stream_idle(handle(stream), &idle), "asking a stream");
    return idle != 0;
  }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize_stream(stream); }
  void synchronizeEvent(void* event) const override {
    if (event)
      check(runtime().event_synchronize(static_cast<dicp_rt_event>(event)), "waiting for an event");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize(index_of(device));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (Block* block = block_of(data)) pool_at(block->device).record(block, handle(stream));
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    double milliseconds = 0;
    check(runtime().event_elapsed(static_cast<dicp_rt_event>(start),
                                  static_cast<dicp_rt_event>(end), &milliseconds),
          "reading the time between two events");
    return milliseconds;
  }
  c10::DeviceType shown;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return state().devices > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return state().running; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(index_of(device));
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(index_of(device));
  }
  at::Device getDeviceFromPtr(void* data) const override {
    int device = -1;
    check(runtime().address_device(data, &device), "asking for an address");
    TORCH_CHECK(device >= 0, data, " is not memory of a device");
    return {kType, c10::DeviceIndex(device)};
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(state().devices); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return c10::DeviceIndex(this_device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const int before = this_device;
    set_device(device);
    return c10::DeviceIndex(before);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? c10::DeviceIndex(this_device) : exchangeDevice(device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    const int device = storage.device().index();
    if (bytes < impl->nbytes()) remember_lost(impl);
    auto fresh = allocate_on(bytes, device);
    const size_t kept = std::min(bytes, impl->nbytes());
    if (kept > 0) {
      wait_for_queue(device);
      check(runtime().copy_on_device(device, fresh.get(), impl->data(), kept, nullptr), "copying");
    }
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(bytes);
  }
};

DeviceMemory memory;
Pinned pinned;

}  // namespace

void check(int status, const char* action) {
  if (status == 0) return;
  std::string text = runtime().error();
  std::lock_guard<std::mutex> lock(state().mutex);
  if (!state().errors.empty()) {
    text = state().errors.front();
    state().errors.clear();
  }
  TORCH_CHECK(false, "the device failed while ", action, ": ", text);
}

void note_error(const std::string& text) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().errors.push_back(text);
}

bool started() { return state().running; }

void stop_using(const std::string& why) { state().stopped = why; }

void start(const std::vector<int64_t>& addresses, const std::optional<std::vector<int>>& visible,
           Options options, Algorithm host) {
  TORCH_CHECK(!started(), "the device is registered already");
  auto& table = runtime();
  size_t next = 0;
#define DICP_SET(name) \
  table.name = reinterpret_cast<decltype(table.name)>(addresses.at(next++));
  DICP_RUNTIME(DICP_SET)
#undef DICP_SET
  if (visible) table = renumbered(table, *visible);
  auto& s = state();
  check(table.device_count(&s.devices), "counting devices");
  s.host_pool = std::make_unique<Pool>(kHostMemory, Options{host});
  for (int device = 0; device < s.devices; ++device) {
    s.pools.push_back(std::make_unique<Pool>(device, options));
    std::vector<Queue> queues(1 + 2 * kStreamsPerPriority);
    for (int k = 0; k < kStreamsPerPriority; ++k) queues[size_t(1 + k)].priority = -1;
    s.queues.push_back(queues);
    s.generators.push_back(new_generator(device));
  }
  s.next_urgent.assign(size_t(s.devices), 0);
  s.next_plain.assign(size_t(s.devices), 0);
  if (s.devices > 0) {
    dicp_rt_properties properties;
    check(table.device_properties(0, &properties), "asking for properties");
    s.addressable = properties.host_addressable != 0;
  }
  c10::SetAllocator(kType, &memory);
  static c10::impl::DeviceGuardImplRegistrar guard(kType, new Guard(kType));
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  if (s.addressable) c10::SetCPUAllocator(new Redirecting(c10::GetCPUAllocator()), 100);
  s.running = true;
}

void register_mock_guard(bool on) {
  static const Guard* const guard = new Guard(c10::kCUDA);
  c10::impl::device_guard_impl_registry[size_t(c10::kCUDA)].store(on ? guard : nullptr);
}

int device_count() { return state().devices; }
int current_device() { return this_device; }

void set_device(int device) {
  check_device(device);
  if (device == this_device) return;
  check(runtime().set_device(device), "setting the device");
  this_device = device;
}

bool host_addressable() { return state().addressable; }

Pool& pool_at(int device) {
  check_device(device);
  return *state().pools[size_t(device)];
}

void* allocate_memory(size_t bytes, int device) {
  check_device(device);
  auto stream = queue_of(device, stream_id(device)).handle;
  try {
    Block* block = state().pools[size_t(device)]->allocate(bytes, stream);
    report_to_profiler(block->at, int64_t(block->size), device);
    return block->at;
  } catch (const OutOfMemory& error) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
  }
}

void empty_caches() {
  for (auto& pool : state().pools) pool->empty_cache();
  state().host_pool->empty_cache();
}

void free_memory(void* address) {
  const auto fault = freed(address);
  TORCH_CHECK(fault.empty(), fault);
}

c10::Allocator* device_allocator() { return &memory; }
c10::Allocator* pinned_allocator() { return &pinned; }

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> lock(state().mutex);
  for (const auto& [start, bytes] : state().pinned) {
    const auto at = static_cast<const char*>(address), from = static_cast<const char*>(start);
    if (at >= from && at < from + bytes) return true;
  }
  return false;
}

Block* block_of(const c10::DataPtr& data) {
  int device = -1;
  if (data.get_deleter() != &free_block) return nullptr;
  runtime().address_device(data.get(), &device);
  return device < 0 ? nullptr : state().pools[size_t(device)]->block_at(data.get_context());
}

std::string lost_block(c10::StorageImpl* storage) {
  std::lock_guard<std::mutex> lock(state().mutex);
  const auto found = state().lost.find(storage);
  return found == state().lost.end() ? "" : "; " + found->second.block;
}

c10::Stream current_stream(int device) {
  const c10::Device place(kType, c10::DeviceIndex(device));
  return c10::Stream(c10::Stream::UNSAFE, place, stream_id(device));
}

c10::Stream stream_from_pool(int device, int priority) {
  check_device(device);
  std::lock_guard<std::mutex> lock(state().mutex);
  auto& next = (priority < 0 ? state().next_urgent : state().next_plain)[size_t(device)];
  const int first = priority < 0 ? 1 : 1 + kStreamsPerPriority;
  const int id = first + int(next++ % kStreamsPerPriority);
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, c10::DeviceIndex(device)), id);
}

void set_stream(c10::Stream stream) {
  const int device = stream.device_index();
  check_device(device);
  stream_id(device);
  this_stream[size_t(device)] = int(stream.id());
}

dicp_rt_stream handle(c10::Stream stream) {
  return queue_of(stream.device_index(), int(stream.id())).handle;
}

void wait_for_queue(int device) {
  auto stream = queue_of(device, stream_id(device)).handle;
  int idle = 0;
  check(runtime().stream_idle(stream, &idle), "asking a stream");
  if (!idle) check(runtime().stream_synchronize(stream), "waiting for a stream");
}

void synchronize(int device) {
  check_device(device);
  check(runtime().device_synchronize(device), "synchronizing");
}

void synchronize_stream(c10::Stream stream) {
  check(runtime().stream_synchronize(handle(stream)), "synchronizing a stream");
}

at::Generator& default_generator(int device) {
  check_device(device);
  return state().generators[size_t(device)];
}

at::Generator new_generator(int device) {
  auto host = at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val);
  return at::make_generator<Generator>(c10::DeviceIndex(device), std::move(host));
}

at::Generator host_generator(const at::Generator& generator) {
  if (generator.device().type() != kType) return generator;
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->host;
}

HostMemoryOnDevice::HostMemoryOnDevice(int device) : before(redirected) {
  if (host_addressable()) redirected = device;
}

HostMemoryOnDevice::~HostMemoryOnDevice() { redirected = before; }

}  // namespace dicp
