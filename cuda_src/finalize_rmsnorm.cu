// Tensor-parallel finalize: sum of every expert row over the ranks in rank order, rounded to BF16;
// RMSNorm of it; weighted sum over the slots of a token, rounded once.
//
// Rows travel by 16-byte stores into receive buffers of the peers (lamport/word.cuh), in two hops:
//   EveryRank    all rows to every rank; every rank reduces
//   TokenOwner   all rows of token t to rank t % P, which reduces; its BF16 row to every rank
//   ExpertOwner  rows of a slot to its owner, which reduces; FP32 sums of an owner to every rank
// A cluster handles one token at a time. A warp has 256 columns, a piece, of all slots of the token
// or, with few tokens, of some of them: then as many warps have the other slots of the piece.
// Blocks of a cluster share the sums of squares, warps of a block the reduced rows. A token, a
// piece and a part of the slots are a slot of the protocol: the warp that has it counts its
// generation g, uses copy g % 3 of the buffers and re-arms copy (g + 2) % 3, which was read in the
// launch before. All blocks of all ranks must be resident at once, and each sends what it has of a
// token before it waits for that token, in increasing order of tokens.
#include "common/types.cuh"
#include "finalize/exchange.cuh"
#include "finalize/piece.cuh"
#include "finalize/results.cuh"
#include "finalize/rows.cuh"
#include "lamport/receive.cuh"
#include "lamport/word.cuh"
#include "ptx/cluster.cuh"
#include "ptx/ld_st.cuh"
#include "ptx/pdl.cuh"

namespace cupy_moe::finalize {

// NOTE: ptxas would spill if warps that have many slots kept these while they wait.
constexpr bool kKeepsIndex = kGroups > 2;
constexpr bool kLoadsNormAhead = kGroups > 1;

// A token whose rows were sent: the index of this lane's slot, and the generation of its buffers.
struct Begun {
  i32 index;
  i32 generation;
};

// Reduced rows that a thread loads at once: before the sums arrive where registers are left.
constexpr bool kLoadsTailAhead = kGroups > 2;
constexpr i32 kTailSlots = kLoadsTailAhead ? 8 : 1;

// The exchange of a warp with its counterparts on the other ranks.
struct Exchange : Results {
  uint4* stash;  // shared, [kGroups > 1 ? 2 : 1, top_k, columns of the block] reduced rows
  RowSums row_sums;

  __device__ Exchange(const Params& params, uint4* rows, RowSums::Storage& sums)
      : Results(params), stash(rows), row_sums(sums) {}

  // Sends what this rank has of a token and counts this launch. The rows are on their way before
  // anything waits for the generation.
  __device__ Begun begin(i32 token) const {
    const i32 index = load_index(token);
    if (kNumPeers == 0) return {index, 0};
    const bool counts = p.phases == kAllPhases;
    i32* const counters = generations_of(p, token, piece, group);
    const i32 generation = counts ? ptx::ld_relaxed_gpu(counters) : 0;
    if ((p.phases & kSend) && !sends_in_reduce()) send(token, index, copies_of(generation).used);
    __syncwarp();
    if (counts && lane < kCountersPerWarp) {
      counters[lane] = (generation + 1) % lamport::kGenerations;
    }
    return {index, generation};
  }

  // A warp that reduces all at once loads it once; peers of one that takes turns would wait.
  __device__ bool sends_in_reduce() const {
    return kScheme == FinalizeScheme::EveryRank && p.top_k <= kSlotsInFlight * kGroups &&
           p.phases == kAllPhases;
  }

  __device__ void reduce_if_owner(i32 token, Begun begun) {
    const bool is_owner = !kByToken || owner_of(token) == p.rank;
    if ((p.phases & kReduce) && is_owner) reduce(token, begun.index, copies(begun.generation));
  }

  __device__ void receive_if_expected(i32 token, i32 generation) {
    const bool is_expected = kByExpert || (kByToken && owner_of(token) != p.rank);
    if ((p.phases & kReceive) && is_expected && in_row && group < kReceivers) {
      receive(token, copies(generation));
    }
  }

  __device__ Copies copies(i32 generation) const {
    Copies found = copies_of(generation);
    if (kNumPeers == 0 || p.phases != kAllPhases) found.spent = -1;
    return found;
  }

  // --- reduction -------------------------------------------------------------------------------

