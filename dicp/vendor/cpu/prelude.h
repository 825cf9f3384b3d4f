// What generated kernels and routines share on the host CPU. It reads no header of PyTorch or of the
// standard library: compiling a translation unit takes little longer than its kernels alone.
#pragma once
// Functions have vector variants in libmvec where the toolchain has it; their error is below 4 units in
// the last place. DICP_LIBMVEC is the release of ARM's glibc that has as many; 2.38 has no vectors of two
// floats, and functions of doubles stay scalar there.
#define d_scalar __attribute__((const))
#define d_vector __attribute__((simd("notinbranch"), const))
#if DICP_LIBMVEC >= 240
#define d_since_240 d_vector
#else
#define d_since_240 d_scalar
#endif
#define d_doubles(kind) kind
#if DICP_LIBMVEC >= 239
#define d_since_239 d_vector
#define d_since_238 d_vector
#else
#define d_since_239 d_scalar
#if DICP_LIBMVEC == 238
#define d_since_238 _Pragma("omp declare simd simdlen(4) notinbranch") d_scalar
#undef d_doubles
#define d_doubles(kind) d_scalar
#else
#define d_since_238 d_scalar
#endif
#endif
#define d_declare1(name, kind) \
  extern "C" { d_doubles(kind) double name(double); kind float name##f(float); }
#define d_declare2(name, kind) \
  extern "C" { d_doubles(kind) double name(double, double); kind float name##f(float, float); }
d_declare1(log, d_since_238) d_declare1(sin, d_since_238) d_declare1(cos, d_since_238)
d_declare1(exp2, d_since_239) d_declare1(expm1, d_since_239) d_declare1(log2, d_since_239)
d_declare1(log10, d_since_239) d_declare1(log1p, d_since_239) d_declare1(tan, d_since_239)
d_declare1(asin, d_since_239) d_declare1(acos, d_since_239) d_declare1(atan, d_since_239)
d_declare2(atan2, d_since_239)
d_declare1(sinh, d_since_240) d_declare1(cosh, d_since_240) d_declare1(asinh, d_since_240)
d_declare1(acosh, d_since_240) d_declare1(atanh, d_since_240) d_declare1(erfc, d_since_240)
d_declare2(hypot, d_since_240) d_declare2(pow, d_since_240)
d_declare1(lgamma, d_scalar)
extern "C" d_doubles(d_since_238) double exp(double);  // of floats, these are in scalar.h
extern "C" d_doubles(d_since_240) double erf(double);
extern "C" d_doubles(d_since_240) double tanh(double);
// libmvec has no vector variants of fmod; those that loops call then are defined below. Compiling them
// takes as long as a small kernel: a unit that computes remainders defines D_REMAINDERS.
#if defined(D_REMAINDERS) && defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define D_FMOD_VECTORS
extern "C" { d_vector float fmodf(float, float); d_vector double fmod(double, double); }
#else
extern "C" { float fmodf(float, float); double fmod(double, double); }
#endif
#define D_DECLARED
#include "scalar.h"

extern "C" void* aligned_alloc(unsigned long, unsigned long);
extern "C" void free(void*);

// Memory at the start of a cache line: a vector load that crosses two lines takes twice as long.
d_inline void* d_alloc(uint64_t bytes) { return aligned_alloc(64, (bytes + 64) / 64 * 64); }
d_inline void d_free(void* p) { free(p); }
#ifdef _OPENMP
extern "C" int omp_get_max_threads(void);
extern "C" int omp_get_thread_num(void);
extern "C" int sched_yield(void);
d_inline int64_t d_threads() { return omp_get_max_threads(); }
d_inline int64_t d_thread() { return omp_get_thread_num(); }
// Between two looks at a value that another thread will write soon. After some 50 us the thread yields
// its core, which the other one may be waiting for.
d_inline void d_spin_wait(int64_t looks) {
  if (looks > 2000) {
    sched_yield();
    return;
  }
#if defined(__SSE__)
  __builtin_ia32_pause();
#endif
}
#else
d_inline int64_t d_threads() { return 1; }
d_inline int64_t d_thread() { return 0; }
d_inline void d_spin_wait(int64_t) {}
#endif
// Memory for `count` elements, freed at the end of the scope. If the allocation fails, `data` is null
// and the error is reported.
template <class T> struct d_workspace {
  T* const data;
  d_workspace(int64_t count, int64_t* status) : data((T*)d_alloc(count * sizeof(T))) {
    if (!data) d_report(status, 3, count * sizeof(T));
  }
  ~d_workspace() { d_free(data); }
};
// An estimate of the mean of numbers, by the first ones' sum and that of their squares: 0 if the square
// of their mean is at most a third of their variance.
d_inline double d_estimated_mean(double sum, double squares, int64_t count) {
  return sum * sum * 4 <= squares * count ? 0 : sum / count;
}
// Whether about their mean, the squares of `count` deviations with this sum would be at least half as
// large. Sums that are not finite say nothing of the mean.
d_inline bool d_is_centred(double sum, double squares, int64_t count) {
  return (squares < d_inf && sum * sum <= 0.5 * count * squares) || sum - sum != 0;
}
// The calling thread's part of memory that was allocated for the team.
d_inline char* d_thread_workspace(char* workspace, int64_t bytes) { return workspace + d_thread() * bytes; }
// A number whose value the compiler does not know.
d_inline int64_t d_opaque(int64_t n) {
  asm("" : "+r"(n));
  return n;
}
// Chunks of a reduction or scatter that threads divide: at least 16, so that their number, and with
// it the rounding of sums, is that of any machine of up to 16 threads.
constexpr int64_t d_max_chunks = 256;
d_inline int64_t d_chunks() {
  const int64_t threads = d_threads();
  return threads < 16 ? 16 : threads < d_max_chunks ? threads : d_max_chunks;
}
// Strips of an axis of `size` elements that threads divide, each of a vector's width or more.
d_inline int64_t d_strips(int64_t size) {
  const int64_t wanted = d_threads() > 4 ? d_threads() : 4, most = size > 16 ? size / 16 : 1;
  return wanted < most ? wanted : most;
}
// Number of partial sums of a sum over rows: at least one per thread, and few rows in each, because
// the rounding error grows with the rows of a partial sum.
d_inline int64_t d_partial_sum_count(int64_t rows) {
  const int64_t many = rows / 64, few = rows / 16 < 4 ? 4 : rows / 16;
  return many > d_chunks() ? many : few < d_chunks() ? few : d_chunks();
}

template <class T> d_inline void d_swap(T& a, T& b) { const T x = a; a = b; b = x; }
// The position of the first of n values that equals `value` or is NaN: a NaN is always the extremum.
template <class T> d_inline int64_t d_first_index_of(const T* x, int64_t n, T& value) {
  int32_t first = n ? (int32_t)n - 1 : 0;
#pragma omp simd reduction(min: first)
  for (int32_t i = 0; i < (int32_t)n; ++i) {
    const int32_t at = (x[i] == value) | d_isnan(x[i]) ? i : 0x7fffffff;
    first = at < first ? at : first;
  }
  value = n ? x[first] : value;
  return first;
}

// The sum of N lanes, a power of 2, in pairs: g++ adds the lanes of a reduction one after another.
template <class T, int N> struct d_pairwise {
  d_inline T sum(const T (&lanes)[N]) {
    T halves[N / 2];
#pragma omp simd
    for (int64_t lane = 0; lane < N / 2; ++lane) halves[lane] = lanes[lane] + lanes[lane + N / 2];
    return d_pairwise<T, N / 2>::sum(halves);
  }
};
template <class T> struct d_pairwise<T, 1> {
  d_inline T sum(const T (&lanes)[1]) { return lanes[0]; }
};
template <class T, int N> d_inline T d_sum(const T (&lanes)[N]) { return d_pairwise<T, N>::sum(lanes); }

#if defined(__AVX512F__)
#define D_VECTOR_BYTES 64
#elif defined(__AVX__)
#define D_VECTOR_BYTES 32
#else
#define D_VECTOR_BYTES 16
#endif

// ---- vectors of remainders ----------------------------------------------------------------------
#ifdef D_FMOD_VECTORS
template <class T> struct d_fmod_vector { typedef T type __attribute__((vector_size(D_VECTOR_BYTES))); };
// The remainder of lanes whose quotients are below the limit of `d_fmod_limit`, beyond which it is wrong.
// In double, a quotient of floats below 2^29 is truncated exactly: it is at least 2^-24 / b away from
// the next integer, relatively more than the division's rounding error. Its product with b has 53 bits,
// and so the remainder is exact.
d_inline double d_fmod_limit(float) { return 0x1p29; }
d_inline float d_fmod_near(float a, float b, double& q) {
  q = d_trunc((double)a / (double)b);
  return (float)((double)a - q * (double)b);
}
// A quotient of doubles below 2^53 may be rounded up to the next integer: the remainder, which one rounding
// of a - q * b gives exactly, then has the other sign.
d_inline double d_fmod_limit(double) { return 0x1p53; }
d_inline double d_fmod_near(double a, double b, double& q) {
  q = d_trunc(a / b);
  const double r = d_fma(-q, b, a), size = a < 0 ? -r : r;
  return size < 0 ? r + d_copysign(b, a) : r;
}
d_inline float d_fmod_exact(float a, float b) { return fmodf(a, b); }
d_inline double d_fmod_exact(double a, double b) { return fmod(a, b); }
// Vectors with larger quotients, infinities or NaN call the C library.
template <class T> static __attribute__((noinline)) typename d_fmod_vector<T>::type d_fmod_lanes(
    typename d_fmod_vector<T>::type a, typename d_fmod_vector<T>::type b) {
  constexpr int N = D_VECTOR_BYTES / sizeof(T);
  T x[N], y[N], r[N];
  __builtin_memcpy(x, &a, D_VECTOR_BYTES);
  __builtin_memcpy(y, &b, D_VECTOR_BYTES);
  int32_t large = 0;
#pragma omp simd reduction(|: large)
  for (int k = 0; k < N; ++k) {
    double q;
    r[k] = d_copysign(d_fmod_near(x[k], y[k], q), x[k]);
    large |= !((d_abs(q) < d_fmod_limit(x[k])) & (d_abs(y[k]) < d_inff));
  }
  for (int k = 0; large && k < N; ++k) {
    asm("");  // else the compiler makes this loop a call of the function that it is in
    r[k] = d_fmod_exact(x[k], y[k]);
  }
  __builtin_memcpy(&a, r, D_VECTOR_BYTES);
  return a;
}
// The names are those by which g++ calls the vector variants of fmodf and fmod: 4 floats or 2 doubles with
// SSE, 8 or 4 with AVX and AVX2, 16 or 8 with AVX-512. The shorter ones are padded by ones: one function is
// compiled sooner than four.
#define d_define_fmod(T, name, bytes) \
  typedef T name##_lanes __attribute__((vector_size(bytes))); \
  extern "C" __attribute__((weak, visibility("hidden"))) name##_lanes name(name##_lanes a, name##_lanes b) { \
    d_fmod_vector<T>::type x = d_fmod_vector<T>::type{} + (T)1, y = x; \
    __builtin_memcpy(&x, &a, bytes); \
    __builtin_memcpy(&y, &b, bytes); \
    x = d_fmod_lanes<T>(x, y); \
    __builtin_memcpy(&a, &x, bytes); \
    return a; \
  }
d_define_fmod(float, _ZGVbN4vv_fmodf, 16) d_define_fmod(double, _ZGVbN2vv_fmod, 16)
#ifdef __AVX__
d_define_fmod(float, _ZGVcN8vv_fmodf, 32) d_define_fmod(double, _ZGVcN4vv_fmod, 32)
#endif
#ifdef __AVX2__
d_define_fmod(float, _ZGVdN8vv_fmodf, 32) d_define_fmod(double, _ZGVdN4vv_fmod, 32)
#endif
#ifdef __AVX512F__
d_define_fmod(float, _ZGVeN16vv_fmodf, 64) d_define_fmod(double, _ZGVeN8vv_fmod, 64)
#endif
#endif

// ---- vectors of float16 ---------------------------------------------------------------------------
// g++ 12 vectorizes d_from_f16 and d_to_f16 as integer arithmetic. These are the processor's instructions,
// with the same results but for the bits of a NaN.
template <int N> struct d_f16_lanes {
  typedef short half __attribute__((vector_size(2 * N)));
  typedef float full __attribute__((vector_size(4 * N)));
};
#if defined(__F16C__)
#define D_FEWEST_F16 8
d_inline d_f16_lanes<8>::full d_f16_to_float(d_f16_lanes<8>::half h) { return __builtin_ia32_vcvtph2ps256(h); }
d_inline d_f16_lanes<8>::half d_float_to_f16(d_f16_lanes<8>::full x) {
  return __builtin_ia32_vcvtps2ph256(x, 0);
}
#elif defined(__aarch64__)
#define D_FEWEST_F16 4
d_inline d_f16_lanes<4>::full d_f16_to_float(d_f16_lanes<4>::half h) {
  d_f16_lanes<4>::full x;
  asm("fcvtl %0.4s, %1.4h" : "=w"(x) : "w"(h));
  return x;
}
d_inline d_f16_lanes<4>::half d_float_to_f16(d_f16_lanes<4>::full x) {
  d_f16_lanes<4>::half h;
  asm("fcvtn %0.4h, %1.4s" : "=w"(h) : "w"(x));
  return h;
}
#endif
#if defined(__F16C__) && defined(__AVX512F__)
#define D_MOST_F16 16
d_inline d_f16_lanes<16>::full d_f16_to_float(d_f16_lanes<16>::half h) {
  return __builtin_ia32_vcvtph2ps512_mask(h, d_f16_lanes<16>::full{}, (uint16_t)-1, 4);
}
d_inline d_f16_lanes<16>::half d_float_to_f16(d_f16_lanes<16>::full x) {
  return __builtin_ia32_vcvtps2ph512_mask(x, 0, d_f16_lanes<16>::half{}, (uint16_t)-1);
}
#elif defined(D_FEWEST_F16)
#define D_MOST_F16 D_FEWEST_F16
#endif
#if defined(__F16C__)
d_inline void d_convert_one(d_f16 from, float& to) {
  to = __builtin_ia32_vcvtph2ps(d_f16_lanes<8>::half{(short)from})[0];
}
d_inline void d_convert_one(float from, d_f16& to) {
  to = __builtin_ia32_vcvtps2ph(d_f16_lanes<4>::full{from}, 0)[0];
}
#else
d_inline void d_convert_one(d_f16 from, float& to) { to = d_from_f16(from); }
d_inline void d_convert_one(float from, d_f16& to) { to = d_to_f16(from); }
#endif
#if defined(D_MOST_F16)
template <int N> d_inline void d_convert_lanes(const d_f16* from, float* to) {
  typename d_f16_lanes<N>::half h;
  __builtin_memcpy(&h, from, sizeof(h));
  const typename d_f16_lanes<N>::full x = d_f16_to_float(h);
  __builtin_memcpy(to, &x, sizeof(x));
}
template <int N> d_inline void d_convert_lanes(const float* from, d_f16* to) {
  typename d_f16_lanes<N>::full x;
  __builtin_memcpy(&x, from, sizeof(x));
  const typename d_f16_lanes<N>::half h = d_float_to_f16(x);
  __builtin_memcpy(to, &h, sizeof(h));
}
// Vectors of the lengths that the loop over the floats has, too: a load that finds a part of its bytes in
// a store that has not reached the cache waits for it.
template <class From, class To> d_inline void d_convert(const From* from, To* to, int64_t count) {
  int64_t i = 0;
  for (; i + D_MOST_F16 <= count; i += D_MOST_F16) d_convert_lanes<D_MOST_F16>(from + i, to + i);
  for (; i + D_FEWEST_F16 <= count; i += D_FEWEST_F16) d_convert_lanes<D_FEWEST_F16>(from + i, to + i);
  for (; i < count; ++i) {
    asm("");  // not vectorized, which would take compile time
    d_convert_one(from[i], to[i]);
  }
}
#else
template <class From, class To> d_inline void d_convert(const From* from, To* to, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) d_convert_one(from[i], to[i]);
}
#endif
static __attribute__((noinline)) void d_widen(const d_f16* from, float* to, int64_t count) {
  d_convert(from, to, count);
}
static __attribute__((noinline)) void d_narrow(const float* from, d_f16* to, int64_t count) {
  d_convert(from, to, count);
}
// A block of known size: arrays stay in registers where it is short.
template <int N> d_inline void d_widen(const d_f16* from, float* to) { d_convert(from, to, N); }
template <int N> d_inline void d_narrow(const float* from, d_f16* to) { d_convert(from, to, N); }

