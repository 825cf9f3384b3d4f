// Scalar operations of generated kernels. No framework and no standard library header is read:
// a translation unit costs little more than the kernels in it.
#pragma once
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef uint16_t d_bf16;
typedef uint16_t d_f16;
#define INT64_MIN (-0x7fffffffffffffffL - 1)
#define d_inline static inline __attribute__((always_inline))

static const double d_inf = __builtin_inf(), d_nan = __builtin_nan("");
static const float d_inff = __builtin_inff(), d_nanf = __builtin_nanf("");

// Vector variants of the float functions come from libmvec where the toolchain has it; they are
// within 4 units in the last place. Doubles keep the scalar functions, which are within one.
#ifdef DICP_LIBMVEC
#define d_vector __attribute__((simd("notinbranch"), const))
#else
#define d_vector __attribute__((const))
#endif
#define d_math1(name, kind) \
  extern "C" __attribute__((const)) double name(double); extern "C" kind float name##f(float); \
  d_inline double d_##name(double x) { return name(x); } \
  d_inline float d_##name(float x) { return name##f(x); }
#define d_math2(name, kind) \
  extern "C" __attribute__((const)) double name(double, double); \
  extern "C" kind float name##f(float, float); \
  d_inline double d_##name(double x, double y) { return name(x, y); } \
  d_inline float d_##name(float x, float y) { return name##f(x, y); }
#define d_scalar __attribute__((const))
d_math1(exp2, d_vector) d_math1(expm1, d_vector) d_math1(log, d_vector)
d_math1(log2, d_vector) d_math1(log10, d_vector) d_math1(log1p, d_vector) d_math1(sin, d_vector)
d_math1(cos, d_vector) d_math1(tan, d_vector) d_math1(asin, d_vector) d_math1(acos, d_vector)
d_math1(atan, d_vector) d_math1(sinh, d_vector) d_math1(cosh, d_vector)
d_math1(asinh, d_vector) d_math1(acosh, d_vector) d_math1(atanh, d_vector)
d_math1(erfc, d_vector) d_math1(lgamma, d_scalar)
extern "C" __attribute__((const)) double exp(double);
extern "C" __attribute__((const)) double erf(double);
extern "C" __attribute__((const)) double tanh(double);
d_inline double d_exp(double x) { return exp(x); }
d_inline double d_tanh(double x) { return tanh(x); }
d_inline double d_erf(double x) { return erf(x); }
d_math2(atan2, d_vector) d_math2(hypot, d_vector) d_math2(pow, d_vector)
d_math2(nextafter, d_scalar)
extern "C" void* aligned_alloc(unsigned long, unsigned long);
extern "C" void free(void*);
extern "C" double fmod(double, double);
extern "C" float fmodf(float, float);

// Whole cache lines: vectors that cross from one to the next take twice as long.
d_inline void* d_alloc(uint64_t bytes) { return aligned_alloc(64, (bytes + 64) / 64 * 64); }
d_inline void d_free(void* p) { free(p); }
// The first thread that fails fills `status`: the code, the place in the code or the bytes that were
// wanted, and for an index its value and the size.
static __attribute__((noinline, cold)) void d_report(
    int64_t* status, int64_t code, int64_t site, int64_t index = 0, int64_t size = 0) {
  if (!__sync_bool_compare_and_swap(status, (int64_t)0, code)) return;
  status[1] = site; status[2] = index; status[3] = size;
}
#ifdef _OPENMP
extern "C" int omp_get_max_threads(void);
extern "C" int omp_get_thread_num(void);
d_inline int64_t d_threads() { return omp_get_max_threads(); }
d_inline int64_t d_thread() { return omp_get_thread_num(); }
#else
d_inline int64_t d_threads() { return 1; }
d_inline int64_t d_thread() { return 0; }
#endif
// Memory for `count` elements while a scope lasts; null, and reported, where there is none.
template <class T> struct d_room {
  T* const at;
  d_room(int64_t count, int64_t* status) : at((T*)d_alloc(count * sizeof(T))) {
    if (!at) d_report(status, 3, count * sizeof(T));
  }
  ~d_room() { d_free(at); }
};
// The calling thread's part of the memory that a team has.
d_inline char* d_own_room(char* rooms, int64_t bytes) { return rooms + d_thread() * bytes; }
// Parts of a sum over rows: enough for the threads, and few rows in each, since errors grow with them.
d_inline int64_t d_parts(int64_t rows) {
  const int64_t many = rows / 64, few = rows / 16 < 4 ? 4 : rows / 16;
  return many > 16 ? many : few < 16 ? few : 16;
}

