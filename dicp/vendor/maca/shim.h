// The device on the host: a launch runs its blocks one after another. Kernels without barriers run
// thread after thread in a plain loop, which the compiler may vectorize; in others every thread has
// a stack of its own, and gives way to the next at each barrier and each exchange within its wave.
//
// What waits at different barriers, and accesses out of range of shared memory, are errors of the
// launch. With D_CHECKED, shared and global memory record who accessed them: what would be a data race
// on the device is one, too.
#pragma once
#define D_HOST
#define D_EXP2(x) __builtin_exp2f(x)
#define D_INVERSE(y) (1.0f / (y))
#ifndef D_CHECKED
#define D_AT_ONCE  // a wave's reductions and scans take one exchange
#endif
#ifndef D_WAVE
#define D_WAVE 64
#endif
#ifdef D_SHIM_STACK
#define D_STACK D_SHIM_STACK
#else
#define D_STACK (64 << 10)
#endif
#define __global__ static inline
#define __device__
#define __shared__ static
#define __launch_bounds__(n)

typedef unsigned long d_size;
extern "C" void* mmap(void*, d_size, int, int, int, long);
extern "C" int munmap(void*, d_size);
extern "C" void* memset(void*, int, d_size);
extern "C" void* memcpy(void*, const void*, d_size);

struct d_dims { unsigned x = 1, y = 1, z = 1; };
static d_dims threadIdx, blockIdx, blockDim, gridDim;
static long* status;  // of the running launch: its first error
static volatile int d_running;  // launches take turns: a library has one state

#define D_MOST_THREADS 1024
enum d_error { D_DIVERGED = 16, D_EXITED, D_SHARED_RANGE, D_SHARED_RACE, D_GLOBAL_RACE, D_BEYOND_WAVE, D_TOO_LARGE };
enum d_wait { D_NOTHING, D_AT_BARRIER, D_AT_EXCHANGE, D_DONE };
static void d_wrong(d_error error, long where, long index = 0, long size = 0) {
  if (status[0]) return;
  status[0] = error; status[1] = where; status[2] = index; status[3] = size;
}

// ---- threads -------------------------------------------------------------------------------------
struct d_fiber {
  void* stack;
  d_wait wait;
  int line;  // where it waits
  int parity;  // of its next exchange
};
static d_fiber d_fibers[D_MOST_THREADS];
static void* d_scheduler;
static unsigned long d_exchanged[2][D_MOST_THREADS];
static unsigned long d_groups[2][D_MOST_THREADS];
static int d_current;
static unsigned d_epoch;  // counts barriers and blocks
static void (*d_body)(void*);
static void* d_closure;
static char* d_stacks;

#if defined(__x86_64__)
// Saves what a call preserves on the old stack, and takes it from the new one.
__attribute__((naked, noinline)) static void d_switch(void** from, void* to) {
  asm volatile(
      "push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
      "mov %rsp, (%rdi)\n mov %rsi, %rsp\n"
      "pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n");
}
#define D_SAVED_WORDS 6
#elif defined(__aarch64__)
asm(".text\n.type d_switch_stack, %function\nd_switch_stack:\n"
    "sub sp, sp, #176\n stp x19, x20, [sp]\n stp x21, x22, [sp, #16]\n stp x23, x24, [sp, #32]\n"
    "stp x25, x26, [sp, #48]\n stp x27, x28, [sp, #64]\n stp x29, x30, [sp, #80]\n"
    "stp d8, d9, [sp, #96]\n stp d10, d11, [sp, #112]\n stp d12, d13, [sp, #128]\n"
    "stp d14, d15, [sp, #144]\n mov x9, sp\n str x9, [x0]\n mov sp, x1\n"
    "ldp x19, x20, [sp]\n ldp x21, x22, [sp, #16]\n ldp x23, x24, [sp, #32]\n"
    "ldp x25, x26, [sp, #48]\n ldp x27, x28, [sp, #64]\n ldp x29, x30, [sp, #80]\n"
    "ldp d8, d9, [sp, #96]\n ldp d10, d11, [sp, #112]\n ldp d12, d13, [sp, #128]\n"
    "ldp d14, d15, [sp, #144]\n add sp, sp, #176\n ret\n");
extern "C" void d_switch_stack(void** from, void* to);
#define d_switch d_switch_stack
#define D_SAVED_WORDS 22
#else
#error "the emulation needs x86-64 or AArch64"
#endif

