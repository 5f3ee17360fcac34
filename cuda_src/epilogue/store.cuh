// From accumulator fragments to rows of the output.
//
// Prepared weight rows are shuffled inside blocks of 32: with g = lane / 4, rows g and g+8 of the
// block's first (half 0) or second (half 1) sixteen rows belong to
//
//   gated FC1:  up and gate of feature 16 b + 2 g + half (interleaved before the shuffle)
//   otherwise:  features 32 b + 4 g + 2 half and the next one
//
// where b counts blocks of 32 rows. So the two accumulators a thread holds for one column are
// exactly what an activation needs. Values pass through shared memory to leave in 16-byte vectors
// of a row, or in words in the order of formats/k_order.cuh.
#pragma once

#include "common/types.cuh"
#include "epilogue/activation.cuh"
#include "epilogue/requantize.cuh"
#include "epilogue/scales.cuh"
#include "formats/bf16.cuh"
#include "formats/block_scale.cuh"
#include "formats/e4m3.cuh"
#include "formats/k_order.cuh"

namespace cupy_moe::epilogue {

// FC1: activation, then saturating E4M3. One byte a feature.
template <ActivationType kActivation>
struct ActivateToE4m3 {
  static constexpr bool kGated = is_gated(kActivation);
  static constexpr i32 kFeaturesPer32Rows = kGated ? 16 : 32;
  static constexpr i32 kStagedBytes = 1;
  static constexpr i32 kElementBytes = 1;
  static constexpr bool kRequantizes = false;
  static constexpr i32 kValuesAtOnce = 8;

  __device__ static void stage(u8* row, i32 block, i32 half, i32 group, float x0, float x1,
                               const ExpertScales& scales) {
    using Act = Activation<kActivation>;
    if constexpr (kGated) {
      const float h = Act::apply(x0, x1, scales.output, scales.gate, scales.limit);
      row[16 * block + 2 * group + half] = static_cast<u8>(formats::encode_e4m3x2(h, 0.0f));
    } else {
      const float h0 = Act::apply(x0, 0.0f, scales.output, scales.gate, scales.limit);
      const float h1 = Act::apply(x1, 0.0f, scales.output, scales.gate, scales.limit);
      *reinterpret_cast<u16*>(row + 32 * block + 4 * group + 2 * half) =
          formats::encode_e4m3x2(h0, h1);
    }
  }
};

// FC2: dequantize and round once to BF16.
struct ScaleToBf16 {
  static constexpr i32 kFeaturesPer32Rows = 32;
  static constexpr i32 kStagedBytes = 2;
  static constexpr i32 kElementBytes = 2;
  static constexpr bool kRequantizes = false;
  static constexpr i32 kValuesAtOnce = 8;

  __device__ static void stage(u8* row, i32 block, i32 half, i32 group, float x0, float x1,
                               const ExpertScales& scales) {
    reinterpret_cast<u32*>(row)[16 * block + 2 * group + half] =
        formats::encode_bf16x2(scales.output * x0, scales.output * x1);
  }
};

// One group of threads writes its kGroupRows weight rows of a tile, some columns at a time.
template <typename Config, typename Mainloop, typename Transform>
struct TileStore {
  static constexpr i32 kFeatures = Mainloop::kGroupRows / 32 * Transform::kFeaturesPer32Rows;
  static constexpr i32 kRowBytes = kFeatures * Transform::kElementBytes;
  static constexpr i32 kPitch = kFeatures * Transform::kStagedBytes + 16;  // spreads over the banks
  // Loads may not pass stores: so many values are computed between them, side by side.
  static constexpr i32 kFragsAtOnce = max(1, Transform::kValuesAtOnce / 2 / Mainloop::kFragsM);
  using Accumulators = typename Mainloop::Accumulators;
  using Group = typename Mainloop::Group;
  static_assert(kRowBytes % 16 == 0, "rows leave in 16-byte vectors");
  static_assert(Mainloop::kGroupColumns * kPitch == Config::kStagingBytes,
                "the host reserves what is staged");

  // Fragments [first, first + kStagedFragsN) of every column, transformed, as rows of tokens.
  __device__ static void stage(const Group& group, const Accumulators& acc, i32 first,
                               const ExpertScales& scales) {
#pragma unroll
    for (i32 n = 0; n < Mainloop::kStagedFragsN; n += kFragsAtOnce) {
      stage_some(group, acc, first, n, scales);
    }
  }

