// The list of output tiles, and which of them a persistent block computes.
#pragma once

#include "common/types.cuh"
#include "gemm/order.cuh"
#include "gemm/problem.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"

namespace cupy_moe::gemm {

struct alignas(16) Tile {
  i32 m_tile;
  i32 expert;
  i32 first_row;  // permuted row
  i32 num_rows;   // in use, 1 ... tile_n
};

// Tiles of an expert are consecutive. The blocks of a wave should read the same bytes at the same
// time: neighbours take the same weight tile and different token tiles, of which kBand at most, so
// that their rows stay in L2 while the weight tiles pass by.
//
// Half a large tile takes more than half of its time. So large tiles of an expert share its rows
// evenly, in steps of eight, and products have the widths that come of it; small ones are full up
// to the last.
//
// A cluster takes so many neighbouring weight tiles of a token tile, one a block, and counts as one
// block here. Past the end of the weights its last ones have nothing to compute.
template <typename Config>
struct TileList {
  static constexpr u32 kBand = 16;
  static constexpr u32 kClusterRows = Config::kTileM * Config::kCluster;
  static constexpr i32 kRowStep = 8;
  static constexpr bool kSharesRows = Config::kTileN >= 160;
  static_assert(Config::kTileN % kRowStep == 0, "no share exceeds a tile");

  const Params& p;
  const Order<Config>& order;
  u32 num_m_tiles;  // of a cluster
  u32 num_tiles;

  __device__ TileList(const Params& params, const Order<Config>& row_order)
      : p(params),
        order(row_order),
        num_m_tiles(ceil_div(static_cast<u32>(params.m), kClusterRows)),
        num_tiles(num_m_tiles * static_cast<u32>(order.num_tiles(p))) {}

  // The tile of a cluster's first block. False past the end of the list.
  __device__ bool locate(u32 index, Tile& tile) const {
    if (index >= num_tiles) return false;
    const int4 info = order.tile(p, index / num_m_tiles);
    const u32 first = static_cast<u32>(info.y);
    const u32 in_expert = index - first * num_m_tiles;
    const u32 band = in_expert / (kBand * num_m_tiles) * kBand;
    const u32 width = min(kBand, static_cast<u32>(info.z) - band);
    const u32 in_band = in_expert - band * num_m_tiles;
    tile.expert = info.x;
    tile.m_tile = static_cast<i32>(in_band / width) * Config::kCluster;
    const i32 n_tile = static_cast<i32>(band + in_band % width);  // of the expert
    const i32 last_rows = info.z == 1 ? info.w : order.tile(p, info.y + info.z - 1).w;
    const i32 num_rows = (info.z - 1) * Config::kTileN + last_rows;  // of the expert
    const i32 begin = begin_row(n_tile, info.z, num_rows);
    tile.first_row = info.y * Config::kTileN + begin;
    tile.num_rows = min(begin_row(n_tile + 1, info.z, num_rows), num_rows) - begin;
    return true;
  }

 private:
  // Where a tile begins in the rows of its expert. The first ones get a step more than the others.
  __device__ static i32 begin_row(i32 n_tile, i32 num_tiles, i32 num_rows) {
    if (!kSharesRows) return n_tile * Config::kTileN;
    const i32 num_steps = ceil_div(num_rows, kRowStep);
    return (n_tile * (num_steps / num_tiles) + min(n_tile, num_steps % num_tiles)) * kRowStep;
  }
};

// Position in a ring of slots in shared memory. The parity flips with every lap.
template <i32 kSlots>
struct RingCursor {
  i32 slot = 0;
  u32 parity = 0;

  __device__ __forceinline__ void advance() {
    if (++slot == kSlots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// Hands the tiles that a block takes from the list to all roles of the block, in order. With many
// tiles, which differ in rows in use and therefore in time, blocks take them as they get free. A
// tile is found by one thread: that takes divisions and a trip to the list. The blocks of a cluster
// go on together: the first one finds the tiles of all.
template <i32 kReadingWarps, i32 kReadingThreads, i32 kCluster>
struct TileQueue {
  static constexpr i32 kDepth = 4;
  static constexpr i32 kReaders =
      (kReadingWarps * ptx::kArrivalsOfWarp + kReadingThreads) * kCluster +
      (kCluster - 1);  // those that would push in the first block

  // One register: tiles are few, and the products of others need them.
  struct Cursor {
    u32 count = 0;

    __device__ __forceinline__ u32 slot() const { return count % kDepth; }
    __device__ __forceinline__ u32 parity() const { return count / kDepth % 2; }
  };

  Tile tiles[kDepth];
  u64 full[kDepth];
  u64 empty[kDepth];

  __device__ void init() {
    for (i32 i = 0; i < kDepth; ++i) {
      ptx::mbarrier_init(&full[i], 1);
      ptx::mbarrier_init(&empty[i], kReaders);
    }
  }

  // By one thread of the first block. A tile without rows tells the readers to stop.
  __device__ void push(Cursor& at, Tile tile) {
    const u32 slot = at.slot();
    ptx::mbarrier_wait_parity(&empty[slot], at.parity() ^ 1);
    tiles[slot] = tile;
    ptx::mbarrier_arrive(&full[slot]);
#pragma unroll
    for (i32 rank = 1; rank < kCluster; ++rank) {
      const int4 words = make_int4(tile.m_tile + rank, tile.expert, tile.first_row, tile.num_rows);
      const u32 barrier = ptx::mapa_shared_cluster(&full[slot], rank);
      ptx::mbarrier_arrive_expect_tx_cluster(barrier, sizeof(words));
      ptx::st_async_shared_cluster(ptx::mapa_shared_cluster(&tiles[slot], rank), words, barrier);
    }
    ++at.count;
  }

  // By kReadingWarps whole warps. False after the last tile. In terms that let the compiler see
  // that lanes agree: descriptors of operands then take uniform registers.
  __device__ bool pop(Cursor& at, Tile& tile) {
    wait_for_tile(at);
    tile = tiles[at.slot()];
    tile.num_rows = __shfl_sync(~0u, tile.num_rows, 0);
    __syncwarp();
    if (threadIdx.x % 32 < ptx::kArrivalsOfWarp) release(at);
    ++at.count;
    return __all_sync(~0u, tile.num_rows > 0);
  }

  // The same by kReadingThreads, and by those of other blocks that would push in the first.
  __device__ bool pop_alone(Cursor& at, Tile& tile) {
    wait_for_tile(at);
    tile = tiles[at.slot()];
    release(at);
    ++at.count;
    return tile.num_rows > 0;
  }

 private:
  __device__ void wait_for_tile(const Cursor& at) {
    if constexpr (kCluster > 1) {
      ptx::mbarrier_wait_parity_cluster(&full[at.slot()], at.parity());
    } else {
      ptx::mbarrier_wait_parity(&full[at.slot()], at.parity());
    }
  }

  __device__ void release(const Cursor& at) {
    ptx::mbarrier_arrive_at<kCluster>(&empty[at.slot()], 0);
  }
};

}  // namespace cupy_moe::gemm
