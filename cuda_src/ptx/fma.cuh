// Arithmetic on pairs of BF16.
#pragma once

#include "common/types.cuh"

namespace cupy_moe::ptx {

// a * b + c of both halves, each rounded once; subnormals are kept.
__device__ __forceinline__ u32 fma_rn_bf16x2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

}  // namespace cupy_moe::ptx
