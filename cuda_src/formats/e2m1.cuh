// E2M1: sign, 2 exponent bits with bias 1, 1 mantissa bit; magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6.
// Even elements lie in the low halves of bytes.
#pragma once

#include "common/types.cuh"
#include "formats/bf16.cuh"

namespace cupy_moe::formats {

// The three low bits of a code, at the low end of BF16's exponent, are the magnitude times 2^-126
// (below 1 as a subnormal). A multiplication by kE2m1Scale, or by that times a block scale, makes
// values of them.
constexpr float kE2m1Scale = 0x1p126f;

// Eight codes of a word as four pairs of BF16, elements (i, i + 4), each times `scale` /
// kE2m1Scale. Additions of shifted copies as products: they run beside the logic instructions. Of
// the last pair the signs are in place.
__device__ __forceinline__ void widen_e2m1x8(u32 codes, u32 scale, u32 (&pairs)[4]) {
  constexpr u32 kSigns = 0x80008000u;
  constexpr u32 kMagnitudes = 0x01C001C0u;
  constexpr u32 kPlaces = kSigns | kMagnitudes;
  const u32 upper = codes >> 6;
  pairs[0] = mul_bf16x2(((codes & 0x000F000Fu) * 0x1040u) & kPlaces, scale);
  pairs[1] = mul_bf16x2(((codes & 0x00F000F0u) * 0x0104u) & kPlaces, scale);
  pairs[2] = mul_bf16x2(((upper & 0x003C003Cu) * 0x0410u) & kPlaces, scale);
  pairs[3] = mul_bf16x2((codes & kSigns) | (upper & kMagnitudes), scale);
}

// Nearest value of the format, ties to the even code, saturating; NaN becomes 6.
__device__ __forceinline__ float round_e2m1(float x) {
  const float magnitude = fminf(fabsf(x), 6.0f);
  const float step = magnitude < 2.0f ? 0.5f : (magnitude < 4.0f ? 1.0f : 2.0f);
  const float anchor = step * 0x1p23f;  // whose neighbours are a step away
  const float rounded = __fsub_rn(__fadd_rn(magnitude, anchor), anchor);
  return x < 0.0f ? -rounded : rounded;
}

}  // namespace cupy_moe::formats
