// Device functions of generated kernels: what a thread, a wave and a block share. The same text
// compiles with mxcc (waves of 64), through the CUDA compatibility header (32), and on the host,
// where shim.h emulates the device.
#pragma once
#if defined(__MACACC__) || defined(__MACA__)
#include "native.h"
#elif defined(__CUDACC__)
#include "compat.h"
#else
#include "shim.h"
#endif
#ifdef D_HALVES
typedef __half d_f16;
typedef __maca_bfloat16 d_bf16;
d_inline float d_from_f16(d_f16 x) { return __half2float(x); }
d_inline d_f16 d_to_f16(float x) { return __float2half_rn(x); }
d_inline float d_from_bf16(d_bf16 x) { return __bfloat162float(x); }
d_inline d_bf16 d_to_bf16(float x) { return __float2bfloat16_rn(x); }
#endif
#include "scalar.h"
#ifndef D_HOST
#define status nullptr
#endif

#ifdef D_NARROW
typedef int32_t d_index;  // every index of the launch fits
#else
typedef int64_t d_index;
#endif
#ifndef D_CHECKED
template <class T> using d_global = T*;
#ifndef D_HOST
template <class T, int N> using d_shared = T[N];
#endif
#endif

// ---- cheaper forms of operators (dicp/gpu/precision.py) ------------------------------------------
// exp(x), the relative error of which grows with |x|: 2^-22 and 2^-24 |x|.
d_inline float d_exp_short(float x) { return D_EXP2(x * 1.4426950408889634f); }
// The error is at most 2^-22, the relative one 2^-16 above -5.5 and less than 1 everywhere. The
// logarithm of the tail is fitted by a polynomial on [0, 5.6]; beyond, that falls faster.
d_inline float d_normal_cdf_short(float x) {
  const float a = d_abs(x);
  float p = d_madd(a, -3.8490651e-07f, 6.3467314e-06f);
  p = d_madd(p, a, -8.2310207e-06f);
  p = d_madd(p, a, -6.2489312e-04f);
  p = d_madd(p, a, 7.7815601e-03f);
  p = d_madd(p, a, -5.3046655e-02f);
  p = d_madd(p, a, -4.5901126e-01f);
  p = d_madd(p, a, -1.1511306e+00f);
  const float tail = D_EXP2(d_madd(p, a, -9.9999946e-01f));
  return x < 0 ? tail : 1.0f - tail;
}
// a / b for many a: what rounding lost of a * (1 / b) is put in again (Markstein, 1990).
d_inline float d_divided(float a, float b, float inverse) {
  const float q = a * inverse;
  return d_fma(d_fma(-q, b, a), inverse, q);
}
// The same for any a; the negative of what is lost keeps the sign of zero. q where it is inf or NaN.
d_inline float d_over(float a, float b, float inverse) {
  const float q = a * inverse, r = d_fma(-d_fma(q, b, -a), inverse, q);
  return r == r ? r : q;
}
// a / y where y is at least 1: a guess of 1 / y and one step of Newton's.
d_inline float d_over_above_one(float a, float y) {
  const float guess = D_INVERSE(y);
  const float inverse = y == d_inff ? 0.0f : d_fma(d_fma(-y, guess, 1.0f), guess, guess);
  const float q = a * inverse, lost = d_fma(-q, y, a);
  return d_abs(lost) > 0 ? d_fma(lost, inverse, q) : q;  // q where it is -0, inf or NaN
}

