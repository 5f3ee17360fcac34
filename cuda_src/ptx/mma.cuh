// Warp-wide matrix instructions.
#pragma once

#include "common/types.cuh"

namespace cupy_moe::ptx {

// acc[16 x 8] += a[16 x 16] * b[16 x 8], FP16 operands, FP32 accumulation.
// With g = lane / 4 and q = lane % 4 a thread holds
//   a: rows g, g+8, g, g+8 at K 2q..2q+1, same, 2q+8..2q+9, same   b: column g at the same K pairs
//   acc: row g columns 2q, 2q+1, then row g+8 columns 2q, 2q+1
__device__ __forceinline__ void mma_m16n8k16_f16(float (&acc)[4], const u32 (&a)[4],
                                                 const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace cupy_moe::ptx
