// Weighted sum over a token's slots: out[t, :] = bf16(sum over k of w[t, k] * z[row(t, k), :]).
//
// One block a token and 8 * kNumThreads columns; a thread owns 8 columns. FP32 sum in slot order
// from +0.0; slots without a row are skipped, so their weights and rows are never looked at.
#include "common/types.cuh"
#include "formats/bf16.cuh"
#include "ptx/pdl.cuh"

namespace cupy_moe {

struct Params {
  const u16* gemm2_output;          // [permuted rows, hidden_size] bf16
  const i32* expanded_to_permuted;  // [num_tokens * top_k] row, or -1
  const void* expert_weights;       // [num_tokens * top_k] bf16 or f32, or null: weights of 1
  u16* output;                      // [num_tokens, hidden_size] bf16
  i32 hidden_size;
  i32 top_k;
  i32 weights_are_f32;
};

CUPY_MOE_CHECK_PARAMS(Params);

__device__ float load_weight(const Params& p, i64 slot) {
  if (p.expert_weights == nullptr) return 1.0f;
  if (p.weights_are_f32) return static_cast<const float*>(p.expert_weights)[slot];
  return formats::decode_bf16(static_cast<const u16*>(p.expert_weights)[slot]);
}

extern "C" __global__ void __launch_bounds__(Config::kNumThreads)
    finalize(const __grid_constant__ Params p) {
  const i64 token = blockIdx.x;
  const i32 column = 8 * static_cast<i32>(blockIdx.y * Config::kNumThreads + threadIdx.x);

  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  if (column >= p.hidden_size) return;
  float sum[8] = {};
#pragma unroll 4
  for (i32 k = 0; k < p.top_k; ++k) {
    const i64 slot = token * p.top_k + k;
    const i64 row = p.expanded_to_permuted[slot];
    if (row < 0) continue;
    const float weight = load_weight(p, slot);
    const uint4 z = *reinterpret_cast<const uint4*>(p.gemm2_output + row * p.hidden_size + column);
    const u32 words[4] = {z.x, z.y, z.z, z.w};
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
      sum[2 * i] += weight * formats::decode_bf16_low(words[i]);
      sum[2 * i + 1] += weight * formats::decode_bf16_high(words[i]);
    }
  }
  const uint4 packed = {
      formats::encode_bf16x2(sum[0], sum[1]), formats::encode_bf16x2(sum[2], sum[3]),
      formats::encode_bf16x2(sum[4], sum[5]), formats::encode_bf16x2(sum[6], sum[7])};
  *reinterpret_cast<uint4*>(p.output + token * p.hidden_size + column) = packed;
}

}  // namespace cupy_moe
