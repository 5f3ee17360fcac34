// Warpgroup matrix products (sm_90a): D[64 x N] (+)= A * B^T.
//
// Fragment of D: with w = warp of the group, g = lane / 4 and j = n / 8, d[4 j + i] is row
// 16 w + g + 8 (i / 2), column 8 j + 2 (lane % 4) + i % 2.
#pragma once

#include "common/types.cuh"
#include "ptx/cp_async.cuh"

namespace cupy_moe::ptx {

// Operand of rows of 128 bytes in the 128-byte swizzle; eight rows are an atom of 1024 bytes, to
// which `smem` is aligned. Addresses in descriptors are in units of 16 bytes. The compiler has to
// see that they are uniform, and that additions to them never carry into the upper word.
struct Swizzle128Operand {
  u32 address;

  __device__ __forceinline__ explicit Swizzle128Operand(const void* smem)
      : address(__shfl_sync(~0u, cvta_to_shared(smem), 0)) {}

  // The operand so many bytes, a multiple of 16, further on.
  __device__ __forceinline__ Swizzle128Operand at(u32 byte_offset) const {
    Swizzle128Operand moved = *this;
    moved.address += byte_offset;
    return moved;
  }

  __device__ __forceinline__ u64 descriptor(u32 byte_offset) const {
    return (kLayout | (address >> 4)) + byte_offset / 16;
  }