// ---- 16-bit floats: stored as bits, computed in float --------------------------------------
d_inline uint32_t d_bits(float x) { uint32_t u; __builtin_memcpy(&u, &x, 4); return u; }
d_inline float d_float(uint32_t u) { float x; __builtin_memcpy(&x, &u, 4); return x; }
d_inline float d_from_bf16(d_bf16 x) { return d_float((uint32_t)x << 16); }
d_inline d_bf16 d_to_bf16(float x) {
  const uint32_t u = d_bits(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
  return x != x ? (d_bf16)0x7fc0 : (d_bf16)rounded;
}
d_inline float d_round_bf16(float x) { return d_from_bf16(d_to_bf16(x)); }
d_inline float d_from_f16(d_f16 h) {
  // No step is subnormal in float, so that nothing becomes zero where subnormals are flushed.
  const uint32_t sign = ((uint32_t)h & 0x8000u) << 16, size = (uint32_t)h & 0x7fffu;
  const uint32_t small = d_bits(d_float(0x3f000000u | size) - 0.5f);
  const uint32_t normal = (size << 13) + (size >= 0x7c00u ? 224u << 23 : 112u << 23);
  return d_float(sign | (size < 0x400u ? small : normal));
}
d_inline d_f16 d_to_f16(float x) {
  const uint32_t sign = d_bits(x) & 0x80000000u;
  const uint32_t u = d_bits(x) ^ sign;
  // Subnormal results: adding 0.5 lines the significand up and rounds it to nearest even.
  const uint32_t small = d_bits(d_float(u) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (u + 0xc8000fffu + ((u >> 13) & 1)) >> 13;
  const uint32_t large = u > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t finite = u < 0x38800000u ? small : normal;
  const uint32_t magnitude = u >= 0x47800000u ? large : finite;
  return (d_f16)(magnitude | (sign >> 16));
}
d_inline float d_round_f16(float x) { return d_from_f16(d_to_f16(x)); }

// ---- integers of numbers ---------------------------------------------------------------------
// What does not fit, NaN included, is the lowest integer, as in PyTorch on x86; C++ leaves it open.
// Shorter integers are the lowest bits of one of 32.
d_inline int32_t d_to_int32(float x) {
  return (x >= -0x1p31f) & (x < 0x1p31f) ? (int32_t)x : -2147483647 - 1;
}
d_inline int32_t d_to_int32(double x) {
  return (x > -0x1.00000002p31) & (x < 0x1p31) ? (int32_t)x : -2147483647 - 1;
}
d_inline int64_t d_to_int64(float x) {
  return (x >= -0x1p63f) & (x < 0x1p63f) ? (int64_t)x : INT64_MIN;
}
d_inline int64_t d_to_int64(double x) {
  return (x >= -0x1p63) & (x < 0x1p63) ? (int64_t)x : INT64_MIN;
}

// ---- limits ----------------------------------------------------------------------------------
template <class T> d_inline T d_lowest();
template <class T> d_inline T d_highest();
#define d_limits(T, low, high) \
  template <> inline T d_lowest<T>() { return low; } \
  template <> inline T d_highest<T>() { return high; }
d_limits(float, -d_inff, d_inff) d_limits(double, -d_inf, d_inf)
d_limits(int8_t, -128, 127) d_limits(uint8_t, 0, 255) d_limits(bool, false, true)
d_limits(int16_t, -32768, 32767) d_limits(int32_t, -2147483647 - 1, 2147483647)
d_limits(int64_t, INT64_MIN, 0x7fffffffffffffffL)

// ---- arithmetic with PyTorch's rules ---------------------------------------------------------
// NaN is looked for in the bits, and each choice is one select: comparisons joined by || would keep
// g++ from vectorizing once it has pushed them into one another.
// The bits of a number's size, which grow with it; those of NaN are above infinity's.
d_inline uint32_t d_size_bits(float x) { return d_bits(x) & 0x7fffffffu; }
d_inline uint64_t d_size_bits(double x) {
  uint64_t u; __builtin_memcpy(&u, &x, 8);
  return u & 0x7fffffffffffffffu;
}
d_inline bool d_size_of_nan(uint32_t bits) { return bits > 0x7f800000u; }
d_inline bool d_size_of_nan(uint64_t bits) { return bits > 0x7ff0000000000000u; }
d_inline bool d_isnan(float x) { return d_size_of_nan(d_size_bits(x)); }
d_inline bool d_isnan(double x) { return d_size_of_nan(d_size_bits(x)); }
template <class T> d_inline bool d_isnan(T) { return false; }
template <class T> d_inline T d_maximum(T a, T b) {
  const T m = a > b ? a : b;
  return d_isnan(a) ? a : m;
}
template <class T> d_inline T d_minimum(T a, T b) {
  const T m = a < b ? a : b;
  return d_isnan(a) ? a : m;
}
template <class T> d_inline T d_fmax(T a, T b) {
  const T m = b > a ? b : a;
  return d_isnan(a) ? b : m;
}
template <class T> d_inline T d_fmin(T a, T b) {
  const T m = b < a ? b : a;
  return d_isnan(a) ? b : m;
}
// Pairs of a value and its position: a NaN beats every number, and the first of equals wins.
#define d_pair_reduction(kind, sign) \
  template <class T> d_inline bool d_better_##kind(T a, T b) { return (a sign b) | (d_isnan(a) & !d_isnan(b)); } \
  template <class T> d_inline void d_take_##kind(T x, int64_t at, T& best, int64_t& best_at) { \
    const bool better = d_better_##kind(x, best); \
    best = better ? x : best; \
    best_at = better ? at : best_at; \
  }
d_pair_reduction(max, >) d_pair_reduction(min, <)
template <class T> d_inline void d_swap(T& a, T& b) { const T x = a; a = b; b = x; }
// The first place of `value` among n values, or of a NaN, which is the extremum wherever there is one.
template <class T> d_inline int64_t d_first(const T* x, int64_t n, T& value) {
  int32_t first = n ? (int32_t)n - 1 : 0;
#pragma omp simd reduction(min: first)
  for (int32_t i = 0; i < (int32_t)n; ++i) {
    const int32_t at = (x[i] == value) | d_isnan(x[i]) ? i : 0x7fffffff;
    first = at < first ? at : first;
  }
  value = n ? x[first] : value;
  return first;
}

d_inline float d_abs(float x) { return __builtin_fabsf(x); }
d_inline double d_abs(double x) { return __builtin_fabs(x); }
template <class T> d_inline T d_abs(T x) { return x < 0 ? (T)-x : x; }
template <class T> d_inline T d_sign(T x) { return (T)((x > (T)0) - (x < (T)0)); }
d_inline bool d_signbit(float x) { return (int32_t)d_bits(x) < 0; }
d_inline bool d_signbit(double x) { int64_t u; __builtin_memcpy(&u, &x, 8); return u < 0; }
template <class T> d_inline bool d_signbit(T x) { return x < 0; }
d_inline float d_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
d_inline double d_fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
template <class T> d_inline T d_fma(T a, T b, T c) { return (T)(a * b + c); }
d_inline float d_sqrt(float x) { return __builtin_sqrtf(x); }
d_inline double d_sqrt(double x) { return __builtin_sqrt(x); }
d_inline float d_floor(float x) { return __builtin_floorf(x); }
d_inline double d_floor(double x) { return __builtin_floor(x); }
d_inline float d_ceil(float x) { return __builtin_ceilf(x); }
d_inline double d_ceil(double x) { return __builtin_ceil(x); }
d_inline float d_trunc(float x) { return __builtin_truncf(x); }
d_inline double d_trunc(double x) { return __builtin_trunc(x); }
d_inline float d_round(float x) { return __builtin_rintf(x); }
d_inline double d_round(double x) { return __builtin_rint(x); }
d_inline float d_copysign(float x, float y) { return __builtin_copysignf(x, y); }
d_inline double d_copysign(double x, double y) { return __builtin_copysign(x, y); }
d_inline bool d_isinf(float x) { return __builtin_fabsf(x) == d_inff; }
d_inline bool d_isinf(double x) { return __builtin_fabs(x) == d_inf; }
template <class T> d_inline T d_bitwise_not(T x) { return (T)~x; }
d_inline bool d_bitwise_not(bool x) { return !x; }
template <class T> d_inline T d_lshift(T x, T n) {
  return (n < 0) | (n >= (T)(8 * sizeof(T))) ? (T)0 : (T)((uint64_t)x << n);
}
template <class T> d_inline T d_rshift(T x, T n) {
  const T most = (T)(8 * sizeof(T) - 1);
  return (T)(x >> ((n < 0) | (n > most) ? most : n));
}
template <class T> d_inline T d_pow(T x, T n) {
  if (n < 0) return x == (T)1 ? (T)1 : x == (T)-1 ? (T)((n % 2) ? -1 : 1) : (T)0;
  T result = 1;
  for (; n; n /= 2) { if (n % 2) result = (T)(result * x); x = (T)(x * x); }
  return result;
}

// Arithmetic of sizes, rounded towards minus infinity as Python's.
d_inline int64_t d_size_div(int64_t a, int64_t b) { return a / b - ((a % b != 0) & ((a ^ b) < 0)); }
d_inline int64_t d_size_mod(int64_t a, int64_t b) { return a - d_size_div(a, b) * b; }

// Integer division by zero is reported through `status`, as PyTorch raises it.
#define d_status status
template <class T> d_inline T d_trunc_div(T a, T b, int64_t* status, int site) {
  if (b == 0) { d_report(status, 2, site); return 0; }
  return b == (T)-1 ? (T)(0 - (uint64_t)a) : (T)(a / b);
}
template <class T> d_inline T d_floor_div(T a, T b, int64_t* status, int site) {
  if (b == 0) { d_report(status, 2, site); return 0; }
  if (b == (T)-1) return (T)(0 - (uint64_t)a);
  const T q = (T)(a / b);
  return (T)(q - ((a % b != 0) & ((a < 0) != (b < 0))));
}
template <class T> d_inline T d_remainder(T a, T b, int64_t* status, int site) {
  if (b == 0) { d_report(status, 2, site); return 0; }
  if (b == (T)-1) return 0;
  const T r = (T)(a % b);
  return (T)((r != 0) & ((r < 0) != (b < 0)) ? r + b : r);
}
template <class T> d_inline T d_fmod(T a, T b, int64_t* status, int site) {
  if (b == 0) { d_report(status, 2, site); return 0; }
  return b == (T)-1 ? (T)0 : (T)(a % b);
}
#define d_float_division(T, MOD) \
  d_inline T d_trunc_div(T a, T b, int64_t*, int) { return d_trunc(a / b); } \
  d_inline T d_fmod(T a, T b, int64_t*, int) { return MOD(a, b); } \
  d_inline T d_remainder(T a, T b, int64_t*, int) { \
    const T r = MOD(a, b); \
    return (r != 0) & ((r < 0) != (b < 0)) ? r + b : r; \
  } \
  d_inline T d_floor_div(T a, T b, int64_t*, int) { \
    if (b == 0) return a / b; \
    const T r = MOD(a, b); \
    T q = (a - r) / b; \
    if ((r != 0) & ((r < 0) != (b < 0))) q -= 1; \
    if (q == 0) return d_copysign((T)0, a / b); \
    const T f = d_floor(q); \
    return q - f > (T)0.5 ? f + 1 : f; \
  }
d_float_division(float, fmodf) d_float_division(double, fmod)

#if defined(__AVX512F__)
#define D_VECTOR_BYTES 64
#elif defined(__AVX__)
#define D_VECTOR_BYTES 32
#else
#define D_VECTOR_BYTES 16
#endif

// ---- results that no cache keeps until they are read ---------------------------------------------
typedef float d_far __attribute__((vector_size(D_VECTOR_BYTES)));
#if defined(__clang__)
#define d_store_far(to, v) __builtin_nontemporal_store(v, (d_far*)(to))
#elif defined(__AVX512F__)
#define d_store_far(to, v) __builtin_ia32_movntps512(to, v)
#elif defined(__AVX__)
#define d_store_far(to, v) __builtin_ia32_movntps256(to, v)
#elif defined(__SSE__)
#define d_store_far(to, v) __builtin_ia32_movntps(to, v)
#else
d_inline void d_store_far(float* to, d_far v) { __builtin_memcpy(to, &v, sizeof(v)); }
#endif
// Whole lines written past the caches, which then need not read them first.
template <class T, int N> d_inline void d_stream(T* to, const T (&from)[N]) {
  constexpr int bytes = N * (int)sizeof(T);
  if ((uint64_t)to % D_VECTOR_BYTES) { __builtin_memcpy(to, from, bytes); return; }
  for (int k = 0; k < bytes; k += D_VECTOR_BYTES) {
    d_far v;
    __builtin_memcpy(&v, (const char*)from + k, sizeof(v));
    d_store_far((float*)((char*)to + k), v);
  }
}
// Other threads see what was written so only after this.
d_inline void d_stream_end() {
#if defined(__SSE__)
  __builtin_ia32_sfence();
#else
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

// ---- tiles turned in registers -----------------------------------------------------------------
template <int...> struct d_pack {};
// Lanes of a and, counted on, of b; M: a vector of as many integers.
#if defined(__clang__)
#define D_SHUFFLE(a, b, M, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
template <class, int... j> struct d_packed { typedef d_pack<j...> type; };
template <int N> struct d_range { typedef typename __make_integer_seq<d_packed, int, N>::type type; };
#else
#define D_SHUFFLE(a, b, M, ...) __builtin_shuffle(a, b, M{__VA_ARGS__})
template <int N> struct d_range { typedef d_pack<__integer_pack(N)...> type; };
#endif
template <int size> struct d_signed;
template <> struct d_signed<1> { typedef int8_t type; };
template <> struct d_signed<2> { typedef int16_t type; };
template <> struct d_signed<4> { typedef int32_t type; };
template <> struct d_signed<8> { typedef int64_t type; };
// Blocks of s elements change places between two rows that are s apart.
template <int N, int s, class V, class M, int... j>
d_inline void d_exchange(V& a, V& b, d_pack<j...>) {
  const V low = D_SHUFFLE(a, b, M, ((j & s) ? N + j - s : j)...);
  b = D_SHUFFLE(a, b, M, ((j & s) ? N + j : j + s)...);
  a = low;
}
template <int N, int s, class V, class M> d_inline void d_exchanges(V* rows) {
  if constexpr (s > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i)
      if (!(i & s)) d_exchange<N, s, V, M>(rows[i], rows[i + s], typename d_range<N>::type());
    d_exchanges<N, s / 2, V, M>(rows);
  }
}
template <bool far, class T, int N>
d_inline void d_turn_square(const T* from, int64_t stride, T* to, int64_t step) {
  typedef T V __attribute__((vector_size(N * sizeof(T))));
  typedef typename d_signed<sizeof(T)>::type I;
  typedef I M __attribute__((vector_size(N * sizeof(T))));
  V rows[N];
  // The square below comes next; its lines are too far apart for the processor to foresee.
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) __builtin_prefetch(from + (i + N) * stride);
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) __builtin_memcpy(&rows[i], from + i * stride, sizeof(V));
  d_exchanges<N, N / 2, V, M>(rows);
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) {
    if constexpr (far) d_store_far((float*)(to + i * step), (d_far)rows[i]);
    else __builtin_memcpy(to + i * step, &rows[i], sizeof(V));
  }
}
// to[c * K + l] = from[l * stride + c] for c < width, l < K: colours of an image, side by side.
template <int K, class T>
d_inline void d_interleave(const T* __restrict from, int64_t stride, T* __restrict to, int64_t width) {
#pragma omp simd
  for (int64_t c = 0; c < width; ++c) {
#pragma GCC unroll 4
    for (int l = 0; l < K; ++l) to[c * K + l] = from[l * stride + c];
  }
}
// to[c * step + l] = from[l * stride + c] for c < width, l < height: whole squares in registers.
template <bool far, class T>
d_inline void d_turn_by_squares(const T* from, int64_t stride, T* to, int64_t step, int64_t width,
                                int64_t height) {
  constexpr int fit = D_VECTOR_BYTES / (int)sizeof(T), N = fit < 16 ? fit : 16;
  const int64_t columns = width / N * N, rows = height / N * N;
  for (int64_t c = 0; c < columns; c += N)
    for (int64_t l = 0; l < rows; l += N)
      d_turn_square<far, T, N>(from + l * stride + c, stride, to + c * step + l, step);
  for (int64_t l = 0; l < height; ++l)
    for (int64_t c = l < rows ? columns : 0; c < width; ++c) to[c * step + l] = from[l * stride + c];
}
template <class T>
d_inline void d_turn(const T* from, int64_t stride, T* to, int64_t step, int64_t width, int64_t height) {
  if (height == 2 && step == 2) return d_interleave<2>(from, stride, to, width);
  if (height == 3 && step == 3) return d_interleave<3>(from, stride, to, width);
  if (height == 4 && step == 4) return d_interleave<4>(from, stride, to, width);
  d_turn_by_squares<false>(from, stride, to, step, width, height);
}
// The same past the caches, where a step is whole cache lines.
template <class T>
d_inline void d_turn_far(const T* from, int64_t stride, T* to, int64_t step, int64_t width, int64_t height) {
  if ((uint64_t)to % D_VECTOR_BYTES) return d_turn_by_squares<false>(from, stride, to, step, width, height);
  d_turn_by_squares<true>(from, stride, to, step, width, height);
}

