// Main loop for Hopper (sm_90a): weights by TMA, tokens gathered by cp.async, products by wgmma.
//
// The last warpgroup fills a ring of stages: its warp 0 copies weight tiles, warps 2 and 3 gather
// token rows. The others multiply; each owns kGroupRows weight rows of the tile, all its tokens and
// its part of the epilogue. All roles walk the same list of tiles, so the ring never drains between
// tiles.
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
  static constexpr i32 kTileBytesK = 128;  // one row of the 128-byte swizzle
  static constexpr i32 kConsumers = Config::kTileM == 64 ? 1 : 2;  // warpgroups
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

  struct Smem {
    alignas(1024) u8 weights[kNumStages][Config::kTileM * kTileBytesK];
    alignas(1024) u8 tokens[kNumStages][Config::kTileN * kTileBytesK];
    alignas(16) u8 staging[kConsumers][Config::kStagingBytes];
    float token_scale[kConsumers][Config::kTileN];
    alignas(8) u64 full[kNumStages];
    u64 empty[kNumStages];
  };

  // Position in the ring. The parity flips with every lap.
  struct Ring {
    i32 stage = 0;
    u32 parity = 0;

    __device__ __forceinline__ void advance() {
      if (++stage == kNumStages) {
        stage = 0;
        parity ^= 1;
      }
    }
  };

  // The threads that share rows of an epilogue, and their shared memory.
  struct Group {
    i32 index;
    i32 thread;
    u8* staging;
    const float* token_scale;

    __device__ __forceinline__ void sync() const {
      ptx::named_barrier_sync(1 + index, kGroupThreads);
    }
    // First row and column of a fragment of this warp.
    __device__ __forceinline__ i32 fragment_row(i32 m) const { return 64 * m + thread / 32 * 16; }
    __device__ __forceinline__ i32 fragment_column(i32 n) const { return 8 * n; }
  };

  static constexpr i32 kTokenWarps = 2;
  static constexpr i32 kConsumerWarps = 4 * kConsumers;

  __device__ static void init_barriers(Smem& smem) {
    if (threadIdx.x == 0) {
      for (i32 stage = 0; stage < kNumStages; ++stage) {
        ptx::mbarrier_init(&smem.full[stage], 1 + kTokenWarps);
        ptx::mbarrier_init(&smem.empty[stage], kConsumerWarps);
      }
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
  }

  __device__ static void copy_weights(Smem& smem, const Params& p) {
    constexpr ptx::L2Hint kHint =
        Config::kStreamWeights ? ptx::L2Hint::EvictFirst : ptx::L2Hint::EvictNormal;
    TileScheduler<Config> scheduler(p);
    Tile tile;
    Ring ring;
    while (scheduler.advance(tile)) {
      for (i32 step = 0; step < p.k / kTileBytesK; ++step, ring.advance()) {
        ptx::mbarrier_wait_parity(&smem.empty[ring.stage], ring.parity ^ 1);
        ptx::mbarrier_arrive_expect_tx(&smem.full[ring.stage], sizeof(smem.weights[0]));
        ptx::tma_load_4d(smem.weights[ring.stage], &p.weight_map, &smem.full[ring.stage], 0,
                         tile.m_tile * Config::kTileM, step, tile.expert, kHint);
      }
    }
  }

  // A warp copies four rows at a time, eight lanes a row. Its lanes keep the sources of all its
  // rows between them. The rows of a stage are announced once kAhead later stages are on their way.
  __device__ static void gather_tokens(Smem& smem, const Params& p, i32 warp, i32 lane) {
    constexpr i32 kRowsAtOnce = 4 * kTokenWarps;
    constexpr i32 kPasses = Config::kTileN / kRowsAtOnce;
    constexpr i32 kAhead = max(1, min(4, kNumStages / 2 - 1));
    const i32 row = 4 * warp + lane / 8;
    const i32 vector = lane % 8;
    const i32 offset = row * kTileBytesK + ((vector ^ row) * 16);  // the 128-byte swizzle

    auto announce = [&](Ring& ring) {
      ptx::fence_proxy_async_shared();
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(&smem.full[ring.stage]);
      ring.advance();
    };

    TileScheduler<Config> scheduler(p);
    Tile tile;
    Ring ring, announced;
    i32 in_flight = 0;
    while (scheduler.advance(tile)) {
      u32 source[kPasses];  // past the rows in use, the last of them again
#pragma unroll
      for (i32 i = 0; i < kPasses; ++i) {
        const i32 r = min(row + i * kRowsAtOnce, tile.num_rows - 1);
        source[i] = static_cast<u32>(source_row<Config>(p, tile.first_row + r));
      }
      const u8* column = p.tokens + vector * 16;
      const u32 row_bytes = static_cast<u32>(p.k);
      for (i32 step = 0; step < p.k / kTileBytesK; ++step, ring.advance()) {
        ptx::mbarrier_wait_parity(&smem.empty[ring.stage], ring.parity ^ 1);
        u8* tokens = smem.tokens[ring.stage] + offset;
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
    auto issue = [&](float* d, i32 m, bool fresh) {
      const u32 a = ring.stage * sizeof(smem.weights[0]) + m * 64 * kTileBytesK;
      const u32 b = ring.stage * sizeof(smem.tokens[0]);
      ptx::wgmma_fence();
#pragma unroll
      for (i32 k = 0; k < kTileBytesK; k += 32) {
        ptx::WgmmaE4m3<kN>::mma(d, weights.descriptor(a + k), tokens.descriptor(b + k),
                                !fresh || k != 0);
      }
      ptx::wgmma_commit_group();
    };
    auto promote = [&](const float* d, i32 m) {
#pragma unroll
      for (i32 i = 0; i < kN / 2; ++i) acc[m][i / 4][i % 4] += d[i];
    };
    auto release = [&](i32 stage) {
      if (group.thread % 32 == 0) ptx::mbarrier_arrive(&smem.empty[stage]);
    };
#ifndef VARIANT
#define VARIANT 0
#endif
#if VARIANT == 0 || VARIANT == 1
#pragma unroll 1
    for (i32 step = 0; step < num_steps; ++step, ring.advance()) {
      ptx::mbarrier_wait_parity(&smem.full[ring.stage], ring.parity);
#pragma unroll
      for (i32 m = 0; m < kFragsM; ++m) {
        float partial[kN / 2];
#if VARIANT == 1
        ptx::named_barrier_sync(4 + group.index, 256);
#endif
        issue(partial, m, true);
#if VARIANT == 1
        asm volatile("bar.arrive %0, %1;" ::"r"(5 - group.index), "r"(256) : "memory");
#endif
        ptx::wgmma_wait_group<0>();
        promote(partial, m);
      }
      release(ring.stage);
    }
#elif VARIANT == 2
    static_assert(kFragsM == 1);
    float even[kN / 2], odd[kN / 2];
    i32 step = 0;
    i32 previous = ring.stage;
    auto next = [&]() {
      previous = ring.stage;
      ring.advance();
      ptx::mbarrier_wait_parity(&smem.full[ring.stage], ring.parity);
    };
    ptx::mbarrier_wait_parity(&smem.full[ring.stage], ring.parity);
    issue(even, 0, true);
#pragma unroll 1
    while (true) {
      if (++step == num_steps) {
        ptx::wgmma_wait_group<0>();
        promote(even, 0);
        break;
      }
      next();
      issue(odd, 0, true);
      ptx::wgmma_wait_group<1>();
      release(previous);
      promote(even, 0);
      if (++step == num_steps) {
        ptx::wgmma_wait_group<0>();
        promote(odd, 0);
        break;
      }
      next();
      issue(even, 0, true);
      ptx::wgmma_wait_group<1>();
      release(previous);
      promote(odd, 0);
    }
    release(ring.stage);
    ring.advance();
#elif VARIANT == 3
#pragma unroll 1
    for (i32 step = 0; step < num_steps; ++step, ring.advance()) {
      ptx::mbarrier_wait_parity(&smem.full[ring.stage], ring.parity);
#pragma unroll
      for (i32 m = 0; m < kFragsM; ++m) issue(&acc[m][0][0], m, step == 0);
      ptx::wgmma_wait_group<0>();
      release(ring.stage);
    }
#endif
  }

  // The narrowest product that covers the rows in use: padding costs no tensor-core time.
  __device__ static void multiply(Smem& smem, Ring& ring, const Group& group, i32 num_steps,
                                  i32 num_rows, Accumulators& acc) {
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
    const i32 thread = static_cast<i32>(threadIdx.x) % kGroupThreads;
    float* token_scale = smem.token_scale[index];
    const Group group{index, thread, smem.staging[index], token_scale};
    TileScheduler<Config> scheduler(p);
    Tile tile;
    Ring ring;
    while (scheduler.advance(tile)) {
      const epilogue::ExpertScales scales = load_scales<Config>(p, tile.expert);
      if (thread < tile.num_rows) {
        token_scale[thread] = load_token_scale<Config>(p, tile.first_row + thread);
      }
      Accumulators acc = {};
      multiply(smem, ring, group, p.k / kTileBytesK, tile.num_rows, acc);
      group.sync();
      epilogue(tile, group, acc, scales);
    }
  }

  // Calls epilogue(tile, group, accumulators, scales) for every tile of this block.
  //
  // FC2 starts to load weights before FC1 has ended: the list of tiles comes from the permutation,
  // which had ended before FC1 let FC2 start. Only FC1's rows must be waited for.
  template <typename Epilogue>
  __device__ static void for_each_tile(Smem& smem, const Params& p, Epilogue epilogue) {
    init_barriers(smem);
    const i32 warp = __shfl_sync(~0u, static_cast<i32>(threadIdx.x) / 32, 0);
    const i32 lane = static_cast<i32>(threadIdx.x) % 32;
    if (warp >= kConsumerWarps) {
      ptx::setmaxnreg_dec<56>();
      const i32 producer = warp - kConsumerWarps;
      if (producer == 0 && lane == 0) {
        ptx::prefetch_tensor_map(&p.weight_map);
        if constexpr (kIsFc1<Config>) ptx::griddepcontrol_wait();
        copy_weights(smem, p);
      } else if (producer >= 4 - kTokenWarps) {
        ptx::griddepcontrol_wait();
        ptx::griddepcontrol_launch_dependents();
        gather_tokens(smem, p, producer - (4 - kTokenWarps), lane);
      }
    } else {
      ptx::setmaxnreg_inc<224>();
      if constexpr (kIsFc1<Config>) ptx::griddepcontrol_wait();
      consume(smem, p, warp / 4, epilogue);
    }
  }
};

}  // namespace cupy_moe::gemm
