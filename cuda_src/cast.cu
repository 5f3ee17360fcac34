// Hidden states of FP4 layers as BF16, exactly (down to 2^-133), in the order in which their main
// loop walks K.
//
// One block a token and 8 * kNumThreads columns, eight columns a thread. Routing weights in FP32
// are rounded to BF16 on the way where the layer asks for it.
#include "common/types.cuh"
#include "formats/bf16.cuh"
#include "formats/block_scale.cuh"
#include "formats/e2m1.cuh"
#include "formats/e4m3.cuh"
#include "formats/k_order.cuh"
#include "formats/ue8m0.cuh"
#include "ptx/pdl.cuh"

namespace cupy_moe {

struct Params {
  const u8* hidden_states;    // [num_tokens, hidden_size] packed e2m1, e4m3 or bf16
  const u8* scales;           // [num_tokens, scale_pitch] e4m3 or ue8m0; null for bf16
  u8* output;                 // [num_tokens, hidden_size] bf16
  const float* topk_weights;  // [num_tokens * top_k] to be rounded, or null
  u16* expert_weights;        // [num_tokens * top_k] bf16 of them
  i32 hidden_size;
  i32 scale_pitch;
  i32 top_k;
};

CUPY_MOE_CHECK_PARAMS(Params);

// Pairs (i, i + 4) of the eight elements that start at `element` of a row.
template <MoeFormat kFormat>
struct Widen;

template <>
struct Widen<MoeFormat::Nvfp4> {
  __device__ static void run(const u8* row, const u8* scales, i32 element, u32 (&pairs)[4]) {
    const u32 codes = *reinterpret_cast<const u32*>(row + element / 2);
    u32 multiplier, unused;
    formats::NvScale::multipliers(scales[element / 16], 0, multiplier, unused);
    formats::widen_e2m1x8(codes, multiplier, pairs);
    const u32 gain = formats::encode_bf16x2(formats::NvScale::kGain, formats::NvScale::kGain);
#pragma unroll
    for (u32& pair : pairs) pair = formats::mul_bf16x2(pair, gain);
  }
};

template <>
struct Widen<MoeFormat::Mxfp8> {
  __device__ static void run(const u8* row, const u8* scales, i32 element, u32 (&pairs)[4]) {
    const uint2 codes = *reinterpret_cast<const uint2*>(row + element);
    const float scale = formats::decode_ue8m0(scales[element / 32]);
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
      pairs[i] =
          formats::encode_bf16x2(formats::decode_e4m3(static_cast<u8>(codes.x >> (8 * i))) * scale,
                                 formats::decode_e4m3(static_cast<u8>(codes.y >> (8 * i))) * scale);
    }
  }
};

template <>
struct Widen<MoeFormat::Bf16> {
  __device__ static void run(const u8* row, const u8*, i32 element, u32 (&pairs)[4]) {
    const uint4 words = *reinterpret_cast<const uint4*>(row + 2 * element);
    pairs[0] = __byte_perm(words.x, words.z, 0x5410);
    pairs[1] = __byte_perm(words.x, words.z, 0x7632);
    pairs[2] = __byte_perm(words.y, words.w, 0x5410);
    pairs[3] = __byte_perm(words.y, words.w, 0x7632);
  }
};

constexpr i64 row_bytes(i64 elements) {
  return Config::kMoeFormat == MoeFormat::Nvfp4   ? elements / 2
         : Config::kMoeFormat == MoeFormat::Mxfp8 ? elements
                                                  : 2 * elements;
}

__device__ void round_weights(const Params& p, i64 token) {
  for (i32 i = static_cast<i32>(threadIdx.x); i < p.top_k; i += Config::kNumThreads) {
    const i64 slot = token * p.top_k + i;
    p.expert_weights[slot] = formats::encode_bf16(p.topk_weights[slot]);
  }
}

extern "C" __global__ void __launch_bounds__(Config::kNumThreads)
    cast(const __grid_constant__ Params p) {
  const i64 token = blockIdx.x;
  const i32 eight = static_cast<i32>(blockIdx.y * Config::kNumThreads + threadIdx.x);

  ptx::griddepcontrol_wait();
  // Not before the wait: the next kernel takes it that the permutation has ended.
  ptx::griddepcontrol_launch_dependents();
  if (p.topk_weights != nullptr && blockIdx.y == 0) round_weights(p, token);
  if (8 * eight >= p.hidden_size) return;
  u32 pairs[4];
  Widen<Config::kMoeFormat>::run(p.hidden_states + token * row_bytes(p.hidden_size),
                                 p.scales + token * p.scale_pitch, 8 * eight, pairs);
  formats::store_in_k_order(p.output + token * p.hidden_size * 2, eight, pairs);
}

}  // namespace cupy_moe
