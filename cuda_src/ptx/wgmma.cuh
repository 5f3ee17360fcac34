// Warpgroup matrix products of E4M3 operands in shared memory (sm_90a): D[64 x N] (+)= A * B^T.
//
// Fragment of D: with w = warp of the group, g = lane / 4 and j = n / 8, d[4 j + i] is row
// 16 w + g + 8 (i / 2), column 8 j + 2 (lane % 4) + i % 2.
#pragma once

#include "common/types.cuh"
#include "ptx/cp_async.cuh"

namespace cupy_moe::ptx {

// Operand of rows of 128 bytes in the 128-byte swizzle; eight rows are an atom of 1024 bytes, to
// which `smem` is aligned. Only the low word of a descriptor depends on the address, in units of 16
// bytes, so that descriptors of other stages, rows or K are one addition away.
struct Swizzle128Operand {
  u32 low;

  __device__ __forceinline__ explicit Swizzle128Operand(const void* smem)
      : low(__shfl_sync(~0u, (cvta_to_shared(smem) >> 4) | kUnusedLeadingOffset, 0)) {}

  __device__ __forceinline__ u64 descriptor(u32 byte_offset) const {
    constexpr u64 kHigh = u64{kSwizzle128 | kAtomStride} << 32;
    return kHigh | (low + byte_offset / 16);
  }

 private:
  static constexpr u32 kUnusedLeadingOffset = 1u << 16;
  static constexpr u32 kAtomStride = 1024 / 16;
  static constexpr u32 kSwizzle128 = 1u << 30;
};

// Orders earlier accesses of the accumulator registers before the products that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending of the latest groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from reading results before the wait above it, which it does not connect.
template <int kCount>
__device__ __forceinline__ void wgmma_fence_registers(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// K = 32 bytes. `accumulate` false overwrites D.
template <int kN>
struct WgmmaE4m3;

#define CUPY_MOE_D8(i)                                                                        \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define CUPY_MOE_WGMMA_E4M3(N, REGISTERS, A, B, ACCUMULATE, ...)                                \
  template <>                                                                                   \
  struct WgmmaE4m3<N> {                                                                         \
    __device__ __forceinline__ static void mma(float* d, u64 a, u64 b, bool accumulate) {       \
      asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, " ACCUMULATE             \
                   ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" REGISTERS \
                   "}, " A ", " B ", accumulate, 1, 1;\n}\n"                                    \
                   : __VA_ARGS__                                                                \
                   : "l"(a), "l"(b), "r"(static_cast<i32>(accumulate)));                        \
    }                                                                                           \
  }

CUPY_MOE_WGMMA_E4M3(8, "%0, %1, %2, %3", "%4", "%5", "%6", "+f"(d[0]), "+f"(d[1]), "+f"(d[2]),
                    "+f"(d[3]));
CUPY_MOE_WGMMA_E4M3(16, "%0, %1, %2, %3, %4, %5, %6, %7", "%8", "%9", "%10", CUPY_MOE_D8(0));
CUPY_MOE_WGMMA_E4M3(32, "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15",
                    "%16", "%17", "%18", CUPY_MOE_D8(0), CUPY_MOE_D8(8));
CUPY_MOE_WGMMA_E4M3(
    64,
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31",
    "%32", "%33", "%34", CUPY_MOE_D8(0), CUPY_MOE_D8(8), CUPY_MOE_D8(16), CUPY_MOE_D8(24));
CUPY_MOE_WGMMA_E4M3(
    96,
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47",
    "%48", "%49", "%50", CUPY_MOE_D8(0), CUPY_MOE_D8(8), CUPY_MOE_D8(16), CUPY_MOE_D8(24),
    CUPY_MOE_D8(32), CUPY_MOE_D8(40));
CUPY_MOE_WGMMA_E4M3(
    128,
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63",
    "%64", "%65", "%66", CUPY_MOE_D8(0), CUPY_MOE_D8(8), CUPY_MOE_D8(16), CUPY_MOE_D8(24),
    CUPY_MOE_D8(32), CUPY_MOE_D8(40), CUPY_MOE_D8(48), CUPY_MOE_D8(56));

#undef CUPY_MOE_WGMMA_E4M3
#undef CUPY_MOE_D8

}  // namespace cupy_moe::ptx
