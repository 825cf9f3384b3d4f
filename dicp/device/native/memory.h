// Device memory: a caching allocator over the runtime interface, with statistics and a checker.
#pragma once
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "runtime.h"

namespace dicp {

// The functions of the interface, in the order in which Python passes their addresses.
#define DICP_RUNTIME(_)                                                                     \
  _(device_count) _(set_device) _(device_properties) _(device_synchronize) _(memory_info)  \
  _(malloc) _(free) _(host_malloc) _(host_free) _(address_device)                           \
  _(copy_to_device) _(copy_to_host) _(copy_on_device) _(copy_between) _(fill)               \
  _(stream_create) _(stream_destroy) _(stream_synchronize) _(stream_idle) _(stream_wait)    \
  _(stream_launch) _(event_create) _(event_destroy) _(event_record) _(event_done)           \
  _(event_synchronize) _(event_elapsed) _(last_error)

struct Runtime {
#define DICP_MEMBER(name) decltype(&dicp_rt_##name) name = nullptr;
  DICP_RUNTIME(DICP_MEMBER)
#undef DICP_MEMBER
  std::string error() const;
};

Runtime& runtime();

struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// current, peak, and what was ever added and taken
struct Counter {
  int64_t current = 0, peak = 0, added = 0, taken = 0;
  void add(int64_t n) {
    current += n;
    added += n;
    if (current > peak) peak = current;
  }
  void take(int64_t n) {
    current -= n;
    taken += n;
  }
};

struct Statistics {
  Counter allocation, segment, active, allocated_bytes, reserved_bytes, active_bytes,
      requested_bytes;
  int64_t retries = 0, failures = 0;
};

enum class Algorithm { RAW, BF, BS, TORCH };

struct Block {
  char* at = nullptr;
  size_t size = 0, requested = 0;
  int device = 0;
  dicp_rt_stream stream = nullptr;
  bool free = true;
  bool first = true;  // of its segment
  bool small = false;
  Block *before = nullptr, *after = nullptr;  // neighbours in the segment
  std::vector<dicp_rt_stream> users;          // streams beside its own that read or write it
  std::vector<dicp_rt_event> waiting;
  std::string where;
};

struct Options {
  Algorithm algorithm = Algorithm::BF;
  size_t max_split = SIZE_MAX;
  double collect_above = 0.0;  // of the limit; 0: never before memory runs out
};

// Checks and records, shared by all devices.
struct Checker {
  bool on = false, backtraces = false;
  int64_t max_blocks = 10000, interval = 1000;
  std::function<std::string()> where;
  std::function<void(const std::string&)> print;
};

Checker& checker();

// The memory of a device, or pinned memory of the host, whose device is kHostMemory.
constexpr int kHostMemory = -1;

class Pool {
 public:
  Pool(int device, Options options);
  Block* allocate(size_t bytes, dicp_rt_stream stream);
  // What is wrong with freeing the address; empty where it is a live block, which is freed.
  std::string free(void* address);
  Block* block_at(void* address);  // null: not a live block
  void record(Block* block, dicp_rt_stream stream);
  void empty_cache();
  void limit(size_t bytes) { limit_ = bytes; }
  Statistics statistics();
  void reset_peak();
  void reset_accumulated();
  std::vector<Block> live();
  std::vector<Block> all();
  const Options& options() const { return options_; }

 private:
  struct Order {
    bool operator()(const Block* a, const Block* b) const {
      if (a->stream != b->stream) return a->stream < b->stream;
      if (a->size != b->size) return a->size < b->size;
      return a->at < b->at;
    }
  };
  using Free = std::set<Block*, Order>;

  size_t rounded(size_t bytes) const;
  size_t segment_size(size_t size) const;
  bool splits(const Block& block, size_t size) const;
  Block* find(size_t size, dicp_rt_stream stream);
  Block* grow(size_t size, dicp_rt_stream stream);
  void* reserve(size_t bytes);
  void give_back(const Block& block);  // to the runtime
  void release_cached();
  bool is_cached(const void* address) const;  // in memory that was given back
  void collect(bool wait);
  void put_back(Block* block);
  void swallow(Block* block, Block* neighbour);
  Free& pool_of(bool small) { return small ? small_ : large_; }
  std::string shortage(size_t bytes);

  int device_;
  Options options_;
  size_t limit_ = SIZE_MAX;
  std::mutex mutex_;
  Free small_, large_;
  std::unordered_map<void*, Block*> used_;
  std::unordered_map<void*, std::string> freed_;  // where they had been allocated, if known
  std::list<Block*> deferred_;
  Statistics statistics_;
};

// The line that the checker prints; `state` follows "dipu memory checker: ".
std::string checker_line(const std::string& state);
std::string size_text(int64_t bytes);
void checker_insert(const Block& block);
void checker_remove(const Block& block);

}  // namespace dicp
