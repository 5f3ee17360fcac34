// E4M3 (fn): sign, 4 exponent bits with bias 7, 3 mantissa bits; 448 is the largest magnitude, 0x7F
// and 0xFF are NaN. Every value is exact in FP16.
#pragma once

#include "common/types.cuh"
#include "ptx/cvt.cuh"

namespace cupy_moe::formats {

namespace detail {

// Saturating round to nearest even without a conversion instruction (before sm_89).
__device__ __forceinline__ u8 encode_e4m3_by_bits(float x) {
  const u32 bits = __float_as_uint(x);
  const u32 sign = (bits >> 24) & 0x80u;
  const u32 magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 0x7F;
  if (magnitude >= 0x43E00000u) return static_cast<u8>(sign | 0x7Eu);  // |x| >= 448
  if (magnitude < 0x3C800000u) {  // below 2^-6: multiples of 2^-9, rounded by the FP32 adder
    const float steps = __fadd_rn(__uint_as_float(magnitude), 16384.0f);  // ulp(2^14) = 2^-9
    return static_cast<u8>(sign | (__float_as_uint(steps) - 0x46800000u));
  }
  const u32 odd = (magnitude >> 20) & 1u;
  const u32 rounded = magnitude + 0x7FFFFu + odd;  // keep 3 of 23 mantissa bits
  return static_cast<u8>(sign | ((rounded >> 20) - (120u << 3)));
}

// Exponent and mantissa move to their FP16 places, which is the value times 2^-8; NaN is kept.
__device__ __forceinline__ u32 decode_e4m3x2_by_bits(u16 codes) {
  const u32 spread = (codes & 0xFFu) | ((codes & 0xFF00u) << 8);
  const u32 magnitude = spread & 0x007F007Fu;
  const u32 is_nan = ((magnitude + 0x00010001u) >> 7) & 0x00010001u;
  const u32 shifted = (magnitude << 7) | ((spread & 0x00800080u) << 8);
  return shifted | (is_nan * 0x7E00u);
}

// Exponent and mantissa move to their FP32 places, which is the value times 2^-120; the product is
// exact, and NaN stays NaN.
__device__ __forceinline__ float decode_e4m3_by_bits(u8 code) {
  const u32 magnitude = code & 0x7Fu;
  if (magnitude == 0x7Fu) return __uint_as_float(0x7FC00000u);
  const u32 bits = ((code & 0x80u) << 24) | (magnitude << 20);
  return __uint_as_float(bits) * 0x1p120f;
}

}  // namespace detail

__device__ __forceinline__ u16 encode_e4m3x2(float low, float high) {
#if __CUDA_ARCH__ >= 890
  return ptx::cvt_rn_satfinite_e4m3x2_f32(high, low);
#else
  return static_cast<u16>(detail::encode_e4m3_by_bits(low) |
                          (detail::encode_e4m3_by_bits(high) << 8));
#endif
}

// Two codes as FP32, exactly; x is that of the low byte.
__device__ __forceinline__ float2 decode_e4m3x2(u16 codes) {
#if __CUDA_ARCH__ >= 890
  const u32 halves = ptx::cvt_rn_f16x2_e4m3x2(codes);
  return {ptx::cvt_f32_f16(static_cast<u16>(halves)),
          ptx::cvt_f32_f16(static_cast<u16>(halves >> 16))};
#else
  return {detail::decode_e4m3_by_bits(static_cast<u8>(codes)),
          detail::decode_e4m3_by_bits(static_cast<u8>(codes >> 8))};
#endif
}

__device__ __forceinline__ float decode_e4m3(u8 code) {
  return decode_e4m3x2(code).x;
}

// Four codes of a word as two words of FP16 pairs, in order, each times kF16FromE4m3Scale.
#if __CUDA_ARCH__ >= 890
constexpr float kF16FromE4m3Scale = 1.0f;
#else
constexpr float kF16FromE4m3Scale = 0.00390625f;  // 2^-8
#endif

__device__ __forceinline__ void decode_e4m3x4_to_f16(u32 codes, u32& low_pair, u32& high_pair) {
  const u16 low = static_cast<u16>(codes);
  const u16 high = static_cast<u16>(codes >> 16);
#if __CUDA_ARCH__ >= 890
  low_pair = ptx::cvt_rn_f16x2_e4m3x2(low);
  high_pair = ptx::cvt_rn_f16x2_e4m3x2(high);
#else
  low_pair = detail::decode_e4m3x2_by_bits(low);
  high_pair = detail::decode_e4m3x2_by_bits(high);
#endif
}

}  // namespace cupy_moe::formats
