// The part of a tile that a warp multiplies on mma.sync, and its fragments.
#pragma once

#include "common/types.cuh"

namespace cupy_moe::gemm {

template <typename Config>
struct WarpTile {
  static constexpr i32 kRows = Config::kTileM / Config::kWarpsM;
  static constexpr i32 kColumns = Config::kTileN / Config::kWarpsN;
  static constexpr i32 kFragsM = kRows / 16;
  static constexpr i32 kFragsN = kColumns / 8;
  static constexpr i32 kNumThreads = 32 * Config::kWarpsM * Config::kWarpsN;
  static_assert(kRows % 16 == 0 && kColumns % 8 == 0, "a warp owns whole 16 x 8 fragments");

  using Accumulators = float[kFragsM][kFragsN][4];

  __device__ static i32 first_row() {
    return static_cast<i32>(threadIdx.x) / 32 % Config::kWarpsM * kRows;
  }
  __device__ static i32 first_column() {
    return static_cast<i32>(threadIdx.x) / 32 / Config::kWarpsM * kColumns;
  }
};

}  // namespace cupy_moe::gemm
