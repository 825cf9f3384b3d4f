// Memory that records who accessed it: the threads of a block since the last barrier, and of global
// memory the blocks since the start of the launch. Of two accesses that nothing orders, one of which
// changes the value, the launch reports the second.
#pragma once

extern "C" int dprintf(int, const char*, ...);

template <class T> struct d_plain { typedef T type; };
template <class T> struct d_plain<const T> { typedef T type; };
template <class T> static bool d_same(const T& a, const T& b) {
  return !__builtin_memcmp(&a, &b, sizeof(T));
}

// The accesses of a block's threads to an element; `reads` and `writes` record one, and return whether
// no barrier orders it and another thread's.
struct d_accesses {
  unsigned written, read;  // epochs
  int writer, reader;  // threads; -1: several
  bool other_wrote() const { return written == d_epoch && writer != d_current; }
  bool other_read() const { return read == d_epoch && reader != d_current; }
  bool reads() {
    reader = other_read() ? -1 : d_current;
    read = d_epoch;
    return other_wrote();
  }
  bool writes() {
    const bool races = other_wrote() || other_read();
    written = d_epoch;
    writer = d_current;
    return races;
  }
};

// ---- shared memory -------------------------------------------------------------------------------
template <class T> struct d_shared_element {
  T value;
  d_accesses accesses;
};
template <class T> struct d_shared_place {
  d_shared_element<T>& at;
  long index;
  operator T() const {
    if (at.accesses.reads()) d_wrong(D_SHARED_RACE, d_current, index);
    return at.value;
  }
  void operator=(T value) const {
    if (at.accesses.writes()) d_wrong(D_SHARED_RACE, d_current, index);
    at.value = value;
  }
  void operator=(const d_shared_place& other) const { *this = (T)other; }
};
template <class T, int N> struct d_shared {
  d_shared_element<T> elements[N];
  d_shared_place<T> operator[](long k) {
    const bool inside = k >= 0 && k < N;
    if (!inside) d_wrong(D_SHARED_RANGE, d_current, k, N);
    return {elements[inside ? k : 0], k};
  }
};

// ---- global memory -------------------------------------------------------------------------------
struct d_global_record {
  unsigned long address;
  unsigned launch;
  int writer, reader;  // 1 + the block; -1: several
  bool atomic;
  d_accesses accesses;
};
#define D_RECORDS (1ul << 20)
#define D_MOST_RECORDED (D_RECORDS / 2)
static d_global_record* d_records;
static unsigned d_launch_number;
static unsigned long d_recorded;
static void d_forget_launch() {
  if (!d_records)
    d_records = (d_global_record*)mmap(0, D_RECORDS * sizeof(d_global_record), 3, 0x4022, -1, 0);
  ++d_launch_number;
  d_recorded = 0;
}
__attribute__((destructor)) static void d_free_records() {
  if (d_records) munmap(d_records, D_RECORDS * sizeof(d_global_record));
}
static int d_own_block() {
  return 1 + (int)((blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x);
}
// The record of an address; null, and a message, once a launch has accessed too many.
static d_global_record* d_record(const void* place) {
  const unsigned long address = (unsigned long)place;
  unsigned long k = address * 0x9E3779B97F4A7C15ul >> 44;
  for (;; k = (k + 1) % D_RECORDS) {
    d_global_record& r = d_records[k];
    if (r.launch == d_launch_number && r.address == address) return &r;
    if (r.launch == d_launch_number) continue;
    if (++d_recorded > D_MOST_RECORDED) {
      if (d_recorded == D_MOST_RECORDED + 1)
        dprintf(2, "macagraph, checking mode: a launch accesses more than %lu addresses of global "
                "memory; races at the others are not found\n", D_MOST_RECORDED);
      return nullptr;
    }
    r = {address, d_launch_number};
    return &r;
  }
}
static void d_reads(const void* place) {
  d_global_record* r = d_record(place);
  if (!r) return;
  const int own = d_own_block();
  const bool unordered = r->accesses.reads();
  if (unordered || (r->writer && r->writer != own)) d_wrong(D_GLOBAL_RACE, own - 1, d_current);
  r->reader = r->reader && r->reader != own ? -1 : own;
}
static void d_writes(const void* place, bool atomic) {
  d_global_record* r = d_record(place);
  if (!r) return;
  const int own = d_own_block();
  const bool unordered = r->accesses.writes() || (r->writer && r->writer != own);
  if ((unordered && !(atomic && r->atomic)) || (r->reader && r->reader != own))
    d_wrong(D_GLOBAL_RACE, own - 1, d_current);
  r->writer = own;
  r->atomic = atomic;
}
template <class T> struct d_global_place {
  T* at;
  operator T() const {
    d_reads(at);
    return *at;
  }
  void operator=(T value) const {
    // Equal values may be written by several blocks.
    if (!d_same(*at, value)) d_writes(at, false);
    *at = value;
  }
  void operator=(const d_global_place& other) const { *this = (T)other; }
};
template <class T> struct d_global {
  T* start;
  d_global(T* at) : start(at) {}
  d_global_place<typename d_plain<T>::type> operator[](long k) const {
    return {(typename d_plain<T>::type*)(start + k)};
  }
  d_global operator+(long k) const { return start + k; }
};
template <class T> static T& d_atomic_place(d_global<T> to, long at) {
  d_writes(to.start + at, true);
  return to.start[at];
}