static void d_yield(d_wait wait, int line) {
  d_fiber& own = d_fibers[d_current];
  own.wait = wait;
  own.line = line;
  d_switch(&own.stack, d_scheduler);
}
static void d_enter() {
  d_body(d_closure);
  d_yield(D_DONE, 0);
}
static void d_prepare(int thread) {
  // Stacks begin at different cache sets.
  char* top = d_stacks + (d_size)(thread + 1) * D_STACK - 64 * (thread % 61) - 64;
  void** at = (void**)((d_size)top & ~(d_size)15);
#if defined(__x86_64__)
  *--at = 0;
  *--at = (void*)d_enter;
  at -= D_SAVED_WORDS;
#else
  at -= D_SAVED_WORDS;
  at[11] = (void*)d_enter;  // the link register
#endif
  d_fibers[thread] = {at, D_NOTHING, 0, 0};
}
static void d_resume(int thread) {
  d_current = thread;
  threadIdx.x = thread % blockDim.x;
  threadIdx.y = thread / blockDim.x % blockDim.y;
  threadIdx.z = thread / blockDim.x / blockDim.y;
  d_switch(&d_scheduler, d_fibers[thread].stack);
}
// Runs one wave until all of its threads wait at a barrier or are done; false where it is stuck.
static bool d_run_wave(int first, int end) {
  for (;;) {
    int exchanging = 0, done = 0, line = 0;
    bool same = true;
    for (int t = first; t < end; ++t) {
      if (d_fibers[t].wait != D_DONE) d_resume(t);
      if (status[0]) return false;
      const d_fiber& f = d_fibers[t];
      exchanging += f.wait == D_AT_EXCHANGE;
      done += f.wait == D_DONE;
      same &= t == first || f.line == line;
      line = f.line;
    }
    if (exchanging == 0) {
      if ((done != 0 && done != end - first) || !same) {
        d_wrong(done ? D_EXITED : D_DIVERGED, d_fibers[first].line, done, end - first);
        return false;
      }
      return true;
    }
    if (exchanging != end - first || !same) {
      d_wrong(done ? D_EXITED : D_DIVERGED, d_fibers[first].line, exchanging, end - first);
      return false;
    }
  }
}
static void d_run_block(int threads) {
  for (int t = 0; t < threads; ++t) d_prepare(t);
  for (;;) {
    ++d_epoch;
    int done = 0, line = 0;
    for (int first = 0; first < threads; first += D_WAVE) {
      const int end = first + D_WAVE < threads ? first + D_WAVE : threads;
      if (!d_run_wave(first, end)) return;
      done += d_fibers[first].wait == D_DONE ? end - first : 0;
      if (first && line != d_fibers[first].line) {
        d_wrong(done ? D_EXITED : D_DIVERGED, line, done, threads);
        return;
      }
      line = d_fibers[first].line;
    }
    if (done == threads) return;
  }
}
#define __syncthreads() d_yield(D_AT_BARRIER, __LINE__)
#define d_barrier() d_yield(D_AT_BARRIER, __LINE__)

// ---- exchanges within a wave ---------------------------------------------------------------------
static inline int d_thread() { return (int)threadIdx.x; }
static inline int d_lane() { return d_current % D_WAVE; }
// `x` of lane `from`. A thread is at most one exchange ahead of another: two rows of values do.
template <class T> static T d_exchange(T x, int from, int line) {
  static_assert(sizeof(T) <= 8, "an exchange of more than 8 bytes");
  d_fiber& own = d_fibers[d_current];
  unsigned long* row = d_exchanged[own.parity];
  own.parity ^= 1;
  const int base = d_current - d_lane();
  __builtin_memcpy(&row[d_current], &x, sizeof(T));
  d_yield(D_AT_EXCHANGE, line);
  __builtin_memcpy(&x, &row[base + from], sizeof(T));
  return x;
}
template <class T> static T d_shuffled(T x, int from, int own, int line) {
#ifdef D_CHECKED
  if (own < 0 && (from < 0 || from >= D_WAVE)) d_wrong(D_BEYOND_WAVE, line, from, D_WAVE);
#endif
  return d_exchange(x, from >= 0 && from < D_WAVE ? from : own < 0 ? d_lane() : own, line);
}
// Lanes past the wave's end keep their own value.
#define __shfl_down(x, n) d_shuffled(x, d_lane() + (n), d_lane(), __LINE__)
#define __shfl_up(x, n) d_shuffled(x, d_lane() - (n), d_lane(), __LINE__)
#define __shfl(x, lane) d_shuffled(x, lane, -1, __LINE__)
#define d_lane_above __shfl_down
#define d_lane_below __shfl_up
#define d_lane_at __shfl

