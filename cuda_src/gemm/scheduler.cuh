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

// Tiles of an expert are consecutive. The blocks of a wave should read the same bytes at the same
// time: neighbours take the same weight tile and different token tiles, of which kBand at most, so
// that their rows stay in L2 while the weight tiles pass by.
template <typename Config>
struct TileScheduler {
  static constexpr u32 kBand = 16;

  const Params& p;
  u32 num_m_tiles;
  u32 num_tiles;
  u32 next;

  __device__ explicit TileScheduler(const Params& params)
      : p(params),
        num_m_tiles(static_cast<u32>(params.m) / Config::kTileM),
        num_tiles(num_m_tiles * static_cast<u32>(p.expert_first_tile[p.local_num_experts])),
        next(blockIdx.x) {}

  __device__ bool advance(Tile& tile) {
    if (next >= num_tiles) return false;
    tile.expert = p.tile_expert[next / num_m_tiles];
    const u32 first = static_cast<u32>(p.expert_first_tile[tile.expert]);
    const u32 count = static_cast<u32>(p.expert_first_tile[tile.expert + 1]) - first;
    const u32 index = next - first * num_m_tiles;
    const u32 band = index / (kBand * num_m_tiles) * kBand;
    const u32 width = min(kBand, count - band);
    const u32 in_band = index - band * num_m_tiles;
    tile.m_tile = static_cast<i32>(in_band / width);
    tile.n_tile = static_cast<i32>(first + band + in_band % width);
    tile.first_row = tile.n_tile * Config::kTileN;
    tile.num_rows = p.tile_rows[tile.n_tile];
    next += gridDim.x;
    return true;
  }
};

}  // namespace cupy_moe::gemm