  __device__ void reduce(i32 token, i32 index, Copies copies) {
    const SlotRange slots = reduced_slots(p, p.rank);
    const Part part(slots.count, group);
    if (!kKeepsIndex) index = load_index(token);
    const float weight = load_weight(token, slots);
    TailWords norm_weight{};
    if (kLoadsNormAhead) norm_weight = load_norm_weight();
    uint4* const stashed =
        stash + (kGroups > 1 ? row_sums.parity() * p.top_k * vectors_in_block : 0);
#pragma unroll 1
    for (i32 first = part.begin; first < part.end; first += kSlotsInFlight) {
      uint4 rows[kSlotsInFlight];
      load_rows(rows, index, slots, first, part.end);
      if (kNumPeers > 0 && sends_in_reduce()) {
        send_rows(rows, slots, first, part.end, token, copies.used);
      }
      if (copies.spent >= 0 && in_row) {
        rearm_rows(first, part.end, token, copies.spent);
      }
      if (kNumPeers > 0) {
        add_peers(rows, first, part.end, token, copies.used);
      } else {
#pragma unroll
        for (uint4& row : rows) row = sum_of_two(row, make_uint4(0, 0, 0, 0));
      }
      float squares[kSlotsInFlight];
      sum_squares(squares, rows);
#pragma unroll
      for (i32 i = 0; i < kSlotsInFlight; ++i) {
        if (first + i < part.end) {
          stashed[(first + i) * vectors_in_block + piece_in_block() * kWarpSize + lane] = rows[i];
        }
      }
      row_sums.put(squares, first, part.end, piece, lane);
    }
    if (part.begin == part.end) row_sums.put_nothing(lane);
    // For the rows of other warps; the arrivals that are waited for are for the sums.
    TailWords words[kTailSlots];
    if constexpr (kGroups > 1) __syncthreads();
    if constexpr (kLoadsTailAhead) load_tail(words, stashed, 0, slots.count);
    row_sums.wait(part.end - part.begin, lane);
    float total[kTail] = {};
    add_normalized(total, words, slots.count, stashed, weight);
    if (!kLoadsNormAhead) norm_weight = load_norm_weight();
    float gain[kTail];
    widen(gain, norm_weight);
#pragma unroll
    for (i32 j = 0; j < kTail; ++j) {
      total[j] = fmaf(total[j], gain[j] + p.gain_center, 0.0f);  // no -0.0
    }
    if (in_tail) {
      // NaN may come of another thread that gave up on its part of the token.
      if (kNumPeers > 0 && total[0] != total[0]) patience.look();
      if (kByExpert) {
        send_partial(total, token, copies.used);
      } else {
        finish(narrow(total), token, copies.used);
      }
    }
  }

  __device__ i32 piece_in_block() const {
    return static_cast<i32>(threadIdx.x) / kWarpSize / kGroups;
  }

  // Waits for the peers' rows of slots [first, end) and adds them to this rank's, in rank order
  // from +0.0.
  __device__ void add_peers(uint4 (&rows)[kSlotsInFlight], i32 first, i32 end, i32 token,
                            i32 copy) {
    constexpr i32 kPeers = max(1, kNumPeers);
    uint4 theirs[kSlotsInFlight * kPeers];
    const u8* const from = received_rows(token, copy, first);
    const i32 expected = in_row ? min(end - first, kSlotsInFlight) * kPeers : 0;
    const i32 missing = lamport::receive<kRowSentinel>(
        theirs, expected, from,
        [&](i32 i) { return row_bytes(i / kPeers) + i % kPeers * p.rows_sender_bytes; },
        p.is_polite, patience);
    if (missing >= 0) give_up(p, peer_rank(missing % kPeers, p.rank), token);
#pragma unroll
    for (i32 i = 0; i < kSlotsInFlight; ++i) {
      rows[i] = patience.gave_up() ? bf16_nan() : sum_over_ranks(rows[i], theirs + i * kPeers);
    }
  }

  __device__ uint4 sum_over_ranks(const uint4& own, const uint4* theirs) const {
    if constexpr (kNumPeers == 1) return sum_of_two(own, theirs[0]);
    float sum[kColumns] = {};
#pragma unroll
    for (i32 peer = 0; peer < kNumPeers; ++peer) {
      if (peer == p.rank) add(sum, own);
      add(sum, theirs[peer]);
    }
    if (p.rank == kNumPeers) add(sum, own);
    return vector_of(narrow(sum));
  }

  __device__ void sum_squares(float (&squares)[kSlotsInFlight],
                              const uint4 (&rows)[kSlotsInFlight]) const {
    float gain[kColumns];
    if (p.weight_before_norm && in_row) {
      widen(gain, *reinterpret_cast<const uint4*>(p.norm_weight + column));
#pragma unroll
      for (float& g : gain) g += p.gain_center;
    }
#pragma unroll
    for (i32 i = 0; i < kSlotsInFlight; ++i) {
      float x[kColumns];
      widen(x, rows[i]);
      if (p.weight_before_norm) {
#pragma unroll
        for (i32 j = 0; j < kColumns; ++j) x[j] *= gain[j];
      }
      squares[i] = 0.0f;
#pragma unroll
      for (i32 j = 0; j < kColumns; ++j) squares[i] += x[j] * x[j];
      if (!in_row) squares[i] = 0.0f;
    }
  }

