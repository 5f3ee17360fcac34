// Main loop on mma.sync (sm_80 and later): E4M3 weights and tokens widened to FP16 in registers.
//
// E4M3 is exact in FP16 and so are the products in the FP32 accumulators. A dot product does not
// care in which order K is walked: of every 64 bytes of a row a thread takes 16 contiguous ones,
// for weights and tokens alike, and feeds them to four MMAs.
#pragma once

#include "common/types.cuh"
#include "formats/e4m3.cuh"
#include "gemm/order.cuh"
#include "gemm/problem.cuh"
#include "gemm/scheduler.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mma.cuh"
#include "ptx/pdl.cuh"

namespace cupy_moe::gemm {

constexpr i32 kChunkBytes = 64;
constexpr i32 kVectorBytes = 16;

// Place of 16 bytes in a tile of shared memory. A tile is cut along K into chunks of 64 bytes,
// chunk-major: [chunk][row][64 B]. A quarter warp reads 16 bytes of two neighbouring rows of one
// chunk, 128 contiguous bytes, so loads have no bank conflicts; odd chunks swap neighbouring rows,
// so that the 8 vectors of one global row, which lie in two chunks, do not collide when stored.
template <i32 kRows>
__device__ __forceinline__ i32 tile_offset(i32 row, i32 chunk, i32 vector) {
  return (chunk * kRows + (row ^ (chunk & 1))) * kChunkBytes + vector * kVectorBytes;
}

template <typename Config>
struct MainloopMma {
  static constexpr i32 kWarpM = Config::kTileM / Config::kWarpsM;
  static constexpr i32 kWarpN = Config::kTileN / Config::kWarpsN;
  static constexpr i32 kNumChunks = Config::kTileK / kChunkBytes;
  static constexpr i32 kNumThreads = 32 * Config::kWarpsM * Config::kWarpsN;
  static constexpr i32 kGroupThreads = kNumThreads;
  static constexpr i32 kGroupRows = Config::kTileM;
  static constexpr i32 kGroupColumns = Config::kTileN;  // staged at once
  static constexpr i32 kFragsM = kWarpM / 16;
  static constexpr i32 kFragsN = kWarpN / 8;
  static constexpr i32 kStagedFragsN = kFragsN;
  static constexpr float kAccScale =
      1.0f / (formats::kF16FromE4m3Scale * formats::kF16FromE4m3Scale);
  static_assert(kWarpM % 16 == 0 && kWarpN % 8 == 0, "a warp owns whole 16 x 8 fragments");
  static_assert(Config::kTileK % (2 * kChunkBytes) == 0, "rows are copied in pairs of chunks");
  static_assert(Config::kTileN <= kNumThreads, "one thread loads one row's source");

  using Accumulators = float[kFragsM][kFragsN][4];

  // A ring of stages, each a weight tile and a token tile; the epilogue reuses it.
  struct Smem : Order<Config> {
    static constexpr i32 kWeightBytes = Config::kTileM * Config::kTileK;
    static constexpr i32 kStageBytes = kWeightBytes + Config::kTileN * Config::kTileK;
    static_assert(Config::kStagingBytes <= Config::kNumStages * kStageBytes);

    alignas(128) u8 ring[Config::kNumStages * kStageBytes];
    i64 token_offset[Config::kTileN];  // first byte of the row's source, -1 for padding
    float token_scale[Config::kTileN];

    __device__ u8* weights(i32 stage) { return ring + stage * kStageBytes; }
    __device__ u8* tokens(i32 stage) { return weights(stage) + kWeightBytes; }
  };

  // The threads that share rows of an epilogue, and their shared memory: the whole block.
  struct Group {
    i32 index;
    i32 thread;
    Smem& smem;

    __device__ u8* staging() const { return smem.ring; }

    __device__ __forceinline__ float row_scale(i32 row) const { return smem.token_scale[row]; }

    // The ring is idle after the last product.
    __device__ __forceinline__ void acquire_staging() {}
    __device__ __forceinline__ void sync() const { __syncthreads(); }
    // First row and column of a fragment of this warp.
    __device__ __forceinline__ i32 fragment_row(i32 m) const { return warp_row() + 16 * m; }
    __device__ __forceinline__ i32 fragment_column(i32 n) const { return warp_column() + 8 * n; }
  };

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

  __device__ static i32 warp_row() {
    return static_cast<i32>(threadIdx.x) / 32 % Config::kWarpsM * kWarpM;
  }
  __device__ static i32 warp_column() {
    return static_cast<i32>(threadIdx.x) / 32 / Config::kWarpsM * kWarpN;
  }

