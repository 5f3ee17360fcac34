// FP4 weights with block scales and BF16 tokens for mma.sync, weights widened in registers.
//
// A weight times its scale is exact in BF16, and so are the products in the FP32 accumulators.
// Tokens come in the order of formats/k_order.cuh, weights and scales as they were prepared: a row
// shuffle that FC1's epilogue and the store undo, and the 128x4 order of scales.
#pragma once

#include "common/types.cuh"
#include "common/words.cuh"
#include "formats/block_scale.cuh"
#include "formats/e2m1.cuh"
#include "formats/k_order.cuh"
#include "gemm/problem.cuh"
#include "gemm/scheduler.cuh"
#include "gemm/warp_tile.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mma.cuh"

namespace cupy_moe::gemm {

template <typename Config>
struct OperandsFp4 {
  using Warp = WarpTile<Config>;
  using Accumulators = typename Warp::Accumulators;
  using Scale = typename formats::WeightScaleOf<Config::kMoeFormat>::type;
  static constexpr float kAccScale = Scale::kGain;
  static constexpr i32 kVectorBytes = 16;
  static constexpr i32 kWindows = Config::kTileK / formats::kWindow;
  static constexpr i32 kWeightRowBytes = Config::kTileK / 2;
  static constexpr i32 kTokenRowBytes = 2 * formats::kWindow;  // of one window
  static constexpr i32 kScaleTileBytes = 512;                  // 128 rows by 4 scales
  static constexpr i32 kScaleTiles = Config::kTileK / Scale::kBlock / 4;
  static constexpr i32 kSpanWindows = formats::kSpanWindows<Scale::kBlock>;
  static constexpr i32 kWeightBytes = Config::kTileM * kWeightRowBytes;
  static constexpr i32 kScaleBytes = kScaleTiles * kScaleTileBytes;
  static constexpr i32 kStageBytes =
      kWeightBytes + kScaleBytes + kWindows * Config::kTileN * kTokenRowBytes;
  static_assert(Config::kTileM == 128, "the rows of a tile of scales");
  static_assert(kWeightRowBytes == 64 && kWindows == 2, "one span of MXFP4 or two of NVFP4");

  static constexpr i32 kWeightVectors = kWeightRowBytes / kVectorBytes;  // of a row
  static constexpr i32 kTokenVectors = 2 * Config::kTileK / kVectorBytes;
  static constexpr i32 kTokenCopies = ceil_div(Config::kTileN * kTokenVectors, Warp::kNumThreads);
  static_assert(Warp::kNumThreads % kTokenVectors == 0, "a thread copies one column of vectors");

  // Where a thread finds its vectors of a tile.
  const u8* weights;
  const u8* scales;
  const u8* tokens[kTokenCopies];  // null for padding
  i32 k;
  i32 block_shift;
  i32 row_bytes;
  i64 block_stride;

  __device__ OperandsFp4(const Params& p, const Tile& tile, const i64* token_offset)
      : k(p.k), block_shift(p.weight_block_shift) {
    const i32 thread = static_cast<i32>(threadIdx.x);
    const i64 expert_rows = static_cast<i64>(tile.expert) * p.m;
    const i32 row = tile.m_tile * Config::kTileM;
    row_bytes = min(p.k / 2, 1 << block_shift);
    block_stride = static_cast<i64>(p.m) * row_bytes;
    weights = p.weights + expert_rows * (p.k / 2) +
              static_cast<i64>(row + thread / kWeightVectors) * row_bytes +
              thread % kWeightVectors * kVectorBytes;
    scales = p.weight_scales + (expert_rows + row) * (p.k / Scale::kBlock) + thread * kVectorBytes;
#pragma unroll
    for (i32 i = 0; i < kTokenCopies; ++i) {
      const i32 r = min(Config::kTileN - 1, token_row(i));
      const bool valid = token_offset[r] >= 0 && token_row(i) < Config::kTileN;
      tokens[i] =
          valid ? p.tokens + token_offset[r] + thread % kTokenVectors * kVectorBytes : nullptr;
    }
  }

  __device__ static i32 token_row(i32 copy) {
    return (static_cast<i32>(threadIdx.x) + copy * Warp::kNumThreads) / kTokenVectors;
  }

