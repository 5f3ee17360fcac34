// Tensor-parallel finalize: sum of every expert row over the ranks in rank order, rounded to BF16;
// RMSNorm of it; weighted sum over the slots of a token, rounded once.
//
// Rows travel by 16-byte stores into receive buffers of the peers (lamport/word.cuh), in two hops:
//   EveryRank    all rows to every rank; every rank reduces
//   TokenOwner   all rows of token t to rank t % P, which reduces; its BF16 row to every rank
//   ExpertOwner  rows of a slot to its owner, which reduces; FP32 sums of an owner to every rank
// A cluster handles one token at a time, a thread eight columns; the blocks of a cluster share the
// sums of squares only. A token and 256 columns are a slot of the protocol: the warp that has it
// counts its generation g, uses copy g % 3 of the buffers and re-arms copy (g + 2) % 3, which it
// read in the launch before. All blocks of all ranks must be resident at once, and each sends what
// it has of a token before it waits for that token, in increasing order of tokens.
#include "common/types.cuh"
#include "finalize/exchange.cuh"
#include "finalize/piece.cuh"
#include "finalize/rows.cuh"
#include "lamport/receive.cuh"
#include "lamport/word.cuh"
#include "ptx/cluster.cuh"
#include "ptx/ld_st.cuh"
#include "ptx/pdl.cuh"

namespace cupy_moe::finalize {

// The exchange of a warp with its counterparts on the other ranks.
struct Exchange : Piece {
  uint4* stash;  // shared, [top_k] reduced rows of this thread, blockDim.x apart
  RowSums row_sums;

  __device__ Exchange(const Params& params, uint4* rows, RowSums::Storage& sums)
      : Piece(params), stash(rows + threadIdx.x), row_sums(sums) {}

