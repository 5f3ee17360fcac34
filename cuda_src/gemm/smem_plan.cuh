// Shared memory of the grouped GEMM: a ring of stages, each a weight tile and a token tile.
//
// A tile is cut along K into chunks of 64 bytes, chunk-major: [chunk][row][64 B]. A quarter warp
// reads 16 bytes of two neighbouring rows of one chunk, 128 contiguous bytes, so loads have no bank
// conflicts; odd chunks swap neighbouring rows, so that the 8 vectors of one global row, which lie
// in two chunks, do not collide when they are stored.
#pragma once

#include "common/types.cuh"

namespace cupy_moe::gemm {

constexpr i32 kChunkBytes = 64;
constexpr i32 kVectorBytes = 16;

template <i32 kRows>
__device__ __forceinline__ i32 tile_offset(i32 row, i32 chunk, i32 vector) {
  return (chunk * kRows + (row ^ (chunk & 1))) * kChunkBytes + vector * kVectorBytes;
}

template <typename Config>
struct SmemPlan {
  static constexpr i32 kWeightBytes = Config::kTileM * Config::kTileK;
  static constexpr i32 kTokenBytes = Config::kTileN * Config::kTileK;
  static constexpr i32 kStageBytes = kWeightBytes + kTokenBytes;
  static constexpr i32 kRingBytes = Config::kNumStages * kStageBytes;

  alignas(128) u8 ring[kRingBytes];  // the epilogue reuses it to transpose its tile
  i64 token_offset[Config::kTileN];  // first byte of the row's source, -1 for padding
  float token_scale[Config::kTileN];

  __device__ u8* weights(i32 stage) { return ring + stage * kStageBytes; }
  __device__ u8* tokens(i32 stage) { return weights(stage) + kWeightBytes; }
};

}  // namespace cupy_moe::gemm