  // Two rows of a tile of weights fill all banks; every other pair of rows has its halves swapped,
  // so that neither loads of 8 bytes of four rows collide.
  __device__ static i32 weight_offset(i32 row, i32 vector) {
    return row * kWeightRowBytes + (vector ^ (row & 2)) * kVectorBytes;
  }
  __device__ static i32 token_offset_in_stage(i32 row, i32 window, i32 vector) {
    return (window * Config::kTileN + row) * kTokenRowBytes + (vector ^ (row & 7)) * kVectorBytes;
  }
  __device__ static i32 scale_offset(i32 row) { return row % 32 * 16 + row / 32 * 4; }

  // Starts the copies of one K step. What lies past the end of K, or is padding, becomes zero;
  // nothing is read there.
  __device__ void copy_stage(u8* stage, i32 step) const {
    copy_weights(stage, step);
    copy_scales(stage + kWeightBytes, step);
    copy_tokens(stage + kWeightBytes + kScaleBytes, step);
  }

  __device__ void copy_weights(u8* stage, i32 step) const {
    constexpr i32 kRowsAtOnce = Warp::kNumThreads / kWeightVectors;
    const i32 thread = static_cast<i32>(threadIdx.x);
    const i32 row = thread / kWeightVectors;
    const i32 vector = thread % kWeightVectors;
    const i32 first_byte = step * kWeightRowBytes;
    const bool valid = 2 * (first_byte + vector * kVectorBytes) < k;
    const u8* source = weights + (first_byte >> block_shift) * block_stride +
                       (first_byte & ((1 << block_shift) - 1));
#pragma unroll
    for (i32 i = 0; i < Config::kTileM / kRowsAtOnce; ++i) {
      ptx::cp_async_cg_16_or_zero(stage + weight_offset(row + i * kRowsAtOnce, vector),
                                  source + static_cast<i64>(i * kRowsAtOnce) * row_bytes, valid);
    }
  }

  __device__ void copy_scales(u8* stage, i32 step) const {
    const i32 offset = static_cast<i32>(threadIdx.x) * kVectorBytes;
    if (offset >= kScaleBytes) return;
    const bool valid = step * kScaleBytes + offset < Config::kTileM * (k / Scale::kBlock);
    ptx::cp_async_cg_16_or_zero(stage + offset, scales + step * kScaleBytes, valid);
  }

  __device__ void copy_tokens(u8* stage, i32 step) const {
    constexpr i32 kVectorsPerWindow = kTokenRowBytes / kVectorBytes;
    const i32 vector = static_cast<i32>(threadIdx.x) % kTokenVectors;
    const i32 byte = 2 * step * Config::kTileK;
    const bool in_row = byte + vector * kVectorBytes < 2 * k;
#pragma unroll
    for (i32 i = 0; i < kTokenCopies; ++i) {
      if (token_row(i) >= Config::kTileN) return;
      const i32 offset = token_offset_in_stage(token_row(i), vector / kVectorsPerWindow,
                                               vector % kVectorsPerWindow);
      ptx::cp_async_cg_16_or_zero(stage + offset, tokens[i] + byte, in_row && tokens[i] != nullptr);
    }
  }

  // Scales of rows g and g + 8 of a fragment, of a lane's block in each span.
  struct ScalePair {
    u32 bytes[2][kScaleTiles];

    __device__ __forceinline__ void load(const u8* stage, i32 row, i32 q) {
#pragma unroll
      for (i32 i = 0; i < 2; ++i) {
#pragma unroll
        for (i32 span = 0; span < kScaleTiles; ++span) {
          bytes[i][span] =
              stage[kWeightBytes + span * kScaleTileBytes + scale_offset(row + 8 * i) + q];
        }
      }
    }

    __device__ __forceinline__ bool is_rare() const {
      bool rare = false;
#pragma unroll
      for (i32 span = 0; span < kScaleTiles; ++span) {
        rare |= Scale::is_rare(bytes[0][span]) || Scale::is_rare(bytes[1][span]);
      }
      return rare;
    }
  };

