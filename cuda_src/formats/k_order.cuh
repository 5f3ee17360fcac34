// Order in which rows of BF16 that meet FP4 weights are stored.
//
// Of every span of four blocks of scales in a weight row, lane q of four owns the q-th block: 8 or
// 16 bytes of codes under one scale. A window is what four lanes multiply at a time: eight bytes of
// each, 64 elements, so that a span is one window of NVFP4 or two of MXFP4. Eight codes are widened
// in pairs (i, i + 4). Tokens are stored in the order in which matrix instructions then walk K, so
// that no weight moves: elements i and i + 4 of eight are neighbours, a granule of four bytes.
#pragma once

#include "common/types.cuh"
#include "formats/bf16.cuh"

namespace cupy_moe::formats {

constexpr i32 kWindow = 64;

// Windows of a span, by the elements of a block of scales.
template <i32 kBlock>
constexpr i32 kSpanWindows = 4 * kBlock / kWindow;

// Stores the BF16 pairs (i, i + 4) with i = 2 half and 2 half + 1 of elements 8 v ... 8 v + 7 of a
// row, whose weights have blocks of kBlock elements.
template <i32 kBlock>
__device__ __forceinline__ void store_half_in_k_order(u8* row, i32 v, i32 half, u32 first,
                                                      u32 second) {
  constexpr i32 kEights = kBlock / 8;
  constexpr i32 kSpanBytes = 4 * kBlock * 2;
  const i32 lane = v / kEights % 4;
  u8* at = row + v / (4 * kEights) * kSpanBytes + v % kEights * 64 + half * 32 + lane * 4;
  *reinterpret_cast<u32*>(at) = first;
  *reinterpret_cast<u32*>(at + 16) = second;
}

// All four pairs of those elements.
template <i32 kBlock>
__device__ __forceinline__ void store_in_k_order(u8* row, i32 v, const u32 (&pairs)[4]) {
  store_half_in_k_order<kBlock>(row, v, 0, pairs[0], pairs[1]);
  store_half_in_k_order<kBlock>(row, v, 1, pairs[2], pairs[3]);
}

}  // namespace cupy_moe::formats
