// The same kernels on an NVIDIA GPU, by nvcc or NVRTC without further headers: waves of 32, and the
// masked forms of the exchanges, which MACA does not need.
#pragma once
#define D_WAVE 32
#define __shfl_down(x, n) __shfl_down_sync(0xffffffffu, x, n)
#define __shfl_up(x, n) __shfl_up_sync(0xffffffffu, x, n)
#define __shfl(x, lane) __shfl_sync(0xffffffffu, x, lane)
#ifdef __CUDACC_RTC__  // lacks some builtin functions
#define __builtin_inf() __builtin_bit_cast(double, 0x7ff0000000000000ul)
#define __builtin_nan(text) __builtin_bit_cast(double, 0x7ff8000000000000ul)
#define __builtin_inff() __builtin_bit_cast(float, 0x7f800000u)
#define __builtin_nanf(text) __builtin_bit_cast(float, 0x7fc00000u)
#endif
#define D_TRAP() asm volatile("trap;")
#define D_INVERSE(y) __fdividef(0.25f, 0.25f * (y))  // it gives 0 beyond 2^126
#include "gpu.h"

static __device__ __forceinline__ float D_EXP2(float x) {  // 0 where it is no normal number
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#if __CUDA_ARCH__ >= 800
static __device__ __forceinline__ float D_MAXIMUM(float x, float y) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(y));
  return x;
}
static __device__ __forceinline__ float D_MINIMUM(float x, float y) {
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(y));
  return x;
}
#define D_MAXIMUM D_MAXIMUM
#define D_MINIMUM D_MINIMUM
#endif
struct d_f16_bits { unsigned short bits; };
typedef d_f16_bits __half;
typedef unsigned short __maca_bfloat16;
static __device__ __forceinline__ float __half2float(__half x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
static __device__ __forceinline__ __half __float2half_rn(float x) {
  __half y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
static __device__ __forceinline__ float __bfloat162float(__maca_bfloat16 x) {
  return __uint_as_float((unsigned)x << 16);
}
static __device__ __forceinline__ __maca_bfloat16 __float2bfloat16_rn(float x) {
  unsigned short y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
