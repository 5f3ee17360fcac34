// From accumulator fragments to rows of the output.
//
// Prepared weight rows are shuffled inside blocks of 32: with g = lane / 4, rows g and g+8 of the
// block's first (half 0) or second (half 1) sixteen rows belong to
//   a gated FC1 (up and gate interleaved before the shuffle): up and gate of feature 16 b + 2 g +
//   half anything else: features 32 b + 4 g + 2 half and 32 b + 4 g + 2 half + 1
// where b counts blocks of 32 rows. So the two accumulators a thread holds for one column are
// exactly what an activation needs. Values pass through shared memory to leave in 16-byte vectors
// of a row.
#pragma once

#include "common/types.cuh"
#include "epilogue/activation.cuh"
#include "formats/bf16.cuh"
#include "formats/e4m3.cuh"
#include "gemm/smem_plan.cuh"

namespace cupy_moe::epilogue {

// What one expert contributes to every value of a tile.
struct ExpertScales {
  float output;  // s1 (FC1) or s2 (FC2)
  float gate;    // sg, FC1 only
  float limit;   // clamp limit on raw accumulators, SwigluStep only
};

// FC1: activation, then saturating E4M3. One byte a feature.
template <ActivationType kActivation>
struct ActivateToE4m3 {
  static constexpr bool kGated = is_gated(kActivation);
  static constexpr i32 kFeaturesPer32Rows = kGated ? 16 : 32;
  static constexpr i32 kElementBytes = 1;

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
  static constexpr i32 kElementBytes = 2;

  __device__ static void stage(u8* row, i32 block, i32 half, i32 group, float x0, float x1,
                               const ExpertScales& scales) {
    reinterpret_cast<u32*>(row)[16 * block + 2 * group + half] =
        formats::encode_bf16x2(scales.output * x0, scales.output * x1);
  }
};

template <typename Config, typename Mainloop, typename Transform>
struct TileStore {
  static constexpr i32 kTileFeatures = Config::kTileM / 32 * Transform::kFeaturesPer32Rows;
  static constexpr i32 kRowBytes = kTileFeatures * Transform::kElementBytes;
  static constexpr i32 kPitch = kRowBytes + 16;  // spreads the rows over the banks
  using Smem = typename Mainloop::Smem;
  static_assert(kRowBytes % 16 == 0, "rows leave in 16-byte vectors");
  static_assert(Config::kTileN * kPitch <= Smem::kRingBytes, "the staged tile must fit the ring");

  // `output` is the tile's first row and feature, `pitch` the bytes of an output row. Padding rows
  // are not written. The ring must be idle; the caller synchronizes before using it again.
  __device__ static void run(Smem& smem, const typename Mainloop::Accumulators& acc,
                             const ExpertScales& scales, u8* output, i64 pitch) {
    const i32 lane = static_cast<i32>(threadIdx.x) % 32;
#pragma unroll
    for (i32 n = 0; n < Mainloop::kFragsN; ++n) {
#pragma unroll
      for (i32 c = 0; c < 2; ++c) {
        const i32 column = Mainloop::warp_column() + 8 * n + 2 * (lane % 4) + c;
        const float scale = Mainloop::kAccScale * smem.token_scale[column];
        u8* row = smem.ring + column * kPitch;
#pragma unroll
        for (i32 m = 0; m < Mainloop::kFragsM; ++m) {
          const i32 sixteen = Mainloop::warp_row() / 16 + m;
          Transform::stage(row, sixteen / 2, sixteen % 2, lane / 4, scale * acc[m][n][c],
                           scale * acc[m][n][2 + c], scales);
        }
      }
    }
    __syncthreads();
    constexpr i32 kVectorsPerRow = kRowBytes / 16;
    for (i32 i = static_cast<i32>(threadIdx.x); i < Config::kTileN * kVectorsPerRow;
         i += Mainloop::kNumThreads) {
      const i32 row = i / kVectorsPerRow;
      const i32 vector = i % kVectorsPerRow;
      if (smem.token_offset[row] < 0) continue;
      *reinterpret_cast<uint4*>(output + row * pitch + vector * 16) =
          *reinterpret_cast<const uint4*>(smem.ring + row * kPitch + vector * 16);
    }
  }
};

}  // namespace cupy_moe::epilogue
