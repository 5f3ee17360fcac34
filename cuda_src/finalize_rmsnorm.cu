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

// The exchange of a warp with its counterparts on the other ranks.
struct Exchange : Results {
  uint4* stash;  // shared, [kGroups > 1 ? 2 : 1, top_k, columns of the block] reduced rows
  RowSums row_sums;

  __device__ Exchange(const Params& params, uint4* rows, RowSums::Storage& sums)
      : Results(params), stash(rows), row_sums(sums) {}

  // Sends what this rank has of a token and counts this launch; returns the generation of its
  // buffers. The rows are on their way before anything waits for the generation.
  __device__ i32 begin(i32 token) const {
    if (kNumPeers == 0) return 0;
    const bool sends = (p.phases & kSend) && !sends_in_reduce();
    const bool counts = p.phases == kAllPhases;
    i32* const counters = generations_of(p, token, piece, group);
    const i32 index = sends ? load_index(token) : -1;
    const i32 generation = counts ? ptx::ld_relaxed_gpu(counters) : 0;
    if (sends) send(token, index, copies_of(generation).used);
    __syncwarp();
    if (counts && lane < kCountersPerWarp) {
      counters[lane] = (generation + 1) % lamport::kGenerations;
    }
    return generation;
  }

  // A rank that reduces what it sends loads it once.
  __device__ bool sends_in_reduce() const {
    return kScheme == FinalizeScheme::EveryRank && p.phases == kAllPhases;
  }

  __device__ void reduce_if_owner(i32 token, i32 generation) {
    const bool is_owner = !kByToken || owner_of(token) == p.rank;
    if ((p.phases & kReduce) && is_owner) reduce(token, copies(generation));
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

  __device__ void reduce(i32 token, Copies copies) {
    const SlotRange slots = reduced_slots(p, p.rank);
    const Part part(slots.count, group);
    const i32 index = load_index(token);
    const float weight = load_weight(token, slots);
    TailWords norm_weight{};
    if (in_tail) norm_weight = *reinterpret_cast<const TailWords*>(p.norm_weight + tail_column);
    uint4* const stashed =
        stash + (kGroups > 1 ? row_sums.parity() * p.top_k * vectors_in_block : 0);
#pragma unroll 1
    for (i32 first = part.begin; first < part.end; first += kSlotsInFlight) {
      uint4 rows[kSlotsInFlight];
      load_rows(rows, index, slots, first, part.end);
      if (kNumPeers > 0 && sends_in_reduce()) {
        send_rows(rows, first, part.end, token, copies.used, 0, kNumPeers);
      }
      if (copies.spent >= 0 && in_row) {
        rearm_rows(first, min(first + kSlotsInFlight, part.end), token, copies.spent);
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
    row_sums.wait(part.end - part.begin, lane);
    // NOTE: the arrivals that are waited for order what warps read of each other's rows; racecheck
    // does not see it.
    if constexpr (kGroups > 1) __syncthreads();
    float total[kTail] = {};
    add_normalized(total, slots, stashed, norm_weight, weight);
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
    const u8* const from = own(rows_at(p, copy, 0, token)) + row_bytes(first);
    const i64 per_peer = rows_at(p, copy, 1, token) - rows_at(p, copy, 0, token);
    const i32 expected = in_row ? min(end - first, kSlotsInFlight) * kPeers : 0;
    const i32 missing = lamport::receive<kRowSentinel>(
        theirs, expected, from,
        [&](i32 i) { return row_bytes(i / kPeers) + i % kPeers * per_peer; }, p.is_polite,
        patience);
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

  // Sum of row * gain * rstd * weight over the slots; the gain of a column is common to all of
  // them.
  __device__ void add_normalized(float (&total)[kTail], SlotRange slots, const uint4* stashed,
                                 const TailWords& norm_weight, float weight) {
    const i32 num_pieces = ceil_div(p.hidden_size, kColumnsPerWarp);
    const i32 lanes = RowSums::lanes_per_slot(slots.count);
    const float sum = row_sums.get(num_pieces, slots.count, lane);
    const float scales = rsqrtf(sum * p.per_column + p.eps) * weight;
    const auto* words = reinterpret_cast<const TailWords*>(stashed) + (in_tail ? threadIdx.x : 0);
    const i32 words_of_row = vectors_in_block * kColumns / kTail;
#pragma unroll 4
    for (i32 i = 0; i < slots.count; ++i) {
      const float scale = __shfl_sync(kFullWarp, scales, i * lanes);
      float x[kTail];
      widen(x, words[i * words_of_row]);
#pragma unroll
      for (i32 j = 0; j < kTail; ++j) total[j] += x[j] * scale;
    }
    float gain[kTail];
    widen(gain, norm_weight);
#pragma unroll
    for (i32 j = 0; j < kTail; ++j) {
      total[j] = fmaf(total[j], gain[j] + p.gain_center, 0.0f);  // no -0.0
    }
  }
};

// Tokens are sent one ahead of the reduction, so that the wires are never idle, and results are
// received two behind it, so that no owner waits for one while others wait for it.
__device__ void run(const Params& p, uint4* stash, RowSums::Storage& sums) {
  constexpr i32 kBehind = kScheme == FinalizeScheme::EveryRank ? 0 : 2;
  Exchange exchange(p, stash, sums);
  const i32 step = ptx::nclusterid();
  const i32 first = ptx::clusterid();
  if (first >= p.num_tokens) return;
  i32 ahead = exchange.begin(first);
  i32 generations[kBehind + 1] = {};  // of the token that is reduced and of those behind it
  for (i32 token = first; token - kBehind * step < p.num_tokens; token += step) {
#pragma unroll
    for (i32 i = kBehind; i > 0; --i) generations[i] = generations[i - 1];
    generations[0] = ahead;
    if (token + step < p.num_tokens) ahead = exchange.begin(token + step);
    if (token < p.num_tokens) exchange.reduce_if_owner(token, generations[0]);
    const i32 behind = token - kBehind * step;
    if (behind >= first) exchange.receive_if_expected(behind, generations[kBehind]);
  }
}

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

}  // namespace cupy_moe::finalize

namespace cupy_moe {

extern "C" __global__ void __launch_bounds__(Config::kNumThreads, 1)
    finalize_rmsnorm(const __grid_constant__ Params p) {
  extern __shared__ uint4 stash[];
  __shared__ finalize::RowSums::Storage sums;
  finalize::enter(p, sums);
  finalize::run(p, stash, sums);
}

}  // namespace cupy_moe
