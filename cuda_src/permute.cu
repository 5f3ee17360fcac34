// Sorts the routed slots by local expert: maps between slots and padded, expert-sorted rows.
//
//   start[e]  = sum over experts l < e of ceil(count[l] / tile_n) * tile_n
//   row(slot) = start[expert(slot)] + number of earlier slots of the same expert
//
// One block a local expert. Every block counts all slots itself, which needs no communication
// between blocks, and then places its own expert's slots in slot order, so the result is
// deterministic. Slots of no local expert get row -1; expert 0's block writes those.
#include "common/block.cuh"
#include "common/types.cuh"
#include "ptx/pdl.cuh"

namespace cupy_moe {

struct Params {
  const i32* topk_ids;        // [num_slots] global expert ids, or words (id << 16) | bf16 weight
  u16* expert_weights;        // [num_slots] bf16 of the packed words; null for plain ids
  i32* expanded_to_permuted;  // [num_slots] row of the slot, or -1
  i32* permuted_to_expanded;  // [padded rows] slot of the row, or -1 for padding
  i32* tile_expert;           // [token tiles] local expert of each tile
  i32* tile_rows;             // [token tiles] rows in use of each tile, from the first
  i32* num_n_tiles;           // [1] token tiles in use
  i32 num_slots;
  i32 local_num_experts;
  i32 local_expert_offset;
  i32 tile_n;
};

CUPY_MOE_CHECK_PARAMS(Params);

constexpr i32 kNumThreads = Config::kNumThreads;
constexpr i32 kSlotsPerThread = 4;
constexpr i32 kSlotsPerPass = kNumThreads * kSlotsPerThread;

// Local expert of a slot, or -1. Ids are compared as 32-bit values: no id wraps into the valid
// range.
__device__ i32 local_expert(const Params& p, i32 word) {
  const i64 id = Config::kPackedIds ? word >> 16 : word;
  const i64 local = id - p.local_expert_offset;
  return local >= 0 && local < p.local_num_experts ? static_cast<i32>(local) : -1;
}

// Lanes that hold the same expert add to its counter once.
__device__ void count_slots(const Params& p, i32* counts) {
  const i32 lane = static_cast<i32>(threadIdx.x) % 32;
  for (i32 base = 0; base < p.num_slots; base += kNumThreads) {
    const i32 slot = base + static_cast<i32>(threadIdx.x);
    const i32 expert = slot < p.num_slots ? local_expert(p, p.topk_ids[slot]) : -1;
    const u32 peers = __match_any_sync(~0u, expert);
    if (expert >= 0 && __ffs(peers) - 1 == lane) atomicAdd(counts + expert, __popc(peers));
  }
}

// First token tile of `expert`.
__device__ i32 first_tile(const Params& p, const i32* counts, i32 expert,
                          BlockScan<kNumThreads>& scan) {
  i32 tiles = 0;
  for (i32 l = static_cast<i32>(threadIdx.x); l < expert; l += kNumThreads) {
    tiles += ceil_div(counts[l], p.tile_n);
  }
  i32 total;
  scan.exclusive_sum(tiles, total);
  return total;
}

__device__ void place_slots(const Params& p, i32 expert, i32 first_row,
                            BlockScan<kNumThreads>& scan) {
  i32 placed = 0;
  i32 pass = 0;
  for (i32 base = 0; base < p.num_slots; base += kSlotsPerPass, ++pass) {
    const i32 first_slot = base + static_cast<i32>(threadIdx.x) * kSlotsPerThread;
    i32 words[kSlotsPerThread];
    i32 owners[kSlotsPerThread];
    i32 mine = 0;
#pragma unroll
    for (i32 i = 0; i < kSlotsPerThread; ++i) {
      const bool present = first_slot + i < p.num_slots;
      words[i] = present ? p.topk_ids[first_slot + i] : 0;
      owners[i] = present ? local_expert(p, words[i]) : -2;
      mine += owners[i] == expert;
    }
    i32 total;
    i32 row = first_row + placed + scan.exclusive_sum(mine, total);
    placed += total;
#pragma unroll
    for (i32 i = 0; i < kSlotsPerThread; ++i) {
      const i32 slot = first_slot + i;
      if (owners[i] == expert) {
        p.expanded_to_permuted[slot] = row;
        p.permuted_to_expanded[row] = slot;
        ++row;
      } else if (owners[i] == -1 && expert == 0) {
        p.expanded_to_permuted[slot] = -1;
      }
      if constexpr (Config::kPackedIds) {
        const bool my_pass = pass % p.local_num_experts == expert;  // blocks share the decoding
        if (my_pass && owners[i] != -2) p.expert_weights[slot] = static_cast<u16>(words[i]);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads)
    permute(const __grid_constant__ Params p) {
  __shared__ i32 counts[Config::kMaxLocalExperts];
  __shared__ BlockScan<kNumThreads> scan;
  const i32 thread = static_cast<i32>(threadIdx.x);
  const i32 expert = static_cast<i32>(blockIdx.x);

  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  for (i32 l = thread; l < p.local_num_experts; l += kNumThreads) counts[l] = 0;
  __syncthreads();
  count_slots(p, counts);
  __syncthreads();

  const i32 tile = first_tile(p, counts, expert, scan);
  const i32 count = counts[expert];
  const i32 num_tiles = ceil_div(count, p.tile_n);
  for (i32 i = thread; i < num_tiles; i += kNumThreads) {
    p.tile_expert[tile + i] = expert;
    p.tile_rows[tile + i] = min(p.tile_n, count - i * p.tile_n);
  }
  if (expert == p.local_num_experts - 1 && thread == 0) *p.num_n_tiles = tile + num_tiles;

  const i32 first_row = tile * p.tile_n;
  for (i32 i = count + thread; i < num_tiles * p.tile_n; i += kNumThreads) {
    p.permuted_to_expanded[first_row + i] = -1;
  }
  place_slots(p, expert, first_row, scan);
}

}  // namespace cupy_moe
