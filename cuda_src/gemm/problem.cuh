// What the grouped GEMM is given, and how a tile finds its scales in it.
#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "epilogue/scales.cuh"
#include "ptx/cp_async.cuh"

namespace cupy_moe::gemm {

struct Params {
  TensorMap token_map;      // of `tokens` unless gathered; by tensor copies only
  TensorMap weight_map;     // of `weights`; by tensor copies only
  const u8* weights;        // [local_num_experts, m, k] e4m3, or e2m1 packed; prepared
  const u8* weight_scales;  // [local_num_experts, m, k / block] in the 128x4 order; FP4 only
  const u8* tokens;         // [num_tokens, k] e4m3 to gather from, else [permuted rows, k];
                            // bf16 in the order of formats/k_order.cuh for FP4
  const i32* permuted_to_expanded;  // [permuted rows] token * top_k + slot; FC1 only
  const int4* tile_info;            // [token tiles] expert, its first tile, its tiles, rows in use
  const i32* num_n_tiles;           // [1] token tiles in use
  u32* tile_counter;  // [1] tiles taken after every block's first, or null; Hopper loop only
  const float* output_scales;  // [local_num_experts] s1 (FC1) or s2 (FC2), or null: 1 (FP4)
  const float* gate_scales;    // [local_num_experts] sg, or null: 1 (FP4); FC1 only
  const float* clamp_limits;   // [local_num_experts] or null: 7 / sg (SwigluStep), no limit (FP4)
  const float* alphas;         // [local_num_experts] or null; FC1 of FP4 only
  const float* betas;          // [local_num_experts] or null; FC1 of FP4 only
  const void* token_scales;    // [num_tokens * top_k] bf16 or f32, or null; FC1 of FP8 only
  u8* output;                  // FC1: [permuted rows, features] e4m3, or like tokens; FC2: bf16
  // Where the kernel sorts the slots itself; the maps before are null then. FC1 writes the last
  // two, as the permutation kernel does else.
  const i32* topk_ids;        // [num_slots] ids or packed words
  u16* expert_weights;        // [num_slots] bf16 of the packed words
  i32* expanded_to_permuted;  // [num_slots] row of the slot, or -1
  i32 num_slots;
  i32 packed_ids;
  i32 local_num_experts;
  i32 local_expert_offset;
  i32 m;
  i32 k;
  i32 token_pitch;         // bytes between rows of tokens
  i32 output_pitch;        // bytes between rows of the output
  i32 first_feature;       // of an output row, of what these weights make
  i32 weight_block_shift;  // of a block of K there are 1 << that many bytes in a row; FP4 only
  i32 top_k;
  i32 token_scales_are_f32;
  // Of the Hopper loop only.
  i32 stream_weights;  // they leave L2 first
  i32 prefetch_steps;  // of K, of the first tile's weights, into L2
  // Of FC1 of FP4 only, where there are no vectors.
  float default_alpha;
  float default_beta;
};

template <typename Config>
constexpr bool kIsFc1 = Config::kGemmStage == GemmStage::Fc1;

// Whether a routing weight may scale a row on the input side.
template <typename Config>
constexpr bool kScalesRows = kIsFc1<Config> && Config::kMoeFormat == MoeFormat::Fp8;
// Floats that a tile keeps for it.
template <typename Config>
constexpr i32 kScaledRows = kScalesRows<Config> ? Config::kTileN : 1;

template <typename Config>
constexpr bool kIsStep = Config::kActivation == ActivationType::SwigluStep;

// Calls load(scale, values, otherwise) for every scale of an expert that the GEMM uses: its vector,
// or null, and what stands for it then.
template <typename Config, typename Load>
__device__ __forceinline__ void for_each_scale(const Params& p, epilogue::ExpertScales& scales,
                                               Load load) {
  load(scales.output, p.output_scales, 1.0f);
  if constexpr (kIsFc1<Config>) {
    constexpr bool kIsFp4 = Config::kMoeFormat != MoeFormat::Fp8;
    load(scales.gate, p.gate_scales, 1.0f);
    if constexpr (kIsFp4 || kIsStep<Config>) {
      load(scales.limit, p.clamp_limits, __int_as_float(0x7F800000));
    }
    if constexpr (kIsFp4 && !kIsStep<Config>) {
      load(scales.alpha, p.alphas, p.default_alpha);
      load(scales.beta, p.betas, p.default_beta);
    }
  }
}

// Of SwigluStep the limit that nobody gave depends on the gate's scale.
template <typename Config>
__device__ __forceinline__ void set_default_limit(const Params& p, epilogue::ExpertScales& scales) {
  if constexpr (kIsFc1<Config> && kIsStep<Config>) {
    if (p.clamp_limits == nullptr) scales.limit = 7.0f / scales.gate;
  }
}

template <typename Config>
__device__ __forceinline__ epilogue::ExpertScales load_scales(const Params& p, i32 expert) {
  epilogue::ExpertScales scales{};
  for_each_scale<Config>(p, scales, [&](float& scale, const float* values, float otherwise) {
    scale = values != nullptr ? values[expert] : otherwise;
  });
  set_default_limit<Config>(p, scales);
  return scales;
}

// The same in shared memory, by one thread: begun before products that hide how long it takes.
template <typename Config>
__device__ __forceinline__ void begin_scales(const Params& p, i32 expert,
                                             epilogue::ExpertScales& scales) {
  for_each_scale<Config>(p, scales, [&](float& scale, const float* values, float otherwise) {
    if (values != nullptr) {
      ptx::cp_async_ca_4(&scale, values + expert);
    } else {
      scale = otherwise;
    }
  });
}

template <typename Config>
__device__ __forceinline__ void end_scales(const Params& p, epilogue::ExpertScales& scales) {
  ptx::cp_async_wait_all();
  set_default_limit<Config>(p, scales);
}

}  // namespace cupy_moe::gemm
