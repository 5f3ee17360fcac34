// Routing rules: by which key the experts of a token are compared, and which weight a selected
// expert gets.
//
// A key policy turns the logits a lane holds into keys, in place. A weight policy runs with one
// lane per slot of the token. `Rule` pairs them; adding a routing method means adding a line there.
#pragma once

#include "common/types.cuh"
#include "common/warp.cuh"
#include "formats/bf16.cuh"

namespace cupy_moe::routing {

// Logistic function as 0.5 * tanh(x / 2) + 0.5: exactly 1 for large x, exactly 0 for very negative
// x, with an absolute resolution of about 2^-25. Routing compares these values, so which of them
// tie is part of the definition.
__device__ __forceinline__ float sigmoid_tanh(float x) {
  return 0.5f * tanhf(0.5f * x) + 0.5f;
}

// ---- key policies: to_keys(float (&scores)[rows], bias(row)) ----

struct LogitKey {
  template <int kNumRows, typename Bias>
  static __device__ void to_keys(float (&)[kNumRows], const Bias&) {}
};

struct SigmoidKey {
  template <int kNumRows, typename Bias>
  static __device__ void to_keys(float (&scores)[kNumRows], const Bias&) {
#pragma unroll
    for (int row = 0; row < kNumRows; ++row) scores[row] = sigmoid_tanh(scores[row]);
  }
};

// Softmax over all experts of the token, with the maximum subtracted. Absent experts must hold
// -inf.
struct SoftmaxKey {
  template <int kNumRows, typename Bias>
  static __device__ void to_keys(float (&scores)[kNumRows], const Bias&) {
    float largest = scores[0];
#pragma unroll
    for (int row = 1; row < kNumRows; ++row) largest = fmaxf(largest, scores[row]);
    largest = warp_max(largest);

    float sum = 0.0f;
#pragma unroll
    for (int row = 0; row < kNumRows; ++row) {
      scores[row] = expf(scores[row] - largest);
      sum += scores[row];
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int row = 0; row < kNumRows; ++row) scores[row] = scores[row] / sum;
  }
};

// The bias steers the selection only: weights are recomputed from the logit, never as key - bias.
template <bool kBiasRoundedToBf16>
struct BiasedSigmoidKey {
  template <int kNumRows, typename Bias>
  static __device__ void to_keys(float (&scores)[kNumRows], const Bias& bias) {
#pragma unroll
    for (int row = 0; row < kNumRows; ++row) {
      float offset = bias(row);
      if constexpr (kBiasRoundedToBf16) {
        offset = formats::decode_bf16(formats::encode_bf16(offset));
      }
      scores[row] = sigmoid_tanh(scores[row]) + offset;
    }
  }
};

// ---- weight policies: weight(slot, factor), all 32 lanes call them together ----

// Lane k describes slot k of the token; lanes from top_k on are not used and add nothing to the
// sums.
struct Slot {
  bool used;
  float key;
  float logit;
};

__device__ __forceinline__ float sum_over_slots(const Slot& slot, float value) {
  return warp_sum(slot.used ? value : 0.0f);
}

struct KeyWeight {
  static __device__ float weight(const Slot& slot, float) { return slot.key; }
};

struct SigmoidWeight {
  static __device__ float weight(const Slot& slot, float) { return sigmoid_tanh(slot.logit); }
};

// Softmax over the selected logits; slot 0 holds the largest of them.
struct SelectedSoftmaxWeight {
  static __device__ float weight(const Slot& slot, float) {
    const float largest = __shfl_sync(kFullWarp, slot.logit, 0);
    const float exponential = expf(slot.logit - largest);
    return exponential / sum_over_slots(slot, exponential);
  }
};

struct NormalizedKeyWeight {
  static __device__ float weight(const Slot& slot, float) {
    return slot.key / fmaxf(sum_over_slots(slot, slot.key), 1e-20f);
  }
};

// The tiny addend, not a maximum, keeps 0 / 0 away when all selected sigmoids underflow.
struct ScaledSigmoidWeight {
  static __device__ float weight(const Slot& slot, float factor) {
    const float sigmoid = sigmoid_tanh(slot.logit);
    return sigmoid * factor / (sum_over_slots(slot, sigmoid) + 1e-20f);
  }
};

// ---- rules ----

template <typename KeyPolicy, typename WeightPolicy, bool kGroupLimited = false>
struct KeyAndWeight {
  using Key = KeyPolicy;
  using Weight = WeightPolicy;
  static constexpr bool kGrouped = kGroupLimited;
};

// One line per distinct rule. kernels/route.py folds equal methods onto these before compiling
// (RenormalizeNaive is Renormalize, Llama4 is TopKSigmoid, SigmoidRenorm without normalization is
// Sigmoid, DeepSeekV3 without groups is MiniMax2); a method that was not folded has no Rule and
// does not compile.
template <RoutingMethodType kMethod>
struct Rule;

template <>
struct Rule<RoutingMethodType::Default> : KeyAndWeight<SoftmaxKey, KeyWeight> {};
template <>
struct Rule<RoutingMethodType::Renormalize> : KeyAndWeight<LogitKey, SelectedSoftmaxWeight> {};
template <>
struct Rule<RoutingMethodType::TopK> : KeyAndWeight<LogitKey, KeyWeight> {};
template <>
struct Rule<RoutingMethodType::TopKSigmoid> : KeyAndWeight<LogitKey, SigmoidWeight> {};
template <>
struct Rule<RoutingMethodType::Sigmoid> : KeyAndWeight<SigmoidKey, KeyWeight> {};
template <>
struct Rule<RoutingMethodType::SigmoidRenorm> : KeyAndWeight<SigmoidKey, NormalizedKeyWeight> {};
template <>
struct Rule<RoutingMethodType::MiniMax2>
    : KeyAndWeight<BiasedSigmoidKey<false>, ScaledSigmoidWeight> {};
template <>
struct Rule<RoutingMethodType::DeepSeekV3>
    : KeyAndWeight<BiasedSigmoidKey<true>, ScaledSigmoidWeight, true> {};

}  // namespace cupy_moe::routing
