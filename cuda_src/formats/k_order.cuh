// Order in which rows of BF16 that meet FP4 weights are stored.
//
// Of every window of 64 elements of a weight row, lane q of four owns the eight bytes with elements
// 16 q ... 16 q + 15, and widens them in pairs (i, i + 4). Tokens are stored in the order in which
// matrix instructions then walk K, so that no weight moves: elements i and i + 4 of the v-th eight
// of a window are neighbours, a granule of four bytes.
#pragma once

#include "common/types.cuh"
#include "formats/bf16.cuh"

namespace cupy_moe::formats {

constexpr i32 kWindow = 64;

// Stores the BF16 pairs (i, i + 4), i = 0 ... 3, of elements 8 v ... 8 v + 7 of a row.
__device__ __forceinline__ void store_in_k_order(u8* row, i32 v, const u32 (&pairs)[4]) {
  const i32 in_window = v % 8;
  u8* first = row + v / 8 * (2 * kWindow) + in_window % 2 * 64 + in_window / 2 * 4;
#pragma unroll
  for (i32 i = 0; i < 4; ++i) {
    *reinterpret_cast<u32*>(first + i / 2 * 32 + i % 2 * 16) = pairs[i];
  }
}

}  // namespace cupy_moe::formats
