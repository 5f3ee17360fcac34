// Main loop for Hopper (sm_90a): weights by TMA, tokens by TMA or gathered by cp.async, products by
// wgmma.
//
// The last warpgroup fills a ring of stages: its warp 0 copies weight tiles, warp 2 copies token
// tiles or, with warp 3, gathers token rows. The others multiply; each owns kGroupRows weight rows
// of the tile, all its tokens and its part of the epilogue. The ring never drains between tiles.
//
// The tensor cores keep fewer bits than FP32 between products. Every 128 of K therefore start from
// zero and are added to FP32 accumulators.
#pragma once

#include "common/types.cuh"
#include "gemm/problem.cuh"
#include "gemm/scheduler.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/pdl.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

namespace cupy_moe::gemm {

template <typename Config>
struct MainloopWgmma {
  static constexpr i32 kNumStages = Config::kNumStages;
  static constexpr i32 kTileBytesK = 128;                 // one row of the 128-byte swizzle
  static constexpr i32 kConsumers = Config::kWarpsM / 4;  // warpgroups
  static constexpr i32 kNumThreads = 128 * (kConsumers + 1);
  static constexpr i32 kGroupThreads = 128;
  static constexpr i32 kGroupRows = Config::kTileM / kConsumers;
  static constexpr i32 kGroupColumns = min(Config::kTileN, 32);  // staged at once
  static constexpr i32 kFragsM = kGroupRows / 64;
  static constexpr i32 kFragsN = Config::kTileN / 8;
  static constexpr i32 kStagedFragsN = kGroupColumns / 8;
  static constexpr float kAccScale = 1.0f;
  static_assert(Config::kTileK == kTileBytesK);
  static_assert(kGroupRows % 64 == 0 && Config::kTileN % 8 == 0);

  using Accumulators = float[kFragsM][kFragsN][4];

  // Gathering needs an address a row. Blocks of 384 threads start with 168 registers a thread.
  static constexpr i32 kProducerRegisters = Config::kGatherTokens ? 64 : 40;
  static constexpr i32 kConsumerRegisters = Config::kGatherTokens ? 216 : 232;
  static constexpr i32 kTokenWarps = Config::kGatherTokens ? 2 : 1;
  static constexpr i32 kConsumerWarps = 4 * kConsumers;
  static constexpr i32 kTokenBox = min(Config::kTileN, 32);  // rows of one tensor copy
  static constexpr i32 kScaledRows = kIsFc1<Config> ? Config::kTileN : 1;

  using Ring = RingCursor<kNumStages>;
  using Queue = TileQueue<kConsumerWarps + kTokenWarps>;

  struct Smem {
    alignas(1024) u8 weights[kNumStages][Config::kTileM * kTileBytesK];
    alignas(1024) u8 tokens[kNumStages][Config::kTileN * kTileBytesK];
    alignas(16) u8 staging[kConsumers][2][Config::kStagingBytes];
    float token_scale[kConsumers][kScaledRows];
    alignas(8) u64 full[kNumStages];
    u64 empty[kNumStages];
    Queue queue;
  };

  // The threads that share rows of an epilogue, and their shared memory. While one half of it is
  // being written out, the other one is filled.
  struct Group {
    i32 index;
    i32 thread;
    Smem& smem;
    i32 half = 0;

    __device__ u8* staging() const { return smem.staging[index][half]; }

    __device__ __forceinline__ void sync() const {
      ptx::named_barrier_sync(1 + index, kGroupThreads);
    }
    // First row and column of a fragment of this warp.
    __device__ __forceinline__ i32 fragment_row(i32 m) const { return 64 * m + thread / 32 * 16; }
    __device__ __forceinline__ i32 fragment_column(i32 n) const { return 8 * n; }

    __device__ __forceinline__ float row_scale(i32 row) const {
      if constexpr (kIsFc1<Config>) return smem.token_scale[index][row];
      return 1.0f;
    }

    // All threads have left this half: they have met after they filled the other one.
    __device__ __forceinline__ void acquire_staging() { half ^= 1; }
  };

