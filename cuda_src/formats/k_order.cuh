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

// Stores the BF16 pairs (i, i + 4) with i = 2 half and 2 half + 1 of elements 8 v ... 8 v + 7 of a
// row.
__device__ __forceinline__ void store_half_in_k_order(u8* row, i32 v, i32 half, u32 first,
                                                      u32 second) {
  const i32 in_window = v % 8;
  u8* at = row + v / 8 * (2 * kWindow) + in_window % 2 * 64 + in_window / 2 * 4 + half * 32;
  *reinterpret_cast<u32*>(at) = first;
  *reinterpret_cast<u32*>(at + 16) = second;
}

// All four pairs of those elements.
__device__ __forceinline__ void store_in_k_order(u8* row, i32 v, const u32 (&pairs)[4]) {
  store_half_in_k_order(row, v, 0, pairs[0], pairs[1]);
  store_half_in_k_order(row, v, 1, pairs[2], pairs[3]);
}

}  // namespace cupy_moe::formats
