// FC1 of FP4 layers: activation on raw FP32 accumulators, then the block rule of the mode.
//
// What the rule represents is stored as BF16, which holds it exactly, for FC2 to read. Elements of
// a block lie in several lanes, four in each; NaN does not count for a block's maximum.
#pragma once

#include "common/types.cuh"
#include "epilogue/activation.cuh"
#include "epilogue/scales.cuh"
#include "formats/bf16.cuh"
#include "formats/e2m1.cuh"
#include "formats/e4m3.cuh"
#include "formats/k_order.cuh"
#include "formats/ue8m0.cuh"

namespace cupy_moe::epilogue {

__device__ __forceinline__ float clamp_above(float x, float limit) {
  return x > limit ? limit : x;
}

// Where it clamps, up is clamped on both sides, the gate only from above; NaN passes. SwigluStep
// always does, the gate after its SiLU.
template <ActivationType kActivation, bool kClamps>
__device__ __forceinline__ float activate(float u, float v, const ExpertScales& s) {
  if constexpr (kActivation == ActivationType::SwigluStep) {
    return Activation<kActivation>::apply(u, v, 1.0f, s.gate, s.limit);
  } else {
    const float up = !kClamps ? u : u < -s.limit ? -s.limit : clamp_above(u, s.limit);
    const float gate = s.gate * (kClamps ? clamp_above(v, s.limit) : v);
    if constexpr (kActivation == ActivationType::Swiglu) {
      return (up + s.beta) * gate * sigmoid_exp(s.alpha * gate);
    } else {
      static_assert(kActivation == ActivationType::Situ);
      return s.beta * tanhf(s.gate * up / s.beta) * s.alpha * tanhf(gate / s.alpha) *
             sigmoid_exp(gate);
    }
  }
}

template <i32 kLanes>
__device__ __forceinline__ float block_maximum(const float (&r)[4]) {
  float most = 0.0f;
#pragma unroll
  for (float x : r) most = fmaxf(most, fabsf(x));
#pragma unroll
  for (i32 distance = 1; distance < kLanes; distance *= 2) {
    most = fmaxf(most, __shfl_xor_sync(~0u, most, distance));
  }
  return most;
}

// By whole warps, neighbouring lanes on neighbouring elements: replaces r by what is represented.
template <MoeFormat kFormat>
struct BlockRule;

template <>
struct BlockRule<MoeFormat::Bf16> {
  __device__ static void apply(float (&)[4], float) {}
};

// Blocks of 16 E2M1 values with an E4M3 scale; c multiplies r first.
template <>
struct BlockRule<MoeFormat::Nvfp4> {
  __device__ static void apply(float (&r)[4], float c) {
    const float most = block_maximum<4>(r) * c;
    const u16 code = formats::encode_e4m3x2(most * (1.0f / 6.0f), 0.0f);
    const float scale = formats::decode_e4m3(static_cast<u8>(code));
    const float multiplier = scale == 0.0f ? 0.0f : __frcp_rn(scale) * c;
#pragma unroll
    for (float& x : r) x = formats::round_e2m1(x * multiplier) * scale;
  }
};

// Blocks of 32 E4M3 values with a UE8M0 scale of 2^(floor(log2(maximum)) - 8).
template <>
struct BlockRule<MoeFormat::Mxfp8> {
  __device__ static void apply(float (&r)[4], float) {
    const u32 exponent = __float_as_uint(block_maximum<8>(r)) >> 23;
    const u32 byte = exponent >= 9 ? exponent - 8 : 0;
    const float multiplier = byte > 0 ? __uint_as_float((254 - byte) << 23) : 0.0f;
    const float scale = formats::decode_ue8m0(byte);
#pragma unroll
    for (i32 i = 0; i < 4; i += 2) {
      const u16 codes = formats::encode_e4m3x2(r[i] * multiplier, r[i + 1] * multiplier);
      const float2 values = formats::decode_e4m3x2(codes);
      r[i] = values.x * scale;
      r[i + 1] = values.y * scale;
    }
  }
};

// One FP32 a feature is staged; the block rule is applied as rows leave.
template <typename Config, bool kClamps>
struct ActivateToBlocks {
  static constexpr i32 kFeaturesPer32Rows = 16;
  static constexpr i32 kStagedBytes = 4;
  static constexpr i32 kElementBytes = 2;
  static constexpr bool kRequantizes = true;
  // Two hyperbolic tangents a value leave no registers for more of them.
  static constexpr i32 kValuesAtOnce = Config::kActivation == ActivationType::Situ ? 2 : 8;

  __device__ static void stage(u8* row, i32 block, i32 half, i32 group, float x0, float x1,
                               const ExpertScales& scales) {
    reinterpret_cast<float*>(row)[16 * block + 2 * group + half] =
        activate<Config::kActivation, kClamps>(x0, x1, scales);
  }

  // Of eight features where they were staged, the pairs (i, i + 4) for i = 2 half and the next one.
  __device__ static uint2 requantize(const u8* staged, i32 half, const ExpertScales& scales) {
    const float2 first = reinterpret_cast<const float2*>(staged)[half];
    const float2 second = reinterpret_cast<const float2*>(staged)[half + 2];
    float r[4] = {first.x, first.y, second.x, second.y};
    BlockRule<Config::kMoeFormat>::apply(r, scales.output);
    return {formats::encode_bf16x2(r[0], r[2]), formats::encode_bf16x2(r[1], r[3])};
  }
};

}  // namespace cupy_moe::epilogue
