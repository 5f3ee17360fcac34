// Block-wide reductions and scans over one i32 a thread.
#pragma once

#include "common/types.cuh"

namespace cupy_moe {

// Exclusive prefix sum in thread order and the block's total. All threads call it; it ends with a
// barrier, so it may be called again at once.
template <i32 kNumThreads>
struct BlockScan {
  static constexpr i32 kNumWarps = kNumThreads / 32;
  static_assert(kNumThreads % 32 == 0 && kNumWarps <= 32, "one warp scans the warp totals");
  i32 warp_totals[kNumWarps];

  __device__ i32 exclusive_sum(i32 value, i32& total) {
    const i32 lane = static_cast<i32>(threadIdx.x) % 32;
    const i32 warp = static_cast<i32>(threadIdx.x) / 32;
    i32 inclusive = inclusive_warp_sum(value, lane);
    if (lane == 31) warp_totals[warp] = inclusive;
    __syncthreads();
    const i32 warp_total = lane < kNumWarps ? warp_totals[lane] : 0;
    const i32 warp_inclusive = inclusive_warp_sum(warp_total, lane);
    const i32 before_warp = __shfl_sync(~0u, warp_inclusive - warp_total, warp);
    total = __shfl_sync(~0u, warp_inclusive, kNumWarps - 1);
    __syncthreads();
    return before_warp + inclusive - value;
  }

  __device__ static i32 inclusive_warp_sum(i32 value, i32 lane) {
#pragma unroll
    for (i32 distance = 1; distance < 32; distance *= 2) {
      const i32 other = __shfl_up_sync(~0u, value, distance);
      if (lane >= distance) value += other;
    }
    return value;
  }
};

}  // namespace cupy_moe
