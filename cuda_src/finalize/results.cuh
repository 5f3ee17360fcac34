// What a rank makes of a token: to its output and to other ranks, and what it takes from them.
#pragma once

#include "common/types.cuh"
#include "finalize/exchange.cuh"
#include "finalize/piece.cuh"
#include "finalize/rows.cuh"
#include "lamport/receive.cuh"
#include "lamport/word.cuh"
#include "ptx/cluster.cuh"
#include "ptx/ld_st.cuh"

namespace cupy_moe::finalize {

// Columns of a thread behind the sum over ranks: all warps of a piece have their share.
constexpr i32 kTail = max(2, kColumns / kGroups);
using TailWords = Words<kTail / 2>;

// Warps of a piece that take results, a vector of each or two.
constexpr i32 kReceivers = min(kGroups, kResultVectors);

struct Results : Piece {
  i32 vectors_in_block;  // of a row
  i32 tail_column;       // first of the thread's kTail
  bool in_tail;

  __device__ explicit Results(const Params& params) : Piece(params) {
    vectors_in_block = static_cast<i32>(blockDim.x) / kGroups;
    const i32 in_block = kTail * static_cast<i32>(threadIdx.x);
    tail_column = ptx::cluster_ctarank() * vectors_in_block * kColumns + in_block;
    in_tail = in_block < vectors_in_block * kColumns && tail_column < p.hidden_size;
  }

  __device__ void send_partial(const float (&total)[kTail], i32 token, i32 copy) const {
    if (patience.gave_up()) return;
    constexpr i32 kCount = min(kTail, 4);  // words of an access
    const i64 offset = result_at(p, copy, token) + tail_column * i64{sizeof(float)};
    u8* const own = p.results_from + p.rank * p.results_sender_bytes;
#pragma unroll
    for (i32 first = 0; first < kTail; first += kCount) {
      Words<kCount> words;
#pragma unroll
      for (i32 i = 0; i < kCount; ++i) {
        words.at[i] = lamport::scrubbed<kResultSentinel>(__float_as_uint(total[first + i]));
      }
      const i64 at = offset + first * sizeof(float);
#pragma unroll
      for (i32 turn = 0; turn < kNumPeers; ++turn) store(p.results_to[turn] + at, words);
      store(own + at, words);
    }
  }

  __device__ void finish(TailWords words, i32 token, i32 copy) const {
#pragma unroll
    for (u32& word : words.at) word = lamport::scrubbed<lamport::kBf16Sentinel>(word);
    if (kByToken && !patience.gave_up()) {
      const i64 at = result_at(p, copy, token) + tail_column * i64{sizeof(u16)};
#pragma unroll
      for (i32 turn = 0; turn < kNumPeers; ++turn) store(p.results_to[turn] + at, words);
    }
    write_output(words, token, tail_column);  // the bits that the others get
  }

  // Where other ranks wait for it.
  template <i32 kCount>
  __device__ static void store(u8* to, const Words<kCount>& words) {
    if constexpr (kCount == 4) ptx::st_relaxed_sys_v4(to, vector_of(words));
    if constexpr (kCount == 2) ptx::st_relaxed_sys_v2(to, make_uint2(words.at[0], words.at[1]));
    if constexpr (kCount == 1) ptx::st_relaxed_sys(reinterpret_cast<i32*>(to), words.at[0]);
  }

  template <i32 kCount>
  __device__ void write_output(Words<kCount> words, i32 token, i32 first) const {
    if (patience.gave_up()) {
#pragma unroll
      for (u32& word : words.at) word = kBf16Nans;
    }
    u16* const to = p.output + static_cast<i64>(token) * p.hidden_size + first;
    *reinterpret_cast<Words<kCount>*>(to) = words;
  }

  // Takes what owners finished; every one of kReceivers warps of a piece calls it.
  __device__ void receive(i32 token, Copies copies) {
    constexpr i32 kVectors = kResultVectors / kReceivers;
    constexpr i32 kCount = (kByExpert ? kNumRanks : 1) * kVectors;
    const i32 sender = kByExpert ? 0 : peer_number(owner_of(token), p.rank);
    u8* const from = p.results_from + sender * p.results_sender_bytes +
                     kResultVectors * column * i64{sizeof(u16)} + 16 * group;
    const auto buffer = [&](i32 copy) { return from + result_at(p, copy, token); };
    const auto offset = [&](i32 i) {
      return i / kVectors * p.results_sender_bytes + 16 * (i % kVectors);
    };
    if (copies.spent >= 0) {
      u8* const spent = buffer(copies.spent);
#pragma unroll
      for (i32 i = 0; i < kCount; ++i) {
        *reinterpret_cast<uint4*>(spent + offset(i)) = lamport::armed<kResultSentinel>();
      }
    }
    uint4 v[kCount];
    const i32 missing = lamport::receive<kResultSentinel>(v, kCount, buffer(copies.used), offset,
                                                          p.is_polite, patience);
    if (missing >= 0) give_up(p, kByExpert ? missing / kVectors : owner_of(token), token);
    if constexpr (kByExpert) {
      write_output(add_partials<kVectors>(v), token, column + 4 * group);
    } else {
      write_output(words_of(v[0]), token, column);
    }
  }
};

}  // namespace cupy_moe::finalize