// ---- running sums ------------------------------------------------------------------------------
template <int N, int s, class V, class M, int... j> d_inline V d_moved_up(V x, d_pack<j...>) {
  return D_SHUFFLE(V{}, x, M, (j < s ? j : N + j - s)...);
}
template <int N, int s, class V, class M> d_inline V d_prefix(V x) {
  if constexpr (s < N)
    return d_prefix<N, 2 * s, V, M>(x + d_moved_up<N, s, V, M>(x, typename d_range<N>::type()));
  else
    return x;
}
// x[i] = total + x[0] + ... + x[i], a vector at a time: from one to the next leads a single addition.
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
    v = d_prefix<N, 1, V, M>(v);
    const V sum = before + v;
    __builtin_memcpy(x + i, &sum, sizeof(V));
    before = before + v[N - 1];
  }
  total = before[0];
  for (; i < n; ++i) x[i] = total = (T)(total + x[i]);
}

// ---- indices from memory -----------------------------------------------------------------------
// The place before which there are `share` places and rows, first[place] being the rows before a place.
d_inline int64_t d_share(const int64_t* first, int64_t places, int64_t share) {
  int64_t low = 0, high = places;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (first[middle] + middle < share) low = middle + 1; else high = middle;
  }
  return low;
}
d_inline int64_t d_check_index(
    int64_t i, int64_t n, int64_t* status, int site, bool active = true) {
  if (i >= 0 && i < n) return i;
  if (active) d_report(status, 1, site, i, n);
  return 0;
}
d_inline int64_t d_wrap_index(
    int64_t i, int64_t n, int64_t* status, int site, bool active = true) {
  const int64_t at = i < 0 ? i + n : i;
  if (at >= 0 && at < n) return at;
  if (active) d_report(status, 1, site, i, n);
  return 0;
}

