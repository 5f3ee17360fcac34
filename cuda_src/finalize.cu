// Weighted sum over a token's slots: out[t, :] = bf16(sum over k of w[t, k] * z[row(t, k), :]),
// where z may come as two partial sums.
//
// One block a token and 8 * kNumThreads columns; a thread owns 8 columns. FP32 sum in slot order
// from +0.0; slots without a row are skipped: their weights do not enter, their rows are not read.
// Up to kSlotsInFlight slots are loaded before the first is used: indices and weights, then rows.
#include "common/types.cuh"
#include "formats/bf16.cuh"
#include "ptx/pdl.cuh"

namespace cupy_moe {

struct Params {
  const u16* gemm2_output;          // [permuted rows, hidden_size] bf16
  const u16* partial_output;        // what is to be added to it, likewise; split sums only
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

constexpr i32 kSlotsInFlight = 8;

// Row of a slot, -1 for none, and its weight. The lanes of a warp load one slot each and share.
struct Slot {
  i32 row = -1;
  float weight = 0.0f;

  __device__ Slot shared_by(i32 lane) const {
    return {__shfl_sync(~0u, row, lane), __shfl_sync(~0u, weight, lane)};
  }
};

// Of slots [first, first + kSlotsInFlight) of a token, the one of this lane.
__device__ Slot load_own_slot(const Params& p, i64 token, i32 first, i32 lane) {
  if (lane >= min(kSlotsInFlight, p.top_k - first)) return {};
  const i64 slot = token * p.top_k + first + lane;
  return {p.expanded_to_permuted[slot], load_weight(p, slot)};
}

// Every row is read once: it leaves the caches first.
__device__ uint4 load_columns(const u16* rows, i32 hidden_size, i64 row, i32 column) {
  return __ldcs(reinterpret_cast<const uint4*>(rows + row * hidden_size + column));
}

// Columns of one row: BF16, or a pair of them that is not rounded to one.
struct Columns {
  uint4 z;
  uint4 partial;

  __device__ void load(const Params& p, i64 row, i32 column) {
    z = load_columns(p.gemm2_output, p.hidden_size, row, column);
    if constexpr (Config::kSplitSums) {
      partial = load_columns(p.partial_output, p.hidden_size, row, column);
    }
  }

  __device__ void accumulate(float (&sum)[8], float weight) const {
    const u32 words[4] = {z.x, z.y, z.z, z.w};
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
      float low = formats::decode_bf16_low(words[i]);
      float high = formats::decode_bf16_high(words[i]);
      if constexpr (Config::kSplitSums) {
        const u32 others[4] = {partial.x, partial.y, partial.z, partial.w};
        low += formats::decode_bf16_low(others[i]);
        high += formats::decode_bf16_high(others[i]);
      }
      sum[2 * i] += weight * low;
      sum[2 * i + 1] += weight * high;
    }
  }
};

extern "C" __global__ void __launch_bounds__(Config::kNumThreads)
    finalize(const __grid_constant__ Params p) {
  const i64 token = blockIdx.x;
  const i32 column = 8 * static_cast<i32>(blockIdx.y * Config::kNumThreads + threadIdx.x);
  const i32 lane = static_cast<i32>(threadIdx.x) % 32;
  const bool in_row = column < p.hidden_size;

  // Rows and weights were there before FC2 let this kernel start, only its output is waited for.
  Slot own = load_own_slot(p, token, 0, lane);
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  float sum[8] = {};
  for (i32 first = 0; first < p.top_k; first += kSlotsInFlight) {
    if (first > 0) own = load_own_slot(p, token, first, lane);
    Slot slots[kSlotsInFlight];
    Columns z[kSlotsInFlight];
#pragma unroll
    for (i32 i = 0; i < kSlotsInFlight; ++i) {
      slots[i] = own.shared_by(i);
      if (slots[i].row >= 0 && in_row) z[i].load(p, slots[i].row, column);
    }
#pragma unroll
    for (i32 i = 0; i < kSlotsInFlight; ++i) {
      if (slots[i].row >= 0 && in_row) z[i].accumulate(sum, slots[i].weight);
    }
  }
  if (!in_row) return;
  const uint4 packed = {
      formats::encode_bf16x2(sum[0], sum[1]), formats::encode_bf16x2(sum[2], sum[3]),
      formats::encode_bf16x2(sum[4], sum[5]), formats::encode_bf16x2(sum[6], sum[7])};
  *reinterpret_cast<uint4*>(p.output + token * p.hidden_size + column) = packed;
}

}  // namespace cupy_moe
