// What a thread of the Hopper main loop reads of FP4 weights in a stage, for fragments of 64 rows.
//
// With g = lane / 4 a lane has rows g and g + 8 of its warp's sixteen, and of each the block of
// scales lane % 4 in every span of K (formats/k_order.cuh): eight bytes of codes a window, those of
// all windows of a span side by side.
#pragma once

#include "common/types.cuh"
#include "common/words.cuh"
#include "gemm/scheduler.cuh"
#include "gemm/stage_fp4.cuh"

namespace cupy_moe::gemm {

// Of one row group of a tile; kGroupRows are 64 or 128.
template <typename Config, i32 kGroupRows>
class CodesFp4 {
 public:
  using Stage = StageFp4<Config>;
  using Scale = typename Stage::Scale;
  static constexpr i32 kSpanWindows = formats::kSpanWindows<Scale::kBlock>;

  // Of rows g and g + 8: eight bytes of codes a window, and the scale of all.
  template <i32 kNumWindows>
  struct Loaded {
    u32 words[2][2 * kNumWindows];
    u32 scales[2];
  };

  // The scales of a tile of 64 rows are in one half of theirs.
  __device__ CodesFp4(const Tile& tile, i32 group) {
    const i32 scaled_row = tile.m_tile * Config::kTileM % Stage::kScaleTileRows;
    const i32 lane = static_cast<i32>(threadIdx.x) % 32;
    const i32 warp = static_cast<i32>(threadIdx.x) / 32 % 4;
    const i32 row = group * kGroupRows + 16 * warp + lane / 4;
    codes_ = row * Stage::kBoxRowBytes + lane % 4 * kBlockBytes;
    scales_ = Stage::kCodeBytes + scale_row(scaled_row + row) + lane % 4;
    group_scales_ = Stage::kCodeBytes + scale_row(scaled_row + group * kGroupRows) + lane * 16;
  }

  // Of a unit of 64 rows, one window or all of a span.
  template <i32 kNumWindows>
  __device__ __forceinline__ Loaded<kNumWindows> load(const u8* stage, i32 window, i32 unit) const {
    static_assert(kNumWindows == 1 || kNumWindows == kSpanWindows);
    const u8* codes = stage + codes_ + window / 2 * Stage::kBoxBytes +
                      window % 2 / kSpanWindows * (4 * kBlockBytes) + window % kSpanWindows * 8;
    const u8* scales = stage + scales_ + window / kSpanWindows * Stage::kScaleTileBytes;
    Loaded<kNumWindows> loaded;
#pragma unroll
    for (i32 i = 0; i < 2; ++i) {
      const i32 row = 64 * unit + 8 * i;
      load_words(codes + row * Stage::kBoxRowBytes, loaded.words[i]);
      loaded.scales[i] = scales[scale_row(row)];
    }
    return loaded;
  }

  // Whether a stage may have scales that need a second multiplier. All warps of a group look at all
  // scales of the group, so that they agree.
  __device__ __forceinline__ bool any_rare(const u8* stage) const {
    if constexpr (Scale::kHasRare) {
      u32 bits = 0;
#pragma unroll
      for (i32 tile = 0; tile < Stage::kScaleTiles; ++tile) {
        u32 words[kGroupRows / 32];
        load_words(stage + group_scales_ + tile * Stage::kScaleTileBytes, words);
#pragma unroll
        for (u32 word : words) bits |= word;
      }
      return __any_sync(~0u, Scale::rare_bits(bits) != 0);
    }
    return false;
  }

 private:
  static constexpr i32 kBlockBytes = Scale::kBlock / 2;

  // Of the scales of a row in the first tile that has it.
  __device__ static i32 scale_row(i32 row) {
    constexpr i32 kRows = Stage::kScaleTileRows;
    return row / kRows * (Stage::kScaleTiles * Stage::kScaleTileBytes) + row % 32 * 16 +
           row % kRows / 32 * 4;
  }

  // Offsets in a stage.
  i32 codes_;
  i32 scales_;
  i32 group_scales_;  // of kGroupRows, spread over a warp
};

}  // namespace cupy_moe::gemm
