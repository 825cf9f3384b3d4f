#include "memory.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <sstream>

namespace dicp {

namespace {

constexpr size_t kUnit = 512;
constexpr size_t kSmall = size_t(1) << 20;          // requests up to this share small segments
constexpr size_t kSmallSegment = size_t(2) << 20;
constexpr size_t kLargeSegment = size_t(20) << 20;  // of requests below kOwnSegment
constexpr size_t kOwnSegment = size_t(10) << 20;
constexpr size_t kStep = size_t(2) << 20;
constexpr size_t kShown = 10;
constexpr size_t kMostFreed = 10000;  // addresses remembered to tell a double free

std::atomic<int64_t> block_number{0}, block_bytes{0}, insert_count{0};
std::atomic<bool> above_limit{false};

size_t up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

Runtime& runtime() {
  static Runtime* const one = new Runtime;
  return *one;
}

std::string Runtime::error() const {
  char text[512] = "";
  last_error(text, sizeof text);
  return text;
}

Checker& checker() {
  static Checker* const one = new Checker;
  return *one;
}

std::string size_text(int64_t bytes) {
  char text[32];
  if (bytes >= (int64_t(1) << 20))
    std::snprintf(text, sizeof text, "%lldMB", static_cast<long long>(bytes >> 20));
  else if (bytes >= 1024)
    std::snprintf(text, sizeof text, "%lldKB", static_cast<long long>(bytes >> 10));
  else
    std::snprintf(text, sizeof text, "%lldB", static_cast<long long>(bytes));
  return text;
}

std::string checker_line(const std::string& state) {
  std::ostringstream line;
  line << "dipu memory checker: " << state << "current block num = " << block_number
       << ", total_size = " << size_text(block_bytes) << ", insert count = " << insert_count
       << ", max block num = " << checker().max_blocks
       << ", log interval = " << checker().interval;
  return line.str();
}

void checker_insert(const Block& block) {
  const auto number = ++block_number;
  block_bytes += int64_t(block.size);
  const auto count = ++insert_count;
  const auto& check = checker();
  if (!check.print) return;
  if (check.interval > 0 && count % check.interval == 0) check.print(checker_line(""));
  if (number <= check.max_blocks)
    above_limit = false;
  else if (!above_limit.exchange(true))  // once each time the number rises above the limit
    check.print(checker_line("there may be memory leak. "));
}

void checker_remove(const Block& block) {
  --block_number;
  block_bytes -= int64_t(block.size);
}

Pool::Pool(int device, Options options) : device_(device), options_(options) {}

size_t Pool::rounded(size_t bytes) const {
  const size_t size = std::max(up(bytes, kUnit), kUnit);
  if (options_.algorithm != Algorithm::BS) return size;
  size_t bucket = kUnit;  // buckets: powers of two with three steps between
  while (bucket * 2 <= size) bucket *= 2;
  return up(size, std::max(bucket / 4, kUnit));
}

size_t Pool::segment_size(size_t size) const {
  if (options_.algorithm == Algorithm::RAW || options_.algorithm == Algorithm::BS) return size;
  if (size <= kSmall) return kSmallSegment;
  return size < kOwnSegment ? kLargeSegment : up(size, kStep);
}

bool Pool::splits(const Block& block, size_t size) const {
  const size_t rest = block.size - size;
  switch (options_.algorithm) {
    case Algorithm::BF: return rest >= kUnit;
    case Algorithm::TORCH:
      return block.small ? rest >= kUnit : (size < options_.max_split && rest > kSmall);
    default: return false;
  }
}

Block* Pool::find(size_t size, dicp_rt_stream stream) {
  auto& pool = pool_of(size <= kSmall);
  Block wanted;
  wanted.stream = stream;
  wanted.size = size;
  auto found = pool.lower_bound(&wanted);
  if (found == pool.end() || (*found)->stream != stream) return nullptr;
  Block* block = *found;
  if (options_.algorithm == Algorithm::BS && block->size != size) return nullptr;
  // A block above the split limit serves only requests of about its size.
  if (block->size >= options_.max_split && size < options_.max_split) return nullptr;
  pool.erase(found);
  return block;
}

void* Pool::reserve(size_t bytes) {
  if (size_t(statistics_.reserved_bytes.current) + bytes > limit_) return nullptr;
  void* at = nullptr;
  const int status = device_ == kHostMemory ? runtime().host_malloc(bytes, &at)
                                            : runtime().malloc(device_, bytes, &at);
  return status == 0 ? at : nullptr;
}

void Pool::give_back(const Block& block) {
  if (device_ == kHostMemory) {
    runtime().host_free(block.at);
  } else {
    runtime().stream_synchronize(block.stream);
    runtime().free(device_, block.at);
  }
  statistics_.segment.take(1);
  statistics_.reserved_bytes.take(int64_t(block.size));
}

Block* Pool::grow(size_t size, dicp_rt_stream stream) {
  size_t bytes = segment_size(size);
  if (options_.collect_above > 0 && limit_ != SIZE_MAX &&
      double(statistics_.reserved_bytes.current) > options_.collect_above * double(limit_))
    release_cached();
  void* at = reserve(bytes);
  if (!at && bytes > size) at = reserve(bytes = size);  // without room for others
  if (!at) {
    ++statistics_.retries;
    collect(true);
    if (Block* block = find(size, stream)) return block;
    release_cached();
    at = reserve(bytes);
  }
  if (!at) return nullptr;
  auto* block = new Block;
  block->at = static_cast<char*>(at);
  block->size = bytes;
  block->device = device_;
  block->stream = stream;
  block->small = size <= kSmall;
  statistics_.segment.add(1);
  statistics_.reserved_bytes.add(int64_t(bytes));
  return block;
}

Block* Pool::allocate(size_t bytes, dicp_rt_stream stream) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (bytes > SIZE_MAX / 2) throw OutOfMemory(shortage(bytes));  // rounding would overflow
  const size_t size = rounded(bytes);
  collect(false);
  Block* block = options_.algorithm == Algorithm::RAW ? nullptr : find(size, stream);
  if (!block) block = grow(size, stream);
  if (!block) {
    ++statistics_.failures;
    throw OutOfMemory(shortage(bytes));
  }
  if (splits(*block, size)) {
    auto* rest = new Block(*block);
    rest->at += size;
    rest->size -= size;
    rest->first = false;
    rest->before = block;
    if (rest->after) rest->after->before = rest;
    block->after = rest;
    block->size = size;
    pool_of(rest->small).insert(rest);
  }
  block->free = false;
  block->requested = bytes;
  used_[block->at] = block;
  if (!freed_.empty()) freed_.erase(block->at);
  statistics_.allocation.add(1);
  statistics_.active.add(1);
  statistics_.allocated_bytes.add(int64_t(block->size));
  statistics_.active_bytes.add(int64_t(block->size));
  statistics_.requested_bytes.add(int64_t(bytes));
  lock.unlock();
  if (checker().on && device_ != kHostMemory) {
    if (checker().backtraces && checker().where) block->where = checker().where();
    checker_insert(*block);
  }
  return block;
}

Block* Pool::block_at(void* address) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = used_.find(address);
  return found == used_.end() ? nullptr : found->second;
}

