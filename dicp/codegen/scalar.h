// Scalar functions of generated kernels in C-family languages: arithmetic, conversions and random
// numbers with PyTorch's rules. It reads no header, and it compiles for a host and for a device.
//
// A language may define before it includes this file:
//   d_inline        the qualifiers of a function: `static inline ..`, or `static __device__ ..`
//   D_NATIVE(name)  a function of the C mathematical library that one instruction or builtin does
//   D_DECLARED      the functions of the C mathematical library are declared already
//   D_NATIVE_MATH   exp, tanh, erf and what is made of them call that library in float, too; else
//                   they are polynomials, which a compiler vectorizes
//   D_HALVES        d_bf16, d_f16 and their conversions (d_from_bf16, d_to_bf16, ..) are defined
//   D_FMA           d_madd is one rounding; known by itself for x86-64 and ARM
//   D_MAXIMUM(a, b), D_MINIMUM(a, b)   of floats, NaN if one is, where the hardware has that
//   D_CLAIM(p, x)   whether *p was 0 and has become x, atomically
//   D_COLD          the qualifiers of a function that reports an error
//   D_UNROLL(n)     a pragma that unrolls the next loop n times
#pragma once
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
#ifndef D_HALVES
typedef uint16_t d_bf16;
typedef uint16_t d_f16;
#endif
#ifndef INT64_MIN
#define INT64_MIN (-0x7fffffffffffffffL - 1)
#endif
#ifndef d_inline
#define d_inline static inline __attribute__((always_inline))
#endif
#ifndef D_NATIVE
#define D_NATIVE(name) __builtin_##name
#endif
#ifndef D_CLAIM
#define D_CLAIM(place, value) __sync_bool_compare_and_swap(place, (int64_t)0, value)
#endif
#ifndef D_COLD
#define D_COLD static __attribute__((noinline, cold))
#endif
#ifndef D_UNROLL
#define D_UNROLL(n) D_UNROLL_PRAGMA(GCC unroll n)
#define D_UNROLL_PRAGMA(text) _Pragma(#text)
#endif

static constexpr double d_inf = __builtin_inf(), d_nan = __builtin_nan("");
static constexpr float d_inff = __builtin_inff(), d_nanf = __builtin_nanf("");

// ---- errors ------------------------------------------------------------------------------------
// The first thread that fails fills `status`: the code; the place in the kernel, or the bytes that
// could not be allocated; and, for an index, its value and the size it must lie below.
D_COLD void d_report(
    int64_t* status, int64_t code, int64_t site, int64_t index = 0, int64_t size = 0) {
  if (!D_CLAIM(status, code)) return;
  status[1] = site; status[2] = index; status[3] = size;
}

// ---- the C mathematical library ----------------------------------------------------------------
#ifndef D_DECLARED
#define d_declare1(name) extern "C" double name(double); extern "C" float name##f(float);
#define d_declare2(name) \
  extern "C" double name(double, double); extern "C" float name##f(float, float);
d_declare1(exp) d_declare1(exp2) d_declare1(expm1) d_declare1(log) d_declare1(log2)
d_declare1(log10) d_declare1(log1p) d_declare1(sin) d_declare1(cos) d_declare1(tan)
d_declare1(asin) d_declare1(acos) d_declare1(atan) d_declare1(sinh) d_declare1(cosh)
d_declare1(tanh) d_declare1(asinh) d_declare1(acosh) d_declare1(atanh) d_declare1(erf)
d_declare1(erfc) d_declare1(lgamma)
d_declare2(atan2) d_declare2(hypot) d_declare2(pow) d_declare2(fmod)
#endif
#define d_math1(name) \
  d_inline double d_##name(double x) { return name(x); } \
  d_inline float d_##name(float x) { return name##f(x); }
#define d_math2(name) \
  d_inline double d_##name(double x, double y) { return name(x, y); } \
  d_inline float d_##name(float x, float y) { return name##f(x, y); }