  __device__ static void multiply_stage(const u8* stage, Accumulators& acc) {
    const i32 lane = static_cast<i32>(threadIdx.x) % 32;
    ScalePair scales[Warp::kFragsM];
#pragma unroll
    for (i32 m = 0; m < Warp::kFragsM; ++m) {
      scales[m].load(stage, Warp::first_row() + 16 * m + lane / 4, lane % 4);
    }
    if constexpr (Scale::kHasRare) {
      bool rare = false;
#pragma unroll
      for (i32 m = 0; m < Warp::kFragsM; ++m) rare |= scales[m].is_rare();
      if (__any_sync(~0u, rare)) return multiply_windows<true>(stage, scales, acc);
    }
    multiply_windows<false>(stage, scales, acc);
  }

  // A lane's codes of a span, of rows g and g + 8 of every fragment.
  using Codes = u32[Warp::kFragsM][2][2 * kSpanWindows];

  __device__ static void load_codes(const u8* stage, i32 span, Codes& codes) {
    const i32 lane = static_cast<i32>(threadIdx.x) % 32;
    const i32 q = lane % 4;
#pragma unroll
    for (i32 m = 0; m < Warp::kFragsM; ++m) {
#pragma unroll
      for (i32 i = 0; i < 2; ++i) {
        const i32 row = Warp::first_row() + 16 * m + 8 * i + lane / 4;
        if constexpr (kSpanWindows == 2) {
          load_words(stage + weight_offset(row, q), codes[m][i]);
        } else {
          load_words(stage + weight_offset(row, 2 * span + q / 2) + q % 2 * 8, codes[m][i]);
        }
      }
    }
  }

  template <bool kRare>
  __device__ static void multiply_windows(const u8* stage, const ScalePair (&scales)[Warp::kFragsM],
                                          Accumulators& acc) {
#pragma unroll
    for (i32 span = 0; span < kScaleTiles; ++span) {
      Codes codes;
      load_codes(stage, span, codes);
#pragma unroll
      for (i32 i = 0; i < kSpanWindows; ++i) {
        multiply_window<kRare>(stage, span, i, codes, scales, acc);
      }
    }
  }

  template <bool kRare>
  __device__ static void multiply_window(const u8* stage, i32 span, i32 window_in_span,
                                         const Codes& codes,
                                         const ScalePair (&scales)[Warp::kFragsM],
                                         Accumulators& acc) {
    const i32 lane = static_cast<i32>(threadIdx.x) % 32;
    const i32 window = span * kSpanWindows + window_in_span;
    u32 multipliers[Warp::kFragsM][2];
#pragma unroll
    for (i32 m = 0; m < Warp::kFragsM; ++m) {
      u32 upper = scales[m].bytes[0][span];
      u32 lower = scales[m].bytes[1][span];
      if constexpr (kRare) {
        upper = Scale::clamp_rare(upper);
        lower = Scale::clamp_rare(lower);
      }
      Scale::multipliers(upper, lower, multipliers[m][0], multipliers[m][1]);
    }
    const u8* tokens = stage + kWeightBytes + kScaleBytes;
#pragma unroll
    for (i32 word = 0; word < 2; ++word) {
      u32 pairs[Warp::kFragsM][2][4];
#pragma unroll
      for (i32 m = 0; m < Warp::kFragsM; ++m) {
#pragma unroll
        for (i32 i = 0; i < 2; ++i) {
          formats::widen_e2m1x8(codes[m][i][2 * window_in_span + word], multipliers[m][i],
                                pairs[m][i]);
          if constexpr (kRare) {
            const u32 rare = Scale::rare_multiplier(scales[m].bytes[i][span]);
#pragma unroll
            for (u32& pair : pairs[m][i]) pair = formats::mul_bf16x2(pair, rare);
          }
        }
      }
#pragma unroll
      for (i32 n = 0; n < Warp::kFragsN; ++n) {
        u32 b[4];
        const i32 row = Warp::first_column() + 8 * n + lane % 8;
        ptx::ldmatrix_x4(b, tokens + token_offset_in_stage(row, window, 4 * word + lane / 8));
#pragma unroll
        for (i32 m = 0; m < Warp::kFragsM; ++m) {
          const auto& [upper, lower] = pairs[m];
          ptx::mma_m16n8k16_bf16(acc[m][n], {upper[0], lower[0], upper[1], lower[1]}, b[0], b[1]);
          ptx::mma_m16n8k16_bf16(acc[m][n], {upper[2], lower[2], upper[3], lower[3]}, b[2], b[3]);
        }
      }
    }
  }
};

}  // namespace cupy_moe::gemm
