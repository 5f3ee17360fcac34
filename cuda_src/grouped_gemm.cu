// One GEMM of the layer over all experts: out[row, :] = epilogue(W[expert(row)] * x[row]).
//
// Weights are the M operand (128 prepared rows a tile), tokens the N operand, so that a tile of
// eight tokens wastes nothing. Rows are expert-sorted and padded to whole token tiles: a tile has
// one expert. Block: kWarpsM x kWarpsN warps, persistent over the (token tile, weight tile) list;
// the counts are on the device. FC1 gathers token rows from the hidden states, FC2 reads FC1's rows
// in place. The K order of a value does not depend on the tile, so neither does a single bit of the
// result.
#include "common/types.cuh"
#include "epilogue/store.cuh"
#include "gemm/mainloop_mma.cuh"
#include "gemm/scheduler.cuh"
#include "ptx/pdl.cuh"

namespace cupy_moe {

struct Params {
  const u8* weights;                // [local_num_experts, m, k] e4m3, prepared
  const u8* tokens;                 // FC1: [num_tokens, k] e4m3; FC2: [permuted rows, k] e4m3
  const i32* permuted_to_expanded;  // [permuted rows] token * top_k + slot, -1 for padding
  const i32* tile_expert;           // [num_n_tiles] local expert of every token tile
  const i32* num_n_tiles;           // [1]
  const float* output_scales;       // [local_num_experts] s1 (FC1) or s2 (FC2)
  const float* gate_scales;         // [local_num_experts] sg; FC1 only
  const float* clamp_limits;        // [local_num_experts] or null: 7 / sg; SwigluStep only
  const void* token_scales;         // [num_tokens * top_k] bf16 or f32, or null; FC1 only
  u8* output;                       // FC1: [permuted rows, features] e4m3; FC2: bf16
  i32 m;
  i32 k;
  i32 top_k;
  i32 token_scales_are_f32;
};

CUPY_MOE_CHECK_PARAMS(Params);

using Mainloop = gemm::MainloopMma<Config>;
using Smem = Mainloop::Smem;

template <GemmStage kStage>
struct TransformOf {
  using type = epilogue::ActivateToE4m3<Config::kActivation>;
};
template <>
struct TransformOf<GemmStage::Fc2> {
  using type = epilogue::ScaleToBf16;
};
using Store = epilogue::TileStore<Config, Mainloop, TransformOf<Config::kGemmStage>::type>;

constexpr bool kIsFc1 = Config::kGemmStage == GemmStage::Fc1;

// The routing weight that scales a token on the input side, as BF16.
__device__ float load_token_scale(const Params& p, i32 expanded) {
  if (p.token_scales == nullptr) return 1.0f;
  if (p.token_scales_are_f32) {
    return formats::round_bf16(static_cast<const float*>(p.token_scales)[expanded]);
  }
  return formats::decode_bf16(static_cast<const u16*>(p.token_scales)[expanded]);
}

// Where each row of the token tile comes from.
__device__ void load_rows(Smem& smem, const Params& p, i32 first_row) {
  const i32 row = static_cast<i32>(threadIdx.x);
  if (row >= Config::kTileN) return;
  const i32 expanded = p.permuted_to_expanded[first_row + row];
  const i32 source = kIsFc1 ? expanded / p.top_k : first_row + row;
  smem.token_offset[row] = expanded < 0 ? -1 : static_cast<i64>(source) * p.k;
  smem.token_scale[row] = kIsFc1 && expanded >= 0 ? load_token_scale(p, expanded) : 1.0f;
}

__device__ epilogue::ExpertScales load_scales(const Params& p, i32 expert) {
  epilogue::ExpertScales scales{p.output_scales[expert], 1.0f, 0.0f};
  if constexpr (kIsFc1) {
    scales.gate = p.gate_scales[expert];
    if constexpr (Config::kActivation == ActivationType::SwigluStep) {
      scales.limit = p.clamp_limits != nullptr ? p.clamp_limits[expert] : 7.0f / scales.gate;
    }
  }
  return scales;
}

extern "C" __global__ void __launch_bounds__(Mainloop::kNumThreads, Config::kMinBlocks)
    grouped_gemm(const __grid_constant__ Params p) {
  static_assert(Config::kTileN <= Mainloop::kNumThreads, "one thread loads one row's source");
  static_assert(sizeof(Smem) == Config::kSmemBytes, "the host reserves what the plan needs");
  extern __shared__ __align__(128) u8 smem_raw[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_raw);

  ptx::griddepcontrol_wait();
  gemm::TileScheduler scheduler(p.m / Config::kTileM, *p.num_n_tiles);
  i32 m_tile, n_tile;
  while (scheduler.advance(m_tile, n_tile)) {
    const i32 expert = p.tile_expert[n_tile];
    const i32 first_row = n_tile * Config::kTileN;
    load_rows(smem, p, first_row);
    __syncthreads();

    const u8* weights =
        p.weights + (static_cast<i64>(expert) * p.m + m_tile * Config::kTileM) * p.k;
    Mainloop::Accumulators acc;
    Mainloop::run(smem, weights, p.tokens, p.k, acc);

    const i64 pitch = static_cast<i64>(p.m / Config::kTileM) * Store::kRowBytes;
    Store::run(smem, acc, load_scales(p, expert),
               p.output + first_row * pitch + m_tile * Store::kRowBytes, pitch);
    __syncthreads();
  }
  ptx::griddepcontrol_launch_dependents();
}

}  // namespace cupy_moe
