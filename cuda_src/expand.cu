// Copies token rows to their permuted places, so that a GEMM can fetch tiles of them.
//
// A warp copies a row. Padding rows are left alone: nobody looks at what is computed from them.
#include "common/types.cuh"
#include "ptx/pdl.cuh"

namespace cupy_moe {

struct Params {
  const uint4* hidden_states;       // [num_tokens, row_vectors]
  const i32* permuted_to_expanded;  // [permuted rows] token * top_k + slot, -1 for padding
  const i32* num_n_tiles;           // [1] token tiles in use
  uint4* output;                    // [permuted rows, row_vectors]
  i32 row_vectors;                  // of 16 bytes
  i32 top_k;
  i32 tile_n;
};

CUPY_MOE_CHECK_PARAMS(Params);

extern "C" __global__ void __launch_bounds__(Config::kNumThreads)
    expand(const __grid_constant__ Params p) {
  constexpr i32 kNumWarps = Config::kNumThreads / 32;
  const i32 lane = static_cast<i32>(threadIdx.x) % 32;
  const i32 first = static_cast<i32>(blockIdx.x) * kNumWarps + static_cast<i32>(threadIdx.x) / 32;

  ptx::griddepcontrol_wait();
  // Not before the wait: the next kernel takes it that the permutation has ended.
  ptx::griddepcontrol_launch_dependents();
  const i32 num_rows = *p.num_n_tiles * p.tile_n;
  for (i32 row = first; row < num_rows; row += static_cast<i32>(gridDim.x) * kNumWarps) {
    const i32 expanded = p.permuted_to_expanded[row];
    if (expanded < 0) continue;
    const uint4* source = p.hidden_states + static_cast<i64>(expanded / p.top_k) * p.row_vectors;
    uint4* target = p.output + static_cast<i64>(row) * p.row_vectors;
#pragma unroll 8
    for (i32 i = lane; i < p.row_vectors; i += 32) target[i] = source[i];
  }
}

}  // namespace cupy_moe
