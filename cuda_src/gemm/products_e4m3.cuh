// E4M3 products of the Hopper main loop: both operands in shared memory.
//
// The tensor cores keep fewer bits than FP32 between products. Every 128 of K therefore start from
// zero and are added to FP32 accumulators.
#pragma once

#include "common/types.cuh"
#include "gemm/feed_wgmma.cuh"
#include "gemm/scheduler.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"

namespace cupy_moe::gemm {

template <typename Config>
struct ProductsE4m3 {
  using Feed = FeedWgmma<Config>;
  using Smem = typename Feed::Smem;
  using Ring = typename Feed::Ring;
  static constexpr i32 kGroupRows = Feed::kGroupRows;
  static constexpr i32 kFragsM = kGroupRows / 64;
  static constexpr i32 kTileBytesK = 128;
  static constexpr float kAccScale = 1.0f;
  using Accumulators = float[kFragsM][Config::kTileN / 8][4];

  // acc = weights[kGroupRows, K] * tokens[kN, K]^T; other columns are left alone.
  template <i32 kN>
  __device__ static void multiply_columns(Smem& smem, Ring& ring, i32 group, i32 num_steps,
                                          Accumulators& acc) {
    const ptx::Swizzle128Operand weights(smem.weights[0] + group * kGroupRows * kTileBytesK);
    const ptx::Swizzle128Operand tokens(smem.tokens[0]);
    auto issue = [&](float* d, i32 m) {
      const ptx::Swizzle128Operand a = weights.at(ring.slot * sizeof(smem.weights[0]));
      const ptx::Swizzle128Operand b = tokens.at(ring.slot * sizeof(smem.tokens[0]));
      ptx::wgmma_fence();
#pragma unroll
      for (i32 k = 0; k < kTileBytesK; k += 32) {
        ptx::WgmmaE4m3<kN>::mma(d, a.descriptor(m * 64 * kTileBytesK + k), b.descriptor(k), k != 0);
      }
      ptx::wgmma_commit_group();
    };
#pragma unroll
    for (i32 i = 0; i < kFragsM * kN / 2; ++i) {
      const i32 m = i / (kN / 2);
      acc[m][i % (kN / 2) / 4][i % 4] = 0.0f;
    }
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
      Feed::release(smem, ring.slot);
    }
  }

  // The narrowest product that covers the rows in use: padding costs no tensor-core time.
  __device__ static void multiply(Smem& smem, Ring& ring, const Tile& tile, i32 group,
                                  i32 num_steps, Accumulators& acc) {
    if constexpr (Config::kTileN == 128) {
      if (tile.num_rows <= 32) return multiply_columns<32>(smem, ring, group, num_steps, acc);
      if (tile.num_rows <= 64) return multiply_columns<64>(smem, ring, group, num_steps, acc);
      if (tile.num_rows <= 96) return multiply_columns<96>(smem, ring, group, num_steps, acc);
    }
    if constexpr (Config::kTileN == 64) {
      if (tile.num_rows <= 32) return multiply_columns<32>(smem, ring, group, num_steps, acc);
    }
    multiply_columns<Config::kTileN>(smem, ring, group, num_steps, acc);
  }
};

}  // namespace cupy_moe::gemm
