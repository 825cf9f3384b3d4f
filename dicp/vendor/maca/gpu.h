// What compilers for GPUs have in common; the C mathematical library is built in.
#pragma once
#define d_inline static __device__ __forceinline__
#define D_KERNEL extern "C" __global__
#define D_COLD static __device__ __noinline__
#define D_NATIVE(name) name
#define D_NATIVE_MATH
#define D_FMA
#define D_DECLARED
#define D_HALVES
#define D_UNROLL_PRAGMA(text) _Pragma(#text)
#define D_UNROLL(n) D_UNROLL_PRAGMA(unroll n)
// There is no status to fill: an index out of range ends the launch, as PyTorch's assertions do on
// its device; an integer division by zero has some result there, too.
#define D_CLAIM(place, code) d_stop(code)
#define d_barrier() __syncthreads()
#define d_lane_above __shfl_down
#define d_lane_below __shfl_up
#define d_lane_at __shfl
static __device__ __forceinline__ bool d_stop(long code) {
  if (code == 1) D_TRAP();
  return false;
}
static __device__ __forceinline__ int d_thread() { return (int)threadIdx.x; }
static __device__ __forceinline__ int d_lane() { return (int)(threadIdx.x % D_WAVE); }
