// Top-k of the keys of one token, spread over a warp. Ties go to the smaller expert id.
//
// Expert e sits in lane e % width of row e / width. The width is 32, or the group size when experts
// are group-limited, so that a row is a group. Keys are compared as integers in the total order of
// the float bits: -0.0 below +0.0, and NaN has a place like any other value, so there are always
// top_k distinct ids in range.
#pragma once

#include "common/types.cuh"
#include "common/warp.cuh"

namespace cupy_moe::routing {

// Key of "no expert here" and "already taken": below the key of every float.
constexpr u32 kAbsentKey = 0;
constexpr u32 kMinusInfinityKey = 0x007FFFFF;

// Order-preserving map of float bits to unsigned integers. The one NaN that would map to kAbsentKey
// moves up by one.
__device__ __forceinline__ u32 to_key(float value) {
  const u32 bits = __float_as_uint(value);
  const u32 flip = (bits >> 31) != 0 ? 0xFFFFFFFFu : 0x80000000u;
  return max(bits ^ flip, kAbsentKey + 1);
}

__device__ __forceinline__ float from_key(u32 key) {
  const u32 flip = (key >> 31) != 0 ? 0x80000000u : 0xFFFFFFFFu;
  return __uint_as_float(key ^ flip);
}

// Which expert a lane holds in each row.
struct LaneExperts {
  i32 lane;
  i32 width;  // experts per row, <= 32
  i32 num_experts;

  __device__ i32 id(int row) const { return row * width + lane; }
  __device__ bool has(int row) const { return lane < width && id(row) < num_experts; }
};

struct Candidate {
  u32 key;
  i32 row;
};

// Best of the keys one lane holds; among equals the first row, which is the smaller id.
template <int kNumRows>
__device__ Candidate lane_best(const u32 (&keys)[kNumRows]) {
  Candidate best{kAbsentKey, 0};
#pragma unroll
  for (int row = 0; row < kNumRows; ++row) {
    if (keys[row] > best.key) best = {keys[row], row};
  }
  return best;
}

struct Selection {
  u32 key;
  i32 id;
};

// Returns slot k's expert in lane k < top_k; the other lanes get {kAbsentKey, 0}. Consumes the
// keys. Needs top_k <= 32 present keys.
template <int kNumRows>
__device__ Selection select_top_k(u32 (&keys)[kNumRows], const LaneExperts& experts, int top_k) {
  Selection selected{kAbsentKey, 0};
  Candidate best = lane_best(keys);
  for (int slot = 0; slot < top_k; ++slot) {
    const i32 best_id = experts.id(best.row);
    const u32 winning_key = warp_max(best.key);
    // kFullWarp exceeds every id: lanes that do not hold the winning key never supply the minimum.
    const u32 winning_id =
        warp_min(best.key == winning_key ? static_cast<u32>(best_id) : kFullWarp);
    if (experts.lane == slot) selected = {winning_key, static_cast<i32>(winning_id)};
    if (best.key == winning_key && static_cast<u32>(best_id) == winning_id) {
#pragma unroll
      for (int row = 0; row < kNumRows; ++row) {
        if (row == best.row) keys[row] = kAbsentKey;
      }
      best = lane_best(keys);
    }
  }
  return selected;
}

// Score of the group in one row: FP32 sum of its two largest keys; kAbsentKey for a row without
// experts.
__device__ __forceinline__ u32 group_score(u32 key, i32 lane) {
  const u32 first = warp_max(key);
  const i32 first_lane = __ffs(__ballot_sync(kFullWarp, key == first)) - 1;
  const u32 second = warp_max(lane == first_lane ? kAbsentKey : key);
  return first == kAbsentKey ? kAbsentKey : to_key(from_key(first) + from_key(second));
}

// Keeps the topk_group rows of largest score, ties to the smaller row, and gives the experts of all
// others the key of -inf. Rows are groups of at least two experts.
template <int kNumRows>
__device__ void limit_to_best_groups(u32 (&keys)[kNumRows], i32 lane, int topk_group) {
  u32 scores[kNumRows];
  u32 own_score = kAbsentKey;  // of group `lane`
#pragma unroll
  for (int group = 0; group < kNumRows; ++group) {
    scores[group] = group_score(keys[group], lane);
    if (lane == group) own_score = scores[group];
  }
  int own_rank = 0;
#pragma unroll
  for (int group = 0; group < kNumRows; ++group) {
    own_rank += scores[group] > own_score || (scores[group] == own_score && group < lane);
  }
  const u32 kept = __ballot_sync(kFullWarp, own_score != kAbsentKey && own_rank < topk_group);
#pragma unroll
  for (int group = 0; group < kNumRows; ++group) {
    const bool is_kept = (kept >> group) & 1;
    if (!is_kept && keys[group] != kAbsentKey) keys[group] = kMinusInfinityKey;
  }
}

}  // namespace cupy_moe::routing
