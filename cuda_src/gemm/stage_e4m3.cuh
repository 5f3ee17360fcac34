// What a stage of the Hopper ring holds of E4M3 weights and tokens: 128 of K, one row of the
// 128-byte swizzle.
#pragma once

#include "common/types.cuh"
#include "gemm/problem.cuh"
#include "gemm/scheduler.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

namespace cupy_moe::gemm {

template <typename Config>
struct StageE4m3 {
  static constexpr i32 kWindow = 128;  // of K in 128 bytes of a token row
  static constexpr i32 kWindows = 1;
  static constexpr i32 kWeightBytes = Config::kTileM * kWindow;
  static_assert(Config::kTileK == kWindow);

  // By one thread; announces what it copies to `full`.
  __device__ static void copy_weights(const Params& p, const Tile& tile, i32 step, u8* stage,
                                      u64* full, ptx::L2Hint hint) {
    ptx::mbarrier_arrive_expect_tx(full, kWeightBytes);
    ptx::tma_load_4d(stage, &p.weight_map, full, 0, tile.m_tile * Config::kTileM, step, tile.expert,
                     hint);
  }

  __device__ static void prefetch_weights(const Params& p, i32 expert, i32 row, i32 step) {
    ptx::tma_prefetch_4d(&p.weight_map, 0, row, step, expert);
  }
};

}  // namespace cupy_moe::gemm