// ---- random numbers of adjacent elements ---------------------------------------------------------
template <int N> struct d_calls { d_draws at[N]; };
// The calls `counter`, `counter` + 1 and so on, round by round: they share the keys of a round.
template <int N> d_inline d_calls<N> d_philox_calls(int64_t seed, int64_t site, int64_t counter) {
  d_calls<N> calls;
  D_UNROLL(8)
  for (int k = 0; k < N; ++k) {
    const uint64_t own = (uint64_t)counter + k;
    calls.at[k] = {{(uint32_t)own, (uint32_t)(own >> 32), (uint32_t)site, 0}};
  }
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)((uint64_t)seed >> 32);
  D_UNROLL(7)
  for (int round = 0; round < 7; ++round) {
    D_UNROLL(8)
    for (int k = 0; k < N; ++k) {
      uint32_t* const c = calls.at[k].w;
      d_philox_round(c[0], c[1], c[2], c[3], k0, k1);
    }
    d_philox_keys(k0, k1);
  }
  return calls;
}

// ---- adjacent elements in one access -------------------------------------------------------------
template <int bytes> struct d_bytes;
template <> struct d_bytes<1> { typedef uint8_t type; };
template <> struct d_bytes<2> { typedef uint16_t type; };
template <> struct d_bytes<4> { typedef uint32_t type; };
template <> struct d_bytes<8> { typedef uint64_t type; };
template <int bytes> struct d_word;  // as atomics take it
template <> struct d_word<4> { typedef unsigned type; };
template <> struct d_word<8> { typedef unsigned long long type; };
struct alignas(16) d_words { uint32_t w[4]; };
template <> struct d_bytes<16> { typedef d_words type; };

#ifdef D_ALIGNED  // the launch has checked all tensors' addresses
#define D_IS_ALIGNED(place, V) true
#else
#define D_IS_ALIGNED(place, V) ((uint64_t)(place) % sizeof(V) == 0)
#endif
template <int N, class T, class P> d_inline void d_load(T* to, P from) {
#ifndef D_HOST
  typedef typename d_bytes<N * sizeof(T)>::type V;
  if (D_IS_ALIGNED(from, V)) {
    *(V*)to = *(const V*)from;
    return;
  }
#endif
  D_UNROLL(16)
  for (int k = 0; k < N; ++k) to[k] = from[k];
}
template <int N, class T, class P> d_inline void d_store(P to, const T* from) {
#ifndef D_HOST
  typedef typename d_bytes<N * sizeof(T)>::type V;
  if (D_IS_ALIGNED(to, V)) {
    *(V*)to = *(const V*)from;
    return;
  }
#endif
  D_UNROLL(16)
  for (int k = 0; k < N; ++k) to[k] = from[k];
}

// ---- reductions ----------------------------------------------------------------------------------
// Lanes read from lanes above them. What a lane near the end of its group reads comes from another
// group and is not used: a group's first lane has the group's result.
struct d_op_sum { template <class T> d_inline T of(T a, T b) { return (T)(a + b); } };
struct d_op_prod { template <class T> d_inline T of(T a, T b) { return (T)(a * b); } };
struct d_op_max { template <class T> d_inline T of(T a, T b) { return d_maximum(a, b); } };
struct d_op_min { template <class T> d_inline T of(T a, T b) { return d_minimum(a, b); } };
struct d_op_any { template <class T> d_inline T of(T a, T b) { return (T)(a | b); } };
struct d_op_all { template <class T> d_inline T of(T a, T b) { return (T)(a & b); } };

