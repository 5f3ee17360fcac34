// Sorts the routed slots by local expert: maps between slots and padded, expert-sorted rows.
//
//   start[e]  = sum over experts l < e of ceil(count[l] / tile_n) * tile_n
//   row(slot) = start[expert(slot)] + number of earlier slots of the same expert
//
// A cluster of blocks counts all slots, one contiguous run of slots a warp, one private counter an
// expert and warp. The blocks exchange their sums through distributed shared memory, and every
// counter becomes the first row of its warp's slots of its expert. Then each warp walks its run
// once more and hands out rows in slot order. Nothing depends on scheduling.
//
// Several clusters all count everything, which needs no communication between them, and then place
// the slots of different experts: scattered stores, not counting, are what takes time.
#include "common/block.cuh"
#include "common/types.cuh"
#include "ptx/cluster.cuh"
#include "ptx/pdl.cuh"
#include "routing/slots.cuh"

namespace cupy_moe {

struct Params {
  const i32* topk_ids;        // [num_slots] global expert ids, or words (id << 16) | bf16 weight
  u16* expert_weights;        // [num_slots] bf16 of the packed words; null for plain ids
  i32* expanded_to_permuted;  // [num_slots] row of the slot, or -1
  i32* permuted_to_expanded;  // [padded rows] slot of the row, or -1 for padding
  int4* tile_info;            // [token tiles] expert, its first tile, its tiles, rows in use
  i32* schedule;              // [5] token tiles in use, tile counters of two FC1 and FC2: 0
  i32 num_slots;
  i32 local_num_experts;
  i32 local_expert_offset;
  i32 tile_n;
};

CUPY_MOE_CHECK_PARAMS(Params);

constexpr i32 kClusterSize = Config::kClusterSize;
constexpr i32 kNumThreads = Config::kNumThreads;
constexpr i32 kNumWarps = kNumThreads / 32;
constexpr i32 kLoadsInFlight = kNumWarps > 8 ? 8 : 4;  // few warps serve few slots: short code

// Dynamic shared memory, kNumWarps + 3 words an expert.
struct Smem {
  i32* block_counts;  // [local_num_experts] slots that this block counted
  i32* counts;        // [local_num_experts] slots of all blocks
  i32* first_tiles;   // [local_num_experts]
  i32* warp_rows;     // [kNumWarps, local_num_experts] counts, later the next row to hand out

  __device__ Smem(i32* base, i32 num_experts)
      : block_counts(base),
        counts(base + num_experts),
        first_tiles(base + 2 * num_experts),
        warp_rows(base + 3 * num_experts) {}
};

// Where a thread is. Blocks of a cluster are neighbors, and so are the runs of their warps.
struct Place {
  i32 lane = static_cast<i32>(threadIdx.x) % 32;
  i32 warp = static_cast<i32>(threadIdx.x) / 32;
  i32 rank = static_cast<i32>(blockIdx.x) % kClusterSize;
  i32 cluster = static_cast<i32>(blockIdx.x) / kClusterSize;
  i32 num_clusters = static_cast<i32>(gridDim.x) / kClusterSize;

  // One cluster stores what belongs to an expert; -1 means the slots of no local expert. The number
  // of clusters is a power of two.
  __device__ bool owns(i32 expert) const { return (expert & (num_clusters - 1)) == cluster; }
};

// Slots [first, last) of a warp.
struct Run {
  i32 first;
  i32 last;