  __device__ __forceinline__ static void stage_some(const Group& group, const Accumulators& acc,
                                                    i32 first, i32 first_n,
                                                    const ExpertScales& scales) {
    const i32 lane = static_cast<i32>(threadIdx.x) % 32;
    float row_scales[kFragsAtOnce][2];
#pragma unroll
    for (i32 i = 0; i < kFragsAtOnce; ++i) {
      const i32 n = first_n + i;
      if (first + n >= Mainloop::kFragsN) break;  // the last columns may be fewer
#pragma unroll
      for (i32 c = 0; c < 2; ++c) {
        const i32 column = group.fragment_column(n) + 2 * (lane % 4) + c;
        row_scales[i][c] = Mainloop::kAccScale * group.row_scale(8 * first + column);
      }
    }
#pragma unroll
    for (i32 i = 0; i < kFragsAtOnce; ++i) {
      const i32 n = first_n + i;
      if (first + n >= Mainloop::kFragsN) break;
#pragma unroll
      for (i32 c = 0; c < 2; ++c) {
        const float scale = row_scales[i][c];
        u8* row = group.staging() + (group.fragment_column(n) + 2 * (lane % 4) + c) * kPitch;
#pragma unroll
        for (i32 m = 0; m < Mainloop::kFragsM; ++m) {
          const i32 sixteen = group.fragment_row(m) / 16;
          Transform::stage(row, sixteen / 2, sixteen % 2, lane / 4, scale * acc[m][first + n][c],
                           scale * acc[m][first + n][2 + c], scales);
        }
      }
    }
  }

  __device__ static void write(const Group& group, u8* output, i32 feature, i64 pitch, i32 num_rows,
                               const ExpertScales& scales) {
    if constexpr (Transform::kRequantizes) {
      requantize(group, output, feature, pitch, num_rows, scales);
    } else {
      copy(group, output + feature * Transform::kElementBytes, pitch, num_rows);
    }
  }

  __device__ static void copy(const Group& group, u8* output, i64 pitch, i32 num_rows) {
    constexpr i32 kVectorsPerRow = kRowBytes / 16;
#pragma unroll 2
    for (i32 i = group.thread; i < num_rows * kVectorsPerRow; i += Mainloop::kGroupThreads) {
      const i32 row = i / kVectorsPerRow;
      const i32 offset = i % kVectorsPerRow * 16;
      *reinterpret_cast<uint4*>(output + row * pitch + offset) =
          *reinterpret_cast<const uint4*>(group.staging() + row * kPitch + offset);
    }
  }

  // Four features a lane, so that small tiles keep all warps busy. Whole warps go on together, as
  // lanes share blocks.
  __device__ static void requantize(const Group& group, u8* output, i32 feature, i64 pitch,
                                    i32 num_rows, const ExpertScales& scales) {
    constexpr i32 kFoursPerRow = kFeatures / 4;
    static_assert(Mainloop::kGroupColumns * kFoursPerRow % 32 == 0, "staged for whole warps");
    static_assert(kFoursPerRow % 8 == 0, "a block lies in one row and one warp");
    const i32 lane = group.thread % 32;
    for (i32 first = group.thread - lane; first < num_rows * kFoursPerRow;
         first += Mainloop::kGroupThreads) {
      const i32 row = (first + lane) / kFoursPerRow;
      const i32 eight = (first + lane) % kFoursPerRow / 2;
      const i32 half = lane % 2;
      const u8* staged = group.staging() + row * kPitch + eight * 8 * Transform::kStagedBytes;
      const uint2 pairs = Transform::requantize(staged, half, scales);
      if (row < num_rows) {
        constexpr i32 kBlock = formats::WeightScaleOf<Config::kMoeFormat>::type::kBlock;
        formats::store_half_in_k_order<kBlock>(output + row * pitch, feature / 8 + eight, half,
                                               pairs.x, pairs.y);
      }
    }
  }

  // `output` is the tile's first row, `feature` the group's first one, `pitch` the bytes of a row.
  // Padding rows are not written.
  __device__ static void run(Group& group, const Accumulators& acc, const ExpertScales& scales,
                             i32 num_rows, u8* output, i32 feature, i64 pitch) {
#pragma unroll
    for (i32 first = 0; first < Mainloop::kFragsN; first += Mainloop::kStagedFragsN) {
      const i32 chunk = first / Mainloop::kStagedFragsN;
      const i32 first_row = chunk * Mainloop::kGroupColumns;
      if (first_row >= num_rows) return;
      group.acquire_staging();
      stage(group, acc, first, scales);
      group.sync();
      write(group, output + first_row * pitch, feature, pitch,
            min(num_rows - first_row, Mainloop::kGroupColumns), scales);
    }
  }
};

}  // namespace cupy_moe::epilogue