// ---- exponentials, hyperbolic tangent and the error function ----------------------------------------
// Inlined, so that a loop keeps its constants in registers; short chains of operations, since few
// iterations fit into the processor's window at once.
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
d_inline float d_madd(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
d_inline float d_madd(float a, float b, float c) { return a * b + c; }
#endif
// exp(x) without its power of two, which is left in the upper bits of `power`, to be added to the
// result's. Coefficients: Moshier, Cephes (1992).
d_inline float d_exp_fraction(float x, uint32_t& power) {
  const float shift = 12582912.0f;  // adding it rounds to an integer, left in the lowest bits
  const float moved = d_madd(x, 1.44269504088896341f, shift), n = moved - shift;
  const float r = d_madd(n, 2.12194440e-4f, d_madd(n, -0.693359375f, x)), s = r * r;
  const float a = d_madd(1.9875691500e-4f, r, 1.3981999507e-3f);
  const float b = d_madd(8.3334519073e-3f, r, 4.1665795894e-2f);
  const float c = d_madd(1.6666665459e-1f, r, 5.0000001201e-1f);
  power = d_bits(moved) << 23;
  return d_madd(d_madd(d_madd(a, s, b), s, c), s, r) + 1.0f;
}
// Within 2 units in the last place. The power of two is applied in two steps, so that results may be
// subnormal or infinite.
d_inline float d_exp(float x) {
  uint32_t power;
  const float p = d_exp_fraction(x, power);
  const float first = d_float(power + (x < 0 ? 191u << 23 : 63u << 23)), second = x < 0 ? 0x1p-64f : 0x1p64f;
  const float scaled = p * first * second, low = x < -104.0f ? 0.0f : scaled;
  return x > 89.0f ? d_inff : low;
}
// exp(x) for x that is not above zero by more than rounding; what is subnormal becomes zero. Within 2
// units in the last place above -20, 4 below: five coefficients, and log(2) as one number where its
// product is not rounded, since a sum of weights is bound by these operations and not by memory.
d_inline float d_exp_weight(float x) {
  const float shift = 12582912.0f + 127.0f;  // the power of two is left with its bias
  const float moved = d_madd(x, 1.44269504088896341f, shift), n = moved - shift;
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  const float r = d_madd(n, -0.693147182f, x), s = r * r;
#else
  const float r = d_madd(n, 2.12194440e-4f, d_madd(n, -0.693359375f, x)), s = r * r;
#endif
  const float a = d_madd(1.66671167e-1f, r, 4.99992281e-1f), b = d_madd(8.31246788e-3f, r, 4.18906524e-2f);
  const float p = d_madd(d_madd(b, s, a), s, r + 1.0f);
  const float scaled = p * d_float(d_bits(moved) << 23);
  return x < -87.0f ? 0.0f : scaled;
}
// Within 1.01 units in the last place: 1 - exp(r(|x|)) far from zero, a polynomial near it.
// Coefficients: Juffa, a faithfully rounded erff (2015).
d_inline float d_erf(float x) {
  const float size = d_abs(x), t = size > 4.0f ? 4.0f : size, s = x * x, q = t * t;
  float r = d_madd(-1.72853470e-5f, t, 3.83197126e-4f);
  r = d_madd(r, q, d_madd(-3.88396438e-3f, t, 2.42546219e-2f));
  r = d_madd(r, t, -1.06777877e-1f);
  r = d_madd(r, t, -6.34846687e-1f);
  r = d_madd(r, t, -1.28717512e-1f);
  r = d_madd(r, t, -t);
  uint32_t power;
  const float e = d_exp_fraction(r, power);
  const float far = d_copysign(1.0f - d_float(d_bits(e) + power), x);
  float p = d_madd(-5.96761703e-4f, s, 4.99119423e-3f);
  p = d_madd(p, s, -2.67681349e-2f);
  p = d_madd(p, s, 1.12819925e-1f);
  p = d_madd(p, s, -3.76125336e-1f);
  p = d_madd(p, s, 1.28379166e-1f);
  const float near = d_madd(p, x, x);
  return size > 0.927734375f ? far : near;
}
// (1 + erf(x / sqrt(2))) / 2 within 2e-7: x P(x^2) / Q(x^2), fitted over |x| < 5.5 to an error of 7e-9
// before rounding.
d_inline float d_normal_cdf(float x) {
  const float s = x * x, q = s * s;
  const float p0 = d_madd(2.27495356e-08f, s, 6.35211381e-06f);
  const float p1 = d_madd(1.68824321e-04f, s, 4.67725238e-03f);
  const float p2 = d_madd(3.38525102e-02f, s, 3.98942232e-01f);
  const float q0 = d_madd(1.19750871e-06f, s, 7.36471047e-05f);
  const float q1 = d_madd(1.88443705e-03f, s, 2.86457930e-02f);
  const float q2 = d_madd(2.51521587e-01f, s, 1.0f);
  const float near = x * d_madd(d_madd(p0, q, p1), q, p2) / d_madd(d_madd(q0, q, q1), q, q2);
  return 0.5f + (s >= 30.25f ? d_copysign(0.5f, x) : near);
}
d_inline double d_normal_cdf(double x) { return 0.5 * (1 + erf(x * 0.70710678118654752440)); }
// (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2 in the same form, fitted over |x| < 4.9.
d_inline float d_normal_cdf_tanh(float x) {
  const float s = x * x, q = s * s;
  const float p0 = d_madd(2.10323584e-08f, s, 6.70259540e-06f);
  const float p1 = d_madd(1.34234422e-04f, s, 3.61711626e-03f);
  const float p2 = d_madd(3.08245302e-02f, s, 3.98942298e-01f);
  const float q0 = d_madd(1.20515735e-06f, s, 7.44040872e-05f);
  const float q1 = d_madd(1.29630899e-03f, s, 2.44890372e-02f);
  const float q2 = d_madd(2.44757673e-01f, s, 1.0f);
  const float near = x * d_madd(d_madd(p0, q, p1), q, p2) / d_madd(d_madd(q0, q, q1), q, q2);
  return 0.5f + (s >= 24.01f ? d_copysign(0.5f, x) : near);
}
d_inline double d_normal_cdf_tanh(double x) {
  return 0.5 * (1 + tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x)));
}
// Within 3 units in the last place: x P(x^2) / Q(x^2), fitted over |x| < 9 to a relative error of 2e-8
// before rounding, which may carry it beyond one.
d_inline float d_tanh(float x) {
  const float s = x * x, q = s * s, size = d_abs(x);
  const float p0 = d_madd(1.33195782e-08f, s, 2.05839341e-05f), p1 = d_madd(3.49406616e-03f, s, 1.33797460e-01f);
  const float q0 = d_madd(7.76225205e-07f, s, 3.28314158e-04f), q1 = d_madd(2.58711979e-02f, s, 4.67130613e-01f);
  const float near = size * d_madd(d_madd(p0, q, p1), s, 1.0f) / d_madd(d_madd(q0, q, q1), s, 1.0f);
  return d_copysign((s >= 81.0f) | (near > 1.0f) ? 1.0f : near, x);
}