template <class Op, int N, class T> d_inline T d_in_wave(T x) {
#ifdef D_AT_ONCE
  return d_in_group<N>(x, [](T* row) {
    for (int step = N / 2; step > 0; step /= 2)
      for (int k = 0; k < step; ++k) row[k] = Op::of(row[k], row[k + step]);
    for (int k = 1; k < N; ++k) row[k] = row[0];
  }, N);
#endif
  D_UNROLL(6)
  for (int step = N / 2; step > 0; step /= 2) x = Op::of(x, (T)d_lane_above(x, step));  // short integers arrive as int
  return d_lane_at(x, d_lane() & ~(N - 1));
}
// The reduction over each N adjacent threads of a block; every thread gets it. `shared` has an element
// per 32 threads.
template <class Op, int N, class T, class R> d_inline T d_reduce(T x, R& shared) {
  if constexpr (N <= D_WAVE) {
    return d_in_wave<Op, N>(x);
  } else {
    x = d_in_wave<Op, D_WAVE>(x);
    if (d_lane() == 0) shared[d_thread() / D_WAVE] = x;
    d_barrier();
    const int first = d_thread() / N * (N / D_WAVE);
    x = shared[first];
    for (int k = 1; k < N / D_WAVE; ++k) x = Op::of(x, (T)shared[first + k]);
    return x;
  }
}
// The reduction over threads that are X apart, of which there are R; `shared` has an element a thread.
template <class Op, int X, int R, class T, class S> d_inline T d_reduce_apart(T x, S& shared) {
  if constexpr (R == 1) {
    return x;
  } else {
    shared[d_thread()] = x;
    d_barrier();
    const int column = d_thread() % X;
    x = shared[column];
    for (int k = 1; k < R; ++k) x = Op::of(x, (T)shared[column + k * X]);
    return x;
  }
}
// The sums that threads X apart have, of which there are R, each of N points: the first X threads get
// the total. `shared` has an element a thread.
template <int X, int R, int N, class T, class S> d_inline void d_add_rows(T* sums, S& shared) {
  D_UNROLL(64)
  for (int n = 0; n < N; ++n) {
    d_barrier();  // the previous point has been read
    shared[d_thread()] = sums[n];
    d_barrier();
    if (d_thread() < X)
      for (int k = 1; k < R; ++k) sums[n] += (T)shared[d_thread() + k * X];
  }
}
// Online softmax: the largest value so far, and the sum of exp(x - largest). The lower less the
// higher is 0 where they are equal, be they infinite.
template <class T> d_inline T d_below(T x, T top) { return -d_abs(x == top ? (T)0 : x - top); }
template <class T> d_inline void d_online(T& top, T& total, T x, T fall) {
  const bool rises = (x > top) | (x != x);
  total = rises ? d_fma(total, fall, (T)1) : total + fall;
  top = rises ? x : top;
}
// A sum of exp(x - old) as one of exp(x - new); 0 where both are -inf: nothing has been seen yet.
template <class T> d_inline T d_rescaled(T total, T old, T now) {
  return total * d_exp(old - (now == -(T)d_inff ? (T)0 : now));
}
// Pairs of a value and its position: of equals, and of NaNs, the first position wins.
#define d_pair_merge(kind) \
  struct d_first_##kind { \
    template <class T> d_inline void take(T& x, int64_t& at, T y, int64_t y_at) { \
      const bool same = !d_better_##kind(x, y); \
      const bool other = d_better_##kind(y, x) | (same & (y_at < at)); \
      x = other ? y : x; \
      at = other ? y_at : at; \
    } \
  };
d_pair_merge(max) d_pair_merge(min)
template <class Op, int N, class T> d_inline void d_pair_in_wave(T& x, int64_t& at) {
  for (int step = N / 2; step > 0; step /= 2) {
    const T y = d_lane_above(x, step);
    const int64_t y_at = d_lane_above(at, step);
    Op::take(x, at, y, y_at);
  }
  x = d_lane_at(x, d_lane() & ~(N - 1));
  at = d_lane_at(at, d_lane() & ~(N - 1));
}
template <class Op, int N, class T, class R, class P>
d_inline void d_reduce_pair(T& x, int64_t& at, R& shared, P& places) {
  if constexpr (N <= D_WAVE) {
    d_pair_in_wave<Op, N>(x, at);
  } else {
    d_pair_in_wave<Op, D_WAVE>(x, at);
    if (d_lane() == 0) {
      shared[d_thread() / D_WAVE] = x;
      places[d_thread() / D_WAVE] = at;
    }
    d_barrier();
    const int first = d_thread() / N * (N / D_WAVE);
    x = shared[first];
    at = places[first];
    for (int k = 1; k < N / D_WAVE; ++k)
      Op::take(x, at, (T)shared[first + k], (int64_t)places[first + k]);
  }
}
template <class Op, int X, int R, class T, class S, class P>
d_inline void d_reduce_pair_apart(T& x, int64_t& at, S& shared, P& places) {
  if constexpr (R > 1) {
    shared[d_thread()] = x;
    places[d_thread()] = at;
    d_barrier();
    const int column = d_thread() % X;
    x = shared[column];
    at = places[column];
    for (int k = 1; k < R; ++k)
      Op::take(x, at, (T)shared[column + k * X], (int64_t)places[column + k * X]);
  }
}

