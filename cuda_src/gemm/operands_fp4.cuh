// FP4 weights with block scales and BF16 tokens for mma.sync, weights widened in registers.
//
// A weight times its scale is exact in BF16, and so are the products in the FP32 accumulators.
// Tokens come in the order of formats/k_order.cuh, weights and scales as they were prepared: a row
// shuffle that FC1's epilogue and the store undo, and the 128x4 order of scales.
#pragma once

#include "common/types.cuh"
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
  static constexpr i32 kWeightBytes = Config::kTileM * kWeightRowBytes;
  static constexpr i32 kScaleBytes = kScaleTiles * kScaleTileBytes;
  static constexpr i32 kStageBytes =
      kWeightBytes + kScaleBytes + kWindows * Config::kTileN * kTokenRowBytes;
  static_assert(Config::kTileM == 128, "the rows of a tile of scales");
  static_assert(kWeightRowBytes == 64 && kWindows == 2, "half a weight row is one window");

  // Of a tile.
  const u8* weights;
  const u8* scales;
  const u8* tokens;
  i32 k;
  i32 block_shift;
  i32 row_bytes;
  i64 block_stride;

  __device__ OperandsFp4(const Params& p, const Tile& tile)
      : tokens(p.tokens), k(p.k), block_shift(p.weight_block_shift) {
    const i64 expert_rows = static_cast<i64>(tile.expert) * p.m;
    const i32 row = tile.m_tile * Config::kTileM;
    row_bytes = min(p.k / 2, 1 << block_shift);
    block_stride = static_cast<i64>(p.m) * row_bytes;
    weights = p.weights + expert_rows * (p.k / 2) + static_cast<i64>(row) * row_bytes;
    scales = p.weight_scales + (expert_rows + row) * (p.k / Scale::kBlock);
  }

  // Two rows of a tile of weights fill all banks; every other pair of rows has the windows swapped,
  // so that neither loads of 8 bytes of four rows collide.
  __device__ static i32 weight_offset(i32 row, i32 vector) {
    return row * kWeightRowBytes + (vector ^ (row & 2)) * kVectorBytes;
  }
  __device__ static i32 token_offset_in_stage(i32 row, i32 window, i32 vector) {
    return (window * Config::kTileN + row) * kTokenRowBytes + (vector ^ (row & 7)) * kVectorBytes;
  }
  __device__ static i32 scale_offset(i32 row) { return row % 32 * 16 + row / 32 * 4; }

  // Starts the copies of one K step. What lies past the end of K is zero.
  __device__ void copy_stage(u8* stage, const i64* token_offset, i32 step) const {
    copy_weights(stage, step);
    copy_scales(stage + kWeightBytes, step);
    copy_tokens(stage + kWeightBytes + kScaleBytes, token_offset, step);
  }

  __device__ void copy_weights(u8* stage, i32 step) const {
    constexpr i32 kVectorsPerRow = kWeightRowBytes / kVectorBytes;
    const i32 thread = static_cast<i32>(threadIdx.x);
    const i32 first_byte = step * kWeightRowBytes;
    const u8* block = weights + (first_byte >> block_shift) * block_stride +
                      (first_byte & ((1 << block_shift) - 1));
#pragma unroll
    for (i32 i = 0; i < Config::kTileM * kVectorsPerRow / Warp::kNumThreads; ++i) {
      const i32 index = thread + i * Warp::kNumThreads;
      const i32 row = index / kVectorsPerRow;
      const i32 vector = index % kVectorsPerRow;
      const bool valid = 2 * (first_byte + vector * kVectorBytes) < k;
      const i64 source = static_cast<i64>(row) * row_bytes + vector * kVectorBytes;
      ptx::cp_async_cg_16_or_zero(stage + weight_offset(row, vector), block + (valid ? source : 0),
                                  valid);
    }
  }

  __device__ void copy_scales(u8* stage, i32 step) const {
    const i32 vector = static_cast<i32>(threadIdx.x);
    if (vector >= kScaleBytes / kVectorBytes) return;
    const i32 offset = step * kScaleBytes + vector * kVectorBytes;
    const bool valid = offset < Config::kTileM * (k / Scale::kBlock);
    ptx::cp_async_cg_16_or_zero(stage + vector * kVectorBytes, scales + (valid ? offset : 0),
                                valid);
  }

  __device__ void copy_tokens(u8* stage, const i64* token_offset, i32 step) const {
    constexpr i32 kVectorsPerRow = 2 * Config::kTileK / kVectorBytes;
    constexpr i32 kVectorsPerWindow = kTokenRowBytes / kVectorBytes;
    const i32 thread = static_cast<i32>(threadIdx.x);
#pragma unroll
    for (i32 i = 0; i < Config::kTileN * kVectorsPerRow / Warp::kNumThreads; ++i) {
      const i32 index = thread + i * Warp::kNumThreads;
      const i32 row = index / kVectorsPerRow;
      const i32 vector = index % kVectorsPerRow;
      const i32 byte = 2 * step * Config::kTileK + vector * kVectorBytes;
      const bool valid = token_offset[row] >= 0 && byte < 2 * k;
      const i32 offset =
          token_offset_in_stage(row, vector / kVectorsPerWindow, vector % kVectorsPerWindow);
      ptx::cp_async_cg_16_or_zero(stage + offset, tokens + (valid ? token_offset[row] + byte : 0),
                                  valid);
    }
  }

  // Eight bytes and the scale of two rows of a fragment.
  struct RowPair {
    uint2 codes[2];
    u32 scale[2];  // multipliers
    u32 rare[2];
    bool is_rare;

    __device__ __forceinline__ void load(const u8* stage, i32 row, i32 window, i32 q) {
      u32 bytes[2];
#pragma unroll
      for (i32 i = 0; i < 2; ++i) {
        const i32 r = row + 8 * i;
        const u8* place = stage + weight_offset(r, 2 * window + q / 2) + q % 2 * 8;
        codes[i] = *reinterpret_cast<const uint2*>(place);
        const i32 column = (window * formats::kWindow + 16 * q) / Scale::kBlock;
        bytes[i] =
            stage[kWeightBytes + column / 4 * kScaleTileBytes + scale_offset(r) + column % 4];
        rare[i] = Scale::rare_multiplier(bytes[i]);
      }
      is_rare = Scale::is_rare(bytes[0]) || Scale::is_rare(bytes[1]);
      Scale::multipliers(bytes[0], bytes[1], scale[0], scale[1]);
    }

    __device__ __forceinline__ void widen(i32 row, i32 word, bool any_rare, u32 (&pairs)[4]) const {
      formats::widen_e2m1x8(word == 0 ? codes[row].x : codes[row].y, scale[row], pairs);
      if (any_rare) {
#pragma unroll
        for (u32& pair : pairs) pair = formats::mul_bf16x2(pair, rare[row]);
      }
    }
  };

  __device__ static void multiply_stage(const u8* stage, Accumulators& acc) {
#pragma unroll
    for (i32 window = 0; window < kWindows; ++window) multiply_window(stage, window, acc);
  }

  __device__ static void multiply_window(const u8* stage, i32 window, Accumulators& acc) {
    const i32 lane = static_cast<i32>(threadIdx.x) % 32;
    RowPair rows[Warp::kFragsM];
    bool is_rare = false;
#pragma unroll
    for (i32 m = 0; m < Warp::kFragsM; ++m) {
      rows[m].load(stage, Warp::first_row() + 16 * m + lane / 4, window, lane % 4);
      is_rare |= rows[m].is_rare;
    }
    const bool any_rare = __any_sync(~0u, is_rare);
    const u8* tokens = stage + kWeightBytes + kScaleBytes;
#pragma unroll
    for (i32 word = 0; word < 2; ++word) {
      u32 pairs[Warp::kFragsM][2][4];
#pragma unroll
      for (i32 m = 0; m < Warp::kFragsM; ++m) {
        rows[m].widen(0, word, any_rare, pairs[m][0]);
        rows[m].widen(1, word, any_rare, pairs[m][1]);
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