  // Starts the copies of one K step: weights[kTileM rows] and the gathered token rows.
  __device__ static void copy_stage(Smem& smem, i32 stage, const u8* weights, const u8* tokens,
                                    i64 row_bytes, i32 k_offset) {
    constexpr i32 kVectorsPerRow = Config::kTileK / kVectorBytes;
    constexpr i32 kVectorsPerChunk = kChunkBytes / kVectorBytes;
    const i32 thread = static_cast<i32>(threadIdx.x);
#pragma unroll
    for (i32 i = 0; i < ceil_div(Config::kTileM * kVectorsPerRow, kNumThreads); ++i) {
      const i32 index = thread + i * kNumThreads;
      const i32 row = index / kVectorsPerRow;
      const i32 vector = index % kVectorsPerRow;
      const i32 offset =
          tile_offset<Config::kTileM>(row, vector / kVectorsPerChunk, vector % kVectorsPerChunk);
      ptx::cp_async_cg_16(smem.weights(stage) + offset,
                          weights + row * row_bytes + k_offset + vector * kVectorBytes);
    }
#pragma unroll
    for (i32 i = 0; i < ceil_div(Config::kTileN * kVectorsPerRow, kNumThreads); ++i) {
      const i32 index = thread + i * kNumThreads;
      const i32 row = index / kVectorsPerRow;
      const i32 vector = index % kVectorsPerRow;
      if (row >= Config::kTileN) break;
      const i64 source = smem.token_offset[row];
      const bool valid = source >= 0;
      const i32 offset =
          tile_offset<Config::kTileN>(row, vector / kVectorsPerChunk, vector % kVectorsPerChunk);
      ptx::cp_async_cg_16_or_zero(smem.tokens(stage) + offset,
                                  tokens + (valid ? source + k_offset + vector * kVectorBytes : 0),
                                  valid);
    }
  }

  __device__ static void multiply_chunk(const u8* weights, const u8* tokens, i32 chunk,
                                        Accumulators& acc) {
    const i32 lane = static_cast<i32>(threadIdx.x) % 32;
    const i32 group = lane / 4;   // row of the fragment
    const i32 vector = lane % 4;  // 16 bytes of the chunk
    RowVector frag_a[kFragsM][2];
#pragma unroll
    for (i32 m = 0; m < kFragsM; ++m) {
      const i32 row = warp_row() + 16 * m + group;
      frag_a[m][0].load(weights + tile_offset<Config::kTileM>(row, chunk, vector));
      frag_a[m][1].load(weights + tile_offset<Config::kTileM>(row + 8, chunk, vector));
    }
#pragma unroll
    for (i32 n = 0; n < kFragsN; ++n) {
      RowVector frag_b;
      frag_b.load(tokens +
                  tile_offset<Config::kTileN>(warp_column() + 8 * n + group, chunk, vector));
#pragma unroll
      for (i32 j = 0; j < 4; ++j) {
        const u32 b[2] = {frag_b.pairs[2 * j], frag_b.pairs[2 * j + 1]};
#pragma unroll
        for (i32 m = 0; m < kFragsM; ++m) {
          const u32 a[4] = {frag_a[m][0].pairs[2 * j], frag_a[m][1].pairs[2 * j],
                            frag_a[m][0].pairs[2 * j + 1], frag_a[m][1].pairs[2 * j + 1]};
          ptx::mma_m16n8k16_f16(acc[m][n], a, b);
        }
      }
    }
  }

  // acc += weights[kTileM, k] * tokens[kTileN, k]^T. On return the ring is idle and every thread of
  // the block has passed a barrier after its last read.
  __device__ static void multiply(Smem& smem, const u8* weights, const u8* tokens, i32 k,
                                  Accumulators& acc) {
    const i32 num_steps = k / Config::kTileK;
    constexpr i32 kInFlight = Config::kNumStages - 1;
#pragma unroll
    for (i32 step = 0; step < kInFlight; ++step) {
      if (step < num_steps) copy_stage(smem, step, weights, tokens, k, step * Config::kTileK);
      ptx::cp_async_commit_group();
    }
    i32 stage = 0;
    for (i32 step = 0; step < num_steps; ++step) {
      ptx::cp_async_wait_group<kInFlight - 1>();
      __syncthreads();  // this stage has arrived for all; the previous one has been read by all
      const i32 ahead = step + kInFlight;
      const i32 free_stage = stage == 0 ? Config::kNumStages - 1 : stage - 1;
      if (ahead < num_steps)
        copy_stage(smem, free_stage, weights, tokens, k, ahead * Config::kTileK);
      ptx::cp_async_commit_group();
#pragma unroll
      for (i32 chunk = 0; chunk < kNumChunks; ++chunk) {
        multiply_chunk(smem.weights(stage), smem.tokens(stage), chunk, acc);
      }
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
    smem.token_offset[row] = static_cast<i64>(source_row<Config>(p, smem, permuted)) * p.k;
    smem.token_scale[row] = load_token_scale<Config>(p, smem, permuted);
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
      const u8* weights =
          p.weights + (static_cast<i64>(tile.expert) * p.m + tile.m_tile * Config::kTileM) * p.k;
      Accumulators acc = {};
      multiply(smem, weights, p.tokens, p.k, acc);
      epilogue(tile, group, acc, load_scales<Config>(p, tile.expert));
      __syncthreads();
    }
    ptx::griddepcontrol_launch_dependents();
  }
};

}  // namespace cupy_moe::gemm
