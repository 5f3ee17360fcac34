// Number conversions the hardware has an instruction for.
#pragma once

#include "common/types.cuh"

namespace cupy_moe::ptx {

__device__ __forceinline__ u16 cvt_rn_bf16_f32(float x) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

// Low half of the result holds `low`.
__device__ __forceinline__ u32 cvt_rn_bf16x2_f32(float high, float low) {
  u32 bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

__device__ __forceinline__ float cvt_f32_f16(u16 x) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x));
  return value;
}

#if __CUDA_ARCH__ >= 890
// Low byte of the result holds `low`; NaN becomes 0x7F, overflow saturates to 448.
__device__ __forceinline__ u16 cvt_rn_satfinite_e4m3x2_f32(float high, float low) {
  u16 bits;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
  return bits;
}

// Exact; the low half of the result is the low byte's value.
__device__ __forceinline__ u32 cvt_rn_f16x2_e4m3x2(u16 codes) {
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
  return halves;
}
#endif

}  // namespace cupy_moe::ptx
