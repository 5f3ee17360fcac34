// E4M3 weights and tokens for mma.sync, widened to FP16 in registers.
//
// E4M3 is exact in FP16 and so are the products in the FP32 accumulators. A dot product does not
// care in which order K is walked: of every 64 bytes of a row a thread takes 16 contiguous ones,
// for weights and tokens alike, and feeds them to four MMAs.
#pragma once

#include "common/types.cuh"
#include "formats/e4m3.cuh"
#include "gemm/problem.cuh"
#include "gemm/scheduler.cuh"
#include "gemm/warp_tile.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mma.cuh"

namespace cupy_moe::gemm {

template <typename Config>
struct OperandsE4m3 {
  using Warp = WarpTile<Config>;
  using Accumulators = typename Warp::Accumulators;
  static constexpr i32 kChunkBytes = 64;
  static constexpr i32 kVectorBytes = 16;
  static constexpr i32 kNumChunks = Config::kTileK / kChunkBytes;
  static constexpr i32 kWeightBytes = Config::kTileM * Config::kTileK;
  static constexpr i32 kStageBytes = kWeightBytes + Config::kTileN * Config::kTileK;
  static constexpr float kAccScale =
      1.0f / (formats::kF16FromE4m3Scale * formats::kF16FromE4m3Scale);
  static_assert(Config::kTileK % (2 * kChunkBytes) == 0, "rows are copied in pairs of chunks");

  // Place of 16 bytes in a tile of shared memory. A tile is cut along K into chunks of 64 bytes,
  // chunk-major: [chunk][row][64 B]. A quarter warp reads 16 bytes of two neighbouring rows of one
  // chunk, 128 contiguous bytes, so loads have no bank conflicts; odd chunks swap neighbouring
  // rows, so that the 8 vectors of one global row, which lie in two chunks, do not collide when
  // stored.
  template <i32 kRows>
  __device__ static i32 tile_offset(i32 row, i32 chunk, i32 vector) {
    return (chunk * kRows + (row ^ (chunk & 1))) * kChunkBytes + vector * kVectorBytes;
  }

  // 16 bytes of each of a row's fragment as FP16 pairs: word j of the vector becomes [2j], [2j+1].
  struct RowVector {
    u32 pairs[8];

    __device__ __forceinline__ void load(const u8* smem) {
      const uint4 bytes = *reinterpret_cast<const uint4*>(smem);
      formats::decode_e4m3x4_to_f16(bytes.x, pairs[0], pairs[1]);
      formats::decode_e4m3x4_to_f16(bytes.y, pairs[2], pairs[3]);
      formats::decode_e4m3x4_to_f16(bytes.z, pairs[4], pairs[5]);
      formats::decode_e4m3x4_to_f16(bytes.w, pairs[6], pairs[7]);
    }
  };

  const u8* weights;  // first of the tile
  const u8* tokens;
  const i64* token_offset;  // of the tile's rows, -1 for padding
  i32 row_bytes;

  __device__ OperandsE4m3(const Params& p, const Tile& tile, const i64* offsets)
      : weights(p.weights +
                (static_cast<i64>(tile.expert) * p.m + tile.m_tile * Config::kTileM) * p.k),
        tokens(p.tokens),
        token_offset(offsets),
        row_bytes(p.k) {}

  // Starts the copies of one K step: weights of kTileM rows and the gathered token rows.
  __device__ void copy_stage(u8* stage, i32 step) const {
    constexpr i32 kVectorsPerRow = Config::kTileK / kVectorBytes;
    constexpr i32 kVectorsPerChunk = kChunkBytes / kVectorBytes;
    const i32 thread = static_cast<i32>(threadIdx.x);
    const i32 k_offset = step * Config::kTileK;
#pragma unroll
    for (i32 i = 0; i < ceil_div(Config::kTileM * kVectorsPerRow, Warp::kNumThreads); ++i) {
      const i32 index = thread + i * Warp::kNumThreads;
      const i32 row = index / kVectorsPerRow;
      const i32 vector = index % kVectorsPerRow;
      const i32 offset =
          tile_offset<Config::kTileM>(row, vector / kVectorsPerChunk, vector % kVectorsPerChunk);
      ptx::cp_async_cg_16(stage + offset, weights + static_cast<i64>(row) * row_bytes + k_offset +
                                              vector * kVectorBytes);
    }
#pragma unroll
    for (i32 i = 0; i < ceil_div(Config::kTileN * kVectorsPerRow, Warp::kNumThreads); ++i) {
      const i32 index = thread + i * Warp::kNumThreads;
      const i32 row = index / kVectorsPerRow;
      const i32 vector = index % kVectorsPerRow;
      if (row >= Config::kTileN) break;
      const i64 source = token_offset[row];
      const bool valid = source >= 0;
      const i32 offset =
          tile_offset<Config::kTileN>(row, vector / kVectorsPerChunk, vector % kVectorsPerChunk);
      ptx::cp_async_cg_16_or_zero(stage + kWeightBytes + offset,
                                  tokens + (valid ? source + k_offset + vector * kVectorBytes : 0),
                                  valid);
    }
  }

  __device__ static void multiply_stage(const u8* stage, Accumulators& acc) {
#pragma unroll
    for (i32 chunk = 0; chunk < kNumChunks; ++chunk) {
      multiply_chunk(stage, stage + kWeightBytes, chunk, acc);
    }
  }

  __device__ static void multiply_chunk(const u8* weights, const u8* tokens, i32 chunk,
                                        Accumulators& acc) {
    const i32 lane = static_cast<i32>(threadIdx.x) % 32;
    const i32 group = lane / 4;   // row of the fragment
    const i32 vector = lane % 4;  // 16 bytes of the chunk
    RowVector frag_a[Warp::kFragsM][2];
#pragma unroll
    for (i32 m = 0; m < Warp::kFragsM; ++m) {
      const i32 row = Warp::first_row() + 16 * m + group;
      frag_a[m][0].load(weights + tile_offset<Config::kTileM>(row, chunk, vector));
      frag_a[m][1].load(weights + tile_offset<Config::kTileM>(row + 8, chunk, vector));
    }
#pragma unroll
    for (i32 n = 0; n < Warp::kFragsN; ++n) {
      RowVector frag_b;
      frag_b.load(tokens +
                  tile_offset<Config::kTileN>(Warp::first_column() + 8 * n + group, chunk, vector));
#pragma unroll
      for (i32 j = 0; j < 4; ++j) {
        const u32 b[2] = {frag_b.pairs[2 * j], frag_b.pairs[2 * j + 1]};
#pragma unroll
        for (i32 m = 0; m < Warp::kFragsM; ++m) {
          const u32 a[4] = {frag_a[m][0].pairs[2 * j], frag_a[m][1].pairs[2 * j],
                            frag_a[m][0].pairs[2 * j + 1], frag_a[m][1].pairs[2 * j + 1]};
          ptx::mma_m16n8k16_f16(acc[m][n], a, b);
        }
      }
    }
  }
};

}  // namespace cupy_moe::gemm
