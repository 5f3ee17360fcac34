// A tile of the portable FP4 loop: tokens stored in its order, all steps of K, sums as FP32.
#include "device.h"

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline int __any_sync(unsigned mask, bool vote) {
  unsigned any = 0;
  for (int lane = 0; lane < 32; ++lane) any |= __shfl_sync(mask, unsigned{vote}, lane);
  return any != 0;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selectors) {
  const unsigned long long bytes = a | static_cast<unsigned long long>(b) << 32;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned byte = bytes >> 8 * (selectors >> 4 * i & 7) & 0xFF;
    result |= byte << 8 * i;
  }
  return result;
}

#include "gemm/operands_fp4.cuh"

using namespace cupy_moe;

struct Config {
  static constexpr MoeFormat kMoeFormat = MoeFormat::FORMAT;
  static constexpr i32 kTileM = 128, kTileN = 32, kTileK = 128, kWarpsM = 4, kWarpsN = 1;
};
using Operands = gemm::OperandsFp4<Config>;
using Warp = Operands::Warp;

// weights [128, k / 2], scales in the 128x4 order, tokens [32, k] BF16, out [128, 32].
extern "C" void multiply(const u8* weights, const u8* scales, const u16* tokens, int k, float* out) {
  std::vector<u8> ordered(Config::kTileN * k * 2);
  std::vector<i64> offsets(Config::kTileN);
  for (i64 row = 0; row < Config::kTileN; ++row) {
    offsets[row] = row * k * 2;
    for (int v = 0; v < k / 8; ++v) {
      const u16* x = tokens + row * k + 8 * v;
      u32 pairs[4];
      for (int i = 0; i < 4; ++i) pairs[i] = x[i] | u32{x[i + 4]} << 16;
      formats::store_in_k_order<Operands::Scale::kBlock>(&ordered[offsets[row]], v, pairs);
    }
  }
  const gemm::Params p{weights, scales, ordered.data(), 128, k, 30};
  emulator::launch(1, Warp::kNumThreads, 1, Operands::kStageBytes, [&](char* shared) {
    u8* stage = reinterpret_cast<u8*>(shared);
    const Operands operands(p, gemm::Tile{0, 0, 0, Config::kTileN}, offsets.data());
    Operands::Accumulators acc = {};
    for (int step = 0; step < ceil_div(k, Config::kTileK); ++step) {
      operands.copy_stage(stage, step);
      __syncthreads();
      Operands::multiply_stage(stage, acc);
      __syncthreads();
    }
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    for (int m = 0; m < Warp::kFragsM; ++m) {
      for (int n = 0; n < Warp::kFragsN; ++n) {
        for (int i = 0; i < 4; ++i) {
          const int row = Warp::first_row() + 16 * m + g + 8 * (i / 2);
          const int column = Warp::first_column() + 8 * n + 2 * q + i % 2;
          out[row * Config::kTileN + column] = Operands::kAccScale * acc[m][n][i];
        }
      }
    }
  });
}
