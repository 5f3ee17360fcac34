// Which output tiles a block computes: a persistent block walks the tile list in a fixed stride.
#pragma once

#include "common/types.cuh"

namespace cupy_moe::gemm {

// Tiles are ordered token tile by token tile, so that the blocks of a wave share token rows and,
// for an expert with several token tiles, find its weights in L2.
struct TileScheduler {
  i32 num_m_tiles;
  i64 num_tiles;
  i64 next;

  __device__ TileScheduler(i32 num_m_tiles_, i32 num_n_tiles)
      : num_m_tiles(num_m_tiles_),
        num_tiles(static_cast<i64>(num_m_tiles_) * num_n_tiles),
        next(blockIdx.x) {}

  __device__ bool advance(i32& m_tile, i32& n_tile) {
    if (next >= num_tiles) return false;
    m_tile = static_cast<i32>(next % num_m_tiles);
    n_tile = static_cast<i32>(next / num_m_tiles);
    next += gridDim.x;
    return true;
  }
};

}  // namespace cupy_moe::gemm
