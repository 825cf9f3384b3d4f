// What mxcc and the headers of MACA declare, as far as generated kernels use it: for a syntax check.
#pragma once
#include <math.h>
#include <string.h>
#define __global__
#define __device__
#define __shared__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(threads)

struct stub_dims { unsigned x, y, z; };
extern const stub_dims threadIdx, blockIdx, blockDim, gridDim;
void __syncthreads();

#define STUB_EXCHANGES(T) \
  T __shfl_down(T value, unsigned steps, int width = 64); \
  T __shfl_up(T value, unsigned steps, int width = 64); \
  T __shfl(T value, int lane, int width = 64);
STUB_EXCHANGES(int) STUB_EXCHANGES(unsigned) STUB_EXCHANGES(long) STUB_EXCHANGES(unsigned long)
STUB_EXCHANGES(long long) STUB_EXCHANGES(unsigned long long)
STUB_EXCHANGES(float) STUB_EXCHANGES(double)

#define STUB_ATOMIC(name, T) T atomic##name(T* place, T value);
STUB_ATOMIC(Add, int) STUB_ATOMIC(Add, unsigned) STUB_ATOMIC(Add, unsigned long long)
STUB_ATOMIC(Add, float) STUB_ATOMIC(Add, double)
STUB_ATOMIC(Max, int) STUB_ATOMIC(Max, unsigned) STUB_ATOMIC(Min, int) STUB_ATOMIC(Min, unsigned)
unsigned atomicCAS(unsigned* place, unsigned known, unsigned next);
unsigned long long atomicCAS(
    unsigned long long* place, unsigned long long known, unsigned long long next);

struct __half { unsigned short bits; };
struct __maca_bfloat16 { unsigned short bits; };
float __half2float(__half x);
__half __float2half_rn(float x);
float __bfloat162float(__maca_bfloat16 x);
__maca_bfloat16 __float2bfloat16_rn(float x);