// ---- scans ---------------------------------------------------------------------------------------
// The scan over each N adjacent threads, begun from `carry`, which becomes its last value. `shared` has
// an element per 32 threads.
template <class Op, int N, class T, class R> d_inline T d_scan(T x, T& carry, R& shared) {
  constexpr int G = N < D_WAVE ? N : D_WAVE;
  const int at = d_lane() & (G - 1);
#ifdef D_AT_ONCE
  x = d_in_group<G>(x, [](T* row) {
    for (int k = 1; k < G; ++k) row[k] = Op::of(row[k - 1], row[k]);
  }, G);
#else
  D_UNROLL(6)
  for (int step = 1; step < G; step *= 2) {
    const T y = d_lane_below(x, step);
    x = at >= step ? Op::of(y, x) : x;
  }
#endif
  if constexpr (N <= D_WAVE) {
    x = Op::of(carry, x);
    carry = d_lane_at(x, d_lane() | (G - 1));
    return x;
  } else {
    const int wave = d_thread() / D_WAVE, first = d_thread() / N * (N / D_WAVE);
    d_barrier();  // the previous scan's values have been read
    if (at == D_WAVE - 1) shared[wave] = x;
    d_barrier();
    T before = carry;
    for (int k = first; k < first + N / D_WAVE; ++k) {
      before = k == wave ? carry : before;
      carry = Op::of(carry, (T)shared[k]);
    }
    x = Op::of(before, x);
    return x;
  }
}

// ---- colliding stores ----------------------------------------------------------------------------
#ifdef D_HOST
#define d_atomic(op) \
  template <class P, class T> d_inline void d_atomic_##op(P to, d_index at, T x) { \
    T& place = d_atomic_place(to, at); \
    place = d_op_##op::of(place, x); \
  }
d_atomic(sum) d_atomic(prod) d_atomic(max) d_atomic(min)
#else
template <class T> d_inline void d_atomic_sum(T* to, d_index at, T x) { atomicAdd(to + at, x); }
d_inline void d_atomic_sum(int64_t* to, d_index at, int64_t x) {
  atomicAdd((unsigned long long*)to + at, (unsigned long long)x);
}
template <class Op, class T> d_inline void d_exchanged(T* to, T x) {
  typedef typename d_word<sizeof(T)>::type W;
  W old = *(W*)to, known;
  do {
    known = old;
    T next;
    memcpy(&next, &known, sizeof(T));
    next = Op::of(next, x);
    W word;
    memcpy(&word, &next, sizeof(T));
    old = atomicCAS((W*)to, known, word);
  } while (old != known);
}
template <class T> d_inline void d_atomic_prod(T* to, d_index at, T x) {
  d_exchanged<d_op_prod>(to + at, x);
}
template <class T> d_inline void d_atomic_max(T* to, d_index at, T x) {
  d_exchanged<d_op_max>(to + at, x);
}
template <class T> d_inline void d_atomic_min(T* to, d_index at, T x) {
  d_exchanged<d_op_min>(to + at, x);
}
d_inline void d_atomic_max(int32_t* to, d_index at, int32_t x) { atomicMax(to + at, x); }
d_inline void d_atomic_min(int32_t* to, d_index at, int32_t x) { atomicMin(to + at, x); }
#endif
