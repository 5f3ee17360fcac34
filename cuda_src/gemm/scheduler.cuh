// Which output tiles a block computes: a persistent block walks the tile list in a fixed stride.
#pragma once

#include "common/types.cuh"
#include "gemm/problem.cuh"

namespace cupy_moe::gemm {

struct Tile {
  i32 m_tile;
  i32 n_tile;
  i32 expert;
  i32 first_row;  // permuted row
  i32 num_rows;   // in use, 1 ... tile_n
};

// Tiles are ordered token tile by token tile, so that the blocks of a wave share token rows and,
// for an expert with several token tiles, find its weights in L2.
template <typename Config>
struct TileScheduler {
  const Params& p;
  u32 num_m_tiles;
  u32 num_tiles;
  u32 next;

  __device__ explicit TileScheduler(const Params& params)
      : p(params),
        num_m_tiles(static_cast<u32>(params.m) / Config::kTileM),
        num_tiles(num_m_tiles * static_cast<u32>(*params.num_n_tiles)),
        next(blockIdx.x) {}

  __device__ bool advance(Tile& tile) {
    if (next >= num_tiles) return false;
    tile.m_tile = static_cast<i32>(next % num_m_tiles);
    tile.n_tile = static_cast<i32>(next / num_m_tiles);
    tile.expert = p.tile_expert[tile.n_tile];
    tile.first_row = tile.n_tile * Config::kTileN;
    tile.num_rows = p.tile_rows[tile.n_tile];
    next += gridDim.x;
    return true;
  }
};

}  // namespace cupy_moe::gemm