// ---- non-temporal stores ------------------------------------------------------------------------
typedef float d_non_temporal __attribute__((vector_size(D_VECTOR_BYTES)));
#if defined(__clang__)
#define d_store_non_temporal(to, v) __builtin_nontemporal_store(v, (d_non_temporal*)(to))
#elif defined(__AVX512F__)
#define d_store_non_temporal(to, v) __builtin_ia32_movntps512(to, v)
#elif defined(__AVX__)
#define d_store_non_temporal(to, v) __builtin_ia32_movntps256(to, v)
#elif defined(__SSE__)
#define d_store_non_temporal(to, v) __builtin_ia32_movntps(to, v)
#else
d_inline void d_store_non_temporal(float* to, d_non_temporal v) { __builtin_memcpy(to, &v, sizeof(v)); }
#endif
// Writes whole cache lines with non-temporal stores, which do not read the lines first.
template <class T, int N> d_inline void d_store_lanes_non_temporal(T* to, const T (&from)[N]) {
  constexpr int bytes = N * (int)sizeof(T);
  if ((uint64_t)to % D_VECTOR_BYTES) { __builtin_memcpy(to, from, bytes); return; }
  for (int k = 0; k < bytes; k += D_VECTOR_BYTES) {
    d_non_temporal v;
    __builtin_memcpy(&v, (const char*)from + k, sizeof(v));
    d_store_non_temporal((float*)((char*)to + k), v);
  }
}
// A store fence: other threads see non-temporal stores only after it.
d_inline void d_store_fence() {
#if defined(__SSE__)
  __builtin_ia32_sfence();
#else
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

// ---- tiles transposed in registers -----------------------------------------------------------------
template <int...> struct d_int_sequence {};
// Selects lanes of a (0 .. N-1) and of b (N .. 2N-1); M is the vector of lane numbers.
#if defined(__clang__)
#define D_SHUFFLE(a, b, M, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
template <class, int... j> struct d_int_sequence_type { typedef d_int_sequence<j...> type; };
template <int N> struct d_int_sequence_of {
  typedef typename __make_integer_seq<d_int_sequence_type, int, N>::type type;
};
#else
#define D_SHUFFLE(a, b, M, ...) __builtin_shuffle(a, b, M{__VA_ARGS__})
template <int N> struct d_int_sequence_of { typedef d_int_sequence<__integer_pack(N)...> type; };
#endif
template <int size> struct d_signed;
template <> struct d_signed<1> { typedef int8_t type; };
template <> struct d_signed<2> { typedef int16_t type; };
template <> struct d_signed<4> { typedef int32_t type; };
template <> struct d_signed<8> { typedef int64_t type; };
// Exchanges blocks of s elements between two rows whose numbers differ by s.
template <int N, int s, class V, class M, int... j>
d_inline void d_exchange(V& a, V& b, d_int_sequence<j...>) {
  const V low = D_SHUFFLE(a, b, M, ((j & s) ? N + j - s : j)...);
  b = D_SHUFFLE(a, b, M, ((j & s) ? N + j : j + s)...);
  a = low;
}
template <int N, int s, class V, class M> d_inline void d_exchange_blocks(V* rows) {
  if constexpr (s > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i)
      if (!(i & s)) d_exchange<N, s, V, M>(rows[i], rows[i + s], typename d_int_sequence_of<N>::type());
    d_exchange_blocks<N, s / 2, V, M>(rows);
  }
}
template <bool non_temporal, class T, int N>
d_inline void d_transpose_square(const T* from, int64_t stride, T* to, int64_t step) {
  typedef T V __attribute__((vector_size(N * sizeof(T))));
  typedef typename d_signed<sizeof(T)>::type I;
  typedef I M __attribute__((vector_size(N * sizeof(T))));
  V rows[N];
  // Prefetches the next square: its lines are too far apart for the hardware prefetcher.
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) __builtin_prefetch(from + (i + N) * stride);
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) __builtin_memcpy(&rows[i], from + i * stride, sizeof(V));
  d_exchange_blocks<N, N / 2, V, M>(rows);
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) {
    if constexpr (non_temporal)
      d_store_non_temporal((float*)(to + i * step), (d_non_temporal)rows[i]);
    else __builtin_memcpy(to + i * step, &rows[i], sizeof(V));
  }
}
// to[c * K + l] = from[l * stride + c] for c < width, l < K: interleaves K rows, such as the colours
// of an image.
template <int K, class T>
d_inline void d_interleave(const T* __restrict from, int64_t stride, T* __restrict to, int64_t width) {
#pragma omp simd
  for (int64_t c = 0; c < width; ++c) {
#pragma GCC unroll 4
    for (int l = 0; l < K; ++l) to[c * K + l] = from[l * stride + c];
  }
}
// Transposes a square of which `width` columns and `height` rows exist. Whole vectors are read as far as
// `readable` elements exist, and written as far as `writable` ones may be: later rows overwrite the rest.
template <class T, int N>
__attribute__((noinline)) static void d_transpose_part(const T* from, int64_t stride, T* to, int64_t step,
                                                       int64_t width, int64_t height, int64_t readable,
                                                       int64_t writable) {
  typedef T V __attribute__((vector_size(N * sizeof(T))));
  typedef typename d_signed<sizeof(T)>::type I;
  typedef I M __attribute__((vector_size(N * sizeof(T))));
  V rows[N] = {};
  for (int64_t i = 0; i < height; ++i)
    if (i * stride + N <= readable) __builtin_memcpy(&rows[i], from + i * stride, sizeof(V));
    else
      for (int64_t c = 0; c < width; ++c) rows[i][c] = from[i * stride + c];
  d_exchange_blocks<N, N / 2, V, M>(rows);
  for (int64_t i = 0; i < width; ++i)
    if (i * step + N <= writable) __builtin_memcpy(to + i * step, &rows[i], sizeof(V));
    else
      for (int64_t l = 0; l < height; ++l) to[i * step + l] = rows[i][l];
}
// to[c * step + l] = from[l * stride + c] for c < width, l < height: transposes squares in registers.
template <bool non_temporal, class T>
d_inline void d_transpose_squares(const T* from, int64_t stride, T* to, int64_t step, int64_t width,
                                int64_t height) {
  constexpr int fit = D_VECTOR_BYTES / (int)sizeof(T), N = fit < 16 ? fit : 16;
  for (int64_t c = 0; c < width; c += N)
    for (int64_t l = 0; l < height; l += N) {
      const int64_t wide = width - c < N ? width - c : N, high = height - l < N ? height - l : N;
      const T* at = from + l * stride + c;
      T* into = to + c * step + l;
      if (wide == N && high == N) {
        d_transpose_square<non_temporal, T, N>(at, stride, into, step);
        continue;
      }
      const int64_t readable = (height - 1 - l) * stride + width - c;
      const bool adjacent = step == height && height <= N;  // a row's rest is written with the next row
      const int64_t writable = high == N ? (wide - 1) * step + N : adjacent ? (width - 1 - c) * step + high : 0;
      if (wide > 4 && high > 4 && writable) {
        d_transpose_part<T, N>(at, stride, into, step, wide, high, readable, writable);
        continue;
      }
      for (int64_t i = 0; i < high; ++i)
        for (int64_t k = 0; k < wide; ++k) into[k * step + i] = at[i * stride + k];
    }
}
template <class T>
d_inline void d_transpose(const T* from, int64_t stride, T* to, int64_t step, int64_t width, int64_t height) {
  if (height == 2 && step == 2) return d_interleave<2>(from, stride, to, width);
  if (height == 3 && step == 3) return d_interleave<3>(from, stride, to, width);
  if (height == 4 && step == 4) return d_interleave<4>(from, stride, to, width);
  d_transpose_squares<false>(from, stride, to, step, width, height);
}
// The same with non-temporal stores; `step` must be a multiple of a cache line.
template <class T> d_inline void d_transpose_non_temporal(const T* from, int64_t stride, T* to, int64_t step,
                                                          int64_t width, int64_t height) {
  if ((uint64_t)to % D_VECTOR_BYTES) return d_transpose_squares<false>(from, stride, to, step, width, height);
  d_transpose_squares<true>(from, stride, to, step, width, height);
}