  // Sends what this rank has of a token; returns the generation of its buffers.
  __device__ i32 begin(i32 token) const {
    if (kNumPeers == 0) return 0;
    const i32 generation =
        p.phases == kAllPhases ? ptx::ld_relaxed_gpu(generation_of(p, token, warp)) : 0;
    if ((p.phases & kSend) && !sends_in_reduce()) send(token, copies_of(generation).used);
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

  __device__ void end(i32 token, i32 generation) {
    const bool is_expected = kByExpert || (kByToken && owner_of(token) != p.rank);
    if ((p.phases & kReceive) && is_expected && in_row) receive(token, copies(generation));
    if (kNumPeers == 0 || p.phases != kAllPhases) return;
    __syncwarp();
    if (lane == 0) *generation_of(p, token, warp) = (generation + 1) % lamport::kGenerations;
  }

  __device__ Copies copies(i32 generation) const {
    Copies found = copies_of(generation);
    if (kNumPeers == 0 || p.phases != kAllPhases) found.spent = -1;
    return found;
  }

  // --- reduction -------------------------------------------------------------------------------

  __device__ void reduce(i32 token, Copies copies) {
    const SlotRange slots = reduced_slots(p, p.rank);
    const i32 index = load_index(token);
    const float weight = load_weight(token);
    const float per_column = 1.0f / static_cast<float>(p.hidden_size);
    const uint4 norm_weight = load_norm_weight();
#pragma unroll 1
    for (i32 first = 0; first < slots.count; first += kSlotsInFlight) {
      uint4 rows[kSlotsInFlight];
      load_rows(rows, index, slots, first);
      if (kNumPeers > 0 && sends_in_reduce()) {
        send_rows(rows, first, slots.count, token, copies.used, 0, kNumPeers);
      }
      if (kNumPeers > 0) {
        add_peers(rows, first, slots.count, token, copies.used);
      } else {
#pragma unroll
        for (uint4& row : rows) row = sum_of_two(row, make_uint4(0, 0, 0, 0));
      }
      float squares[kSlotsInFlight];
      sum_squares(squares, rows, norm_weight);
#pragma unroll
      for (i32 i = 0; i < kSlotsInFlight; ++i) {
        if (first + i < slots.count) stash[(first + i) * blockDim.x] = rows[i];
      }
      row_sums.put(squares, first, warp, lane);
    }
    const i32 num_warps = ceil_div(p.hidden_size, kColumnsPerWarp);
    const float sum = row_sums.get(num_warps, slots.count, lane);
    const float rstd = rsqrtf(sum * per_column + p.eps);
    float total[kColumns] = {};
    add_normalized(total, slots, norm_weight, rstd, weight);
    if (!in_row) return;
    // NaN may come of another thread that gave up on its part of the token.
    if (kNumPeers > 0 && total[0] != total[0]) patience.look();
    if (kByExpert) {
      send_partial(total, token, copies.used);
    } else {
      finish(narrow(total), token, copies.used);
    }
    if (copies.spent >= 0) rearm_rows(slots.count, token, copies.spent);
  }

  // Waits for the peers' rows and adds them to this rank's, in rank order from +0.0.
  __device__ void add_peers(uint4 (&rows)[kSlotsInFlight], i32 first, i32 count, i32 token,
                            i32 copy) {
    constexpr i32 kPeers = max(1, kNumPeers);
    uint4 theirs[kSlotsInFlight * kPeers];
    const u8* const from = own(rows_at(p, copy, 0, token)) + row_bytes(first);
    const i64 per_peer = rows_at(p, copy, 1, token) - rows_at(p, copy, 0, token);
    const i32 expected = in_row ? min(count - first, kSlotsInFlight) * kPeers : 0;
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
    return narrow(sum);
  }

  __device__ void sum_squares(float (&squares)[kSlotsInFlight], const uint4 (&rows)[kSlotsInFlight],
                              const uint4& norm_weight) const {
    float gain[kColumns];
    widen_gain(gain, norm_weight);
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
  __device__ void add_normalized(float (&total)[kColumns], SlotRange slots,
                                 const uint4& norm_weight, float rstd, float weight) const {
    const i32 lanes = RowSums::lanes_per_slot(slots.count);
#pragma unroll 4
    for (i32 i = 0; i < slots.count; ++i) {
      const float scale =
          __shfl_sync(kFullWarp, rstd, i * lanes) * __shfl_sync(kFullWarp, weight, slots.first + i);
      float x[kColumns];
      widen(x, stash[i * blockDim.x]);
#pragma unroll
      for (i32 j = 0; j < kColumns; ++j) total[j] += x[j] * scale;
    }
    float gain[kColumns];
    widen_gain(gain, norm_weight);
#pragma unroll
    for (i32 j = 0; j < kColumns; ++j) total[j] = fmaf(total[j], gain[j], 0.0f);  // no -0.0
  }

  // --- results ---------------------------------------------------------------------------------

  __device__ void send_partial(const float (&total)[kColumns], i32 token, i32 copy) const {
    if (patience.gave_up()) return;
    const i64 offset = result_at(p, copy, p.rank, token) + column * sizeof(u16);  // FP32: twice
#pragma unroll
    for (i32 i = 0; i < kResultVectors; ++i) {
      const float* x = total + 4 * i;
      const uint4 bits = lamport::scrubbed<kResultSentinel>(
          make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                     __float_as_uint(x[3])));
#pragma unroll
      for (i32 peer = 0; peer < kNumPeers; ++peer) {
        ptx::st_relaxed_sys_v4(peers(peer, offset) + 16 * i, bits);
      }
      ptx::st_relaxed_sys_v4(own(offset) + 16 * i, bits);
    }
  }

  __device__ void finish(const uint4& row, i32 token, i32 copy) const {
    const uint4 payload = lamport::scrubbed<lamport::kBf16Sentinel>(row);
    if (kByToken && !patience.gave_up()) {
#pragma unroll
      for (i32 peer = 0; peer < kNumPeers; ++peer) {
        const i32 sender = peer_number(p.rank, peer_rank(peer, p.rank));
        ptx::st_relaxed_sys_v4(peers(peer, result_at(p, copy, sender, token)), payload);
      }
    }
    write_output(payload, token);  // the bits that the others get
  }

  __device__ void write_output(const uint4& row, i32 token) const {
    u16* const to = p.output + static_cast<i64>(token) * p.hidden_size + column;
    *reinterpret_cast<uint4*>(to) = patience.gave_up() ? bf16_nan() : row;
  }

  // Takes what owners finished.
  __device__ void receive(i32 token, Copies copies) {
    constexpr i32 kCount = (kByExpert ? kNumRanks : 1) * kResultVectors;
    const i32 sender = kByExpert ? 0 : peer_number(owner_of(token), p.rank);
    const i64 per_sender = result_at(p, 0, 1, token) - result_at(p, 0, 0, token);
    const auto buffer = [&](i32 copy) {
      const i64 widened = (kResultVectors - 1) * column * i64{sizeof(u16)};
      return own(result_at(p, copy, sender, token)) + widened;
    };
    const auto offset = [&](i32 i) {
      return i / kResultVectors * per_sender + 16 * (i % kResultVectors);
    };
    uint4 v[kCount];
    const i32 missing = lamport::receive<kResultSentinel>(v, kCount, buffer(copies.used), offset,
                                                          p.is_polite, patience);
    if (missing >= 0) give_up(p, kByExpert ? missing / kResultVectors : owner_of(token), token);
    write_output(kByExpert ? add_partials(v) : v[0], token);
    if (copies.spent < 0) return;
    u8* const spent = buffer(copies.spent);
#pragma unroll
    for (i32 i = 0; i < kCount; ++i) {
      *reinterpret_cast<uint4*>(spent + offset(i)) = lamport::armed<kResultSentinel>();
    }
  }
};

// Tokens are sent one ahead of the reduction, so that the wires are never idle, and results are
// received two behind it, so that no owner waits for one while others wait for it.
__device__ void run(const Params& p, uint4* stash, RowSums::Storage& sums) {
  constexpr i32 kBehind = kScheme == FinalizeScheme::EveryRank ? 0 : 2;
  Exchange exchange(p, stash, sums);
  const i32 cluster_size = ptx::cluster_nctarank();
  const i32 step = static_cast<i32>(gridDim.x) / cluster_size;
  const i32 first = static_cast<i32>(blockIdx.x) / cluster_size;
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
    if (behind >= first) exchange.end(behind, generations[kBehind]);
  }
}

// Waits for the grid before. Blocks of the next one may come early, but on a device of several
// ranks, where they could take the place of blocks that this rank waits for.
__device__ void enter(const Params& p) {
  const bool is_clustered = ptx::cluster_nctarank() > 1;
  // A block must have started before another one writes to its shared memory.
  if (is_clustered) ptx::barrier_cluster_arrive_relaxed();
  ptx::griddepcontrol_wait();
  if (!p.is_shared) ptx::griddepcontrol_launch_dependents();
  if (is_clustered) ptx::barrier_cluster_wait();
}

}  // namespace cupy_moe::finalize

namespace cupy_moe {

extern "C" __global__ void __launch_bounds__(Config::kNumThreads, 1)
    finalize_rmsnorm(const __grid_constant__ Params p) {
  extern __shared__ uint4 stash[];  // [top_k, blockDim.x]
  __shared__ finalize::RowSums::Storage sums;
  finalize::enter(p);
  finalize::run(p, stash, sums);
}

}  // namespace cupy_moe
