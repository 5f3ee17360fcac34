// Main loop on mma.sync (sm_80 and later): a ring of stages that all threads fill and multiply.
//
// What a stage holds and how it is multiplied depends on the number format of the operands.
#pragma once

#include "common/types.cuh"
#include "gemm/operands_e4m3.cuh"
#include "gemm/operands_fp4.cuh"
#include "gemm/order.cuh"
#include "gemm/problem.cuh"
#include "gemm/scheduler.cuh"
#include "gemm/warp_tile.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/pdl.cuh"

namespace cupy_moe::gemm {

template <typename Config, MoeFormat kFormat>
struct OperandsOf {
  using type = OperandsFp4<Config>;
};
template <typename Config>
struct OperandsOf<Config, MoeFormat::Fp8> {
  using type = OperandsE4m3<Config>;
};

template <typename Config>
struct MainloopMma {
  using Warp = WarpTile<Config>;
  using Operands = typename OperandsOf<Config, Config::kMoeFormat>::type;
  using Accumulators = typename Warp::Accumulators;
  static constexpr i32 kNumThreads = Warp::kNumThreads;
  static constexpr i32 kGroupThreads = kNumThreads;
  static constexpr i32 kGroupRows = Config::kTileM;
  static constexpr i32 kGroupColumns = Config::kTileN;  // staged at once
  static constexpr i32 kFragsM = Warp::kFragsM;
  static constexpr i32 kFragsN = Warp::kFragsN;
  static constexpr i32 kStagedFragsN = kFragsN;
  static constexpr float kAccScale = Operands::kAccScale;
  static_assert(Config::kTileN <= kNumThreads, "one thread loads one row's source");

  // The epilogue reuses the ring.
  struct Smem : Order<Config> {
    static constexpr i32 kStageBytes = Operands::kStageBytes;
    static_assert(Config::kStagingBytes <= Config::kNumStages * kStageBytes);
    static_assert(Config::kNumStages >= 2, "one is filled while another one is multiplied");

    alignas(128) u8 ring[Config::kNumStages * kStageBytes];
    i64 token_offset[Config::kTileN];  // first byte of the row's source, -1 for padding
    float token_scale[kScaledRows<Config>];

    __device__ u8* stage(i32 index) { return ring + index * kStageBytes; }
  };

  // The threads that share rows of an epilogue, and their shared memory: the whole block.
  struct Group {
    i32 index;
    i32 thread;
    Smem& smem;

    __device__ u8* staging() const { return smem.ring; }

    __device__ __forceinline__ float row_scale(i32 row) const {
      if constexpr (kScalesRows<Config>) return smem.token_scale[row];
      return 1.0f;
    }

    // The ring is idle after the last product.
    __device__ __forceinline__ void acquire_staging() {}
    __device__ __forceinline__ void sync() const { __syncthreads(); }
    // First row and column of a fragment of this warp.
    __device__ __forceinline__ i32 fragment_row(i32 m) const { return Warp::first_row() + 16 * m; }
    __device__ __forceinline__ i32 fragment_column(i32 n) const {
      return Warp::first_column() + 8 * n;
    }
  };

  // acc += weights[kTileM, k] * tokens[kTileN, k]^T. On return the ring is idle and every thread of
  // the block has passed a barrier after its last read.
  __device__ static void multiply(Smem& smem, const Operands& operands, i32 k, Accumulators& acc) {
    const i32 num_steps = ceil_div(k, Config::kTileK);
    constexpr i32 kInFlight = Config::kNumStages - 1;
#pragma unroll
    for (i32 step = 0; step < kInFlight; ++step) {
      if (step < num_steps) operands.copy_stage(smem.stage(step), step);
      ptx::cp_async_commit_group();
    }
    i32 stage = 0;
    for (i32 step = 0; step < num_steps; ++step) {
      ptx::cp_async_wait_group<kInFlight - 1>();
      __syncthreads();  // this stage has arrived for all; the previous one has been read by all
      const i32 ahead = step + kInFlight;
      const i32 free_stage = stage == 0 ? Config::kNumStages - 1 : stage - 1;
      if (ahead < num_steps) operands.copy_stage(smem.stage(free_stage), ahead);
      ptx::cp_async_commit_group();
      Operands::multiply_stage(smem.stage(stage), acc);
      stage = stage + 1 == Config::kNumStages ? 0 : stage + 1;
    }
    ptx::cp_async_wait_group<0>();
    __syncthreads();
  }

  __device__ static void load_row(Smem& smem, const Params& p, const Tile& tile) {
    const i32 row = static_cast<i32>(threadIdx.x);
    if (row >= Config::kTileN) return;
    smem.token_offset[row] = -1;
    if (row >= tile.num_rows) return;
    const i32 permuted = tile.first_row + row;
    smem.token_offset[row] =
        static_cast<i64>(source_row<Config>(p, smem, permuted)) * p.token_pitch;
    if constexpr (kScalesRows<Config>) {
      smem.token_scale[row] = load_token_scale<Config>(p, smem, permuted);
    }
  }

  // Calls epilogue(tile, group, accumulators, scales) for every tile of this block.
  template <typename Epilogue>
  __device__ static void for_each_tile(Smem& smem, const Params& p, Epilogue epilogue) {
    ptx::griddepcontrol_wait();
    if constexpr (Config::kSortSlots) {
      if (threadIdx.x < 32) smem.sort(p, static_cast<i32>(threadIdx.x));
      __syncthreads();
    }
    Group group{0, static_cast<i32>(threadIdx.x), smem};
    const TileList<Config> tiles(p, smem);
    Tile tile;
    for (u32 index = blockIdx.x; tiles.locate(index, tile); index += gridDim.x) {
      load_row(smem, p, tile);
      __syncthreads();
      Accumulators acc = {};
      multiply(smem, Operands(p, tile, smem.token_offset), p.k, acc);
      epilogue(tile, group, acc, load_scales<Config>(p, tile.expert));
      __syncthreads();
    }
    ptx::griddepcontrol_launch_dependents();
  }
};

}  // namespace cupy_moe::gemm