d_math1(exp2) d_math1(expm1) d_math1(log) d_math1(log2) d_math1(log10) d_math1(log1p)
d_math1(sin) d_math1(cos) d_math1(tan) d_math1(asin) d_math1(acos) d_math1(atan)
d_math1(sinh) d_math1(cosh) d_math1(asinh) d_math1(acosh) d_math1(atanh)
d_math1(erfc)
d_math2(atan2) d_math2(hypot) d_math2(pow)
d_inline double d_lgamma(double x) { return lgamma(x); }
d_inline double d_exp(double x) { return exp(x); }
d_inline double d_tanh(double x) { return tanh(x); }
d_inline double d_erf(double x) { return erf(x); }

// ---- 16-bit floats: stored as bits, computed in float --------------------------------------
d_inline uint32_t d_bits(float x) { uint32_t u; D_NATIVE(memcpy)(&u, &x, 4); return u; }
d_inline float d_float(uint32_t u) { float x; D_NATIVE(memcpy)(&x, &u, 4); return x; }
// -x, for g++ no negation: it joins one and a sum into a difference.
d_inline float d_flipped(float x) { return d_float(d_bits(x) ^ 0x80000000u); }
d_inline double d_flipped(double x) {
  uint64_t u;
  D_NATIVE(memcpy)(&u, &x, 8);
  u ^= (uint64_t)1 << 63;
  D_NATIVE(memcpy)(&x, &u, 8);
  return x;
}
#ifndef D_HALVES
d_inline float d_from_bf16(d_bf16 x) { return d_float((uint32_t)x << 16); }
d_inline d_bf16 d_to_bf16(float x) {
  const uint32_t u = d_bits(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
  return x != x ? (d_bf16)0x7fc0 : (d_bf16)rounded;
}
d_inline float d_from_f16(d_f16 h) {
  // No intermediate is a subnormal float, so the result is right where subnormals are flushed to 0.
  const uint32_t sign = ((uint32_t)h & 0x8000u) << 16, size = (uint32_t)h & 0x7fffu;
  const uint32_t small = d_bits(d_float(0x3f000000u | size) - 0.5f);
  const uint32_t normal = (size << 13) + (size >= 0x7c00u ? 224u << 23 : 112u << 23);
  return d_float(sign | (size < 0x400u ? small : normal));
}
d_inline d_f16 d_to_f16(float x) {
  const uint32_t sign = d_bits(x) & 0x80000000u;
  const uint32_t u = d_bits(x) ^ sign;
  // Subnormal results: adding 0.5 aligns the significand and rounds it to nearest even.
  const uint32_t small = d_bits(d_float(u) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (u + 0xc8000fffu + ((u >> 13) & 1)) >> 13;
  const uint32_t large = u > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t finite = u < 0x38800000u ? small : normal;
  const uint32_t magnitude = u >= 0x47800000u ? large : finite;
  return (d_f16)(magnitude | (sign >> 16));
}
#endif
d_inline float d_round_bf16(float x) { return d_from_bf16(d_to_bf16(x)); }
d_inline float d_round_f16(float x) { return d_from_f16(d_to_f16(x)); }

// ---- floats to integers ------------------------------------------------------------------------
// NaN and values out of range give the lowest integer, as PyTorch does on x86; in C++ that conversion
// is undefined. An integer type below 32 bits takes the lowest bits of an int32_t.
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

// A byte takes the lowest bits of an int64_t: it holds any double of that range modulo 256.
d_inline uint8_t d_to_uint8(double x) {
  const double whole = D_NATIVE(trunc)(x);
  return (uint8_t)d_to_int32(whole - 256 * D_NATIVE(floor)(whole * 0x1p-8));
}

// ---- limits ------------------------------------------------------------------------------------
template <class T> struct d_limits;
#define d_define_limits(T, low, high) \
  template <> struct d_limits<T> { static constexpr T lowest = low, highest = high; };
d_define_limits(float, -d_inff, d_inff) d_define_limits(double, -d_inf, d_inf)
d_define_limits(int8_t, -128, 127) d_define_limits(uint8_t, 0, 255)
d_define_limits(bool, false, true) d_define_limits(int16_t, -32768, 32767)
d_define_limits(int32_t, -2147483647 - 1, 2147483647)
d_define_limits(int64_t, INT64_MIN, 0x7fffffffffffffffL)
template <class T> d_inline T d_lowest() { return d_limits<T>::lowest; }
template <class T> d_inline T d_highest() { return d_limits<T>::highest; }

// ---- arithmetic with PyTorch's rules ---------------------------------------------------------
// NaNs are found by their bits, and each choice is one select: g++ does not vectorize comparisons that
// are joined by ||.
// The magnitude bits of a number grow with its magnitude; those of a NaN are above infinity's.
d_inline uint32_t d_size_bits(float x) { return d_bits(x) & 0x7fffffffu; }
d_inline uint64_t d_size_bits(double x) {
  uint64_t u; D_NATIVE(memcpy)(&u, &x, 8);
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
#ifdef D_MAXIMUM
d_inline float d_maximum(float a, float b) { return D_MAXIMUM(a, b); }
d_inline float d_minimum(float a, float b) { return D_MINIMUM(a, b); }
#endif
template <class T> d_inline T d_fmax(T a, T b) {
  const T m = b > a ? b : a;
  return d_isnan(a) ? b : m;
}
template <class T> d_inline T d_fmin(T a, T b) {
  const T m = b < a ? b : a;
  return d_isnan(a) ? b : m;
}
// Reduces pairs of a value and its position: a NaN beats every number, and the first of equals wins.
// "not at most" holds for a NaN, too.
#define d_pair_reduction(kind, at_most) \
  template <class T> d_inline bool d_better_##kind(T a, T b) { return !(a at_most b) & !d_isnan(b); } \
  template <class T, class Place> d_inline void d_take_##kind(T x, int64_t at, T& best, Place& best_at) { \
    const bool better = d_better_##kind(x, best); \
    best = better ? x : best; \
    best_at = better ? (Place)at : best_at; \
  }
d_pair_reduction(max, <=) d_pair_reduction(min, >=)

d_inline float d_abs(float x) { return D_NATIVE(fabsf)(x); }
d_inline double d_abs(double x) { return D_NATIVE(fabs)(x); }
template <class T> d_inline T d_abs(T x) { return x < 0 ? (T)-x : x; }
template <class T> d_inline T d_sign(T x) { return (T)((x > (T)0) - (x < (T)0)); }
d_inline bool d_signbit(float x) { return (int32_t)d_bits(x) < 0; }
d_inline bool d_signbit(double x) { int64_t u; D_NATIVE(memcpy)(&u, &x, 8); return u < 0; }
template <class T> d_inline bool d_signbit(T x) { return x < 0; }
d_inline float d_fma(float a, float b, float c) { return D_NATIVE(fmaf)(a, b, c); }
d_inline double d_fma(double a, double b, double c) { return D_NATIVE(fma)(a, b, c); }
template <class T> d_inline T d_fma(T a, T b, T c) { return (T)(a * b + c); }
d_inline float d_sqrt(float x) { return D_NATIVE(sqrtf)(x); }
d_inline double d_sqrt(double x) { return D_NATIVE(sqrt)(x); }
d_inline float d_floor(float x) { return D_NATIVE(floorf)(x); }
d_inline double d_floor(double x) { return D_NATIVE(floor)(x); }
d_inline float d_ceil(float x) { return D_NATIVE(ceilf)(x); }
d_inline double d_ceil(double x) { return D_NATIVE(ceil)(x); }
d_inline float d_trunc(float x) { return D_NATIVE(truncf)(x); }
d_inline double d_trunc(double x) { return D_NATIVE(trunc)(x); }
d_inline float d_round(float x) { return D_NATIVE(rintf)(x); }
d_inline double d_round(double x) { return D_NATIVE(rint)(x); }
d_inline float d_copysign(float x, float y) { return D_NATIVE(copysignf)(x, y); }
d_inline double d_copysign(double x, double y) { return D_NATIVE(copysign)(x, y); }
d_inline bool d_isinf(float x) { return D_NATIVE(fabsf)(x) == d_inff; }
d_inline bool d_isinf(double x) { return D_NATIVE(fabs)(x) == d_inf; }
template <class T> d_inline T d_bitwise_not(T x) { return (T)~x; }
d_inline bool d_bitwise_not(bool x) { return !x; }
template <class T> d_inline T d_lshift(T x, T n) {
  return (n < 0) | (n >= (T)(8 * sizeof(T))) ? (T)0 : (T)((uint64_t)x << n);
}
template <class T> d_inline T d_rshift(T x, T n) {
  const T most = (T)(8 * sizeof(T) - ((T)-1 < 0));  // of an unsigned type all bits are shifted out
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

// Integer division by zero is reported through `status`; PyTorch raises an error on the CPU.
template <class T> d_inline bool d_is_minus_one(T b) { return (T)-1 < (T)0 && b == (T)-1; }
template <class T> d_inline T d_trunc_div(T a, T b, int64_t* status, int site) {
  if (b == 0) { d_report(status, 2, site); return 0; }
  return d_is_minus_one(b) ? (T)(0 - (uint64_t)a) : (T)(a / b);
}
template <class T> d_inline T d_floor_div(T a, T b, int64_t* status, int site) {
  if (b == 0) { d_report(status, 2, site); return 0; }
  if (d_is_minus_one(b)) return (T)(0 - (uint64_t)a);
  const T q = (T)(a / b);
  return (T)(q - ((a % b != 0) & ((a < 0) != (b < 0))));
}
template <class T> d_inline T d_remainder(T a, T b, int64_t* status, int site) {
  if (b == 0) { d_report(status, 2, site); return 0; }
  if (d_is_minus_one(b)) return 0;
  const T r = (T)(a % b);
  // A mask, not a choice: as a branch it would be mispredicted for every other element.
  return (T)(r + (b & -(int64_t)((r != 0) & ((r < 0) != (b < 0)))));
}
template <class T> d_inline T d_fmod(T a, T b, int64_t* status, int site) {
  if (b == 0) { d_report(status, 2, site); return 0; }
  return d_is_minus_one(b) ? (T)0 : (T)(a % b);
}
// The numbers of one sign, in order of size, are consecutive integers.
#define d_define_nextafter(T, U) \
  d_inline T d_nextafter(T x, T y) { \
    U from, to; \
    D_NATIVE(memcpy)(&from, &x, sizeof(x)); \
    D_NATIVE(memcpy)(&to, &y, sizeof(y)); \
    const U sign = (U)1 << (8 * sizeof(T) - 1), step = (x < y) == (x > 0) ? (U)1 : (U)-1; \
    const U next = from << 1 ? from + step : (to & sign) | 1; \
    T found; \
    D_NATIVE(memcpy)(&found, &next, sizeof(next)); \
    return d_isnan(x) | d_isnan(y) ? x + y : x == y ? y : found; \
  }
d_define_nextafter(float, uint32_t) d_define_nextafter(double, uint64_t)
#define d_float_division(T, MOD) \
  d_inline T d_trunc_div(T a, T b, int64_t*, int) { return d_trunc(a / b); } \
  d_inline T d_fmod(T a, T b, int64_t*, int) { return MOD(a, b); } \
  d_inline T d_remainder(T a, T b, int64_t*, int) { \
    const T r = MOD(a, b); \
    return (r != 0) & ((r < 0) != (b < 0)) ? r + b : r; \
  } \
  d_inline T d_floor_div(T a, T b, int64_t*, int) { \
    const T r = MOD(a, b), ratio = a / b, p = (a - r) / b; \
    const T q = (r != 0) & ((r < 0) != (b < 0)) ? p - 1 : p; \
    const T f = d_floor(q), near = q - f > (T)0.5 ? f + 1 : f; \
    const T found = q == 0 ? d_copysign((T)0, ratio) : near; \
    return b == 0 ? ratio : found; \
  }
d_float_division(float, fmodf) d_float_division(double, fmod)

// ---- indices read from memory ------------------------------------------------------------------
// `site` names the access for the error message; where `active` is false it is not executed.
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

// ---- exponential, hyperbolic tangent and error function ----------------------------------------
// a * b + c, in one rounding where the hardware has that.
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA) || defined(D_FMA)
d_inline float d_madd(float a, float b, float c) { return D_NATIVE(fmaf)(a, b, c); }
#else
d_inline float d_madd(float a, float b, float c) { return a * b + c; }
#endif
#ifdef D_NATIVE_MATH
d_inline float d_exp(float x) { return expf(x); }
d_inline float d_tanh(float x) { return tanhf(x); }
d_inline float d_erf(float x) { return erff(x); }
d_inline float d_exp_weight(float x) { return expf(x); }
d_inline float d_normal_cdf(float x) { return 0.5f * erfcf(-0.70710678118654752440f * x); }
d_inline float d_normal_cdf_tanh(float x) {
  return 0.5f * (1.0f + tanhf(0.79788456080286535588f * (x + 0.044715f * x * x * x)));
}
#else
// Polynomials are inlined, so that a loop keeps their constants in registers. Their dependence
// chains are short, because the processor's reorder window holds only a few iterations.
//
// exp(x) without its power of two, less 1. The power is returned in the exponent bits of `power`, which
// the caller adds to the bits of the result. Coefficients: Moshier, Cephes (1992).
d_inline float d_expm1_fraction(float x, uint32_t& power) {
  const float shift = 12582912.0f;  // adding it rounds to an integer, left in the lowest bits
  const float moved = d_madd(x, 1.44269504088896341f, shift), n = moved - shift;
  const float r = d_madd(n, 2.12194440e-4f, d_madd(n, -0.693359375f, x)), s = r * r;
  const float a = d_madd(1.9875691500e-4f, r, 1.3981999507e-3f);
  const float b = d_madd(8.3334519073e-3f, r, 4.1665795894e-2f);
  const float c = d_madd(1.6666665459e-1f, r, 5.0000001201e-1f);
  power = d_bits(moved) << 23;
  return d_madd(d_madd(d_madd(a, s, b), s, c), s, r);
}
d_inline float d_exp_fraction(float x, uint32_t& power) { return d_expm1_fraction(x, power) + 1.0f; }
// Within 2 units in the last place. The power of two is applied in two steps, so that results may be
// subnormal or infinite.
d_inline float d_exp(float x) {
  uint32_t power;
  const float p = d_exp_fraction(x, power);
  const float first = d_float(power + (x < 0 ? 191u << 23 : 63u << 23)), second = x < 0 ? 0x1p-64f : 0x1p64f;
  const float scaled = p * first * second, low = x < -104.0f ? 0.0f : scaled;
  return x > 89.0f ? d_inff : low;
}
// exp(x) for x <= 0, up to rounding; subnormal results become zero. The error is below 2 units in the
// last place above -20, and 4 below. It has five coefficients, and log(2) is one number where the
// hardware has a fused multiply-add: sums of exponentials are bound by arithmetic, not by memory.
d_inline float d_exp_weight(float x) {
  const float shift = 12582912.0f + 127.0f;  // the power of two is left with its bias
  const float moved = d_madd(x, 1.44269504088896341f, shift), n = moved - shift;
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA) || defined(D_FMA)
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
// (1 + erf(x / sqrt(2))) / 2 and (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2 within 1e-7. For x = -t
// they are (1 - t g(t))^4 / 2 with a polynomial g, fitted over t < 5.5 and t < 5.2: small results are
// not differences of large numbers, so that their errors are small, too. `y` is t g(t).
d_inline float d_tail_or_rest(float x, float y, float end) {
  const float root = d_madd(y, y - 2.0f, 1.0f), tail = d_abs(x) > end ? 0.0f : 0.5f * root * root;
  return x < 0 ? tail : 1.0f - tail;
}
d_inline float d_normal_cdf(float x) {
  const float t = d_abs(x), s = t * t, q = s * s;
  const float a = d_madd(5.96820079e-2f, t, 1.99471205e-1f), b = d_madd(-4.67520487e-3f, t, -5.46024367e-3f);
  const float c = d_madd(2.13683204e-4f, t, 2.46099284e-4f), d = d_madd(-1.47564588e-5f, t, -8.23989524e-7f);
  const float e = d_madd(d_madd(7.69976349e-9f, s, d_madd(-2.46592691e-7f, t, 2.99035128e-6f)), q, d_madd(d, s, c));
  return d_tail_or_rest(x, t * d_madd(e, q, d_madd(b, s, a)), 5.5f);
}
d_inline float d_normal_cdf_tanh(float x) {
  const float t = d_abs(x), s = t * t, q = s * s;
  const float a = d_madd(5.9674371e-2f, t, 1.99471548e-1f), b = d_madd(-4.98752994e-3f, t, -5.56678604e-3f);
  const float c = d_madd(-3.17846774e-4f, t, 7.37040886e-4f), d = d_madd(-2.36214153e-4f, t, 4.55262663e-4f);
  const float e = d_madd(-9.42136103e-6f, t, 6.29917195e-5f), f = d_madd(-2.51692516e-8f, t, 7.53518748e-7f);
  const float high = d_madd(d_madd(f, s, e), q, d_madd(d, s, c));
  return d_tail_or_rest(x, t * d_madd(high, q, d_madd(b, s, a)), 5.2f);
}
// Within 1.4 units in the last place, and 0.6 beyond 2, where its gradient 1 - tanh(x)^2 magnifies errors:
// m / (m + 2) for m = exp(2 x) - 1, and 1 - 2 / (m + 2) where that is more exact.
d_inline float d_tanh(float x) {
  const float size = d_abs(x), twice = size > 10.0f ? 20.0f : size + size;
  uint32_t power;
  const float fraction = d_expm1_fraction(twice, power), scale = d_float(power + (127u << 23));
  const float m = d_madd(scale, fraction, scale - 1.0f);
  const bool near = !(m >= 6.0f);
  const float part = (near ? m : 2.0f) / (m + 2.0f);
  return d_copysign(near ? part : 1.0f - part, x);
}
#endif
// Far below 0, 1 + erf and 1 + tanh would be differences of equal numbers. erfc(t) magnifies the rounding error
// of t by its slope, which is -erfc(t) * (t + sqrt(t^2 + 4 / pi)) to a tenth.
d_inline double d_normal_cdf(double x) {
  const double near = x < -40 ? -40 : x > 40 ? 40 : x, scale = -0.70710678118654752440, t = near * scale;
  const double error = d_fma(near, scale, -t) + near * 4.8336466567264567e-17;  // of t = -x / sqrt(2)
  return 0.5 * erfc(t) * (1 - error * (t + d_sqrt(t * t + 1.27323954473516268615)));
}
d_inline double d_normal_cdf_tanh(double x) {
  return 1 / (1 + exp(-1.59576912160573071176 * (x + 0.044715 * x * x * x)));
}

// ---- special functions ---------------------------------------------------------------------------
// As Giles, "Approximating the erfinv function" (2010): y P(w), w = -log(1 - y^2), by one polynomial below
// w = 5 and one in sqrt(w) above, fitted to relative errors of 6e-9 and 7e-7 up to the last double below 1.
// A step of Halley's method on erf, beyond one half on erfc, leaves the rounding errors of these. Without
// branches, so that loops are vectorized.
d_inline double d_erfinv(double y) {
  const double size = d_abs(y), rest = 1 - size, w = -log(rest * (1 + size));
  const bool near = w < 5;
  const double t = near ? w - 2.5 : d_sqrt(w) - 4.16;
  double p = near ? -8.79146701e-09 : -1.24438285e-06;
  p = (near ? 2.32320302e-08 : 1.79068214e-05) + p * t;
  p = (near ? 4.66176082e-07 : -4.57748874e-05) + p * t;
  p = (near ? -3.46269709e-06 : 1.47935728e-05) + p * t;
  p = (near ? -4.96337044e-06 : -7.57047035e-06) + p * t;
  p = (near ? 0.000218344411 : 0.000257412764) + p * t;
  p = (near ? -0.00125274185 : -0.000750662845) + p * t;
  p = (near ? -0.00417738675 : 0.000881354578) + p * t;
  p = (near ? 0.246640286 : 1.0098487) + p * t;
  p = (near ? 1.50140936 : 4.00133231) + p * t;
  const double x = p * size, off = size < 0.5 ? erf(x) - size : rest - erfc(x);
  const double step = off * 0.886226925452758013649 * exp(x * x);
  const double found = x - step / (1 + x * step);
  return d_copysign(size < 1 ? found : size == 1 ? d_inf : d_nan, y);
}
// Within a relative error of 1.7 * 2^-23: y P(w), w = -log(1 - y^2), by one polynomial
// below w = 5 and one in sqrt(w) above, fitted to relative errors of 6e-9 and 2e-8 before rounding.
d_inline float d_erfinv(float y) {
  const float w = -d_log((1.0f - y) * (1.0f + y)), s = w - 2.5f, t = d_sqrt(w) - 3.0f;
  float near = d_madd(-8.820527e-9f, s, 4.53241095e-8f);
  near = d_madd(near, s, 3.53218769e-7f);
  near = d_madd(near, s, -4.34618121e-6f);
  near = d_madd(near, s, 5.90068503e-6f);
  near = d_madd(near, s, 2.03594121e-4f);
  near = d_madd(near, s, -1.76172515e-3f);
  near = d_madd(near, s, 2.26924714e-4f);
  near = d_madd(near, s, 2.46072974e-1f);
  near = d_madd(near, w, 8.86226925e-1f);
  float far = d_madd(1.00986996e-4f, t, -2.94174441e-4f);
  far = d_madd(far, t, -3.62075866e-5f);
  far = d_madd(far, t, 1.46568223e-3f);
  far = d_madd(far, t, -3.60793438e-3f);
  far = d_madd(far, t, 5.69451673e-3f);
  far = d_madd(far, t, -7.63503687e-3f);
  far = d_madd(far, t, 9.4443862e-3f);
  far = d_madd(far, t, 1.00167482f);
  far = d_madd(far, t, 2.83297682f);
  const float x = y * (w < 5.0f ? near : far);
  return d_abs(y) == 1.0f ? d_copysign(d_inff, y) : x;
}
// Asymptotic series (Abramowitz and Stegun 6.3.18) from 10 on, to which smaller numbers are moved by
// digamma(x + 1) = digamma(x) + 1 / x; reflection below 0. Without branches, so that loops are vectorized.
d_inline double d_digamma(double x) {
  const double pi = 3.14159265358979323846, w = x < 0 ? 1 - x : x;
  // The ten reciprocals in pairs: (w + k) (w + 9 - k) is s + k (9 - k).
  const double s = w * (w + 9), ten = 1 / s + 1 / (s + 8) + 1 / (s + 14) + 1 / (s + 18) + 1 / (s + 20);
  const double y = w < 10 ? w + 10 : w, moved = w < 10 ? (2 * w + 9) * ten : 0, z = 1 / (y * y);
  const double series = z * (1.0 / 12 - z * (1.0 / 120 - z * (1.0 / 252 - z * (1.0 / 240 -
      z * (1.0 / 132 - z * (691.0 / 32760 - z / 12))))));
  const double found = log(y) - 0.5 / y - series - moved, turn = x - d_trunc(x);
  const double reflected = turn == 0 ? d_nan : found - pi / tan(pi * turn);
  return x == 0 ? d_copysign(d_inf, -x) : x < 0 ? reflected : found;
}
d_inline float d_digamma(float x) { return (float)d_digamma((double)x); }
#ifdef D_NATIVE_MATH
d_inline float d_lgamma(float x) { return lgammaf(x); }
#else
// The same way: Stirling's series (Abramowitz and Stegun 6.1.41) from 8 on, reflection below 1/2.
d_inline float d_lgamma(float number) {
  const double pi = 3.14159265358979323846, x = number, w = x < 0.5 ? 1 - x : x;
  double product = w;
  D_UNROLL(7)
  for (int k = 1; k < 8; ++k) product *= w + k;
  const double y = w < 8 ? w + 8 : w, r = 1 / y, z = r * r;
  const double series = r * (1.0 / 12 - z * (1.0 / 360 - z * (1.0 / 1260 - z * (1.0 / 1680 -
      z * (1.0 / 1188 - z * (691.0 / 360360 - z / 156))))));
  const double far = (y - 0.5) * log(y) - y + 0.91893853320467274178 + series;
  const double sum = far - log(w < 8 ? product : 1), turn = x - d_round(x);
  const double found = (w == 1) | (w == 2) ? 0 : sum;
  const double reflected = log(pi / d_abs(sin(pi * turn))) - found;
  return d_isinf(x) ? d_inff : (float)(x < 0.5 ? reflected : found);
}
#endif

// ---- random numbers: Philox 4x32-7 (Salmon et al., SC 2011) ------------------------------------
// Adjacent elements share a call: each takes one of its four words, or a pair of them. All targets
// give the same numbers.
struct d_draws { uint32_t w[4]; };
d_inline void d_philox_keys(uint32_t& k0, uint32_t& k1) {
  k0 += 0x9E3779B9u;
  k1 += 0xBB67AE85u;
}
d_inline void d_philox_round(
    uint32_t& c0, uint32_t& c1, uint32_t& c2, uint32_t& c3, uint32_t k0, uint32_t k1) {
  const uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
  c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
  c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
  c1 = (uint32_t)p1;
  c3 = (uint32_t)p0;
}
d_inline d_draws d_philox(int64_t seed, int64_t site, int64_t counter) {
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)((uint64_t)seed >> 32);
  uint32_t c0 = (uint32_t)counter, c1 = (uint32_t)((uint64_t)counter >> 32);
  uint32_t c2 = (uint32_t)site, c3 = 0;
  D_UNROLL(7)
  for (int round = 0; round < 7; ++round) {
    d_philox_round(c0, c1, c2, c3, k0, k1);
    d_philox_keys(k0, k1);
  }
  return {{c0, c1, c2, c3}};
}
d_inline uint64_t d_joined(uint32_t low, uint32_t high) { return ((uint64_t)high << 32) | low; }
d_inline float d_unit(uint32_t bits) { return (float)(int32_t)(bits >> 8) * 0x1p-24f; }
d_inline double d_unit(uint64_t bits) { return (double)(int64_t)(bits >> 11) * 0x1p-53; }
// What the element `index` takes of its call's words.
d_inline uint32_t d_drawn_word(d_draws c, int64_t index) {
  const uint32_t low = index & 1 ? c.w[1] : c.w[0], high = index & 1 ? c.w[3] : c.w[2];
  return index & 2 ? high : low;
}
d_inline uint64_t d_drawn_pair(d_draws c, int64_t index) {
  return index & 1 ? d_joined(c.w[2], c.w[3]) : d_joined(c.w[0], c.w[1]);
}
d_inline int64_t d_drawn_bits(d_draws c, int64_t index) {
  return (int64_t)(d_drawn_pair(c, index) >> 1);
}
d_inline float d_drawn_uniform_f(d_draws c, int64_t index) {
  return d_unit(d_drawn_word(c, index));
}
d_inline double d_drawn_uniform_d(d_draws c, int64_t index) {
  return d_unit(d_drawn_pair(c, index));
}
// Box and Muller (1958): two normal numbers from two uniform ones, a quarter of a turn apart.
d_inline float d_drawn_normal_f(d_draws c, int64_t index) {
  const uint32_t low = index & 2 ? c.w[2] : c.w[0], high = index & 2 ? c.w[3] : c.w[1];
  const float u = d_unit(low), turn = d_unit(high) - 0.25f * (float)(int32_t)(index & 1);
  return d_sqrt(-2.0f * logf(1.0f - u)) * cosf(6.28318530717958647692f * turn);
}
d_inline double d_drawn_normal_d(d_draws c, int64_t) {
  const double u = d_unit(d_joined(c.w[0], c.w[1])), v = d_unit(d_joined(c.w[2], c.w[3]));
  return d_sqrt(-2.0 * log(1.0 - u)) * cos(6.28318530717958647692 * v);
}