// ---- tiles of short rows ------------------------------------------------------------------------
// A square of K rows of which N columns exist, to the columns' places; whole vectors are read.
template <int K, int N, class T>
d_inline void d_load_square(const T* from, int64_t stride, T* to, int64_t step) {
  typedef T V __attribute__((vector_size(K * sizeof(T))));
  typedef typename d_signed<sizeof(T)>::type I;
  typedef I M __attribute__((vector_size(K * sizeof(T))));
  V rows[K];
#pragma GCC unroll 16
  for (int i = 0; i < K; ++i) __builtin_memcpy(&rows[i], from + i * stride, sizeof(V));
  d_exchange_blocks<K, K / 2, V, M>(rows);
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) __builtin_memcpy(to + i * step, &rows[i], sizeof(V));
}
// The same back. Rows are written as whole vectors if `whole`: the next row overwrites what is too much.
template <int K, int N, bool whole, class T>
d_inline void d_store_square_of_rows(const T* from, int64_t step, T* to, int64_t stride) {
  typedef T V __attribute__((vector_size(K * sizeof(T))));
  typedef typename d_signed<sizeof(T)>::type I;
  typedef I M __attribute__((vector_size(K * sizeof(T))));
  V rows[K] = {};
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) __builtin_memcpy(&rows[i], from + i * step, sizeof(V));
  d_exchange_blocks<K, K / 2, V, M>(rows);
