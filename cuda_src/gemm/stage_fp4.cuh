// What a stage of the Hopper ring holds of FP4 weights and BF16 tokens: some windows of K.
//
// Codes lie as [128 of K][row][64 B], then come the scales, of every 128 rows as tiles of 128 rows
// by 4 scales. Tokens lie window by window, a row of 128 bytes each. What lies past the end of K is
// not copied; codes there become zero where they share a copy with others.
#pragma once

#include "common/types.cuh"
#include "formats/block_scale.cuh"
#include "formats/k_order.cuh"
#include "gemm/problem.cuh"
#include "gemm/scheduler.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

namespace cupy_moe::gemm {

template <typename Config>
struct StageFp4 {
  using Scale = typename formats::WeightScaleOf<Config::kMoeFormat>::type;
  static constexpr i32 kWindow = formats::kWindow;  // of K in 128 bytes of a token row
  static constexpr i32 kWindows = Config::kTileK / kWindow;
  static constexpr i32 kBoxK = 128;  // of one copy of codes
  static constexpr i32 kBoxRowBytes = kBoxK / 2;
  static constexpr i32 kBoxBytes = Config::kTileM * kBoxRowBytes;
  static constexpr i32 kBoxes = Config::kTileK / kBoxK;
  static constexpr i32 kCodeBytes = kBoxes * kBoxBytes;
  static constexpr i32 kScaleTileRows = 128;
  static constexpr i32 kScaleTileK = 4 * Scale::kBlock;
  static constexpr i32 kScaleTileBytes = 512;
  static constexpr i32 kScaleTiles = Config::kTileK / kScaleTileK;  // of the same rows
  static constexpr i32 kScaledRowBlocks = ceil_div(Config::kTileM, kScaleTileRows);
  static constexpr i32 kScaleBytes = kScaledRowBlocks * kScaleTiles * kScaleTileBytes;
  static constexpr i32 kWeightBytes = kCodeBytes + kScaleBytes;
  static_assert(Config::kTileK % kBoxK == 0 && kBoxK == 2 * kWindow);

  // By one thread; announces what it copies to `full`. K is a multiple of kScaleTileK.
  __device__ static void copy_weights(const Params& p, const Tile& tile, i32 step, u8* stage,
                                      u64* full, ptx::L2Hint hint) {
    const u32 k_left = static_cast<u32>(p.k - step * Config::kTileK);
    const u32 num_boxes = min(u32{kBoxes}, (k_left + kBoxK - 1) / kBoxK);
    const u32 scale_bytes = min(u32{kScaleTiles}, k_left / kScaleTileK) * kScaleTileBytes;
    ptx::mbarrier_arrive_expect_tx(full, num_boxes * kBoxBytes + kScaledRowBlocks * scale_bytes);
    const i32 row = tile.m_tile * Config::kTileM;
    const i32 block_mask = (1 << p.weight_block_shift) - 1;
#pragma unroll
    for (i32 box = 0; box < kBoxes; ++box) {
      if (box >= num_boxes) break;
      const i32 byte = (step * kBoxes + box) * kBoxRowBytes;
      ptx::tma_load_4d(stage + box * kBoxBytes, &p.weight_map, full, byte & block_mask, row,
                       byte >> p.weight_block_shift, tile.expert, hint);
    }
    // NOTE: rows of all experts fit 32 bits, which divide cheaply without a sign.
    const u32 row_block_bytes = static_cast<u32>(p.k) / kScaleTileK * kScaleTileBytes;
    const u32 row_block = static_cast<u32>(tile.expert * p.m + row) / kScaleTileRows;
    const u8* scales = p.weight_scales + static_cast<u64>(row_block) * row_block_bytes +
                       step * (kScaleTiles * kScaleTileBytes);
#pragma unroll
    for (i32 i = 0; i < kScaledRowBlocks; ++i) {
      ptx::bulk_load(stage + kCodeBytes + i * kScaleTiles * kScaleTileBytes,
                     scales + i * row_block_bytes, full, scale_bytes, hint);
    }
  }

  __device__ static void prefetch_weights(const Params& p, i32 expert, i32 row, i32 step) {
    const i32 block_mask = (1 << p.weight_block_shift) - 1;
#pragma unroll
    for (i32 box = 0; box < kBoxes; ++box) {
      const i32 byte = (step * kBoxes + box) * kBoxRowBytes;
      ptx::tma_prefetch_4d(&p.weight_map, byte & block_mask, row, byte >> p.weight_block_shift,
                           expert);
    }
  }
};

}  // namespace cupy_moe::gemm