  __device__ TailWords load_norm_weight() const {
    if (!in_tail) return {};
    return *reinterpret_cast<const TailWords*>(p.norm_weight + tail_column);
  }

  // Reduced rows of slots [first, first + kTailSlots), at this thread's last columns; zeros from
  // `count` on.
  __device__ void load_tail(TailWords (&words)[kTailSlots], const uint4* stashed, i32 first,
                            i32 count) const {
    const auto* from = reinterpret_cast<const TailWords*>(stashed) + (in_tail ? threadIdx.x : 0);
    const i32 words_of_row = vectors_in_block * kColumns / kTail;
#pragma unroll
    for (i32 i = 0; i < kTailSlots; ++i) {
      words[i] = {};
      if (first + i < count) words[i] = from[(first + i) * words_of_row];
    }
  }

  // Sum of row * rstd * weight over the slots.
  __device__ void add_normalized(float (&total)[kTail], TailWords (&words)[kTailSlots], i32 count,
                                 const uint4* stashed, float weight) {
    const i32 num_pieces = ceil_div(p.hidden_size, kColumnsPerWarp);
    const float sum = row_sums.get(num_pieces, count, lane);
    const bool has_slot = RowSums::slot_of_lane(count, lane) < count;
    const float scales = has_slot ? rsqrtf(sum * p.per_column + p.eps) * weight : 0.0f;
#pragma unroll(kLoadsTailAhead ? 1 : 4)
    for (i32 first = 0; first < count; first += kTailSlots) {
      if (!kLoadsTailAhead || first > 0) load_tail(words, stashed, first, count);
#pragma unroll
      for (i32 i = 0; i < kTailSlots; ++i) {
        const float scale = __shfl_sync(kFullWarp, scales, RowSums::lane_of_slot(count, first + i));
        float x[kTail];
        widen(x, words[i]);
#pragma unroll
        for (i32 j = 0; j < kTail; ++j) total[j] += x[j] * scale;
      }
    }
  }
};

// Waits for the grid before. Blocks of the next one may come early, but on a device of several
// ranks, where they could take the place of blocks that this rank waits for.
__device__ void enter(const Params& p, RowSums::Storage& sums) {
  const bool is_clustered = ptx::cluster_nctarank() > 1;
  // A block must have started before another one writes to its shared memory.
  if (is_clustered) {
    if (threadIdx.x == 0) RowSums::init(sums);
    ptx::barrier_cluster_arrive_relaxed();
  }
  ptx::griddepcontrol_wait();
  if (!p.is_shared) ptx::griddepcontrol_launch_dependents();
  if (is_clustered) ptx::barrier_cluster_wait();
}

// Tokens are sent one ahead of the reduction, so that the wires are never idle, and results are
// received two behind it, so that no owner waits for one while others wait for it.
__device__ void run(const Params& p, uint4* stash, RowSums::Storage& sums) {
  constexpr i32 kBehind = kScheme == FinalizeScheme::EveryRank ? 0 : 2;
  Exchange exchange(p, stash, sums);
  const i32 step = ptx::nclusterid();
  const i32 first = ptx::clusterid();
  enter(p, sums);
  if (first >= p.num_tokens) return;
  if (kNumPeers > 0) exchange.patience.look();
  Begun ahead = exchange.begin(first);
  i32 generations[kBehind + 1] = {};  // of the token that is reduced and of those behind it
  for (i32 token = first; token - kBehind * step < p.num_tokens; token += step) {
    const Begun begun = ahead;
#pragma unroll
    for (i32 i = kBehind; i > 0; --i) generations[i] = generations[i - 1];
    generations[0] = begun.generation;
    if (token + step < p.num_tokens) ahead = exchange.begin(token + step);
    if (token < p.num_tokens) exchange.reduce_if_owner(token, begun);
    const i32 behind = token - kBehind * step;
    if (behind >= first) exchange.receive_if_expected(behind, generations[kBehind]);
  }
}

}  // namespace cupy_moe::finalize

namespace cupy_moe {

extern "C" __global__ void __launch_bounds__(Config::kNumThreads, 1)
    finalize_rmsnorm(const __grid_constant__ Params p) {
  extern __shared__ uint4 stash[];
  __shared__ finalize::RowSums::Storage sums;
  finalize::run(p, stash, sums);
}

}  // namespace cupy_moe
