// Arithmetic on pairs of BF16 values, and comparisons of pairs. Subnormals are kept.
#pragma once

#include "common/types.cuh"

namespace cupy_moe::ptx {

__device__ __forceinline__ u32 fma_rn_bf16x2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// All ones in each half where a > b as FP16.
__device__ __forceinline__ u32 set_gt_f16x2(u32 a, u32 b) {
  u32 d;
  asm("set.gt.u32.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

}  // namespace cupy_moe::ptx
