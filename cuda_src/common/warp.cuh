// Reductions over the 32 lanes of a warp. Every lane must take part; every lane receives the same
// bits.
#pragma once

#include "common/types.cuh"

namespace cupy_moe {

constexpr int kWarpSize = 32;
constexpr u32 kFullWarp = 0xFFFFFFFFu;

__device__ __forceinline__ u32 warp_max(u32 value) {
  return __reduce_max_sync(kFullWarp, value);
}
__device__ __forceinline__ u32 warp_min(u32 value) {
  return __reduce_min_sync(kFullWarp, value);
}

// Butterfly of a commutative operation: partners combine the same two values, so the order of
// additions is fixed.
template <typename T, typename Op>
__device__ T warp_reduce(T value, Op op) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value = op(value, __shfl_xor_sync(kFullWarp, value, distance));
  }
  return value;
}

__device__ __forceinline__ float warp_sum(float value) {
  return warp_reduce(value, [](float a, float b) { return a + b; });
}

// NaN elements are ignored unless all are NaN.
__device__ __forceinline__ float warp_max(float value) {
  return warp_reduce(value, [](float a, float b) { return fmaxf(a, b); });
}

}  // namespace cupy_moe
