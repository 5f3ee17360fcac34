// Router logits to expert ids and weights, both by slot k of token t.
//
// One warp serves one token. Its lanes hold the keys of all experts in registers
// (routing/select.cuh has the layout); top_k rounds of a warp-wide maximum pick the experts in
// descending key order. Then lane k owns slot k and computes its weight. The routing method is a
// pair of policies (routing/keys.cuh). All arithmetic is FP32, weights are rounded to BF16. No
// shared memory, barriers or atomics: the result of a token depends on its own logits alone.
#include "common/types.cuh"
#include "common/warp.cuh"
#include "formats/bf16.cuh"
#include "ptx/pdl.cuh"
#include "routing/keys.cuh"
#include "routing/select.cuh"

namespace cupy_moe::routing {

template <bool kIsBf16>
struct Storage {
  using Type = float;
};
template <>
struct Storage<true> {
  using Type = u16;
};

__device__ __forceinline__ float widen(float value) {
  return value;
}
__device__ __forceinline__ float widen(u16 bf16_bits) {
  return formats::decode_bf16(bf16_bits);
}

struct Params {
  const Storage<Config::kLogitsBf16>::Type* logits;  // [T, E]
  const Storage<Config::kBiasBf16>::Type* bias;      // [E], null: zeros
  i32* topk_ids;                                     // [T, K], descending key
  u16* topk_weights;                                 // [T, K] BF16
  i16* routing_replay_out;                           // [>= T, K] or null; only rows < T are written
  i32 num_tokens;
  i32 num_experts;        // E
  i32 top_k;              // K <= 32
  i32 experts_per_group;  // read by group-limited rules only
  i32 topk_group;         // likewise
  float routed_scaling_factor;
};

CUPY_MOE_CHECK_PARAMS(Params);

constexpr int kNumWarps = Config::kNumThreads / kWarpSize;

__device__ __forceinline__ void route_token(const Params& p, i64 token, i32 lane) {
  using Rule = routing::Rule<Config::kMethod>;
  constexpr int kNumRows = Config::kExpertsPerLane;
  const float minus_infinity = from_key(kMinusInfinityKey);

  const LaneExperts experts{lane, Rule::kGrouped ? p.experts_per_group : kWarpSize, p.num_experts};
  const auto* logits = p.logits + token * p.num_experts;
  const auto bias = [&](int row) {
    return p.bias != nullptr && experts.has(row) ? widen(p.bias[experts.id(row)]) : 0.0f;
  };

  float scores[kNumRows];
#pragma unroll
  for (int row = 0; row < kNumRows; ++row) {
    scores[row] = experts.has(row) ? widen(logits[experts.id(row)]) : minus_infinity;
  }
  Rule::Key::to_keys(scores, bias);

  u32 keys[kNumRows];
#pragma unroll
  for (int row = 0; row < kNumRows; ++row) {
    keys[row] = experts.has(row) ? to_key(scores[row]) : kAbsentKey;
  }
  if constexpr (Rule::kGrouped) limit_to_best_groups(keys, lane, p.topk_group);
  const Selection selected = select_top_k(keys, experts, p.top_k);

  const bool used = lane < p.top_k;
  const Slot slot{used, from_key(selected.key), used ? widen(logits[selected.id]) : 0.0f};
  const float weight = Rule::Weight::weight(slot, p.routed_scaling_factor);
  if (used) {
    const i64 expanded_idx = token * p.top_k + lane;
    p.topk_ids[expanded_idx] = selected.id;
    p.topk_weights[expanded_idx] = formats::encode_bf16(weight);
    if (p.routing_replay_out != nullptr) {
      p.routing_replay_out[expanded_idx] = static_cast<i16>(selected.id);
    }
  }
}

}  // namespace cupy_moe::routing

extern "C" __global__ void __launch_bounds__(Config::kNumThreads)
    route(const __grid_constant__ cupy_moe::routing::Params p) {
  using namespace cupy_moe;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const i64 token = i64{blockIdx.x} * routing::kNumWarps + threadIdx.x / kWarpSize;
  if (token < p.num_tokens) routing::route_token(p, token, threadIdx.x % kWarpSize);
}
