// Rows of eight BF16 columns a thread, and sums over whole rows that the blocks of a cluster share.
#pragma once

#include "common/types.cuh"
#include "common/warp.cuh"
#include "formats/bf16.cuh"
#include "ptx/bf16x2.cuh"
#include "ptx/cluster.cuh"

namespace cupy_moe::finalize {

constexpr i32 kColumns = 8;                            // of a thread: 16 bytes of BF16
constexpr i32 kColumnsPerWarp = kColumns * kWarpSize;  // 256
constexpr i32 kMaxWarps = 64;                          // of a row of up to 16,384 columns
constexpr i32 kMaxSlots = kWarpSize;                   // of a token: a lane has the index of each

__device__ __forceinline__ void widen(float (&x)[kColumns], const uint4& v) {
  const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (i32 i = 0; i < 4; ++i) {
    x[2 * i] = formats::decode_bf16_low(words[i]);
    x[2 * i + 1] = formats::decode_bf16_high(words[i]);
  }
}

__device__ __forceinline__ void add(float (&sum)[kColumns], const uint4& v) {
  float x[kColumns];
  widen(x, v);
#pragma unroll
  for (i32 i = 0; i < kColumns; ++i) sum[i] += x[i];
}

// BF16 sum of two BF16 rows from +0.0. The same bits as an FP32 sum that is then rounded: 24 bits
// are enough for a second rounding to 8 to change nothing, and only -0.0 twice would stay -0.0.
__device__ __forceinline__ u32 sum_of_two(u32 a, u32 b) {
  constexpr u32 kOnes = 0x3F803F80u;
  return ptx::fma_rn_bf16x2(ptx::fma_rn_bf16x2(a, kOnes, b), kOnes, 0u);
}

__device__ __forceinline__ uint4 sum_of_two(const uint4& a, const uint4& b) {
  return make_uint4(sum_of_two(a.x, b.x), sum_of_two(a.y, b.y), sum_of_two(a.z, b.z),
                    sum_of_two(a.w, b.w));
}

__device__ __forceinline__ uint4 narrow(const float (&x)[kColumns]) {
  return make_uint4(formats::encode_bf16x2(x[0], x[1]), formats::encode_bf16x2(x[2], x[3]),
                    formats::encode_bf16x2(x[4], x[5]), formats::encode_bf16x2(x[6], x[7]));
}

// Sum of FP32 partial rows, two vectors each, in order; rounded once.
template <i32 kCount>
__device__ __forceinline__ uint4 add_partials(const uint4 (&v)[kCount]) {
  float total[kColumns] = {};
#pragma unroll
  for (i32 i = 0; i < kCount; ++i) {
    const u32 words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
    for (i32 j = 0; j < 4; ++j) total[4 * (i % 2) + j] += __uint_as_float(words[j]);
  }
  return narrow(total);
}

__device__ __forceinline__ uint4 bf16_nan() {
  return make_uint4(0x7FC07FC0u, 0x7FC07FC0u, 0x7FC07FC0u, 0x7FC07FC0u);
}

// Sums kCount values over the lanes of a warp: halves of the values are exchanged for halves of the
// lanes. Lane l receives the sum of value l / (32 / kCount), in an order that depends on nothing.
template <i32 kCount>
__device__ __forceinline__ float warp_sum_each(float (&x)[kCount], i32 lane) {
  static_assert(kCount <= kWarpSize && (kCount & (kCount - 1)) == 0, "a power of two");
  i32 distance = kWarpSize / 2;
#pragma unroll
  for (i32 half = kCount / 2; half > 0; half /= 2) {
    const bool is_upper = lane & distance;
#pragma unroll
    for (i32 i = 0; i < half; ++i) {
      const float given = is_upper ? x[i] : x[i + half];
      const float kept = is_upper ? x[i + half] : x[i];
      x[i] = kept + __shfl_xor_sync(kFullWarp, given, distance);
    }
    distance /= 2;
  }
#pragma unroll
  for (i32 d = kWarpSize / kCount / 2; d > 0; d /= 2) x[0] += __shfl_xor_sync(kFullWarp, x[0], d);
  return x[0];
}

// Sums over rows whose 256-column pieces belong to the warps of a cluster, one for each slot of a
// token. Every block gets the sums of all warps and adds them in the same order, whatever the
// cluster.
class RowSums {
 public:
  // [two tokens: a block may be one ahead of one that still reads][warp along the row][slot]
  using Storage = float[2][kMaxWarps][kMaxSlots];

  __device__ explicit RowSums(Storage& sums)
      : sums_(sums), cluster_size_(ptx::cluster_nctarank()) {}

  // Hands the warp's part of slots [first, first + kCount) to all blocks.
  template <i32 kCount>
  __device__ __forceinline__ void put(float (&x)[kCount], i32 first, i32 warp, i32 lane) {
    constexpr i32 kLanes = kWarpSize / kCount;  // that hold the same value
    const float own = warp_sum_each(x, lane);
    float* const to = &sums_[parity_][warp][(first + lane / kLanes) % kMaxSlots];
    if (cluster_size_ == 1) {
      if (lane % kLanes == 0) *to = own;
      return;
    }
    for (i32 block = lane % kLanes; block < cluster_size_; block += kLanes) {
      ptx::st_shared_cluster(ptx::mapa_shared_cluster(to, block), own);
    }
  }

  // All threads of the cluster call it once a token. Lane l gets the sum of slot l / lanes().
  __device__ __forceinline__ float get(i32 num_warps, i32 num_slots, i32 lane) {
    if (cluster_size_ == 1) {
      __syncthreads();
    } else {
      ptx::barrier_cluster_arrive();
      ptx::barrier_cluster_wait();
    }
    const i32 lanes = lanes_per_slot(num_slots);
    float total = 0.0f;
    for (i32 w = lane % lanes; w < num_warps; w += lanes) {
      total += sums_[parity_][w][lane / lanes];
    }
    if (lanes == 4) {
      total += __shfl_xor_sync(kFullWarp, total, 2);
      total += __shfl_xor_sync(kFullWarp, total, 1);
    }
    parity_ ^= 1;
    return total;
  }

  __device__ static i32 lanes_per_slot(i32 num_slots) { return num_slots <= 8 ? 4 : 1; }

 private:
  Storage& sums_;
  i32 cluster_size_;
  i32 parity_ = 0;
};

}  // namespace cupy_moe::finalize
