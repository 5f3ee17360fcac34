// What feeds the Hopper main loop (sm_90a): its shared memory, and the roles that fill it.
//
// A ring of stages holds weights and tokens of a step of K. What a stage holds of weights depends
// on their number format, which also copies them, by TMA. Tokens lie window by window of K, in rows
// of 128 bytes; they come by TMA where rows are in place, else they are gathered by cp.async. A
// queue hands the tiles of the block to all roles.
//
// Blocks of a cluster compute neighbouring weight tiles of the same tokens: each copies its share
// of them into the shared memory of all. So a stage is refilled once all blocks have left it.
#pragma once

#include "common/types.cuh"
#include "gemm/order.cuh"
#include "gemm/problem.cuh"
#include "gemm/scheduler.cuh"
#include "gemm/stage_e4m3.cuh"
#include "gemm/stage_fp4.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

namespace cupy_moe::gemm {

template <typename Config, MoeFormat kFormat>
struct StageOf {
  using type = StageFp4<Config>;
};
template <typename Config>
struct StageOf<Config, MoeFormat::Fp8> {
  using type = StageE4m3<Config>;
};

template <typename Config>
struct FeedWgmma {
  using Stage = typename StageOf<Config, Config::kMoeFormat>::type;
  static constexpr i32 kNumStages = Config::kNumStages;
  static constexpr i32 kCluster = Config::kCluster;
  static_assert(kNumStages >= 2, "a stage is held until the next one is begun");
  static constexpr i32 kWindows = Stage::kWindows;        // of a stage
  static constexpr i32 kTokenRowBytes = 128;              // one row of the 128-byte swizzle
  static constexpr i32 kConsumers = Config::kWarpsM / 4;  // warpgroups
  static constexpr i32 kGroupRows = Config::kTileM / kConsumers;
  static constexpr i32 kConsumerWarps = 4 * kConsumers;
  static constexpr i32 kTokenWarps = Config::kGatherTokens ? 2 : 1;
  static constexpr i32 kNumThreads = 128 * (kConsumers + 1);

  // Of a thread. Gathering needs an address a row, of which small tiles have few.
  static constexpr i32 kLaunchRegisters = 65536 / (kNumThreads * Config::kMinBlocks) / 8 * 8;
  static constexpr bool kFewRegisters = kLaunchRegisters < 128;
  static constexpr i32 kGatherRegisters =
      kFewRegisters ? max(32, ceil_div(20 + Config::kTileN / 2, 8) * 8) : 72;
  static constexpr i32 kCopyRegisters = kFewRegisters ? 32 : 40;
  static constexpr i32 kProducerRegisters =
      Config::kGatherTokens ? kGatherRegisters : kCopyRegisters;
  static constexpr i32 kConsumerRegisters =
      min(232, (kLaunchRegisters * kNumThreads - kProducerRegisters * 128) / (128 * kConsumers)) /
      8 * 8;

  static constexpr i32 kTokenWindowBytes = Config::kTileN * kTokenRowBytes;
  // A tensor copy of tokens brings so many rows of so many windows.
  static constexpr i32 kTokenBox = Config::kTokenBox;
  static constexpr i32 kTokenBoxes = Config::kTileN / kTokenBox;
  static constexpr i32 kBoxWindows = kTokenBoxes > 1 ? 1 : kWindows;
  static_assert(!Config::kGatherTokens || kCluster == 1, "tensor copies reach other blocks");
  static constexpr i32 kStagedTokens = min(Config::kTileN, 32);                   // at once
  static constexpr i32 kStagingBuffers = Config::kTileN > kStagedTokens ? 2 : 1;  // of a group

  using Ring = RingCursor<kNumStages>;
  using Queue = TileQueue<kConsumerWarps + (Config::kGatherTokens ? kTokenWarps : 0),
                          Config::kGatherTokens ? 0 : 1, kCluster>;

  struct Smem : Order<Config> {
    alignas(1024) u8 tokens[kNumStages][kWindows * kTokenWindowBytes];
    u8 weights[kNumStages][Stage::kWeightBytes];  // aligned as much, in the 128-byte swizzle
    alignas(16) u8 staging[kConsumers][kStagingBuffers][Config::kStagingBytes];
    Queue queue;
    u64 full[kNumStages];
    u64 empty[kNumStages];
    float token_scale[kConsumers][kScaledRows<Config>];
    epilogue::ExpertScales expert_scales[kConsumers];  // FC1 only
  };

