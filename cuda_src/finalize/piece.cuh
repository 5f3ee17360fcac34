// What a rank has of a token and gives away, 256 columns a warp; and where it receives as much.
#pragma once

#include "common/types.cuh"
#include "common/warp.cuh"
#include "finalize/exchange.cuh"
#include "finalize/rows.cuh"
#include "formats/bf16.cuh"
#include "lamport/receive.cuh"
#include "lamport/word.cuh"
#include "ptx/cluster.cuh"
#include "ptx/ld_st.cuh"

namespace cupy_moe::finalize {

// Vectors in flight hide the latency of a load, and cost four registers each.
constexpr i32 kSentInFlight = min(kNumRanks > 4 ? 4 : 8, 8 / kGroups);
// Of a slot that is reduced there is one from every rank. NOTE: but for sm_90 ptxas would spill
// with eight slots of few ranks, and there as well if two send and reduce them at once.
#if __CUDA_ARCH__ == 900
constexpr i32 kSlotsOfFew = kNumRanks == 2 && !kByToken ? 4 : 8;
#else
constexpr i32 kSlotsOfFew = 4;
#endif
constexpr i32 kSlotsOfWarp = max(1, 8 / kGroups / (kByExpert ? kNumRanks : 1));  // of eight
constexpr i32 kSlotsInFlight = min(kNumRanks > 2 ? 8 / kNumRanks : kSlotsOfFew, kSlotsOfWarp);

// A warp's 256 columns and its part of the slots, of one token after another.
struct Piece {
  const Params& p;
  i32 piece;   // along the row
  i32 group;   // among the warps that share the piece
  i32 column;  // first of the thread's eight
  i32 lane;
  bool in_row;
  // Who gave up sends nothing more: whoever needs it gives up as well and says so.
  lamport::Patience patience;

  __device__ explicit Piece(const Params& params)
      : p(params), patience(params.timeout_ns, params.failed) {
    const i32 thread =
        ptx::cluster_ctarank() * static_cast<i32>(blockDim.x) + static_cast<i32>(threadIdx.x);
    const i32 warp = thread / kWarpSize;
    piece = warp / kGroups;
    group = warp % kGroups;
    lane = thread % kWarpSize;
    column = kColumnsPerWarp * piece + kColumns * lane;
    in_row = column < p.hidden_size;
  }

  __device__ i32 load_index(i32 token) const {
    return lane < p.top_k ? p.index[static_cast<i64>(token) * p.top_k + lane] : -1;
  }

  // Slots [first, min(first + kCount, end)) of a range. One without a row is zeros: nothing is
  // read, so that nothing of it can be NaN.
  template <i32 kCount>
  __device__ void load_rows(uint4 (&rows)[kCount], i32 index, SlotRange slots, i32 first,
                            i32 end) const {
#pragma unroll
    for (i32 i = 0; i < kCount; ++i) {
      const i32 row = __shfl_sync(kFullWarp, index, slots.at(first + i, p.top_k));
      const bool is_valid = first + i < end && row >= 0 && row < p.num_rows;
      rows[i] = make_uint4(0, 0, 0, 0);
      if (in_row && is_valid) {
        rows[i] = __ldcs(reinterpret_cast<const uint4*>(p.gemm2 + row * p.row_stride + column));
      }
    }
  }

  __device__ void send(i32 token, i32 index, i32 copy) const {
    if (kByToken && owner_of(token) == p.rank) return;
    const SlotRange slots = sent_slots(p);
    const Part part(slots.count, group);
#pragma unroll 1
    for (i32 first = part.begin; first < part.end; first += kSentInFlight) {
      uint4 rows[kSentInFlight];
      load_rows(rows, index, slots, first, part.end);
      send_rows(rows, slots, first, part.end, token, copy);
    }
  }

  // Slots [first, min(first + kCount, end)) of a range, to those who reduce them.
  template <i32 kCount>
  __device__ void send_rows(const uint4 (&rows)[kCount], SlotRange slots, i32 first, i32 end,
                            i32 token, i32 copy) const {
    if (!in_row || patience.gave_up()) return;
    const i64 at = rows_at(p, copy, token) + column * i64{sizeof(u16)};
    if (kByExpert) {
#pragma unroll
      for (i32 i = 0; i < kCount; ++i) {
        const i32 slot = slots.at(first + i, p.top_k);
        const i32 owner = owner_of_slot(p, slot);
        const i32 number = slot - reduced_slots(p, owner).first;
        if (first + i < end) {
          send_row(p.rows_to[turn_of(p, owner)] + at + row_bytes(number), rows[i]);
        }
      }
    } else {
      const i32 begin = kByToken ? turn_of(p, owner_of(token)) : 0;
#pragma unroll
      for (i32 turn = 0; turn < (kByToken ? 1 : kNumPeers); ++turn) {
        u8* const to = p.rows_to[begin + turn] + at + row_bytes(first);
#pragma unroll
        for (i32 i = 0; i < kCount; ++i) {
          if (first + i < end) send_row(to + row_bytes(i), rows[i]);
        }
      }
    }
  }

  __device__ static void send_row(u8* to, const uint4& row) {
    ptx::st_relaxed_sys_v4(to, lamport::scrubbed<kRowSentinel>(row));
  }

  // Slots [first, min(first + kSlotsInFlight, end)).
  __device__ void rearm_rows(i32 first, i32 end, i32 token, i32 copy) const {
    u8* const at = received_rows(token, copy, first);
#pragma unroll
    for (i32 i = 0; i < kSlotsInFlight; ++i) {
      if (first + i >= end) break;
#pragma unroll
      for (i32 peer = 0; peer < kNumPeers; ++peer) {
        *reinterpret_cast<uint4*>(at + row_bytes(i) + peer * p.rows_sender_bytes) =
            lamport::armed<kRowSentinel>();
      }
    }
  }

  // Where this rank receives row `first` of a token from its first peer, at this thread's columns.
  __device__ u8* received_rows(i32 token, i32 copy, i32 first) const {
    return p.rows_from + rows_at(p, copy, token) + row_bytes(first) + column * sizeof(u16);
  }

  __device__ u32 row_bytes(i32 count) const { return count * p.hidden_size * u32{sizeof(u16)}; }

  // Lane l gets the weight of slot `RowSums::slot_of_lane(l)` of a range.
  __device__ float load_weight(i32 token, SlotRange slots) const {
    const i32 number = RowSums::slot_of_lane(slots.count, lane);
    if (number >= slots.count) return 0.0f;
    const i64 slot = static_cast<i64>(token) * p.top_k + slots.first + number;
    if (p.weights_are_f32) return static_cast<const float*>(p.weights)[slot];
    return formats::decode_bf16(static_cast<const u16*>(p.weights)[slot]);
  }
};

}  // namespace cupy_moe::finalize