  __device__ Run(const Place& at, i32 num_slots) {
    constexpr i32 kNumRuns = kClusterSize * kNumWarps;
    const i32 length = ceil_div(num_slots, 32 * kNumRuns) * 32;
    first = min(num_slots, (at.rank * kNumWarps + at.warp) * length);
    last = min(num_slots, first + length);
  }
};

__device__ i32 local_expert(const Params& p, i32 word) {
  return routing::local_expert(word, Config::kPackedIds,
                               {p.local_expert_offset, p.local_num_experts});
}

// Calls `step(slot, present, word)` for 32 slots at a time, in order and with all lanes.
template <typename Step>
__device__ __forceinline__ void for_each_slot(const Params& p, const Run& run, i32 lane,
                                              Step step) {
  for (i32 base = run.first; base < run.last; base += 32 * kLoadsInFlight) {
    i32 words[kLoadsInFlight];
#pragma unroll
    for (i32 i = 0; i < kLoadsInFlight; ++i) {
      const i32 slot = base + 32 * i + lane;
      words[i] = slot < run.last ? p.topk_ids[slot] : 0;
    }
#pragma unroll
    for (i32 i = 0; i < kLoadsInFlight; ++i) {
      if (base + 32 * i >= run.last) break;
      const i32 slot = base + 32 * i + lane;
      step(slot, slot < run.last, words[i]);
    }
  }
}

// Adding the constant 1 lets the hardware combine the lanes of the same expert.
__device__ void count_run(const Params& p, const Run& run, i32 lane, i32* warp_counts) {
  for_each_slot(p, run, lane, [&](i32, bool present, i32 word) {
    const i32 expert = present ? local_expert(p, word) : -1;
    if (expert >= 0) atomicAdd(warp_counts + expert, 1);
  });
}

__device__ i32 sum_warps(const Params& p, const Smem& smem, i32 expert) {
  i32 sum = 0;
#pragma unroll 8
  for (i32 warp = 0; warp < kNumWarps; ++warp) {
    sum += smem.warp_rows[warp * p.local_num_experts + expert];
  }
  return sum;
}

// Makes the sums of every block readable by the whole cluster.
__device__ void publish_counts(const Params& p, const Smem& smem) {
  if constexpr (kClusterSize > 1) {
    for (i32 e = static_cast<i32>(threadIdx.x); e < p.local_num_experts; e += kNumThreads) {
      smem.block_counts[e] = sum_warps(p, smem, e);
    }
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
  }
}

struct ExpertCount {
  i32 total;   // slots of the expert
  i32 before;  // those in earlier blocks of the cluster
};

__device__ ExpertCount expert_count(const Params& p, const Smem& smem, i32 rank, i32 expert) {
  if constexpr (kClusterSize == 1) return {sum_warps(p, smem, expert), 0};
  ExpertCount count{0, 0};
#pragma unroll
  for (i32 block = 0; block < kClusterSize; ++block) {
    const u32 address = ptx::mapa_shared_cluster(smem.block_counts + expert, block);
    const i32 slots = ptx::ld_shared_cluster(address);
    count.total += slots;
    if (block < rank) count.before += slots;
  }
  return count;
}

// Turns the counters of an expert into first rows, warp by warp. Several are read before the first
// is written, as the compiler cannot know that they are different ones.
__device__ void assign_rows(const Params& p, const Smem& smem, i32 expert, i32 first_row) {
  constexpr i32 kBatch = min(8, kNumWarps);
  static_assert(kNumWarps % kBatch == 0, "whole batches of warps");
  for (i32 first_warp = 0; first_warp < kNumWarps; first_warp += kBatch) {
    i32* rows = smem.warp_rows + first_warp * p.local_num_experts + expert;
    i32 counts[kBatch];
#pragma unroll
    for (i32 i = 0; i < kBatch; ++i) counts[i] = rows[i * p.local_num_experts];
#pragma unroll
    for (i32 i = 0; i < kBatch; ++i) {
      rows[i * p.local_num_experts] = first_row;
      first_row += counts[i];
    }
  }
}

// Lays the experts out one after the other and returns the number of token tiles.
__device__ i32 lay_out_experts(const Params& p, const Smem& smem, i32 rank,
                               BlockScan<kNumThreads>& scan) {
  i32 num_tiles = 0;
  for (i32 base = 0; base < p.local_num_experts; base += kNumThreads) {
    const i32 expert = base + static_cast<i32>(threadIdx.x);
    const bool exists = expert < p.local_num_experts;
    const ExpertCount count = exists ? expert_count(p, smem, rank, expert) : ExpertCount{0, 0};
    i32 tiles;
    const i32 tile = num_tiles + scan.exclusive_sum(ceil_div(count.total, p.tile_n), tiles);
    num_tiles += tiles;
    if (exists) {
      smem.counts[expert] = count.total;
      smem.first_tiles[expert] = tile;
      assign_rows(p, smem, expert, tile * p.tile_n + count.before);
    }
  }
  return num_tiles;
}

// The last expert that starts at or before the tile: experts without tiles start where the next one
// does.
__device__ i32 expert_of_tile(const Params& p, const Smem& smem, i32 tile) {
  i32 low = 0;
  i32 high = p.local_num_experts;
  while (high - low > 1) {
    const i32 middle = (low + high) / 2;
    (smem.first_tiles[middle] <= tile ? low : high) = middle;
  }
  return low;
}

// Describes token tiles, one a lane, and marks their padding. All warps of the grid take equal
// shares of at most 32 tiles; the last warps, whose runs are the shortest, take the first.
__device__ void write_tiles(const Params& p, const Smem& smem, const Place& at, i32 num_tiles) {
  const i32 num_warps = kNumWarps * static_cast<i32>(gridDim.x);
  const i32 share = max(1, min(32, ceil_div(num_tiles, num_warps)));
  const i32 task = (kNumWarps - 1 - at.warp) * static_cast<i32>(gridDim.x) + blockIdx.x;
  for (i32 first = task * share; first < num_tiles; first += num_warps * share) {
    const i32 tile = first + at.lane;
    i32 rows = p.tile_n;  // lanes without a tile of theirs mark no padding
    if (at.lane < share && tile < num_tiles) {
      const i32 expert = expert_of_tile(p, smem, tile);
      rows = min(rows, smem.counts[expert] - (tile - smem.first_tiles[expert]) * p.tile_n);
      const i32 num_expert_tiles = ceil_div(smem.counts[expert], p.tile_n);
      p.tile_info[tile] = make_int4(expert, smem.first_tiles[expert], num_expert_tiles, rows);
    }
    if (__all_sync(~0u, rows == p.tile_n)) continue;
    for (i32 base = 0; base < share * p.tile_n; base += 32) {
      const i32 i = base + at.lane;
      const i32 valid = __shfl_sync(~0u, rows, i / p.tile_n);
      if (i % p.tile_n >= valid) p.permuted_to_expanded[first * p.tile_n + i] = -1;
    }
  }
}

// Lanes of the same expert take consecutive rows, the first of them moves the counter on.
__device__ void place_run(const Params& p, const Run& run, const Place& at, i32* next_rows) {
  const u32 lower_lanes = (1u << at.lane) - 1;
  for_each_slot(p, run, at.lane, [&](i32 slot, bool present, i32 word) {
    const i32 expert = present ? local_expert(p, word) : -1;
    const u32 peers = __match_any_sync(~0u, expert);
    const i32 earlier = __popc(peers & lower_lanes);
    i32 row = -1;
    if (expert >= 0) row = next_rows[expert] + earlier;
    __syncwarp();
    if (expert >= 0 && earlier == 0) next_rows[expert] = row + __popc(peers);
    __syncwarp();
    if (present && at.owns(expert)) {
      p.expanded_to_permuted[slot] = row;
      if (row >= 0) p.permuted_to_expanded[row] = slot;
    }
    if constexpr (Config::kPackedIds) {
      if (present && at.cluster == 0) p.expert_weights[slot] = static_cast<u16>(word);
    }
  });
}

extern "C" __global__ void __launch_bounds__(kNumThreads)
    permute(const __grid_constant__ Params p) {
  extern __shared__ i32 smem_raw[];
  __shared__ BlockScan<kNumThreads> scan;
  const Smem smem(smem_raw, p.local_num_experts);
  const Place at;
  const Run run(at, p.num_slots);
  i32* warp_rows = smem.warp_rows + at.warp * p.local_num_experts;
  for (i32 e = at.lane; e < p.local_num_experts; e += 32) warp_rows[e] = 0;
  __syncwarp();

  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  count_run(p, run, at.lane, warp_rows);
  __syncthreads();

  publish_counts(p, smem);
  const i32 num_tiles = lay_out_experts(p, smem, at.rank, scan);
  // Other blocks' sums have been read. A block stays until its own have been, too.
  if constexpr (kClusterSize > 1) ptx::barrier_cluster_arrive_relaxed();
  __syncthreads();

  if (blockIdx.x == 0 && threadIdx.x < Config::kScheduleWords) {
    p.schedule[threadIdx.x] = threadIdx.x == 0 ? num_tiles : 0;
  }
  place_run(p, run, at, warp_rows);
  write_tiles(p, smem, at, num_tiles);
  if constexpr (kClusterSize > 1) ptx::barrier_cluster_wait();
}

}  // namespace cupy_moe
