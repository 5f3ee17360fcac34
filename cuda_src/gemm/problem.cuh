// What the grouped GEMM is given, and how a tile finds its rows and scales in it.
#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "epilogue/scales.cuh"
#include "formats/bf16.cuh"

namespace cupy_moe::gemm {

struct Params {
  TensorMap token_map;              // of `tokens` unless gathered; by tensor copies only
  TensorMap weight_map;             // of `weights`; by tensor copies only
  const u8* weights;                // [local_num_experts, m, k] e4m3, prepared
  const u8* tokens;                 // [num_tokens, k] e4m3 to gather from, else [permuted rows, k]
  const i32* permuted_to_expanded;  // [permuted rows] token * top_k + slot; FC1 only
  const int4* tile_info;            // [token tiles] expert, its first tile, its tiles, rows in use
  const i32* num_n_tiles;           // [1] token tiles in use
  u32* tile_counter;  // [1] tiles taken after every block's first, or null; Hopper loop only
  const float* output_scales;  // [local_num_experts] s1 (FC1) or s2 (FC2)
  const float* gate_scales;    // [local_num_experts] sg; FC1 only
  const float* clamp_limits;   // [local_num_experts] or null: 7 / sg; SwigluStep only
  const void* token_scales;    // [num_tokens * top_k] bf16 or f32, or null; FC1 only
  u8* output;                  // FC1: [permuted rows, features] e4m3; FC2: bf16
  i32 m;
  i32 k;
  i32 top_k;
  i32 token_scales_are_f32;
};

template <typename Config>
constexpr bool kIsFc1 = Config::kGemmStage == GemmStage::Fc1;

// Row of `tokens` behind a permuted row that is in use.
template <typename Config>
__device__ __forceinline__ i32 source_row(const Params& p, i32 row) {
  return Config::kGatherTokens ? p.permuted_to_expanded[row] / p.top_k : row;
}

// The routing weight that scales a row on the input side, as BF16.
template <typename Config>
__device__ __forceinline__ float load_token_scale(const Params& p, i32 row) {
  if (!kIsFc1<Config> || p.token_scales == nullptr) return 1.0f;
  const i32 expanded = p.permuted_to_expanded[row];
  if (p.token_scales_are_f32) {
    return formats::round_bf16(static_cast<const float*>(p.token_scales)[expanded]);
  }
  return formats::decode_bf16(static_cast<const u16*>(p.token_scales)[expanded]);
}

template <typename Config>
__device__ __forceinline__ epilogue::ExpertScales load_scales(const Params& p, i32 expert) {
  epilogue::ExpertScales scales{p.output_scales[expert], 1.0f, 0.0f};
  if constexpr (kIsFc1<Config>) {
    scales.gate = p.gate_scales[expert];
    if constexpr (Config::kActivation == ActivationType::SwigluStep) {
      scales.limit = p.clamp_limits != nullptr ? p.clamp_limits[expert] : 7.0f / scales.gate;
    }
  }
  return scales;
}

}  // namespace cupy_moe::gemm
