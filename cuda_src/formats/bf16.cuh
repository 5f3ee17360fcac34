// BF16: the upper half of an FP32.
#pragma once

#include "common/types.cuh"
#include "ptx/bf16x2.cuh"
#include "ptx/cvt.cuh"

namespace cupy_moe::formats {

__device__ __forceinline__ float decode_bf16(u16 bits) {
  return __uint_as_float(static_cast<u32>(bits) << 16);
}

__device__ __forceinline__ u16 encode_bf16(float x) {
  return ptx::cvt_rn_bf16_f32(x);
}

__device__ __forceinline__ float round_bf16(float x) {
  return decode_bf16(encode_bf16(x));
}

// Two values of one word, `low` first in memory.
__device__ __forceinline__ u32 encode_bf16x2(float low, float high) {
  return ptx::cvt_rn_bf16x2_f32(high, low);
}

__device__ __forceinline__ float decode_bf16_low(u32 word) {
  return __uint_as_float(word << 16);
}

__device__ __forceinline__ float decode_bf16_high(u32 word) {
  return __uint_as_float(word & 0xFFFF0000u);
}

__device__ __forceinline__ constexpr u32 both_halves(u32 bits) {
  return bits * 0x10001u;
}

// Products of two pairs; adding -0 keeps their signs (sm_80 has no plain product).
__device__ __forceinline__ u32 mul_bf16x2(u32 a, u32 b) {
  return ptx::fma_rn_bf16x2(a, b, 0x80008000u);
}

}  // namespace cupy_moe::formats