// The first lane of each group of N computes for all of it: one exchange in the place of log2(N).
// Lanes are resumed in order.
template <int N, class T, class F> static T d_in_group(T x, F all, int line) {
  d_fiber& own = d_fibers[d_current];
  T* row = (T*)d_groups[own.parity];
  own.parity ^= 1;
  row[d_current] = x;
  d_yield(D_AT_EXCHANGE, line);
  if (d_lane() % N == 0) all(row + d_current);
  return row[d_current];
}

#ifdef D_CHECKED
#include "checked.h"
#else
template <class T, int N> struct d_shared {
  T elements[N];
  T& operator[](long k) {
    const bool inside = k >= 0 && k < N;
    if (!inside) d_wrong(D_SHARED_RANGE, d_current, k, N);
    return elements[inside ? k : 0];
  }
};
#endif
template <class T> static T& d_atomic_place(T* to, long at) { return to[at]; }

// ---- launches ------------------------------------------------------------------------------------
template <class F> static void d_each_block(d_dims grid, d_dims block, F run) {
  gridDim = grid;
  blockDim = block;
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x && !status[0]; ++x) {
        blockIdx = {x, y, z};
        run();
      }
}
// A kernel without barriers and exchanges.
template <class F> static void d_run_independent(d_dims grid, d_dims block, F kernel) {
  d_each_block(grid, block, [&] {
    ++d_epoch;
    for (unsigned z = 0; z < block.z; ++z)
      for (unsigned y = 0; y < block.y; ++y)
        for (unsigned x = 0; x < block.x; ++x) {
          threadIdx = {x, y, z};
#ifdef D_CHECKED
          d_current = (z * block.y + y) * block.x + x;
#endif
          kernel();
        }
  });
}
template <class F> static void d_run_together(d_dims grid, d_dims block, F kernel) {
  const int threads = block.x * block.y * block.z;
  if (threads > D_MOST_THREADS) return d_wrong(D_TOO_LARGE, 0, threads, D_MOST_THREADS);
  if (!d_stacks)
    d_stacks = (char*)mmap(0, (d_size)D_STACK * D_MOST_THREADS, 3, 0x4022, -1, 0);
  d_body = [](void* closure) { (*(F*)closure)(); };
  d_closure = &kernel;
  d_each_block(grid, block, [&] { d_run_block(threads); });
}
struct d_turn {
  d_turn(long* own) {
    while (__sync_lock_test_and_set(&d_running, 1)) {}
    status = own;
#ifdef D_CHECKED
    d_forget_launch();
#endif
  }
  ~d_turn() { __sync_lock_release(&d_running); }
};

#define D_KERNEL static inline
#define D_LAUNCHER(kernel) D_LAUNCHER_OF(kernel)
#define D_LAUNCHER_OF(kernel) \
  static void kernel##_launch(void** args, const long* sizes); \
  extern "C" void kernel##_run(void** args, const long* sizes, long* own) { \
    const d_turn turn(own); \
    kernel##_launch(args, sizes); \
  } \
  static void kernel##_launch(void** args, const long* sizes)
__attribute__((destructor)) static void d_free_stacks() {
  if (d_stacks) munmap(d_stacks, (d_size)D_STACK * D_MOST_THREADS);
}

// Runs consecutive kernels of a graph: one call from Python for all of them.
struct d_launch {
  void (*kernel)(void** args, const long* sizes, long* status);
  const int* slots;
  long count;
  const long* sizes;
};
#define D_MOST_ARGS 1024
// Returns 0, or one more than the position of the launch that reported an error in `status`.
extern "C" long dicp_run(const d_launch* launches, long count, void** table, long* own) {
  void* args[D_MOST_ARGS];
  for (long k = 0; k < count; ++k) {
    for (long i = 0; i < launches[k].count; ++i) args[i] = table[launches[k].slots[i]];
    launches[k].kernel(args, launches[k].sizes, own);
    if (own[0] != 0) return k + 1;
  }
  return 0;
}