  __device__ static i32 num_windows(const Params& p) { return p.k / Stage::kWindow; }
  __device__ static i32 num_steps(const Params& p) { return ceil_div(num_windows(p), kWindows); }

  __device__ static void init_barriers(Smem& smem) {
    if (threadIdx.x == 0) {
      for (i32 stage = 0; stage < kNumStages; ++stage) {
        ptx::mbarrier_init(&smem.full[stage], 1 + kTokenWarps);
        ptx::mbarrier_init(&smem.empty[stage], kConsumerWarps * kCluster * ptx::kArrivalsOfWarp);
      }
      smem.queue.init();
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
    meet_cluster();
  }

  // Barriers of all blocks are there, or nobody needs those of another block any longer.
  __device__ static void meet_cluster() {
    if constexpr (kCluster > 1) {
      ptx::barrier_cluster_arrive();
      ptx::barrier_cluster_wait();
    }
  }

  // By kConsumerWarps whole warps: this one has left a stage, and says so to every block. What its
  // lanes have read themselves lies before a `__syncwarp`.
  __device__ __forceinline__ static void release(Smem& smem, i32 slot) {
    constexpr u32 kArrivals = kCluster * ptx::kArrivalsOfWarp;
#pragma unroll
    for (u32 i = threadIdx.x % 32; i < kArrivals; i += 32) {
      ptx::mbarrier_arrive_at<kCluster>(&smem.empty[slot], i / ptx::kArrivalsOfWarp);
    }
  }

  // Before the list of tiles is there, for many slots: most probably every expert has one token
  // tile, and this block takes this weight tile first. It costs bandwidth nobody else uses.
  __device__ static void prefetch_weights(const Params& p) {
    const i32 num_m_tiles = p.m / Config::kTileM;
    const i32 expert = static_cast<i32>(blockIdx.x) / num_m_tiles;
    if (expert >= p.local_num_experts) return;
    const i32 row = static_cast<i32>(blockIdx.x) % num_m_tiles * Config::kTileM;
    for (i32 step = 0; step < p.prefetch_steps; ++step) {
      Stage::prefetch_weights(p, expert, row, step);
    }
  }

  __device__ static void copy_weights(Smem& smem, const Params& p) {
    Ring ring;
    typename Queue::Cursor queued;
    Tile tile;
    if (kCluster > 1 && ptx::cluster_ctarank() > 0) {
      while (smem.queue.pop_alone(queued, tile)) copy_tile(smem, p, tile, ring);
      return;
    }
    const TileList<Config> tiles(p, smem);
    const u32 num_clusters = gridDim.x / kCluster;
    u32 index = blockIdx.x / kCluster;
    while (true) {
      const bool found = tiles.locate(index, tile);
      if (!found) tile.num_rows = 0;
      smem.queue.push(queued, tile);
      if (!found) return;
      const u32 next =
          num_clusters + (p.tile_counter != nullptr ? atomicAdd(p.tile_counter, 1u) : index);
      copy_tile(smem, p, tile, ring);
      index = next;
    }
  }

  // Past the end of the weights the last tile again: nobody looks at its products.
  __device__ __forceinline__ static void copy_tile(Smem& smem, const Params& p, Tile tile,
                                                   Ring& ring) {
    const ptx::L2Hint hint = p.stream_weights ? ptx::L2Hint::EvictFirst : ptx::L2Hint::EvictNormal;
    if constexpr (kCluster > 1) tile.m_tile = min(tile.m_tile, p.m / Config::kTileM - 1);
    for (i32 step = 0; step < num_steps(p); ++step, ring.advance()) {
      ptx::mbarrier_wait_parity(&smem.empty[ring.slot], ring.parity ^ 1);
      Stage::copy_weights(p, tile, step, smem.weights[ring.slot], &smem.full[ring.slot], hint);
    }
  }

  // Tokens of a stage, to all blocks of a cluster by the one whose turn it is.
  __device__ __forceinline__ static void copy_box(const Params& p, u8* tokens, u64* full, i32 row,
                                                  i32 window, i32 turn) {
    if constexpr (kCluster > 1) {
      if (turn != ptx::cluster_ctarank()) return;
      ptx::tma_load_3d_multicast(tokens, &p.token_map, full, 0, row, window, (1 << kCluster) - 1,
                                 ptx::L2Hint::EvictNormal);
    } else {
      ptx::tma_load_3d(tokens, &p.token_map, full, 0, row, window, ptx::L2Hint::EvictNormal);
    }
  }

  // By one thread. Of several boxes a window, only those with rows in use are copied. What lies
  // past the end of K arrives as zeros.
  __device__ static void copy_tokens(Smem& smem, const Params& p) {
    Tile tile;
    Ring ring;
    typename Queue::Cursor queued;
    while (smem.queue.pop_alone(queued, tile)) {
      const i32 num_boxes = ceil_div(tile.num_rows, kTokenBox);
      const i32 box_bytes = kTokenBox * kTokenRowBytes;
      const i32 num_all = num_windows(p);
#pragma unroll 1
      for (i32 window = 0; window < num_all; window += kWindows, ring.advance()) {
        ptx::mbarrier_wait_parity(&smem.empty[ring.slot], ring.parity ^ 1);
        ptx::mbarrier_arrive_expect_tx(&smem.full[ring.slot], kWindows * num_boxes * box_bytes);
#pragma unroll
        for (i32 i = 0; i < kWindows; i += kBoxWindows) {
          u8* tokens = smem.tokens[ring.slot] + i * kTokenWindowBytes;
#pragma unroll
          for (i32 box = 0; box < kTokenBoxes; ++box) {
            if (box >= num_boxes) break;
            copy_box(p, tokens + box * box_bytes, &smem.full[ring.slot],
                     tile.first_row + box * kTokenBox, window + i, (box + i) % kCluster);
          }
        }
      }
    }
  }

  // A warp copies four rows at a time, eight lanes a row. The rows of a stage are announced once
  // kAhead later stages are on their way.
  __device__ static void gather_tokens(Smem& smem, const Params& p, i32 warp, i32 lane) {
    constexpr i32 kRowsAtOnce = 4 * kTokenWarps;
    constexpr i32 kPasses = Config::kTileN / kRowsAtOnce;
    constexpr i32 kAhead = kNumStages > 2 ? max(1, min(Queue::kDepth, kNumStages / 2 - 1)) : 0;
    static_assert(kRowsAtOnce == 8, "rows of one pass are one atom of the swizzle");
    static_assert(kAhead + 2 <= kNumStages, "a stage may be held until the next one is announced");
    const i32 row = 4 * warp + lane / 8;
    const i32 vector = lane % 8;
    const i32 offset = row * kTokenRowBytes + ((vector ^ row) * 16);  // the 128-byte swizzle

    auto announce = [&](Ring& ring) {
      ptx::fence_proxy_async_shared();
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(&smem.full[ring.slot]);
      ring.advance();
    };

    Tile tile;
    Ring ring, announced;
    typename Queue::Cursor queued;
    i32 in_flight = 0;
    while (smem.queue.pop(queued, tile)) {
      u32 source[kPasses];  // past the rows in use, the last of them again
#pragma unroll
      for (i32 i = 0; i < kPasses; ++i) {
        const i32 r = min(row + i * kRowsAtOnce, tile.num_rows - 1);
        source[i] = static_cast<u32>(source_row<Config>(p, smem, tile.first_row + r));
      }
      const u32 row_bytes = static_cast<u32>(p.token_pitch);
#pragma unroll 1
      for (i32 left = num_windows(p); left > 0; left -= kWindows, ring.advance()) {
        ptx::mbarrier_wait_parity(&smem.empty[ring.slot], ring.parity ^ 1);
        // Made anew: of the registers that are saved here consumers get some.
        const i32 window = num_windows(p) - left;
        const u8* column = p.tokens + static_cast<u32>(window * kTokenRowBytes + vector * 16);
        u8* tokens = smem.tokens[ring.slot] + offset;
#pragma unroll
        for (i32 i = 0; i < kPasses; ++i) {
          if (i * kRowsAtOnce >= tile.num_rows) break;
          const u8* vectors = column + static_cast<u64>(source[i]) * row_bytes;
#pragma unroll
          for (i32 w = 0; w < kWindows; ++w) {
            if (w > 0 && w >= left) break;
            ptx::cp_async_cg_16(tokens + w * kTokenWindowBytes + i * kRowsAtOnce * kTokenRowBytes,
                                vectors + w * kTokenRowBytes);
          }
        }
        ptx::cp_async_commit_group();
        if (in_flight == kAhead) {
          ptx::cp_async_wait_group<kAhead>();
          announce(announced);
        } else {
          ++in_flight;
        }
      }
    }
    ptx::cp_async_wait_group<0>();
    for (; in_flight > 0; --in_flight) announce(announced);
  }
};

}  // namespace cupy_moe::gemm