#pragma GCC unroll 16
  for (int i = 0; i < K; ++i) __builtin_memcpy(to + i * stride, &rows[i], whole ? sizeof(V) : N * sizeof(T));
}
// Rows of N elements, `stride` elements apart, to a tile in which each element's `rows` are contiguous,
// B at most; those beyond are zeros.
template <int N, int B, class T>
__attribute__((noinline)) static void d_load_short_rows(const T* from, int64_t stride, T* to,
                                                                int64_t rows) {
  constexpr int fit = D_VECTOR_BYTES / (int)sizeof(T), K = fit < 16 ? fit : 16;
  if (rows < B) {
    __builtin_memset(to, 0, N * B * sizeof(T));
    return d_transpose(from, stride, to, B, N, rows);
  }
  if constexpr (N <= 4) {
    if (stride == N) {
#pragma omp simd
      for (int l = 0; l < B; ++l)
#pragma GCC unroll 4
        for (int c = 0; c < N; ++c) to[c * B + l] = from[l * N + c];
      return;
    }
  }
  for (int l = 0; l < B; l += K) {
    const T* at = from + l * stride;
    if constexpr (N >= K) {
      for (int c = 0; c + K < N; c += K) d_load_square<K, K>(at + c, stride, to + c * B + l, B);
      d_load_square<K, K>(at + N - K, stride, to + (N - K) * B + l, B);  // overlaps the one before
    } else if (l + K < B) {
      d_load_square<K, N>(at, stride, to + l, B);
    } else {
      d_transpose(at, stride, to + l, B, N, K);  // not a vector beyond the last row
    }
  }
}
// The same back.
template <int N, int B, class T>
__attribute__((noinline)) static void d_store_short_rows(const T* from, T* to, int64_t stride,
                                                                 int64_t rows) {
  constexpr int fit = D_VECTOR_BYTES / (int)sizeof(T), K = fit < 16 ? fit : 16;
  if (rows < B) return d_transpose(from, B, to, stride, rows, N);
  if constexpr (N <= 4) {
    if (stride == N) return d_interleave<N>(from, B, to, B);
  }
  for (int l = 0; l < B; l += K) {
    T* at = to + l * stride;
    if constexpr (N >= K) {
      for (int c = 0; c + K < N; c += K) d_store_square_of_rows<K, K, true>(from + c * B + l, B, at + c, stride);
      d_store_square_of_rows<K, K, true>(from + (N - K) * B + l, B, at + N - K, stride);
    } else if (l + K < B && stride == N) {
      d_store_square_of_rows<K, N, true>(from + l, B, at, stride);
    } else {
      d_store_square_of_rows<K, N, false>(from + l, B, at, stride);
    }
  }
}