  __device__ static void init_barriers(Smem& smem) {
    if (threadIdx.x == 0) {
      for (i32 stage = 0; stage < kNumStages; ++stage) {
        ptx::mbarrier_init(&smem.full[stage], 1 + kTokenWarps);
        ptx::mbarrier_init(&smem.empty[stage], kConsumerWarps);
      }
      smem.queue.init();
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
  }

  __device__ static void copy_weights(Smem& smem, const Params& p) {
    constexpr ptx::L2Hint kHint =
        Config::kStreamWeights ? ptx::L2Hint::EvictFirst : ptx::L2Hint::EvictNormal;
    const TileList<Config> tiles(p);
    Tile tile;
    Ring ring;
    typename Queue::Cursor queued;
    u32 index = blockIdx.x;
    while (true) {
      smem.queue.push(queued, index);
      if (!tiles.locate(index, tile)) return;
      const u32 next =
          gridDim.x + (p.tile_counter != nullptr ? atomicAdd(p.tile_counter, 1u) : index);
      for (i32 step = 0; step < p.k / kTileBytesK; ++step, ring.advance()) {
        ptx::mbarrier_wait_parity(&smem.empty[ring.slot], ring.parity ^ 1);
        ptx::mbarrier_arrive_expect_tx(&smem.full[ring.slot], sizeof(smem.weights[0]));
        ptx::tma_load_4d(smem.weights[ring.slot], &p.weight_map, &smem.full[ring.slot], 0,
                         tile.m_tile * Config::kTileM, step, tile.expert, kHint);
      }
      index = next;
    }
  }

  // Only the boxes with rows in use are copied.
  __device__ static void copy_tokens(Smem& smem, const Params& p, i32 lane) {
    const TileList<Config> tiles(p);
    Tile tile;
    Ring ring;
    typename Queue::Cursor queued;
    while (tiles.locate(smem.queue.pop(queued), tile)) {
      if (lane == 0) copy_token_tile(smem, p, tile, ring);
      __syncwarp();
    }
  }

  __device__ static void copy_token_tile(Smem& smem, const Params& p, const Tile& tile,
                                         Ring& ring) {
    const i32 num_boxes = ceil_div(tile.num_rows, kTokenBox);
    for (i32 step = 0; step < p.k / kTileBytesK; ++step, ring.advance()) {
      ptx::mbarrier_wait_parity(&smem.empty[ring.slot], ring.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(&smem.full[ring.slot], num_boxes * kTokenBox * kTileBytesK);
      for (i32 box = 0; box < num_boxes; ++box) {
        ptx::tma_load_2d(smem.tokens[ring.slot] + box * kTokenBox * kTileBytesK, &p.token_map,
                         &smem.full[ring.slot], step * kTileBytesK,
                         tile.first_row + box * kTokenBox, ptx::L2Hint::EvictNormal);
      }
    }
  }

  // A warp copies four rows at a time, eight lanes a row. The rows of a stage are announced once
  // kAhead later stages are on their way.
  __device__ static void gather_tokens(Smem& smem, const Params& p, i32 warp, i32 lane) {
    constexpr i32 kRowsAtOnce = 4 * kTokenWarps;
    constexpr i32 kPasses = Config::kTileN / kRowsAtOnce;
    constexpr i32 kAhead = max(1, min(Queue::kDepth, kNumStages / 2 - 1));
    static_assert(kRowsAtOnce == 8, "rows of one pass are one atom of the swizzle");
    static_assert(kAhead < kNumStages, "a stage is announced before its successors fill the ring");
    const i32 row = 4 * warp + lane / 8;
    const i32 vector = lane % 8;
    const i32 offset = row * kTileBytesK + ((vector ^ row) * 16);  // the 128-byte swizzle

    auto announce = [&](Ring& ring) {
      ptx::fence_proxy_async_shared();
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(&smem.full[ring.slot]);
      ring.advance();
    };

    const TileList<Config> tiles(p);
    Tile tile;
    Ring ring, announced;
    typename Queue::Cursor queued;
    i32 in_flight = 0;
    while (tiles.locate(smem.queue.pop(queued), tile)) {
      u32 source[kPasses];  // past the rows in use, the last of them again
#pragma unroll
      for (i32 i = 0; i < kPasses; ++i) {
        const i32 r = min(row + i * kRowsAtOnce, tile.num_rows - 1);
        source[i] = static_cast<u32>(source_row<Config>(p, tile.first_row + r));
      }
      const u8* column = p.tokens + vector * 16;
      const u32 row_bytes = static_cast<u32>(p.k);
      for (i32 step = 0; step < p.k / kTileBytesK; ++step, ring.advance()) {
        ptx::mbarrier_wait_parity(&smem.empty[ring.slot], ring.parity ^ 1);
        u8* tokens = smem.tokens[ring.slot] + offset;
#pragma unroll
        for (i32 i = 0; i < kPasses; ++i) {
          if (i * kRowsAtOnce >= tile.num_rows) break;
          ptx::cp_async_cg_16(tokens + i * kRowsAtOnce * kTileBytesK,
                              column + static_cast<u64>(source[i]) * row_bytes);
        }
        column += kTileBytesK;
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

  // acc += weights[kGroupRows, 128] * tokens[kN, 128]^T of every stage of a tile.
  template <i32 kN>
  __device__ static void multiply(Smem& smem, Ring& ring, const Group& group, i32 num_steps,
                                  Accumulators& acc) {
    const ptx::Swizzle128Operand weights(smem.weights[0] + group.index * kGroupRows * kTileBytesK);
    const ptx::Swizzle128Operand tokens(smem.tokens[0]);
    auto issue = [&](float* d, i32 m) {
      const u32 a = ring.slot * sizeof(smem.weights[0]) + m * 64 * kTileBytesK;
      const u32 b = ring.slot * sizeof(smem.tokens[0]);
      ptx::wgmma_fence();
#pragma unroll
      for (i32 k = 0; k < kTileBytesK; k += 32) {
        ptx::WgmmaE4m3<kN>::mma(d, weights.descriptor(a + k), tokens.descriptor(b + k), k != 0);
      }
      ptx::wgmma_commit_group();
    };
#pragma unroll 1
    for (i32 step = 0; step < num_steps; ++step, ring.advance()) {
      ptx::mbarrier_wait_parity(&smem.full[ring.slot], ring.parity);
#pragma unroll
      for (i32 m = 0; m < kFragsM; ++m) {
        float partial[kN / 2];
        issue(partial, m);
        ptx::wgmma_wait_group<0>();
        ptx::wgmma_fence_registers(partial);
#pragma unroll
        for (i32 i = 0; i < kN / 2; ++i) acc[m][i / 4][i % 4] += partial[i];
      }
      if (group.thread % 32 == 0) ptx::mbarrier_arrive(&smem.empty[ring.slot]);
    }
  }

  // The narrowest product that covers the rows in use: padding costs no tensor-core time.
  __device__ static void multiply_rows_in_use(Smem& smem, Ring& ring, const Group& group,
                                              i32 num_steps, i32 num_rows, Accumulators& acc) {
    if constexpr (Config::kTileN == 128) {
      if (num_rows <= 32) return multiply<32>(smem, ring, group, num_steps, acc);
      if (num_rows <= 64) return multiply<64>(smem, ring, group, num_steps, acc);
      if (num_rows <= 96) return multiply<96>(smem, ring, group, num_steps, acc);
    }
    if constexpr (Config::kTileN == 64) {
      if (num_rows <= 32) return multiply<32>(smem, ring, group, num_steps, acc);
    }
    multiply<Config::kTileN>(smem, ring, group, num_steps, acc);
  }

  template <typename Epilogue>
  __device__ static void consume(Smem& smem, const Params& p, i32 index, Epilogue epilogue) {
    Group group{index, static_cast<i32>(threadIdx.x) % kGroupThreads, smem};
    const TileList<Config> tiles(p);
    Tile tile;
    Ring ring;
    typename Queue::Cursor queued;
    while (tiles.locate(smem.queue.pop(queued), tile)) {
      const epilogue::ExpertScales scales = load_scales<Config>(p, tile.expert);
      if (kIsFc1<Config> && group.thread < tile.num_rows) {
        smem.token_scale[index][group.thread] =
            load_token_scale<Config>(p, tile.first_row + group.thread);
      }
      Accumulators acc = {};
      multiply_rows_in_use(smem, ring, group, p.k / kTileBytesK, tile.num_rows, acc);
      if constexpr (kIsFc1<Config>) group.sync();  // token_scale
      epilogue(tile, group, acc, scales);
    }
  }

  // Calls epilogue(tile, group, accumulators, scales) for every tile of this block.
  //
  // Unless tokens are gathered, this GEMM follows a kernel that let it start after the permutation
  // had ended. So the list of tiles is there: weights are loaded at once, and only the rows that
  // the kernel before writes are waited for.
  template <typename Epilogue>
  __device__ static void for_each_tile(Smem& smem, const Params& p, Epilogue epilogue) {
    init_barriers(smem);
    const i32 warp = __shfl_sync(~0u, static_cast<i32>(threadIdx.x) / 32, 0);
    const i32 lane = static_cast<i32>(threadIdx.x) % 32;
    if (warp >= kConsumerWarps) {
      ptx::setmaxnreg_dec<kProducerRegisters>();
      const i32 producer = warp - kConsumerWarps;
      if (producer == 0 && lane == 0) {
        ptx::prefetch_tensor_map(&p.weight_map);
        if constexpr (Config::kGatherTokens) ptx::griddepcontrol_wait();
        copy_weights(smem, p);
      } else if (producer >= 2 && producer < 2 + kTokenWarps) {
        ptx::griddepcontrol_wait();
        ptx::griddepcontrol_launch_dependents();  // not before: see above
        if constexpr (Config::kGatherTokens) {
          gather_tokens(smem, p, producer - 2, lane);
        } else {
          ptx::fence_proxy_async_global();
          copy_tokens(smem, p, lane);
        }
      }
    } else {
      ptx::setmaxnreg_inc<kConsumerRegisters>();
      if constexpr (Config::kGatherTokens) ptx::griddepcontrol_wait();
      consume(smem, p, warp / 4, epilogue);
    }
  }
};

}  // namespace cupy_moe::gemm
