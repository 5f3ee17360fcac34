// Main loop for Hopper (sm_90a): weights by TMA, tokens by TMA or gathered by cp.async, products by
// wgmma.
//
// The last warpgroup fills a ring of stages: its warp 0 copies weight tiles, warp 2 copies token
// tiles or, with warp 3, gathers token rows. The others multiply; each owns kGroupRows weight rows
// of the tile, all its tokens and its part of the epilogue. The ring never drains between tiles.
// How a group multiplies depends on the number format of the operands.
#pragma once

#include "common/types.cuh"
#include "gemm/feed_wgmma.cuh"
#include "gemm/problem.cuh"
#include "gemm/products_e4m3.cuh"
#include "gemm/products_fp4.cuh"
#include "gemm/scheduler.cuh"
#include "ptx/pdl.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"

namespace cupy_moe::gemm {

template <typename Config, MoeFormat kFormat>
struct ProductsOf {
  using type = ProductsFp4<Config>;
};
template <typename Config>
struct ProductsOf<Config, MoeFormat::Fp8> {
  using type = ProductsE4m3<Config>;
};

template <typename Config>
struct MainloopWgmma {
  using Feed = FeedWgmma<Config>;
  using Products = typename ProductsOf<Config, Config::kMoeFormat>::type;
  using Smem = typename Feed::Smem;
  using Ring = typename Feed::Ring;
  using Queue = typename Feed::Queue;
  using Accumulators = typename Products::Accumulators;
  static constexpr i32 kConsumers = Feed::kConsumers;
  static constexpr i32 kConsumerWarps = Feed::kConsumerWarps;
  static constexpr i32 kNumThreads = Feed::kNumThreads;
  static constexpr i32 kGroupThreads = 128;
  static constexpr i32 kGroupRows = Feed::kGroupRows;
  static constexpr i32 kGroupColumns = Feed::kStagedTokens;
  static constexpr i32 kFragsM = Products::kFragsM;
  static constexpr i32 kFragsN = Config::kTileN / 8;
  static constexpr i32 kStagedFragsN = kGroupColumns / 8;
  static constexpr float kAccScale = Products::kAccScale;
  static_assert(kGroupRows % 64 == 0 && Config::kTileN % 8 == 0);

  // The threads that share rows of an epilogue, and their shared memory. Of large tiles one buffer
  // is filled while the other one is being written out.
  struct Group {
    i32 index;
    i32 thread;
    Smem& smem;
    i32 buffer = 0;

    __device__ u8* staging() const { return smem.staging[index][buffer]; }

    __device__ __forceinline__ void sync() const {
      ptx::named_barrier_sync(1 + index, kGroupThreads);
    }
    // First row and column of a fragment of this warp.
    __device__ __forceinline__ i32 fragment_row(i32 m) const { return 64 * m + thread / 32 * 16; }
    __device__ __forceinline__ i32 fragment_column(i32 n) const { return 8 * n; }

    __device__ __forceinline__ float row_scale(i32 row) const {
      if constexpr (kScalesRows<Config>) return smem.token_scale[index][row];
      return 1.0f;
    }

    // All threads have left this buffer: they have met after they filled the other one. With one
    // buffer those of FC1 have met for the scales; those of FC2 meet here.
    __device__ __forceinline__ void acquire_staging() {
      if constexpr (Feed::kStagingBuffers == 2) {
        buffer ^= 1;
      } else if constexpr (!kIsFc1<Config>) {
        sync();
      }
    }
  };

  // What the epilogue of FC1 needs arrives while products run, which need the registers.
  __device__ __forceinline__ static void begin_scales(Smem& smem, const Params& p,
                                                      const Group& group, const Tile& tile) {
    if constexpr (kScalesRows<Config>) {
      for (i32 row = group.thread; row < tile.num_rows; row += kGroupThreads) {
        const float scale = load_token_scale<Config>(p, smem, tile.first_row + row);
        smem.token_scale[group.index][row] = scale;
      }
    }
    if (group.thread == kGroupThreads - 1) {
      gemm::begin_scales<Config>(p, tile.expert, smem.expert_scales[group.index]);
    }
  }

  __device__ __forceinline__ static epilogue::ExpertScales end_scales(Smem& smem, const Params& p,
                                                                      const Group& group) {
    if (group.thread == kGroupThreads - 1) {
      gemm::end_scales<Config>(p, smem.expert_scales[group.index]);
    }
    group.sync();
    return smem.expert_scales[group.index];
  }

  template <typename Epilogue>
  __device__ static void consume(Smem& smem, const Params& p, i32 index, Epilogue epilogue) {
    Group group{index, static_cast<i32>(threadIdx.x) % kGroupThreads, smem};
    Tile tile;
    Ring ring;
    typename Queue::Cursor queued;
    while (smem.queue.pop(queued, tile)) {
      epilogue::ExpertScales scales;
      if constexpr (kIsFc1<Config>) {
        begin_scales(smem, p, group, tile);
      } else {
        scales = load_scales<Config>(p, tile.expert);
      }
      Accumulators acc;  // of columns in use
      Products::multiply(smem, ring, tile, index, Feed::num_windows(p), acc);
      if constexpr (kIsFc1<Config>) scales = end_scales(smem, p, group);
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
      ptx::setmaxnreg_dec<Feed::kProducerRegisters>();
      const i32 producer = warp - kConsumerWarps;
      if (producer == 0 && ptx::elect_sync()) {
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
          if (ptx::elect_sync()) Feed::copy_tokens(smem, p);
        }
      }
    } else {
      ptx::setmaxnreg_inc<Feed::kConsumerRegisters>();
      if constexpr (Config::kGatherTokens) ptx::griddepcontrol_wait();
      consume(smem, p, warp / 4, epilogue);
    }
    Feed::meet_cluster();
  }
};

}  // namespace cupy_moe::gemm
