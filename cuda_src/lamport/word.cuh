// Words that are their own arrival flag: a receive buffer is armed with a bit pattern that no
// payload word has, and a word has arrived once it is anything else.
#pragma once

#include "common/types.cuh"

namespace cupy_moe::lamport {

constexpr u32 kBf16Sentinel = 0x80008000u;  // two BF16 of -0.0
constexpr u32 kF32Sentinel = 0x80000000u;   // one FP32 of -0.0
constexpr i32 kGenerations = 3;             // copies of every receive buffer

template <u32 kSentinel>
__device__ __forceinline__ uint4 armed() {
  return make_uint4(kSentinel, kSentinel, kSentinel, kSentinel);
}

// NOTE: as bits and every word: a comparison of floats takes subnormals or +0.0 for the sentinel,
// and a 16-byte store need not become visible as a unit.
template <u32 kSentinel>
__device__ __forceinline__ bool is_armed(const uint4& v) {
  return v.x == kSentinel || v.y == kSentinel || v.z == kSentinel || v.w == kSentinel;
}

// Payload without the sentinel: -0.0 becomes +0.0, the same to whoever adds it to +0.0.
template <u32 kSentinel>
__device__ __forceinline__ u32 scrubbed(u32 word) {
  return word == kSentinel ? 0u : word;
}

template <u32 kSentinel>
__device__ __forceinline__ uint4 scrubbed(const uint4& v) {
  return make_uint4(scrubbed<kSentinel>(v.x), scrubbed<kSentinel>(v.y), scrubbed<kSentinel>(v.z),
                    scrubbed<kSentinel>(v.w));
}

}  // namespace cupy_moe::lamport
