// The order of the rows: which slot a permuted row holds, which rows a token tile has.
//
// An order is a base of the main loop's shared memory, empty where it lies in global memory.
#pragma once

#include "common/types.cuh"
#include "formats/bf16.cuh"
#include "gemm/problem.cuh"
#include "routing/slots.cuh"

namespace cupy_moe::gemm {

// As the permutation kernel wrote it.
template <typename Config>
struct GivenOrder {
  __device__ static i32 num_tiles(const Params& p) { return *p.num_n_tiles; }
  __device__ static int4 tile(const Params& p, i32 index) { return p.tile_info[index]; }
  __device__ static i32 slot(const Params& p, i32 row) { return p.permuted_to_expanded[row]; }

  __device__ static float routing_weight(const Params& p, i32 slot) {
    if (p.token_scales_are_f32) {
      return formats::round_bf16(static_cast<const float*>(p.token_scales)[slot]);
    }
    return formats::decode_bf16(static_cast<const u16*>(p.token_scales)[slot]);
  }
};

// Sorted by every block itself, a slot a lane of one warp: for few slots that is faster than to
// wait for a kernel. The rows are those that the permutation kernel would have given.
template <typename Config>
struct SortedOrder {
  static constexpr i32 kMaxSlots = 32;

  int4 tiles[kMaxSlots];
  i32 slots[kMaxSlots * Config::kTileN];
  i32 words[kMaxSlots];
  i32 tile_count;

  __device__ i32 num_tiles(const Params&) const { return tile_count; }
  __device__ int4 tile(const Params&, i32 index) const { return tiles[index]; }
  __device__ i32 slot(const Params&, i32 row) const { return slots[row]; }

  // Words hold the weights: what FC1 unpacks for others may not be there yet.
  __device__ float routing_weight(const Params& p, i32 slot) const {
    if (p.packed_ids) return formats::decode_bf16(static_cast<u16>(words[slot]));
    return GivenOrder<Config>::routing_weight(p, slot);
  }

  // By a whole warp; the block must meet before it reads.
  __device__ void sort(const Params& p, i32 lane) {
    const bool present = lane < p.num_slots;
    const i32 word = present ? p.topk_ids[lane] : 0;
    const routing::LocalExperts experts{p.local_expert_offset, p.local_num_experts};
    const i32 expert = present ? routing::local_expert(word, p.packed_ids, experts) : -1;
    const u32 peers = __match_any_sync(~0u, expert);
    const i32 earlier = __popc(peers & ((1u << lane) - 1));
    const i32 count = __popc(peers);
    const bool is_first = expert >= 0 && earlier == 0;  // its lane describes the expert's tiles
    const i32 num_own_tiles = is_first ? ceil_div(count, Config::kTileN) : 0;
    i32 first_tile = 0;
#pragma unroll 8
    for (i32 i = 0; i < p.num_slots; ++i) {
      const i32 num_other_tiles = __shfl_sync(~0u, num_own_tiles, i);
      if (__shfl_sync(~0u, expert, i) < expert) first_tile += num_other_tiles;
    }
    const i32 row = expert >= 0 ? first_tile * Config::kTileN + earlier : -1;

    words[lane] = word;
    if (row >= 0) slots[row] = lane;
    for (i32 i = 0; i < num_own_tiles; ++i) {
      const i32 num_rows = min(Config::kTileN, count - i * Config::kTileN);
      tiles[first_tile + i] = make_int4(expert, first_tile, num_own_tiles, num_rows);
    }
    const i32 num_all_tiles = __reduce_add_sync(~0u, num_own_tiles);
    if (lane == 0) tile_count = num_all_tiles;
    if (kIsFc1<Config> && blockIdx.x == 0 && present) {
      p.expanded_to_permuted[lane] = row;
      if (p.packed_ids) p.expert_weights[lane] = static_cast<u16>(word);
    }
  }
};

template <typename Config, bool kSorted>
struct OrderOf {
  using type = GivenOrder<Config>;
};
template <typename Config>
struct OrderOf<Config, true> {
  using type = SortedOrder<Config>;
};
template <typename Config>
using Order = typename OrderOf<Config, Config::kSortSlots>::type;

// Row of `tokens` behind a permuted row that is in use.
template <typename Config>
__device__ __forceinline__ i32 source_row(const Params& p, const Order<Config>& order, i32 row) {
  return Config::kGatherTokens ? order.slot(p, row) / p.top_k : row;
}

// The routing weight that scales a row on the input side, as BF16.
template <typename Config>
__device__ __forceinline__ float load_token_scale(const Params& p, const Order<Config>& order,
                                                  i32 row) {
  if (p.token_scales == nullptr) return 1.0f;
  return order.routing_weight(p, order.slot(p, row));
}

}  // namespace cupy_moe::gemm
