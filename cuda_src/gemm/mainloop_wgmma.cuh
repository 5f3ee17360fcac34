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
#include "gemm/feed_wgmma.cuh"
#include "gemm/problem.cuh"
#include "gemm/scheduler.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/pdl.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

namespace cupy_moe::gemm {

template <typename Config>
struct MainloopWgmma {
  using Feed = FeedWgmma<Config>;
  using Smem = typename Feed::Smem;
  using Ring = typename Feed::Ring;
  using Queue = typename Feed::Queue;
  static constexpr i32 kTileBytesK = Feed::kTileBytesK;
  static constexpr i32 kConsumers = Feed::kConsumers;
  static constexpr i32 kConsumerWarps = Feed::kConsumerWarps;
  static constexpr i32 kNumThreads = 128 * (kConsumers + 1);
  static constexpr i32 kGroupThreads = 128;
  static constexpr i32 kGroupRows = Config::kTileM / kConsumers;
  static constexpr i32 kGroupColumns = min(Config::kTileN, 32);  // staged at once
  static constexpr i32 kFragsM = kGroupRows / 64;
  static constexpr i32 kFragsN = Config::kTileN / 8;
  static constexpr i32 kStagedFragsN = kGroupColumns / 8;
  static constexpr float kAccScale = 1.0f;
  static_assert(kGroupRows % 64 == 0 && Config::kTileN % 8 == 0);

  using Accumulators = float[kFragsM][kFragsN][4];

  // Gathering needs an address a row. Blocks of 384 threads start with 168 registers a thread.
  static constexpr i32 kProducerRegisters = Config::kGatherTokens ? 64 : 40;
  static constexpr i32 kConsumerRegisters = Config::kGatherTokens ? 216 : 232;

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
    const TileList<Config> tiles(p, smem);
    Tile tile;
    Ring ring;
    typename Queue::Cursor queued;
    while (tiles.locate(smem.queue.pop(queued), tile)) {
      const epilogue::ExpertScales scales = load_scales<Config>(p, tile.expert);
      if (kIsFc1<Config> && group.thread < tile.num_rows) {
        smem.token_scale[index][group.thread] =
            load_token_scale<Config>(p, smem, tile.first_row + group.thread);
      }
      Accumulators acc = {};
      multiply_rows_in_use(smem, ring, group, p.k / kTileBytesK, tile.num_rows, acc);
      if constexpr (kIsFc1<Config>) group.sync();  // token_scale
      epilogue(tile, group, acc, scales);
    }
  }

  // Calls epilogue(tile, group, accumulators, scales) for every tile of this block.
  //
  // Unless tokens are gathered, this GEMM follows a kernel that let it start after the permutation,
  // or whatever made the ids, had ended. So the list of tiles is there: weights are loaded at once,
  // and only the rows that the kernel before writes are waited for.
  template <typename Epilogue>
  __device__ static void for_each_tile(Smem& smem, const Params& p, Epilogue epilogue) {
    const i32 warp = __shfl_sync(~0u, static_cast<i32>(threadIdx.x) / 32, 0);
    const i32 lane = static_cast<i32>(threadIdx.x) % 32;
    if constexpr (Config::kSortSlots) {
      if (warp == kConsumerWarps) {
        if constexpr (kIsFc1<Config>) ptx::griddepcontrol_wait();
        smem.sort(p, lane);
      }
    }
    Feed::init_barriers(smem);
    if (warp >= kConsumerWarps) {
      ptx::setmaxnreg_dec<kProducerRegisters>();
      const i32 producer = warp - kConsumerWarps;
      if (producer == 0 && lane == 0) {
        ptx::prefetch_tensor_map(&p.weight_map);
        Feed::prefetch_weights(p);
        if constexpr (Config::kGatherTokens) ptx::griddepcontrol_wait();
        Feed::copy_weights(smem, p);
      } else if (producer >= 2 && producer < 2 + Feed::kTokenWarps) {
        ptx::griddepcontrol_wait();
        ptx::griddepcontrol_launch_dependents();  // not before: see above
        if constexpr (Config::kGatherTokens) {
          Feed::gather_tokens(smem, p, producer - 2, lane);
        } else {
          ptx::fence_proxy_async_global();
          Feed::copy_tokens(smem, p, lane);
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
