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
  u8* own;    // receive buffers of this rank
  u8* peer0;  // and of the others in order of rank, as this one sees them
  u8* peer1;
  u8* peer2;
  u8* peer3;
  u8* peer4;
  u8* peer5;
  u8* peer6;
  i32* generations;    // [slot, 64, 4] of this scheme, modulo the copies of the buffers
  i32* failed;         // [1] whether a wait was ever given up
  i32* report;         // [8] in host memory, see give_up
  i64 rows_offset;     // bytes to [3, num_peers, rows_slots, reduced slots, hidden_size] bf16
  i64 results_offset;  // bytes to [3, senders, results_slots, hidden_size] bf16 or f32
  i64 row_stride;      // elements
  u64 timeout_ns;
  i32 rows_slots;
  i32 results_slots;
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
constexpr i32 kNumSenders = kByExpert ? kNumRanks : kNumPeers;  // of results to a rank
constexpr i32 kResultVectors = kByExpert ? 2 : 1;               // of a thread's eight columns
constexpr u32 kRowSentinel = lamport::kBf16Sentinel;
constexpr u32 kResultSentinel = kByExpert ? lamport::kF32Sentinel : lamport::kBf16Sentinel;

// Warps that share the 256 columns of a piece, each with some of the slots.
constexpr i32 kGroups = Config::kNumGroups;
constexpr i32 kMaxGroups = 4;
static_assert(kMaxGroups % kGroups == 0, "counters are divided among the groups");

// Number of a sender among the peers of a receiver, and back.
__device__ __forceinline__ i32 peer_number(i32 sender, i32 receiver) {
  return sender < receiver ? sender : sender - 1;
}
__device__ __forceinline__ i32 peer_rank(i32 number, i32 receiver) {
  return number < receiver ? number : number + 1;
}

__device__ __forceinline__ u8* buffers_of_peer(const Params& p, i32 number) {
  u8* const all[7] = {p.peer0, p.peer1, p.peer2, p.peer3, p.peer4, p.peer5, p.peer6};
  u8* found = all[0];
#pragma unroll
  for (i32 i = 1; i < kNumPeers; ++i) found = number == i ? all[i] : found;
  return found;
}

__device__ __forceinline__ i32 owner_of(i32 token) {
  return token % kNumRanks;
}

// Slots [first, first + count) of a token that a rank reduces.
struct SlotRange {
  i32 first;
  i32 count;
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

// A token's place in the buffers; under TokenOwner they hold the tokens of one owner only.
__device__ __forceinline__ i32 slot_of(i32 token) {
  return kByToken ? token / kNumRanks : token;
}

// Bytes from the start of a receiver's buffers to its first row of a token from peer number
// `sender`; the next row follows after hidden_size columns.
__device__ __forceinline__ i64 rows_at(const Params& p, i32 copy, i32 sender, i32 token) {
  const i32 rows = kByExpert ? ceil_div(p.top_k, kNumRanks) : p.top_k;
  const i64 slot = static_cast<i64>(copy * kNumPeers + sender) * p.rows_slots + slot_of(token);
  return p.rows_offset + slot * rows * p.hidden_size * i64{sizeof(u16)};
}

// Likewise to a finished row or, FP32, a partial sum; a sender of the latter sends to itself, too.
__device__ __forceinline__ i64 result_at(const Params& p, i32 copy, i32 sender, i32 token) {
  const i64 slot = static_cast<i64>(copy * kNumSenders + sender) * p.results_slots + slot_of(token);
  return p.results_offset + slot * p.hidden_size * i64{sizeof(u16)} * kResultVectors;
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
