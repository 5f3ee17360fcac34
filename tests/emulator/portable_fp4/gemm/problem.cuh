// What the operands read of the parameters.
#pragma once

#include "common/types.cuh"

namespace cupy_moe::gemm {

struct Params {
  const u8* weights;
  const u8* weight_scales;
  const u8* tokens;
  i32 m;
  i32 k;
  i32 weight_block_shift;
};

}  // namespace cupy_moe::gemm
