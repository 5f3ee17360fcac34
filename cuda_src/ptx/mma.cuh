// Warp-wide matrix instructions.
#pragma once

#include "common/types.cuh"
#include "ptx/cp_async.cuh"

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

// The same for BF16 operands.
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&acc)[4], const u32 (&a)[4], u32 b0,
                                                  u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices of 16-bit elements: lane 8 i + r gives the address of row r of matrix i, and
// gets of row lane / 4 of every matrix the elements 2 (lane % 4) and the next one.
__device__ __forceinline__ void ldmatrix_x4(u32 (&matrices)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(cvta_to_shared(row))
               : "memory");
}

}  // namespace cupy_moe::ptx
