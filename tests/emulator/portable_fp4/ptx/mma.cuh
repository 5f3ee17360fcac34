// Matrix instructions by shuffles; fragments are described beside the originals.
#pragma once

#include "common/types.cuh"

namespace cupy_moe::ptx {

inline void ldmatrix_x4(u32 (&matrices)[4], const void* row) {
  const u64 address = reinterpret_cast<u64>(row);
  const u32 low = static_cast<u32>(address), high = static_cast<u32>(address >> 32);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    const int owner = 8 * i + lane / 4;
    const u64 from = __shfl_sync(~0u, low, owner) | u64{__shfl_sync(~0u, high, owner)} << 32;
    std::memcpy(&matrices[i], reinterpret_cast<const char*>(from) + 4 * (lane % 4), 4);
  }
}

inline float dot_bf16x2(u32 a, u32 b) {
  const auto upper = [](u32 x) { return __uint_as_float(x & 0xFFFF0000u); };
  return upper(a << 16) * upper(b << 16) + upper(a) * upper(b);
}

inline void mma_m16n8k16_bf16(float (&acc)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  const u32 b[2] = {b0, b1};
  for (int half = 0; half < 2; ++half) {
    for (int pair = 0; pair < 4; ++pair) {
      for (int i = 0; i < 4; ++i) {
        const u32 weights = __shfl_sync(~0u, a[2 * half + i / 2], 4 * g + pair);
        const u32 tokens = __shfl_sync(~0u, b[half], 4 * (2 * q + i % 2) + pair);
        acc[i] += dot_bf16x2(weights, tokens);
      }
    }
  }
}

}  // namespace cupy_moe::ptx
