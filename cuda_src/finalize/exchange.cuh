// Parameters and receive buffers of the tensor-parallel finalize: who sends what, and where it
// lies.
#pragma once

#include "common/types.cuh"
#include "finalize/rows.cuh"
#include "lamport/word.cuh"
#include "ptx/ld_st.cuh"

namespace cupy_moe {

struct Params {
  const u16* gemm2;        // [num_rows, row_stride] bf16, the first hidden_size columns are read
  const void* weights;     // [num_tokens, top_k] bf16 or f32
  const i32* index;        // [num_tokens, top_k] row of a slot; outside [0, num_rows): zeros
  const u16* norm_weight;  // [hidden_size] bf16
  u16* output;             // [num_tokens, hidden_size] bf16
  i32 call;
  i32 rank;
  u8* rows_from;  // receive buffers of this rank: [3, senders, tokens, reduced slots, hidden_size]
  u8* results_from;  // bf16, and [3, senders, tokens, hidden_size] bf16 or f32
  u8* rows_to[7];  // those of the next rank and so on, as this one sees them: its own part of copy
                   // 0
  u8* results_to[7];
  i64 rows_copy_bytes;    // of one of the three copies
  i64 rows_sender_bytes;  // of one sender in it
  i64 results_copy_bytes;
  i64 results_sender_bytes;
  i32 rows_token_bytes;  // of one token from one sender
  i32 results_token_bytes;
  i32* generations;  // [token, 64, 8] of this scheme, modulo the copies of the buffers
  i32* failed;       // [1] whether a wait was ever given up
  i32* report;       // [8] in host memory, see give_up
  i64 row_stride;    // elements
  u64 timeout_ns;
  i32 num_rows;
  i32 num_tokens;
  i32 hidden_size;
  i32 top_k;
  i32 phases;     // Phase bits
  i32 is_polite;  // whether waits leave the memory to the stores
  i32 weights_are_f32;
  i32 weight_before_norm;
  float eps;
  float gain_center;
  float per_column;  // 1 / hidden_size
  i32 is_shared;     // whether other ranks run on this device
};

CUPY_MOE_CHECK_PARAMS(Params);

namespace finalize {

// One launch has all of them, or a transport in between copies what each one wrote.
enum Phase { kSend = 1, kReduce = 2, kReceive = 4, kAllPhases = 7 };

constexpr FinalizeScheme kScheme = Config::kScheme;
constexpr bool kByExpert = kScheme == FinalizeScheme::ExpertOwner;
constexpr bool kByToken = kScheme == FinalizeScheme::TokenOwner;
constexpr i32 kNumRanks = Config::kNumRanks;
constexpr i32 kNumPeers = kNumRanks - 1;
constexpr i32 kResultVectors = kByExpert ? 2 : 1;  // of a thread's eight columns
constexpr u32 kRowSentinel = lamport::kBf16Sentinel;
constexpr u32 kResultSentinel = kByExpert ? lamport::kF32Sentinel : lamport::kBf16Sentinel;

// Warps that share the 256 columns of a piece, each with some of the slots.
constexpr i32 kGroups = Config::kNumGroups;
constexpr i32 kMaxGroups = 8;
static_assert(kMaxGroups % kGroups == 0, "counters are divided among the groups");

// Number of a sender among those of a receiver, and back.
__device__ __forceinline__ i32 peer_number(i32 sender, i32 receiver) {
  return sender < receiver ? sender : sender - 1;
}
__device__ __forceinline__ i32 peer_rank(i32 number, i32 receiver) {
  return number < receiver ? number : number + 1;
}

// A rank sends to the others in turn, from the next one on: if all had the same order, each would
// get everything at once. The turn of a receiver:
__device__ __forceinline__ i32 turn_of(const Params& p, i32 receiver) {
  if (kNumPeers == 1) return 0;
  return receiver > p.rank ? receiver - p.rank - 1 : receiver - p.rank - 1 + kNumRanks;
}

__device__ __forceinline__ i32 owner_of(i32 token) {
  return token % kNumRanks;
}

// So many slots of a token from `first` on; slot 0 follows the last one.
struct SlotRange {
  i32 first;
  i32 count;

  __device__ __forceinline__ i32 at(i32 number, i32 top_k) const {
    const i32 slot = first + number;
    return kByExpert && slot >= top_k ? slot - top_k : slot;
  }
};

// Of so many slots those of one warp among kGroups: [begin, end).
struct Part {
  i32 begin;
  i32 end;

  __device__ Part(i32 count, i32 group)
      : begin(group * count / kGroups), end((group + 1) * count / kGroups) {}
};

__device__ __forceinline__ SlotRange reduced_slots(const Params& p, i32 rank) {
  if (!kByExpert) return {0, p.top_k};
  const i32 first = rank * p.top_k / kNumRanks;
  return {first, (rank + 1) * p.top_k / kNumRanks - first};
}

// Those of other owners, the next rank's first.
__device__ __forceinline__ SlotRange sent_slots(const Params& p) {
  if (!kByExpert) return {0, p.top_k};
  const SlotRange own = reduced_slots(p, p.rank);
  return {own.first + own.count, p.top_k - own.count};
}

// The rank whose reduced_slots() have a slot.
__device__ __forceinline__ i32 owner_of_slot(const Params& p, i32 slot) {
  return ((slot + 1) * kNumRanks - 1) / p.top_k;
}

// A token's place in the buffers; under TokenOwner they hold the tokens of one owner only.
__device__ __forceinline__ i32 slot_of(i32 token) {
  return kByToken ? token / kNumRanks : token;
}

// Bytes to the rows of a token in the buffer of a sender, and to its result, finished or a sum.
__device__ __forceinline__ i64 rows_at(const Params& p, i32 copy, i32 token) {
  return copy * p.rows_copy_bytes + i64{slot_of(token)} * p.rows_token_bytes;
}
__device__ __forceinline__ i64 result_at(const Params& p, i32 copy, i32 token) {
  return copy * p.results_copy_bytes + i64{slot_of(token)} * p.results_token_bytes;
}

// Copies of the buffers for a token in this launch: the one in use, and the one that this rank read
// in the launch before and arms again, -1 for none.
struct Copies {
  i32 used;
  i32 spent;
};

__device__ __forceinline__ Copies copies_of(i32 generation) {
  return {generation % lamport::kGenerations,
          (generation + lamport::kGenerations - 1) % lamport::kGenerations};
}

// Counts, modulo kGenerations, of the launches that had a token: a piece has kMaxGroups of them, of
// equal values between launches, and each of its warps has its share.
constexpr i32 kCountersPerWarp = kMaxGroups / kGroups;
__device__ __forceinline__ i32* generations_of(const Params& p, i32 token, i32 piece, i32 group) {
  const i64 first = static_cast<i64>(token) * kMaxWarps + piece;
  return p.generations + first * kMaxGroups + group * kCountersPerWarp;
}

// The first thread to give up says who it waited for: words of `report`, the first one last.
__device__ inline void give_up(const Params& p, i32 peer, i32 token) {
  if (atomicCAS(p.failed, 0, 1) != 0) return;
  const i32 words[5] = {1, peer, p.call, p.num_tokens, token};
  for (i32 i = 4; i > 0; --i) ptx::st_relaxed_sys(p.report + i, words[i]);
  __threadfence_system();
  ptx::st_relaxed_sys(p.report, words[0]);
}

}  // namespace finalize
}  // namespace cupy_moe
