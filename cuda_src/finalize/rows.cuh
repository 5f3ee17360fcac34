// Rows of eight BF16 columns a thread, and sums over whole rows that the blocks of a cluster share.
#pragma once

#include "common/types.cuh"
#include "common/warp.cuh"
#include "formats/bf16.cuh"
#include "ptx/bf16x2.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"

namespace cupy_moe::finalize {

constexpr i32 kColumns = 8;                            // of a thread: 16 bytes of BF16
constexpr i32 kColumnsPerWarp = kColumns * kWarpSize;  // 256
constexpr i32 kMaxWarps = 64;                          // of a row of up to 16,384 columns
constexpr i32 kMaxSlots = kWarpSize;                   // of a token: a lane has the index of each

// Pairs of BF16, or FP32, that one access moves.
template <i32 kCount>
struct alignas(4 * kCount) Words {
  u32 at[kCount];
};

__device__ __forceinline__ Words<4> words_of(const uint4& v) {
  return {v.x, v.y, v.z, v.w};
}

__device__ __forceinline__ uint4 vector_of(const Words<4>& words) {
  return make_uint4(words.at[0], words.at[1], words.at[2], words.at[3]);
}

template <i32 kPairs>
__device__ __forceinline__ void widen(float (&x)[2 * kPairs], const Words<kPairs>& words) {
#pragma unroll
  for (i32 i = 0; i < kPairs; ++i) {
    x[2 * i] = formats::decode_bf16_low(words.at[i]);
    x[2 * i + 1] = formats::decode_bf16_high(words.at[i]);
  }
}

__device__ __forceinline__ void widen(float (&x)[kColumns], const uint4& v) {
  widen(x, words_of(v));
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

template <i32 kCount>
__device__ __forceinline__ Words<kCount / 2> narrow(const float (&x)[kCount]) {
  Words<kCount / 2> words;
#pragma unroll
  for (i32 i = 0; i < kCount / 2; ++i) {
    words.at[i] = formats::encode_bf16x2(x[2 * i], x[2 * i + 1]);
  }
  return words;
}

// Sum of FP32 partial rows, of so many vectors each, in order; rounded once.
template <i32 kVectors, i32 kCount>
__device__ __forceinline__ Words<2 * kVectors> add_partials(const uint4 (&v)[kCount]) {
  float total[4 * kVectors] = {};
#pragma unroll
  for (i32 i = 0; i < kCount; ++i) {
    const u32 words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
    for (i32 j = 0; j < 4; ++j) total[4 * (i % kVectors) + j] += __uint_as_float(words[j]);
  }
  return narrow(total);
}

constexpr u32 kBf16Nans = 0x7FC07FC0u;

__device__ __forceinline__ uint4 bf16_nan() {
  return make_uint4(kBf16Nans, kBf16Nans, kBf16Nans, kBf16Nans);
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
// token. Every block gets the sums of all pieces and adds them in the same order, whatever the
// cluster and whichever of the warps that share a piece has a slot.
class RowSums {
 public:
  // Without clusters a row has at most 16 pieces.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  static constexpr i32 kPitch = 16;
#else
  static constexpr i32 kPitch = kMaxWarps + 16;  // with a word to spare
#endif

  // Of two tokens each: a warp may be one ahead of another one that still reads.
  struct Storage {
    // [slot][piece]; neighbouring slots lie in other banks.
    alignas(16) float sums[2][kMaxSlots][kPitch];
    u64 arrived[2];  // with several blocks: all warps of this one, and bytes from all of them
  };

  // One thread calls it, before a barrier of the cluster.
  __device__ static void init(Storage& storage) {
    for (u64& barrier : storage.arrived) {
      ptx::mbarrier_init(&barrier, static_cast<i32>(blockDim.x) / kWarpSize);
    }
    ptx::fence_mbarrier_init();
  }

  __device__ explicit RowSums(Storage& storage)
      : storage_(storage), cluster_size_(ptx::cluster_nctarank()) {}

  // Which of two buffers that the warps of a block share belongs to the token.
  __device__ __forceinline__ i32 parity() const { return parity_; }

  // Hands the warp's sums of slots [first, min(first + kCount, end)) of a piece to all blocks.
  // They travel behind no fence: one would wait for the rows that are under way to other ranks.
  template <i32 kCount>
  __device__ __forceinline__ void put(float (&x)[kCount], i32 first, i32 end, i32 piece, i32 lane) {
    constexpr i32 kLanes = kWarpSize / kCount;  // that hold the same value
    const float own = warp_sum_each(x, lane);
    const i32 slot = first + lane / kLanes;
    if (slot >= end) return;
    float* const to = &storage_.sums[parity_][slot][piece];
    if (cluster_size_ == 1) {
      if (lane % kLanes == 0) *to = own;
      return;
    }
    send(to, own, lane % kLanes, kLanes);
  }

  // For a warp that has no slots of the token. Blocks must not be ahead by more than a token of one
  // that still reads, so they wait for a word of it all the same.
  __device__ __forceinline__ void put_nothing(i32 lane) {
    if (cluster_size_ > 1) send(&storage_.sums[parity_][0][kPitch - 1], 0.0f, lane, kWarpSize);
  }

  // All warps of the cluster call it once a token, each with the number of slots that it has put:
  // waits for the sums of all warps, and for what the warps of the block have written to its
  // shared memory.
  __device__ __forceinline__ void wait(i32 num_put, i32 lane) {
    if (cluster_size_ == 1) {
      __syncthreads();
      return;
    }
    // Every block has warps with the same pieces and slots, so each stands for its counterparts.
    __syncwarp();
    u64* const barrier = &storage_.arrived[parity_];
    if (lane == 0) {
      const i32 num_words = max(1, num_put) * cluster_size_;
      ptx::mbarrier_arrive_expect_tx(barrier, num_words * i32{sizeof(float)});
    }
    ptx::mbarrier_wait_parity_cluster(barrier, phase_);
  }

  // Lane l gets the sum of slot `slot_of_lane(l)`, for the token of the last `wait`.
  __device__ __forceinline__ float get(i32 num_pieces, i32 num_slots, i32 lane) {
    const i32 slot = slot_of_lane(num_slots, lane);
    const i32 lanes = 1 << lanes_per_slot_log2(num_slots);
    float total = 0.0f;
#pragma unroll 1
    for (i32 first = 4 * (lane & (lanes - 1)); first < num_pieces; first += 4 * lanes) {
      const Four four = *reinterpret_cast<const Four*>(&storage_.sums[parity_][slot][first]);
#pragma unroll
      for (i32 i = 0; i < 4; ++i) total += first + i < num_pieces ? four.at[i] : 0.0f;
    }
    if (lanes == 4) {
      total += __shfl_xor_sync(kFullWarp, total, 2);
      total += __shfl_xor_sync(kFullWarp, total, 1);
    }
    phase_ ^= parity_;
    parity_ ^= 1;
    return total;
  }

  __device__ static i32 slot_of_lane(i32 num_slots, i32 lane) {
    return lane >> lanes_per_slot_log2(num_slots);
  }
  __device__ static i32 lane_of_slot(i32 num_slots, i32 slot) {
    return slot << lanes_per_slot_log2(num_slots);
  }

 private:
  // To blocks first, first + step ... of the cluster.
  __device__ __forceinline__ void send(const float* to, float value, i32 first, i32 step) {
    for (i32 block = first; block < cluster_size_; block += step) {
      ptx::st_async_shared_cluster(ptx::mapa_shared_cluster(to, block), value,
                                   ptx::mapa_shared_cluster(&storage_.arrived[parity_], block));
    }
  }

  struct alignas(16) Four {
    float at[4];
  };

  // A shift, as a division takes longer than all the rest of it.
  __device__ static i32 lanes_per_slot_log2(i32 num_slots) { return num_slots <= 8 ? 2 : 0; }

  Storage& storage_;
  i32 cluster_size_;
  i32 parity_ = 0;
  u32 phase_ = 0;  // of both barriers in turn
};

}  // namespace cupy_moe::finalize
