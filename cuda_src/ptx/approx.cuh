// Functions that the hardware approximates, one instruction each. Subnormal arguments and results
// become zero: to keep them takes three instructions more.
#pragma once

#include "common/types.cuh"

namespace cupy_moe::ptx {

// 2^x, relative error below 2^-22.
__device__ __forceinline__ float ex2_approx_ftz(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// 1 / x, to one unit in the last place.
__device__ __forceinline__ float rcp_approx_ftz(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace cupy_moe::ptx