// ---- special functions ---------------------------------------------------------------------------
// Giles, "Approximating the erfinv function" (2010), with one Newton step for full precision.
d_inline double d_erfinv(double y) {
  if (!(y > -1 && y < 1)) return y == 1 ? d_inf : y == -1 ? -d_inf : d_nan;
  double w = -log((1 - y) * (1 + y)), p;
  if (w < 5) {
    w -= 2.5;
    p = 2.81022636e-08; p = 3.43273939e-07 + p * w; p = -3.5233877e-06 + p * w;
    p = -4.39150654e-06 + p * w; p = 0.00021858087 + p * w; p = -0.00125372503 + p * w;
    p = -0.00417768164 + p * w; p = 0.246640727 + p * w; p = 1.50140941 + p * w;
  } else {
    w = d_sqrt(w) - 3;
    p = -0.000200214257; p = 0.000100950558 + p * w; p = 0.00134934322 + p * w;
    p = -0.00367342844 + p * w; p = 0.00573950773 + p * w; p = -0.0076224613 + p * w;
    p = 0.00943887047 + p * w; p = 1.00167406 + p * w; p = 2.83297682 + p * w;
  }
  double x = p * y;
  for (int k = 0; k < 2; ++k) {
    const double off = y < 0 ? erfc(-x) - (1 + y) : (1 - y) - erfc(x);
    x -= off * 0.886226925452758013649 * exp(x * x);
  }
  return x;
}
d_inline float d_erfinv(float y) { return (float)d_erfinv((double)y); }
// Recurrence up to 10, then the asymptotic series (Abramowitz and Stegun 6.3.18); reflection below 0.
d_inline double d_digamma(double x) {
  if (x == 0) return d_copysign(d_inf, -x);
  double result = 0;
  if (x < 0) {
    if (x == d_floor(x)) return d_nan;
    const double pi = 3.14159265358979323846;
    const double whole = d_trunc(x);
    result = -pi / tan(pi * (x - whole));
    x = 1 - x;
  }
  while (x < 10) { result -= 1 / x; x += 1; }
  const double z = 1 / (x * x);
  const double series = z * (1.0 / 12 - z * (1.0 / 120 - z * (1.0 / 252 - z * (1.0 / 240 -
      z * (1.0 / 132 - z * (691.0 / 32760 - z / 12))))));
  return result + log(x) - 0.5 / x - series;
}
d_inline float d_digamma(float x) { return (float)d_digamma((double)x); }

