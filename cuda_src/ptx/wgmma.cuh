// Warpgroup matrix products (sm_90a): D[64 x N] (+)= A * B^T.
//
// Fragment of D: with w = warp of the group, g = lane / 4 and j = n / 8, d[4 j + i] is row
// 16 w + g + 8 (i / 2), column 8 j + 2 (lane % 4) + i % 2.
#pragma once

#include "common/types.cuh"
#include "ptx/cp_async.cuh"

namespace cupy_moe::ptx {

// Operand of rows of 128 bytes in the 128-byte swizzle; eight rows are an atom of 1024 bytes, to
// which `smem` is aligned. Descriptors have addresses in this block, without the rank in a cluster
// that is above them, in units of 16 bytes. The compiler has to see that they are uniform, and that
// additions to them never carry into the upper word.
struct Swizzle128Operand {
  u32 address;

  __device__ __forceinline__ explicit Swizzle128Operand(const void* smem)
      : address(__shfl_sync(~0u, cvta_to_shared(smem) & kInBlock, 0)) {}

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
  static constexpr u32 kInBlock = (1u << 18) - 1;
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

// The registers of D of so many floats, and their operands.
#define CUPY_MOE_R4 "%0, %1, %2, %3"
#define CUPY_MOE_R8 CUPY_MOE_R4 ", %4, %5, %6, %7"
#define CUPY_MOE_R12 CUPY_MOE_R8 ", %8, %9, %10, %11"
#define CUPY_MOE_R16 CUPY_MOE_R8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define CUPY_MOE_R24 CUPY_MOE_R16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define CUPY_MOE_R32 CUPY_MOE_R24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define CUPY_MOE_R36 CUPY_MOE_R32 ", %32, %33, %34, %35"
#define CUPY_MOE_R40 CUPY_MOE_R32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define CUPY_MOE_R48 CUPY_MOE_R40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define CUPY_MOE_R56 CUPY_MOE_R48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define CUPY_MOE_R60 CUPY_MOE_R56 ", %56, %57, %58, %59"
#define CUPY_MOE_R64 CUPY_MOE_R56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define CUPY_MOE_R68 CUPY_MOE_R64 ", %64, %65, %66, %67"
#define CUPY_MOE_R72 CUPY_MOE_R64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define CUPY_MOE_R80 CUPY_MOE_R72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define CUPY_MOE_R84 CUPY_MOE_R80 ", %80, %81, %82, %83"
#define CUPY_MOE_R88 CUPY_MOE_R80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define CUPY_MOE_R96 CUPY_MOE_R88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define CUPY_MOE_AT4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define CUPY_MOE_AT8(i) CUPY_MOE_AT4(i), CUPY_MOE_AT4(i + 4)
#define CUPY_MOE_D4 CUPY_MOE_AT4(0)
#define CUPY_MOE_D8 CUPY_MOE_D4, CUPY_MOE_AT4(4)
#define CUPY_MOE_D12 CUPY_MOE_D8, CUPY_MOE_AT4(8)
#define CUPY_MOE_D16 CUPY_MOE_D8, CUPY_MOE_AT8(8)
#define CUPY_MOE_D24 CUPY_MOE_D16, CUPY_MOE_AT8(16)
#define CUPY_MOE_D32 CUPY_MOE_D24, CUPY_MOE_AT8(24)
#define CUPY_MOE_D36 CUPY_MOE_D32, CUPY_MOE_AT4(32)
#define CUPY_MOE_D40 CUPY_MOE_D32, CUPY_MOE_AT8(32)
#define CUPY_MOE_D48 CUPY_MOE_D40, CUPY_MOE_AT8(40)
#define CUPY_MOE_D56 CUPY_MOE_D48, CUPY_MOE_AT8(48)
#define CUPY_MOE_D60 CUPY_MOE_D56, CUPY_MOE_AT4(56)
#define CUPY_MOE_D64 CUPY_MOE_D56, CUPY_MOE_AT8(56)
#define CUPY_MOE_D68 CUPY_MOE_D64, CUPY_MOE_AT4(64)
#define CUPY_MOE_D72 CUPY_MOE_D64, CUPY_MOE_AT8(64)
#define CUPY_MOE_D80 CUPY_MOE_D72, CUPY_MOE_AT8(72)
#define CUPY_MOE_D84 CUPY_MOE_D80, CUPY_MOE_AT4(80)
#define CUPY_MOE_D88 CUPY_MOE_D80, CUPY_MOE_AT8(80)
#define CUPY_MOE_D96 CUPY_MOE_D88, CUPY_MOE_AT8(88)
// kN / 2 floats of D; I1 ... I4 are the numbers of the operands after the first behind them.
#define CUPY_MOE_WGMMA(N, COUNT, I1, I2, I3, I4)                                                \
  template <>                                                                                   \
  struct WgmmaE4m3<N> {                                                                         \
    __device__ __forceinline__ static void mma(float* d, u64 a, u64 b, bool accumulate) {       \
      asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %" #I2                   \
                   ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N                                 \
                   "k32.f32.e4m3.e4m3 {" CUPY_MOE_R##COUNT "}, %" #COUNT ", %" #I1              \
                                                           ", accumulate, 1, 1;\n}\n"           \
                   : CUPY_MOE_D##COUNT                                                          \
                   : "l"(a), "l"(b), "r"(static_cast<i32>(accumulate)));                        \
    }                                                                                           \
  };                                                                                            \
  template <>                                                                                   \
  struct WgmmaBf16<N> {                                                                         \
    __device__ __forceinline__ static void mma(float* d, const u32 (&a)[4], u64 b) {            \
      asm volatile(                                                                             \
          "{\n.reg .pred accumulate;\nsetp.eq.b32 accumulate, 0, 0;\n"                          \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" CUPY_MOE_R##COUNT        \
          "}, {%" #COUNT ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4 ", accumulate, 1, 1, 0;\n}\n" \
          : CUPY_MOE_D##COUNT                                                                   \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                \
    }                                                                                           \
  }

CUPY_MOE_WGMMA(8, 4, 5, 6, 7, 8);
CUPY_MOE_WGMMA(16, 8, 9, 10, 11, 12);
CUPY_MOE_WGMMA(24, 12, 13, 14, 15, 16);
CUPY_MOE_WGMMA(32, 16, 17, 18, 19, 20);
CUPY_MOE_WGMMA(48, 24, 25, 26, 27, 28);
CUPY_MOE_WGMMA(64, 32, 33, 34, 35, 36);
CUPY_MOE_WGMMA(72, 36, 37, 38, 39, 40);
CUPY_MOE_WGMMA(80, 40, 41, 42, 43, 44);
CUPY_MOE_WGMMA(96, 48, 49, 50, 51, 52);
CUPY_MOE_WGMMA(120, 60, 61, 62, 63, 64);
CUPY_MOE_WGMMA(128, 64, 65, 66, 67, 68);
CUPY_MOE_WGMMA(136, 68, 69, 70, 71, 72);
CUPY_MOE_WGMMA(144, 72, 73, 74, 75, 76);
CUPY_MOE_WGMMA(160, 80, 81, 82, 83, 84);
CUPY_MOE_WGMMA(168, 84, 85, 86, 87, 88);
CUPY_MOE_WGMMA(176, 88, 89, 90, 91, 92);
CUPY_MOE_WGMMA(192, 96, 97, 98, 99, 100);

#undef CUPY_MOE_WGMMA
#undef CUPY_MOE_D96
#undef CUPY_MOE_D88
#undef CUPY_MOE_D84
#undef CUPY_MOE_D80
#undef CUPY_MOE_D72
#undef CUPY_MOE_D68
#undef CUPY_MOE_D64
#undef CUPY_MOE_D60
#undef CUPY_MOE_D56
#undef CUPY_MOE_D48
#undef CUPY_MOE_D40
#undef CUPY_MOE_D36
#undef CUPY_MOE_D32
#undef CUPY_MOE_D24
#undef CUPY_MOE_D16
#undef CUPY_MOE_D12
#undef CUPY_MOE_D8
#undef CUPY_MOE_D4
#undef CUPY_MOE_AT8
#undef CUPY_MOE_AT4
#undef CUPY_MOE_R96
#undef CUPY_MOE_R88
#undef CUPY_MOE_R84
#undef CUPY_MOE_R80
#undef CUPY_MOE_R72
#undef CUPY_MOE_R68
#undef CUPY_MOE_R64
#undef CUPY_MOE_R60
#undef CUPY_MOE_R56
#undef CUPY_MOE_R48
#undef CUPY_MOE_R40
#undef CUPY_MOE_R36
#undef CUPY_MOE_R32
#undef CUPY_MOE_R24
#undef CUPY_MOE_R16
#undef CUPY_MOE_R12
#undef CUPY_MOE_R8
#undef CUPY_MOE_R4

}  // namespace cupy_moe::ptx