 private:
  static constexpr u64 kAtomStride = u64{1024 / 16} << 32;
  static constexpr u64 kSwizzle128 = u64{1} << 62;
  static constexpr u64 kLayout = kSwizzle128 | kAtomStride;
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

// Products of E4M3, both operands in shared memory: K = 32. `accumulate` false overwrites D.
template <int kN>
struct WgmmaE4m3;

// D += A * B^T of BF16 with A in registers: K = 16. Fragment of A: a[0] is row 16 w + g, K 2 q and
// the next one with q = lane % 4; a[1] is row 16 w + g + 8, and a[2], a[3] are those at K 8 later.
// They may not change before the wait that covers the product.
template <int kN>
struct WgmmaBf16;

#define CUPY_MOE_R8_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define CUPY_MOE_R8_8 "%8, %9, %10, %11, %12, %13, %14, %15"
#define CUPY_MOE_R8_16 "%16, %17, %18, %19, %20, %21, %22, %23"
#define CUPY_MOE_R8_24 "%24, %25, %26, %27, %28, %29, %30, %31"
#define CUPY_MOE_R8_32 "%32, %33, %34, %35, %36, %37, %38, %39"
#define CUPY_MOE_R8_40 "%40, %41, %42, %43, %44, %45, %46, %47"
#define CUPY_MOE_R8_48 "%48, %49, %50, %51, %52, %53, %54, %55"
#define CUPY_MOE_R8_56 "%56, %57, %58, %59, %60, %61, %62, %63"
#define CUPY_MOE_R4_0 "%0, %1, %2, %3"
#define CUPY_MOE_R4_32 "%32, %33, %34, %35"
#define CUPY_MOE_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define CUPY_MOE_D8(i) CUPY_MOE_D4(i), CUPY_MOE_D4(i + 4)
// I0 ... I4 are the numbers of the operands after D.
#define CUPY_MOE_WGMMA(N, I0, I1, I2, I3, I4, REGISTERS, ...)                                   \
  template <>                                                                                   \
  struct WgmmaE4m3<N> {                                                                         \
    __device__ __forceinline__ static void mma(float* d, u64 a, u64 b, bool accumulate) {       \
      asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %" #I2                   \
                   ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" REGISTERS \
                   "}, %" #I0 ", %" #I1 ", accumulate, 1, 1;\n}\n"                              \
                   : __VA_ARGS__                                                                \
                   : "l"(a), "l"(b), "r"(static_cast<i32>(accumulate)));                        \
    }                                                                                           \
  };                                                                                            \
  template <>                                                                                   \
  struct WgmmaBf16<N> {                                                                         \
    __device__ __forceinline__ static void mma(float* d, const u32 (&a)[4], u64 b) {            \
      asm volatile(                                                                             \
          "{\n.reg .pred accumulate;\nsetp.eq.b32 accumulate, 0, 0;\n"                          \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REGISTERS "}, {%" #I0    \
          ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4 ", accumulate, 1, 1, 0;\n}\n"                \
          : __VA_ARGS__                                                                         \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                \
    }                                                                                           \
  }

CUPY_MOE_WGMMA(8, 4, 5, 6, 7, 8, CUPY_MOE_R4_0, CUPY_MOE_D4(0));
CUPY_MOE_WGMMA(16, 8, 9, 10, 11, 12, CUPY_MOE_R8_0, CUPY_MOE_D8(0));
CUPY_MOE_WGMMA(32, 16, 17, 18, 19, 20, CUPY_MOE_R8_0 ", " CUPY_MOE_R8_8, CUPY_MOE_D8(0),
               CUPY_MOE_D8(8));
CUPY_MOE_WGMMA(48, 24, 25, 26, 27, 28, CUPY_MOE_R8_0 ", " CUPY_MOE_R8_8 ", " CUPY_MOE_R8_16,
               CUPY_MOE_D8(0), CUPY_MOE_D8(8), CUPY_MOE_D8(16));
CUPY_MOE_WGMMA(64, 32, 33, 34, 35, 36,
               CUPY_MOE_R8_0 ", " CUPY_MOE_R8_8 ", " CUPY_MOE_R8_16 ", " CUPY_MOE_R8_24,
               CUPY_MOE_D8(0), CUPY_MOE_D8(8), CUPY_MOE_D8(16), CUPY_MOE_D8(24));
CUPY_MOE_WGMMA(72, 36, 37, 38, 39, 40,
               CUPY_MOE_R8_0 ", " CUPY_MOE_R8_8 ", " CUPY_MOE_R8_16 ", " CUPY_MOE_R8_24
                             ", " CUPY_MOE_R4_32,
               CUPY_MOE_D8(0), CUPY_MOE_D8(8), CUPY_MOE_D8(16), CUPY_MOE_D8(24), CUPY_MOE_D4(32));
CUPY_MOE_WGMMA(80, 40, 41, 42, 43, 44,
               CUPY_MOE_R8_0 ", " CUPY_MOE_R8_8 ", " CUPY_MOE_R8_16 ", " CUPY_MOE_R8_24
                             ", " CUPY_MOE_R8_32,
               CUPY_MOE_D8(0), CUPY_MOE_D8(8), CUPY_MOE_D8(16), CUPY_MOE_D8(24), CUPY_MOE_D8(32));
CUPY_MOE_WGMMA(96, 48, 49, 50, 51, 52,
               CUPY_MOE_R8_0 ", " CUPY_MOE_R8_8 ", " CUPY_MOE_R8_16 ", " CUPY_MOE_R8_24
                             ", " CUPY_MOE_R8_32 ", " CUPY_MOE_R8_40,
               CUPY_MOE_D8(0), CUPY_MOE_D8(8), CUPY_MOE_D8(16), CUPY_MOE_D8(24), CUPY_MOE_D8(32),
               CUPY_MOE_D8(40));
CUPY_MOE_WGMMA(128, 64, 65, 66, 67, 68,
               CUPY_MOE_R8_0 ", " CUPY_MOE_R8_8 ", " CUPY_MOE_R8_16 ", " CUPY_MOE_R8_24
                             ", " CUPY_MOE_R8_32 ", " CUPY_MOE_R8_40 ", " CUPY_MOE_R8_48
                             ", " CUPY_MOE_R8_56,
               CUPY_MOE_D8(0), CUPY_MOE_D8(8), CUPY_MOE_D8(16), CUPY_MOE_D8(24), CUPY_MOE_D8(32),
               CUPY_MOE_D8(40), CUPY_MOE_D8(48), CUPY_MOE_D8(56));

#undef CUPY_MOE_WGMMA
#undef CUPY_MOE_D8
#undef CUPY_MOE_D4
#undef CUPY_MOE_R4_0
#undef CUPY_MOE_R4_32
#undef CUPY_MOE_R8_0
#undef CUPY_MOE_R8_8
#undef CUPY_MOE_R8_16
#undef CUPY_MOE_R8_24
#undef CUPY_MOE_R8_32
#undef CUPY_MOE_R8_40
#undef CUPY_MOE_R8_48
#undef CUPY_MOE_R8_56

}  // namespace cupy_moe::ptx
