// Block scales of FP4 weights as BF16 multipliers of widened codes.
//
// A multiplier is the scale times kE2m1Scale / kGain, so that it stays in BF16's range. What does
// not fit there is rare and makes a second multiplier necessary.
#pragma once

#include "common/types.cuh"
#include "formats/bf16.cuh"
#include "formats/e2m1.cuh"

namespace cupy_moe::formats {

constexpr u32 kBf16One = 0x3F80u;
constexpr u32 kBf16Nan = 0x7FC0u;

// UE8M0, one of 32 elements: 2^(b - 1). Above b = 128, where is_rare, as 2^127 and 2^(b - 128).
struct MxScale {
  static constexpr i32 kBlock = 32;
  static constexpr float kGain = 1.0f;
  static constexpr bool kHasRare = true;

  __device__ static bool is_rare(u32 byte) { return byte > 128; }
  __device__ static u32 rare_multiplier(u32 byte) {
    if (byte == 255) return both_halves(kBf16Nan);
    return both_halves(byte > 128 ? (byte - 1) << 7 : kBf16One);
  }
  // The greatest scale that needs no second multiplier, if this one does.
  __device__ static u32 clamp_rare(u32 byte) { return min(byte, 128u); }

  // Of the scales of two rows that are not rare.
  __device__ static void multipliers(u32 byte0, u32 byte1, u32& first, u32& second) {
    first = byte0 * both_halves(1u << 7) + both_halves(126u << 7);
    second = byte1 * both_halves(1u << 7) + both_halves(126u << 7);
  }

  // Whether one of four scales may be rare: no false negatives.
  __device__ static u32 rare_bits(u32 bytes) { return bytes & 0x80808080u; }
};

// E4M3, one of 16 elements: the scale times 2^118. With exponent and mantissa at their BF16 places
// a code is the scale times 2^-120.
struct NvScale {
  static constexpr i32 kBlock = 16;
  static constexpr float kGain = 256.0f;
  static constexpr bool kHasRare = false;

  // Of the scales of two rows. The magnitude 0x7F is NaN; read as FP16, which orders them alike,
  // placed magnitudes are compared two at a time.
  __device__ static void multipliers(u32 byte0, u32 byte1, u32& first, u32& second) {
    const u32 codes = byte0 + byte1 * 0x10000u;
    const u32 magnitudes = (codes & 0x007F007Fu) * 0x10u;
    const u32 nan = ptx::set_gt_f16x2(magnitudes, both_halves(0x07E0u));
    const u32 placed = magnitudes | ((codes * 0x100u) & 0x80008000u) | nan;
    const u32 scales =
        mul_bf16x2(mul_bf16x2(placed, both_halves(kTwoTo127)), both_halves(kTwoTo111));
    first = __byte_perm(scales, 0, 0x1010);
    second = __byte_perm(scales, 0, 0x3232);
  }

 private:
  static constexpr u32 kTwoTo127 = 254u << 7;
  static constexpr u32 kTwoTo111 = 238u << 7;
};

template <MoeFormat kFormat>
struct WeightScaleOf {
  using type = MxScale;
};
template <>
struct WeightScaleOf<MoeFormat::Nvfp4> {
  using type = NvScale;
};

}  // namespace cupy_moe::formats
