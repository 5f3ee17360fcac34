// Rows from partial sums over two halves of K: bf16(first + second), added in FP32.
//
// One block a row and 8 * kNumThreads columns, eight columns a thread. Padding rows are added, too.
#include "common/types.cuh"
#include "formats/bf16.cuh"
#include "ptx/pdl.cuh"

namespace cupy_moe {

struct Params {
  const uint4* first;   // [rows, row_vectors] of 8 bf16
  const uint4* second;  // likewise
  uint4* output;        // likewise
  i32 row_vectors;
};

CUPY_MOE_CHECK_PARAMS(Params);

__device__ u32 add_pairs(u32 a, u32 b) {
  return formats::encode_bf16x2(formats::decode_bf16_low(a) + formats::decode_bf16_low(b),
                                formats::decode_bf16_high(a) + formats::decode_bf16_high(b));
}

extern "C" __global__ void __launch_bounds__(Config::kNumThreads)
    add_rows(const __grid_constant__ Params p) {
  const i32 column = static_cast<i32>(blockIdx.y * Config::kNumThreads + threadIdx.x);
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  if (column >= p.row_vectors) return;
  const i64 i = static_cast<i64>(blockIdx.x) * p.row_vectors + column;
  const uint4 a = p.first[i];
  const uint4 b = p.second[i];
  p.output[i] = {add_pairs(a.x, b.x), add_pairs(a.y, b.y), add_pairs(a.z, b.z),
                 add_pairs(a.w, b.w)};
}

}  // namespace cupy_moe