bool Pool::is_cached(const void* address) const {
  const auto holds = [address](const Block* block) {
    return block->at <= address && address < block->at + block->size;
  };
  return std::any_of(small_.begin(), small_.end(), holds) ||
         std::any_of(large_.begin(), large_.end(), holds) ||
         std::any_of(deferred_.begin(), deferred_.end(), holds);
}

std::string Pool::free(void* address) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = used_.find(address);
  if (found == used_.end()) {
    std::ostringstream line;
    line << (is_cached(address) ? "double free of " : "free of an unknown pointer ") << address
         << " on device " << device_;
    auto before = freed_.find(address);
    if (before != freed_.end()) line << ", allocated at\n" << before->second;
    return line.str();
  }
  Block* block = found->second;
  used_.erase(found);
  if (checker().on && device_ != kHostMemory) checker_remove(*block);
  statistics_.allocation.take(1);
  statistics_.allocated_bytes.take(int64_t(block->size));
  statistics_.requested_bytes.take(int64_t(block->requested));
  if (!block->where.empty()) {
    if (freed_.size() >= kMostFreed) freed_.clear();
    freed_[address] = std::move(block->where);
    block->where.clear();
  }
  for (auto stream : block->users) {
    dicp_rt_event event = nullptr;
    if (runtime().event_create(device_, 0, &event) != 0) continue;
    runtime().event_record(event, stream);
    block->waiting.push_back(event);
  }
  block->users.clear();
  if (block->waiting.empty())
    put_back(block);
  else
    deferred_.push_back(block);
  return "";
}

void Pool::record(Block* block, dicp_rt_stream stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& users = block->users;
  if (stream != block->stream && std::find(users.begin(), users.end(), stream) == users.end())
    users.push_back(stream);
}