// ---- prefix sums ------------------------------------------------------------------------------
template <int N, int s, class V, class M, int... j> d_inline V d_shifted_lanes(V x, d_int_sequence<j...>) {
  return D_SHUFFLE(V{}, x, M, (j < s ? j : N + j - s)...);
}
template <int N, int s, class V, class M> d_inline V d_prefix_sum(V x) {
  if constexpr (s < N)
    return d_prefix_sum<N, 2 * s, V, M>(
        x + d_shifted_lanes<N, s, V, M>(x, typename d_int_sequence_of<N>::type()));
  else
    return x;
}
// x[i] = total + x[0] + ... + x[i], a vector at a time: only one addition depends on the vector
// before.
template <class T> d_inline void d_running_sum(T* x, int64_t n, T& total) {
  constexpr int N = D_VECTOR_BYTES / (int)sizeof(T);
  typedef T V __attribute__((vector_size(D_VECTOR_BYTES)));
  typedef typename d_signed<sizeof(T)>::type I;
  typedef I M __attribute__((vector_size(D_VECTOR_BYTES)));
  V before = V{} + total;
  int64_t i = 0;
  for (; i + N <= n; i += N) {
    V v;
    __builtin_memcpy(&v, x + i, sizeof(V));
    v = d_prefix_sum<N, 1, V, M>(v);
    const V sum = before + v;
    __builtin_memcpy(x + i, &sum, sizeof(V));
    before = before + v[N - 1];
  }
  total = before[0];
  for (; i < n; ++i) x[i] = total = (T)(total + x[i]);
}

// ---- scatters ----------------------------------------------------------------------------------
// The first destination that has `before` or more destinations and rows before it; first[i] counts the
// rows before destination i.
d_inline int64_t d_partition(const int64_t* first, int64_t places, int64_t before) {
  int64_t low = 0, high = places;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (first[middle] + middle < before) low = middle + 1; else high = middle;
  }
  return low;
}