// ---- random numbers: Philox 4x32-7 (Salmon et al., SC 2011), as the GPU's ----------------------
// Neighbours share a call: each element has one of its four words, or a pair of them.
struct d_draws { uint32_t w[4]; };
d_inline d_draws d_philox(int64_t seed, int64_t site, int64_t counter) {
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)((uint64_t)seed >> 32);
  uint32_t c0 = (uint32_t)counter, c1 = (uint32_t)((uint64_t)counter >> 32);
  uint32_t c2 = (uint32_t)site, c3 = 0;
#pragma GCC unroll 7
  for (int round = 0; round < 7; ++round) {
    const uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
    const uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
    c1 = (uint32_t)p1; c3 = (uint32_t)p0; c0 = n0; c2 = n2;
    k0 += 0x9E3779B9u; k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}
d_inline uint64_t d_joined(uint32_t low, uint32_t high) { return ((uint64_t)high << 32) | low; }
d_inline uint64_t d_philox_pair(int64_t seed, int64_t site, int64_t index) {
  const d_draws c = d_philox(seed, site, index >> 1);
  return index & 1 ? d_joined(c.w[2], c.w[3]) : d_joined(c.w[0], c.w[1]);
}
d_inline int64_t d_philox_bits(int64_t seed, int64_t site, int64_t index) {
  return (int64_t)(d_philox_pair(seed, site, index) >> 1);
}
d_inline float d_unit(uint32_t bits) { return (float)(int32_t)(bits >> 8) * 0x1p-24f; }
d_inline double d_unit(uint64_t bits) { return (double)(int64_t)(bits >> 11) * 0x1p-53; }
d_inline float d_philox_uniform_f(int64_t seed, int64_t site, int64_t index) {
  const d_draws c = d_philox(seed, site, index >> 2);
  const uint32_t low = index & 1 ? c.w[1] : c.w[0], high = index & 1 ? c.w[3] : c.w[2];
  return d_unit(index & 2 ? high : low);
}
d_inline double d_philox_uniform_d(int64_t seed, int64_t site, int64_t index) {
  return d_unit(d_philox_pair(seed, site, index));
}
// Box and Muller (1958): two normal numbers from two uniform ones, a quarter of a turn apart.
d_inline float d_philox_normal_f(int64_t seed, int64_t site, int64_t index) {
  const uint64_t bits = d_philox_pair(seed, site, index >> 1);
  const float u = d_unit((uint32_t)bits);
  const float turn = d_unit((uint32_t)(bits >> 32)) - 0.25f * (float)(int32_t)(index & 1);
  return d_sqrt(-2.0f * logf(1.0f - u)) * cosf(6.28318530717958647692f * turn);
}
d_inline double d_philox_normal_d(int64_t seed, int64_t site, int64_t index) {
  const d_draws c = d_philox(seed, site, index);
  const double u = d_unit(d_joined(c.w[0], c.w[1])), v = d_unit(d_joined(c.w[2], c.w[3]));
  return d_sqrt(-2.0 * log(1.0 - u)) * cos(6.28318530717958647692 * v);
}