// Puts back blocks that other streams are done with.
void Pool::collect(bool wait) {
  for (auto block = deferred_.begin(); block != deferred_.end();) {
    auto& events = (*block)->waiting;
    while (!events.empty()) {
      int done = 0;
      if (wait) runtime().event_synchronize(events.back());
      runtime().event_done(events.back(), &done);
      if (!done) break;
      runtime().event_destroy(events.back());
      events.pop_back();
    }
    if (!events.empty()) {
      ++block;
      continue;
    }
    put_back(*block);
    block = deferred_.erase(block);
  }
}

void Pool::swallow(Block* block, Block* neighbour) {
  pool_of(neighbour->small).erase(neighbour);
  if (neighbour == block->before) {
    block->at = neighbour->at;
    block->first = neighbour->first;
    block->before = neighbour->before;
    if (block->before) block->before->after = block;
  } else {
    block->after = neighbour->after;
    if (block->after) block->after->before = block;
  }
  block->size += neighbour->size;
  delete neighbour;
}

void Pool::put_back(Block* block) {
  statistics_.active.take(1);
  statistics_.active_bytes.take(int64_t(block->size));
  block->free = true;
  if (options_.algorithm == Algorithm::RAW) {
    give_back(*block);
    delete block;
    return;
  }
  if (block->before && block->before->free) swallow(block, block->before);
  if (block->after && block->after->free) swallow(block, block->after);
  pool_of(block->small).insert(block);
}

void Pool::release_cached() {
  for (auto* pool : {&small_, &large_}) {
    for (auto one = pool->begin(); one != pool->end();) {
      Block* block = *one;
      if (block->before || block->after) {
        ++one;
        continue;
      }
      give_back(*block);
      one = pool->erase(one);
      delete block;
    }
  }
}

void Pool::empty_cache() {
  std::lock_guard<std::mutex> lock(mutex_);
  collect(true);
  release_cached();
}

Statistics Pool::statistics() {
  std::lock_guard<std::mutex> lock(mutex_);
  return statistics_;
}

void Pool::reset_peak() {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& s = statistics_;
  for (auto* c : {&s.allocation, &s.segment, &s.active, &s.allocated_bytes, &s.reserved_bytes,
                  &s.active_bytes, &s.requested_bytes})
    c->peak = c->current;
}

void Pool::reset_accumulated() {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& s = statistics_;
  for (auto* c : {&s.allocation, &s.segment, &s.active, &s.allocated_bytes, &s.reserved_bytes,
                  &s.active_bytes, &s.requested_bytes})
    c->added = c->taken = 0;
  s.retries = s.failures = 0;
}

std::vector<Block> Pool::live() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Block> found;
  for (auto& [at, block] : used_) found.push_back(*block);
  return found;
}

std::vector<Block> Pool::all() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Block> found;
  for (auto& [at, block] : used_) found.push_back(*block);
  for (auto* block : deferred_) found.push_back(*block);
  for (auto* pool : {&small_, &large_})
    for (auto* block : *pool) found.push_back(*block);
  std::sort(found.begin(), found.end(), [](auto& a, auto& b) { return a.at < b.at; });
  return found;
}

std::string Pool::shortage(size_t bytes) {
  std::vector<Block*> largest;
  for (auto& [at, block] : used_) largest.push_back(block);
  std::sort(largest.begin(), largest.end(), [](auto* a, auto* b) { return a->size > b->size; });
  size_t free_bytes = 0, total = 0;
  std::ostringstream text;
  if (device_ == kHostMemory) {
    text << "the host";
  } else {
    runtime().memory_info(device_, &free_bytes, &total);
    text << "device " << device_;
  }
  text << " is out of memory: requested " << bytes << " bytes; allocated "
       << statistics_.allocated_bytes.current << ", reserved "
       << statistics_.reserved_bytes.current << ", total " << total;
  if (limit_ != SIZE_MAX) text << ", limited to " << limit_;
  text << ". The largest live blocks:";
  for (size_t k = 0; k < std::min(kShown, largest.size()); ++k) {
    text << "\n  " << largest[k]->size << " bytes at " << static_cast<void*>(largest[k]->at);
    if (!largest[k]->where.empty()) text << ", allocated at\n" << largest[k]->where;
  }
  if (!checker().backtraces)
    text << "\nDIPU_MEM_CHECK=1 DIPU_MEM_CHECK_ENABLE_BACKTRACE=1 shows where each was allocated.";
  return text.str();
}

}  // namespace dicp
